//! A flat run of bytes that the offline tools work on: a file, a block device, or memory.
//!
//! Synchronous on purpose: these tools do one thing at a time, and a test can put any misfortune behind the trait.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate, fcntl_getfl};
use tapio_ring::uring::{LockHolder, WriterLock};
use tapio_types::{Access, Span};

use crate::error::{FormatError, Result};

/// Transfers past the page cache begin and end on a multiple of this, in the file and in memory.
const DIRECT_ALIGN: usize = 4096;
/// Transfers of at least this many bytes go past the page cache.
const DIRECT_LEN_MIN: usize = 256 << 10;
/// Zeros up to this many bytes are written and not punched out.
const ZEROS_WRITTEN_MAX: u64 = 64 << 10;

/// A flat run of bytes. Never short: an operation does all of what it was asked for or fails.
pub trait Medium {
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Whether there are no bytes at all.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Whether the length is given by the device, so that a footer stands at its end and not behind the data.
    fn is_device(&self) -> bool {
        false
    }
    /// Reads `into.len()` bytes from `at`.
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes all of `from` at `at`; a file grows where it must.
    fn write_at(&mut self, at: u64, from: &[u8]) -> io::Result<()>;
    /// Makes it `len` bytes long. Fails on a device.
    fn set_len(&mut self, len: u64) -> io::Result<()>;
    /// Returns when everything written so far is on stable storage.
    fn flush(&mut self) -> io::Result<()>;
    /// Begins to bring the bytes of `span` to stable storage, so that the next flush has less to wait for.
    fn begin_flush(&mut self, _span: Span) {}
    /// Makes the bytes of `span` read as zeros, taking no space for them where that can be done.
    fn zero(&mut self, span: Span) -> io::Result<()> {
        write_zeros(self, span)
    }
    /// Makes the bytes of `span` read as zeros with space set aside for them, growing a file where it must.
    fn reserve(&mut self, span: Span) -> io::Result<()> {
        write_zeros(self, span)
    }
}

impl<M: Medium + ?Sized> Medium for Box<M> {
    fn len(&self) -> io::Result<u64> {
        (**self).len()
    }
    fn is_device(&self) -> bool {
        (**self).is_device()
    }
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        (**self).read_at(at, into)
    }
    fn write_at(&mut self, at: u64, from: &[u8]) -> io::Result<()> {
        (**self).write_at(at, from)
    }
    fn set_len(&mut self, len: u64) -> io::Result<()> {
        (**self).set_len(len)
    }
    fn flush(&mut self) -> io::Result<()> {
        (**self).flush()
    }
    fn begin_flush(&mut self, span: Span) {
        (**self).begin_flush(span);
    }
    fn zero(&mut self, span: Span) -> io::Result<()> {
        (**self).zero(span)
    }
    fn reserve(&mut self, span: Span) -> io::Result<()> {
        (**self).reserve(span)
    }
}

/// A medium that is borrowed.
///
/// A type of its own and not `&mut M`, which would take `len` and its like away from a `&mut Vec<u8>`.
#[derive(Debug)]
pub struct Lent<'m, M: ?Sized>(pub &'m mut M);

impl<M: Medium + ?Sized> Medium for Lent<'_, M> {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn is_device(&self) -> bool {
        self.0.is_device()
    }
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_at(at, into)
    }
    fn write_at(&mut self, at: u64, from: &[u8]) -> io::Result<()> {
        self.0.write_at(at, from)
    }
    fn set_len(&mut self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
    fn begin_flush(&mut self, span: Span) {
        self.0.begin_flush(span);
    }
    fn zero(&mut self, span: Span) -> io::Result<()> {
        self.0.zero(span)
    }
    fn reserve(&mut self, span: Span) -> io::Result<()> {
        self.0.reserve(span)
    }
}

/// Memory as a medium: for tests, fuzzers, and the simulator's look at what a power cut left.
impl Medium for Vec<u8> {
    fn len(&self) -> io::Result<u64> {
        Ok(Self::len(self) as u64)
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let span = usize::try_from(at).ok().and_then(|at| self.get(at..at.checked_add(into.len())?));
        into.copy_from_slice(span.ok_or_else(past_the_end)?);
        Ok(())
    }

    fn write_at(&mut self, at: u64, from: &[u8]) -> io::Result<()> {
        let at = usize::try_from(at).map_err(|_| past_the_end())?;
        let end = at.checked_add(from.len()).ok_or_else(past_the_end)?;
        if end > Self::len(self) {
            self.resize(end, 0);
        }
        self[at..end].copy_from_slice(from);
        Ok(())
    }

    fn set_len(&mut self, len: u64) -> io::Result<()> {
        self.resize(usize::try_from(len).map_err(|_| past_the_end())?, 0);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Memory that begins on a page, as transfers past the page cache need it.
#[derive(Debug)]
pub struct PageBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl PageBuffer {
    /// `len` zero bytes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + DIRECT_ALIGN];
        let start = bytes.as_ptr().align_offset(DIRECT_ALIGN).min(DIRECT_ALIGN);
        Self { bytes, start, len }
    }
}

impl Deref for PageBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// A file or block device.
///
/// Large transfers of whole pages go past the page cache where the file system lets them: merging a disk of hundreds
/// of gigabytes must not push everything else out of memory, and costs a fraction of the time. The kernel keeps the
/// two ways in step.
#[derive(Debug)]
pub struct FileMedium {
    file: File,
    /// The same file, opened to go past the page cache.
    direct: Option<File>,
    /// The length of a device, which does not change while it is open; `None` for a file.
    device_len: Option<u64>,
    _lock: Option<WriterLock>,
}

impl FileMedium {
    /// Opens what is there.
    ///
    /// # Errors
    /// Those of the system, and `InvalidArgument` for what is neither a file nor a block device. With EBUSY, after some
    /// seconds, when another process has it open for writing and this one wants to write too.
    pub fn open(path: &Path, access: Access) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(access == Access::ReadWrite)
            .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(path)
            .map_err(|error| FormatError::io("cannot open", error).with_path(path))?;
        let locked = (access == Access::ReadWrite).then(|| WriterLock::take_when_free(&file, path));
        let lock = locked.transpose().map_err(|error| {
            let what = match error.raw_os_error() {
                Some(libc::EBUSY) => LockHolder::of(path).to_string(),
                _ => "cannot lock".to_owned(),
            };
            FormatError::io(what, error).with_path(path)
        })?;
        Ok(Self { _lock: lock, ..Self::from_file(file, path)? })
    }

    /// Makes a new file for writing, which must not be there yet. Its owner alone may read it: it is a guest's disk.
    ///
    /// # Errors
    /// Those of the system.
    pub fn create_new(path: &Path) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .custom_flags(libc::O_CLOEXEC)
            .mode(0o600)
            .open(path)
            .map_err(|error| FormatError::io("cannot create", error).with_path(path))?;
        let lock = WriterLock::take(&file);
        let lock = lock.map_err(|error| FormatError::io("cannot lock", error).with_path(path))?;
        Ok(Self { direct: open_direct(&file), file, device_len: None, _lock: Some(lock) })
    }

    /// An open file or device; `path` is for messages.
    ///
    /// # Errors
    /// As [`FileMedium::open`].
    pub fn from_file(file: File, path: &Path) -> Result<Self> {
        let wrap = |error| FormatError::io("cannot examine", error).with_path(path);
        let kind = file.metadata().map_err(wrap)?.file_type();
        let device_len = if kind.is_block_device() {
            forget_cache(&file);
            Some(end_of(&file).map_err(wrap)?)
        } else if kind.is_file() {
            None
        } else {
            let error = crate::error::invalid("is neither a regular file nor a block device").with_path(path);
            return Err(if kind.is_dir() { error.with_errno(libc::EISDIR) } else { error });
        };
        Ok(Self { direct: open_direct(&file), file, device_len, _lock: None })
    }

    /// The file below.
    pub fn file(&self) -> &File {
        &self.file
    }

    fn fallocate(&self, mode: FallocateFlags, span: Span) -> io::Result<()> {
        if i64::try_from(span.start).is_err() || i64::try_from(span.len).is_err() {
            return Err(past_the_end());
        }
        Ok(fallocate(&self.file, mode, span.start, span.len)?)
    }
}

impl Medium for FileMedium {
    fn len(&self) -> io::Result<u64> {
        match self.device_len {
            Some(len) => Ok(len),
            None => Ok(self.file.metadata()?.len()),
        }
    }

    fn is_device(&self) -> bool {
        self.device_len.is_some()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        // What goes wrong past the cache, at the end of a file above all, is tried again through it.
        if let Some(direct) = self.direct.as_ref().filter(|_| is_direct(at, into))
            && direct.read_exact_at(into, at).is_ok()
        {
            return Ok(());
        }
        self.file.read_exact_at(into, at)
    }

    fn write_at(&mut self, at: u64, from: &[u8]) -> io::Result<()> {
        if self.device_len.is_some_and(|len| at.saturating_add(from.len() as u64) > len) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        if let Some(direct) = self.direct.as_ref().filter(|_| is_direct(at, from)) {
            match direct.write_all_at(from, at) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                done => return done,
            }
        }
        self.file.write_all_at(from, at)
    }

    fn set_len(&mut self, len: u64) -> io::Result<()> {
        if self.device_len.is_some() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.file.set_len(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn begin_flush(&mut self, span: Span) {
        let (Ok(start), Ok(len)) = (i64::try_from(span.start), i64::try_from(span.len)) else { return };
        // SAFETY: the descriptor is open for as long as `self.file` lives; no memory is passed. It only hints: what
        // fails here fails again, and is reported, in the flush.
        unsafe { libc::sync_file_range(self.file.as_raw_fd(), start, len, libc::SYNC_FILE_RANGE_WRITE) };
    }

    fn zero(&mut self, span: Span) -> io::Result<()> {
        if span.is_empty() {
            return Ok(());
        }
        // A file grows by a hole; on a device the range must be there.
        if self.device_len.is_none() && span.end().is_some_and(|end| self.len().is_ok_and(|len| end > len)) {
            self.set_len(span.start.saturating_add(span.len))?;
        }
        // A hole for a few pages costs more than it saves.
        if span.len <= ZEROS_WRITTEN_MAX {
            return write_zeros(self, span);
        }
        let modes = [
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        ];
        for mode in modes {
            match self.fallocate(mode, span) {
                Ok(()) => return Ok(()),
                Err(error) if is_unsupported(&error) => {}
                Err(error) => return Err(error),
            }
        }
        write_zeros(self, span)
    }

    fn reserve(&mut self, span: Span) -> io::Result<()> {
        if span.is_empty() {
            return Ok(());
        }
        match self.fallocate(FallocateFlags::ZERO_RANGE, span) {
            Ok(()) => return Ok(()),
            Err(error) if is_unsupported(&error) => {}
            Err(error) => return Err(error),
        }
        write_zeros(self, span)
    }
}

/// Whether a transfer is large and aligned enough to go past the page cache.
fn is_direct(at: u64, bytes: &[u8]) -> bool {
    bytes.len() >= DIRECT_LEN_MIN
        && bytes.len().is_multiple_of(DIRECT_ALIGN)
        && at.is_multiple_of(DIRECT_ALIGN as u64)
        && bytes.as_ptr().addr().is_multiple_of(DIRECT_ALIGN)
}

/// The same open file once more, past the page cache; `None` where that cannot be had.
fn open_direct(file: &File) -> Option<File> {
    let is_writable = fcntl_getfl(file).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDWR);
    // By its descriptor and not by its name, which may be another file's by now.
    OpenOptions::new()
        .read(true)
        .write(is_writable)
        .custom_flags(libc::O_CLOEXEC | libc::O_DIRECT)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .ok()
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV))
}

/// Drops clean pages of a device: another host may have written to it since they were read.
fn forget_cache(file: &File) {
    // A refusal changes nothing.
    let _ = fadvise(file, 0, None, Advice::DontNeed);
}

/// The length of a device, which its metadata do not tell.
fn end_of(file: &File) -> io::Result<u64> {
    use std::io::{Seek, SeekFrom};
    let mut file = file;
    file.seek(SeekFrom::End(0))
}

fn past_the_end() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "beyond the end")
}

/// Zeros written by hand, in pieces of a megabyte at most.
fn write_zeros<M: Medium + ?Sized>(medium: &mut M, span: Span) -> io::Result<()> {
    const PIECE: u64 = 1 << 20;
    let zeros = vec![0; span.len.min(PIECE) as usize];
    let mut left = span;
    while !left.is_empty() {
        let piece = left.prefix(PIECE);
        medium.write_at(piece.start, &zeros[..piece.len as usize])?;
        left = left.skip(piece.len);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exercise(medium: &mut dyn Medium) {
        medium.write_at(4096, &[7; 8192]).unwrap();
        assert_eq!(medium.len().unwrap(), 12288);
        medium.zero(Span::new(5000, 1000)).unwrap();
        let mut bytes = [1; 8192];
        medium.read_at(4096, &mut bytes).unwrap();
        assert!(bytes.iter().enumerate().all(|(i, &b)| b == if (904..1904).contains(&i) { 0 } else { 7 }));
        medium.reserve(Span::new(8192, 8192)).unwrap();
        assert_eq!(medium.len().unwrap(), 16384);
        medium.zero(Span::new(16384, 512)).unwrap();
        assert_eq!(medium.len().unwrap(), 16896);
        medium.set_len(9000).unwrap();
        assert!(medium.read_at(8999, &mut [0; 2]).is_err());
        assert!(medium.read_at(u64::MAX, &mut [0; 2]).is_err());
        medium.flush().unwrap();
    }

    #[test]
    fn memory_and_files_behave_alike() {
        exercise(&mut Vec::new());
        let file = tempfile::tempfile().unwrap();
        exercise(&mut FileMedium::from_file(file, Path::new("test")).unwrap());
    }

    #[test]
    fn both_ways_past_and_through_the_cache_see_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let mut medium = FileMedium::create_new(&dir.path().join("x")).unwrap();
        let mut page = PageBuffer::new(1 << 20);
        assert!(is_direct(4096, &page) && !is_direct(512, &page) && !is_direct(0, &page[512..]));
        for round in 0..4u8 {
            page.fill(round + 1);
            medium.write_at(0, &page).unwrap();
            medium.write_at(5000, &[99; 3000]).unwrap();
            medium.write_at(1 << 20, &[98; 700]).unwrap();
            medium.read_at(0, &mut page).unwrap();
            let wrong = page
                .iter()
                .enumerate()
                .find(|(at, byte)| **byte != if (5000..8000).contains(at) { 99 } else { round + 1 });
            assert_eq!(wrong, None, "round {round}");
            let mut plain = vec![0; 1 << 20];
            medium.read_at(700, &mut plain).unwrap();
            assert_eq!((plain[0], plain[4300], plain[(1 << 20) - 1]), (round + 1, 99, 98));
            // Past the end of what there is, in the middle of a page.
            assert!(medium.read_at(4096, &mut page).is_err());
        }
    }

    #[test]
    fn a_directory_is_no_medium() {
        let dir = tempfile::tempdir().unwrap();
        let error = FileMedium::open(dir.path(), Access::ReadOnly).unwrap_err();
        assert!(error.to_string().contains("neither a regular file"), "{error}");
    }

    #[test]
    fn a_writer_waits_for_the_one_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let medium = FileMedium::create_new(&path).unwrap();
        let first = WriterLock::take(medium.file()).unwrap();
        assert!(matches!(LockHolder::of(&path), LockHolder::This | LockHolder::Unseen));
        std::thread::scope(|scope| {
            let second = scope.spawn(|| FileMedium::open(&path, Access::ReadWrite).map(drop));
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(first);
            second.join().unwrap().unwrap();
        });
        assert_eq!(LockHolder::of(&path), LockHolder::Unseen);
    }
}
