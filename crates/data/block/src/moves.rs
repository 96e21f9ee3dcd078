//! A disk moves to other images only once that is noted.

use tapio_format::continuation::Move;
use tapio_format::{FormatError, Result};
use tapio_ring::Io;

use crate::core::Core;

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
        let noted = self.io.offload(move || notes.take(&change)).await;
        noted.map_err(|error| FormatError::io("cannot note which image the disk goes on with", error))?
    }
}
