//! The requests in an image: what must be known before the place of a block may serve another.

use std::cell::Cell;

/// Requests that may still use a place they looked up earlier, counted in two epochs.
///
/// A request belongs to the epoch in which it began. When the epoch changes, the earlier one gets no more requests;
/// once all of it have ended, no request holds a place that was given back before the change.
#[derive(Debug, Default)]
pub(super) struct Visits {
    shift: Cell<usize>,
    inside: [Cell<u32>; 2],
}

/// A request inside an image. Ends when it is dropped.
#[derive(Debug)]
pub struct Visit<'a>(&'a Cell<u32>);

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Visits {
    pub(super) fn enter(&self) -> Visit<'_> {
        let inside = &self.inside[self.shift.get()];
        inside.set(inside.get() + 1);
        Visit(inside)
    }

    /// Whether all requests of the earlier epoch have ended.
    pub(super) fn earlier_left(&self) -> bool {
        self.inside[1 - self.shift.get()].get() == 0
    }

    /// Begins another epoch. All requests of the earlier one must have ended.
    pub(super) fn change_shift(&self) {
        debug_assert!(self.earlier_left());
        self.shift.set(1 - self.shift.get());
    }
}

/// Places for the counts of [`Flying`].
const COUNTS: usize = 512;

/// Writes in flight, counted by block. Blocks that are far apart share a count, so that the memory is bounded: one that
/// is busy makes its mates look busy.
#[derive(Debug)]
pub(super) struct Flying(Box<[Cell<u32>]>);

impl Flying {
    /// For an image that is written, or one that is only read.
    pub(super) fn new(writes: bool) -> Self {
        Self(vec![Cell::new(0); if writes { COUNTS } else { 1 }].into_boxed_slice())
    }

    fn count(&self, block: u32) -> &Cell<u32> {
        &self.0[block as usize & (self.0.len() - 1)]
    }

    pub(super) fn begin(&self, block: u32) {
        let count = self.count(block);
        count.set(count.get() + 1);
    }

    pub(super) fn end(&self, block: u32) {
        let count = self.count(block);
        debug_assert!(count.get() > 0, "a write to block {block} ended that never began");
        count.set(count.get().saturating_sub(1));
    }

    /// Whether no write to the block is in flight.
    pub(super) fn is_quiet(&self, block: u32) -> bool {
        self.count(block).get() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shift_has_left_when_its_last_visitor_has() {
        let visits = Visits::default();
        let (first, second) = (visits.enter(), visits.enter());
        assert!(visits.earlier_left());
        visits.change_shift();
        let late = visits.enter();
        drop(first);
        assert!(!visits.earlier_left());
        drop(second);
        assert!(visits.earlier_left());
        visits.change_shift();
        assert!(!visits.earlier_left());
        drop(late);
        assert!(visits.earlier_left());
    }

    #[test]
    fn writes_are_counted_by_block() {
        let flying = Flying::new(true);
        flying.begin(3);
        flying.begin(3);
        flying.end(3);
        assert!(!flying.is_quiet(3) && !flying.is_quiet(3 + COUNTS as u32) && flying.is_quiet(4));
        flying.end(3);
        assert!(flying.is_quiet(3));
    }
}
