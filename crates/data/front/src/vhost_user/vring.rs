//! The split virtqueue: descriptor table, available and used ring.
//!
//! Layouts: virtio 1.2, section 2.7 "Split Virtqueues". The other side is the guest's driver and may write anything
//! at any time: every value is loaded once, then checked, then used.

use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::chain::{CHAIN_MAX, Chain, DESC_F_INDIRECT, DESC_F_NEXT, DESC_LEN, Descriptor};
use super::memory::{GuestMemory, copy_out};
use super::message::RingAddresses;
use super::ring_error::RingError;

/// The longest queue that virtio knows.
pub const QUEUE_SIZE_MAX: u16 = 32768;
/// `avail.flags`: the driver does not want interrupts.
const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// `used.flags`: the device does not want kicks.
const USED_F_NO_NOTIFY: u16 = 1;

/// A split ring in guest memory. Valid as long as the [`GuestMemory`] it was made from.
#[derive(Debug)]
pub struct SplitRing {
    size: u16,
    desc: *const u8,
    avail: *const u8,
    used: *mut u8,
}

impl SplitRing {
    /// Finds the parts of a ring of `size` descriptors in memory.
    pub fn new(memory: &GuestMemory, size: u16, addresses: &RingAddresses) -> Result<Self, RingError> {
        if !size.is_power_of_two() || size > QUEUE_SIZE_MAX {
            return Err(RingError::Size(size.into()));
        }
        let entries = u64::from(size);
        let find = |name, user, len, align: usize| {
            let pointer = memory.user_contiguous(user, len).ok_or(RingError::Outside(name))?;
            if (pointer as usize).is_multiple_of(align) {
                Ok(pointer)
            } else {
                Err(RingError::Misaligned(name))
            }
        };
        // Both rings end with the event index, which has its place whether it is negotiated or not.
        let desc = find("descriptor table", addresses.desc, DESC_LEN * entries, 16)?;
        let avail = find("available ring", addresses.avail, 6 + 2 * entries, 2)?;
        let used = find("used ring", addresses.used, 6 + 8 * entries, 4)?;
        Ok(Self { size, desc, avail, used })
    }

    /// Descriptors in the table.
    pub const fn size(&self) -> u16 {
        self.size
    }

    fn avail_word(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers give an even offset inside the available ring, which `new` found inside guest memory at an
        // even address; the memory outlives `self` and is only ever accessed by atomic or volatile operations.
        unsafe { AtomicU16::from_ptr(self.avail.add(offset).cast_mut().cast()) }
    }

    fn used_word(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: as in `avail_word`, for the used ring.
        unsafe { AtomicU16::from_ptr(self.used.add(offset).cast()) }
    }

    /// How far the driver has come. What it published before is visible after this.
    #[inline]
    pub fn avail_index(&self) -> u16 {
        u16::from_le(self.avail_word(2).load(Ordering::Acquire))
    }

    /// The head that the driver put at position `index` of the available ring; any value.
    #[inline]
    pub fn avail_head(&self, index: u16) -> u16 {
        let place = usize::from(index & (self.size - 1));
        u16::from_le(self.avail_word(4 + 2 * place).load(Ordering::Relaxed))
    }

    /// Whether the driver wants an interrupt for the answers from `old` to `new`.
    #[inline]
    pub fn wants_interrupt(&self, event_index: bool, old: u16, new: u16) -> bool {
        // The new used index must be visible before the driver's flags are read; it does so the other way round.
        fence(Ordering::SeqCst);
        if !event_index {
            return u16::from_le(self.avail_word(0).load(Ordering::Relaxed)) & AVAIL_F_NO_INTERRUPT == 0;
        }
        let event = u16::from_le(self.avail_word(4 + 2 * usize::from(self.size)).load(Ordering::Relaxed));
        need_event(event, new, old)
    }

    /// Where the used ring stands.
    pub fn used_index(&self) -> u16 {
        u16::from_le(self.used_word(2).load(Ordering::Relaxed))
    }

    /// Notes an answer at position `index`: request `head` is done and `len` bytes of it were written.
    #[inline]
    pub fn put_used(&self, index: u16, head: u16, len: u32) {
        let place = usize::from(index & (self.size - 1));
        // SAFETY: the entry lies inside the used ring, which is 4-aligned, and so is the entry.
        unsafe {
            let entry = self.used.add(4 + 8 * place).cast::<u32>();
            entry.write_volatile(u32::from(head).to_le());
            entry.add(1).write_volatile(len.to_le());
        }
    }

    /// Makes the answers before `index` visible.
    #[inline]
    pub fn publish_used(&self, index: u16) {
        self.used_word(2).store(index.to_le(), Ordering::Release);
    }

    /// Asks for a kick at the next request after `next`, then looks: the driver may have been faster.
    #[inline]
    pub fn enable_kicks(&self, event_index: bool, next: u16) -> u16 {
        if event_index {
            self.used_word(4 + 8 * usize::from(self.size)).store(next.to_le(), Ordering::Relaxed);
        }
        self.used_word(0).store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.avail_index()
    }

    /// No kicks are needed for now. With the event index, an index that is not moved says the same.
    #[inline]
    pub fn disable_kicks(&self, event_index: bool) {
        if !event_index {
            self.used_word(0).store(USED_F_NO_NOTIFY.to_le(), Ordering::Relaxed);
        }
    }

    /// Follows the chain that begins at `head` and collects its memory.
    ///
    /// An error means that the chain itself makes no sense. A sound chain with senseless buffers ends with
    /// [`Chain::fault`] set.
    #[inline]
    pub fn walk(
        &self,
        memory: &GuestMemory,
        head: u16,
        indirect: bool,
        into: &mut Chain,
    ) -> Result<(), RingError> {
        into.clear();
        if head >= self.size {
            return Err(RingError::Head(head));
        }
        let mut index = head;
        for _ in 0..usize::from(self.size).min(CHAIN_MAX) {
            let mut bytes = [0; 16];
            // SAFETY: the index is below the size, so the descriptor lies inside the table.
            unsafe { copy_out(self.desc.add(usize::from(index) * 16), &mut bytes) };
            let descriptor = Descriptor::parse(bytes);
            if descriptor.flags & DESC_F_INDIRECT != 0 {
                // virtio 1.2, 2.7.5.3.1: INDIRECT and NEXT exclude each other.
                if !indirect {
                    return Err(RingError::IndirectRefused);
                }
                if descriptor.flags & DESC_F_NEXT != 0 {
                    return Err(RingError::IndirectNested);
                }
                return into.add_table(memory, descriptor.at, descriptor.len);
            }
            into.add(memory, descriptor);
            if descriptor.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
            if index >= self.size {
                return Err(RingError::Next(index));
            }
        }
        Err(RingError::ChainLength)
    }
}

/// Whether moving an index from `old` to `new` passes `event` (virtio 1.2, 2.7.10).
pub const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
#[path = "vring_tests.rs"]
mod tests;
