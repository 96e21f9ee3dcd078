//! Where in the store rows lie that belong to no object, and who else writes there.

use uuid::Uuid;

/// How this database uses its store.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// Where rows that belong to no object lie.
    pub(super) notes: String,
    /// Whether other hosts write to the store too.
    pub(super) is_shared: bool,
}

/// Where what belongs to single hosts lies in a shared store.
pub(super) const HOSTS: &str = "/hosts/";

/// Where the journal of a host lies in a shared store.
pub(super) fn notes_of(host: Uuid) -> String {
    format!("{HOSTS}{host}/note/")
}
