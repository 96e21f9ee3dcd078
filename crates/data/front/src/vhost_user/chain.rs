//! The memory of one request: descriptors as guests write them, and the pieces of host memory behind them.
//!
//! Layouts: virtio 1.2, sections 2.7.5 (split) and 2.8.13 (packed). A descriptor was copied out of guest memory once
//! before it comes here.

use super::memory::{GuestMemory, copy_out};
use super::ring_error::RingError;

/// Descriptors of one request, those of its indirect table included. Eight times what we announce (`seg_max`).
pub const CHAIN_MAX: usize = 1024;
/// Pieces of host memory of one request: a descriptor that crosses region borders makes several.
const PIECES_MAX: usize = CHAIN_MAX + 256;

/// Bytes of a descriptor, in either kind of ring.
pub const DESC_LEN: u64 = 16;
/// Another descriptor follows.
pub const DESC_F_NEXT: u16 = 1;
/// The device writes this buffer.
pub const DESC_F_WRITE: u16 = 2;
/// The buffer holds a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;

/// What is wrong with a request whose chain is sound: it is answered with an I/O error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A buffer lies outside guest memory.
    Outside { at: u64, len: u32 },
    /// A buffer for reading follows one for writing.
    Order,
    /// More pieces of memory than a request may have.
    Pieces,
}

/// A descriptor, copied out of guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest address.
    pub at: u64,
    /// Bytes.
    pub len: u32,
    /// `NEXT`, `WRITE`, `INDIRECT`; in a packed ring also the marks of available and used.
    pub flags: u16,
    /// The successor in the table, if `NEXT`; in a packed ring the buffer's id.
    pub next: u16,
}

impl Descriptor {
    /// From the 16 bytes of a split ring.
    #[inline]
    pub fn parse(bytes: [u8; 16]) -> Self {
        let (at, high) = halves(bytes);
        Self { at, len: high as u32, flags: (high >> 32) as u16, next: (high >> 48) as u16 }
    }

    /// From the 16 bytes of a packed ring, which has the last two fields the other way round.
    #[inline]
    pub fn parse_packed(bytes: [u8; 16]) -> Self {
        let (at, high) = halves(bytes);
        Self { at, len: high as u32, flags: (high >> 48) as u16, next: (high >> 32) as u16 }
    }

    /// The 16 bytes of a split ring.
    pub fn to_bytes(self) -> [u8; 16] {
        self.bytes(self.flags, self.next)
    }

    /// The 16 bytes of a packed ring.
    pub fn to_packed_bytes(self) -> [u8; 16] {
        self.bytes(self.next, self.flags)
    }

    fn bytes(self, first: u16, second: u16) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.at.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&first.to_le_bytes());
        bytes[14..].copy_from_slice(&second.to_le_bytes());
        bytes
    }
}

#[inline]
fn halves(bytes: [u8; 16]) -> (u64, u64) {
    let both = u128::from_le_bytes(bytes);
    (both as u64, (both >> 64) as u64)
}

/// The memory of one request: first what the device reads, then what it writes. Keeps its table between requests.
#[derive(Debug, Default)]
pub struct Chain {
    /// Pieces of host memory inside guest memory, none of them empty.
    pub pieces: Vec<libc::iovec>,
    /// How many of them are for reading.
    pub readable: usize,
    /// Bytes for reading.
    pub readable_len: u64,
    /// Bytes for writing.
    pub writable_len: u64,
    /// The last byte for writing: where the status goes.
    pub status_at: Option<u64>,
    /// The first thing that is wrong.
    pub fault: Option<Fault>,
    /// The descriptors in the ring itself, if the caller asked for them.
    pub direct: Vec<Descriptor>,
}

impl Chain {
    /// Forgets the last request.
    #[inline]
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.readable = 0;
        self.readable_len = 0;
        self.writable_len = 0;
        self.status_at = None;
        self.fault = None;
        self.direct.clear();
    }

    /// Adds the buffer of a descriptor.
    #[inline]
    pub fn add(&mut self, memory: &GuestMemory, descriptor: Descriptor) {
        let Descriptor { at, len, flags, .. } = descriptor;
        let write = flags & DESC_F_WRITE != 0;
        if len == 0 {
            return;
        }
        if write {
            self.writable_len += u64::from(len);
            self.status_at = at.checked_add(u64::from(len) - 1);
        } else {
            self.readable_len += u64::from(len);
            if self.writable_len > 0 {
                self.fault.get_or_insert(Fault::Order);
            }
        }
        if self.fault.is_some() {
            return;
        }
        let (mut from, mut left) = (at, u64::from(len));
        loop {
            let Some((pointer, found)) = memory.translate(from, left) else {
                self.fault = Some(Fault::Outside { at, len });
                return;
            };
            if self.pieces.len() == PIECES_MAX {
                self.fault = Some(Fault::Pieces);
                return;
            }
            self.pieces.push(libc::iovec { iov_base: pointer.cast(), iov_len: found as usize });
            self.readable += usize::from(!write);
            left -= found;
            if left == 0 {
                return;
            }
            let Some(next) = from.checked_add(found) else {
                self.fault = Some(Fault::Outside { at, len });
                return;
            };
            from = next;
        }
    }

    /// Follows the chain in the indirect table of a split ring.
    #[inline]
    pub fn add_table(&mut self, memory: &GuestMemory, at: u64, len: u32) -> Result<(), RingError> {
        let table = Table::find(memory, at, len)?;
        let mut index = 0;
        for _ in 0..table.count {
            let descriptor = Descriptor::parse(table.read(index)?);
            if descriptor.flags & DESC_F_INDIRECT != 0 {
                return Err(RingError::IndirectNested);
            }
            self.add(memory, descriptor);
            if descriptor.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
            if index >= table.count {
                return Err(RingError::Next(index));
            }
        }
        Err(RingError::ChainLength)
    }

    /// Adds every descriptor of the indirect table of a packed ring: there they follow each other without links.
    #[inline]
    pub fn add_packed_table(&mut self, memory: &GuestMemory, at: u64, len: u32) -> Result<(), RingError> {
        let table = Table::find(memory, at, len)?;
        for index in 0..table.count {
            let descriptor = Descriptor::parse_packed(table.read(index)?);
            if descriptor.flags & DESC_F_INDIRECT != 0 {
                return Err(RingError::IndirectNested);
            }
            self.add(memory, descriptor);
        }
        Ok(())
    }
}

/// An indirect table in guest memory.
struct Table<'a> {
    memory: &'a GuestMemory,
    at: u64,
    count: u16,
    /// Where all of it is, unless it crosses a region border.
    whole: Option<*mut u8>,
}

impl<'a> Table<'a> {
    #[inline]
    fn find(memory: &'a GuestMemory, at: u64, len: u32) -> Result<Self, RingError> {
        let count = u64::from(len) / DESC_LEN;
        if !u64::from(len).is_multiple_of(DESC_LEN) || count == 0 || count > CHAIN_MAX as u64 {
            return Err(RingError::IndirectLen(len));
        }
        Ok(Self { memory, at, count: count as u16, whole: memory.contiguous(at, u64::from(len)) })
    }

    #[inline]
    fn read(&self, index: u16) -> Result<[u8; 16], RingError> {
        let mut bytes = [0; 16];
        match self.whole {
            // SAFETY: callers give an index below the count, so the descriptor lies inside the table.
            Some(table) => unsafe { copy_out(table.add(usize::from(index) * 16), &mut bytes) },
            None => {
                // A table across a region border; or outside.
                let place = self.at.checked_add(u64::from(index) * DESC_LEN);
                if !place.is_some_and(|place| self.memory.read(place, &mut bytes)) {
                    return Err(RingError::IndirectOutside(self.at));
                }
            }
        }
        Ok(bytes)
    }
}
