//! VBDs whose disks clients pause.

use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};

use super::allowed::refresh;
use super::paused::show;
use super::running::Running;
use super::vbd::live_vm;
use super::{Call, Handlers, Vms, lookup};
use crate::db::{Change, Object};

/// How long the requests in flight may take to end, and the images to be opened.
const TIMEOUT: Duration = Duration::from_secs(60);

/// [`show`] in a change of its own, with what may be done now.
///
/// # Errors
/// The store's.
pub(super) fn shown(vms: &Vms, vbd: &str, token: Option<&str>) -> Result<(), ApiError> {
    vms.db.change(|change| {
        let before = change.get("VBD", vbd)?;
        show(change, &before, token)?;
        refresh(change, "VBD", vbd)
    })
}

/// Registers the messages.
pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VBD.pause", |call, args| pause(call, args.text(0)?).map(Value::String));
    handlers
        .on("VBD.unpause", |call, args| unpause(call, args.text(0)?, args.text(1)?).map(|()| Value::Void));
}

/// Refuses a VBD without a disk in a VM that is there.
fn check(change: &mut Change<'_>, vbd: &Object) -> Result<uuid::Uuid, ApiError> {
    live_vm(change, vbd)?;
    if !vbd.bool("currently_attached") {
        return Err(ApiError::new("DEVICE_NOT_ATTACHED", [&vbd.reference]));
    }
    if vbd.bool("empty") {
        return Err(ApiError::new("VBD_IS_EMPTY", [&vbd.reference]));
    }
    vbd.uuid()
}

/// Pauses the disk of a VBD; answers the token.
///
/// # Errors
/// As `VBD.pause`.
pub(super) fn pause(call: &Call, reference: &str) -> Result<String, ApiError> {
    let (_running, uuid) = Running::begin(call, "VBD", reference, "pause", check)?;
    let paused = call.part.disks.pause_for_client(uuid, Instant::now() + TIMEOUT);
    // One that did not end its requests in time may be about to.
    shown(&call.part, reference, call.part.disks.pause_token(uuid).as_deref())?;
    paused
}

/// Lets it go on.
///
/// # Errors
/// As `VBD.unpause`.
pub(super) fn unpause(call: &Call, reference: &str, token: &str) -> Result<(), ApiError> {
    let (_running, uuid) = Running::begin(call, "VBD", reference, "unpause", check)?;
    call.part.disks.unpause(uuid, token, Instant::now() + TIMEOUT)?;
    shown(&call.part, reference, None)
}

/// Lets all disks of a VM go on that clients paused: its guest is about to end, and writes what it has. One that does
/// not is logged; the guest is waited for no longer than it would be anyway.
pub(super) fn unpause_all(call: &Call, vm: &Object) {
    for vbd in call.part.db.find("VBD", "VM", &vm.reference) {
        let Ok(uuid) = vbd.uuid() else { continue };
        if call.part.disks.pause_token(uuid).is_none() {
            continue;
        }
        let gone_on = call.part.disks.unpause(uuid, "", Instant::now() + TIMEOUT);
        match gone_on.and_then(|()| shown(&call.part, &vbd.reference, None)) {
            Ok(()) => lookup::tell(
                &call.part,
                "VBD_UNPAUSED",
                vm,
                &format!("The disk of VBD {uuid} was paused and goes on, because its VM is to end."),
            ),
            Err(error) => {
                tracing::warn!(vbd = %uuid, %error, "a paused disk of a VM that is to end does not go on");
            }
        }
    }
}
