//! From a message's name to who does it.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use tapio_model::{Answer, ApiError, Class, ImpliedKind, Initial, NULL_REF, Role, Type, Value};

use crate::accounts::Peer;
use crate::answers::Reader;
use crate::args::Args;
use crate::call::{Call, Handler, Handlers};
use crate::events::Wait;
use crate::progress::Unwatched;
use crate::sessions::Session;
use crate::tasks::Owner;
use crate::{Toolstack, check, generic, roles};

/// Who does it.
#[derive(Clone, Copy, Debug)]
enum Doer {
    /// A handler.
    Handler(Handler),
    /// The table itself.
    Generic(ImpliedKind),
    /// The dispatcher: logins.
    Login,
    /// The dispatcher: waits for events.
    Wait,
    /// The dispatcher: records of messages.
    Messages,
    /// Nobody yet.
    Nobody,
}

/// One message.
#[derive(Debug)]
pub(crate) struct Method {
    /// As `VDI.snapshot`.
    pub(crate) name: String,
    pub(crate) class: &'static Class,
    doer: Doer,
    role: Role,
    is_async: bool,
    /// Whether its one parameter is the record of a new object.
    is_create: bool,
    needs_session: bool,
    params: Vec<(&'static str, Type, Option<Initial>)>,
    result: Type,
    doc: &'static str,
}

impl Method {
    /// Whether it does anything to what a start puts in order. What only looks, and sessions, tasks and events, do not.
    fn changes(&self) -> bool {
        let looks = |word: &str| word.starts_with("get_") || word.starts_with("assert_");
        match self.doer {
            Doer::Login | Doer::Wait | Doer::Messages | Doer::Nobody => false,
            Doer::Generic(_) | Doer::Handler(_) => {
                let word = self.name.split_once('.').map_or("", |(_, word)| word);
                !looks(word) && !matches!(self.class.name, "session" | "task" | "event")
            }
        }
    }
}

/// All messages by name.
#[derive(Debug)]
pub struct Methods(BTreeMap<String, Arc<Method>>);

impl Methods {
    /// The messages of the object table, done by these handlers where they are registered.
    pub fn new(handlers: &Handlers) -> Self {
        let mut methods = BTreeMap::new();
        for class in tapio_model::CLASSES {
            for message in class.messages {
                let name = format!("{}.{}", class.name, message.name);
                let method = Method {
                    doer: doer_of(handlers, &name, || setter_of(class, message.name)),
                    class,
                    role: message.role,
                    is_async: message.is_async,
                    is_create: false,
                    needs_session: message.needs_session,
                    params: message
                        .params
                        .iter()
                        .map(|param| (param.name, param.ty, param.default))
                        .collect(),
                    result: message.result,
                    doc: message.doc,
                    name: name.clone(),
                };
                methods.insert(name, Arc::new(method));
            }
            for message in tapio_model::implied(class) {
                let name = format!("{}.{}", class.name, message.name);
                let (params, result, doc) = generic::shape(class, message.kind);
                let method = Method {
                    doer: doer_of(handlers, &name, || Some(message.kind)),
                    class,
                    role: message.role,
                    is_async: matches!(message.kind, ImpliedKind::Create | ImpliedKind::Destroy),
                    is_create: matches!(message.kind, ImpliedKind::Create),
                    needs_session: true,
                    params,
                    result,
                    doc,
                    name: name.clone(),
                };
                methods.insert(name, Arc::new(method));
            }
        }
        Self(methods)
    }

    /// Names of handlers that no message of the table has: nobody could ever call them.
    pub fn unreachable<'a>(&self, handlers: &'a Handlers) -> Vec<&'a str> {
        handlers.0.keys().filter(|name| !self.0.contains_key(**name)).copied().collect()
    }

    /// Names of messages that nobody does.
    pub fn undone(&self) -> Vec<&str> {
        let undone = self.0.values().filter(|method| matches!(method.doer, Doer::Nobody));
        undone.map(|method| method.name.as_str()).collect()
    }

    /// Names of all messages, with `Async.` and `system.`, in order. What nobody does is not among them.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = ["system.listMethods", "system.methodHelp"].map(str::to_owned).to_vec();
        for method in self.0.values().filter(|method| !matches!(method.doer, Doer::Nobody)) {
            names.push(method.name.clone());
            if method.is_async {
                names.push(format!("Async.{}", method.name));
            }
        }
        names.sort();
        names
    }

    fn get(&self, name: &str) -> Option<&Arc<Method>> {
        self.0.get(name)
    }
}

fn doer_of(handlers: &Handlers, name: &str, generic: impl Fn() -> Option<ImpliedKind>) -> Doer {
    match name {
        "session.login_with_password" | "session.slave_local_login_with_password" => Doer::Login,
        "event.from" | "event.next" => Doer::Wait,
        "message.get" | "message.get_since" => Doer::Messages,
        _ => match handlers.0.get(name) {
            Some(handler) => Doer::Handler(*handler),
            None => generic().map_or(Doer::Nobody, Doer::Generic),
        },
    }
}

/// What a message without a handler does where its name is that of a getter or setter of a field that has none of
/// its own.
fn setter_of(class: &'static Class, message: &str) -> Option<ImpliedKind> {
    type Make = fn(&'static tapio_model::Field) -> ImpliedKind;
    let kinds: [(&str, Make); 6] = [
        ("add_to_", ImpliedKind::AddTo),
        ("remove_from_", ImpliedKind::RemoveFrom),
        ("set_", ImpliedKind::Set),
        ("add_", ImpliedKind::Add),
        ("remove_", ImpliedKind::Remove),
        ("get_", ImpliedKind::Get),
    ];
    let found = kinds.iter().find_map(|(prefix, make)| {
        let field = class.field(message.strip_prefix(prefix)?)?;
        Some(make(field))
    })?;
    let declared = class.message(message)?.params.len();
    (declared == generic::shape(class, found).0.len()).then_some(found)
}

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
        Owner {
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
        let entered = self.enter(method, params)?;
        if entered.method.changes() {
            self.wait_until_recovered();
        }
        match entered.method.doer {
            Doer::Login => self.login(peer, &entered).map(Answer::Whole),
            Doer::Messages => {
                let found = crate::basics::messages::found(self, &entered.args)?;
                self.reader(&entered)?.records(found)
            }
            Doer::Wait => {
                let mut wait = begin_wait(&entered)?;
                loop {
                    let before = self.db.generation();
                    let is_late = wait.until().is_some_and(|until| until <= std::time::Instant::now());
                    if let Some(answer) = wait.poll(self, is_late)? {
                        return Ok(answer);
                    }
                    // A logout that comes between the look and the wait is seen a moment later.
                    let soon = std::time::Instant::now() + std::time::Duration::from_secs(1);
                    self.db.wait(before, wait.until().map_or(soon, |until| until.min(soon)));
                }
            }
            _ if entered.is_async => self.begin(entered).map(Answer::Whole),
            Doer::Generic(kind) => {
                let read = self.reader(&entered)?.read(entered.method.class, kind, &entered.args);
                read.unwrap_or_else(|| self.run_watched(&entered).map(Answer::Whole))
            }
            _ => self.run_watched(&entered).map(Answer::Whole),
        }
    }

    /// A call of a message that [`Self::waits`], without a thread while it waits. Whoever drops it ends the wait.
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
        let entered = self.enter(&method, params)?;
        let mut wait = begin_wait(&entered)?;
        let mut news = self.db.watch();
        let mut is_late = false;
        loop {
            news.mark_unchanged();
            let answer = if wait.is_large() {
                // Those who ask for everything take turns, so that they leave the processors to others.
                let _turn = self.looks.acquire().await;
                let stack = Arc::clone(&self);
                let looked = tokio::task::spawn_blocking(move || {
                    let answer = wait.poll(&stack, is_late);
                    (wait, answer)
                });
                let answer;
                (wait, answer) =
                    looked.await.map_err(|error| ApiError::internal(format!("events: {error}")))?;
                answer?
            } else {
                wait.poll(&self, is_late)?
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

    fn reader(self: &Arc<Self>, entered: &Entered) -> Result<Reader, ApiError> {
        let session = entered.session.clone();
        let session = session.ok_or_else(|| ApiError::internal("records need a session"))?;
        Ok(Reader { stack: Arc::clone(self), session })
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

    fn enter(&self, name: &str, mut params: Vec<Value>) -> Result<Entered, ApiError> {
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
            let reviewed = self.sessions.review(self);
            let entered = self.sessions.enter(&self.db, &reference)?;
            entered.admit(reviewed)?;
            roles::check(&entered.caller(), method.role, &method.name)?;
            session = Some(entered);
        }
        let mut args = Args(check::parameters(name, &method.params, params, method.needs_session)?);
        if method.is_create {
            args = generic::prepare_create(method.class, args)?;
        }
        if method.class.name == "session"
            && let (Doer::Generic(_), Some(session)) = (method.doer, &session)
        {
            // Whoever knows the reference of a session can use it: nobody looks at those of others.
            if args.text(0)? != session.reference {
                return Err(roles::denied(&method.name));
            }
            self.sessions.refresh(&self.db, &session.reference);
        }
        if method.class.name == "task"
            && let (Doer::Generic(kind), Some(session)) = (method.doer, &session)
            && is_change(kind)
        {
            crate::tasks::check_owner(self, &session.caller(), &method.name, args.text(0)?)?;
        }
        Ok(Entered { method, session, args, is_async })
    }

    fn login(&self, peer: &Peer, entered: &Entered) -> Result<Value, ApiError> {
        let (user, password) = (entered.args.text(0)?, entered.args.text(1)?);
        let originator = entered.args.0.get(3).and_then(Value::as_str).unwrap_or_default();
        self.sessions.login(self, peer, user, password, originator).map(Value::String)
    }

    /// A call whose client waits for it. Long ones can be seen and cancelled as tasks meanwhile.
    fn run_watched(self: &Arc<Self>, entered: &Entered) -> Result<Value, ApiError> {
        let is_seen = entered.method.is_async && matches!(entered.method.doer, Doer::Handler(_));
        if !is_seen {
            return self.run(entered, Arc::new(Unwatched::default()));
        }
        let owner = entered.owner();
        let task = self.tasks.begin(self, &entered.method.name, owner, false)?;
        let answer = self.run(entered, Arc::clone(&task) as _);
        self.tasks.drop_volatile(self, &task);
        answer
    }

    /// A call whose client looks at its task.
    fn begin(self: &Arc<Self>, entered: Entered) -> Result<Value, ApiError> {
        let label = format!("Async.{}", entered.method.name);
        let task = self.tasks.begin(self, &label, entered.owner(), true)?;
        let reference = crate::call::Progress::task(&*task).unwrap_or_default().to_owned();
        let result = entered.method.result;
        let stack = Arc::clone(self);
        let running = Arc::clone(&task);
        let is_taken = self.tasks.workers.run(move || {
            let answer = stack.run(&entered, Arc::clone(&running) as _);
            stack.tasks.finish(&stack, &running, &answer, result);
        });
        if !is_taken {
            self.tasks.drop_volatile(self, &task);
            return Err(ApiError::bare("TOO_MANY_PENDING_TASKS"));
        }
        Ok(Value::String(reference))
    }

    fn run(
        self: &Arc<Self>,
        entered: &Entered,
        progress: Arc<dyn crate::call::Progress>,
    ) -> Result<Value, ApiError> {
        let Some(session) = &entered.session else {
            return Err(ApiError::new("NOT_IMPLEMENTED", [entered.method.name.as_str()]));
        };
        let call = Call { stack: Arc::clone(self), caller: session.caller(), progress, made_for: None };
        // A defect in one message must not take the daemon, and the task, with it.
        let done = std::panic::catch_unwind(AssertUnwindSafe(|| match entered.method.doer {
            Doer::Handler(handler) => handler(&call, &entered.args),
            Doer::Generic(kind) => generic::run(&call.stack.db, entered.method.class, kind, &entered.args),
            Doer::Login | Doer::Wait | Doer::Messages | Doer::Nobody => {
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
