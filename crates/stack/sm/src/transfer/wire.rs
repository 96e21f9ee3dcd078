//! The socket of a transfer: waits that show signs of life, and end when the call is cancelled.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use tapio_sys::poll::{self, PollFd, PollFlags};
use tapio_types::ApiError;

use crate::errors;
use crate::traits::Ctx;

/// How often a wait looks whether the call was cancelled.
const LOOK: Duration = Duration::from_millis(500);

/// How often a transfer shows that it lives, while its client takes or sends nothing: the daemon ends a worker that is
/// silent.
const BEAT: Duration = Duration::from_secs(5);

/// Steps in which progress is reported.
const STEPS: f64 = 200.0;

/// One end of a transfer.
pub(super) struct Wire<'a> {
    stream: UnixStream,
    ctx: &'a dyn Ctx,
    fraction: Cell<f64>,
    told: Cell<Instant>,
    is_cancelled: Cell<bool>,
    has_ended: Cell<bool>,
}

impl<'a> Wire<'a> {
    pub(super) fn new(ctx: &'a dyn Ctx, socket: OwnedFd) -> Result<Self, ApiError> {
        let stream = UnixStream::from(socket);
        let failed = |error| ApiError::internal(format!("the socket of a transfer: {error}"));
        stream.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            stream,
            ctx,
            fraction: Cell::new(0.0),
            told: Cell::new(Instant::now()),
            is_cancelled: Cell::new(false),
            has_ended: Cell::new(false),
        })
    }

    /// How far it is, 0 to 1.
    pub(super) fn progress(&self, fraction: f64) {
        if fraction - self.fraction.get() >= 1.0 / STEPS || self.told.get().elapsed() >= BEAT {
            self.fraction.set(fraction);
            self.told.set(Instant::now());
            self.ctx.progress(fraction);
        }
    }

    /// # Errors
    /// `TASK_CANCELLED`.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        self.progress(self.fraction.get());
        if self.is_cancelled.get() || self.ctx.is_cancelled() { Err(errors::cancelled()) } else { Ok(()) }
    }

    /// Whether the other end has closed it.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.get()
    }

    /// Sends all of it.
    ///
    /// # Errors
    /// `TASK_CANCELLED`, also where the client has gone away.
    pub(super) fn send(&self, mut bytes: &[u8]) -> Result<(), ApiError> {
        while !bytes.is_empty() {
            match self.ready(PollFlags::OUT).and_then(|()| (&self.stream).write(bytes)) {
                Ok(len) => bytes = &bytes[len..],
                Err(error) if is_repeated(&error) => {}
                Err(_) => {
                    self.has_ended.set(true);
                    return Err(errors::cancelled());
                }
            }
        }
        Ok(())
    }

    /// Receives until `into` is full or the stream ends; how many bytes came.
    ///
    /// # Errors
    /// `TASK_CANCELLED`.
    pub(super) fn receive(&self, into: &mut [u8]) -> Result<usize, ApiError> {
        let mut len = 0;
        while len < into.len() {
            match (&*self).read(&mut into[len..]) {
                Ok(0) => break,
                Ok(more) => len += more,
                Err(error) if is_repeated(&error) => {}
                Err(_) if self.is_cancelled.get() => return Err(errors::cancelled()),
                Err(_) => break,
            }
        }
        self.has_ended.set(self.has_ended.get() || len < into.len());
        Ok(len)
    }

    fn ready(&self, flags: PollFlags) -> io::Result<()> {
        while !poll::any(&mut [PollFd::new(&self.stream, flags)], Some(LOOK))? {
            self.progress(self.fraction.get());
            if self.ctx.is_cancelled() {
                self.is_cancelled.set(true);
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
        Ok(())
    }
}

fn is_repeated(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

impl Read for &Wire<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            self.ready(PollFlags::IN)?;
            match (&self.stream).read(into) {
                Ok(0) if !into.is_empty() => {
                    self.has_ended.set(true);
                    return Ok(0);
                }
                Err(error) if is_repeated(&error) => {}
                Err(error) => {
                    self.has_ended.set(true);
                    return Err(error);
                }
                read => return read,
            }
        }
    }
}
