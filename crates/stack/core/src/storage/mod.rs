//! SRs, PBDs and VDIs: what their messages do.
//!
//! Every message follows one pattern. It takes the objects that it is about to change ([`crate::operations`]), which is
//! refused with `OTHER_OPERATION_IN_PROGRESS` or `VDI_IN_USE` where that would do harm; one transaction shows it to
//! clients and writes a note of what is half done ([`notes`]); the driver works; one transaction writes the result, the
//! sizes, what is allowed now, and removes the note. Notes that a killed daemon left are finished or undone when the SR
//! is attached again ([`recover()`]).

mod activate;
mod allowed;
pub(crate) mod archive;
mod attach_call;
mod attached;
mod cbt;
mod collect;
pub(crate) mod copy;
mod database_uuid;
pub mod diagnose;
mod drivers;
pub mod external;
mod forecast;
mod fork;
mod half_done;
mod hot_plug;
mod members;
mod notes;
pub(crate) mod outgoing;
mod pbd;
mod plug;
pub(crate) mod plugin_api;
mod plugins;
mod pool;
mod probe;
mod queues;
mod reconcile;
mod records;
mod recover;
pub(crate) mod relocate;
pub(crate) mod replica;
mod retry;
mod room;
mod samples;
mod scan;
mod setters;
mod sizes;
mod sr;
mod state;
mod steps;
mod thin;
mod tracking;
mod transaction;
pub(crate) mod transfer;
mod unfinished;
pub(crate) mod vdi;
mod work;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use tapio_model::ApiError;
use tapio_sm::SrDriver;
use tapio_types::Access;

pub use activate::{Opening, activate, closing, deactivate, release};
pub(crate) use copy::{Copy, copy as copy_vdi};
pub(crate) use fork::fork as fork_vdi;
pub(crate) use members::{
    finish_half_done, forget_pbd, forget_sr, plug_pbd, sr_of_note, unplug_pbd, want_pbd,
};
pub(crate) use pool::pool_pages;
pub use recover::{open, recover};
pub use room::listen as listen_for_room;
pub use steps::STEPS;
pub(crate) use tracking::has_data;

use crate::basics::this_host;
use crate::config::Config;
use crate::db::Db;
use crate::disks::Disks;
use crate::operations::Operations;
use crate::tasks::Tasks;
use attached::Attached;
use state::StorageState;

/// A call to the storage.
type Call = crate::call::Call<Storage>;
/// Its handlers.
type Handlers<'a> = crate::call::HandlersOf<'a, Storage>;

/// Drivers, attached SRs, and what has their VDIs open.
pub struct Storage {
    db: Arc<Db>,
    /// A driver asks for the running disk of a VDI that it changes.
    disks: Disks,
    drivers: RwLock<Vec<Arc<dyn SrDriver>>>,
    operations: Arc<Operations>,
    state: Mutex<StorageState>,
    recovering: retry::Recovering,
    tasks: Arc<Tasks>,
    collector: collect::Collector,
    yields: OnceLock<Yield>,
    /// Opens sessions for plugins.
    sessions: OnceLock<plugin_api::Sessions>,
    /// Those that are open, with the SR that each may change.
    plugin_sessions: Mutex<BTreeMap<String, Option<String>>>,
    looks: external::Looks,
    /// Whether a thread looks at the use of SRs.
    is_sampling: AtomicBool,
    /// SRs are mounted below it.
    mount_dir: PathBuf,
    queues: queues::Owned,
    rooms: room::Rooms,
    /// Where disks ask for room.
    room_socket: PathBuf,
}

/// Ends what has a VDI open and does not need it any more; whether there was such a thing.
type Yield = Box<dyn Fn(&str) -> bool + Send + Sync>;

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage").finish_non_exhaustive()
    }
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut crate::call::Handlers, storage: &Arc<Storage>) {
    let mut handlers = handlers.of(storage);
    sr::register(&mut handlers);
    probe::register(&mut handlers);
    pbd::register(&mut handlers);
    vdi::register(&mut handlers);
    attach_call::register(&mut handlers);
    fork::register(&mut handlers);
    copy::register(&mut handlers);
    relocate::register(&mut handlers);
    samples::register(&mut handlers);
    cbt::register(&mut handlers);
    setters::register(&mut handlers);
    thin::register(&mut handlers);
    collect::register(&mut handlers);
    diagnose::register(&mut handlers);
    plugins::register(&mut handlers);
    plugin_api::register(&mut handlers);
}

/// Brings what may be done with a VDI up to date.
///
/// # Errors
/// The database's.
pub(crate) fn refresh_vdi(
    storage: &Storage,
    change: &mut crate::db::Change<'_>,
    vdi: &str,
) -> Result<(), ApiError> {
    allowed::refresh(storage, change, "VDI", vdi)
}

impl Storage {
    /// None is attached yet; [`recover()`] attaches what was.
    pub(crate) fn new(
        config: &Config,
        (db, tasks): (&Arc<Db>, &Arc<Tasks>),
        disks: &Disks,
        operations: &Arc<Operations>,
    ) -> Self {
        Self {
            db: Arc::clone(db),
            disks: disks.clone(),
            drivers: RwLock::new(drivers::all(config)),
            operations: Arc::clone(operations),
            state: Mutex::default(),
            recovering: retry::Recovering::default(),
            tasks: Arc::clone(tasks),
            collector: collect::Collector::default(),
            yields: OnceLock::new(),
            sessions: OnceLock::new(),
            plugin_sessions: Mutex::default(),
            looks: external::Looks::default(),
            is_sampling: AtomicBool::new(false),
            mount_dir: config.mount_dir.clone(),
            queues: queues::Owned::new(&config.run_dir, &config.mount_dir),
            rooms: room::Rooms::default(),
            room_socket: config.room_socket(),
        }
    }

    /// Adds a driver, or puts it in the place of the one with its type.
    pub fn add_driver(&self, driver: Arc<dyn SrDriver>) {
        let mut drivers = self.drivers.write();
        drivers.retain(|known| known.info().sr_type != driver.info().sr_type);
        drivers.push(driver);
    }

    /// What an operation asks whose VDI is in use, by the VDI's reference: an export without clients ends.
    pub(crate) fn on_conflict(&self, yields: Yield) {
        // Set once, when the parts are put together.
        let _ = self.yields.set(yields);
    }

    /// Plugins get their sessions here.
    pub(crate) fn give_sessions(&self, sessions: plugin_api::Sessions) {
        // Set once, when the parts are put together.
        let _ = self.sessions.set(sessions);
    }

    /// Whether what was in the way has gone, so that the same may be tried again.
    fn has_yielded(&self, error: &ApiError) -> bool {
        let vdi = error.params.first().filter(|_| &*error.code == "VDI_IN_USE");
        vdi.zip(self.yields.get()).is_some_and(|(vdi, yields)| yields(vdi))
    }

    /// The attached SR.
    ///
    /// # Errors
    /// `HANDLE_INVALID`, `SR_HAS_NO_PBDS`, `SR_NOT_ATTACHED`.
    fn attached(&self, sr: &str) -> Result<Arc<Attached>, ApiError> {
        if let Some(attached) = self.state().attached.get(sr) {
            return Ok(Arc::clone(attached));
        }
        self.db.get("SR", sr)?;
        let is_without = self.db.find("PBD", "SR", sr).is_empty();
        Err(ApiError::new(if is_without { "SR_HAS_NO_PBDS" } else { "SR_NOT_ATTACHED" }, [sr]))
    }

    /// What has VDIs open: the VDI's reference, the holder's name, and what it may do.
    pub fn holders(&self) -> Vec<(String, String, Access)> {
        let state = self.state();
        let each = state.holders.iter().flat_map(|(vdi, holders)| {
            holders.iter().map(|(holder, access)| (vdi.clone(), holder.clone(), *access))
        });
        each.collect()
    }
}
