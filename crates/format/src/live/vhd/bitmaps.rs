//! The sector bitmaps that are in memory.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Bitmaps kept, at least; one of a 2 MiB block takes 512 bytes. tapdisk keeps 32.
const KEEP: usize = 2048;

/// A bitmap in memory, MSB first.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) block: u32,
    /// One bit a sector, MSB first, whole bytes of the bitmap on disk.
    pub(super) bits: Box<[u8]>,
    /// Bits were set that are not on disk.
    pub(super) dirty: bool,
    /// Writes under way that will set bits here: it must stay.
    pub(super) pins: u32,
    used: bool,
}

/// The bitmaps of partly present blocks, found by block number, evicted by a clock.
#[derive(Debug)]
pub(super) struct Bitmaps {
    /// Index of the entry of each block that has one. A table of all blocks would be as large as the allocation table
    /// itself, and traffic that is spread over a large disk would touch all of its pages.
    place: HashMap<u32, u32, BuildHasherDefault<BlockHasher>>,
    entries: Vec<Entry>,
    hand: usize,
}

impl Bitmaps {
    pub(super) fn new() -> Self {
        // Room at once, so that no request pays for growing: the memory is not touched before it is used.
        let place = HashMap::with_capacity_and_hasher(2 * KEEP, BuildHasherDefault::default());
        Self { place, entries: Vec::new(), hand: 0 }
    }

    pub(super) fn contains(&self, block: u32) -> bool {
        self.place.contains_key(&block)
    }

    pub(super) fn entry(&mut self, block: u32) -> Option<&mut Entry> {
        let entry = &mut self.entries[*self.place.get(&block)? as usize];
        entry.used = true;
        Some(entry)
    }

    /// Forgets all of them.
    pub(super) fn forget(&mut self) {
        self.place.clear();
        self.entries.clear();
        self.hand = 0;
    }

    /// Puts a bitmap in; one that is there already is newer and stays.
    pub(super) fn insert(&mut self, block: u32, bits: &[u8]) {
        if self.contains(block) {
            return;
        }
        if let Some(index) = self.victim() {
            let entry = &mut self.entries[index];
            self.place.remove(&entry.block);
            entry.block = block;
            entry.bits.copy_from_slice(bits);
            entry.used = true;
            self.place.insert(block, index as u32);
            return;
        }
        self.entries.push(Entry { block, bits: bits.into(), dirty: false, pins: 0, used: true });
        self.place.insert(block, self.entries.len() as u32 - 1);
    }

    /// An entry to be overwritten, once there are enough.
    fn victim(&mut self) -> Option<usize> {
        if self.entries.len() < KEEP {
            return None;
        }
        // Twice round: the first takes the marks off.
        for _ in 0..self.entries.len() * 2 {
            self.hand = (self.hand + 1) % self.entries.len();
            let entry = &mut self.entries[self.hand];
            if entry.dirty || entry.pins > 0 {
                continue;
            }
            if !std::mem::take(&mut entry.used) {
                return Some(self.hand);
            }
        }
        None
    }
}

/// Spreads block numbers, which no stranger chooses: a guest can only make its own lookups slower.
#[derive(Default)]
struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    fn write_u32(&mut self, block: u32) {
        // The upper bits choose among neighbours, the lower ones the place, so both halves must depend on all of it.
        let product = (self.0 ^ u64::from(block)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ product >> 32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_found_and_the_number_is_bounded() {
        let mut bitmaps = Bitmaps::new();
        let blocks = || (0..3 * KEEP as u32).map(|index| index * 331);
        for block in blocks() {
            bitmaps.insert(block, &block.to_be_bytes());
        }
        assert_eq!((bitmaps.entries.len(), bitmaps.place.len()), (KEEP, KEEP));
        let kept: Vec<u32> = blocks().filter(|block| bitmaps.contains(*block)).collect();
        assert_eq!(kept.len(), KEEP);
        for block in kept {
            let entry = bitmaps.entry(block).expect("it is kept");
            assert_eq!((entry.block, &*entry.bits), (block, &block.to_be_bytes()[..]));
        }
    }

    #[test]
    fn what_is_dirty_or_pinned_stays() {
        let mut bitmaps = Bitmaps::new();
        bitmaps.insert(1, &[1]);
        bitmaps.insert(2, &[2]);
        bitmaps.entry(1).expect("in").dirty = true;
        bitmaps.entry(2).expect("in").pins = 1;
        for block in 3..4 * KEEP as u32 {
            bitmaps.insert(block, &[0]);
        }
        assert!(bitmaps.contains(1) && bitmaps.contains(2));
        // A bitmap that is there is newer than one that comes from the disk.
        bitmaps.insert(1, &[9]);
        assert_eq!(&*bitmaps.entry(1).expect("in").bits, [1]);
    }
}
