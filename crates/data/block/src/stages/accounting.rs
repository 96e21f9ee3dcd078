//! Statistics and traces of requests.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use tapio_ring::Io;
use tapio_stat::trace::Clock;

use super::Stage;
use crate::meter::{Meter, StageTimes};
use crate::request::{DiskError, Op};
use crate::taken::{Origin, Taken};
use crate::trace::Trace;

/// Hears of every request; the statistics.
pub trait Observer {
    /// A request was taken.
    fn submitted(&self, origin: Origin, op: Op, bytes: u64);
    /// A request ended at `now_ns` of the data thread's clock.
    fn completed(&self, origin: Origin, op: Op, bytes: u64, stages: StageTimes, now_ns: u64, ok: bool);
    /// The second side of the disk's mirror was lost, or is lost no more.
    fn mirror_lost(&self, _is_lost: bool) {}
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Accounting {
    observer: RefCell<Option<Rc<dyn Observer>>>,
    trace: Rc<Trace>,
    /// Requests that failed at the images.
    failures: Cell<u64>,
}

/// The account of one request. Its meter takes the times at the storages.
pub(crate) struct Account {
    pub meter: Meter,
    observer: Option<Rc<dyn Observer>>,
    origin: Origin,
    /// Number of the client, and what the client calls the request.
    of: (u8, u64),
    /// What it is, and its bytes.
    about: (Op, u64),
    born_ns: u64,
    started_ns: u64,
    /// When it began, by the clock of the trace.
    stamp: u64,
}

impl fmt::Debug for Accounting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accounting").field("failures", &self.failures).finish_non_exhaustive()
    }
}

impl Accounting {
    /// Lets `observer` hear of every request from now on.
    pub fn observe(&self, observer: Rc<dyn Observer>) {
        *self.observer.borrow_mut() = Some(observer);
    }

    pub fn observer(&self) -> Option<Rc<dyn Observer>> {
        self.observer.borrow().clone()
    }

    pub const fn trace(&self) -> &Rc<Trace> {
        &self.trace
    }

    pub const fn failures(&self) -> u64 {
        self.failures.get()
    }

    /// A request has failed.
    pub fn failed(&self) {
        self.failures.set(self.failures.get() + 1);
    }
}

impl Stage for Accounting {
    type Pass = Account;

    fn enter<I: Io>(&self, taken: &Taken, io: &I) -> Account {
        let Taken { request, origin, client, .. } = taken;
        let (origin, about) = (*origin, (request.op, request.span.len));
        let observer = self.observer();
        let started_ns = io.tasks().turn_ns();
        if let Some(observer) = &observer {
            observer.submitted(origin, about.0, about.1);
        }
        let clock = self.trace.clock();
        let (meter, stamp) = (Meter::traced(clock), clock.map_or(0, Clock::now));
        let (of, born_ns) = ((*client, request.tag), request.born_ns);
        Account { meter, observer, origin, of, about, born_ns, started_ns, stamp }
    }

    fn leave<I: Io>(&self, account: Account, result: Result<(), DiskError>, io: &I) -> bool {
        let Account { meter, origin, about: (op, bytes), .. } = &account;
        if let Some(observer) = &account.observer {
            // The one clock that is read for a request; everything else goes by the turn's.
            let now_ns = io.now_ns();
            let stages = meter.stages(account.born_ns, account.started_ns, now_ns);
            observer.completed(*origin, *op, *bytes, stages, now_ns, result.is_ok());
        }
        if meter.is_traced() {
            self.trace.served(account.of, account.about, account.stamp, meter);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use tapio_ring::sim::SimHost;
    use tapio_stat::trace::TraceRing;

    use super::super::asked::{answer, asked};
    use super::*;

    /// What was submitted and what was completed.
    #[derive(Default)]
    struct Seen {
        submitted: RefCell<Vec<u64>>,
        completed: RefCell<Vec<(u64, bool)>>,
    }

    impl Observer for Seen {
        fn submitted(&self, _origin: Origin, _op: Op, bytes: u64) {
            self.submitted.borrow_mut().push(bytes);
        }

        fn completed(&self, _: Origin, _: Op, bytes: u64, _: StageTimes, _: u64, ok: bool) {
            self.completed.borrow_mut().push((bytes, ok));
        }
    }

    #[test]
    fn the_observer_of_a_requests_begin_hears_of_its_end() {
        let (sim, accounting) = (SimHost::new(1).process(), Accounting::default());
        let [first, second] = [Rc::<Seen>::default(), Rc::default()];
        let client = Rc::default();
        let [unseen, seen] = [512, 1024].map(|len| asked(&client, Op::Read, 0, len));
        let early = accounting.enter(&unseen, &sim);
        accounting.observe(Rc::<Seen>::clone(&first));
        let account = accounting.enter(&seen, &sim);
        accounting.observe(Rc::<Seen>::clone(&second));
        assert!(!accounting.leave(early, Ok(()), &sim));
        assert!(!accounting.leave(account, Err(DiskError::NoSpace), &sim));
        assert_eq!((first.submitted.take(), first.completed.take()), (vec![1024], vec![(1024, false)]));
        assert!(second.submitted.take().is_empty() && second.completed.take().is_empty());
        [unseen, seen].into_iter().for_each(answer);
    }

    #[test]
    fn a_request_is_traced_if_it_began_while_the_disk_was() {
        let (sim, accounting) = (SimHost::new(1).process(), Accounting::default());
        let taken = asked(&Rc::default(), Op::Read, 0, 512);
        let before = accounting.enter(&taken, &sim);
        accounting.trace().start(TraceRing::private(256).expect("memory"));
        let traced = accounting.enter(&taken, &sim);
        accounting.leave(before, Ok(()), &sim);
        let written = |accounting: &Accounting| accounting.trace().stop();
        accounting.leave(traced, Ok(()), &sim);
        // Started and ended; it went to no storage.
        assert_eq!(written(&accounting), Some(2));
        answer(taken);
    }
}
