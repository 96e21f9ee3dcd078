//! VMs move between hosts that have no database in common: the VM, its snapshots and checkpoints, and all their disks.
//!
//! ```text
//!   check        what is needed at both ends, before anything is sent
//!   send         the host that has the VM: it asks for each step, sends the disks, and decides
//!   stream       the contents of one image on their way, in pieces that the other host confirms
//!   remote       calls at the other host, again and again while the network is away
//!   receive      the host that gets the VM: it makes what it is asked for, and decides nothing
//!   records      what of the VM's records goes, and what is made of them
//!   live         a guest that goes to another host of its pool while it runs: one database, disks that both hosts
//!                have, or that go along by mirrors
//!   evacuate     all VMs of this host go to others of its pool, or end
//!   within_pool  the same, where disks go to other SRs before or after it
//!   local        the same within this host, where disks change their SR alone
//!   finish       what is left when a daemon was killed
//!   notes        what of all that is in the store
//! ```
//!
//! A VM is here until the sender has written down that it is there: one row of one store. By then all that is needed
//! there is durable there. See docs/design/motion.md.

mod check;
mod evacuate;
mod finish;
mod live;
mod local;
mod notes;
mod receive;
mod records;
mod remote;
mod send;
mod stream;
mod within_pool;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tapio_model::{ApiError, NULL_REF, Value};
use uuid::Uuid;

use crate::basics::this_host;
use crate::call::Handlers;
use crate::db::Db;
use crate::exports::Exports;
use crate::operations::Operations;
use crate::plan::steps::Step;
use crate::pool::Pool;
use crate::sessions::Sessions;
use crate::storage::Storage;
use crate::vms::Vms;

use self::check::Place;

pub use live::{CROSSING_STEPS, STEPS as LIVE_STEPS};
pub(crate) use live::{is_on_its_way, read_memory};
pub(crate) use receive::may_send;

type Call = crate::call::Call<Motions>;

const fn at(name: &'static str, half_done: &'static str) -> Step {
    Step { name, half_done }
}

/// Every place of motions between hosts. After a kill of the sender at one of its own: what it was, and what becomes of
/// it; a receiver that was killed goes on when its daemon has started again.
pub const STEPS: &[Step] = &[
    at("motion-out:noted", "a note of a motion; nothing is sent. The VM stays, the note is removed"),
    at("motion-out:checked", "both ends agree, nothing is sent. The VM stays, the receiver forgets it"),
    at("motion-out:copied", "all disks are at the receiver. The VM stays, they are removed"),
    at("motion-out:prepared", "the receiver has all it needs. The VM stays, what it has is removed"),
    at("motion-out:decided", "the VM is the receiver's, no record there says so. The records are made there"),
    at("motion-out:committed", "the VM has records at both hosts; it is the receiver's. Those here go"),
    at("motion-out:left", "the VM is at the receiver alone, its old images are here. They are removed"),
    at("motion-in:image-made", "a disk that comes. The sender asks for another one, this one is removed"),
    at("motion-in:image-forked", "a disk that comes. The sender asks for another one, this one is removed"),
    at("motion-in:prepared", "all is here and the sender may not know it. It asks again"),
    at("motion-in:committed", "the VM is here and the sender may not know it. It asks again"),
    at("motion-in:aborting", "what came is to go and is here. It is removed"),
];

/// VMs on their way to and from this host.
pub struct Motions {
    db: Arc<Db>,
    storage: Arc<Storage>,
    vms: Arc<Vms>,
    pool: Arc<Pool>,
    exports: Arc<Exports>,
    operations: Arc<Operations>,
    /// Where this host serves HTTPS.
    served: OnceLock<String>,
    /// Motions to this host.
    now: Mutex<BTreeMap<Uuid, receive::Now>>,
    /// Guests that come from other hosts of the pool.
    arrivals: live::Arrivals,
}

impl fmt::Debug for Motions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Motions").field("served", &self.served).finish_non_exhaustive()
    }
}

impl Motions {
    pub(crate) fn new(
        db: &Arc<Db>,
        (storage, vms, pool, exports): (&Arc<Storage>, &Arc<Vms>, &Arc<Pool>, &Arc<Exports>),
        sessions: &Sessions,
        operations: &Arc<Operations>,
    ) -> Arc<Self> {
        let known = Arc::clone(db);
        sessions.admit_motions(Box::new(move |motion, secret, peer| {
            receive::admit(&known, motion, secret, peer)
        }));
        Arc::new(Self {
            db: Arc::clone(db),
            storage: Arc::clone(storage),
            vms: Arc::clone(vms),
            pool: Arc::clone(pool),
            exports: Arc::clone(exports),
            operations: Arc::clone(operations),
            served: OnceLock::new(),
            now: Mutex::default(),
            arrivals: Mutex::default(),
        })
    }

    /// Other hosts reach this one at `ADDRESS:PORT`; an address that is not specified is that of the network which is
    /// asked for.
    pub fn serve_at(&self, address: String) {
        let _ = self.served.set(address);
    }

    /// Where another host reaches `host`, which is this one, on a network: `ADDRESS:PORT`.
    ///
    /// # Errors
    /// `HOST_OFFLINE` of another host; `HOST_CANNOT_ATTACH_NETWORK`, `INTERFACE_HAS_NO_IP`.
    fn address_on(&self, host: &str, network: &str) -> Result<String, ApiError> {
        if host != this_host(&self.db) {
            return Err(ApiError::new("HOST_OFFLINE", [host]));
        }
        let served = self.served.get();
        let served =
            served.ok_or_else(|| ApiError::internal("this host serves no HTTPS: --listen says where"))?;
        let whole = served.parse::<std::net::SocketAddr>().ok();
        let Some(port) = whole.filter(|whole| whole.ip().is_unspecified()).map(|whole| whole.port()) else {
            return Ok(served.clone());
        };
        if network == NULL_REF || network.is_empty() {
            return Ok(format!("{}:{port}", crate::basics::address()));
        }
        self.db.get("network", network)?;
        let pifs = self.db.find("PIF", "network", network);
        let own = pifs.iter().find(|pif| pif.text("host") == host);
        let own = own.ok_or_else(|| ApiError::new("HOST_CANNOT_ATTACH_NETWORK", [host, network]))?;
        match own.text("IP") {
            "" => Err(ApiError::new("INTERFACE_HAS_NO_IP", [&own.reference])),
            address => Ok(format!("{address}:{port}")),
        }
    }
}

/// Whether a session that is for a motion may send a message.
pub(crate) fn is_of_sender(message: &str) -> bool {
    matches!(message, "host.receive_motion" | "session.logout")
}

/// A field of an object.
fn text_of(db: &Db, class: &str, reference: &str, field: &str) -> Result<String, ApiError> {
    Ok(db.get(class, reference)?.text(field).to_owned())
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, motions: &Arc<Motions>) {
    let mut handlers = handlers.of(motions);
    handlers.on("host.migrate_receive", receive::prepare);
    handlers.on("host.receive_motion", receive::receive);
    handlers.on("host.get_motions", |call, _| Ok(Value::string_map(finish::told(&call.part.db))));
    handlers.on("host.get_fingerprint", |call, args| {
        if args.text(0)? != this_host(&call.part.db) {
            return Err(ApiError::new("HOST_OFFLINE", [args.text(0)?]));
        }
        Ok(Value::string(call.part.pool.link()?.certificate().1))
    });
    handlers.on("VM.migrate_send", |call, args| {
        let wish = check::Wish::read(call, args);
        let wish = wish.inspect_err(|_| send::refuse(call, &args.map(1).unwrap_or_default()))?;
        match wish.place(call) {
            Place::Here => local::move_disks(call, &wish),
            Place::Pool(host) => within_pool::send(call, &wish, &host, &args.map(5)?),
            Place::Other => send::send(call, &wish),
        }
        .map(Value::String)
    });
    handlers.on("VM.pool_migrate", |call, args| {
        let (vm, host, options) = (args.text(0)?, args.text(1)?, args.map(2)?);
        live::pool_migrate(call, vm, host, &options, &live::Along::default()).map(|()| Value::Void)
    });
    handlers.on("host.receive_guest", live::receive);
    handlers.on("host.evacuate", evacuate::evacuate);
    handlers.on("host.assert_can_evacuate", evacuate::assert_can);
    handlers.on("host.get_vms_which_prevent_evacuation", evacuate::preventing);
    handlers.on("VM.assert_can_migrate", |call, args| {
        let wish = check::Wish::read(call, args)?;
        match wish.place(call) {
            Place::Here => local::check(call, &wish).map(drop),
            Place::Pool(host) => within_pool::check(call, &wish, &host, &args.map(5)?).map(drop),
            Place::Other => send::check(call, &wish),
        }
        .map(|()| Value::Void)
    });
}

/// Goes on with what an earlier daemon had begun.
///
/// # Errors
/// The store's; there is no thread.
pub(crate) fn recover(motions: &Arc<Motions>) -> Result<(), ApiError> {
    finish::recover(motions)?;
    live::recover(motions)?;
    receive::tend(motions)
}
