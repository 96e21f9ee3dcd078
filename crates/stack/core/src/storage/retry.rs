//! Work on one SR that is tried until its storage answers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tapio_model::ApiError;

use super::notes::{self, Note};
use super::{Call, Storage};

/// How long an SR whose storage hung is left alone before it is tried again.
pub(super) const AGAIN: Duration = Duration::from_secs(5);

/// SRs that are not in order yet; see [`super::recover()`].
#[derive(Debug, Default)]
pub(super) struct Recovering {
    /// Their references.
    pub(super) left: Mutex<BTreeSet<String>>,
    changed: Condvar,
}

impl Recovering {
    fn is_over(&self, sr: &str) {
        self.left.lock().remove(sr);
        self.changed.notify_all();
    }

    /// Waits until `are_over` of those that are left; answers whether that came in time.
    pub(super) fn wait(&self, until: Option<Instant>, are_over: impl Fn(&BTreeSet<String>) -> bool) -> bool {
        let mut left = self.left.lock();
        while !are_over(&left) {
            let timeout = until.map_or(AGAIN, |until| until.saturating_duration_since(Instant::now()));
            if timeout.is_zero() {
                return false;
            }
            self.changed.wait_for(&mut left, timeout);
        }
        true
    }
}

impl Storage {
    /// Whether the SR is still to be attached after this start.
    pub fn is_recovering(&self, sr: &str) -> bool {
        self.recovering.left.lock().contains(sr)
    }

    /// Waits until the start has attached an SR, or given up.
    pub fn wait_until_recovered(&self, sr: &str) {
        self.recovering.wait(None, |left| !left.contains(sr));
    }
}

/// Works on an SR that is among those that are left.
pub(super) fn spawn(storage: &Arc<Storage>, sr: String, work: impl FnOnce(&Call) + Send + 'static) {
    let (of, same) = (sr.clone(), Arc::clone(storage));
    let working = std::thread::Builder::new().name("sr-recovery".to_owned()).spawn(move || {
        work(&Call::own(&same));
        same.recovering.is_over(&of);
    });
    if let Err(error) = working {
        tracing::error!(sr, %error, "no thread to put an SR in order: it waits for the next start");
        storage.recovering.is_over(&sr);
    }
}

type Run = dyn Fn(&Call) -> Result<(), ApiError> + Send;

/// What is to be done with one SR; it may wait for its storage.
pub(super) struct Job {
    /// Stays until it is done, where it is not done at once.
    note: Option<Note>,
    run: Box<Run>,
}

impl Job {
    /// One that is noted until it is done.
    pub(super) fn noted(note: Note, run: impl Fn(&Call) -> Result<(), ApiError> + Send + 'static) -> Self {
        Self { note: Some(note), run: Box::new(run) }
    }

    /// One that does not fail.
    pub(super) fn certain(run: impl Fn(&Call) + Send + 'static) -> Self {
        let run = move |call: &Call| {
            run(call);
            Ok(())
        };
        Self { note: None, run: Box::new(run) }
    }
}

/// Does a job again and again, until it is done or what it is about is gone.
pub(super) fn until_done(call: &Call, job: &Job) {
    let mut is_told = false;
    while let Err(error) = (job.run)(call) {
        if !is_told {
            tracing::error!(note = ?job.note, %error, "what was half done with an SR is tried until it is done");
            is_told = true;
        }
        std::thread::sleep(AGAIN);
        if job.note.as_ref().is_some_and(|note| !notes::all(&call.part.db).contains(note)) {
            return;
        }
    }
}

/// Does a job of an operation that was broken off, from a moment later on, until it is done.
pub(super) fn later(call: &Call, sr: &str, job: Job) {
    if call.part.recovering.left.lock().insert(sr.to_owned()) {
        spawn(&call.part, sr.to_owned(), move |call| {
            std::thread::sleep(AGAIN);
            until_done(call, &job);
        });
    }
}
