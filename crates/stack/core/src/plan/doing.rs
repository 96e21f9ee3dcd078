//! What a running step is given: the request to stop, and the timeline.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use tapio_model::ApiError;

use super::timeline::Part;
use crate::progress::Progress;

/// What a running leaf is given.
pub struct Doing {
    /// None for what takes back: it is not stopped by what stopped the rest.
    pub(super) stop: Option<(Arc<dyn Progress>, Arc<AtomicBool>)>,
    pub(super) parts: Parts,
    pub(super) epoch: Instant,
}

/// Work that a step does on another thread; the timeline has it below the step.
pub(super) type Parts = Arc<Mutex<Vec<Part>>>;

/// Microseconds.
pub(super) fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

impl fmt::Debug for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doing").finish_non_exhaustive()
    }
}

impl Doing {
    /// Whether the whole operation shall stop.
    pub fn is_cancelled(&self) -> bool {
        let is_set = |(progress, cancelled): &(Arc<dyn Progress>, Arc<AtomicBool>)| {
            cancelled.load(Ordering::Relaxed) || progress.is_cancelled()
        };
        self.stop.as_ref().is_some_and(is_set)
    }

    /// Does `part` on a thread of its own while this one does `rest`; answers, once both have ended, what they did.
    /// It takes no permits: there are never more parts than steps that run.
    pub fn alongside<T>(
        &self,
        name: &'static str,
        part: impl FnOnce() -> Result<(), ApiError> + Send,
        rest: impl FnOnce() -> T,
    ) -> (Result<(), ApiError>, T) {
        let timed = || {
            let place = {
                let mut parts = self.parts.lock();
                parts.push(Part::new(name, self.stop.is_none(), micros(self.epoch)));
                parts.len() - 1
            };
            let defect = |_| Err(ApiError::internal(format!("'{name}' failed with a defect")));
            let done = catch_unwind(AssertUnwindSafe(part)).unwrap_or_else(defect);
            self.parts.lock()[place].end(&done, micros(self.epoch));
            done
        };
        thread::scope(|scope| {
            let spawned = thread::Builder::new().name("part".into()).spawn_scoped(scope, timed);
            let rest = rest();
            let done = match spawned {
                Ok(spawned) => spawned.join().unwrap_or_else(|_| Err(ApiError::internal("a part was lost"))),
                Err(error) => Err(ApiError::internal(format!("no thread can be started to {name}: {error}"))),
            };
            (done, rest)
        })
    }
}
