//! A larger disk: in place where the image can, with the guest held for a moment where it cannot.

use tapio_block::DiskFailure;
use tapio_control::Result;
use tapio_format::FormatErrorKind;
use tapio_format::vhd::offline;

use crate::failure::{bad_image, failure};
use crate::host_disk::HostDisk;
use crate::limits::LATE;
use crate::log;

/// Makes the disk at least `len` bytes long.
pub fn grow(disk: &HostDisk, len: u64) -> Result<()> {
    match disk.with(|disk| Ok(disk.grow(len, LATE)))? {
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
    let status = disk.with(|disk| disk.status(LATE))?;
    let Some(chain) = status.spec.filter(|chain| !chain.layers.is_empty()) else { return Ok(()) };
    disk.with(|disk| disk.pause(LATE))?;
    let leaf = &chain.layers[0].path;
    let journal = offline::journal_beside(leaf);
    let resized = offline::resize_journalled(leaf, len, &journal, |_| ()).map_err(|error| bad_image(&error));
    // Whatever came of it, the guest goes on.
    let resumed = disk.with(|disk| disk.resume(chain.clone(), LATE));
    resized.and(resumed)
}
