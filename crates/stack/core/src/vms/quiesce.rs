//! Snapshots of a guest that holds still: its agent freezes the file systems before the disks are snapshotted, so that
//! each is whole without a journal.
//!
//! A guest that stays frozen is worse than a snapshot that fails, so it is thawed on every way out, and by a thread
//! of its own when the time is over. A note says that a guest may be frozen: the next daemon thaws it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tapio_model::{ApiError, Value};
use tapio_vm::{VmDriver, VmState};
use uuid::Uuid;

use super::allowed::{bad_power_state, refuse_special};
use super::parallel::for_each;
use super::power::note_key;
use super::running::Running;
use super::{Call, Handlers, Vms, copy, lookup};
use crate::args::Args;
use crate::db::{Object, reference_of};
use crate::plan::steps::step;

/// The kind of the notes.
const NOTE: &str = "quiesce";

/// How long file systems may be frozen, in seconds, where `other_config:quiesce-timeout` says nothing.
const FROZEN_SECONDS: u64 = 20;
/// The longest that a caller may choose: programs of the guest wait meanwhile.
const FROZEN_SECONDS_MAX: u64 = 300;

/// How long one try to thaw may take.
const THAW: Duration = Duration::from_secs(5);
/// Between two tries: first, and at most.
const PAUSE: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Tries until the operation ends and a thread goes on with them.
const TRIES: u32 = 3;

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.snapshot_with_quiesce", snapshot);
}

fn snapshot(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (_running, vm) = Running::begin(call, "VM", args.text(0)?, "snapshot_with_quiesce", |change, vm| {
        refuse_special(vm)?;
        if vm.text("power_state") != "Running" {
            return Err(bad_power_state(vm, "Running"));
        }
        change.get("VM", &vm.reference)
    })?;
    assert_can_freeze(call, &vm)?;
    call.part.db.change(|change| {
        change.put_note(note_key(NOTE, &vm), &vm.reference);
        Ok(())
    })?;
    step("vm-quiesce:noted");
    let frozen = Frozen::begin(call, &vm)?;
    step("vm-quiesce:frozen");
    let made = copy::make_quiet(call, &vm, args.text(1)?, || {
        step("vm-quiesce:disks-made");
        let ended = frozen.end();
        step("vm-quiesce:thawed");
        ended
    })?;
    Ok(made)
}

fn refused(what: &str, vm: &Object, why: impl std::fmt::Display) -> ApiError {
    ApiError::new(format!("VM_SNAPSHOT_WITH_QUIESCE_{what}"), [vm.reference.clone(), why.to_string()])
}

/// Whether an agent answers that can freeze: a note is only of a guest that has one.
fn assert_can_freeze(call: &Call, vm: &Object) -> Result<(), ApiError> {
    let driver = lookup::driver(&call.part, vm)?;
    match driver.guest(vm.uuid()?, Instant::now() + THAW) {
        Ok(Some(facts)) if facts.can_freeze => Ok(()),
        Ok(Some(_)) => Err(refused(
            "NOT_SUPPORTED",
            vm,
            "the guest's agent does not freeze file systems: enable it there",
        )),
        Ok(None) => Err(refused(
            "NOT_SUPPORTED",
            vm,
            "no guest agent answers: install qemu-guest-agent in the guest, and look whether it runs",
        )),
        Err(error) => Err(refused("PLUGIN_DEOS_NOT_RESPOND", vm, error)),
    }
}

#[derive(Debug, Default)]
struct Time {
    is_over: Mutex<Over>,
    changed: Condvar,
}

/// How the time of a freeze ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Over {
    #[default]
    No,
    /// The operation thaws.
    Ended,
    /// The limit was reached first.
    Expired,
}

/// File systems that are frozen; thawed when this is dropped.
struct Frozen {
    vms: Arc<Vms>,
    driver: Arc<dyn VmDriver>,
    vm: Arc<Object>,
    limit: Duration,
    time: Arc<Time>,
}

impl Frozen {
    fn begin(call: &Call, vm: &Arc<Object>) -> Result<Self, ApiError> {
        let driver = lookup::driver(&call.part, vm)?;
        let limit = lookup::seconds(&[vm], "quiesce-timeout", FROZEN_SECONDS);
        let limit = limit.min(Duration::from_secs(FROZEN_SECONDS_MAX));
        let this = Self {
            vms: Arc::clone(&call.part),
            driver: Arc::clone(&driver),
            vm: Arc::clone(vm),
            limit,
            time: Arc::default(),
        };
        let uuid = vm.uuid()?;
        let (time, guard) = (Arc::clone(&this.time), Arc::clone(&driver));
        // Before the freeze: a guest that cannot be guarded is not frozen.
        let spawned = thread::Builder::new().name("quiesce".into()).spawn(move || {
            let mut over = time.is_over.lock();
            time.changed.wait_while_for(&mut over, |over| *over == Over::No, limit);
            if *over == Over::No {
                *over = Over::Expired;
                drop(over);
                tracing::warn!(vm = %uuid, "a guest was frozen for {limit:?} and is thawed");
                if let Err(error) = guard.thaw(uuid, Instant::now() + THAW) {
                    tracing::warn!(vm = %uuid, %error, "a guest that was frozen for too long does not thaw yet");
                }
            }
        });
        spawned.map_err(|error| refused("FAILED", vm, error))?;
        driver.freeze(uuid, Instant::now() + limit)?;
        Ok(this)
    }

    /// Thaws, and says whether the file systems were frozen until now.
    fn end(&self) -> Result<(), ApiError> {
        let is_in_time = {
            let mut over = self.time.is_over.lock();
            let is_in_time = *over == Over::No;
            if is_in_time {
                *over = Over::Ended;
            }
            is_in_time
        };
        self.time.changed.notify_all();
        let thawed = self.driver.thaw(self.vm.uuid()?, Instant::now() + THAW);
        if !is_in_time {
            let why = format!(
                "the snapshot took longer than {:?}, and the guest was thawed: see other-config:quiesce-timeout",
                self.limit
            );
            return Err(refused("TIMEOUT", &self.vm, why));
        }
        match thawed {
            Ok(true) => Ok(()),
            Ok(false) => Err(refused(
                "FAILED",
                &self.vm,
                "the guest thawed by itself before its disks were snapshotted",
            )),
            // It is tried again; the snapshot is of frozen file systems.
            Err(error) => {
                tracing::warn!(vm = self.vm.text("uuid"), %error, "a guest does not thaw yet");
                Ok(())
            }
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let mut over = self.time.is_over.lock();
        if *over == Over::No {
            *over = Over::Ended;
        }
        drop(over);
        self.time.changed.notify_all();
        if let Ok(uuid) = self.vm.uuid() {
            surely(&self.vms, &self.driver, uuid);
        }
    }
}

/// Thaws what of a VM may be frozen. An agent that is gone may come back: it is an error, too.
fn thaw(driver: &dyn VmDriver, vm: Uuid) -> Result<(), ApiError> {
    if driver.state(vm)? == VmState::Halted {
        return Ok(());
    }
    driver.thaw(vm, Instant::now() + THAW).map(drop)
}

fn forget(vms: &Vms, vm: Uuid) {
    let dropped = vms.db.change(|change| {
        if let Ok(vm) = change.get("VM", &reference_of(vm)) {
            change.drop_note(note_key(NOTE, &vm));
        }
        Ok(())
    });
    if let Err(error) = dropped {
        tracing::warn!(%vm, %error, "a guest that was thawed will be thawed again at the next start");
    }
}

/// Thaws a guest; one that does not answer is tried again by a thread until it does, or has ended.
fn surely(vms: &Arc<Vms>, driver: &Arc<dyn VmDriver>, vm: Uuid) {
    let mut pause = PAUSE;
    for attempt in 0..TRIES {
        match thaw(&**driver, vm) {
            Ok(()) => return forget(vms, vm),
            Err(error) => tracing::warn!(%vm, %error, attempt, "a guest does not thaw"),
        }
        thread::sleep(pause);
        pause *= 2;
    }
    tell_frozen(vms, vm);
    let (weak, driver) = (Arc::downgrade(vms), Arc::clone(driver));
    let going_on = move || loop {
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
        let Some(vms) = weak.upgrade() else { return };
        if thaw(&*driver, vm).is_ok() {
            tracing::info!(%vm, "a guest has thawed at last");
            return forget(&vms, vm);
        }
    };
    if let Err(error) = thread::Builder::new().name("thaw".into()).spawn(going_on) {
        tracing::error!(%vm, %error, "a guest stays frozen until the next start of the toolstack");
    }
}

fn tell_frozen(vms: &Vms, vm: Uuid) {
    if let Ok(vm) = vms.db.get("VM", &reference_of(vm)) {
        let why = "The guest's agent does not answer after its file systems were frozen; it is asked again and again. \
                   In the guest, 'fsfreeze -u' thaws a file system.";
        lookup::tell(vms, "VM_STAYS_FROZEN", &vm, why);
    }
}

/// Guests that a daemon may have left frozen.
pub fn recover(vms: &Arc<Vms>) {
    let notes = vms.db.notes(&format!("machines/{NOTE}/"));
    for_each(&notes, |(key, _)| {
        let uuid = key.rsplit('/').next().and_then(|uuid| Uuid::parse_str(uuid).ok());
        let Some(uuid) = uuid else { return };
        match vms.db.get("VM", &reference_of(uuid)).and_then(|vm| lookup::driver(vms, &vm)) {
            Ok(driver) => surely(vms, &driver, uuid),
            Err(_) => drop(vms.db.change(|change| {
                change.drop_note(key);
                Ok(())
            })),
        }
    });
}
