//! One collection of an SR, as clients see it.

use std::sync::{Arc, OnceLock};

use tapio_model::{ApiError, Type, Value};
use tapio_sm::collect::{Job, Plan, Skipped, View, Why, Work as Kind, plan};
use tapio_sm::worker::is_unfinished;

use super::super::Call;
use super::super::attached::Attached;
use super::job;
use super::look::{Memory, look};
use super::request::forecast_line;
use super::stop::Stop;
use crate::progress::Progress;
use crate::tasks::Running;

/// The task's name; clients of XenServer look for it.
const NAME: &str = "Garbage Collection";

/// How often a merge is tried whose disks changed between the plan and the change of their chains.
const TRIES: u32 = 3;

/// When an SR is to be collected again without a change of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// Nothing is left that could be done then.
    Never,
    /// What was in the way may be over.
    Soon,
    /// What is left has failed, and may fail again.
    AfterFailure,
}

/// Progress and cancel of a collection. Its task is made when there is something to do.
#[derive(Default)]
struct Watched {
    stop: Arc<Stop>,
    task: OnceLock<Arc<Running>>,
}

impl Watched {
    fn is_task_cancelled(&self) -> bool {
        self.task.get().is_some_and(|task| task.is_cancelled())
    }
}

impl Progress for Watched {
    fn is_cancelled(&self) -> bool {
        self.stop.is_job_over() || self.is_task_cancelled()
    }

    /// Of the job that runs: how many are to come is not known.
    fn set(&self, fraction: f64) {
        if let Some(task) = self.task.get() {
            task.set(fraction);
        }
    }

    fn task(&self) -> Option<&str> {
        self.task.get().and_then(|task| task.task())
    }
}

/// A collection that runs.
struct Round<'a> {
    call: Call,
    attached: &'a Attached,
    watched: Arc<Watched>,
    memory: Memory,
    /// What was done, for people.
    done: Vec<String>,
}

/// Collects an SR until nothing is left to do. Answers when the rest is to be tried again.
pub(super) fn run(call: &Call, sr: &str, stop: &Arc<Stop>) -> Again {
    let Ok(attached) = call.part.attached(sr) else { return Again::Never };
    // A plugin removes what its snapshots leave behind itself.
    if !attached.can("VDI_SNAPSHOT") || attached.origin.is_some() {
        return Again::Never;
    }
    let watched = Arc::new(Watched { stop: Arc::clone(stop), task: OnceLock::new() });
    let call = call.with(Arc::clone(&watched) as Arc<dyn Progress>);
    let (memory, done) = (Memory::default(), Vec::new());
    let mut round = Round { call, attached: &attached, watched, memory, done };
    let left = round.work();
    round.end(left)
}

impl Round<'_> {
    /// Does job after job; answers what is left alone.
    fn work(&mut self) -> Result<Vec<Skipped>, ApiError> {
        loop {
            let (view, plan) = self.plan()?;
            let Some(job) = plan.jobs.first() else { return Ok(plan.skipped) };
            if job.is_measured {
                self.begin(&view, &plan)?;
            }
            if self.watched.stop.is_over() || self.watched.is_task_cancelled() {
                return Err(self.cancelled());
            }
            self.watched.stop.begin_job(job.work.images());
            if let Err(error) = self.step(&view, job) {
                self.judge(job, error)?;
            }
        }
    }

    fn plan(&self) -> Result<(View, Plan), ApiError> {
        let view = look(&self.call, self.attached, &self.memory)?;
        let plan = plan(&view);
        Ok((view, plan))
    }

    /// Makes the task, if there is none yet: once something changes, not for a look at images that have no room to go.
    fn begin(&self, view: &View, plan: &Plan) -> Result<(), ApiError> {
        if self.watched.task.get().is_none() {
            let mut description = format!("Garbage collection for SR {}", self.attached.uuid);
            if let Some(forecast) = forecast_line(plan) {
                description += &format!("; {forecast}");
            }
            if let Some(free) = view.free {
                description += &format!("; {free} bytes are free");
            }
            let task = self.call.part.tasks.begin_own(NAME, &description)?;
            let _ = self.watched.task.set(task);
        }
        Ok(())
    }

    fn cancelled(&self) -> ApiError {
        ApiError::new("TASK_CANCELLED", [self.watched.task().unwrap_or_default()])
    }

    /// Does a job, or finds out what it takes.
    fn step(&mut self, view: &View, job: &Job) -> Result<(), ApiError> {
        let (call, attached) = (&self.call, self.attached);
        if let Some((image, parent)) = job.work.images().filter(|_| !job.is_measured) {
            let merge = job::merge(image, parent, &[]);
            let cost = attached.with(|sr| sr.merge_cost(&super::super::work::Work::new(call), &merge))?;
            self.memory.costs.insert(image, cost);
            return Ok(());
        }
        tracing::info!(sr = %attached.uuid, "garbage collection: {}", super::request::line(job));
        match job.work {
            Kind::Garbage => job::garbage(call, attached)?,
            Kind::Freeze { image, .. } => {
                *self.memory.freezes.entry(image).or_insert(0) += 1;
                self.memory.forget(image);
                job::freeze(call, attached, image)?;
            }
            Kind::Leaf { image, parent } => {
                job::leaf(call, attached, image, parent)?;
                self.memory.forget(image);
            }
            Kind::Inner { image, parent } => self.inner(view, job, (image, parent))?,
        }
        self.done.push(super::request::line(job));
        Ok(())
    }

    fn inner(
        &self,
        view: &View,
        job: &Job,
        (image, parent): (uuid::Uuid, uuid::Uuid),
    ) -> Result<(), ApiError> {
        let must_grow = self.memory.costs.get(&image).is_some_and(|cost| cost.must_grow);
        let size = |uuid| view.nodes.iter().find(|node| node.uuid == uuid).map(|node| node.virtual_size);
        if must_grow && size(parent) < size(image) {
            job::grow(&self.call, self.attached, (image, parent), &job.disks)?;
        }
        job::copy(&self.call, self.attached, (image, parent))?;
        for turn in 1.. {
            // Disks may have been made and removed meanwhile.
            let (_, plan) = self.plan()?;
            let Some(job) = plan.jobs.into_iter().find(|now| now.work == job.work) else {
                let why = plan.skipped.into_iter().find(|skipped| skipped.image == image);
                let why =
                    why.map_or_else(|| "it is not there any more".to_owned(), |known| known.why.to_string());
                return Err(ApiError::backend(46, why, ""));
            };
            match job::relink(&self.call, self.attached, (image, parent), &job.disks) {
                Err(error) if turn < TRIES && is_taken(&error) => {}
                done => return done,
            }
        }
        Ok(())
    }

    /// A job has failed: whether the collection goes on without it.
    fn judge(&mut self, job: &Job, error: ApiError) -> Result<(), ApiError> {
        let stop = &self.watched.stop;
        if stop.is_over() || self.watched.is_task_cancelled() || is_unfinished(&error) {
            return Err(error);
        }
        let Some((image, _)) = job.work.images() else { return Err(error) };
        tracing::info!(sr = %self.attached.uuid, %image, %error, "garbage collection: a job is put off");
        self.memory.failed.insert(image, told(&error));
        Ok(())
    }

    /// Ends the task; answers when the rest is to be tried again.
    fn end(self, left: Result<Vec<Skipped>, ApiError>) -> Again {
        let again = left.as_ref().map_or(Again::Never, |skipped| again(skipped));
        if let Err(error) = &left
            && error.code != "TASK_CANCELLED"
        {
            tracing::warn!(sr = %self.attached.uuid, %error, "garbage collection failed");
        }
        let Some(task) = self.watched.task.get() else { return again };
        let report = |skipped: &Vec<Skipped>| {
            let skipped = skipped.iter().map(super::request::skipped_line);
            let lines: Vec<String> = self.done.iter().cloned().chain(skipped).collect();
            Value::string(lines.join("\n"))
        };
        let result = match &left {
            Ok(skipped) => Ok(report(skipped)),
            Err(_) if self.watched.is_cancelled() => Err(self.cancelled()),
            Err(error) => Err(error.clone()),
        };
        self.call.part.tasks.finish(task, &result, Type::String);
        again
    }
}

/// When what was left alone is to be tried again.
fn again(left: &[Skipped]) -> Again {
    let mut may_pass = left.iter().map(|skipped| &skipped.why).filter(|why| why.may_pass()).peekable();
    if may_pass.peek().is_none() {
        return Again::Never;
    }
    if may_pass.all(|why| matches!(why, Why::Failed { .. })) { Again::AfterFailure } else { Again::Soon }
}

/// Whether a disk that a job needs is taken by something else.
fn is_taken(error: &ApiError) -> bool {
    matches!(&*error.code, "VDI_IN_USE" | "OTHER_OPERATION_IN_PROGRESS")
}

/// An error in one line.
fn told(error: &ApiError) -> String {
    let params: Vec<&str> =
        error.params.iter().map(String::as_str).filter(|param| !param.is_empty()).collect();
    format!("{}: {}", error.code, params.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn what_failed_alone_is_tried_later_than_what_was_in_the_way() {
        let skipped = |why| Skipped { image: Uuid::nil(), why };
        let failed = || skipped(Why::Failed { error: "the cable is out".into() });
        let held = skipped(Why::Held { vdi: Uuid::nil(), by: "a copy".into() });
        assert_eq!(again(&[]), Again::Never);
        assert_eq!(again(&[skipped(Why::OffForVdi)]), Again::Never);
        assert_eq!(again(&[failed(), skipped(Why::OffForVdi)]), Again::AfterFailure);
        assert_eq!(again(&[failed(), held]), Again::Soon);
    }
}
