//! Everything a daemon holds.

use std::sync::Arc;
use std::time::Duration;

use tapio_model::ApiError;

use crate::call::Handlers;
use crate::config::Config;
use crate::db::Db;
use crate::disks::Disks;
use crate::dispatch::Methods;
use crate::machines::Machines;
use crate::plan::Plans;
use crate::sessions::{Accounts, NoAccounts, Sessions};
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
}

/// What is old is looked for so often.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

impl Toolstack {
    /// Puts the parts together; nothing runs yet. Only peers that are superusers can log in.
    pub fn new(config: Config, db: Db) -> Arc<Self> {
        Self::with_accounts(config, db, Box::new(NoAccounts))
    }

    /// Puts the parts together, with accounts that may log in; nothing runs yet.
    pub fn with_accounts(config: Config, db: Db, accounts: Box<dyn Accounts>) -> Arc<Self> {
        let disks = Disks::new(&config);
        Self::with_disks(config, db, accounts, disks)
    }

    /// The same, with disk processes of another kind or in another place.
    pub fn with_disks(config: Config, db: Db, accounts: Box<dyn Accounts>, disks: Disks) -> Arc<Self> {
        let mut handlers = Handlers::default();
        crate::basics::register(&mut handlers);
        crate::events::register(&mut handlers);
        crate::sessions::register(&mut handlers);
        crate::tasks::register(&mut handlers);
        crate::storage::register(&mut handlers);
        crate::machines::register(&mut handlers);
        Arc::new(Self {
            plans: Plans::new(config.worker_pool_size, config.per_vm_parallel),
            storage: Storage::new(&config),
            disks,
            machines: Machines::new(&config),
            sessions: Sessions::new(accounts),
            tasks: Tasks::default(),
            methods: Methods::new(&handlers),
            handlers,
            db,
            config,
        })
    }

    /// Makes what must always be there (pool, host, networks, roles), recovers what an earlier run left half done,
    /// and begins to look after what gets old. Comes before the first call.
    ///
    /// # Errors
    /// The store's, or a part cannot be recovered.
    pub fn start(self: &Arc<Self>) -> Result<(), ApiError> {
        crate::basics::start(self)?;
        // Storage asks who uses its disks; machines need storage to give disks up.
        self.disks.adopt(self);
        crate::storage::recover(self)?;
        crate::machines::recover(self)?;
        // Whoever finished or resumed its task has said so by now.
        self.tasks.fail_interrupted(self)?;
        let stack = Arc::downgrade(self);
        let sweeper = std::thread::Builder::new().name("sweeper".to_owned());
        let sweeping = sweeper.spawn(move || {
            while let Some(stack) = stack.upgrade() {
                stack.sessions.expire(&stack.db);
                let swept = stack.tasks.sweep(&stack).and_then(|()| crate::basics::messages::sweep(&stack));
                if let Err(error) = swept {
                    tracing::warn!(%error, "old tasks and messages stay");
                }
                drop(stack);
                std::thread::sleep(SWEEP_EVERY);
            }
        });
        sweeping.map(drop).map_err(|error| ApiError::internal(format!("no thread for the sweeper: {error}")))
    }
}
