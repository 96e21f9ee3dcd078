//! The block allocation table (BAT): for each block the sector of its bitmap, or all ones.

use super::{BAT_ENTRIES_MAX, SECTOR_LEN};
use crate::error::{Result, corrupt};

/// The entry of a block that is not in the image.
pub const UNALLOCATED: u32 = u32::MAX;
/// Table entries in one sector, the smallest piece of a table that is written.
pub const ENTRIES_PER_SECTOR: usize = SECTOR_LEN as usize / 4;

/// A block table in memory.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Bat {
    entries: Vec<u32>,
}

impl Bat {
    /// A table of `count` blocks, none of them allocated.
    pub fn new(count: u32) -> Self {
        Self { entries: vec![UNALLOCATED; count as usize] }
    }

    /// The first `count` entries in `bytes`.
    ///
    /// # Errors
    /// `Corrupt` where there are fewer bytes than that.
    pub fn decode(bytes: &[u8], count: u32) -> Result<Self> {
        let want = count as usize * 4;
        if count > BAT_ENTRIES_MAX || bytes.len() < want {
            return Err(corrupt(format!("a block table of {count} entries is not in {} bytes", bytes.len())));
        }
        let entries =
            bytes[..want].as_chunks::<4>().0.iter().map(|&entry| u32::from_be_bytes(entry)).collect();
        Ok(Self { entries })
    }

    /// The table as on disk, padded to whole sectors with entries that are not allocated.
    pub fn encode(&self) -> Vec<u8> {
        let padded = self.entries.len().next_multiple_of(ENTRIES_PER_SECTOR) * 4;
        let mut bytes: Vec<u8> = self.entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        bytes.resize(padded, 0xff);
        bytes
    }

    /// The sector of the block's bitmap, or `None` where the block is not in the image or beyond the table.
    pub fn entry(&self, block: u32) -> Option<u32> {
        self.entries.get(block as usize).copied().filter(|&entry| entry != UNALLOCATED)
    }

    /// Records that the block's bitmap is at `sector`.
    ///
    /// # Panics
    /// If the table has no such block.
    pub fn set(&mut self, block: u32, sector: u32) {
        self.entries[block as usize] = sector;
    }

    /// Entries in the table.
    pub fn len(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(u32::MAX)
    }

    /// Whether the table has no entries at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries as they stand.
    pub fn entries(&self) -> &[u32] {
        &self.entries
    }

    /// The blocks in the image and the sectors of their bitmaps.
    pub fn allocated(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (0..)
            .zip(&self.entries)
            .filter(|(_, entry)| **entry != UNALLOCATED)
            .map(|(block, &entry)| (block, entry))
    }

    /// Makes the table `count` entries long; new ones are not allocated.
    pub fn resize(&mut self, count: u32) {
        self.entries.resize(count as usize, UNALLOCATED);
    }
}

/// The first block whose entry shares a sector of the table with the entry of `block`.
pub fn sector_start(block: u32) -> u32 {
    block - block % ENTRIES_PER_SECTOR as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_comes_back_and_is_padded_with_ones() {
        let mut bat = Bat::new(130);
        bat.set(0, 9);
        bat.set(129, 0x0102_0304);
        let bytes = bat.encode();
        assert_eq!(bytes.len(), 1024);
        assert_eq!(&bytes[129 * 4..131 * 4], b"\x01\x02\x03\x04\xff\xff\xff\xff");
        assert_eq!(Bat::decode(&bytes, 130).unwrap(), bat);
        assert_eq!(bat.allocated().collect::<Vec<_>>(), [(0, 9), (129, 0x0102_0304)]);
        assert_eq!((bat.entry(1), bat.entry(130), bat.entry(u32::MAX)), (None, None, None));
        assert_eq!(sector_start(129), 128);
    }

    #[test]
    fn a_short_table_is_an_error() {
        assert!(Bat::decode(&[0; 512], 129).is_err());
        assert!(Bat::decode(&[], u32::MAX).is_err());
    }
}
