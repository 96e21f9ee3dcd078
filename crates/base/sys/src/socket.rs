//! Sockets.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

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
    use std::os::unix::net::UnixStream;

    use super::*;

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
