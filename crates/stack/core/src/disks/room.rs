//! Disks whose volumes are too short: which of them rang, and what each wants.

use std::time::{Duration, Instant};

use tapio_control::{RoomBell, RoomReport};
use tapio_model::ApiError;
use tapio_types::Access;
use uuid::Uuid;

use super::{Disks, ids, noted};

/// How long a disk process may take to say how its room stands.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The disk of a bell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rang {
    /// Of which VBD.
    pub vbd: Uuid,
    /// The VDI that it writes to.
    pub vdi: Uuid,
    /// Its SR.
    pub sr: Uuid,
}

impl Disks {
    /// The disk that rang; none where no process of ours has it open for writing.
    pub(crate) fn rang(&self, bell: &RoomBell) -> Option<Rang> {
        let disks = self.0.lock();
        let is_it = |note: &&super::Note| {
            let process = note.process.is_some_and(|process| i64::from(process.pid) == i64::from(bell.pid));
            let writes = note.chain.as_ref().is_some_and(|chain| chain.access == Access::ReadWrite);
            process && note.minor == Some(bell.minor) && writes
        };
        disks.values().find(is_it).map(|note| Rang { vbd: note.spec.vbd, vdi: note.vdi_uuid, sr: note.sr })
    }

    /// Has the disk of a VBD look how long its volume is; how its room stands then, where it asks for room.
    ///
    /// # Errors
    /// It has no process, or that does not answer.
    pub(crate) fn look_for_room(&self, vbd: Uuid) -> Result<Option<RoomReport>, ApiError> {
        let (process, minor) = ids(&noted(&self.0.lock(), vbd)?)?;
        self.0.backend.look_for_room(process, minor, Instant::now() + TIMEOUT)
    }
}
