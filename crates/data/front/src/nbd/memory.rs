//! What one connection may hold of the data thread's pool.
//!
//! Half of the pool is set aside so that every connection that may exist can hold a share of its own; the rest is
//! for any that needs more, first come, first served. A client that sends half a write and stops, or never reads its
//! replies, can so keep what it holds, but it cannot keep the others from going on: the memory that is reserved for
//! them is never given to others.
//!
//! With F bytes free, C connections at most and U(i) what connection i has not used of its share S, F >= sum of U(i)
//! always: taking from a share lowers both sides alike, and taking more needs F >= C x S afterwards.

use std::cell::Cell;
use std::rc::Rc;

use tapio_ring::{Buffer, Pool};

use super::limits::{CONNECTIONS_MAX, HELD_LEN_MAX, SHARE_LEN};

const PAGE_LEN: usize = 4096;

/// The account of one connection.
#[derive(Debug)]
pub struct Memory {
    pool: Pool,
    held: Rc<Cell<usize>>,
    /// Bytes this connection can count on.
    share: usize,
    /// Bytes that are never given out beyond the shares.
    reserve: usize,
}

/// Pool memory on a connection's account; goes back when dropped.
#[derive(Debug)]
pub struct Held {
    /// Not there while an operation or a request has it.
    buffer: Option<Buffer>,
    charged: usize,
    held: Rc<Cell<usize>>,
}

impl Memory {
    /// A fresh account.
    pub fn new(pool: &Pool) -> Self {
        let share = (pool.len() / 2 / CONNECTIONS_MAX).clamp(PAGE_LEN, SHARE_LEN) / PAGE_LEN * PAGE_LEN;
        let reserve = share * CONNECTIONS_MAX;
        Self { pool: pool.clone(), held: Rc::new(Cell::new(0)), share, reserve }
    }

    /// Bytes held now.
    #[cfg(test)]
    pub fn held_len(&self) -> usize {
        self.held.get()
    }

    fn allows(&self, len: usize) -> bool {
        let after = self.held.get() + len;
        let lent = after <= HELD_LEN_MAX && self.pool.free_len() >= self.reserve + len;
        after <= self.share || lent
    }

    /// `len` bytes in one piece, or nothing.
    pub fn take(&self, len: usize) -> Option<Held> {
        let charged = len.max(1).next_multiple_of(PAGE_LEN);
        if !self.allows(charged) {
            return None;
        }
        let buffer = self.pool.take(len)?;
        self.held.set(self.held.get() + charged);
        Some(Held { buffer: Some(buffer), charged, held: Rc::clone(&self.held) })
    }

    /// `len` bytes, or as large a part of them as is to be had now: whole pages, at least one.
    pub fn take_some(&self, len: usize) -> Option<Held> {
        let mut want = len;
        loop {
            if let Some(held) = self.take(want) {
                return Some(held);
            }
            let half = (want / 2).next_multiple_of(PAGE_LEN);
            if half >= want {
                return None;
            }
            want = half;
        }
    }
}

const LENT: &str = "what is lent is not looked at before it is back";

impl Held {
    /// The memory itself, for an operation or a request. It stays on the account.
    pub fn lend(&mut self) -> Buffer {
        self.buffer.take().expect(LENT)
    }

    /// The memory is back.
    pub fn put_back(&mut self, buffer: Buffer) {
        self.buffer = Some(buffer);
    }
}

impl std::ops::Deref for Held {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        self.buffer.as_ref().expect(LENT)
    }
}

impl std::ops::DerefMut for Held {
    fn deref_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().expect(LENT)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.held.set(self.held.get() - self.charged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_connections_never_take_the_share_of_a_modest_one() {
        for pool_len in [1 << 20, 32 << 20] {
            let pool = Pool::new(pool_len).unwrap();
            let greedy: Vec<_> = (1..CONNECTIONS_MAX).map(|_| Memory::new(&pool)).collect();
            let mut taken = Vec::new();
            for memory in &greedy {
                while let Some(held) = memory.take_some(1 << 20) {
                    taken.push(held);
                }
                assert!(memory.held_len() >= memory.share && memory.held_len() <= HELD_LEN_MAX);
            }
            let modest = Memory::new(&pool);
            let mut own = Vec::new();
            while modest.held_len() < modest.share {
                own.push(modest.take_some(PAGE_LEN).expect("a promised page"));
            }
            drop((own, taken));
            assert_eq!((modest.held_len(), pool.free_len()), (0, pool.len()));
        }
    }

    #[test]
    fn a_lone_connection_gets_its_eight_mebibytes() {
        let pool = Pool::new(32 << 20).unwrap();
        let memory = Memory::new(&pool);
        let held: Vec<_> = (0..8).map_while(|_| memory.take(1 << 20)).collect();
        assert_eq!(held.len(), 8);
        assert!(memory.take(1).is_none());
        let part = {
            drop(held);
            memory.take_some(100 << 10).unwrap()
        };
        assert_eq!(part.len(), 100 << 10);
    }
}
