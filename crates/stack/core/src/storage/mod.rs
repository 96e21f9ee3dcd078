//! SRs, PBDs and VDIs: what their messages do.
//!
//! Every message follows one pattern. It enters what it is about to do into the table of running operations
//! ([`gate`]), which answers `OTHER_OPERATION_IN_PROGRESS` or `VDI_IN_USE` where that would do harm; one transaction
//! shows it to clients and writes a note of what is half done ([`notes`]); the driver works; one transaction writes
//! the result, the sizes, what is allowed now, and removes the note. Notes that a killed daemon left are finished or
//! undone when the SR is attached again ([`recover()`]).

mod activate;
mod allowed;
mod attached;
mod copy;
mod drivers;
mod fork;
mod gate;
mod half_done;
mod notes;
mod operation;
mod pbd;
mod plug;
mod probe;
mod reconcile;
mod records;
mod recover;
mod retry;
mod setters;
mod sr;
mod steps;
mod unfinished;
mod vdi;
mod work;

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use tapio_model::{ApiError, NULL_REF};
use tapio_sm::SrDriver;
use tapio_types::Access;

pub use activate::{Hold, Opening};
pub use recover::{open, recover};
pub use steps::STEPS;

use crate::Toolstack;
use crate::call::{Call, Handlers};
use crate::caller::Caller;
use crate::config::Config;
use crate::db::Db;
use crate::progress::Unwatched;
use attached::Attached;
use gate::Gate;

/// Drivers, attached SRs, and what runs on them.
pub struct Storage {
    drivers: RwLock<Vec<Arc<dyn SrDriver>>>,
    gate: Arc<Gate>,
    recovering: retry::Recovering,
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage").finish_non_exhaustive()
    }
}

/// Registers the messages of this part.
pub fn register(handlers: &mut Handlers) {
    sr::register(handlers);
    probe::register(handlers);
    pbd::register(handlers);
    vdi::register(handlers);
    fork::register(handlers);
    copy::register(handlers);
    setters::register(handlers);
}

impl Storage {
    /// None is attached yet; [`recover()`] attaches what was.
    pub fn new(config: &Config) -> Self {
        Self {
            drivers: RwLock::new(drivers::all(config)),
            gate: Arc::default(),
            recovering: retry::Recovering::default(),
        }
    }

    /// Adds a driver, or puts it in the place of the one with its type.
    pub fn add_driver(&self, driver: Arc<dyn SrDriver>) {
        let mut drivers = self.drivers.write().unwrap_or_else(PoisonError::into_inner);
        drivers.retain(|known| known.info().sr_type != driver.info().sr_type);
        drivers.push(driver);
    }

    /// The attached SR.
    ///
    /// # Errors
    /// `HANDLE_INVALID`, `SR_HAS_NO_PBDS`, `SR_NOT_ATTACHED`.
    fn attached(&self, db: &Db, sr: &str) -> Result<Arc<Attached>, ApiError> {
        if let Some(attached) = self.gate.state().attached.get(sr) {
            return Ok(Arc::clone(attached));
        }
        db.get("SR", sr)?;
        let is_without = db.find("PBD", "SR", sr).is_empty();
        Err(ApiError::new(if is_without { "SR_HAS_NO_PBDS" } else { "SR_NOT_ATTACHED" }, [sr]))
    }

    /// Who has VDIs open: the VDI's reference, the holder's name, and what it may do.
    pub fn holders(&self) -> Vec<(String, String, Access)> {
        let state = self.gate.state();
        let each = state.holders.iter().flat_map(|(vdi, holders)| {
            holders.iter().map(|(holder, access)| (vdi.clone(), holder.clone(), *access))
        });
        each.collect()
    }
}

/// The reference of this host; the null reference before there is a record of it.
fn this_host(db: &Db) -> String {
    let master = db.all("pool").first().map(|pool| pool.text("master").to_owned());
    let host = master.filter(|master| db.get("host", master).is_ok());
    let only = || db.all("host").first().map(|host| host.reference.clone());
    host.or_else(only).unwrap_or_else(|| NULL_REF.to_owned())
}

/// A call of the toolstack's own, at start.
fn own_call(stack: &Arc<Toolstack>) -> Call {
    let caller = Caller::toolstack();
    Call { stack: Arc::clone(stack), caller, progress: Arc::new(Unwatched::default()), made_for: None }
}
