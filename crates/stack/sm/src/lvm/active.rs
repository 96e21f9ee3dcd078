//! Which VDIs are open on this host, and how often: a file for each below the run directory.
//!
//! Volumes that a VDI's chain needs stay reachable as long as it is open. A worker that takes another's place reads
//! here what that one had made reachable; a reboot forgets it together with the volumes' being reachable.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use uuid::Uuid;

use crate::dir::facts::plain_uuid;

#[derive(Debug)]
pub(super) struct Active {
    directory: PathBuf,
    counts: Mutex<BTreeMap<Uuid, u32>>,
}

impl Active {
    /// Of the SR, as its last worker left it.
    pub(super) fn load(run_dir: &Path, sr: Uuid) -> Self {
        let directory = run_dir.join("lvm").join(sr.to_string());
        let mut counts = BTreeMap::new();
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let vdi = entry.file_name().to_str().and_then(plain_uuid);
            let count = fs::read_to_string(entry.path()).ok().and_then(|text| text.trim().parse().ok());
            if let (Some(vdi), Some(count)) = (vdi, count) {
                counts.insert(vdi, count);
            }
        }
        Self { directory, counts: Mutex::new(counts) }
    }

    fn note(&self, vdi: Uuid, count: u32) {
        let path = self.directory.join(vdi.to_string());
        let noted = match count {
            0 => fs::remove_file(&path),
            _ => fs::create_dir_all(&self.directory).and_then(|()| fs::write(&path, format!("{count}\n"))),
        };
        if let Err(error) = noted {
            tracing::warn!("{}: cannot be written: {error}", path.display());
        }
    }

    pub(super) fn add(&self, vdi: Uuid) {
        let mut counts = self.counts.lock();
        let count = counts.entry(vdi).or_insert(0);
        *count += 1;
        self.note(vdi, *count);
    }

    /// Whether it was the last.
    pub(super) fn take(&self, vdi: Uuid) -> bool {
        let mut counts = self.counts.lock();
        let left = counts.get(&vdi).map_or(0, |count| count.saturating_sub(1));
        if counts.contains_key(&vdi) {
            self.note(vdi, left);
        }
        if left == 0 {
            counts.remove(&vdi);
        } else {
            counts.insert(vdi, left);
        }
        left == 0
    }

    /// It is not open at all.
    pub(super) fn forget(&self, vdi: Uuid) {
        if self.counts.lock().remove(&vdi).is_some() {
            self.note(vdi, 0);
        }
    }

    pub(super) fn has(&self, vdi: Uuid) -> bool {
        self.counts.lock().contains_key(&vdi)
    }

    pub(super) fn all(&self) -> Vec<Uuid> {
        self.counts.lock().keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_knows_what_is_open() {
        let (dir, sr, vdi) = (tempfile::tempdir().unwrap(), Uuid::from_u128(1), Uuid::from_u128(2));
        let first = Active::load(dir.path(), sr);
        first.add(vdi);
        first.add(vdi);
        let second = Active::load(dir.path(), sr);
        assert_eq!(second.all(), [vdi]);
        assert!(!second.take(vdi) && second.has(vdi));
        assert!(second.take(vdi) && !second.has(vdi));
        assert!(Active::load(dir.path(), sr).all().is_empty());
        assert!(second.take(vdi), "one that is not there");
    }
}
