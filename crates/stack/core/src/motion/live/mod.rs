//! A guest goes to another host of its pool while it runs; its disks are on SRs that both hosts have, or go along (see
//! `mirrors`).
//!
//! ```text
//!       host that sends                              host that receives
//!    1  note of the departure
//!    2                                               note of the arrival; the VM with disks without images (prepare)
//!    3  memory, while the guest runs; then it stops  reads it
//!    4  closes the disks that the guest writes
//!    5                                               opens them, and notes that (open)
//!    6  the record names the other host: decided
//!    7                                               the guest goes on (run)
//!    8  ends what is left
//! ```
//!
//! Before 6 the guest is the sender's: it takes its disks back, which the leases of their SRs allow once the receiver
//! has closed them, and lets the guest go on. From 6 on it is the receiver's. After 5 the receiver gives up nothing by
//! itself while the record says that the sender has the VM. See docs/design/motion.md.

mod arrive;
mod check;
mod landing;
mod leave;
mod mirrors;
mod there;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tapio_model::ApiError;
use uuid::Uuid;

use super::notes::{read, text};
use crate::db::{Change, Db};
use crate::operations::Held;
use crate::plan::steps::Step;

pub(crate) use arrive::read_memory;
pub(super) use arrive::receive;
pub(super) use check::{check, has_sr, network_of};
pub(super) use leave::{Along, pool_migrate};

/// What operations and errors call it.
const OP: &str = "pool_migrate";

const OUT: &str = "motion/departure/";
const IN: &str = "motion/arrival/";

const fn at(name: &'static str, half_done: &'static str) -> Step {
    Step { name, half_done }
}

/// Every place of a guest's way to another host of its pool: what a kill of that host's daemon leaves there, and what
/// becomes of it.
pub const STEPS: &[Step] = &[
    at("vm-migrate:noted", "a note of a departure, the guest runs. It goes on here"),
    at(
        "vm-migrate:prepared",
        "the guest runs, there is a VM without memory at the receiver. It goes on here",
    ),
    at("vm-migrate:sent", "the guest has stopped, its memory is at both hosts. It goes on here"),
    at(
        "vm-migrate:closed",
        "the guest has stopped, its disks are open nowhere. It gets them, and goes on here",
    ),
    at(
        "vm-migrate:opened",
        "the guest has stopped, the receiver has its disks. It gets them back, and goes on here",
    ),
    at("vm-migrate:decided", "the guest is the receiver's and goes on there, what is here ends"),
    at("vm-arrive:created", "a VM without disks and memory. It is ended"),
    at("vm-arrive:made", "a VM without memory, and disks without images. They are ended"),
    at("vm-arrive:read", "a VM that has stopped, and disks without images. They are ended"),
    at(
        "vm-arrive:opened",
        "a VM that has stopped, with its disks. It waits until the record says where it is",
    ),
    at("vm-arrive:running", "the guest runs here, and the record does not say all of that. It does"),
];

/// The places of a guest's way that there are if disks go along.
pub const CROSSING_STEPS: &[Step] = &[
    at(
        "vm-migrate:landed",
        "the guest runs, there are new disks without data at the receiver. It goes on here",
    ),
    at("vm-migrate:mirrored", "the guest runs, and its disks are at both hosts. It goes on here"),
    at("vm-migrate:sealed", "the guest has stopped, its disks are the same at both hosts. It goes on here"),
    at("vm-arrive:disk-made", "a new disk that no VM has. It is removed"),
    at("vm-arrive:landed", "new disks without data, which are exported. They are removed"),
    at("vm-arrive:closed", "a VM that has stopped, and new disks with all data. They are removed"),
];

/// A disk that goes along.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Crossing {
    /// Its VDI's reference here.
    vdi: String,
    /// The reference of the SR there.
    to: String,
}

/// A guest that this host sends.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Departure {
    /// The VM's reference.
    vm: String,
    /// The other host's.
    to: String,
    /// Disks that go along, by VBD.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    disks: BTreeMap<Uuid, Crossing>,
}

/// How far an arrival is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Phase {
    /// Its disks are made, and come: it may be given up.
    Landing,
    /// The VM is made, and its memory comes: it may be given up.
    Making,
    /// Its disks are open here: only the record says whether it may be given up.
    Opened,
}

/// A guest that comes to this host.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Arrival {
    /// The VM's reference.
    vm: String,
    /// The other host's.
    from: String,
    phase: Phase,
    /// The VDIs that come along, by VBD.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    disks: BTreeMap<Uuid, String>,
}

/// What of an arrival is only of this run.
#[derive(Debug)]
pub(super) struct Now {
    /// Held while a step works.
    steps: Mutex<()>,
    /// When the sender was heard last.
    heard: Mutex<Instant>,
    /// Whether memory comes.
    is_reading: AtomicBool,
    /// Whether it has come.
    is_read: AtomicBool,
    /// Keeps the disks that come from other operations.
    held: Mutex<Vec<Held>>,
}

impl Default for Now {
    fn default() -> Self {
        Self {
            steps: Mutex::default(),
            heard: Mutex::new(Instant::now()),
            is_reading: AtomicBool::new(false),
            is_read: AtomicBool::new(false),
            held: Mutex::default(),
        }
    }
}

/// Arrivals by the VM's reference.
pub(super) type Arrivals = Mutex<BTreeMap<String, Arc<Now>>>;

impl Departure {
    fn key(&self) -> String {
        format!("{OUT}{}", self.vm)
    }

    fn put(&self, change: &mut Change<'_>) -> Result<(), ApiError> {
        change.put_note(self.key(), text(self)?);
        Ok(())
    }
}

impl Arrival {
    fn key(&self) -> String {
        format!("{IN}{}", self.vm)
    }

    fn put(&self, change: &mut Change<'_>) -> Result<(), ApiError> {
        change.put_note(self.key(), text(self)?);
        Ok(())
    }

    fn of(db: &Db, vm: &str) -> Option<Self> {
        read(db, &format!("{IN}{vm}")).into_iter().next()
    }
}

/// Whether a VM is on its way from this host or to it: what there is of it is looked after here alone.
pub(crate) fn is_on_its_way(db: &Db, vm: Uuid) -> bool {
    let vm = crate::db::reference_of(vm);
    [OUT, IN].iter().any(|notes| !db.notes(&format!("{notes}{vm}")).is_empty())
}

/// Goes on with what an earlier daemon had begun.
///
/// # Errors
/// There is no thread.
pub(super) fn recover(motions: &Arc<super::Motions>) -> Result<(), ApiError> {
    leave::recover(motions);
    arrive::recover(motions)
}
