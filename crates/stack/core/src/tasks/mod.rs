//! Tasks: work that can be watched and cancelled.
//!
//! An `Async.` call has a task in the store; after a restart of the daemon it says that the work was interrupted. A
//! call that its client waits for has one as long as it runs, in memory alone.
//!
//! A task belongs to the account that began it: that may cancel, destroy and change it, whatever its role; tasks of
//! others are for pool-operators and above (as in xapi, whose permission is called `task.destroy/any`). Finished tasks
//! are forgotten after a while, and so are those that a client made, left pending and never touched again.

mod text;
mod workers;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_model::{ApiError, NULL_REF, Role, Type, Value};

use crate::accounts::Credential;
use crate::args::Args;
use crate::call::{Call, Handlers};
use crate::caller::Caller;
use crate::dates;
use crate::db::{Change, Db, Generation, Object};
use crate::progress::Progress;

pub use text::xml_text;
pub(crate) use workers::Workers;

/// Calls that run at a time without their clients waiting.
const THREADS_MAX: usize = 256;

/// Such calls that wait for a thread.
const QUEUE_MAX: usize = 2_000;

/// Finished tasks are kept so long (xapi's `completed_task_timeout`),
const KEEP_SECONDS: i64 = 65 * 60;

/// and so many of them.
const FINISHED_MAX: usize = 1_000;

/// A pending task that nothing works on here is forgotten after so long without a change (xapi's
/// `pending_task_timeout`): its client is gone.
const PENDING_SECONDS: i64 = 24 * 3600;

/// Tasks in all; a client that makes more has forgotten to destroy them.
const ALL_MAX: usize = 20_000;

/// Pending tasks of one account that makes another one by `task.create`, so that no account takes the room of others.
const PER_ACCOUNT_MAX: usize = 2_000;

/// Progress is shown again when it grew by so much,
const PROGRESS_STEP: f64 = 0.01;

/// or after so long.
const PROGRESS_EVERY: Duration = Duration::from_millis(250);

/// Whose a task is.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    /// The account; none for the local superuser.
    pub(crate) account: Option<(String, Credential)>,
    /// What the caller must be allowed for it.
    pub(crate) needs: Role,
    /// The session of another host of the pool that asks for it, for a client of its own.
    pub(crate) visit: Option<String>,
}

/// Progress and cancel of a task that runs here.
#[derive(Debug)]
pub struct Running {
    db: Arc<Db>,
    reference: String,
    /// None for one that an earlier run of the daemon began.
    owner: Option<Owner>,
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
            let mut shown = self.shown.lock();
            if (fraction - shown.0).abs() < PROGRESS_STEP && shown.1.elapsed() < PROGRESS_EVERY {
                return;
            }
            *shown = (fraction, Instant::now());
        }
        // A task that its client destroyed meanwhile has nothing to show.
        let _ = self.db.set("task", &self.reference, "progress", fraction);
    }

    fn task(&self) -> Option<&str> {
        Some(&self.reference)
    }
}

/// Tasks that run here, and their threads.
#[derive(Debug)]
pub struct Tasks {
    db: Arc<Db>,
    running: Mutex<HashMap<String, Arc<Running>>>,
    /// Pending tasks that nothing works on here: as which change they were seen, and since when.
    still: Mutex<HashMap<String, (Generation, i64)>>,
    pub(crate) workers: Workers,
}

impl Tasks {
    /// None runs yet.
    pub(crate) fn new(db: &Arc<Db>) -> Self {
        Self {
            db: Arc::clone(db),
            running: Mutex::default(),
            still: Mutex::default(),
            workers: Workers::new(THREADS_MAX, QUEUE_MAX),
        }
    }

    /// Progress and cancel of a task that runs here.
    pub fn progress_of(&self, reference: &str) -> Option<Arc<Running>> {
        self.running.lock().get(reference).cloned()
    }

    /// What a session of another host does here.
    fn of_visit(&self, session: &str) -> Option<Arc<Running>> {
        let is_its = |running: &&Arc<Running>| {
            running.owner.as_ref().and_then(|owner| owner.visit.as_deref()) == Some(session)
        };
        self.running.lock().values().find(is_its).cloned()
    }

    /// Begins a task; one that is kept is in the store before this answers.
    ///
    /// # Errors
    /// The store's, `TOO_MANY_PENDING_TASKS`.
    pub(crate) fn begin(&self, label: &str, owner: Owner, is_kept: bool) -> Result<Arc<Running>, ApiError> {
        if self.db.count("task") >= ALL_MAX {
            return Err(ApiError::bare("TOO_MANY_PENDING_TASKS"));
        }
        let reference = self.db.change(|change| {
            let mut fields = new_fields(change, self.db.own_host(), label, "");
            fields.push(("allowed_operations", Value::strings(["cancel"])));
            if is_kept {
                create_owned(change, &fields, owner.account.as_ref().map(|(user, _)| user.as_str()))
            } else {
                change.create_volatile("task", &fields)
            }
        })?;
        Ok(self.watch(reference, Some(owner)))
    }

    /// Begins a task of the toolstack's own, for pool-operators to watch and cancel.
    ///
    /// # Errors
    /// The store's, `TOO_MANY_PENDING_TASKS`.
    pub(crate) fn begin_own(&self, label: &str, description: &str) -> Result<Arc<Running>, ApiError> {
        let running =
            self.begin(label, Owner { account: None, needs: Role::PoolOperator, visit: None }, true)?;
        self.db.set("task", &running.reference, "name_description", description)?;
        Ok(running)
    }

    /// Takes up a task of an earlier run of the daemon, at start: it does not count as interrupted, and the caller
    /// ends it by [`Self::finish`].
    ///
    /// # Errors
    /// `HANDLE_INVALID`: it is not there; `OPERATION_NOT_ALLOWED`: it is over.
    pub fn resume(&self, reference: &str) -> Result<Arc<Running>, ApiError> {
        let task = self.db.get("task", reference)?;
        if !is_pending(&task) {
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the task is over"]));
        }
        self.db.set("task", reference, "allowed_operations", Value::strings(["cancel"]))?;
        Ok(self.watch(reference.to_owned(), None))
    }

    /// Takes up a task that the caller made for the work that it asks for now.
    ///
    /// # Errors
    /// `HANDLE_INVALID`, `RBAC_PERMISSION_DENIED`; `OPERATION_NOT_ALLOWED`: it is over, or something works on it.
    pub(crate) fn adopt(
        &self,
        caller: &Caller,
        reference: &str,
        owner: Owner,
    ) -> Result<Arc<Running>, ApiError> {
        check_owner(self, caller, "task", reference)?;
        self.take_up(reference, owner)
    }

    /// The same of a task whose owner was looked at elsewhere.
    ///
    /// # Errors
    /// Those of [`Self::adopt`].
    pub(crate) fn take_up(&self, reference: &str, owner: Owner) -> Result<Arc<Running>, ApiError> {
        let refused = |why: &str| Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        if self.progress_of(reference).is_some() {
            return refused("something works on the task already");
        }
        if !is_pending(&*self.db.get("task", reference)?) {
            return refused("the task is over");
        }
        self.db.set("task", reference, "allowed_operations", Value::strings(["cancel"]))?;
        Ok(self.watch(reference.to_owned(), Some(owner)))
    }

    fn watch(&self, reference: String, owner: Option<Owner>) -> Arc<Running> {
        let running = Arc::new(Running {
            db: Arc::clone(&self.db),
            reference: reference.clone(),
            owner,
            is_cancelled: AtomicBool::new(false),
            shown: Mutex::new((0.0, Instant::now())),
        });
        self.running.lock().insert(reference, Arc::clone(&running));
        running
    }

    /// Ends a task that was watched by the client of the call itself.
    pub(crate) fn drop_volatile(&self, running: &Running) {
        self.running.lock().remove(&running.reference);
        let _ = match running.owner {
            // A kept one whose work could not be begun.
            Some(_) if self.db.get("task", &running.reference).is_ok_and(|task| task.is_stored) => {
                self.db.change(|change| forget(change, &running.reference))
            }
            _ => self.db.destroy("task", &running.reference),
        };
    }

    /// Cancels what runs for accounts that may not do it any more; `standings` says what they may.
    ///
    /// # Errors
    /// Those of `standings`.
    pub(crate) fn hold(
        &self,
        standings: impl FnOnce(&[(&str, Credential)]) -> Result<Vec<Option<Role>>, ApiError>,
    ) -> Result<(), ApiError> {
        let running: Vec<Arc<Running>> = self.running.lock().values().cloned().collect();
        let owned: Vec<(&Running, (&str, Credential), Role)> = running
            .iter()
            .filter_map(|running| {
                let Owner { account, needs, .. } = running.owner.as_ref()?;
                let (user, credential) = account.as_ref()?;
                Some((&**running, (user.as_str(), *credential), *needs))
            })
            .collect();
        if owned.is_empty() {
            return Ok(());
        }
        let asked: Vec<(&str, Credential)> = owned.iter().map(|(_, account, _)| *account).collect();
        for ((running, (user, _), needs), role) in owned.iter().zip(standings(&asked)?) {
            if role.is_none_or(|role| role < *needs) && !running.is_cancelled.swap(true, Ordering::AcqRel) {
                tracing::warn!(
                    user,
                    task = running.reference,
                    "cancelled: its account may not do it any more"
                );
                // One that ended meanwhile has nothing to show.
                let _ = self.db.set("task", &running.reference, "status", "cancelling");
            }
        }
        Ok(())
    }

    /// Ends a task with its result, whose type is `ty`.
    pub fn finish(&self, running: &Running, result: &Result<Value, ApiError>, ty: Type) {
        let reference = &running.reference;
        self.running.lock().remove(reference);
        let written = self.db.change(|change| end(change, reference, result, ty));
        if let Err(error) = written
            && error.code != "HANDLE_INVALID"
        {
            // The work is done, and only its report is lost; the client finds the task pending until a restart.
            tracing::error!(task = reference, %error, "the end of a task could not be written");
        }
    }

    /// Tasks of an earlier run of the daemon that were not taken up again have failed.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn fail_interrupted(&self) -> Result<(), ApiError> {
        let why = ApiError::internal(
            "the toolstack's daemon ended while this was in progress; what was half done was finished or undone at \
             its start: look at the objects concerned and repeat if needed",
        );
        let failed = Err(why);
        let running = self.running.lock();
        self.db.change(|change| {
            let is_own = |task: &Object| self.db.own_host().is_none_or(|own| task.text("resident_on") == own);
            for task in change.all("task").into_iter().filter(|task| is_own(task)) {
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

    /// Forgets finished tasks that are old, the oldest where there are too many, and pending ones that were left; `now`
    /// is in seconds since 1970.
    ///
    /// # Errors
    /// The store's.
    pub fn sweep(&self, now: i64) -> Result<(), ApiError> {
        let mut finished: Vec<(i64, String)> = Vec::new();
        let mut pending = Vec::new();
        for task in self.db.all("task") {
            match task.get("finished") {
                _ if is_pending(&task) => pending.push(task),
                Value::DateTime(at) => finished.push((*at, task.reference.clone())),
                _ => {}
            }
        }
        finished.sort();
        let too_many = finished.len().saturating_sub(FINISHED_MAX);
        let old = now - KEEP_SECONDS;
        let mut going: Vec<String> = finished
            .into_iter()
            .enumerate()
            .filter(|(at, (when, _))| *at < too_many || *when < old)
            .map(|(_, (_, reference))| reference)
            .collect();
        for reference in self.left(&pending, now) {
            tracing::warn!(task = reference, "forgotten: it was pending without a change for a day");
            going.push(reference);
        }
        if going.is_empty() {
            return Ok(());
        }
        self.db.change(|change| {
            for reference in &going {
                // A client may have been faster.
                if change.get("task", reference).is_ok() {
                    forget(change, reference)?;
                }
            }
            Ok(())
        })
    }

    /// Which of the pending tasks nothing works on and no client changed for too long, as far as this run has seen.
    fn left(&self, pending: &[Arc<Object>], now: i64) -> Vec<String> {
        let running: HashSet<String> = self.running.lock().keys().cloned().collect();
        let mut still = self.still.lock();
        let mut seen = HashMap::new();
        let mut left = Vec::new();
        for task in pending.iter().filter(|task| !running.contains(&task.reference)) {
            let since = match still.get(&task.reference) {
                Some((modified, since)) if *modified == task.modified => *since,
                _ => now,
            };
            if now - since >= PENDING_SECONDS {
                left.push(task.reference.clone());
            }
            seen.insert(task.reference.clone(), (task.modified, since));
        }
        *still = seen;
        left
    }
}

/// What the keys of [`owner_note`] begin with.
const OWNERS: &str = "task/owner/";

/// Where the account of a kept task is noted.
fn owner_note(reference: &str) -> String {
    format!("{OWNERS}{reference}")
}

/// Whether an account has as many pending tasks as one account may.
fn is_full(db: &Db, account: &str) -> bool {
    if db.count("task") < PER_ACCOUNT_MAX {
        return false;
    }
    let is_theirs = |key: &str, owner: &str| {
        let task = (owner == account).then(|| db.get("task", key.strip_prefix(OWNERS)?).ok()).flatten();
        task.is_some_and(|task| is_pending(&task))
    };
    db.notes(OWNERS).iter().filter(|(key, owner)| is_theirs(key, owner)).count() >= PER_ACCOUNT_MAX
}

/// Makes a task that belongs to an account; none: to those that may do everything.
fn create_owned(
    change: &mut Change<'_>,
    fields: &[(&str, Value)],
    account: Option<&str>,
) -> Result<String, ApiError> {
    let reference = change.create("task", fields)?;
    if let Some(account) = account {
        change.put_note(owner_note(&reference), account);
    }
    Ok(reference)
}

/// Removes a kept task, with the note of its account.
fn forget(change: &mut Change<'_>, reference: &str) -> Result<(), ApiError> {
    change.destroy("task", reference)?;
    change.drop_note(owner_note(reference));
    Ok(())
}

/// Whether the caller may change, cancel or destroy a task: its own, or any with the role for it.
///
/// # Errors
/// `HANDLE_INVALID`, `RBAC_PERMISSION_DENIED`.
pub(crate) fn check_owner(
    tasks: &Tasks,
    caller: &Caller,
    method: &str,
    reference: &str,
) -> Result<(), ApiError> {
    tasks.db.get("task", reference)?;
    if caller.role >= Role::PoolOperator {
        return Ok(());
    }
    let running = tasks.progress_of(reference);
    let owner = match running.as_ref().and_then(|running| running.owner.as_ref()) {
        Some(owner) => owner.account.as_ref().map(|(user, _)| user.clone()),
        None => {
            let key = owner_note(reference);
            tasks.db.notes(&key).into_iter().find(|(known, _)| *known == key).map(|(_, account)| account)
        }
    };
    if caller.account().is_some() && caller.account() == owner.as_deref() {
        return Ok(());
    }
    let what = format!(
        "{method} of a task of another account: the account {} has the role {}, {} is needed",
        caller.user,
        caller.role.name(),
        Role::PoolOperator.name()
    );
    Err(ApiError::new("RBAC_PERMISSION_DENIED", ["task.destroy/any".to_owned(), what]))
}

/// Whether a task is not over.
fn is_pending(task: &Object) -> bool {
    matches!(task.text("status"), "pending" | "cancelling")
}

fn new_fields(
    change: &Change<'_>,
    own: Option<&str>,
    label: &str,
    description: &str,
) -> Vec<(&'static str, Value)> {
    let only =
        || change.all("host").first().map_or_else(|| NULL_REF.to_owned(), |host| host.reference.clone());
    let host = own.map_or_else(only, str::to_owned);
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
pub(crate) fn register(handlers: &mut Handlers, tasks: &Arc<Tasks>) {
    let mut handlers = handlers.of(tasks);
    handlers.on("task.create", |call, args| {
        let (label, description) = (args.text(0)?, args.text(1)?);
        let account = call.caller.account();
        if call.part.db.count("task") >= ALL_MAX
            || account.is_some_and(|account| is_full(&call.part.db, account))
        {
            return Err(ApiError::bare("TOO_MANY_PENDING_TASKS"));
        }
        let made = call.part.db.change(|change| {
            let mut fields = new_fields(change, call.part.db.own_host(), label, description);
            fields.push(("allowed_operations", Value::strings(["cancel", "destroy"])));
            create_owned(change, &fields, account)
        });
        made.map(Value::String)
    });
    handlers.on("task.destroy", |call, args| {
        let reference = args.text(0)?;
        check_owner(&call.part, &call.caller, "task.destroy", reference)?;
        // Work that its client waits for is seen as long as it runs, in memory alone.
        if call.part.db.get("task", reference)?.is_stored {
            call.part.db.change(|change| forget(change, reference))?;
        } else {
            call.part.db.destroy("task", reference)?;
        }
        Ok(Value::Void)
    });
    handlers.on("task.cancel", cancel);
    handlers.on("task.follow", follow);
    handlers.on("task.set_status", |call, args| {
        let (reference, status) = (own(call, args, "task.set_status")?, args.text(1)?);
        call.part.db.change(|change| {
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
        let reference = own(call, args, "task.set_progress")?;
        let Value::Float(fraction) = args.value(1)? else {
            return Err(ApiError::new("FIELD_TYPE_ERROR", ["value"]));
        };
        if !(0.0..=1.0).contains(fraction) {
            return Err(ApiError::new("INVALID_VALUE", ["value".to_owned(), fraction.to_string()]));
        }
        call.part.db.set("task", reference, "progress", *fraction)?;
        Ok(Value::Void)
    });
    handlers.on("task.set_result", |call, args| {
        call.part.db.set("task", own(call, args, "task.set_result")?, "result", args.text(1)?)?;
        Ok(Value::Void)
    });
    handlers.on("task.set_error_info", |call, args| {
        call.part.db.set(
            "task",
            own(call, args, "task.set_error_info")?,
            "error_info",
            args.value(1)?.clone(),
        )?;
        Ok(Value::Void)
    });
}

/// The task of a setter: one that a client made and brings forward itself.
fn own<'a>(call: &Call<Tasks>, args: &'a Args, method: &str) -> Result<&'a str, ApiError> {
    let reference = args.text(0)?;
    check_owner(&call.part, &call.caller, method, reference)?;
    if call.part.progress_of(reference).is_some() {
        return Err(ApiError::new(
            "OPERATION_NOT_ALLOWED",
            ["the task is the toolstack's own, it says how it stands"],
        ));
    }
    Ok(reference)
}

fn cancel(call: &Call<Tasks>, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    check_owner(&call.part, &call.caller, "task.cancel", reference)?;
    let running = call.part.progress_of(reference);
    let me = call.progress.task().unwrap_or(NULL_REF).to_owned();
    call.part.db.change(|change| {
        let task = change.get("task", reference)?;
        if !is_pending(&task) {
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the task is over"]));
        }
        if running.is_some() {
            change.set("task", reference, "status", "cancelling")?;
            return change.set("task", reference, "current_operations", Value::string_map([(&me, "cancel")]));
        }
        // Nothing works on it here: the client that made it reads its status.
        let cancelled = Err(ApiError::new("TASK_CANCELLED", [reference]));
        end(change, reference, &cancelled, Type::Void)
    })?;
    if let Some(running) = running {
        running.is_cancelled.store(true, Ordering::Release);
    }
    Ok(Value::Void)
}

/// How far a call of another host is, 0 to 1, which asks for it in another session; cancels it if that is asked for.
///
/// # Errors
/// `OPERATION_NOT_ALLOWED`: the caller is no host of the pool; `HANDLE_INVALID`: nothing runs for that session.
fn follow(call: &Call<Tasks>, args: &Args) -> Result<Value, ApiError> {
    let (session, is_cancelled) = (args.text(0)?, args.bool(1)?);
    if !call.caller.is_host() {
        let why = "task.follow is for other hosts of the pool: look at the task";
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    let running = call.part.of_visit(session);
    let running = running.ok_or_else(|| ApiError::new("HANDLE_INVALID", ["task", session]))?;
    if is_cancelled && !running.is_cancelled.swap(true, Ordering::AcqRel) {
        // One that ended meanwhile has nothing to show.
        let _ = call.part.db.set("task", &running.reference, "status", "cancelling");
    }
    let fraction = running.shown.lock().0;
    Ok(Value::Float(fraction))
}
