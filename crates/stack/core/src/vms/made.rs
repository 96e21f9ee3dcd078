//! VDIs that were made for a VM and that nothing leads to: clones of disks, memory images.

use tapio_model::{ApiError, Value};

use super::{Call, lookup};
use crate::db::Change;
use crate::storage;
use crate::storage::vdi::made_note;

/// Removes a VDI that was made for a VM, if nothing leads to it, and its note.
///
/// # Errors
/// Those of `VDI.destroy`, the store's.
pub(super) fn remove_unused(call: &Call, vdi: &str) -> Result<(), ApiError> {
    let db = &call.part.db;
    let is_unused = db.find("VBD", "VDI", vdi).is_empty() && db.find("VM", "suspend_VDI", vdi).is_empty();
    if db.get("VDI", vdi).is_ok() && is_unused {
        storage::vdi::destroy(&lookup::to_storage(call), vdi)?;
    }
    db.change(|change| {
        change.drop_note(made_note(vdi));
        Ok(())
    })
}

/// Removes a memory image that nothing leads to. The note of one that stays has the next start try again.
pub(super) fn discard(call: &Call, vdi: &str) {
    if let Err(error) = remove_unused(call, vdi) {
        tracing::warn!(vdi, %error, "a memory image that no VM needs stays until the next start");
    }
}

/// A VM does not lead to its memory image any more; the image, which is to be [`discard`]ed then.
///
/// # Errors
/// The store's.
pub(super) fn leave_image(change: &mut Change<'_>, vm: &str) -> Result<Option<String>, ApiError> {
    let image = change.get("VM", vm)?.text("suspend_VDI").to_owned();
    change.set("VM", vm, "suspend_VDI", Value::string(tapio_model::NULL_REF))?;
    // A client may have named any VDI when it made the VM.
    if change.get("VDI", &image).is_ok_and(|vdi| vdi.text("type") == "suspend") {
        change.put_note(made_note(&image), vm);
        return Ok(Some(image));
    }
    Ok(None)
}
