//! What a pool of hosts asks of the storage of one of them.

use std::sync::Arc;

use tapio_model::ApiError;

use super::notes::Note;
use super::{Call, Storage, half_done, pbd, plug, sr};
use crate::db::Change;

/// Attaches an SR to this host by its PBD.
///
/// # Errors
/// As `PBD.plug`.
pub fn plug_pbd(storage: &Arc<Storage>, pbd: &str) -> Result<(), ApiError> {
    plug::plug(&Call::own(storage), pbd)
}

/// Detaches an SR from this host.
///
/// # Errors
/// As `PBD.unplug`.
pub fn unplug_pbd(storage: &Arc<Storage>, pbd: &str) -> Result<(), ApiError> {
    plug::unplug(&Call::own(storage), pbd)
}

/// A PBD that is not attached now is attached by the next start.
pub fn want_pbd(change: &mut Change<'_>, pbd: &str) -> Result<(), ApiError> {
    Note::PbdWanted { pbd: pbd.to_owned() }.put(change)
}

/// Removes the record of a PBD.
///
/// # Errors
/// The database's.
pub fn forget_pbd(change: &mut Change<'_>, pbd: &str) -> Result<(), ApiError> {
    pbd::remove(change, pbd)
}

/// Removes the records of an SR; the storage keeps its data.
///
/// # Errors
/// The database's.
pub fn forget_sr(change: &mut Change<'_>, sr: &str) -> Result<(), ApiError> {
    sr::remove_records(change, sr)
}

/// The SR on which a note's work can be finished or undone by any host that has it attached.
pub fn sr_of_note(text: &str) -> Option<String> {
    match serde_json::from_str(text).ok()? {
        Note::ImageMade { sr, .. }
        | Note::VdiDestroy { sr, .. }
        | Note::DataDestroy { sr, .. }
        | Note::Introduce { sr, .. } => Some(sr),
        _ => None,
    }
}

/// Finishes or undoes what the notes of this host say of an SR, as when it is attached.
pub fn finish_half_done(storage: &Arc<Storage>, sr: &str) {
    let call = Call::own(storage);
    if let Ok(attached) = storage.attached(sr) {
        half_done::images(&call, &attached);
    }
}

impl Storage {
    /// Whether this host has an SR attached.
    pub(crate) fn has_attached(&self, sr: &str) -> bool {
        self.state().attached.contains_key(sr)
    }
}
