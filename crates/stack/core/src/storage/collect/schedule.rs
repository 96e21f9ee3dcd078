//! When a collection begins, and how it is stopped.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tapio_model::ApiError;
use uuid::Uuid;

use super::super::{Call, Storage};
use super::round::Again;
use super::stop::Stop;
use super::{quiet, round};
use crate::progress::Progress;

/// How soon a collection that left something for later begins again, at least.
const AGAIN: Duration = Duration::from_secs(5);

/// How late a collection begins again at most whose jobs failed time and again: each of them writes a task.
const AGAIN_MAX: Duration = Duration::from_secs(3600);

/// How long the end of an SR waits for the end of its collection. A copy looks for it between two blocks; a storage
/// that hangs is noticed by what comes next.
const END: Duration = Duration::from_secs(30);

/// How often a waiting call looks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
struct Slot {
    due: Option<Instant>,
    running: Option<Arc<Stop>>,
    /// What keeps collections from beginning.
    held_off: usize,
    /// Collections one after the other in which nothing but failures was left.
    failures: u32,
}

#[derive(Debug, Default)]
struct State {
    slots: BTreeMap<String, Slot>,
    has_thread: bool,
    is_over: bool,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

/// Collections that run and wait, by the SR's reference.
#[derive(Default)]
pub(in super::super) struct Collector(Arc<Inner>);

impl fmt::Debug for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collector").finish_non_exhaustive()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_over = true;
        for running in state.slots.values().filter_map(|slot| slot.running.as_ref()) {
            running.end();
        }
        drop(state);
        self.0.changed.notify_all();
    }
}

/// While this is there no collection of the SR runs.
pub(in super::super) struct HeldOff<'a> {
    storage: &'a Arc<Storage>,
    sr: String,
    has_stopped: bool,
}

impl Drop for HeldOff<'_> {
    fn drop(&mut self) {
        let collector = &self.storage.collector;
        let mut state = collector.0.state.lock();
        if let Some(slot) = state.slots.get_mut(&self.sr) {
            slot.held_off = slot.held_off.saturating_sub(1);
        }
        drop(state);
        collector.0.changed.notify_all();
        if self.has_stopped && self.storage.attached(&self.sr).is_ok() {
            self.storage.collect_later(&self.sr);
        }
    }
}

impl Storage {
    /// Something changed in an SR: it is collected after its quiet time, however much changes meanwhile.
    pub(crate) fn collect_later(self: &Arc<Self>, sr: &str) {
        let Ok(record) = self.db.get("SR", sr) else { return };
        self.collect_at(sr, Instant::now() + quiet(&record));
    }

    /// An SR is collected at once, or as soon as the collection that runs is over.
    pub(in super::super) fn collect_now(self: &Arc<Self>, sr: &str) {
        self.collect_at(sr, Instant::now());
    }

    /// The quiet time of an SR may be another one now.
    pub(in super::super) fn collect_as_set(self: &Arc<Self>, sr: &str) {
        let is_due = self.collector.0.state.lock().slots.get(sr).is_some_and(|slot| slot.due.is_some());
        if is_due {
            self.collect_later(sr);
        }
    }

    fn collect_at(self: &Arc<Self>, sr: &str, at: Instant) {
        let inner = &self.collector.0;
        let mut state = inner.state.lock();
        let slot = state.slots.entry(sr.to_owned()).or_default();
        slot.due = Some(slot.due.map_or(at, |due| due.min(at)));
        if !state.has_thread && !state.is_over {
            let (waiting, storage) = (Arc::clone(inner), Arc::downgrade(self));
            let wait = move || wait(&waiting, &storage);
            match std::thread::Builder::new().name("gc-timer".to_owned()).spawn(wait) {
                Ok(_) => state.has_thread = true,
                Err(error) => tracing::error!(%error, "no thread for garbage collections"),
            }
        }
        drop(state);
        inner.changed.notify_all();
    }

    /// Ends the collection of an SR, and keeps others from beginning.
    pub(in super::super) fn hold_off<'a>(self: &'a Arc<Self>, sr: &str) -> HeldOff<'a> {
        let inner = &self.collector.0;
        let mut state = inner.state.lock();
        let slot = state.slots.entry(sr.to_owned()).or_default();
        slot.held_off += 1;
        let running = slot.running.clone();
        if let Some(stop) = &running {
            stop.end();
        }
        let until = Instant::now() + END;
        while state.slots.get(sr).is_some_and(|slot| slot.running.is_some()) {
            if inner.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        HeldOff { storage: self, sr: sr.to_owned(), has_stopped: running.is_some() }
    }

    /// Images of an SR are gone: a job with one of them ends.
    pub(in super::super) fn drop_job(&self, sr: &str, gone: &[Uuid]) {
        let state = self.collector.0.state.lock();
        let Some(stop) = state.slots.get(sr).and_then(|slot| slot.running.as_ref()) else { return };
        stop.end_job_of(gone);
    }

    /// Waits until no collection of the SR runs, or is about to.
    ///
    /// # Errors
    /// `SR_NOT_ATTACHED`; `TASK_CANCELLED`, after which the collection goes on.
    pub(super) fn wait_for_collection(&self, sr: &str, progress: &dyn Progress) -> Result<(), ApiError> {
        while self.is_collecting(sr) {
            if progress.is_cancelled() {
                return Err(ApiError::new("TASK_CANCELLED", [progress.task().unwrap_or_default()]));
            }
            // One that is held off while the SR goes would never begin.
            self.attached(sr)?;
            let inner = &self.collector.0;
            inner.changed.wait_for(&mut inner.state.lock(), LOOK);
        }
        Ok(())
    }

    /// Whether a collection of the SR runs, or is about to.
    pub fn is_collecting(&self, sr: &str) -> bool {
        let state = self.collector.0.state.lock();
        let is_due = |slot: &Slot| slot.due.is_some_and(|due| due <= Instant::now());
        state.slots.get(sr).is_some_and(|slot| slot.running.is_some() || is_due(slot))
    }
}

/// Begins collections when they are due, until the storage is gone.
fn wait(inner: &Arc<Inner>, storage: &Weak<Storage>) {
    let mut state = inner.state.lock();
    loop {
        if state.is_over {
            return;
        }
        let can_begin = |slot: &Slot| slot.running.is_none() && slot.held_off == 0;
        let next = state.slots.iter().filter(|(_, slot)| can_begin(slot));
        let next = next.filter_map(|(sr, slot)| Some((slot.due?, sr.clone()))).min();
        match next {
            Some((due, sr)) if due <= Instant::now() => begin(inner, &mut state, storage, sr),
            Some((due, _)) => drop(inner.changed.wait_until(&mut state, due)),
            None => inner.changed.wait(&mut state),
        }
    }
}

fn begin(inner: &Arc<Inner>, state: &mut State, storage: &Weak<Storage>, sr: String) {
    let Some(slot) = state.slots.get_mut(&sr) else { return };
    let stop = Arc::new(Stop::default());
    (slot.due, slot.running) = (None, Some(Arc::clone(&stop)));
    let (inner_too, storage) = (Arc::clone(inner), Weak::clone(storage));
    let of = sr.clone();
    let work = move || {
        let running = Running { inner: &inner_too, sr: &of };
        let Some(storage) = storage.upgrade() else { return };
        let again = round::run(&Call::own(&storage), &of, &stop);
        let failures = running.end(again);
        if again != Again::Never
            && let Ok(record) = storage.db.get("SR", &of)
        {
            storage.collect_at(&of, Instant::now() + pause(quiet(&record), failures));
        }
    };
    if let Err(error) = std::thread::Builder::new().name("gc".to_owned()).spawn(work) {
        tracing::error!(sr, %error, "no thread for a garbage collection");
        if let Some(slot) = state.slots.get_mut(&sr) {
            slot.running = None;
        }
    }
}

/// How long until what a collection left is tried again: twice as long after each that only failed.
fn pause(quiet: Duration, failures: u32) -> Duration {
    let first = quiet.max(AGAIN);
    let doubled = first.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(AGAIN_MAX.max(first))
}

/// A collection that runs; it is over when this goes, also by a panic.
struct Running<'a> {
    inner: &'a Inner,
    sr: &'a str,
}

impl Running<'_> {
    /// It is over; answers how many have failed one after the other.
    fn end(self, again: Again) -> u32 {
        let mut state = self.inner.state.lock();
        let Some(slot) = state.slots.get_mut(self.sr) else { return 0 };
        slot.failures = if again == Again::AfterFailure { slot.failures.saturating_add(1) } else { 0 };
        slot.failures
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.inner.state.lock().slots.get_mut(self.sr) {
            slot.running = None;
        }
        self.inner.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_repeated_less_and_less_often() {
        let seconds = |quiet, failures| pause(Duration::from_secs(quiet), failures).as_secs();
        assert_eq!(
            [0, 1, 2, 3, 9, 99].map(|failures| seconds(300, failures)),
            [300, 300, 600, 1200, 3600, 3600]
        );
        assert_eq!(seconds(0, 0), AGAIN.as_secs());
        // A quiet time that is longer than the longest pause holds.
        assert_eq!(seconds(86_400, 5), 86_400);
    }
}
