//! Sockets of the control side: blocking reads and writes with one deadline for all of them, and listeners.
//!
//! The sockets themselves stay in blocking mode, because io_uring, which takes them over, would otherwise answer EAGAIN
//! where it should wait.

use std::fs;
use std::io;
use std::mem::size_of;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Waits until `fd` is ready for `events`, or the time is over.
fn wait(fd: BorrowedFd<'_>, events: i16, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
        let timeout = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
        // SAFETY: one valid entry.
        match check(unsafe { libc::poll(&raw mut entry, 1, timeout) }) {
            Ok(0) => {}
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Fills `into` before the deadline; not a byte more is read.
pub fn read_exact(fd: BorrowedFd<'_>, mut into: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !into.is_empty() {
        // SAFETY: the memory is valid for writing.
        let result =
            unsafe { libc::recv(fd.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), libc::MSG_DONTWAIT) };
        match result {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len if len > 0 => into = &mut into[len as usize..],
            _ => again(fd, libc::POLLIN, deadline)?,
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
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the memory is valid for reading.
        let result = unsafe { libc::send(fd.as_raw_fd(), from.as_ptr().cast(), from.len(), flags) };
        if result >= 0 {
            from = &from[result as usize..];
        } else {
            again(fd, libc::POLLOUT, deadline)?;
        }
    }
    Ok(())
}

/// After a failed call: waits if waiting helps.
fn again(fd: BorrowedFd<'_>, events: i16, deadline: Instant) -> io::Result<()> {
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock => wait(fd, events, deadline),
        io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
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

/// A socket that clients connect to.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    /// Where it is, for people: `/run/x.sock` or `127.0.0.1:10809`.
    pub address: String,
    /// A UNIX socket's file, and which one it was: removed at the end if it is still that one.
    file: Option<(PathBuf, u64, u64)>,
}

impl Listener {
    /// Listens on a UNIX socket that users allowed by `mode` can connect to. A socket file that nobody answers is
    /// replaced; anything else in the way is an error.
    pub fn unix(path: &Path, mode: u32) -> io::Result<Self> {
        let (address, len) = unix_address(path)?;
        // SAFETY: socket takes no pointers.
        let fd = check(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // The file that bind makes takes the mode of the socket, so that it is never open to more users than it may.
        // SAFETY: the descriptor is open.
        check(unsafe { libc::fchmod(fd.as_raw_fd(), mode) })?;
        // SAFETY: the address is valid and `len` bytes long.
        let bind = || check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) });
        match bind() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                bind()?;
            }
            result => drop(result?),
        }
        // The umask may have taken bits away.
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        let made = fs::symlink_metadata(path)?;
        // SAFETY: the descriptor is open.
        check(unsafe { libc::listen(fd.as_raw_fd(), 128) })?;
        let file = Some((path.to_path_buf(), made.dev(), made.ino()));
        Ok(Self { fd, address: path.display().to_string(), file })
    }

    /// Listens on a TCP address; port 0 lets the kernel choose one, found in [`Listener::address`].
    pub fn tcp(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?.to_string();
        Ok(Self { fd: listener.into(), address, file: None })
    }

    /// Whether it is a UNIX socket.
    pub fn is_unix(&self) -> bool {
        self.file.is_some()
    }

    /// Takes one waiting connection; `None` when there is none.
    pub fn accept(&self) -> io::Result<Option<(OwnedFd, String)>> {
        let (null, flags) = (std::ptr::null_mut(), libc::SOCK_CLOEXEC);
        // SAFETY: the address is not asked for.
        match check(unsafe { libc::accept4(self.fd.as_raw_fd(), null, std::ptr::null_mut(), flags) }) {
            Ok(fd) => {
                // SAFETY: the descriptor was just made and belongs to nobody else.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                let peer = if self.is_unix() { unix_peer(fd.as_fd()) } else { tcp_peer(&fd) };
                Ok(Some((fd, peer)))
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {
                    Ok(None)
                }
                _ => Err(error),
            },
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, dev, ino)) = &self.file {
            let ours =
                fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (*dev, *ino));
            if ours {
                let _ = fs::remove_file(path);
            }
        }
    }
}

fn unix_address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: an all-zero address is a valid value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        let why = format!(
            "'{}' cannot be a socket: the path must have 1 to {} bytes and no NUL",
            path.display(),
            address.sun_path.len() - 1
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok((address, size_of::<libc::sockaddr_un>() as libc::socklen_t))
}

/// Removes a socket file that nobody listens on.
fn remove_stale(path: &Path) -> io::Result<()> {
    let refuse = |why: &str| {
        let why = format!("cannot listen on {}: {why}", path.display());
        Err(io::Error::new(io::ErrorKind::AddrInUse, why))
    };
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return refuse("there is a file of another kind; choose another path");
    }
    match UnixStream::connect(path) {
        Ok(_) => refuse("another process answers there; stop it or choose another path"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => refuse(&error.to_string()),
    }
}

fn unix_peer(fd: BorrowedFd<'_>) -> String {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: `who` is valid for writing `len` bytes.
    let result =
        unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut who).cast(), &raw mut len) };
    if result == 0 { format!("unix:pid={},uid={}", who.pid, who.uid) } else { "unix".to_string() }
}

fn tcp_peer(fd: &OwnedFd) -> String {
    let stream = fd.try_clone().map(std::net::TcpStream::from);
    stream.and_then(|stream| stream.peer_addr()).map_or_else(|_| "tcp".to_string(), |peer| peer.to_string())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listener = Listener::unix(&path, 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = Listener::unix(&path, 0o600).unwrap_err();
        assert!(error.to_string().contains("another process answers"), "{error}");
        drop(listener);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(Listener::unix(&path, 0o600).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        let long = dir.path().join("x".repeat(200));
        assert!(Listener::unix(&long, 0o600).unwrap_err().to_string().contains("107"));
    }

    #[test]
    fn a_slow_talker_meets_the_deadline_however_often_it_talks() {
        let (mut far, near) = UnixStream::pair().unwrap();
        let talker = std::thread::spawn(move || {
            for _ in 0..50 {
                std::thread::sleep(Duration::from_millis(10));
                if far.write_all(b"x").is_err() {
                    break;
                }
            }
        });
        let begin = Instant::now();
        let deadline = begin + Duration::from_millis(100);
        let error = read_exact(near.as_fd(), &mut [0; 1000], deadline).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begin.elapsed() < Duration::from_millis(400));
        drop(near);
        talker.join().unwrap();
    }
}
