//! VHD by the offline tools: headers, whole images, journals.

use std::io;
use std::path::Path;

use tapio_format::vhd::footer::{COOKIE, COOKIE_DISABLED};
use tapio_format::vhd::journal::{ENTRY_LEN, Entry, HEADER_LEN as JOURNAL_HEADER_LEN, JournalHeader};
use tapio_format::vhd::locator::decode_path;
use tapio_format::vhd::offline::{
    Chain, CheckOptions, Image, Layer, OpenOptions, check, locator_path, revert, unresolved_parent,
};
use tapio_format::vhd::stream::StreamIn;
use tapio_format::vhd::{
    Bat, BatmapHeader, FOOTER_LEN, Footer, HEADER_LEN, Header, LocatorEntry, PlatformCode, SECTOR_LEN,
    batmap as map, layout,
};
use tapio_format::{FormatError, Medium};
use tapio_types::Span;

use super::take;

/// The longest file that a target lets a tool make: an allocation is at most a block of 2 MiB and its metadata.
const FILE_LEN_MAX: u64 = 16 << 20;

/// Memory that fills up, as a disk does: an offset out of a damaged header must not take the host's memory.
#[derive(Debug)]
pub struct Bounded(pub Vec<u8>);

impl Medium for Bounded {
    fn len(&self) -> io::Result<u64> {
        Medium::len(&self.0)
    }
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_at(at, into)
    }
    fn write_at(&mut self, at: u64, from: &[u8]) -> io::Result<()> {
        if at.saturating_add(from.len() as u64) > FILE_LEN_MAX {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.write_at(at, from)
    }
    fn set_len(&mut self, len: u64) -> io::Result<()> {
        if len > FILE_LEN_MAX {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Medium::set_len(&mut self.0, len)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn zero(&mut self, span: Span) -> io::Result<()> {
        if span.end().is_none_or(|end| end > FILE_LEN_MAX) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.write_at(span.start, &vec![0; span.len as usize])
    }
    fn reserve(&mut self, span: Span) -> io::Result<()> {
        self.zero(span)
    }
}

/// An error must say something, and say it in bounds: it goes to a log.
fn heard(error: &FormatError) {
    let text = error.to_string();
    assert!(!text.is_empty() && text.len() < 16 << 10, "an error of {} bytes", text.len());
}

/// The image with all of its checksums put right, as an attacker would write it.
pub fn healed(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let len = bytes.len();
    let mut footer = None;
    for at in [Some(0), len.checked_sub(FOOTER_LEN)].into_iter().flatten() {
        if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<FOOTER_LEN>())
            && (place.starts_with(&COOKIE) || place.starts_with(&COOKIE_DISABLED))
        {
            let found = Footer::parse(place);
            *place = found.encode();
            footer = Some(found);
        }
    }
    let Some(footer) = footer else { return bytes };
    let place = usize::try_from(footer.data_offset).ok().and_then(|at| bytes.get_mut(at..));
    let Some(place) = place.and_then(|rest| rest.first_chunk_mut::<HEADER_LEN>()) else { return bytes };
    if !place.starts_with(b"cxsparse") {
        return bytes;
    }
    let header = Header::parse(place);
    *place = header.encode();
    heal_batmap(&mut bytes, &footer, &header);
    bytes
}

fn heal_batmap(bytes: &mut [u8], footer: &Footer, header: &Header) {
    let at = map::header_offset(header);
    let place = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
    let Some(place) = place.and_then(|rest| rest.first_chunk::<{ map::HEADER_LEN }>()) else { return };
    let mut batmap = BatmapHeader::parse(place);
    if batmap.cookie != map::COOKIE {
        return;
    }
    let bits = usize::try_from(batmap.offset).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
    let len = map::sectors_for(header.entries_max) as usize * SECTOR_LEN as usize;
    batmap.checksum = batmap.map_checksum(&bits[..bits.len().min(len)], footer.current_len);
    bytes[at as usize..at as usize + map::HEADER_LEN].copy_from_slice(&batmap.encode());
}

/// An image as it is, and with its checksums right.
pub fn vhd_open(bytes: &[u8]) {
    examine(bytes);
    let healed = healed(bytes);
    if healed != bytes {
        examine(&healed);
    }
}

fn examine(bytes: &[u8]) {
    let medium = bytes.to_vec();
    let path = Path::new("/nowhere/image.vhd");
    let every = CheckOptions { bitmaps: true, counts: true, ..CheckOptions::default() };
    let valid = match check(&medium, &every) {
        Ok(report) => report.is_valid(),
        Err(error) => {
            heard(&error);
            false
        }
    };
    for options in
        [OpenOptions::READ, OpenOptions::LOOK, OpenOptions { use_backup: true, ..OpenOptions::READ }]
    {
        match Image::open_on(medium.clone(), path, options) {
            Ok(image) => look_at(image),
            Err(error) => heard(&error),
        }
    }
    write_to(medium, path, valid);
}

fn look_at(image: Image<Vec<u8>>) {
    let _ = format!("{image:?}").len();
    let allocated = image.allocated_blocks();
    assert!(allocated <= image.bat().len());
    let _ = (image.physical_len(), image.virtual_len(), image.parent_name(), image.has_raw_parent());
    for (block, _) in image.bat().allocated().take(8).collect::<Vec<_>>() {
        let want = layout::bitmap_len(image.block_len()) as usize;
        for map in [image.bitmap(block), image.bitmap_on_disk(block)] {
            match map {
                Ok(map) => assert_eq!(map.map(|map| map.len()), Some(want)),
                Err(error) => heard(&error),
            }
        }
        let _ = (image.data_offset(block), image.is_block_full(block));
    }
    if let Some(header) = image.header() {
        for entry in &header.locators {
            if let Err(error) = locator_path(&image, entry) {
                heard(&error);
            }
        }
        if let Err(error) = unresolved_parent(&image) {
            heard(&error);
        }
    }
    let len = image.virtual_len();
    let chain = Chain::new(vec![Layer::Vhd(Box::new(image))]);
    let sectors = len / SECTOR_LEN;
    for first in [0, sectors / 2, sectors.saturating_sub(8)] {
        let count = (sectors - first).min(8);
        let span = Span::new(first * SECTOR_LEN, count * SECTOR_LEN);
        match chain.extents(span) {
            Ok(extents) => {
                let covered: u64 = extents.iter().map(|extent| extent.span.len).sum();
                assert_eq!(covered, span.len, "the extents of {span:?} are not the whole of it");
            }
            Err(error) => heard(&error),
        }
        if let Err(error) = chain.read_at(span.start, &mut vec![0x5a; span.len as usize]) {
            heard(&error);
        }
    }
}

/// Writes a few sectors. What a valid image took must be there again, and the image still valid.
fn write_to(medium: Vec<u8>, path: &Path, valid: bool) {
    let mut image = match Image::open_on(Bounded(medium), path, OpenOptions::WRITE) {
        Ok(image) => image,
        Err(error) => return heard(&error),
    };
    let sectors = image.virtual_len() / SECTOR_LEN;
    let mut written = Vec::new();
    for (index, first) in [0, sectors / 2, sectors.saturating_sub(1)].into_iter().enumerate() {
        let data = [0xa0 | index as u8; SECTOR_LEN as usize];
        match image.write_at(first * SECTOR_LEN, &data) {
            Ok(()) => {
                written.retain(|(other, _)| *other != first);
                written.push((first, data));
            }
            Err(error) => heard(&error),
        }
    }
    if let Err(error) = image.commit().and_then(|()| image.write_footer()) {
        return heard(&error);
    }
    if !valid {
        return;
    }
    let medium = image.into_medium().0;
    let report = check(&medium, &CheckOptions::default()).expect("memory is read");
    assert!(report.is_valid(), "writing made a valid image invalid: {:?}", report.findings);
    let image = Image::open_on(medium, path, OpenOptions::READ).expect("what was written is opened again");
    let chain = Chain::new(vec![Layer::Vhd(Box::new(image))]);
    for (first, data) in written {
        let mut found = [0; SECTOR_LEN as usize];
        chain.read_at(first * SECTOR_LEN, &mut found).expect("what was written is read");
        assert!(found == data, "sector {first} does not hold what was written to it");
    }
}

/// A footer of 512 or 511 bytes; what is accepted is written as it was read.
pub fn vhd_footer(bytes: &[u8]) {
    let mut rest = bytes;
    let mut whole = take::<FOOTER_LEN>(&mut rest);
    for heal in [false, true] {
        if heal {
            whole = Footer::parse(&whole).encode();
        }
        match Footer::decode(&whole) {
            Ok((footer, _)) => {
                let (again, _) = Footer::decode(&footer.encode()).expect("what was read is written readably");
                assert_eq!(Footer { checksum: footer.checksum, ..again }, footer);
                let _ = (footer.bit_order(), footer.may_have_batmap(), footer.is_old_creator());
                let _ = footer.resized(footer.current_len / 2);
            }
            Err(error) => heard(&error),
        }
        if let Err(error) = Footer::decode_short(whole.first_chunk().expect("511 of 512 bytes")) {
            heard(&error);
        }
    }
}

/// An image that a client sends, read from the first byte to the last.
pub fn vhd_stream(bytes: &[u8]) {
    for bytes in [bytes, &healed(bytes)] {
        let mut stream = match StreamIn::open(bytes) {
            Ok(stream) => stream,
            Err(error) => {
                heard(&error);
                continue;
            }
        };
        let (len, block_len) = (stream.virtual_len(), stream.block_len());
        let count = stream.blocks().len();
        assert!(count <= bytes.len() / 4, "more blocks than entries");
        let mut data = vec![0; block_len as usize];
        let mut found = 0;
        loop {
            match stream.next_block(&mut data) {
                Ok(Some(block)) => {
                    found += 1;
                    assert!(u64::from(block.block) * u64::from(block_len) < len, "a block behind the end");
                    assert_eq!(block.bitmap.len() as u64, layout::bitmap_len(block_len));
                }
                Ok(None) => break assert_eq!(found, count),
                Err(error) => break heard(&error),
            }
        }
    }
}

/// A header of 1024 bytes.
pub fn vhd_header(bytes: &[u8]) {
    let mut rest = bytes;
    let mut whole = take::<HEADER_LEN>(&mut rest);
    for heal in [false, true] {
        if heal {
            whole = Header::parse(&whole).encode();
        }
        match Header::decode(&whole) {
            Ok(header) => {
                assert_eq!(header.encode(), whole, "a header is written as it was read");
                let _ = (header.parent_name(), header.parent_name_old());
                for len in [0, 1, 1 << 20, 2 << 40, u64::MAX] {
                    if let Ok(entries) = header.entries_for(len) {
                        assert!(entries <= header.entries_max);
                    }
                }
                let end = layout::metadata_end(&header, None);
                let ends = header.locators.iter().filter_map(layout::locator_end);
                assert!(ends.into_iter().all(|one| one <= end), "a locator reaches beyond the metadata");
                header.locators.iter().for_each(entry);
            }
            Err(error) => heard(&error),
        }
    }
}

fn entry(entry: &LocatorEntry) {
    match entry.path_span() {
        Ok((at, len)) => {
            let space = entry.space_len().expect("a path has a space");
            assert!(len as u64 <= space && at.checked_add(space).is_some());
        }
        Err(error) => heard(&error),
    }
}

/// A batmap header (512 bytes) for an image whose header says `entries` (4 bytes), then the map.
pub fn batmap(bytes: &[u8]) {
    let mut rest = bytes;
    let entries = u32::from_be_bytes(take(&mut rest));
    let len = u64::from_be_bytes(take(&mut rest));
    let whole = take::<{ map::HEADER_LEN }>(&mut rest);
    let header = Header::new(entries);
    match BatmapHeader::decode(&whole, &header) {
        Ok(batmap) => {
            assert_eq!(batmap.encode(), whole, "a batmap header is written as it was read");
            assert!(batmap.offset.checked_add(batmap.len()).is_some());
            assert!(batmap.offset >= map::header_offset(&header) + map::HEADER_LEN as u64);
            let _ = (batmap.map_checksum(rest, len), batmap.is_empty(), batmap.key_hash.is_set());
            let _ = layout::metadata_end(&header, Some(&batmap));
        }
        Err(error) => heard(&error),
    }
    if let Ok(bat) = Bat::decode(rest, (rest.len() / 4) as u32) {
        assert!(bat.allocated().count() <= bat.entries().len());
    }
}

/// The bytes of a parent locator; the first says of which code.
pub fn locator(bytes: &[u8]) {
    let mut rest = bytes;
    let [pick] = take::<1>(&mut rest);
    let known = [*b"MacX", *b"W2ku", *b"W2ru", *b"Wi2r", *b"Wi2k", *b"Mac ", [0; 4], *b"what"];
    let code = PlatformCode::from_code(u32::from_be_bytes(known[usize::from(pick) % known.len()]));
    match decode_path(code, rest) {
        Ok(path) => {
            assert!(code.is_readable(), "a path under {code:?}");
            assert!(path.len() <= 3 * rest.len(), "a path longer than its bytes");
        }
        Err(error) => heard(&error),
    }
    let mut header = [0; HEADER_LEN];
    let len = rest.len().min(header.len());
    header[..len].copy_from_slice(&rest[..len]);
    Header::parse(&header).locators.iter().for_each(entry);
}

/// A journal, put back into an image that was there before, and into nothing.
pub fn vhd_journal(bytes: &[u8]) {
    let healed = healed_journal(bytes);
    for journal in [bytes.to_vec(), healed] {
        for before in [Vec::new(), super::seeds::dynamic_image()] {
            let mut medium = Bounded(before.clone());
            match revert(tapio_format::medium::Lent(&mut medium), &journal) {
                Ok(()) => {
                    let header = journal.first_chunk::<JOURNAL_HEADER_LEN>().expect("a journal has a header");
                    let header = JournalHeader::decode(header).expect("it was taken");
                    let len = Medium::len(&medium).expect("memory has a length");
                    assert_eq!(len, header.footer_offset + FOOTER_LEN as u64);
                }
                Err(error) => heard(&error),
            }
        }
    }
}

/// The journal with the checksums of its entries put right, metadata and data.
fn healed_journal(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let Some(Ok(header)) = bytes.first_chunk::<JOURNAL_HEADER_LEN>().map(JournalHeader::decode) else {
        return bytes;
    };
    for (start, count) in
        [(header.metadata_offset, header.metadata_entries), (header.data_offset, header.data_entries)]
    {
        let mut at = start;
        for _ in 0..count.min(64) {
            let Some(rest) = usize::try_from(at).ok().and_then(|at| bytes.get(at..)) else { break };
            let Some((Ok(mut entry), rest)) =
                rest.split_first_chunk::<ENTRY_LEN>().map(|(head, rest)| (Entry::decode(head), rest))
            else {
                break;
            };
            let Some(payload) = rest.get(..entry.len as usize) else { break };
            entry.checksum = entry.expected_checksum(payload);
            bytes[at as usize..at as usize + ENTRY_LEN].copy_from_slice(&entry.encode());
            at += ENTRY_LEN as u64 + u64::from(entry.len);
        }
    }
    bytes
}
