//! The socket to a client, which may take its time: waits end when the task is cancelled.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use tapio_model::ApiError;

use crate::progress::Progress;

/// How often a wait looks whether the task was cancelled.
const LOOK: Duration = Duration::from_millis(500);

pub(crate) struct Client {
    stream: UnixStream,
    progress: Arc<dyn Progress>,
}

impl Client {
    pub(crate) fn new(socket: OwnedFd, progress: &Arc<dyn Progress>) -> Result<Self, ApiError> {
        let stream = UnixStream::from(socket);
        let failed = |error| ApiError::internal(format!("the socket of a transfer: {error}"));
        stream.set_nonblocking(false).map_err(failed)?;
        stream.set_read_timeout(Some(LOOK)).map_err(failed)?;
        stream.set_write_timeout(Some(LOOK)).map_err(failed)?;
        Ok(Self { stream, progress: Arc::clone(progress) })
    }

    /// The socket alone.
    pub(super) fn into_socket(self) -> OwnedFd {
        self.stream.into()
    }

    /// Does it until it comes to something; a cancelled task is `ConnectionAborted`.
    fn wait(&self, mut attempt: impl FnMut(&UnixStream) -> io::Result<usize>) -> io::Result<usize> {
        loop {
            if self.progress.is_cancelled() {
                return Err(ErrorKind::ConnectionAborted.into());
            }
            match attempt(&self.stream) {
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                done => return done,
            }
        }
    }
}

impl Read for Client {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.wait(|mut stream| stream.read(into)) {
            // The server has let go of a client that was lost.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(0),
            read => read,
        }
    }
}

impl Write for Client {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(|mut stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
