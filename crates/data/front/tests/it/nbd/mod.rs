//! The NBD server on a disk of its own.

mod chain;
mod commands;
mod cost;
mod failures;
mod hostile;
mod lifecycle;
mod resize;
mod tls;
mod tools;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_block::{Disk, DiskOptions};
pub use tapio_fixtures::pattern;
use tapio_front::nbd::client::{Address, Client, ClientOptions};
use tapio_front::nbd::wire::Style;
use tapio_front::nbd::{Export, NbdServer};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};
use tempfile::TempDir;

/// Every wait of a test is bounded by this.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A disk on a raw file, and a server with the disk as its export `disk`.
pub struct Rig {
    pub server: NbdServer,
    pub disk: Disk,
    pub path: PathBuf,
    pub socket: PathBuf,
    _dir: TempDir,
}

/// Where the image of a test lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// In memory.
    Shm,
    /// In a file system on a disk.
    OnDisk,
}

impl Rig {
    pub fn new(len: u64) -> Self {
        Self::with(len, Where::Shm, DiskOptions::default())
    }

    pub fn with(len: u64, place: Where, options: DiskOptions) -> Self {
        let dir = match place {
            Where::Shm if Path::new("/dev/shm").is_dir() => tempfile::tempdir_in("/dev/shm").unwrap(),
            _ => tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        };
        let path = dir.path().join("disk.raw");
        File::create(&path).unwrap().set_len(len).unwrap();
        let disk = Disk::start(spec(&path, Access::ReadWrite), options).unwrap();
        let server = NbdServer::new().unwrap();
        server.add_export(Export::new("disk", disk.remote().clone())).unwrap();
        let socket = dir.path().join("nbd.sock");
        server.listen_unix(&socket, 0o600).unwrap();
        Self { server, disk, path, socket, _dir: dir }
    }

    pub fn address(&self) -> Address {
        Address::Unix(self.socket.clone())
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.address(), &ClientOptions::all("disk"), TIMEOUT).unwrap()
    }

    pub fn client_of(&self, style: Style) -> Client {
        let options = ClientOptions { export: "disk".into(), style, allocation: style != Style::Simple };
        let client = Client::connect(&self.address(), &options, TIMEOUT).unwrap();
        assert_eq!(client.style(), style);
        client
    }

    pub fn spec(&self) -> ChainSpec {
        spec(&self.path, Access::ReadWrite)
    }

    /// `len` bytes of the image itself.
    pub fn image(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        File::open(&self.path).unwrap().read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    /// URI for other people's clients.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket.display())
    }

    /// Waits until the server has taken this many requests of its only client.
    pub fn wait_requests(&self, count: u64) {
        let taken = || self.server.connections().iter().any(|info| info.requests >= count);
        wait_until(taken, "requests to be taken");
    }

    /// Waits until the server has this many connections.
    pub fn wait_connections(&self, count: usize) {
        wait_until(|| self.server.connections().len() == count, "the number of connections");
    }

    /// Bytes of the data thread's pool that are in use.
    pub fn pool_used(&self) -> usize {
        let used = |data_thread: &tapio_block::Owner| {
            data_thread.uring.pool().len() - data_thread.uring.pool().free_len()
        };
        self.disk.remote().call(TIMEOUT, used).unwrap()
    }
}

pub fn spec(path: &Path, access: Access) -> ChainSpec {
    ChainSpec { layers: vec![LayerSpec { kind: ImageKind::Raw, path: path.to_path_buf() }], access }
}

pub fn wait_until(mut happened: impl FnMut() -> bool, what: &str) {
    let deadline = std::time::Instant::now() + TIMEOUT;
    while !happened() {
        assert!(std::time::Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
