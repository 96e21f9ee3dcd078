//! A daemon that starts finds machines and disks of one before it: what runs goes on, what was half done is undone or
//! finished.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};
use tapio_vm::{ShutdownKind, VmState};

use super::operation::refresh;
use super::plug::record;
use super::{copy, fields, lookup, power, templates, vif};
use crate::Toolstack;
use crate::call::Call;
use crate::db::Object;
use crate::disks::{Note, Phase};

/// How long each thing that is tidied may take.
const TIDY: Duration = Duration::from_secs(20);
/// How long a disk process that died may take to be back.
const RESTART: Duration = Duration::from_secs(30);
/// How often its start is tried, in that time, before the guest loses the disk: what ended the first process, a full
/// memory for example, may end the second one while it starts.
const RESTARTS_MAX: u32 = 4;
/// Between the first two tries; doubled for each further one.
const RESTART_PAUSE: Duration = Duration::from_millis(250);
/// VMs and disks that are put in order at a time.
const PARALLEL: usize = 16;

/// Puts machines and disks in order. `Disks::adopt` and the storage's recovery have run before.
///
/// # Errors
/// The store cannot be written.
pub fn recover(stack: &Arc<Toolstack>) -> Result<(), ApiError> {
    let call = lookup::own_call(stack);
    templates::ensure(stack)?;
    machines(&call);
    disks(&call);
    holders(&call);
    copy::recover(stack);
    provisions(&call)?;
    stack.db.change(|change| {
        vif::recover_in(change)?;
        fields::recover_in(change)?;
        for vm in change.all("VM") {
            refresh(change, "VM", &vm.reference)?;
        }
        Ok(())
    })?;
    Ok(())
}

fn machines(call: &Call) {
    let special = |vm: &Arc<Object>| {
        vm.bool("is_control_domain") || vm.bool("is_a_template") || vm.bool("is_a_snapshot")
    };
    let all: Vec<_> = call.stack.db.all("VM").into_iter().filter(|vm| !special(vm)).collect();
    beside(&all, |vm| {
        if let Err(error) = machine(call, vm) {
            tracing::warn!(vm = vm.text("uuid"), %error, "a machine could not be put in order");
        }
    });
}

/// Does something with each of these on a few threads: one whose disks hang takes its time alone.
fn beside<T: Sync>(all: &[T], work: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..PARALLEL.min(all.len()) {
            scope.spawn(|| {
                while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(one);
                }
            });
        }
    });
}

fn machine(call: &Call, vm: &Arc<Object>) -> Result<(), ApiError> {
    let db = &call.stack.db;
    let uuid = vm.uuid()?;
    let is_noted = |what: &str| !db.notes(&format!("machines/{what}/{uuid}")).is_empty();
    let told = vm.text("power_state");
    let (was_starting, was_ending) = (is_noted("start"), is_noted("shutdown"));
    let Ok(driver) = lookup::driver(&call.stack, vm) else {
        // Nobody can say what it does: then it does nothing.
        return if told == "Halted" { Ok(()) } else { power::halted(call, vm) };
    };
    let state = driver.state(uuid)?;
    if was_starting || (told == "Halted" && state != VmState::Halted) {
        tracing::info!(vm = %uuid, "a start that was interrupted is undone");
        return power::clear(call, vm, &driver, "undo start");
    }
    match (told, state) {
        ("Halted", _) => Ok(()),
        (_, VmState::Halted) => {
            if !was_ending {
                let why = "The machine was not running when the toolstack was started.";
                lookup::tell(&call.stack, "VM_CRASHED", vm, why);
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
            })
        }
    }
}

/// Each disk that is known, and each that a record speaks of.
fn disks(call: &Call) {
    let stack = &call.stack;
    let notes = stack.disks.all();
    let known: BTreeSet<String> = notes.iter().map(|note| note.spec.vbd.to_string()).collect();
    beside(&notes, |note| disk(call, note));
    for vbd in stack.db.all("VBD") {
        let is_left =
            vbd.bool("currently_attached") && !vbd.bool("empty") && !known.contains(vbd.text("uuid"));
        if is_left && let Err(error) = record(call, &vbd.reference, None, None) {
            tracing::warn!(vbd = vbd.text("uuid"), %error, "a VBD says that it is plugged");
        }
    }
}

fn disk(call: &Call, note: &Note) {
    let stack = &call.stack;
    let vbd = stack.db.by_uuid("VBD", &note.spec.vbd.to_string()).ok();
    let is_plugged = vbd.as_ref().is_some_and(|vbd| vbd.bool("currently_attached"));
    let runs = note.phase == Phase::Running && is_plugged;
    if runs && stack.disks.serves(note.spec.vbd) {
        return;
    }
    let sr = crate::db::reference_of(note.sr);
    if runs && stack.storage.is_recovering(&sr) {
        // Its images cannot be opened yet. The guest waits; nobody else does.
        return later(stack, note, sr);
    }
    if runs && restart(stack, note).is_ok() {
        tracing::info!(vbd = %note.spec.vbd, "its disk process had died and was started again");
        return;
    }
    tracing::info!(vbd = %note.spec.vbd, phase = ?note.phase, "a disk is taken away");
    if let Err(error) = remove(call, note, vbd.as_deref()) {
        tracing::warn!(vbd = %note.spec.vbd, %error, "a disk is not all gone");
        stack.disks.is_left(note.spec.vbd);
    }
}

/// Looks at a disk again when its SR is attached.
fn later(stack: &Arc<Toolstack>, note: &Note, sr: String) {
    let (vbd, stack) = (note.spec.vbd, Arc::clone(stack));
    let waiting = move || {
        stack.storage.wait_until_recovered(&sr);
        // It may have been unplugged meanwhile.
        if let Some(note) = stack.disks.of_vbd(vbd) {
            disk(&lookup::own_call(&stack), &note);
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
pub fn restart(stack: &Toolstack, note: &Note) -> Result<(), ApiError> {
    let until = Instant::now() + RESTART;
    let mut pause = RESTART_PAUSE;
    for attempt in 1.. {
        let Err(error) = restart_once(stack, note, until) else { break };
        let is_wanted = stack.disks.of_vbd(note.spec.vbd).is_some_and(|note| note.phase == Phase::Running);
        if !is_wanted || attempt == RESTARTS_MAX || Instant::now() + pause >= until {
            return Err(error);
        }
        tracing::warn!(vbd = %note.spec.vbd, attempt, %error, "its disk process died and did not start; tried again");
        thread::sleep(pause);
        pause *= 2;
    }
    Ok(())
}

fn restart_once(stack: &Toolstack, note: &Note, until: Instant) -> Result<(), ApiError> {
    let again = stack.disks.restart(note.spec.vbd, until)?;
    match (again, stack.machines.driver(&note.driver)) {
        (Some(disk), Some(driver)) => driver.plug(note.vm, &disk),
        _ => Ok(()),
    }
}

/// Takes a disk away from whoever has it.
///
/// # Errors
/// The process does not end, the store fails.
pub fn remove(call: &Call, note: &Note, vbd: Option<&Object>) -> Result<(), ApiError> {
    let (stack, uuid) = (&call.stack, note.spec.vbd);
    if let Some(driver) = stack.machines.driver(&note.driver) {
        driver.unplug(note.vm, &note.spec, true, Instant::now() + TIDY)?;
    }
    stack.disks.withdraw(uuid, true, Instant::now() + TIDY).unwrap_or_else(|error| {
        tracing::warn!(vbd = %uuid, %error, "a front end is ended with its process");
    });
    stack.disks.end(uuid, true, Instant::now() + TIDY)?;
    let holder = crate::db::reference_of(uuid);
    // A VDI that is gone has nobody who holds it.
    if stack.db.get("VDI", &note.vdi).is_ok()
        && let Err(error) = stack.storage.deactivate(call, &note.vdi, &holder)
    {
        tracing::warn!(vbd = %uuid, %error, "its VDI stays active");
    }
    if let Some(vbd) = vbd {
        record(call, &vbd.reference, None, None)?;
    }
    stack.disks.forget(uuid);
    Ok(())
}

/// VDIs that somebody holds of whom no process is known.
fn holders(call: &Call) {
    let stack = &call.stack;
    for (vdi, holder, _) in stack.storage.holders() {
        // Those that are no VBD's are somebody else's to give up.
        let uuid = holder.strip_prefix("OpaqueRef:").and_then(|uuid| uuid::Uuid::parse_str(uuid).ok());
        let is_left = uuid.is_some_and(|uuid| stack.disks.of_vbd(uuid).is_none());
        if is_left && let Err(error) = stack.storage.deactivate(call, &vdi, &holder) {
            tracing::warn!(vdi, holder, %error, "a VDI stays active");
        }
    }
}

/// Templates whose disks were being made: they are templates still, and can be provisioned again.
fn provisions(call: &Call) -> Result<(), ApiError> {
    for (key, _) in call.stack.db.notes("machines/provision/") {
        let vm = key.trim_start_matches("machines/provision/").to_owned();
        for vbd in call.stack.db.find("VBD", "VM", &vm) {
            let vdi = vbd.text("VDI").to_owned();
            call.stack.db.change(|change| super::vbd::remove_in(change, &vbd))?;
            if vbd.text("type") == "Disk"
                && let Err(error) = lookup::send(call, "VDI.destroy", vec![Value::string(&vdi)])
            {
                tracing::warn!(vdi, %error, "a disk that was being made stays");
            }
        }
        call.stack.db.change(|change| {
            change.drop_note(&key);
            Ok(())
        })?;
    }
    Ok(())
}
