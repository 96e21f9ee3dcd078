//! A VM goes back to a snapshot of it.
//!
//! ```text
//! 1  a VM that runs is ended, without asking its guest
//! 2  clones of the snapshot's disks are made                  each with a note: nothing leads to it yet
//! 3  in one change: the VM's VBDs lead to the clones, its VIFs and settings are the snapshot's; disks that were
//!    replaced get such a note
//! 4  the disks that were replaced are removed
//! ```
//!
//! A VM that goes back to a checkpoint is suspended then, with a clone of the checkpoint's memory.
//!
//! So a failure or a kill before 3 leaves the VM as it was, and one after it leaves the VM as the snapshot is; what
//! nothing leads to is removed by the next start. XenServer removes the old disks first, which takes less space, and
//! loses them where a clone fails. pool-and-motion.md, VM operations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use tapio_model::{ApiError, Value};
use tapio_sm::ForkKind;

use super::allowed::{bad_power_state, refresh};
use super::copy::add;
use super::made::remove_unused;
use super::running::Running;
use super::{Call, Handlers, fields, lookup, power, vbd, vif};
use crate::args::Args;
use crate::db::{Change, Object};
use crate::plan::steps::step;
use crate::plan::{Permits, Plan};
use crate::storage;
use crate::storage::vdi::made_note;

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.revert", revert);
}

/// New VDIs, by the place of the snapshot's VBD, or [`MEMORY`].
type Made = Arc<Mutex<BTreeMap<String, String>>>;

/// The place of the memory of a checkpoint, from which the VM is suspended then.
const MEMORY: &str = "memory";

fn revert(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (_held, snapshot) = Running::begin(call, "VM", args.text(0)?, "revert", |change, snapshot| {
        if !snapshot.bool("is_a_snapshot") {
            return Err(ApiError::bare("REVERT_ONLY_ALLOWED_ON_SNAPSHOT"));
        }
        change.get("VM", &snapshot.reference)
    })?;
    let db = &call.part.db;
    let vm = db.get("VM", snapshot.text("snapshot_of")).map_err(|_| {
        let name = snapshot.text("name_label");
        let why =
            format!("the VM of snapshot '{name}' is gone: make a VM of the snapshot (xe snapshot-clone)");
        ApiError::new("VM_REVERT_FAILED", [snapshot.reference.clone(), why])
    })?;
    if vm.text("power_state") != "Halted" {
        power::shut_down(call, &vm.reference)?;
    }
    let (_running, ()) = Running::begin(call, "VM", &vm.reference, "reverting", |_, vm| {
        if vm.text("power_state") == "Halted" { Ok(()) } else { Err(bad_power_state(vm, "Halted")) }
    })?;
    let made = Made::default();
    clone_disks(call, &snapshot, &vm.reference, &made)?;
    let made = std::mem::take(&mut *made.lock());
    let switched = db.change(|change| switch(change, &snapshot, &vm.reference, &made));
    let replaced = switched.inspect_err(|_| made.values().for_each(|vdi| discard(call, vdi)))?;
    step("vm-revert:switched");
    replaced.iter().for_each(|vdi| discard(call, vdi));
    Ok(Value::Void)
}

/// Removes a VDI that nothing leads to. The note of one that stays has the next start try again.
fn discard(call: &Call, vdi: &str) {
    if let Err(error) = remove_unused(call, vdi) {
        tracing::warn!(vdi, %error, "a disk that no VM has any more stays until the next start");
    }
}

fn is_disk(vbd: &Object) -> bool {
    vbd.text("type") != "CD" && !vbd.is_null("VDI")
}

/// Makes a clone of each disk of the snapshot; all or none.
fn clone_disks(call: &Call, snapshot: &Object, vm: &str, made: &Made) -> Result<(), ApiError> {
    lookup::apply_limits(call);
    let db = &call.part.db;
    let mut plans = Vec::new();
    let vbds = db.find("VBD", "VM", &snapshot.reference).into_iter().filter(|vbd| is_disk(vbd));
    let mut wanted: Vec<(String, String)> =
        vbds.map(|vbd| (vbd.text("userdevice").to_owned(), vbd.text("VDI").to_owned())).collect();
    if snapshot.text("power_state") == "Suspended" {
        wanted.push((MEMORY.to_owned(), snapshot.text("suspend_VDI").to_owned()));
    }
    for (place, vdi) in wanted {
        let vdi = db.get("VDI", &vdi)?;
        let permits = Permits { vm: Some(vm.into()), sr: Some(vdi.text("SR").into()) };
        let (this, that, of) = (call.clone(), call.clone(), vm.to_owned());
        let undone = place.clone();
        let (here, there) = (Arc::clone(made), Arc::clone(made));
        let subject = format!("VDI {}", vdi.text("uuid"));
        let plan = Plan::leaf("clone the disk", subject, permits, move |_| {
            let to = lookup::to_storage(&this);
            let kind = ForkKind::Clone;
            let new = storage::fork_vdi(&to, &vdi.reference, &BTreeMap::new(), kind, Some(&of))?;
            here.lock().insert(place, new);
            step("vm-revert:disk-made");
            Ok(())
        });
        plans.push(plan.undone_by(move |_| {
            let new = there.lock().remove(&undone);
            new.map_or(Ok(()), |vdi| remove_unused(&that, &vdi))
        }));
    }
    call.part.plans.run("VM.revert", Plan::Parallel(plans), &call.progress)
}

/// Step 3; answers the VDIs that were replaced and that nothing leads to.
fn switch(
    change: &mut Change<'_>,
    snapshot: &Object,
    vm: &str,
    made: &BTreeMap<String, String>,
) -> Result<Vec<String>, ApiError> {
    for (field, value) in fields::of_reverted(snapshot) {
        change.set("VM", vm, field, value)?;
    }
    change.set("VM", vm, "parent", Value::string(&snapshot.reference))?;
    for vif in change.find("VIF", "VM", vm) {
        vif::remove_in(change, &vif)?;
    }
    for vif in change.find("VIF", "VM", &snapshot.reference) {
        vif::copy_in(change, vm, &vif, true)?;
    }
    let mut had = BTreeSet::new();
    for old in change.find("VBD", "VM", vm) {
        vbd::remove_in(change, &old)?;
        if is_disk(&old) {
            had.insert(old.text("VDI").to_owned());
        }
    }
    let mut replaced = Vec::new();
    for like in change.find("VBD", "VM", &snapshot.reference) {
        let Some(new) = made.get(like.text("userdevice")).filter(|_| is_disk(&like)) else {
            add(change, vm, &like, like.text("VDI"))?;
            continue;
        };
        change.drop_note(made_note(new));
        add(change, vm, &like, new)?;
        let was = change.get("VDI", like.text("VDI"))?.text("snapshot_of").to_owned();
        if !had.contains(&was) {
            continue;
        }
        // Snapshots of the disk that goes are snapshots of the one in its place.
        for other in change.find("VDI", "snapshot_of", &was) {
            change.set("VDI", &other.reference, "snapshot_of", Value::string(new))?;
        }
        if change.find("VBD", "VDI", &was).is_empty() {
            change.put_note(made_note(&was), vm);
            replaced.push(was);
        }
    }
    if let Some(image) = made.get(MEMORY) {
        change.drop_note(made_note(image));
        change.set("VM", vm, "suspend_VDI", Value::string(image))?;
        change.set("VM", vm, "power_state", Value::string("Suspended"))?;
    }
    refresh(change, "VM", vm)?;
    Ok(replaced)
}
