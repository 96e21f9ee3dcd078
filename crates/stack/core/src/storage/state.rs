//! What the storage knows of now: attached SRs, and the disk processes that have VDIs open.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::MutexGuard;
use tapio_types::Access;

use super::Storage;
use super::attached::Attached;

/// What has a VDI open, by the holder's name (a VBD's reference).
pub(super) type Holders = BTreeMap<String, Access>;

/// What is known.
#[derive(Debug, Default)]
pub(super) struct StorageState {
    /// By the VDI's reference.
    pub(super) holders: BTreeMap<String, Holders>,
    /// Disks that were moved while they were used, by the reference of the VDI that is no more: who began to unplug one
    /// before that still finds it. An entry for each move of this daemon.
    pub(super) moved: BTreeMap<String, String>,
    /// By the SR's reference.
    pub(super) attached: BTreeMap<String, Arc<Attached>>,
}

impl StorageState {
    /// Whether several disk processes have the VDI open and one of them writes: what a fork puts on top takes one
    /// writer.
    pub(super) fn is_shared_by_a_writer(&self, vdi: &str) -> bool {
        let several = self.holders.get(vdi).is_some_and(|holders| holders.len() > 1);
        several && self.use_of(vdi) == Some(Access::ReadWrite)
    }

    /// How the VDI is open: for writing if any holder writes; none if it is not.
    pub(super) fn use_of(&self, vdi: &str) -> Option<Access> {
        let holders = self.holders.get(vdi)?;
        let writes = holders.values().any(|access| *access == Access::ReadWrite);
        (!holders.is_empty()).then_some(if writes { Access::ReadWrite } else { Access::ReadOnly })
    }
}

impl Storage {
    /// What is known now. No other lock is taken while this is held.
    pub(super) fn state(&self) -> MutexGuard<'_, StorageState> {
        self.state.lock()
    }
}
