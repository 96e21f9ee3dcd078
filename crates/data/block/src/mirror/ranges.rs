//! The ranges of the disk that are worked on. Overlapping work is done one after the other, in the order of its
//! arrival.

use std::cell::{Cell, RefCell};

use tapio_ring::{Notify, Tasks};
use tapio_types::Span;

/// Ranges that are worked on before the table must grow: the deepest queue, and the copies beside it.
const ROOM: usize = 320;

#[derive(Clone, Copy, Debug)]
struct Entry {
    ticket: u64,
    span: Span,
}

/// The ranges that are worked on or waited for.
///
/// Each piece of work takes a number when it comes, and begins when no piece with a lower number overlaps: first come,
/// first served, so none waits for ever. None holds one range while it waits for another, so there is no deadlock.
#[derive(Debug)]
pub struct Ranges {
    tasks: Tasks,
    entries: RefCell<Vec<Entry>>,
    next: Cell<u64>,
    waiting: Cell<usize>,
    freed: Notify,
}

/// A range that is worked on until this is dropped.
#[derive(Debug)]
pub struct Held<'a> {
    ranges: &'a Ranges,
    ticket: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.ranges.leave(self.ticket);
    }
}

impl Ranges {
    /// No ranges yet, on this thread.
    pub fn new(tasks: Tasks) -> Self {
        let entries = RefCell::new(Vec::with_capacity(ROOM));
        Self { tasks, entries, next: Cell::new(0), waiting: Cell::new(0), freed: Notify::default() }
    }

    /// Takes a number for `span` and waits for its turn. The number stays taken until [`Ranges::leave`].
    pub async fn enter(&self, span: Span) -> u64 {
        let ticket = self.next.get();
        self.next.set(ticket + 1);
        self.entries.borrow_mut().push(Entry { ticket, span });
        while self.must_wait(ticket) {
            self.waiting.set(self.waiting.get() + 1);
            self.freed.wait(&self.tasks).await;
            self.waiting.set(self.waiting.get() - 1);
        }
        ticket
    }

    /// Gives a number back: the work is done.
    pub fn leave(&self, ticket: u64) {
        let mut entries = self.entries.borrow_mut();
        if let Some(index) = entries.iter().position(|entry| entry.ticket == ticket) {
            entries.swap_remove(index);
        }
        if self.waiting.get() > 0 {
            self.freed.notify_all(&self.tasks);
        }
    }

    /// [`Ranges::enter`] with a number that is given back by itself.
    pub async fn hold(&self, span: Span) -> Held<'_> {
        Held { ranges: self, ticket: self.enter(span).await }
    }

    fn must_wait(&self, ticket: u64) -> bool {
        let entries = self.entries.borrow();
        let Some(mine) = entries.iter().find(|entry| entry.ticket == ticket) else { return false };
        entries.iter().any(|entry| entry.ticket < ticket && entry.span.overlaps(mine.span))
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use tapio_ring::sim::{Random, SimHost};
    use tapio_ring::{Executor, Inbox, Io, Polling, PollingConfig};

    use super::*;

    #[test]
    fn overlapping_work_is_done_in_the_order_in_which_it_came() {
        let sim = SimHost::new(3).process();
        let tasks = sim.tasks().clone();
        let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
        let mut executor =
            Executor::new(tasks.clone(), Inbox::<()>::new(1), |()| std::future::ready(()), polling);
        let ranges = Rc::new(Ranges::new(tasks.clone()));
        // For each of ten places: whether it is taken, and the last number there.
        let places: Rc<RefCell<[(bool, u64); 10]>> = Rc::default();
        let left = Rc::new(Cell::new(200));
        let mut random = Random::new(5);
        for number in 1..=200u64 {
            let (tasks, ranges) = (tasks.clone(), Rc::clone(&ranges));
            let (places, left) = (Rc::clone(&places), Rc::clone(&left));
            let first = random.below(10);
            let span = Span::new(first, 1 + random.below(10 - first));
            let pause = random.below(1000);
            tasks.clone().spawn(async move {
                let held = ranges.hold(span).await;
                for place in span.start..span.start + span.len {
                    let (busy, last) = &mut places.borrow_mut()[place as usize];
                    assert!(!*busy && *last < number, "{number} after {last} at {place}");
                    (*busy, *last) = (true, number);
                }
                tasks.sleep_until(tasks.turn_ns() + pause).await;
                for place in span.start..span.start + span.len {
                    places.borrow_mut()[place as usize].0 = false;
                }
                drop(held);
                left.set(left.get() - 1);
            });
        }
        let waiter = (tasks.clone(), Rc::clone(&left));
        executor.block_on(&sim, &mut (), async move {
            while waiter.1.get() > 0 {
                waiter.0.sleep_until(waiter.0.turn_ns() + 1000).await;
            }
        });
        assert!(ranges.entries.borrow().is_empty());
        sim.end();
    }
}
