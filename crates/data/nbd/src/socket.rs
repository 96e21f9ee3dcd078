//! Sockets before transmission: blocking reads and writes with one deadline for all of them.
//!
//! The sockets themselves stay in blocking mode, because io_uring, which takes them over, would otherwise answer EAGAIN
//! where it should wait.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Waits until `fd` is ready for `events`, or the time is over.
fn wait(fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // What is too long for the kernel has no end.
        let left = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::from_borrowed_fd(fd, events)], left.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Fills `into` before the deadline; not a byte more is read.
pub fn read_exact(fd: BorrowedFd<'_>, mut into: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !into.is_empty() {
        match recv(fd, &mut *into, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((len, _)) => into = &mut into[len..],
            Err(error) => again(error, fd, PollFlags::IN, deadline)?,
        }
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Sends all of `from` before the deadline.
pub fn write_all(fd: BorrowedFd<'_>, mut from: &[u8], deadline: Instant) -> io::Result<()> {
    while !from.is_empty() {
        match send(fd, from, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(len) => from = &from[len..],
            Err(error) => again(error, fd, PollFlags::OUT, deadline)?,
        }
    }
    Ok(())
}

/// After a failed call: waits if waiting helps.
fn again(error: Errno, fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> io::Result<()> {
    match error {
        Errno::WOULDBLOCK => wait(fd, events, deadline),
        Errno::INTR => Ok(()),
        _ => Err(error.into()),
    }
}

fn set_option<T>(fd: BorrowedFd<'_>, level: i32, name: i32, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is valid for reading `len` bytes.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), len) })
        .map(drop)
}

/// Prepares a fresh connection for transmission. What the kernel refuses costs speed, not function.
///
/// UNIX sockets keep the buffers they have: 256 KiB, 1 MiB and 4 MiB were measured and brought nothing at 4 KiB, while
/// reads of 1 MiB cost up to a tenth more, because what waits in a larger buffer has left the cache when it is fetched.
pub fn prepare(fd: BorrowedFd<'_>, is_unix: bool) {
    if is_unix {
        return;
    }
    let _ = set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &1i32);
    // A peer that lost its power is noticed within two minutes.
    let _ = set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, &1i32);
    let _ = set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, &60i32);
    let _ = set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, &10i32);
    let _ = set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, &6i32);
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_slow_talker_meets_the_deadline_however_often_it_talks() {
        let (mut far, near) = UnixStream::pair().unwrap();
        let talker = std::thread::spawn(move || {
            while far.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let begin = Instant::now();
        let deadline = begin + Duration::from_millis(100);
        let error = read_exact(near.as_fd(), &mut [0; 100_000], deadline).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // Its bytes alone would take a quarter of an hour.
        assert!(begin.elapsed() < Duration::from_secs(60));
        drop(near);
        talker.join().unwrap();
    }
}
