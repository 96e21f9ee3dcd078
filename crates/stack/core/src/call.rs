//! A call on its way to its handler.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tapio_model::{ApiError, Value};

use crate::Toolstack;
use crate::db::Change;

pub use crate::args::Args;
pub use crate::caller::Caller;
pub use crate::progress::{Progress, Unwatched};

/// What a handler works with.
#[derive(Clone)]
pub struct Call {
    /// The toolstack.
    pub stack: Arc<Toolstack>,
    /// Who calls.
    pub caller: Caller,
    /// Progress and cancel.
    pub progress: Arc<dyn Progress>,
    /// The machine for which a VDI is made: noted with its record, until a VBD leads to it.
    pub made_for: Option<Arc<str>>,
}

impl Call {
    /// Notes with a VDI's record that nothing leads to it yet, where it is made for a machine.
    pub(crate) fn note_made(&self, change: &mut Change<'_>, vdi: &str) {
        if let Some(vm) = &self.made_for {
            change.put_note(made_note(vdi), &**vm);
        }
    }
}

/// Rows about VDIs that were made for a machine and that no VBD leads to.
pub(crate) const MADE_NOTES: &str = "machines/disk/";

/// The key of such a row.
pub(crate) fn made_note(vdi: &str) -> String {
    format!("{MADE_NOTES}{vdi}")
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("caller", &self.caller).finish_non_exhaustive()
    }
}

/// Does a message's work.
pub type Handler = fn(&Call, &Args) -> Result<Value, ApiError>;

/// Handlers by the full name of their message, as `VDI.snapshot`.
#[derive(Debug, Default)]
pub struct Handlers(pub BTreeMap<&'static str, Handler>);

impl Handlers {
    /// Registers one.
    pub fn on(&mut self, message: &'static str, handler: Handler) {
        let before = self.0.insert(message, handler);
        debug_assert!(before.is_none(), "{message} has two handlers");
    }
}
