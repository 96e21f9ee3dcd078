//! A file or block device that is open: what is known of it, and its end.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use tapio_types::{Access, SECTOR_LEN, Span};

use super::lock::WriterLock;
use super::offload::{Closer, Closing};
use crate::blocks::Blocks;
use crate::storage::StorageInfo;

/// Whether the host's page cache stands between us and the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// O_DIRECT where the file system takes it in sectors of 512 or 4096 bytes, the page cache where it does not.
    Direct,
    /// The page cache.
    Cached,
}

/// Takes back a range of a device: `_IO(0x12, 119)` of `linux/fs.h`.
const BLKDISCARD: u32 = 0x1277;
/// The longest piece in which O_DIRECT is used: the longest that every disk writes as a whole or not at all.
const BLOCK_LEN_MAX: u32 = 4096;
/// A file that is used past the page cache in longer pieces than sectors of 512 bytes.
#[derive(Debug)]
pub(super) struct DirectBlocks {
    pub blocks: Blocks,
    /// The same file by the page cache, for what a file has behind its last whole block. Open as long as the file.
    pub cached: RawFd,
    /// That was written.
    pub end_was_written: Cell<bool>,
}

/// The file as the thread that opened it has it: held by its storage, and by calls on helper threads that take longer
/// than their tasks wait.
#[derive(Debug)]
pub(super) struct Handle {
    /// Both taken when this is dropped.
    file: Option<Arc<OpenFile>>,
    lock: Option<WriterLock>,
    /// A device that is written: while this is open the kernel lets nothing mount it, or build upon it.
    claim: Option<File>,
    pub closer: Closer,
    /// Its storage was dropped.
    pub closing: OnceLock<Closing>,
}

impl Handle {
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()?.files.as_ref().map(|(file, _)| file)
    }
}

impl Drop for Handle {
    /// Releasing a lock and closing a file wait for the file system: for a server, for writing back, and for the space
    /// of a file that was removed.
    fn drop(&mut self) {
        let (file, lock, claim) = (self.file.take(), self.lock.take(), self.claim.take());
        let closing = self.closing.take().unwrap_or_else(|| self.closer.closing());
        self.closer.run(move || {
            drop(claim);
            drop(lock);
            if let Some(mut open) = file.and_then(Arc::into_inner) {
                drop(open.files.take());
            }
            drop(closing);
        });
    }
}

/// A file that is open. The thread that lets go of it last has it closed, and does not wait for that.
#[derive(Debug)]
struct OpenFile {
    /// The file, and the same by the page cache where both are used. Taken when this is dropped.
    files: Option<(File, Option<File>)>,
    closer: Closer,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Some(files) = self.files.take() {
            let closing = self.closer.closing();
            self.closer.run(move || {
                drop(files);
                drop(closing);
            });
        }
    }
}

/// A file that is open and not yet in any thread's ring: it may come from another thread.
#[derive(Debug)]
pub(super) struct OpenedFile {
    pub shared: SharedFile,
    pub handle: Handle,
    pub direct_blocks: Option<Box<DirectBlocks>>,
}

/// An open file for the rings of all threads of the process. The lock of a writer stays with the thread that opened it,
/// and so do its length and what is found out about it: others read and write what they know to be there.
#[derive(Clone, Debug)]
pub struct SharedFile {
    /// Its descriptor stays open as long as this.
    _file: Arc<OpenFile>,
    pub(super) fd: RawFd,
    pub(super) info: StorageInfo,
    pub(super) inode: u64,
    /// What O_DIRECT wants of memory addresses; 1 without it.
    pub(super) memory_align: u32,
    pub(super) is_device: bool,
    /// A file system in memory: see [`UringFile`](super::UringFile).
    pub(super) in_memory: bool,
    /// A file on FUSE: see there.
    pub(super) on_fuse: bool,
    /// Bytes when it was opened or shared.
    pub(super) len: u64,
}

impl SharedFile {
    /// The same, which has `len` bytes now.
    pub(super) fn with_len(&self, len: u64) -> Self {
        Self { len, ..self.clone() }
    }

    /// Has a device take back what it keeps for a span.
    ///
    /// # Errors
    /// EOPNOTSUPP: it takes nothing back; the system's others.
    pub(super) fn discard(&self, span: Span) -> io::Result<()> {
        let range = [span.start, span.len];
        // SAFETY: the descriptor is open as long as `self`, and BLKDISCARD reads two numbers from the place it is
        // given.
        let result = unsafe { libc::ioctl(self.fd, BLKDISCARD.into(), range.as_ptr()) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl OpenedFile {
    /// Opens a file, which `closer` closes.
    pub(super) fn open(path: &Path, access: Access, caching: Caching, closer: Closer) -> io::Result<Self> {
        let open = |flags| {
            OpenOptions::new()
                .read(true)
                .write(access == Access::ReadWrite)
                .custom_flags(flags | libc::O_CLOEXEC)
                .open(path)
        };
        let plain = open(0)?;
        let kind = plain.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let why = "neither a regular file nor a block device";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let is_device = kind.is_block_device();
        let inode = if is_device { 0 } else { plain.metadata()?.ino() };
        let lock = if access == Access::ReadWrite { Some(WriterLock::take(&plain)?) } else { None };
        let claim = if is_device && lock.is_some() { Some(claim(path)?) } else { None };
        // O_DIRECT cannot reach a last piece shorter than a sector, where a damaged VHD may have its footer.
        let caching = if current_len(&plain)? % SECTOR_LEN == 0 { caching } else { Caching::Cached };
        let sector_len = if is_device { device_sector_len(&plain) } else { SECTOR_LEN as u32 };
        let direct = match caching {
            Caching::Cached => None,
            Caching::Direct => match direct_align(&plain, sector_len) {
                Some((memory, offset)) if offset <= BLOCK_LEN_MAX => {
                    open(libc::O_DIRECT).ok().map(|file| (file, memory.max(1), u64::from(offset)))
                }
                _ => None,
            },
        };
        let (file, memory_align, align, direct_blocks, cached) = match direct {
            Some((file, memory, len)) if len > SECTOR_LEN => {
                let (blocks, end_was_written) = (Blocks::new(len), Cell::new(false));
                let parts = Box::new(DirectBlocks { blocks, cached: plain.as_raw_fd(), end_was_written });
                (file, memory, SECTOR_LEN as u32, Some(parts), Some(plain))
            }
            Some((file, memory, _)) => (file, memory, SECTOR_LEN as u32, None, None),
            None => (plain, 1, 1, None, None),
        };
        let len = current_len(&file)?;
        let system = if is_device { None } else { file_system(&file) };
        let in_memory = system.is_some_and(|magic| [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&magic));
        let on_fuse = system == Some(libc::FUSE_SUPER_MAGIC);
        let info = StorageInfo {
            align,
            sector_len,
            resizable: !is_device,
            fresh_reads_zero: !is_device,
            promises_space: !is_device && !in_memory,
        };
        let fd = file.as_raw_fd();
        let file = Arc::new(OpenFile { files: Some((file, cached)), closer: closer.clone() });
        let handle = Handle { file: Some(Arc::clone(&file)), lock, claim, closer, closing: OnceLock::new() };
        let shared =
            SharedFile { _file: file, fd, info, inode, memory_align, is_device, in_memory, on_fuse, len };
        Ok(Self { shared, handle, direct_blocks })
    }
}

/// Keeps a device from being mounted, or built upon, while the returned file is open.
///
/// # Errors
/// EBUSY where that is the case already.
fn claim(path: &Path) -> io::Result<File> {
    // Not for writing: the last writer that closes a device has the kernel look for partitions on it.
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)
}

/// Bytes of a sector of the image at `path` as a disk: what a block device says, 512 for a file.
///
/// # Errors
/// It cannot be opened.
pub fn sector_len_of(path: &Path) -> io::Result<u32> {
    let file = File::open(path)?;
    let is_device = file.metadata()?.file_type().is_block_device();
    Ok(if is_device { device_sector_len(&file) } else { SECTOR_LEN as u32 })
}

/// Bytes of a sector of a block device, as its driver says.
fn device_sector_len(device: &File) -> u32 {
    let mut len: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes an int to the place it is given.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::BLKSSZGET as _, &raw mut len) };
    let known = u32::try_from(len).ok().filter(|len| result == 0 && len.is_power_of_two());
    known.unwrap_or(0).max(SECTOR_LEN as u32)
}

/// What O_DIRECT asks of memory and of offsets on this file, in bytes; `None` where it is not to be had.
fn direct_align(file: &File, sector_len: u32) -> Option<(u32, u32)> {
    // SAFETY: an all-zero statx is a valid value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let (flags, mask) = (libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
    // SAFETY: the path is an empty C string and `stat` is valid for writing.
    let result = unsafe { libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, mask, &raw mut stat) };
    if result != 0 {
        return None;
    }
    if stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        // The file system does not say (tmpfs, older kernels): 512 works wherever O_DIRECT works on a file at all.
        return Some((sector_len, sector_len));
    }
    let offset = stat.stx_dio_offset_align;
    (offset > 0).then_some((stat.stx_dio_mem_align, offset.max(sector_len)))
}

/// The number of a file system in memory that is not in `libc`.
const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;

/// The number of the kind of file system that the file is on.
fn file_system(file: &File) -> Option<libc::__fsword_t> {
    // SAFETY: an all-zero statfs is a valid value, and `fstatfs` gets a valid descriptor and place.
    unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        (libc::fstatfs(file.as_raw_fd(), &raw mut stat) == 0).then_some(stat.f_type)
    }
}

/// The length of a file, or the size of a block device.
pub(super) fn current_len(file: &File) -> io::Result<u64> {
    use std::io::{Seek, SeekFrom};
    let mut handle = file;
    handle.seek(SeekFrom::End(0))
}
