//! VDIs that hold a database: one on each SR that has a copy of it.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};

use super::database_uuid::{TYPE, new_uuid};
use super::{Call, vdi};

/// Whether an SR can have such a VDI.
///
/// # Errors
/// `SR_NOT_ATTACHED`, `SR_HAS_NO_PBDS`, `SR_OPERATION_NOT_SUPPORTED`.
pub(crate) fn assert_supports(call: &Call, sr: &str) -> Result<(), ApiError> {
    let attached = call.part.attached(sr)?;
    attached.needs("VDI_CREATE")?;
    // A driver that chooses the UUIDs of its images is none of ours.
    attached.is_collected()
}

/// Makes one of `len` bytes for a pool's database; its reference.
///
/// # Errors
/// Those of `VDI.create`.
pub(crate) fn create(call: &Call, sr: &str, len: u64, pool: &str) -> Result<String, ApiError> {
    let record = BTreeMap::from([
        ("SR".to_owned(), Value::string(sr)),
        ("virtual_size".to_owned(), Value::Int(i64::try_from(len).unwrap_or(i64::MAX))),
        ("name_label".to_owned(), Value::string("Metadata for DR")),
        ("name_description".to_owned(), Value::string("The database of a pool, for its recovery elsewhere")),
        ("type".to_owned(), Value::string(TYPE)),
    ]);
    let more = vec![("metadata_of_pool", Value::string(pool))];
    vdi::create_as(call, &record, (new_uuid(), more), None)
}

/// Removes one.
///
/// # Errors
/// Those of `VDI.destroy`.
pub(crate) fn destroy(call: &Call, vdi: &str) -> Result<(), ApiError> {
    vdi::destroy(call, vdi)
}
