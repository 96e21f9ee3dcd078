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
/// is busy makes its mates look busy. The lower half of a count is those in flight, the upper half those that have
/// begun.
#[derive(Debug)]
pub(super) struct Flying(Box<[Cell<u64>]>);

/// One more has begun, and is in flight.
const BEGUN: u64 = (1 << 32) + 1;
const IN_FLIGHT: u64 = (1 << 32) - 1;

impl Flying {
    /// For an image that is written, or one that is only read.
    pub(super) fn new(writes: bool) -> Self {
        Self(vec![Cell::new(0); if writes { COUNTS } else { 1 }].into_boxed_slice())
    }

    fn count(&self, block: u32) -> &Cell<u64> {
        &self.0[block as usize & (self.0.len() - 1)]
    }

    pub(super) fn begin(&self, block: u32) {
        let count = self.count(block);
        count.set(count.get().wrapping_add(BEGUN));
    }

    pub(super) fn end(&self, block: u32) {
        let count = self.count(block);
        let any = count.get() & IN_FLIGHT > 0;
        debug_assert!(any, "a write to block {block} ended that never began");
        count.set(count.get() - u64::from(any));
    }

    /// Whether no write to the block is in flight.
    pub(super) fn is_quiet(&self, block: u32) -> bool {
        self.count(block).get() & IN_FLIGHT == 0
    }

    /// A mark of now, if no write to the block is in flight: as long as it stays the same, none has begun.
    pub(super) fn quiet_mark(&self, block: u32) -> Option<u64> {
        self.is_quiet(block).then(|| self.count(block).get())
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
        let mark = flying.quiet_mark(3);
        assert!(mark.is_some() && mark == flying.quiet_mark(3));
        flying.begin(3);
        assert_eq!(flying.quiet_mark(3), None);
        flying.end(3);
        assert_ne!(flying.quiet_mark(3), mark, "a write has begun since, and ended");
    }
}
