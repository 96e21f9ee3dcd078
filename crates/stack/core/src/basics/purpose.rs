//! What networks are for.

use tapio_model::{ApiError, Value};

use crate::call::HandlersOf;
use crate::db::{Change, Db};

/// Registers the messages of networks.
pub(super) fn register(handlers: &mut HandlersOf<'_, Db>) {
    handlers.on("network.add_purpose", |call, args| {
        let (network, purpose) = (args.text(0)?, args.text(1)?);
        call.part.change(|change| add(change, network, purpose)).map(|()| Value::Void)
    });
    handlers.on("network.remove_purpose", |call, args| {
        let (network, purpose) = (args.text(0)?, args.text(1)?);
        call.part.change(|change| {
            let mut purposes = of(change, network)?;
            purposes.retain(|known| known != purpose);
            change.set("network", network, "purpose", Value::strings(purposes))
        })?;
        Ok(Value::Void)
    });
}

fn of(change: &Change<'_>, network: &str) -> Result<Vec<String>, ApiError> {
    let network = change.get("network", network)?;
    let purposes = network.get("purpose").as_set().unwrap_or_default().iter();
    Ok(purposes.filter_map(|purpose| purpose.as_str().map(str::to_owned)).collect())
}

/// Exports either need TLS or do not, in the whole pool: a client cannot know on which network it is.
fn add(change: &mut Change<'_>, network: &str, purpose: &str) -> Result<(), ApiError> {
    let mut purposes = of(change, network)?;
    if purposes.iter().any(|known| known == purpose) {
        return Ok(());
    }
    let other = if purpose == "nbd" { "insecure_nbd" } else { "nbd" };
    for known in change.all("network") {
        if of(change, &known.reference)?.iter().any(|known| known == other) {
            return Err(ApiError::new("NETWORK_INCOMPATIBLE_PURPOSES", [purpose, other]));
        }
    }
    purposes.push(purpose.to_owned());
    change.set("network", network, "purpose", Value::strings(purposes))
}
