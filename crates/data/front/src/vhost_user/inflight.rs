//! The in-flight region, and the part of a split queue in it: which requests the guest has no answer for, in memory
//! that survives this process.
//!
//! Layout and order of the steps: vhost-user protocol, section *Inflight I/O tracking* (split virtqueue). The region
//! is made by the first back end, kept by the front end, and given to whichever back end comes next. Only back ends
//! read it, so that how queues follow each other in it is ours to choose; a front end can still write anything to it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use super::inflight_packed::{self, PackedInflight};
use super::memory::{MapError, Mapping, memfd};
use super::message::InflightSpec;
use super::vring::QUEUE_SIZE_MAX;

const HEADER_LEN: u64 = 16;
const ENTRY_LEN: u64 = 16;
/// Queues begin on cache lines of their own.
const QUEUE_ALIGN: u64 = 64;
const VERSION: u16 = 1;

// struct { u64 features; u16 version; u16 desc_num; u16 last_batch_head; u16 used_idx; }
const AT_VERSION: usize = 8;
const AT_DESC_NUM: usize = 10;
const AT_LAST_BATCH_HEAD: usize = 12;
const AT_USED_INDEX: usize = 14;
// struct { u8 inflight; u8 padding[5]; u16 next; u64 counter; }
const AT_NEXT: usize = 6;
const AT_COUNTER: usize = 8;

const fn queue_len(queue_size: u16) -> u64 {
    (HEADER_LEN + ENTRY_LEN * queue_size as u64).next_multiple_of(QUEUE_ALIGN)
}

const fn packed_len(queue_size: u16) -> u64 {
    (inflight_packed::HEADER_LEN + inflight_packed::ENTRY_LEN * queue_size as u64)
        .next_multiple_of(QUEUE_ALIGN)
}

/// The part of one queue, of either kind.
#[derive(Debug)]
pub enum InflightPart {
    /// Of a split queue.
    Split(InflightQueue),
    /// Of a packed queue.
    Packed(PackedInflight),
}

/// The region of a device, mapped.
#[derive(Clone, Debug)]
pub struct InflightRegion {
    mapping: Arc<Mapping>,
    queues: u16,
    queue_size: u16,
}

impl InflightRegion {
    /// Makes a region for `queues` queues of `queue_size` descriptors, whatever their kind will be: what
    /// `GET_INFLIGHT_FD` answers.
    pub fn create(queues: u16, queue_size: u16) -> std::io::Result<(InflightSpec, OwnedFd)> {
        let len = packed_len(queue_size) * u64::from(queues);
        let file = memfd(c"vhost-user-inflight", len)?;
        Ok((InflightSpec { len, offset: 0, queues, queue_size }, file))
    }

    /// Maps a region that the front end kept: `SET_INFLIGHT_FD`.
    pub fn map(spec: InflightSpec, file: &OwnedFd) -> Result<Self, String> {
        if spec.queues == 0 || spec.queue_size == 0 || spec.queue_size > QUEUE_SIZE_MAX {
            return Err(format!("in-flight region for {} queues of {}", spec.queues, spec.queue_size));
        }
        let want = queue_len(spec.queue_size) * u64::from(spec.queues);
        if spec.len < want || !spec.offset.is_multiple_of(8) {
            return Err(format!(
                "in-flight region of {} bytes at {}: {} queues of {} need {want} bytes at a multiple of 8",
                spec.len, spec.offset, spec.queues, spec.queue_size
            ));
        }
        let most = packed_len(spec.queue_size) * u64::from(spec.queues);
        let mapping = Mapping::new(file.as_fd(), spec.offset, spec.len.min(most))
            .map_err(|error: MapError| format!("in-flight region: {error}"))?;
        Ok(Self { mapping: Arc::new(mapping), queues: spec.queues, queue_size: spec.queue_size })
    }

    /// The part of queue `index`, if the region has one for a queue of this size.
    pub fn queue(&self, index: usize, queue_size: u16) -> Option<InflightQueue> {
        if index >= usize::from(self.queues) || queue_size > self.queue_size {
            return None;
        }
        // SAFETY: `map` checked that the region holds `queues` parts of this length.
        let base = unsafe { self.mapping.as_ptr().add(queue_len(self.queue_size) as usize * index) };
        Some(InflightQueue { base, size: queue_size, counter: 0, _region: Arc::clone(&self.mapping) })
    }

    /// The part of packed queue `index`, if the region has one for a queue of this size.
    pub fn packed(&self, index: usize, queue_size: u16) -> Option<PackedInflight> {
        let len = packed_len(self.queue_size);
        let room = len * u64::from(self.queues) <= self.mapping.len();
        if index >= usize::from(self.queues) || queue_size > self.queue_size || !room {
            return None;
        }
        // SAFETY: the region holds `queues` parts of this length, as just checked, each a multiple of 64 bytes, from
        // an offset that is a multiple of 8.
        Some(unsafe {
            let base = self.mapping.as_ptr().add(len as usize * index);
            PackedInflight::new(base, queue_size, Arc::clone(&self.mapping))
        })
    }
}

/// The part of one queue.
#[derive(Debug)]
pub struct InflightQueue {
    base: *mut u8,
    size: u16,
    counter: u64,
    _region: Arc<Mapping>,
}

// SAFETY: the memory belongs to no thread; it is accessed by atomic operations alone, from the owner of the value.
unsafe impl Send for InflightQueue {}

/// What the last back end left behind.
#[derive(Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Heads without an answer, in the order in which they were taken.
    pub heads: Vec<u16>,
    /// Where the available ring is to be read on.
    pub next_avail: u16,
}

impl InflightQueue {
    fn features(&self) -> &AtomicU64 {
        // SAFETY: the first field of this queue's part, which is 8-aligned.
        unsafe { AtomicU64::from_ptr(self.base.cast()) }
    }

    fn word(&self, at: usize) -> &AtomicU16 {
        // SAFETY: callers give an even offset inside this queue's part, which is 8-aligned.
        unsafe { AtomicU16::from_ptr(self.base.add(at).cast()) }
    }

    fn entry(&self, head: u16) -> usize {
        assert!(head < self.size, "heads are checked before they are noted");
        (HEADER_LEN + ENTRY_LEN * u64::from(head)) as usize
    }

    fn flag(&self, head: u16) -> &AtomicU8 {
        // SAFETY: the entry lies inside this queue's part.
        unsafe { AtomicU8::from_ptr(self.base.add(self.entry(head))) }
    }

    fn counter(&self, head: u16) -> &AtomicU64 {
        // SAFETY: the entry lies inside this queue's part and is 8-aligned.
        unsafe { AtomicU64::from_ptr(self.base.add(self.entry(head) + AT_COUNTER).cast()) }
    }

    /// Reads what was left behind, finishes a batch that was cut off between its publication and its last step, and
    /// makes the part ready. `used_index` is where the used ring stands, `base` where the front end says that the
    /// available ring is to be read on. A part that was never used gives no heads and `base`.
    pub fn recover(&mut self, used_index: u16, base: u16) -> Recovered {
        // The part may have belonged to a packed queue.
        let fresh = self.features().load(Ordering::Relaxed) != 0
            || self.word(AT_VERSION).load(Ordering::Relaxed) != VERSION
            || self.word(AT_DESC_NUM).load(Ordering::Relaxed) != self.size;
        if fresh {
            for head in 0..self.size {
                self.flag(head).store(0, Ordering::Relaxed);
            }
            self.word(AT_DESC_NUM).store(self.size, Ordering::Relaxed);
            self.word(AT_USED_INDEX).store(used_index, Ordering::Relaxed);
            self.features().store(0, Ordering::Relaxed);
            self.word(AT_VERSION).store(VERSION, Ordering::Release);
            return Recovered { heads: Vec::new(), next_avail: base };
        }
        // Answers that were published but whose marks were not yet cleared.
        let behind = used_index.wrapping_sub(self.word(AT_USED_INDEX).load(Ordering::Relaxed));
        let mut head = self.word(AT_LAST_BATCH_HEAD).load(Ordering::Relaxed);
        for _ in 0..behind.min(self.size) {
            if head >= self.size {
                break;
            }
            self.flag(head).store(0, Ordering::Relaxed);
            head = self.word(self.entry(head) + AT_NEXT).load(Ordering::Relaxed);
        }
        self.word(AT_USED_INDEX).store(used_index, Ordering::Release);
        let mut left: Vec<(u64, u16)> = (0..self.size)
            .filter(|head| self.flag(*head).load(Ordering::Relaxed) == 1)
            .map(|head| (self.counter(head).load(Ordering::Relaxed), head))
            .collect();
        left.sort_unstable();
        self.counter = left.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        let next_avail = used_index.wrapping_add(left.len() as u16);
        Recovered { heads: left.into_iter().map(|(_, head)| head).collect(), next_avail }
    }

    /// Request `head` was taken.
    pub fn begin(&mut self, head: u16) {
        self.counter(head).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.flag(head).store(1, Ordering::Release);
    }

    /// Request `head` was put back into the available ring, untouched.
    pub fn forget(&mut self, head: u16) {
        self.flag(head).store(0, Ordering::Release);
    }

    /// Request `head` is part of the batch of answers that is published next.
    pub fn batch(&mut self, head: u16) {
        let last = self.word(AT_LAST_BATCH_HEAD).load(Ordering::Relaxed);
        self.word(self.entry(head) + AT_NEXT).store(last, Ordering::Relaxed);
        self.word(AT_LAST_BATCH_HEAD).store(head, Ordering::Release);
    }

    /// The batch `heads` was published; the used ring stands at `used_index` now.
    pub fn published(&mut self, heads: &[u16], used_index: u16) {
        for head in heads {
            self.flag(*head).store(0, Ordering::Release);
        }
        self.word(AT_USED_INDEX).store(used_index, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(queues: u16, size: u16) -> InflightRegion {
        let (spec, file) = InflightRegion::create(queues, size).unwrap();
        InflightRegion::map(spec, &file).unwrap()
    }

    #[test]
    fn a_fresh_part_begins_where_the_front_end_says() {
        let mut queue = region(2, 8).queue(1, 8).unwrap();
        assert_eq!(queue.recover(5, 7), Recovered { heads: vec![], next_avail: 7 });
    }

    #[test]
    fn what_has_no_answer_comes_back_in_the_order_it_was_taken() {
        let region = region(1, 8);
        let mut queue = region.queue(0, 8).unwrap();
        queue.recover(0, 0);
        for head in [5, 2, 7, 0] {
            queue.begin(head);
        }
        queue.batch(2);
        queue.published(&[2], 1);
        let mut next = region.queue(0, 8).unwrap();
        assert_eq!(next.recover(1, 1), Recovered { heads: vec![5, 7, 0], next_avail: 4 });
        // The counters go on: a request taken now comes after the old ones, should this one die too.
        next.begin(3);
        let mut third = region.queue(0, 8).unwrap();
        assert_eq!(third.recover(1, 1).heads, vec![5, 7, 0, 3]);
    }

    #[test]
    fn a_process_that_dies_between_publication_and_its_marks_answers_nothing_twice() {
        let region = region(1, 8);
        let mut queue = region.queue(0, 8).unwrap();
        queue.recover(0, 0);
        for head in [1, 2, 3] {
            queue.begin(head);
        }
        queue.batch(1);
        queue.batch(3);
        // The used ring was moved to 2, `published` was never reached.
        let mut next = region.queue(0, 8).unwrap();
        assert_eq!(next.recover(2, 0), Recovered { heads: vec![2], next_avail: 3 });
        // And when the process died before the used ring moved, all three are repeated.
        let region = self::region(1, 8);
        let mut queue = region.queue(0, 8).unwrap();
        queue.recover(0, 0);
        for head in [1, 2, 3] {
            queue.begin(head);
        }
        queue.batch(1);
        assert_eq!(region.queue(0, 8).unwrap().recover(0, 0).heads, vec![1, 2, 3]);
    }

    #[test]
    fn a_scribbled_region_is_survived() {
        for fill in [0x00u8, 0x01, 0x08, 0x7f, 0xff] {
            let (spec, file) = InflightRegion::create(1, 8).unwrap();
            let region = InflightRegion::map(spec, &file).unwrap();
            let bytes = vec![fill; spec.len as usize];
            std::os::unix::fs::FileExt::write_all_at(&std::fs::File::from(file), &bytes, 0).unwrap();
            let mut queue = region.queue(0, 8).unwrap();
            // SAFETY: the version and the size lie inside the region.
            unsafe {
                queue.base.cast::<u64>().write(0);
                queue.base.add(AT_VERSION).cast::<u16>().write(VERSION);
                queue.base.add(AT_DESC_NUM).cast::<u16>().write(8);
            }
            assert!(queue.recover(3, 3).heads.len() <= 8);
        }
    }

    #[test]
    fn a_region_too_small_for_its_queues_is_refused() {
        let (spec, file) = InflightRegion::create(2, 64).unwrap();
        assert!(InflightRegion::map(InflightSpec { queues: 5, ..spec }, &file).is_err());
        assert!(InflightRegion::map(InflightSpec { queues: 3, len: 1 << 30, ..spec }, &file).is_err());
        assert!(InflightRegion::map(InflightSpec { queue_size: 0, ..spec }, &file).is_err());
        assert!(InflightRegion::map(InflightSpec { offset: 4, ..spec }, &file).is_err());
        let region = InflightRegion::map(spec, &file).unwrap();
        assert!(region.queue(2, 64).is_none());
        assert!(region.queue(0, 128).is_none());
    }
}
