//! VDIs that hold a database: one on each SR that has a copy of it.
//!
//! Their UUIDs begin as no other's, and say so on SRs that keep nothing of a VDI but its image: a host that has never
//! known the VDI gives its record the type `metadata`.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};
use uuid::Uuid;

use super::{Call, vdi};

/// The first bytes: "tapiod", then version 8 (RFC 9562, custom), then 'b'.
const PREFIX: [u8; 8] = *b"tapiod\x8db";

/// `VDI.type`.
pub(super) const TYPE: &str = "metadata";

/// Whether a VDI of this UUID holds a database.
pub(super) fn is_one(uuid: Uuid) -> bool {
    uuid.as_bytes().starts_with(&PREFIX)
}

fn new_uuid() -> Uuid {
    let mut bytes = *Uuid::new_v4().as_bytes();
    bytes[..PREFIX.len()].copy_from_slice(&PREFIX);
    Uuid::from_bytes(bytes)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_uuid_is_one_and_is_told_from_others() {
        let uuid = new_uuid();
        assert!(is_one(uuid) && !is_one(Uuid::new_v4()));
        assert_eq!(uuid.get_version_num(), 8);
        assert_eq!(uuid.get_variant(), uuid::Variant::RFC4122);
        assert_ne!(uuid, new_uuid());
    }
}
