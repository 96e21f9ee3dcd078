//! Disk processes and VBDs.

use super::super::{Call, this_host};
use super::{Finding, pool};
use crate::basics::available_memory;

pub(super) fn find(call: &Call) -> Vec<Finding> {
    let disks = &call.part.disks;
    let mut found = Vec::new();
    for (process, vbd) in disks.stray() {
        let detail = format!("process {} was started for VBD {vbd}, which has no such disk", process.pid);
        found.push(Finding::new("process-leaked", process.pid, detail));
    }
    for note in disks.dead() {
        // Another process takes its place: that is no finding.
        if disks.is_paused(note.spec.vbd) {
            continue;
        }
        let detail = format!("VDI {} of VM {}", note.vdi_uuid, note.vm);
        found.push(Finding::new("process-dead", note.spec.vbd, detail).of_sr(note.sr));
    }
    found.extend(without_disk(call));
    let pools = disks.pools();
    found.extend(pools.iter().filter_map(|(pool, disks)| pool::exhausted(pool, disks, available_memory())));
    found
}

/// VBDs of VMs of this host whose record says that they are plugged, and of which no disk is known. A start of the
/// daemon corrects the record.
fn without_disk(call: &Call) -> Vec<Finding> {
    let db = &call.part.db;
    let host = this_host(db);
    let is_lost = |reference: &str| {
        let Ok(vbd) = db.get("VBD", reference) else { return false };
        let is_plugged = vbd.bool("currently_attached") && !vbd.bool("empty");
        is_plugged && vbd.uuid().is_ok_and(|uuid| call.part.disks.of_vbd(uuid).is_none())
    };
    let mut found = Vec::new();
    for vbd in db.all("VBD").into_iter().filter(|vbd| is_lost(&vbd.reference)) {
        let Ok(vm) = db.get("VM", vbd.text("VM")) else { continue };
        let is_here = vm.text("resident_on") == host || vm.bool("is_control_domain");
        // An operation that is under way changes record and disk one after the other.
        let is_free = |class, object| call.part.operations.check_free(class, object).is_ok();
        let is_busy = !is_free("VBD", &vbd.reference) || !is_free("VM", &vm.reference);
        if is_here && !is_busy && is_lost(&vbd.reference) {
            let detail =
                format!("its record says that VM {} has it, and it has no disk process", vm.text("uuid"));
            found.push(Finding::new("process-dead", vbd.text("uuid"), detail));
        }
    }
    found
}
