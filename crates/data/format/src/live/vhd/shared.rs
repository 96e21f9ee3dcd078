//! Where blocks are, for threads other than the one that keeps the image.
//!
//! The owner of an image writes one word a block here, once it knows enough of the block that anybody may use it
//! without asking; the other threads read that word and nothing else of the image:
//!
//! | word | what the block is | published when |
//! |---|---|---|
//! | 0 | unknown: the owner is to be asked | at first, and before anything about the block changes |
//! | all ones | not in this image | the table has no place for it |
//! | else the inverted sector of its bitmap | here, with every sector | it is full, and a kill of the process cannot take a sector of it away: what its bitmap has more than the one on disk is in the intent log |
//!
//! A request that read a word keeps using what it said. So whatever gives a place another meaning (a block that is
//! given back, another image in this one's place) first makes sure that no such request is left:
//! see `tapio_block`'s gate. A block that gets a place needs no such care: a request that still reads around it began
//! before the write that changed it was answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tapio_ring::Storage;
use tapio_types::{SECTOR_LEN, Span};

use super::VhdLayer;
use crate::live::mapping::{Extent, Lookup, Place};

const UNKNOWN: u32 = 0;
/// Sector 0 has the copy of the footer, so that no block is there.
const ABSENT: u32 = u32::MAX;

/// The map of one image.
#[derive(Debug)]
pub struct SharedMap {
    /// Zeroes that were never touched cost no memory.
    words: Box<[AtomicU32]>,
    block_shift: u32,
    /// Bytes from the sector in a word to the block's data.
    bitmap_len: u64,
    /// What a block reads as that is not here.
    absent: Place,
}

impl SharedMap {
    /// A map of `count` unknown blocks.
    fn new(count: u32, block_shift: u32, bitmap_len: u64, absent: Place) -> Self {
        // SAFETY: zero is a valid value of every word.
        let words = unsafe { Box::new_zeroed_slice(count as usize).assume_init() };
        Self { words, block_shift, bitmap_len, absent }
    }

    /// Nothing is known of the block any more.
    pub(super) fn withdraw(&self, block: u32) {
        if let Some(word) = self.words.get(block as usize) {
            word.store(UNKNOWN, Ordering::Release);
        }
    }

    /// The block is not in this image, or at `sector` with all its sectors.
    pub(super) fn publish(&self, block: u32, sector: Option<u32>) {
        if let Some(word) = self.words.get(block as usize) {
            word.store(sector.map_or(ABSENT, |sector| !sector), Ordering::Release);
        }
    }

    /// Forgets everything and gives the memory back. The owner tells again what it is asked.
    pub(crate) fn forget(&self) {
        const PAGE_LEN: usize = 4096;
        let words = self.words.as_ptr_range();
        let start = words.start.addr().next_multiple_of(PAGE_LEN);
        let end = words.end.addr() & !(PAGE_LEN - 1);
        if start < end {
            let first = words.start.with_addr(start).cast_mut().cast();
            // SAFETY: whole pages of this slice and of nothing else, of memory that is the process' alone, so that they
            // read as zero afterwards. A thread that reads meanwhile finds a word as it was or unknown, and either is
            // true. The owner writes, and runs this.
            unsafe { libc::madvise(first, end - start, libc::MADV_DONTNEED) };
        }
    }

    /// Where the beginning of `want` is, as far as it is known.
    pub(crate) fn lookup(&self, want: Span) -> Lookup {
        let block = (want.start >> self.block_shift) as u32;
        let within = want.start & ((1 << self.block_shift) - 1);
        let len = want.len.min((1 << self.block_shift) - within);
        let word = self.words.get(block as usize).map_or(UNKNOWN, |word| word.load(Ordering::Acquire));
        let place = match word {
            UNKNOWN => return Lookup::Miss { block },
            ABSENT => self.absent,
            inverted => Place::Data { offset: u64::from(!inverted) * SECTOR_LEN + self.bitmap_len + within },
        };
        Lookup::Extent(Extent { len, place })
    }
}

impl<S: Storage> VhdLayer<S> {
    /// The map of this image for other threads, which from now on is kept true; `None` for an encrypted image, whose
    /// sectors are no use without its owner.
    pub(crate) fn share_map(&self) -> Option<Arc<SharedMap>> {
        if self.cipher.is_some() {
            return None;
        }
        let make = || {
            let count = self.header.borrow().entries_max;
            SharedMap::new(count, self.block_shift, self.bitmap_len, self.absent())
        };
        Some(Arc::clone(self.table.share(make)))
    }

    /// Tells other threads, if there are any, where a block is of which every sector is present.
    #[inline]
    pub(super) fn publish_full(&self, block: u32, sector: u32) {
        if let Some(shared) = self.table.shared()
            && self.writer.as_ref().is_none_or(|writer| writer.is_recorded())
        {
            shared.publish(block, Some(sector));
        }
    }

    /// Tells other threads, if there are any, that a block is not here.
    #[inline]
    pub(super) fn publish_absent(&self, block: u32) {
        if let Some(shared) = self.table.shared() {
            shared.publish(block, None);
        }
    }

    /// Gives back the memory of what other threads were told, when they have had nothing to do for a while.
    pub(crate) fn forget_shared(&self) {
        if let Some(shared) = self.table.shared() {
            shared.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_known_from_its_publication_to_its_withdrawal() {
        let map = SharedMap::new(4, 21, 512, Place::Parent);
        let at = |start, len| map.lookup(Span::new(start, len));
        assert_eq!(at(5 << 20, 512), Lookup::Miss { block: 2 });
        map.publish(2, Some(9));
        let data = |len| Lookup::Extent(Extent { len, place: Place::Data { offset: 10 * 512 + (1 << 20) } });
        assert_eq!(at(5 << 20, 512), data(512));
        assert_eq!(at(5 << 20, 8 << 20), data(1 << 20), "as far as the block goes");
        map.publish(2, None);
        assert_eq!(at(5 << 20, 512), Lookup::Extent(Extent { len: 512, place: Place::Parent }));
        map.withdraw(2);
        assert_eq!(at(5 << 20, 512), Lookup::Miss { block: 2 });
        // What lies on pages of its own is forgotten, as at rest; a map of one page may keep what it has.
        let large = SharedMap::new(64 << 10, 21, 512, Place::Parent);
        let known =
            |block: u64| large.lookup(Span::new(block << 21, 512)) != Lookup::Miss { block: block as u32 };
        (0..64 << 10).for_each(|block| large.publish(block, Some(9)));
        assert!((0..64 << 10).all(known));
        large.forget();
        assert!((1024..63 << 10).all(|block| !known(block)));
        large.publish(5000, Some(9));
        assert!(known(5000) && !known(5001));
        // The disk may grow past the map.
        map.publish(4, Some(9));
        map.withdraw(4);
        assert_eq!(at(8 << 20, 512), Lookup::Miss { block: 4 });
    }
}
