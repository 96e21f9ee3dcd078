//! The steps that give an image another parent: at every moment it has one that can be found.
//!
//! Where the new paths can be written to be just as long as the old ones, no write is more than a sector, and a power
//! cut tears nothing:
//!
//! ```text
//! 1  the new path into the places of all locators but the first
//! 2  the first sector of the header: the new parent
//! 3  the new path into the place of the first locator
//! ```
//!
//! Between 2 and 3 the first locator leads to the old parent and the others to the new one; `resolve_parent` takes the
//! one that the header means. Otherwise locators move, and the second sector of the header changes too:
//!
//! ```text
//! 1  header: one old locator is kept, the other ones are taken out
//! 2  new paths into all places but that of the kept one
//! 3  header: the new parent, with the new locators
//! 4  the new path into the place of the kept one
//! 5  header: with all locators
//! ```
//!
//! A power cut that tears that header leaves an image that does not open, here as with every tool of this format. A
//! kill cannot.
//!
//! Computed here, without a storage; carried out by `reparent` on an image that is not in use, and by
//! [`VhdLayer`](crate::live::vhd::VhdLayer) under a guest.

use tapio_types::Span;

use super::create::{LOCATOR_CODES, ParentFacts, locator_entry};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::vhd::locator::encode_path;
use crate::vhd::{BatmapHeader, Header, LocatorEntry, PlatformCode, SECTOR_LEN, layout};

/// Where a path that is longer than the old one may go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room<'a> {
    pub(crate) batmap: Option<&'a BatmapHeader>,
    /// Where the first block begins, in bytes, if there is one.
    pub(crate) first_block: Option<u64>,
    /// From where to where metadata may grow. Not behind blocks: it would then lie among them, which `check`, here and
    /// elsewhere, takes for damage.
    pub(crate) behind: Option<(u64, u64)>,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// These bytes are written there.
    Write(u64, Vec<u8>),
    /// Everything so far is made durable.
    Flush,
    /// From here on the header names the new parent.
    Switch,
}

/// What is to be done.
#[derive(Debug)]
pub(crate) struct Relink {
    pub(crate) steps: Vec<Step>,
    /// The header when all is done.
    pub(crate) header: Header,
    /// How far metadata reaches behind [`Room::behind`], if it does.
    pub(crate) behind_end: Option<u64>,
}

/// A locator as it will be.
struct NewLocator {
    /// Where in the header.
    index: usize,
    entry: LocatorEntry,
    /// What goes to its place, as long as its space.
    bytes: Vec<u8>,
}

/// The steps by which the image with the header `old` at byte `header_at` comes under `parent`.
///
/// # Errors
/// `InvalidArgument` for a path that cannot be recorded; `OutOfSpace` without room for a longer path.
pub(crate) fn plan(old: &Header, header_at: u64, room: &Room<'_>, parent: &ParentFacts) -> Result<Relink> {
    match plan_in_place(old, header_at, parent)? {
        Some(relink) => Ok(relink),
        None => plan_with_moves(old, header_at, room, parent),
    }
}

/// The steps where no locator changes its place or its length, if there are such.
fn plan_in_place(old: &Header, header_at: u64, parent: &ParentFacts) -> Result<Option<Relink>> {
    // A change that was broken off may have left fewer; all shall be there again.
    if !LOCATOR_CODES.iter().all(|code| old.locators.iter().any(|entry| entry.code == *code)) {
        return Ok(None);
    }
    let mut paths = Vec::new();
    for entry in old.locators.iter().filter(|entry| entry.code.is_readable()) {
        let Some(mut bytes) = stretched(entry.code, &parent.relative_path, entry.data_len as usize)? else {
            return Ok(None);
        };
        bytes.resize(bytes.len().next_multiple_of(SECTOR_LEN as usize), 0);
        // More than a sector may be torn.
        if bytes.len() as u64 > SECTOR_LEN || entry.space_len()? < SECTOR_LEN {
            return Ok(None);
        }
        paths.push(Step::Write(entry.data_offset, bytes));
    }
    let mut header = old.clone();
    header.parent_uuid = parent.uuid;
    header.parent_timestamp = parent.timestamp;
    header.set_parent_name(&parent.name)?;
    let (before, after) = (old.encode(), header.encode());
    let (first, rest) = after.split_at(SECTOR_LEN as usize);
    if paths.is_empty() || before[SECTOR_LEN as usize..] != *rest {
        return Ok(None);
    }
    let first_path = paths.remove(0);
    let mut steps = paths;
    steps.extend([Step::Flush, Step::Switch]);
    steps.extend([Step::Write(header_at, first.to_vec()), Step::Flush, first_path, Step::Flush]);
    Ok(Some(Relink { steps, header, behind_end: None }))
}

/// The path as it is recorded with `code`, made `len` bytes long by parts that mean nothing; `None` where it is longer.
fn stretched(code: PlatformCode, path: &str, len: usize) -> Result<Option<Vec<u8>>> {
    let plain = encode_path(code, path)?;
    let unit = if matches!(code, PlatformCode::W2ku | PlatformCode::W2ru) { 2 } else { 1 };
    let Some(missing) = len.checked_sub(plain.len()).filter(|missing| missing.is_multiple_of(unit)) else {
        return Ok(None);
    };
    let missing = missing / unit;
    let mut longer = "./".repeat(missing / 2) + path;
    if missing % 2 == 1 {
        let Some(slash) = longer.find('/') else { return Ok(None) };
        longer.insert(slash, '/');
    }
    let bytes = encode_path(code, &longer)?;
    Ok((bytes.len() == len).then_some(bytes))
}

fn plan_with_moves(old: &Header, header_at: u64, room: &Room<'_>, parent: &ParentFacts) -> Result<Relink> {
    let (locators, behind_end) = place_locators(old, room, &parent.relative_path)?;
    let kept = locators.iter().position(|new| old.locators[new.index].code == new.entry.code);
    let mut steps = Vec::new();
    let write_header = |steps: &mut Vec<Step>, header: &Header| {
        steps.push(Step::Write(header_at, header.encode().to_vec()));
        steps.push(Step::Flush);
    };

    // Those that find no place go too: they would lead to the old parent.
    let mut header = old.clone();
    let kept_index = kept.map(|kept| locators[kept].index);
    for (index, entry) in header.locators.iter_mut().enumerate() {
        if LOCATOR_CODES.contains(&entry.code) && Some(index) != kept_index {
            *entry = LocatorEntry::NONE;
        }
    }
    write_header(&mut steps, &header);
    for (_, new) in locators.iter().enumerate().filter(|(position, _)| Some(*position) != kept) {
        steps.push(Step::Write(new.entry.data_offset, new.bytes.clone()));
    }
    steps.push(Step::Flush);
    steps.push(Step::Switch);

    header.parent_uuid = parent.uuid;
    header.parent_timestamp = parent.timestamp;
    header.set_parent_name(&parent.name)?;
    for (position, new) in locators.iter().enumerate() {
        header.locators[new.index] = if Some(position) == kept { LocatorEntry::NONE } else { new.entry };
    }
    if let Some(new) = kept.map(|kept| &locators[kept]) {
        if locators.len() > 1 {
            write_header(&mut steps, &header);
        }
        steps.push(Step::Write(new.entry.data_offset, new.bytes.clone()));
        steps.push(Step::Flush);
        header.locators[new.index] = new.entry;
    }
    write_header(&mut steps, &header);
    Ok(Relink { steps, header, behind_end })
}

/// A place for each of the locators: its old one where the path fits, else a free one before the first block, else
/// behind the metadata. A locator beyond the first that finds none is left out.
fn place_locators(old: &Header, room: &Room<'_>, path: &str) -> Result<(Vec<NewLocator>, Option<u64>)> {
    let mut locators: Vec<NewLocator> = Vec::new();
    let mut taken: Vec<Span> = Vec::new();
    let mut behind_end = None;
    for entry in old.locators.iter().filter(|entry| entry.code != PlatformCode::None) {
        taken.push(Span::new(entry.data_offset, entry.space_len()?));
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
            let place = free_place(old, room, &taken, len).or_else(|| {
                let (begin, limit) = room.behind?;
                let at = behind_end.unwrap_or(begin).next_multiple_of(SECTOR_LEN);
                (at + len <= limit).then(|| {
                    behind_end = Some(at + len);
                    at
                })
            });
            match place {
                Some(at) => entry.data_offset = at,
                None if !locators.is_empty() => continue,
                None => {
                    return Err(FormatError::new(
                        FormatErrorKind::OutOfSpace,
                        "has no room for so long a path to its parent: bring the two nearer to each other",
                    ));
                }
            }
            taken.push(Span::new(entry.data_offset, len));
        }
        let mut bytes = path;
        bytes.resize(entry.data_space as usize, 0);
        locators.push(NewLocator { index, entry, bytes });
    }
    Ok((locators, behind_end))
}

/// A free place between the metadata and the first block.
fn free_place(header: &Header, room: &Room<'_>, taken: &[Span], len: u64) -> Option<u64> {
    let bare = Header { locators: [LocatorEntry::NONE; 8], ..header.clone() };
    let start = layout::metadata_end(&bare, room.batmap);
    let mut at = start.next_multiple_of(SECTOR_LEN);
    while at + len <= room.first_block? {
        let overlaps = |span: &&Span| at < span.start + span.len && span.start < at + len;
        match taken.iter().find(overlaps) {
            Some(span) => at = (span.start + span.len).next_multiple_of(SECTOR_LEN),
            None => return Some(at),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhd::KeyHash;

    #[test]
    fn a_path_is_stretched_by_what_means_nothing() {
        let text = |path: &str, len: usize| {
            stretched(PlatformCode::MacX, path, len).unwrap().map(|bytes| String::from_utf8(bytes).unwrap())
        };
        assert_eq!(text("./p.vhd", 14).as_deref(), Some("file://./p.vhd"));
        assert_eq!(text("./p.vhd", 15).as_deref(), Some("file://.//p.vhd"));
        assert_eq!(text("./p.vhd", 18).as_deref(), Some("file://./././p.vhd"));
        assert_eq!(text("./p.vhd", 13), None);
        assert_eq!(stretched(PlatformCode::W2ku, "./p", 7).unwrap(), None);
    }

    fn child(path: &str) -> Header {
        let mut header = Header::new(32);
        for (index, code) in LOCATOR_CODES.into_iter().enumerate() {
            let bytes = encode_path(code, path).unwrap();
            header.locators[index] = locator_entry(code, &bytes, 3072 + 512 * index as u64);
        }
        header
    }

    fn parent(path: &str) -> ParentFacts {
        ParentFacts {
            uuid: uuid::Uuid::from_u128(7),
            timestamp: 1,
            name: "p.vhd".into(),
            relative_path: path.into(),
            key_hash: KeyHash::default(),
        }
    }

    #[test]
    fn a_path_that_is_no_longer_needs_writes_of_one_sector_only() {
        let room = Room { batmap: None, first_block: None, behind: None };
        let relink = plan(&child("./longer.vhd"), 512, &room, &parent("./p.vhd")).unwrap();
        assert!(relink.steps.iter().all(|step| !matches!(step, Step::Write(_, bytes) if bytes.len() != 512)));
        assert_eq!(relink.header.locators, child("./longer.vhd").locators);
        assert_eq!(relink.steps.iter().filter(|step| matches!(step, Step::Write(512, _))).count(), 1);
    }

    #[test]
    fn a_longer_path_moves_within_its_space() {
        let room = Room { batmap: None, first_block: None, behind: None };
        let relink = plan(&child("./p.vhd"), 512, &room, &parent("./longer.vhd")).unwrap();
        assert_eq!(relink.header.locators[0].data_len, 19);
        assert!(relink.steps.contains(&Step::Write(512, relink.header.encode().to_vec())));
    }
}
