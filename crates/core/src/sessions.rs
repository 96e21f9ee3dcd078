//! Who is logged in.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tapio_model::{ApiError, NULL_REF, Role, Value};

use crate::call::{Call, Caller, Handlers};
use crate::dates;
use crate::db::Db;
use crate::events::Registration;

/// A session ends after so long without a call.
const IDLE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Sessions of one account; the one that was idle longest makes room.
const PER_USER_MAX: usize = 500;

/// Sessions in all.
const ALL_MAX: usize = 4_000;

/// Longest name, password or originator that is looked at, in bytes.
const TEXT_MAX: usize = 1024;

/// The other end of a connection.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Whether it is root on the UNIX socket: it needs no password.
    pub superuser: bool,
    /// As `192.0.2.1` or `unix:uid=1000`; for logs and delays.
    pub address: String,
}

/// Accounts that may log in.
pub trait Accounts: Send + Sync {
    /// Whose password this is, and what the account may do.
    ///
    /// # Errors
    /// `SESSION_AUTHENTICATION_FAILED`, `SESSION_AUTHORIZATION_FAILED` for an account without a role.
    fn authenticate(&self, user: &str, password: &str, peer: &Peer) -> Result<Role, ApiError>;

    /// Changes an account's password.
    ///
    /// # Errors
    /// `SESSION_AUTHENTICATION_FAILED` for a wrong old one, or why the new one is not taken.
    fn change_password(&self, user: &str, old: &str, new: &str) -> Result<(), ApiError>;
}

/// No accounts: only superusers get in.
#[derive(Clone, Copy, Debug)]
pub struct NoAccounts;

impl Accounts for NoAccounts {
    fn authenticate(&self, user: &str, _: &str, _: &Peer) -> Result<Role, ApiError> {
        Err(refused(user))
    }

    fn change_password(&self, user: &str, _: &str, _: &str) -> Result<(), ApiError> {
        Err(refused(user))
    }
}

fn refused(user: &str) -> ApiError {
    ApiError::new("SESSION_AUTHENTICATION_FAILED", [user, "the name or the password is wrong"])
}

/// One session.
#[derive(Debug)]
pub struct Session {
    /// Who calls with it.
    pub caller: Caller,
    is_superuser: bool,
    /// The last call, in milliseconds since the first session could be.
    used_ms: AtomicU64,
    /// The same as a date.
    used_at: AtomicU64,
    is_over: AtomicBool,
    /// What `event.next` waits for.
    pub(crate) registration: Mutex<Option<Registration>>,
}

impl Session {
    /// Whether it was logged out: calls that wait for events end.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

/// Sessions, and the accounts they belong to.
pub struct Sessions {
    accounts: Box<dyn Accounts>,
    began: Instant,
    idle_max_ms: AtomicU64,
    all: Mutex<HashMap<String, Arc<Session>>>,
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").finish_non_exhaustive()
    }
}

impl Sessions {
    /// Nobody is logged in yet.
    pub fn new(accounts: Box<dyn Accounts>) -> Self {
        let sessions =
            Self { accounts, began: Instant::now(), idle_max_ms: AtomicU64::new(0), all: Mutex::default() };
        sessions.set_idle_limit(IDLE_MAX);
        sessions
    }

    /// Sessions end after so long without a call.
    pub fn set_idle_limit(&self, limit: Duration) {
        let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.idle_max_ms.store(limit, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.lock().len()
    }

    /// The session of a call that begins now.
    ///
    /// # Errors
    /// `SESSION_INVALID`.
    pub fn enter(&self, db: &Db, reference: &str) -> Result<Arc<Session>, ApiError> {
        let found = self.lock().get(reference).cloned();
        let session = found.ok_or_else(|| ApiError::new("SESSION_INVALID", [reference]))?;
        if self.is_idle(&session) {
            self.end(db, reference);
            return Err(ApiError::new("SESSION_INVALID", [reference]));
        }
        session.used_ms.store(self.now_ms(), Ordering::Relaxed);
        session.used_at.store(u64::try_from(dates::now()).unwrap_or_default(), Ordering::Relaxed);
        Ok(session)
    }

    /// Logs in.
    ///
    /// # Errors
    /// What the accounts say.
    pub fn login(
        &self,
        db: &Db,
        peer: &Peer,
        user: &str,
        password: &str,
        originator: &str,
    ) -> Result<String, ApiError> {
        if [user, password, originator].iter().any(|text| text.len() > TEXT_MAX) {
            return Err(refused(&user.chars().take(64).collect::<String>()));
        }
        let (user, role) = if peer.superuser {
            (if user.is_empty() { "root" } else { user }, Role::PoolAdmin)
        } else {
            (user, self.accounts.authenticate(user, password, peer)?)
        };
        let host = db.all("host").first().map_or_else(|| NULL_REF.to_owned(), |host| host.reference.clone());
        let now = dates::now();
        let reference = db.create(
            "session",
            &[
                ("this_host", Value::string(host)),
                ("last_active", Value::DateTime(now)),
                ("validation_time", Value::DateTime(now)),
                ("is_local_superuser", peer.superuser.into()),
                ("auth_user_name", user.into()),
                ("originator", originator.into()),
            ],
        )?;
        let session = Arc::new(Session {
            caller: Caller { session: reference.clone(), role, user: user.to_owned() },
            is_superuser: peer.superuser,
            used_ms: AtomicU64::new(self.now_ms()),
            used_at: AtomicU64::new(u64::try_from(now).unwrap_or_default()),
            is_over: AtomicBool::new(false),
            registration: Mutex::default(),
        });
        let crowded = {
            let mut all = self.lock();
            let crowded = crowded(&all, user);
            all.insert(reference.clone(), session);
            crowded
        };
        if let Some(oldest) = crowded {
            tracing::warn!(user, "too many sessions: the one that was idle longest ends");
            self.end(db, &oldest);
        }
        Ok(reference)
    }

    /// Ends a session; those who wait for events by it are released.
    pub fn end(&self, db: &Db, reference: &str) {
        let Some(session) = self.lock().remove(reference) else { return };
        session.is_over.store(true, Ordering::Release);
        // A session without its object is no error: the object is for display.
        let _ = db.destroy("session", reference);
        db.announce();
    }

    /// Ends sessions that nobody used for too long. A call that is under way ends as if nothing had happened.
    pub fn expire(&self, db: &Db) {
        let idle: Vec<String> = {
            let mut all = self.lock();
            let idle = all.iter().filter(|(_, session)| self.is_idle(session));
            let idle: Vec<String> = idle.map(|(reference, _)| reference.clone()).collect();
            for reference in &idle {
                all.remove(reference);
            }
            idle
        };
        for reference in idle {
            let _ = db.destroy("session", &reference);
        }
    }

    /// Writes when it was used last into the object of a session, which somebody is about to look at.
    pub(crate) fn refresh(&self, db: &Db, reference: &str) {
        let Some(session) = self.lock().get(reference).cloned() else { return };
        let used = i64::try_from(session.used_at.load(Ordering::Relaxed)).unwrap_or_default();
        let _ = db.set("session", reference, "last_active", Value::DateTime(used));
    }
}

/// The session that must go so that `user` can have another one.
fn crowded(all: &HashMap<String, Arc<Session>>, user: &str) -> Option<String> {
    let of_user = all.values().filter(|session| session.caller.user == user).count();
    let is_candidate = |session: &&Arc<Session>| {
        all.len() >= ALL_MAX || (of_user >= PER_USER_MAX && session.caller.user == user)
    };
    let oldest =
        all.values().filter(is_candidate).min_by_key(|session| session.used_ms.load(Ordering::Relaxed));
    oldest.map(|session| session.caller.session.clone())
}

/// Registers the messages of sessions; logins are the dispatcher's.
pub(crate) fn register(handlers: &mut Handlers) {
    handlers.on("session.logout", |call, _| logout(call));
    handlers.on("session.local_logout", |call, _| logout(call));
    handlers.on("session.change_password", |call, args| {
        let (old, new) = (args.text(0)?, args.text(1)?);
        call.stack.sessions.accounts.change_password(&call.caller.user, old, new)?;
        Ok(Value::Void)
    });
    handlers.on("session.get_all_subject_identifiers", |call, _| {
        let all = call.stack.sessions.lock();
        let mut names: Vec<&str> = all
            .values()
            .filter(|session| !session.is_superuser)
            .map(|session| session.caller.user.as_str())
            .collect();
        names.sort_unstable();
        names.dedup();
        Ok(Value::strings(names))
    });
    handlers.on("session.logout_subject_identifier", |call, args| {
        let user = args.text(0)?;
        let theirs: Vec<String> = {
            let all = call.stack.sessions.lock();
            let theirs =
                all.iter().filter(|(_, session)| session.caller.user == user && !session.is_superuser);
            theirs.map(|(reference, _)| reference.clone()).collect()
        };
        for reference in theirs {
            call.stack.sessions.end(&call.stack.db, &reference);
        }
        Ok(Value::Void)
    });
}

fn logout(call: &Call) -> Result<Value, ApiError> {
    call.stack.sessions.end(&call.stack.db, &call.caller.session);
    Ok(Value::Void)
}
