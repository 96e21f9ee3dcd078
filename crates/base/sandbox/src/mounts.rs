//! Which files there are at all: a root of a process's own, in which a few files and directories of the host are shown
//! and everything else is missing.
//!
//! A [`Root`] is written down as steps in the parent; the child takes them, which allocates nothing. The new root is a
//! file system in memory. The old one is detached as a whole, so a guest that lives on holds no mount of the host: a
//! storage repository that is unmounted later is unmounted everywhere.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::ptr::{null, null_mut};

use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Uid, chown, mkdir, mknodat, open, symlink};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{chdir, pivot_root, umask};

/// What may be done below a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading, and starting programs.
    Read,
    /// Reading and writing, but no programs.
    Write,
    /// As [`Access::Write`], for nodes of devices.
    Device,
}

#[derive(Debug)]
enum Step {
    MakeDir(CString),
    MakeFile(CString),
    Link { to: CString, at: CString },
    Mount { from: CString, at: CString, flags: libc::c_ulong },
    Node { at: CString, mode: libc::mode_t, device: libc::dev_t, user: (u32, u32) },
    Memory { at: CString, options: CString },
    Processes { at: CString },
}

/// A root to be made.
#[derive(Debug)]
pub struct Root {
    at: PathBuf,
    at_name: CString,
    options: CString,
    steps: Vec<Step>,
    made: Vec<PathBuf>,
    shown: Vec<PathBuf>,
}

fn name(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

impl Root {
    /// An empty one. `at` is an empty directory of the host, over which it is put for the process alone.
    ///
    /// # Errors
    /// The path holds a NUL.
    pub fn new(at: &Path) -> io::Result<Self> {
        let options = CString::new("mode=755,size=1m,nr_inodes=4096")?;
        let at_name = name(at)?;
        let (steps, made, shown) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { at: at.to_path_buf(), at_name, options, steps, made, shown })
    }

    /// Where a path of the new root is before it is the root.
    fn inside(&self, path: &Path) -> PathBuf {
        self.at.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn make_dirs(&mut self, path: &Path) -> io::Result<()> {
        let mut whole = PathBuf::from("/");
        for part in path.components() {
            let Component::Normal(part) = part else { continue };
            whole.push(part);
            if !self.made.contains(&whole) {
                self.steps.push(Step::MakeDir(name(&self.inside(&whole))?));
                self.made.push(whole.clone());
            }
        }
        Ok(())
    }

    /// Shows a file or a directory of the host at its own path, which has no links; mounts below it are not shown.
    ///
    /// # Errors
    /// It is not there.
    pub fn show(&mut self, path: &Path, access: Access) -> io::Result<()> {
        let is_dir = std::fs::metadata(path)?.is_dir();
        let at = name(&self.inside(path))?;
        // What is shown already has it; nothing may be made there, because it would be made on the host.
        if self.shown.iter().any(|shown| path.starts_with(shown)) {
            if access == Access::Read {
                return Ok(());
            }
        } else if is_dir {
            self.make_dirs(path)?;
        } else {
            self.make_dirs(path.parent().unwrap_or(Path::new("/")))?;
            self.steps.push(Step::MakeFile(at.clone()));
        }
        self.shown.push(path.to_path_buf());
        let flags = match access {
            Access::Read => libc::MS_RDONLY | libc::MS_NODEV,
            Access::Write => libc::MS_NOEXEC | libc::MS_NODEV,
            Access::Device => libc::MS_NOEXEC,
        };
        self.steps.push(Step::Mount { from: name(path)?, at, flags: flags | libc::MS_NOSUID });
        Ok(())
    }

    /// Makes what the host has there: the same link, or the directory, readable. Nothing where the host has nothing.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn show_as_is(&mut self, path: &Path) -> io::Result<()> {
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(data) if data.file_type().is_symlink() => {
                self.make_dirs(path.parent().unwrap_or(Path::new("/")))?;
                let to = name(&std::fs::read_link(path)?)?;
                self.steps.push(Step::Link { to, at: name(&self.inside(path))? });
                Ok(())
            }
            Ok(_) => self.show(path, Access::Read),
        }
    }

    /// A node of a device of the host, for this user alone, whatever its node on the host allows.
    ///
    /// # Errors
    /// It is not there.
    pub fn device(&mut self, path: &Path, uid: u32, gid: u32) -> io::Result<()> {
        let data = std::fs::metadata(path)?;
        self.make_dirs(path.parent().unwrap_or(Path::new("/")))?;
        let mode = (data.mode() & libc::S_IFMT) | 0o600;
        self.steps.push(Step::Node {
            at: name(&self.inside(path))?,
            mode,
            device: data.rdev(),
            user: (uid, gid),
        });
        Ok(())
    }

    /// A directory in memory, of this user alone and empty, that holds at most `len` bytes.
    ///
    /// # Errors
    /// The path holds a NUL.
    pub fn memory(&mut self, path: &Path, len: u64, uid: u32, gid: u32) -> io::Result<()> {
        self.make_dirs(path)?;
        let options = CString::new(format!("mode=700,size={len},uid={uid},gid={gid}"))?;
        self.steps.push(Step::Memory { at: name(&self.inside(path))?, options });
        Ok(())
    }

    /// `/proc`, in which a user sees its own processes alone. Kernels before 5.8, where the host's own would change
    /// with it, get none.
    ///
    /// # Errors
    /// The kernel does not say what it is.
    pub fn processes(&mut self) -> io::Result<()> {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|word| word.parse().unwrap_or(0));
        let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if version < (5, 8) {
            return Ok(());
        }
        let path = Path::new("/proc");
        self.make_dirs(path)?;
        self.steps.push(Step::Processes { at: name(&self.inside(path))? });
        Ok(())
    }

    /// Makes it, and makes it the root of this process, whose working directory it is then; networks, names and
    /// queues of the host are gone, too. Needs the rights of root. Allocates nothing; answers which step failed.
    ///
    /// # Errors
    /// The kernel's. The process is in no state to go on.
    pub fn enter(&self) -> Result<(), (&'static str, io::Error)> {
        let flags = libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWNET | libc::CLONE_NEWUTS;
        // SAFETY: only numbers are passed.
        check(unsafe { libc::unshare(flags) }).map_err(|error| ("namespaces", error))?;
        let all = libc::MS_REC | libc::MS_PRIVATE;
        mount(None, c"/", None, all, None).map_err(|error| ("mounts of its own", error))?;
        // Not without devices: nodes lie in it, and none can be made once it is closed.
        let memory = libc::MS_NOSUID;
        mount(Some(c"tapio"), &self.at_name, Some(c"tmpfs"), memory, Some(&self.options))
            .map_err(|error| ("a root", error))?;
        // Directories of the new root are root's, and the user that comes passes through them.
        let before = umask(Mode::WGRP | Mode::WOTH);
        for step in &self.steps {
            step.take()?;
        }
        umask(before);
        let failed = |step| move |error: Errno| (step, error.into());
        chdir(self.at_name.as_c_str()).map_err(failed("entering the root"))?;
        // The old root is put over the new one, and taken away from there: pivot_root(2), "pivot_root(".", ".")".
        pivot_root(c".", c".").map_err(failed("changing the root"))?;
        unmount(c".", UnmountFlags::DETACH).map_err(failed("leaving the host's root"))?;
        chdir(c"/").map_err(failed("entering the root"))?;
        let fixed = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | memory;
        mount(None, c"/", None, fixed, None).map_err(|error| ("closing the root", error))
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn mount(
    from: Option<&CStr>,
    at: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    options: Option<&CStr>,
) -> io::Result<()> {
    let of = |text: Option<&CStr>| text.map_or(null(), CStr::as_ptr);
    let options = options.map_or(null_mut(), |text| text.as_ptr().cast_mut().cast());
    // SAFETY: all texts end with NUL or are absent; the kernel only reads them.
    check(unsafe { libc::mount(of(from), at.as_ptr(), of(kind), flags, options) })
}

impl Step {
    fn take(&self) -> Result<(), (&'static str, io::Error)> {
        match self {
            Self::MakeDir(at) => match mkdir(at.as_c_str(), Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => Ok(()),
                Err(error) => Err(("making a directory", error.into())),
            },
            Self::MakeFile(at) => {
                let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
                let made = open(at.as_c_str(), flags, Mode::from_raw_mode(0o600));
                made.map(drop).map_err(|error| ("making a file", error.into()))
            }
            Self::Link { to, at } => {
                symlink(to.as_c_str(), at.as_c_str()).map_err(|error| ("a link", error.into()))
            }
            Self::Mount { from, at, flags } => {
                mount(Some(from), at, None, libc::MS_BIND, None)
                    .map_err(|error| ("showing a path", error))?;
                let flags = flags | libc::MS_REMOUNT | libc::MS_BIND;
                mount(None, at, None, flags, None).map_err(|error| ("narrowing a path", error))
            }
            Self::Node { at, mode, device, user: (uid, gid) } => {
                let (kind, mode) = (FileType::from_raw_mode(*mode), Mode::from_raw_mode(*mode));
                mknodat(CWD, at.as_c_str(), kind, mode, *device)
                    .and_then(|()| chown(at.as_c_str(), Some(Uid::from_raw(*uid)), Some(Gid::from_raw(*gid))))
                    .map_err(|error| ("a device's node", error.into()))
            }
            Self::Memory { at, options } => {
                let flags = libc::MS_NOSUID | libc::MS_NODEV;
                mount(Some(c"tapio"), at, Some(c"tmpfs"), flags, Some(options))
                    .map_err(|error| ("memory", error))
            }
            Self::Processes { at } => {
                let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
                mount(Some(c"proc"), at, Some(c"proc"), flags, Some(c"hidepid=2"))
                    .map_err(|error| ("/proc", error))
            }
        }
    }
}
