//! A raw image into a new raw image: shared, where the file system can. Nothing is moved then, and nothing is taken.

use std::os::fd::AsRawFd;

use tapio_format::vhd::offline::{Chain, Layer};

use super::source::Source;
use super::target::Target;

/// Whether the target now has all data of the source. It is as it was where it has not.
pub(super) fn share(source: &Source, target: &Target) -> bool {
    let Some([Layer::Raw { medium: from, .. }]) = source.files().map(Chain::layers) else { return false };
    let Some((into, _)) = target.raw().filter(|_| target.is_fresh()) else { return false };
    // A length of 0 is up to the end.
    let range = libc::file_clone_range {
        src_fd: from.file().as_raw_fd().into(),
        src_offset: 0,
        src_length: 0,
        dest_offset: 0,
    };
    // SAFETY: both descriptors are open for as long as the media live, and `range` is what the request reads.
    unsafe { libc::ioctl(into.file().as_raw_fd(), libc::FICLONERANGE, &raw const range) == 0 }
}
