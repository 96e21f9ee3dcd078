//! What a plan did, and when.

use serde::{Deserialize, Serialize};

use tapio_model::ApiError;

use super::schedule::{Outcome, Record};

/// One step of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimelineStep {
    /// What was done.
    pub name: String,
    /// To what: `VBD <uuid>`.
    pub subject: String,
    /// Number of the group that it belongs to; steps of one group have the same.
    pub parent: usize,
    /// When it could have begun, in microseconds after the operation did.
    pub queued_us: u64,
    /// How long it waited for permits.
    pub wait_us: u64,
    /// How long it worked.
    pub work_us: u64,
    /// `ok`, `failed`, `skipped` or `undone`; `waiting` and `running` while the operation runs.
    pub result: String,
    /// Whether it took another step back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub undo: bool,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The steps of an operation. As JSON, it is what `task.get_timeline` answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// As `VM.start`.
    pub operation: String,
    /// From its beginning to its end, in microseconds.
    pub total_us: u64,
    /// In the order of the plan; what was taken back comes last.
    pub steps: Vec<TimelineStep>,
}

impl Timeline {
    /// Its text.
    pub fn json(&self) -> String {
        // There is nothing in it that cannot be written.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// How long its steps worked, together, in microseconds.
    pub fn work_us(&self) -> u64 {
        self.steps.iter().map(|step| step.work_us).sum()
    }
}

/// What a step does on another thread, at the same time as its own work.
#[derive(Debug)]
pub(super) struct Part {
    name: &'static str,
    /// Whether it belongs to what takes the step back.
    undo: bool,
    began: u64,
    /// When it ended, and its error.
    ended: Option<(u64, Option<String>)>,
}

impl Part {
    pub fn new(name: &'static str, undo: bool, now: u64) -> Self {
        Self { name, undo, began: now, ended: None }
    }

    pub fn end(&mut self, done: &Result<(), ApiError>, now: u64) {
        self.ended = Some((now, done.as_ref().err().map(ToString::to_string)));
    }
}

/// The part as a step of its own; none where it belongs to the other of doing and undoing. A step that failed has
/// taken its parts back.
pub(super) fn part(
    part: &Part,
    record: &Record,
    began: u64,
    now: u64,
    subject: &str,
) -> Option<TimelineStep> {
    let (ended, result, error) = match &part.ended {
        None => (now, "running", None),
        Some((at, Some(error))) => (*at, "failed", Some(error.clone())),
        Some((at, None)) if matches!(record.outcome, Outcome::Failed | Outcome::Undone) => {
            (*at, "undone", None)
        }
        Some((at, None)) => (*at, "ok", None),
    };
    (part.undo == record.undo).then(|| TimelineStep {
        name: part.name.to_owned(),
        subject: subject.to_owned(),
        parent: record.parent,
        queued_us: part.began.saturating_sub(began),
        wait_us: 0,
        work_us: ended.saturating_sub(part.began),
        result: result.to_owned(),
        undo: part.undo,
        error,
    })
}

pub(super) fn step(
    record: &Record,
    began: u64,
    now: u64,
    name: &str,
    subject: &str,
    error: Option<String>,
) -> TimelineStep {
    let (started, ended) = match record.outcome {
        Outcome::Waiting => (now, now),
        Outcome::Running => (record.started, now),
        _ => (record.started, record.ended),
    };
    let queued = if record.queued == 0 { started } else { record.queued };
    TimelineStep {
        name: name.to_owned(),
        subject: subject.to_owned(),
        parent: record.parent,
        queued_us: queued.saturating_sub(began),
        wait_us: started.saturating_sub(queued),
        work_us: ended.saturating_sub(started),
        result: match record.outcome {
            Outcome::Waiting => "waiting",
            Outcome::Running => "running",
            Outcome::Done => "ok",
            Outcome::Failed => "failed",
            Outcome::Skipped => "skipped",
            Outcome::Undone => "undone",
        }
        .to_owned(),
        undo: record.undo,
        error,
    }
}
