//! The calls that move VDIs.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};

use super::super::vdi::Subject;
use super::super::work::Work;
use super::super::{Call, Handlers};
use super::{Wish, relocate};
use crate::args::Args;

pub(in super::super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VDI.pool_migrate", pool_migrate);
    handlers.on("VDI.convert", convert);
    handlers.on("VDI.get_fragmentation", fragmentation);
    handlers.on("VDI.defragment", |call, args| anew(call, args.text(0)?, None));
}

/// A VDI and its snapshots in the same SR: they move together, and what they have in common is copied once.
pub(crate) fn with_snapshots(call: &Call, vdi: &str) -> Result<Vec<String>, ApiError> {
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

/// Makes the images of a VDI and its snapshots anew, in the same SR.
fn anew(call: &Call, vdi: &str, shape: Option<BTreeMap<String, String>>) -> Result<Value, ApiError> {
    let sr = call.part.db.get("VDI", vdi)?.text("SR").to_owned();
    let wish = Wish { to: &sr, shape, part: (0.0, 1.0) };
    let made = relocate(call, &with_snapshots(call, vdi)?, &wish)?.into_iter().next();
    made.map(Value::String).ok_or_else(|| ApiError::internal("a VDI was made anew and has no successor"))
}

/// Thin is a VHD, which grows as it is written; thick a raw image whose space is taken at once.
fn convert(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (vdi, allocation) = (args.text(0)?, args.text(1)?);
    let shape: &[(&str, &str)] = match allocation {
        "thin" => &[("image-format", "vhd")],
        "thick" => &[("image-format", "raw"), ("allocation", "thick")],
        other => return Err(ApiError::new("INVALID_VALUE", ["allocation", other])),
    };
    let shape = shape.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    anew(call, vdi, Some(shape))
}

fn fragmentation(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let subject = Subject::find_at_all(call, args.text(0)?)?;
    let found = subject.sr.with(|sr| sr.fragmentation(&Work::new(call), subject.uuid));
    let found = found.map_err(|error| subject.told(call, "get_fragmentation", error))?;
    let number = |number: u64| number.to_string();
    let mut told = BTreeMap::from([
        ("block-size", number(found.block_len)),
        ("blocks", number(found.blocks)),
        ("runs", number(found.runs)),
        ("runs-in-order", number(found.runs_min)),
        ("file-size", number(found.file_len)),
    ]);
    told.extend(found.extents.map(|extents| ("file-extents", number(extents))));
    Ok(Value::string_map(told))
}
