//! How a process takes the place of one that was killed.
//!
//! A process that starts programs is two for a moment: between `fork` and `exec` the second one has its sockets and its
//! locks (`flock`), and a kill of the first does not end the second. A client can even connect to such a socket. So a
//! successor that finds a lock held or a socket answered looks whether the holder runs, and waits if it does not.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::process::is_running;
use crate::socket::peer;

/// How long a successor waits. The program that is being started needs a processor for a moment, on a busy host too.
const LEFT_MAX: Duration = Duration::from_secs(5);

/// How long a successor waits for a holder that it cannot name.
const UNKNOWN_MAX: Duration = Duration::from_secs(2);

const EVERY: Duration = Duration::from_millis(5);

/// The holder of what a successor needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// This process, as the lock or the socket says.
    Process(u32),
    /// It does not say.
    Unknown,
}

/// Tries until it succeeds, fails for another reason, or a holder of `error` is one that stays.
///
/// # Errors
/// The last one of `attempt`.
pub fn take_over<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    mut holder: impl FnMut(&E) -> Option<Holder>,
) -> Result<T, E> {
    let begun = Instant::now();
    loop {
        let error = match attempt() {
            Ok(taken) => return Ok(taken),
            Err(error) => error,
        };
        let may_go = match holder(&error) {
            None => false,
            Some(Holder::Process(pid)) => !is_running(pid) && begun.elapsed() < LEFT_MAX,
            Some(Holder::Unknown) => begun.elapsed() < UNKNOWN_MAX,
        };
        if !may_go {
            return Err(error);
        }
        thread::sleep(EVERY);
    }
}

/// Locks a file (`flock`) that its holder writes its number into, if it does; see [`pid_in`].
///
/// # Errors
/// `WouldBlock` where a process that runs holds the lock.
pub fn take_lock(file: &File) -> Result<(), TryLockError> {
    let holder = |error: &TryLockError| match error {
        TryLockError::WouldBlock => Some(pid_in(file).map_or(Holder::Unknown, Holder::Process)),
        TryLockError::Error(_) => None,
    };
    take_over(|| file.try_lock(), holder)
}

/// The process number at the beginning of a lock file; none where it has none.
pub fn pid_in(mut file: &File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok().filter(|pid| *pid > 0)
}

/// Whether a process serves the UNIX socket at `path`. It may have to wait for what a killed one left.
pub fn is_served(path: &Path) -> bool {
    let begun = Instant::now();
    loop {
        let Ok(mut stream) = UnixStream::connect(path) else { return false };
        let left = match listener(&stream) {
            Holder::Process(pid) if is_running(pid) => return true,
            Holder::Process(_) => LEFT_MAX,
            Holder::Unknown => UNKNOWN_MAX,
        };
        let left = left.saturating_sub(begun.elapsed());
        // On one connection: many would fill the queue of a socket that is not served, and the next would wait for
        // ever. The kernel resets this one when the socket goes.
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            return true;
        }
        if let Err(error) = stream.read(&mut [0])
            && matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
        {
            return true;
        }
        thread::sleep(EVERY);
    }
}

/// The process that listens where this stream is connected to.
fn listener(stream: &UnixStream) -> Holder {
    match peer(stream) {
        Ok(peer) => peer.pid.map_or(Holder::Unknown, Holder::Process),
        Err(_) => Holder::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A socket that a process which has ended listens on, and this one, which has it too, keeps.
    fn left_socket(path: &Path) -> UnixListener {
        let socket = UnixListener::bind(path).expect("bound");
        // SAFETY: the child calls listen(2) and _exit(2) alone, which are async-signal-safe.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above; the descriptor is open. The socket belongs to the process that listened last.
            unsafe {
                libc::listen(socket.as_raw_fd(), 8);
                libc::_exit(0);
            }
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: `status` is written to during the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        let stream = UnixStream::connect(path).expect("it is still answered");
        assert_eq!(listener(&stream), Holder::Process(child as u32));
        socket
    }

    #[test]
    fn a_socket_that_a_killed_process_left_for_a_moment_is_not_served() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("socket");
        assert!(!is_served(&path), "it is not there");
        let left = left_socket(&path);
        let ends = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            drop(left);
        });
        assert!(!is_served(&path));
        assert!(UnixStream::connect(&path).is_err(), "it was waited for");
        ends.join().expect("it ends");
    }

    #[test]
    fn a_socket_of_a_process_that_runs_is_served() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("socket");
        let _listener = UnixListener::bind(&path).expect("bound");
        assert!(is_served(&path));
    }

    #[test]
    fn what_a_process_that_runs_holds_is_not_waited_for() {
        let mut attempts = 0;
        let mut attempt = |wins_at: u32| {
            attempts += 1;
            if attempts == wins_at { Ok(attempts) } else { Err("held") }
        };
        assert_eq!(take_over(|| attempt(2), |_| Some(Holder::Process(std::process::id()))), Err("held"));
        assert_eq!(take_over(|| attempt(9), |_| None), Err("held"));
        assert_eq!(take_over(|| attempt(9), |_| Some(Holder::Unknown)), Ok(9));
    }
}
