//! VMs and VBDs: what their messages do.
//!
//! | module | holds |
//! |---|---|
//! | `running` | operations on VMs and VBDs, forced ones too |
//! | `allowed` | what may be done in which state |
//! | `power` | start, shutdown, reboot, pause, as plans |
//! | `suspend`, `memory` | memory goes to a VDI and comes back from it |
//! | `departure`, `arrival` | guests that go to another host of the pool while they run, and come from one |
//! | `made` | VDIs that nothing leads to yet, or any more |
//! | `processors` | processors that guests get while they run |
//! | `balloon` | memory that guests give back while they run |
//! | `console` | records of consoles, and their sockets |
//! | `renew` | new emulators for guests that run |
//! | `checkpoint` | snapshots with memory |
//! | `parallel` | the same with several of them |
//! | `evacuate`, `host_power` | all VMs of the host end; then the host |
//! | `worker_pool` | how many plugs at a time the host had better allow |
//! | `plug` | a disk on its way into a VM and out of it |
//! | `drive` | CD drives, and media that change while a VM runs |
//! | `guest` | what guests report of themselves |
//! | `quiesce` | snapshots of guests that hold still |
//! | `vbd`, `vif`, `vm` | records: made, changed, removed |
//! | `fields` | what a VM takes over of the one it is made from |
//! | `copy` | clones, copies, snapshots, templates that become VMs |
//! | `archive` | VMs that are exported and imported as XVA archives |
//! | `devices`, `tuning` | places and names of disks; limits, polling, priority |
//! | `events` | guests that end, disk processes that die |
//! | `recover`, `templates` | what a start of the daemon finds and makes |

pub(crate) mod allowed;
pub(crate) mod archive;
pub(crate) mod arrival;
mod balloon;
mod checkpoint;
mod console;
pub(crate) mod copy;
pub(crate) mod departure;
mod devices;
mod drive;
pub(crate) mod evacuate;
mod events;
pub(crate) mod fields;
mod firmware;
mod guest;
mod host_power;
mod lookup;
mod lost_storage;
mod made;
mod memory;
mod nic;
mod parallel;
mod pause;
mod paused;
mod plug;
mod power;
mod processors;
mod quiesce;
mod recover;
mod renew;
mod revert;
pub(crate) mod running;
mod suspend;
mod templates;
pub(crate) mod tuning;
pub(crate) mod vbd;
pub(crate) mod vif;
pub(crate) mod vm;
mod worker_pool;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use tapio_model::{ApiError, NULL_REF, Value};
pub use tapio_sm::worker::Program;
use tapio_vm::VmDriver;

use crate::args::Args;
use crate::config::Config;
use crate::db::Db;
use crate::disks::Disks;
use crate::operations::Operations;
use crate::plan::Plans;
use crate::storage::Storage;

pub(crate) use events::spawn as listen;
pub use memory::MemoryHead;
pub(crate) use power::{lost, start_here};
pub use recover::recover;

/// A call to the VMs.
type Call = crate::call::Call<Vms>;
/// A call of theirs to the storage.
type StorageCall = crate::call::Call<Storage>;
/// Their handlers.
type Handlers<'a> = crate::call::HandlersOf<'a, Vms>;

/// Guests of this host.
pub struct Vms {
    config: Config,
    db: Arc<Db>,
    plans: Plans,
    pub(crate) disks: Disks,
    storage: Arc<Storage>,
    drivers: RwLock<BTreeMap<&'static str, Arc<dyn VmDriver>>>,
    operations: Arc<Operations>,
    /// The program that decompresses archives; see [`Vms::decode_by`].
    decoder: OnceLock<Program>,
    guests: guest::Guests,
}

impl fmt::Debug for Vms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vms").field("drivers", &self.driver_names()).finish()
    }
}

impl Drop for Vms {
    fn drop(&mut self) {
        // The thread that follows deaths finds that there are no VMs any more.
        self.disks.look_at_deaths();
    }
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut crate::call::Handlers, vms: &Arc<Vms>) {
    let mut handlers = handlers.of(vms);
    vbd::register(&mut handlers);
    pause::register(&mut handlers);
    drive::register(&mut handlers);
    guest::register(&mut handlers);
    quiesce::register(&mut handlers);
    vif::register(&mut handlers);
    nic::register(&mut handlers);
    vm::register(&mut handlers);
    firmware::register(&mut handlers);
    power::register(&mut handlers);
    processors::register(&mut handlers);
    balloon::register(&mut handlers);
    host_power::register(&mut handlers);
    worker_pool::register(&mut handlers);
    copy::register(&mut handlers);
    revert::register(&mut handlers);
    suspend::register(&mut handlers);
    renew::register(&mut handlers);
    checkpoint::register(&mut handlers);
    handlers.on("task.get_timeline", timeline);
}

/// `task.get_timeline`: the steps of an operation as JSON, or nothing where a task had none. The task itself may be
/// gone; for no task it is the latest operation that had steps.
fn timeline(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let plans = &call.part.plans;
    let timeline = match args.text(0)? {
        NULL_REF => plans.latest_timeline(),
        task => plans.timeline(task),
    };
    Ok(Value::string(timeline.map(|timeline| timeline.json()).unwrap_or_default()))
}

impl Vms {
    /// No driver is known yet.
    pub(crate) fn new(
        config: Config,
        db: &Arc<Db>,
        plans: &Plans,
        disks: &Disks,
        storage: &Arc<Storage>,
        operations: &Arc<Operations>,
    ) -> Self {
        Self {
            config,
            db: Arc::clone(db),
            plans: plans.clone(),
            disks: disks.clone(),
            storage: Arc::clone(storage),
            drivers: RwLock::default(),
            operations: Arc::clone(operations),
            decoder: OnceLock::new(),
            guests: guest::Guests::default(),
        }
    }

    /// Objects.
    pub(crate) fn db(&self) -> &Arc<Db> {
        &self.db
    }

    /// Names the program that decompresses archives of VMs. Its standard input is the client's stream, its standard
    /// output a socket; it calls [`tapio_xva::decode`] with them. Without one, compressed archives are refused.
    pub fn decode_by(&self, program: Program) {
        // The first one counts.
        let _ = self.decoder.set(program);
    }

    /// Adds a kind of guests, or puts it in the place of the one with its name.
    pub fn add_driver(&self, driver: Arc<dyn VmDriver>) {
        self.drivers.write().insert(driver.name(), driver);
    }

    /// The driver of this name.
    pub fn driver(&self, name: &str) -> Option<Arc<dyn VmDriver>> {
        self.drivers.read().get(name).cloned()
    }

    /// All of them.
    pub fn drivers(&self) -> Vec<Arc<dyn VmDriver>> {
        self.drivers.read().values().cloned().collect()
    }

    /// Other hosts that beat on an SR; none where this host cannot see that.
    pub(crate) fn hosts_alive_on(&self, sr: uuid::Uuid) -> Option<std::collections::BTreeSet<uuid::Uuid>> {
        tapio_sm::lease::others_alive(&self.config.run_dir, sr)
    }

    fn driver_names(&self) -> Vec<&'static str> {
        self.drivers.read().keys().copied().collect()
    }
}
