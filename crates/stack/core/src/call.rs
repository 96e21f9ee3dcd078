//! A call on its way to its handler.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tapio_model::{ApiError, Role, Value};

use crate::Toolstack;
use crate::accounts::Credential;
use crate::db::Change;

/// Who calls.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The session's reference; empty before login.
    pub session: String,
    /// What the caller may do.
    pub role: Role,
    /// Account.
    pub user: String,
    /// By what it was opened; none for the local superuser and for the toolstack itself.
    pub credential: Option<Credential>,
}

impl Caller {
    /// The toolstack itself.
    pub fn toolstack() -> Self {
        Self { session: String::new(), role: Role::PoolAdmin, user: "root".to_owned(), credential: None }
    }

    /// The account that what it makes belongs to; none for those that may do everything without one.
    pub fn account(&self) -> Option<&str> {
        self.credential.map(|_| self.user.as_str())
    }
}

/// Progress and cancel of a running call. Every call has one; that of an `Async.` call shows in its task.
pub trait Progress: Send + Sync {
    /// Whether somebody cancelled the task.
    fn is_cancelled(&self) -> bool;
    /// How far it is, 0 to 1.
    fn set(&self, fraction: f64);
    /// The task's reference, where there is one.
    fn task(&self) -> Option<&str>;
}

/// Progress of a call that nobody watches.
#[derive(Debug, Default)]
pub struct Unwatched(AtomicBool);

impl Progress for Unwatched {
    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, _: f64) {}

    fn task(&self) -> Option<&str> {
        None
    }
}

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

/// Parameters after the session, checked against the message's types, defaults filled in: the accessors answer an
/// internal error only where a handler and the table disagree.
#[derive(Clone, Debug)]
pub struct Args(pub Vec<Value>);

impl Args {
    /// One parameter.
    ///
    /// # Errors
    /// The handler asks for one that the table does not have.
    pub fn value(&self, at: usize) -> Result<&Value, ApiError> {
        self.0.get(at).ok_or_else(|| ApiError::internal(format!("the message has no parameter {at}")))
    }

    /// A text, a reference, a word.
    ///
    /// # Errors
    /// As [`Self::value`].
    pub fn text(&self, at: usize) -> Result<&str, ApiError> {
        self.value(at)?.as_str().ok_or_else(|| ApiError::internal(format!("parameter {at} is no text")))
    }

    /// A number.
    ///
    /// # Errors
    /// As [`Self::value`].
    pub fn int(&self, at: usize) -> Result<i64, ApiError> {
        self.value(at)?.as_int().ok_or_else(|| ApiError::internal(format!("parameter {at} is no number")))
    }

    /// A truth.
    ///
    /// # Errors
    /// As [`Self::value`].
    pub fn bool(&self, at: usize) -> Result<bool, ApiError> {
        self.value(at)?.as_bool().ok_or_else(|| ApiError::internal(format!("parameter {at} is no boolean")))
    }

    /// A map of texts.
    ///
    /// # Errors
    /// As [`Self::value`].
    pub fn map(&self, at: usize) -> Result<BTreeMap<String, String>, ApiError> {
        Ok(self.value(at)?.to_string_map())
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
