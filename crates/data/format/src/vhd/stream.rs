//! VHDs as streams: written and read from the first byte to the last, without a way back.
//!
//! ```text
//! footer  header  table  batmap  [parent locators]   bitmap block  bitmap block  ...  footer
//! ```
//!
//! Published readers of exported disks ignore block bitmaps, so a block in a stream of ours is whole and every bit of
//! its bitmap is set. A stream of others is read with its bitmaps, in the order in which its blocks lie. Its table must
//! come before its blocks, as in every published writer.

use std::io::{self, Read};

use uuid::Uuid;

use super::bat::Bat;
use super::locator::{LocatorEntry, PlatformCode, encode_path};
use super::{
    BLOCK_LEN, BitOrder, DiskType, FOOTER_LEN, Footer, HEADER_LEN, Header, Layout, SECTOR_LEN, bitmap, layout,
};
use crate::error::{FormatError, FormatErrorKind, Result, corrupt, invalid};

/// The largest disk that XenServer keeps in a VHD, and the largest that is written as a stream: 2040 GiB.
pub const STREAM_LEN_MAX: u64 = 2040 << 30;

/// The most table entries of a stream that is read: 2 TiB in blocks of 512 KiB.
const ENTRIES_MAX: u32 = 4 << 20;

/// Bytes that are read at once while a table arrives or a gap is passed: memory follows the bytes that came.
const PIECE_LEN: u64 = 64 << 10;

/// What a stream says of its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamShape {
    /// Bytes of the disk; whole sectors.
    pub len: u64,
    /// Names the image.
    pub uuid: Uuid,
    /// When it was made, see [`super::time`].
    pub timestamp: u32,
    /// For a difference: the UUID of what it is a difference to. Its file is taken to be `<uuid>.vhd` beside this one.
    pub parent: Option<Uuid>,
}

/// A stream to be written: where each of its bytes comes from.
#[derive(Clone, Debug)]
pub struct StreamOut {
    head: Vec<u8>,
    footer: [u8; FOOTER_LEN],
    blocks: Vec<u32>,
}

/// A part of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamPart<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// The bitmap of a block, then the block of the disk with this number.
    Block(u32),
}

/// Bytes of a block's bitmap.
const BITMAP_LEN: u64 = layout::bitmap_len(BLOCK_LEN);

/// Bytes of a block in a stream of ours, with its bitmap.
pub const STREAM_BLOCK_LEN: u64 = BITMAP_LEN + BLOCK_LEN as u64;

impl StreamOut {
    /// A stream of these blocks, in ascending order.
    ///
    /// # Errors
    /// `InvalidArgument` for a disk of more than [`STREAM_LEN_MAX`] bytes, or one without any.
    pub fn new(shape: &StreamShape, blocks: Vec<u32>) -> Result<Self> {
        if !(1..=STREAM_LEN_MAX).contains(&shape.len) {
            return Err(invalid(format!(
                "a VHD stream cannot have {} bytes: 1 to {STREAM_LEN_MAX} bytes are possible",
                shape.len
            )));
        }
        let layout = Layout::new(shape.len, 0)?;
        let mut header = Header::new(layout.entries);
        let mut end = layout.locators_offset;
        let mut locators = Vec::new();
        if let Some(parent) = shape.parent {
            let name = format!("{parent}.vhd");
            header.parent_uuid = parent;
            header.parent_timestamp = shape.timestamp;
            header.set_parent_name(&name)?;
            let codes = [PlatformCode::MacX, PlatformCode::W2ku, PlatformCode::W2ru];
            for (entry, code) in header.locators.iter_mut().zip(codes) {
                let mut path = encode_path(code, &format!("./{name}"))?;
                let data_len = path.len() as u32;
                let data_space = data_len.next_multiple_of(SECTOR_LEN as u32);
                *entry = LocatorEntry { code, data_space, data_len, reserved: 0, data_offset: end };
                path.resize(data_space as usize, 0);
                end += u64::from(data_space);
                locators.extend(path);
            }
        }
        let mut bat = Bat::new(layout.entries);
        let mut map = vec![0; usize::try_from(layout.batmap_len).unwrap_or(0)];
        let block_sectors = STREAM_BLOCK_LEN / SECTOR_LEN;
        for (at, &block) in blocks.iter().enumerate() {
            if block >= layout.entries {
                return Err(invalid(format!("a disk of {} bytes has no block {block}", shape.len)));
            }
            let sector = u32::try_from(end / SECTOR_LEN + at as u64 * block_sectors);
            bat.set(block, sector.map_err(|_| invalid("a VHD stream is longer than its table reaches"))?);
            bitmap::set(&mut map, block as usize);
        }
        let mut batmap = layout.batmap_header();
        batmap.checksum = batmap.map_checksum(&map, shape.len);
        let disk_type = if shape.parent.is_some() { DiskType::Differencing } else { DiskType::Dynamic };
        let footer =
            Footer { uuid: shape.uuid, timestamp: shape.timestamp, ..Footer::new(disk_type, shape.len) };
        let footer = footer.encode();
        let mut table = bat.encode();
        table[layout.entries as usize * 4..].fill(0);
        let mut head = Vec::with_capacity(usize::try_from(end).unwrap_or(0));
        head.extend_from_slice(&footer);
        head.extend_from_slice(&header.encode());
        head.extend(table);
        head.extend_from_slice(&batmap.encode());
        head.extend(map);
        head.extend(locators);
        Ok(Self { head, footer, blocks })
    }

    /// Bytes of the stream.
    pub fn len(&self) -> u64 {
        self.head.len() as u64 + self.blocks.len() as u64 * STREAM_BLOCK_LEN + FOOTER_LEN as u64
    }

    /// A stream always has a head.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// The parts in their order, with the place of each in the stream.
    pub fn parts(&self) -> impl Iterator<Item = (u64, StreamPart<'_>)> {
        let head_len = self.head.len() as u64;
        let blocks = self
            .blocks
            .iter()
            .enumerate()
            .map(move |(at, &block)| (head_len + at as u64 * STREAM_BLOCK_LEN, StreamPart::Block(block)));
        std::iter::once((0, StreamPart::Bytes(&self.head)))
            .chain(blocks)
            .chain(std::iter::once((self.len() - FOOTER_LEN as u64, StreamPart::Bytes(&self.footer))))
    }

    /// What stands in front of the data of a block: its bitmap, with every bit set.
    pub const fn bitmap() -> [u8; BITMAP_LEN as usize] {
        [0xff; BITMAP_LEN as usize]
    }
}

/// A stream that is read.
#[derive(Debug)]
pub struct StreamIn<R> {
    source: R,
    at: u64,
    footer: Footer,
    header: Header,
    /// The places of the blocks that are in the stream, in ascending order, and their numbers.
    table: Vec<(u32, u32)>,
    next: usize,
}

/// A block of a stream, whose data were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamBlock {
    /// Its number.
    pub block: u32,
    /// Which of its sectors the image holds, the first sector in the highest bit.
    pub bitmap: Vec<u8>,
}

impl<R: Read> StreamIn<R> {
    /// Reads what comes before the blocks.
    ///
    /// # Errors
    /// `NotThisFormat` where no footer begins, `Unsupported` for a fixed disk, more than 2^22 blocks, or a table that
    /// lies behind blocks; `Corrupt` for what contradicts itself; `Io` where the stream ends or fails.
    pub fn open(source: R) -> Result<Self> {
        let placeholder = (Footer::new(DiskType::Dynamic, 0), Header::new(0));
        let (footer, header) = placeholder;
        let mut this = Self { source, at: 0, footer, header, table: Vec::new(), next: 0 };
        let mut bytes = [0; FOOTER_LEN];
        this.read(&mut bytes)?;
        this.footer = Footer::decode(&bytes)?.0;
        if this.footer.is_disabled() {
            return Err(corrupt("an interrupted change of its size has disabled the image: repair it first"));
        }
        if !this.footer.disk_type.is_dynamic() {
            let why = "a fixed VHD: send its data as a raw image, without the footer";
            return Err(FormatError::new(FormatErrorKind::Unsupported, why));
        }
        this.pass(this.footer.data_offset, "the header")?;
        let mut bytes = [0; HEADER_LEN];
        this.read(&mut bytes)?;
        this.header = Header::decode(&bytes)?;
        let entries = this.header.entries_for(this.footer.current_len)?;
        if entries > ENTRIES_MAX {
            let why = format!("a table of {entries} blocks: streams of up to {ENTRIES_MAX} are read");
            return Err(FormatError::new(FormatErrorKind::Unsupported, why));
        }
        this.pass(this.header.table_offset, "the block table")?;
        let bat = Bat::decode(&this.read_table(u64::from(entries) * 4)?, entries)?;
        this.table = bat.allocated().map(|(block, sector)| (sector, block)).collect();
        this.table.sort_unstable();
        this.check_places()?;
        Ok(this)
    }

    /// Bytes of the disk.
    pub fn virtual_len(&self) -> u64 {
        self.footer.current_len
    }

    /// Whether it holds a difference: what is not in it is in a parent.
    pub fn is_difference(&self) -> bool {
        self.footer.disk_type == DiskType::Differencing
    }

    /// Bytes of a block.
    pub fn block_len(&self) -> u32 {
        self.header.block_len
    }

    /// The blocks that are in the stream, in its order.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = u32> {
        self.table.iter().map(|(_, block)| *block)
    }

    /// The next block, whose data are put into `data`; none behind the last. A footer may follow it, which says nothing
    /// new.
    ///
    /// # Errors
    /// `Io` where the stream ends or fails.
    pub fn next_block(&mut self, data: &mut [u8]) -> Result<Option<StreamBlock>> {
        let Some(&(sector, block)) = self.table.get(self.next) else { return Ok(None) };
        self.next += 1;
        self.pass(u64::from(sector) * SECTOR_LEN, "a block")?;
        let mut bitmap = vec![0; layout::bitmap_len(self.header.block_len) as usize];
        self.read(&mut bitmap)?;
        if self.footer.bit_order() == BitOrder::LsbFirst {
            BitOrder::LsbFirst.swap(&mut bitmap);
        }
        self.read(&mut data[..self.header.block_len as usize])?;
        Ok(Some(StreamBlock { block, bitmap }))
    }

    /// No block may lie in front of the table's end or within another one.
    fn check_places(&self) -> Result<()> {
        let span = layout::block_span_len(self.header.block_len);
        let mut free = self.at;
        for &(sector, block) in &self.table {
            let start = u64::from(sector) * SECTOR_LEN;
            if start < free {
                return Err(corrupt(format!(
                    "block {block} begins at byte {start}, before byte {free}, where what precedes it ends"
                )));
            }
            free = start + span;
        }
        Ok(())
    }

    fn read(&mut self, into: &mut [u8]) -> Result<()> {
        self.source.read_exact(into).map_err(|error| ended(error, self.at))?;
        self.at += into.len() as u64;
        Ok(())
    }

    fn read_table(&mut self, len: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < len {
            let start = bytes.len();
            bytes.resize(start + (len - start as u64).min(PIECE_LEN) as usize, 0);
            self.read(&mut bytes[start..])?;
        }
        Ok(bytes)
    }

    /// Reads on to a place.
    fn pass(&mut self, to: u64, what: &str) -> Result<()> {
        let Some(mut left) = to.checked_sub(self.at) else {
            let why = format!("{what} is at byte {to}, behind which the stream is at byte {}", self.at);
            return Err(FormatError::new(FormatErrorKind::Unsupported, why));
        };
        let mut dropped = [0; 4096];
        while left > 0 {
            let piece = left.min(dropped.len() as u64) as usize;
            self.read(&mut dropped[..piece])?;
            left -= piece as u64;
        }
        Ok(())
    }
}

fn ended(error: io::Error, at: u64) -> FormatError {
    FormatError::io("the stream cannot be read on", error).with_offset(at)
}

#[cfg(test)]
mod tests;
