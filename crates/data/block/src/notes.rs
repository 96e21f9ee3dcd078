//! Which image a disk goes on with is noted where those look that start it next; see `tapio_format::continuation`.

use std::fmt;
use std::sync::Arc;

use tapio_format::Result;
use tapio_format::continuation::Move;

type Take = dyn Fn(&Move) -> Result<()> + Send + Sync;

/// Takes note of the moves of a disk, durably, before they happen. Not called on the data thread.
#[derive(Clone)]
pub struct Notes(Arc<Take>);

impl Notes {
    /// Notes that `take` writes.
    pub fn new(take: impl Fn(&Move) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }

    /// Takes note of a move.
    pub(crate) fn take(&self, change: &Move) -> Result<()> {
        (self.0)(change)
    }
}

impl Default for Notes {
    /// None: the caller keeps them.
    fn default() -> Self {
        Self::new(|_| Ok(()))
    }
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notes").finish_non_exhaustive()
    }
}
