//! What is written down about a disk process, so that a daemon that is started again finds it.
//!
//! One file a VBD below `RUN_DIR/disks`, replaced as a whole. The directory is empty after the host was rebooted,
//! as is the list of processes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tapio_model::ApiError;
use tapio_sm::OpenSpec;
use tapio_types::ChainSpec;
use tapio_vm::{DiskSpec, FrontSpec};
use uuid::Uuid;

use super::backend::{Offer, Process, Tuning};
use super::place::ExportNote;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Being made; not the guest's yet.
    Starting,
    /// The guest's.
    Running,
    /// Being taken away.
    Ending,
}

/// A disk of a VBD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// As the guest's driver knows it.
    pub spec: DiskSpec,
    /// `VM.uuid`.
    pub vm: Uuid,
    /// The guest's driver.
    pub driver: String,
    /// The VDI's reference.
    pub vdi: String,
    /// `VDI.uuid`.
    pub vdi_uuid: Uuid,
    /// `SR.uuid`; names the page pool.
    pub sr: Uuid,
    /// How far it is.
    pub phase: Phase,
    /// Minor number, once there is one.
    pub minor: Option<u16>,
    /// The process, once there is one.
    pub process: Option<Process>,
    /// The images that it has open.
    pub chain: Option<ChainSpec>,
    /// The log of changed blocks that it has open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
    /// How it is offered.
    pub front: Option<FrontSpec>,
    /// Where.
    pub offer: Offer,
    /// Bytes.
    pub size: u64,
    /// How it behaves.
    pub tuning: Tuning,
    /// How it is exported: then `spec.vbd` names no VBD, and there is no VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<ExportNote>,
    /// The token of the client that has paused it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<String>,
}

impl Note {
    /// A disk of a VDI that is about to be made: no process, nothing open, offered to none.
    pub fn starting(
        spec: DiskSpec,
        (vm, driver): (Uuid, &str),
        (vdi, vdi_uuid): (&str, Uuid),
        sr: Uuid,
        tuning: Tuning,
    ) -> Self {
        Self {
            spec,
            vm,
            driver: driver.to_owned(),
            vdi: vdi.to_owned(),
            vdi_uuid,
            sr,
            phase: Phase::Starting,
            minor: None,
            process: None,
            chain: None,
            log: None,
            front: None,
            offer: Offer::default(),
            size: 0,
            tuning,
            export: None,
            paused: None,
        }
    }

    /// What a process opens that takes the place of this one.
    pub fn open_spec(&self) -> Option<OpenSpec> {
        self.chain.clone().map(|chain| OpenSpec { chain, log: self.log.clone() })
    }

    /// It has this open.
    pub(super) fn opens(&mut self, with: &OpenSpec) {
        (self.chain, self.log) = (Some(with.chain.clone()), with.log.clone());
    }
}

/// The files.
#[derive(Clone, Debug)]
pub struct Notes(PathBuf);

impl Notes {
    /// Those of this run directory.
    pub fn new(run_dir: &Path) -> Self {
        Self(run_dir.join("disks"))
    }

    fn path(&self, vbd: Uuid) -> PathBuf {
        self.0.join(format!("{vbd}.json"))
    }

    /// Writes one down. Other processes see the old one or the new one.
    ///
    /// # Errors
    /// The run directory is full or gone.
    pub fn write(&self, note: &Note) -> Result<(), ApiError> {
        let path = self.path(note.spec.vbd);
        let fresh = path.with_extension("new");
        let written = serde_json::to_vec(note).map_err(io::Error::from).and_then(|text| {
            // The directory is there but for the first time.
            fs::write(&fresh, &text).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    fs::create_dir_all(&self.0).and_then(|()| fs::write(&fresh, &text))
                }
                _ => Err(error),
            })?;
            fs::rename(&fresh, &path)
        });
        written.map_err(|error| {
            ApiError::internal(format!("cannot write {}: {error}; the disk is not changed", path.display()))
        })
    }

    /// Forgets one.
    pub fn remove(&self, vbd: Uuid) {
        let path = self.path(vbd);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "a note of a disk that is gone stays");
        }
    }

    /// All that are there. What cannot be read is logged and left: its process is found as an orphan.
    pub fn read(&self) -> Vec<Note> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(path = %self.0.display(), %error, "notes of disks cannot be read");
                }
                return Vec::new();
            }
        };
        let paths = entries.flatten().map(|entry| entry.path());
        let notes = paths.filter(|path| path.extension().is_some_and(|ending| ending == "json"));
        notes
            .filter_map(|path| {
                let read = fs::read(&path).and_then(|text| Ok(serde_json::from_slice::<Note>(&text)?));
                read.inspect_err(|error| tracing::warn!(path = %path.display(), %error, "a note is damaged"))
                    .ok()
            })
            .collect()
    }
}
