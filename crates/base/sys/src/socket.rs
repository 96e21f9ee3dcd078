//! UNIX sockets: which process is at the other end, and descriptors that travel with bytes (unix(7)).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Descriptors that one message carries, at most.
pub const FDS_MAX: usize = 8;

/// Room for the control messages: more than a message may bring, so that one with too many is seen to have them.
type Room = [MaybeUninit<u8>; rustix::cmsg_space!(ScmRights(3 * FDS_MAX))];

const EMPTY: Room = [MaybeUninit::uninit(); size_of::<Room>()];

/// What [`receive`] took from a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes; 0 at the end.
    pub len: usize,
    /// More descriptors came than there was room for; those are closed.
    pub is_cut: bool,
}

/// Receives what is there, without waiting. Descriptors that came with it are added to `fds`, all of them, so that none
/// leaks when there are too many; they are closed by `exec`.
///
/// # Errors
/// `WouldBlock` when nothing is there; the kernel's.
pub fn receive(socket: &impl AsFd, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Received> {
    let mut room = EMPTY;
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    Ok(Received { len: got.bytes, is_cut: got.flags.contains(ReturnFlags::CTRUNC) })
}

/// Sends bytes, and descriptors with the first of them, without waiting for room; answers how many bytes went. A socket
/// that is gone is an error and no signal.
///
/// # Errors
/// `InvalidInput`: more than [`FDS_MAX`] descriptors. `WouldBlock` when there is no room; the kernel's.
pub fn send(socket: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if fds.len() > FDS_MAX {
        let why = format!("at most {FDS_MAX} descriptors at a time");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let mut room = EMPTY;
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() {
        // There is room for three times as many.
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags))?)
}

/// The process at the other end of a UNIX socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number; `None` where it has none here, as a process outside of this container.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
}

/// The process at the other end: as it was when it connected, or when it began to listen (unix(7), SO_PEERCRED).
///
/// # Errors
/// It is no UNIX socket.
pub fn peer(stream: &impl AsFd) -> io::Result<Peer> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    let fd = stream.as_fd().as_raw_fd();
    // By hand: rustix has no value for a process without a number.
    // SAFETY: the buffer is a `ucred`, and `len` says so.
    let failed = unsafe { libc::getsockopt(fd, level, name, (&raw mut found).cast(), &raw mut len) };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    let pid = u32::try_from(found.pid).ok().filter(|pid| *pid > 0);
    Ok(Peer { pid, uid: found.uid })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn descriptors_arrive_with_the_first_byte_and_work() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (mut one, other) = UnixStream::pair().expect("a pair");
        let nothing = receive(&theirs, &mut [0; 4], &mut Vec::new()).expect_err("nothing is there");
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        let many = [other.as_fd(); FDS_MAX + 1];
        assert_eq!(send(&ours, b"x", &many).expect_err("too many").kind(), io::ErrorKind::InvalidInput);
        assert_eq!(send(&ours, b"ab", &many[..2]).expect("sent"), 2);
        drop(other);
        let (mut bytes, mut fds) = ([0; 4], Vec::new());
        let got = receive(&theirs, &mut bytes, &mut fds).expect("received");
        assert_eq!((got, &bytes[..2], fds.len()), (Received { len: 2, is_cut: false }, &b"ab"[..], 2));
        one.write_all(b"hello").expect("sent");
        let mut text = [0; 5];
        UnixStream::from(fds.remove(0)).read_exact(&mut text).expect("received");
        assert_eq!(&text, b"hello");
        drop(ours);
        assert_eq!(receive(&theirs, &mut bytes, &mut fds).expect("the end").len, 0);
    }

    #[test]
    fn the_other_end_is_known() {
        let (near, _far) = UnixStream::pair().expect("a pair");
        let found = peer(&near).expect("a UNIX socket");
        assert_eq!(found.pid, Some(std::process::id()));
        assert_eq!(found.uid, crate::process::user());
        assert!(
            peer(&std::net::UdpSocket::bind("127.0.0.1:0").expect("bound")).is_ok_and(|it| it.pid.is_none())
        );
    }
}
