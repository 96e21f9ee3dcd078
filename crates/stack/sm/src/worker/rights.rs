//! Links to an SR's worker: a descriptor each, through the socket that it was started with. A link for one transfer
//! comes with a second one, the socket of its data.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use tapio_sys::{poll, socket};

/// A link, and the socket of the data of its only call.
pub(super) type Ends = (OwnedFd, Option<OwnedFd>);

/// Sends a link; does not wait for room in the socket.
///
/// # Errors
/// The other end is gone, or takes nothing.
pub(super) fn send(socket: &UnixStream, link: impl AsFd, data: Option<&OwnedFd>) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = std::iter::once(link.as_fd()).chain(data.map(OwnedFd::as_fd)).collect();
    socket::send(socket, &[0], &fds).map(drop)
}

/// The next link; none when the other end is gone.
///
/// # Errors
/// Something else came.
pub(super) fn receive(socket: &UnixStream) -> io::Result<Option<Ends>> {
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
    let mut fds = fds.into_iter();
    let link = fds.next().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no descriptor came"))?;
    Ok(Some((link, fds.next())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_descriptor_arrives_and_works() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut one, other) = UnixStream::pair().unwrap();
        send(&ours, &other, None).unwrap();
        let (got, data) = receive(&theirs).unwrap().expect("a link");
        assert!(data.is_none());
        drop(got);
        let (third, fourth) = UnixStream::pair().unwrap();
        send(&ours, &third, Some(&OwnedFd::from(other))).unwrap();
        let (link, data) = receive(&theirs).unwrap().expect("a link");
        drop((link, third, fourth));
        let mut got = UnixStream::from(data.expect("its data"));
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
