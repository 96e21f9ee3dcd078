//! Errors of storage drivers: their numbers, names, and texts in our own words. sm-layout.md section 10.
//!
//! A number becomes `SR_BACKEND_FAILURE_<number>`; five of them are codes of their own.

mod table;

use std::fmt;
use std::io;
use std::path::Path;

use tapio_format::{FormatError, FormatErrorKind};
use tapio_types::ApiError;
use uuid::Uuid;

pub use table::ALL;

/// One error that drivers know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// As in `SR_BACKEND_FAILURE_79`.
    pub number: u16,
    /// As `VDISize`.
    pub name: &'static str,
    /// Cause and next step.
    pub text: &'static str,
}

/// What is known of a number.
pub fn known(number: u16) -> Option<&'static Known> {
    ALL.binary_search_by_key(&number, |known| known.number).ok().map(|at| &ALL[at])
}

/// The error of this number: its text, and in the manner of XenServer's drivers what happened here.
pub fn fail(number: u16, what: impl fmt::Display) -> ApiError {
    fail_with(number, what, "")
}

/// As [`fail`], with a document for the caller: what a probe found so far.
pub fn fail_with(number: u16, what: impl fmt::Display, document: impl Into<String>) -> ApiError {
    let text = known(number).map_or("The storage driver failed", |known| known.text);
    ApiError::backend(number, format!("{text} [opterr={what}]"), document)
}

/// The caller wanted it to stop.
pub fn cancelled() -> ApiError {
    ApiError::new("TASK_CANCELLED", [""])
}

/// Number 24: the VDI is in use.
pub fn vdi_in_use(vdi: Uuid, operation: &str) -> ApiError {
    ApiError::new("VDI_IN_USE", [vdi.to_string(), operation.to_string()])
}

/// Number 144: the SR has no such VDI.
pub fn vdi_missing(sr: Uuid, vdi: Uuid) -> ApiError {
    ApiError::new("VDI_MISSING", [sr.to_string(), vdi.to_string()])
}

/// Number 39: there are VDIs in it.
pub fn sr_not_empty() -> ApiError {
    ApiError::bare("SR_NOT_EMPTY")
}

/// Number 16: the device is used by something else.
pub fn sr_in_use(what: impl fmt::Display) -> ApiError {
    ApiError::new("SR_DEVICE_IN_USE", [what.to_string()])
}

/// An error of the system while doing `what` with `path`. `number` is for those that say nothing better themselves.
pub fn io(number: u16, what: &str, path: &Path, error: &io::Error) -> ApiError {
    let number = match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => 44,
        Some(libc::EROFS) => 461,
        Some(libc::EIO | libc::ENXIO | libc::ENODEV | libc::EREMOTEIO | libc::ENOMEDIUM) => 200,
        _ => number,
    };
    fail(number, format_args!("{what} {}: {error}", path.display()))
}

/// An error of an image. `number` is for those whose kind says nothing better.
pub fn image(number: u16, error: &FormatError) -> ApiError {
    let number = match error.kind() {
        FormatErrorKind::Cancelled => return cancelled(),
        FormatErrorKind::OutOfSpace => 44,
        FormatErrorKind::ReadOnly => 461,
        FormatErrorKind::TooDeep => 109,
        FormatErrorKind::Exists => 43,
        FormatErrorKind::Io if error.errno() == libc::EIO => 200,
        _ => number,
    };
    fail(number, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_there_once_and_says_something() {
        assert!(ALL.is_sorted_by(|a, b| a.number < b.number));
        for known in ALL {
            assert!(known.text.len() > 12, "{known:?}");
            assert!(known.name.chars().all(|c| c.is_ascii_alphanumeric()), "{known:?}");
        }
        assert_eq!(known(109).unwrap().name, "SnapshotChainTooLong");
        assert_eq!(known(1200).unwrap().name, "GenericException");
        assert_eq!(known(3), None);
    }

    #[test]
    fn a_full_disk_is_one_whatever_was_done() {
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let error = io(78, "cannot make", Path::new("/sr/a.vhd"), &full);
        assert_eq!(error.code, "SR_BACKEND_FAILURE_44");
        assert!(error.params[1].contains("[opterr=cannot make /sr/a.vhd"), "{error}");
        let wrapped = FormatError::io("cannot write", io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(image(78, &wrapped).code, "SR_BACKEND_FAILURE_44");
        assert!(fail(79, "x").params[1].starts_with("VDI Invalid size"));
    }
}
