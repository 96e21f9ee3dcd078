//! What the drivers of real guests have in common: their VMs, each with a process, an agent and a record, and
//! the events that come of them.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tapio_types::ApiError;
use uuid::Uuid;

use crate::agent::{Agent, Way};
use crate::boot::{self, Kernels};
use crate::errors::{bad_power_state, failed};
use crate::nvram;
use crate::place::{Phase, Place, Saved, SavedDisk, found};
use crate::process::Process;
use crate::record::Record;
use crate::settings::Settings;
use crate::supervise::{Events, Stop, Watched, verdict, watch};
use crate::traits::{DiskSpec, VmEvent, VmSpec, VmState};

/// A VM of this driver; `own` is what only its driver knows.
#[derive(Debug)]
pub(crate) struct DriverVm<T> {
    pub vm: Uuid,
    pub place: Place,
    pub agent: Agent,
    pub own: T,
    record: Record,
    process: Mutex<Option<Arc<Process>>>,
}

impl<T> DriverVm<T> {
    pub(crate) fn new(place: Place, saved: Saved, way: Way, own: T) -> Self {
        let vm = saved.spec.uuid;
        let agent = Agent::new(way);
        Self { vm, place, agent, own, record: Record::new(saved), process: Mutex::default() }
    }

    /// Changes what is known, and keeps it.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Saved)) -> Result<(), ApiError> {
        self.record.change(&self.place, change)
    }

    /// What is known.
    pub(crate) fn saved(&self) -> Saved {
        self.record.look().clone()
    }

    pub(crate) fn phase(&self) -> Phase {
        self.record.look().phase
    }

    /// The record of this very disk.
    pub(crate) fn disk(&self, disk: &DiskSpec) -> Option<SavedDisk> {
        let saved = self.record.look();
        saved.disks.get(&disk.position).filter(|known| known.disk.spec.vbd == disk.vbd).cloned()
    }

    pub(crate) fn process(&self) -> Option<Arc<Process>> {
        self.process.lock().clone()
    }

    pub(crate) fn state(&self) -> VmState {
        let phase = self.phase();
        let has_ended = self.process().is_none_or(|process| process.has_ended());
        match phase {
            Phase::Made => VmState::Paused,
            _ if has_ended => VmState::Halted,
            Phase::Paused => VmState::Paused,
            Phase::Running => VmState::Running,
        }
    }
}

/// The VMs of a driver.
#[derive(Debug)]
pub(crate) struct Fleet<T> {
    pub name: &'static str,
    pub settings: Settings,
    pub events: Events,
    vms: Mutex<BTreeMap<Uuid, Arc<DriverVm<T>>>>,
    stop: Option<Arc<Stop>>,
}

impl<T> Drop for Fleet<T> {
    fn drop(&mut self) {
        self.dismiss();
    }
}

impl<T> Fleet<T> {
    pub(crate) fn new(name: &'static str, settings: &Settings) -> Arc<Self> {
        Arc::new(Self {
            name,
            settings: settings.clone(),
            events: Events::default(),
            vms: Mutex::default(),
            stop: Stop::new().ok(),
        })
    }

    /// Ends all threads; guests stay.
    pub(crate) fn dismiss(&self) {
        if let Some(stop) = &self.stop {
            stop.stop();
        }
    }

    /// What tells the threads of this driver to end.
    pub(crate) fn stop(&self) -> io::Result<Arc<Stop>> {
        self.stop.clone().ok_or_else(|| io::Error::other("no descriptor was free when the driver started"))
    }

    /// The VM, if the driver has it.
    pub(crate) fn find(&self, vm: Uuid) -> Option<Arc<DriverVm<T>>> {
        self.vms.lock().get(&vm).cloned()
    }

    /// The VM, which must be there.
    pub(crate) fn vm(&self, vm: Uuid) -> Result<Arc<DriverVm<T>>, ApiError> {
        self.find(vm).ok_or_else(|| bad_power_state(vm, "Running", "Halted"))
    }

    /// Makes the record and the directory of a new VM.
    pub(crate) fn create(
        &self,
        vm: &VmSpec,
        kernels: Kernels,
        guest: impl FnOnce(Place, Saved) -> DriverVm<T>,
    ) -> Result<Arc<DriverVm<T>>, ApiError> {
        let vm = &boot::checked(&self.settings, vm, kernels)?;
        let place = Place::of(&self.settings, vm.uuid)?;
        let mut vms = self.vms.lock();
        if vms.contains_key(&vm.uuid) {
            return Err(bad_power_state(vm.uuid, "Halted", "Running"));
        }
        place.remove();
        place.make(&self.settings)?;
        let saved = Saved::new(self.name, vm);
        place.save(&saved)?;
        let guest = Arc::new(guest(place, saved));
        vms.insert(vm.uuid, Arc::clone(&guest));
        Ok(guest)
    }

    /// The VMs of an earlier daemon, each with its process if that lives; `guest` completes them. Those that
    /// ended meanwhile are reported.
    pub(crate) fn adopt_all(
        self: &Arc<Self>,
        guest: impl Fn(Place, Saved) -> DriverVm<T>,
        adopt: impl Fn(&Arc<DriverVm<T>>, Process) -> Result<(), ApiError>,
    ) {
        for (place, saved) in found(&self.settings, self.name) {
            let (phase, is_ending, started) = (saved.phase, saved.is_ending, saved.started);
            let guest = Arc::new(guest(place, saved));
            self.vms.lock().insert(guest.vm, Arc::clone(&guest));
            match Process::find(&guest.place, started) {
                Some(process) => {
                    if let Err(error) = adopt(&guest, process) {
                        tracing::warn!(vm = %guest.vm, "a guest that runs cannot be looked after: {error}");
                    }
                }
                None if phase != Phase::Made || started.is_some() => {
                    self.ended(&guest, is_ending, verdict(guest.vm, &guest.place, "it ended unseen"));
                }
                None => {}
            }
        }
    }

    /// The process of a VM has ended: reports `event`, unless the toolstack asked for the end.
    pub(crate) fn ended(&self, guest: &DriverVm<T>, is_ending: bool, event: VmEvent) {
        // Before the event: its reader may create the VM again at once.
        self.forget(guest);
        if !is_ending {
            self.events.push(event);
        }
    }

    /// Forgets a VM.
    pub(crate) fn forget(&self, guest: &DriverVm<T>) {
        let mut vms = self.vms.lock();
        // Another one with its name may have been made meanwhile.
        if vms.get(&guest.vm).is_some_and(|known| std::ptr::eq(Arc::as_ptr(known), guest)) {
            vms.remove(&guest.vm);
            nvram::keep(&self.settings, &guest.place, guest.vm);
            guest.record.forget(&guest.place);
        }
    }
}

impl<T: Send + Sync + 'static> Fleet<T> {
    /// Looks after a process from now on; `verdict` says what its end meant.
    pub(crate) fn look_after(
        self: &Arc<Self>,
        guest: &Arc<DriverVm<T>>,
        process: Process,
        has_console: bool,
        verdict: impl FnOnce(&DriverVm<T>, &str) -> VmEvent + Send + 'static,
    ) -> Result<(), ApiError> {
        let process = Arc::new(process);
        let started = process.started();
        *guest.process.lock() = Some(Arc::clone(&process));
        guest.change(|saved| saved.started = started)?;
        let told = |error: io::Error| failed(guest.vm, "it cannot be looked after", error);
        let stop = self.stop().map_err(told)?;
        // Not for ever: a driver that goes away ends its threads.
        let (fleet, ended) = (Arc::downgrade(self), Arc::clone(guest));
        let rotation = self.settings.console_rotation();
        let watched =
            Watched { process: Arc::clone(&process), place: guest.place.clone(), rotation, has_console };
        let on_end = move || {
            process.end_rest(&ended.place);
            let how =
                process.status().map_or_else(|| "it ended".to_owned(), |how| format!("it ended with {how}"));
            let event = verdict(&ended, &how);
            let is_ending = ended.record.look().is_ending;
            *ended.process.lock() = None;
            if let Some(fleet) = fleet.upgrade() {
                fleet.ended(&ended, is_ending, event);
            }
        };
        watch(watched, stop, on_end).map_err(told)
    }
}
