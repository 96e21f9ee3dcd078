//! UUIDs of VDIs that hold a database: they begin as no other's.
//!
//! So they say what they are on SRs that keep nothing of a VDI but its image: a host that has never known the VDI gives
//! its record the type `metadata`.

use uuid::Uuid;

/// The first bytes: "tapiod", then version 8 (RFC 9562, custom), then 'b'.
const PREFIX: [u8; 8] = *b"tapiod\x8db";

/// `VDI.type`.
pub(super) const TYPE: &str = "metadata";

/// Whether a VDI of this UUID holds a database.
pub(super) fn is_one(uuid: Uuid) -> bool {
    uuid.as_bytes().starts_with(&PREFIX)
}

/// One of these.
pub(super) fn new_uuid() -> Uuid {
    let mut bytes = *Uuid::new_v4().as_bytes();
    bytes[..PREFIX.len()].copy_from_slice(&PREFIX);
    Uuid::from_bytes(bytes)
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
