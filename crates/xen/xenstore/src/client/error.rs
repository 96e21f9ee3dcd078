//! What can go wrong with xenstored.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::wire::{Errno, Request, WireError};

/// Why a request failed.
#[derive(Debug)]
pub enum XsError {
    /// xenstored refused it: why, and what was asked.
    Refused {
        /// As `ENOENT`.
        errno: Errno,
        /// Operation and path.
        what: String,
    },
    /// There is no xenstored.
    Missing {
        /// Where it was looked for, and what was there.
        tried: String,
    },
    /// The connection failed.
    Io {
        /// Socket or device.
        address: String,
        /// How.
        error: io::Error,
    },
    /// No answer came in time.
    Timeout {
        /// Operation and path.
        what: String,
        /// How long it was waited.
        after: Duration,
    },
    /// The answer makes no sense.
    Nonsense(String),
    /// A transaction met changes of others each time it was tried.
    Contended {
        /// How often.
        tries: u32,
    },
    /// A node does not hold what it should.
    Value {
        /// The node.
        path: String,
        /// What is wrong with its value.
        why: String,
    },
}

impl XsError {
    pub(super) fn refused(errno: Errno, request: &Request<'_>) -> Self {
        Self::Refused { errno, what: what(request) }
    }

    pub(super) fn odd(request: &Request<'_>, kind: u32) -> Self {
        Self::Nonsense(format!("{} was answered by a message of type {kind}", what(request)))
    }

    /// The errno of a refusal.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            _ => None,
        }
    }

    /// Whether the connection is still good after it.
    pub fn is_harmless(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Contended { .. } | Self::Value { .. })
    }
}

/// Operation and path, for messages.
pub(super) fn what(request: &Request<'_>) -> String {
    let of = match request {
        Request::Directory { path }
        | Request::Read { path }
        | Request::GetPerms { path }
        | Request::Watch { path, .. }
        | Request::Unwatch { path, .. }
        | Request::Write { path, .. }
        | Request::Mkdir { path }
        | Request::Rm { path }
        | Request::SetPerms { path, .. }
        | Request::DirectoryPart { path, .. } => (*path).to_owned(),
        Request::Introduce { domid, .. }
        | Request::Release { domid }
        | Request::GetDomainPath { domid }
        | Request::IsDomainIntroduced { domid }
        | Request::Resume { domid }
        | Request::SetTarget { domid, .. }
        | Request::SetFeature { domid, .. } => format!("of domain {domid}"),
        _ => return request.kind().name().to_owned(),
    };
    format!("{} {}", request.kind().name(), of.escape_default())
}

impl From<WireError> for XsError {
    fn from(error: WireError) -> Self {
        Self::Nonsense(error.to_string())
    }
}

impl fmt::Display for XsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { errno, what } => write!(f, "xenstored answered {errno} to {what}"),
            Self::Missing { tried } => write!(
                f,
                "there is no xenstored here ({tried}); start one, as 'tapio-xenstored', or set XENSTORED_PATH to its socket"
            ),
            Self::Io { address, error } => {
                write!(f, "the connection to xenstored by {address} failed: {error}")
            }
            Self::Timeout { what, after } => {
                write!(f, "xenstored has not answered {what} in {} s", after.as_secs_f32())
            }
            Self::Nonsense(what) => write!(f, "xenstored makes no sense: {what}"),
            Self::Contended { tries } => {
                write!(f, "a transaction met changes of others {tries} times; try again later")
            }
            Self::Value { path, why } => write!(f, "the node {path} {why}"),
        }
    }
}

impl std::error::Error for XsError {}
