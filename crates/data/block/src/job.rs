//! Jobs, the long work in the background of the guest's requests: progress, rate and end.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Notify, Tasks};

/// Jobs that have ended and are still told of.
const ENDED_MAX: usize = 8;
const NS_PER_S: u64 = 1_000_000_000;

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Moves what an image holds into its parent, and takes it out of the chain.
    Commit,
    /// Copies the disk to a second storage, and keeps that the same.
    Mirror,
}

impl fmt::Display for JobKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Commit => "commit",
            Self::Mirror => "mirror",
        })
    }
}

/// Where a job stands.
#[derive(Clone, Debug)]
pub enum JobState {
    /// At work.
    Running,
    /// Its copy is complete and stays so: it waits to be told how to end.
    Ready,
    /// It did what it was to do.
    Done,
    /// It was told to stop, and everything is as if it had not begun, but for space.
    Cancelled,
    /// It could not go on.
    Failed(FormatError),
}

impl JobState {
    /// Whether nothing more will happen.
    pub const fn has_ended(&self) -> bool {
        matches!(self, Self::Done | Self::Cancelled | Self::Failed(_))
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Ready => "ready",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Failed(_) => "failed",
        })
    }
}

/// What a job says of itself.
#[derive(Clone, Debug)]
pub struct JobInfo {
    /// Its number, unique for the life of the disk.
    pub id: u32,
    /// What it does.
    pub kind: JobKind,
    /// To which image, for a person.
    pub subject: String,
    /// Where it stands.
    pub state: JobState,
    /// Bytes done.
    pub done: u64,
    /// Bytes there are to do, as far as is known now.
    pub total: u64,
    /// Bytes a second it may move; 0 is no limit.
    pub rate: u64,
}

/// A job: held by the work itself and by the list of jobs of its disk.
#[derive(Debug)]
pub struct Job {
    id: u32,
    kind: JobKind,
    subject: String,
    state: RefCell<JobState>,
    done: Cell<u64>,
    total: Cell<u64>,
    rate: Cell<u64>,
    /// When the next piece may begin, by the rate.
    next_ns: Cell<u64>,
    cancelled: Cell<bool>,
    changed: Notify,
}

impl Job {
    /// Its number.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// What it says of itself.
    pub fn info(&self) -> JobInfo {
        JobInfo {
            id: self.id,
            kind: self.kind,
            subject: self.subject.clone(),
            state: self.state.borrow().clone(),
            done: self.done.get(),
            total: self.total.get(),
            rate: self.rate.get(),
        }
    }

    /// Sets how much there is to do.
    pub fn set_total(&self, bytes: u64) {
        self.total.set(bytes);
    }

    /// Counts `bytes` more as done.
    pub fn advance(&self, bytes: u64) {
        self.done.set(self.done.get() + bytes);
    }

    /// Lets the work move `bytes` a second from now on; 0 is no limit.
    pub fn set_rate(&self, bytes: u64, tasks: &Tasks) {
        self.rate.set(bytes);
        self.next_ns.set(0);
        self.changed.notify_all(tasks);
    }

    /// Asks the work to stop.
    pub fn cancel(&self, tasks: &Tasks) {
        self.cancelled.set(true);
        self.changed.notify_all(tasks);
    }

    /// Whether it was asked to stop.
    pub const fn is_cancelled(&self) -> bool {
        self.cancelled.get()
    }

    /// Sets its state; an end stays.
    pub fn set_state(&self, state: JobState, tasks: &Tasks) {
        if !self.state.borrow().has_ended() {
            *self.state.borrow_mut() = state;
        }
        self.changed.notify_all(tasks);
    }

    /// Ends it with the result of its work.
    pub fn finish(&self, result: Result<()>, tasks: &Tasks) {
        let state = match result {
            Ok(()) => JobState::Done,
            Err(error) if error.kind() == FormatErrorKind::Cancelled => JobState::Cancelled,
            Err(error) => JobState::Failed(error),
        };
        self.set_state(state, tasks);
    }

    /// Waits until the work may move `bytes` more.
    ///
    /// # Errors
    /// `Cancelled` once it was asked to stop.
    pub async fn pace(&self, bytes: u64, tasks: &Tasks) -> Result<()> {
        loop {
            if self.cancelled.get() {
                return Err(FormatError::new(FormatErrorKind::Cancelled, "the job was cancelled"));
            }
            let (now, next) = (tasks.turn_ns(), self.next_ns.get());
            if self.rate.get() == 0 {
                return Ok(());
            }
            if next <= now {
                let takes = u128::from(bytes) * u128::from(NS_PER_S) / u128::from(self.rate.get());
                self.next_ns.set(now.saturating_add(u64::try_from(takes).unwrap_or(u64::MAX)));
                return Ok(());
            }
            self.changed.wait_until(tasks, next).await;
        }
    }

    /// Waits for a change: of its state, or a request to stop. To be tested before and after, in a loop.
    pub async fn wait(&self, tasks: &Tasks) {
        self.changed.wait(tasks).await;
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// What it failed with; `Cancelled`.
    pub async fn ended(&self, tasks: &Tasks) -> Result<()> {
        loop {
            match &*self.state.borrow() {
                JobState::Done => return Ok(()),
                JobState::Failed(error) => return Err(error.clone()),
                JobState::Cancelled => {
                    return Err(FormatError::new(FormatErrorKind::Cancelled, "the job was cancelled"));
                }
                JobState::Running | JobState::Ready => {}
            }
            self.changed.wait(tasks).await;
        }
    }
}

/// The jobs of a disk.
#[derive(Debug, Default)]
pub struct Jobs {
    list: RefCell<Vec<Rc<Job>>>,
    last: Cell<u32>,
}

impl Jobs {
    /// A new job; the caller does its work and [`Job::finish`]es it.
    pub fn begin(&self, kind: JobKind, subject: String, rate: u64) -> Rc<Job> {
        let id = self.last.get() + 1;
        self.last.set(id);
        let job = Rc::new(Job {
            id,
            kind,
            subject,
            state: RefCell::new(JobState::Running),
            done: Cell::new(0),
            total: Cell::new(0),
            rate: Cell::new(rate),
            next_ns: Cell::new(0),
            cancelled: Cell::new(false),
            changed: Notify::default(),
        });
        let mut list = self.list.borrow_mut();
        let ended = list.iter().filter(|job| job.state.borrow().has_ended()).count();
        if ended >= ENDED_MAX
            && let Some(oldest) = list.iter().position(|job| job.state.borrow().has_ended())
        {
            list.remove(oldest);
        }
        list.push(Rc::clone(&job));
        job
    }

    /// The job of this number.
    pub fn get(&self, id: u32) -> Option<Rc<Job>> {
        self.list.borrow().iter().find(|job| job.id == id).cloned()
    }

    /// All that are at work, and the last that have ended, oldest first.
    pub fn infos(&self) -> Vec<JobInfo> {
        self.list.borrow().iter().map(|job| job.info()).collect()
    }

    /// Asks all to stop and waits until they have.
    pub async fn stop_all(&self, tasks: &Tasks) {
        let running: Vec<_> = self.list.borrow().clone();
        for job in running {
            if !job.state.borrow().has_ended() {
                job.cancel(tasks);
                // Its state says how it ended.
                let _ = job.ended(tasks).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tapio_ring::Io;
    use tapio_ring::sim::SimHost;

    use super::*;

    #[test]
    fn the_list_forgets_the_oldest_that_have_ended() {
        let (jobs, sim) = (Jobs::default(), SimHost::new(1).process());
        for _ in 0..20 {
            jobs.begin(JobKind::Commit, "an image".into(), 0).finish(Ok(()), sim.tasks());
        }
        let running = jobs.begin(JobKind::Mirror, "a copy".into(), 0);
        let infos = jobs.infos();
        assert_eq!((infos.len(), infos[0].id, running.id()), (ENDED_MAX, 14, 21));
        assert!(jobs.get(14).is_some() && jobs.get(13).is_none());
    }

    #[test]
    fn an_end_stays() {
        let (jobs, sim) = (Jobs::default(), SimHost::new(1).process());
        let job = jobs.begin(JobKind::Commit, "an image".into(), 0);
        job.finish(Err(FormatError::new(FormatErrorKind::Cancelled, "stop")), sim.tasks());
        job.finish(Ok(()), sim.tasks());
        assert!(matches!(job.info().state, JobState::Cancelled));
    }
}
