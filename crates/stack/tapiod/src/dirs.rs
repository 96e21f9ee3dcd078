//! Directories of the daemon.

use std::path::Path;

/// Modes of directories: of the daemon alone, and of what others may pass and not list.
pub const OURS: u32 = 0o700;
pub const PASSED: u32 = 0o711;

/// Makes a directory of this mode and those above it; one that is there stays as it is.
///
/// # Errors
/// A sentence with its path.
pub fn make_dir(path: &Path, mode: u32) -> Result<(), String> {
    let made = tapio_sys::private::make_dir(path, mode);
    made.map_err(|error| format!("{}: {error}; name another directory, or run as root", path.display()))
}
