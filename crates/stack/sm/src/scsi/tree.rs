//! The kernel's tree of devices, as files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// `/sys`, `/dev` and `/proc`, or a test's double of them. Every file or directory that is looked at counts, so that a
/// test can compare the work for the first SR of a host and for the 256th.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    root: PathBuf,
    looks: Arc<AtomicU64>,
}

/// No attribute of a SCSI device is longer; the tables of sockets in `/proc` are.
const LEN_MAX: usize = 4 << 20;

impl Tree {
    /// Below `root`, which is `/` on a host.
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_path_buf(), looks: Arc::default() }
    }

    /// `/sys/REST`.
    pub(crate) fn sys(&self, rest: &str) -> PathBuf {
        self.root.join("sys").join(rest)
    }

    /// `/dev/REST`.
    pub(crate) fn dev(&self, rest: &str) -> PathBuf {
        self.root.join("dev").join(rest)
    }

    /// Another place of this host.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// How many files and directories were looked at so far.
    #[cfg(test)]
    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    fn look(&self) {
        self.looks.fetch_add(1, Ordering::Relaxed);
    }

    /// What a file holds; none where it is not there or is not readable, as an attribute that a device lacks.
    pub(crate) fn bytes(&self, path: &Path) -> Option<Vec<u8>> {
        self.look();
        fs::read(path).ok().filter(|bytes| bytes.len() <= LEN_MAX)
    }

    /// The same as text, without blanks around it.
    pub(crate) fn text(&self, path: &Path) -> Option<String> {
        self.bytes(path).map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The names in a directory, sorted; none where it is not there.
    pub(crate) fn names(&self, path: &Path) -> Vec<String> {
        self.look();
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Where a link leads.
    pub(crate) fn real(&self, path: &Path) -> Option<PathBuf> {
        self.look();
        fs::canonicalize(path).ok()
    }

    /// Whether something is there.
    pub(crate) fn is_there(&self, path: &Path) -> bool {
        self.look();
        path.exists()
    }

    /// Tells the kernel something by an attribute.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        self.look();
        fs::write(path, text)
    }
}
