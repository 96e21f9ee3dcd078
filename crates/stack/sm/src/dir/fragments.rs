//! How the blocks of an image lie in its file, and the file on its file system.

use std::fs::File;
use std::os::fd::AsRawFd;

use tapio_format::Medium;
use tapio_format::vhd::offline::{Image, OpenOptions};
use tapio_types::ApiError;
use uuid::Uuid;

use super::ImageDir;
use super::facts::FileKind;
use crate::errors;
use crate::traits::Fragmentation;

impl ImageDir {
    /// See [`crate::Sr::fragmentation`].
    pub(super) fn lies_as(&self, vdi: Uuid) -> Result<Fragmentation, ApiError> {
        let facts = self.image(vdi)?;
        let path = self.file(facts.kind, vdi);
        let failed = |error: std::io::Error| errors::io(65, "cannot look at", &path, &error);
        let file = File::open(&path).map_err(failed)?;
        let file_len = file.metadata().map_err(failed)?.len();
        let mut found = Fragmentation { extents: extents(&file), file_len, ..Fragmentation::default() };
        if facts.kind == FileKind::Vhd {
            let image = Image::open(&path, OpenOptions::READ).map_err(|error| errors::image(65, &error))?;
            let len = image.medium().len().map_err(failed)?;
            let allocated: Vec<(u32, u32)> =
                image.bat().allocated().filter(|(_, sector)| u64::from(*sector) * 512 < len).collect();
            found.block_len = u64::from(image.block_len());
            found.blocks = allocated.len() as u64;
            (found.runs, found.runs_min) = runs(&allocated);
        }
        Ok(found)
    }
}

/// Runs of blocks that follow each other on the disk and in the file, and the fewest that there can be: a run ends
/// where the disk has a block that the image has not. The blocks are in the order of the disk, each with its place.
fn runs(allocated: &[(u32, u32)]) -> (u64, u64) {
    // Blocks of one image are equally long in its file: the least distance of two of them.
    let mut places: Vec<u32> = allocated.iter().map(|(_, place)| *place).collect();
    places.sort_unstable();
    let step = places.windows(2).map(|two| two[1] - two[0]).filter(|step| *step > 0).min().unwrap_or(0);
    let (mut runs, mut least) = (u64::from(!allocated.is_empty()), u64::from(!allocated.is_empty()));
    for two in allocated.windows(2) {
        let ((block, place), (next, there)) = (two[0], two[1]);
        let is_gap = next != block + 1;
        least += u64::from(is_gap);
        runs += u64::from(is_gap || there != place.saturating_add(step));
    }
    (runs, least)
}

/// The head of `FS_IOC_FIEMAP`'s request; linux/fiemap.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
}

/// `_IOWR('f', 11, struct fiemap)`.
const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;

/// Pieces of a file; none where its file system does not tell.
fn extents(file: &File) -> Option<u64> {
    // No room for extents is given: the kernel then counts them.
    let mut asked = Fiemap { length: u64::MAX, ..Fiemap::default() };
    // SAFETY: the descriptor is open, and `asked` is what the request reads and writes; it has room for no extent.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut asked) };
    (done == 0).then(|| u64::from(asked.mapped_extents))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_the_file_or_the_disk_goes_on_elsewhere() {
        assert_eq!(runs(&[]), (0, 0));
        assert_eq!(runs(&[(3, 40)]), (1, 1));
        assert_eq!(runs(&[(0, 10), (1, 20), (2, 30)]), (1, 1));
        assert_eq!(runs(&[(0, 30), (1, 20), (2, 10)]), (3, 1), "written backwards");
        assert_eq!(runs(&[(0, 10), (5, 20), (6, 30)]), (2, 2), "a gap of the disk is no fragment");
        assert_eq!(runs(&[(0, 10), (1, 30), (2, 20), (3, 40)]), (4, 1));
    }
}
