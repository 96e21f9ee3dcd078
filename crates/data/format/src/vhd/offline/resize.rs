//! A larger table: metadata grow, the first blocks give way, and a journal can bring everything back.
//!
//! ```text
//! 1  the journal gets whatever is going to be overwritten      flush: from here on the image can be brought back
//! 2  both footers are made 'v_poison'                          flush: what is half done does not open
//! 3  blocks in the way are copied behind the last one          flush
//! 4  locators, batmap, table, header                           flush
//! 5  the footer's copy, the footer, the end of the file        flush after each
//! 6  the journal goes
//! ```
//!
//! A kill before 2 leaves the old image, one after 5 the new one, each with a journal that is of no more use; between
//! them the image is disabled until [`revert`] is told to use the journal. Reverting can itself be killed and
//! repeated: the footers come back last.

use std::path::Path;

use tapio_types::{Access, Span};

use super::coalesce::grow_fixed;
use super::create::sync_directory_of;
use super::footer::read_footer;
use super::image::{Image, OpenOptions};
use super::modify::resize_fast;
use super::parent::locator_bytes;
use crate::error::{FormatError, FormatErrorKind, Result, corrupt, invalid};
use crate::medium::{FileMedium, Medium};
use crate::vhd::footer::{COOKIE, COOKIE_DISABLED};
use crate::vhd::journal::{ENTRY_LEN, Entry, EntryKind, HEADER_LEN as JOURNAL_HEADER_LEN, JournalHeader};
use crate::vhd::{
    BAT_ENTRIES_MAX, Bat, DiskType, FOOTER_LEN, Footer, HEADER_LEN, Header, LocatorEntry, PlatformCode,
    SECTOR_LEN, VIRTUAL_LEN_MAX, batmap, layout,
};

/// How far a resize is, for tests that stop it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResizeStep {
    /// The journal is written and the image disabled.
    Begin,
    /// The blocks in the way are elsewhere.
    DataMoved,
    /// Locators and batmap are where they will be.
    MetadataMoved,
    /// The image is whole again; the journal is still there.
    End,
}

/// Makes the virtual disk of the image at `path` `len` bytes large, rounded up to whole sectors, moving data where it
/// must, with a journal at `journal`: a file that is not there yet, or a device.
///
/// A failure brings the old image back by itself. A kill leaves the image disabled until [`revert_path`].
///
/// # Errors
/// `InvalidArgument` for a smaller size and for images by other creators, `Exists` for a journal that is there,
/// `OutOfSpace`, those of the media.
pub fn resize_journalled(
    path: &Path,
    len: u64,
    journal: &Path,
    mut step: impl FnMut(ResizeStep),
) -> Result<()> {
    let mut image = Image::open(path, OpenOptions::WRITE)?;
    let len = wanted_len(&image, len)?;
    if len == image.virtual_len() {
        return Ok(());
    }
    // These two need no journal: each of their steps leaves a valid image.
    if image.footer().disk_type == DiskType::Fixed {
        return grow_fixed(&mut image, len);
    }
    if image.header().is_some_and(|header| header.entries_for(len).is_ok()) {
        return resize_fast(&mut image, len);
    }
    let mut medium = open_journal(journal)?;
    let done =
        sync_directory_of(journal).and_then(|()| resize_with_journal(image, len, &mut medium, &mut step));
    if let Err(error) = done {
        let image = FileMedium::open(path, Access::ReadWrite)?;
        // A journal that was never finished is of no use; the image was not touched then.
        match revert(image, &medium) {
            Ok(()) => remove_journal(journal, &mut medium)?,
            Err(reverting) if reverting.kind() == FormatErrorKind::NotThisFormat => {
                remove_journal(journal, &mut medium)?;
            }
            Err(reverting) => {
                return Err(FormatError::new(
                    error.kind(),
                    format!("{error}; and it cannot be taken back: {reverting}; use 'vhd-util revert'"),
                )
                .with_path(path));
            }
        }
        return Err(error);
    }
    step(ResizeStep::End);
    remove_journal(journal, &mut medium)
}

/// Brings the image at `path` back to what `journal` holds, and removes the journal.
///
/// # Errors
/// `Corrupt` for a journal of another image or one that is damaged; those of the media.
pub fn revert_path(path: &Path, journal: &Path) -> Result<()> {
    let mut medium = FileMedium::open(journal, Access::ReadWrite)?;
    let image = FileMedium::open(path, Access::ReadWrite)?;
    revert(image, &medium).map_err(|error| error.with_path(journal))?;
    remove_journal(journal, &mut medium)
}

fn wanted_len<M: Medium>(image: &Image<M>, len: u64) -> Result<u64> {
    let fail = |sentence: String| Err(invalid(sentence).with_path(image.path()));
    if !image.footer().is_by_tapdisk() {
        return fail("was not made by tapdisk's tools or these: its metadata are not moved".into());
    }
    let len = len.checked_next_multiple_of(SECTOR_LEN).unwrap_or(u64::MAX);
    if len > VIRTUAL_LEN_MAX {
        return fail(format!("{len} bytes are more than the {VIRTUAL_LEN_MAX} that a VHD can have"));
    }
    if len < image.virtual_len() {
        let sentence =
            format!("size ({len}) < curr size ({}): a disk is not made smaller", image.virtual_len());
        return Err(invalid(sentence).with_path(image.path()).with_errno(libc::ENOSYS));
    }
    Ok(len)
}

/// An empty place for a journal: a new file, or a device that holds none.
fn open_journal(path: &Path) -> Result<FileMedium> {
    let medium = match FileMedium::open(path, Access::ReadWrite) {
        Err(error) if error.kind() == FormatErrorKind::Missing => return FileMedium::create_new(path),
        opened => opened?,
    };
    let mut bytes = [0; JOURNAL_HEADER_LEN];
    let is_free = medium.is_device()
        && medium.read_at(0, &mut bytes).is_ok()
        && JournalHeader::decode(&bytes).is_err_and(|error| error.kind() == FormatErrorKind::NotThisFormat);
    if is_free {
        return Ok(medium);
    }
    Err(FormatError::new(
        FormatErrorKind::Exists,
        "a journal is there already: an earlier resize was broken off; use 'vhd-util revert', or another name",
    )
    .with_path(path))
}

fn remove_journal(path: &Path, medium: &mut FileMedium) -> Result<()> {
    let wrap = |error| FormatError::io("cannot remove the journal", error).with_path(path);
    if medium.is_device() {
        return medium.write_at(0, &[0; JOURNAL_HEADER_LEN]).and_then(|()| medium.flush()).map_err(wrap);
    }
    // Nothing is written into it first: on a full file system that fails, and the journal would stay.
    std::fs::remove_file(path).map_err(wrap)?;
    sync_directory_of(path)
}

/// What the image will look like.
struct Plan {
    header: Header,
    bat: Bat,
    batmap: Option<super::Batmap>,
    /// Encoded paths and where they go.
    locators: Vec<(u64, Vec<u8>)>,
    /// Blocks in the way: number, sector now, sector then.
    moves: Vec<(u32, u32, u32)>,
    metadata_end: u64,
    end: u64,
}

impl Plan {
    fn new<M: Medium>(image: &Image<M>, old: &Header, len: u64) -> Result<Self> {
        let block_len = old.block_len;
        let entries = u32::try_from(len.div_ceil(u64::from(block_len)))
            .ok()
            .filter(|&entries| entries <= BAT_ENTRIES_MAX)
            .ok_or_else(|| invalid(format!("{len} bytes in blocks of {block_len} are too many blocks")))?;
        let mut header = old.clone();
        header.entries_max = entries;
        let mut end = batmap::header_offset(&header);
        let batmap = image.batmap.clone().map(|mut batmap| {
            batmap.header.offset = end + batmap::HEADER_LEN as u64;
            batmap.header.sectors = batmap::sectors_for(entries);
            batmap.map.resize(batmap.header.len() as usize, 0);
            batmap.header.checksum = batmap.header.map_checksum(&batmap.map, len);
            end = batmap.header.offset + batmap.header.len();
            batmap
        });
        let mut locators = Vec::new();
        for entry in header.locators.iter_mut().filter(|entry| entry.code != PlatformCode::None) {
            let (bytes, space) = locator_bytes(image, entry)?;
            *entry = LocatorEntry { data_offset: end, data_space: space, ..*entry };
            locators.push((end, bytes));
            end += u64::from(space);
        }
        let metadata_end = end;
        let mut bat = image.bat.clone();
        let mut moves = Vec::new();
        let mut data_end = image.end.max(metadata_end);
        for (block, sector) in
            image.bat.allocated().filter(|(_, at)| u64::from(*at) * SECTOR_LEN < metadata_end)
        {
            let place = layout::place_block(data_end, block_len)?;
            moves.push((block, sector, place));
            bat.set(block, place);
            data_end = u64::from(place) * SECTOR_LEN + layout::block_span_len(block_len);
        }
        bat.resize(entries);
        Ok(Self { header, bat, batmap, locators, moves, metadata_end, end: data_end })
    }
}

/// The resize itself, on any two media; the journal is empty or a device.
///
/// # Errors
/// As [`resize_journalled`]; nothing is taken back.
pub fn resize_with_journal<M: Medium, J: Medium>(
    mut image: Image<M>,
    len: u64,
    journal: &mut J,
    mut step: impl FnMut(ResizeStep),
) -> Result<()> {
    let Some(old) = image.header.clone() else {
        return Err(invalid("a fixed disk has no table").with_path(&image.path));
    };
    if batmap::is_required(&image.footer) && image.batmap.is_none() {
        return Err(corrupt("its batmap cannot be read: look with 'vhd-util check'").with_path(&image.path));
    }
    let plan = Plan::new(&image, &old, len)?;
    let old_len = image.medium_len()?;
    if image.medium.is_device() && plan.end + FOOTER_LEN as u64 > old_len {
        return Err(FormatError::new(
            FormatErrorKind::OutOfSpace,
            format!(
                "the device has {old_len} bytes and {} are needed: make it larger",
                plan.end + FOOTER_LEN as u64
            ),
        )
        .with_path(&image.path));
    }
    write_journal(&image, &old, &plan, journal)?;

    let footer = image.footer.resized(len);
    image.footer.cookie = COOKIE_DISABLED;
    let disabled = image.footer.encode();
    let footer_at = old_len.next_multiple_of(SECTOR_LEN) - FOOTER_LEN as u64;
    image.write_bytes(footer_at, &disabled)?;
    image.write_bytes(0, &disabled)?;
    image.flush()?;
    step(ResizeStep::Begin);

    if !image.medium.is_device() && plan.end > footer_at {
        image.write_bytes(plan.end, &disabled)?;
    }
    let mut bytes = vec![0; layout::block_span_len(old.block_len) as usize];
    for &(_, from, to) in &plan.moves {
        image.read_bytes(u64::from(from) * SECTOR_LEN, &mut bytes)?;
        image.write_bytes(u64::from(to) * SECTOR_LEN, &bytes)?;
    }
    image.flush()?;
    step(ResizeStep::DataMoved);

    for (at, bytes) in &plan.locators {
        image.write_bytes(*at, bytes)?;
    }
    if let Some(batmap) = &plan.batmap {
        image.write_bytes(batmap::header_offset(&plan.header), &batmap.header.encode())?;
        image.write_bytes(batmap.header.offset, &batmap.map)?;
    }
    step(ResizeStep::MetadataMoved);
    image.write_bytes(plan.header.table_offset, &plan.bat.encode())?;
    image.write_bytes(image.footer.data_offset, &plan.header.encode())?;
    image.flush()?;

    image.footer = Footer { cookie: COOKIE, ..footer };
    image.end = plan.end;
    (image.header, image.bat, image.batmap) = (Some(plan.header), plan.bat, plan.batmap);
    image.write_footer()
}

fn write_journal<M: Medium, J: Medium>(
    image: &Image<M>,
    old: &Header,
    plan: &Plan,
    journal: &mut J,
) -> Result<()> {
    let io = |error| FormatError::io("cannot write the journal", error);
    let footer_at = image.medium_len()?.next_multiple_of(SECTOR_LEN) - FOOTER_LEN as u64;
    let mut pieces = vec![
        (EntryKind::Footer, Span::new(footer_at, FOOTER_LEN as u64)),
        (EntryKind::FooterCopy, Span::new(0, FOOTER_LEN as u64)),
        (EntryKind::Header, Span::new(image.footer.data_offset, HEADER_LEN as u64)),
    ];
    for entry in old.locators.iter().filter(|entry| entry.code != PlatformCode::None) {
        pieces.push((EntryKind::Locator, Span::new(entry.data_offset, entry.space_len()?)));
    }
    let table_len = (u64::from(old.entries_max) * 4).next_multiple_of(SECTOR_LEN);
    pieces.push((EntryKind::Table, Span::new(old.table_offset, table_len)));
    if let Some(batmap) = &image.batmap {
        pieces.push((
            EntryKind::BatmapHeader,
            Span::new(batmap::header_offset(old), batmap::HEADER_LEN as u64),
        ));
        pieces.push((EntryKind::Batmap, Span::new(batmap.header.offset, batmap.header.len())));
    }
    let metadata_entries = pieces.len() as u32;
    // Of a block in the way, only what the metadata will cover: the rest stays where it is.
    let block_len = layout::block_span_len(old.block_len);
    for &(_, sector, _) in &plan.moves {
        let start = u64::from(sector) * SECTOR_LEN;
        pieces.push((EntryKind::Data, Span::new(start, block_len.min(plan.metadata_end - start))));
    }
    let mut header = JournalHeader {
        uuid: image.footer.uuid,
        footer_offset: footer_at,
        data_entries: pieces.len() as u32 - metadata_entries,
        metadata_entries,
        data_offset: 0,
        metadata_offset: JOURNAL_HEADER_LEN as u64,
        end: JOURNAL_HEADER_LEN as u64,
    };
    for (index, (kind, span)) in (0..).zip(pieces) {
        if index == metadata_entries {
            header.data_offset = header.end;
        }
        let mut payload = vec![0; span.len as usize];
        // A short footer has one byte less than the piece.
        let there = image.medium_len()?.saturating_sub(span.start).min(span.len) as usize;
        image.read_bytes(span.start, &mut payload[..there])?;
        let entry = Entry::new(kind, span.start, &payload);
        journal.write_at(header.end, &entry.encode()).map_err(io)?;
        journal.write_at(header.end + ENTRY_LEN as u64, &payload).map_err(io)?;
        header.end += ENTRY_LEN as u64 + span.len;
    }
    if header.data_entries == 0 {
        header.data_offset = header.end;
    }
    journal.flush().map_err(io)?;
    journal.write_at(0, &header.encode()).map_err(io)?;
    journal.flush().map_err(io)
}

/// Puts everything in `journal` back into the image on `medium`.
///
/// Every entry is read and verified before the first is written.
///
/// # Errors
/// `NotThisFormat` without a journal, `Corrupt` for one that is damaged or of another image, those of the media.
pub fn revert<M: Medium, J: Medium>(mut medium: M, journal: &J) -> Result<()> {
    let read = |at: u64, into: &mut [u8]| {
        journal
            .read_at(at, into)
            .map_err(|error| FormatError::io("cannot read the journal", error).with_offset(at))
    };
    let mut bytes = [0; JOURNAL_HEADER_LEN];
    if journal.len().is_ok_and(|len| len < JOURNAL_HEADER_LEN as u64) {
        return Err(FormatError::new(FormatErrorKind::NotThisFormat, "is too short for a journal")
            .with_errno(libc::EPIPE));
    }
    read(0, &mut bytes)?;
    let header = JournalHeader::decode(&bytes)?;
    let mut entries = Vec::new();
    for (start, count) in
        [(header.metadata_offset, header.metadata_entries), (header.data_offset, header.data_entries)]
    {
        let mut at = start;
        for _ in 0..count {
            let mut bytes = [0; ENTRY_LEN];
            read(at, &mut bytes)?;
            let entry = Entry::decode(&bytes).map_err(|error| error.with_offset(at))?;
            let payload_at = at + ENTRY_LEN as u64;
            at = payload_at + u64::from(entry.len);
            if at > header.end {
                return Err(corrupt("an entry of the journal reaches beyond its end").with_offset(payload_at));
            }
            load_payload(journal, &entry, payload_at)?;
            entries.push((entry, payload_at));
        }
    }
    check_owner(journal, &header, &entries)?;
    // An image that still tells its name must be the journal's; one that cannot is taken for it.
    if let Ok((footer, ..)) = read_footer(&medium, false)
        && footer.uuid != header.uuid
    {
        return Err(corrupt(format!("the journal is of image {} and this is {}", header.uuid, footer.uuid)));
    }

    let io = |error| FormatError::io("cannot put the image back", error);
    for footers in [false, true] {
        for (entry, payload_at) in entries.iter().filter(|(entry, _)| entry.kind.is_footer() == footers) {
            let payload = load_payload(journal, entry, *payload_at)?;
            medium.write_at(entry.offset, &payload).map_err(io)?;
        }
        medium.flush().map_err(io)?;
    }
    let len = header.footer_offset + FOOTER_LEN as u64;
    if !medium.is_device() && medium.len().map_err(io)? != len {
        medium.set_len(len).map_err(io)?;
        medium.flush().map_err(io)?;
    }
    Ok(())
}

fn load_payload<J: Medium>(journal: &J, entry: &Entry, at: u64) -> Result<Vec<u8>> {
    let mut payload = vec![0; entry.len as usize];
    journal
        .read_at(at, &mut payload)
        .map_err(|error| FormatError::io("cannot read the journal", error).with_offset(at))?;
    if entry.expected_checksum(&payload) != entry.checksum {
        return Err(corrupt("an entry of the journal has a wrong checksum").with_offset(at));
    }
    Ok(payload)
}

/// The journal must hold a footer with the UUID that its header names.
fn check_owner<J: Medium>(journal: &J, header: &JournalHeader, entries: &[(Entry, u64)]) -> Result<()> {
    let Some((entry, at)) = entries.iter().find(|(entry, _)| entry.kind == EntryKind::Footer) else {
        return Err(corrupt("the journal holds no footer"));
    };
    let payload = load_payload(journal, entry, *at)?;
    let footer = <&[u8; FOOTER_LEN]>::try_from(payload.as_slice())
        .map_err(|_| corrupt("the journal's footer is of an odd length"))?;
    let (footer, _) = Footer::decode(footer)?;
    if footer.uuid != header.uuid {
        return Err(corrupt("the journal's footer is of another image than its header"));
    }
    Ok(())
}
