//! A data thread with a storage on it, and servers that are started, killed and waited for.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
pub use tapio_fixtures::pattern;
use tapio_fixtures::stopped::until_stopped;
use tapio_nbd::NbdStore;
use tapio_ring::uring::{Uring, UringConfig};
use tapio_ring::{Executor, Inbox, Io, PageBuf, Polling, PollingConfig, Storage};
use tapio_types::Access;
use tempfile::TempDir;

/// Every wait of a test is bounded by this.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `story` on a data thread of its own, with what it reported.
pub fn on_ring<T: 'static, F>(story: impl FnOnce(Uring) -> F) -> T
where
    F: Future<Output = T> + 'static,
{
    let uring = Uring::new(UringConfig::default()).unwrap();
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    let tasks = uring.tasks().clone();
    let mut executor = Executor::new(tasks.clone(), Inbox::<()>::new(1), |()| async {}, polling);
    let limit = Instant::now() + 2 * TIMEOUT;
    // A wake-up now and then, so that a story that hangs is found out.
    let ticks = tasks.clone();
    tasks.spawn(async move {
        loop {
            ticks.sleep_until(ticks.turn_ns() + 100_000_000).await;
            assert!(Instant::now() < limit, "the story does not end");
        }
    });
    let value = executor.block_on(&uring, &mut (), story(uring.clone()));
    executor.end(&uring);
    value
}

/// The storage that `name` names, open for writing.
pub async fn open(uring: &Uring, name: &str) -> io::Result<NbdStore> {
    NbdStore::open(uring, name.parse()?, Access::ReadWrite, |line| println!("{line}")).await
}

/// Starts every future as a task and waits until all have ended.
pub async fn all<F: Future<Output = ()> + 'static>(uring: &Uring, futures: Vec<F>) {
    let left = Rc::new(std::cell::Cell::new(futures.len()));
    for future in futures {
        let left = Rc::clone(&left);
        uring.tasks().spawn(async move {
            future.await;
            left.set(left.get() - 1);
        });
    }
    while left.get() > 0 {
        pause(uring, 1).await;
    }
}

pub async fn pause(uring: &Uring, milliseconds: u64) {
    let tasks = uring.tasks().clone();
    // The clock of the turn may be old; this one is not.
    tasks.sleep_until(Io::now_ns(uring) + milliseconds * 1_000_000).await;
}

pub async fn write(store: &NbdStore, at: u64, bytes: &[u8]) -> io::Result<()> {
    let mut page = PageBuf::zeroed(bytes.len());
    page[..bytes.len()].copy_from_slice(bytes);
    store.write_from(at, page, 0..bytes.len()).await.1
}

pub async fn read(store: &NbdStore, at: u64, len: usize) -> io::Result<Vec<u8>> {
    let (page, read) = store.read_into(at, PageBuf::zeroed(len), 0..len).await;
    read?;
    Ok(page[..len].to_vec())
}

/// A place for sockets and images.
pub struct Place {
    dir: TempDir,
}

impl Place {
    pub fn new() -> Self {
        let dir =
            if Path::new("/dev/shm").is_dir() { tempfile::tempdir_in("/dev/shm") } else { TempDir::new() };
        Self { dir: dir.unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("nbd.sock")
    }

    /// The target on this place's socket, with options as in a URI.
    pub fn target(&self, export: &str, options: &str) -> String {
        format!("nbd+unix:///{export}?socket={}&{options}", self.socket().display())
    }
}

/// Whether a program is there; says so if not.
pub fn has(tool: &str) -> bool {
    let dirs = ["/usr/bin", "/usr/sbin", "/bin", "/usr/local/bin"];
    let found = dirs.iter().any(|dir| Path::new(dir).join(tool).is_file());
    if !found {
        let thread = std::thread::current();
        eprintln!("\nskipped: needs {tool} [{}]", thread.name().unwrap_or("unnamed"));
    }
    found
}

/// A server that ends with the test.
pub struct Server {
    child: Child,
}

impl Server {
    /// Starts a program that listens on the place's socket, and waits until it takes a connection.
    pub fn start(place: &Place, program: &str, arguments: &[&str]) -> Self {
        let mut child =
            Command::new(program).args(arguments).stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + TIMEOUT;
        while UnixStream::connect(place.socket()).is_err() {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("{program} {arguments:?} ended with {status}");
            }
            assert!(Instant::now() < deadline, "{program} does not answer");
            std::thread::sleep(Duration::from_millis(2));
        }
        Self { child }
    }

    /// nbdkit on the place's socket.
    pub fn nbdkit(place: &Place, arguments: &[&str]) -> Self {
        let socket = place.socket().display().to_string();
        let _ = std::fs::remove_file(place.socket());
        Self::start(place, "nbdkit", &[&["-f", "-U", &socket], arguments].concat())
    }

    /// Stops the process, as an overloaded host does.
    pub fn freeze(&self) {
        self.signal(libc::SIGSTOP);
        until_stopped(self.child.id());
    }

    pub fn signal(&self, signal: i32) {
        // The child has not been waited for, so the number is its own.
        let signal = Signal::from_named_raw(signal).expect("a signal");
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
