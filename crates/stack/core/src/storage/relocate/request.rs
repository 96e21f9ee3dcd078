//! The calls that move VDIs.

use tapio_model::{ApiError, Value};

use super::super::{Call, Handlers};
use super::{Wish, relocate};
use crate::args::Args;

pub(in super::super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VDI.pool_migrate", pool_migrate);
}

/// A VDI and its snapshots in the same SR: they move together, and what they have in common is copied once.
fn with_snapshots(call: &Call, vdi: &str) -> Result<Vec<String>, ApiError> {
    let record = call.part.db.get("VDI", vdi)?;
    let snapshots = call.part.db.find("VDI", "snapshot_of", vdi);
    let here = snapshots.iter().filter(|snapshot| snapshot.text("SR") == record.text("SR"));
    let here = here.filter(|snapshot| super::tracking::has_data(snapshot).is_ok());
    Ok(std::iter::once(vdi.to_owned()).chain(here.map(|snapshot| snapshot.reference.clone())).collect())
}

fn pool_migrate(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (vdi, to, options) = (args.text(0)?, args.text(1)?, args.map(2)?);
    call.part.db.get("SR", to)?;
    let record = call.part.db.get("VDI", vdi)?;
    if record.text("SR") == to && options.is_empty() {
        return Ok(Value::string(vdi));
    }
    let shape = match options.get("dest-img-format").map(String::as_str) {
        None | Some("") => None,
        Some(format @ ("vhd" | "raw")) => {
            Some([("image-format".to_owned(), format.to_owned())].into_iter().collect())
        }
        Some(other) => return Err(ApiError::new("INVALID_VALUE", ["options:dest-img-format", other])),
    };
    let wish = Wish { to, shape, part: (0.0, 1.0) };
    let moved = relocate(call, &with_snapshots(call, vdi)?, &wish)?;
    let first = moved.into_iter().next();
    first.map(Value::String).ok_or_else(|| ApiError::internal("a VDI was moved and has no successor"))
}
