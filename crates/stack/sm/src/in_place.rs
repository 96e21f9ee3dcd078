//! Images on file systems that copy on write.
//!
//! Btrfs writes each block to a new place, so that an image which a guest overwrites at random falls into pieces, and
//! every write also writes metadata. Files of a directory with the flag "no copy on write" are written in place. They
//! have no checksums then, as on ext4 and XFS. A clone of a file is copied on write all the same.

use std::fs::File;
use std::path::Path;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

/// From now on, what is made in `directory` is written in place, where the file system would copy it. Other file
/// systems do not know the flag; images that are there already stay as they are.
pub(crate) fn write_in_place(directory: &Path) {
    let set = || -> rustix::io::Result<()> {
        let directory = File::open(directory).map_err(|_| rustix::io::Errno::NOENT)?;
        let flags = ioctl_getflags(&directory)?;
        if flags.contains(IFlags::NOCOW) {
            return Ok(());
        }
        ioctl_setflags(&directory, flags | IFlags::NOCOW)
    };
    if let Err(error) = set() {
        tracing::debug!(
            "{}: new images are written as the file system does it: {error}",
            directory.display()
        );
    }
}
