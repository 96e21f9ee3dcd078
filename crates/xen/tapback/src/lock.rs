//! One tapback for a kind of back end: the process that serves it holds a lock, which others can ask for.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use tapio_control::{ControlError, Errno, RunDir};
use tapio_sys::successor::{pid_in, take_lock};

/// Held as long as the program serves.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

fn path(run: &RunDir, name: &str) -> PathBuf {
    run.path().join(format!("tapback-{name}.lock"))
}

impl Lock {
    /// Takes the lock of a kind of back end and writes this process's number into it.
    ///
    /// # Errors
    /// `EBUSY` if another process serves it; the message has its number.
    pub fn take(run: &RunDir, name: &str) -> Result<Self, ControlError> {
        run.create()?;
        let path = path(run, name);
        let failed =
            |error: &io::Error| ControlError::io(format_args!("cannot lock {}", path.display()), error);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(&path)
            .map_err(|error| failed(&error))?;
        match take_lock(&file) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let process = pid_in(&file).map_or_else(String::new, |pid| format!(" (process {pid})"));
                return Err(ControlError::new(
                    Errno::EBUSY,
                    format!("another tapback serves {name}{process}"),
                )
                .next("end that one, or give this one another --backend-name"));
            }
            Err(TryLockError::Error(error)) => return Err(failed(&error)),
        }
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        written.map_err(|error| failed(&error))?;
        Ok(Self { _file: file })
    }
}

/// Whether a process serves a kind of back end; its number, if the process has written it.
pub fn serving(run: &RunDir, name: &str) -> Option<Option<u32>> {
    let file = File::open(path(run, name)).ok()?;
    file.try_lock_shared().is_err().then(|| pid_in(&file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_serves_and_the_others_are_told_which() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::new(dir.path().join("run"));
        assert_eq!(serving(&run, "vbd3"), None);
        let lock = Lock::take(&run, "vbd3").unwrap();
        let own = std::process::id();
        assert_eq!(serving(&run, "vbd3"), Some(Some(own)));
        let error = Lock::take(&run, "vbd3").unwrap_err();
        assert_eq!(error.errno, Errno::EBUSY);
        assert!(error.message.contains(&own.to_string()), "{error}");
        assert!(Lock::take(&run, "other").is_ok());
        drop(lock);
        assert_eq!(serving(&run, "vbd3"), None);
        assert!(Lock::take(&run, "vbd3").is_ok());
    }
}
