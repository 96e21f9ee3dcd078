//! The one error type of this crate: a small kind to match on, and what, where and why for a person.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::num::NonZeroI32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The result of everything here that can fail.
pub type Result<T, E = FormatError> = std::result::Result<T, E>;

/// What went wrong, as a caller needs to know it to decide what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FormatErrorKind {
    /// The storage below failed; the source says how.
    Io,
    /// The bytes are not of this format at all (no cookie where one must be).
    NotThisFormat,
    /// The format is right, but the image uses something that is not read or written here.
    Unsupported,
    /// The image contradicts itself or the format.
    Corrupt,
    /// A journalled operation runs or was interrupted: the image is disabled until it is reverted.
    Disabled,
    /// The file system, the device or the format has no room left.
    OutOfSpace,
    /// The image or its storage may not be written.
    ReadOnly,
    /// A file that the image needs is not there.
    Missing,
    /// A chain that comes back to an image already in it.
    Loop,
    /// A chain with more images than allowed.
    TooDeep,
    /// A name, size or option that makes no sense.
    InvalidArgument,
    /// What was to be made is there already.
    Exists,
    /// It cannot be done while the image is in use; the sentence says how it can.
    NeedsPause,
    /// The caller cancelled it.
    Cancelled,
    /// Only the thread that has the image open can do it.
    Owner,
}

impl FormatErrorKind {
    /// The kind as words for a message.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Io => "input/output error",
            Self::NotThisFormat => "not an image of this format",
            Self::Unsupported => "not supported",
            Self::Corrupt => "damaged image",
            Self::Disabled => "image is disabled",
            Self::OutOfSpace => "no space left",
            Self::ReadOnly => "read only",
            Self::Missing => "not found",
            Self::Loop => "loop of parents",
            Self::TooDeep => "chain too deep",
            Self::InvalidArgument => "invalid argument",
            Self::Exists => "exists already",
            Self::NeedsPause => "in use",
            Self::Cancelled => "cancelled",
            Self::Owner => "another thread's",
        }
    }
}

/// A failure with its kind, the image, the place in it, a sentence, and the failure below if there was one.
#[derive(Clone, Debug)]
pub struct FormatError {
    kind: FormatErrorKind,
    path: Option<PathBuf>,
    offset: Option<u64>,
    detail: Cow<'static, str>,
    source: Option<Arc<io::Error>>,
    /// The number, where it is another than that of the kind. Four bytes: every request's task has room for errors.
    number: Option<NonZeroI32>,
}

impl FormatError {
    /// A failure of `kind`; `detail` is a sentence that names the cause and, where there is one, the next step.
    pub fn new(kind: FormatErrorKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, path: None, offset: None, detail: detail.into(), source: None, number: None }
    }

    /// A failure of the storage below while doing `what`.
    pub fn io(what: impl Into<Cow<'static, str>>, source: io::Error) -> Self {
        let kind = match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => FormatErrorKind::OutOfSpace,
            Some(libc::EROFS) => FormatErrorKind::ReadOnly,
            Some(libc::ENOENT | libc::ENOTDIR) => FormatErrorKind::Missing,
            Some(libc::EEXIST) => FormatErrorKind::Exists,
            Some(libc::ELOOP) => FormatErrorKind::Loop,
            _ => FormatErrorKind::Io,
        };
        let source = Some(Arc::new(source));
        Self { kind, path: None, offset: None, detail: what.into(), source, number: None }
    }

    /// The same failure under another error number, one that scripts know from XenServer's tools.
    #[must_use]
    pub const fn with_errno(mut self, number: i32) -> Self {
        self.number = NonZeroI32::new(number);
        self
    }

    /// The same failure, saying which image. A path named already, nearer to the cause, stays.
    #[must_use]
    pub fn with_path(mut self, path: &Path) -> Self {
        self.path.get_or_insert_with(|| path.to_path_buf());
        self
    }

    /// The same failure, saying where in the image, in bytes.
    #[must_use]
    pub fn with_offset(mut self, offset: u64) -> Self {
        self.offset.get_or_insert(offset);
        self
    }

    /// What to match on.
    pub const fn kind(&self) -> FormatErrorKind {
        self.kind
    }

    /// The image, if known.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The place in the image in bytes, if known.
    pub const fn offset(&self) -> Option<u64> {
        self.offset
    }

    /// The sentence, without path, kind and source.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// The error number that stands for this failure: what the tools exit with and what a guest's request gets.
    pub fn errno(&self) -> i32 {
        if let Some(number) = self.number {
            return number.get();
        }
        if let Some(errno) = self.source.as_deref().and_then(io::Error::raw_os_error) {
            return errno;
        }
        match self.kind {
            FormatErrorKind::Io => libc::EIO,
            FormatErrorKind::Unsupported => libc::EOPNOTSUPP,
            FormatErrorKind::OutOfSpace | FormatErrorKind::TooDeep => libc::ENOSPC,
            FormatErrorKind::ReadOnly => libc::EROFS,
            FormatErrorKind::Missing => libc::ENOENT,
            FormatErrorKind::Loop => libc::ELOOP,
            FormatErrorKind::Exists => libc::EEXIST,
            FormatErrorKind::Cancelled => libc::ECANCELED,
            FormatErrorKind::NeedsPause | FormatErrorKind::Owner => libc::EBUSY,
            FormatErrorKind::NotThisFormat
            | FormatErrorKind::Corrupt
            | FormatErrorKind::Disabled
            | FormatErrorKind::InvalidArgument => libc::EINVAL,
        }
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "{}: ", path.display())?;
        }
        f.write_str(&self.detail)?;
        if let Some(offset) = self.offset {
            write!(f, " (at byte {offset})")?;
        }
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl std::error::Error for FormatError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<FormatError> for io::Error {
    fn from(error: FormatError) -> Self {
        match error.source.as_deref().and_then(io::Error::raw_os_error) {
            Some(errno) => Self::from_raw_os_error(errno),
            None => Self::other(error),
        }
    }
}

/// A damaged image, in one word at the many places that find one.
pub(crate) fn corrupt(detail: impl Into<Cow<'static, str>>) -> FormatError {
    FormatError::new(FormatErrorKind::Corrupt, detail)
}

/// An argument that makes no sense.
pub(crate) fn invalid(detail: impl Into<Cow<'static, str>>) -> FormatError {
    FormatError::new(FormatErrorKind::InvalidArgument, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_object_cause_and_place() {
        let error =
            corrupt("the footer's checksum is wrong").with_offset(3072).with_path(Path::new("/d/a.vhd"));
        assert_eq!(error.to_string(), "/d/a.vhd: the footer's checksum is wrong (at byte 3072)");
        assert_eq!(error.errno(), libc::EINVAL);
    }

    #[test]
    fn an_error_of_the_system_keeps_its_number_and_picks_its_kind() {
        let error = FormatError::io("cannot write", io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!((error.kind(), error.errno()), (FormatErrorKind::OutOfSpace, libc::ENOSPC));
    }

    #[test]
    fn the_first_path_named_is_kept() {
        let error = invalid("no").with_path(Path::new("a")).with_path(Path::new("b"));
        assert_eq!(error.path(), Some(Path::new("a")));
    }
}
