//! Where the words of a segment are.
//!
//! | word | |
//! |---|---|
//! | 0..3 | magic, version, slots |
//! | 3 | slots ever used: those behind were never used |
//! | 4 | disks that have a slot |
//! | 32.. | a slot of eight words, a cache line, for each disk |

/// "TAPIOSHR" as the first eight bytes of the file.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"TAPIOSHR");
/// Layout number. A process that does not know it leaves the segment alone.
pub const VERSION: u64 = 2;
/// Disks that can share a device.
pub const SLOTS: usize = 256;
/// Bytes of a segment file.
pub const SEGMENT_LEN: usize = 5 * 4096;

/// Word indices.
pub mod at {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const SLOTS: usize = 2;
    pub const USED: usize = 3;
    pub const MEMBERS: usize = 4;
    const FIRST: usize = 32;
    const SLOT_WORDS: usize = 8;

    /// Process and start time, see `pool::layout::Owner`; 0: a free slot.
    pub const fn owner(slot: usize) -> usize {
        FIRST + slot * SLOT_WORDS
    }
    /// Bytes sent to the device so far and the fixed cost of each piece; runs freely.
    pub const fn cost(slot: usize) -> usize {
        owner(slot) + 1
    }
    /// Bytes moved so far; runs freely.
    pub const fn bytes(slot: usize) -> usize {
        owner(slot) + 6
    }
    /// Nanoseconds in which something was in flight or waited; runs freely.
    pub const fn busy(slot: usize) -> usize {
        owner(slot) + 2
    }
    /// 1 to `sample::WEIGHT_MAX`.
    pub const fn weight(slot: usize) -> usize {
        owner(slot) + 3
    }
    /// See `sample::flag`.
    pub const fn flags(slot: usize) -> usize {
        owner(slot) + 4
    }
    /// Minor number of the disk.
    pub const fn minor(slot: usize) -> usize {
        owner(slot) + 5
    }
    /// Up to when the disk competes if it does nothing more, by the host's clock; `u64::MAX`: something is in flight.
    pub const fn until(slot: usize) -> usize {
        owner(slot) + 7
    }
}

const _: () = assert!(at::until(SLOTS - 1) < SEGMENT_LEN / 8);
