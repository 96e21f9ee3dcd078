//! Errors as clients see them. Codes and the meaning of their first parameters are XenAPI's; where a cause is known,
//! it follows as one more parameter.

use std::fmt;

use tapio_types::ApiError;
use uuid::Uuid;

/// The reference of an object with this UUID.
fn reference(uuid: Uuid) -> String {
    format!("OpaqueRef:{uuid}")
}

/// The VM is in another state than the operation needs.
pub(crate) fn bad_power_state(vm: Uuid, expected: &str, actual: &str) -> ApiError {
    ApiError::new("VM_BAD_POWER_STATE", [reference(vm), expected.to_owned(), actual.to_owned()])
}

/// The guest has nothing that could do it.
pub(crate) fn lacks_feature(vm: Uuid, cause: impl fmt::Display) -> ApiError {
    ApiError::new("VM_LACKS_FEATURE", [reference(vm), cause.to_string()])
}

/// This cannot be done to the VM as it is.
pub(crate) fn not_allowed(vm: Uuid, cause: impl fmt::Display) -> ApiError {
    ApiError::new("OPERATION_NOT_ALLOWED", [format!("VM {vm}: {cause}")])
}

/// The guest's file systems could not be frozen: `NOT_SUPPORTED`, `FAILED`, `TIMEOUT`, `PLUGIN_DEOS_NOT_RESPOND`.
pub(crate) fn quiesce(what: &str, vm: Uuid, cause: impl fmt::Display) -> ApiError {
    ApiError::new(format!("VM_SNAPSHOT_WITH_QUIESCE_{what}"), [reference(vm), cause.to_string()])
}

/// The guest keeps the medium of a drive in it.
pub(crate) fn tray_locked(vbd: Uuid, cause: impl fmt::Display) -> ApiError {
    ApiError::new("VBD_TRAY_LOCKED", [reference(vbd), cause.to_string()])
}

/// The guest did not take the disk in time.
pub(crate) fn attach_timeout(vbd: Uuid, cause: impl fmt::Display) -> ApiError {
    ApiError::new("DEVICE_ATTACH_TIMEOUT", ["VBD".to_owned(), reference(vbd), cause.to_string()])
}

/// The guest did not let go of the disk in time.
pub(crate) fn detach_timeout(vbd: Uuid, cause: impl fmt::Display) -> ApiError {
    ApiError::new("DEVICE_DETACH_TIMEOUT", ["VBD".to_owned(), reference(vbd), cause.to_string()])
}

/// The guest keeps the disk.
pub(crate) fn detach_rejected(vbd: Uuid, cause: impl fmt::Display) -> ApiError {
    ApiError::new("DEVICE_DETACH_REJECTED", ["VBD".to_owned(), reference(vbd), cause.to_string()])
}

/// There is a disk in this place already.
pub(crate) fn already_there(position: u8) -> ApiError {
    ApiError::new("DEVICE_ALREADY_EXISTS", [position.to_string()])
}

/// A network interface was not taken, or given up, as `what` says: `ATTACH_TIMEOUT`, `DETACH_TIMEOUT` or
/// `DETACH_REJECTED`.
pub(crate) fn vif(what: &str, vif: Option<Uuid>, cause: impl fmt::Display) -> ApiError {
    let named = vif.map_or_else(String::new, reference);
    ApiError::new(format!("DEVICE_{what}"), ["VIF".to_owned(), named, cause.to_string()])
}

/// The driver has no such place for a network interface.
pub(crate) fn invalid_device(position: u8, cause: impl fmt::Display) -> ApiError {
    ApiError::new("INVALID_DEVICE", [position.to_string(), cause.to_string()])
}

/// The driver has no such place.
pub(crate) fn illegal_device(vbd: Uuid, position: u8, cause: impl fmt::Display) -> ApiError {
    ApiError::new("ILLEGAL_VBD_DEVICE", [reference(vbd), position.to_string(), cause.to_string()])
}

/// More viewers of screens than there may be.
pub(crate) fn too_many_viewers(vm: Uuid, of: &str, most: usize) -> ApiError {
    let why =
        format!("VM {}: {most} viewers {of} are connected, as many as may be; close one", reference(vm));
    ApiError::new("OPERATION_NOT_ALLOWED", [why])
}

/// The guest did not end in time.
pub(crate) fn shutdown_timeout(vm: Uuid, waited: std::time::Duration) -> ApiError {
    ApiError::new("VM_SHUTDOWN_TIMEOUT", [reference(vm), waited.as_secs_f64().to_string()])
}

/// An operation on the VM failed: which one, and the cause.
pub(crate) fn failed(vm: Uuid, what: impl fmt::Display, cause: impl fmt::Display) -> ApiError {
    ApiError::internal(format!("VM {vm}: {what}: {cause}"))
}
