//! Everything a daemon holds.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tokio::sync::Semaphore;

use crate::accounts::Accounts;
use crate::call::Handlers;
use crate::config::Config;
use crate::db::Db;
use crate::disks::Disks;
use crate::dispatch::Methods;
use crate::machines::Machines;
use crate::plan::Plans;
use crate::sessions::Sessions;
use crate::storage::Storage;
use crate::tasks::Tasks;

/// The toolstack.
#[derive(Debug)]
pub struct Toolstack {
    /// Settings.
    pub config: Config,
    /// Objects.
    pub db: Db,
    /// Steps that run and wait.
    pub plans: Plans,
    /// Attached SRs.
    pub storage: Storage,
    /// Disk processes.
    pub disks: Disks,
    /// Guests.
    pub machines: Machines,
    /// Who is logged in.
    pub sessions: Sessions,
    /// Calls that can be watched.
    pub tasks: Tasks,
    /// Who does what.
    pub handlers: Handlers,
    /// All messages.
    pub methods: Methods,
    /// Whether what an earlier run left is being put in order.
    is_recovering: Mutex<bool>,
    recovered: Condvar,
    /// Listeners that look at everything there is, at a time.
    pub(crate) looks: Semaphore,
}

/// Listeners that look at everything there is, at a time.
const LOOKS_MAX: usize = 2;

impl Toolstack {
    /// The parts, put together.
    pub(crate) fn of(
        config: Config,
        db: Db,
        accounts: Box<dyn Accounts>,
        disks: Disks,
        handlers: Handlers,
    ) -> Arc<Self> {
        Arc::new(Self {
            plans: Plans::new(config.worker_pool_size, config.per_vm_parallel),
            storage: Storage::new(&config),
            disks,
            machines: Machines::new(&config),
            sessions: Sessions::new(accounts),
            tasks: Tasks::default(),
            methods: Methods::new(&handlers),
            handlers,
            is_recovering: Mutex::new(false),
            recovered: Condvar::new(),
            looks: Semaphore::new(LOOKS_MAX),
            db,
            config,
        })
    }

    /// Waits until [`Self::recover`] is over.
    pub(crate) fn wait_until_recovered(&self) {
        let mut is_recovering = self.is_recovering.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_recovering {
            is_recovering = self.recovered.wait(is_recovering).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn set_recovering(&self, is_recovering: bool) {
        *self.is_recovering.lock().unwrap_or_else(PoisonError::into_inner) = is_recovering;
        self.recovered.notify_all();
    }
}
