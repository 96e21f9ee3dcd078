//! Several hosts that share their objects: who belongs to them, who decides, who does which call.
//!
//! The objects are in etcd. Each host has a copy that follows it, and writes by compare-and-set. A host holds a key by
//! a lease: as long as it does it may write. One of them holds the key of the coordinator. Clients log in there, and a
//! call that concerns another host is done by that one.

mod access;
pub(crate) mod apart;
mod certificates;
mod eject;
mod elsewhere;
mod forward;
mod import;
mod join;
mod link;
mod master;
mod membership;
mod route;
mod srs;
pub(crate) mod version;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use tapio_model::{ApiError, Value};
use tapio_store::{Etcd, Store};
use uuid::Uuid;

use crate::call::Handlers;
use crate::db::{Db, reference_of};
use crate::sessions::Sessions;
use crate::storage::Storage;

pub(crate) use crate::caller::HOST_LOGIN;
pub use access::Access;
pub use link::{Destination, Link, Visit};

/// What a host is as a member of a pool.
#[derive(Debug)]
pub struct Member {
    /// The pool's database.
    pub etcd: Arc<Etcd>,
    /// How others get there.
    pub access: Access,
    /// Where this host serves its API: `ADDRESS` or `ADDRESS:PORT`.
    pub address: String,
    /// Its certificate (DER).
    pub certificate: Vec<u8>,
    /// How long a host that does not answer counts as living.
    pub lease: Duration,
}

/// What is known of the pool now.
#[derive(Debug, Default)]
struct State {
    /// Hosts that live, by UUID.
    hosts: BTreeMap<Uuid, Destination>,
    /// The host that decides.
    coordinator: Option<Uuid>,
    /// Whether this one does, and by which holding.
    own: Option<u64>,
    /// Until when this host surely holds its key.
    holds_until: Option<Instant>,
}

/// The part of the toolstack that knows of other hosts.
pub struct Pool {
    db: Arc<Db>,
    storage: Arc<Storage>,
    sessions: Arc<Sessions>,
    state_dir: PathBuf,
    member: OnceLock<Member>,
    link: OnceLock<Arc<dyn Link>>,
    state: RwLock<State>,
    /// Shared SRs that this host has looked at.
    known_srs: parking_lot::Mutex<Option<BTreeSet<String>>>,
    /// Whether what an earlier run left is in order.
    is_started: AtomicBool,
    /// VMs of groups that were sent to a host.
    sent: apart::Sent,
    /// Held while this host looks at who decides, and while it gives that up.
    turning: parking_lot::Mutex<()>,
    /// How this host holds its keys.
    holding: parking_lot::Mutex<Option<membership::Holding>>,
    /// The certificate (DER) that the pool knows of this host; none: that of its start.
    announced: parking_lot::Mutex<Option<Vec<u8>>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("member", &self.member).finish_non_exhaustive()
    }
}

impl Pool {
    pub(crate) fn new(
        state_dir: PathBuf,
        db: &Arc<Db>,
        storage: &Arc<Storage>,
        sessions: &Arc<Sessions>,
    ) -> Self {
        Self {
            db: Arc::clone(db),
            storage: Arc::clone(storage),
            sessions: Arc::clone(sessions),
            state_dir,
            member: OnceLock::new(),
            link: OnceLock::new(),
            state: RwLock::default(),
            known_srs: parking_lot::Mutex::default(),
            is_started: AtomicBool::new(false),
            sent: apart::Sent::default(),
            turning: parking_lot::Mutex::default(),
            holding: parking_lot::Mutex::default(),
            announced: parking_lot::Mutex::default(),
        }
    }

    /// How this host reaches others.
    pub fn link_by(&self, link: Arc<dyn Link>) {
        let _ = self.link.set(link);
    }

    /// This host belongs to a pool: it holds its key from now on. Comes before [`crate::Toolstack::open`].
    ///
    /// # Errors
    /// The cluster's.
    pub fn enter(&self, member: Member) -> Result<(), ApiError> {
        let member = self.member.get_or_init(|| member);
        let held = membership::hold_host(member);
        let held =
            held.map_err(|error| ApiError::internal(format!("the pool cannot be entered: {error}")))?;
        self.state.write().holds_until = Some(held.since + member.lease);
        *self.holding.lock() = Some(held);
        Ok(())
    }

    /// Whether this host belongs to a pool.
    pub fn is_member(&self) -> bool {
        self.member.get().is_some()
    }

    pub(crate) fn link(&self) -> Result<&Arc<dyn Link>, ApiError> {
        self.link.get().ok_or_else(|| ApiError::internal("this host reaches no others: it serves no HTTPS"))
    }

    fn member(&self) -> Result<&Member, ApiError> {
        let alone = "this host belongs to no pool on etcd: see etcd-endpoints in tapiod.conf";
        self.member.get().ok_or_else(|| ApiError::new("OPERATION_NOT_ALLOWED", [alone]))
    }

    /// A login at another host of the pool.
    pub(crate) fn visit(&self, host: &str) -> Result<Box<dyn Visit>, ApiError> {
        let member = self.member()?;
        let to = self.destination(host)?;
        self.link()?.visit(&to, &format!("{HOST_LOGIN}{}", member.access.host), "")
    }

    /// Where another host of the pool serves its API.
    ///
    /// # Errors
    /// `CANNOT_CONTACT_HOST`: it does not live.
    pub(crate) fn destination(&self, host: &str) -> Result<Destination, ApiError> {
        let uuid = self.db.get("host", host)?.uuid()?;
        self.is_live(host);
        let to = self.state.read().hosts.get(&uuid).cloned();
        to.ok_or_else(|| ApiError::new("CANNOT_CONTACT_HOST", [host]))
    }

    /// Where another host serves HTTPS.
    fn address_of(&self, host: &str) -> Result<String, ApiError> {
        let uuid = self.db.get("host", host)?.uuid()?;
        let known = self.state.read().hosts.get(&uuid).map(|to| to.address.clone());
        known.ok_or_else(|| ApiError::new("CANNOT_CONTACT_HOST", [host]))
    }

    /// Whether a host lives. One that did not a moment ago may have come since.
    pub(crate) fn is_live(&self, host: &str) -> bool {
        let Ok(uuid) = self.db.get("host", host).and_then(|host| host.uuid()) else { return false };
        let is_known = || self.state.read().hosts.contains_key(&uuid);
        if let (false, Some(member)) = (is_known(), self.member.get()) {
            let _turning = self.turning.lock();
            if let Err(error) = self.look(member) {
                tracing::warn!(%error, "what other hosts do is not known");
            }
        }
        is_known()
    }

    /// Waits until this host knows what others wrote before now.
    pub(crate) fn catch_up(&self) {
        let Some(member) = self.member.get() else { return };
        let until = Instant::now() + Duration::from_secs(10);
        // A look without a wait answers all that was written before it.
        let found = member.etcd.changes(self.db.followed(), Duration::ZERO);
        let last = found.ok().and_then(|found| found.last().map(|row| row.revision)).unwrap_or_default();
        while self.db.followed() < last && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, pool: &Arc<Pool>) {
    let mut handlers = handlers.of(pool);
    handlers.on("pool.join", |call, args| join::join(call, args, false));
    handlers.on("pool.join_force", |call, args| join::join(call, args, true));
    handlers.on("pool.get_database_access", |call, _| {
        let told = call.part.member()?.access.told().map_err(ApiError::internal)?;
        Ok(Value::string_map(told))
    });
    certificates::register(&mut handlers);
    handlers.on("session.lend", elsewhere::lend);
    handlers.on("pool.eject", |call, args| eject::eject(call, args.text(0)?).map(|()| Value::Void));
    handlers.on("host.destroy", |call, args| eject::destroy(call, args.text(0)?).map(|()| Value::Void));
    handlers.on("pool.designate_new_master", |call, args| {
        master::designate(call, args.text(0)?).map(|()| Value::Void)
    });
    handlers.on("pool.emergency_transition_to_master", |call, _| {
        master::take_over(&call.part).map(|()| Value::Void)
    });
    handlers.on("pool.recover_slaves", |call, _| {
        let member = call.part.member()?;
        let state = call.part.state.read();
        let others = state.hosts.keys().filter(|host| **host != member.access.host);
        Ok(Value::strings(others.map(|host| reference_of(*host))))
    });
}

/// Writes the rows of a database that one host has for itself into the database of a pool, whole or not at all.
///
/// # Errors
/// One of the stores': a sentence.
pub fn bring(local: &dyn Store, pool: &dyn Store, host: Uuid) -> Result<(), String> {
    let told = |error: tapio_store::StoreError| error.to_string();
    let (ours, theirs) = (local.list("/").map_err(told)?, pool.list("/").map_err(told)?);
    pool.commit(import::transaction(&ours, &theirs, host)).map(drop).map_err(told)
}
