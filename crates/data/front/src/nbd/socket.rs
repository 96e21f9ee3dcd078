//! Listening sockets.

use std::fs;
use std::io;
use std::mem::size_of;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tapio_sys::socket::peer;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
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
    /// Listens on a UNIX socket that users allowed by `mode` can connect to. A socket file without a server is
    /// replaced; anything else in the way is an error.
    pub fn unix(path: &Path, mode: u32) -> io::Result<Self> {
        let (address, len) = unix_address(path)?;
        // SAFETY: socket takes no pointers.
        let fd = check(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
        // SAFETY: the descriptor was just made and has no other owner.
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
                // SAFETY: the descriptor was just made and has no other owner.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                let peer = if self.is_unix() { unix_peer(&fd) } else { tcp_peer(&fd) };
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

/// Removes a socket file without a server.
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

fn unix_peer(fd: &OwnedFd) -> String {
    match peer(fd) {
        Ok(peer) => format!("unix:pid={},uid={}", peer.pid.unwrap_or(0), peer.uid),
        Err(_) => "unix".to_string(),
    }
}

fn tcp_peer(fd: &OwnedFd) -> String {
    let stream = fd.try_clone().map(std::net::TcpStream::from);
    stream.and_then(|stream| stream.peer_addr()).map_or_else(|_| "tcp".to_string(), |peer| peer.to_string())
}

#[cfg(test)]
mod tests {
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
}
