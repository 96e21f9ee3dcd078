//! Which devices guests have had, in a file of the state directory: `devices/<sr>.json`.
//!
//! A guest may make a volume group, or an array, on a disk that it was given. Such marks on a device that no guest has
//! had are this host's own, and it is refused.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::block_device::{BlockDevice, Identity};
use crate::mount;

/// What is remembered of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Had {
    pub(super) vdi: Uuid,
    /// The name that it had last.
    pub(super) device: String,
    /// Bytes, the last time.
    pub(super) size: u64,
}

/// The file.
#[derive(Debug)]
pub(super) struct Given {
    path: PathBuf,
    known: Mutex<BTreeMap<String, Had>>,
}

impl Given {
    /// Reads it. One that is not there is empty.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub(super) fn open(state_dir: &Path, sr: Uuid) -> io::Result<Self> {
        let path = state_dir.join("devices").join(format!("{sr}.json"));
        let known = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(error),
        };
        Ok(Self { path, known: Mutex::new(known) })
    }

    pub(super) fn has(&self, identity: &Identity) -> bool {
        self.known.lock().contains_key(identity.as_str())
    }

    /// Remembers a device, durably.
    ///
    /// # Errors
    /// The file cannot be written; nothing is remembered.
    pub(super) fn note(&self, identity: &Identity, vdi: Uuid, device: &BlockDevice) -> io::Result<()> {
        let had = Had { vdi, device: device.name.clone(), size: device.size };
        let mut known = self.known.lock();
        if known.get(identity.as_str()) == Some(&had) {
            return Ok(());
        }
        let mut next = known.clone();
        next.insert(identity.as_str().to_owned(), had);
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let unfinished = self.path.with_extension("unfinished");
        let mut file = File::create(&unfinished)?;
        file.write_all(&serde_json::to_vec_pretty(&next)?)?;
        file.sync_all()?;
        fs::rename(&unfinished, &self.path)?;
        mount::sync_directory(directory)?;
        *known = next;
        Ok(())
    }

    /// Forgets all of them, with the SR.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub(super) fn remove(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
