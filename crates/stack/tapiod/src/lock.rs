//! One daemon for one state.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use tapio_sys::successor::{pid_in, take_lock};

/// File that a daemon locks as long as it runs, with its process number in it.
const FILE: &str = "tapiod.lock";

/// The lock; falls with the process, however that ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

fn path(state_dir: &Path) -> PathBuf {
    state_dir.join(FILE)
}

fn open(path: &Path) -> Result<File, String> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    file.map_err(|error| format!("{}: {error}", path.display()))
}

/// Takes the lock.
///
/// # Errors
/// A sentence: another daemon has it, or the file cannot be opened.
pub fn take(state_dir: &Path) -> Result<Lock, String> {
    let path = path(state_dir);
    let file = open(&path)?;
    match take_lock(&file) {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let pid = pid_in(&file).map_or(String::new(), |pid| format!(" (process {pid})"));
            return Err(format!("{}: another tapiod{pid} runs on this state; end it first", path.display()));
        }
        Err(TryLockError::Error(error)) => return Err(format!("{}: {error}", path.display())),
    }
    // Of one length and in its place: what a full file system has room for already.
    let write = |mut file: &File| {
        file.rewind()?;
        writeln!(file, "{:<10}", std::process::id())
    };
    match write(&file) {
        Err(error) if error.kind() != std::io::ErrorKind::StorageFull => {
            return Err(format!("{}: {error}", path.display()));
        }
        // The lock holds; the number is for people and for SIGHUP.
        Err(error) => tracing::warn!("{}: {error}", path.display()),
        Ok(()) => {}
    }
    Ok(Lock { _file: file })
}

/// The daemon that runs on this state; none where none does.
///
/// # Errors
/// The file cannot be read.
pub fn holder(state_dir: &Path) -> Result<Option<u32>, String> {
    let path = path(state_dir);
    if !path.exists() {
        return Ok(None);
    }
    let file = open(&path)?;
    match file.try_lock_shared() {
        Ok(()) => Ok(None),
        Err(TryLockError::WouldBlock) => Ok(pid_in(&file)),
        Err(TryLockError::Error(error)) => Err(format!("{}: {error}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_it_names_the_holder() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(holder(dir.path()), Ok(None));
        let lock = take(dir.path()).expect("free");
        let pid = std::process::id();
        assert!(take(dir.path()).expect_err("taken").contains(&format!("process {pid}")));
        assert_eq!(holder(dir.path()), Ok(Some(pid)));
        drop(lock);
        assert_eq!(holder(dir.path()), Ok(None));
        take(dir.path()).expect("free again");
    }

    /// A program that a daemon was starting when it was killed has the lock for a moment.
    #[test]
    fn the_lock_of_a_daemon_that_was_killed_is_waited_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let left = take(dir.path()).expect("free");
        // More than PID_MAX_LIMIT, so no process has this number. A process started here would have the locks of the
        // other tests for a moment.
        let pid = (1 << 22) + 1;
        std::fs::write(path(dir.path()), format!("{pid:<10}\n")).expect("its number");
        let ends = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(300));
            drop(left);
        });
        take(dir.path()).expect("it is free in the end");
        ends.join().expect("it ends");
    }
}
