//! Files of the daemon that a backup of its host has.

use std::path::PathBuf;

/// Whether the daemon would start with this file.
type Check = Box<dyn Fn(&[u8]) -> Result<(), String> + Send + Sync>;

/// A file of the daemon that a backup of its host has.
pub struct HostFile {
    /// Its name in the archive.
    pub name: &'static str,
    /// Where it is.
    pub path: PathBuf,
    /// Why the daemon would not start with these bytes, or would not find what it has.
    pub check: Check,
}

impl std::fmt::Debug for HostFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostFile").field("name", &self.name).field("path", &self.path).finish_non_exhaustive()
    }
}
