//! Requests, for tests of the stages that they pass.

use std::cell::RefCell;
use std::future::ready;
use std::rc::Rc;

use tapio_ring::sim::Sim;
use tapio_ring::{Executor, Inbox, Io, Polling, PollingConfig};
use tapio_types::Span;

use crate::request::{Completion, Data, DiskError, Op, Request};
use crate::taken::Taken;

/// A client that gives its requests up, or does not.
#[derive(Debug, Default)]
pub(super) struct Client {
    pub gives_up: bool,
    /// What it was asked to give up.
    pub given_up: RefCell<Vec<u64>>,
}

impl Completion for Client {
    fn complete(&self, _tag: u64, _result: Result<(), DiskError>) {}

    fn give_up(&self, tag: u64) -> bool {
        self.given_up.borrow_mut().push(tag);
        self.gives_up
    }
}

/// A request of `client` for `len` bytes at `start`; its tag is `start`.
pub(super) fn asked(client: &Rc<Client>, op: Op, start: u64, len: u64) -> Taken {
    let span = Span::new(start, len);
    let client: Rc<dyn Completion> = Rc::<Client>::clone(client);
    Request::new(op, span, Data::None, 0, start, client).into()
}

/// Ends a request.
pub(super) fn answer(taken: Taken) {
    taken.request.answer(Ok(()));
}

/// Ends the process whose requests wait in `inbox`: they need no answer any more.
pub(super) fn end(sim: &Sim, inbox: Rc<Inbox<Taken>>) {
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    Executor::new(sim.tasks().clone(), inbox, |_| ready(()), polling).end(sim);
}

/// Runs `work` as a task of `sim`.
pub(crate) fn run<T: 'static>(sim: &Sim, work: impl Future<Output = T> + 'static) -> T {
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    let mut executor = Executor::new(sim.tasks().clone(), Inbox::<Taken>::new(1), |_| ready(()), polling);
    let value = executor.block_on(sim, &mut (), work);
    executor.end(sim);
    value
}
