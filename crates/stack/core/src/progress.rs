//! How far a call is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Progress and cancel of a running call. Every call has one; that of an `Async.` call shows in its task.
pub trait Progress: Send + Sync {
    /// Whether the task was cancelled.
    fn is_cancelled(&self) -> bool;
    /// How far it is, 0 to 1.
    fn set(&self, fraction: f64);
    /// The task's reference, where there is one.
    fn task(&self) -> Option<&str>;
}

/// Progress of a call without a task.
#[derive(Debug, Default)]
pub struct Unwatched(AtomicBool);

impl Progress for Unwatched {
    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, _: f64) {}

    fn task(&self) -> Option<&str> {
        None
    }
}

/// A part of a call, from one fraction of it to another. It is cancelled with the call.
pub(crate) struct Share {
    pub(crate) of: Arc<dyn Progress>,
    pub(crate) from: f64,
    pub(crate) to: f64,
}

impl Progress for Share {
    fn is_cancelled(&self) -> bool {
        self.of.is_cancelled()
    }

    fn set(&self, fraction: f64) {
        self.of.set(self.from + (self.to - self.from) * fraction);
    }

    fn task(&self) -> Option<&str> {
        self.of.task()
    }
}
