//! The bytes' way to xenstored: its socket, or the kernel's device.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::XsError;

/// Sockets, then devices, that are tried without a word from the environment.
const SOCKETS: [&str; 2] = ["/run/xenstored/socket", "/var/run/xenstored/socket"];
const DEVICES: [&str; 2] = ["/dev/xen/xenbus", "/proc/xen/xenbus"];

/// A connection. Reads and writes never wait; [`Link::wait`] does.
#[derive(Debug)]
pub(super) struct Link {
    file: File,
    is_socket: bool,
    address: String,
}

impl Link {
    pub(super) fn open() -> Result<Self, XsError> {
        let from_env = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(path) = from_env("XENSTORED_PATH") {
            return Self::connect(Path::new(&path));
        }
        let mut tried = Vec::new();
        let in_dir = from_env("XENSTORED_RUNDIR").map(|dir| PathBuf::from(dir).join("socket"));
        let sockets = in_dir.map_or_else(|| SOCKETS.map(PathBuf::from).to_vec(), |socket| vec![socket]);
        for path in sockets.into_iter().chain(DEVICES.map(PathBuf::from)) {
            match Self::connect(&path) {
                Ok(link) => return Ok(link),
                Err(XsError::Io { error, .. }) => tried.push(format!("{}: {error}", path.display())),
                Err(error) => return Err(error),
            }
        }
        Err(XsError::Missing { tried: tried.join(", ") })
    }

    pub(super) fn connect(path: &Path) -> Result<Self, XsError> {
        let address = path.display().to_string();
        let opened = std::fs::metadata(path).and_then(|data| {
            if data.file_type().is_socket() {
                let stream = UnixStream::connect(path)?;
                stream.set_nonblocking(true)?;
                return Ok((File::from(OwnedFd::from(stream)), true));
            }
            if !data.file_type().is_char_device() && !path.starts_with("/proc") {
                return Err(io::Error::other("it is neither a socket nor a device"));
            }
            let device =
                OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
            Ok((device, false))
        });
        match opened {
            Ok((file, is_socket)) => Ok(Self { file, is_socket, address }),
            Err(error) => Err(XsError::Io { address, error }),
        }
    }

    pub(super) fn from_socket(socket: OwnedFd) -> Result<Self, XsError> {
        let stream = UnixStream::from(socket);
        let address = "a connected socket".to_owned();
        match stream.set_nonblocking(true) {
            Ok(()) => Ok(Self { file: File::from(OwnedFd::from(stream)), is_socket: true, address }),
            Err(error) => Err(XsError::Io { address, error }),
        }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Sends as many whole messages as there is room for; of the next one it keeps what is left to send. A message is
    /// a call of its own: the kernel's device takes one at a time.
    pub(super) fn send(&mut self, frames: &mut [Vec<u8>]) -> Result<usize, XsError> {
        let mut sent = 0;
        for frame in frames {
            while !frame.is_empty() {
                match self.write(frame) {
                    Ok(0) => return Err(self.failed(io::ErrorKind::WriteZero.into())),
                    Ok(len) => drop(frame.drain(..len)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(sent),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(self.failed(error)),
                }
            }
            sent += 1;
        }
        Ok(sent)
    }

    /// A daemon that goes away is an error, and must not be a signal that ends the program.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_socket {
            return self.file.write(bytes);
        }
        Ok(rustix::net::send(&self.file, bytes, SendFlags::NOSIGNAL)?)
    }

    /// Bytes that are there; `None` if there are none now.
    pub(super) fn receive(&mut self, bytes: &mut [u8]) -> Result<Option<usize>, XsError> {
        loop {
            match self.file.read(bytes) {
                Ok(0) => return Err(self.failed(io::ErrorKind::UnexpectedEof.into())),
                Ok(len) => return Ok(Some(len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    /// Waits until there is something to read, or with `to_send` room to write. False once `until` has passed.
    pub(super) fn wait(&self, to_send: bool, until: Option<Instant>) -> Result<bool, XsError> {
        let mut events = PollFlags::IN;
        events.set(PollFlags::OUT, to_send);
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            // What is too long for the kernel has no end.
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut [PollFd::new(&self.file, events)], left.as_ref()) {
                Ok(count) => return Ok(count > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.failed(error.into())),
            }
        }
    }

    fn failed(&self, error: io::Error) -> XsError {
        XsError::Io { address: self.address.clone(), error }
    }
}
