//! Descriptors through a socket.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Room for the control message of one descriptor, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Room([u8; 64]);

const FD_LEN: u32 = mem::size_of::<libc::c_int>() as u32;

fn message(room: &mut Room, byte: &mut libc::iovec, room_len: usize) -> libc::msghdr {
    // SAFETY: an all-zero msghdr is a valid value: no name, no data, no control message.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = byte;
    message.msg_iovlen = 1;
    message.msg_control = room.0.as_mut_ptr().cast();
    message.msg_controllen = room_len as _;
    message
}

/// Sends a descriptor; does not wait for room in the socket.
///
/// # Errors
/// The other end is gone, or takes nothing.
pub(super) fn send(socket: &UnixStream, fd: impl AsFd) -> io::Result<()> {
    let mut data = [0u8; 1];
    let mut byte = libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: 1 };
    let mut room = Room([0; 64]);
    // SAFETY: it computes a number.
    let room_len = unsafe { libc::CMSG_SPACE(FD_LEN) } as usize;
    let message = message(&mut room, &mut byte, room_len);
    // SAFETY: the message names `room`, which has space for this one control message and outlives the call.
    unsafe {
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        (*head).cmsg_level = libc::SOL_SOCKET;
        (*head).cmsg_type = libc::SCM_RIGHTS;
        (*head).cmsg_len = libc::CMSG_LEN(FD_LEN) as _;
        libc::CMSG_DATA(head).cast::<libc::c_int>().write_unaligned(fd.as_fd().as_raw_fd());
    }
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the message and what it names live until the call ends.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    if sent == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The next descriptor; none when the other end is gone.
///
/// # Errors
/// Something else came.
pub(super) fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut data = [0u8; 1];
    let mut byte = libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: 1 };
    let mut room = Room([0; 64]);
    let room_len = mem::size_of::<Room>();
    let mut message = message(&mut room, &mut byte, room_len);
    // SAFETY: the message and what it names live until the call ends.
    let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if len < 0 {
        return Err(io::Error::last_os_error());
    }
    if len == 0 {
        return Ok(None);
    }
    // SAFETY: the kernel filled the control messages of `message`, and says how long they are.
    let found = unsafe {
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        let is_rights = !head.is_null()
            && (*head).cmsg_level == libc::SOL_SOCKET
            && (*head).cmsg_type == libc::SCM_RIGHTS
            && (*head).cmsg_len as usize == libc::CMSG_LEN(FD_LEN) as usize;
        is_rights.then(|| libc::CMSG_DATA(head).cast::<libc::c_int>().read_unaligned())
    };
    let fd = found.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no descriptor came"))?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
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
