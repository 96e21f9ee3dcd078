//! What a disk process opens its storages with: files and block devices through the ring, exports of other processes by
//! NBD, images of Ceph clusters. A closed list, so that the path of a request has no virtual call.

use std::io;
use std::path::Path;
use std::time::Duration;

use tapio_nbd::{NbdStore, Target};
use tapio_rbd::RbdStore;
use tapio_ring::uring::{SharedFile, Uring, UringFile};
use tapio_ring::{InBlocks, Io, Segments, Storage, StorageInfo, TaskId, Tasks, Zeroing};
use tapio_types::{Access, ImageKind, Span};

/// Opens storages on the ring of a data thread.
#[derive(Clone, Debug)]
pub struct DiskIo {
    uring: Uring,
    /// Hears of connections lost and found.
    report: fn(&str),
}

/// A storage of a disk.
#[derive(Debug)]
pub enum DiskStore {
    /// A file or a block device.
    File(UringFile),
    /// A remote export.
    Remote(NbdStore),
    /// One that takes whole blocks of more than 512 bytes only.
    RemoteInBlocks(Box<InBlocks<NbdStore>>),
    /// An image of a Ceph cluster.
    Rbd(RbdStore),
}

/// How long images of Ceph that were let go of may take to be closed before the next are opened all the same.
const RBD_CLOSED_MAX: Duration = Duration::from_secs(10);

impl DiskIo {
    /// Opens storages on this ring.
    pub const fn new(uring: Uring, report: fn(&str)) -> Self {
        Self { uring, report }
    }
}

impl Io for DiskIo {
    type Store = DiskStore;
    type Share = SharedFile;

    fn share(&self, store: &DiskStore) -> Option<SharedFile> {
        match store {
            DiskStore::File(file) => self.uring.share(file),
            // Its connections are tasks of this thread.
            DiskStore::Remote(_) | DiskStore::RemoteInBlocks(_) => None,
            // Its ends come to this thread.
            DiskStore::Rbd(_) => None,
        }
    }

    fn adopt(&self, share: &SharedFile) -> DiskStore {
        DiskStore::File(self.uring.adopt(share))
    }

    async fn open(&self, path: &Path, access: Access) -> io::Result<DiskStore> {
        self.uring.open(path, access).await.map(DiskStore::File)
    }

    async fn closed(&self) {
        self.uring.files_closed().await;
        if tapio_rbd::is_closing() {
            // What is not closed by then has its lock still, and opening it says so.
            let _ = self.uring.offload(|| tapio_rbd::closed(RBD_CLOSED_MAX)).await;
        }
    }

    async fn offload<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        self.uring.offload(work).await
    }

    async fn open_remote(&self, kind: ImageKind, name: &str, access: Access) -> io::Result<DiskStore> {
        if kind == ImageKind::Rbd {
            let target: tapio_rbd::Target = name.parse()?;
            return RbdStore::open(&self.uring, target, access, self.report).await.map(DiskStore::Rbd);
        }
        let target: Target = name.parse()?;
        let store = NbdStore::open(&self.uring, target, access, self.report).await?;
        Ok(match store.info().sector_len {
            512 => DiskStore::Remote(store),
            _ => DiskStore::RemoteInBlocks(Box::new(InBlocks::new(store, self.uring.tasks().clone()))),
        })
    }

    fn tasks(&self) -> &Tasks {
        self.uring.tasks()
    }

    fn now_ns(&self) -> u64 {
        Io::now_ns(&self.uring)
    }

    /// What waits for a remote export waits for its connection, which has time limits of its own.
    fn cancel(&self, task: TaskId) {
        self.uring.cancel(task);
    }
}

/// The same call on whichever it is.
macro_rules! either {
    ($store:expr, $inner:ident => $call:expr) => {
        match $store {
            DiskStore::File($inner) => $call,
            DiskStore::Remote($inner) => $call,
            DiskStore::RemoteInBlocks($inner) => $call,
            DiskStore::Rbd($inner) => $call,
        }
    };
}

// SAFETY: all kinds do as they must.
unsafe impl Storage for DiskStore {
    fn info(&self) -> StorageInfo {
        either!(self, store => store.info())
    }

    fn len(&self) -> u64 {
        either!(self, store => store.len())
    }

    fn inode(&self) -> u64 {
        either!(self, store => store.inode())
    }

    async fn data_run(&self, span: Span) -> (u64, bool) {
        either!(self, store => store.data_run(span).await)
    }

    async fn known_runs(&self, span: Span, count_max: usize) -> Vec<(u64, bool)> {
        either!(self, store => store.known_runs(span, count_max).await)
    }

    async fn read(&self, at: u64, into: Segments) -> io::Result<()> {
        match self {
            Self::File(store) => store.read(at, into).await,
            Self::Remote(store) => store.read(at, into).await,
            // Boxed: hundreds of request tasks have room for the common ones.
            Self::RemoteInBlocks(store) => Box::pin(store.read(at, into)).await,
            Self::Rbd(store) => store.read(at, into).await,
        }
    }

    async fn write(&self, at: u64, from: Segments) -> io::Result<()> {
        match self {
            Self::File(store) => store.write(at, from).await,
            Self::Remote(store) => store.write(at, from).await,
            // Boxed: hundreds of request tasks have room for the common ones.
            Self::RemoteInBlocks(store) => Box::pin(store.write(at, from)).await,
            Self::Rbd(store) => store.write(at, from).await,
        }
    }

    async fn flush(&self) -> io::Result<()> {
        either!(self, store => store.flush().await)
    }

    async fn zero(&self, span: Span, how: Zeroing) -> io::Result<()> {
        match self {
            Self::File(store) => store.zero(span, how).await,
            Self::Remote(store) => store.zero(span, how).await,
            // Boxed: hundreds of request tasks have room for the common ones.
            Self::RemoteInBlocks(store) => Box::pin(store.zero(span, how)).await,
            Self::Rbd(store) => store.zero(span, how).await,
        }
    }

    async fn allocate(&self, span: Span, space: bool) -> io::Result<()> {
        either!(self, store => store.allocate(span, space).await)
    }

    async fn measured_len(&self) -> io::Result<u64> {
        either!(self, store => store.measured_len().await)
    }

    fn has_grown(&self, len: u64) {
        either!(self, store => store.has_grown(len));
    }

    fn ends_at(&self, len: u64) {
        either!(self, store => store.ends_at(len));
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        either!(self, store => store.set_len(len).await)
    }
}
