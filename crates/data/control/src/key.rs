//! Keys of encrypted images, as they come along with a request.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use zeroize::Zeroize;

use crate::{ControlError, Errno, Result};

/// A key of an encrypted image. Never printed, and wiped when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(pub Vec<u8>);

impl Drop for Key {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl Key {
    /// Reads a key and nothing behind it.
    ///
    /// # Errors
    /// `EINVAL` unless there are exactly 32 or 64 bytes; why it cannot be read.
    pub fn read(from: impl Read) -> Result<Self> {
        // Room for all of it at once: a vector that grows leaves copies behind.
        let mut key = Self(Vec::with_capacity(80));
        from.take(65).read_to_end(&mut key.0).map_err(|error| ControlError::io("reading the key", &error))?;
        if matches!(key.0.len(), 32 | 64) {
            return Ok(key);
        }
        Err(ControlError::new(Errno::EINVAL, "unsupported key size")
            .next("give a key of exactly 32 or 64 bytes"))
    }

    /// Reads the key in a file.
    ///
    /// # Errors
    /// As [`Key::read`], naming the file.
    pub fn in_file(path: &Path) -> Result<Self> {
        // A pipe must not make the caller wait for its writer.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let opened =
            OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| {
                ControlError::io(format_args!("opening the key {}", path.display()), &error)
            })?;
        Self::read(opened).map_err(|error| ControlError {
            message: format!("{}: {}", path.display(), error.message),
            ..error
        })
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} bytes)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_one_of_two_lengths_and_are_not_printed() {
        for len in [32, 64] {
            let key = Key::read(&vec![1; len][..]).expect("valid");
            assert_eq!(key.0.len(), len);
            assert_eq!(format!("{key:?}"), format!("Key({len} bytes)"));
        }
        for len in [0, 31, 33, 65, 1000] {
            assert_eq!(Key::read(&vec![1; len][..]).expect_err("invalid").errno, Errno::EINVAL, "{len}");
        }
        let missing = Key::in_file(Path::new("/nonexistent/key")).expect_err("not there");
        assert!(missing.to_string().contains("/nonexistent/key"), "{missing}");
    }
}
