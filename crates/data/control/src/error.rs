//! Errors as both protocols carry them: a number of the system, a sentence, and what to do next.

use std::ffi::CStr;
use std::fmt;
use std::io;

/// The result of everything here.
pub type Result<T> = std::result::Result<T, ControlError>;

/// An error number of the system, always positive.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! names {
    ($($name:ident)*) => {
        impl Errno {
            $(#[doc = concat!("`", stringify!($name), "`")] pub const $name: Self = Self(libc::$name);)*

            /// The number's name in the system's headers; `EUNKNOWN` for rare ones.
            pub const fn name(self) -> &'static str {
                match self.0 {
                    $(libc::$name => stringify!($name),)*
                    _ => "EUNKNOWN",
                }
            }
        }
    };
}

names! {
    EPERM ENOENT EINTR EIO ENXIO E2BIG EBADF EAGAIN ENOMEM EACCES EBUSY EEXIST ENODEV ENOTDIR EISDIR EINVAL ENFILE
    EMFILE EFBIG ENOSPC ESPIPE EROFS EPIPE ERANGE ENAMETOOLONG ENOSYS ELOOP EPROTO EOVERFLOW EADDRINUSE EMSGSIZE
    EOPNOTSUPP ECONNREFUSED ECONNRESET ETIMEDOUT EALREADY EINPROGRESS ESHUTDOWN ESTALE ECANCELED
}

impl Errno {
    /// From a number as the system or a peer gave it; nonsense becomes `EIO`.
    pub const fn new(number: i32) -> Self {
        match number.checked_abs() {
            Some(number) if number > 0 && number < 4096 => Self(number),
            _ => Self::EIO,
        }
    }

    /// The number.
    pub const fn raw(self) -> i32 {
        self.0
    }

    /// The system's text, as `strerror` has it.
    pub fn text(self) -> String {
        let mut text = [0; 128];
        // SAFETY: the buffer is writable for its whole length, which is what is passed.
        let failed = unsafe { libc::strerror_r(self.0, text.as_mut_ptr(), text.len()) } != 0;
        if failed {
            return format!("Unknown error {}", self.0);
        }
        // SAFETY: on success the buffer holds a string that ends with NUL within its length.
        unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

/// What went wrong: with which object, why, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlError {
    /// The kind, which callers match on.
    pub errno: Errno,
    /// A sentence that names the object and the cause.
    pub message: String,
    /// What to do next, where there is something.
    pub next: Option<String>,
}

impl ControlError {
    /// An error with its sentence.
    pub fn new(errno: Errno, message: impl Into<String>) -> Self {
        Self { errno, message: message.into(), next: None }
    }

    /// Adds what to do next.
    #[must_use]
    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// An error of the system while `doing` something.
    pub fn io(doing: impl fmt::Display, error: &io::Error) -> Self {
        let errno = error.raw_os_error().map_or_else(|| of_kind(error.kind()), Errno::new);
        let cause = match error.raw_os_error() {
            Some(_) => errno.text(),
            None => error.to_string(),
        };
        Self::new(errno, format!("{doing}: {cause}"))
    }
}

/// The number that comes nearest to an error made by the standard library.
fn of_kind(kind: io::ErrorKind) -> Errno {
    match kind {
        io::ErrorKind::NotFound => Errno::ENOENT,
        io::ErrorKind::PermissionDenied => Errno::EACCES,
        io::ErrorKind::TimedOut => Errno::ETIMEDOUT,
        io::ErrorKind::WouldBlock => Errno::EAGAIN,
        io::ErrorKind::InvalidInput => Errno::EINVAL,
        io::ErrorKind::AlreadyExists => Errno::EEXIST,
        io::ErrorKind::UnexpectedEof => Errno::ECONNRESET,
        _ => Errno::EIO,
    }
}

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.next {
            Some(next) => write!(f, "; {next}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ControlError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_names_and_texts() {
        assert_eq!(Errno::ENODEV.name(), "ENODEV");
        assert_eq!(Errno::ENODEV.text(), "No such device");
        assert_eq!(Errno::new(-16), Errno::EBUSY);
        for nonsense in [0, 4096, i32::MIN, i32::MAX] {
            assert_eq!(Errno::new(nonsense), Errno::EIO);
        }
    }

    #[test]
    fn an_error_says_what_to_do() {
        let error = ControlError::new(Errno::EBUSY, "disk 3 is open").next("close it first");
        assert_eq!(error.to_string(), "disk 3 is open; close it first");
    }
}
