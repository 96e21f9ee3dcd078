//! What the data thread asks of a front end that meets its guest in shared memory.

use std::cell::RefCell;
use std::rc::Rc;

use tapio_ring::{Hooks, Pool};
use tapio_stat::trace::Point;

use crate::trace::Trace;

/// A front end in shared memory: vhost-user, later blkif.
///
/// A front end on sockets (NBD) is made of service tasks and does not need this.
pub trait FrontEnd {
    /// Takes new requests from the guest while [`crate::Port::room`] allows and submits them. Returns whether there
    /// were
    /// any. Called every turn: with nothing new it costs a load or two.
    fn pull(&mut self) -> bool;
    /// Makes the completions since the last call visible, and notifies the guest once if it asked for that.
    fn publish(&mut self);
    /// Whether a request waits in shared memory: a load or two; what the poller spins on. False when there is no room
    /// for one, because then only a completion can help.
    fn peek(&self) -> bool;
    /// Asks the guest for wake-ups again; true if a request slipped in meanwhile.
    fn arm(&mut self) -> bool;
    /// Turns the guest's notifications off while the thread is awake.
    fn disarm(&mut self);
    /// The thread has been without work for a while: memory that only work needs may go.
    fn rest(&mut self) {}
}

/// Names a front end of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontId(u32);

type List = Vec<(FrontId, Box<dyn FrontEnd>)>;

/// The shared-memory front ends of a data thread; drives them as the executor's hooks.
#[derive(Clone, Default)]
pub struct Fronts {
    list: Rc<RefCell<List>>,
    next: Rc<std::cell::Cell<u32>>,
    /// Given back to the host when the thread rests.
    pool: Option<Pool>,
    /// Called when the thread rests.
    at_rest: Option<fn()>,
    trace: Rc<Trace>,
}

impl std::fmt::Debug for Fronts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fronts").field("count", &self.list.borrow().len()).finish_non_exhaustive()
    }
}

impl Fronts {
    /// No front ends yet, on a thread with this pool, that calls `at_rest` when it has been without work for a while.
    pub(crate) fn on_thread(pool: Pool, at_rest: Option<fn()>, trace: Rc<Trace>) -> Self {
        Self { pool: Some(pool), at_rest, trace, ..Self::default() }
    }

    /// Adds a front end. Not to be called from inside a front end.
    pub fn add(&self, front: Box<dyn FrontEnd>) -> FrontId {
        let id = FrontId(self.next.get());
        self.next.set(id.0 + 1);
        self.list.borrow_mut().push((id, front));
        id
    }

    /// Takes a front end out; what it holds is released when the value is dropped.
    pub fn remove(&self, id: FrontId) -> Option<Box<dyn FrontEnd>> {
        let mut list = self.list.borrow_mut();
        let index = list.iter().position(|(other, _)| *other == id)?;
        Some(list.swap_remove(index).1)
    }
}

impl Hooks for Fronts {
    fn turn(&mut self) -> bool {
        let mut pulled = false;
        for (_, front) in self.list.borrow_mut().iter_mut() {
            pulled |= front.pull();
        }
        pulled
    }

    fn publish(&mut self) {
        for (_, front) in self.list.borrow_mut().iter_mut() {
            front.publish();
        }
        // The kernel is entered next.
        self.trace.note_all(Point::Entering, 0);
    }

    fn turned(&mut self) {
        self.trace.note_all(Point::Woke, 0);
    }

    fn peek(&self) -> bool {
        self.list.borrow().iter().any(|(_, front)| front.peek())
    }

    fn arm(&mut self) -> bool {
        let mut waiting = false;
        for (_, front) in self.list.borrow_mut().iter_mut() {
            waiting |= front.arm();
        }
        waiting
    }

    fn disarm(&mut self) {
        for (_, front) in self.list.borrow_mut().iter_mut() {
            front.disarm();
        }
    }

    fn rest(&mut self) {
        for (_, front) in self.list.borrow_mut().iter_mut() {
            front.rest();
        }
        if let Some(pool) = &self.pool {
            pool.rest();
        }
        if let Some(at_rest) = self.at_rest {
            at_rest();
        }
    }
}
