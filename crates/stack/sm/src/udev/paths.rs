//! Paths by which disk processes open devices: `<run dir>/devices/<sr>/<vdi>`, links to nodes.
//!
//! A disk process that died is started again with the same path, perhaps when the device has another name. Each scan,
//! and each attaching, makes the links lead to where the devices are now.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use uuid::Uuid;

/// The links of an SR.
#[derive(Debug)]
pub(super) struct Paths {
    directory: PathBuf,
}

impl Paths {
    pub(super) fn new(run_dir: &Path, sr: Uuid) -> Self {
        Self { directory: run_dir.join("devices").join(sr.to_string()) }
    }

    pub(super) fn path(&self, vdi: Uuid) -> PathBuf {
        self.directory.join(vdi.to_string())
    }

    /// VDIs that have a link.
    pub(super) fn all(&self) -> Vec<Uuid> {
        let entries = fs::read_dir(&self.directory);
        let names = entries.map(|entries| entries.flatten().map(|entry| entry.file_name()));
        let uuid = |name: std::ffi::OsString| Uuid::try_parse(name.to_str()?).ok();
        names.map(|names| names.filter_map(uuid).collect()).unwrap_or_default()
    }

    /// Makes the link of a VDI lead to a node; answers whether it did not already.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn lead(&self, vdi: Uuid, node: &Path) -> io::Result<bool> {
        let path = self.path(vdi);
        if fs::read_link(&path).is_ok_and(|to| to == node) {
            return Ok(false);
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let unfinished = self.directory.join(format!(".{vdi}"));
        let _ = fs::remove_file(&unfinished);
        symlink(node, &unfinished)?;
        fs::rename(unfinished, path)?;
        Ok(true)
    }

    /// Removes the link of a VDI: its device may not be opened by it any more.
    pub(super) fn remove(&self, vdi: Uuid) {
        let _ = fs::remove_file(self.path(vdi));
    }

    /// Removes all that is left, with the SR.
    pub(super) fn end(&self) {
        self.all().into_iter().for_each(|vdi| self.remove(vdi));
        let _ = fs::remove_dir(&self.directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_follows_its_device() {
        let dir = tempfile::tempdir().unwrap();
        let (paths, vdi) = (Paths::new(dir.path(), Uuid::from_u128(1)), Uuid::from_u128(2));
        assert!(paths.lead(vdi, Path::new("/dev/sdb")).unwrap());
        assert!(!paths.lead(vdi, Path::new("/dev/sdb")).unwrap());
        assert!(paths.lead(vdi, Path::new("/dev/sdc")).unwrap());
        assert_eq!(fs::read_link(paths.path(vdi)).unwrap(), Path::new("/dev/sdc"));
        assert_eq!(paths.all(), [vdi]);
        paths.end();
        assert!(!dir.path().join("devices").join(Uuid::from_u128(1).to_string()).exists());
    }
}
