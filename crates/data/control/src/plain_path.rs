//! Paths in commands.

use std::path::Path;

use crate::{ControlError, Errno, Result};

/// Refuses what is no absolute path of at most `len_max` bytes, or cannot be shown.
pub(crate) fn plain_path(path: &Path, what: &str, len_max: usize) -> Result<()> {
    let text = path.to_str().unwrap_or("\0");
    if !path.is_absolute() || text.chars().any(char::is_control) || text.len() > len_max.min(4095) {
        return Err(ControlError::new(
            Errno::EINVAL,
            format!("the {what} path '{}' is not usable", path.display().to_string().escape_default()),
        )
        .next(format!("give an absolute path of at most {} bytes", len_max.min(4095))));
    }
    Ok(())
}
