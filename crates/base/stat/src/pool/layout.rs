//! Where the words of a pool's segment are, and how the two that must change together are packed.
//!
//! | word | |
//! |---|---|
//! | 0..4 | magic, version, pages, slots |
//! | 4 | slots ever used: those behind were never used |
//! | 8 | the state: free pages and the last change, see [`FreePages`] |
//! | 16 | the virtual time: pages handed out while a disk waited |
//! | 24..28 | a bit for each slot that waits |
//! | 32.. | a slot of eight words for each disk |
//!
//! Words have the host's own byte order: all processes that share a segment run on the same host.

/// "TAPIOPOO" as the first eight bytes of the file.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"TAPIOPOO");
/// Layout number. A process that does not know it leaves the segment alone.
pub const VERSION: u64 = 1;
/// Disks that can share a pool.
pub const SLOTS: usize = 256;
/// Most pages of a pool: 256 MiB less one page.
pub const PAGES_MAX: u32 = 65_535;
/// Bytes of a segment file.
pub const SEGMENT_LEN: usize = 5 * 4096;

/// Word indices.
pub mod at {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const TOTAL: usize = 2;
    pub const SLOTS: usize = 3;
    pub const USED: usize = 4;
    pub const STATE: usize = 8;
    pub const TIME: usize = 16;
    pub const WAITING: usize = 24;
    pub const WAITING_WORDS: usize = 4;
    const FIRST: usize = 32;
    const SLOT_WORDS: usize = 8;

    /// Process and start time, see `Owner`; 0: a free slot.
    pub const fn owner(slot: usize) -> usize {
        FIRST + slot * SLOT_WORDS
    }
    /// See `Share`.
    pub const fn share(slot: usize) -> usize {
        owner(slot) + 1
    }
    /// Virtual time at which the disk's next request may start.
    pub const fn tag(slot: usize) -> usize {
        owner(slot) + 2
    }
    /// Pages of the request that waits.
    pub const fn want(slot: usize) -> usize {
        owner(slot) + 3
    }
    /// 1: was woken and has not looked yet.
    pub const fn woken(slot: usize) -> usize {
        owner(slot) + 4
    }
    /// Minor number of the disk.
    pub const fn minor(slot: usize) -> usize {
        owner(slot) + 5
    }
}

const _: () = assert!(at::minor(SLOTS - 1) < SEGMENT_LEN / 8);
const _: () = assert!(at::WAITING_WORDS * 64 == SLOTS);

/// Free pages, and the last change with the slot that it belongs to: one word, so that a change happens or does not,
/// at whatever moment a process is killed.
///
/// `free:16 | delta:17 | slot:8 | count:23`. The change counts in the slot's [`Share`] as soon as a process has carried
/// it over; that has happened when the share's count is `count`, and not yet when it is one less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreePages(pub u64);

const COUNT_MASK: u64 = (1 << 23) - 1;

impl FreePages {
    pub fn new(free: u32, delta: i32, slot: usize, count: u64) -> Self {
        let delta = (i64::from(delta) + (1 << 16)) as u64;
        Self(u64::from(free) | delta << 16 | (slot as u64) << 33 | (count & COUNT_MASK) << 41)
    }

    pub const fn free(self) -> u32 {
        (self.0 & 0xffff) as u32
    }

    pub const fn delta(self) -> i32 {
        ((self.0 >> 16) & 0x1_ffff) as i32 - (1 << 16)
    }

    pub const fn slot(self) -> usize {
        ((self.0 >> 33) & 0xff) as usize
    }

    pub const fn count(self) -> u64 {
        self.0 >> 41
    }
}

/// Pages that a disk holds, and how often that has changed: `held:16 | count:48`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(pub u64);

impl Share {
    pub const fn held(self) -> u32 {
        (self.0 & 0xffff) as u32
    }

    pub const fn next_count(self) -> u64 {
        ((self.0 >> 16) + 1) & COUNT_MASK
    }

    /// Whether the last change of `state` is still to be carried over to this share.
    pub const fn lacks(self, state: FreePages) -> bool {
        self.next_count() == state.count()
    }

    /// After that. Never below nothing or above the largest pool, whatever a damaged segment says.
    pub fn with(self, delta: i32) -> Self {
        let held = (self.held() as i32 + delta).clamp(0, PAGES_MAX as i32) as u64;
        Self(held | ((self.0 >> 16).wrapping_add(1)) << 16)
    }
}

/// A process, so that a number given out again is not mistaken for it: `pid:32 | start:32`, the start in clock ticks
/// since the host's start, modulo 2^32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub u64);

impl Owner {
    pub const NONE: Self = Self(0);

    pub const fn new(pid: u32, start: u64) -> Self {
        Self((pid as u64) << 32 | (start & 0xffff_ffff))
    }

    pub const fn pid(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub const fn start(self) -> u32 {
        self.0 as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_hold_what_was_put_into_them() {
        for (free, delta, slot, count) in
            [(0, 0, 0, 0), (65_535, 65_535, 255, COUNT_MASK), (704, -65_535, 7, 5), (1, -1, 128, 1 << 22)]
        {
            let state = FreePages::new(free, delta, slot, count);
            assert_eq!(
                (state.free(), state.delta(), state.slot(), state.count()),
                (free, delta, slot, count)
            );
        }
        let share = Share(COUNT_MASK << 16 | 9);
        assert_eq!((share.next_count(), share.with(-3).held(), share.with(-30).held()), (0, 6, 0));
        assert!(share.lacks(FreePages::new(1, 1, 0, 1 << 23)));
        assert!(!share.with(1).lacks(FreePages::new(1, 1, 0, 1 << 23)));
        let owner = Owner::new(4711, 0x1_2345_6789);
        assert_eq!((owner.pid(), owner.start()), (4711, 0x2345_6789));
    }
}
