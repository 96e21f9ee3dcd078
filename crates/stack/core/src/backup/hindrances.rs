//! What is in the way of a restore.

use tapio_model::ApiError;

use super::Backups;
use crate::db::{Dump, Object, half_done, reference_of};

/// What only a client that says so gets over.
pub(super) fn oddities(backups: &Backups, now: &Dump, then: &Dump) -> Vec<String> {
    let mut found = Vec::new();
    if then.pool() != now.pool() {
        found.push(format!("the dump is of the pool {}, and this is the pool {}", then.pool(), now.pool()));
    }
    if !backups.pool.is_member() && then.hosts() != now.hosts() {
        let names = |dump: &Dump| dump.hosts().into_iter().collect::<Vec<_>>().join(", ");
        found.push(format!("the dump has the host {}, and this is the host {}", names(then), names(now)));
    }
    if then.is_newer() {
        found.push(format!("the dump was made by the newer Tapio {}", then.version));
    }
    found.extend(then.odd.iter().cloned());
    found
}

/// The object as people know it.
fn called(object: &Object) -> String {
    let name = object.text("name_label");
    let quoted = if name.is_empty() { String::new() } else { format!(" '{name}'") };
    format!("the {} {}{quoted}", object.class.name, object.text("uuid"))
}

fn hosts(backups: &Backups, now: &Dump, then: &Dump) -> Vec<String> {
    let mut found = Vec::new();
    if !backups.pool.is_member() {
        if then.hosts().len() != 1 {
            found.push(format!(
                "the dump has {} hosts, and this host has a database of its own: put the pool together first",
                then.hosts().len()
            ));
        }
        return found;
    }
    if then.hosts() != now.hosts() {
        found.push(
            "the dump has other hosts than the pool: let hosts join or leave until they are the same".into(),
        );
    }
    for host in now.of("host").filter(|host| backups.db.own_host() != Some(host.reference.as_str())) {
        if backups.pool.is_live(&host.reference) {
            found.push(format!("{} lives: stop tapiod on all hosts of the pool but this", called(host)));
        }
    }
    found
}

/// PBDs that are attached, and of which the dump knows nothing, or something else.
fn attached(now: &Dump, then: &Dump) -> Vec<String> {
    let attached = now.of("PBD").filter(|pbd| pbd.bool("currently_attached"));
    let is_same = |pbd: &Object| {
        then.of("PBD").any(|other| {
            other.reference == pbd.reference
                && other.bool("currently_attached")
                && ["host", "SR", "device_config"].iter().all(|field| other.get(field) == pbd.get(field))
        })
    };
    attached
        .filter(|pbd| !is_same(pbd))
        .map(|pbd| {
            let sr = now.of("SR").find(|sr| sr.reference == pbd.text("SR"));
            let sr = sr.map_or_else(|| pbd.text("SR").to_owned(), |sr| called(sr));
            let uuid = pbd.text("uuid");
            format!(
                "{sr} is attached, and is not in the dump as it is here: detach it first (xe pbd-unplug uuid={uuid})"
            )
        })
        .collect()
}

/// What no client gets over, a sentence each with the next step. `own` is the task of the restore.
///
/// # Errors
/// The store's.
pub(super) fn all(backups: &Backups, now: &Dump, then: &Dump, own: &str) -> Result<Vec<String>, ApiError> {
    let db = &backups.db;
    let mut found = hosts(backups, now, then);
    if db.all("pool").iter().any(|pool| pool.bool("ha_enabled")) {
        found.push(
            "the pool restarts VMs of hosts that die: switch that off first (xe pool-ha-disable)".to_owned(),
        );
    }
    for vm in db.all("VM").iter().filter(|vm| !vm.bool("is_control_domain")) {
        let state = vm.text("power_state");
        if matches!(state, "Running" | "Paused") {
            found.push(format!("{} is {state}: shut it down, or suspend it, first", called(vm)));
        }
    }
    for vbd in db.all("VBD").iter().filter(|vbd| vbd.bool("currently_attached")) {
        let uuid = vbd.text("uuid");
        found.push(format!("the VBD {uuid} is attached: unplug it first (xe vbd-unplug uuid={uuid})"));
    }
    for task in db.all("task").iter().filter(|task| task.reference != own) {
        if matches!(task.text("status"), "pending" | "cancelling") {
            found.push(format!(
                "{} is not finished: wait for it, or cancel it (xe task-cancel)",
                called(task)
            ));
        }
    }
    for class in ["VM", "VDI", "SR", "VBD"] {
        for object in db.all(class) {
            let running = object.get("current_operations").to_string_map();
            if let Some(operation) = running.values().next() {
                found.push(format!("{} has the operation {operation}: wait for its end", called(&object)));
            }
        }
    }
    found.extend(attached(now, then));
    let half_done = half_done(db.store(), backups.pool.is_member());
    for note in half_done.map_err(|error| ApiError::internal(format!("the database: {error}")))? {
        found.push(format!("an operation is half done ({note}): wait for its end, or start tapiod again"));
    }
    let own_host = db.own_host().map(str::to_owned);
    if let Some(own) = own_host.filter(|own| !then.hosts().iter().any(|host| is_of(own, host))) {
        found.push(format!("the dump does not have this host ({own})"));
    }
    Ok(found)
}

fn is_of(reference: &str, uuid: &str) -> bool {
    uuid.parse().is_ok_and(|uuid| reference_of(uuid) == reference)
}
