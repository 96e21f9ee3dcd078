//! A VM that goes to another host of its pool while disks of it go to other SRs.
//!
//! ```text
//! 1  before   disks go to SRs that both hosts have: where they shall be, or a stop on the way
//! 2           the guest goes, and disks from SRs that only this host has go along, to SRs of the other (see `live`)
//! 3  after    the other host moves disks to SRs that only it has
//! ```
//!
//! Each part is whole by itself: after a kill between two of them the guest runs at one host with all its disks, and
//! what is missing is that disks lie on another SR than the one they were to go to. Where the guest does not go, disks
//! that went ahead are brought back.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, Value};

use super::check::{OP, Wish, disk_may_go, vbds_of};
use super::local::{Moves, move_all, moves_of};
use super::{Call, live};
use crate::args::Args;
use crate::basics::this_host;
use crate::db::Object;
use crate::progress::{Share, Unwatched};
use crate::vms::allowed::refuse_special;
use crate::vms::running::Running;

/// Which disks go where, and when.
#[derive(Debug, Default)]
pub(super) struct Way {
    /// VDIs that go before the guest does, with their SRs.
    before: BTreeMap<String, String>,
    /// VDIs that go with it.
    along: BTreeMap<String, String>,
    /// VBDs whose VDIs go after it, with the SRs.
    after: BTreeMap<String, String>,
}

/// The way of a VM and its disks, and that nothing known here forbids it.
///
/// # Errors
/// Those of `VM.pool_migrate`; `VM_REQUIRES_SR`: one of the hosts lacks an SR that a disk has to be on.
pub(super) fn check(
    call: &Call,
    wish: &Wish,
    host: &Object,
    options: &BTreeMap<String, String>,
) -> Result<Way, ApiError> {
    wish.stays_in_pool()?;
    let way = way(call, wish, host)?;
    if is_halted(&wish.vm) {
        refuse_special(&wish.vm)?;
        if !call.part.pool.is_live(&host.reference) {
            return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
        }
        return Ok(way);
    }
    let force = options.get("force").is_some_and(|word| word == "true");
    live::check(call, &wish.vm, host, force, live::network_of(options), (&way.before, &way.along))?;
    Ok(way)
}

/// There is no guest that would go.
fn is_halted(vm: &Object) -> bool {
    vm.text("power_state") == "Halted"
}

/// The disks of a VM: VBDs with their VDIs. Media stay where they are.
fn disks(call: &Call, vm: &str) -> Result<Vec<(String, Arc<Object>)>, ApiError> {
    let db = &call.part.db;
    vbds_of(db, vm).map(|vbd| Ok((vbd.reference.clone(), db.get("VDI", vbd.text("VDI"))?))).collect()
}

fn way(call: &Call, wish: &Wish, host: &Object) -> Result<Way, ApiError> {
    let db = &call.part.db;
    let own = this_host(db);
    let requires = |sr: &str| ApiError::new("VM_REQUIRES_SR", [&wish.vm.reference, sr]);
    let is_of_both = |sr: &Object| {
        let has = |host: &str| live::has_sr(db, host, &sr.reference);
        sr.bool("shared") && has(&own) && has(&host.reference)
    };
    let is_alive = !is_halted(&wish.vm);
    let (mut way, mut stopping) = (Way::default(), Vec::new());
    for (vbd, vdi) in disks(call, &wish.vm.reference)? {
        let from = db.get("SR", vdi.text("SR"))?;
        let Some(to) = wish.sr_of(&vdi.reference).filter(|to| *to != from.reference) else { continue };
        let to = db.get("SR", to)?;
        if is_of_both(&to) {
            way.before.insert(vdi.reference.clone(), to.reference.clone());
            continue;
        }
        if !live::has_sr(db, &host.reference, &to.reference) {
            return Err(requires(&to.reference));
        }
        if !is_of_both(&from) {
            if is_alive && goes_along(call, wish, &vdi)? {
                way.along.insert(vdi.reference.clone(), to.reference.clone());
                continue;
            }
            stopping.push(vdi);
        }
        way.after.insert(vbd, to.reference.clone());
    }
    if !stopping.is_empty() {
        let stop = stop(call, &stopping, &is_of_both).ok_or_else(|| no_stop(&stopping, host))?;
        way.before.extend(stopping.iter().map(|vdi| (vdi.reference.clone(), stop.clone())));
    }
    Ok(way)
}

/// Whether a disk can be mirrored to the other host while its guest goes: its snapshots could not follow.
///
/// # Errors
/// What forbids that it moves.
fn goes_along(call: &Call, wish: &Wish, vdi: &Object) -> Result<bool, ApiError> {
    let db = &call.part.db;
    disk_may_go(db, wish, &vdi.reference, std::slice::from_ref(&wish.vm.reference))?;
    Ok(db.find("VDI", "snapshot_of", &vdi.reference).is_empty())
}

/// The SR of both hosts with most room, for disks that go from an SR of one to an SR of the other.
fn stop(call: &Call, disks: &[Arc<Object>], is_of_both: &dyn Fn(&Object) -> bool) -> Option<String> {
    let wanted: i64 = disks.iter().map(|vdi| vdi.int("physical_utilisation")).sum();
    let free = |sr: &Object| sr.int("physical_size").saturating_sub(sr.int("physical_utilisation"));
    let all = call.part.db.all("SR").into_iter();
    let fit = all.filter(|sr| sr.text("content_type") != "iso" && sr.text("type") != "iso" && is_of_both(sr));
    let fit = fit.filter(|sr| free(sr) >= wanted).max_by_key(|sr| free(sr));
    fit.map(|sr| sr.reference.clone())
}

fn no_stop(disks: &[Arc<Object>], host: &Object) -> ApiError {
    let names: Vec<&str> = disks.iter().map(|vdi| vdi.text("name_label")).collect();
    let bytes: i64 = disks.iter().map(|vdi| vdi.int("physical_utilisation")).sum();
    let why = format!(
        "the disks {} go from SRs that only this host has to SRs that only host {} has: those of a halted VM, and with \
         snapshots, go so by way of a shared SR that both have attached, and none has {bytes} bytes free; destroy the \
         snapshots of a VM that runs, or attach one",
        names.join(", "),
        host.text("name_label")
    );
    ApiError::new("OPERATION_NOT_ALLOWED", [why])
}

/// `VM.migrate_send` to another host of the pool.
///
/// # Errors
/// Those of [`check`], of `VDI.pool_migrate`, of `VM.pool_migrate`: the guest runs on here then, on its own SRs unless
/// the host's log says otherwise. `VM_MIGRATE_FAILED`: it runs there, and disks are still on their way.
pub(super) fn send(
    call: &Call,
    wish: &Wish,
    host: &Object,
    options: &BTreeMap<String, String>,
) -> Result<String, ApiError> {
    let vm = &wish.vm.reference;
    let way = check(call, wish, host, options)?;
    let parts = [!way.before.is_empty(), !is_halted(&wish.vm), !way.after.is_empty()];
    let parts = parts.map(|is_there| f64::from(u8::from(is_there)));
    let whole = parts.iter().sum::<f64>().max(1.0);
    let share = |at: usize| {
        let from: f64 = parts[..at].iter().sum();
        let progress =
            Share { of: Arc::clone(&call.progress), from: from / whole, to: (from + parts[at]) / whole };
        call.with(Arc::new(progress))
    };
    let homes: BTreeMap<String, String> =
        disks(call, vm)?.into_iter().map(|(vbd, vdi)| (vbd, vdi.text("SR").to_owned())).collect();
    let gone = go_ahead(&share(0), vm, &way).and_then(|()| match is_halted(&wish.vm) {
        true => Ok(()),
        false => {
            let along = live::Along { disks: way.along.clone(), rate: wish.rate };
            live::pool_migrate(&share(1), vm, &host.reference, options, &along)
        }
    });
    if let Err(error) = gone {
        bring_back(call, vm, &homes);
        return Err(error);
    }
    if !way.after.is_empty() {
        follow(&share(2), vm, host, &way).map_err(|error| {
            let why = format!(
                "the VM is host {}'s, and disks of it are not where they were to go yet: {error}; \
                 'xe vdi-pool-migrate' moves them",
                host.text("name_label")
            );
            ApiError::new(
                "VM_MIGRATE_FAILED",
                [vm.clone(), this_host(&call.part.db), host.reference.clone(), why],
            )
        })?;
    }
    Ok(vm.clone())
}

/// Moves VDIs of a VM within this host.
fn relocate(call: &Call, vm: &str, moves: impl Fn() -> Result<Moves, ApiError>) -> Result<(), ApiError> {
    let vms = call.to(&call.part.vms);
    let (_running, ()) = Running::begin(&vms, "VM", vm, OP, |_, _| Ok(()))?;
    move_all(call, &moves()?)
}

fn go_ahead(call: &Call, vm: &str, way: &Way) -> Result<(), ApiError> {
    if way.before.is_empty() {
        return Ok(());
    }
    relocate(call, vm, || moves_of(call, way.before.clone()))
}

/// Brings disks back to where they were, of a VM that did not go.
fn bring_back(call: &Call, vm: &str, homes: &BTreeMap<String, String>) {
    let own = this_host(&call.part.db);
    let is_here = |vm: &Object| vm.is_null("resident_on") || vm.text("resident_on") == own;
    if !call.part.db.get("VM", vm).is_ok_and(|vm| is_here(&vm)) {
        return;
    }
    // What was cancelled is brought back all the same.
    let call = call.with(Arc::new(Unwatched::default()));
    let back = || {
        let away = disks(&call, vm)?.into_iter().filter_map(|(vbd, vdi)| {
            homes
                .get(&vbd)
                .filter(|home| *home != vdi.text("SR"))
                .map(|home| (vdi.reference.clone(), home.clone()))
        });
        moves_of(&call, away)
    };
    if let Err(error) = relocate(&call, vm, back) {
        tracing::warn!(vm, %error, "disks of a VM that was to move stay on the SRs that they went ahead to");
    }
}

/// The other host, which has the VM, moves disks on.
fn follow(call: &Call, vm: &str, host: &Object, way: &Way) -> Result<(), ApiError> {
    call.part.pool.catch_up();
    let (pool, mut map) = (&call.part.pool, BTreeMap::new());
    for (vbd, vdi) in disks(call, vm)? {
        let to = way.after.get(&vbd).map_or(vdi.text("SR"), String::as_str);
        map.insert(vdi.reference.clone(), to.to_owned());
    }
    if is_halted(&*call.part.db.get("VM", vm)?) {
        let is_away =
            |vdi: &str, to: &str| call.part.db.get("VDI", vdi).is_ok_and(|vdi| vdi.text("SR") != to);
        for (vdi, to) in map.into_iter().filter(|(vdi, to)| is_away(vdi, to)) {
            let args = Args(vec![vdi.into(), to.into(), Value::string_map::<String, String>([])]);
            pool.have_done(&*call.progress, &host.reference, "VDI.pool_migrate", &args)?;
        }
        return Ok(());
    }
    let dest = Value::string_map([("host", host.reference.as_str())]);
    let none = || Value::string_map::<String, String>([]);
    let args = Args(vec![vm.into(), dest, Value::Bool(true), Value::string_map(map), none(), none()]);
    pool.have_done(&*call.progress, &host.reference, "VM.migrate_send", &args).map(drop)
}
