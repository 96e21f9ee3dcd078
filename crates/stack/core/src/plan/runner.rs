//! The threads around the schedule.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tapio_model::ApiError;

use super::doing::{Doing, Parts, micros};
use super::schedule::{Limits, RunId, Schedule, Taken};
use super::timeline::{Timeline, part, step};
use super::tree::{Plan, Work};
use crate::progress::Progress;

/// A worker that has found nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(10);
/// How often a waiting caller looks whether its task was cancelled, and says how far it is.
const LOOK: Duration = Duration::from_millis(100);
/// Timelines that are kept.
const TIMELINES_MAX: usize = 256;

thread_local! {
    /// Whether this thread is a worker. A plan inside a leaf would wait for permits while it holds some.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

struct Slot {
    name: &'static str,
    subject: String,
    run: Option<Work>,
    undo: Option<Work>,
    error: Option<String>,
    undo_error: Option<String>,
    parts: Parts,
}

struct Job {
    operation: String,
    slots: Vec<Slot>,
    progress: Arc<dyn Progress>,
    cancelled: Arc<AtomicBool>,
    error: Option<ApiError>,
    began: u64,
}

struct State {
    schedule: Schedule,
    jobs: BTreeMap<RunId, Job>,
    workers: usize,
    idle: usize,
    timelines: VecDeque<(String, Timeline)>,
}

struct Shared {
    state: Mutex<State>,
    /// There is something to do.
    work: Condvar,
    /// A plan has ended.
    done: Condvar,
    epoch: Instant,
}

/// Steps that run and wait; a handle that can be cloned.
#[derive(Clone)]
pub struct Plans(Arc<Shared>);

impl fmt::Debug for Plans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.lock();
        f.debug_struct("Plans")
            .field("limits", &state.schedule.limits)
            .field("running", &state.schedule.running())
            .field("waiting", &state.schedule.waiting())
            .finish_non_exhaustive()
    }
}

impl Plans {
    /// So many steps at a time on this host, and so many for one VM; an SR has as many as the host.
    pub fn new(host: usize, per_vm: usize) -> Self {
        let state = State {
            schedule: Schedule::new(Limits { host, vm: per_vm, sr: host }),
            jobs: BTreeMap::new(),
            workers: 0,
            idle: 0,
            timelines: VecDeque::new(),
        };
        Self(Arc::new(Shared {
            state: Mutex::new(state),
            work: Condvar::new(),
            done: Condvar::new(),
            // Times of 0 mean "never".
            epoch: Instant::now().checked_sub(Duration::from_millis(1)).unwrap_or_else(Instant::now),
        }))
    }

    /// How many steps may run at a time.
    pub fn limits(&self) -> Limits {
        self.0.lock().schedule.limits
    }

    /// Changes it; what runs goes on.
    pub fn set_limits(&self, limits: Limits) {
        let mut state = self.0.lock();
        if state.schedule.limits != limits {
            state.schedule.limits = limits;
            // Without a helper the workers there are do it.
            let _ = self.0.help(&mut state);
            drop(state);
            self.0.work.notify_all();
        }
    }

    /// Steps that run, and steps that wait for permits.
    pub fn load(&self) -> (usize, usize) {
        let state = self.0.lock();
        (state.schedule.running(), state.schedule.waiting())
    }

    /// Runs a plan to its end. When it fails, or its task is cancelled, what it did is undone before this answers.
    ///
    /// # Errors
    /// The first step's that failed; `TASK_CANCELLED`.
    pub fn run(&self, operation: &str, plan: Plan, progress: &Arc<dyn Progress>) -> Result<(), ApiError> {
        if IS_WORKER.get() {
            return Err(ApiError::internal(format!("{operation} was begun inside a step of another plan")));
        }
        let mut leaves = Vec::new();
        let shape = plan.split(&mut leaves);
        let slots = leaves.into_iter().map(|leaf| Slot {
            name: leaf.name,
            subject: leaf.subject,
            run: Some(leaf.run),
            undo: leaf.undo,
            error: None,
            undo_error: None,
            parts: Parts::default(),
        });
        let slots = slots.collect();
        let shared = &self.0;
        let mut state = shared.lock();
        let began = shared.now();
        let id = state.schedule.submit(&shape, began);
        let cancelled = Arc::new(AtomicBool::new(false));
        let job = Job {
            operation: operation.to_owned(),
            slots,
            progress: Arc::clone(progress),
            cancelled: Arc::clone(&cancelled),
            error: None,
            began,
        };
        state.jobs.insert(id, job);
        if let Err(error) = shared.help(&mut state)
            && state.workers == 0
        {
            state.schedule.cancel(id, shared.now());
            let job = state.jobs.get_mut(&id);
            job.into_iter().for_each(|job| {
                job.error = Some(ApiError::internal(format!("no thread can be started for a step: {error}")));
            });
        }
        shared.work.notify_all();
        let ok = loop {
            if let Some(ok) = state.schedule.finished(id) {
                break ok;
            }
            shared.done.wait_for(&mut state, LOOK);
            let (ended, all) = state.schedule.progress(id);
            let (is_new, fraction) = (!cancelled.load(Ordering::Relaxed), ended as f64 / all.max(1) as f64);
            // The progress of a task may wait for a disk.
            drop(state);
            let stop = is_new && progress.is_cancelled();
            progress.set(fraction.min(0.99));
            state = shared.lock();
            if stop {
                cancelled.store(true, Ordering::Relaxed);
                state.schedule.cancel(id, shared.now());
            }
        };
        let timeline = state.timeline(id, shared.now());
        state.schedule.forget(id);
        let error = state.jobs.remove(&id).and_then(|job| job.error);
        if let (Some(timeline), Some(task)) = (timeline, progress.task()) {
            state.keep(task, timeline);
        }
        drop(state);
        match (ok, error) {
            (true, _) => Ok(()),
            (false, Some(error)) if !cancelled.load(Ordering::Relaxed) => Err(error),
            (false, _) => Err(ApiError::new("TASK_CANCELLED", [progress.task().unwrap_or_default()])),
        }
    }

    /// What the task has done, or has done so far.
    pub fn timeline(&self, task: &str) -> Option<Timeline> {
        let state = self.0.lock();
        let job = state.jobs.iter().find(|(_, job)| job.progress.task() == Some(task)).map(|(id, _)| *id);
        match job {
            Some(id) => state.timeline(id, self.0.now()),
            None => state.timelines.iter().rev().find(|(of, _)| of == task).map(|(_, line)| line.clone()),
        }
    }

    /// What the latest operation that had steps has done, whether its task is still there or not. Those that only
    /// changed records have none: they would hide what was meant.
    pub fn latest_timeline(&self) -> Option<Timeline> {
        let state = self.0.lock();
        let latest = state.timelines.iter().rev().find(|(_, line)| !line.steps.is_empty());
        latest.map(|(_, line)| line.clone())
    }
}

impl State {
    /// Sums the operation up.
    fn timeline(&self, id: RunId, now: u64) -> Option<Timeline> {
        let job = self.jobs.get(&id)?;
        let mut steps = Vec::new();
        for record in self.schedule.records(id) {
            let Some(slot) = job.slots.get(record.leaf) else { continue };
            let error = if record.undo { &slot.undo_error } else { &slot.error };
            steps.push(step(&record, job.began, now, slot.name, &slot.subject, error.clone()));
            let parts = slot.parts.lock();
            steps.extend(parts.iter().filter_map(|made| part(made, &record, job.began, now, &slot.subject)));
        }
        Some(Timeline { operation: job.operation.clone(), total_us: now - job.began, steps })
    }

    /// Keeps a timeline. An operation of several plans has one, with the later plans' steps at the end.
    fn keep(&mut self, task: &str, timeline: Timeline) {
        if let Some((_, kept)) = self.timelines.iter_mut().find(|(of, _)| of == task) {
            let offset = kept.total_us;
            let parents = kept.steps.iter().map(|step| step.parent + 1).max().unwrap_or(0);
            kept.total_us += timeline.total_us;
            kept.steps.extend(timeline.steps.into_iter().map(|mut step| {
                step.queued_us += offset;
                step.parent += parents;
                step
            }));
            return;
        }
        if self.timelines.len() == TIMELINES_MAX {
            self.timelines.pop_front();
        }
        self.timelines.push_back((task.to_owned(), timeline));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No work runs under the lock, and every change under it is complete.
        self.state.lock()
    }

    /// Microseconds since it was made.
    fn now(&self) -> u64 {
        micros(self.epoch)
    }

    /// Starts a worker for what waits.
    fn help(self: &Arc<Self>, state: &mut State) -> std::io::Result<()> {
        let wanted =
            state.schedule.waiting() > state.idle && state.workers < state.schedule.limits.host.max(1);
        if !wanted {
            return Ok(());
        }
        let shared = Arc::clone(self);
        thread::Builder::new().name("step".into()).spawn(move || shared.work())?;
        state.workers += 1;
        Ok(())
    }

    fn work(self: Arc<Self>) {
        IS_WORKER.set(true);
        let mut state = self.lock();
        let mut is_late = false;
        loop {
            let now = self.now();
            let Some(taken) = state.schedule.take(now) else {
                if is_late {
                    state.workers -= 1;
                    return;
                }
                state.idle += 1;
                let waited = self.work.wait_for(&mut state, IDLE);
                state.idle -= 1;
                is_late = waited.timed_out();
                continue;
            };
            is_late = false;
            // Without a helper this thread does one after the other.
            let _ = self.help(&mut state);
            state = self.perform(state, taken);
        }
    }

    fn perform<'a>(&'a self, mut state: MutexGuard<'a, State>, taken: Taken) -> MutexGuard<'a, State> {
        let found = state.jobs.get_mut(&taken.run).and_then(|job| {
            let slot = job.slots.get_mut(taken.leaf)?;
            let work = if taken.undo { slot.undo.take() } else { slot.run.take() }?;
            let stop = (!taken.undo).then(|| (Arc::clone(&job.progress), Arc::clone(&job.cancelled)));
            Some((work, Doing { stop, parts: Arc::clone(&slot.parts), epoch: self.epoch }, slot.name))
        });
        drop(state);
        let done = match found {
            None => Err(ApiError::internal("a step was to run twice")),
            Some((work, doing, name)) => catch_unwind(AssertUnwindSafe(|| work(&doing)))
                .unwrap_or_else(|_| Err(ApiError::internal(format!("'{name}' failed with a defect")))),
        };
        let mut state = self.lock();
        let is_excused = taken.undo || state.schedule.is_excused(taken);
        if let (Err(error), Some(job)) = (&done, state.jobs.get_mut(&taken.run)) {
            if let Some(slot) = job.slots.get_mut(taken.leaf) {
                tracing::warn!(step = slot.name, subject = slot.subject, undo = taken.undo, %error, "step failed");
                let place = if taken.undo { &mut slot.undo_error } else { &mut slot.error };
                *place = Some(error.to_string());
            }
            if !is_excused {
                job.error.get_or_insert_with(|| error.clone());
            }
        }
        state.schedule.end(taken, done.is_ok(), self.now());
        if state.schedule.finished(taken.run).is_some() {
            self.done.notify_all();
        }
        if state.schedule.waiting() > 0 {
            self.work.notify_all();
        }
        state
    }
}

#[cfg(test)]
#[path = "runner_tests.rs"]
mod tests;
