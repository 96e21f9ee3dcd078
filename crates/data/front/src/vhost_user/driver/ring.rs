//! The driver's side of a ring of either kind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use super::super::chain::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Descriptor};
use super::super::packed::{
    DESC_F_AVAIL, DESC_F_USED, EVENT_DESC, EVENT_DISABLE, EVENT_ENABLE, Position, packed_need_event,
};
use super::super::vring::need_event;
use super::{Layout, Memory};

/// A ring as its driver uses it.
#[derive(Debug)]
pub(super) struct DriverRing {
    memory: Arc<Memory>,
    layout: Layout,
    size: u16,
    event_index: bool,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Split {
        next: u16,
        kicked: u16,
        seen: u16,
        /// Descriptors that each slot owns.
        stride: u16,
    },
    Packed {
        next: Position,
        kicked: Position,
        seen: Position,
        /// Descriptors that each slot's request takes up.
        counts: Vec<u16>,
    },
}

impl DriverRing {
    pub(super) fn new(
        memory: Arc<Memory>,
        layout: Layout,
        size: u16,
        stride: u16,
        (packed, event_index): (bool, bool),
    ) -> Self {
        let kind = if packed {
            let (next, kicked, seen) = (Position::START, Position::START, Position::START);
            Kind::Packed { next, kicked, seen, counts: vec![0; usize::from(size)] }
        } else {
            Kind::Split { next: 0, kicked: 0, seen: 0, stride }
        };
        Self { memory, layout, size, event_index, kind }
    }

    /// What answers call the request of a slot.
    pub(super) const fn head_of(&self, slot: u16) -> u16 {
        match self.kind {
            Kind::Split { stride, .. } => slot * stride,
            Kind::Packed { .. } => slot,
        }
    }

    /// Where a back end that knows nothing else reads on: everything before was answered.
    pub(super) fn base(&self) -> u32 {
        match self.kind {
            Kind::Split { seen, .. } => seen.into(),
            Kind::Packed { seen, .. } => u32::from(seen.to_bits()) * 0x1_0001,
        }
    }

    fn word(&self, offset: u64) -> &AtomicU16 {
        // SAFETY: `at` checked the range, callers give even offsets; only atomic operations touch ring words.
        unsafe { AtomicU16::from_ptr(self.memory.at(offset, 2).cast()) }
    }

    fn double(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: `at` checked the range, callers give multiples of 4; only atomic operations touch ring words.
        unsafe { AtomicU32::from_ptr(self.memory.at(offset, 4).cast()) }
    }

    /// A descriptor of an indirect table.
    pub(super) fn table_entry(&self, index: u16, at: u64, len: u32, flags: u16) -> [u8; 16] {
        match self.kind {
            Kind::Split { .. } => Descriptor { at, len, flags, next: index + 1 }.to_bytes(),
            // Entries follow each other without links.
            Kind::Packed { .. } => {
                Descriptor { at, len, flags: flags & DESC_F_WRITE, next: 0 }.to_packed_bytes()
            }
        }
    }

    /// Makes the request of `slot` available: guest address, length and flags of each descriptor.
    pub(super) fn put(&mut self, slot: u16, parts: impl Iterator<Item = (u64, u32, u16)>) {
        match self.kind {
            Kind::Split { stride, .. } => {
                let head = slot * stride;
                for (step, (at, len, flags)) in parts.enumerate() {
                    let index = head + step as u16;
                    self.put_descriptor(index, Descriptor { at, len, flags, next: index + 1 });
                }
                self.put_avail(head);
            }
            Kind::Packed { .. } => {
                let list = parts.map(|(at, len, flags)| Descriptor { at, len, flags, next: slot });
                self.put_packed(slot, list);
            }
        }
    }

    /// Makes descriptors available as they are, but for their marks; the first becomes visible last.
    pub(super) fn put_packed(&mut self, slot: u16, list: impl Iterator<Item = Descriptor>) {
        let Kind::Packed { next, .. } = self.kind else { return };
        let (mut at, mut count, mut first) = (next, 0, None);
        for descriptor in list {
            let marks = if at.wrap { DESC_F_AVAIL } else { DESC_F_USED };
            let flags = descriptor.flags | marks;
            let offset = self.layout.desc + 16 * u64::from(at.index);
            let bytes = Descriptor { flags, ..descriptor }.to_packed_bytes();
            let to = self.memory.at(offset, 14);
            // SAFETY: `at` checked the range; the device does not write to what it is about to read.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), 14) };
            match first {
                None => first = Some((offset + 14, flags)),
                Some(_) => self.word(offset + 14).store(flags.to_le(), Ordering::Relaxed),
            }
            at = at.after(1, self.size);
            count += 1;
        }
        if let Some((offset, flags)) = first {
            self.word(offset).store(flags.to_le(), Ordering::Release);
        }
        if let Kind::Packed { next, counts, .. } = &mut self.kind {
            *next = at;
            counts[usize::from(slot)] = count;
        }
    }

    /// Writes a descriptor of a split ring's table.
    pub(super) fn put_descriptor(&self, index: u16, descriptor: Descriptor) {
        let to = self.memory.at(self.layout.desc + 16 * u64::from(index), 16);
        // SAFETY: `at` checked the range; the device does not write to the table.
        unsafe { to.copy_from_nonoverlapping(descriptor.to_bytes().as_ptr(), 16) };
    }

    /// Makes the chain at `head` of a split ring available, whatever it is.
    pub(super) fn put_avail(&mut self, head: u16) {
        let Kind::Split { next, .. } = self.kind else { return };
        let place = u64::from(next & (self.size - 1));
        self.word(self.layout.avail + 4 + 2 * place).store(head.to_le(), Ordering::Relaxed);
        self.jump(1);
    }

    /// Moves the available index of a split ring.
    pub(super) fn jump(&mut self, step: u16) {
        if let Kind::Split { next, .. } = &mut self.kind {
            *next = next.wrapping_add(step);
            let index = *next;
            self.word(self.layout.avail + 2).store(index.to_le(), Ordering::Release);
        }
    }

    /// Whether the device asks to be woken for what was put into the ring since the last call.
    pub(super) fn wants_kick(&mut self) -> bool {
        fence(Ordering::SeqCst);
        match &mut self.kind {
            Kind::Split { next, kicked, .. } => {
                let (new, old) = (*next, std::mem::replace(kicked, *next));
                if new == old {
                    false
                } else if self.event_index {
                    let at = self.layout.used + 4 + 8 * u64::from(self.size);
                    need_event(u16::from_le(self.word(at).load(Ordering::Relaxed)), new, old)
                } else {
                    u16::from_le(self.word(self.layout.used).load(Ordering::Relaxed)) & 1 == 0
                }
            }
            Kind::Packed { next, kicked, .. } => {
                let (new, old) = (*next, std::mem::replace(kicked, *next));
                let word = u32::from_le(self.double(self.layout.used).load(Ordering::Relaxed));
                new != old
                    && match (word >> 16) as u16 {
                        EVENT_DESC => packed_need_event(word as u16, old, new, self.size),
                        flags => flags != EVENT_DISABLE,
                    }
            }
        }
    }

    /// Whether an answer is there: one load.
    pub(super) fn has_answers(&self) -> bool {
        match self.kind {
            Kind::Split { seen, .. } => {
                u16::from_le(self.word(self.layout.used + 2).load(Ordering::Acquire)) != seen
            }
            Kind::Packed { seen, .. } => {
                let at = self.layout.desc + 16 * u64::from(seen.index) + 14;
                let flags = u16::from_le(self.word(at).load(Ordering::Acquire));
                let marks = (flags & DESC_F_AVAIL != 0, flags & DESC_F_USED != 0);
                marks == (seen.wrap, seen.wrap)
            }
        }
    }

    /// The next answer: its slot, and how many bytes the device says to have written.
    pub(super) fn next_answer(&mut self) -> Option<(u16, u32)> {
        if !self.has_answers() {
            return None;
        }
        match &mut self.kind {
            Kind::Split { seen, stride, .. } => {
                let place = u64::from(*seen & (self.size - 1));
                let entry = self.memory.at(self.layout.used + 4 + 8 * place, 8).cast::<u32>();
                // SAFETY: the entry lies inside the used ring, is aligned, and was published before the index.
                let (head, written) = unsafe { (entry.read_volatile(), entry.add(1).read_volatile()) };
                *seen = seen.wrapping_add(1);
                Some(((u32::from_le(head) / u32::from(*stride)) as u16, u32::from_le(written)))
            }
            Kind::Packed { seen, counts, .. } => {
                let entry = self.memory.at(self.layout.desc + 16 * u64::from(seen.index), 16);
                // SAFETY: the entry lies inside the ring, is aligned, and was published before its flags.
                let (written, slot) = unsafe {
                    (entry.add(8).cast::<u32>().read_volatile(), entry.add(12).cast::<u16>().read_volatile())
                };
                let slot = u16::from_le(slot);
                *seen = seen.after(counts.get(usize::from(slot)).copied().unwrap_or(1), self.size);
                Some((slot, u32::from_le(written)))
            }
        }
    }

    /// Asks for an interrupt at the next answer. Looks must follow: it may be there already.
    pub(super) fn enable_interrupts(&self) {
        if self.event_index {
            match self.kind {
                Kind::Split { seen, .. } => {
                    let event = self.word(self.layout.avail + 4 + 2 * u64::from(self.size));
                    event.store(seen.to_le(), Ordering::Relaxed);
                }
                Kind::Packed { seen, .. } => {
                    let word = u32::from(seen.to_bits()) | u32::from(EVENT_DESC) << 16;
                    self.double(self.layout.avail).store(word.to_le(), Ordering::Relaxed);
                }
            }
        }
        fence(Ordering::SeqCst);
    }

    /// Turns interrupts on or off.
    pub(super) fn want_interrupts(&self, wanted: bool) {
        match self.kind {
            Kind::Split { seen, .. } => {
                self.word(self.layout.avail).store(u16::from(!wanted).to_le(), Ordering::Relaxed);
                if self.event_index && !wanted {
                    // An index that lies half the ring's numbers behind is not passed for a long time.
                    let event = self.word(self.layout.avail + 4 + 2 * u64::from(self.size));
                    event.store(seen.wrapping_sub(0x8000).to_le(), Ordering::Relaxed);
                }
            }
            Kind::Packed { .. } => {
                let flags = if wanted { EVENT_ENABLE } else { EVENT_DISABLE };
                self.double(self.layout.avail).store((u32::from(flags) << 16).to_le(), Ordering::Relaxed);
            }
        }
    }
}

/// The descriptors of a request: header, data in pieces, status byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    pub(super) header: u64,
    pub(super) data: u64,
    pub(super) len: u32,
    pub(super) piece: u32,
    /// `DESC_F_WRITE` where the device writes the data.
    pub(super) write: u16,
    pub(super) status: u64,
    done: Option<u32>,
}

impl Parts {
    pub(super) fn new(header: u64, (data, len, piece): (u64, u32, u32), write: u16, status: u64) -> Self {
        Self { header, data, len, piece, write, status, done: None }
    }

    /// The one descriptor in the ring for a table of `count`.
    pub(super) fn table(at: u64, count: u16) -> (u64, u32, u16) {
        (at, u32::from(count) * 16, DESC_F_INDIRECT)
    }
}

impl Iterator for Parts {
    type Item = (u64, u32, u16);

    fn next(&mut self) -> Option<Self::Item> {
        match self.done {
            None => {
                self.done = Some(0);
                Some((self.header, 16, DESC_F_NEXT))
            }
            Some(done) if done < self.len => {
                let piece = self.piece.min(self.len - done);
                self.done = Some(done + piece);
                Some((self.data + u64::from(done), piece, DESC_F_NEXT | self.write))
            }
            Some(u32::MAX) => None,
            Some(_) => {
                self.done = Some(u32::MAX);
                self.len = 0;
                Some((self.status, 1, DESC_F_WRITE))
            }
        }
    }
}
