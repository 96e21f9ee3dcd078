//! The leaf of a disk is swapped while its guest goes on: steps 5 to 7 of a fork.
//!
//! ```text
//! from here on no process takes the place of the disk's own
//! 4  the log gets the snapshot's name, and   the disk still notes in the old one; the new one is empty
//!    the new one the VDI's
//! 5  the leaf takes the VDI's name           the disk still writes to what is called as the base copy now; the leaf
//!                                            is empty and reads as that
//! 6  the disk goes on with leaf and log      between two requests; it closes the base copy for writing, and the old
//!                                            log
//! 7  the logs lead to each other             until then no list goes past the new one
//! 8  the base copy is hidden
//! ```
//!
//! Logs change their names before images do, because a process that takes the disk's place opens what has the VDI's
//! name: whichever leaf it finds, a change that it makes is in the new log, and the recovery adds what that has to the
//! old one if it undoes the fork. A log that its process did not close says that it is not complete, and everything
//! counts as changed in it then.
//!
//! At every moment the VDI's name leads to what the guest reads: whatever opens the VDI after a kill or a power cut
//! opens a leaf that is empty on top of what the guest wrote last, or the leaf that it writes to. So no answer of the
//! disk is needed to know what is right. The snapshot is of the moment of step 6; one whose fork is broken off before
//! holds what the disk held when its process ended, or is undone.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use tapio_format::FormatError;
use tapio_types::ApiError;
use uuid::Uuid;

use super::ImageDir;
use super::facts::FileKind;
use super::fork::{Broken, Next};
use super::journal::CloneJournal;
use crate::errors;
use crate::traits::{Ctx, LeafSwap, LiveDisk};

/// How long another process may take to open the images of one that died, which completes the base copy.
const OPENED_WITHIN: Duration = Duration::from_secs(20);
/// How often that is looked at.
const TURN: Duration = Duration::from_millis(20);

impl ImageDir {
    /// Steps 5 to 7 for a disk that is held.
    pub(super) fn swap_running(
        &self,
        ctx: &dyn Ctx,
        journal: &CloneJournal,
        (kind, leaf): (FileKind, &Path),
        (disk, new_log): (&dyn LiveDisk, bool),
        number: u16,
    ) -> Result<(), Broken> {
        ctx.step("fork:held");
        if new_log {
            self.switch_open_logs(ctx, journal).map_err(|error| self.with_old_log(journal, error))?;
        }
        self.name_leaf(ctx, journal, leaf, number).map_err(|error| self.with_old_log(journal, error))?;
        let with =
            self.open_spec(journal.vdi, disk.access()).map_err(|error| self.with_old_log(journal, error))?;
        match disk.swap_leaf(&with, new_log) {
            Ok(LeafSwap::Done) => {}
            Ok(LeafSwap::Refused(error)) => return Err(self.with_old_log(journal, error)),
            Err(error) => self.after_lost_answer(ctx, journal, disk, error)?,
        }
        ctx.step("fork:leaf-swapped");
        // Guests write to the new leaf. The next recovery does what is left.
        self.link_logs(ctx, journal).map_err(|error| Broken { error, next: Next::Keep })?;
        let hidden = self.hide_complete(journal.base, kind);
        hidden.map_err(|error| Broken { error: errors::image(number, &error), next: Next::Keep })?;
        self.keep_time(journal, kind);
        ctx.step("fork:hidden");
        Ok(())
    }

    /// The fork is to be undone while the disk notes in the log that it had: names alone change.
    pub(super) fn with_old_log(&self, journal: &CloneJournal, error: ApiError) -> Broken {
        match self.switch_open_logs_back(journal) {
            Ok(()) => error.into(),
            // The recovery undoes it with the disk closed.
            Err(second) => {
                tracing::warn!(
                    "the log of {} keeps another name until the fork is undone: {second}",
                    journal.vdi
                );
                Broken { error, next: Next::Keep }
            }
        }
    }

    /// Hides a base copy that a disk process may have left incomplete when it died a moment ago: the one that takes its
    /// place completes it.
    fn hide_complete(&self, base: Uuid, kind: FileKind) -> Result<(), FormatError> {
        let until = Instant::now() + OPENED_WITHIN;
        loop {
            match self.hide_base(base, kind) {
                Err(error) if error.errno() == libc::EBUSY && Instant::now() < until => thread::sleep(TURN),
                done => return done,
            }
        }
    }
}
