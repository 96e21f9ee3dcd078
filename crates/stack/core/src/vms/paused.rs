//! What the record of a VBD says of a client's pause.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};

use crate::db::{Change, Object};

/// The key of `VBD.runtime_properties` that has the token of the pause.
const SHOWN: &str = "pause-token";

/// Whether a VBD's record says that it is paused.
pub(super) fn is_shown(vbd: &Object) -> bool {
    vbd.get("runtime_properties").as_map().is_some_and(|known| known.contains_key(SHOWN))
}

/// Has a record say so, or not.
///
/// # Errors
/// The store's.
pub(super) fn show(change: &mut Change<'_>, vbd: &Object, token: Option<&str>) -> Result<(), ApiError> {
    let before = vbd.map("runtime_properties");
    let mut known: BTreeMap<String, String> = before.clone();
    match token {
        Some(token) => known.insert(SHOWN.to_owned(), token.to_owned()),
        None => known.remove(SHOWN),
    };
    if known == before {
        return Ok(());
    }
    change.set("VBD", &vbd.reference, "runtime_properties", Value::string_map(known))
}
