//! The packed virtqueue: one ring of descriptors for requests and answers, two words by which a side asks to be woken.
//!
//! Layouts: virtio 1.2, section 2.8 "Packed Virtqueues". As with the split ring, the driver may write anything at any
//! time: every value is loaded once, then checked, then used.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use super::chain::{CHAIN_MAX, Chain, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_LEN, Descriptor};
use super::memory::{GuestMemory, copy_out};
use super::message::RingAddresses;
use super::ring_error::RingError;
use super::vring::{QUEUE_SIZE_MAX, need_event};

/// Set to the driver's wrap counter when a descriptor becomes available.
pub const DESC_F_AVAIL: u16 = 1 << 7;
/// Set to the device's wrap counter when a descriptor is used; the opposite while it is available.
pub const DESC_F_USED: u16 = 1 << 15;

/// Event suppression: always wake.
pub const EVENT_ENABLE: u16 = 0;
/// Never wake.
pub const EVENT_DISABLE: u16 = 1;
/// Wake at the descriptor that the other half names; only with `VIRTIO_F_EVENT_IDX`.
pub const EVENT_DESC: u16 = 2;

const AT_ID: usize = 12;
const AT_FLAGS: usize = 14;

/// A place in a packed ring: an index, and the wrap counter, which changes each time the index comes round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Below the ring's size.
    pub index: u16,
    /// The wrap counter.
    pub wrap: bool,
}

impl Position {
    /// Where both sides begin.
    pub const START: Self = Self { index: 0, wrap: true };

    /// As messages and event words carry it: the index in 15 bits, the wrap counter above.
    pub const fn from_bits(bits: u16) -> Self {
        Self { index: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    /// The inverse of [`Position::from_bits`].
    pub const fn to_bits(self) -> u16 {
        self.index | (self.wrap as u16) << 15
    }

    /// `count` descriptors later in a ring of `size`; at most one whole ring.
    pub const fn after(self, count: u16, size: u16) -> Self {
        let index = self.index as u32 + count as u32;
        if index >= size as u32 {
            Self { index: (index - size as u32) as u16, wrap: !self.wrap }
        } else {
            Self { index: index as u16, wrap: self.wrap }
        }
    }

    /// `count` descriptors earlier.
    pub const fn before(self, count: u16, size: u16) -> Self {
        if self.index >= count {
            Self { index: self.index - count, wrap: self.wrap }
        } else {
            Self { index: (self.index as u32 + size as u32 - count as u32) as u16, wrap: !self.wrap }
        }
    }

    /// The marks of a descriptor that is available here.
    const fn available(self) -> u16 {
        if self.wrap { DESC_F_AVAIL } else { DESC_F_USED }
    }

    /// The marks of a descriptor that is used here.
    const fn used(self) -> u16 {
        if self.wrap { DESC_F_AVAIL | DESC_F_USED } else { 0 }
    }
}

/// Whether progress from `old` to `new` passes the event word `event`, in a ring of `size`.
pub fn packed_need_event(event: u16, old: Position, new: Position, size: u16) -> bool {
    let named = Position::from_bits(event);
    let off = if named.wrap == new.wrap { named.index } else { named.index.wrapping_sub(size) };
    let old = if old.wrap == new.wrap { old.index } else { old.index.wrapping_sub(size) };
    need_event(off, new.index, old)
}

/// A packed ring in guest memory. Valid as long as the [`GuestMemory`] it was made from.
#[derive(Debug)]
pub struct PackedRing {
    size: u16,
    desc: *mut u8,
    /// Written by the driver: when it wants interrupts.
    driver: *const u8,
    /// Written by us: when we want kicks.
    device: *mut u8,
}

impl PackedRing {
    /// Finds the parts of a ring of `size` descriptors in memory. The driver's event word comes as the address of the
    /// available ring, the device's as that of the used ring.
    pub fn new(memory: &GuestMemory, size: u16, addresses: &RingAddresses) -> Result<Self, RingError> {
        if size == 0 || size > QUEUE_SIZE_MAX {
            return Err(RingError::Size(size.into()));
        }
        let find = |name, user, len, align: usize| {
            let pointer = memory.user_contiguous(user, len).ok_or(RingError::Outside(name))?;
            if (pointer as usize).is_multiple_of(align) {
                Ok(pointer)
            } else {
                Err(RingError::Misaligned(name))
            }
        };
        let desc = find("descriptor ring", addresses.desc, DESC_LEN * u64::from(size), 16)?;
        let driver = find("driver's event word", addresses.avail, 4, 4)?;
        let device = find("device's event word", addresses.used, 4, 4)?;
        Ok(Self { size, desc, driver, device })
    }

    /// Descriptors in the ring.
    pub const fn size(&self) -> u16 {
        self.size
    }

    fn flags(&self, index: u16) -> &AtomicU16 {
        debug_assert!(index < self.size);
        // SAFETY: callers give an index below the size, so the word lies inside the ring, which `new` found in guest
        // memory, 16-aligned; it is only ever accessed by atomic or volatile operations.
        unsafe { AtomicU16::from_ptr(self.desc.add(usize::from(index) * 16 + AT_FLAGS).cast()) }
    }

    /// Whether the driver has made the descriptor at `position` available. What it wrote before is visible then.
    #[inline]
    pub fn is_available(&self, position: Position) -> bool {
        let flags = u16::from_le(self.flags(position.index).load(Ordering::Acquire));
        flags & (DESC_F_AVAIL | DESC_F_USED) == position.available()
    }

    /// Whether nothing was ever made available in this ring: its first descriptor has neither mark.
    pub fn is_untouched(&self) -> bool {
        u16::from_le(self.flags(0).load(Ordering::Acquire)) & (DESC_F_AVAIL | DESC_F_USED) == 0
    }

    /// Puts the marks of an available descriptor back: what a former process of ours wrote there was never published.
    pub fn mark_available(&self, position: Position) {
        let word = self.flags(position.index);
        let flags = u16::from_le(word.load(Ordering::Relaxed)) & !(DESC_F_AVAIL | DESC_F_USED);
        word.store((flags | position.available()).to_le(), Ordering::Release);
    }

    /// Follows the chain that begins at `position` and collects its memory. `room` is how many descriptors the driver
    /// may have made available beyond those that were not answered yet; `keep` asks for [`Chain::direct`].
    ///
    /// Gives the buffer's id and how many descriptors of the ring it takes. An error means that the chain itself makes
    /// no sense; one with senseless buffers ends with [`Chain::fault`] set.
    #[inline]
    pub fn walk(
        &self,
        memory: &GuestMemory,
        position: Position,
        room: u16,
        (indirect, keep): (bool, bool),
        into: &mut Chain,
    ) -> Result<(u16, u16), RingError> {
        into.clear();
        let (mut at, limit) = (position, usize::from(self.size).min(CHAIN_MAX));
        for count in 1..=limit as u16 {
            if count > room {
                return Err(RingError::Overrun);
            }
            let mut bytes = [0; 16];
            // SAFETY: the index is below the size, so the descriptor lies inside the ring.
            unsafe { copy_out(self.desc.add(usize::from(at.index) * 16), &mut bytes) };
            let descriptor = Descriptor::parse_packed(bytes);
            if keep {
                into.direct.push(descriptor);
            }
            if add(memory, descriptor, indirect, into)? {
                return Ok((descriptor.next, count));
            }
            at = at.after(1, self.size);
        }
        Err(RingError::ChainLength)
    }

    /// Notes at `position` that request `id` is done and `len` bytes of it were written. Not visible before its flags.
    #[inline]
    pub fn put_used(&self, position: Position, id: u16, len: u32) {
        // SAFETY: the index is below the size; length and id are aligned as the ring is.
        unsafe {
            let entry = self.desc.add(usize::from(position.index) * 16);
            entry.add(8).cast::<u32>().write_volatile(len.to_le());
            entry.add(AT_ID).cast::<u16>().write_volatile(id.to_le());
        }
    }

    /// Makes what [`PackedRing::put_used`] noted visible.
    #[inline]
    pub fn publish(&self, position: Position) {
        // Something is always written: the status byte at least.
        let flags = position.used() | DESC_F_WRITE;
        self.flags(position.index).store(flags.to_le(), Ordering::Release);
    }

    /// Whether the driver wants an interrupt for the answers from `old` to `new`.
    #[inline]
    pub fn wants_interrupt(&self, old: Position, new: Position) -> bool {
        // The answers must be visible before the driver's event word is read; the driver does it the other way round.
        fence(Ordering::SeqCst);
        // SAFETY: `new` found four aligned bytes there; they are only ever accessed by atomic operations.
        let word = unsafe { AtomicU32::from_ptr(self.driver.cast_mut().cast()) };
        let word = u32::from_le(word.load(Ordering::Relaxed));
        match (word >> 16) as u16 & 3 {
            EVENT_DESC => packed_need_event(word as u16, old, new, self.size),
            flags => flags != EVENT_DISABLE,
        }
    }

    /// Asks for a kick at the next request after `next`, then looks: the driver may have been faster.
    #[inline]
    pub fn enable_kicks(&self, event_index: bool, next: Position) -> bool {
        let flags = if event_index { EVENT_DESC } else { EVENT_ENABLE };
        self.set_event(u32::from(next.to_bits()) | u32::from(flags) << 16);
        fence(Ordering::SeqCst);
        self.is_available(next)
    }

    /// No kicks are needed for now. With the event index, a place that is not moved says the same until the ring has
    /// come round twice.
    #[inline]
    pub fn disable_kicks(&self, event_index: bool) {
        if !event_index {
            self.set_event(u32::from(EVENT_DISABLE) << 16);
        }
    }

    fn set_event(&self, word: u32) {
        // SAFETY: as in `wants_interrupt`.
        unsafe { AtomicU32::from_ptr(self.device.cast()) }.store(word.to_le(), Ordering::Relaxed);
    }
}

/// Adds one descriptor of the ring itself; whether it is the last of its chain.
#[inline]
fn add(
    memory: &GuestMemory,
    descriptor: Descriptor,
    indirect: bool,
    into: &mut Chain,
) -> Result<bool, RingError> {
    let last = descriptor.flags & DESC_F_NEXT == 0;
    if descriptor.flags & DESC_F_INDIRECT == 0 {
        into.add(memory, descriptor);
        return Ok(last);
    }
    // virtio 1.2, 2.8.19: INDIRECT and NEXT exclude each other.
    if !indirect {
        return Err(RingError::IndirectRefused);
    }
    if !last {
        return Err(RingError::IndirectNested);
    }
    into.add_packed_table(memory, descriptor.at, descriptor.len)?;
    Ok(true)
}

/// Collects the memory of a chain whose descriptors were kept: [`PackedRing::walk`] without the ring.
pub fn walk_kept(
    memory: &GuestMemory,
    kept: impl Iterator<Item = Descriptor>,
    indirect: bool,
    into: &mut Chain,
) -> Result<(), RingError> {
    into.clear();
    for descriptor in kept.take(CHAIN_MAX) {
        if add(memory, descriptor, indirect, into)? {
            return Ok(());
        }
    }
    Err(RingError::ChainLength)
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
