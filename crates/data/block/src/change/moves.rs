//! A disk moves to other images only once that is noted.

use std::cell::{Cell, RefCell};

use tapio_format::Result;
use tapio_format::continuation::Move;
use tapio_ring::Io;

use crate::host::Host;

/// The moves of a disk.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    /// Those that are still to be noted.
    owed: RefCell<Vec<Move>>,
    /// The disk has moved to other images than those it was opened with.
    has_moved: Cell<bool>,
}

impl Moves {
    /// The disk is on other images than those it was opened with.
    pub fn moved(&self) {
        self.has_moved.set(true);
    }

    /// Whether it is.
    pub const fn has_moved(&self) -> bool {
        self.has_moved.get()
    }

    /// Takes note of moves that could not be noted earlier.
    ///
    /// # Errors
    /// They cannot be made durable: the disk must not move.
    pub async fn note_owed<I: Io>(&self, host: &Host<I>) -> Result<()> {
        loop {
            let owed = self.owed.borrow().first().cloned();
            let Some(owed) = owed else { return Ok(()) };
            host.write_note(owed).await?;
            self.owed.borrow_mut().remove(0);
        }
    }

    /// Takes note of a move of the disk, after those that could not be noted earlier.
    ///
    /// # Errors
    /// It cannot be made durable: the disk must not move.
    pub async fn note<I: Io>(&self, host: &Host<I>, change: Move) -> Result<()> {
        self.note_owed(host).await?;
        host.write_note(change).await
    }

    /// Takes note of a move that cannot be stopped any more. What is noted of it already is right until the disk moves
    /// again, so if it cannot be noted now, it is before that.
    ///
    /// # Errors
    /// As [`Moves::note`], for the log.
    pub async fn note_or_owe<I: Io>(&self, host: &Host<I>, change: Move) -> Result<()> {
        let noted = self.note(host, change.clone()).await;
        if noted.is_err() {
            self.owed.borrow_mut().push(change);
        }
        noted
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use parking_lot::Mutex;
    use tapio_format::{FormatError, FormatErrorKind};
    use tapio_ring::sim::SimHost;
    use tapio_types::{ImageKind, LayerSpec};

    use super::*;
    use crate::notes::Notes;
    use crate::options::CoreOptions;
    use crate::stages::asked::run;

    fn stays(path: &str) -> Move {
        let image = |path: &str| LayerSpec { kind: ImageKind::Vhd, path: path.into() };
        Move::Stays { image: image(path), other: image("/other") }
    }

    #[test]
    fn a_move_that_could_not_be_noted_is_noted_before_the_next() {
        let (noted, is_full) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(true)));
        let (list, full) = (Arc::clone(&noted), Arc::clone(&is_full));
        let notes = Notes::new(move |change| {
            if full.load(Ordering::SeqCst) {
                return Err(FormatError::new(FormatErrorKind::OutOfSpace, "no space for a note"));
            }
            list.lock().push(format!("{change:?}"));
            Ok(())
        });
        let sim = SimHost::new(1).process();
        let host = Host::new(sim.clone(), CoreOptions { notes, ..CoreOptions::default() });
        let moves = run(&sim, async move {
            let moves = Moves::default();
            assert!(moves.note(&host, stays("/refused")).await.is_err());
            assert!(moves.note_or_owe(&host, stays("/owed")).await.is_err());
            is_full.store(false, Ordering::SeqCst);
            moves.note(&host, stays("/next")).await.expect("there is space");
            moves.note(&host, stays("/last")).await.expect("there is space");
            moves
        });
        let wanted = ["/owed", "/next", "/last"].map(|path| format!("{:?}", stays(path)));
        assert_eq!(*noted.lock(), wanted);
        assert!(!moves.has_moved());
    }
}
