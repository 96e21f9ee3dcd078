//! The state of a ring and its steps: what is taken, cut into parts, noted and answered.

use std::collections::VecDeque;

use tapio_block::{Data, DiskError, Op};
use tapio_ring::Buffer;
use tapio_types::Span;
use tapio_xen::Channel;
use tapio_xen::blkif::{BackRing, INDIRECT_PER_PAGE, Request, Response, RingError, Segment, status};

use super::check::{self, Fault, Limits};
use super::mover::Mover;
use super::record::RecordQueue;
use super::report::{Broken, QueueCounts};
use super::slots::{Part, Places, Slot, Stage, Why, take_part, take_slot};

/// Bytes of a part whose data is copied, at most.
const PART_LEN_MAX: u64 = 1 << 20;
/// Segments of indirect requests that are copied by one call, at most.
const TABLE_LEN: usize = 16 << 10;
/// Whether requests are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueState {
    /// They are.
    Running,
    /// Takes nothing new.
    Halted,
    /// Takes nothing new, for this reason.
    Broken(Broken),
    /// Answers nothing any more.
    Dead,
}

/// What stands in the way of the first pending request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// Nothing.
    No,
    /// Requests of this ring have to end.
    Ends,
    /// So much memory was free, and was not enough.
    Memory(usize),
}

/// The state of a ring.
pub struct Core {
    pub ring: BackRing,
    pub mover: Mover,
    pub record: RecordQueue,
    pub free_entries: Vec<u32>,
    pub repeat: VecDeque<(u32, tapio_xen::blkif::Slot)>,
    pub limits: Limits,
    pub state: QueueState,
    pub slots: Places<Slot>,
    pub parts: Places<Part>,
    /// Requests without an answer.
    pub in_flight: usize,
    pub pending: VecDeque<u32>,
    pub ready: VecDeque<u32>,
    pub blocked: Blocked,
    /// Segments of indirect requests, as they were copied.
    pub table: Vec<u64>,
    pub table_used: usize,
    pub fetched: Vec<u32>,
    pub answers: Vec<(Response, u32)>,
    pub finished: Vec<(u32, Result<(), DiskError>)>,
    pub batch: Vec<u32>,
    /// When this batch was taken, as traces have it.
    pub stamp: u64,
    pub counts: QueueCounts,
}

impl Core {
    pub fn takes(&self) -> bool {
        self.state == QueueState::Running
    }

    pub fn has_leftovers(&self) -> bool {
        !self.pending.is_empty() || !self.ready.is_empty()
    }

    /// Whether a pull would do something, room at the disk assumed.
    pub fn has_work(&self) -> bool {
        if !self.ready.is_empty() {
            return true;
        }
        if !self.pending.is_empty() {
            return match self.blocked {
                Blocked::No => true,
                Blocked::Ends => false,
                Blocked::Memory(free) => self.mover.free_len() > free,
            };
        }
        let waits = !self.repeat.is_empty() || self.ring.waiting() > 0 || self.ring.peek();
        self.takes() && waits && self.has_places()
    }

    /// Whether there are places for requests: those whose storage hangs keep theirs after their answer.
    pub fn has_places(&self) -> bool {
        self.slots.used() < 2 * self.ring.size() as usize
    }

    pub fn break_down(&mut self, error: Broken) {
        if !matches!(self.state, QueueState::Broken(_) | QueueState::Dead) {
            self.state = QueueState::Broken(error);
        }
    }

    /// Takes up to `most` requests; those that make sense are pending then, the others answered.
    pub fn take(&mut self, most: usize, now_ns: u64, read_only: bool) -> Result<usize, RingError> {
        self.ring.look()?;
        let limits = Limits { read_only, ..self.limits };
        let abi = self.ring.abi();
        let table_max = usize::from(self.limits.max_indirect);
        let mut taken = 0;
        while taken < most && TABLE_LEN - self.table_used >= table_max {
            let (entry, bytes) = match self.repeat.pop_front() {
                Some(left) => {
                    self.counts.repeated += 1;
                    left
                }
                None => {
                    let places = self.has_places();
                    let Some(entry) = self.free_entries.last().copied().filter(|_| places) else { break };
                    let Some(bytes) = self.ring.take() else { break };
                    self.free_entries.pop();
                    self.record.take(entry, &bytes);
                    (entry, bytes)
                }
            };
            taken += 1;
            self.counts.requests += 1;
            self.in_flight += 1;
            match Request::decode(&bytes, abi) {
                Err(malformed) => {
                    self.counts.errors[Why::Message as usize] += 1;
                    self.in_flight -= 1;
                    self.answers.push((malformed.response(), entry));
                }
                Ok(request) => self.begin(request, entry, now_ns, &limits),
            }
        }
        if self.table_used > 0 {
            self.fetch(&limits);
        }
        Ok(taken)
    }

    pub fn begin(&mut self, request: Request, entry: u32, now_ns: u64, limits: &Limits) {
        let index = take_slot(&mut self.slots);
        let slot = &mut self.slots[index];
        slot.pieces.clear();
        (slot.live, slot.answered, slot.dropped) = (true, false, false);
        (slot.entry, slot.taken_ns, slot.parts, slot.failed) = (entry, now_ns, 0, None);
        slot.stamp = self.stamp;
        (slot.request, slot.span) = (request, Span::new(0, 0));
        if request.indirect {
            let count = usize::from(request.segments);
            if request.segments > limits.max_indirect {
                self.refuse(index, Fault::Segments);
                self.finish(index);
                return;
            }
            slot.table = self.table_used;
            self.table_used += count;
            self.fetched.push(index);
            // In line from now on; it ends when its turn comes if its segments make no sense.
            self.pending.push_back(index);
            return;
        }
        let made = check::pieces(request.direct_segments().iter().copied(), &mut slot.pieces);
        match made.and_then(|bytes| check::operation(&request, bytes, limits)) {
            Ok(operation) => {
                slot.plan(operation);
                self.pending.push_back(index);
            }
            Err(fault) => {
                self.refuse(index, fault);
                self.finish(index);
            }
        }
    }

    /// Copies the segments of all indirect requests of the batch by one call, then understands them: the guest may
    /// change its pages, not the copies.
    pub fn fetch(&mut self, limits: &Limits) {
        if self.table.is_empty() {
            self.table = vec![0; TABLE_LEN];
        }
        let fetched = std::mem::take(&mut self.fetched);
        for index in &fetched {
            let slot = &self.slots[*index];
            let count = usize::from(slot.request.segments);
            for (page, grant) in slot.request.indirect_pages().iter().enumerate() {
                let first = page * INDIRECT_PER_PAGE;
                let len = (count - first).min(INDIRECT_PER_PAGE) * 8;
                let into = &mut self.table[slot.table + first..][..len / 8];
                // SAFETY: `into` has `len` bytes, and the table is not touched before the batch was carried out.
                unsafe { self.mover.push_table(*grant, into.as_mut_ptr().cast(), len as u16) };
            }
        }
        let called = self.mover.carry_out();
        let mut copy = 0;
        for index in &fetched {
            let slot = &mut self.slots[*index];
            let pages = slot.request.indirect_pages().len();
            let copied = called.is_ok() && (copy..copy + pages).all(|copy| self.mover.is_done(copy));
            copy += pages;
            if !copied {
                self.fail(*index, Why::Map, status::ERROR);
                continue;
            }
            let words = &self.table[slot.table..slot.table + usize::from(slot.request.segments)];
            let segments = words.iter().map(|word| Segment::decode(&word.to_ne_bytes()));
            let made = check::pieces(segments, &mut slot.pieces);
            match made.and_then(|bytes| check::operation(&slot.request, bytes, limits)) {
                Ok(operation) => slot.plan(operation),
                Err(fault) => self.refuse(*index, fault),
            }
        }
        self.mover.clear();
        self.table_used = 0;
        self.fetched = fetched;
        self.fetched.clear();
        if let Err(error) = called {
            self.break_down(Broken::Domain(error.raw_os_error().unwrap_or(libc::EIO)));
        }
    }

    /// A request that cannot be had: nothing of it is handed over.
    pub fn refuse(&mut self, index: u32, fault: Fault) {
        let code = if fault == Fault::Unsupported { status::EOPNOTSUPP } else { status::ERROR };
        self.fail(index, Why::Message, code);
    }

    pub fn fail(&mut self, index: u32, why: Why, code: i16) {
        let slot = &mut self.slots[index];
        slot.stage = Stage::Over;
        slot.failed.get_or_insert((why, code));
    }

    /// Makes up to `most` parts of what is pending; gives how many were ready before.
    pub fn make_parts(&mut self, most: usize, transfer_max: u64) -> usize {
        let had = self.ready.len();
        self.blocked = Blocked::No;
        while self.ready.len() < most {
            let Some(index) = self.pending.front().copied() else { break };
            if !self.next_part(index, transfer_max) {
                break;
            }
        }
        had
    }

    /// Copies the data of writes among the ready parts from the `had`th on, by one call.
    pub fn copy_in(&mut self, had: usize) {
        if let Err(error) = self.mover.carry_out() {
            for index in self.ready.range(had..) {
                self.parts[*index].broken = true;
            }
            self.break_down(Broken::Domain(error.raw_os_error().unwrap_or(libc::EIO)));
        } else {
            for index in self.ready.range(had..) {
                let part = &mut self.parts[*index];
                part.broken |= !self.mover.all_done(&part.hold);
            }
        }
        self.mover.clear();
    }

    /// Makes the next part of the first pending request, or takes that out of the line when all of it was made. False
    /// if it has to wait.
    pub fn next_part(&mut self, index: u32, transfer_max: u64) -> bool {
        let others = self.slots.used() - self.pending.len();
        let slot = &mut self.slots[index];
        if slot.failed.is_some() {
            slot.stage = Stage::Over;
        }
        match slot.stage {
            Stage::Over => {
                self.pending.pop_front();
                if self.slots[index].parts == 0 {
                    self.finish(index);
                }
                true
            }
            Stage::Drain if others > 0 => self.wait_for_ends(),
            Stage::Drain | Stage::Flush => {
                slot.stage = Stage::Flushing;
                slot.parts += 1;
                self.push_part(index, Op::Flush, Span::new(0, 0), (0, 0));
                true
            }
            Stage::Flushing | Stage::Alone if slot.parts > 0 => self.wait_for_ends(),
            Stage::Flushing if slot.span.len > 0 => {
                slot.stage = Stage::Data;
                true
            }
            Stage::Flushing | Stage::Alone => {
                slot.stage = Stage::Over;
                true
            }
            Stage::Discard => {
                let span = slot.span;
                slot.stage = Stage::Over;
                slot.parts += 1;
                self.push_part(index, Op::Discard, span, (0, 0));
                true
            }
            Stage::Data => self.next_data(index, transfer_max),
        }
    }

    pub fn wait_for_ends(&mut self) -> bool {
        self.blocked = Blocked::Ends;
        false
    }

    pub fn next_data(&mut self, index: u32, transfer_max: u64) -> bool {
        let len_max = if self.mover.is_copying() { transfer_max.min(PART_LEN_MAX) } else { transfer_max };
        let name = take_part(&mut self.parts);
        let (slot, part) = (&mut self.slots[index], &mut self.parts[name]);
        let rest = &slot.pieces[slot.next..];
        let Some((count, bytes)) = self.mover.reserve(rest, len_max, &mut part.hold) else {
            self.blocked = Blocked::Memory(self.mover.free_len());
            self.parts.give(name);
            return false;
        };
        let write = matches!(slot.op, Op::Write { .. });
        let prepared = self.mover.prepare(&rest[..count], write, &mut part.hold);
        (part.slot, part.op, part.broken) = (index, slot.op, prepared.is_err());
        (part.span, part.pieces) = (Span::new(slot.at, bytes), (slot.next, count));
        slot.next += count;
        slot.at += bytes;
        slot.parts += 1;
        if slot.next == slot.pieces.len() {
            let alone = slot.request.op == tapio_xen::blkif::op::WRITE_BARRIER;
            slot.stage = if alone { Stage::Alone } else { Stage::Over };
        }
        self.ready.push_back(name);
        true
    }

    pub fn push_part(&mut self, slot: u32, op: Op, span: Span, pieces: (usize, usize)) {
        let name = take_part(&mut self.parts);
        let part = &mut self.parts[name];
        (part.slot, part.op, part.span, part.pieces, part.broken) = (slot, op, span, pieces, false);
        self.ready.push_back(name);
    }

    /// The memory of a part, as the disk is to have it.
    ///
    /// # Safety
    /// It is not used any more when the part is answered.
    pub unsafe fn data(&mut self, name: u32) -> Data {
        let part = &mut self.parts[name];
        if part.pieces.1 == 0 {
            return Data::None;
        }
        // SAFETY: what the part holds is released when it is answered.
        unsafe { part.hold.data(part.span.len) }
    }

    /// The disk is done with memory that it was given.
    pub fn take_back(&mut self, name: u32, buffer: Buffer) {
        self.parts[name].hold.take_back(buffer);
    }

    /// The guest gets an error for a part that the storage still has.
    pub fn give_up(&mut self, name: u32) {
        let index = self.parts[name].slot;
        let slot = &mut self.slots[index];
        slot.failed.get_or_insert((Why::Disk, status::ERROR));
        if !slot.answered && !slot.dropped {
            self.pending.retain(|other| *other != index);
            self.answer(index);
        }
    }

    /// Takes note of everything that the disk has finished: copies the data of reads by one call, then answers. Whether
    /// there was something.
    pub fn note_all(&mut self) -> bool {
        if self.finished.is_empty() {
            return false;
        }
        let finished = std::mem::take(&mut self.finished);
        let dead = self.state == QueueState::Dead;
        for (name, result) in &finished {
            let part = &mut self.parts[*name];
            let slot = &self.slots[part.slot];
            if part.op == Op::Read && result.is_ok() && !slot.answered && !slot.dropped && !dead {
                let (first, count) = part.pieces;
                self.mover.answer(&slot.pieces[first..first + count], &mut part.hold);
            }
        }
        let called = self.mover.carry_out();
        for (name, result) in &finished {
            let part = &mut self.parts[*name];
            let copied = part.op != Op::Read || called.is_ok() && self.mover.all_done(&part.hold);
            let (index, unreachable) = (part.slot, part.broken || !copied);
            self.mover.release(&mut part.hold);
            self.parts.give(*name);
            let slot = &mut self.slots[index];
            slot.parts -= 1;
            if unreachable {
                slot.failed.get_or_insert((Why::Map, status::ERROR));
            } else if let Err(error) = result {
                let unsupported = *error == DiskError::Unsupported;
                let code = if unsupported { status::EOPNOTSUPP } else { status::ERROR };
                slot.failed.get_or_insert((Why::Disk, code));
            }
            // The first in line ends when it leaves the line.
            let over = slot.stage == Stage::Over || slot.answered || slot.dropped;
            if slot.parts == 0 && over && self.pending.front() != Some(&index) {
                self.finish(index);
            }
        }
        self.mover.clear();
        self.blocked = Blocked::No;
        self.finished = finished;
        self.finished.clear();
        if let Err(error) = called {
            self.break_down(Broken::Domain(error.raw_os_error().unwrap_or(libc::EIO)));
        }
        true
    }

    /// A request has ended and its place is free.
    pub fn finish(&mut self, index: u32) {
        let slot = &self.slots[index];
        if !slot.answered {
            if slot.dropped {
                self.in_flight -= 1;
            } else {
                self.answer(index);
            }
        }
        self.slots[index].live = false;
        self.slots.give(index);
    }

    /// Answers a request. The guest sees it with [`Core::commit`].
    pub fn answer(&mut self, index: u32) {
        let slot = &mut self.slots[index];
        slot.answered = true;
        self.in_flight -= 1;
        let code = match slot.failed {
            None => status::OKAY,
            Some((why, code)) => {
                self.counts.errors[why as usize] += 1;
                code
            }
        };
        self.answers.push((slot.request.response(code), slot.entry));
    }

    /// Makes answers visible; see `record` for the order.
    pub fn commit(&mut self, channel: &Channel) -> bool {
        if self.answers.is_empty() {
            return false;
        }
        if self.state == QueueState::Dead {
            self.answers.clear();
            return false;
        }
        for (response, entry) in self.answers.drain(..) {
            self.record.answer(entry, self.ring.next_response());
            self.ring.push(&response);
            self.counts.responses += 1;
            self.batch.push(entry);
        }
        let notify = self.ring.publish();
        self.record.published(&self.batch, self.ring.next_response());
        self.free_entries.append(&mut self.batch);
        if notify {
            self.counts.kicks_out += 1;
            if let Err(error) = channel.notify() {
                self.break_down(Broken::Channel(error.raw_os_error().unwrap_or(libc::EIO)));
            }
        }
        true
    }

    /// Gives up what the disk has not begun: it has no answer, and the next process that serves the ring does it.
    pub fn leave(&mut self) {
        while let Some(name) = self.ready.pop_front() {
            let part = &mut self.parts[name];
            self.mover.release(&mut part.hold);
            let slot = &mut self.slots[part.slot];
            slot.parts -= 1;
            slot.dropped = true;
            let (index, over) = (part.slot, slot.parts == 0 && slot.is_handed_over());
            self.parts.give(name);
            if over && !self.pending.contains(&index) {
                self.finish(index);
            }
        }
        while let Some(index) = self.pending.pop_front() {
            let slot = &mut self.slots[index];
            slot.dropped = true;
            slot.stage = Stage::Over;
            if slot.parts == 0 {
                self.finish(index);
            }
        }
    }
}
