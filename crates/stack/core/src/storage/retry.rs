//! Work on one SR that is tried until its storage answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tapio_model::ApiError;

use super::notes::{self, Note};
use super::{Call, Storage};

/// How long an SR whose storage hung is left alone before it is tried again.
pub(super) const AGAIN: Duration = Duration::from_secs(5);

/// What is worked on, by the SR's reference: the note of each piece of work, none for the work of a start.
type Left = BTreeMap<String, Vec<Option<Note>>>;

/// SRs that are not in order yet; see [`super::recover()`].
#[derive(Debug, Default)]
pub(super) struct Recovering {
    left: Mutex<Left>,
    changed: Condvar,
}

impl Recovering {
    /// Answers whether nothing of the kind is worked on already.
    pub(super) fn begins(&self, sr: &str, note: Option<&Note>) -> bool {
        let mut left = self.left.lock();
        let works = left.entry(sr.to_owned()).or_default();
        let is_new = !works.iter().any(|work| work.as_ref() == note);
        if is_new {
            works.push(note.cloned());
        }
        is_new
    }

    pub(super) fn is_over(&self, sr: &str, note: Option<&Note>) {
        let mut left = self.left.lock();
        if let Some(works) = left.get_mut(sr) {
            works.retain(|work| work.as_ref() != note);
            if works.is_empty() {
                left.remove(sr);
            }
        }
        self.changed.notify_all();
    }

    /// References of the SRs that are left.
    pub(super) fn srs(&self) -> Vec<String> {
        self.left.lock().keys().cloned().collect()
    }

    /// Waits until none is left; answers whether that came in time.
    pub(super) fn wait_for_all(&self, until: Option<Instant>) -> bool {
        self.wait(until, Left::is_empty)
    }

    /// Waits until `are_over` of those that are left; answers whether that came in time.
    fn wait(&self, until: Option<Instant>, are_over: impl Fn(&Left) -> bool) -> bool {
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
        self.recovering.left.lock().contains_key(sr)
    }

    /// Waits until the start has attached an SR, or given up.
    pub fn wait_until_recovered(&self, sr: &str) {
        self.recovering.wait(None, |left| !left.contains_key(sr));
    }
}

/// Works on an SR; the work [has begun](Recovering::begins) already, and says itself that it is over.
pub(super) fn spawn(
    storage: &Arc<Storage>,
    sr: &str,
    note: Option<&Note>,
    work: impl FnOnce(&Call) + Send + 'static,
) {
    let same = Arc::clone(storage);
    let working = std::thread::Builder::new().name("sr-recovery".to_owned());
    if let Err(error) = working.spawn(move || work(&Call::own(&same))) {
        tracing::error!(sr, %error, "no thread to put an SR in order: it waits for the next start");
        storage.recovering.is_over(sr, note);
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

/// Does a job of an operation that was broken off, from a moment later on, until it is done. The same job is done once,
/// however often it is asked for meanwhile; another job of the same SR does not wait for it.
pub(super) fn later(call: &Call, sr: &str, job: Job) {
    let note = job.note.clone();
    if !call.part.recovering.begins(sr, note.as_ref()) {
        return;
    }
    let of = sr.to_owned();
    spawn(&call.part, sr, note.as_ref(), move |call| {
        std::thread::sleep(AGAIN);
        until_done(call, &job);
        // One that was broken off in the same way after this one was done, and before this thread ended.
        call.part.recovering.is_over(&of, job.note.as_ref());
        if job.note.as_ref().is_some_and(|note| notes::all(&call.part.db).contains(note)) {
            later(call, &of, job);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_job_of_an_sr_is_done_and_the_same_job_once() {
        let recovering = Recovering::default();
        let [destroyed, unplugged] =
            [Note::SrDestroy { sr: "sr".into() }, Note::PbdUnplug { pbd: "pbd".into() }];
        assert!(recovering.begins("sr", Some(&destroyed)));
        assert!(!recovering.begins("sr", Some(&destroyed)), "twice at once");
        assert!(recovering.begins("sr", Some(&unplugged)), "the first one may be about to end");
        recovering.is_over("sr", Some(&destroyed));
        assert_eq!(recovering.srs(), ["sr"]);
        assert!(!recovering.wait_for_all(Some(Instant::now())));
        assert!(recovering.begins("sr", Some(&destroyed)), "broken off once more");
        recovering.is_over("sr", Some(&destroyed));
        recovering.is_over("sr", Some(&unplugged));
        assert!(recovering.wait_for_all(Some(Instant::now())));
    }
}
