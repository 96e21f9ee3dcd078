//! From a message's name to the work.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use tapio_model::{Answer, ApiError, ImpliedKind, NULL_REF, Value};

use crate::accounts::Peer;
use crate::answers::Reader;
use crate::args::Args;
use crate::db::Db;
use crate::events::Wait;
use crate::methods::{Method, Work};
use crate::progress::{Progress, Unwatched};
use crate::sessions::Session;
use crate::tasks::Owner;
use crate::{Toolstack, check, generic, roles};

/// A call that was let in.
struct Entered {
    method: Arc<Method>,
    session: Option<Arc<Session>>,
    args: Args,
    is_async: bool,
}

impl Entered {
    /// Whose task it is.
    fn owner(&self) -> Owner {
        let caller = self.session.as_ref().map(|session| session.caller());
        let visits = caller.as_ref().filter(|caller| caller.is_host());
        Owner {
            visit: visits.map(|caller| caller.session.clone()),
            account: caller.and_then(|caller| Some((caller.user, caller.credential?))),
            needs: self.method.role,
        }
    }
}

impl Toolstack {
    /// Whether a message waits for events: it goes to [`Self::call_waiting`], so that no thread waits with it.
    pub fn waits(method: &str) -> bool {
        matches!(method, "event.from" | "event.next")
    }

    /// One call. `params` begins with the session where the message needs one. Blocks until it is done.
    ///
    /// # Errors
    /// The message's; `MESSAGE_METHOD_UNKNOWN`, `SESSION_INVALID`, `RBAC_PERMISSION_DENIED`, or the parameters are
    /// wrong.
    pub fn call(self: &Arc<Self>, peer: &Peer, method: &str, params: Vec<Value>) -> Result<Value, ApiError> {
        self.answer(peer, method, params)?.whole()
    }

    /// The same, with a large answer in parts that are made when they are asked for.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub fn answer(
        self: &Arc<Self>,
        peer: &Peer,
        method: &str,
        params: Vec<Value>,
    ) -> Result<Answer, ApiError> {
        if let Some(answer) = self.system(method, &params) {
            return answer.map(Answer::Whole);
        }
        let entered = self.enter(peer, method, params)?;
        // A plugin is a part of what recovery waits for.
        if entered.method.changes() && !entered.session.as_ref().is_some_and(|session| session.is_plugins()) {
            self.wait_until_recovered();
            self.backups.check()?;
        }
        match &entered.method.work {
            Work::Login => self.login(peer, &entered).map(Answer::Whole),
            Work::Messages => {
                let found = crate::basics::messages::found(&self.db, &entered.args)?;
                self.reader(&entered)?.records(found)
            }
            Work::Wait => {
                let mut wait = begin_wait(&entered)?;
                loop {
                    let before = self.db.generation();
                    let is_late = wait.until().is_some_and(|until| until <= std::time::Instant::now());
                    if let Some(answer) = wait.poll(&self.events, is_late)? {
                        return Ok(answer);
                    }
                    // A logout that comes between the look and the wait is seen a moment later.
                    let soon = std::time::Instant::now() + std::time::Duration::from_secs(1);
                    self.db.wait(before, wait.until().map_or(soon, |until| until.min(soon)));
                }
            }
            _ if entered.is_async => self.begin(entered).map(Answer::Whole),
            Work::Generic(kind) => {
                let read = self.reader(&entered)?.read(entered.method.class, *kind, &entered.args);
                read.unwrap_or_else(|| self.run_watched(&entered).map(Answer::Whole))
            }
            _ => self.run_watched(&entered).map(Answer::Whole),
        }
    }

    /// A call of a message that [`Self::waits`], without a thread while it waits. Dropping it ends the wait.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub async fn call_waiting(
        self: Arc<Self>,
        peer: Peer,
        method: String,
        params: Vec<Value>,
    ) -> Result<Answer, ApiError> {
        if !Self::waits(&method) {
            return self.answer(&peer, &method, params);
        }
        let entered = self.enter(&peer, &method, params)?;
        let mut wait = begin_wait(&entered)?;
        let mut news = self.db.watch();
        let mut is_late = false;
        loop {
            news.mark_unchanged();
            let answer = if wait.is_large() {
                // Listeners that ask for everything take turns, so that they leave the processors to others.
                let _turn = self.looks.acquire().await;
                let events = Arc::clone(&self.events);
                let looked = tokio::task::spawn_blocking(move || {
                    let answer = wait.poll(&events, is_late);
                    (wait, answer)
                });
                let answer;
                (wait, answer) =
                    looked.await.map_err(|error| ApiError::internal(format!("events: {error}")))?;
                answer?
            } else {
                wait.poll(&self.events, is_late)?
            };
            if let Some(answer) = answer {
                return Ok(answer);
            }
            match wait.until() {
                Some(until) => is_late = tokio::time::timeout_at(until.into(), news.changed()).await.is_err(),
                // The database lives as long as `self`: there is always a sender.
                None => drop(news.changed().await),
            }
        }
    }

    fn reader(&self, entered: &Entered) -> Result<Reader, ApiError> {
        let session = entered.session.clone();
        let session = session.ok_or_else(|| ApiError::internal("records need a session"))?;
        Ok(Reader { db: Arc::clone(self.objects(entered)), session })
    }

    /// The database of a call: that which was opened as its session, but for sessions themselves.
    fn objects<'a>(&'a self, entered: &'a Entered) -> &'a Arc<Db> {
        let view = entered.session.as_ref().and_then(|session| session.view());
        view.filter(|_| entered.method.class.name != "session").unwrap_or(&self.db)
    }

    /// The account of a session; none for one that is not open. Root of the socket is an account of its own.
    pub fn account_of(&self, session: &str) -> Option<String> {
        let caller = self.sessions.peek(session)?.caller();
        Some(caller.account().map_or_else(String::new, str::to_owned))
    }

    fn system(&self, method: &str, params: &[Value]) -> Option<Result<Value, ApiError>> {
        match method {
            "system.listMethods" => Some(Ok(Value::strings(self.methods.names()))),
            "system.methodHelp" => {
                let name = params.last().and_then(Value::as_str).unwrap_or_default();
                let found = self.methods.get(name.strip_prefix("Async.").unwrap_or(name));
                let unknown = || ApiError::new("MESSAGE_METHOD_UNKNOWN", [name]);
                Some(found.map(|method| Value::string(method.doc)).ok_or_else(unknown))
            }
            _ => None,
        }
    }

    fn enter(&self, peer: &Peer, name: &str, mut params: Vec<Value>) -> Result<Entered, ApiError> {
        let (is_async, short) = name.strip_prefix("Async.").map_or((false, name), |short| (true, short));
        let method = self.methods.get(short).filter(|method| !is_async || method.is_async);
        let shown = || name.chars().take(200).collect::<String>();
        let method = Arc::clone(method.ok_or_else(|| ApiError::new("MESSAGE_METHOD_UNKNOWN", [shown()]))?);
        let mut session = None;
        if method.needs_session {
            if params.is_empty() {
                let expected = (method.params.len() + 1).to_string();
                let what = [name.to_owned(), expected, "0".to_owned()];
                return Err(ApiError::new("MESSAGE_PARAMETER_COUNT_MISMATCH", what));
            }
            let reference = match params.remove(0) {
                Value::String(reference) => reference,
                // What clients without a session send.
                Value::Void => return Err(ApiError::new("SESSION_INVALID", [NULL_REF])),
                _ => return Err(ApiError::new("FIELD_TYPE_ERROR", ["session_id"])),
            };
            // What the account may do is what its file says now.
            let reviewed = self.sessions.review();
            let entered = self.sessions.enter(&reference)?;
            entered.admit(reviewed)?;
            if entered.is_plugins() && !peer.superuser {
                return Err(ApiError::new("SESSION_INVALID", [reference.as_str()]));
            }
            if entered.motion().is_some() && !crate::motion::is_of_sender(&method.name) {
                return Err(roles::denied(&method.name));
            }
            roles::check(&entered.caller(), method.role, &method.name)?;
            if entered.view().is_some() && !reads(&method) {
                let why =
                    format!("{} in the session of a database that was opened: it is only read", method.name);
                return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
            }
            session = Some(entered);
        }
        let mut args = Args(check::parameters(name, &method.params, params, method.needs_session)?);
        if method.is_create {
            args = generic::prepare_create(method.class, args)?;
        }
        if method.class.name == "session"
            && let (Work::Generic(_), Some(session)) = (&method.work, &session)
        {
            // The reference of a session is enough to use it: no client looks at those of others.
            if args.text(0)? != session.reference {
                return Err(roles::denied(&method.name));
            }
            self.sessions.refresh(&session.reference);
        }
        if method.class.name == "task"
            && let (Work::Generic(kind), Some(session)) = (&method.work, &session)
            && is_change(*kind)
        {
            crate::tasks::check_owner(&self.tasks, &session.caller(), &method.name, args.text(0)?)?;
        }
        Ok(Entered { method, session, args, is_async })
    }

    fn login(&self, peer: &Peer, entered: &Entered) -> Result<Value, ApiError> {
        let (user, password) = (entered.args.text(0)?, entered.args.text(1)?);
        let originator = entered.args.0.get(3).and_then(Value::as_str).unwrap_or_default();
        self.sessions.login(peer, user, password, originator).map(Value::String)
    }

    /// A call whose client waits for it. Long ones can be seen and cancelled as tasks meanwhile.
    fn run_watched(self: &Arc<Self>, entered: &Entered) -> Result<Value, ApiError> {
        let is_seen = entered.method.is_async && matches!(entered.method.work, Work::Handler(_));
        if !is_seen {
            return self.run(entered, Arc::new(Unwatched::default()));
        }
        let owner = entered.owner();
        let task = self.tasks.begin(&entered.method.name, owner, false)?;
        let answer = self.run(entered, Arc::clone(&task) as _);
        self.tasks.drop_volatile(&task);
        answer
    }

    /// A call whose client looks at its task.
    fn begin(self: &Arc<Self>, entered: Entered) -> Result<Value, ApiError> {
        let label = format!("Async.{}", entered.method.name);
        let task = self.tasks.begin(&label, entered.owner(), true)?;
        let reference = task.task().unwrap_or_default().to_owned();
        let result = entered.method.result;
        let stack = Arc::clone(self);
        let running = Arc::clone(&task);
        let is_taken = self.tasks.workers.run(move || {
            let answer = stack.run(&entered, Arc::clone(&running) as _);
            stack.tasks.finish(&running, &answer, result);
        });
        if !is_taken {
            self.tasks.drop_volatile(&task);
            return Err(ApiError::bare("TOO_MANY_PENDING_TASKS"));
        }
        Ok(Value::String(reference))
    }

    fn run(&self, entered: &Entered, progress: Arc<dyn Progress>) -> Result<Value, ApiError> {
        let Some(session) = &entered.session else {
            return Err(ApiError::new("NOT_IMPLEMENTED", [entered.method.name.as_str()]));
        };
        // A defect in one message must not take the daemon, and the task, with it.
        let caller = session.caller();
        let done = std::panic::catch_unwind(AssertUnwindSafe(|| match &entered.method.work {
            Work::Handler(handler) => match self.pool.host_for(&caller, &entered.method, &entered.args) {
                Some(host) => {
                    if entered.method.name == "task.cancel" {
                        crate::tasks::check_owner(
                            &self.tasks,
                            &caller,
                            "task.cancel",
                            entered.args.text(0)?,
                        )?;
                    }
                    self.pool.forward(&caller, &*progress, &host, &entered.method, &entered.args)
                }
                None => handler.run(caller, progress, &entered.args),
            },
            Work::Generic(kind) => {
                generic::run(self.objects(entered), entered.method.class, *kind, &entered.args)
            }
            Work::Names => Ok(Value::strings(self.methods.names())),
            Work::Login | Work::Wait | Work::Messages | Work::Missing => {
                Err(ApiError::new("NOT_IMPLEMENTED", [entered.method.name.as_str()]))
            }
        }));
        done.unwrap_or_else(|_| {
            let name = &entered.method.name;
            tracing::error!(method = name, "a defect: the message ended in a panic");
            Err(ApiError::internal(format!("{name} ended in a defect of ours; the daemon's log has more")))
        })
    }
}

/// Messages with work of their own in the session of a database that was opened.
const OF_VIEWS: [&str; 7] = [
    "session.logout",
    "VM.recover",
    "VM.assert_can_be_recovered",
    "VM.get_SRs_required_for_recovery",
    "VM_appliance.recover",
    "VM_appliance.assert_can_be_recovered",
    "VM_appliance.get_SRs_required_for_recovery",
];

/// Whether a message may come in the session of a database that was opened.
fn reads(method: &Method) -> bool {
    match &method.work {
        Work::Generic(kind) => !is_change(*kind) && !matches!(kind, ImpliedKind::Create),
        Work::Handler(_) => OF_VIEWS.contains(&method.name.as_str()),
        _ => false,
    }
}

/// Whether a message of the table changes the object it is sent to.
const fn is_change(kind: ImpliedKind) -> bool {
    use ImpliedKind::{Add, AddTo, Destroy, Remove, RemoveFrom, Set};
    matches!(kind, Add(_) | AddTo(_) | Destroy | Remove(_) | RemoveFrom(_) | Set(_))
}

fn begin_wait(entered: &Entered) -> Result<Wait, ApiError> {
    let session = entered.session.clone();
    let session = session.ok_or_else(|| ApiError::internal("events need a session"))?;
    Wait::new(session, &entered.method.name, &entered.args)
}
