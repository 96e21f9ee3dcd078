//! UNIX stream sockets with deadlines and descriptors.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Descriptors that one message may bring.
pub(crate) const FDS_MAX: usize = 8;

/// A moment after which waiting ends; `None` waits for ever.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(timeout: Option<Duration>) -> Self {
        // A timeout beyond the end of time is none.
        Self(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    /// For poll(2): milliseconds, rounded up so that a short rest does not spin.
    fn poll_ms(self) -> i32 {
        match self.0 {
            None => -1,
            Some(end) => {
                let rest = end.saturating_duration_since(Instant::now());
                i32::try_from(rest.as_millis().saturating_add(u128::from(!rest.is_zero())))
                    .unwrap_or(i32::MAX)
            }
        }
    }
}

/// Waits until one of the descriptors is ready; tells which, or nothing when the time is over.
pub(crate) fn wait<const N: usize>(
    fds: [(BorrowedFd<'_>, i16); N],
    deadline: Deadline,
) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|(fd, events)| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 });
    loop {
        // SAFETY: the array has N initialised entries and lives across the call.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, deadline.poll_ms()) };
        if ready >= 0 {
            return Ok(polled.map(|entry| entry.revents != 0));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Room for the control messages, aligned as the kernel wants it.
#[repr(C, align(8))]
struct ControlBuffer([u8; 128]);

const _: () = assert!(
    // SAFETY: CMSG_SPACE only computes.
    unsafe { libc::CMSG_SPACE((FDS_MAX * size_of::<RawFd>()) as u32) } as usize <= size_of::<ControlBuffer>()
);

/// Receives what is there, descriptors included, without waiting.
pub(crate) fn receive(stream: &UnixStream, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut control = ControlBuffer([0; 128]);
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: all fields of msghdr may be zero.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_iov = &mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = control.0.len() as _;
    // SAFETY: the header points to one writable part and a writable control buffer, both alive here.
    let len = unsafe {
        libc::recvmsg(stream.as_raw_fd(), &mut header, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC)
    };
    if len < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has filled in the header that it was given.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(&header) };
    while !message.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give pointers to whole headers inside the control buffer.
        let head = unsafe { &*message };
        if head.cmsg_level == libc::SOL_SOCKET && head.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: only computes.
            let head_len = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (head.cmsg_len as usize).saturating_sub(head_len) / size_of::<RawFd>();
            // SAFETY: the data of the message follows its header inside the control buffer.
            let data = unsafe { libc::CMSG_DATA(message) }.cast::<RawFd>();
            for index in 0..count {
                // SAFETY: there are `count` numbers, perhaps unaligned.
                let fd = unsafe { data.add(index).read_unaligned() };
                // SAFETY: the kernel has just made this descriptor for us; it has no other owner.
                fds.push(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
        // SAFETY: as for CMSG_FIRSTHDR.
        message = unsafe { libc::CMSG_NXTHDR(&header, message) };
    }
    Ok(len as usize)
}

/// Sends all bytes before the deadline, the descriptors with the first of them.
pub(crate) fn send_all(
    stream: &UnixStream,
    mut bytes: &[u8],
    mut fds: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> io::Result<()> {
    if fds.len() > FDS_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("at most {FDS_MAX} descriptors at a time"),
        ));
    }
    while !bytes.is_empty() {
        match send_some(stream, bytes, fds) {
            Ok(sent) => {
                bytes = &bytes[sent..];
                fds = &[];
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if wait([(stream.as_fd(), libc::POLLOUT)], deadline)? == [false] {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn send_some(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut control = ControlBuffer([0; 128]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all fields of msghdr may be zero.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_iov = &mut part;
    header.msg_iovlen = 1;
    if !fds.is_empty() {
        let data_len = std::mem::size_of_val(fds) as u32;
        header.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: only computes.
        header.msg_controllen = unsafe { libc::CMSG_SPACE(data_len) } as _;
        // SAFETY: the control buffer has room for a header and FDS_MAX descriptors, checked at compile time and by
        // the caller, so the first header and its data lie inside it.
        unsafe {
            let message = libc::CMSG_FIRSTHDR(&header);
            (*message).cmsg_level = libc::SOL_SOCKET;
            (*message).cmsg_type = libc::SCM_RIGHTS;
            (*message).cmsg_len = libc::CMSG_LEN(data_len) as _;
            for (index, fd) in fds.iter().enumerate() {
                libc::CMSG_DATA(message).cast::<RawFd>().add(index).write_unaligned(fd.as_raw_fd());
            }
        }
    }
    // SAFETY: the header points to readable bytes and a valid control buffer, both alive here.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &header, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

/// Fills the buffer before the deadline.
pub(crate) fn read_exact(stream: &UnixStream, into: &mut [u8], deadline: Deadline) -> io::Result<()> {
    let mut len = 0;
    while len < into.len() {
        if wait([(stream.as_fd(), libc::POLLIN)], deadline)? == [false] {
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
