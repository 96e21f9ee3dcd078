//! Who works on which range of the disk: overlapping work is done one after the other, in the order in which it came.

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
/// Everybody takes a number when he comes, and goes on when nobody with a lower number overlaps: first come, first
/// served, so nobody waits for ever; and as nobody holds one range while he waits for another, nobody waits in a circle.
#[derive(Debug)]
pub struct Ranges {
    entries: RefCell<Vec<Entry>>,
    next: Cell<u64>,
    waiting: Cell<usize>,
    freed: Notify,
}

/// A range that is worked on until this is dropped.
#[derive(Debug)]
pub struct Held<'a> {
    ranges: &'a Ranges,
    tasks: &'a Tasks,
    ticket: u64,
}

impl Default for Ranges {
    fn default() -> Self {
        let entries = RefCell::new(Vec::with_capacity(ROOM));
        Self { entries, next: Cell::new(0), waiting: Cell::new(0), freed: Notify::default() }
    }
}

impl Ranges {
    /// Takes a number for `span` at once; work may begin when [`Held::granted`] ends.
    pub fn enter<'a>(&'a self, tasks: &'a Tasks, span: Span) -> Held<'a> {
        let ticket = self.next.get();
        self.next.set(ticket + 1);
        self.entries.borrow_mut().push(Entry { ticket, span });
        Held { ranges: self, tasks, ticket }
    }

    /// Takes a number for `span` and waits for its turn.
    pub async fn hold<'a>(&'a self, tasks: &'a Tasks, span: Span) -> Held<'a> {
        let held = self.enter(tasks, span);
        held.granted().await;
        held
    }

    fn must_wait(&self, ticket: u64) -> bool {
        let entries = self.entries.borrow();
        let Some(mine) = entries.iter().find(|entry| entry.ticket == ticket) else { return false };
        entries.iter().any(|entry| {
            entry.ticket < ticket
                && entry.span.start < mine.span.start.saturating_add(mine.span.len)
                && mine.span.start < entry.span.start.saturating_add(entry.span.len)
        })
    }
}

impl Held<'_> {
    /// Waits until nobody who came before works on any of it.
    pub async fn granted(&self) {
        while self.ranges.must_wait(self.ticket) {
            self.ranges.waiting.set(self.ranges.waiting.get() + 1);
            self.ranges.freed.wait(self.tasks).await;
            self.ranges.waiting.set(self.ranges.waiting.get() - 1);
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut entries = self.ranges.entries.borrow_mut();
        if let Some(index) = entries.iter().position(|entry| entry.ticket == self.ticket) {
            entries.swap_remove(index);
        }
        if self.ranges.waiting.get() > 0 {
            self.ranges.freed.notify_all(self.tasks);
        }
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
        let ranges: Rc<Ranges> = Rc::default();
        // For each of ten places, who is there, and who was last.
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
                let held = ranges.hold(&tasks, span).await;
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
