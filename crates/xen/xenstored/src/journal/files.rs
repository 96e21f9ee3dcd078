//! The few things that a journal does with files, so that a test can stop in the middle of each.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tapio_sys::successor;

/// A directory.
pub trait Files {
    /// Names of its files.
    ///
    /// # Errors
    /// It cannot be read.
    fn names(&mut self) -> io::Result<Vec<String>>;
    /// All of a file.
    ///
    /// # Errors
    /// It cannot be read.
    fn read(&mut self, name: &str) -> io::Result<Vec<u8>>;
    /// A file of this content, in the place of one that may be there.
    ///
    /// # Errors
    /// It cannot be written.
    fn write_new(&mut self, name: &str, bytes: &[u8]) -> io::Result<()>;
    /// Adds to the end of a file that was written new.
    ///
    /// # Errors
    /// It cannot be written.
    fn append(&mut self, name: &str, bytes: &[u8]) -> io::Result<()>;
    /// The content of a file survives a power cut from now on.
    ///
    /// # Errors
    /// The disk refuses.
    fn sync(&mut self, name: &str) -> io::Result<()>;
    /// Gives a file another name.
    ///
    /// # Errors
    /// It cannot be done.
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    ///
    /// # Errors
    /// It cannot be done.
    fn remove(&mut self, name: &str) -> io::Result<()>;
    /// The names of the files survive a power cut from now on.
    ///
    /// # Errors
    /// The disk refuses.
    fn sync_names(&mut self) -> io::Result<()>;
}

/// A directory of the host, for one daemon at a time.
#[derive(Debug)]
pub struct Dir {
    path: PathBuf,
    /// Holds the lock.
    _lock: File,
    /// The file that was written or appended to last.
    last: Option<(String, File)>,
}

impl Dir {
    /// Makes the directory if need be.
    ///
    /// # Errors
    /// It cannot be made, or another daemon has it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let failed = |error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("cannot use the state directory {}: {error}", path.display()),
            )
        };
        fs::create_dir_all(path).map_err(failed)?;
        let lock = File::options().create(true).append(true).open(path.join("lock")).map_err(failed)?;
        match successor::take_lock(&lock) {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                let what = format!(
                    "the state directory {} is another daemon's: end it, or name another with --state-dir",
                    path.display()
                );
                return Err(io::Error::other(what));
            }
            Err(fs::TryLockError::Error(error)) => return Err(failed(error)),
        }
        Ok(Self { path: path.to_owned(), _lock: lock, last: None })
    }

    fn file(&mut self, name: &str) -> io::Result<&mut File> {
        if self.last.as_ref().is_none_or(|(last, _)| last != name) {
            let file = File::options().append(true).open(self.path.join(name))?;
            self.last = Some((name.to_owned(), file));
        }
        self.last.as_mut().map(|(_, file)| file).ok_or_else(|| io::Error::other("no file"))
    }
}

impl Files for Dir {
    fn names(&mut self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            names.extend(entry?.file_name().into_string());
        }
        Ok(names)
    }

    fn read(&mut self, name: &str) -> io::Result<Vec<u8>> {
        fs::read(self.path.join(name))
    }

    fn write_new(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut file = File::create(self.path.join(name))?;
        file.write_all(bytes)?;
        self.last = None;
        Ok(())
    }

    fn append(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.file(name)?.write_all(bytes)
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        self.file(name)?.sync_data()
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.last = None;
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn sync_names(&mut self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}
