//! UNIX stream sockets with deadlines and descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use tapio_sys::poll::{self, PollFd, PollFlags};
use tapio_sys::socket;
pub(crate) use tapio_sys::socket::FDS_MAX;

/// A moment after which waiting ends; `None` waits for ever.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(timeout: Option<Duration>) -> Self {
        // A timeout beyond the end of time is none.
        Self(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    /// What is left.
    fn left(self) -> Option<Duration> {
        self.0.map(|end| end.saturating_duration_since(Instant::now()))
    }
}

/// Waits until one of the descriptors is ready; tells which, or nothing when the time is over.
pub(crate) fn wait<const N: usize>(
    fds: [(BorrowedFd<'_>, PollFlags); N],
    deadline: Deadline,
) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|(fd, events)| PollFd::from_borrowed_fd(fd, events));
    loop {
        match poll::any(&mut polled, deadline.left()) {
            Ok(_) => return Ok(polled.map(|entry| !entry.revents().is_empty())),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Receives what is there, descriptors included, without waiting.
pub(crate) fn receive(stream: &UnixStream, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    socket::receive(stream, into, fds).map(|received| received.len)
}

/// Sends all bytes before the deadline, the descriptors with the first of them.
pub(crate) fn send_all(
    stream: &UnixStream,
    mut bytes: &[u8],
    mut fds: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> io::Result<()> {
    while !bytes.is_empty() {
        match socket::send(stream, bytes, fds) {
            Ok(sent) => {
                bytes = &bytes[sent..];
                fds = &[];
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if wait([(stream.as_fd(), PollFlags::OUT)], deadline)? == [false] {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fills the buffer before the deadline.
pub(crate) fn read_exact(stream: &UnixStream, into: &mut [u8], deadline: Deadline) -> io::Result<()> {
    let mut len = 0;
    while len < into.len() {
        if wait([(stream.as_fd(), PollFlags::IN)], deadline)? == [false] {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut unwanted = Vec::new();
        match receive(stream, &mut into[len..], &mut unwanted) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => len += more,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
