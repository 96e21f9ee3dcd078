//! Advisory locks of files (flock(2)).

use std::fs::{File, TryLockError};
use std::io;

/// Takes the lock of a file without waiting; whether it was free. The lock belongs to the open file: it ends when the
/// last descriptor of it is closed, in whichever process.
///
/// # Errors
/// The kernel's.
pub fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_open_file_has_the_lock() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let (one, other) = (file.reopen().expect("opened"), file.reopen().expect("opened"));
        assert!(try_lock(&one).expect("asked"));
        assert!(try_lock(&one).expect("asked"), "it has it already");
        assert!(!try_lock(&other).expect("asked"));
    }
}
