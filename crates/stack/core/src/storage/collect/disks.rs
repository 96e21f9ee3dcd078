//! The disks of one VM, merged as far as they can be, while a caller waits.

use std::collections::{BTreeMap, BTreeSet};

use tapio_model::ApiError;
use tapio_sm::collect::{Node, Work, plan};
use uuid::Uuid;

use super::super::Call;
use super::super::work::Names;
use super::look::{Memory, look};
use super::request::skipped_line;

/// Collects the SRs of a VM's disks at once, and waits until that is over. Answers what is left of the chains of its
/// disks, and why: nothing, where all went well.
///
/// # Errors
/// `SR_NOT_ATTACHED`, `SR_OPERATION_NOT_SUPPORTED`; `TASK_CANCELLED`, after which the collection goes on.
pub(in super::super) fn merge_disks_of(call: &Call, vm: &str) -> Result<Vec<String>, ApiError> {
    let storage = &call.part;
    let mut disks: BTreeMap<String, Vec<Uuid>> = BTreeMap::new();
    for vbd in storage.db.find("VBD", "VM", vm) {
        if vbd.text("type") != "CD" && !vbd.bool("empty") {
            let vdi = storage.db.get("VDI", vbd.text("VDI"))?;
            disks.entry(vdi.text("SR").to_owned()).or_default().push(vdi.uuid()?);
        }
    }
    for sr in disks.keys() {
        storage.attached(sr)?.is_collected()?;
    }
    disks.keys().for_each(|sr| storage.collect_now(sr));
    let mut left = Vec::new();
    for (sr, vdis) in &disks {
        storage.wait_for_collection(sr, &*call.progress)?;
        left.extend(left_of(call, sr, vdis)?);
    }
    Ok(left)
}

/// What is not merged of the chains of these disks.
fn left_of(call: &Call, sr: &str, vdis: &[Uuid]) -> Result<Vec<String>, ApiError> {
    let told = |error| Names { sr, vdi: "", op: "collect_garbage" }.translate(call, error);
    let view = look(call, &*call.part.attached(sr)?, &Memory::default()).map_err(told)?;
    let chain = chain(&view.nodes, vdis);
    let plan = plan(&view);
    let skipped = plan.skipped.iter().filter(|skipped| chain.contains(&skipped.image)).map(skipped_line);
    let undone = plan.jobs.iter().filter_map(|job| match job.work {
        Work::Garbage => None,
        Work::Inner { image, .. } | Work::Freeze { image, .. } | Work::Leaf { image, .. } => Some(image),
    });
    let undone = undone.filter(|image| chain.contains(image));
    let undone = undone.map(|image| {
        format!("not merged: {image}: the task 'Garbage Collection' says why; it is tried again by itself")
    });
    Ok(skipped.chain(undone).collect())
}

/// Images of the chains of these disks.
fn chain(nodes: &[Node], vdis: &[Uuid]) -> BTreeSet<Uuid> {
    let parents: BTreeMap<Uuid, Option<Uuid>> = nodes.iter().map(|node| (node.uuid, node.parent)).collect();
    let mut chain = BTreeSet::new();
    for vdi in vdis {
        let mut next = Some(*vdi);
        // An image that was met before ends it: so does a circle, which only a damaged SR has.
        while let Some(image) = next.filter(|image| chain.insert(*image)) {
            next = parents.get(&image).copied().flatten();
        }
    }
    chain
}
