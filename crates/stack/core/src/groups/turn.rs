//! A plan of snapshots is due: each of its VMs gets one, and those that are too many go.
//!
//! What a kill leaves: a plan runs at most once for a moment, because that is written down before it begins. A snapshot
//! counts as the plan's from one change of the database on; before, it is one that a person may have taken, and stays.
//! Of a snapshot that goes, the disks go first and the record last: what is left of it is found again by its record.

use std::sync::Arc;
use std::time::Duration;

use tapio_model::{ApiError, Value};

use super::schedule::{CLASS, SEEN, Schedule};
use super::{Busy, Groups, each};
use crate::dates;
use crate::db::Object;
use crate::plan::steps::step;

/// How often it is looked whether a plan is due.
pub(super) const EVERY: Duration = Duration::from_secs(5);

/// A moment that passed longer ago while no daemon ran is left out, with a message.
const LATE_S: i64 = 3600;

/// A plan that runs, in a note until it has ended.
const RUNNING: &str = "vmss/running/";

/// Most bytes of a message's body.
const BODY_LEN_MAX: usize = 2000;

/// One look, on the host that decides.
pub(super) fn turn(groups: &Groups, now: i64) {
    if !groups.pool.decides() {
        return;
    }
    let due: Vec<_> = groups.db.all(CLASS).into_iter().filter(|plan| is_due(groups, plan, now)).collect();
    each(&due, |plan| match run(groups, &plan.reference, now) {
        Ok(_) => {}
        Err(error) => tracing::warn!(plan = plan.text("name_label"), %error, "a plan of snapshots failed"),
    });
}

/// Whether a plan has to run. One that is too late is told of, and waits for its next time.
fn is_due(groups: &Groups, plan: &Object, now: i64) -> bool {
    if !plan.bool("enabled") {
        return false;
    }
    let Ok(schedule) = Schedule::of(plan.text("frequency"), &plan.map("schedule")) else { return false };
    let Value::DateTime(seen) = *plan.get(SEEN) else { return false };
    let Some(due) = schedule.last_due(now).filter(|due| *due > seen) else { return false };
    if now - due <= LATE_S {
        return true;
    }
    if groups.db.set(CLASS, &plan.reference, SEEN, Value::DateTime(now)).is_ok() {
        let body = format!("Snapshots of {} were not taken: the toolstack did not run.", dates::format(due));
        tell(groups, plan, "VMSS_SNAPSHOT_MISSED_EVENT", 3, &body);
    }
    false
}

/// A client asks for it now.
///
/// # Errors
/// `OPERATION_PARTIALLY_FAILED`, `OTHER_OPERATION_IN_PROGRESS`.
pub(super) fn now(groups: &Groups, plan: &str) -> Result<String, ApiError> {
    run(groups, plan, dates::now())
}

fn run(groups: &Groups, reference: &str, now: i64) -> Result<String, ApiError> {
    let _busy = Busy::begin(groups, CLASS, reference, "snapshot_now")?;
    let running = format!("{RUNNING}{reference}");
    let plan = groups.db.change(|change| {
        change.set(CLASS, reference, SEEN, Value::DateTime(now))?;
        change.put_note(running.as_str(), now.to_string());
        change.set(CLASS, reference, "last_run_time", Value::DateTime(now))?;
        change.get(CLASS, reference)
    })?;
    step("vmss:noted");
    let is_vm = |vm: &Arc<Object>| !vm.bool("is_a_template") && !vm.bool("is_a_snapshot");
    let vms = groups.db.find("VM", "snapshot_schedule", reference).into_iter().filter(is_vm);
    let vms: Vec<_> = vms.collect();
    let name = format!("{}_{}", plan.text("name_label"), dates::format(now));
    let done = each(&vms, |vm| {
        let made = take(groups, &plan, vm, &name);
        made.and_then(|made| prune(groups, &plan, vm, &made))
    });
    groups.db.change(|change| {
        change.drop_note(running);
        Ok(())
    })?;
    let failed: Vec<String> = vms
        .iter()
        .zip(&done)
        .filter_map(|(vm, done)| {
            done.as_ref().err().map(|error| format!("{}: {error}", vm.text("name_label")))
        })
        .collect();
    let removed: usize = done.iter().flatten().sum();
    let told = format!(
        "{} of {} VMs have a snapshot, {removed} older ones are removed",
        vms.len() - failed.len(),
        vms.len()
    );
    if failed.is_empty() {
        tell(groups, &plan, "VMSS_SNAPSHOT_SUCCEEDED", 5, &told);
        return Ok(told);
    }
    tell(groups, &plan, "VMSS_SNAPSHOT_FAILED", 3, &format!("{told}. {}", failed.join("; ")));
    let params = std::iter::once("snapshot_now".to_owned()).chain(failed);
    Err(ApiError::new("OPERATION_PARTIALLY_FAILED", params.collect::<Vec<_>>()))
}

/// Takes a VM's snapshot; its reference. One that does not run has neither memory nor an agent.
fn take(groups: &Groups, plan: &Object, vm: &Object, name: &str) -> Result<String, ApiError> {
    let runs = vm.text("power_state") == "Running";
    let message = match plan.text("type") {
        "checkpoint" if runs => "VM.checkpoint",
        "snapshot_with_quiesce" if runs => "VM.snapshot_with_quiesce",
        _ => "VM.snapshot",
    };
    let made = groups.send(message, vec![vm.reference.as_str().into(), name.into()])?;
    let made = made.as_str().ok_or_else(|| ApiError::internal("a snapshot without a reference"))?.to_owned();
    step("vmss:made");
    groups.db.set("VM", &made, "is_vmss_snapshot", true)?;
    step("vmss:marked");
    Ok(made)
}

/// Removes the oldest snapshots that plans took of a VM, so that as many are left as the plan keeps; how many went.
fn prune(groups: &Groups, plan: &Object, vm: &Object, made: &str) -> Result<usize, ApiError> {
    let of_plans = groups.db.find("VM", "snapshot_of", &vm.reference).into_iter();
    let mut of_plans: Vec<_> = of_plans.filter(|snapshot| snapshot.bool("is_vmss_snapshot")).collect();
    let time = |snapshot: &Object| match snapshot.get("snapshot_time") {
        Value::DateTime(at) => *at,
        _ => 0,
    };
    // The newest first. A date has seconds: the one that was just made is the newest whatever it says.
    of_plans.sort_by_key(|snapshot| (snapshot.reference != made, std::cmp::Reverse(time(snapshot))));
    let kept = usize::try_from(plan.int("retained_snapshots")).unwrap_or(usize::MAX).max(1);
    let gone: Vec<_> = of_plans.into_iter().skip(kept).collect();
    for snapshot in &gone {
        remove(groups, snapshot)?;
    }
    Ok(gone.len())
}

/// Removes a snapshot with the disks that are its alone.
fn remove(groups: &Groups, snapshot: &Object) -> Result<(), ApiError> {
    for vbd in groups.db.find("VBD", "VM", &snapshot.reference) {
        if vbd.text("type") != "Disk" || vbd.is_null("VDI") {
            continue;
        }
        let vdi = vbd.text("VDI");
        let is_its_own = groups.db.get("VDI", vdi).is_ok_and(|disk| disk.bool("is_a_snapshot"))
            && groups.db.find("VBD", "VDI", vdi).len() == 1;
        if is_its_own {
            groups.send("VDI.destroy", vec![vdi.into()])?;
            step("vmss:disk-gone");
        }
    }
    groups.send("VM.destroy", vec![snapshot.reference.as_str().into()]).map(drop)
}

fn tell(groups: &Groups, plan: &Object, name: &str, priority: i64, body: &str) {
    let mut end = body.len().min(BODY_LEN_MAX);
    while !body.is_char_boundary(end) {
        end -= 1;
    }
    let told = crate::tell(&groups.db, name, priority, CLASS, plan.text("uuid"), &body[..end]);
    if let Err(error) = told {
        tracing::warn!(%error, "a message about a plan of snapshots is lost");
    }
}

/// Tells of plans that a daemon did not bring to an end. They run again at their next time.
///
/// # Errors
/// The store's.
pub(super) fn recover(groups: &Groups) -> Result<(), ApiError> {
    for (key, _) in groups.db.notes(RUNNING) {
        groups.db.change(|change| {
            change.drop_note(key.as_str());
            Ok(())
        })?;
        if let Ok(plan) = groups.db.get(CLASS, key.trim_start_matches(RUNNING)) {
            let body = "The toolstack ended in the middle: some VMs have no snapshot of that time.";
            tell(groups, &plan, "VMSS_SNAPSHOT_FAILED", 3, body);
        }
    }
    Ok(())
}
