//! Another parent for an image, at every moment one that can be found.
//!
//! ```text
//! 1  header: one old locator is kept, the other ones are taken out
//! 2  new paths into all places but that of the kept one
//! 3  header: the new parent, with the new locators
//! 4  the new path into the place of the kept one
//! 5  header: with all locators
//! ```
//!
//! The header is two sectors: a power cut that tears it leaves an image that does not open, here as with every tool
//! of this format. A kill cannot.

use std::path::Path;

use tapio_types::Span;

use super::create::{LOCATOR_CODES, ParentFacts, locator_entry};
use super::image::Image;
use crate::error::{FormatError, FormatErrorKind, Result, invalid};
use crate::medium::Medium;
use crate::vhd::locator::encode_path;
use crate::vhd::{DiskType, FOOTER_LEN, Header, LocatorEntry, PlatformCode, SECTOR_LEN, layout};

/// A locator as it will be.
struct NewLocator {
    /// Where in the header.
    index: usize,
    entry: LocatorEntry,
    /// What goes to its place, as long as its space.
    bytes: Vec<u8>,
}

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
    let Some(old) = image.header.clone().filter(|_| image.footer.disk_type == DiskType::Differencing) else {
        return Err(invalid("is not a differencing disk and can have no parent").with_path(&image.path));
    };
    let (facts, _) = ParentFacts::gather(&image.path, parent, is_raw)?;
    if facts.uuid == image.footer.uuid {
        return Err(invalid("an image cannot be its own parent").with_path(&image.path));
    }
    let old_end = image.end;
    let locators = place_locators(image, &old, &facts.relative_path)?;
    let kept = locators.iter().position(|new| old.locators[new.index].code == new.entry.code);

    // Those that find no place go too: they would lead to the old parent.
    let mut header = old.clone();
    let kept_index = kept.map(|kept| locators[kept].index);
    for (index, entry) in header.locators.iter_mut().enumerate() {
        if LOCATOR_CODES.contains(&entry.code) && Some(index) != kept_index {
            *entry = LocatorEntry::NONE;
        }
    }
    write_header(image, &header)?;
    for (_, new) in locators.iter().enumerate().filter(|(position, _)| Some(*position) != kept) {
        image.write_bytes(new.entry.data_offset, &new.bytes)?;
    }
    image.flush()?;
    between();

    header.parent_uuid = facts.uuid;
    header.parent_timestamp = facts.timestamp;
    header.set_parent_name(&facts.name)?;
    for (position, new) in locators.iter().enumerate() {
        header.locators[new.index] = if Some(position) == kept { LocatorEntry::NONE } else { new.entry };
    }
    if let Some(new) = kept.map(|kept| &locators[kept]) {
        if locators.len() > 1 {
            write_header(image, &header)?;
        }
        image.write_bytes(new.entry.data_offset, &new.bytes)?;
        image.flush()?;
        header.locators[new.index] = new.entry;
    }
    write_header(image, &header)?;
    image.header = Some(header);
    if image.end == old_end { Ok(()) } else { image.write_footer() }
}

fn write_header<M: Medium>(image: &mut Image<M>, header: &Header) -> Result<()> {
    let at = image.footer.data_offset;
    image.write_bytes(at, &header.encode())?;
    image.flush()
}

/// A place for each of the locators: its old one where the path fits, else a free one before the first block, else
/// behind the metadata of an image without blocks. A locator beyond the first that finds none is left out.
fn place_locators<M: Medium>(image: &mut Image<M>, old: &Header, path: &str) -> Result<Vec<NewLocator>> {
    let mut locators: Vec<NewLocator> = Vec::new();
    let mut taken: Vec<Span> = Vec::new();
    for entry in old.locators.iter().filter(|entry| entry.code != PlatformCode::None) {
        let space = entry.space_len().map_err(|error| error.with_path(&image.path))?;
        taken.push(Span::new(entry.data_offset, space));
    }
    for code in LOCATOR_CODES {
        let path = encode_path(code, path)?;
        let existing = old.locators.iter().position(|entry| entry.code == code);
        let free = || {
            old.locators.iter().enumerate().position(|(index, entry)| {
                entry.code == PlatformCode::None && locators.iter().all(|new| new.index != index)
            })
        };
        let Some(index) = existing.or_else(free) else { continue };
        let mut entry = locator_entry(code, &path, old.locators[index].data_offset);
        let space = old.locators[index].space_len().unwrap_or(0);
        if existing.is_some() && space >= u64::from(entry.data_space) {
            entry.data_space = u32::try_from(space).unwrap_or(entry.data_space);
        } else {
            let len = u64::from(entry.data_space);
            entry.data_offset = match free_place(image, old, &taken, len) {
                Some(at) => at,
                None => match place_behind(image, len) {
                    Ok(at) => at,
                    Err(error) if error.kind() == FormatErrorKind::OutOfSpace && !locators.is_empty() => {
                        continue;
                    }
                    Err(error) => return Err(error),
                },
            };
            taken.push(Span::new(entry.data_offset, len));
        }
        let mut bytes = path;
        bytes.resize(entry.data_space as usize, 0);
        locators.push(NewLocator { index, entry, bytes });
    }
    Ok(locators)
}

/// A free place between the metadata and the first block.
fn free_place<M: Medium>(image: &Image<M>, header: &Header, taken: &[Span], len: u64) -> Option<u64> {
    let bare = Header { locators: [LocatorEntry::NONE; 8], ..header.clone() };
    let start = layout::metadata_end(&bare, image.batmap.as_ref().map(|batmap| &batmap.header));
    let first_block = image.bat.allocated().map(|(_, sector)| u64::from(sector) * SECTOR_LEN).min()?;
    let mut at = start.next_multiple_of(SECTOR_LEN);
    while at + len <= first_block {
        let overlaps = |span: &&Span| at < span.start + span.len && span.start < at + len;
        match taken.iter().find(overlaps) {
            Some(span) => at = (span.start + span.len).next_multiple_of(SECTOR_LEN),
            None => return Some(at),
        }
    }
    None
}

/// A place behind the metadata, with a footer behind it in a file. Not behind blocks: they would then lie among the
/// metadata, which `check`, here and elsewhere, takes for damage.
fn place_behind<M: Medium>(image: &mut Image<M>, len: u64) -> Result<u64> {
    let at = image.end.next_multiple_of(SECTOR_LEN);
    let end = at + len;
    let fits = image.medium_len()? >= end + FOOTER_LEN as u64;
    if image.bat.allocated().next().is_some() || (!fits && image.medium.is_device()) {
        return Err(FormatError::new(
            FormatErrorKind::OutOfSpace,
            "has no room for so long a path to its parent: bring the two nearer to each other",
        )
        .with_path(&image.path));
    }
    if !fits {
        let footer = image.footer.encode();
        image.write_bytes(end, &footer)?;
    }
    image.end = end;
    Ok(at)
}
