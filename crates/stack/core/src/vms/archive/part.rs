//! The progress of one disk as a part of the whole.

use std::sync::Arc;

use super::super::StorageCall;
use crate::progress::Progress;

pub(super) struct Part {
    whole: Arc<dyn Progress>,
    from: f64,
    to: f64,
}

impl Part {
    /// The call with the progress of the disk that begins at byte `done` of `all` and has `len`.
    pub(super) fn of(call: &StorageCall, done: u64, len: u64, all: u64) -> StorageCall {
        let fraction = |bytes: u64| bytes as f64 / all.max(1) as f64;
        let whole = Arc::clone(&call.progress);
        call.with(Arc::new(Self { whole, from: fraction(done), to: fraction(done + len) }))
    }
}

impl Progress for Part {
    fn is_cancelled(&self) -> bool {
        self.whole.is_cancelled()
    }

    fn set(&self, fraction: f64) {
        self.whole.set(self.from + (self.to - self.from) * fraction.clamp(0.0, 1.0));
    }

    fn task(&self) -> Option<&str> {
        self.whole.task()
    }
}
