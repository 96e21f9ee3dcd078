//! Pre-shared keys in files, for as long as a disk process needs to read them.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tapio_model::ApiError;
use uuid::Uuid;

use super::Disks;

/// Below the run directory.
const DIR: &str = "keys";
/// As the TLS of disk processes finds it in a directory.
const NAME: &str = "keys.psk";

/// The user of all keys.
pub(crate) const USER: &str = "tapio";

/// A key in a directory of its own, which goes with this.
#[derive(Debug)]
pub(crate) struct KeyFile(PathBuf);

impl KeyFile {
    /// The directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.0
    }

    /// The file.
    pub(crate) fn path(&self) -> PathBuf {
        self.0.join(NAME)
    }

    fn write(&self, key: &str) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.path())?;
        writeln!(file, "{USER}:{key}")
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(dir = %self.0.display(), %error, "a key that is not needed any more stays");
        }
    }
}

impl Disks {
    /// Writes a key of hexadecimal digits into a file that only this host's administrator can read.
    ///
    /// # Errors
    /// It has other characters; the run directory's.
    pub(crate) fn key_file(&self, id: Uuid, key: &str) -> Result<KeyFile, ApiError> {
        // Another host may have made it.
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(ApiError::internal("a key for a disk is not of hexadecimal digits"));
        }
        let file = KeyFile(self.0.run_dir.join(DIR).join(id.to_string()));
        let written = file.write(key);
        written
            .map_err(|error| ApiError::internal(format!("cannot write {}: {error}", file.dir().display())))?;
        Ok(file)
    }

    /// Removes those of an earlier daemon.
    pub(super) fn drop_key_files(&self) {
        let _ = std::fs::remove_dir_all(self.0.run_dir.join(DIR));
    }
}
