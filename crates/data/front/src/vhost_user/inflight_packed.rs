//! The part of one packed queue in the in-flight region.
//!
//! Layout and order of the steps: vhost-user protocol, section *Inflight I/O tracking* (packed virtqueue). Answers
//! overwrite descriptors of requests that still run, so that the region keeps a copy of each descriptor. What is free
//! and what follows what is kept here as well: while we run, nothing is read back from memory that others can write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::chain::Descriptor;
use super::memory::Mapping;
use super::packed::{PackedRing, Position};

/// Bytes before the entries.
pub const HEADER_LEN: u64 = 32;
/// Bytes of an entry.
pub const ENTRY_LEN: u64 = 32;
const VERSION: u16 = 1;
/// Our mark in the region's features, so that a split queue's leavings are never taken for ours.
pub const FEATURES: u64 = 1 << 34;

// struct { u64 features; u16 version; u16 desc_num; u16 free_head; u16 old_free_head; u16 used_idx; u16 old_used_idx;
//          u8 used_wrap_counter; u8 old_used_wrap_counter; u8 padding[7]; }
const AT_VERSION: usize = 8;
const AT_DESC_NUM: usize = 10;
const AT_FREE_HEAD: usize = 12;
const AT_OLD_FREE_HEAD: usize = 14;
const AT_USED_INDEX: usize = 16;
const AT_OLD_USED_INDEX: usize = 18;
const AT_USED_WRAP: usize = 20;
const AT_OLD_USED_WRAP: usize = 21;
// struct { u8 inflight; u8 padding; u16 next; u16 last; u16 num; u64 counter; u16 id; u16 flags; u32 len; u64 addr; }
const AT_NEXT: usize = 2;
const AT_LAST: usize = 4;
const AT_NUM: usize = 6;
const AT_COUNTER: usize = 8;
const AT_ID: usize = 16;
const AT_FLAGS: usize = 18;
const AT_LEN: usize = 20;
const AT_ADDR: usize = 24;

/// What is known of an entry without looking at the region.
#[derive(Clone, Copy, Debug, Default)]
struct Link {
    next: u16,
    /// Of a head: the last entry of its chain.
    last: u16,
    /// Of a head: how many entries its chain has.
    count: u16,
}

/// The part of one queue.
#[derive(Debug)]
pub struct PackedInflight {
    base: *mut u8,
    size: u16,
    counter: u64,
    /// The first free entry; the queue's size when there is none.
    free: u16,
    links: Box<[Link]>,
    _region: Arc<Mapping>,
}

// SAFETY: the memory belongs to no thread; it is accessed by atomic operations alone, from the owner of the value.
unsafe impl Send for PackedInflight {}

/// What the last back end left behind.
#[derive(Debug, PartialEq, Eq)]
pub struct PackedRecovered {
    /// Requests without an answer, by their first entry, in the order in which they were taken.
    pub marks: Vec<u16>,
    /// Where requests are to be read on.
    pub next_avail: Position,
    /// Where the next answer goes.
    pub next_used: Position,
    /// Descriptors of the requests without an answer.
    pub outstanding: u16,
}

impl PackedInflight {
    /// The part at `base`, which has room for `size` entries as long as `region` lives.
    ///
    /// # Safety
    /// `HEADER_LEN + size * ENTRY_LEN` bytes at `base` are part of `region`, and `base` is 8-aligned.
    pub(super) unsafe fn new(base: *mut u8, size: u16, region: Arc<Mapping>) -> Self {
        let links = vec![Link::default(); usize::from(size)].into_boxed_slice();
        Self { base, size, counter: 0, free: size, links, _region: region }
    }

    fn byte(&self, at: usize) -> &AtomicU8 {
        // SAFETY: callers give an offset inside this queue's part.
        unsafe { AtomicU8::from_ptr(self.base.add(at)) }
    }

    fn word(&self, at: usize) -> &AtomicU16 {
        // SAFETY: callers give an even offset inside this queue's part, which is 8-aligned.
        unsafe { AtomicU16::from_ptr(self.base.add(at).cast()) }
    }

    fn long(&self, at: usize) -> &AtomicU64 {
        // SAFETY: callers give an offset inside this queue's part that is a multiple of 8.
        unsafe { AtomicU64::from_ptr(self.base.add(at).cast()) }
    }

    fn entry(&self, index: u16) -> usize {
        assert!(index < self.size, "entries are checked before they are looked at");
        (HEADER_LEN + ENTRY_LEN * u64::from(index)) as usize
    }

    fn set_next(&mut self, index: u16, next: u16) {
        self.links[usize::from(index)].next = next;
        self.word(self.entry(index) + AT_NEXT).store(next, Ordering::Relaxed);
    }

    fn set_free(&mut self, free: u16) {
        self.free = free;
        self.word(AT_FREE_HEAD).store(free, Ordering::Release);
    }

    fn set_old(&self, used: Position) {
        self.word(AT_OLD_FREE_HEAD).store(self.free, Ordering::Release);
        self.word(AT_OLD_USED_INDEX).store(used.index, Ordering::Release);
        self.byte(AT_OLD_USED_WRAP).store(used.wrap.into(), Ordering::Release);
    }

    fn set_used(&self, used: Position) {
        self.word(AT_USED_INDEX).store(used.index, Ordering::Release);
        self.byte(AT_USED_WRAP).store(used.wrap.into(), Ordering::Release);
    }

    /// Reads what was left behind, finishes or takes back a batch that was cut off, and makes the part and the ring
    /// ready. `(next_avail, next_used)` is what the front end says; a part that was never used gives that back.
    pub fn recover(&mut self, ring: &PackedRing, said: (Position, Position)) -> PackedRecovered {
        let load = |at| self.word(at).load(Ordering::Relaxed);
        let ours = matches!(self.long(0).load(Ordering::Relaxed), 0 | FEATURES);
        let position = |index, wrap| Position {
            index: self.word(index).load(Ordering::Relaxed),
            wrap: self.byte(wrap).load(Ordering::Relaxed) != 0,
        };
        let used = position(AT_USED_INDEX, AT_USED_WRAP);
        let mut old = position(AT_OLD_USED_INDEX, AT_OLD_USED_WRAP);
        let known = ours && load(AT_VERSION) == VERSION && load(AT_DESC_NUM) == self.size;
        if !known || used.index >= self.size || old.index >= self.size {
            return self.begin_anew(said);
        }
        let mut free = load(AT_OLD_FREE_HEAD);
        // The whole ring may have been answered in one batch: then only the wrap counter tells.
        if used != old && !ring.is_available(old) {
            // The guest has seen the batch.
            (old, free) = (used, load(AT_FREE_HEAD));
        }
        // What is free is not in flight, whatever its mark says: that was about to be cleared, or to be set.
        for _ in 0..self.size {
            if free >= self.size {
                break;
            }
            self.byte(self.entry(free)).store(0, Ordering::Relaxed);
            free = load_word(self.base, self.entry(free) + AT_NEXT);
        }
        let (marks, outstanding) = self.claim();
        let free = self.link_free(&marks);
        self.set_free(free);
        self.set_used(old);
        self.set_old(old);
        self.long(0).store(FEATURES, Ordering::Release);
        // Answers of a batch that never became visible may lie in the ring behind its first one.
        for step in 0..outstanding {
            ring.mark_available(old.after(step, self.size));
        }
        let next_avail = old.after(outstanding, self.size);
        PackedRecovered { marks, next_avail, next_used: old, outstanding }
    }

    fn begin_anew(&mut self, (next_avail, next_used): (Position, Position)) -> PackedRecovered {
        self.word(AT_VERSION).store(0, Ordering::Release);
        for index in 0..self.size {
            self.byte(self.entry(index)).store(0, Ordering::Relaxed);
        }
        let free = self.link_free(&[]);
        self.set_free(free);
        self.set_used(next_used);
        self.set_old(next_used);
        self.word(AT_DESC_NUM).store(self.size, Ordering::Relaxed);
        self.long(0).store(FEATURES, Ordering::Relaxed);
        self.word(AT_VERSION).store(VERSION, Ordering::Release);
        PackedRecovered { marks: Vec::new(), next_avail, next_used, outstanding: 0 }
    }

    /// The chains that are in flight, oldest first, and how many entries they have together. A chain that contradicts
    /// itself or an earlier one was not written by this code, and is forgotten.
    fn claim(&mut self) -> (Vec<u16>, u16) {
        let mut heads: Vec<(u64, u16)> = (0..self.size)
            .filter(|head| self.byte(self.entry(*head)).load(Ordering::Relaxed) == 1)
            .map(|head| (self.long(self.entry(head) + AT_COUNTER).load(Ordering::Relaxed), head))
            .collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        let mut claimed = vec![false; usize::from(self.size)];
        let (mut marks, mut total) = (Vec::new(), 0u16);
        for (_, head) in heads {
            match self.follow(head, &claimed) {
                Some(chain) => {
                    let (count, last) = (chain.len() as u16, chain.last().copied().unwrap_or(head));
                    for index in chain {
                        claimed[usize::from(index)] = true;
                    }
                    let link = &mut self.links[usize::from(head)];
                    (link.count, link.last) = (count, last);
                    total += count;
                    marks.push(head);
                }
                None => self.byte(self.entry(head)).store(0, Ordering::Relaxed),
            }
        }
        (marks, total)
    }

    /// The entries of the chain at `head`, if they exist and belong to no other. Notes how they follow each other.
    fn follow(&mut self, head: u16, claimed: &[bool]) -> Option<Vec<u16>> {
        let count = load_word(self.base, self.entry(head) + AT_NUM);
        if count == 0 || count > self.size {
            return None;
        }
        let mut chain: Vec<u16> = Vec::with_capacity(usize::from(count));
        let mut index = head;
        let mut seen = vec![false; usize::from(self.size)];
        for _ in 0..count {
            let free = index < self.size
                && !claimed[usize::from(index)]
                && !std::mem::replace(&mut seen[usize::from(index)], true);
            // Another head in the middle of a chain is in flight by itself.
            let own = free && (index == head || self.byte(self.entry(index)).load(Ordering::Relaxed) == 0);
            if !own {
                return None;
            }
            chain.push(index);
            let next = load_word(self.base, self.entry(index) + AT_NEXT);
            self.links[usize::from(index)].next = next;
            index = next;
        }
        Some(chain)
    }

    /// Links everything that no chain of `marks` holds; gives the first of them.
    fn link_free(&mut self, marks: &[u16]) -> u16 {
        let mut held = vec![false; usize::from(self.size)];
        for mark in marks {
            let mut index = *mark;
            for _ in 0..self.links[usize::from(*mark)].count {
                held[usize::from(index)] = true;
                index = self.links[usize::from(index)].next;
            }
        }
        let mut next = self.size;
        for index in (0..self.size).rev().filter(|index| !held[usize::from(*index)]) {
            self.set_next(index, next);
            next = index;
        }
        next
    }

    /// A request was taken: its descriptors are kept. Gives the entry that names it from now on; none when there are
    /// more descriptors than entries, which the ring does not let happen.
    pub fn begin(&mut self, direct: &[Descriptor]) -> Option<u16> {
        let head = self.free;
        let (mut at, mut last) = (head, head);
        for descriptor in direct {
            if at >= self.size {
                return None;
            }
            let entry = self.entry(at);
            self.word(entry + AT_ID).store(descriptor.next, Ordering::Relaxed);
            self.word(entry + AT_FLAGS).store(descriptor.flags, Ordering::Relaxed);
            // SAFETY: the offset is a multiple of 4 inside this queue's part.
            let len = unsafe { AtomicU32::from_ptr(self.base.add(entry + AT_LEN).cast()) };
            len.store(descriptor.len, Ordering::Relaxed);
            self.long(entry + AT_ADDR).store(descriptor.at, Ordering::Relaxed);
            last = at;
            at = self.links[usize::from(at)].next;
        }
        let entry = self.entry(head);
        let count = direct.len() as u16;
        let link = &mut self.links[usize::from(head)];
        (link.count, link.last) = (count, last);
        self.word(entry + AT_NUM).store(count, Ordering::Relaxed);
        self.word(entry + AT_LAST).store(last, Ordering::Relaxed);
        self.long(entry + AT_COUNTER).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.byte(entry).store(1, Ordering::Release);
        self.set_free(at);
        // From here on the request counts as taken.
        self.word(AT_OLD_FREE_HEAD).store(at, Ordering::Release);
        Some(head)
    }

    /// The last request taken was put back into the ring, untouched.
    pub fn forget(&mut self, mark: u16) {
        let last = self.links[usize::from(mark)].last;
        self.set_next(last, self.free);
        self.word(AT_OLD_FREE_HEAD).store(mark, Ordering::Release);
        self.set_free(mark);
        self.byte(self.entry(mark)).store(0, Ordering::Release);
    }

    /// The batch `marks` becomes visible next; the next answer goes to `used` then.
    pub fn batch(&mut self, marks: &[u16], used: Position) {
        let mut free = self.free;
        for mark in marks {
            let last = self.links[usize::from(*mark)].last;
            self.set_next(last, free);
            free = *mark;
        }
        self.set_free(free);
        self.set_used(used);
    }

    /// The batch is visible.
    pub fn published(&mut self, marks: &[u16], used: Position) {
        for mark in marks {
            self.byte(self.entry(*mark)).store(0, Ordering::Release);
        }
        self.set_old(used);
    }

    /// Ring descriptors of a request.
    pub fn count(&self, mark: u16) -> u16 {
        self.links[usize::from(mark)].count
    }

    /// The descriptors of a request as they were when it was taken; the front end may have changed them since.
    pub fn descriptors(&self, mark: u16) -> impl Iterator<Item = Descriptor> + '_ {
        let mut index = mark;
        (0..self.count(mark)).map(move |_| {
            let entry = self.entry(index);
            index = self.links[usize::from(index)].next;
            // SAFETY: the offset is a multiple of 4 inside this queue's part.
            let len = unsafe { AtomicU32::from_ptr(self.base.add(entry + AT_LEN).cast()) };
            Descriptor {
                at: self.long(entry + AT_ADDR).load(Ordering::Relaxed),
                len: len.load(Ordering::Relaxed),
                flags: self.word(entry + AT_FLAGS).load(Ordering::Relaxed),
                next: self.word(entry + AT_ID).load(Ordering::Relaxed),
            }
        })
    }
}

fn load_word(base: *mut u8, at: usize) -> u16 {
    // SAFETY: callers give an even offset inside a queue's part, which is 8-aligned.
    unsafe { AtomicU16::from_ptr(base.add(at).cast()) }.load(Ordering::Relaxed)
}

#[cfg(test)]
#[path = "inflight_packed_tests.rs"]
mod tests;
