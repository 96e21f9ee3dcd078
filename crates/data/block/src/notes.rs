//! Which image a disk goes on with is noted where those look that start it next; see `tapio_format::continuation`.

use std::fmt;
use std::sync::Arc;

use tapio_format::Result;
use tapio_format::continuation::Move;
use tapio_ring::Io;

use crate::core::Core;

type Take = dyn Fn(&Move) -> Result<()> + Send + Sync;

/// Takes note of the moves of a disk, durably, before they happen. Called beside the data thread.
#[derive(Clone)]
pub struct Notes(Arc<Take>);

impl Notes {
    /// Notes that `take` writes.
    pub fn new(take: impl Fn(&Move) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
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

impl<I: Io> Core<I> {
    /// Takes note of a move of the disk, after those that could not be noted earlier.
    ///
    /// # Errors
    /// It cannot be made durable: the disk must not move.
    pub(crate) async fn note_move(&self, change: Move) -> Result<()> {
        loop {
            let owed = self.owed_notes.borrow().first().cloned();
            let Some(owed) = owed else { break };
            self.write_note(owed).await?;
            self.owed_notes.borrow_mut().remove(0);
        }
        self.write_note(change).await
    }

    /// Takes note of a move that cannot be stopped any more. What is noted of it already is right until the disk moves
    /// again, so if it cannot be noted now, it is before that.
    ///
    /// # Errors
    /// As [`Core::note_move`], for the log.
    pub(crate) async fn note_or_owe(&self, change: Move) -> Result<()> {
        let noted = self.note_move(change.clone()).await;
        if noted.is_err() {
            self.owed_notes.borrow_mut().push(change);
        }
        noted
    }

    pub(crate) async fn write_note(&self, change: Move) -> Result<()> {
        let notes = self.options.notes.clone();
        let noted = self.io.offload(move || (notes.0)(&change)).await;
        noted.map_err(|error| {
            tapio_format::FormatError::io("cannot note which image the disk goes on with", error)
        })?
    }
}
