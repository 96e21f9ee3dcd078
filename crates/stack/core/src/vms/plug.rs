//! Giving a VM a disk and taking it away, as plans.

mod hand_over;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_model::{ApiError, Value};
use tapio_stat::VbdId;
use tapio_types::Access;
use tapio_vm::{DiskSpec, FrontSpec, VmDriver};
use uuid::Uuid;

use super::allowed::refresh;
use super::{Call, StorageCall, devices, lookup, paused, tuning};
use crate::db::Object;
use crate::disks::{Note, Phase, Rights};
use crate::operations::{Claim, Held};
use crate::plan::steps::step;
use crate::plan::{Doing, Permits, Plan};
use crate::progress::{Progress, Unwatched};
use crate::storage::{self, Opening};

pub use hand_over::written;

/// How long one step of a plug may take.
const PLUG: Duration = Duration::from_secs(120);
/// How long undoing one may take.
const UNDO: Duration = Duration::from_secs(30);

/// How long a forced unplug waits for a snapshot of its VDI.
const SNAPSHOT: Duration = Duration::from_secs(2);

/// Cancels what waits, from then on.
struct Until(Instant);

impl Progress for Until {
    fn is_cancelled(&self) -> bool {
        Instant::now() >= self.0
    }

    fn set(&self, _: f64) {}

    fn task(&self) -> Option<&str> {
        None
    }
}

/// When an unplug gives up.
#[derive(Clone, Copy, Debug)]
pub enum Timeout {
    /// The whole operation, as its caller chose.
    Until(Instant),
    /// All disks of an operation together, but each has at least this long once it is its turn: disks that hang, one
    /// after the other, do not add up.
    Shared(Instant, Duration),
}

impl Timeout {
    fn until(self) -> Instant {
        match self {
            Self::Until(until) => until,
            Self::Shared(until, least) => until.max(Instant::now() + least),
        }
    }
}

/// What the driver gets to know of a VBD.
///
/// # Errors
/// `INVALID_DEVICE`.
pub fn disk_spec(vbd: &Object) -> Result<DiskSpec, ApiError> {
    let is_cd = vbd.text("type") == "CD";
    Ok(DiskSpec {
        vbd: vbd.uuid()?,
        position: devices::place(vbd.text("userdevice"))?,
        read_only: is_cd || vbd.text("mode") == "RO",
        is_cd,
        is_bootable: vbd.bool("bootable"),
    })
}

/// A disk of a VM, on its way in or out.
pub struct Disk {
    call: Call,
    /// The same to the storage.
    storage: StorageCall,
    /// The same, which no client cancels: for what takes back.
    uncancelled: StorageCall,
    driver: Arc<dyn VmDriver>,
    vm: Uuid,
    domid: u32,
    is_host: bool,
    spec: DiskSpec,
    /// The VBD's reference.
    vbd: String,
    vm_reference: String,
    vdi: Arc<Object>,
    vdi_uuid: Uuid,
    sr: Arc<Object>,
    record: Arc<Object>,
    claim: Arc<Claim>,
    /// Keeps the chain as it is until a process has it open.
    opening: Mutex<Option<Opening>>,
    /// As the driver said when it was asked first.
    front: OnceLock<FrontSpec>,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "disk of VBD {}", self.spec.vbd)
    }
}

fn taken<T>(place: &Mutex<Option<T>>) -> Option<T> {
    place.lock().take()
}

fn put<T>(place: &Mutex<Option<T>>, value: T) {
    *place.lock() = Some(value);
}

impl Disk {
    /// The disk of a VBD that has a VDI.
    ///
    /// # Errors
    /// `HANDLE_INVALID`, an unknown driver, `INVALID_DEVICE`.
    pub fn of(call: &Call, vbd: &Arc<Object>) -> Result<Arc<Self>, ApiError> {
        let vdi = call.part.db.get("VDI", vbd.text("VDI"))?;
        Self::claimed(call, vbd, vdi, Arc::default())
    }

    /// [`Self::of`] an operation that may be overridden by a forced one, with the VDI as the operation found it.
    ///
    /// # Errors
    /// As there.
    pub fn claimed(
        call: &Call,
        vbd: &Arc<Object>,
        vdi: Arc<Object>,
        claim: Arc<Claim>,
    ) -> Result<Arc<Self>, ApiError> {
        let db = &call.part.db;
        let vm = db.get("VM", vbd.text("VM"))?;
        let sr = db.get("SR", vdi.text("SR"))?;
        let storage = lookup::to_storage(call);
        let spec = disk_spec(vbd)?;
        Ok(Arc::new(Self {
            call: call.clone(),
            uncancelled: storage.with(Arc::new(Unwatched::default())),
            storage,
            driver: lookup::driver(&call.part, &vm)?,
            vm: vm.uuid()?,
            domid: u32::try_from(vm.int("domid")).unwrap_or(0),
            is_host: vm.bool("is_control_domain"),
            spec,
            vbd: vbd.reference.clone(),
            vm_reference: vm.reference.clone(),
            vdi_uuid: vdi.uuid()?,
            vdi,
            sr,
            record: Arc::clone(vbd),
            claim,
            opening: Mutex::new(None),
            front: OnceLock::new(),
        }))
    }

    /// Does what changes records and notes, unless a forced operation has taken over.
    ///
    /// # Errors
    /// `OTHER_OPERATION_IN_PROGRESS`, or what `work` answers.
    fn if_mine<T>(&self, work: impl FnOnce() -> Result<T, ApiError>) -> Result<T, ApiError> {
        match self.claim.hold() {
            Some(_held) => work(),
            None => Err(ApiError::new(
                "OTHER_OPERATION_IN_PROGRESS",
                ["VBD", self.vbd.as_str(), "unplug_force", self.call.progress.task().unwrap_or_default()],
            )),
        }
    }

    /// How the guest gets the disk. The driver is asked once.
    fn front(&self) -> Result<&FrontSpec, ApiError> {
        if let Some(front) = self.front.get() {
            return Ok(front);
        }
        let front = self.driver.front(self.vm, &self.spec)?;
        Ok(self.front.get_or_init(|| front))
    }

    fn is_mine(&self) -> bool {
        self.claim.hold().is_some()
    }

    fn permits(&self) -> Permits {
        Permits { vm: Some(self.vm_reference.as_str().into()), sr: Some(self.sr.reference.as_str().into()) }
    }

    fn permit_of_vm(&self) -> Permits {
        Permits { sr: None, ..self.permits() }
    }

    fn subject(&self) -> String {
        format!("VBD {}", self.spec.vbd)
    }

    /// Everything from the storage to the guest. The record says that the VBD is plugged when it has ended.
    pub fn plug(self: &Arc<Self>) -> Plan {
        let leaf = |name, permits, run: fn(&Self, &Doing) -> Result<(), ApiError>| {
            let this = Arc::clone(self);
            Plan::leaf(name, self.subject(), permits, move |doing| run(&this, doing))
        };
        let (first, last) = (Arc::clone(self), Arc::clone(self));
        Plan::Serial(vec![
            leaf("activate the VDI", self.permits(), Self::activate).undone_by(move |_| first.clear()),
            leaf("open the images", self.permits(), |this, _| this.open()),
            leaf("plug the disk into the VM", self.permit_of_vm(), |this, _| this.give())
                .undone_by(move |_| last.take_back()),
        ])
    }

    /// Makes the VDI ready, and a process for it meanwhile: storage takes its time, a process a processor's.
    fn activate(&self, doing: &Doing) -> Result<(), ApiError> {
        let disks = &self.call.part.disks;
        let uuid = self.spec.vbd;
        if disks.of_vbd(uuid).is_some_and(|note| note.phase != Phase::Running) {
            // What an earlier attempt could not end is ended first.
            self.clear()?;
        }
        disks.note(Note::starting(
            self.spec.clone(),
            (self.vm, self.driver.name()),
            (&self.vdi.reference, self.vdi_uuid),
            self.sr.uuid()?,
            tuning::of(&self.record, &self.sr, &self.call.part.config),
        ))?;
        let access = if self.spec.read_only { Access::ReadOnly } else { Access::ReadWrite };
        if self.sr.bool("shared") && !self.spec.read_only && !self.is_host {
            let run_dir = &self.call.part.config.run_dir;
            tapio_sm::lease::note_guest(run_dir, self.sr.uuid()?, self.vm).map_err(|error| {
                ApiError::internal(format!("{}: a guest cannot be noted: {error}", run_dir.display()))
            })?;
        }
        let start = || {
            let rights = Rights::of(self.sr.text("type"), self.front()?.is_of_host());
            disks.start(uuid, rights, Instant::now() + PLUG)
        };
        let (started, activated) = doing.alongside("start a disk process", start, || {
            let opening = storage::activate(&self.storage, &self.vdi, &self.vbd, access)?;
            put(&self.opening, opening);
            step("vbd-plug:activated");
            Ok(())
        });
        // Where both fail, the storage is what the caller asked for.
        let ready = activated.and(started).and_then(|()| self.if_mine(|| Ok(())));
        if ready.is_ok() {
            step("vbd-plug:ready");
        } else if let Err(error) = self.clear() {
            tracing::warn!(vbd = %uuid, %error, "a disk that was not made is not all gone");
        }
        ready
    }

    /// Ends the process and deactivates the VDI, as far as they are there.
    fn clear(&self) -> Result<(), ApiError> {
        drop(taken(&self.opening));
        if !self.is_mine() {
            // The forced operation has done it, and another plug may have come since.
            return Ok(());
        }
        self.call.part.disks.end(self.spec.vbd, true, Instant::now() + UNDO)?;
        storage::deactivate(&self.uncancelled, &self.vdi.reference, &self.vbd)?;
        self.call.part.disks.forget(self.spec.vbd);
        Ok(())
    }

    fn open(&self) -> Result<(), ApiError> {
        let opening = taken(&self.opening);
        let with = opening.as_ref().map(|opening| opening.with.clone());
        let with = with.ok_or_else(|| ApiError::internal("a disk is opened that is not active"))?;
        self.call.part.disks.open(self.spec.vbd, &with, Instant::now() + PLUG)?;
        self.if_mine(|| Ok(()))
    }

    fn give(&self) -> Result<(), ApiError> {
        let disks = &self.call.part.disks;
        let uuid = self.spec.vbd;
        let front = self.front()?;
        let number = VbdId { domid: self.domid, devid: devices::number(self.spec.position) };
        let has_number = !matches!(front, FrontSpec::Nothing | FrontSpec::Xen);
        let id = (!self.is_host && has_number).then_some(number);
        let offered = disks.offer(uuid, front, id, Instant::now() + PLUG)?;
        let given = self.driver.plug(self.vm, &offered).and_then(|()| {
            step("vbd-plug:plugged");
            let node = offered.node.as_ref().filter(|_| offered.front == FrontSpec::Device);
            let device = node.and_then(|node| node.file_name()).map_or_else(
                || devices::name(self.spec.position),
                |name| name.to_string_lossy().into_owned(),
            );
            self.if_mine(|| {
                disks.is_running(uuid)?;
                self.record_plugged(Some(&device))
            })
        });
        if given.is_err() && self.is_mine() {
            let _ = self.driver.unplug(self.vm, &self.spec, true, Instant::now() + UNDO);
            let _ = disks.withdraw(uuid, true, Instant::now() + UNDO);
        }
        given
    }

    fn take_back(&self) -> Result<(), ApiError> {
        let disks = &self.call.part.disks;
        if !self.is_mine() {
            return Ok(());
        }
        disks.is_ending(self.spec.vbd, Instant::now() + UNDO)?;
        self.driver.unplug(self.vm, &self.spec, true, Instant::now() + UNDO)?;
        disks.withdraw(self.spec.vbd, true, Instant::now() + UNDO)?;
        self.record_plugged(None)
    }

    /// Records whether, and as what, the VBD is plugged.
    fn record_plugged(&self, device: Option<&str>) -> Result<(), ApiError> {
        record(&self.call, &self.vbd, device, None)
    }

    /// Everything from the guest to the storage. With `force` the guest is not asked, and no permit but the host's is
    /// needed: those of the VM and of the SR may be held by steps that hang. The record says that the VBD is not
    /// plugged when it has ended; of what fails before the guest has let go, nothing has happened.
    pub fn unplug(self: &Arc<Self>, force: bool, timeout: Timeout) -> Plan {
        let (first, second) = (Arc::clone(self), Arc::clone(self));
        let until: Arc<Mutex<Option<Instant>>> = Arc::default();
        let same = Arc::clone(&until);
        let (of_vm, of_both) = match force {
            true => (Permits::default(), Permits::default()),
            false => (self.permit_of_vm(), self.permits()),
        };
        Plan::Serial(vec![
            Plan::leaf("unplug the disk from the VM", self.subject(), of_vm, move |_| {
                let end = timeout.until();
                put(&until, end);
                first.let_go(force, end)
            }),
            Plan::leaf("end the disk process", self.subject(), of_both, move |_| {
                second.close(force, taken(&same).unwrap_or_else(|| timeout.until()))
            }),
        ])
    }

    fn let_go(&self, force: bool, until: Instant) -> Result<(), ApiError> {
        let disks = &self.call.part.disks;
        let uuid = self.spec.vbd;
        if disks.of_vbd(uuid).is_none() {
            return Ok(());
        }
        // The guest writes what it has before it lets go.
        if !force && disks.pause_token(uuid).is_some() {
            disks.unpause(uuid, "", until)?;
        }
        disks.is_ending(uuid, until)?;
        let let_go = self
            .driver
            .unplug(self.vm, &self.spec, force, until)
            .and_then(|()| disks.withdraw(uuid, force, until));
        match let_go {
            Ok(()) => {
                step("vbd-unplug:unplugged");
                Ok(())
            }
            // A forced end goes on to the process, which is what the guest's side hangs on.
            Err(error) if force => {
                tracing::warn!(vbd = %uuid, %error, "the front end did not release the disk");
                Ok(())
            }
            Err(error) => {
                self.if_mine(|| {
                    disks.goes_on(uuid);
                    Ok(())
                })?;
                Err(self.named(error, until))
            }
        }
    }

    fn close(&self, force: bool, until: Instant) -> Result<(), ApiError> {
        let vms = &self.call.part;
        let uuid = self.spec.vbd;
        // A snapshot of the VDI that runs is waited for: it needs the process. Not for long where force is meant: then
        // it finds that the disk is gone.
        let hold = if force {
            self.closing_soon()
        } else {
            Some(storage::closing(&self.uncancelled, &self.vdi.reference)?)
        };
        let ended = vms.disks.end(uuid, force, until);
        drop(hold);
        match ended {
            Ok(()) => {}
            Err(error) if force => return self.leave_behind(&error),
            Err(error) => {
                return Err(self.if_mine(|| {
                    vms.disks.is_left(uuid);
                    Ok(self.named(error, until))
                })?);
            }
        }
        self.if_mine(|| Ok(()))?;
        if force {
            storage::release(&self.uncancelled, &self.vdi.reference, &self.vbd)?;
        } else {
            storage::deactivate(&self.uncancelled, &self.vdi.reference, &self.vbd)?;
        }
        step("vbd-unplug:deactivated");
        self.if_mine(|| {
            self.record_plugged(None)?;
            vms.disks.forget(uuid);
            Ok(())
        })
    }

    fn closing_soon(&self) -> Option<Held> {
        let call = self.storage.with(Arc::new(Until(Instant::now() + SNAPSHOT)));
        let hold = storage::closing(&call, &self.vdi.reference);
        hold.inspect_err(|error| {
            tracing::warn!(vbd = %self.spec.vbd, %error, "a disk is closed under an operation that hangs");
        })
        .ok()
    }

    /// The process does not end, because the kernel waits for its storage. It holds the image's lock, and its VDI stays
    /// in use, until it does; the VBD is unplugged all the same.
    fn leave_behind(&self, error: &ApiError) -> Result<(), ApiError> {
        let vms = &self.call.part;
        self.if_mine(|| {
            let why = format!(
                "Its disk process was left behind: {error}. The VDI stays in use until that process ends; see to the \
                 storage."
            );
            tracing::error!(vbd = %self.spec.vbd, "{why}");
            record(&self.call, &self.vbd, None, Some(&why))?;
            vms.disks.is_left(self.spec.vbd);
            Ok(())
        })
    }

    /// The error as the caller of an unplug knows it.
    fn named(&self, error: ApiError, until: Instant) -> ApiError {
        let params = |why: String| ["VBD".to_owned(), self.vbd.clone(), why];
        let why = error.params.last().cloned().unwrap_or_default();
        match &*error.code {
            "DEVICE_DETACH_REJECTED" => ApiError::new("DEVICE_DETACH_REJECTED", params(why)),
            "VBD_TRAY_LOCKED" => ApiError::new("VBD_TRAY_LOCKED", [self.vbd.clone(), why]),
            _ if Instant::now() >= until => ApiError::new("DEVICE_DETACH_TIMEOUT", params(error.to_string())),
            "DEVICE_DETACH_TIMEOUT" => ApiError::new("DEVICE_DETACH_TIMEOUT", params(why)),
            _ => error,
        }
    }
}

/// Plugs a drive without a medium into a VM that runs.
///
/// # Errors
/// The driver's.
pub fn plug_empty(call: &Call, vbd: &Object) -> Result<(), ApiError> {
    let vm = call.part.db.get("VM", vbd.text("VM"))?;
    lookup::driver(&call.part, &vm)?.plug_drive(vm.uuid()?, &disk_spec(vbd)?)?;
    let name = devices::name(devices::place(vbd.text("userdevice"))?);
    record(call, &vbd.reference, Some(&name), None)
}

/// Records in a VBD whether, and as what, it is plugged; and its error, if there was one.
///
/// # Errors
/// The store's.
pub fn record(call: &Call, vbd: &str, device: Option<&str>, trouble: Option<&str>) -> Result<(), ApiError> {
    call.part.db.change(|change| {
        let Ok(before) = change.get("VBD", vbd) else { return Ok(()) };
        change.set("VBD", vbd, "currently_attached", device.is_some())?;
        change.set("VBD", vbd, "device", device.unwrap_or_default())?;
        paused::show(change, &before, None)?;
        let code = i64::from(trouble.is_some()) * 5;
        if before.int("status_code") != code || trouble.is_some() {
            change.set("VBD", vbd, "status_code", code)?;
            change.set("VBD", vbd, "status_detail", Value::string(trouble.unwrap_or_default()))?;
        }
        refresh(change, "VBD", vbd)
    })
}
