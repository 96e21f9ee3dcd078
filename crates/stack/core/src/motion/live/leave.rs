//! The host that sends: it asks for each step, and decides.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tapio_model::ApiError;
use tapio_vm::VmState;

use super::super::{Call, Motions};
use super::check::{address_on, check, network_of};
use super::landing;
use super::mirrors::{self, Mirrors};
use super::there::There;
use super::{Crossing, Departure, OP, OUT, read, text};
use crate::basics::this_host;
use crate::db::Object;
use crate::plan::steps::step;
use crate::progress::{Share, Unwatched};
use crate::storage::outgoing::remove_noted;
use crate::vms::running::Running;
use crate::vms::{arrival, departure};

/// How long the other host may take to make the VM.
const MAKE: Duration = Duration::from_secs(300);
/// How long it may take to open the disks: the guest is stopped.
const OPEN: Duration = Duration::from_secs(150);
/// How long it may take for what is short.
const SHORT: Duration = Duration::from_secs(30);
/// How long a guest that stays is tried to be brought back, until its next start of the daemon.
const STAY: Duration = Duration::from_secs(900);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(500);

/// What goes along with a guest.
#[derive(Debug, Default)]
pub(in super::super) struct Along {
    /// VDIs, with the SRs of the other host that they go to.
    pub(in super::super) disks: BTreeMap<String, String>,
    /// Bytes of them that are copied a second, at most.
    pub(in super::super) rate: Option<u64>,
}

/// The part of the progress that belongs to disks that go along.
const DISKS: f64 = 0.7;

/// `VM.pool_migrate`, with disks that go along.
///
/// # Errors
/// Those of [`check`]; `MIRROR_FAILED`; the other host's; `TASK_CANCELLED`: the guest goes on here.
pub(in super::super) fn pool_migrate(
    call: &Call,
    vm: &str,
    host: &str,
    options: &BTreeMap<String, String>,
    along: &Along,
) -> Result<(), ApiError> {
    let db = &call.part.db;
    let (vm, host) = (db.get("VM", vm)?, db.get("host", host)?);
    let force = options.get("force").is_some_and(|word| word == "true");
    check(call, &vm, &host, force, network_of(options), (&BTreeMap::new(), &along.disks))?;
    if host.reference == this_host(db) {
        return Ok(());
    }
    let address = address_on(db, &host.reference, network_of(options))?;
    let vms = call.to(&call.part.vms);
    let mut disks = BTreeMap::new();
    for vbd in db.find("VBD", "VM", &vm.reference) {
        if let Some(to) = along.disks.get(vbd.text("VDI")) {
            disks.insert(vbd.uuid()?, Crossing { vdi: vbd.text("VDI").to_owned(), to: to.clone() });
        }
    }
    let note = Departure { vm: vm.reference.clone(), to: host.reference.clone(), disks };
    let (_running, vm) = Running::begin(&vms, "VM", &vm.reference, OP, |change, vm| {
        if arrival::place(vm) != ("Running", &*this_host(&call.part.db)) {
            return Err(crate::vms::allowed::bad_power_state(vm, "running"));
        }
        note.put(change)?;
        change.get("VM", &vm.reference)
    })?;
    step("vm-migrate:noted");
    let begun = Instant::now();
    let Err(error) = go(call, &vm, &note, address, along.rate) else {
        tracing::info!(vm = vm.text("uuid"), host = host.text("name_label"), took = ?begun.elapsed(), "a VM has moved");
        return Ok(());
    };
    tracing::warn!(vm = vm.text("uuid"), %error, "a VM that was to move stays");
    match stay(call, &note) {
        Ok(Ended::Here) => Err(error),
        Ok(Ended::There) => Ok(()),
        Ok(Ended::Elsewhere) => {
            let why = format!("{error}; meanwhile the pool took it from this host");
            Err(failed(&vm, &note, &why))
        }
        Err(other) => {
            let why = format!(
                "{error}; its guest is stopped, because it could not be brought back: {other}. It is tried again at the \
                 next start of this host's daemon; 'xe vm-shutdown force=true' ends it"
            );
            Err(failed(&vm, &note, &why))
        }
    }
}

fn failed(vm: &Object, note: &Departure, why: &str) -> ApiError {
    let params = [&vm.reference, vm.text("resident_on"), &note.to, why].map(str::to_owned);
    ApiError::new("VM_MIGRATE_FAILED", params)
}

/// All steps.
fn go(
    call: &Call,
    vm: &Arc<Object>,
    note: &Departure,
    address: Option<String>,
    rate: Option<u64>,
) -> Result<(), ApiError> {
    let there = There::new(&call.part.pool, &note.to, &note.vm).reached_at(address);
    let begun = if note.disks.is_empty() { None } else { Some(Mirrors::begin(call, note, &there, rate)?) };
    let call = match &begun {
        None => call.clone(),
        Some(mirrors) => {
            let share = |from, to| Share { of: Arc::clone(&call.progress), from, to };
            mirrors.wait(&there, &share(0.0, DISKS))?;
            step("vm-migrate:mirrored");
            call.with(Arc::new(share(DISKS, 1.0)))
        }
    };
    let (call, vms) = (&call, call.to(&call.part.vms));
    let looks = text(&departure::looks(&vms, vm)?)?;
    there.ask("prepare", &[("looks", &looks)], MAKE)?;
    step("vm-migrate:prepared");
    send(call, vm, &there)?;
    step("vm-migrate:sent");
    let stopped = Instant::now();
    if let Some(mirrors) = &begun {
        mirrors.seal()?;
        step("vm-migrate:sealed");
    }
    departure::give_up_disks(&vms, vm)?;
    step("vm-migrate:closed");
    there.ask("open", &[], OPEN)?;
    step("vm-migrate:opened");
    let becoming = begun.as_ref().map(Mirrors::becoming).unwrap_or_default();
    if !becoming.is_empty() {
        // The receiver has changed the records of its disks when it opened them.
        call.part.pool.catch_up();
    }
    departure::decide(&vms, vm, &note.to, &note.key(), &becoming)?;
    step("vm-migrate:decided");
    // It goes on by itself there, a little later, where this is not heard.
    if let Err(error) = there.ask("run", &[], SHORT) {
        tracing::warn!(vm = vm.text("uuid"), %error, "the other host was not told that it has a VM now");
    }
    tracing::info!(vm = vm.text("uuid"), switched = ?stopped.elapsed(), "a guest was switched over");
    match departure::leave(&vms, vm) {
        Ok(()) => {
            drop(begun);
            remove_old(call, note);
        }
        Err(error) => {
            let vm = vm.text("uuid");
            tracing::warn!(vm, %error, "what is left of a VM that has moved stays until the next start");
        }
    }
    Ok(())
}

/// Removes the images that a VM which has moved had here.
fn remove_old(call: &Call, note: &Departure) {
    let storage = call.to(&call.part.storage).with(Arc::new(Unwatched::default()));
    remove_noted(&storage, note.disks.values().map(|crossing| &crossing.vdi));
}

/// Sends the memory until the other host has read all of it: the guest is stopped then.
fn send(call: &Call, vm: &Object, there: &There<'_>) -> Result<(), ApiError> {
    let broken =
        |error: std::io::Error| ApiError::internal(format!("a socket for a guest's memory: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(broken)?;
    let vms = call.to(&call.part.vms);
    let has_failed = AtomicBool::new(false);
    let is_broken = || has_failed.load(Ordering::Relaxed) || call.progress.is_cancelled();
    std::thread::scope(|scope| {
        let putting = scope.spawn(|| there.put(theirs, &is_broken));
        let sent = departure::send(&vms, vm, OwnedFd::from(ours));
        has_failed.store(sent.is_err(), Ordering::Relaxed);
        let put = putting.join().unwrap_or_else(|_| Err(ApiError::internal("a defect while memory is sent")));
        match (sent, put) {
            // What the other host refuses is why the emulator cannot write; one that is cut off by us says nothing.
            (Err(_), Err(error)) if error.code != "TASK_CANCELLED" => Err(error),
            // The emulator saw that its socket was closed before its own wait saw why.
            (Err(_), Err(cancelled)) if call.progress.is_cancelled() => Err(cancelled),
            (Err(error), _) | (Ok(()), Err(error)) => Err(error),
            (Ok(()), Ok(())) => Ok(()),
        }
    })
}

/// Where a guest is that was to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Here,
    /// At the host that it was to move to.
    There,
    /// The pool took it for lost, and its record says something else.
    Elsewhere,
}

/// Ends a motion that failed: the guest is where the record says. What this run cannot know of the record, because an
/// answer of the database was lost, a change that is durable settles: no earlier one comes behind it.
fn stay(call: &Call, note: &Departure) -> Result<Ended, ApiError> {
    let until = Instant::now() + STAY;
    loop {
        let error = match settle(call, note) {
            Ok(ended) => return Ok(ended),
            Err(error) => error,
        };
        if Instant::now() >= until {
            return Err(error);
        }
        tracing::info!(vm = note.vm, %error, "a guest that stays cannot go on yet; it is tried again");
        std::thread::sleep(PAUSE);
    }
}

fn settle(call: &Call, note: &Departure) -> Result<Ended, ApiError> {
    let db = &call.part.db;
    db.change(|change| note.put(change))?;
    db.look_again("VM", &note.vm)?;
    // Before the receiver closes its side, which a guest that runs would wait for.
    mirrors::end(call, &note.disks)?;
    // What brings a guest back is not cancelled.
    let vms = call.to(&call.part.vms).with(Arc::new(Unwatched::default()));
    let drop_note = || {
        db.change(|change| {
            change.drop_note(note.key());
            Ok(())
        })
    };
    let Ok(vm) = db.get("VM", &note.vm) else { return drop_note().map(|()| Ended::Elsewhere) };
    let own = this_host(db);
    if arrival::place(&vm) == ("Running", own.as_str()) {
        if !note.disks.is_empty() {
            landing::say_given_up(db, &note.vm)?;
        }
        // Its lease on the disks ends in any case before they can be opened here.
        let there = There::new(&call.part.pool, &note.to, &note.vm);
        if let Err(error) = there.ask("abort", &[], SHORT) {
            tracing::info!(vm = note.vm, %error, "the host that a VM was to move to is not told that it stays");
        }
        departure::go_on(&vms, &vm, &note.key())?;
        return Ok(Ended::Here);
    }
    let ended = if vm.text("resident_on") == note.to { Ended::There } else { Ended::Elsewhere };
    departure::leave(&vms, &vm)?;
    if ended == Ended::There {
        remove_old(call, note);
    }
    drop_note().map(|()| ended)
}

/// Guests that an earlier daemon was sending.
pub(super) fn recover(motions: &Arc<Motions>) {
    for note in read::<Departure>(&motions.db, OUT) {
        let call = Call::own(motions);
        let vms = call.to(&call.part.vms);
        // From here on nothing else is done with it.
        let begun = Running::begin(&vms, "VM", &note.vm, OP, |_, _| Ok(()));
        let work = move || {
            let _begun = begun;
            if let Err(error) = come_back(&call, &note) {
                tracing::error!(vm = note.vm, %error, "a guest that was to move is stopped, and cannot go on");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("motion-stays".to_owned()).spawn(work) {
            tracing::error!(%error, "there is no thread for a guest that was to move");
        }
    }
}

fn come_back(call: &Call, note: &Departure) -> Result<(), ApiError> {
    let vms = call.to(&call.part.vms);
    let vm = call.part.db.get("VM", &note.vm);
    for vbd in call.part.db.find("VBD", "VM", &note.vm) {
        if let Ok(vdi) = call.part.db.get("VDI", vbd.text("VDI")) {
            call.part.storage.wait_until_recovered(vdi.text("SR"));
        }
    }
    let ended = stay(call, note)?;
    let Ok(vm) = vm else { return Ok(()) };
    tracing::info!(vm = vm.text("uuid"), ?ended, "a motion that was interrupted has ended");
    if ended == Ended::Here && arrival::state(&vms, &vm)? == VmState::Halted {
        departure::has_crashed(&vms, &vm)?;
    }
    Ok(())
}
