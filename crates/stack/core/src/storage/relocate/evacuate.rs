//! An SR without disks: all go to another one, while their VMs run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tapio_model::{ApiError, Value};

use super::super::vdi::Subject;
use super::super::{Call, Handlers};
use super::{Wish, may_move, relocate};
use crate::args::Args;
use crate::db::Object;

pub(in super::super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("SR.evacuate", evacuate);
}

/// Moves every VDI of an SR to another one, a tree of chains at a time. What cannot move keeps no other from it.
/// Calling it again goes on with what is left.
///
/// # Errors
/// `SR_NOT_ATTACHED`; `TASK_CANCELLED`: what was moved by then is elsewhere; `SR_NOT_EVACUATED` names what stays, why,
/// and what to do.
fn evacuate(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (sr, to) = (args.text(0)?, args.text(1)?);
    if sr == to {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the SR cannot be evacuated into itself"]));
    }
    let from = call.part.attached(sr)?;
    call.part.attached(to)?;
    let mut left: BTreeMap<String, String> = BTreeMap::new();
    let mut groups: Vec<Vec<Arc<Object>>> = Vec::new();
    for group in trees(&call.part.db.find("VDI", "SR", sr)) {
        let mut moves = Vec::new();
        for vdi in group {
            let checked =
                Subject::usable(call, Arc::clone(&vdi)).and_then(|member| may_move(call, &from, &member));
            match checked {
                Ok(()) => moves.push(vdi),
                Err(error) => drop(left.insert(name(&vdi), reason(&error))),
            }
        }
        groups.push(moves);
    }
    let size = |group: &[Arc<Object>]| group.iter().map(|vdi| vdi.int("virtual_size") as f64).sum::<f64>();
    let all: f64 = groups.iter().map(|group| size(group)).sum::<f64>().max(1.0);
    let mut done = 0.0;
    for group in groups.iter().filter(|group| !group.is_empty()) {
        let next = done + size(group) / all;
        let vdis: Vec<String> = group.iter().map(|vdi| vdi.reference.clone()).collect();
        let moved = relocate(call, &vdis, &Wish { to, shape: None, part: (done, next.min(1.0)) });
        if call.progress.is_cancelled() {
            return Err(ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()]));
        }
        if let Err(error) = moved {
            tracing::warn!(sr, %error, "disks stay in an SR that is evacuated");
            // Some may have gone before the error came.
            let stay = group.iter().filter(|vdi| call.part.db.get("VDI", &vdi.reference).is_ok());
            left.extend(stay.map(|vdi| (name(vdi), reason(&error))));
        }
        done = next;
        call.progress.set(done.min(1.0));
    }
    if left.is_empty() {
        return Ok(Value::Void);
    }
    let told: Vec<String> = left.into_iter().map(|(vdi, why)| format!("{vdi}: {why}")).collect();
    Err(ApiError::new("SR_NOT_EVACUATED", [sr.to_owned(), told.join("; ")]))
}

fn name(vdi: &Object) -> String {
    format!("VDI '{}' ({})", vdi.text("name_label"), vdi.text("uuid"))
}

/// Why a VDI stays, and the next step.
fn reason(error: &ApiError) -> String {
    let next = match &*error.code {
        "VDI_CBT_ENABLED" => "xe vdi-disable-cbt",
        "VDI_IN_USE" => "end the snapshot, export or copy of it, or unplug it where it is plugged read-only",
        "VDI_INCOMPATIBLE_TYPE" => "it has no data any more: xe vdi-destroy",
        "VDI_MISSING" => "bring its image back and xe sr-scan, or xe vdi-forget",
        "VDI_ON_BOOT_MODE_INCOMPATIBLE_WITH_OPERATION" => "set on-boot to persist",
        "SR_FULL" => "give back space in the destination, or choose another one for the rest",
        "OTHER_OPERATION_IN_PROGRESS" => "wait for that operation",
        _ => "see the cause, and evacuate once more",
    };
    format!("{error}; {next}")
}

/// VDIs that have images in common, or are snapshots of each other: they move together, so that what they have in
/// common is there once. Base copies are left out; they go with the last disk that needs them.
fn trees(all: &[Arc<Object>]) -> Vec<Vec<Arc<Object>>> {
    let known: BTreeMap<&str, &Arc<Object>> = all.iter().map(|vdi| (vdi.reference.as_str(), vdi)).collect();
    // The lowest image of each, then that of what it is a snapshot of.
    let root = |vdi: &str| {
        let (mut now, mut seen) = (vdi.to_owned(), BTreeSet::new());
        while seen.insert(now.clone()) {
            match known
                .get(now.as_str())
                .map(|vdi| vdi.text("parent"))
                .filter(|below| known.contains_key(below))
            {
                Some(below) => now = below.to_owned(),
                None => break,
            }
        }
        now
    };
    let mut joined: BTreeMap<String, String> = BTreeMap::new();
    let find = |joined: &BTreeMap<String, String>, of: &str| {
        let mut now = of.to_owned();
        while let Some(next) = joined.get(&now) {
            now.clone_from(next);
        }
        now
    };
    for vdi in all {
        if known.contains_key(vdi.text("snapshot_of")) {
            let own = find(&joined, &root(&vdi.reference));
            let of = find(&joined, &root(vdi.text("snapshot_of")));
            if own != of {
                joined.insert(own, of);
            }
        }
    }
    let mut groups: BTreeMap<String, Vec<Arc<Object>>> = BTreeMap::new();
    for vdi in all.iter().filter(|vdi| vdi.bool("managed")) {
        groups.entry(find(&joined, &root(&vdi.reference))).or_default().push(Arc::clone(vdi));
    }
    groups.into_values().collect()
}
