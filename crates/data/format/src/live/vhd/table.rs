//! The block allocation table in memory.

use std::cell::{Cell, OnceCell, RefCell};
use std::sync::Arc;

use super::shared::SharedMap;

/// Where each block is, and which blocks have every sector.
///
/// Entries are kept inverted, so that an unallocated block (all ones on disk) is zero here: the memory of a table that
/// is mostly empty is then never touched, and a 2 TiB disk with little in it costs little.
#[derive(Debug)]
pub(super) struct BlockTable {
    inverted: RefCell<Vec<u32>>,
    full: RefCell<Vec<u64>>,
    allocated: Cell<u32>,
    /// What other threads are told, once there are any.
    shared: OnceCell<Arc<SharedMap>>,
}

impl BlockTable {
    /// A table of `count` unallocated blocks.
    pub(super) fn new(count: u32) -> Self {
        let count = count as usize;
        Self {
            inverted: RefCell::new(vec![0; count]),
            full: RefCell::new(vec![0; count.div_ceil(64)]),
            allocated: Cell::new(0),
            shared: OnceCell::new(),
        }
    }

    /// What other threads are told; `make` is called once.
    pub(super) fn share(&self, make: impl FnOnce() -> SharedMap) -> &Arc<SharedMap> {
        self.shared.get_or_init(|| Arc::new(make()))
    }

    /// What other threads are told, if there are any.
    #[inline]
    pub(super) fn shared(&self) -> Option<&Arc<SharedMap>> {
        self.shared.get()
    }

    fn withdraw(&self, block: u32) {
        if let Some(shared) = self.shared.get() {
            shared.withdraw(block);
        }
    }

    /// How many blocks there are.
    pub(super) fn len(&self) -> u32 {
        self.inverted.borrow().len() as u32
    }

    /// How many blocks are allocated.
    pub(super) fn allocated(&self) -> u32 {
        self.allocated.get()
    }

    /// The sector of the block's bitmap.
    pub(super) fn sector(&self, block: u32) -> Option<u32> {
        match self.inverted.borrow()[block as usize] {
            0 => None,
            inverted => Some(!inverted),
        }
    }

    /// Sets the sector of the block's bitmap.
    pub(super) fn set_sector(&self, block: u32, sector: u32) {
        self.withdraw(block);
        let before = std::mem::replace(&mut self.inverted.borrow_mut()[block as usize], !sector);
        if before == 0 {
            self.allocated.set(self.allocated.get() + 1);
        }
    }

    /// The block is not here any more.
    pub(super) fn clear(&self, block: u32) {
        let before = std::mem::take(&mut self.inverted.borrow_mut()[block as usize]);
        if before != 0 {
            self.allocated.set(self.allocated.get() - 1);
        }
        self.clear_full(block);
    }

    /// Notes that not every sector of the block may be present.
    pub(super) fn clear_full(&self, block: u32) {
        self.withdraw(block);
        self.full.borrow_mut()[block as usize / 64] &= !(1 << (block % 64));
    }

    /// Makes the table `count` blocks long, the new ones unallocated. It never becomes shorter.
    pub(super) fn grow(&self, count: u32) {
        let count = (count as usize).max(self.inverted.borrow().len());
        self.inverted.borrow_mut().resize(count, 0);
        self.full.borrow_mut().resize(count.div_ceil(64), 0);
    }

    /// Whether every sector of the block is present.
    pub(super) fn is_full(&self, block: u32) -> bool {
        self.full.borrow()[block as usize / 64] & (1 << (block % 64)) != 0
    }

    /// Notes that every sector of the block is present.
    pub(super) fn set_full(&self, block: u32) {
        self.full.borrow_mut()[block as usize / 64] |= 1 << (block % 64);
    }

    /// How many blocks from `block` on are unallocated, at most `max`.
    pub(super) fn unallocated_run(&self, block: u32, max: u32) -> u32 {
        let table = self.inverted.borrow();
        let rest = &table[block as usize..];
        let rest = &rest[..rest.len().min(max as usize)];
        rest.iter().position(|&entry| entry != 0).unwrap_or(rest.len()) as u32
    }

    /// `(block, sector)` of every allocated block.
    pub(super) fn for_each_allocated(&self, mut each: impl FnMut(u32, u32)) {
        for (block, &inverted) in self.inverted.borrow().iter().enumerate() {
            if inverted != 0 {
                each(block as u32, !inverted);
            }
        }
    }

    /// The big-endian bytes of the entries from `first`, as on disk; entries past the table read as unallocated.
    pub(super) fn encode(&self, first: u32, out: &mut [u8]) {
        let table = self.inverted.borrow();
        for (index, bytes) in out.chunks_exact_mut(4).enumerate() {
            let inverted = table.get(first as usize + index).copied().unwrap_or(0);
            bytes.copy_from_slice(&(!inverted).to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_encodes_what_was_set() {
        let table = BlockTable::new(3);
        table.set_sector(1, 0x0102_0304);
        let mut out = [0; 16];
        table.encode(0, &mut out);
        assert_eq!(out, [255, 255, 255, 255, 1, 2, 3, 4, 255, 255, 255, 255, 255, 255, 255, 255]);
        assert_eq!((table.sector(0), table.sector(1)), (None, Some(0x0102_0304)));
        assert_eq!((table.unallocated_run(0, 9), table.unallocated_run(2, 9)), (1, 1));
        table.set_full(1);
        table.clear(1);
        table.clear(1);
        assert_eq!((table.sector(1), table.is_full(1), table.allocated()), (None, false, 0));
        table.grow(70);
        assert_eq!((table.len(), table.sector(69), table.is_full(69)), (70, None, false));
    }
}
