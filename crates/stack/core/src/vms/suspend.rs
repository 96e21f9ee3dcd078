//! VMs whose memory goes to a VDI, and that go on from there: suspend and resume.
//!
//! ```text
//! suspend   1  a VDI is made for the memory                       with a note: nothing leads to it yet
//!           2  the guest's processors stop, its memory is written
//!           3  in one change: the VM is suspended, and leads to the VDI
//!           4  the VM's process ends, its disks are unplugged
//! resume    1  the VM is made, its disks are plugged, its memory is read; the guest has not run
//!           2  in one change: the VM is paused, and the VDI is one that nothing leads to
//!           3  the guest goes on; the VDI is removed
//! ```
//!
//! A failure or a kill before 3 of a suspend lets the guest go on, one after it leaves the VM suspended. A failure or a
//! kill before 2 of a resume leaves the VM suspended with its memory, which is still good: the guest has not run, so
//! its disks are as they were. From then on the memory is never read again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};
use tapio_vm::{ShutdownKind, VmDriver, VmState};

use super::allowed::{bad_power_state, refresh, refuse_special};
use super::made::{discard, leave_image};
use super::running::Running;
use super::{Call, Handlers, Vms, balloon, lookup, memory, power};
use crate::args::Args;
use crate::basics::this_host;
use crate::db::{Change, Object};
use crate::plan::steps::step;
use crate::storage::vdi::{self, made_note};

/// How long the emulator of a VM whose memory is written may take to end.
const END: Duration = Duration::from_secs(30);

/// Notes of an operation that stopped a guest which shall go on.
const STOPPED: &str = "suspend";
/// Notes of a guest that is to go on from its memory.
const RESUMED: &str = "resume";

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.suspend", suspend);
    handlers.on("VM.resume", |call, args| resume(call, args.text(0)?, args.bool(1)?));
    handlers.on("VM.resume_on", |call, args| {
        let host = call.part.db.get("host", args.text(1)?)?;
        if host.reference != this_host(&call.part.db) {
            return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
        }
        resume(call, args.text(0)?, args.bool(2)?)
    });
}

/// Where the memory of a VM goes: the first that is there of the VM's SR for it, the host's, the pool's, and the pool's
/// default SR.
fn sr_for(vms: &Vms, vm: &Object) -> Result<String, ApiError> {
    let db = &vms.db;
    let host = db.get("host", &this_host(db)).ok();
    let pool = db.all("pool").into_iter().next();
    let told = [
        Some(vm.text("suspend_SR")),
        host.as_ref().map(|host| host.text("suspend_image_sr")),
        pool.as_ref().map(|pool| pool.text("suspend_image_SR")),
        pool.as_ref().map(|pool| pool.text("default_SR")),
    ];
    let found = told.into_iter().flatten().find(|sr| db.get("SR", sr).is_ok());
    found.map(str::to_owned).ok_or_else(|| ApiError::new("VM_NO_SUSPEND_SR", [&vm.reference]))
}

/// Makes a VDI for the memory of a VM. A note says that nothing leads to it; the change after which a record does drops
/// the note.
///
/// # Errors
/// `VM_NO_SUSPEND_SR`, those of `VDI.create`.
pub(super) fn make_image(call: &Call, vm: &Object) -> Result<String, ApiError> {
    let sr = sr_for(&call.part, vm)?;
    let room = memory::room_for(power::most_memory(vm).max(power::spec(vm)?.memory));
    let name = format!("Memory of {}", vm.text("name_label"));
    let record = [
        ("SR", Value::string(sr)),
        ("virtual_size", Value::Int(i64::try_from(room).unwrap_or(i64::MAX))),
        ("name_label", Value::string(name)),
        ("name_description", Value::string("Memory of a suspended VM, or of a checkpoint")),
        ("type", Value::string("suspend")),
    ];
    let record: BTreeMap<String, Value> =
        record.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    vdi::create(&lookup::to_storage(call), &record, Some(&vm.reference))
}

/// Says that the guest of a VM that runs is about to be stopped and shall go on, whatever comes.
pub(super) fn note_stopped(change: &mut Change<'_>, vm: &Object) {
    change.put_note(power::note_key(STOPPED, vm), &vm.reference);
}

/// It goes on, or needs not.
pub(super) fn drop_stopped(change: &mut Change<'_>, vm: &Object) {
    change.drop_note(power::note_key(STOPPED, vm));
}

/// Lets a guest go on that was stopped; a note of one that does not has the next start of the daemon try again.
pub(super) fn go_on(call: &Call, driver: &dyn VmDriver, vm: &Object) -> Result<(), ApiError> {
    driver.unpause(vm.uuid()?)?;
    call.part.db.change(|change| {
        drop_stopped(change, vm);
        Ok(())
    })
}

fn suspend(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let begin = |change: &mut Change<'_>, vm: &Object| about_to_stop(call, change, vm);
    let (_running, vm) = Running::begin(call, "VM", args.text(0)?, "suspend", begin)?;
    put_to_rest(call, &vm)?;
    Ok(Value::Void)
}

/// Notes that the guest of a VM that runs is about to be stopped, if its memory can be written.
///
/// # Errors
/// `VM_IS_TEMPLATE`, `OPERATION_NOT_ALLOWED`, `VM_BAD_POWER_STATE`; the driver's.
pub(super) fn about_to_stop(
    call: &Call,
    change: &mut Change<'_>,
    vm: &Object,
) -> Result<Arc<Object>, ApiError> {
    refuse_special(vm)?;
    if vm.text("power_state") != "Running" {
        return Err(bad_power_state(vm, "Running"));
    }
    lookup::driver(&call.part, vm)?.check_save(vm.uuid()?)?;
    note_stopped(change, vm);
    change.get("VM", &vm.reference)
}

/// All steps of a suspend.
///
/// # Errors
/// Those of [`make_image`], the driver's: the guest goes on, or is suspended and not all of its process is gone.
pub(super) fn put_to_rest(call: &Call, vm: &Arc<Object>) -> Result<(), ApiError> {
    let driver = lookup::driver(&call.part, vm)?;
    // Requests that wait would keep the guest from standing still; a guest that is resumed has no paused disks.
    super::pause::unpause_all(call, vm);
    let mut image = None;
    let saved = write_down(call, &driver, vm, &mut image);
    if saved.is_err() {
        // Harmless where it was not stopped.
        if let Err(error) = go_on(call, &*driver, vm) {
            tracing::warn!(vm = vm.text("uuid"), %error, "a guest that could not be suspended stays paused");
        }
        if let Some(image) = image {
            discard(call, &image);
        }
    }
    saved?;
    driver.shutdown(vm.uuid()?, ShutdownKind::Hard, Instant::now() + END)?;
    step("vm-suspend:ended");
    power::take_disks(call, vm, "VM.suspend");
    Ok(())
}

/// Steps 1 to 3 of a suspend. `image` is the VDI once there is one.
fn write_down(
    call: &Call,
    driver: &Arc<dyn VmDriver>,
    vm: &Object,
    image: &mut Option<String>,
) -> Result<(), ApiError> {
    let uuid = vm.uuid()?;
    let made = make_image(call, vm)?;
    let vdi = image.insert(made);
    step("vm-suspend:image-made");
    driver.pause(uuid)?;
    step("vm-suspend:paused");
    memory::save(call, &**driver, uuid, vdi)?;
    step("vm-suspend:saved");
    call.part.db.change(|change| {
        change.drop_note(made_note(vdi));
        drop_stopped(change, vm);
        change.set("VM", &vm.reference, "suspend_VDI", Value::string(vdi.as_str()))?;
        power::at_rest(change, vm, "Suspended")
    })?;
    step("vm-suspend:recorded");
    Ok(())
}

pub(super) fn resume(call: &Call, reference: &str, start_paused: bool) -> Result<Value, ApiError> {
    let published = power::numbers_below(&call.part);
    let begin = |change: &mut Change<'_>, vm: &Object| about_to_go_on(call, change, vm, published);
    let (_running, vm) = Running::begin(call, "VM", reference, "resume", begin)?;
    wake(call, &vm, start_paused)?;
    Ok(Value::Void)
}

/// Notes that a suspended VM is about to go on. `published` is [`power::numbers_below`].
///
/// # Errors
/// `VM_IS_TEMPLATE`, `OPERATION_NOT_ALLOWED`, `VM_BAD_POWER_STATE`, `HOST_DISABLED`, `VM_HAS_NO_SUSPEND_VDI`.
pub(super) fn about_to_go_on(
    call: &Call,
    change: &mut Change<'_>,
    vm: &Object,
    published: u32,
) -> Result<Arc<Object>, ApiError> {
    refuse_special(vm)?;
    if vm.text("power_state") != "Suspended" {
        return Err(bad_power_state(vm, "Suspended"));
    }
    power::assert_enabled(change, call)?;
    if vm.is_null("suspend_VDI") {
        return Err(ApiError::new("VM_HAS_NO_SUSPEND_VDI", [&vm.reference]));
    }
    change.get("VDI", vm.text("suspend_VDI"))?;
    power::announce(change, vm, published, RESUMED)
}

/// All steps of a resume.
///
/// # Errors
/// The driver's, the store's: the VM is suspended with its memory, or goes on.
pub(super) fn wake(call: &Call, vm: &Arc<Object>, start_paused: bool) -> Result<(), ApiError> {
    step("vm-resume:noted");
    let image = vm.text("suspend_VDI").to_owned();
    let brought_back = bring_back(call, vm, &image, start_paused);
    let (driver, image) = brought_back.inspect_err(|_| {
        // All steps are undone; what cannot be written now is done by the next start.
        let ended = call.part.db.change(|change| {
            change.drop_note(power::note_key(RESUMED, vm));
            change.set("VM", &vm.reference, "domid", -1)
        });
        if let Err(error) = ended {
            tracing::warn!(vm = vm.text("uuid"), %error, "a failed resume could not be written down");
        }
    })?;
    if !start_paused {
        // A guest of which it is not known whether it runs stays as the record has it: paused.
        driver.unpause(vm.uuid()?)?;
        step("vm-resume:running");
        runs(call, vm)?;
    }
    if let Some(image) = image {
        discard(call, &image);
    }
    Ok(())
}

fn runs(call: &Call, vm: &Object) -> Result<(), ApiError> {
    call.part.db.change(|change| {
        change.drop_note(power::note_key(RESUMED, vm));
        change.set("VM", &vm.reference, "power_state", Value::string("Running"))?;
        refresh(change, "VM", &vm.reference)
    })
}

/// Steps 1 and 2 of a resume; the driver, and the image that is to be removed.
#[allow(clippy::type_complexity)]
fn bring_back(
    call: &Call,
    vm: &Arc<Object>,
    image: &str,
    start_paused: bool,
) -> Result<(Arc<dyn VmDriver>, Option<String>), ApiError> {
    let driver = power::build(call, vm, "VM.resume", power::Origin::Memory(image))?;
    step("vm-resume:loaded");
    let recorded = call.part.db.change(|change| {
        if start_paused {
            change.drop_note(power::note_key(RESUMED, vm));
        }
        let image = leave_image(change, &vm.reference)?;
        power::record_live(change, call, vm, &*driver, "Paused")?;
        Ok(image)
    });
    let image = recorded.inspect_err(|_| {
        if let Err(error) = undo(call, vm, &driver) {
            tracing::warn!(vm = vm.text("uuid"), %error, "a VM that could not be recorded is not removed completely");
        }
    })?;
    step("vm-resume:recorded");
    balloon::follow(call, vm, &*driver);
    Ok((driver, image))
}

/// Whatever there is of a suspended VM beside its memory image goes.
fn undo(call: &Call, vm: &Object, driver: &Arc<dyn VmDriver>) -> Result<(), ApiError> {
    driver.shutdown(vm.uuid()?, ShutdownKind::Hard, Instant::now() + END)?;
    power::take_disks(call, vm, "undo resume");
    call.part.db.change(|change| {
        change.drop_note(power::note_key(RESUMED, vm));
        power::at_rest(change, vm, "Suspended")
    })
}

/// What a start of the daemon finds of a suspend or a resume that was interrupted; false where there is nothing that
/// concerns this.
///
/// # Errors
/// The driver's, the store's.
pub(super) fn recover(
    call: &Call,
    vm: &Arc<Object>,
    driver: &Arc<dyn VmDriver>,
    state: VmState,
) -> Result<bool, ApiError> {
    let uuid = vm.uuid()?;
    let is_noted = |what: &str| !call.part.db.notes(&power::note_key(what, vm)).is_empty();
    if vm.text("power_state") == "Suspended" {
        let vbds = call.part.db.find("VBD", "VM", &vm.reference);
        let has_disks = vbds.iter().any(|vbd| vbd.bool("currently_attached"));
        if state != VmState::Halted || has_disks || is_noted(RESUMED) {
            tracing::info!(vm = %uuid, "what was left of a suspended VM's process and disks is removed");
            undo(call, vm, driver)?;
        }
        return Ok(true);
    }
    if is_noted(STOPPED) {
        if vm.text("power_state") == "Running" && state == VmState::Paused {
            tracing::info!(vm = %uuid, "a guest that was stopped for its memory goes on");
            return go_on(call, &**driver, vm).map(|()| true);
        }
        call.part.db.change(|change| {
            drop_stopped(change, vm);
            Ok(())
        })?;
    }
    if is_noted(RESUMED) {
        if state != VmState::Halted {
            tracing::info!(vm = %uuid, "a guest whose resume was interrupted goes on");
            driver.unpause(uuid)?;
            return runs(call, vm).map(|()| true);
        }
        call.part.db.change(|change| {
            change.drop_note(power::note_key(RESUMED, vm));
            Ok(())
        })?;
    }
    Ok(false)
}
