//! What forbids that a guest goes to another host of its pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF};

use super::super::Call;
use crate::basics::this_host;
use crate::db::{Db, Object};
use crate::pool::version;
use crate::vms::allowed::{bad_power_state, refuse_special};
use crate::vms::arrival;

/// Facts about processors that a guest has seen.
const PROCESSOR: [&str; 5] = ["vendor", "family", "model", "features", "flags"];

/// Whether a guest that runs here can go to a host, as far as is known here. `moved` are VDIs that go to other SRs
/// before it does, or, those in `along`, with it, with these SRs.
///
/// # Errors
/// `VM_IS_TEMPLATE`, `OPERATION_NOT_ALLOWED`, `VM_BAD_POWER_STATE`, `HOST_OFFLINE`, `HOST_DISABLED`,
/// `VM_HOST_INCOMPATIBLE_VERSION_MIGRATE`, `VM_LACKS_FEATURE`, `VM_REQUIRES_SR`, `VM_INCOMPATIBLE_WITH_THIS_HOST`,
/// those of [`address_on`].
pub(in super::super) fn check(
    call: &Call,
    vm: &Arc<Object>,
    host: &Object,
    force: bool,
    network: &str,
    (moved, along): (&BTreeMap<String, String>, &BTreeMap<String, String>),
) -> Result<(), ApiError> {
    let db = &call.part.db;
    refuse_special(vm)?;
    if vm.text("power_state") != "Running" {
        return Err(bad_power_state(vm, "running"));
    }
    let own = this_host(db);
    if vm.text("resident_on") != own {
        return Err(ApiError::new("HOST_OFFLINE", [vm.text("resident_on")]));
    }
    if host.reference == own {
        return Ok(());
    }
    if !call.part.pool.is_live(&host.reference) {
        return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
    }
    if !host.bool("enabled") {
        return Err(ApiError::new("HOST_DISABLED", [&host.reference]));
    }
    version::refuse_older(&vm.reference, host)?;
    address_on(&call.part.db, &host.reference, network)?;
    let vms = call.to(&call.part.vms);
    let driver = arrival::driver_of(&vms, vm)?;
    driver.check_migrate(vm.uuid()?)?;
    for vbd in db.find("VBD", "VM", &vm.reference).iter().filter(|vbd| !vbd.bool("empty")) {
        vms.part.disks.check_not_paused(vbd.uuid()?)?;
        let vdi = db.get("VDI", vbd.text("VDI"))?;
        let to = along.get(&vdi.reference).or_else(|| moved.get(&vdi.reference));
        let sr = db.get("SR", to.map_or(vdi.text("SR"), String::as_str))?;
        let is_there = has_sr(db, &host.reference, &sr.reference);
        // Only the hosts of a shared SR keep off each other's disks. One that goes along is another one there.
        let is_kept = sr.bool("shared")
            || along.contains_key(&vdi.reference)
            || vbd.text("mode") == "RO"
            || vbd.text("type") == "CD";
        if !is_there || !is_kept {
            return Err(ApiError::new("VM_REQUIRES_SR", [&vm.reference, &sr.reference]));
        }
    }
    let is_native = driver.made_as(vm.uuid()?)?.get("accel").is_some_and(|accel| accel == "kvm");
    let (ours, theirs) = (db.get("host", &own)?.map("cpu_info"), host.map("cpu_info"));
    match PROCESSOR.iter().find(|key| ours.get(**key) != theirs.get(**key)) {
        Some(key) if is_native && !force => {
            let of = |cpu: &BTreeMap<String, String>| cpu.get(*key).cloned().unwrap_or_default();
            let why = format!(
                "the processors' {key} is {} here and {} there; 'force' moves it all the same, and its guest may fail",
                of(&ours),
                of(&theirs)
            );
            let params = [vm.reference.clone(), host.reference.clone(), why];
            Err(ApiError::new("VM_INCOMPATIBLE_WITH_THIS_HOST", params))
        }
        _ => Ok(()),
    }
}

/// Whether a host has an SR attached.
pub(in super::super) fn has_sr(db: &Db, host: &str, sr: &str) -> bool {
    let pbds = db.find("PBD", "SR", sr);
    pbds.iter().any(|pbd| pbd.text("host") == host && pbd.bool("currently_attached"))
}

/// The network that options name; none: an empty one.
pub(in super::super) fn network_of(options: &BTreeMap<String, String>) -> &str {
    options.get("network").map(String::as_str).unwrap_or_default()
}

/// The address of a host on a network over which memory is to be sent; none if none is named: the host's own.
///
/// # Errors
/// `HANDLE_INVALID`; `PIF_NOT_PRESENT`, `REQUIRED_PIF_IS_UNPLUGGED`, `INTERFACE_HAS_NO_IP`.
pub(super) fn address_on(db: &Db, host: &str, network: &str) -> Result<Option<String>, ApiError> {
    if network.is_empty() || network == NULL_REF {
        return Ok(None);
    }
    db.get("network", network)?;
    let pifs = db.find("PIF", "network", network);
    let pif = pifs.iter().find(|pif| pif.text("host") == host);
    let pif = pif.ok_or_else(|| ApiError::new("PIF_NOT_PRESENT", [host, network]))?;
    if !pif.bool("currently_attached") {
        return Err(ApiError::new("REQUIRED_PIF_IS_UNPLUGGED", [&pif.reference]));
    }
    match pif.text("IP") {
        "" => Err(ApiError::new("INTERFACE_HAS_NO_IP", [&pif.reference])),
        address => Ok(Some(address.to_owned())),
    }
}
