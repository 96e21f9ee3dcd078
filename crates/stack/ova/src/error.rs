//! What can be wrong with a package.

use std::fmt;
use std::io;

use tapio_xva::XvaError;

/// Why a package cannot be read or written.
#[derive(Debug)]
pub enum OvaError {
    /// It ends before its end.
    Early,
    /// A file does not have the sum of the manifest.
    Damaged {
        /// The file.
        name: String,
    },
    /// It is right, and has something that is not read here.
    Unsupported(String),
    /// It is no package, or contradicts itself.
    Wrong(String),
    /// What is below it failed.
    Io(io::Error),
}

impl OvaError {
    pub(crate) fn wrong(why: impl Into<String>) -> Self {
        Self::Wrong(why.into())
    }
}

impl fmt::Display for OvaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Early => f.write_str("the package ends early: fetch it again"),
            Self::Damaged { name } => {
                write!(
                    f,
                    "'{name}' does not have its sum in the manifest: it is damaged, fetch the package again"
                )
            }
            Self::Unsupported(why) | Self::Wrong(why) => f.write_str(why),
            Self::Io(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for OvaError {}

impl From<io::Error> for OvaError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Early,
            _ => Self::Io(error),
        }
    }
}

impl From<XvaError> for OvaError {
    fn from(error: XvaError) -> Self {
        match error {
            XvaError::Early => Self::Early,
            XvaError::Io(error) => Self::Io(error),
            other => Self::Wrong(other.to_string()),
        }
    }
}

/// A text of a package as an error shows it: short, without control characters.
pub(crate) fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).take(80).collect()
}
