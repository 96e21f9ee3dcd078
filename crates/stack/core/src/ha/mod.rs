//! High availability: VMs of a host that died start on other hosts of the pool.
//!
//! The pool's database says which hosts live, by leases of etcd. A VM never runs twice because its disks lie on shared
//! SRs: another host gets them when the dead one's lease of the SR has ended, and by then the keeper of that lease has
//! ended the guest. See `docs/pools.md` and `docs/design/pools.md`.
//!
//! | module | holds |
//! |---|---|
//! | `plan` | how many hosts may fail |
//! | `restart` | what the host that decides does when one died |
//! | `settings` | on and off, and what each VM wants |
//! | `starts` | which VMs may start now |

mod plan;
mod restart;
mod settings;
mod starts;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tapio_model::ApiError;

use crate::call::Handlers;
use crate::db::{Db, Object};
use crate::pool::Pool;
use crate::vms::Vms;

/// Restarted as soon as its host died, and until that succeeds.
const RESTART: &str = "restart";
/// Restarted if that is possible, after all others.
const BEST_EFFORT: &str = "best-effort";

/// The part of the toolstack that starts VMs again.
#[derive(Debug)]
pub struct Ha {
    db: Arc<Db>,
    pool: Arc<Pool>,
    vms: Arc<Vms>,
    /// Starts that failed, by the VM's reference.
    failed: Mutex<BTreeMap<String, restart::Failed>>,
    /// Until when VMs without a promise are tried, by the VM's reference.
    best_effort: Mutex<BTreeMap<String, Instant>>,
    starts: Mutex<starts::Starts>,
    /// Nothing is started before.
    not_before: Mutex<Option<Instant>>,
}

impl Ha {
    pub(crate) fn new(db: &Arc<Db>, pool: &Arc<Pool>, vms: &Arc<Vms>) -> Self {
        Self {
            db: Arc::clone(db),
            pool: Arc::clone(pool),
            vms: Arc::clone(vms),
            failed: Mutex::default(),
            best_effort: Mutex::default(),
            starts: Mutex::default(),
            not_before: Mutex::default(),
        }
    }

    /// The pool, if high availability is on.
    fn enabled(&self) -> Option<Arc<Object>> {
        self.db.all("pool").into_iter().find(|pool| pool.bool("ha_enabled"))
    }

    /// The disks of a VM that it may write, each with its SR's reference.
    fn written_disks(&self, vm: &str) -> Vec<String> {
        let vbds = self.db.find("VBD", "VM", vm);
        let written = vbds.iter().filter(|vbd| !vbd.bool("empty") && vbd.text("mode") != "RO");
        let vdis = written.filter_map(|vbd| self.db.get("VDI", vbd.text("VDI")).ok());
        vdis.map(|vdi| vdi.text("SR").to_owned()).collect()
    }

    /// Whether any host may start a VM, and only one at a time: it has a disk, and all its disks are on shared SRs.
    ///
    /// # Errors
    /// `HA_CONSTRAINT_VIOLATION_SR_NOT_SHARED`.
    fn assert_agile(&self, vm: &str) -> Result<(), ApiError> {
        let vbds = self.db.find("VBD", "VM", vm);
        for vbd in vbds.iter().filter(|vbd| !vbd.bool("empty")) {
            let sr = self.db.get("VDI", vbd.text("VDI")).and_then(|vdi| self.db.get("SR", vdi.text("SR")))?;
            if !sr.bool("shared") {
                return Err(ApiError::new("HA_CONSTRAINT_VIOLATION_SR_NOT_SHARED", [&sr.reference]));
            }
        }
        match self.written_disks(vm).is_empty() {
            true => Err(ApiError::new(
                "OPERATION_NOT_ALLOWED",
                ["the VM has no disk that it writes: nothing on shared storage says on which host it runs"],
            )),
            false => Ok(()),
        }
    }
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, ha: &Arc<Ha>) {
    settings::register(&mut handlers.of(ha));
}

/// Begins to look after VMs; this goes on until the toolstack has gone.
///
/// # Errors
/// There is no thread.
pub(crate) fn listen(ha: &Arc<Ha>) -> Result<(), ApiError> {
    if !ha.pool.is_member() {
        return Ok(());
    }
    let weak = Arc::downgrade(ha);
    let looking = move || {
        while let Some(ha) = weak.upgrade() {
            restart::turn(&ha);
            drop(ha);
            std::thread::sleep(restart::TURN);
        }
    };
    let thread = std::thread::Builder::new().name("ha".to_owned()).spawn(looking);
    thread.map(drop).map_err(|error| ApiError::internal(format!("no thread restarts VMs: {error}")))
}
