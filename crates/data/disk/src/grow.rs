//! A larger disk: in place where the image can, with the guest held for a moment where it cannot.

use std::path::Path;

use tapio_block::DiskFailure;
use tapio_control::Result;
use tapio_format::FormatErrorKind;
use tapio_format::vhd::offline;
use tapio_types::{Access, ChainSpec, ImageKind};

use crate::host::{HostDisk, LATE, bad_image, failure};
use crate::log;

/// Puts right what a resize left in the leaf that was broken off by a kill.
pub fn finish_resize(path: &Path) -> Result<()> {
    if let Some(done) = offline::finish_resize(path).map_err(|error| bad_image(&error))? {
        log::line(&format!("{}: {done}", path.display()));
    }
    Ok(())
}

/// The same for the leaf of a chain.
pub fn finish_resize_of(chain: &ChainSpec) -> Result<()> {
    match chain.layers.first() {
        Some(leaf) if leaf.kind == ImageKind::Vhd && chain.access == Access::ReadWrite => {
            finish_resize(&leaf.path)
        }
        _ => Ok(()),
    }
}

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
