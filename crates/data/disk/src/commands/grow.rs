//! A larger disk: in place where the image can, with the guest held for a moment where it cannot.

use std::sync::atomic::Ordering;

use tapio_block::DiskFailure;
use tapio_control::command::{Call, Grow, Handle};
use tapio_control::{ControlError, DiskInfo, Errno, Result, VbdState};
use tapio_format::FormatErrorKind;
use tapio_format::vhd::offline;

use crate::failure::{bad_image, failure};
use crate::host_disk::HostDisk;
use crate::limits::IMAGES_TIMEOUT;
use crate::log;
use crate::memory::new_leaf_len;
use crate::table::{Plane, PlaneDisk, Table, word};

impl<P: Plane> Handle<Grow> for Table<P> {
    fn handle(&self, command: Grow, call: &mut Call<'_>) -> Result<DiskInfo> {
        let disk = self.disk(command.minor)?;
        let plane = disk.opened()?;
        match disk.state() {
            VbdState::Running => plane.handle(command, call),
            state => {
                let why = format!("disk {} is {}, not running", command.minor, word(state));
                Err(ControlError::new(Errno::EINVAL, why)
                    .next("let it go on first, with 'tapio disk resume'"))
            }
        }
    }
}

impl Handle<Grow> for HostDisk {
    fn handle(&self, command: Grow, _: &mut Call<'_>) -> Result<DiskInfo> {
        let len = command.len;
        let more = new_leaf_len(len).saturating_sub(new_leaf_len(self.len.load(Ordering::Relaxed)));
        let share = self.memory.take(more)?;
        let grown = grow(self, len);
        if grown.is_ok() {
            self.keep(share);
        }
        self.look_at_length();
        self.fronts.grown();
        grown.map(|()| self.info())
    }
}

/// Makes the disk at least `len` bytes long.
fn grow(disk: &HostDisk, len: u64) -> Result<()> {
    match disk.with(|disk| Ok(disk.grow(len, IMAGES_TIMEOUT)))? {
        Ok(_) => Ok(()),
        Err(DiskFailure::Format(error)) if error.kind() == FormatErrorKind::NeedsPause => {
            log::line(&format!("{error}; done here"));
            grow_paused(disk, len)
        }
        Err(error) => Err(failure(&error)),
    }
}

/// Closes the images, lets the offline tool move what is in the way, and goes on with the same images. Until the tool
/// has ended, the journal beside the image can take everything back.
fn grow_paused(disk: &HostDisk, len: u64) -> Result<()> {
    let status = disk.with(|disk| disk.status(IMAGES_TIMEOUT))?;
    let Some(chain) = status.spec.filter(|chain| !chain.layers.is_empty()) else { return Ok(()) };
    disk.with(|disk| disk.pause(IMAGES_TIMEOUT))?;
    let leaf = &chain.layers[0].path;
    let journal = offline::journal_beside(leaf);
    let resized = offline::resize_journalled(leaf, len, &journal, |_| ()).map_err(|error| bad_image(&error));
    // Whatever came of it, the guest goes on.
    let resumed = disk.with(|disk| disk.resume(chain.clone(), IMAGES_TIMEOUT));
    resized.and(resumed)
}
