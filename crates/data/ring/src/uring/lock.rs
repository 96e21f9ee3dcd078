//! One writer for an image: its lock, and the lock's holder.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use tapio_sys::process::is_running;

/// Between two attempts to get a lock that another has.
pub const LOCK_RETRY: Duration = Duration::from_millis(10);
/// How long to wait for a lock whose holder lives: it may have been killed a moment ago.
const HELD_MAX: Duration = Duration::from_secs(2);
/// How long a lock is asked for that no other living process is known to have: the kernel ends the operations of a
/// killed process, and with them its locks, after the process.
const LEFT_MAX: Duration = Duration::from_secs(5);

/// The lock of a writer on an image: two writers would destroy it. Released when dropped.
#[derive(Debug)]
pub struct WriterLock(File);

impl WriterLock {
    /// Takes the lock on `file`.
    ///
    /// # Errors
    /// EBUSY when another has it.
    pub fn take(file: &File) -> io::Result<Self> {
        let lock = Self(file.try_clone()?);
        // SAFETY: `flock` takes no pointers.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
            return Ok(lock);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EWOULDBLOCK) => Err(io::Error::from_raw_os_error(libc::EBUSY)),
            // A file system without locks (some network ones) is no reason to refuse a disk.
            Some(libc::EOPNOTSUPP | libc::ENOLCK | libc::ENOSYS | libc::EINVAL) => Ok(lock),
            _ => Err(error),
        }
    }

    /// Takes the lock on `file`, which is at `path`, and waits for it as long as [`lock_may_come`] says.
    ///
    /// # Errors
    /// EBUSY when another still has it.
    pub fn take_when_free(file: &File, path: &Path) -> io::Result<Self> {
        let begin = Instant::now();
        loop {
            match Self::take(file) {
                Err(error)
                    if error.raw_os_error() == Some(libc::EBUSY) && lock_may_come(path, begin.elapsed()) =>
                {
                    std::thread::sleep(LOCK_RETRY);
                }
                taken => return taken,
            }
        }
    }
}

impl Drop for WriterLock {
    /// Not left to the closing of the file: a child that was forked meanwhile, and has not got to its own program yet,
    /// holds a copy of the descriptor and with it the lock.
    fn drop(&mut self) {
        // SAFETY: `flock` takes no pointers. Unlocking what was never locked does nothing.
        unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}

/// Whether the lock on the image at `path` is worth asking for again, [`LOCK_RETRY`] later, when it was asked for in
/// vain for the time `waited`.
pub fn lock_may_come(path: &Path, waited: Duration) -> bool {
    waited < HELD_MAX || (waited < LEFT_MAX && !matches!(LockHolder::of(path), LockHolder::Other(_)))
}

/// The holder of an image's lock, in words that follow its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockHolder {
    /// This process: another disk of it, or requests of a moment ago.
    This,
    /// Another process, which lives.
    Other(u32),
    /// A process that has died, whose operations the kernel has not ended yet.
    Gone(u32),
    /// A holder out of sight: a process on another host, outside this container, or on a file system that has other
    /// numbers for locks.
    Unseen,
}

impl LockHolder {
    /// The holder of the lock on the file at `path`, by `/proc/locks`.
    pub fn of(path: &Path) -> Self {
        let Ok(file) = fs::metadata(path) else { return Self::Unseen };
        let Ok(locks) = fs::read_to_string("/proc/locks") else { return Self::Unseen };
        let place = (libc::major(file.dev()), libc::minor(file.dev()), file.ino());
        match locks.lines().find_map(|line| pid_of(line, place)) {
            None => Self::Unseen,
            Some(pid) if pid == std::process::id() => Self::This,
            Some(pid) if is_running(pid) => Self::Other(pid),
            Some(pid) => Self::Gone(pid),
        }
    }
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::This => write!(f, "is open for writing in this process already: close that disk first"),
            Self::Other(pid) => {
                write!(f, "is open for writing in another process ({pid}): close it there first")
            }
            Self::Gone(pid) => write!(
                f,
                "is locked by process {pid}, which has died, but its requests to the storage have not ended: \
                 see whether the storage hangs, and try again"
            ),
            Self::Unseen => write!(
                f,
                "is open for writing in another process, which cannot be seen from here: close it there first"
            ),
        }
    }
}

/// The process of a line of `/proc/locks` that is about the file with this device and inode:
/// `1: FLOCK  ADVISORY  WRITE 708 fe:01:1234 0 EOF`.
fn pid_of(line: &str, (major, minor, inode): (u32, u32, u64)) -> Option<u32> {
    let mut words = line.split_ascii_whitespace().skip(1);
    if words.next()? != "FLOCK" {
        return None;
    }
    let (pid, place) = (words.nth(2)?, words.next()?);
    (place == format!("{major:02x}:{minor:02x}:{inode}")).then(|| pid.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_a_lock_names_its_process() {
        let place = (0xfe, 1, 1234);
        assert_eq!(pid_of("1: FLOCK  ADVISORY  WRITE 708 fe:01:1234 0 EOF", place), Some(708));
        for other in [
            "1: -> FLOCK  ADVISORY  WRITE 708 fe:01:1234 0 EOF",
            "2: POSIX  ADVISORY  WRITE 708 fe:01:1234 0 EOF",
            "3: FLOCK  ADVISORY  WRITE 708 fe:01:12345 0 EOF",
            "4: FLOCK  ADVISORY  WRITE 708 fe:02:1234 0 EOF",
            "5: FLOCK  ADVISORY  WRITE",
            "",
        ] {
            assert_eq!(pid_of(other, place), None, "{other}");
        }
    }

    #[test]
    fn a_process_lives_until_it_has_ended() {
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        assert!(is_running(std::process::id()));
        // Ended, and not yet asked for by its parent.
        let mut info = [0u8; 128];
        // SAFETY: the memory is ours and as long as a `siginfo_t`; the child is not waited for, only looked at.
        let looked = unsafe {
            libc::waitid(libc::P_PID, child.id(), info.as_mut_ptr().cast(), libc::WEXITED | libc::WNOWAIT)
        };
        assert_eq!(looked, 0);
        assert!(!is_running(child.id()));
        child.wait().expect("ended");
        assert!(!is_running(child.id()));
    }

    #[test]
    fn a_lock_of_an_unknown_holder_is_asked_for_longer_but_not_for_ever() {
        let nowhere = Path::new("/nowhere/at/all");
        assert!(lock_may_come(nowhere, HELD_MAX));
        assert!(!lock_may_come(nowhere, LEFT_MAX));
    }
}
