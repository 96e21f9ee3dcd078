//! Where things are: offsets of an image's parts, and the place of its next block.

use super::locator::LocatorEntry;
use super::{BAT_ENTRIES_MAX, BLOCK_LEN, BatmapHeader, Header, SECTOR_LEN, batmap};
use crate::error::{FormatError, FormatErrorKind, Result, invalid};

/// Data of a block begins on a multiple of this, so that a guest's pages are pages of the file.
pub const DATA_ALIGN: u64 = 4096;

/// A size rounded up to whole blocks, as `vhd-util create` and `resize` and the SRs make disks.
pub const fn whole_blocks(len: u64) -> u64 {
    match len.checked_next_multiple_of(BLOCK_LEN as u64) {
        Some(len) => len,
        None => u64::MAX,
    }
}

/// The offsets of an image that is about to be made. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Entries in the block table.
    pub entries: u32,
    /// Where the block table is.
    pub bat_offset: u64,
    /// Bytes of the table, whole sectors.
    pub bat_len: u64,
    /// Where the batmap's header is.
    pub batmap_header_offset: u64,
    /// Where the batmap is.
    pub batmap_offset: u64,
    /// Bytes of the batmap, whole sectors.
    pub batmap_len: u64,
    /// Where parent locators begin: the end of the batmap.
    pub locators_offset: u64,
}

impl Layout {
    /// The layout of an image of `len` bytes whose table has room to grow to `len_max`.
    ///
    /// # Errors
    /// `InvalidArgument` for sizes whose table would have more than [`BAT_ENTRIES_MAX`] entries.
    pub fn new(len: u64, len_max: u64) -> Result<Self> {
        let entries = u32::try_from(len.max(len_max).div_ceil(u64::from(BLOCK_LEN)))
            .ok()
            .filter(|&entries| entries <= BAT_ENTRIES_MAX)
            .ok_or_else(|| invalid(format!("{} bytes are more than a VHD holds", len.max(len_max))))?;
        let bat_offset = super::header::TABLE_OFFSET;
        let bat_len = (u64::from(entries) * 4).next_multiple_of(SECTOR_LEN);
        let batmap_header_offset = bat_offset + bat_len;
        let batmap_offset = batmap_header_offset + batmap::HEADER_LEN as u64;
        let batmap_len = u64::from(batmap::sectors_for(entries)) * SECTOR_LEN;
        Ok(Self {
            entries,
            bat_offset,
            bat_len,
            batmap_header_offset,
            batmap_offset,
            batmap_len,
            locators_offset: batmap_offset + batmap_len,
        })
    }

    /// The batmap header of a new image with this layout.
    pub fn batmap_header(&self) -> BatmapHeader {
        BatmapHeader::new(self.batmap_offset, batmap::sectors_for(self.entries))
    }
}

/// Sectors of the bitmap in front of each block of `block_len` bytes.
pub const fn bitmap_sectors(block_len: u32) -> u32 {
    let bits = block_len as u64 / SECTOR_LEN;
    let sectors = bits.div_ceil(8).div_ceil(SECTOR_LEN);
    if sectors == 0 { 1 } else { sectors as u32 }
}

/// Bytes of the bitmap in front of each block of `block_len` bytes.
pub const fn bitmap_len(block_len: u32) -> u64 {
    bitmap_sectors(block_len) as u64 * SECTOR_LEN
}

/// Bytes that a block takes: bitmap and data.
pub const fn block_span_len(block_len: u32) -> u64 {
    bitmap_len(block_len) + block_len as u64
}

/// The end of all metadata before the blocks, in bytes: header, table, batmap and locators.
///
/// Locators with senseless sizes are passed over here; opening the parent reports them.
pub fn metadata_end(header: &Header, batmap: Option<&BatmapHeader>) -> u64 {
    let header_end = (super::FOOTER_LEN + super::HEADER_LEN) as u64;
    let table_end = batmap::header_offset(header);
    let batmap_end = batmap.map_or(0, |batmap| batmap.offset.saturating_add(batmap.len()));
    let locators_end = header.locators.iter().filter_map(locator_end).max().unwrap_or(0);
    header_end.max(table_end).max(batmap_end).max(locators_end)
}

/// The end of the space set aside for a locator, `None` for one that is not used or senseless.
pub fn locator_end(entry: &LocatorEntry) -> Option<u64> {
    if entry.code == super::PlatformCode::None {
        return None;
    }
    entry.data_offset.checked_add(entry.space_len().ok()?)
}

/// The sector for the bitmap of a new block when everything so far ends at byte `end`.
///
/// A gap is left where it takes one for the data to begin on a multiple of [`DATA_ALIGN`].
///
/// # Errors
/// `OutOfSpace` where the block would lie behind what a 32-bit sector number reaches.
pub fn place_block(end: u64, block_len: u32) -> Result<u32> {
    let bitmap = bitmap_len(block_len);
    let full = || {
        FormatError::new(
            FormatErrorKind::OutOfSpace,
            "the image is full: no block fits below the 2 TiB that a VHD reaches",
        )
    };
    let data = end
        .checked_next_multiple_of(SECTOR_LEN)
        .and_then(|end| end.checked_add(bitmap))
        .and_then(|data| data.checked_next_multiple_of(DATA_ALIGN))
        .ok_or_else(full)?;
    let last = data.checked_add(u64::from(block_len)).ok_or_else(full)? / SECTOR_LEN;
    if last >= u64::from(u32::MAX) {
        return Err(full());
    }
    u32::try_from((data - bitmap) / SECTOR_LEN).map_err(|_| full())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_of_64_mib_is_that_of_the_reference() {
        let layout = Layout::new(64 << 20, 0).unwrap();
        assert_eq!(layout.entries, 32);
        assert_eq!((layout.bat_offset, layout.bat_len), (1536, 512));
        assert_eq!((layout.batmap_header_offset, layout.batmap_offset, layout.batmap_len), (2048, 2560, 512));
        assert_eq!(layout.locators_offset, 3072);
        let header = Header::new(32);
        assert_eq!(metadata_end(&header, Some(&layout.batmap_header())), 3072);
        assert_eq!(metadata_end(&header, None), 2048);
    }

    #[test]
    fn room_to_grow_makes_the_table_longer() {
        let layout = Layout::new(64 << 20, 2 << 40).unwrap();
        assert_eq!((layout.entries, layout.bat_len), (1 << 20, 4 << 20));
        assert_eq!(Layout::new(32 << 40, 0).unwrap().entries, BAT_ENTRIES_MAX);
        assert!(Layout::new((32 << 40) + 1, 0).is_err());
        assert_eq!(layout.batmap_len, 128 << 10);
        assert!(Layout::new(u64::MAX, 0).is_err());
    }

    #[test]
    fn data_begins_on_a_page() {
        assert_eq!(place_block(3072, BLOCK_LEN).unwrap(), 7);
        assert_eq!(place_block(4608, BLOCK_LEN).unwrap(), 15);
        assert_eq!(place_block(7 * 512 + block_span_len(BLOCK_LEN), BLOCK_LEN).unwrap(), 7 + 4096 + 8);
        assert_eq!(place_block(3584, BLOCK_LEN).unwrap(), 7);
    }

    #[test]
    fn blocks_end_where_sector_numbers_end() {
        let most = u64::from(u32::MAX) * 512;
        assert!(place_block(most - (4 << 20), BLOCK_LEN).is_ok());
        assert_eq!(place_block(most - (2 << 20), BLOCK_LEN).unwrap_err().kind(), FormatErrorKind::OutOfSpace);
        assert!(place_block(u64::MAX, BLOCK_LEN).is_err());
    }

    #[test]
    fn a_bitmap_takes_at_least_a_sector() {
        assert_eq!((bitmap_sectors(BLOCK_LEN), bitmap_sectors(512 << 10), bitmap_sectors(4096)), (1, 1, 1));
    }
}
