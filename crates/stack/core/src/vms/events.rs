//! What happens by itself: guests end, disk processes die.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tapio_model::ApiError;
use tapio_vm::{ShutdownKind, VmDriver, VmEvent, VmState};

use super::plug::record;
use super::running::Running;

use super::{Call, Vms, balloon, guest, lookup, lost_storage, power, recover};
use crate::basics::may_be_here;
use crate::db::{Change, Object};
use crate::disks::{Note, Phase};

/// How often a thread looks whether its toolstack is still there.
const TURN: Duration = Duration::from_secs(1);
/// When an event that met another operation is looked at again.
const AGAIN: Duration = Duration::from_millis(200);
/// How long a guest that has ended may take to be cleared away.
const CLEAR: Duration = Duration::from_secs(30);
/// Deaths of disk processes that are followed at a time.
const FOLLOWED_MAX: usize = 16;

/// One thread for each driver, and one for disk processes. They end with the toolstack.
pub fn spawn(vms: &Arc<Vms>) {
    for driver in vms.drivers() {
        let weak = Arc::downgrade(vms);
        let name = format!("events-{}", driver.name());
        let spawned = thread::Builder::new().name(name).spawn(move || guests(&weak, &*driver));
        if let Err(error) = spawned {
            tracing::error!(%error, "no thread listens to guests: the ends of guests will be noticed at the next start");
        }
    }
    guest::spawn(vms);
    lost_storage::spawn(vms);
    let weak = Arc::downgrade(vms);
    let spawned = thread::Builder::new().name("disk-deaths".into()).spawn(move || processes(&weak));
    if let Err(error) = spawned {
        tracing::error!(%error, "no thread watches disk processes");
    }
}

fn guests(vms: &Weak<Vms>, driver: &dyn VmDriver) {
    let mut pending: VecDeque<VmEvent> = VecDeque::new();
    loop {
        let turn = if pending.is_empty() { TURN } else { AGAIN };
        pending.extend(driver.wait_event(Instant::now() + turn));
        let Some(vms) = vms.upgrade() else { return };
        for _ in 0..pending.len() {
            let Some(event) = pending.pop_front() else { break };
            match ended(&vms, driver, &event) {
                Err(error) if error.code == "OTHER_OPERATION_IN_PROGRESS" => pending.push_back(event),
                Err(error) => tracing::warn!(?event, %error, "the end of a guest could not be followed"),
                Ok(()) => {}
            }
        }
    }
}

/// A guest ended without having been told to.
fn ended(vms: &Arc<Vms>, driver: &dyn VmDriver, event: &VmEvent) -> Result<(), ApiError> {
    let (uuid, field, operation) = match event {
        VmEvent::Halted(vm) => (*vm, "actions_after_shutdown", "hard_shutdown"),
        VmEvent::Rebooted(vm) => (*vm, "actions_after_reboot", "hard_reboot"),
        VmEvent::Crashed(vm, _) => (*vm, "actions_after_crash", "hard_shutdown"),
        VmEvent::Agent(vm) => {
            vms.guests.expect(*vm, true);
            return Ok(());
        }
        VmEvent::Memory(vm, bytes) => return balloon::record(vms, *vm, *bytes),
    };
    let call = Call::own(vms);
    let Ok(vm) = vms.db.by_uuid("VM", &uuid.to_string()) else { return Ok(()) };
    let (_running, vm) =
        Running::begin(&call, "VM", &vm.reference, operation, |change, vm| change.get("VM", &vm.reference))?;
    // A guest that has gone to another host is that host's, and so is one that has not come to its end here.
    if !may_be_here(&vms.db, &vm) {
        return Ok(());
    }
    // The operation that ended it has done all of this by now.
    if matches!(vm.text("power_state"), "Halted" | "Suspended") || driver.state(uuid)? != VmState::Halted {
        return Ok(());
    }
    if let VmEvent::Crashed(_, why) = event {
        lookup::tell(vms, "VM_CRASHED", &vm, why);
    }
    driver.shutdown(uuid, ShutdownKind::Hard, Instant::now() + CLEAR)?;
    power::take_disks(&call, &vm, &format!("VM.{operation}"));
    power::halted(&call, &vm)?;
    // The words of a crash are many, those that keep the VM as it is cannot be followed: its process is gone.
    if vm.text(field).ends_with("restart") {
        power::restart(&call, &vm, operation)?;
    }
    Ok(())
}

/// Each death is followed in a thread of its own: a storage that hangs keeps its disk, and none that died after it.
fn processes(vms: &Weak<Vms>) {
    let mut due: Vec<Note> = Vec::new();
    let mut followed: Vec<(Note, JoinHandle<Followed>)> = Vec::new();
    loop {
        let Some(disks) = vms.upgrade().map(|vms| vms.disks.clone()) else { return };
        let is_idle = due.is_empty() && followed.is_empty();
        let death = disks.wait_for_death((!is_idle).then(|| Instant::now() + AGAIN));
        let Some(vms) = vms.upgrade() else { return };
        for (note, thread) in followed.extract_if(.., |(_, thread)| thread.is_finished()) {
            if thread.join().is_ok_and(|followed| followed == Followed::Again) {
                due.push(note);
            }
        }
        due.extend(death.and_then(|vbd| vms.disks.of_vbd(vbd)));
        let free = FOLLOWED_MAX - followed.len();
        let ready = due.extract_if(.., |note| !vms.disks.is_paused(note.spec.vbd)).take(free);
        for note in ready.collect::<Vec<_>>() {
            let (vms, of) = (Arc::clone(&vms), note.clone());
            match thread::Builder::new().name("disk-death".into()).spawn(move || follow(&vms, &of)) {
                Ok(thread) => followed.push((note, thread)),
                Err(error) => {
                    tracing::warn!(vbd = %note.spec.vbd, %error, "the death of a disk process waits for a thread");
                    due.push(note);
                }
            }
        }
    }
}

/// What came of following a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Followed {
    Done,
    /// Another operation holds the VBD, its VM, or the disk's images.
    Again,
}

fn follow(vms: &Arc<Vms>, note: &Note) -> Followed {
    died(vms, note).unwrap_or_else(|error| {
        if error.code == "OTHER_OPERATION_IN_PROGRESS" {
            return Followed::Again;
        }
        tracing::warn!(vbd = %note.spec.vbd, %error, "the death of a disk process could not be followed");
        Followed::Done
    })
}

/// The process of a plugged disk, which `died` names, has died: another takes its place, or the guest has lost its
/// disk.
fn died(vms: &Arc<Vms>, died: &Note) -> Result<Followed, ApiError> {
    let (call, uuid) = (Call::own(vms), died.spec.vbd);
    let Some(note) = vms.disks.of_vbd(uuid) else { return Ok(Followed::Done) };
    if note.process.is_some() && note.process != died.process {
        // Another has taken its place already, and is watched itself.
        return Ok(Followed::Done);
    }
    if note.phase != Phase::Running {
        return left_ended(vms, &call, &note).map(|()| Followed::Done);
    }
    if recover::waits_for_sr(vms, &note) {
        return Ok(Followed::Done);
    }
    let vbd = vms.db.by_uuid("VBD", &uuid.to_string())?;
    let Err(error) = recover::restart(vms, &note) else {
        tracing::warn!(vbd = %uuid, "its disk process had died and was started again");
        let told = format!(
            "The disk process of VBD {uuid} died and was started again; the guest has noticed a pause."
        );
        lookup::tell(vms, "VBD_DISK_PROCESS_RESTARTED", &*vms.db.get("VM", vbd.text("VM"))?, &told);
        return Ok(Followed::Done);
    };
    let Some(note) = vms.disks.of_vbd(uuid) else { return Ok(Followed::Done) };
    if note.phase != Phase::Running {
        // An unplug came first.
        return left_ended(vms, &call, &note).map(|()| Followed::Done);
    }
    if vms.disks.is_paused(uuid) {
        // A snapshot came first, and takes longer than a start may: the guest waits for its storage, and loses nothing.
        return Ok(Followed::Again);
    }
    let why = format!("The disk process of VBD {uuid} died and cannot be started again: {error}");
    recover::remove(&call, &note, Some(&vbd))?;
    record(&call, &vbd.reference, None, Some(&why))?;
    lookup::tell(vms, "VBD_DISK_PROCESS_DIED", &*vms.db.get("VM", vbd.text("VM"))?, &why);
    Ok(Followed::Done)
}

/// A process that an unplug left behind has ended: its VDI is free again.
fn left_ended(vms: &Arc<Vms>, call: &Call, note: &Note) -> Result<(), ApiError> {
    let vbd = vms.db.by_uuid("VBD", &note.spec.vbd.to_string()).ok();
    let Some(record) = &vbd else { return recover::remove(call, note, None) };
    let check = |_: &mut Change<'_>, vbd: &Object| Ok(vbd.bool("currently_attached"));
    let (_running, is_attached) = Running::begin(call, "VBD", &record.reference, "unplug", check)?;
    // An operation may have cleared it away, and plugged another disk. One that is attached although its disk ends is
    // what an unplug that failed left when the guest had let go.
    let is_left = |now: &Note| {
        now.process.is_none_or(|process| note.process == Some(process))
            && (!is_attached || now.phase == Phase::Ending)
    };
    match vms.disks.of_vbd(note.spec.vbd) {
        Some(now) if is_left(&now) => recover::remove(call, &now, Some(record)),
        _ => Ok(()),
    }
}
