//! What a request passes on its way to the images and back. `serve.rs` is the walk through all of them.
//!
//! | stage | as the request enters | holds it back | at its end |
//! |---|---|---|---|
//! | [`Gate`] | it is inside: the inbox was open | in the guest's ring, while the gate is closed | waiters look again |
//! | [`Admission`] | it has its pages | before it has a task: limits, the page pool | the next has its turn |
//! | [`Accounting`] | it is counted, its trace begins | | statistics and trace get its times |
//! | [`RequestTimeouts`] | its time begins | behind an answered change of the same bytes | its place is free |
//! | [`Images`] | it gets the chain | while there is none | |
//! | [`Taps`] | the log notes a change, which gets the mirror | | |
//!
//! A request passes the first four once. It comes to the images and the taps again when it is tried again, because both
//! may be others by then. Nothing of this is dynamic: a stage that has nothing to do costs a load or two.

mod accounting;
mod admission;
#[cfg(test)]
pub(crate) mod asked;
mod fairness;
mod gate;
mod images;
mod log;
mod tap;
mod timeouts;

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use tapio_ring::{Inbox, Io, Storage, Tasks};

use crate::request::DiskError;
use crate::taken::Taken;

pub(crate) use accounting::Accounting;
pub use accounting::Observer;
pub use admission::{Admission, Delays, PageSeat, Pages, PoolFacts};
pub(crate) use admission::{Client, pages_of};
pub(crate) use fairness::{Fairness, Way};
pub(crate) use gate::Gate;
pub(crate) use images::Images;
pub(crate) use log::ChangeLog;
pub(crate) use tap::{Tap, Taps};
pub use timeouts::{InFlight, REQUEST_TIMEOUT};
pub(crate) use timeouts::{Late, Place, RequestTimeouts};

/// What every stage is to a request.
pub(crate) trait Stage {
    /// What the stage gives a request that is inside, and gets back at its end.
    type Pass;

    /// A request comes by, as the current task of `io`.
    fn enter<I: Io>(&self, taken: &Taken, io: &I) -> Self::Pass;

    /// Whether the request must not go on yet. It is asked again when the gate tells of an end.
    fn holds(&self, _taken: &Taken) -> bool {
        false
    }

    /// The request has ended with `result`. True if something may have waited for that, and is to be told by the gate.
    /// A stage that does nothing then need not be left.
    fn leave<I: Io>(&self, _pass: Self::Pass, _result: Result<(), DiskError>, _io: &I) -> bool {
        false
    }
}

/// The stages of a disk, in the order in which a request meets them.
pub(crate) struct Stages<S: Storage> {
    pub gate: Gate,
    pub admission: Rc<Admission>,
    pub accounting: Accounting,
    pub timeouts: RequestTimeouts,
    pub images: Images<S>,
    pub taps: Taps<S>,
    /// No stage that a request passes: it is asked for each way to the images.
    pub fairness: Fairness,
}

impl<S: Storage> fmt::Debug for Stages<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stages").field("gate", &self.gate).finish_non_exhaustive()
    }
}

impl<S: Storage> Stages<S> {
    /// For requests from `inbox`; the gate is closed.
    pub fn new(inbox: Rc<Inbox<Taken>>, tasks: &Tasks, request_timeout: Option<Duration>) -> Self {
        let timeouts = RequestTimeouts::new(request_timeout, inbox.capacity());
        let admission = Admission::new(Rc::clone(&inbox), tasks.clone());
        Self {
            gate: Gate::new(inbox, tasks.clone()),
            admission,
            accounting: Accounting::default(),
            timeouts,
            images: Images::default(),
            taps: Taps::default(),
            fairness: Fairness::default(),
        }
    }

    /// Requests are taken from now on; what waits for that hears of it.
    pub fn open(&self) {
        self.gate.open();
        self.admission.opened();
    }
}
