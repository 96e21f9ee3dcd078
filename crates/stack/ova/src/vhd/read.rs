//! A VHD that is read by its table: its blocks may lie in any order.

use std::io::{Read, Seek};

use tapio_format::vhd::bitmap;
use tapio_format::vhd::layout::bitmap_len;
use tapio_format::vhd::{
    BitOrder, DiskType, FOOTER_LEN, Footer, HEADER_LEN, Header, SECTOR_LEN, UNALLOCATED,
};

use crate::error::OvaError;
use crate::span::Span;

/// Entries of the longest table that is read: 8 TiB in blocks of 2 MiB, 16 MiB of memory.
const ENTRIES_MAX: u32 = 4 << 20;

/// A dynamic VHD.
#[derive(Debug)]
pub(crate) struct Vhd {
    span: Span,
    block_len: u64,
    order: BitOrder,
    table: Vec<u32>,
    /// The block whose bitmap was read last.
    bitmap: Option<(usize, Vec<u8>)>,
}

fn told(error: &tapio_format::FormatError) -> OvaError {
    OvaError::Wrong(format!("a VHD: {error}"))
}

impl Vhd {
    /// The length of the disk, and the table of a dynamic one; none of what is no VHD.
    ///
    /// # Errors
    /// It is a difference, or contradicts itself.
    pub(crate) fn open(
        input: &mut (impl Read + Seek),
        span: Span,
        head: &[u8; 512],
    ) -> Result<Option<(u64, Option<Self>)>, OvaError> {
        let mut last = [0; FOOTER_LEN];
        let Some(data_len) = span.len.checked_sub(FOOTER_LEN as u64) else { return Ok(None) };
        span.read(input, data_len, &mut last)?;
        let is_footer = |bytes: &[u8]| bytes.starts_with(b"conectix");
        let footer = match (is_footer(&last), is_footer(head)) {
            (true, _) => last,
            (false, true) => *head,
            (false, false) => return Ok(None),
        };
        let footer = Footer::decode(&footer).map_err(|error| told(&error))?.0;
        match footer.disk_type {
            DiskType::Fixed if footer.current_len <= data_len => Ok(Some((footer.current_len, None))),
            DiskType::Fixed => Err(OvaError::wrong("a VHD: the file is shorter than the disk")),
            DiskType::Dynamic => {
                Self::dynamic(input, span, &footer).map(|vhd| Some((footer.current_len, Some(vhd))))
            }
            other => Err(OvaError::Unsupported(format!(
                "a VHD that is {}: its parent is not in the package, export it whole",
                other.as_str()
            ))),
        }
    }

    fn dynamic(input: &mut (impl Read + Seek), span: Span, footer: &Footer) -> Result<Self, OvaError> {
        let mut bytes = [0; HEADER_LEN];
        span.read(input, footer.data_offset, &mut bytes)?;
        let header = Header::decode(&bytes).map_err(|error| told(&error))?;
        let entries = header.entries_for(footer.current_len).map_err(|error| told(&error))?;
        if entries > ENTRIES_MAX || u64::from(entries) * 4 > span.len {
            return Err(OvaError::Unsupported(format!("a VHD with a table of {entries} blocks")));
        }
        let mut bytes = vec![0; entries as usize * 4];
        span.read(input, header.table_offset, &mut bytes)?;
        let table =
            bytes.chunks_exact(4).map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
        let (block_len, order) = (u64::from(header.block_len), footer.bit_order());
        let vhd = Self { span, block_len, order, table: table.collect(), bitmap: None };
        let held = (0..vhd.table.len()).filter(|block| vhd.sector(*block).is_some()).count() as u64;
        match held.checked_mul(block_len).is_some_and(|held| held <= span.len) {
            true => Ok(vhd),
            false => Err(OvaError::Wrong(format!("a VHD of {} bytes has {held} blocks", span.len))),
        }
    }

    fn sector(&self, block: usize) -> Option<u32> {
        self.table.get(block).copied().filter(|sector| *sector != UNALLOCATED)
    }

    pub(crate) fn next_held(&self, at: u64) -> Option<u64> {
        let first = (at / self.block_len) as usize;
        let held = (first..self.table.len()).find(|block| self.sector(*block).is_some())?;
        Some(at.max(held as u64 * self.block_len))
    }

    pub(crate) fn read(
        &mut self,
        input: &mut (impl Read + Seek),
        mut at: u64,
        mut into: &mut [u8],
    ) -> Result<(), OvaError> {
        while !into.is_empty() {
            let (block, inside) = ((at / self.block_len) as usize, at % self.block_len);
            let len = (self.block_len - inside).min(into.len() as u64) as usize;
            let (data, rest) = into.split_at_mut(len);
            match self.sector(block) {
                None => data.fill(0),
                Some(sector) => self.block(input, (block, sector), inside, data)?,
            }
            into = rest;
            at += len as u64;
        }
        Ok(())
    }

    /// Reads a part of a block that the image has; sectors that were never written are zero, whatever lies there.
    fn block(
        &mut self,
        input: &mut (impl Read + Seek),
        (block, sector): (usize, u32),
        inside: u64,
        data: &mut [u8],
    ) -> Result<(), OvaError> {
        let start = u64::from(sector) * SECTOR_LEN;
        let map_len = bitmap_len(self.block_len as u32);
        if self.bitmap.as_ref().is_none_or(|(known, _)| *known != block) {
            let mut map = vec![0; map_len as usize];
            self.span.read(input, start, &mut map)?;
            if self.order == BitOrder::LsbFirst {
                BitOrder::LsbFirst.swap(&mut map);
            }
            self.bitmap = Some((block, map));
        }
        self.span.read(input, start + map_len + inside, data)?;
        let Some((_, map)) = &self.bitmap else { return Ok(()) };
        let mut at = 0;
        while at < data.len() {
            let place = inside as usize + at;
            let len = (SECTOR_LEN as usize - place % SECTOR_LEN as usize).min(data.len() - at);
            if !bitmap::test(map, place / SECTOR_LEN as usize) {
                data[at..at + len].fill(0);
            }
            at += len;
        }
        Ok(())
    }
}
