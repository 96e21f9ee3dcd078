//! Descriptors through a socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Room for the control message of one descriptor.
type Room = [MaybeUninit<u8>; rustix::cmsg_space!(ScmRights(1))];

const EMPTY: Room = [MaybeUninit::uninit(); size_of::<Room>()];

/// Sends a descriptor; does not wait for room in the socket.
///
/// # Errors
/// The other end is gone, or takes nothing.
pub(super) fn send(socket: &UnixStream, fd: impl AsFd) -> io::Result<()> {
    let fds = [fd.as_fd()];
    let mut room = EMPTY;
    let mut control = SendAncillaryBuffer::new(&mut room);
    // It is as large as one descriptor needs.
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// The next descriptor; none when the other end is gone.
///
/// # Errors
/// Something else came.
pub(super) fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut data = [0];
    let mut room = EMPTY;
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut data)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes == 0 {
        return Ok(None);
    }
    let found = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    found.map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no descriptor came"))
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
