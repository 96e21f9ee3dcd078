//! VMs of this host whose shared storage this host lost. Their guests have ended before another host may open the disks
//! (`docs/design/pools.md`); here the records say so, without the storage, which may hang.
//!
//! The VM is not started again here. Another host does, if the VM is protected: it finds it halted.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use tapio_model::ApiError;
use tapio_sm::lease;
use tapio_vm::ShutdownKind;

use super::plug::record;
use super::running::Running;
use super::{Call, Vms, lookup, power, recover};
use crate::basics::may_be_here;
use crate::db::Object;
use crate::disks::Note;

/// How often it is looked.
const TURN: Duration = Duration::from_secs(1);
/// How long the end of a guest may take.
const END: Duration = Duration::from_secs(30);
/// How often it is tried to tidy a disk up whose storage hangs.
const AGAIN: Duration = Duration::from_secs(2);

/// A thread that ends with the toolstack.
pub(super) fn spawn(vms: &Arc<Vms>) {
    let weak = Arc::downgrade(vms);
    let looking = move || {
        while let Some(vms) = weak.upgrade() {
            turn(&vms);
            drop(vms);
            thread::sleep(TURN);
        }
    };
    if let Err(error) = thread::Builder::new().name("lost-storage".into()).spawn(looking) {
        tracing::error!(%error, "no thread looks for VMs whose storage is lost");
    }
}

fn turn(vms: &Arc<Vms>) {
    let lost: Vec<_> = vms.db.all("SR").into_iter().filter(|sr| is_lost(vms, sr)).collect();
    if lost.is_empty() {
        return;
    }
    for vm in vms.db.all("VM") {
        if !is_up(vms, &vm) || vm.bool("is_control_domain") {
            continue;
        }
        if let Some(sr) = lost.iter().find(|sr| writes_to(vms, &vm, sr))
            && let Err(error) = end(vms, &vm, sr)
        {
            tracing::warn!(vm = vm.text("uuid"), %error, "a VM whose storage is lost keeps its record for now");
        }
    }
}

fn is_up(vms: &Vms, vm: &Object) -> bool {
    ["Running", "Paused"].contains(&vm.text("power_state")) && may_be_here(&vms.db, vm)
}

/// Whether this host's lease of a shared SR is so late that guests with disks there had to end.
fn is_lost(vms: &Vms, sr: &Object) -> bool {
    let is_over = |uuid| lease::has_ended_guests(&vms.config.run_dir, uuid);
    sr.bool("shared") && sr.uuid().is_ok_and(is_over)
}

/// Whether a guest has a disk on an SR that it may write.
fn writes_to(vms: &Vms, vm: &Object, sr: &Object) -> bool {
    let vbds = vms.db.find("VBD", "VM", &vm.reference);
    let mut written = vbds.iter().filter(|vbd| vbd.bool("currently_attached") && vbd.text("mode") != "RO");
    let is_there = |vdi: &str| vms.db.get("VDI", vdi).is_ok_and(|vdi| vdi.text("SR") == sr.reference);
    written.any(|vbd| is_there(vbd.text("VDI")))
}

fn end(vms: &Arc<Vms>, vm: &Object, sr: &Object) -> Result<(), ApiError> {
    let call = Call::own(vms);
    let (_running, vm) =
        Running::begin_by_force(&call, "VM", &vm.reference, "hard_shutdown", |change, vm, _| {
            change.get("VM", &vm.reference)
        })?;
    if !is_up(vms, &vm) {
        return Ok(());
    }
    let uuid = vm.uuid()?;
    let why = format!(
        "This host lost the SR '{}' ({}), where the VM has disks: it is ended here, because another host may open them.",
        sr.text("name_label"),
        sr.text("uuid"),
    );
    lookup::tell(vms, "VM_CRASHED", &vm, &why);
    lookup::driver(vms, &vm)?.shutdown(uuid, ShutdownKind::Hard, Instant::now() + END)?;
    for vbd in vms.db.find("VBD", "VM", &vm.reference) {
        if vbd.bool("currently_attached") {
            record(&call, &vbd.reference, None, None)?;
        }
    }
    power::want_again(&call, &vm)?;
    power::halted(&call, &vm)?;
    for note in vms.disks.all().into_iter().filter(|note| note.export.is_none() && note.vm == uuid) {
        tidy(vms, note);
    }
    Ok(())
}

/// Ends the process of a disk, and gives its VDI up when the storage answers.
fn tidy(vms: &Arc<Vms>, note: Note) {
    let weak = Arc::downgrade(vms);
    let vbd = note.spec.vbd;
    let tidying = move || {
        while let Some(Err(error)) = tidied(&weak, &note) {
            tracing::info!(%vbd, %error, "a disk whose storage is lost is not all gone yet");
            thread::sleep(AGAIN);
        }
    };
    if let Err(error) = thread::Builder::new().name("lost-disk".into()).spawn(tidying) {
        tracing::error!(%vbd, %error, "a disk whose storage is lost stays until the next start");
    }
}

/// None if there is nothing to do any more: the toolstack has gone, or the disk has.
fn tidied(vms: &Weak<Vms>, note: &Note) -> Option<Result<(), ApiError>> {
    let vms = vms.upgrade()?;
    let now = vms.disks.of_vbd(note.spec.vbd)?;
    (now.process == note.process).then(|| recover::remove(&Call::own(&vms), note, None))
}
