//! Another parent for an image that is not in use; see `relink` for the order of writes.

use std::path::Path;

use super::create::ParentFacts;
use super::image::Image;
use super::relink::{Room, Step, plan};
use crate::error::{Result, invalid};
use crate::medium::Medium;
use crate::vhd::{DiskType, FOOTER_LEN, SECTOR_LEN};

/// Gives a differencing disk another parent.
///
/// # Errors
/// `InvalidArgument` for an image without a parent or one that would be its own; those of gathering the parent's
/// facts and of the medium; `OutOfSpace` on a device without room for a longer path.
pub fn set_parent<M: Medium>(image: &mut Image<M>, parent: &Path, is_raw: bool) -> Result<()> {
    set_parent_with(image, parent, is_raw, || ())
}

/// As [`set_parent`], and calls `between` before the header names the new parent: for tests.
///
/// # Errors
/// As [`set_parent`].
pub fn set_parent_with<M: Medium>(
    image: &mut Image<M>,
    parent: &Path,
    is_raw: bool,
    between: impl FnOnce(),
) -> Result<()> {
    let (facts, _) = ParentFacts::gather(&image.path, parent, is_raw)?;
    under(image, &facts, between)
}

/// As [`set_parent`], of a parent that is not there, or has another name still: the child records what is said of it.
///
/// # Errors
/// As [`set_parent`], but for those of the parent.
pub fn set_parent_facts<M: Medium>(image: &mut Image<M>, parent: &ParentFacts) -> Result<()> {
    under(image, parent, || ())
}

fn under<M: Medium>(image: &mut Image<M>, facts: &ParentFacts, between: impl FnOnce()) -> Result<()> {
    let Some(old) = image.header.clone().filter(|_| image.footer.disk_type == DiskType::Differencing) else {
        return Err(invalid("is not a differencing disk and can have no parent").with_path(&image.path));
    };
    if facts.uuid == image.footer.uuid {
        return Err(invalid("an image cannot be its own parent").with_path(&image.path));
    }
    let footer_len = FOOTER_LEN as u64;
    let is_device = image.medium.is_device();
    let first_block = image.bat.allocated().map(|(_, sector)| u64::from(sector) * SECTOR_LEN).min();
    let limit = if is_device { image.medium_len()?.saturating_sub(footer_len) } else { u64::MAX >> 1 };
    let room = Room {
        batmap: image.batmap.as_ref().map(|batmap| &batmap.header),
        first_block,
        behind: first_block.is_none().then_some((image.end, limit)),
    };
    let relink =
        plan(&old, image.footer.data_offset, &room, facts).map_err(|error| error.with_path(&image.path))?;
    if let Some(end) = relink.behind_end {
        if !is_device && image.medium_len()? < end + footer_len {
            // A footer at the end of the file, at every moment.
            let footer = image.footer.encode();
            image.write_bytes(end, &footer)?;
        }
        image.end = end;
    }
    let mut between = Some(between);
    for step in &relink.steps {
        match step {
            Step::Write(at, bytes) => image.write_bytes(*at, bytes)?,
            Step::Flush => image.flush()?,
            Step::Switch => {
                if let Some(between) = between.take() {
                    between();
                }
            }
        }
    }
    image.header = Some(relink.header);
    if relink.behind_end.is_some() { image.write_footer() } else { Ok(()) }
}
