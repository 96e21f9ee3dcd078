//! The host that receives: it makes what it is asked for, and the record decides.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};
use tapio_vm::VmState;
use uuid::Uuid;

use super::super::{Call, Motions};
use super::{Arrival, IN, Now, OP, Phase, landing, read};
use crate::args::Args;
use crate::db::Object;
use crate::operations::Target;
use crate::plan::steps::step;
use crate::pool::HOST_LOGIN;
use crate::vms::{arrival, departure};

/// How often arrivals are looked at.
const LOOK: Duration = Duration::from_secs(2);

/// How long nothing may be heard of a sender, while no memory comes.
const SILENCE: Duration = Duration::from_secs(120);

fn now_of(motions: &Motions, vm: &str) -> Arc<Now> {
    Arc::clone(motions.arrivals.lock().entry(vm.to_owned()).or_default())
}

/// Only the host that has a VM sends it.
fn is_sender(call: &Call, host: &str) -> Result<(), ApiError> {
    let uuid = call.part.db.get("host", host).map(|host| host.text("uuid").to_owned());
    match uuid.is_ok_and(|uuid| call.caller.user == format!("{HOST_LOGIN}{uuid}")) {
        true => Ok(()),
        false => Err(crate::roles::denied("host.receive_guest")),
    }
}

fn unknown(vm: &str) -> ApiError {
    ApiError::new("HANDLE_INVALID", ["motion", vm])
}

/// `host.receive_guest`: one step.
///
/// # Errors
/// Those of the step; `RBAC_PERMISSION_DENIED`: the caller is not the host that has the VM.
pub(in super::super) fn receive(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (vm, what, args) = (args.text(0)?, args.text(1)?, args.map(2)?);
    call.part.pool.catch_up();
    let vm = call.part.db.get("VM", vm)?;
    let known = Arrival::of(&call.part.db, &vm.reference);
    is_sender(call, known.as_ref().map_or(vm.text("resident_on"), |known| &known.from))?;
    let now = now_of(&call.part, &vm.reference);
    *now.heard.lock() = Instant::now();
    let _working = now.steps.lock();
    // It may have been waited for.
    let known = Arrival::of(&call.part.db, &vm.reference);
    let none = BTreeMap::new;
    let done = match (what, known) {
        ("land", Some(known)) => give_up(call, &known).and_then(|()| land(call, &vm, &now, &args)),
        ("land", None) => land(call, &vm, &now, &args),
        ("wait", Some(_)) => Ok(none()),
        (what, known) => work(call, (what, &args), &vm, &now, known).map(|()| none()),
    };
    *now.heard.lock() = Instant::now();
    done.map(Value::string_map)
}

/// A step that has nothing to answer.
fn work(
    call: &Call,
    (what, args): (&str, &BTreeMap<String, String>),
    vm: &Arc<Object>,
    now: &Now,
    known: Option<Arrival>,
) -> Result<(), ApiError> {
    match (what, known) {
        ("prepare", Some(known)) if known.phase == Phase::Landing => {
            prepare(call, vm, now, args, known.disks)
        }
        ("prepare", Some(known)) => {
            give_up(call, &known).and_then(|()| prepare(call, vm, now, args, BTreeMap::new()))
        }
        ("prepare", None) => prepare(call, vm, now, args, BTreeMap::new()),
        ("open", Some(known)) => open(call, vm, now, known),
        ("run", Some(known)) => run(call, vm, &known),
        ("abort", Some(known)) => give_up(call, &known),
        // It is over.
        ("abort", None) => Ok(()),
        ("run", None) if arrival::is_own(&call.to(&call.part.vms), vm) => Ok(()),
        ("open" | "run" | "wait", None) => Err(unknown(&vm.reference)),
        (other, _) => Err(ApiError::new("INVALID_VALUE", ["step", other])),
    }
}

fn land(
    call: &Call,
    vm: &Arc<Object>,
    now: &Now,
    args: &BTreeMap<String, String>,
) -> Result<landing::Answer, ApiError> {
    landing::remove(&call.part, now, &vm.reference)?;
    landing::land(call, vm, now, args).inspect_err(|_| {
        if let Some(note) = Arrival::of(&call.part.db, &vm.reference) {
            given_up(call, &note);
        }
    })
}

fn prepare(
    call: &Call,
    vm: &Arc<Object>,
    now: &Now,
    args: &BTreeMap<String, String>,
    disks: BTreeMap<Uuid, String>,
) -> Result<(), ApiError> {
    let text = args.get("looks").map(String::as_str).unwrap_or_default();
    let looks: arrival::Looks = serde_json::from_str(text)
        .map_err(|why| ApiError::new("INVALID_VALUE", ["looks".to_owned(), why.to_string()]))?;
    let from = vm.text("resident_on").to_owned();
    let note = Arrival { vm: vm.reference.clone(), from, phase: Phase::Making, disks };
    let vms = call.to(&call.part.vms);
    arrival::driver_of(&vms, vm)?.check()?;
    // What an earlier arrival could not end.
    arrival::remove(&vms, vm)?;
    now.is_read.store(false, Ordering::Relaxed);
    call.part.db.change(|change| note.put(change))?;
    arrival::make(&vms, vm, &looks, &note.disks).inspect_err(|_| given_up(call, &note))
}

/// Reads the memory of a guest that comes.
///
/// # Errors
/// The driver's: the VM is gone then.
pub(crate) fn read_memory(call: &Call, vm: &str, data: OwnedFd) -> Result<(), ApiError> {
    let vm = call.part.db.get("VM", vm)?;
    let note = Arrival::of(&call.part.db, &vm.reference).ok_or_else(|| unknown(&vm.reference))?;
    is_sender(call, &note.from)?;
    let now = now_of(&call.part, &vm.reference);
    if note.phase != Phase::Making || now.is_reading.swap(true, Ordering::Relaxed) {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the memory of this guest has come, or comes"]));
    }
    let vms = call.to(&call.part.vms);
    let done = arrival::read(&vms, &vm, data);
    *now.heard.lock() = Instant::now();
    now.is_read.store(done.is_ok(), Ordering::Relaxed);
    now.is_reading.store(false, Ordering::Relaxed);
    if done.is_ok() {
        step("vm-arrive:read");
    } else {
        let _working = now.steps.lock();
        if Arrival::of(&call.part.db, &vm.reference).is_some() {
            given_up(call, &note);
        }
    }
    done
}

fn open(call: &Call, vm: &Object, now: &Now, note: Arrival) -> Result<(), ApiError> {
    if note.phase != Phase::Making || !now.is_read.load(Ordering::Relaxed) {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the memory of this guest has not come"]));
    }
    let vms = call.to(&call.part.vms);
    let closed = landing::close(call, &note).inspect(|()| {
        if !note.disks.is_empty() {
            step("vm-arrive:closed");
        }
    });
    let opened = closed.and_then(|()| arrival::open(&vms, vm, &note.disks)).and_then(|()| {
        let note = Arrival { phase: Phase::Opened, ..note.clone() };
        call.part.db.change(|change| note.put(change))?;
        step("vm-arrive:opened");
        // The sender does not decide before it has the answer. A guest cannot go on without what ended by now.
        arrival::is_whole(&vms, vm)
    });
    if opened.is_err() {
        given_up(call, &note);
    }
    opened
}

/// The record names this host: the guest goes on.
fn run(call: &Call, vm: &Arc<Object>, note: &Arrival) -> Result<(), ApiError> {
    let vms = call.to(&call.part.vms);
    if note.phase != Phase::Opened || !arrival::is_own(&vms, vm) {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the record does not say that the VM is here"]));
    }
    let notes: Vec<String> = std::iter::once(note.key()).chain(landing::settled(note)).collect();
    arrival::run(&vms, vm, &notes, note.disks.values())?;
    now_of(&call.part, &vm.reference).held.lock().clear();
    tracing::info!(vm = vm.text("uuid"), "a guest has come from another host");
    Ok(())
}

/// Ends what came, unless the record says that it is here.
fn give_up(call: &Call, note: &Arrival) -> Result<(), ApiError> {
    let (db, vms) = (&call.part.db, call.to(&call.part.vms));
    db.look_again("VM", &note.vm)?;
    let Ok(vm) = db.get("VM", &note.vm) else {
        if let Ok(uuid) = Uuid::parse_str(note.vm.trim_start_matches("OpaqueRef:")) {
            arrival::remove_unknown(&vms, uuid)?;
        }
        landing::remove(&call.part, &now_of(&call.part, &note.vm), &note.vm)?;
        return forget(call, note);
    };
    if arrival::is_own(&vms, &vm) {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the record says that the VM is here"]));
    }
    arrival::remove(&vms, &vm)?;
    landing::remove(&call.part, &now_of(&call.part, &note.vm), &note.vm)?;
    forget(call, note)
}

fn forget(call: &Call, note: &Arrival) -> Result<(), ApiError> {
    now_of(&call.part, &note.vm).held.lock().clear();
    call.part.db.change(|change| {
        change.drop_note(note.key());
        landing::settled(note).iter().for_each(|made| change.drop_note(made));
        Ok(())
    })
}

fn given_up(call: &Call, note: &Arrival) {
    if let Err(error) = give_up(call, note) {
        tracing::warn!(vm = note.vm, %error, "what came of a guest is not all gone yet");
    }
}

/// What an arrival without a word of its sender comes to.
fn look(call: &Call, note: &Arrival) -> Result<(), ApiError> {
    let (db, vms) = (&call.part.db, call.to(&call.part.vms));
    let now = now_of(&call.part, &note.vm);
    let Some(_working) = now.steps.try_lock() else { return Ok(()) };
    // A guest that crashed here may be about to be started again: what there is of it is no arrival's then.
    let target = Target { class: "VM", reference: &note.vm, op: OP };
    let Ok(_held) = call.part.operations.enter(&*call.progress, &[target], || Ok(())) else { return Ok(()) };
    // It may have ended since.
    let Some(note) = Arrival::of(db, &note.vm) else { return Ok(()) };
    let Ok(vm) = db.get("VM", &note.vm) else { return give_up(call, &note) };
    if arrival::is_own(&vms, &vm) {
        if arrival::state(&vms, &vm)? == VmState::Halted {
            forget(call, &note)?;
            return departure::has_crashed(&vms, &vm);
        }
        return run(call, &vm, &note);
    }
    let is_senders = arrival::place(&vm) == ("Running", note.from.as_str());
    let is_silent = now.heard.lock().elapsed() > SILENCE && !now.is_reading.load(Ordering::Relaxed);
    match note.phase {
        Phase::Landing | Phase::Making if is_senders && !is_silent => Ok(()),
        Phase::Opened if is_senders && !landing::is_given_up(db, &note) => Ok(()),
        _ => {
            tracing::info!(vm = vm.text("uuid"), phase = ?note.phase, "a guest that did not come to its end is given up");
            give_up(call, &note)
        }
    }
}

/// Goes on with arrivals of an earlier daemon, and looks after all that come.
///
/// # Errors
/// There is no thread.
pub(super) fn recover(motions: &Arc<Motions>) -> Result<(), ApiError> {
    if !motions.pool.is_member() {
        return Ok(());
    }
    for note in read::<Arrival>(&motions.db, IN) {
        let call = Call::own(motions);
        let done = match note.phase {
            // Its memory was on its way through the daemon that ended.
            Phase::Landing | Phase::Making => give_up(&call, &note),
            Phase::Opened => look(&call, &note),
        };
        if let Err(error) = done {
            tracing::warn!(vm = note.vm, %error, "an arrival that was interrupted is looked at again");
        }
    }
    let motions = Arc::downgrade(motions);
    let looking = move || loop {
        std::thread::sleep(LOOK);
        let Some(motions) = motions.upgrade() else { return };
        for note in read::<Arrival>(&motions.db, IN) {
            if let Err(error) = look(&Call::own(&motions), &note) {
                tracing::warn!(vm = note.vm, %error, "an arrival is looked at again");
            }
        }
    };
    let thread = std::thread::Builder::new().name("arrivals".to_owned()).spawn(looking);
    thread.map(drop).map_err(|error| ApiError::internal(format!("no thread for arrivals: {error}")))
}
