//! How sessions begin: of clients that log in, of storage plugins, for motions of VMs, of databases that were opened.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use parking_lot::Mutex;
use tapio_model::{ApiError, Role, Value};

use super::{MOTION_LOGIN, Session, Sessions};
use crate::accounts::{Credential, Login, Peer, refused};
use crate::basics::this_host;
use crate::caller::Caller;
use crate::db::Db;
use crate::{dates, roles};

/// Sessions of one account; the one that was idle longest makes room.
const PER_USER_MAX: usize = 500;

/// Sessions in all.
const ALL_MAX: usize = 4_000;

/// Databases that are open at a time: each is in memory.
const VIEWS_MAX: usize = 4;

/// Whom the sessions of storage plugins belong to.
const PLUGIN: &str = "storage-plugin";

/// Longest name, password or originator that is looked at, in bytes.
const TEXT_MAX: usize = 1024;

/// What a session is for.
#[derive(Debug)]
pub(super) enum Use {
    /// A client's calls.
    Client,
    /// Those of a storage plugin, to which it was given on a command line that every user of this host reads.
    Plugin,
    /// The steps of this motion of a VM alone, by the host that sends.
    Motion(String),
    /// Reading this database instead of the toolstack's.
    View(Arc<Db>),
}

/// A session that begins.
struct Opening<'a> {
    user: &'a str,
    role: Role,
    /// By what it is opened; none where no account stands for it.
    credential: Option<Credential>,
    originator: &'a str,
    of: Use,
}

impl Sessions {
    /// Logs in.
    ///
    /// # Errors
    /// What the accounts say.
    pub fn login(
        &self,
        peer: &Peer,
        user: &str,
        password: &str,
        originator: &str,
    ) -> Result<String, ApiError> {
        if [user, password, originator].iter().any(|text| text.len() > TEXT_MAX) {
            return Err(refused(&user.chars().take(64).collect::<String>()));
        }
        if let (Some(motion), Some(gate)) = (user.strip_prefix(MOTION_LOGIN), self.gate.get()) {
            gate(motion, password, peer)?;
            let (role, of) = (Role::VmAdmin, Use::Motion(motion.to_owned()));
            return self.open(Opening { user, role, credential: None, originator: user, of });
        }
        let elsewhere = self.elsewhere.lock().clone();
        if let Some(address) = elsewhere.filter(|_| !peer.superuser) {
            return Err(ApiError::new("HOST_IS_SLAVE", [address]));
        }
        // Read before the password is checked: an account that changes meanwhile is looked at once more below.
        let before = self.accounts.generation();
        let (user, role, credential) = if peer.superuser {
            (if user.is_empty() { "root" } else { user }, Role::PoolAdmin, None)
        } else {
            let Login { role, credential } = self.accounts.authenticate(user, password, peer)?;
            (user, role, Some(credential))
        };
        let reference = self.open(Opening { user, role, credential, originator, of: Use::Client })?;
        if credential.is_some() && self.accounts.generation() != before {
            self.review_again()?;
            if !self.all.lock().contains_key(&reference) {
                return Err(refused(user));
            }
        }
        Ok(reference)
    }

    /// A session for a storage plugin, with the rights of the toolstack; its opener ends it.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn open_for_plugin(&self) -> Result<String, ApiError> {
        let (user, role) = (PLUGIN, Role::PoolAdmin);
        self.open(Opening { user, role, credential: None, originator: user, of: Use::Plugin })
    }

    /// A session of a caller that reads another database.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn open_view(&self, caller: &Caller, view: Arc<Db>) -> Result<String, ApiError> {
        self.open(Opening {
            user: &caller.user,
            role: caller.role,
            credential: caller.credential,
            originator: "VDI.open_database",
            of: Use::View(view),
        })
    }

    /// Makes the record and the session. One that was idle longest makes room where there are too many of its kind.
    fn open(&self, opening: Opening<'_>) -> Result<String, ApiError> {
        let Opening { user, role, credential, originator, of } = opening;
        let now = dates::now();
        let is_superuser = credential.is_none() && !matches!(of, Use::Motion(_));
        let reference = self.db.create(
            "session",
            &[
                ("this_host", Value::string(this_host(&self.db))),
                ("last_active", Value::DateTime(now)),
                ("validation_time", Value::DateTime(now)),
                ("is_local_superuser", is_superuser.into()),
                ("auth_user_name", user.into()),
                ("originator", originator.into()),
                ("rbac_permissions", Value::Set(vec![role.name().into()])),
            ],
        )?;
        let session = Session {
            reference: reference.clone(),
            user: user.to_owned(),
            role: AtomicU8::new(roles::rank(role)),
            credential: Mutex::new(credential),
            used_ms: AtomicU64::new(self.now_ms()),
            used_at: AtomicU64::new(u64::try_from(now).unwrap_or_default()),
            is_over: AtomicBool::new(false),
            has_expired: AtomicBool::new(false),
            is_revoked: AtomicBool::new(false),
            of,
            registration: Mutex::default(),
        };
        let crowded = {
            let mut all = self.all.lock();
            let crowded = crowded(&all, &session);
            all.insert(reference.clone(), Arc::new(session));
            crowded
        };
        if let Some(oldest) = crowded {
            tracing::warn!(user, "too many sessions are open: the one that was idle longest ends");
            self.end(&oldest);
        }
        Ok(reference)
    }
}

/// The session that must go so that there can be another one. The toolstack's own need room at any time.
fn crowded(all: &HashMap<String, Arc<Session>>, new: &Session) -> Option<String> {
    let count = |of: &dyn Fn(&Session) -> bool| all.values().filter(|session| of(session)).count();
    let is_view = |session: &Session| session.view().is_some();
    let is_users = |session: &Session| session.user == new.user;
    let is_candidate: &dyn Fn(&Session) -> bool = match new.of {
        Use::Plugin | Use::Motion(_) => return None,
        Use::View(_) if count(&is_view) >= VIEWS_MAX => &is_view,
        _ if all.len() >= ALL_MAX => &|_| true,
        _ if count(&is_users) >= PER_USER_MAX => &is_users,
        _ => return None,
    };
    let candidates = all.values().filter(|session| is_candidate(session));
    let oldest = candidates.min_by_key(|session| session.used_ms.load(Ordering::Relaxed));
    oldest.map(|session| session.reference.clone())
}
