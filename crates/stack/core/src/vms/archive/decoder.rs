//! Compressed archives: a process of their own decompresses each, because the decoders read what a client sent.

use std::io::{self, Cursor, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;

use tapio_xva::{Compression, Decoded, XvaError, head};

use super::Call;
use super::client::Client;

/// The bytes of a tar archive.
pub(super) type Plain = Box<dyn Read>;

/// A process that ends with this value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a process makes of a stream.
struct Decoding {
    decoded: Decoded<Client>,
    _process: Running,
}

impl Read for Decoding {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.decoded.read(into)
    }
}

/// The tar archive that a client sends, whatever is around it.
///
/// # Errors
/// As of [`head`]; the process cannot be started.
pub(super) fn plain(call: &Call, mut client: Client) -> Result<Plain, XvaError> {
    let (compression, head) = head(&mut client)?;
    if compression == Compression::None {
        return Ok(Box::new(Cursor::new(head).chain(client)));
    }
    let failed = |what: &str, error: io::Error| {
        XvaError::Io(io::Error::new(
            error.kind(),
            format!("the process that decompresses cannot {what}: {error}"),
        ))
    };
    let program = call.part.decoder.get().ok_or_else(|| {
        XvaError::Io(io::Error::other("this daemon has no program that decompresses archives"))
    })?;
    let (ours, theirs) = UnixStream::pair().map_err(|error| failed("begin", error))?;
    let child = Command::new(&program.path)
        .args(&program.arguments)
        .env_clear()
        .current_dir("/")
        .stdin(client.into_socket())
        .stdout(OwnedFd::from(theirs))
        // A signal from a terminal is for the daemon, which ends in order.
        .process_group(0)
        .spawn();
    let process = Running(child.map_err(|error| failed("begin", error))?);
    let ours = Client::new(ours.into(), &Arc::clone(&call.progress));
    let ours = ours.map_err(|error| XvaError::Io(io::Error::other(error.to_string())))?;
    let decoded = Decoded::begin(ours, &head).map_err(|error| failed("be told what to do", error))?;
    Ok(Box::new(Decoding { decoded, _process: process }))
}
