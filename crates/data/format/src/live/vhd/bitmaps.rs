//! The sector bitmaps that are in memory.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::traffic::Flying;

/// Bitmaps kept, at least, if nothing else is asked for; one of a 2 MiB block takes 512 bytes. tapdisk keeps 32.
pub const BITMAPS_KEPT: usize = 512;
/// No block has this number: tables are far shorter.
const NO_BLOCK: u32 = u32::MAX;

/// A bitmap in memory, MSB first.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) block: u32,
    /// One bit a sector, MSB first, whole bytes of the bitmap on disk.
    pub(super) bits: Box<[u8]>,
    /// Bits were set that are not on disk.
    pub(super) dirty: bool,
    /// A batch is writing it: until that is durable it must be found here.
    pub(super) pinned: bool,
    used: bool,
}

/// The bitmaps of partly present blocks, found by block number, evicted by a clock.
#[derive(Debug)]
pub(super) struct Bitmaps {
    /// Index of the entry of each block that has one. A table of all blocks would be as large as the allocation table
    /// itself, and traffic that is spread over a large disk would touch all of its pages.
    place: HashMap<u32, u32, BuildHasherDefault<BlockHasher>>,
    entries: Vec<Entry>,
    /// Entries that belong to no block any more.
    spare: Vec<u32>,
    hand: usize,
    kept: usize,
}

impl Bitmaps {
    /// Room for `kept` and for those that must stay.
    pub(super) fn new(kept: usize) -> Self {
        // Room at once, so that no request pays for growing: the memory is not touched before it is used.
        let place = HashMap::with_capacity_and_hasher(2 * kept, BuildHasherDefault::default());
        Self { place, entries: Vec::new(), spare: Vec::new(), hand: 0, kept }
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
        self.spare.clear();
        self.hand = 0;
    }

    /// Puts a bitmap in; one that is there already is newer and stays.
    pub(super) fn insert(&mut self, block: u32, bits: &[u8], flying: &Flying) {
        if self.contains(block) {
            return;
        }
        if let Some(index) = self.victim(flying) {
            let entry = &mut self.entries[index];
            self.place.remove(&entry.block);
            entry.block = block;
            entry.bits.copy_from_slice(bits);
            (entry.used, entry.dirty, entry.pinned) = (true, false, false);
            self.place.insert(block, index as u32);
            return;
        }
        self.entries.push(Entry { block, bits: bits.into(), dirty: false, pinned: false, used: true });
        self.place.insert(block, self.entries.len() as u32 - 1);
    }

    /// Forgets the bitmap of a block that is given back.
    pub(super) fn remove(&mut self, block: u32) {
        if let Some(index) = self.place.remove(&block) {
            self.entries[index as usize].block = NO_BLOCK;
            self.spare.push(index);
        }
    }

    /// An entry to be overwritten: one without a block, or another once there are enough.
    fn victim(&mut self, flying: &Flying) -> Option<usize> {
        if let Some(index) = self.spare.pop() {
            return Some(index as usize);
        }
        if self.entries.len() < self.kept {
            return None;
        }
        // Twice round: the first takes the marks off.
        for _ in 0..self.entries.len() * 2 {
            self.hand = (self.hand + 1) % self.entries.len();
            let entry = &mut self.entries[self.hand];
            if entry.dirty || entry.pinned || !flying.is_quiet(entry.block) {
                continue;
            }
            if !std::mem::take(&mut entry.used) {
                return Some(self.hand);
            }
        }
        None
    }
}

/// Spreads block numbers. Only the disk's own guest chooses them, so it can only make its own lookups slower.
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
        let (mut bitmaps, flying) = (Bitmaps::new(BITMAPS_KEPT), Flying::new(true));
        let blocks = || (0..3 * BITMAPS_KEPT as u32).map(|index| index * 331);
        for block in blocks() {
            bitmaps.insert(block, &block.to_be_bytes(), &flying);
        }
        assert_eq!((bitmaps.entries.len(), bitmaps.place.len()), (BITMAPS_KEPT, BITMAPS_KEPT));
        let kept: Vec<u32> = blocks().filter(|block| bitmaps.contains(*block)).collect();
        assert_eq!(kept.len(), BITMAPS_KEPT);
        for block in kept {
            let entry = bitmaps.entry(block).expect("it is kept");
            assert_eq!((entry.block, &*entry.bits), (block, &block.to_be_bytes()[..]));
        }
    }

    #[test]
    fn what_is_dirty_or_in_use_stays() {
        let (mut bitmaps, flying) = (Bitmaps::new(BITMAPS_KEPT), Flying::new(true));
        for block in 1..=3 {
            bitmaps.insert(block, &[block as u8], &flying);
        }
        bitmaps.entry(1).expect("in").dirty = true;
        bitmaps.entry(2).expect("in").pinned = true;
        flying.begin(3);
        for block in 4..4 * BITMAPS_KEPT as u32 {
            bitmaps.insert(block, &[0], &flying);
        }
        assert!((1..=3).all(|block| bitmaps.contains(block)));
        // A bitmap that is there is newer than one that comes from the disk.
        bitmaps.insert(1, &[9], &flying);
        assert_eq!(&*bitmaps.entry(1).expect("in").bits, [1]);
    }

    #[test]
    fn a_bitmap_that_is_forgotten_makes_room_and_leaves_no_mark() {
        let (mut bitmaps, flying) = (Bitmaps::new(BITMAPS_KEPT), Flying::new(true));
        bitmaps.insert(1, &[1], &flying);
        bitmaps.entry(1).expect("in").dirty = true;
        bitmaps.remove(1);
        bitmaps.remove(1);
        assert!(!bitmaps.contains(1));
        bitmaps.insert(2, &[2], &flying);
        let entry = bitmaps.entry(2).expect("in");
        assert_eq!((&*entry.bits, entry.dirty), (&[2][..], false));
        assert_eq!(bitmaps.entries.len(), 1);
    }
}
