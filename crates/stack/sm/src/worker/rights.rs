//! Links to an SR's worker: a descriptor each, through the socket that it was started with.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use tapio_sys::{poll, socket};

/// Sends a descriptor; does not wait for room in the socket.
///
/// # Errors
/// The other end is gone, or takes nothing.
pub(super) fn send(socket: &UnixStream, fd: impl AsFd) -> io::Result<()> {
    socket::send(socket, &[0], &[fd.as_fd()]).map(drop)
}

/// The next descriptor; none when the other end is gone.
///
/// # Errors
/// Something else came.
pub(super) fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut fds = Vec::new();
    let got = loop {
        poll::any(&mut [poll::PollFd::new(socket, poll::PollFlags::IN)], None)?;
        match socket::receive(socket, &mut [0], &mut fds) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            got => break got?,
        }
    };
    if got.len == 0 {
        return Ok(None);
    }
    fds.pop().map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no descriptor came"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_descriptor_arrives_and_works() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut one, other) = UnixStream::pair().unwrap();
        send(&ours, &other).unwrap();
        drop(other);
        let mut got = UnixStream::from(receive(&theirs).unwrap().expect("a descriptor"));
        one.write_all(b"hello").unwrap();
        let mut text = [0; 5];
        got.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"hello");
        (&ours).write_all(b"x").unwrap();
        assert!(receive(&theirs).is_err(), "a byte without a descriptor is refused");
        drop(ours);
        assert!(receive(&theirs).unwrap().is_none());
    }
}
