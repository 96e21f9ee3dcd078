//! Sectors into an image, in an order that a kill or a power cut at any point cannot turn against it.
//!
//! ```text
//! write   new block: footer to the new end, gap and block made zero    old block: data in place
//!         data; a new block's bitmap
//! commit  flush                                              nothing so far is visible
//!         old blocks' bitmaps, table sectors                 each a single sector, each makes visible what is there
//!         flush
//! finish  commit
//!         the batmap: header and map, in one write           bits of blocks that are whole on disk since the commit
//!         flush
//! ```
//!
//! Sectors that an old block held already are written in place; a caller that needs them after a kill must not
//! write here. Only a command that has written all it wants touches the batmap, once: a bit not set costs a look at a
//! bitmap. A power cut within that write leaves a checksum that does not fit; every reader then goes by the bitmaps,
//! and
//! the next writer makes the batmap anew.

use tapio_types::Span;

use super::image::{Image, PendingBitmap};
use crate::error::{FormatError, FormatErrorKind, Result, invalid};
use crate::medium::Medium;
use crate::vhd::bat::sector_start;
use crate::vhd::{FOOTER_LEN, FooterSource, SECTOR_LEN, Tolerance, batmap, bitmap, footer, layout};

/// Writes from this many bytes on begin to be flushed at once.
const FLUSH_EARLY_LEN: usize = 256 << 10;
/// Bitmaps held back before they are committed: 256 KiB of them, half a gigabyte of blocks.
const PENDING_MAX: usize = 512;
/// New blocks held back before they are committed, so that a kill loses at most their space.
const PENDING_NEW_MAX: usize = 64;

impl<M: Medium> Image<M> {
    /// Writes `from` at byte `at` of the virtual disk; whole sectors. Visible on disk after [`Image::commit`].
    ///
    /// # Errors
    /// `InvalidArgument` outside of the disk or off sectors; `OutOfSpace`; those of the medium.
    pub fn write_at(&mut self, at: u64, from: &[u8]) -> Result<()> {
        let span = Span::new(at, from.len() as u64);
        if !span.is_aligned(SECTOR_LEN) || !span.fits(self.virtual_len()) {
            return Err(invalid(format!(
                "cannot write {} bytes at byte {at} of a disk of {} bytes",
                span.len,
                self.virtual_len()
            ))
            .with_path(&self.path));
        }
        if self.header.is_none() {
            return self.write_bytes(at, from);
        }
        let block_len = u64::from(self.block_len());
        let mut done = 0;
        while done < span.len {
            let here = at + done;
            let within = here % block_len;
            let piece = (block_len - within).min(span.len - done);
            let block = u32::try_from(here / block_len).unwrap_or(u32::MAX);
            self.write_in_block(block, within, &from[done as usize..(done + piece) as usize])?;
            done += piece;
        }
        Ok(())
    }

    fn write_in_block(&mut self, block: u32, within: u64, from: &[u8]) -> Result<()> {
        if self.block_sector(block).is_none() {
            self.allocate(block)?;
        }
        let data = self.data_offset(block).ok_or_else(|| invalid("a block was not allocated"))?;
        self.write_bytes(data + within, from)?;
        if from.len() >= FLUSH_EARLY_LEN {
            self.medium.begin_flush(Span::new(data + within, from.len() as u64));
        }
        let (first, count) = ((within / SECTOR_LEN) as usize, from.len() / SECTOR_LEN as usize);
        if let Some(pending) = self.pending.bitmaps.get_mut(&block) {
            bitmap::set_range(&mut pending.map, first, count);
        } else if let (Some(sector), Some(mut map)) = (self.bat.entry(block), self.bitmap(block)?)
            && !bitmap::all_set(&map, first, count)
        {
            bitmap::set_range(&mut map, first, count);
            self.pending.bitmaps.insert(block, PendingBitmap { map, sector, is_new: false });
        }
        self.commit_if_many()
    }

    /// Commits once enough was held back.
    pub(super) fn commit_if_many(&mut self) -> Result<()> {
        let pending = &self.pending.bitmaps;
        let new = pending.values().filter(|pending| pending.is_new).count();
        if pending.len() >= PENDING_MAX || new >= PENDING_NEW_MAX { self.commit() } else { Ok(()) }
    }

    /// Finds a place for a block at the end and makes it zero there.
    pub(super) fn allocate(&mut self, block: u32) -> Result<()> {
        let block_len = self.block_len();
        let sector = layout::place_block(self.end, block_len).map_err(|error| error.with_path(&self.path))?;
        let start = u64::from(sector) * SECTOR_LEN;
        let end = start + layout::block_span_len(block_len);
        let len = self.medium_len()?;
        if self.medium.is_device() {
            if end + FOOTER_LEN as u64 > len {
                return Err(FormatError::new(
                    FormatErrorKind::OutOfSpace,
                    format!("the device of {len} bytes has no room for another block: make it larger"),
                )
                .with_path(&self.path));
            }
            self.zero(Span::new(self.end, end - self.end))?;
        } else {
            // The footer moves first: there is one at the end at any moment. The old one lies in the gap or in the
            // place of the new bitmap, which is made zero before the table can point to it.
            if len < end + FOOTER_LEN as u64 {
                let footer = self.footer.encode();
                self.write_bytes(end, &footer)?;
            }
            let stale = len.min(end).saturating_sub(self.end);
            self.zero(Span::new(self.end, stale))?;
        }
        self.end = end;
        let map = vec![0; layout::bitmap_len(block_len) as usize];
        self.pending.bitmaps.insert(block, PendingBitmap { map, sector, is_new: true });
        Ok(())
    }

    /// Makes everything written so far visible and safe.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn commit(&mut self) -> Result<()> {
        let pending = std::mem::take(&mut self.pending.bitmaps);
        let order = self.footer.bit_order();
        let encode = |map: &[u8]| {
            let mut map = map.to_vec();
            order.swap(&mut map);
            map
        };
        for new in pending.values().filter(|pending| pending.is_new) {
            self.write_bytes(u64::from(new.sector) * SECTOR_LEN, &encode(&new.map))?;
        }
        self.flush()?;
        for old in pending.values().filter(|pending| !pending.is_new) {
            self.write_bytes(u64::from(old.sector) * SECTOR_LEN, &encode(&old.map))?;
        }
        if let Some(batmap) = &self.batmap {
            let is_new = |block: u32| !bitmap::test(&batmap.map, block as usize);
            let sectors = self.block_sectors();
            let full = pending.iter().filter(|(_, done)| bitmap::all_set(&done.map, 0, sectors));
            self.full.extend(full.map(|(&block, _)| block).filter(|&block| is_new(block)));
        }
        let mut changed = Vec::new();
        for (&block, new) in pending.iter().filter(|(_, pending)| pending.is_new) {
            self.bat.set(block, new.sector);
            let start = sector_start(block);
            if changed.last() != Some(&start) {
                changed.push(start);
            }
        }
        for start in changed {
            self.write_bat_sector(start)?;
        }
        self.flush()?;
        // An image that was opened by the copy of its footer is whole again once it was written.
        if self.source == FooterSource::Backup { self.write_footer() } else { Ok(()) }
    }

    /// Commits, and says in the batmap which blocks are whole now.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn finish(&mut self) -> Result<()> {
        self.commit()?;
        let mut full = std::mem::take(&mut self.full);
        let anew = self.batmap_anew()?;
        if full.is_empty() && anew.is_none() {
            return Ok(());
        }
        if anew.is_some() {
            self.batmap = anew;
            self.tolerances.retain(|tolerance| *tolerance != Tolerance::BatmapChecksum);
            full.clear();
        }
        let (Some(header), Some(batmap)) = (&self.header, &mut self.batmap) else { return Ok(()) };
        for block in full {
            bitmap::set(&mut batmap.map, block as usize);
        }
        batmap.header.checksum = batmap.header.map_checksum(&batmap.map, self.footer.current_len);
        let (at, map_at) = (batmap::header_offset(header), batmap.header.offset);
        let (mut bytes, map) = (batmap.header.encode().to_vec(), batmap.map.clone());
        if map_at == at + bytes.len() as u64 {
            bytes.extend(map);
        } else {
            self.write_bytes(map_at, &map)?;
        }
        self.write_bytes(at, &bytes)?;
        self.flush()
    }

    /// Writes the sector of the table that begins with the entry of block `start`.
    ///
    /// Entries behind the virtual size stay as they are on disk.
    pub(super) fn write_bat_sector(&mut self, start: u32) -> Result<()> {
        let Some(header) = &self.header else { return Ok(()) };
        let at = header.table_offset + u64::from(start) * 4;
        let mut bytes = [0xff; SECTOR_LEN as usize];
        self.read_bytes(at, &mut bytes)?;
        let entries = self.bat.entries().get(start as usize..).unwrap_or_default();
        for (entry, slot) in entries.iter().zip(bytes.as_chunks_mut::<4>().0) {
            *slot = entry.to_be_bytes();
        }
        self.write_bytes(at, &bytes)
    }

    /// Writes the footer where it belongs, and its copy, and makes a file end behind it.
    ///
    /// The copy comes first: whichever of the two a kill leaves behind, the one at the end is whole.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn write_footer(&mut self) -> Result<()> {
        let bytes = self.footer.encode();
        if self.footer.disk_type.is_dynamic() {
            self.write_bytes(0, &bytes)?;
            self.flush()?;
        }
        let len = self.medium_len()?;
        let at = if self.medium.is_device() || !self.footer.disk_type.is_dynamic() {
            // A short footer is completed in place.
            len.next_multiple_of(SECTOR_LEN) - FOOTER_LEN as u64
        } else {
            self.end
        };
        let end = at + FOOTER_LEN as u64;
        let same_place = len == end;
        self.write_bytes(at, &bytes)?;
        self.flush()?;
        if !same_place && !self.medium.is_device() && len > end {
            self.medium
                .set_len(end)
                .map_err(|error| FormatError::io("cannot cut the file off", error).with_path(&self.path))?;
            self.flush()?;
        }
        self.source = FooterSource::Primary;
        Ok(())
    }

    /// The footer, to be changed; [`Image::write_footer`] makes it last.
    pub fn footer_mut(&mut self) -> &mut footer::Footer {
        &mut self.footer
    }

    pub(super) fn zero(&mut self, span: Span) -> Result<()> {
        if span.is_empty() {
            return Ok(());
        }
        self.medium.zero(span).map_err(|error| FormatError::io("cannot clear", error).with_path(&self.path))
    }
}
