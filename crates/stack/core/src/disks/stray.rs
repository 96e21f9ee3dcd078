//! Disk processes and VBDs that do not agree.

use std::time::Instant;

use tapio_model::ApiError;
use tapio_stat::pool::PoolInfo;
use uuid::Uuid;

use super::{Disks, Note, Phase, Process, TIDY};

impl Disks {
    /// Processes of this toolstack that no VBD has, with the VBD that each was started for. One that is being started
    /// is noted first, and is none of them.
    pub(crate) fn stray(&self) -> Vec<(Process, Uuid)> {
        let ours = self.0.backend.ours();
        let disks = self.0.lock();
        // A disk on its way names its process after it runs, and again when another takes its place.
        let is_stray = |process: Process, vbd: Uuid| match disks.get(&vbd) {
            None => true,
            Some(note) => note.phase == Phase::Running && note.process.is_some_and(|known| known != process),
        };
        ours.into_iter().filter(|(process, vbd)| is_stray(*process, *vbd)).collect()
    }

    /// Ends one of [`Self::stray`].
    ///
    /// # Errors
    /// `INVALID_VALUE`: the process is none of them. It does not end.
    pub(crate) fn end_stray(&self, pid: i64) -> Result<(), ApiError> {
        let found = self.stray().into_iter().find(|(process, _)| i64::from(process.pid) == pid);
        let Some((process, vbd)) = found else {
            return Err(ApiError::new("INVALID_VALUE", ["pid".to_owned(), pid.to_string()]));
        };
        tracing::info!(pid, %vbd, "a disk process that no VBD has is ended");
        self.0.backend.end(process, None, true, Instant::now() + TIDY)
    }

    /// Disks that a guest has and whose process does not live.
    pub(crate) fn dead(&self) -> Vec<Note> {
        let is_dead = |note: &Note| {
            note.phase == Phase::Running
                && note.process.is_none_or(|process| !self.0.backend.is_alive(process))
        };
        self.all().into_iter().filter(is_dead).collect()
    }

    /// Page pools of this host whose SRs this toolstack has disks of.
    pub(crate) fn pools(&self) -> Vec<PoolInfo> {
        let srs: Vec<String> = self.all().iter().map(|note| note.sr.to_string()).collect();
        let mut pools = self.0.backend.pools();
        pools.retain(|pool| srs.iter().any(|sr| pool.name.starts_with(sr)));
        pools
    }
}
