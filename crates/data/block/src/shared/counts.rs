//! What queue threads have served by themselves, for the statistics that the owner keeps.
//!
//! Counters have one writer. A queue thread notes what it served and tells the owner of many requests at once: after a
//! tenth of a second, or when there are a thousand.

use std::cell::{Cell, RefCell};

use tapio_ring::{Notify, Tasks};

use crate::chain::LayerCounters;
use crate::meter::StageTimes;
use crate::request::Op;
use crate::taken::Origin;

/// Requests that are told of at once, at most.
const COUNT_MAX: usize = 1024;
/// How long the owner may not know.
const DELAY_NS: u64 = 100_000_000;

/// A request that was served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted {
    pub origin: Origin,
    pub op: Op,
    pub bytes: u64,
    pub stages: StageTimes,
    pub ended_ns: u64,
}

/// Requests, and what they did to the images of a view.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub requests: Vec<Counted>,
    pub view: u64,
    /// Since the counts before, leaf first.
    pub layers: Vec<LayerCounters>,
}

/// The requests that the owner does not know of yet.
#[derive(Debug, Default)]
pub(super) struct Uncounted {
    requests: RefCell<Vec<Counted>>,
    waits: Cell<bool>,
    begun: Notify,
}

impl Uncounted {
    /// Notes a request; true if there are so many that the owner should be told.
    pub fn add(&self, counted: Counted, tasks: &Tasks) -> bool {
        let mut requests = self.requests.borrow_mut();
        requests.push(counted);
        if self.waits.replace(false) {
            self.begun.notify_all(tasks);
        }
        requests.len() >= COUNT_MAX
    }

    /// All of them.
    pub fn take(&self) -> Vec<Counted> {
        std::mem::take(&mut self.requests.borrow_mut())
    }

    /// Waits until there are some that are old enough.
    pub async fn due(&self, tasks: &Tasks) {
        while self.requests.borrow().is_empty() {
            self.waits.set(true);
            self.begun.wait(tasks).await;
        }
        tasks.sleep_until(tasks.turn_ns() + DELAY_NS).await;
    }
}
