//! What a storage is, whatever lies behind it.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::path::Path;

use tapio_types::{Access, ImageKind, Span};

use crate::lent::{Memory, MemoryMut, lend};
use crate::segments::Segments;
use crate::tasks::{TaskId, Tasks};

/// What a storage can do; read once at opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageInfo {
    /// Bytes to which offsets and lengths must be aligned: 512 with O_DIRECT, 1 otherwise.
    pub align: u32,
    /// Bytes of a sector as a block device has them, and a disk that is this device; 512 otherwise. Smaller requests
    /// are served, by reading and writing more than they are about.
    pub sector_len: u32,
    /// Whether the length can change: a regular file. A block device has its length for good.
    pub resizable: bool,
    /// Whether bytes that were never written read as zero: a fresh range of a regular file does, a range of a
    /// logical volume may hold what its last owner left there.
    pub fresh_reads_zero: bool,
    /// Whether reserving space ahead costs next to nothing: true on file systems on disks, false where space is
    /// memory (tmpfs) and on devices, which have theirs.
    pub promises_space: bool,
}

/// What a range must read as after [`Storage::zero`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// Zero, and the space may be given back.
    Unmap,
    /// Zero, and the space stays reserved where the storage can guarantee that.
    Keep,
    /// Anything: the space may be given back, and nothing is written for that. A device that takes back space without
    /// promising zeroes is asked to; one that takes nothing back keeps what it has.
    Discard,
}

/// A flat range of bytes: a file, a block device, later a remote export.
///
/// Never short: a call moves every byte or fails. Reading past the end fails. A write is durable only after a
/// [`Storage::flush`] that began after the write had completed.
///
/// The futures own operations of the kernel: they are always polled to their end, never dropped half way
/// ([`crate::dropped`]).
///
/// # Safety
/// What [`Storage::read`] and [`Storage::write`] are given is used from the first poll of their futures until these
/// have ended, and never before or again, by the storage and by everything that it hands the memory to: the kernel,
/// threads, other storages. Callers free and reuse it then.
pub unsafe trait Storage: 'static {
    /// What this storage can do.
    fn info(&self) -> StorageInfo;
    /// Length in bytes.
    fn len(&self) -> u64;
    /// The number that the host's file system has for it, which tells it from a copy; 0 without one that lasts.
    fn inode(&self) -> u64 {
        0
    }
    /// Whether the storage has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// How much from the beginning of `span` is alike, and whether it is data: false where the storage keeps nothing
    /// and it reads as zero. At least one byte, at most the span. Asks nothing but the host's file system; what is not
    /// known without asking further counts as data.
    fn data_run(&self, span: Span) -> impl Future<Output = (u64, bool)> {
        std::future::ready((span.len, true))
    }
    /// [`Storage::data_run`] of `span` and, as far as that costs no further call, of what follows in it; at most
    /// `count_max` runs and at least one. Of a storage that has to be asked, and where asking may take long: for copies
    /// and questions, not for the path of a request.
    fn known_runs(&self, span: Span, count_max: usize) -> impl Future<Output = Vec<(u64, bool)>> {
        let _ = count_max;
        async move { vec![self.data_run(span).await] }
    }
    /// Reads `into.len()` bytes from `at`. Of memory of this process: [`Storage::read_into`].
    fn read(&self, at: u64, into: Segments) -> impl Future<Output = io::Result<()>>;
    /// Writes `from.len()` bytes at `at`. Of memory of this process: [`Storage::write_from`].
    fn write(&self, at: u64, from: Segments) -> impl Future<Output = io::Result<()>>;
    /// Reads from `at` into `place` of `memory`, which comes back with the result.
    fn read_into<B: MemoryMut>(
        &self,
        at: u64,
        memory: B,
        place: Range<usize>,
    ) -> impl Future<Output = (B, io::Result<()>)> {
        // SAFETY: implementations of this trait keep to what `lend` asks for.
        unsafe { lend(memory, place, |into| self.read(at, into)) }
    }
    /// Writes `place` of `memory` at `at`. The memory comes back with the result.
    fn write_from<B: Memory>(
        &self,
        at: u64,
        memory: B,
        place: Range<usize>,
    ) -> impl Future<Output = (B, io::Result<()>)> {
        // SAFETY: implementations of this trait keep to what `lend` asks for.
        unsafe { lend(memory, place, |from| self.write(at, from)) }
    }
    /// Makes every write that has completed durable, with the length and the space it needs.
    fn flush(&self) -> impl Future<Output = io::Result<()>>;
    /// Makes a range read as zero.
    fn zero(&self, span: Span, how: Zeroing) -> impl Future<Output = io::Result<()>>;
    /// Grows the storage so that `span` lies inside, with space reserved where `space` is set. Fresh bytes read zero.
    fn allocate(&self, span: Span, space: bool) -> impl Future<Output = io::Result<()>>;
    /// The length that the storage has by now. A device may have become longer by another program's hand:
    /// [`Storage::has_grown`] takes that over.
    fn measured_len(&self) -> impl Future<Output = io::Result<u64>> {
        std::future::ready(Ok(self.len()))
    }
    /// A device that cannot change its length itself has `len` bytes from now on, as [`Storage::measured_len`] has
    /// found.
    fn has_grown(&self, _len: u64) {}
    /// A device that others make shorter ends at `len` from now on, which is not more than it has: nothing behind that
    /// is read or written any more.
    fn ends_at(&self, _len: u64) {}
    /// Cuts or grows the storage to `len` bytes.
    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>>;
}

/// What the data plane uses of the host: time, tasks and storages. io_uring, or the simulator.
pub trait Io: Clone + 'static {
    /// The storages that this opens.
    type Store: Storage;
    /// An open storage on its way to another thread of the process.
    type Share: Clone + std::fmt::Debug + Send + Sync + 'static;
    /// The storage for other threads of the process; `None` for one that belongs to this thread alone.
    fn share(&self, store: &Self::Store) -> Option<Self::Share>;
    /// A storage that another thread has opened, on this thread too. Only what is known to be there is read and
    /// written through it: its length and its durability are the other thread's.
    fn adopt(&self, share: &Self::Share) -> Self::Store;
    /// Opens a file or a block device, while other tasks go on, however long the file system takes.
    fn open(&self, path: &Path, access: Access) -> impl Future<Output = io::Result<Self::Store>>;
    /// Waits until the storages that were dropped before are closed, and can be opened for writing again. Dropping one
    /// waits for nothing. What other threads have of a storage they must have let go of before.
    fn closed(&self) -> impl Future<Output = ()> {
        std::future::ready(())
    }
    /// Runs a call that may block, while other tasks go on.
    ///
    /// # Errors
    /// It could not be run; what it answers itself is the value.
    fn offload<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = io::Result<T>> {
        std::future::ready(Ok(work()))
    }
    /// Opens what is no file of this host, by the name that follows `nbd:` or `rbd:`. May take as long as connecting
    /// takes. The storage may lose its connection later and get it back. Every call still ends,
    /// well or not, and a flush fails if writes that were answered before may be gone.
    fn open_remote(
        &self,
        kind: ImageKind,
        name: &str,
        access: Access,
    ) -> impl Future<Output = io::Result<Self::Store>> {
        let _ = (kind, access);
        let why = format!("'{name}' is remote, and this process has no way to reach it");
        std::future::ready(Err(io::Error::new(io::ErrorKind::Unsupported, why)))
    }
    /// The tasks of this data thread.
    fn tasks(&self) -> &Tasks;
    /// Nanoseconds of a clock that never goes back.
    fn now_ns(&self) -> u64;
    /// Cancels everything that `task` waits for. What can be cancelled ends with an error soon; the rest goes
    /// on as if nothing had been asked.
    fn cancel(&self, task: TaskId);
}
