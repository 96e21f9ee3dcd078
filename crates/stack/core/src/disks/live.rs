//! A disk that a guest uses, as storage drivers see it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_model::ApiError;
use tapio_sm::{LeafSwap, LiveDisk, OpenSpec, Shortened};
use tapio_types::{Access, ChainSpec};
use uuid::Uuid;

use super::busy::{Busy, Why};
use super::{Note, Table, goes_on, ids};
use crate::plan::steps::step;

/// How long a guest's requests may take to end.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct Live {
    table: Arc<Table>,
    /// The disk that is asked about.
    vbd: Uuid,
    /// All that have the VDI open, that one first: readers, whose chains must change together.
    all: Vec<Uuid>,
    /// Those that are paused or held: no process takes the place of one of theirs meanwhile.
    held: Mutex<Vec<Busy>>,
}

impl Live {
    pub(super) fn new(table: Arc<Table>, note: &Note, others: impl Iterator<Item = Uuid>) -> Self {
        let vbd = note.spec.vbd;
        let all = std::iter::once(vbd).chain(others.filter(|other| *other != vbd)).collect();
        Self { table, vbd, all, held: Mutex::default() }
    }

    fn note_of(&self, vbd: Uuid) -> Result<Note, ApiError> {
        let gone = || ApiError::internal(format!("the disk of VBD {vbd} was unplugged meanwhile"));
        self.table.lock().get(&vbd).cloned().ok_or_else(gone)
    }

    fn hold_one(&self, vbd: Uuid, until: Instant) -> Result<(), ApiError> {
        let mut held = self.held.lock();
        if !held.iter().any(|busy| busy.vbd() == vbd) {
            held.push(Busy::begin(&self.table, vbd, Why::Paused, until)?);
        }
        Ok(())
    }

    /// The only disk that has the VDI open, which writes to it.
    fn only_writer(&self) -> Option<Uuid> {
        let is_only = self.all.len() == 1 && self.access() == Access::ReadWrite;
        is_only.then_some(self.vbd)
    }

    fn pause_one(&self, vbd: Uuid) -> Result<(), ApiError> {
        let until = Instant::now() + TIMEOUT;
        self.hold_one(vbd, until)?;
        let (process, minor) = ids(&self.note_of(vbd)?)?;
        self.table.backend.pause(process, minor, until)
    }

    /// Pauses some disks; when one does not, those before it go on, and that one does when it can.
    fn pause_all(&self, vbds: &[Uuid]) -> Result<(), ApiError> {
        for (at, vbd) in vbds.iter().enumerate() {
            if let Err(error) = self.pause_one(*vbd) {
                for before in &vbds[..at] {
                    let resumed = self.note_of(*before).and_then(|note| {
                        let (process, minor) = ids(&note)?;
                        let with = note.open_spec();
                        let with = with.ok_or_else(|| ApiError::internal("its images are not known"))?;
                        self.table.backend.resume(process, minor, &with, Instant::now() + TIMEOUT)
                    });
                    if let Err(error) = resumed {
                        tracing::error!(vbd = %before, %error, "a disk stays paused");
                    }
                }
                self.held.lock().clear();
                goes_on::as_soon_as_it_can(&self.table, *vbd);
                return Err(error);
            }
        }
        Ok(())
    }

    /// The note comes first: if the process dies, the next one opens these images.
    fn resume_one(&self, vbd: Uuid, with: &OpenSpec) -> Result<(), ApiError> {
        let note = self.note_of(vbd)?;
        // Each as it was opened; the images are the same.
        let access = note.chain.as_ref().map_or(with.chain.access, |before| before.access);
        let with = OpenSpec {
            chain: ChainSpec { access, ..with.chain.clone() },
            log: with.log.clone().filter(|_| access == Access::ReadWrite),
        };
        let note = self.table.update(vbd, |note| note.opens(&with))?;
        let Ok((process, minor)) = ids(&note) else { return Ok(()) };
        let resumed = self.table.backend.resume(process, minor, &with, Instant::now() + TIMEOUT);
        resumed.or_else(|error| if self.table.backend.is_alive(process) { Err(error) } else { Ok(()) })
    }
}

impl LiveDisk for Live {
    fn pause(&self) -> Result<(), ApiError> {
        self.pause_all(&self.all)?;
        step("disk:paused");
        Ok(())
    }

    fn resume(&self, with: &OpenSpec) -> Result<(), ApiError> {
        for (at, vbd) in self.all.iter().enumerate() {
            if let Err(error) = self.resume_one(*vbd, with) {
                // The caller goes back to the images of before, for which all must be paused.
                self.pause_all(&self.all[..at])?;
                return Err(error);
            }
        }
        step("disk:resumed");
        self.held.lock().clear();
        Ok(())
    }

    fn hold(&self, new_log: bool) -> Result<bool, ApiError> {
        // Several are closed, so that all have the new images before one goes on.
        let Some(vbd) = self.only_writer() else { return Ok(false) };
        let until = Instant::now() + TIMEOUT;
        self.hold_one(vbd, until)?;
        let (process, _) = ids(&self.note_of(vbd)?)?;
        let swaps = self.table.backend.swaps_leaf(process, new_log, until);
        step("disk:held");
        Ok(swaps)
    }

    /// The note comes first: if the process dies, the next one opens these images.
    fn swap_leaf(&self, with: &OpenSpec, new_log: bool) -> Result<LeafSwap, ApiError> {
        let vbd = self.vbd;
        let before = self.note_of(vbd)?;
        let (process, minor) = ids(&before)?;
        if let Err(error) = self.table.update_of(vbd, process, |note| note.opens(with)) {
            return Ok(LeafSwap::Refused(error));
        }
        step("disk:leaf-noted");
        match self.table.backend.swap_leaf(process, minor, with, new_log, Instant::now() + TIMEOUT) {
            Ok(LeafSwap::Done) => {}
            // The one that takes its place opens these.
            Ok(LeafSwap::Refused(_)) | Err(_) if !self.table.backend.is_alive(process) => {}
            Ok(LeafSwap::Refused(error)) => {
                // Held still: a note that stays would lead a successor to images that will not be there.
                self.table
                    .update_of(vbd, process, |note| (note.chain, note.log) = (before.chain, before.log))?;
                return Ok(LeafSwap::Refused(error));
            }
            Err(error) => return Err(error),
        }
        step("disk:leaf-swapped");
        self.held.lock().clear();
        Ok(LeafSwap::Done)
    }

    fn access(&self) -> Access {
        let chain = self.note_of(self.vbd).ok().and_then(|note| note.chain);
        chain.map_or(Access::ReadWrite, |chain| chain.access)
    }

    /// Asked while it is held.
    fn shorten(&self, from: u64, to: u64) -> Result<Shortened, ApiError> {
        let (process, minor) = ids(&self.note_of(self.vbd)?)?;
        self.table.backend.shorten(process, minor, from, to, Instant::now() + TIMEOUT)
    }

    fn look_for_room(&self) {
        let looked = self.note_of(self.vbd).and_then(|note| ids(&note)).and_then(|(process, minor)| {
            self.table.backend.look_for_room(process, minor, Instant::now() + TIMEOUT)
        });
        if let Err(error) = looked {
            tracing::info!(vbd = %self.vbd, %error, "a disk was not told that its volume is longer");
        }
    }

    fn grow(&self, bytes: u64) -> Result<(), ApiError> {
        let (process, minor) = ids(&self.note_of(self.vbd)?)?;
        self.table.backend.grow(process, minor, bytes, Instant::now() + TIMEOUT)?;
        self.table.update(self.vbd, |note| note.size = note.size.max(bytes)).map(drop)
    }
}
