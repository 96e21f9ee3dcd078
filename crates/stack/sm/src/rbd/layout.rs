//! How things in the namespace of an SR are called, and what is kept of them.

use tapio_rbd::{Image, RbdError};
use tapio_types::ApiError;
use uuid::Uuid;

use crate::errors;

/// Begins the name of what is left of a destroyed VDI.
pub(super) const BASE: &str = "base-";
/// Begins the name of the snapshot that a clone begins at.
pub(super) const CLONE: &str = "clone-";
/// The key of an image's metadata that says that its changed blocks are asked for.
pub(super) const TRACKED: &str = "tapio.cbt";
/// Begins the key of an image's metadata about one of its snapshots.
const ABOUT: &str = "tapio.snapshot.";
/// The largest disk: sizes are 64-bit numbers with a sign to clients.
pub(super) const LEN_MAX: u64 = i64::MAX.cast_unsigned() / 2;

/// A UUID as it is written in names: nothing else names a VDI.
pub(super) fn plain_uuid(name: &str) -> Option<Uuid> {
    let uuid = Uuid::try_parse(name).ok()?;
    (uuid.to_string() == name).then_some(uuid)
}

/// The size that an image gets which shall have at least `bytes`.
///
/// # Errors
/// 79: none, or more than there can be.
pub(super) fn rounded(bytes: u64) -> Result<u64, ApiError> {
    match bytes.checked_next_multiple_of(4096) {
        Some(size) if bytes > 0 && size <= LEN_MAX => Ok(size),
        _ => Err(errors::fail(79, format_args!("{bytes} bytes: 1 to {LEN_MAX} bytes are possible"))),
    }
}

/// Where a VDI is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// An image of its name.
    Image,
    /// A snapshot of its name, of this image.
    SnapshotOf(String),
}

/// What is kept of a snapshot that is a VDI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct About {
    /// Changed blocks of the VDI were asked for when it was taken.
    pub(super) is_tracked: bool,
    /// Its data are of no use any more.
    pub(super) is_metadata: bool,
}

impl About {
    fn text(self) -> String {
        let words = [(self.is_tracked, "cbt"), (self.is_metadata, "metadata")];
        words.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect::<Vec<_>>().join(" ")
    }

    fn parse(text: &str) -> Self {
        let has = |wanted| text.split(' ').any(|word| word == wanted);
        Self { is_tracked: has("cbt"), is_metadata: has("metadata") }
    }

    /// Of a snapshot.
    pub(super) fn read(image: &Image, snapshot: Uuid) -> Result<Self, RbdError> {
        let text = image.metadata(&format!("{ABOUT}{snapshot}"))?;
        Ok(text.map_or_else(Self::default, |text| Self::parse(&text)))
    }

    /// Keeps it.
    pub(super) fn write(self, image: &Image, snapshot: Uuid) -> Result<(), RbdError> {
        image.set_metadata(&format!("{ABOUT}{snapshot}"), &self.text())
    }

    /// Of a snapshot that goes.
    pub(super) fn forget(image: &Image, snapshot: Uuid) -> Result<(), RbdError> {
        image.remove_metadata(&format!("{ABOUT}{snapshot}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_uuids_name_vdis() {
        let uuid = Uuid::from_u128(5);
        assert_eq!(plain_uuid(&uuid.to_string()), Some(uuid));
        for name in ["", "disk", "{00000000-0000-0000-0000-000000000005}", "00000000000000000000000000000005"]
        {
            assert_eq!(plain_uuid(name), None, "{name}");
        }
        assert_eq!(plain_uuid(&Uuid::from_u128(0xabc).to_string().to_uppercase()), None);
    }

    #[test]
    fn what_is_kept_of_a_snapshot_is_words_and_others_are_ignored() {
        for about in [About::default(), About { is_tracked: true, is_metadata: true }] {
            assert_eq!(About::parse(&about.text()), about);
        }
        assert_eq!(About::parse("  cbt later"), About { is_tracked: true, is_metadata: false });
    }

    #[test]
    fn sizes_are_whole_pages_in_bounds() {
        assert_eq!(rounded(1).unwrap(), 4096);
        assert_eq!(rounded(8192).unwrap(), 8192);
        for bytes in [0, u64::MAX, LEN_MAX + 1] {
            assert_eq!(rounded(bytes).unwrap_err().code, "SR_BACKEND_FAILURE_79");
        }
    }
}
