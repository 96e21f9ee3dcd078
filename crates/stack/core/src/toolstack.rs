//! All that a daemon holds.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use tokio::sync::Semaphore;

use crate::accounts::Accounts;
use crate::backup::Backups;
use crate::call::Handlers;
use crate::config::Config;
use crate::db::Db;
use crate::disks::Disks;
use crate::events::Events;
use crate::exports::Exports;
use crate::groups::Groups;
use crate::ha::Ha;
use crate::history::Histories;
use crate::methods::Methods;
use crate::metrics::Metrics;
use crate::motion::Motions;
use crate::plan::Plans;
use crate::pool::Pool;
use crate::replica::Replicas;
use crate::sessions::Sessions;
use crate::storage::Storage;
use crate::tasks::Tasks;
use crate::vms::Vms;
use crate::{
    basics, events, exports, groups, ha, history, metrics, motion, pool, replica, sessions, storage, tasks,
    vms,
};

/// The toolstack: its parts. A part has those that it uses, and no part has the whole.
#[derive(Debug)]
pub struct Toolstack {
    /// Objects.
    pub db: Arc<Db>,
    /// Steps that run and wait.
    pub plans: Plans,
    /// Attached SRs.
    pub storage: Arc<Storage>,
    /// Disk processes.
    pub disks: Disks,
    /// Guests.
    pub vms: Arc<Vms>,
    /// VDIs that are read by NBD.
    pub exports: Arc<Exports>,
    /// Other hosts.
    pub pool: Arc<Pool>,
    /// What starts VMs of hosts that died.
    pub(crate) ha: Arc<Ha>,
    /// What does things to several VMs.
    pub groups: Arc<Groups>,
    /// VMs that move between hosts.
    pub motions: Arc<Motions>,
    /// The database as a file.
    pub backups: Arc<Backups>,
    /// Copies of the database on SRs.
    pub replicas: Arc<Replicas>,
    /// What was measured.
    pub histories: Arc<Histories>,
    /// Accounts that are logged in.
    pub sessions: Arc<Sessions>,
    /// Calls that can be watched.
    pub tasks: Arc<Tasks>,
    /// What messages of events need.
    pub(crate) events: Arc<Events>,
    /// What does the work of which message.
    pub handlers: Handlers,
    /// All messages.
    pub methods: Methods,
    /// Whether what an earlier run left is being recovered.
    is_recovering: Mutex<bool>,
    recovered: Condvar,
    /// Listeners that look at everything there is, at a time.
    pub(crate) looks: Semaphore,
}

/// Listeners that look at everything there is, at a time.
const LOOKS_MAX: usize = 2;

impl Toolstack {
    /// Puts the parts together; nothing runs yet.
    pub(crate) fn of(config: Config, db: Db, accounts: Box<dyn Accounts>, disks: Disks) -> Self {
        let db = Arc::new(db);
        let plans = Plans::new(config.worker_pool_size, config.per_vm_parallel);
        let tasks = Arc::new(Tasks::new(&db));
        let sessions = Arc::new(Sessions::new(accounts, &db, &tasks));
        let events = Arc::new(Events::new(&db, &sessions));
        let operations = Arc::default();
        let storage = Arc::new(Storage::new(&config, (&db, &tasks), &disks, &operations));
        let (opening, ending) = (Arc::clone(&sessions), Arc::clone(&sessions));
        storage.give_sessions(storage::plugin_api::Sessions {
            open: Box::new(move || opening.open_for_plugin()),
            end: Box::new(move |session| ending.end(session)),
        });
        let state_dir = config.state_dir.clone();
        let histories = Arc::new(Histories::new(&config, &db, &disks));
        let vms = Arc::new(Vms::new(config, &db, &plans, &disks, &storage, &operations));
        let exports = Exports::new(&db, &disks, &storage, &sessions);
        let pool = Arc::new(Pool::new(state_dir.clone(), &db, &storage, &sessions));
        let backups = Arc::new(Backups::new(state_dir, &db, &pool));
        let replicas = Arc::new(Replicas::new(&db, &storage, &vms, &pool, &sessions));
        let ha = Arc::new(Ha::new(&db, &pool, &vms));
        let groups = Arc::new(Groups::new(&db, &pool));
        let motions = Motions::new(&db, (&storage, &vms, &pool, &exports), &sessions, &operations);
        let mut handlers = Handlers::default();
        pool::register(&mut handlers, &pool);
        ha::register(&mut handlers, &ha);
        replica::register(&mut handlers, &replicas);
        basics::register(&mut handlers, &db);
        events::register(&mut handlers, &events);
        sessions::register(&mut handlers, &sessions);
        tasks::register(&mut handlers, &tasks);
        storage::register(&mut handlers, &storage);
        vms::register(&mut handlers, &vms);
        groups::register(&mut handlers, &groups);
        motion::register(&mut handlers, &motions);
        exports::register(&mut handlers, &exports);
        history::register(&mut handlers, &histories);
        metrics::register(&mut handlers, &Arc::new(Metrics::new(&db, &disks, &histories)));
        Self {
            methods: Methods::new(&handlers),
            db,
            plans,
            storage,
            disks,
            vms,
            exports,
            pool,
            ha,
            groups,
            motions,
            backups,
            replicas,
            histories,
            sessions,
            tasks,
            events,
            handlers,
            is_recovering: Mutex::new(false),
            recovered: Condvar::new(),
            looks: Semaphore::new(LOOKS_MAX),
        }
    }

    /// Waits until [`Self::recover`] is over.
    pub(crate) fn wait_until_recovered(&self) {
        let mut is_recovering = self.is_recovering.lock();
        while *is_recovering {
            self.recovered.wait(&mut is_recovering);
        }
    }

    pub(crate) fn set_recovering(&self, is_recovering: bool) {
        *self.is_recovering.lock() = is_recovering;
        self.recovered.notify_all();
    }
}
