//! Disks whose process is being replaced or whose images change: one of these at a time.
//!
//! A process that takes a dead one's place between the pause and the swap of a snapshot would open the old leaf, and
//! write into what has become the snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};
use tapio_model::ApiError;
use uuid::Uuid;

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// Another process takes the place of one that died.
    Replaced,
    /// It is paused, and goes on with other images.
    Paused,
}

/// The disks of which something is done. Locked before the notes.
#[derive(Debug, Default)]
pub(super) struct Table {
    busy: Mutex<BTreeMap<Uuid, Why>>,
    ended: Condvar,
}

impl Table {
    /// Waits while `busy` is in the way, at most until `until`.
    fn wait(
        &self,
        until: Instant,
        mut is_in_the_way: impl FnMut(&BTreeMap<Uuid, Why>) -> bool,
    ) -> MutexGuard<'_, BTreeMap<Uuid, Why>> {
        let timeout = until.saturating_duration_since(Instant::now());
        let mut busy = self.busy.lock();
        self.ended.wait_while_for(&mut busy, |busy| is_in_the_way(busy), timeout);
        busy
    }

    pub(super) fn is_paused(&self, vbd: Uuid) -> bool {
        self.busy.lock().get(&vbd) == Some(&Why::Paused)
    }

    /// Does something when the process of a disk is not being replaced, or at `until`; no replacement begins meanwhile.
    pub(super) fn after_replacement<T>(&self, vbd: Uuid, until: Instant, work: impl FnOnce() -> T) -> T {
        let _held = self.wait(until, |busy| busy.get(&vbd) == Some(&Why::Replaced));
        work()
    }
}

/// A disk that is busy until this is dropped.
pub(super) struct Busy {
    disks: Arc<super::Table>,
    vbd: Uuid,
}

impl Busy {
    /// Waits until nothing else is done with the disk.
    ///
    /// # Errors
    /// It is not free at `until`; a client has paused it.
    pub(super) fn begin(
        disks: &Arc<super::Table>,
        vbd: Uuid,
        why: Why,
        until: Instant,
    ) -> Result<Self, ApiError> {
        let begun = Self::begin_of_any(disks, vbd, why, until)?;
        check_not_paused(disks, vbd)?;
        Ok(begun)
    }

    /// [`Self::begin`] of one that a client may have paused, which is to go on with the images that it had.
    ///
    /// # Errors
    /// It is not free at `until`.
    pub(super) fn begin_of_paused(
        disks: &Arc<super::Table>,
        vbd: Uuid,
        until: Instant,
    ) -> Result<Self, ApiError> {
        Self::begin_of_any(disks, vbd, Why::Paused, until)
    }

    fn begin_of_any(
        disks: &Arc<super::Table>,
        vbd: Uuid,
        why: Why,
        until: Instant,
    ) -> Result<Self, ApiError> {
        let mut busy = disks.busy.wait(until, |busy| busy.contains_key(&vbd));
        match busy.get(&vbd) {
            Some(Why::Replaced) => Err(ApiError::internal(format!(
                "the disk process of VBD {vbd} died, and another is still being started; try again"
            ))),
            Some(Why::Paused) => {
                Err(ApiError::internal(format!("the disk of VBD {vbd} stays paused while its images change")))
            }
            None => {
                busy.insert(vbd, why);
                Ok(Self { disks: Arc::clone(disks), vbd })
            }
        }
    }

    pub(super) fn vbd(&self) -> Uuid {
        self.vbd
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.disks.busy.busy.lock().remove(&self.vbd);
        self.disks.busy.ended.notify_all();
    }
}

/// Refuses what needs the images of a disk that a client has paused.
///
/// # Errors
/// `OPERATION_NOT_ALLOWED`.
pub(super) fn check_not_paused(disks: &super::Table, vbd: Uuid) -> Result<(), ApiError> {
    let is_paused = disks.lock().get(&vbd).is_some_and(|note| note.paused.is_some());
    if !is_paused {
        return Ok(());
    }
    let why =
        format!("a client paused the disk of VBD {vbd}: unpause it first, with xe vbd-unpause uuid={vbd}");
    Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]))
}
