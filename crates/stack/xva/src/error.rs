//! What can be wrong with an archive.

use std::fmt;
use std::io;

/// Why an archive cannot be read or written.
#[derive(Debug)]
pub enum XvaError {
    /// It ends before its end.
    Early,
    /// Another member than this one is there.
    Unexpected {
        /// The name that belongs there.
        expected: String,
        /// The name that is there.
        found: String,
    },
    /// A piece does not have its sum.
    Damaged {
        /// The member.
        name: String,
    },
    /// It refers to an object that it does not have.
    Missing {
        /// The name of the object in the archive.
        id: String,
    },
    /// It is of a version that is not read.
    Incompatible(String),
    /// It is no such archive.
    Wrong(String),
    /// The stream below it failed.
    Io(io::Error),
}

impl fmt::Display for XvaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Early => f.write_str("the archive ends before all of it had come"),
            Self::Unexpected { expected, found } => {
                write!(f, "the archive has '{found}' where '{expected}' belongs")
            }
            Self::Damaged { name } => write!(f, "'{name}' does not have its checksum: it is damaged"),
            Self::Missing { id } => write!(f, "the archive refers to '{id}' and does not have it"),
            Self::Incompatible(why) | Self::Wrong(why) => f.write_str(why),
            Self::Io(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for XvaError {}

impl From<io::Error> for XvaError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Early,
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => Self::Wrong(error.to_string()),
            _ => Self::Io(error),
        }
    }
}

/// A text of an archive as an error shows it: short, without control characters.
pub(crate) fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).take(80).collect()
}
