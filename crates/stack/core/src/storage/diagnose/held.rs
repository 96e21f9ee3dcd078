//! VDIs that count as in use by a VBD or an export that has no disk process: a start gives them up, unless their
//! storage hung then.

use tapio_model::{ApiError, Value};
use tapio_types::Access;
use uuid::Uuid;

use super::super::Call;
use super::super::activate::deactivate_if;
use super::Finding;
use crate::args::Args;

/// The disk that a holder must have: one of a VBD or of an export. A copy gives up what it holds itself.
fn disk_of(holder: &str) -> Option<Uuid> {
    let uuid = holder.strip_prefix("OpaqueRef:").or_else(|| holder.strip_prefix("nbd "))?;
    Uuid::parse_str(uuid).ok()
}

/// Whether a holder has nothing to hold the VDI with. One that is being plugged is noted as a disk before it holds it.
fn is_stale(call: &Call, holder: &str) -> bool {
    disk_of(holder).is_some_and(|disk| call.part.disks.of_vbd(disk).is_none())
}

fn holders(call: &Call, vdi: &str) -> Vec<(String, Access)> {
    let state = call.part.state();
    let of_vdi = state.holders.get(vdi).into_iter().flatten();
    of_vdi.map(|(holder, access)| (holder.clone(), *access)).collect()
}

pub(super) fn find(call: &Call, sr: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for vdi in call.part.db.find("VDI", "SR", sr) {
        for (holder, access) in holders(call, &vdi.reference) {
            // An operation that is under way may be between the two.
            let is_busy = call.part.operations.check_free("VDI", &vdi.reference).is_err();
            if !is_busy && is_stale(call, &holder) {
                let how = if access == Access::ReadWrite { "writing" } else { "reading" };
                let what = if holder.starts_with("nbd ") { "export" } else { "VBD" };
                let disk = disk_of(&holder).unwrap_or_default();
                let detail = format!("{what} {disk} counts as {how} it, and has no disk process");
                found.push(Finding::new("vdi-held", vdi.text("uuid"), detail));
            }
        }
    }
    found
}

/// `VDI.release`. Repeating it, after a kill too, finishes it: the record changes in one step, after the storage has
/// closed the image.
///
/// # Errors
/// `OPERATION_NOT_ALLOWED`: nothing is stale. `VDI_IN_USE`: a holder has a disk process again.
pub(super) fn release(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let vdi = args.text(0)?;
    call.part.db.get("VDI", vdi)?;
    let stale: Vec<String> = holders(call, vdi)
        .into_iter()
        .map(|(holder, _)| holder)
        .filter(|holder| is_stale(call, holder))
        .collect();
    if stale.is_empty() {
        let why = "no VBD or export without a disk process holds it: unplug the VBDs that use it";
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    for holder in stale {
        tracing::info!(vdi, holder, "a VDI is released that a VBD without a disk process held");
        deactivate_if(call, vdi, &holder, &|| {
            let refused = || ApiError::new("VDI_IN_USE", [vdi, "release"]);
            is_stale(call, &holder).then_some(()).ok_or_else(refused)
        })?;
    }
    Ok(Value::Void)
}

/// `host.sm_dp_destroy`: [`release`] of what one VBD or export holds.
///
/// # Errors
/// `HANDLE_INVALID`, `HOST_OFFLINE`; `INVALID_VALUE`: no VDI is held by that name; `VDI_IN_USE`: its disk has a
/// process.
pub(super) fn end_datapath(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (host, dp, allow_leak) = (args.text(0)?, args.text(1)?, args.bool(2)?);
    super::super::sr::check_host(call, host)?;
    if allow_leak {
        let why = "a VDI whose image may still be open stays in use; leave it out, and repeat the call";
        return Err(ApiError::new("VALUE_NOT_SUPPORTED", ["allow_leak", "true", why]));
    }
    let disk = Uuid::parse_str(dp).ok();
    let all = call.part.holders().into_iter();
    let of_dp: Vec<_> = all.filter(|(_, holder, _)| disk.is_some() && disk_of(holder) == disk).collect();
    if of_dp.is_empty() {
        let what =
            format!("{dp}: it is no UUID of a VBD or an export that holds a VDI; tapio doctor lists those");
        return Err(ApiError::new("INVALID_VALUE", ["dp".to_owned(), what]));
    }
    for (vdi, holder, _) in of_dp {
        let refused = || ApiError::new("VDI_IN_USE", [vdi.as_str(), "sm_dp_destroy"]);
        let is_free = || is_stale(call, &holder).then_some(()).ok_or_else(refused);
        // Said before anything waits for what holds it.
        is_free()?;
        tracing::info!(vdi, holder, "a datapath without a disk process is ended");
        deactivate_if(call, &vdi, &holder, &is_free)?;
    }
    Ok(Value::Void)
}
