//! Files of counters, mapped by the one process that writes them.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use tapio_sys::lock::try_lock;
pub(crate) use tapio_sys::shm::is_ours;
use tapio_sys::shm::{PrivateDir, SharedMemory};

/// The directory below which all counters live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmRoot(PathBuf);

impl ShmRoot {
    /// `TAPIO_SHM_DIR`, or `/dev/shm` without it.
    pub fn from_env() -> Self {
        match std::env::var_os("TAPIO_SHM_DIR") {
            Some(dir) if !dir.is_empty() => Self(dir.into()),
            _ => Self("/dev/shm".into()),
        }
    }

    /// A directory of one's own, for tests.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where our own pages are.
    pub fn pages(&self) -> PathBuf {
        self.0.join("tapio")
    }

    /// Where page pools are.
    pub fn pools(&self) -> PathBuf {
        self.0.join("tapio-pool")
    }

    /// Where disks on one device find each other.
    pub fn shares(&self) -> PathBuf {
        self.0.join("tapio-share")
    }

    /// Where requests of Xen guests' rings are noted that have no answer yet; made if it is not there.
    ///
    /// # Errors
    /// It cannot be made, or has another owner.
    pub fn under_way(&self) -> io::Result<PathBuf> {
        let dir = self.0.join("tapio-blkif");
        private_dir(&dir)?;
        Ok(dir)
    }

    /// Where a process publishes its disks in the published layout.
    pub fn process(&self, pid: u32) -> PathBuf {
        self.0.join(format!("td3-{pid}"))
    }

    /// Where a plugged disk publishes the state of its ring.
    pub fn vbd(&self, domid: u32, devid: u32) -> PathBuf {
        self.0.join(format!("vbd3-{domid}-{devid}"))
    }
}

/// What became of a file that is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileState {
    /// It has a name.
    Linked,
    /// It was removed: the disk is gone.
    Unlinked,
}

/// Makes a directory for counters, or accepts one that no other user can change.
pub(crate) fn private_dir(dir: &Path) -> io::Result<()> {
    PrivateDir::make(dir).map(drop)
}

/// The right to make or clean away files below a root. Held for microseconds, so that no process cleans what another is
/// just making.
#[derive(Debug)]
pub(crate) struct Turn(#[expect(dead_code, reason = "closing it gives the turn back")] File);

impl Turn {
    /// Waits for the turn; makes the directory of our pages, whose lock it is, when there is none.
    pub(crate) fn take(root: &ShmRoot) -> io::Result<Self> {
        let dir = PrivateDir::make(&root.pages())?.readable()?;
        retry_on_intr(|| flock(&dir, FlockOperation::LockExclusive))?;
        Ok(Self(dir))
    }
}

/// 64-bit words in memory that other processes may read, written by one thread.
#[derive(Debug)]
pub(crate) struct Words {
    memory: SharedMemory,
    named: Option<Named>,
}

#[derive(Debug)]
struct Named {
    dir: PrivateDir,
    name: String,
    /// Kept for its lock and for rewriting texts.
    file: File,
    /// The name may be another process's by the time the memory goes.
    removed: AtomicBool,
}

impl Words {
    /// Memory without a file, for a disk without readers outside its process.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        Ok(Self { memory: SharedMemory::anonymous(len)?, named: None })
    }

    /// A file of `len` bytes of zeroes at `path`, locked, and removed on drop. Replaces what a dead process left, and
    /// nothing else. The directory is there.
    pub(crate) fn create(_turn: &Turn, path: &Path, len: usize) -> io::Result<Self> {
        let name = path.file_name().and_then(|name| name.to_str()).ok_or(io::ErrorKind::InvalidInput)?;
        let dir = PrivateDir::open(path.parent().unwrap_or(path))?;
        if let Ok(file) = dir.file(name, false)
            && !try_lock(&file)?
        {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("a living process publishes {} already", path.display()),
            ));
        }
        match dir.remove(name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = dir.new_file(name)?;
        let made = file.set_len(len as u64).and_then(|()| match try_lock(&file)? {
            true => SharedMemory::of(&file, len),
            // Only a holder of the turn locks these files, and the turn is ours.
            false => Err(io::Error::other(format!("{} was locked by another process", path.display()))),
        });
        match made {
            Ok(memory) => {
                let named = Named { dir, name: name.to_owned(), file, removed: AtomicBool::new(false) };
                Ok(Self { memory, named: Some(named) })
            }
            Err(error) => {
                // Best effort: the error that matters is the first one.
                let _ = dir.remove(name);
                Err(error)
            }
        }
    }

    /// All words.
    pub(crate) fn as_slice(&self) -> &[AtomicU64] {
        let (base, count) = (self.memory.base().cast::<AtomicU64>(), self.memory.len() / 8);
        // SAFETY: `count` words are mapped, page aligned, until drop; every bit pattern is a valid AtomicU64.
        unsafe { std::slice::from_raw_parts(base.as_ptr(), count) }
    }

    /// Adds to a word. Not one atomic operation: there is a single writer, and a locked instruction would cost ten
    /// times as much.
    #[inline]
    pub(crate) fn add(&self, index: usize, by: u64) {
        let word = &self.as_slice()[index];
        word.store(word.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }

    /// Replaces a word.
    #[inline]
    pub(crate) fn set(&self, index: usize, to: u64) {
        self.as_slice()[index].store(to, Ordering::Relaxed);
    }

    /// Takes the file's name away while the memory stays.
    pub(crate) fn remove_file(&self) {
        if let Some(named) = &self.named
            && !named.removed.swap(true, Ordering::Relaxed)
        {
            // Gone already means that a clean-up removed it; nothing else can be done about a failure here.
            let _ = named.dir.remove(&named.name);
        }
    }

    /// The file behind the words.
    pub(crate) fn file(&self) -> Option<&File> {
        self.named.as_ref().map(|named| &named.file)
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        self.remove_file();
    }
}
