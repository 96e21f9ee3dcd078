//! The slots of a queue: buffers, their grants, and the requests in flight in them.

use std::io;

use super::options::FrontOptions;
use crate::blkif::{INDIRECT_PER_PAGE, Request, SEGMENT_LEN, Segment};
use crate::domain::{GrantRef, PAGE_LEN, Rights};
use crate::double::{DoubleVm, RevokeError};

/// What a slot is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Use {
    #[default]
    Free,
    /// A request, the how manieth of the queue, with so many pages of its buffer and of segments granted.
    Request { turn: u32, pages: u32, indirect_pages: u32 },
}

/// The slots of a queue.
#[derive(Debug)]
pub(super) struct Slots {
    vm: DoubleVm,
    back_end: u32,
    persistent: bool,
    segment_len: u32,
    /// First page of the first buffer, and pages of each.
    buffers: (u32, u32),
    /// The same of pages of segments.
    indirect: (u32, u32),
    /// Of each page of each buffer, and then of each page of segments.
    grants: Vec<GrantRef>,
    uses: Vec<Use>,
    /// The requests in flight, to be asked once more by [`super::FrontQueue::reconnect`].
    requests: Vec<Request>,
    free: Vec<u32>,
    turn: u32,
    /// Grants that could not be taken back because the back end still used the page.
    pub stuck: u64,
}

impl Slots {
    pub(super) fn new(vm: &DoubleVm, options: &FrontOptions) -> io::Result<Self> {
        let take = |count: u32| {
            let none = || io::Error::new(io::ErrorKind::OutOfMemory, "the domain has no pages left");
            vm.take_pages(options.depth * count).ok_or_else(none)
        };
        let (pages, segment_pages) = (options.buffer_pages(), options.indirect_pages());
        let buffers = (take(pages)?, pages);
        let indirect = (take(segment_pages)?, segment_pages);
        let mut slots = Self {
            vm: vm.clone(),
            back_end: options.back_end,
            persistent: options.persistent,
            segment_len: options.segment_len,
            buffers,
            indirect,
            grants: vec![GrantRef::default(); (options.depth * (pages + segment_pages)) as usize],
            uses: vec![Use::Free; options.depth as usize],
            requests: vec![Request::default(); options.depth as usize],
            free: (0..options.depth).rev().collect(),
            turn: 0,
            stuck: 0,
        };
        if options.persistent {
            for slot in 0..options.depth {
                slots.grant(slot, (pages, segment_pages), Rights::Write)?;
            }
        }
        Ok(slots)
    }

    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    pub(super) fn next(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Where the buffer of a slot begins.
    pub(super) fn buffer(&self, slot: u32) -> *mut u8 {
        self.vm.page(self.buffers.0 + slot * self.buffers.1).as_ptr()
    }

    fn grant_index(&self, slot: u32) -> usize {
        (slot * (self.buffers.1 + self.indirect.1)) as usize
    }

    /// Grants the first pages of a slot's buffer, and of its segments.
    fn grant(&mut self, slot: u32, (pages, indirect_pages): (u32, u32), rights: Rights) -> io::Result<()> {
        let first = self.grant_index(slot);
        for page in 0..pages {
            let of = self.buffers.0 + slot * self.buffers.1 + page;
            self.grants[first + page as usize] = self.vm.grant(of, rights, self.back_end)?;
        }
        for page in 0..indirect_pages {
            let of = self.indirect.0 + slot * self.indirect.1 + page;
            let index = first + (self.buffers.1 + page) as usize;
            // Pages that are mapped persistently are mapped for writing, these too.
            let rights = if self.persistent { Rights::Write } else { Rights::Read };
            self.grants[index] = self.vm.grant(of, rights, self.back_end)?;
        }
        Ok(())
    }

    /// Takes a slot for a request and completes it: its id and its segments, which cover the first `len` bytes of the
    /// buffer. The slot must be there ([`Slots::next`]), and `len` fit.
    pub(super) fn fill(&mut self, request: &mut Request, len: u32, rights: Rights) -> io::Result<u32> {
        let count = len.div_ceil(self.segment_len);
        let pages = len.div_ceil(PAGE_LEN as u32);
        request.segments = count as u16;
        request.indirect = request.direct.len() < count as usize;
        let indirect_pages = if request.indirect { count.div_ceil(INDIRECT_PER_PAGE as u32) } else { 0 };
        let Some(slot) = self.next() else {
            return Err(io::Error::other("no slot is free"));
        };
        if !self.persistent {
            self.grant(slot, (pages, indirect_pages), rights)?;
        }
        self.free.pop();
        self.turn = self.turn.wrapping_add(1);
        request.id = u64::from(slot) | u64::from(self.turn) << 32;
        self.uses[slot as usize] = Use::Request { turn: self.turn, pages, indirect_pages };
        let first = self.grant_index(slot);
        let per_page = PAGE_LEN as u32 / self.segment_len;
        let segments_at = self.indirect.0 + slot * self.indirect.1;
        for index in 0..count {
            let begin = index * self.segment_len;
            let end = (begin + self.segment_len).min(len) - 1;
            let sector = |at: u32| (at % PAGE_LEN as u32 / 512) as u8;
            let grant = self.grants[first + (index / per_page) as usize];
            let segment = Segment { grant, first: sector(begin), last: sector(end) };
            if request.indirect {
                self.vm.write(segments_at, index as usize * SEGMENT_LEN, &segment.encode());
            } else {
                request.direct[index as usize] = segment;
            }
        }
        for page in 0..indirect_pages {
            request.grants[page as usize] = self.grants[first + (self.buffers.1 + page) as usize];
        }
        self.requests[slot as usize] = *request;
        Ok(slot)
    }

    /// The slot of a request that was answered, free again. `None` if no such request is in flight.
    pub(super) fn release(&mut self, id: u64) -> Option<u32> {
        let (slot, answered) = (id as u32, (id >> 32) as u32);
        let Use::Request { turn, pages, indirect_pages } = *self.uses.get(slot as usize)? else {
            return None;
        };
        if turn != answered {
            return None;
        }
        if !self.persistent {
            let first = self.grant_index(slot);
            let segments = first + self.buffers.1 as usize;
            for index in (first..first + pages as usize).chain(segments..segments + indirect_pages as usize) {
                let taken = self.vm.revoke(self.grants[index]);
                self.stuck += u64::from(matches!(taken, Err(RevokeError::InUse(_))));
            }
        }
        self.uses[slot as usize] = Use::Free;
        self.free.push(slot);
        Some(slot)
    }

    /// Requests that have no answer, in the order in which they were asked.
    pub(super) fn under_way(&self) -> Vec<Request> {
        let mut turns: Vec<(u32, u32)> = Vec::new();
        for (slot, used) in self.uses.iter().enumerate() {
            if let Use::Request { turn, .. } = used {
                turns.push((self.turn.wrapping_sub(*turn), slot as u32));
            }
        }
        turns.sort_unstable_by(|one, other| other.cmp(one));
        turns.into_iter().map(|(_, slot)| self.requests[slot as usize]).collect()
    }
}
