//! The leaf of a running disk is swapped while its guest goes on: steps 4 to 7 of a fork, in place of those with a
//! pause.
//!
//! ```text
//! from here on no process takes the place of the disk's own
//!    the log gets the snapshot's name, and the new one the VDI's: the disk goes on noting in the old one
//! 4  the image's volume gets the base copy's name       the disk goes on writing to it
//! 5  the leaf gets the VDI's name                        it is empty, and reads as what the disk writes
//! 6  the new VDI gets its name
//!    the disk goes on with the leaf and the log, between two requests; it closes the base copy for writing, and the
//!    old log
//!    the logs lead to each other: until then no list goes past the new one
//! 7  the base copy is hidden, becomes as short as it can be, and refuses writes
//! ```
//!
//! A volume has one name, so that between 4 and 5 the VDI has none. The disk has the volume open and needs no name; a
//! kill of the worker leaves that to the recovery, which undoes it, and until then nothing else opens the VDI: what
//! opens it settles the SR first. From 5 on the VDI's name leads to what its guest reads, whichever process ends.
//!
//! Logs change their names before images do, as in SRs of files (`dir::swap`): a process that takes the disk's place
//! notes its changes in the new log, whichever leaf it finds.
//!
//! A disk that refuses has not gone on with the leaf, and one that does not answer may have. In both cases the recovery
//! of a fork finishes it with the disk paused; one that cannot be paused keeps everything as it is.

use std::time::{Duration, Instant};

use tapio_types::ApiError;

use super::VolumeSr;
use super::fork::Plan;
use crate::dir::facts::FileKind;
use crate::lvm::names;
use crate::traits::{Ctx, LeafSwap, LiveDisk};

/// How long another process may take to open the images of one that died, which completes the base copy.
const OPENED_WITHIN: Duration = Duration::from_secs(20);
/// How often that is looked at.
const TURN: Duration = Duration::from_millis(50);

impl VolumeSr {
    /// Steps 4 to 7 for a disk that is held.
    pub(super) fn swap_running(
        &self,
        ctx: &dyn Ctx,
        plan: &Plan,
        disk: &dyn LiveDisk,
        new_log: bool,
    ) -> Result<(), ApiError> {
        ctx.step("lv:fork-held");
        if new_log {
            self.switch_open_logs(ctx, plan.vdi, plan.new)?;
        }
        self.group.rename(&names::volume(plan.kind, plan.vdi), &names::volume(plan.kind, plan.base))?;
        ctx.step("lv:fork-base-named");
        self.group.rename(&names::new_volume(plan.vdi), &names::volume(FileKind::Vhd, plan.vdi))?;
        ctx.step("lv:fork-leaf-named");
        if let Some(new) = plan.new {
            self.group.rename(&names::new_volume(new), &names::volume(FileKind::Vhd, new))?;
        }
        ctx.step("lv:fork-sibling-named");
        let with = self.open_spec(plan.vdi, disk.access())?;
        if let LeafSwap::Refused(error) = disk.swap_leaf(&with, new_log)? {
            return Err(error);
        }
        ctx.step("lv:fork-leaf-swapped");
        self.link_logs(ctx, plan.vdi, plan.new)?;
        self.close_complete(ctx, plan)?;
        ctx.step("lv:fork-base-closed");
        Ok(())
    }

    /// Closes a base copy that a disk process may have left incomplete when it died a moment ago: the one that takes
    /// its place completes it.
    fn close_complete(&self, ctx: &dyn Ctx, plan: &Plan) -> Result<(), ApiError> {
        let until = Instant::now() + OPENED_WITHIN;
        while !self.close_base(ctx, plan.base, plan.kind)? {
            if Instant::now() >= until {
                let text = format!("base copy {} is not closed by its disk process yet", plan.base);
                return Err(crate::errors::fail(plan.number, text));
            }
            std::thread::sleep(TURN);
        }
        Ok(())
    }
}
