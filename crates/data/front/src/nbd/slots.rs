//! The requests in flight of one connection: a table of fixed size, made once.

use tapio_block::{DiskError, Extent};

use super::memory::Held;
use super::reply::Failure;
use super::wire::RequestHeader;

/// What a slot stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotKind {
    /// Data to be answered; each part is a chunk of its own.
    Read,
    /// Data of a read too large for one simple reply: the first part brings the header, the others only data.
    Stream { first: bool },
    /// Data to be written.
    Write,
    /// Zeroing.
    Zero,
    /// Discarding; `durable`: followed by a flush.
    Trim { durable: bool },
    /// A flush.
    Flush,
    /// Reading ahead: the data is not wanted.
    Cache,
    /// Extents.
    Status,
    /// An answer that needed no disk.
    Answer,
    /// The answer to a read of no bytes.
    EmptyRead,
}

impl SlotKind {
    const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Zero | Self::Trim { .. })
    }
}

/// A request, or one part of it.
#[derive(Debug)]
pub struct Slot {
    /// What it stands for.
    pub kind: SlotKind,
    /// The client's name for the request.
    pub cookie: u64,
    /// Where the request begins on the disk.
    pub request_offset: u64,
    /// Where this part begins.
    pub at: u64,
    /// Bytes of this part.
    pub len: u64,
    /// The slot of the whole request: this one if it has only one part.
    pub head: u32,
    /// In a head: bytes that are not done yet (read: not sent yet).
    pub left: u64,
    /// Why it failed; in a head of several parts, the first failure.
    pub failure: Option<Failure>,
    /// Memory the data is in.
    pub memory: Option<Held>,
    /// What BLOCK_STATUS found.
    pub extents: Vec<Extent>,
    /// The client was told that the request failed; what the disk reports later is dropped.
    pub told: bool,
}

/// What follows from the end of a disk request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Other parts are still to come.
    Nothing,
    /// The slot has something to say to the client.
    Answer(u32),
    /// All parts are done, and a flush must follow before the client is answered.
    FlushFirst(u32),
}

/// The table.
#[derive(Debug)]
pub struct Slots {
    slots: Box<[Slot]>,
    free: Vec<u32>,
}

impl Slots {
    /// `count` free slots.
    pub fn new(count: usize) -> Self {
        let empty = || Slot {
            kind: SlotKind::Answer,
            cookie: 0,
            request_offset: 0,
            at: 0,
            len: 0,
            head: 0,
            left: 0,
            failure: None,
            memory: None,
            extents: Vec::new(),
            told: false,
        };
        let slots = (0..count).map(|_| empty()).collect();
        Self { slots, free: (0..count as u32).rev().collect() }
    }

    /// How many are in use.
    pub fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The slot of this index.
    pub fn at(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    /// Takes a slot for a whole request.
    pub fn take_head(&mut self, kind: SlotKind, header: &RequestHeader, left: u64) -> Option<u32> {
        let index = self.free.pop()?;
        let slot = self.at(index);
        slot.kind = kind;
        slot.cookie = header.cookie;
        slot.request_offset = header.offset;
        (slot.at, slot.len, slot.left) = (header.offset, header.len, left);
        slot.head = index;
        slot.failure = None;
        Some(index)
    }

    /// Takes a slot for a part of `head` that begins at `at`.
    pub fn take_part(&mut self, head: u32, at: u64, len: u64) -> Option<u32> {
        let index = self.free.pop()?;
        let whole = self.at(head);
        let (kind, cookie, request_offset) = (whole.kind, whole.cookie, whole.request_offset);
        let slot = self.at(index);
        (slot.kind, slot.cookie, slot.request_offset) = (kind, cookie, request_offset);
        (slot.at, slot.len, slot.left) = (at, len, 0);
        slot.head = head;
        slot.failure = None;
        Some(index)
    }

    /// Gives a slot back with what it holds.
    pub fn free(&mut self, index: u32) {
        let slot = self.at(index);
        slot.memory = None;
        // Lists of extents are long and rare: their memory is not kept.
        slot.extents = Vec::new();
        self.free.push(index);
    }

    /// A slot that answers the request of `index` with this error while the disk still works on it; `None` where
    /// that cannot be said any more, because the request has other parts.
    pub fn give_up(&mut self, index: u32, error: DiskError) -> Option<u32> {
        let slot = self.at(index);
        if slot.head != index || matches!(slot.kind, SlotKind::Stream { .. }) {
            return None;
        }
        let (cookie, request_offset, write) = (slot.cookie, slot.request_offset, slot.kind.changes());
        let answer = self.free.pop()?;
        self.at(index).told = true;
        let slot = self.at(answer);
        (slot.kind, slot.cookie, slot.request_offset) = (SlotKind::Answer, cookie, request_offset);
        (slot.head, slot.left, slot.len) = (answer, 0, 0);
        slot.failure = Some(Failure::Disk { error, write });
        Some(answer)
    }

    /// Notes the end of a disk request.
    pub fn finish(&mut self, index: u32, result: Result<(), DiskError>) -> Outcome {
        let slot = self.at(index);
        if std::mem::take(&mut slot.told) {
            self.free(index);
            return Outcome::Nothing;
        }
        let (kind, head, len) = (slot.kind, slot.head, slot.len);
        let failure = result.err().map(|error| Failure::Disk { error, write: kind.changes() });
        match kind {
            SlotKind::Read | SlotKind::Stream { .. } | SlotKind::Flush | SlotKind::Status => {
                slot.failure = failure;
                return Outcome::Answer(index);
            }
            SlotKind::Answer | SlotKind::EmptyRead => return Outcome::Nothing,
            SlotKind::Write | SlotKind::Zero | SlotKind::Trim { .. } | SlotKind::Cache => {}
        }
        slot.memory = None;
        if head != index {
            self.free(index);
        }
        let whole = self.at(head);
        whole.failure = whole.failure.or(failure);
        whole.left -= len;
        if whole.left > 0 {
            return Outcome::Nothing;
        }
        match (whole.kind, whole.failure) {
            (SlotKind::Trim { durable: true }, None) => {
                whole.kind = SlotKind::Flush;
                Outcome::FlushFirst(head)
            }
            _ => Outcome::Answer(head),
        }
    }

    /// Notes that the data of a read's part is on its way; true if it is the last of its request.
    pub fn part_sent(&mut self, index: u32) -> bool {
        let (head, len) = (self.at(index).head, self.at(index).len);
        let whole = self.at(head);
        whole.left -= len;
        let last = whole.left == 0;
        if last && head != index {
            self.free(head);
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(len: u64) -> RequestHeader {
        RequestHeader { flags: 0, command: 0, cookie: 9, offset: 1 << 20, len }
    }

    #[test]
    fn a_write_is_answered_once_when_its_last_part_is_done_with_its_first_failure() {
        let mut slots = Slots::new(4);
        let head = slots.take_head(SlotKind::Write, &header(3072), 3072).unwrap();
        let parts: Vec<_> = (0..3).map(|i| slots.take_part(head, i * 1024, 1024).unwrap()).collect();
        assert_eq!(slots.take_part(head, 0, 1), None);
        assert_eq!(slots.finish(parts[1], Err(DiskError::NoSpace)), Outcome::Nothing);
        assert_eq!(slots.finish(parts[0], Err(DiskError::Io(5))), Outcome::Nothing);
        assert_eq!(slots.finish(parts[2], Ok(())), Outcome::Answer(head));
        let failure = Failure::Disk { error: DiskError::NoSpace, write: true };
        assert_eq!(slots.at(head).failure, Some(failure));
        slots.free(head);
        assert_eq!(slots.used(), 0);
    }

    #[test]
    fn a_durable_trim_is_flushed_before_it_is_answered_unless_it_failed() {
        let mut slots = Slots::new(1);
        for (result, outcome) in
            [(Ok(()), Outcome::FlushFirst(0)), (Err(DiskError::Io(5)), Outcome::Answer(0))]
        {
            let head = slots.take_head(SlotKind::Trim { durable: true }, &header(512), 512).unwrap();
            assert_eq!(slots.finish(head, result), outcome);
            slots.free(head);
        }
    }

    #[test]
    fn a_request_given_up_is_answered_once_and_keeps_its_slot_until_the_disk_is_done() {
        let mut slots = Slots::new(4);
        let head = slots.take_head(SlotKind::Write, &header(512), 512).unwrap();
        let answer = slots.give_up(head, DiskError::Io(libc::ETIMEDOUT)).expect("it has one part");
        let failure = Failure::Disk { error: DiskError::Io(libc::ETIMEDOUT), write: true };
        assert_eq!((slots.at(answer).cookie, slots.at(answer).failure), (9, Some(failure)));
        slots.free(answer);
        assert_eq!(slots.used(), 1);
        assert_eq!(slots.finish(head, Ok(())), Outcome::Nothing);
        assert_eq!(slots.used(), 0);
        // One of several parts cannot answer for all.
        let head = slots.take_head(SlotKind::Read, &header(2048), 2048).unwrap();
        let part = slots.take_part(head, 0, 1024).unwrap();
        assert_eq!(slots.give_up(part, DiskError::Io(libc::ETIMEDOUT)), None);
    }

    #[test]
    fn parts_of_a_read_are_answered_one_by_one_and_the_last_one_sent_is_the_last() {
        let mut slots = Slots::new(3);
        let head = slots.take_head(SlotKind::Read, &header(2048), 2048).unwrap();
        let first = slots.take_part(head, 0, 1024).unwrap();
        let second = slots.take_part(head, 1024, 1024).unwrap();
        assert_eq!(slots.finish(second, Ok(())), Outcome::Answer(second));
        assert_eq!(slots.finish(first, Ok(())), Outcome::Answer(first));
        assert!(!slots.part_sent(second));
        slots.free(second);
        assert!(slots.part_sent(first));
        slots.free(first);
        assert_eq!(slots.used(), 0);
    }
}
