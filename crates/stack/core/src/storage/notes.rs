//! Notes of what is half done, kept in the store beside the objects until it is done.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tapio_model::ApiError;
use tapio_types::Access;
use uuid::Uuid;

use crate::db::{Change, Db};

/// Where this part's notes lie.
const PREFIX: &str = "storage/";

/// What is half done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "what")]
pub(super) enum Note {
    /// An SR is made.
    SrCreate(NewSr),
    /// An SR is erased; its reference.
    SrDestroy { sr: String },
    /// An SR is attached; the PBD's reference.
    PbdPlug { pbd: String },
    /// An SR is detached; the PBD's reference.
    PbdUnplug { pbd: String },
    /// A PBD that was attached could not be at the last start: the next one tries again.
    PbdWanted { pbd: String },
    /// An image is made that has no record until it is complete.
    ImageMade { sr: String, image: Uuid },
    /// A VDI is copied into one that is there.
    CopyInto { sr: String, source: String, base: Option<String>, into: String },
    /// An image is removed, its record after it.
    VdiDestroy { sr: String, vdi: String },
    /// The data of a VDI are removed, its log of changed blocks stays.
    DataDestroy { sr: String, vdi: String },
    /// An image is taken in.
    Introduce { sr: String, image: Uuid, fields: BTreeMap<String, String> },
    /// VDIs are moved.
    Move(Move),
    /// A disk process has a VDI open.
    Holder { vdi: String, holder: String, access: Access },
}

/// An SR to be made, as its records will say. `device_config` names secrets and holds none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NewSr {
    pub(super) uuid: Uuid,
    pub(super) host: String,
    pub(super) name_label: String,
    pub(super) name_description: String,
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) content_type: String,
    pub(super) shared: bool,
    pub(super) device_config: BTreeMap<String, String>,
    pub(super) sm_config: BTreeMap<String, String>,
    pub(super) physical_size: i64,
}

/// VDIs that are moved to another SR, or within theirs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Move {
    /// Of this move.
    pub(super) id: Uuid,
    /// Where they lie; the reference.
    pub(super) sr: String,
    /// Where they go; the reference.
    pub(super) to: String,
    /// Those that are not there yet.
    pub(super) members: Vec<Moving>,
    /// The images that are made there and are no VDI yet.
    pub(super) images: Vec<Uuid>,
    /// The image that a disk process is going over to.
    pub(super) switching: Option<Uuid>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Moving {
    /// The VDI's reference.
    pub(super) vdi: String,
    /// What its image will be.
    pub(super) image: Uuid,
    /// The VBD whose disk process writes to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) vbd: Option<Uuid>,
}

impl Note {
    /// Its key in the store.
    pub(super) fn key(&self) -> String {
        let (kind, of) = match self {
            Self::SrCreate(new) => ("sr-create", new.uuid.to_string()),
            Self::SrDestroy { sr } => ("sr-destroy", sr.clone()),
            Self::PbdPlug { pbd } => ("pbd-plug", pbd.clone()),
            Self::PbdUnplug { pbd } => ("pbd-unplug", pbd.clone()),
            Self::PbdWanted { pbd } => ("pbd-wanted", pbd.clone()),
            Self::ImageMade { image, .. } => ("image-made", image.to_string()),
            Self::CopyInto { into, .. } => ("copy-into", into.clone()),
            Self::VdiDestroy { vdi, .. } => ("vdi-destroy", vdi.clone()),
            Self::DataDestroy { vdi, .. } => ("data-destroy", vdi.clone()),
            Self::Introduce { image, .. } => ("introduce", image.to_string()),
            Self::Move(moving) => ("move", moving.id.to_string()),
            Self::Holder { vdi, holder, .. } => ("holder", format!("{vdi}/{holder}")),
        };
        format!("{PREFIX}{kind}/{of}")
    }

    /// Writes it with the change.
    ///
    /// # Errors
    /// It cannot be written as text: a defect of ours.
    pub(super) fn put(&self, change: &mut Change<'_>) -> Result<(), ApiError> {
        let text =
            serde_json::to_string(self).map_err(|why| ApiError::internal(format!("{self:?}: {why}")))?;
        change.put_note(self.key(), text);
        Ok(())
    }

    /// Removes it with the change.
    pub(super) fn drop_from(&self, change: &mut Change<'_>) {
        change.drop_note(self.key());
    }

    /// The SR that must be attached before something can be made of it.
    pub(super) fn sr(&self) -> Option<&str> {
        match self {
            Self::ImageMade { sr, .. }
            | Self::CopyInto { sr, .. }
            | Self::VdiDestroy { sr, .. }
            | Self::DataDestroy { sr, .. }
            | Self::Introduce { sr, .. } => Some(sr),
            _ => None,
        }
    }
}

/// Every note of this part that can be read; one that cannot, of a newer version, stays and is logged.
pub(super) fn all(db: &Db) -> Vec<Note> {
    let read = |(key, text): (String, String)| match serde_json::from_str(&text) {
        Ok(note) => Some(note),
        Err(why) => {
            tracing::error!(key, %why, "a note about storage cannot be read and is left as it is");
            None
        }
    };
    db.notes(PREFIX).into_iter().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let notes = [
            Note::PbdPlug { pbd: "p".into() },
            Note::ImageMade { sr: "s".into(), image: Uuid::nil() },
            Note::Holder { vdi: "v".into(), holder: "h".into(), access: Access::ReadOnly },
        ];
        for note in notes {
            let text = serde_json::to_string(&note).expect("it is plain");
            assert_eq!(serde_json::from_str::<Note>(&text).expect("it was written so"), note);
            assert!(note.key().starts_with("storage/"));
        }
    }
}
