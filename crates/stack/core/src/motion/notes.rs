//! Notes of motions, kept in the store until they are over: one at the host that sends, one at the host that receives.

use serde::{Deserialize, Serialize};
use tapio_model::ApiError;
use uuid::Uuid;

use super::records::Records;
use crate::db::{Change, Db};

const OUT: &str = "motion/out/";
const IN: &str = "motion/in/";

/// The host that receives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// `ADDRESS` or `ADDRESS:PORT`.
    pub(super) address: String,
    /// Its certificate (DER), two digits a byte.
    pub(super) certificate: String,
    /// The secret of this motion.
    pub(super) secret: String,
}

/// A VM that this host sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Out {
    pub(super) id: Uuid,
    /// References of the VM and its snapshots, the VM first.
    pub(super) vms: Vec<String>,
    /// References of its disks.
    pub(super) vdis: Vec<String>,
    pub(super) to: Place,
    /// Whether the VM stays here too.
    pub(super) copy: bool,
    /// Whether the VM is at the other host from now on. Before, it is here.
    pub(super) is_decided: bool,
    /// Whether it has left this host: the receiver is to forget the motion, and nothing else is left to do.
    #[serde(default)]
    pub(super) is_left: bool,
    /// Seconds for which a lost network is tried again.
    pub(super) timeout: u64,
}

/// How far a motion is at the host that receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Phase {
    /// Disks come.
    Receiving,
    /// All is here; the host that sends decides.
    Prepared,
    /// The VM is here.
    Committed,
    /// What came goes.
    Aborting,
}

/// A VM that this host receives.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct In {
    pub(super) id: Uuid,
    /// SHA-256 of the secret, two digits a byte.
    pub(super) secret: String,
    /// The fingerprint of the certificate that the host which sends must show.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) peer: Option<String>,
    pub(super) phase: Phase,
    /// What is to be made, once it is prepared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) records: Option<Records>,
    /// References of the VMs that were made, the VM first.
    pub(super) made: Vec<String>,
    /// Seconds without a word after which it is given up while disks come.
    pub(super) timeout: u64,
}

pub(super) fn text(note: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(note).map_err(|why| ApiError::internal(format!("a note of a motion: {why}")))
}

pub(super) fn read<T: for<'a> Deserialize<'a>>(db: &Db, prefix: &str) -> Vec<T> {
    let notes = db.notes(prefix).into_iter();
    let read = notes.filter_map(|(key, text)| match serde_json::from_str(&text) {
        Ok(note) => Some(note),
        Err(why) => {
            tracing::error!(key, %why, "a note about a motion cannot be read and is left as it is");
            None
        }
    });
    read.collect()
}

impl Out {
    pub(super) fn all(db: &Db) -> Vec<Self> {
        read(db, OUT)
    }

    pub(super) fn put(&self, change: &mut Change<'_>) -> Result<(), ApiError> {
        change.put_note(format!("{OUT}{}", self.id), text(self)?);
        Ok(())
    }

    pub(super) fn drop_from(&self, change: &mut Change<'_>) {
        change.drop_note(format!("{OUT}{}", self.id));
    }

    pub(super) fn is_noted(&self, db: &Db) -> bool {
        !db.notes(&format!("{OUT}{}", self.id)).is_empty()
    }
}

impl In {
    pub(super) fn all(db: &Db) -> Vec<Self> {
        read(db, IN)
    }

    /// # Errors
    /// `HANDLE_INVALID`: it is over, or was given up.
    pub(super) fn find(db: &Db, id: Uuid) -> Result<Self, ApiError> {
        let found = read(db, &format!("{IN}{id}")).into_iter().next();
        found.ok_or_else(|| ApiError::new("HANDLE_INVALID", ["motion".to_owned(), id.to_string()]))
    }

    pub(super) fn put(&self, change: &mut Change<'_>) -> Result<(), ApiError> {
        change.put_note(format!("{IN}{}", self.id), text(self)?);
        Ok(())
    }

    pub(super) fn drop_from(&self, change: &mut Change<'_>) {
        change.drop_note(format!("{IN}{}", self.id));
    }
}
