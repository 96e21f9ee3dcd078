//! Directories and files below `/dev/shm`, which every local user can write to.
//!
//! Another user can make a directory or a file there before we do: with records in it that were never ours, with a
//! FIFO that makes its opener wait, or with a file that is cut while it is mapped, which ends the process by
//! SIGBUS. So a directory is used only if this user or root owns it and no other can write to it; it is opened once,
//! and its files are reached by that descriptor, so that no name is followed twice. A file is used only if it is a
//! plain file of this user or root with one name that no other user can write to, and is never waited for.
//!
//! Processes of this user and of root are not guarded against: they could end ours in other ways.

use std::ffi::{CString, OsStr};
use std::fs::{DirBuilder, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use rustix::fs::{AtFlags, Mode, OFlags, mkfifoat, openat, unlinkat};
use rustix::io::Errno;

/// Whether root or we ourselves own a file: what others own is neither believed nor removed.
pub fn is_ours(metadata: &Metadata) -> bool {
    metadata.uid() == 0 || metadata.uid() == crate::process::user()
}

fn refused(path: &Path, what: &str) -> io::Error {
    let text = format!("{} exists and is not {what}: remove it", path.display());
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// A directory that only this user or root can change.
#[derive(Debug)]
pub struct PrivateDir {
    dir: File,
    path: PathBuf,
}

impl PrivateDir {
    /// Opens the directory at `path`, and makes it and those above it first if they are not there.
    ///
    /// # Errors
    /// It cannot be made, or is not a private directory of this user or root.
    pub fn make(path: &Path) -> io::Result<Self> {
        // A directory that is there is no error here; whether it will do, its descriptor says.
        DirBuilder::new().recursive(true).mode(0o700).create(path).or_else(|error| {
            match path.symlink_metadata() {
                Ok(_) => Ok(()),
                Err(_) => Err(error),
            }
        })?;
        Self::open(path)
    }

    /// Opens the directory at `path`.
    ///
    /// # Errors
    /// There is none, or it is not a private directory of this user or root.
    pub fn open(path: &Path) -> io::Result<Self> {
        // O_PATH: the descriptor is for reaching files by it, and needs no right to list them.
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let dir = match std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path) {
            Ok(dir) => dir,
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTDIR | libc::ELOOP)) => {
                return Err(refused(path, "a directory"));
            }
            Err(error) => return Err(error),
        };
        let found = dir.metadata()?;
        if !found.is_dir() || !is_ours(&found) || found.mode() & 0o022 != 0 {
            return Err(refused(path, "a private directory of this user"));
        }
        Ok(Self { dir, path: path.to_path_buf() })
    }

    /// Its path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file of this name for reading and, with `write`, for writing.
    ///
    /// # Errors
    /// There is none (`NotFound`), or it is not a plain file of this user or root.
    pub fn file(&self, name: &str, write: bool) -> io::Result<File> {
        self.checked(name, if write { OFlags::RDWR } else { OFlags::RDONLY })
    }

    /// Opens the file of this name for writing, and makes it first if there is none.
    ///
    /// # Errors
    /// It cannot be made, or is not a plain file of this user or root.
    pub fn file_or_new(&self, name: &str) -> io::Result<File> {
        self.checked(name, OFlags::RDWR | OFlags::CREATE)
    }

    /// Makes a file of this name.
    ///
    /// # Errors
    /// There is one, or it cannot be made.
    pub fn new_file(&self, name: &str) -> io::Result<File> {
        self.checked(name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)
    }

    fn checked(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let path = self.path.join(name);
        let text = plain(name)?;
        // A FIFO is not waited for, a link not followed, a terminal does not become ours.
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match openat(&self.dir, text.as_c_str(), flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => File::from(fd),
            Err(Errno::LOOP | Errno::NXIO) => return Err(refused(&path, "a plain file")),
            Err(error) => return Err(error.into()),
        };
        let found = file.metadata()?;
        if !found.is_file() || !is_ours(&found) || found.nlink() > 1 || found.mode() & 0o022 != 0 {
            return Err(refused(&path, "a private file of this user"));
        }
        Ok(file)
    }

    /// Opens the FIFO of this name, for reading and writing, so that it never ends without another writer; makes it
    /// first if there is none. Nothing that is done with it waits.
    ///
    /// # Errors
    /// It cannot be made, or is not a FIFO of this user or root.
    pub fn fifo_or_new(&self, name: &str) -> io::Result<File> {
        let text = plain(name)?;
        match mkfifoat(&self.dir, text.as_c_str(), Mode::RUSR | Mode::WUSR) {
            Ok(()) | Err(Errno::EXIST) => self.fifo(name, OFlags::RDWR),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the FIFO of this name for writing; its reader has it open.
    ///
    /// # Errors
    /// There is none, it has no reader, or it is not a FIFO of this user or root.
    pub fn fifo_of_other(&self, name: &str) -> io::Result<File> {
        self.fifo(name, OFlags::WRONLY)
    }

    fn fifo(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let text = plain(name)?;
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(openat(&self.dir, text.as_c_str(), flags, Mode::empty())?);
        let found = file.metadata()?;
        if !found.file_type().is_fifo() || !is_ours(&found) || found.mode() & 0o022 != 0 {
            return Err(refused(&self.path.join(name), "a private FIFO of this user"));
        }
        Ok(file)
    }

    /// The directory itself, for its lock.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn readable(&self) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(openat(&self.dir, c".", flags, Mode::empty())?.into())
    }

    /// Removes the file of this name.
    ///
    /// # Errors
    /// There is none (`NotFound`), or it cannot be removed.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let text = plain(name)?;
        Ok(unlinkat(&self.dir, text.as_c_str(), AtFlags::empty())?)
    }
}

/// A name in a directory, and not a path.
fn plain(name: &str) -> io::Result<CString> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is not the name of a file"));
    if name.is_empty() || name == "." || name == ".." || name.contains('/') {
        return Err(wrong());
    }
    CString::new(OsStr::new(name).as_bytes()).map_err(|_| wrong())
}

/// A file in memory, shared with every process that maps it, until it is dropped; or memory of this process alone.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; code that accesses the memory answers for how.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps the first `len` bytes of `file`, which has them.
    ///
    /// # Errors
    /// The file is shorter: touching what it lacks would end the process; or the kernel refuses.
    pub fn of(file: &File, len: usize) -> io::Result<Self> {
        let has = file.metadata()?.len();
        if has < len as u64 || len == 0 {
            let text = format!("the file has {has} bytes and should have {len}");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        Self::map(len, libc::MAP_SHARED, file.as_raw_fd())
    }

    /// Memory of `len` zeroes without a file.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    fn map(len: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice; no memory of ours is touched.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Self { base, len })
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: nothing of no length is mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it begins.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `of` with this length; every user of the base has let go of it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("ours");
    }

    fn is_refused<T: std::fmt::Debug>(result: io::Result<T>) {
        let error = result.expect_err("it must be refused");
        assert!(error.to_string().contains("remove it"), "{error}");
    }

    #[test]
    fn only_a_private_directory_is_used() {
        let place = tempfile::tempdir().expect("a directory");
        let at = |name: &str| place.path().join(name);
        let dir = PrivateDir::make(&at("made")).expect("made");
        assert_eq!(std::fs::metadata(dir.path()).expect("there").mode() & 0o7777, 0o700);
        PrivateDir::make(&at("made")).expect("ours");
        assert_eq!(PrivateDir::open(&at("none")).expect_err("none").kind(), io::ErrorKind::NotFound);
        mode(&at("made"), 0o777);
        is_refused(PrivateDir::make(&at("made")));
        symlink(place.path(), at("link")).expect("a link");
        is_refused(PrivateDir::make(&at("link")));
        std::fs::write(at("file"), "").expect("a file");
        is_refused(PrivateDir::make(&at("file")));
    }

    #[test]
    fn only_a_private_plain_file_is_used_and_nothing_is_waited_for() {
        let place = tempfile::tempdir().expect("a directory");
        let dir = PrivateDir::make(&place.path().join("made")).expect("made");
        let at = |name: &str| dir.path().join(name);
        dir.new_file("file").expect("made");
        dir.new_file("file").expect_err("it is there");
        dir.file_or_new("file").expect("ours");
        symlink(at("file"), at("link")).expect("a link");
        mkfifoat(rustix::fs::CWD, at("fifo"), Mode::RUSR | Mode::WUSR).expect("made");
        for name in ["link", "fifo"] {
            is_refused(dir.file(name, false));
            is_refused(dir.file_or_new(name));
        }
        std::fs::hard_link(at("file"), at("second")).expect("a second name");
        is_refused(dir.file("file", true));
        dir.remove("second").expect("removed");
        mode(&at("file"), 0o666);
        is_refused(dir.file("file", true));
        for name in ["", ".", "..", "a/b", "a\0b"] {
            assert_eq!(dir.file(name, false).expect_err(name).kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn a_fifo_is_one_of_this_user_and_nothing_is_waited_for() {
        let place = tempfile::tempdir().expect("a directory");
        let dir = PrivateDir::make(&place.path().join("made")).expect("made");
        dir.fifo_of_other("bell").expect_err("there is none");
        let bell = dir.fifo_or_new("bell").expect("made");
        dir.fifo_or_new("bell").expect("ours");
        let other = dir.fifo_of_other("bell").expect("it has a reader");
        std::io::Write::write_all(&mut &other, b"x").expect("written");
        let mut heard = [0; 2];
        assert_eq!(std::io::Read::read(&mut &bell, &mut heard).expect("read"), 1);
        dir.new_file("file").expect("made");
        is_refused(dir.fifo_or_new("file"));
        mode(&dir.path().join("bell"), 0o666);
        is_refused(dir.fifo_or_new("bell"));
    }

    #[test]
    fn a_file_that_is_too_short_is_not_mapped() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4095).expect("set");
        SharedMemory::of(&file, 4096).expect_err("too short");
        file.set_len(4096).expect("set");
        let memory = SharedMemory::of(&file, 4096).expect("mapped");
        // SAFETY: inside the mapping, and this test alone has the file.
        unsafe { memory.base().as_ptr().add(4095).write(7) };
        let mut last = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut last, 4095).expect("read");
        assert_eq!(last, [7]);
    }
}
