//! The door of a disk process to its storages: files and block devices through the ring, exports of other processes by
//! NBD. A closed list, so that the path of a request has no virtual call.

use std::io;
use std::path::Path;

use tapio_nbd::{NbdStore, Target};
use tapio_ring::uring::{Uring, UringFile};
use tapio_ring::{Io, Segments, Storage, StorageInfo, Tasks, Zeroing};
use tapio_types::{Access, Span};

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
}

impl DiskIo {
    /// The door on this ring.
    pub const fn new(uring: Uring, report: fn(&str)) -> Self {
        Self { uring, report }
    }
}

impl Io for DiskIo {
    type Store = DiskStore;

    fn open(&self, path: &Path, access: Access) -> io::Result<DiskStore> {
        self.uring.open(path, access).map(DiskStore::File)
    }

    async fn open_remote(&self, name: &str, access: Access) -> io::Result<DiskStore> {
        let target: Target = name.parse()?;
        NbdStore::open(&self.uring, target, access, self.report).await.map(DiskStore::Remote)
    }

    fn tasks(&self) -> &Tasks {
        self.uring.tasks()
    }

    fn now_ns(&self) -> u64 {
        Io::now_ns(&self.uring)
    }
}

/// The same call on whichever it is.
macro_rules! either {
    ($store:expr, $inner:ident => $call:expr) => {
        match $store {
            DiskStore::File($inner) => $call,
            DiskStore::Remote($inner) => $call,
        }
    };
}

/// The same with the remote case on the heap: it waits for the network, and a request task has room for files only.
macro_rules! remote_boxed {
    ($store:expr, $inner:ident => $call:expr) => {
        match $store {
            DiskStore::File($inner) => $call.await,
            DiskStore::Remote($inner) => Box::pin($call).await,
        }
    };
}

impl Storage for DiskStore {
    fn info(&self) -> StorageInfo {
        either!(self, store => store.info())
    }

    fn len(&self) -> u64 {
        either!(self, store => store.len())
    }

    fn data_run(&self, span: Span) -> (u64, bool) {
        either!(self, store => store.data_run(span))
    }

    async fn known_run(&self, span: Span) -> (u64, bool) {
        either!(self, store => store.known_run(span).await)
    }

    async fn read(&self, at: u64, into: Segments) -> io::Result<()> {
        remote_boxed!(self, store => store.read(at, into))
    }

    async fn write(&self, at: u64, from: Segments) -> io::Result<()> {
        remote_boxed!(self, store => store.write(at, from))
    }

    async fn flush(&self) -> io::Result<()> {
        remote_boxed!(self, store => store.flush())
    }

    async fn zero(&self, span: Span, how: Zeroing) -> io::Result<()> {
        remote_boxed!(self, store => store.zero(span, how))
    }

    async fn allocate(&self, span: Span, space: bool) -> io::Result<()> {
        remote_boxed!(self, store => store.allocate(span, space))
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        remote_boxed!(self, store => store.set_len(len))
    }
}
