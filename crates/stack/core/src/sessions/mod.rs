//! Sessions: accounts that are logged in.

mod lent;
mod open;
mod review;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_model::{ApiError, Role, Value};

use crate::accounts::{Accounts, Credential, Peer};
use crate::call::{Call, Handlers};
use crate::caller::Caller;
use crate::db::Db;
use crate::subscriptions::Registration;
use crate::tasks::Tasks;
use crate::{dates, roles};

use open::Use;

/// A session ends after so long without a call.
const IDLE_MAX: Duration = Duration::from_secs(24 * 3600);

/// One session.
#[derive(Debug)]
pub struct Session {
    /// Its reference.
    pub reference: String,
    /// Its account.
    pub user: String,
    /// What it may do now: the file of accounts may change while it is open.
    role: AtomicU8,
    /// By what it was opened; none for the local superuser, which no account stands for.
    credential: Mutex<Option<Credential>>,
    /// The last call, in milliseconds since the first session could be.
    used_ms: AtomicU64,
    /// The same as a date.
    used_at: AtomicU64,
    is_over: AtomicBool,
    /// It was not used for too long. Calls in progress go on.
    has_expired: AtomicBool,
    /// It was ended because its account is gone or has another password.
    is_revoked: AtomicBool,
    /// What it is for.
    of: Use,
    /// What `event.next` waits for.
    pub(crate) registration: Mutex<Option<Registration>>,
}

impl Session {
    /// Whether it was logged out, or lost its account: calls that wait for events end.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Whether no call can begin in it any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_over() || self.has_expired.load(Ordering::Acquire)
    }

    /// Whether it lost its account.
    pub(crate) fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::Acquire)
    }

    /// Whether it was given to a storage plugin: it is good for root at a UNIX socket alone.
    pub(crate) fn is_plugins(&self) -> bool {
        matches!(self.of, Use::Plugin)
    }

    /// The motion of a VM that it is for.
    pub(crate) fn motion(&self) -> Option<&str> {
        match &self.of {
            Use::Motion(motion) => Some(motion),
            _ => None,
        }
    }

    /// The database that was opened as it.
    pub(crate) fn view(&self) -> Option<&Arc<Db>> {
        match &self.of {
            Use::View(view) => Some(view),
            _ => None,
        }
    }

    /// What it may do now.
    pub fn role(&self) -> Role {
        roles::from_rank(self.role.load(Ordering::Acquire))
    }

    /// The caller that it stands for now.
    pub fn caller(&self) -> Caller {
        Caller {
            session: self.reference.clone(),
            role: self.role(),
            user: self.user.clone(),
            credential: self.credential(),
        }
    }

    /// By what it was opened; none for the local superuser.
    pub(crate) fn credential(&self) -> Option<Credential> {
        *self.credential.lock()
    }

    /// Whether it may go on after a review that came to this: an account may not while nothing is known of it, the
    /// local superuser always may.
    pub(crate) fn admit(&self, reviewed: Result<(), ApiError>) -> Result<(), ApiError> {
        if self.is_superuser() { Ok(()) } else { reviewed }
    }

    fn is_superuser(&self) -> bool {
        self.credential().is_none()
    }
}

/// Sessions, and the accounts they belong to.
pub struct Sessions {
    accounts: Box<dyn Accounts>,
    /// The address of the host that clients have to log in at; none: this one.
    elsewhere: Mutex<Option<String>>,
    db: Arc<Db>,
    /// What runs for an account that may not do it any more is cancelled.
    tasks: Arc<Tasks>,
    began: Instant,
    idle_max_ms: AtomicU64,
    all: Mutex<HashMap<String, Arc<Session>>>,
    /// The generation of the accounts that all sessions were held against last.
    reviewed: AtomicU64,
    /// One review at a time, and no password changes meanwhile.
    reviewing: Mutex<()>,
    /// Called after sessions have ended or have another role.
    changed: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Checks logins of hosts that send VMs.
    gate: OnceLock<Gate>,
    /// Clients that other hosts of the pool send here.
    pub(crate) lent: lent::LentNames,
}

/// Checks the login for a motion: its name, the secret, and the peer.
pub(crate) type Gate = Box<dyn Fn(&str, &str, &Peer) -> Result<(), ApiError> + Send + Sync>;

/// The name under which a host that sends a VM logs in begins so; what follows is the motion's.
pub(crate) const MOTION_LOGIN: &str = "motion/";

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").finish_non_exhaustive()
    }
}

impl Sessions {
    /// None is open yet.
    pub(crate) fn new(accounts: Box<dyn Accounts>, db: &Arc<Db>, tasks: &Arc<Tasks>) -> Self {
        let reviewed = AtomicU64::new(accounts.generation());
        let sessions = Self {
            accounts,
            elsewhere: Mutex::default(),
            db: Arc::clone(db),
            tasks: Arc::clone(tasks),
            began: Instant::now(),
            idle_max_ms: AtomicU64::new(0),
            all: Mutex::default(),
            reviewed,
            reviewing: Mutex::default(),
            changed: OnceLock::new(),
            gate: OnceLock::new(),
            lent: lent::LentNames::default(),
        };
        sessions.set_idle_limit(IDLE_MAX);
        sessions
    }

    /// Clients have to log in at this address instead; none: here. Root of this host, and other hosts of the pool, log
    /// in everywhere.
    pub(crate) fn send_to(&self, address: Option<String>) {
        *self.elsewhere.lock() = address;
    }

    /// Sessions end after so long without a call.
    pub fn set_idle_limit(&self, limit: Duration) {
        let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.idle_max_ms.store(limit, Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn is_idle(&self, session: &Session) -> bool {
        let idle = self.now_ms().saturating_sub(session.used_ms.load(Ordering::Relaxed));
        idle > self.idle_max_ms.load(Ordering::Relaxed)
    }

    /// How many are logged in.
    pub fn count(&self) -> usize {
        self.all.lock().len()
    }

    /// The session of a call that begins now.
    ///
    /// # Errors
    /// `SESSION_INVALID`.
    pub fn enter(&self, reference: &str) -> Result<Arc<Session>, ApiError> {
        let found = self.all.lock().get(reference).cloned();
        let session = found.ok_or_else(|| ApiError::new("SESSION_INVALID", [reference]))?;
        if self.is_idle(&session) {
            self.end(reference);
            return Err(ApiError::new("SESSION_INVALID", [reference]));
        }
        session.used_ms.store(self.now_ms(), Ordering::Relaxed);
        session.used_at.store(u64::try_from(dates::now()).unwrap_or_default(), Ordering::Relaxed);
        Ok(session)
    }

    /// A session, without using it.
    pub(crate) fn peek(&self, reference: &str) -> Option<Arc<Session>> {
        self.all.lock().get(reference).cloned()
    }

    /// Logins for motions of VMs are checked so.
    pub(crate) fn admit_motions(&self, gate: Gate) {
        // Set once, when the parts are put together.
        let _ = self.gate.set(gate);
    }

    /// Ends a session; calls that wait for events by it end.
    pub fn end(&self, reference: &str) {
        let Some(session) = self.all.lock().remove(reference) else { return };
        session.is_over.store(true, Ordering::Release);
        // A session without its object is no error: the object is for display.
        let _ = self.db.destroy("session", reference);
        self.db.announce();
        self.have_changed();
    }

    /// `work` is done whenever sessions have ended or have another role.
    pub(crate) fn on_change(&self, work: Box<dyn Fn() + Send + Sync>) {
        // Set once, when the parts are put together.
        let _ = self.changed.set(work);
    }

    fn have_changed(&self) {
        if let Some(work) = self.changed.get() {
            work();
        }
    }

    /// Ends sessions that were not used for too long. A call that is in progress ends as if nothing had happened.
    pub fn expire(&self) {
        let idle: Vec<String> = {
            let mut all = self.all.lock();
            let idle = all.iter().filter(|(_, session)| self.is_idle(session));
            let idle: Vec<String> = idle.map(|(reference, _)| reference.clone()).collect();
            for reference in &idle {
                if let Some(session) = all.remove(reference) {
                    session.has_expired.store(true, Ordering::Release);
                }
            }
            idle
        };
        let is_any = !idle.is_empty();
        for reference in idle {
            let _ = self.db.destroy("session", &reference);
        }
        if is_any {
            self.have_changed();
        }
    }

    /// Writes when it was used last into the object of a session, which a client is about to read.
    pub(crate) fn refresh(&self, reference: &str) {
        let Some(session) = self.all.lock().get(reference).cloned() else { return };
        let used = i64::try_from(session.used_at.load(Ordering::Relaxed)).unwrap_or_default();
        let _ = self.db.set("session", reference, "last_active", Value::DateTime(used));
    }
}

/// Registers the messages of sessions; logins are the dispatcher's.
pub(crate) fn register(handlers: &mut Handlers, sessions: &Arc<Sessions>) {
    let mut handlers = handlers.of(sessions);
    handlers.on("session.logout", |call, _| logout(call));
    handlers.on("session.local_logout", |call, _| logout(call));
    handlers.on("session.change_password", |call, args| {
        let (old, new) = (args.text(0)?, args.text(1)?);
        call.part.change_password(&call.caller, old, new)?;
        Ok(Value::Void)
    });
    handlers.on("session.get_all_subject_identifiers", |call, _| {
        let all = call.part.all.lock();
        let mut names: Vec<&str> = all
            .values()
            .filter(|session| !session.is_superuser())
            .map(|session| session.user.as_str())
            .collect();
        names.sort_unstable();
        names.dedup();
        Ok(Value::strings(names))
    });
    handlers.on("session.logout_subject_identifier", |call, args| {
        let user = args.text(0)?;
        let theirs: Vec<String> = {
            let all = call.part.all.lock();
            let theirs = all.iter().filter(|(_, session)| session.user == user && !session.is_superuser());
            theirs.map(|(reference, _)| reference.clone()).collect()
        };
        for reference in theirs {
            call.part.end(&reference);
        }
        Ok(Value::Void)
    });
}

fn logout(call: &Call<Sessions>) -> Result<Value, ApiError> {
    call.part.end(&call.caller.session);
    Ok(Value::Void)
}
