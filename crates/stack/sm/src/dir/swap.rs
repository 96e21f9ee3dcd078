//! The leaf of a disk is swapped while its guest goes on: steps 5 to 7 of a fork.
//!
//! ```text
//! from here on no process takes the place of the disk's own
//! 5  the leaf takes the VDI's name           the disk still writes to what is called as the base copy now; the leaf
//!                                            is empty and reads as that
//! 6  the disk goes on with the leaf          between two requests; it closes the base copy for writing
//! 7  the base copy is hidden
//! ```
//!
//! At every moment the VDI's name leads to what the guest reads: whatever opens the VDI after a kill or a power cut
//! opens a leaf that is empty on top of what the guest wrote last, or the leaf that it writes to. So no answer of the
//! disk is needed to know what is right. The snapshot is of the moment of step 6; one whose fork is broken off before
//! holds what the disk held when its process ended, or is undone.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use tapio_format::FormatError;
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
        disk: &dyn LiveDisk,
        number: u16,
    ) -> Result<(), Broken> {
        ctx.step("fork:held");
        self.name_leaf(ctx, journal, leaf, number)?;
        let with = self.open_spec(journal.vdi, disk.access())?;
        match disk.swap_leaf(&with) {
            Ok(LeafSwap::Done) => {}
            Ok(LeafSwap::Refused(error)) => return Err(error.into()),
            Err(error) => self.after_lost_answer(ctx, journal, disk, error)?,
        }
        ctx.step("fork:leaf-swapped");
        let hidden = self.hide_complete(journal.base, kind);
        // Guests write to the new leaf. The next recovery hides the base copy.
        hidden.map_err(|error| Broken { error: errors::image(number, &error), next: Next::Keep })?;
        ctx.step("fork:hidden");
        Ok(())
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
