//! Disk processes and VBDs that do not agree.

use std::time::Instant;

use tapio_model::ApiError;
use tapio_stat::Snapshot;
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

    /// Page pools of this host whose SRs this toolstack has disks of, each with what its disks of this toolstack have
    /// counted.
    pub(crate) fn pools(&self) -> Vec<(PoolInfo, Vec<Snapshot>)> {
        let notes = self.all();
        let counted = |pool: &PoolInfo| {
            let is_member = |note: &&Note| {
                let (Some(process), Some(minor)) = (note.process, note.minor) else { return false };
                let at = (u32::try_from(process.pid).ok(), u32::from(minor));
                pool.disks.iter().any(|disk| (Some(disk.pid), disk.minor) == at)
            };
            let counters = |note: &Note| self.0.backend.counters(note.process?, note.minor?);
            notes.iter().filter(is_member).filter_map(counters).collect()
        };
        let is_ours = |pool: &PoolInfo| notes.iter().any(|note| pool.name.starts_with(&note.sr.to_string()));
        let pools = self.0.backend.pools().into_iter().filter(is_ours);
        pools.map(|pool| (counted(&pool), pool)).map(|(counted, pool)| (pool, counted)).collect()
    }
}
