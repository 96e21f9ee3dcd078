//! Directories that a test may fill.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A directory that goes away with the test.
///
/// Paths stay short because UNIX socket names end at 107 bytes.
#[derive(Debug)]
pub struct Scratch {
    dir: TempDir,
}

impl Scratch {
    /// On a disk file system: O_DIRECT, holes and flushes behave as in real use. Visible to the User-mode Linux guest.
    #[track_caller]
    pub fn on_disk() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// On a tmpfs, for speed. The User-mode Linux guest cannot see it: its own /dev hides /dev/shm.
    #[track_caller]
    pub fn in_memory() -> Self {
        Self::below(Path::new("/dev/shm"))
    }

    /// In a directory that exists.
    #[track_caller]
    pub fn below(parent: &Path) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("tapio-")
            .tempdir_in(parent)
            .unwrap_or_else(|error| panic!("cannot make a directory in {}: {error}", parent.display()));
        Self { dir }
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// It stays when this is dropped, for a look at what is in it.
    pub fn keep(&mut self) {
        self.dir.disable_cleanup(true);
    }

    /// A path in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A sparse raw image of `len` bytes.
    #[track_caller]
    pub fn raw_image(&self, name: &str, len: u64) -> PathBuf {
        let path = self.join(name);
        let file =
            std::fs::File::create(&path).unwrap_or_else(|e| panic!("cannot create {}: {e}", path.display()));
        file.set_len(len).unwrap_or_else(|e| panic!("cannot size {}: {e}", path.display()));
        path
    }
}

/// A small tmpfs of its own, for the tests of a full disk. Needs root.
#[derive(Debug)]
pub struct SmallFileSystem {
    path: PathBuf,
    _scratch: Scratch,
}

impl SmallFileSystem {
    /// Mounts a tmpfs of `len` bytes. `Err` says why not, for a skip message.
    pub fn mount(len: u64) -> Result<Self, String> {
        let scratch = Scratch::on_disk();
        let path = scratch.join("small");
        std::fs::create_dir(&path).map_err(|error| format!("mkdir {}: {error}", path.display()))?;
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={len}"), "tapio-small"]).arg(&path);
        let finished = crate::process::run(&mut mount);
        if !finished.status.success() {
            return Err(format!("may not mount a tmpfs here: {}", finished.stderr.trim()));
        }
        Ok(Self { path, _scratch: scratch })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        // Lazy: a process that still holds a file there is killed by its own guard, perhaps after this one.
        let _ = crate::process::run(std::process::Command::new("umount").arg("-l").arg(&self.path));
    }
}
