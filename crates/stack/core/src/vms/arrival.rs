//! A guest that comes from another host of the pool: its VM is made, its memory read, and it goes on.
//!
//! The record says where the VM is; the host that sends writes that. Until the record names this host, its guest does
//! not run here, whatever there is of it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tapio_model::{ApiError, Value};
use tapio_vm::{ShutdownKind, VmDriver, VmSpec, VmState};
use uuid::Uuid;

use super::allowed::refresh;
use super::parallel::for_each;
use super::plug::{Disk, written};
use super::{Call, balloon, drive, lookup, nic, power};
use crate::basics::this_host;
use crate::db::Object;
use crate::plan::steps::step;

/// How long the emulator of a guest that is not taken may take to end.
const END: Duration = Duration::from_secs(30);

/// What the host that sends tells of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskLooks {
    /// Bytes.
    pub(crate) len: u64,
    /// Bytes of a sector as the guest was told.
    pub(crate) sector_size: Option<u32>,
}

/// What the host that sends tells of its guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Looks {
    /// Keys of its platform with which it must be made.
    pub(crate) platform: BTreeMap<String, String>,
    /// Its disks, by VBD.
    pub(crate) disks: BTreeMap<Uuid, DiskLooks>,
    /// The places of its network interfaces, and whether each leads to a network.
    #[serde(default)]
    pub(crate) vifs: BTreeMap<u8, bool>,
}

/// Does the same with each of these, a few at a time.
///
/// # Errors
/// The first one, once all have ended.
pub(super) fn each(
    all: &[Arc<Disk>],
    work: impl Fn(&Arc<Disk>) -> Result<(), ApiError> + Sync,
) -> Result<(), ApiError> {
    let first: Mutex<Option<ApiError>> = Mutex::default();
    for_each(all, |disk| {
        if let Err(error) = work(disk) {
            first.lock().get_or_insert(error);
        }
    });
    first.into_inner().map_or(Ok(()), Err)
}

/// The disks that a VM has plugged, and the media in its drives.
///
/// # Errors
/// `HANDLE_INVALID`, `INVALID_DEVICE`.
pub(super) fn disks_of(call: &Call, vm: &Object) -> Result<Vec<Arc<Disk>>, ApiError> {
    let vbds = call.part.db.find("VBD", "VM", &vm.reference).into_iter();
    let plugged = vbds.filter(|vbd| !vbd.bool("empty") && vbd.bool("currently_attached"));
    plugged.map(|vbd| Disk::of(call, &vbd)).collect()
}

/// [`disks_of`] a guest that comes, some of whose disks come along: VDIs of this host, by VBD.
fn coming_of(call: &Call, vm: &Object, along: &BTreeMap<Uuid, String>) -> Result<Vec<Arc<Disk>>, ApiError> {
    let disks = disks_of(call, vm)?.into_iter();
    let each = disks.map(|disk| match along.get(&disk.vbd()) {
        None => Ok(disk),
        Some(vdi) => on_vdi(call, disk.vbd(), vdi),
    });
    each.collect()
}

/// The disk of a VBD on a VDI that its record does not name, or not yet.
fn on_vdi(call: &Call, vbd: Uuid, vdi: &str) -> Result<Arc<Disk>, ApiError> {
    let vbd = call.part.db.by_uuid("VBD", &vbd.to_string())?;
    Disk::claimed(call, &vbd, call.part.db.get("VDI", vdi)?, Arc::default())
}

/// Makes the VM, for the memory that comes; `along` are the VDIs of disks that come too, by VBD.
///
/// # Errors
/// `HOST_DISABLED`, `HOST_NOT_ENOUGH_FREE_MEMORY`, `VM_REQUIRES_SR`, `HOST_CANNOT_ATTACH_NETWORK`, the driver's, those
/// of disks.
pub(crate) fn make(
    call: &Call,
    vm: &Arc<Object>,
    looks: &Looks,
    along: &BTreeMap<Uuid, String>,
) -> Result<(), ApiError> {
    let part = &call.part;
    part.db.change(|change| power::assert_enabled(change, call))?;
    power::assert_can_boot(part, vm)?;
    for vbd in part.db.find("VBD", "VM", &vm.reference).iter().filter(|vbd| !vbd.bool("empty")) {
        let vdi = along.get(&vbd.uuid()?).map_or(vbd.text("VDI"), String::as_str);
        let sr = part.db.get("VDI", vdi)?.text("SR").to_owned();
        if !part.storage.has_attached(&sr) {
            return Err(ApiError::new("VM_REQUIRES_SR", [vm.reference.as_str(), &sr]));
        }
    }
    let driver = lookup::driver(part, vm)?;
    let mut spec = VmSpec { drives: drive::of_vm(part, vm)?, ..power::spec_for_memory(vm)? };
    spec.platform.extend(looks.platform.clone());
    let nics = nic::arriving(call, &*driver, vm, &looks.vifs)?;
    driver.create_saved(&spec, "")?;
    step("vm-arrive:created");
    nic::plug_all(&*driver, vm, &nics)?;
    let disks = coming_of(call, vm, along)?;
    each(&disks, |disk| {
        let uuid = disk.vbd();
        let looks = looks.disks.get(&uuid).copied();
        let looks = looks.ok_or_else(|| {
            ApiError::internal(format!(
                "VBD {uuid} was plugged while its VM began to move: move the VM again"
            ))
        })?;
        disk.arrive(looks.len, looks.sector_size)
    })?;
    if disks.len() != looks.disks.len() {
        let why = "a disk was unplugged while its VM began to move: move the VM again";
        return Err(ApiError::internal(why));
    }
    step("vm-arrive:made");
    Ok(())
}

/// Reads the memory, to its end. The guest is stopped then.
///
/// # Errors
/// The driver's: the VM can only be ended.
pub(crate) fn read(call: &Call, vm: &Object, from: OwnedFd) -> Result<(), ApiError> {
    lookup::driver(&call.part, vm)?.load(vm.uuid()?, from)
}

/// Opens the disks, which the host that sends has given up.
///
/// # Errors
/// Those of disks: also that the other host has one open still.
pub(crate) fn open(call: &Call, vm: &Object, along: &BTreeMap<Uuid, String>) -> Result<(), ApiError> {
    if lookup::driver(&call.part, vm)?.state(vm.uuid()?)? != VmState::Paused {
        return Err(ApiError::internal(format!("the memory of VM {} has not come", vm.text("uuid"))));
    }
    each(&written(&coming_of(call, vm, along)?), |disk| disk.take_images())
}

/// Whether the emulator and all disk processes of a guest that is about to go on here are there: a device whose process
/// ended while its guest was stopped is never connected again by QEMU before version 9.
///
/// # Errors
/// `VM_BAD_POWER_STATE`: the emulator has ended; `INTERNAL_ERROR` names a disk.
pub(crate) fn is_whole(call: &Call, vm: &Object) -> Result<(), ApiError> {
    if lookup::driver(&call.part, vm)?.state(vm.uuid()?)? != VmState::Paused {
        return Err(super::allowed::bad_power_state(vm, "Paused"));
    }
    each(&disks_of(call, vm)?, |disk| {
        if call.part.disks.serves(disk.vbd()) {
            return Ok(());
        }
        Err(ApiError::internal(format!(
            "the disk process of VBD {} ended at the host that the VM was to move to: move the VM again",
            disk.vbd()
        )))
    })
}

/// The record names this host: the guest goes on, with VDIs that have come along, and `notes` go. Repeating it is
/// fine.
///
/// # Errors
/// The driver's, the store's; `VM_BAD_POWER_STATE`: its emulator has ended.
pub(crate) fn run<'a>(
    call: &Call,
    vm: &Arc<Object>,
    notes: &[String],
    along: impl Iterator<Item = &'a String> + Clone,
) -> Result<(), ApiError> {
    let (uuid, driver) = (vm.uuid()?, lookup::driver(&call.part, vm)?);
    if driver.state(uuid)? == VmState::Halted {
        return Err(super::allowed::bad_power_state(vm, "Running"));
    }
    // From here on a disk process that dies is replaced.
    each(&disks_of(call, vm)?, |disk| disk.arrived())?;
    driver.unpause(uuid)?;
    step("vm-arrive:running");
    call.part.db.change(|change| {
        notes.iter().for_each(|note| change.drop_note(note));
        for vdi in along.clone() {
            if change.get("VDI", vdi).is_ok() {
                crate::storage::refresh_vdi(&call.part.storage, change, vdi)?;
            }
        }
        for console in change.find("console", "VM", &vm.reference) {
            change.destroy("console", &console.reference)?;
        }
        let vm = change.get("VM", &vm.reference)?;
        power::record_arrived(change, call, &vm, &*driver)?;
        for vbd in change.find("VBD", "VM", &vm.reference) {
            refresh(change, "VBD", &vbd.reference)?;
        }
        Ok(())
    })?;
    balloon::follow(call, vm, &*driver);
    Ok(())
}

/// Ends what there is of a guest that is another host's, without touching its records.
///
/// # Errors
/// The emulator does not end, a disk does not close.
pub(crate) fn remove(call: &Call, vm: &Object) -> Result<(), ApiError> {
    let uuid = vm.uuid()?;
    if let Ok(driver) = lookup::driver(&call.part, vm) {
        driver.shutdown(uuid, ShutdownKind::Hard, Instant::now() + END)?;
    }
    let db = &call.part.db;
    let here = call.part.disks.of_vm(uuid).into_iter();
    let vbds = here.filter_map(|note| Some((db.by_uuid("VBD", &note.spec.vbd.to_string()).ok()?, note)));
    // The record of a VBD whose disk comes along, or has gone along, names the VDI of the other host.
    let disks: Result<Vec<_>, ApiError> = vbds
        .map(|(vbd, note)| match db.get("VDI", &note.vdi) {
            Ok(vdi) => Disk::claimed(call, &vbd, vdi, Arc::default()),
            Err(_) => Disk::of(call, &vbd),
        })
        .collect();
    each(&disks?, |disk| disk.drop_arrived())?;
    tapio_sm::lease::forget_guest(&call.part.config.run_dir, uuid);
    Ok(())
}

/// The same of a guest whose VM is gone.
///
/// # Errors
/// As [`remove`].
pub(crate) fn remove_unknown(call: &Call, vm: Uuid) -> Result<(), ApiError> {
    for driver in call.part.drivers() {
        if driver.state(vm)? != VmState::Halted {
            driver.shutdown(vm, ShutdownKind::Hard, Instant::now() + END)?;
        }
    }
    for note in call.part.disks.of_vm(vm) {
        super::recover::remove(call, &note, None)?;
    }
    tapio_sm::lease::forget_guest(&call.part.config.run_dir, vm);
    Ok(())
}

/// Where the record says that a VM runs: its power state and its host.
pub(crate) fn place(vm: &Object) -> (&str, &str) {
    (vm.text("power_state"), vm.text("resident_on"))
}

/// Whether the record says that a VM runs, or is to run, on this host.
pub(crate) fn is_own(call: &Call, vm: &Object) -> bool {
    place(vm) == ("Running", &this_host(&call.part.db))
}

/// The state of what there is of a VM here.
///
/// # Errors
/// The driver's.
pub(crate) fn state(call: &Call, vm: &Object) -> Result<VmState, ApiError> {
    lookup::driver(&call.part, vm)?.state(vm.uuid()?)
}

/// The VM's record says that it is elsewhere, in one change with what else is to be known.
///
/// # Errors
/// The store's.
pub(super) fn moved_to(change: &mut crate::db::Change<'_>, vm: &Object, host: &str) -> Result<(), ApiError> {
    change.set("VM", &vm.reference, "resident_on", Value::string(host))?;
    for console in change.find("console", "VM", &vm.reference) {
        change.destroy("console", &console.reference)?;
    }
    Ok(())
}

/// The driver of a VM, for what is asked of it elsewhere.
///
/// # Errors
/// `INVALID_VALUE`.
pub(crate) fn driver_of(call: &Call, vm: &Object) -> Result<Arc<dyn VmDriver>, ApiError> {
    lookup::driver(&call.part, vm)
}
