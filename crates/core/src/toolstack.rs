//! Everything a daemon holds.

use std::sync::Arc;

use crate::call::Handlers;
use crate::config::Config;
use crate::db::Db;
use crate::disks::Disks;
use crate::machines::Machines;
use crate::plan::Plans;
use crate::storage::Storage;

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
    /// Who does what.
    pub handlers: Handlers,
}

impl Toolstack {
    /// Puts the parts together; nothing runs yet.
    pub fn new(config: Config, db: Db) -> Arc<Self> {
        let mut handlers = Handlers::default();
        crate::storage::register(&mut handlers);
        crate::machines::register(&mut handlers);
        Arc::new(Self {
            plans: Plans::new(config.worker_pool_size, config.per_vm_parallel),
            storage: Storage::new(&config),
            disks: Disks::new(&config),
            machines: Machines::new(&config),
            handlers,
            db,
            config,
        })
    }
}
