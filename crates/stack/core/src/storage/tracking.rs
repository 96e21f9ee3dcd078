//! What can be done with a VDI as far as the tracking of its changed blocks goes.

use tapio_model::ApiError;

use crate::db::Object;

/// `VDI.type` of one whose data are gone.
pub(super) const METADATA: &str = "cbt_metadata";

/// Refuses what needs the data of a VDI whose data are gone.
///
/// # Errors
/// `VDI_INCOMPATIBLE_TYPE`.
pub(crate) fn has_data(vdi: &Object) -> Result<(), ApiError> {
    if vdi.text("type") == METADATA {
        return Err(ApiError::new("VDI_INCOMPATIBLE_TYPE", [vdi.reference.as_str(), METADATA]));
    }
    Ok(())
}

/// Whether tracking can be switched on or off for this VDI.
///
/// # Errors
/// Why not.
pub(super) fn is_trackable(vdi: &Object) -> Result<(), ApiError> {
    let kind = vdi.text("type");
    if !matches!(kind, "user" | "system") {
        return Err(ApiError::new("VDI_INCOMPATIBLE_TYPE", [vdi.reference.as_str(), kind]));
    }
    if vdi.bool("is_a_snapshot") {
        let why = format!("VDI is a snapshot: {}", vdi.reference);
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    if vdi.text("on_boot") == "reset" {
        return Err(ApiError::bare("VDI_ON_BOOT_MODE_INCOMPATIBLE_WITH_OPERATION"));
    }
    Ok(())
}

/// Whether the data of this VDI can go while its log stays.
///
/// # Errors
/// Why not.
pub(super) fn is_reducible(vdi: &Object) -> Result<(), ApiError> {
    has_data(vdi)?;
    if !vdi.bool("is_a_snapshot") {
        let why = format!("VDI is not a snapshot: {}", vdi.reference);
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    is_tracked(vdi)
}

/// Whether changed blocks of this VDI are tracked.
///
/// # Errors
/// `VDI_NO_CBT_METADATA`.
pub(super) fn is_tracked(vdi: &Object) -> Result<(), ApiError> {
    if vdi.bool("cbt_enabled") {
        return Ok(());
    }
    Err(ApiError::new("VDI_NO_CBT_METADATA", [vdi.reference.as_str()]))
}
