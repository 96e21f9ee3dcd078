//! Disk processes: started, found again, spoken to.
//!
//! Each plugged VBD has a process of its own. What is known of it is written down beside it ([`Note`]), so that a
//! daemon that is started again goes on with it and its I/O never notices.

mod backend;
mod busy;
mod export;
mod goes_on;
mod key_file;
mod live;
mod mirror;
mod note;
mod pause;
mod place;
mod processes;
mod room;
mod stand_in;
mod stray;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tapio_control::{PoolSpec, RunDir, disk_program};
use tapio_model::ApiError;
use tapio_sm::{LiveDisk, OpenSpec};
use tapio_stat::pool::POOL_DISKS_MAX;
use tapio_stat::{ShmRoot, Snapshot, VbdId};
use tapio_types::Access;
use tapio_vm::{DiskFacts, FrontSpec, PluggedDisk};
use uuid::Uuid;

use crate::config::Config;
use crate::plan::steps::step;

pub use backend::{Backend, Offer, Process, Rights, Tuning};
pub(crate) use key_file::USER as KEY_USER;
pub(crate) use mirror::{Mirror, Side};
pub use note::{Note, Phase};
pub use place::{ExportNote, Place};
pub use processes::Processes;
pub(crate) use room::Rang;

/// How long tidying up after a failure may take.
const TIDY: Duration = Duration::from_secs(15);

pub(crate) struct Table {
    backend: Arc<dyn Backend>,
    notes: note::Notes,
    run_dir: PathBuf,
    disks: Mutex<BTreeMap<Uuid, Note>>,
    busy: busy::Table,
    watch: watch::Watch,
    /// The same of exports.
    watch_exports: watch::Watch,
}

/// Disk processes of this host.
#[derive(Clone)]
pub struct Disks(Arc<Table>);

impl fmt::Debug for Disks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disks").field("count", &self.0.lock().len()).finish_non_exhaustive()
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, Note>> {
        // Every change is one call on the map.
        self.disks.lock()
    }

    /// Changes what is known of a disk, on disk first.
    fn update(&self, vbd: Uuid, change: impl FnOnce(&mut Note)) -> Result<Note, ApiError> {
        let mut disks = self.lock();
        let note = noted(&disks, vbd)?;
        self.put(&mut disks, note, change)
    }

    /// Writes a note down if `change` changes it.
    fn put(
        &self,
        disks: &mut BTreeMap<Uuid, Note>,
        before: Note,
        change: impl FnOnce(&mut Note),
    ) -> Result<Note, ApiError> {
        let mut note = before.clone();
        change(&mut note);
        if note != before {
            self.notes.write(&note)?;
            disks.insert(note.spec.vbd, note.clone());
        }
        Ok(note)
    }

    /// [`Self::update`] of a disk that this process still has: what comes late, from a process that was given up,
    /// changes nothing.
    fn update_of(
        &self,
        vbd: Uuid,
        process: Process,
        change: impl FnOnce(&mut Note),
    ) -> Result<Note, ApiError> {
        let mut disks = self.lock();
        let note = noted(&disks, vbd)?;
        if note.process != Some(process) {
            return Err(ApiError::internal(format!("VBD {vbd} has another disk process by now")));
        }
        self.put(&mut disks, note, change)
    }

    fn forget(&self, vbd: Uuid) -> Option<Note> {
        let mut disks = self.lock();
        let note = disks.remove(&vbd);
        self.notes.remove(vbd);
        let is_last = note.as_ref().is_some_and(|gone| !disks.values().any(|other| other.sr == gone.sr));
        drop(disks);
        if is_last {
            self.backend.pool_ended();
        }
        note
    }
}

impl Disks {
    /// None is known yet.
    pub fn new(config: &Config) -> Self {
        // A toolstack is known by its run directory.
        let owner = config.run_dir.display().to_string();
        // Control sockets are where every tool looks for them.
        let (run, shm) = (RunDir::from_env(), ShmRoot::from_env());
        let processes = Processes::new(disk_program(), run, shm, owner).log_to(config.log_socket.clone());
        let processes = processes.room_at(config.room_socket());
        Self::with_backend(config, Arc::new(processes))
    }

    /// On processes of another kind, for tests and scale.
    pub fn with_backend(config: &Config, backend: Arc<dyn Backend>) -> Self {
        Self(Arc::new(Table {
            backend,
            notes: note::Notes::new(&config.run_dir),
            run_dir: config.run_dir.clone(),
            disks: Mutex::default(),
            busy: busy::Table::default(),
            watch: watch::Watch::new(),
            watch_exports: watch::Watch::new(),
        }))
    }

    /// The highest domain number that a disk of this host is published under.
    pub fn domid_max(&self) -> u32 {
        self.0.backend.domid_max()
    }

    /// What is known of the disk of a VBD.
    pub fn of_vbd(&self, vbd: Uuid) -> Option<Note> {
        self.0.lock().get(&vbd).cloned()
    }

    /// The disks that guests have, each with what it has counted.
    pub(crate) fn counters(&self) -> Vec<(Note, Option<Snapshot>)> {
        // Files are read without the lock.
        let is_there = |note: &&Note| note.phase == Phase::Running && note.export.is_none();
        let notes: Vec<Note> = self.0.lock().values().filter(is_there).cloned().collect();
        let counted = |note: &Note| self.0.backend.counters(note.process?, note.minor?);
        notes
            .into_iter()
            .map(|note| (counted(&note), note))
            .map(|(counters, note)| (note, counters))
            .collect()
    }

    /// What is known of the disks of a VM.
    pub fn of_vm(&self, vm: Uuid) -> Vec<Note> {
        self.0.lock().values().filter(|note| note.vm == vm).cloned().collect()
    }

    /// The disk that has this VDI open for writing (or, with none, for reading). One whose process has died counts:
    /// the next process opens the images that [`LiveDisk::resume`] names.
    pub fn live(&self, vdi: Uuid) -> Option<Box<dyn LiveDisk>> {
        let disks = self.0.lock();
        let of_vdi = |note: &&Note| note.vdi_uuid == vdi && note.chain.is_some();
        let writes = |note: &Note| note.chain.as_ref().is_some_and(|chain| chain.access == Access::ReadWrite);
        let found = disks.values().filter(of_vdi).max_by_key(|note| writes(note))?;
        let others = disks.values().filter(of_vdi).map(|note| note.spec.vbd);
        Some(Box::new(live::Live::new(Arc::clone(&self.0), found, others)))
    }

    /// Writes down that a disk is about to be made.
    ///
    /// # Errors
    /// One is there already, or the note cannot be written.
    pub fn note(&self, note: Note) -> Result<(), ApiError> {
        let vbd = note.spec.vbd;
        let mut disks = self.0.lock();
        if disks.contains_key(&vbd) {
            return Err(ApiError::internal(format!("VBD {vbd} has a disk process already")));
        }
        self.0.notes.write(&note)?;
        disks.insert(vbd, note);
        drop(disks);
        step("vbd-plug:noted");
        Ok(())
    }

    /// Starts the process, which takes a minor number; what it will open need not be there yet.
    ///
    /// # Errors
    /// It does not start; no process is left.
    pub fn start(&self, vbd: Uuid, rights: Rights, until: Instant) -> Result<(), ApiError> {
        let table = &self.0;
        let process = table.backend.start(vbd, rights, until)?;
        step("vbd-plug:started");
        match self.take_minor(vbd, process, until) {
            Ok(()) => {
                step("vbd-plug:numbered");
                Ok(())
            }
            Err(error) => {
                let minor = self.of_vbd(vbd).and_then(|note| note.minor);
                if let Err(other) = table.backend.end(process, minor, true, Instant::now() + TIDY) {
                    tracing::warn!(%other, "a disk process that got no number stays");
                }
                // A note that cannot be written any more is cleared when it is read. Its images stay noted: another
                // start may be tried with them.
                let _ = table.update(vbd, |note| (note.process, note.minor) = (None, None));
                Err(error)
            }
        }
    }

    /// Opens the images in the process that was started.
    ///
    /// # Errors
    /// They cannot be opened; the process is there still.
    pub fn open(&self, vbd: Uuid, with: &OpenSpec, until: Instant) -> Result<(), ApiError> {
        let note = noted(&self.0.lock(), vbd)?;
        let (process, minor) = ids(&note)?;
        let pool = self.pool(vbd, &note, minor)?;
        let info = self.0.backend.open(process, minor, with, &pool, &note.tuning, until)?;
        self.0.update_of(vbd, process, |note| {
            note.opens(with);
            note.size = info.len();
            note.tuning.sector_size = Some(info.sector_size);
        })?;
        step("vbd-plug:opened");
        Ok(())
    }

    /// The page pool of a disk. It has the size that it was made with as long as a disk shares it, whatever the SR says
    /// meanwhile.
    fn pool(&self, vbd: Uuid, note: &Note, minor: u16) -> Result<PoolSpec, ApiError> {
        let name = pool_name(note.sr, minor);
        let shares = |other: &&Note| {
            let its_pool = other.minor.map(|minor| pool_name(other.sr, minor));
            other.spec.vbd != vbd && other.chain.is_some() && its_pool.as_ref() == Some(&name)
        };
        let made_with = self.0.lock().values().find(shares).map(|other| other.tuning.pool_pages);
        if let Some(pages) = made_with.filter(|pages| *pages != note.tuning.pool_pages) {
            self.0.update(vbd, |note| note.tuning.pool_pages = pages)?;
        }
        Ok(PoolSpec { name, pages: made_with.unwrap_or(note.tuning.pool_pages) })
    }

    /// Takes a minor number, which others of this host may want too.
    fn take_minor(&self, vbd: Uuid, process: Process, until: Instant) -> Result<(), ApiError> {
        let mut lost = BTreeSet::new();
        loop {
            let minor = self.choose_minor(vbd, process, &lost)?;
            if self.0.backend.take_minor(process, minor, until)? {
                return Ok(());
            }
            lost.insert(minor);
        }
    }

    /// Chooses a minor number and writes it down with the process, before it is taken: so none is lost.
    fn choose_minor(&self, vbd: Uuid, process: Process, lost: &BTreeSet<u16>) -> Result<u16, ApiError> {
        let mut disks = self.0.lock();
        let taken: BTreeSet<u16> = disks.values().filter_map(|note| note.minor).collect();
        let minor = self.0.backend.free_minor(&|minor| taken.contains(&minor) || lost.contains(&minor))?;
        let mut note = noted(&disks, vbd)?;
        (note.process, note.minor) = (Some(process), Some(minor));
        self.0.notes.write(&note)?;
        disks.insert(vbd, note);
        Ok(minor)
    }

    /// Offers the disk; answers what the guest's driver is given.
    ///
    /// # Errors
    /// The front end cannot be made.
    pub fn offer(
        &self,
        vbd: Uuid,
        front: &FrontSpec,
        id: Option<VbdId>,
        until: Instant,
    ) -> Result<PluggedDisk, ApiError> {
        let note = noted(&self.0.lock(), vbd)?;
        let (process, minor) = ids(&note)?;
        let access = if note.spec.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let offer = self.0.backend.offer(process, minor, front, access, id, until)?;
        let note = self.0.update(vbd, |note| (note.front, note.offer) = (Some(front.clone()), offer))?;
        step("vbd-plug:offered");
        Ok(plugged(&note))
    }

    /// The guest has it: its process is watched from now on.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn is_running(&self, vbd: Uuid) -> Result<(), ApiError> {
        let note = self.0.update(vbd, |note| note.phase = Phase::Running)?;
        if let Some(process) = note.process {
            self.0.watch_of(&note).add(vbd, process);
        }
        Ok(())
    }

    /// Writes down that the disk goes. A process that takes the place of one that died is waited for, at most until
    /// `until`: what ends is the disk, whichever process it has by then.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn is_ending(&self, vbd: Uuid, until: Instant) -> Result<(), ApiError> {
        self.0.busy.after_replacement(vbd, until, || {
            self.0.watch.remove(vbd);
            self.0.update(vbd, |note| note.phase = Phase::Ending)
        })?;
        step("vbd-unplug:noted");
        Ok(())
    }

    /// Its process does not end; that it does is noticed later.
    pub fn is_left(&self, vbd: Uuid) {
        if let Some(process) = self.of_vbd(vbd).and_then(|note| note.process) {
            self.0.watch.add(vbd, process);
        }
    }

    /// The guest keeps it after all.
    pub fn goes_on(&self, vbd: Uuid) {
        if let Err(error) = self.is_running(vbd) {
            tracing::warn!(%vbd, %error, "a disk that stays is noted as going");
        }
    }

    /// No longer offers a disk; without `force` a device in use stays.
    ///
    /// # Errors
    /// `DEVICE_DETACH_REJECTED`, or the process does not answer.
    pub fn withdraw(&self, vbd: Uuid, force: bool, until: Instant) -> Result<(), ApiError> {
        let Some(note) = self.of_vbd(vbd) else { return Ok(()) };
        let (Some(process), Some(minor)) = (note.process, note.minor) else { return Ok(()) };
        if !self.0.backend.is_alive(process) {
            return Ok(());
        }
        self.0.backend.withdraw(process, minor, &note.offer, force, until)
    }

    /// Closes the images and ends the process. The note stays until [`Self::forget`].
    ///
    /// # Errors
    /// Requests are still in flight at `until`.
    pub fn end(&self, vbd: Uuid, force: bool, until: Instant) -> Result<(), ApiError> {
        self.end_process(vbd, force, until, |note| (note.chain, note.log) = (None, None))?;
        step("vbd-unplug:ended");
        Ok(())
    }

    /// Ends the process; what `change` does to the note is written with that.
    fn end_process(
        &self,
        vbd: Uuid,
        force: bool,
        until: Instant,
        change: impl FnOnce(&mut Note),
    ) -> Result<(), ApiError> {
        self.0.unwatch(vbd);
        let Some(note) = self.of_vbd(vbd) else { return Ok(()) };
        let clear = |note: &mut Note| {
            (note.process, note.minor) = (None, None);
            change(note);
        };
        match note.process {
            Some(process) => {
                self.0.backend.end(process, note.minor, force, until)?;
                self.0.update_of(vbd, process, clear)?;
            }
            None => drop(self.0.update(vbd, clear)?),
        }
        Ok(())
    }

    /// Nothing is left of the disk.
    pub fn forget(&self, vbd: Uuid) {
        self.0.unwatch(vbd);
        self.0.forget(vbd);
    }

    /// How the disk shall behave from now on; one that is not there will when it is plugged.
    /// Answers what the guest's driver must be given again, where a back end is told through it.
    ///
    /// # Errors
    /// The process does not answer.
    pub fn tune(&self, vbd: Uuid, tuning: &Tuning) -> Result<Option<PluggedDisk>, ApiError> {
        let Some(note) = self.of_vbd(vbd) else { return Ok(None) };
        // The pool stays as it is until its last disk goes, and sectors as the guest was told of them.
        let Tuning { pool_pages, sector_size, .. } = note.tuning;
        let tuning = Tuning { pool_pages, sector_size, ..tuning.clone() };
        if note.tuning == tuning {
            return Ok(None);
        }
        let (process, minor) = ids(&note)?;
        self.0.backend.tune(process, minor, &tuning, Instant::now() + TIDY)?;
        let note = self.0.update(vbd, |note| note.tuning = tuning)?;
        Ok((note.front == Some(FrontSpec::Xen)).then(|| plugged(&note)))
    }

    /// Starts another process in place of one that died, with the images that the note has and the same front end: a
    /// guest whose side connects again has noticed a pause. Waits for another call that does the same, or changes the
    /// images.
    /// Answers what the guest's driver must be given again, where it names the process.
    ///
    /// # Errors
    /// It does not start; or the device would have another name.
    pub fn restart(&self, vbd: Uuid, until: Instant) -> Result<Option<PluggedDisk>, ApiError> {
        let gone = || ApiError::internal(format!("VBD {vbd} has no disk that could be started again"));
        let died = self.of_vbd(vbd).and_then(|note| note.process);
        let _busy = busy::Busy::begin(&self.0, vbd, busy::Why::Replaced, until)?;
        let note = self.of_vbd(vbd).filter(|note| note.phase == Phase::Running).ok_or_else(gone)?;
        if note.process != died && self.serves(vbd) {
            return Ok(None);
        }
        let (Some(with), Some(front)) = (note.open_spec(), note.front.clone()) else { return Err(gone()) };
        tapio_sm::lease::check_kept(&self.0.run_dir, note.vdi_uuid)?;
        if let Some(process) = note.process {
            // Its marker is freed; the process is gone.
            self.0.backend.end(process, note.minor, true, until)?;
        }
        self.start(vbd, Rights::of_chain(&with.chain, front.is_of_host()), until)?;
        self.open(vbd, &with, until).inspect_err(|_| {
            // Its images stay noted: another start is tried with them.
            if let Err(other) = self.end_process(vbd, true, Instant::now() + TIDY, |_| ()) {
                tracing::warn!(%other, "a disk process that could not open its images stays");
            }
        })?;
        let after = self.offer(vbd, &front, None, until)?;
        if let Some(export) = &note.export {
            self.export_again(vbd, export, until)?;
        }
        let names_process = front == FrontSpec::Xen;
        if !names_process && after.node != note.offer.node {
            return Err(ApiError::internal(format!("the device of VBD {vbd} would have another name now")));
        }
        self.is_running(vbd)?;
        Ok(names_process.then_some(after))
    }

    /// Whether the disk waits for other images, or for the client that paused it: no process takes the place of a dead
    /// one meanwhile.
    pub fn is_paused(&self, vbd: Uuid) -> bool {
        self.0.busy.is_paused(vbd) || self.pause_token(vbd).is_some()
    }

    /// Finds what an earlier daemon left: its notes are known from now on, and processes without a note are
    /// ended. What runs is not touched.
    pub fn adopt(&self) {
        // Disk processes are started with an option that leaves this to the daemon.
        self.0.backend.clean_up();
        self.drop_key_files();
        let notes = self.0.notes.read();
        let mut disks = self.0.lock();
        for note in notes {
            disks.insert(note.spec.vbd, note);
        }
        for (process, vbd) in self.0.backend.ours() {
            let known = disks.get(&vbd).and_then(|note| note.process);
            if known == Some(process) {
                continue;
            }
            // It was started and not written down.
            tracing::info!(pid = process.pid, %vbd, "a disk process without a note is ended");
            if let Err(error) = self.0.backend.end(process, None, true, Instant::now() + TIDY) {
                tracing::warn!(pid = process.pid, %error, "it does not end");
            }
        }
        let running: Vec<Note> =
            disks.values().filter(|note| note.phase == Phase::Running).cloned().collect();
        drop(disks);
        for note in running {
            if let Some(process) = note.process {
                self.0.watch_of(&note).add(note.spec.vbd, process);
            }
        }
    }

    /// Whether the process of a VBD lives and serves its disk.
    pub fn serves(&self, vbd: Uuid) -> bool {
        let note = self.of_vbd(vbd);
        let ids = note.as_ref().and_then(|note| ids(note).ok());
        ids.is_some_and(|(process, minor)| {
            self.0.backend.is_alive(process) && self.0.backend.serves(process, minor, Instant::now() + TIDY)
        })
    }

    /// All VBDs of which something is known.
    pub fn all(&self) -> Vec<Note> {
        self.0.lock().values().cloned().collect()
    }

    /// Waits until a watched process has ended, at most until `until`, if there is one; none if the wait was ended by
    /// [`Self::look_at_deaths`].
    pub fn wait_for_death(&self, until: Option<Instant>) -> Option<Uuid> {
        self.0.watch.wait(until)
    }

    /// Ends the wait for the death of one.
    pub(crate) fn look_at_deaths(&self) {
        self.0.watch.wake();
    }
}

/// The page pool of an SR's disk. A pool has places for so many disks, and a host may have more of one SR: each range
/// of minor numbers, which are unique on a host and low ones of which are taken first, has a pool of its own.
fn pool_name(sr: Uuid, minor: u16) -> String {
    match usize::from(minor) / POOL_DISKS_MAX {
        0 => sr.to_string(),
        range => format!("{sr}.{range}"),
    }
}

fn ids(note: &Note) -> Result<(Process, u16), ApiError> {
    match (note.process, note.minor) {
        (Some(process), Some(minor)) => Ok((process, minor)),
        _ => Err(ApiError::internal(format!("VBD {} has no disk process", note.spec.vbd))),
    }
}

/// What is known of the disk of a VBD that has one.
fn noted(disks: &BTreeMap<Uuid, Note>, vbd: Uuid) -> Result<Note, ApiError> {
    let gone = || ApiError::internal(format!("nothing is known of a disk of VBD {vbd}"));
    disks.get(&vbd).cloned().ok_or_else(gone)
}

/// What the guest's driver is given.
fn plugged(note: &Note) -> PluggedDisk {
    PluggedDisk {
        spec: note.spec.clone(),
        front: note.front.clone().unwrap_or(FrontSpec::Nothing),
        node: note.offer.node.clone(),
        size: note.size,
        facts: DiskFacts {
            vdi: Some(note.vdi_uuid),
            polling_us: note.tuning.polling.0,
            polling_idle: note.tuning.polling.1,
            rings: note.tuning.rings,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_pool_gets_more_disks_than_it_has_places() {
        let sr = Uuid::new_v4();
        let mut pools: BTreeMap<String, usize> = BTreeMap::new();
        for minor in 0..tapio_control::MINOR_MAX {
            let name = pool_name(sr, minor);
            assert!(name.parse::<tapio_stat::pool::PoolName>().is_ok(), "{name}");
            *pools.entry(name).or_default() += 1;
        }
        assert_eq!(pools.get(&sr.to_string()), Some(&POOL_DISKS_MAX));
        assert!(pools.values().all(|disks| *disks <= POOL_DISKS_MAX));
    }
}
