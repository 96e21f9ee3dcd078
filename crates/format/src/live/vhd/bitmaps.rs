//! The sector bitmaps that are in memory.

/// Where the bitmap of a block is not in memory.
const ABSENT: u32 = 0;
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
    /// Index of the entry plus one; zero pages until used.
    place: Vec<u32>,
    entries: Vec<Entry>,
    hand: usize,
}

impl Bitmaps {
    pub(super) fn new(blocks: u32) -> Self {
        Self { place: vec![ABSENT; blocks as usize], entries: Vec::new(), hand: 0 }
    }

    pub(super) fn contains(&self, block: u32) -> bool {
        self.place[block as usize] != ABSENT
    }

    pub(super) fn entry(&mut self, block: u32) -> Option<&mut Entry> {
        match self.place[block as usize] {
            ABSENT => None,
            place => {
                let entry = &mut self.entries[place as usize - 1];
                entry.used = true;
                Some(entry)
            }
        }
    }

    /// Puts a bitmap in; one that is there already is newer and stays.
    pub(super) fn insert(&mut self, block: u32, bits: &[u8]) {
        if self.contains(block) {
            return;
        }
        if let Some(index) = self.victim() {
            let entry = &mut self.entries[index];
            self.place[entry.block as usize] = ABSENT;
            entry.block = block;
            entry.bits.copy_from_slice(bits);
            entry.used = true;
            self.place[block as usize] = index as u32 + 1;
            return;
        }
        self.entries.push(Entry { block, bits: bits.into(), dirty: false, pins: 0, used: true });
        self.place[block as usize] = self.entries.len() as u32;
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
