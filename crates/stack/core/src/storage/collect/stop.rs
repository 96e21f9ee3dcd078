//! How a collection is told that it is to end.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use uuid::Uuid;

/// What ends a collection, or one of its jobs.
#[derive(Debug, Default)]
pub(super) struct Stop {
    is_over: AtomicBool,
    is_job_over: AtomicBool,
    /// The images of the job: the one that goes, and its parent.
    images: Mutex<Option<(Uuid, Uuid)>>,
}

impl Stop {
    /// Whether the collection is to end.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Whether the job is to end.
    pub(super) fn is_job_over(&self) -> bool {
        self.is_over() || self.is_job_over.load(Ordering::Acquire)
    }

    /// A job begins.
    pub(super) fn begin_job(&self, images: Option<(Uuid, Uuid)>) {
        *self.images.lock() = images;
        self.is_job_over.store(false, Ordering::Release);
    }

    /// The collection is to end.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// These images are gone: a job with one of them is to end.
    pub(super) fn end_job_of(&self, gone: &[Uuid]) {
        let images = *self.images.lock();
        if images.is_some_and(|(image, parent)| gone.contains(&image) || gone.contains(&parent)) {
            self.is_job_over.store(true, Ordering::Release);
        }
    }
}
