//! A daemon that starts finds VMs and disks of one before it: what runs goes on, what was half done is undone or
//! finished.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};
use tapio_vm::{ShutdownKind, VmState};

use super::allowed::refresh;
use super::parallel::for_each;
use super::plug::record;
use super::{
    Call, Vms, balloon, copy, drive, fields, lookup, nic, power, processors, quiesce, renew, suspend,
    templates, vif, vm,
};
use crate::basics::may_be_here;
use crate::db::Object;
use crate::disks::{Note, Phase};
use crate::storage;

/// How long each thing that is tidied may take.
const TIDY: Duration = Duration::from_secs(20);
/// How long a disk process that died may take to be back.
const RESTART: Duration = Duration::from_secs(30);
/// How often its start is tried, in that time, before the guest loses the disk: what ended the first process, a full
/// memory for example, may end the second one while it starts.
const RESTARTS_MAX: u32 = 4;
/// Between the first two tries; doubled for each further one.
const RESTART_PAUSE: Duration = Duration::from_millis(250);

/// Recovers VMs and disks. `Disks::adopt` and the storage's recovery have run before.
///
/// # Errors
/// The store cannot be written.
pub fn recover(vms: &Arc<Vms>) -> Result<(), ApiError> {
    let call = Call::own(vms);
    templates::ensure(vms)?;
    recover_vms(&call);
    quiesce::recover(vms);
    disks(&call);
    drive::recover(vms)?;
    holders(&call);
    copy::recover(vms);
    vm::keep_only_known(vms);
    provisions(&call)?;
    vms.db.change(|change| {
        vif::recover_in(change)?;
        fields::recover_in(change)?;
        for vm in change.all("VM") {
            refresh(change, "VM", &vm.reference)?;
        }
        Ok(())
    })?;
    interfaces(&call);
    renew::recover(vms);
    Ok(())
}

/// The VIFs of each VM that this host may run.
fn interfaces(call: &Call) {
    let db = &call.part.db;
    let all = db.all("VM").into_iter().filter(|vm| may_be_here(db, vm) && !is_on_its_way(call, vm));
    // An emulator that does not answer keeps no other VM waiting.
    for_each(&all.collect::<Vec<_>>(), |vm| {
        if let Err(error) = nic::recover(call, vm) {
            tracing::warn!(vm = vm.text("uuid"), %error, "the network interfaces of a VM are not known");
        }
    });
}

fn recover_vms(call: &Call) {
    let special = |vm: &Arc<Object>| {
        vm.bool("is_control_domain") || vm.bool("is_a_template") || vm.bool("is_a_snapshot")
    };
    let all = call.part.db.all("VM").into_iter().filter(|vm| !special(vm) && !is_on_its_way(call, vm));
    let (all, elsewhere): (Vec<_>, Vec<_>) = all.partition(|vm| may_be_here(&call.part.db, vm));
    for vm in elsewhere {
        if let Err(error) = end_stranger(call, &vm) {
            tracing::error!(vm = vm.text("uuid"), %error, "a VM that another host runs still runs here");
        }
    }
    for_each(&all, |vm| {
        if let Err(error) = recover_vm(call, vm) {
            tracing::warn!(vm = vm.text("uuid"), %error, "a VM could not be recovered");
        }
    });
}

/// Whether a VM was on its way to another host of the pool, or from one: its motion is recovered later, as a whole.
fn is_on_its_way(call: &Call, vm: &Object) -> bool {
    vm.uuid().is_ok_and(|uuid| crate::motion::is_on_its_way(&call.part.db, uuid))
}

/// A VM that another host has started, because this one counted as dead, does not run here.
fn end_stranger(call: &Call, vm: &Object) -> Result<(), ApiError> {
    let (uuid, Ok(driver)) = (vm.uuid()?, lookup::driver(&call.part, vm)) else { return Ok(()) };
    if driver.state(uuid)? == VmState::Halted {
        return Ok(());
    }
    tracing::warn!(vm = %uuid, "another host runs this VM: what is left of it here is ended");
    driver.shutdown(uuid, ShutdownKind::Hard, Instant::now() + TIDY)?;
    tapio_sm::lease::forget_guest(&call.part.config.run_dir, uuid);
    Ok(())
}

fn recover_vm(call: &Call, vm: &Arc<Object>) -> Result<(), ApiError> {
    let db = &call.part.db;
    let uuid = vm.uuid()?;
    let is_noted = |what: &str| !db.notes(&format!("machines/{what}/{uuid}")).is_empty();
    let told = vm.text("power_state");
    let (was_starting, was_ending) = (is_noted("start"), is_noted("shutdown"));
    let Ok(driver) = lookup::driver(&call.part, vm) else {
        // Without its driver nothing is known of it: it counts as halted.
        return if matches!(told, "Halted" | "Suspended") { Ok(()) } else { power::halted(call, vm) };
    };
    let state = driver.state(uuid)?;
    if suspend::recover(call, vm, &driver, state)? {
        return Ok(());
    }
    if was_starting || (told == "Halted" && state != VmState::Halted) {
        tracing::info!(vm = %uuid, "a start that was interrupted is undone");
        return power::clear(call, vm, &driver, "undo start");
    }
    match (told, state) {
        ("Halted", _) => Ok(()),
        (_, VmState::Halted) => {
            if !was_ending {
                let why = "The VM was not running when the toolstack was started.";
                lookup::tell(&call.part, "VM_CRASHED", vm, why);
            }
            driver.shutdown(uuid, ShutdownKind::Hard, Instant::now() + TIDY)?;
            power::take_disks(call, vm, "finish shutdown");
            power::halted(call, vm)
        }
        (_, now) => {
            let word = if now == VmState::Paused { "Paused" } else { "Running" };
            db.change(|change| {
                change.drop_note(format!("machines/shutdown/{uuid}"));
                change.set("VM", &vm.reference, "power_state", Value::string(word))
            })?;
            processors::follow(call, vm, &driver)?;
            balloon::recover(call, vm, &driver)
        }
    }
}

/// Each disk that is known, and each that a record speaks of.
fn disks(call: &Call) {
    let vms = &call.part;
    let mut notes = vms.disks.all();
    // Exports are recovered by their own part.
    notes.retain(|note| note.export.is_none() && !crate::motion::is_on_its_way(&vms.db, note.vm));
    let known: BTreeSet<String> = notes.iter().map(|note| note.spec.vbd.to_string()).collect();
    for_each(&notes, |note| disk(call, note));
    let is_here = |vbd: &Object| is_here(vms, vbd);
    for vbd in vms.db.all("VBD").into_iter().filter(|vbd| is_here(vbd)) {
        let is_left =
            vbd.bool("currently_attached") && !vbd.bool("empty") && !known.contains(vbd.text("uuid"));
        if is_left && let Err(error) = record(call, &vbd.reference, None, None) {
            tracing::warn!(vbd = vbd.text("uuid"), %error, "a VBD says that it is plugged");
        }
    }
}

/// Whether a VBD is that of a VM which this host may run.
fn is_here(vms: &Vms, vbd: &Object) -> bool {
    let is_settled = |vm: &Object| {
        !vm.uuid().is_ok_and(|uuid| crate::motion::is_on_its_way(&vms.db, uuid)) && may_be_here(&vms.db, vm)
    };
    vms.db.get("VM", vbd.text("VM")).is_ok_and(|vm| is_settled(&vm))
}

fn disk(call: &Call, note: &Note) {
    let vms = &call.part;
    let vbd = vms.db.by_uuid("VBD", &note.spec.vbd.to_string()).ok();
    // What the record says of one that another host has plugged is not about the process here.
    let vbd = vbd.filter(|vbd| is_here(vms, vbd));
    let is_plugged = vbd.as_ref().is_some_and(|vbd| vbd.bool("currently_attached"));
    let runs = note.phase == Phase::Running && is_plugged;
    if runs && note.paused.is_some() {
        // One whose process has died gets another when it goes on.
        vms.disks.stay_paused(note.spec.vbd, Instant::now() + TIDY);
        if let Some(vbd) = &vbd
            && let Err(error) = super::pause::shown(vms, &vbd.reference, note.paused.as_deref())
        {
            tracing::warn!(vbd = %note.spec.vbd, %error, "its record does not say that it is paused");
        }
        return;
    }
    if runs && vms.disks.serves(note.spec.vbd) {
        return;
    }
    if runs && waits_for_sr(vms, note) {
        return;
    }
    if runs && restart(vms, note).is_ok() {
        tracing::info!(vbd = %note.spec.vbd, "its disk process had died and was started again");
        return;
    }
    tracing::info!(vbd = %note.spec.vbd, phase = ?note.phase, "a disk is taken away");
    if let Err(error) = remove(call, note, vbd.as_deref()) {
        tracing::warn!(vbd = %note.spec.vbd, %error, "a disk is not all gone");
        vms.disks.is_left(note.spec.vbd);
    }
}

/// Whether the SR of a disk without a process is not in order yet: its images cannot be opened, and it is looked at
/// again when they can. The guest waits; nothing else does.
pub fn waits_for_sr(vms: &Arc<Vms>, note: &Note) -> bool {
    let sr = crate::db::reference_of(note.sr);
    let waits = vms.storage.is_recovering(&sr);
    if waits {
        later(vms, note, sr);
    }
    waits
}

fn later(vms: &Arc<Vms>, note: &Note, sr: String) {
    let (vbd, vms) = (note.spec.vbd, Arc::clone(vms));
    let waiting = move || {
        vms.storage.wait_until_recovered(&sr);
        // It may have been unplugged meanwhile.
        if let Some(note) = vms.disks.of_vbd(vbd) {
            disk(&Call::own(&vms), &note);
        }
    };
    if let Err(error) = thread::Builder::new().name("disk-later".to_owned()).spawn(waiting) {
        tracing::error!(%vbd, %error, "a disk without a process waits for the next start");
    }
}

/// Starts another process in place of one that died, several times if it has to be, and gives the guest's driver its
/// name where it needs that.
///
/// # Errors
/// As [`crate::disks::Disks::restart`]; the driver's. Those of the last try.
pub fn restart(vms: &Vms, note: &Note) -> Result<(), ApiError> {
    let until = Instant::now() + RESTART;
    let mut pause = RESTART_PAUSE;
    for attempt in 1.. {
        let Err(error) = restart_once(vms, note, until) else { break };
        let is_wanted = vms.disks.of_vbd(note.spec.vbd).is_some_and(|note| note.phase == Phase::Running);
        if !is_wanted || attempt == RESTARTS_MAX || Instant::now() + pause >= until {
            return Err(error);
        }
        tracing::warn!(vbd = %note.spec.vbd, attempt, %error, "its disk process died and did not start; tried again");
        thread::sleep(pause);
        pause *= 2;
    }
    Ok(())
}

fn restart_once(vms: &Vms, note: &Note, until: Instant) -> Result<(), ApiError> {
    let again = vms.disks.restart(note.spec.vbd, until)?;
    match (again, vms.driver(&note.driver)) {
        (Some(disk), Some(driver)) => driver.plug(note.vm, &disk),
        _ => Ok(()),
    }
}

/// Unplugs a disk from its guest, and ends its process.
///
/// # Errors
/// The process does not end, the store fails.
pub fn remove(call: &Call, note: &Note, vbd: Option<&Object>) -> Result<(), ApiError> {
    let (vms, uuid) = (&call.part, note.spec.vbd);
    if let Some(driver) = vms.driver(&note.driver) {
        driver.unplug(note.vm, &note.spec, true, Instant::now() + TIDY)?;
    }
    vms.disks.withdraw(uuid, true, Instant::now() + TIDY).unwrap_or_else(|error| {
        tracing::warn!(vbd = %uuid, %error, "a front end is ended with its process");
    });
    vms.disks.end(uuid, true, Instant::now() + TIDY)?;
    let holder = crate::db::reference_of(uuid);
    // A VDI that is gone has no holder.
    if vms.db.get("VDI", &note.vdi).is_ok()
        && let Err(error) = storage::deactivate(&lookup::to_storage(call), &note.vdi, &holder)
    {
        tracing::warn!(vbd = %uuid, %error, "its VDI stays active");
    }
    if let Some(vbd) = vbd {
        record(call, &vbd.reference, None, None)?;
    }
    vms.disks.forget(uuid);
    Ok(())
}

/// VDIs with a holder that has no process.
fn holders(call: &Call) {
    let vms = &call.part;
    for (vdi, holder, _) in vms.storage.holders() {
        // A holder that is no VBD gives them up itself.
        let uuid = holder.strip_prefix("OpaqueRef:").and_then(|uuid| uuid::Uuid::parse_str(uuid).ok());
        let is_left = uuid.is_some_and(|uuid| vms.disks.of_vbd(uuid).is_none());
        if is_left && let Err(error) = storage::deactivate(&lookup::to_storage(call), &vdi, &holder) {
            tracing::warn!(vdi, holder, %error, "a VDI stays active");
        }
    }
}

/// Templates whose disks were being made: they are templates still, and can be provisioned again.
fn provisions(call: &Call) -> Result<(), ApiError> {
    for (key, _) in call.part.db.notes("machines/provision/") {
        let vm = key.trim_start_matches("machines/provision/").to_owned();
        for vbd in call.part.db.find("VBD", "VM", &vm) {
            let vdi = vbd.text("VDI").to_owned();
            call.part.db.change(|change| super::vbd::remove_in(change, &vbd))?;
            if vbd.text("type") == "Disk"
                && let Err(error) = storage::vdi::destroy(&lookup::to_storage(call), &vdi)
            {
                tracing::warn!(vdi, %error, "a disk that was being made stays");
            }
        }
        call.part.db.change(|change| {
            change.drop_note(&key);
            Ok(())
        })?;
    }
    Ok(())
}
