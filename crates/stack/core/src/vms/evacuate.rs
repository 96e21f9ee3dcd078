//! The VMs of a host, and their end: for a host that is evacuated, or ends.

use std::sync::Arc;

use tapio_model::ApiError;

use super::allowed::bad_power_state;
use super::running::could_begin;
use super::{Call, Vms, power};
use crate::db::Object;

/// The VMs that run on a host, or are paused.
pub(crate) fn running_vms(vms: &Vms, host: &str) -> Vec<String> {
    let resident = vms.db.find("VM", "resident_on", host);
    let runs = |vm: &&Arc<Object>| !vm.bool("is_control_domain") && vm.text("power_state") != "Halted";
    resident.iter().filter(runs).map(|vm| vm.reference.clone()).collect()
}

/// Whether an operation could begin now on a VM that runs.
///
/// # Errors
/// `VM_BAD_POWER_STATE`, `OTHER_OPERATION_IN_PROGRESS`, `OPERATION_BLOCKED`.
pub(crate) fn could(call: &Call, vm: &Object, operation: &str) -> Result<(), ApiError> {
    match vm.text("power_state") {
        "Running" => could_begin(call, vm, operation),
        _ => Err(bad_power_state(vm, "Running")),
    }
}

/// Asks the guest of a VM to end, and waits until it has.
///
/// # Errors
/// Those of `VM.clean_shutdown`.
pub(crate) fn end(call: &Call, vm: &str) -> Result<(), ApiError> {
    power::shut_down_clean(call, vm)
}

/// Bytes of memory that a VM needs on a host.
///
/// # Errors
/// `INVALID_VALUE`.
pub(crate) fn memory(vm: &Object) -> Result<u64, ApiError> {
    Ok(power::spec(vm)?.memory)
}
