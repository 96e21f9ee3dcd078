//! Disk processes and VBDs.

use super::super::Call;
use super::{Finding, pool};

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
    found.extend(disks.pools().iter().filter_map(pool::exhausted));
    found
}
