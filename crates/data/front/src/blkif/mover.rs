//! How a guest's data comes to the disk and back: copied by the hypervisor, many pages by one call; or in place, in
//! pages that are mapped for a request or stay mapped.

use std::io;
use std::ops::Range;
use std::rc::Rc;

use tapio_block::Data;
use tapio_ring::{Buffer, Pool, Segments};
use tapio_types::Movement;
use tapio_xen::domain::Direction;
use tapio_xen::{CopyBatch, Domain, GrantRef, Mapped, Rights};

use super::check::Piece;
use super::persistent::{InUse, PERSISTENT_MAX, PersistentPages};

/// What moving has cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveCounts {
    /// Calls that copied.
    pub copy_calls: u64,
    /// Pieces that these copied.
    pub copied_segments: u64,
    /// Bytes that these copied.
    pub copied_bytes: u64,
    /// Calls that mapped.
    pub maps: u64,
    /// Pages that these mapped.
    pub mapped_pages: u64,
}

/// The memory of a part of a request on its way to the disk. Keeps its tables from one part to the next.
#[derive(Debug, Default)]
pub struct Hold {
    /// Not there while the disk has it.
    buffer: Option<Buffer>,
    table: Vec<libc::iovec>,
    in_use: Vec<InUse>,
    own: Vec<Mapped>,
    /// Its copies in the current batch.
    copies: Range<usize>,
}

impl Hold {
    /// The memory of a part of `bytes` that was prepared: a buffer is the disk's until it comes back, pages stay here.
    ///
    /// # Safety
    /// Nothing else changes here until the disk is done with what is made here: it is released after that.
    pub unsafe fn data(&mut self, bytes: u64) -> Data {
        match self.buffer.take() {
            Some(buffer) => Data::Own(buffer),
            // SAFETY: the table and the pages stay until `release`, which is when the disk is done with them. The guest
            // may change their content at any time: it is moved by the kernel, never looked at here.
            None => Data::Guest(unsafe { Segments::from_iovecs(&self.table, bytes) }),
        }
    }

    /// The disk is done with the buffer.
    pub fn take_back(&mut self, buffer: Buffer) {
        self.buffer = Some(buffer);
    }
}

/// Moves the data of one ring.
#[derive(Debug)]
pub struct Mover {
    domain: Rc<Domain>,
    movement: Movement,
    pool: Pool,
    batch: CopyBatch,
    batch_bytes: u64,
    persistent: PersistentPages,
    grants: Vec<GrantRef>,
    /// What it has cost.
    pub counts: MoveCounts,
}

impl Mover {
    /// Moves between `domain` and memory of `pool`.
    pub fn new(domain: Rc<Domain>, movement: Movement, pool: Pool) -> Self {
        Self {
            domain,
            movement,
            pool,
            batch: CopyBatch::default(),
            batch_bytes: 0,
            persistent: PersistentPages::new(PERSISTENT_MAX),
            grants: Vec::new(),
            counts: MoveCounts::default(),
        }
    }

    /// Whether data lies in memory of ours while the disk works on it.
    pub fn is_copying(&self) -> bool {
        matches!(self.movement, Movement::Copy | Movement::Bounce)
    }

    /// What pages that stay mapped have saved.
    pub fn persistent(&self) -> &PersistentPages {
        &self.persistent
    }

    /// Memory that is free for copies, in bytes.
    pub fn free_len(&self) -> usize {
        if self.is_copying() { self.pool.free_len() } else { usize::MAX }
    }

    /// Takes memory for as much of `pieces` as there is some for: how many of them, and their bytes. Nothing where
    /// there is none.
    pub fn reserve(&mut self, pieces: &[Piece], len_max: u64, hold: &mut Hold) -> Option<(usize, u64)> {
        let mut len_max = len_max;
        loop {
            let (mut count, mut bytes) = (0, 0u64);
            for piece in pieces {
                if count > 0 && bytes + u64::from(piece.len) > len_max {
                    break;
                }
                count += 1;
                bytes += u64::from(piece.len);
            }
            if !self.is_copying() {
                return Some((count, bytes));
            }
            if let Some(buffer) = self.pool.take(bytes as usize) {
                hold.buffer = Some(buffer);
                return Some((count, bytes));
            }
            // There may be memory, but not so much in one run.
            if count <= 1 {
                return None;
            }
            len_max = bytes / 2;
        }
    }

    /// Makes `pieces` reachable for the disk. Of a write that is copied the copies are put into the batch,
    /// which [`Mover::carry_out`] then carries out.
    ///
    /// # Errors
    /// The guest does not grant a page.
    pub fn prepare(&mut self, pieces: &[Piece], write: bool, hold: &mut Hold) -> io::Result<()> {
        match self.movement {
            Movement::Copy => {
                if write {
                    self.push(pieces, Direction::FromDomain, hold);
                }
                Ok(())
            }
            Movement::Persistent => self.prepare_persistent(pieces, hold),
            Movement::Map => self.prepare_mapped(pieces, write, hold),
            Movement::Bounce => {
                self.prepare_mapped(pieces, write, hold)?;
                if write {
                    bounce(hold, true);
                }
                Ok(())
            }
        }
    }

    fn prepare_persistent(&mut self, pieces: &[Piece], hold: &mut Hold) -> io::Result<()> {
        for piece in pieces {
            let misses = self.persistent.counts.misses;
            let base = match self.persistent.get(&self.domain, piece.grant)? {
                Some((page, base)) => {
                    hold.in_use.push(page);
                    base
                }
                None => {
                    let mapped = self.domain.map(&[piece.grant], Rights::Write)?;
                    let base = mapped.as_ptr();
                    hold.own.push(mapped);
                    base
                }
            };
            if self.persistent.counts.misses != misses {
                self.counts.maps += 1;
                self.counts.mapped_pages += 1;
            }
            add(&mut hold.table, base.wrapping_add(piece.at.into()), piece.len.into());
        }
        Ok(())
    }

    fn prepare_mapped(&mut self, pieces: &[Piece], write: bool, hold: &mut Hold) -> io::Result<()> {
        self.grants.clear();
        self.grants.extend(pieces.iter().map(|piece| piece.grant));
        let mapped = self.domain.map(&self.grants, if write { Rights::Read } else { Rights::Write })?;
        self.counts.maps += 1;
        self.counts.mapped_pages += pieces.len() as u64;
        for (index, piece) in pieces.iter().enumerate() {
            let at = index * tapio_xen::domain::PAGE_LEN + usize::from(piece.at);
            add(&mut hold.table, mapped.as_ptr().wrapping_add(at), piece.len.into());
        }
        hold.own.push(mapped);
        Ok(())
    }

    /// Puts the copies of a read that the disk has done into the batch.
    pub fn answer(&mut self, pieces: &[Piece], hold: &mut Hold) {
        match self.movement {
            Movement::Copy => self.push(pieces, Direction::ToDomain, hold),
            Movement::Bounce => bounce(hold, false),
            Movement::Persistent | Movement::Map => {}
        }
    }

    fn push(&mut self, pieces: &[Piece], direction: Direction, hold: &mut Hold) {
        let Some(buffer) = &hold.buffer else { return };
        let start = self.batch.len();
        let mut at = 0;
        for piece in pieces {
            assert!(at + usize::from(piece.len) <= buffer.len(), "the buffer was taken for these pieces");
            let local = buffer.as_ptr().wrapping_add(at);
            // SAFETY: inside the buffer, as just checked, which stays until the part has ended; the batch is carried
            // out before that.
            unsafe { self.batch.push(direction, self.domain.id(), piece.grant, piece.at, local, piece.len) };
            at += usize::from(piece.len);
        }
        self.batch_bytes += at as u64;
        hold.copies = start..self.batch.len();
    }

    /// Puts the copy of a piece of a guest's page into the batch; gives its place there.
    ///
    /// # Safety
    /// `into` is valid for writing `len` bytes until the batch was carried out; `len` is at most a page.
    pub unsafe fn push_table(&mut self, grant: GrantRef, into: *mut u8, len: u16) -> usize {
        // SAFETY: the caller's promise.
        unsafe { self.batch.push(Direction::FromDomain, self.domain.id(), grant, 0, into, len) };
        self.batch_bytes += u64::from(len);
        self.batch.len() - 1
    }

    /// Carries out the batch by one call. How each copy went can be asked until [`Mover::clear`].
    ///
    /// # Errors
    /// The call itself failed; nothing is known of any copy.
    pub fn carry_out(&mut self) -> io::Result<()> {
        if self.batch.is_empty() {
            return Ok(());
        }
        self.counts.copy_calls += 1;
        self.counts.copied_segments += self.batch.len() as u64;
        self.counts.copied_bytes += self.batch_bytes;
        self.batch_bytes = 0;
        self.domain.copy(&mut self.batch)
    }

    /// Whether copy `index` was done.
    pub fn is_done(&self, index: usize) -> bool {
        self.batch.status(index).is_ok()
    }

    /// Whether all copies of a part were done.
    pub fn all_done(&self, hold: &Hold) -> bool {
        hold.copies.clone().all(|index| self.is_done(index))
    }

    /// Forgets the batch.
    pub fn clear(&mut self) {
        self.batch.clear();
        self.batch_bytes = 0;
    }

    /// The disk is done with the memory of a part.
    pub fn release(&mut self, hold: &mut Hold) {
        hold.buffer = None;
        hold.table.clear();
        for page in hold.in_use.drain(..) {
            self.persistent.put(page);
        }
        hold.own.clear();
        hold.copies = 0..0;
    }
}

/// Copies between mapped pages and the buffer: into the buffer for a write, out of it for a read.
fn bounce(hold: &mut Hold, write: bool) {
    let Some(buffer) = &mut hold.buffer else { return };
    let mut at = 0;
    for piece in &hold.table {
        let ours = buffer[at..at + piece.iov_len].as_mut_ptr();
        let theirs = piece.iov_base.cast::<u8>();
        let (from, to) = if write { (theirs, ours) } else { (ours, theirs) };
        // SAFETY: the pages stay mapped until `release`, the slice of the buffer is as long, and the two are apart. The
        // guest may write to its pages meanwhile: any bytes are data.
        unsafe { from.copy_to_nonoverlapping(to, piece.iov_len) };
        at += piece.iov_len;
    }
}

/// Adds a piece of memory, or makes the last one longer.
fn add(table: &mut Vec<libc::iovec>, base: *mut u8, len: usize) {
    if let Some(last) = table.last_mut()
        && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base
    {
        last.iov_len += len;
        return;
    }
    table.push(libc::iovec { iov_base: base.cast(), iov_len: len });
}
