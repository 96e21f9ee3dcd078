//! Why there is no device.

use std::fmt;
use std::io;

use tapio_block::Gone;

/// What went wrong with a device, and what to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceError {
    /// The errno that stands for it.
    pub errno: i32,
    /// What and why.
    pub message: String,
    /// What to do next, where there is something to be done.
    pub next: Option<String>,
}

impl DeviceError {
    /// An error of ours.
    pub fn new(errno: i32, message: impl Into<String>) -> Self {
        Self { errno, message: message.into(), next: None }
    }

    /// An error of the kernel while `doing` something.
    pub fn io(doing: impl fmt::Display, error: &io::Error) -> Self {
        let errno = match (error.raw_os_error(), error.kind()) {
            (Some(errno), _) => errno,
            (None, io::ErrorKind::TimedOut) => libc::ETIMEDOUT,
            (None, io::ErrorKind::PermissionDenied) => libc::EACCES,
            (None, io::ErrorKind::NotFound) => libc::ENOENT,
            (None, io::ErrorKind::ResourceBusy) => libc::EBUSY,
            (None, _) => libc::EIO,
        };
        Self::new(errno, format!("{doing}: {error}"))
    }

    /// The data thread did not answer.
    pub fn gone(gone: &Gone) -> Self {
        let errno = if *gone == Gone::Ended { libc::ESHUTDOWN } else { libc::ETIMEDOUT };
        Self::new(errno, gone.to_string())
    }

    /// With what to do next.
    #[must_use]
    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.next {
            None => f.write_str(&self.message),
            Some(next) => write!(f, "{}; {next}", self.message),
        }
    }
}

impl std::error::Error for DeviceError {}
