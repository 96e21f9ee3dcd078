//! Group commit: many callers that want durability share one run of the work that gives it.

use std::cell::{Cell, RefCell};

use tapio_ring::{Notify, Tasks};

use crate::error::Result;

/// A run that ended, and how.
type Ended = (u64, Result<()>);

/// Joins callers that ask for the same kind of work. A run counts only for those that asked before it began, because
/// what was written later may not be covered by it.
#[derive(Debug, Default)]
pub(crate) struct GroupRun {
    started: Cell<u64>,
    running: Cell<bool>,
    /// The results of the last two runs that ended: no waiter needs an older one.
    results: RefCell<[Option<Ended>; 2]>,
    ended: Notify,
}

impl GroupRun {
    /// Runs `work`, or shares the run of another that begins after now.
    pub(crate) async fn join<F: Future<Output = Result<()>>>(
        &self,
        tasks: &Tasks,
        work: impl FnOnce() -> F,
    ) -> Result<()> {
        let wanted = self.started.get() + 1;
        while self.running.get() {
            self.ended.wait(tasks).await;
            if let Some(result) = self.result_since(wanted) {
                return result;
            }
        }
        let run = wanted.max(self.started.get() + 1);
        self.started.set(run);
        self.running.set(true);
        let result = work().await;
        self.running.set(false);
        let mut results = self.results.borrow_mut();
        results.swap(0, 1);
        results[1] = Some((run, result.clone()));
        drop(results);
        self.ended.notify_all(tasks);
        result
    }

    fn result_since(&self, wanted: u64) -> Option<Result<()>> {
        let results = self.results.borrow();
        results.iter().flatten().find(|(run, _)| *run >= wanted).map(|(_, result)| result.clone())
    }
}
