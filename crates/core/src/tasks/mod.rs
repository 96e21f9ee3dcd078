//! Tasks: work that can be watched and cancelled.
//!
//! An `Async.` call has a task in the store; after a restart of the daemon it says that the work was interrupted. A
//! call that its client waits for has one as long as it runs, in memory alone.

mod text;
mod workers;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tapio_model::{ApiError, NULL_REF, Type, Value};

use crate::Toolstack;
use crate::call::{Args, Call, Handlers, Progress};
use crate::dates;
use crate::db::{Change, Object};

pub use text::xml_text;
pub(crate) use workers::Workers;

/// Calls that run at a time without their clients waiting.
const THREADS_MAX: usize = 256;

/// Such calls that wait for a thread.
const QUEUE_MAX: usize = 2_000;

/// Finished tasks are kept so long,
const KEEP_SECONDS: i64 = 24 * 3600;

/// and so many of them.
const FINISHED_MAX: usize = 1_000;

/// Tasks in all; a client that makes more has forgotten to destroy them.
const ALL_MAX: usize = 20_000;

/// Progress is shown again when it grew by so much,
const PROGRESS_STEP: f64 = 0.01;

/// or after so long.
const PROGRESS_EVERY: Duration = Duration::from_millis(250);

/// Progress and cancel of a task that runs here.
#[derive(Debug)]
pub struct Running {
    stack: Weak<Toolstack>,
    reference: String,
    is_cancelled: AtomicBool,
    shown: Mutex<(f64, Instant)>,
}

impl Progress for Running {
    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    fn set(&self, fraction: f64) {
        let fraction = if fraction.is_finite() { fraction.clamp(0.0, 1.0) } else { return };
        {
            let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
            if (fraction - shown.0).abs() < PROGRESS_STEP && shown.1.elapsed() < PROGRESS_EVERY {
                return;
            }
            *shown = (fraction, Instant::now());
        }
        if let Some(stack) = self.stack.upgrade() {
            // A task that its client destroyed meanwhile has nothing to show.
            let _ = stack.db.set("task", &self.reference, "progress", fraction);
        }
    }

    fn task(&self) -> Option<&str> {
        Some(&self.reference)
    }
}

/// Tasks that run here, and their threads.
#[derive(Debug)]
pub struct Tasks {
    running: Mutex<HashMap<String, Arc<Running>>>,
    pub(crate) workers: Workers,
}

impl Default for Tasks {
    fn default() -> Self {
        Self { running: Mutex::default(), workers: Workers::new(THREADS_MAX, QUEUE_MAX) }
    }
}

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Running>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Progress and cancel of a task that runs here.
    pub fn progress_of(&self, reference: &str) -> Option<Arc<Running>> {
        self.lock().get(reference).cloned()
    }

    /// Begins a task; one that is kept is in the store before this answers.
    ///
    /// # Errors
    /// The store's, `TOO_MANY_PENDING_TASKS`.
    pub(crate) fn begin(
        &self,
        stack: &Arc<Toolstack>,
        label: &str,
        is_kept: bool,
    ) -> Result<Arc<Running>, ApiError> {
        if stack.db.count("task") >= ALL_MAX {
            return Err(ApiError::bare("TOO_MANY_PENDING_TASKS"));
        }
        let reference = stack.db.change(|change| {
            let mut fields = new_fields(change, label, "");
            fields.push(("allowed_operations", Value::strings(["cancel"])));
            if is_kept { change.create("task", &fields) } else { change.create_volatile("task", &fields) }
        })?;
        Ok(self.watch(stack, reference))
    }

    /// Takes up a task of an earlier run of the daemon, at start: it does not count as interrupted, and whoever takes
    /// it up ends it by [`Self::finish`].
    ///
    /// # Errors
    /// `HANDLE_INVALID`: it is not there; `OPERATION_NOT_ALLOWED`: it is over.
    pub fn resume(&self, stack: &Arc<Toolstack>, reference: &str) -> Result<Arc<Running>, ApiError> {
        let task = stack.db.get("task", reference)?;
        if !is_pending(&task) {
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the task is over"]));
        }
        stack.db.set("task", reference, "allowed_operations", Value::strings(["cancel"]))?;
        Ok(self.watch(stack, reference.to_owned()))
    }

    fn watch(&self, stack: &Arc<Toolstack>, reference: String) -> Arc<Running> {
        let running = Arc::new(Running {
            stack: Arc::downgrade(stack),
            reference: reference.clone(),
            is_cancelled: AtomicBool::new(false),
            shown: Mutex::new((0.0, Instant::now())),
        });
        self.lock().insert(reference, Arc::clone(&running));
        running
    }

    /// Ends a task that was watched by the client of the call itself.
    pub(crate) fn drop_volatile(&self, stack: &Toolstack, running: &Running) {
        self.lock().remove(&running.reference);
        let _ = stack.db.destroy("task", &running.reference);
    }

    /// Ends a task with its result, whose type is `ty`.
    pub fn finish(&self, stack: &Toolstack, running: &Running, result: &Result<Value, ApiError>, ty: Type) {
        let reference = &running.reference;
        self.lock().remove(reference);
        let written = stack.db.change(|change| end(change, reference, result, ty));
        if let Err(error) = written
            && error.code != "HANDLE_INVALID"
        {
            // The work is done, and only its report is lost; the client finds the task pending until a restart.
            tracing::error!(task = reference, %error, "the end of a task could not be written");
        }
    }

    /// Tasks of an earlier run of the daemon that nobody took up again have failed.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn fail_interrupted(&self, stack: &Toolstack) -> Result<(), ApiError> {
        let why = ApiError::internal(
            "the toolstack's daemon ended while this was under way; what was half done was finished or undone at \
             its start: look at the objects concerned and repeat if needed",
        );
        let failed = Err(why);
        let running = self.lock();
        stack.db.change(|change| {
            for task in change.all("task") {
                if is_pending(&task) && !running.contains_key(&task.reference) {
                    end(change, &task.reference, &failed, Type::Void)?;
                } else if !is_pending(&task) {
                    change.set("task", &task.reference, "allowed_operations", Value::strings(["destroy"]))?;
                    change.set("task", &task.reference, "progress", 1.0)?;
                }
            }
            Ok(())
        })
    }

    /// Forgets finished tasks that are old, and the oldest where there are too many.
    ///
    /// # Errors
    /// The store's.
    pub fn sweep(&self, stack: &Toolstack) -> Result<(), ApiError> {
        let mut finished: Vec<(i64, String)> = Vec::new();
        for task in stack.db.all("task") {
            if !is_pending(&task)
                && let Value::DateTime(at) = task.get("finished")
            {
                finished.push((*at, task.reference.clone()));
            }
        }
        finished.sort();
        let too_many = finished.len().saturating_sub(FINISHED_MAX);
        let old = dates::now() - KEEP_SECONDS;
        let going: Vec<&String> = finished
            .iter()
            .enumerate()
            .filter(|(at, (when, _))| *at < too_many || *when < old)
            .map(|(_, (_, reference))| reference)
            .collect();
        if going.is_empty() {
            return Ok(());
        }
        stack.db.change(|change| {
            for reference in going {
                // A client may have been faster.
                if change.get("task", reference).is_ok() {
                    change.destroy("task", reference)?;
                }
            }
            Ok(())
        })
    }
}

/// Whether a task is not over.
fn is_pending(task: &Object) -> bool {
    matches!(task.text("status"), "pending" | "cancelling")
}

fn new_fields(change: &Change<'_>, label: &str, description: &str) -> Vec<(&'static str, Value)> {
    let host = change.all("host").first().map_or_else(|| NULL_REF.to_owned(), |host| host.reference.clone());
    vec![
        ("name_label", label.into()),
        ("name_description", description.into()),
        ("created", Value::DateTime(dates::now())),
        ("status", "pending".into()),
        ("type", "<none/>".into()),
        ("resident_on", host.into()),
    ]
}

fn end(
    change: &mut Change<'_>,
    reference: &str,
    result: &Result<Value, ApiError>,
    ty: Type,
) -> Result<(), ApiError> {
    let mut set = |field: &str, value: Value| change.set("task", reference, field, value);
    set("finished", Value::DateTime(dates::now()))?;
    set("allowed_operations", Value::strings(["destroy"]))?;
    set("current_operations", Value::Map(std::collections::BTreeMap::new()))?;
    match result {
        Ok(value) => {
            set("status", "success".into())?;
            set("progress", 1.0.into())?;
            set("type", type_text(ty).into())?;
            set("result", xml_text(value).into())
        }
        Err(error) => {
            let is_cancel = error.code == "TASK_CANCELLED";
            set("status", if is_cancel { "cancelled" } else { "failure" }.into())?;
            set("progress", 1.0.into())?;
            let parts = std::iter::once(error.code.to_string()).chain(error.params.iter().cloned());
            set("error_info", Value::strings(parts))
        }
    }
}

/// `task.type`: what clients find in the result.
fn type_text(ty: Type) -> String {
    match ty {
        Type::Ref(class) => class.to_owned(),
        Type::Void => "<none/>".to_owned(),
        Type::Set(_) => "set".to_owned(),
        Type::Map(..) | Type::Record(_) => "map".to_owned(),
        _ => "value".to_owned(),
    }
}

/// Registers the messages of tasks.
pub(crate) fn register(handlers: &mut Handlers) {
    handlers.on("task.create", |call, args| {
        let (label, description) = (args.text(0)?, args.text(1)?);
        if call.stack.db.count("task") >= ALL_MAX {
            return Err(ApiError::bare("TOO_MANY_PENDING_TASKS"));
        }
        let made = call.stack.db.change(|change| {
            let mut fields = new_fields(change, label, description);
            fields.push(("allowed_operations", Value::strings(["cancel", "destroy"])));
            change.create("task", &fields)
        });
        made.map(Value::String)
    });
    handlers.on("task.destroy", |call, args| {
        call.stack.db.destroy("task", args.text(0)?)?;
        Ok(Value::Void)
    });
    handlers.on("task.cancel", cancel);
    handlers.on("task.set_status", |call, args| {
        let (reference, status) = (own(call, args)?, args.text(1)?);
        call.stack.db.change(|change| {
            change.set("task", reference, "status", status)?;
            if matches!(status, "pending" | "cancelling") {
                return Ok(());
            }
            change.set("task", reference, "finished", Value::DateTime(dates::now()))?;
            change.set("task", reference, "allowed_operations", Value::strings(["destroy"]))
        })?;
        Ok(Value::Void)
    });
    handlers.on("task.set_progress", |call, args| {
        let reference = own(call, args)?;
        let Value::Float(fraction) = args.value(1)? else {
            return Err(ApiError::new("FIELD_TYPE_ERROR", ["value"]));
        };
        if !(0.0..=1.0).contains(fraction) {
            return Err(ApiError::new("INVALID_VALUE", ["value".to_owned(), fraction.to_string()]));
        }
        call.stack.db.set("task", reference, "progress", *fraction)?;
        Ok(Value::Void)
    });
    handlers.on("task.set_result", |call, args| {
        call.stack.db.set("task", own(call, args)?, "result", args.text(1)?)?;
        Ok(Value::Void)
    });
    handlers.on("task.set_error_info", |call, args| {
        call.stack.db.set("task", own(call, args)?, "error_info", args.value(1)?.clone())?;
        Ok(Value::Void)
    });
}

/// The task of a setter: one that a client made and brings forward itself.
fn own<'a>(call: &Call, args: &'a Args) -> Result<&'a str, ApiError> {
    let reference = args.text(0)?;
    if call.stack.tasks.progress_of(reference).is_some() {
        return Err(ApiError::new(
            "OPERATION_NOT_ALLOWED",
            ["the task is the toolstack's own, it says how it stands"],
        ));
    }
    call.stack.db.get("task", reference)?;
    Ok(reference)
}

fn cancel(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let running = call.stack.tasks.progress_of(reference);
    let me = call.progress.task().unwrap_or(NULL_REF).to_owned();
    call.stack.db.change(|change| {
        let task = change.get("task", reference)?;
        if !is_pending(&task) {
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the task is over"]));
        }
        if running.is_some() {
            change.set("task", reference, "status", "cancelling")?;
            return change.set("task", reference, "current_operations", Value::string_map([(&me, "cancel")]));
        }
        // Nobody works on it here: whoever made it finds this out by its status.
        let cancelled = Err(ApiError::new("TASK_CANCELLED", [reference]));
        end(change, reference, &cancelled, Type::Void)
    })?;
    if let Some(running) = running {
        running.is_cancelled.store(true, Ordering::Release);
    }
    Ok(Value::Void)
}
