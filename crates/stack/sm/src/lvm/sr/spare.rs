//! Volumes of disks in use that are longer than needed become shorter: docs/design/thin.md.
//!
//! ```text
//! 1  no process takes the place of the running disk's until this is over
//! 2  journal inflate_<vdi>_<to>             a kill: nothing has changed
//! 3  the disk ends its image at <to>: the footer is there, and none is at the old end
//!                                           a kill: recovery puts the footer at the end; the disk has all of it again
//! 4  the volume becomes shorter             a kill: the same; the disk has what it has
//! 5  the journal goes
//! ```
//!
//! The journal is that of a growth from `<to>`, and so is the state between: a volume that is longer than its image.
//! XenServer's storage manager undoes such a growth, which makes the volume as long as the image. A disk that refuses
//! has changed nothing; one that does not answer may end its image later, so that its journal stays for the recovery.

use tapio_types::ApiError;
use uuid::Uuid;

use super::VolumeSr;
use crate::dir::facts::FileKind;
use crate::errors;
use crate::lock::Share;
use crate::lvm::group::Volume;
use crate::lvm::journal::{Journal, Kind};
use crate::lvm::{names, read, size};
use crate::traits::{Ctx, LiveDisk, RoomSpare, RoomTaken, Shortened};

impl VolumeSr {
    pub(super) fn take_room_of(&self, ctx: &dyn Ctx, spare: &[RoomSpare]) -> Result<RoomTaken, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let listed = self.settled_volumes(ctx)?;
        let mut taken = RoomTaken::default();
        let mut shorter = Vec::new();
        for RoomSpare { vdi, enough } in spare {
            // Each once, and what it is now.
            let Some(volume) = listed.volumes.get(&names::volume(FileKind::Vhd, *vdi)) else { continue };
            let Some(to) = self.shorter(volume, *enough).filter(|_| !shorter.contains(vdi)) else { continue };
            let Some(disk) = ctx.live(*vdi) else { continue };
            match self.cut(ctx, (*vdi, volume), disk.as_ref(), to) {
                Ok(()) => shorter.push(*vdi),
                Err(error) => {
                    tracing::info!(sr = %self.sr, %vdi, %error, "a volume does not become shorter");
                    taken.refused.push((*vdi, error));
                }
            }
        }
        if shorter.is_empty() {
            return Ok(taken);
        }
        let listed = self.group.list()?;
        for vdi in shorter {
            taken.shorter.push(self.info_in(&listed, vdi)?);
        }
        Ok(taken)
    }

    /// How long a volume is to be of which so many bytes are enough; none where that is not worth a change.
    fn shorter(&self, volume: &Volume, enough: u64) -> Option<u64> {
        let provision = self.provision_of(volume);
        let facts = read::facts(volume, FileKind::Vhd);
        if !provision.is_thin || facts.damage.is_some() || facts.hidden || !volume.is_writable {
            return None;
        }
        let to = size::rounded(enough).max(provision.least(facts.virtual_size));
        // What a disk gets at once it gives back at once, so that none goes back and forth.
        (volume.size.saturating_sub(to) >= provision.quantum).then_some(to)
    }

    fn cut(
        &self,
        ctx: &dyn Ctx,
        (vdi, volume): (Uuid, &Volume),
        disk: &dyn LiveDisk,
        to: u64,
    ) -> Result<(), ApiError> {
        if !disk.hold(false)? {
            let text = format!("{vdi} has more than one user, or one that cannot go on without a pause");
            return Err(errors::fail(46, text));
        }
        let journal = Journal::new(Kind::Inflate, vdi, to);
        journal.write(&self.group)?;
        ctx.step("lv:spare-journal");
        // Without an answer the journal stays: the next operation puts the footer at the end.
        if let Shortened::Refused(error) = disk.shorten(volume.size, to)? {
            journal.remove(&self.group)?;
            return Err(error);
        }
        ctx.step("lv:spare-ended");
        self.group.resize(&volume.name, volume.size, to)?;
        ctx.step("lv:spare-shorter");
        journal.remove(&self.group)?;
        ctx.step("lv:spare-done");
        Ok(())
    }
}
