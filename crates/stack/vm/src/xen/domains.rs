//! The VMs of the driver, and what is known of their ends.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tapio_types::ApiError;
use tapio_xenstore::{Client, XsError};
use uuid::Uuid;

use super::bus::Bus;
use super::tapback;
use super::xl::{Listed, Reason, Xl};
use crate::errors::{bad_power_state, failed};
use crate::place::{Phase, Place, Saved, found};
use crate::poll::{poll, polled};
use crate::record::Record;
use crate::settings::Settings;
use crate::supervise::{Events, STACK_LEN, Stop};
use crate::traits::{DiskSpec, VmEvent, VmSpec, VmState};

pub(super) const NAME: &str = "xen";

/// How long xl may take for anything but making a domain.
const XL_LIMIT: Duration = Duration::from_secs(30);

/// Between two looks without an event.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// Until the next try where xenstored cannot be reached.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Until then for xl.
pub(super) fn soon() -> Instant {
    Instant::now() + XL_LIMIT
}

/// A VM of this driver.
#[derive(Debug)]
pub(super) struct DriverVm {
    pub vm: Uuid,
    pub place: Place,
    record: Record,
    /// How its domain ended, once it has.
    end: Mutex<Option<End>>,
    ended: Condvar,
    /// Held while its domain is taken apart.
    life: Mutex<()>,
}

/// How a domain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It shut down, and is still there.
    ShutDown(Reason),
    /// It is not there any more.
    Vanished,
}

impl DriverVm {
    fn new(place: Place, saved: Saved) -> Arc<Self> {
        Arc::new(Self {
            vm: saved.spec.uuid,
            place,
            record: Record::new(saved),
            end: Mutex::default(),
            ended: Condvar::new(),
            life: Mutex::default(),
        })
    }

    /// Changes what is known, and keeps it.
    pub(super) fn change(&self, change: impl FnOnce(&mut Saved)) -> Result<(), ApiError> {
        self.record.change(&self.place, change)
    }

    /// What is known.
    pub(super) fn saved(&self) -> Saved {
        self.record.look().clone()
    }

    pub(super) fn phase(&self) -> Phase {
        self.record.look().phase
    }

    pub(super) fn domid(&self) -> Option<u32> {
        self.record.look().domid
    }

    /// Its domain, which must be there.
    pub(super) fn domain(&self) -> Result<u32, ApiError> {
        self.domid().ok_or_else(|| bad_power_state(self.vm, "Running", "Halted"))
    }

    /// Whether it has this very disk.
    pub(super) fn has(&self, disk: &DiskSpec) -> bool {
        self.record.look().has(disk)
    }

    pub(super) fn state(&self) -> VmState {
        let (domid, phase) = {
            let saved = self.record.look();
            (saved.domid, saved.phase)
        };
        match phase {
            _ if domid.is_none() || self.end.lock().is_some() => VmState::Halted,
            Phase::Made | Phase::Paused => VmState::Paused,
            Phase::Running => VmState::Running,
        }
    }

    fn has_ended(&self, end: End) {
        self.end.lock().get_or_insert(end);
        self.ended.notify_all();
    }

    /// Waits for its end.
    pub(super) fn wait_for_end(&self, until: Instant) -> bool {
        let mut end = self.end.lock();
        while end.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.ended.wait_for(&mut end, left);
        }
        true
    }

    /// While the guard is held, no other thread destroys the domain.
    pub(super) fn life(&self) -> MutexGuard<'_, ()> {
        self.life.lock()
    }

    fn event(&self, end: End) -> VmEvent {
        match end {
            End::ShutDown(Reason::Poweroff) => VmEvent::Halted(self.vm),
            End::ShutDown(Reason::Reboot) => VmEvent::Rebooted(self.vm),
            End::ShutDown(Reason::Crash) => {
                let domid = self.domid().unwrap_or_default();
                VmEvent::Crashed(self.vm, format!("the kernel of domain {domid} crashed"))
            }
            End::ShutDown(Reason::Suspend) => {
                VmEvent::Crashed(self.vm, "the guest suspended itself, which was not requested".into())
            }
            End::Vanished => VmEvent::Crashed(self.vm, "its domain was destroyed by another program".into()),
        }
    }
}

/// The VMs of the driver.
#[derive(Debug)]
pub(super) struct Domains {
    pub settings: Settings,
    pub xl: Xl,
    pub events: Events,
    vms: Mutex<BTreeMap<Uuid, Arc<DriverVm>>>,
    stop: Option<Arc<Stop>>,
    watched: OnceLock<()>,
}

impl Domains {
    /// Those that an earlier daemon made go on; those that ended meanwhile are reported.
    pub(super) fn new(settings: &Settings) -> Arc<Self> {
        let known = found(settings, NAME).into_iter().map(|(place, saved)| DriverVm::new(place, saved));
        let this = Arc::new(Self {
            settings: settings.clone(),
            xl: Xl(settings.xen.xl.clone()),
            events: Events::default(),
            vms: Mutex::new(known.map(|guest| (guest.vm, guest)).collect()),
            stop: Stop::new().ok(),
            watched: OnceLock::new(),
        });
        let vms = this.all();
        if !vms.is_empty() {
            for guest in &vms {
                if let Err(error) = this.adopt(guest) {
                    tracing::warn!(vm = %guest.vm, "a domain cannot be looked after: {error}");
                }
            }
            if let Err(error) = tapback::ensure(settings) {
                tracing::warn!("disks of Xen's guests: {error}");
            }
            this.look(true);
            this.watch();
        }
        this
    }

    /// Ends the thread; guests stay.
    pub(super) fn dismiss(&self) {
        if let Some(stop) = &self.stop {
            stop.stop();
        }
    }

    /// A connection to xenstored.
    pub(super) fn bus(&self) -> Result<Bus, XsError> {
        Bus::open(self.settings.xen.store.as_deref())
    }

    /// A connection for a VM, with its errors.
    pub(super) fn bus_for(&self, vm: Uuid) -> Result<Bus, ApiError> {
        self.bus().map_err(|error| failed(vm, "xenstore", error))
    }

    pub(super) fn find(&self, vm: Uuid) -> Option<Arc<DriverVm>> {
        self.vms.lock().get(&vm).cloned()
    }

    /// The VM, which must be there.
    pub(super) fn vm(&self, vm: Uuid) -> Result<Arc<DriverVm>, ApiError> {
        self.find(vm).ok_or_else(|| bad_power_state(vm, "Running", "Halted"))
    }

    fn all(&self) -> Vec<Arc<DriverVm>> {
        self.vms.lock().values().cloned().collect()
    }

    /// Makes the record and the directory of a new VM.
    pub(super) fn add(&self, vm: &VmSpec) -> Result<Arc<DriverVm>, ApiError> {
        let place = Place::of(&self.settings, vm.uuid)?;
        let mut vms = self.vms.lock();
        if vms.contains_key(&vm.uuid) {
            return Err(bad_power_state(vm.uuid, "Halted", "Running"));
        }
        place.remove();
        place.make(&self.settings)?;
        let saved = Saved::new(NAME, vm);
        place.save(&saved)?;
        let guest = DriverVm::new(place, saved);
        vms.insert(vm.uuid, Arc::clone(&guest));
        Ok(guest)
    }

    /// Forgets a VM.
    pub(super) fn forget(&self, guest: &DriverVm) {
        let mut vms = self.vms.lock();
        // Another one with its name may have been made meanwhile.
        if vms.get(&guest.vm).is_some_and(|known| std::ptr::eq(Arc::as_ptr(known), guest)) {
            vms.remove(&guest.vm);
            guest.record.forget(&guest.place);
        }
    }

    /// Finds the domain of a VM whose daemon died, and which disks it really has.
    fn adopt(&self, guest: &DriverVm) -> Result<(), ApiError> {
        let told = |error: XsError| failed(guest.vm, "xenstore", error);
        let mut bus = self.bus().map_err(told)?;
        if guest.domid().is_none() {
            // It died between making the domain and writing down its number.
            let domid = bus.find(guest.vm).map_err(told)?;
            guest.change(|saved| saved.domid = domid)?;
        }
        let Some(domid) = guest.domid() else { return Ok(()) };
        let disks: Vec<(u8, Uuid)> =
            guest.saved().disks.iter().map(|(position, disk)| (*position, disk.disk.spec.vbd)).collect();
        let present = bus.present(domid, &disks).map_err(told)?;
        guest.change(|saved| saved.disks.retain(|position, _| present.contains(position)))
    }

    /// Takes the domain of a VM apart, with its back ends; one that is gone already is fine.
    pub(super) fn destroy(&self, guest: &DriverVm) -> Result<(), ApiError> {
        let vm = guest.vm;
        let mut bus = self.bus_for(vm)?;
        let told = |error: XsError| failed(vm, "xenstore", error);
        let domid = match guest.domid() {
            Some(domid) => Some(domid),
            None => bus.find(vm).map_err(told)?,
        };
        let Some(domid) = domid else { return Ok(()) };
        // Numbers are used again: only a domain with this UUID is this VM's.
        let is_there = |found: &Listed| found.domid == domid && found.uuid == vm && !found.is_dying;
        let list = |cause: Option<String>| -> Result<bool, ApiError> {
            let all = self.xl.list(soon());
            let all =
                all.map_err(|error| failed(vm, "its domain cannot be destroyed", cause.unwrap_or(error)))?;
            Ok(all.iter().any(is_there))
        };
        if list(None)?
            && let Err(error) = self.xl.act("destroy", domid, soon())
        {
            // It may have gone by itself, and the list is what counts.
            if list(Some(error.clone()))? {
                return Err(failed(vm, "its domain cannot be destroyed", error));
            }
        }
        bus.remove_all(domid).map_err(told)
    }

    /// Begins to listen for ends of domains, once.
    pub(super) fn watch(self: &Arc<Self>) {
        let Some(stop) = self.stop.clone() else { return };
        self.watched.get_or_init(|| {
            let weak = Arc::downgrade(self);
            let body = move || listen(&weak, &stop);
            if let Err(error) = thread::Builder::new().name("xen".into()).stack_size(STACK_LEN).spawn(body) {
                tracing::error!("no thread to listen for the ends of domains: {error}");
            }
        });
    }

    /// Compares what xl lists with what is known, and tells what ended.
    /// A daemon that adopts them takes over whether they are paused: another may have died between doing and keeping.
    fn look(&self, adopts: bool) {
        let vms: Vec<_> = self.all().into_iter().filter(|guest| guest.end.lock().is_none()).collect();
        if vms.is_empty() {
            return;
        }
        // A VM that is being made has no number yet, one that just got it is in the list.
        let numbered: Vec<_> = vms.into_iter().filter_map(|guest| Some((guest.domid()?, guest))).collect();
        let listed = match self.xl.list(soon()) {
            Ok(listed) => listed,
            Err(error) => {
                tracing::warn!("domains cannot be listed: {error}");
                return;
            }
        };
        for (domid, guest) in numbered {
            let found =
                listed.iter().find(|found| found.domid == domid && found.uuid == guest.vm && !found.is_dying);
            let end = match found {
                None => End::Vanished,
                Some(Listed { ended: Some(reason), .. }) => End::ShutDown(*reason),
                Some(Listed { is_paused, .. }) => {
                    if !adopts {
                        continue;
                    }
                    let phase = if *is_paused { Phase::Paused } else { Phase::Running };
                    let is_other = !matches!((guest.phase(), phase), (Phase::Made, Phase::Paused));
                    if is_other && let Err(error) = guest.change(|saved| saved.phase = phase) {
                        tracing::warn!(vm = %guest.vm, "its state cannot be kept: {error}");
                    }
                    continue;
                }
            };
            guest.has_ended(end);
            self.ended(&guest, end);
        }
    }

    /// Reports an end of the guest that was held back while the toolstack asked for one.
    pub(super) fn retell(&self, guest: &DriverVm) {
        let end = *guest.end.lock();
        if let Some(end) = end {
            self.ended(guest, end);
        }
    }

    /// A domain has ended: it is destroyed and reported, unless the toolstack asked for the end and does both.
    fn ended(&self, guest: &DriverVm, end: End) {
        let _life = guest.life();
        if guest.record.is_gone() || guest.saved().is_ending {
            return;
        }
        let event = guest.event(end);
        if let Err(error) = self.destroy(guest) {
            // The caller that reads the event asks for it again.
            tracing::warn!(vm = %guest.vm, "the domain of a guest that ended stays: {error}");
        } else {
            self.forget(guest);
        }
        self.events.push(event);
    }
}

/// Looks whenever a domain ends, and now and then.
fn listen(domains: &Weak<Domains>, stop: &Stop) {
    let mut client = None;
    loop {
        let Some(this) = domains.upgrade() else { return };
        if client.is_none() {
            let opened = this.bus().map(Bus::into_client).and_then(|mut client| {
                client.watch("@releaseDomain", "ends")?;
                Ok(client)
            });
            match opened {
                Ok(opened) => client = Some(opened),
                Err(error) => tracing::warn!("ends of domains are noticed late: {error}"),
            }
        }
        // All that came until now is one look.
        while let Some(known) = &mut client {
            match known.next_event() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!("xenstore is connected to again: {error}");
                    client = None;
                }
            }
        }
        this.look(false);
        let is_used = !this.vms.lock().is_empty();
        if is_used && let Err(error) = tapback::ensure(&this.settings) {
            tracing::warn!("disks of Xen's guests: {error}");
        }
        drop(this);
        let pause = if client.is_some() { LOOK_INTERVAL } else { RETRY_INTERVAL };
        let store = client.as_ref().map_or(-1, Client::raw_fd);
        let mut fds = [polled(stop.fd(), libc::POLLIN), polled(store, libc::POLLIN)];
        poll(&mut fds, Instant::now() + pause);
        if fds[0].revents != 0 {
            return;
        }
    }
}
