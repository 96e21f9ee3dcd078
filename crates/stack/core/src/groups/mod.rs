//! VMs that start and end together (`VM_appliance`), VMs that are placed by a rule (`VM_group`), and VMs that are
//! snapshotted by a plan (`VMSS`).
//!
//! What is done to a VM is a message of the toolstack's own, so that it holds what it works on, shows as every other,
//! and is done by the host of the pool that has the VM.
//!
//! | module | holds |
//! |---|---|
//! | `affinity` | groups by whose rule VMs are placed, and messages about broken ones |
//! | `appliance` | starts and ends of appliances |
//! | `plan` | plans of snapshots: what is allowed in them, and their messages |
//! | `schedule` | when a plan is due |
//! | `turn` | what happens when it is |

mod affinity;
mod appliance;
mod plan;
mod schedule;
mod turn;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tapio_model::{ApiError, Value};

use crate::call::Handlers;
use crate::db::Db;
use crate::parallel;
use crate::pool::Pool;

/// VMs of a group that something is done to at a time.
const PARALLEL: usize = 8;

/// Does a message with the toolstack's rights, on the host that has to do it.
pub(crate) type Sender = dyn Fn(&str, Vec<Value>) -> Result<Value, ApiError> + Send + Sync;

/// The part of the toolstack that does things to several VMs.
pub struct Groups {
    db: Arc<Db>,
    pool: Arc<Pool>,
    send: OnceLock<Box<Sender>>,
    /// Appliances and plans that something is done with, by reference.
    busy: Mutex<BTreeMap<String, &'static str>>,
    /// The messages about broken groups that were sent; none: that is not known.
    broken: Mutex<Option<BTreeSet<String>>>,
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Groups").field("busy", &self.busy).finish_non_exhaustive()
    }
}

impl Groups {
    pub(crate) fn new(db: &Arc<Db>, pool: &Arc<Pool>) -> Self {
        Self {
            db: Arc::clone(db),
            pool: Arc::clone(pool),
            send: OnceLock::new(),
            busy: Mutex::default(),
            broken: Mutex::default(),
        }
    }

    /// By what messages are done. Set once, when the toolstack opens.
    pub(crate) fn give_send(&self, send: Box<Sender>) {
        let _ = self.send.set(send);
    }

    fn send(&self, method: &str, params: Vec<Value>) -> Result<Value, ApiError> {
        let send = self.send.get().ok_or_else(|| ApiError::internal("the toolstack is not open yet"))?;
        send(method, params)
    }

    /// Looks at the groups, and at the plans of snapshots as of a moment: takes those that are due. Comes every few
    /// seconds by itself.
    pub fn turn(&self, now: i64) {
        if let Err(error) = affinity::watch(self) {
            tracing::warn!(%error, "it is not known which groups of VMs are broken");
        }
        turn::turn(self, now);
    }
}

/// An appliance or a plan that something is done with, until this is dropped.
struct Busy<'a> {
    groups: &'a Groups,
    reference: String,
}

impl<'a> Busy<'a> {
    /// # Errors
    /// `OTHER_OPERATION_IN_PROGRESS`.
    fn begin(
        groups: &'a Groups,
        class: &str,
        reference: &str,
        operation: &'static str,
    ) -> Result<Self, ApiError> {
        let mut busy = groups.busy.lock();
        if let Some(other) = busy.get(reference) {
            return Err(ApiError::new("OTHER_OPERATION_IN_PROGRESS", [class, reference, other]));
        }
        busy.insert(reference.to_owned(), operation);
        Ok(Self { groups, reference: reference.to_owned() })
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.groups.busy.lock().remove(&self.reference);
    }
}

/// Does something with each of these, a few at a time; what came of it, in their order.
fn each<T: Sync, R: Send>(all: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    parallel::each(all, PARALLEL, work)
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, groups: &Arc<Groups>) {
    affinity::register(&mut handlers.of(groups));
    appliance::register(&mut handlers.of(groups));
    plan::register(&mut handlers.of(groups));
}

/// Begins to look at groups and plans of snapshots; this goes on until the toolstack has gone.
///
/// # Errors
/// There is no thread; the store's.
pub(crate) fn listen(groups: &Arc<Groups>) -> Result<(), ApiError> {
    turn::recover(groups)?;
    let weak = Arc::downgrade(groups);
    let looking = move || {
        while let Some(groups) = weak.upgrade() {
            groups.turn(crate::dates::now());
            drop(groups);
            std::thread::sleep(turn::EVERY);
        }
    };
    let thread = std::thread::Builder::new().name("snapshot-plans".to_owned()).spawn(looking);
    thread.map(drop).map_err(|error| ApiError::internal(format!("no thread for plans of snapshots: {error}")))
}
