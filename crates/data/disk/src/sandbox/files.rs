//! Which files the process may touch, by Landlock (Linux 5.13 and later; without it, the permissions of the files
//! alone decide).
//!
//! Nothing may be executed anywhere, no device node made. Without a list of directories the system's own ones are
//! read only and everything else is open, because images may lie anywhere and the next one is not known yet. With a
//! list (`--allow`) these directories, those of sockets and statistics, and a few files that the process itself needs
//! are all there is.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tapio_control::{ControlError, Result};
use tapio_sandbox::landlock::{Ruleset, right, version};

const FILE_WRITE: u64 = right::READ_FILE | right::WRITE_FILE | right::TRUNCATE;
const READ: u64 = right::READ_FILE | right::READ_DIR;
const WRITE: u64 = READ
    | FILE_WRITE
    | right::REMOVE_DIR
    | right::REMOVE_FILE
    | right::MAKE_DIR
    | right::MAKE_REG
    | right::MAKE_SOCK
    | right::MAKE_FIFO;
/// Where sockets are made: nothing else can be made, read or written there.
const SOCKETS: u64 = right::READ_DIR | right::MAKE_SOCK | right::REMOVE_FILE;
const HANDLED: u64 = WRITE | right::EXECUTE | right::MAKE_CHAR | right::MAKE_BLOCK | right::MAKE_SYM;

/// Directories of the system that hold no images.
const SYSTEM: &[&str] =
    &["/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sbin", "/sys", "/usr"];
/// What the process itself reads: how idle the host is, names of users, time zones.
const READ_ALWAYS: &[&str] = &["/proc", "/sys", "/etc", "/usr/share/zoneinfo"];
/// What it writes: nothing into nothing, lines into the system's log; and the pages and events of Xen guests.
const WRITE_ALWAYS: &[&str] =
    &["/dev/null", "/dev/log", "/run/systemd/journal", "/dev/xen/gntdev", "/dev/xen/evtchn"];

fn failed(what: &str, error: &io::Error) -> ControlError {
    ControlError::io(format_args!("restricting the files it may touch: {what}"), error)
        .next("start it with '--sandbox off' where the host does not allow this")
}

/// Directories that the process cannot do without.
#[derive(Clone, Debug, Default)]
pub struct Own {
    /// Of the control socket, of statistics and of intent logs.
    pub files: Vec<PathBuf>,
    /// Of the sockets of front ends.
    pub sockets: Vec<PathBuf>,
    /// Files that are only read: of the configuration and the key of a Ceph cluster.
    pub read: Vec<PathBuf>,
}

/// Restricts this thread and all it starts. `allowed` are the directories of images, all but the system's when there
/// are none. Answers false where the kernel cannot.
///
/// # Errors
/// A directory that was named is not there; the kernel refuses.
pub fn restrict(own: &Own, allowed: &[PathBuf]) -> Result<bool> {
    for dir in allowed {
        fs::metadata(dir).map_err(|error| failed(&format!("--allow {}", dir.display()), &error))?;
    }
    let Some(version) = version() else { return Ok(false) };
    let ruleset = Ruleset::new(version, HANDLED, false).map_err(|error| failed("the rules", &error))?;
    let allow = |path: &Path, rights: u64| {
        let name = CString::new(path.as_os_str().as_bytes());
        let allowed = name.map_err(io::Error::from).and_then(|name| ruleset.allow(&name, rights));
        allowed.map_err(|error| failed(&path.display().to_string(), &error))
    };
    for dir in &own.files {
        allow(dir, WRITE)?;
    }
    for dir in &own.sockets {
        allow(dir, SOCKETS)?;
    }
    for path in own.read.iter().filter(|path| path.exists()) {
        allow(path, right::READ_FILE)?;
    }
    for path in READ_ALWAYS {
        allow(Path::new(path), READ)?;
    }
    for path in WRITE_ALWAYS {
        allow(Path::new(path), FILE_WRITE)?;
    }
    if allowed.is_empty() {
        for path in top_level() {
            let is_system = SYSTEM.iter().any(|system| Path::new(system) == path);
            allow(&path, if is_system { READ } else { WRITE })?;
        }
    } else {
        for dir in allowed {
            allow(dir, WRITE)?;
        }
    }
    ruleset.enforce().map_err(|error| failed("the rules", &error))?;
    Ok(true)
}

/// What lies in the root directory; links among it lead to others of these.
fn top_level() -> Vec<PathBuf> {
    let entries = fs::read_dir("/").into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_symlink()))
        .map(|entry| entry.path())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_of_files_are_those_that_the_kernel_takes_for_files() {
        assert_eq!(READ & FILE_WRITE, right::READ_FILE);
        assert_eq!(FILE_WRITE & !HANDLED, 0);
        assert_eq!(HANDLED & !WRITE & right::EXECUTE, right::EXECUTE);
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        let error = restrict(&Own::default(), &[PathBuf::from("/no/such/directory")]).expect_err("not there");
        assert!(error.to_string().contains("/no/such/directory"), "{error}");
    }

    /// On a thread of its own: restrictions hold for a thread and its children alone.
    #[test]
    fn what_is_not_listed_cannot_be_touched() {
        let Some(_) = version() else { return };
        let dir = tempfile::tempdir().expect("temporary directory");
        let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
        fs::create_dir_all(&inside).expect("made");
        fs::create_dir_all(&outside).expect("made");
        fs::write(outside.join("secret"), "s").expect("written");
        let run = move || {
            rustix::thread::set_no_new_privs(true).expect("set");
            assert_eq!(restrict(&Own::default(), std::slice::from_ref(&inside)), Ok(true));
            fs::write(inside.join("image"), "i").expect("inside");
            let refused = fs::read(outside.join("secret")).expect_err("outside");
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            assert!(fs::write(outside.join("new"), "n").is_err());
            assert!(fs::write("/etc/tapio-test", "n").is_err());
            let started = std::process::Command::new("/bin/true").status();
            assert!(started.is_err(), "{started:?}");
        };
        std::thread::spawn(run).join().expect("as promised");
    }
}
