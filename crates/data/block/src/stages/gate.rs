//! The gate of a disk: whether requests are taken, which are inside, and the news that its waiters wait for.
//!
//! While it is closed, requests stay in the guest's ring or the client's socket. Queue threads have a gate of their own
//! in addition (`shared`), which is closed whenever this one is.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

use tapio_ring::{Inbox, Io, Notify, Tasks};

use super::Stage;
use crate::request::DiskError;
use crate::taken::Taken;

/// See the module's documentation.
pub(crate) struct Gate {
    inbox: Rc<Inbox<Taken>>,
    tasks: Tasks,
    /// Requests that wait outside of any chain: for space, or for a standby.
    aside: Cell<usize>,
    /// Something may wait for ends of requests: a pause, a close, a change of the images.
    is_awaited: Cell<bool>,
    /// Told when the disk gets into another state, and of ends of requests where something may wait for these.
    news: Notify,
}

/// A request is inside.
#[derive(Debug)]
pub(crate) struct Inside(());

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("is_open", &self.is_open())
            .field("aside", &self.aside)
            .finish_non_exhaustive()
    }
}

impl Gate {
    /// The gate before `inbox`, closed.
    pub fn new(inbox: Rc<Inbox<Taken>>, tasks: Tasks) -> Self {
        inbox.set_open(false);
        let (aside, is_awaited) = (Cell::new(0), Cell::new(true));
        Self { inbox, tasks, aside, is_awaited, news: Notify::default() }
    }

    pub const fn inbox(&self) -> &Rc<Inbox<Taken>> {
        &self.inbox
    }

    pub fn is_open(&self) -> bool {
        self.inbox.is_open()
    }

    /// Requests are taken from now on.
    pub fn open(&self) {
        self.inbox.set_open(true);
        self.is_awaited.set(false);
    }

    /// No requests are taken from now on. Those inside go on.
    pub fn close(&self) {
        self.is_awaited.set(true);
        self.inbox.set_open(false);
    }

    /// Every end of a request is told from now on, although the gate is open still.
    pub fn expect_ends(&self) {
        self.is_awaited.set(true);
    }

    /// Requests inside that wait outside of any chain.
    pub const fn aside(&self) -> usize {
        self.aside.get()
    }

    /// Requests inside that may use the images.
    pub fn at_images(&self) -> usize {
        self.inbox.in_flight().saturating_sub(self.aside.get())
    }

    /// Whether no request is inside, not even one that waits aside.
    pub fn is_empty(&self) -> bool {
        self.inbox.in_flight() == 0
    }

    /// The request of the current task waits outside of any chain from now on.
    pub fn step_aside(&self) {
        self.aside.set(self.aside.get() + 1);
        self.tell();
    }

    /// It goes on.
    pub fn come_back(&self) {
        self.aside.set(self.aside.get() - 1);
    }

    /// There is news: every waiter looks again.
    pub fn tell(&self) {
        self.news.notify_all(&self.tasks);
    }

    /// Waits for news. To be called in a loop that looks before.
    pub fn news(&self) -> impl Future<Output = ()> + '_ {
        self.news.wait(&self.tasks)
    }

    /// Waits for news, at most until `until_ns`.
    pub fn news_until(&self, until_ns: u64) -> impl Future<Output = ()> + '_ {
        self.news.wait_until(&self.tasks, until_ns)
    }
}

impl Stage for Gate {
    type Pass = Inside;

    fn enter<I: Io>(&self, _taken: &Taken, _io: &I) -> Inside {
        Inside(())
    }

    fn leave<I: Io>(&self, Inside(()): Inside, _result: Result<(), DiskError>, _io: &I) -> bool {
        self.is_awaited.get()
    }
}

#[cfg(test)]
mod tests {
    use tapio_ring::sim::SimHost;

    use super::super::asked::{Client, answer, asked, end};
    use super::*;
    use crate::request::Op;

    #[test]
    fn ends_are_told_while_something_may_wait_for_them_and_only_then() {
        let sim = SimHost::new(1).process();
        let inbox = Inbox::new(4);
        let gate = Gate::new(Rc::clone(&inbox), sim.tasks().clone());
        let taken = asked(&Rc::default(), Op::Read, 0, 512);
        let is_told = || {
            let inside = gate.enter(&taken, &sim);
            gate.leave(inside, Ok(()), &sim)
        };
        assert!(!gate.is_open() && inbox.room() == 0 && is_told());
        gate.open();
        assert!(gate.is_open() && inbox.room() == 4 && !is_told());
        // A disk that begins to drain takes requests still.
        gate.expect_ends();
        assert!(gate.is_open() && is_told());
        gate.close();
        assert!(!gate.is_open() && inbox.room() == 0 && is_told());
        gate.open();
        assert!(!is_told());
        answer(taken);
    }

    #[test]
    fn a_request_that_waits_aside_is_inside_but_not_at_the_images() {
        let sim = SimHost::new(1).process();
        let inbox = Inbox::new(4);
        let gate = Gate::new(Rc::clone(&inbox), sim.tasks().clone());
        gate.open();
        let client = Rc::<Client>::default();
        for start in [0, 512] {
            assert!(inbox.push(asked(&client, Op::Read, start, 512)).is_ok());
        }
        assert_eq!((gate.at_images(), gate.aside()), (2, 0));
        gate.step_aside();
        gate.step_aside();
        assert_eq!((gate.at_images(), gate.aside()), (0, 2));
        assert!(!gate.is_empty());
        gate.come_back();
        assert_eq!((gate.at_images(), gate.aside()), (1, 1));
        end(&sim, inbox);
    }
}
