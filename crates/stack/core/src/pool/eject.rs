//! A host leaves the pool.

use std::sync::atomic::Ordering;

use tapio_model::{ApiError, NULL_REF};

use super::{Access, Pool};
use crate::call::Call;
use crate::db::{Change, Object};
use crate::plan::steps::step;
use crate::storage;

/// The note of a host that leaves.
const LEAVING: &str = "pool/eject";

fn not_allowed(why: &str) -> ApiError {
    ApiError::new("OPERATION_NOT_ALLOWED", [why])
}

fn check(pool: &Pool, host: &str) -> Result<(), ApiError> {
    if pool.db.all("pool").iter().any(|pool| pool.bool("ha_enabled")) {
        return Err(ApiError::bare("HA_IS_ENABLED"));
    }
    if pool.db.all("pool").iter().any(|pool| pool.text("master") == host) {
        return Err(not_allowed(
            "the host decides for the pool: choose another first (pool-designate-new-master)",
        ));
    }
    let is_guest = |vm: &Object| vm.text("resident_on") == host && !vm.bool("is_control_domain");
    match pool.db.all("VM").iter().find(|vm| is_guest(vm)) {
        Some(vm) => Err(not_allowed(&format!("VM {} is resident on the host", vm.text("uuid")))),
        None => Ok(()),
    }
}

/// `pool.eject`, on the host that leaves: its SRs are detached, its records removed, and it starts again alone.
pub(super) fn eject(call: &Call<Pool>, host: &str) -> Result<(), ApiError> {
    let pool = &call.part;
    pool.member()?;
    pool.db.get("host", host)?;
    check(pool, host)?;
    if pool.db.own_host() != Some(host) {
        return Err(ApiError::new("CANNOT_CONTACT_HOST", [host]));
    }
    pool.db.change(|change| {
        change.put_note(LEAVING, host);
        Ok(())
    })?;
    step("pool-eject:noted");
    let detached = pool
        .db
        .find("PBD", "host", host)
        .iter()
        .try_for_each(|pbd| storage::unplug_pbd(&pool.storage, &pbd.reference));
    if let Err(error) = detached {
        pool.db.change(|change| {
            change.drop_note(LEAVING);
            Ok(())
        })?;
        return Err(error);
    }
    step("pool-eject:detached");
    leave(pool, host)
}

fn leave(pool: &Pool, host: &str) -> Result<(), ApiError> {
    pool.db.change(|change| {
        change.drop_note(LEAVING);
        remove_records(change, host)
    })?;
    step("pool-eject:removed");
    Access::forget(&pool.state_dir).map_err(ApiError::internal)?;
    tracing::info!("this host has left its pool, and starts again alone");
    pool.link()?.restart();
    Ok(())
}

/// `host.destroy`: forgets a host that does not live any more.
pub(super) fn destroy(call: &Call<Pool>, host: &str) -> Result<(), ApiError> {
    let pool = &call.part;
    pool.member()?;
    pool.db.get("host", host)?;
    if pool.is_live(host) {
        return Err(ApiError::new("HOST_IS_LIVE", [host]));
    }
    let is_guest = |vm: &Object| vm.text("resident_on") == host && !vm.bool("is_control_domain");
    let guests: Vec<_> = pool.db.all("VM").into_iter().filter(|vm| is_guest(vm)).collect();
    if !guests.is_empty() {
        let mut params = vec![host.to_owned()];
        params.extend(guests.iter().map(|vm| vm.reference.clone()));
        return Err(ApiError::new("HOST_HAS_RESIDENT_VMS", params));
    }
    pool.db.change(|change| remove_records(change, host))
}

/// Removes a host and what only it has.
fn remove_records(change: &mut Change<'_>, host: &str) -> Result<(), ApiError> {
    let record = change.get("host", host)?;
    for pbd in change.find("PBD", "host", host) {
        let sr = pbd.text("SR").to_owned();
        if change.find("PBD", "SR", &sr).len() > 1 {
            storage::forget_pbd(change, &pbd.reference)?;
        } else {
            storage::forget_sr(change, &sr)?;
        }
    }
    for class in ["host_cpu", "PIF"] {
        for object in change.find(class, "host", host) {
            change.destroy(class, &object.reference)?;
        }
    }
    // A VM that would rather run there runs anywhere.
    for vm in change.find("VM", "affinity", host) {
        change.set("VM", &vm.reference, "affinity", NULL_REF)?;
    }
    for vm in change.find("VM", "resident_on", host) {
        for class in ["VBD", "VIF", "console"] {
            for object in change.find(class, "VM", &vm.reference) {
                change.destroy(class, &object.reference)?;
            }
        }
        change.destroy("VM", &vm.reference)?;
    }
    if change.get("host_metrics", record.text("metrics")).is_ok() {
        change.destroy("host_metrics", record.text("metrics"))?;
    }
    change.destroy("host", host)
}

impl Pool {
    /// Goes on with leaving the pool where a daemon was killed in the middle of it. Comes when SRs are in order.
    ///
    /// # Errors
    /// The store's, the storage's.
    pub(crate) fn recover(&self) -> Result<(), ApiError> {
        let Some((_, host)) = self.db.notes(LEAVING).into_iter().next() else {
            self.is_started.store(true, Ordering::Release);
            return Ok(());
        };
        tracing::info!("leaving the pool was interrupted, and goes on");
        for pbd in self.db.find("PBD", "host", &host) {
            storage::unplug_pbd(&self.storage, &pbd.reference)?;
        }
        leave(self, &host)
    }
}
