//! VMs as XVA archives: sent to clients, and made of what clients send.
//!
//! ```text
//!   export   VM held ── its VDIs held and opened ── records ── pieces of disk after disk ── let go
//!   import   records ── VDI after VDI, each whole before it has a record ── in one change: VMs, VBDs, VIFs
//! ```
//!
//! So an import that fails or is killed leaves no VM, and VDIs that nothing leads to, which are removed at once or by
//! the next start (`machines/disk/` notes).

pub(crate) mod client;
mod decoder;
mod export;
mod import;
mod metadata;
mod part;
mod plan;
mod records;
mod write;

pub(crate) use export::export;
pub(crate) use import::import;
pub(crate) use metadata::{export as export_metadata, import as import_metadata, recover};

use tapio_model::ApiError;
use tapio_xva::XvaError;

use super::{Call, lookup};

/// The reference of what a client names by reference or UUID.
fn reference(call: &Call, class: &str, name: &str) -> Result<String, ApiError> {
    let db = &call.part.db;
    let found = if name.starts_with("OpaqueRef:") { db.get(class, name) } else { db.by_uuid(class, name) };
    found.map(|object| object.reference.clone())
}

/// An archive's error as clients know it.
fn told(call: &Call, error: XvaError) -> ApiError {
    match error {
        XvaError::Early => ApiError::bare("IMPORT_ERROR_PREMATURE_EOF"),
        XvaError::Unexpected { expected, found } => {
            ApiError::new("IMPORT_ERROR_UNEXPECTED_FILE", [expected, found])
        }
        XvaError::Damaged { .. } => {
            tracing::warn!(%error, "an import is refused");
            ApiError::bare("IMPORT_ERROR_SOME_CHECKSUMS_FAILED")
        }
        XvaError::Missing { id } => ApiError::new("IMPORT_ERROR_FAILED_TO_FIND_OBJECT", [id]),
        XvaError::Incompatible(why) => {
            tracing::warn!(why, "an import is refused");
            ApiError::bare("IMPORT_INCOMPATIBLE_VERSION")
        }
        XvaError::Wrong(why) => ApiError::new("IMPORT_ERROR", [why]),
        XvaError::Io(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => cancelled(call),
        XvaError::Io(error) => ApiError::internal(format!("the connection of an import: {error}")),
    }
}

fn cancelled(call: &Call) -> ApiError {
    ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()])
}
