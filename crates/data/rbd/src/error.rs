//! What the libraries' negative numbers mean.

use std::ffi::CString;
use std::fmt;
use std::io;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdError {
    errno: i32,
    text: String,
}

impl RbdError {
    /// An error with a sentence of its own.
    pub fn new(errno: i32, text: impl Into<String>) -> Self {
        Self { errno, text: text.into() }
    }

    /// The call that does `what` answered `code`, which is negative.
    pub(crate) fn of(code: i32, what: impl fmt::Display) -> Self {
        let errno = code.checked_neg().unwrap_or(libc::EIO);
        let why = match errno {
            libc::ESHUTDOWN => {
                "the cluster has shut this client out, because another took over its image".into()
            }
            libc::EROFS => "another client holds the image's lock, or it is open for reading only".into(),
            libc::EACCES | libc::EPERM => {
                "the cluster refuses it: check user, keyring and the user's capabilities".into()
            }
            libc::ETIMEDOUT => "the cluster does not answer: check monitors, OSDs and the network".into(),
            errno => io::Error::from_raw_os_error(errno).to_string(),
        };
        Self { errno, text: format!("{what}: {why}") }
    }

    /// Its number.
    pub const fn errno(&self) -> i32 {
        self.errno
    }

    /// Whether what was asked for is not there.
    pub const fn is_missing(&self) -> bool {
        self.errno == libc::ENOENT
    }
}

impl fmt::Display for RbdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for RbdError {}

impl From<RbdError> for io::Error {
    fn from(error: RbdError) -> Self {
        Self::new(Self::from_raw_os_error(error.errno).kind(), error)
    }
}

/// The result of a call that answers 0 or a count.
pub(crate) fn check(code: i32, what: impl fmt::Display) -> crate::Result<i32> {
    if code < 0 { Err(RbdError::of(code, what)) } else { Ok(code) }
}

/// A text for the library.
pub(crate) fn c_text(text: &str) -> crate::Result<CString> {
    CString::new(text).map_err(|_| RbdError::new(libc::EINVAL, "a name has a zero byte"))
}
