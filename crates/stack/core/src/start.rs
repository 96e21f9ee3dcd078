//! The toolstack is put together, started and kept tidy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};

use crate::accounts::{Accounts, NoAccounts, Peer};
use crate::config::Config;
use crate::db::Db;
use crate::disks::Disks;
use crate::{Toolstack, basics, dates, exports, groups, ha, history, replica, storage, vms};

/// What is old is looked for so often.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// Every so many sweeps all sessions are held against the accounts, changed or not: groups of a directory change
/// without a file of this host that does.
const SWEEPS_PER_REVIEW: u64 = 60;

/// Every so many sweeps storages are asked for their sizes.
const SWEEPS_PER_MEASURE: u64 = 12;

/// What SRs have to be attached in where nothing waits for the start.
const UNHURRIED: Duration = Duration::from_secs(600);

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
        Arc::new(Self::of(config, db, accounts, disks))
    }

    /// Everything a start does: [`Self::open`], then [`Self::recover`] without haste. Comes before the first call.
    ///
    /// # Errors
    /// The store's, or a part cannot be recovered.
    pub fn start(self: &Arc<Self>) -> Result<(), ApiError> {
        self.open()?;
        self.recover(Instant::now() + UNHURRIED)
    }

    /// Makes what must always be there (pool, host, networks, roles), and finds the disk processes that run. No storage
    /// is touched, so this takes as long however storage fares. From now on calls are answered: what only looks at
    /// once, what changes something when [`Self::recover`] is over.
    ///
    /// # Errors
    /// The store's.
    pub fn open(self: &Arc<Self>) -> Result<(), ApiError> {
        self.set_recovering(true);
        self.groups.give_send(self.sender());
        basics::start(&self.db)?;
        // Storage asks for the disk processes of its VDIs; recovery of VMs needs storage to deactivate VDIs.
        self.disks.adopt();
        storage::open(&self.storage)?;
        self.pool.follow()
    }

    /// Recovers what an earlier run left half done, and starts the removal of what gets old. SRs that are not attached
    /// at `until` are left to threads of their own.
    ///
    /// # Errors
    /// The store's, or a part cannot be recovered.
    pub fn recover(self: &Arc<Self>, until: Instant) -> Result<(), ApiError> {
        storage::recover(&self.storage, until)?;
        storage::listen_for_room(&self.storage);
        vms::recover(&self.vms)?;
        vms::listen(&self.vms);
        crate::motion::recover(&self.motions)?;
        exports::recover(&self.exports);
        exports::listen(&self.exports);
        history::listen(&self.histories);
        // A task that was resumed or finished is noted as such by now.
        self.tasks.fail_interrupted()?;
        self.sweep()?;
        // Before a client changes anything: what is reported as done must be done.
        self.db.started();
        self.pool.recover()?;
        self.set_recovering(false);
        groups::listen(&self.groups)?;
        replica::listen(&self.replicas)?;
        ha::listen(&self.ha)
    }

    /// Does messages of the toolstack's own, each in a session with all rights, as long as there is the toolstack.
    fn sender(self: &Arc<Self>) -> Box<groups::Sender> {
        let stack = Arc::downgrade(self);
        Box::new(move |method: &str, params: Vec<Value>| {
            let stack = stack.upgrade().ok_or_else(|| ApiError::internal("the daemon ends"))?;
            let session = stack.sessions.open_for_plugin()?;
            let params = std::iter::once(Value::from(session.as_str())).chain(params).collect();
            let peer = Peer { superuser: true, ..Peer::default() };
            let answer = stack.call(&peer, method, params);
            stack.sessions.end(&session);
            answer
        })
    }

    fn sweep(self: &Arc<Self>) -> Result<(), ApiError> {
        let stack = Arc::downgrade(self);
        let sweeper = std::thread::Builder::new().name("sweeper".to_owned());
        let sweeping = sweeper.spawn(move || {
            for turn in 1_u64.. {
                let Some(stack) = stack.upgrade() else { return };
                let is_due = turn.is_multiple_of(SWEEPS_PER_REVIEW);
                let reviewed = match is_due {
                    true => stack.sessions.review_again(),
                    false => stack.sessions.review(),
                };
                if let Err(error) = reviewed {
                    tracing::error!(%error, "sessions of accounts are refused until the accounts can be read");
                }
                stack.sessions.expire();
                let swept = stack.tasks.sweep(dates::now());
                let swept = swept.and_then(|()| basics::messages::sweep(&stack.db));
                if let Err(error) = swept {
                    tracing::warn!(%error, "old tasks and messages stay");
                }
                stack.storage.tend();
                if turn.is_multiple_of(SWEEPS_PER_MEASURE) {
                    stack.storage.measure_sizes();
                }
                stack.storage.sample();
                drop(stack);
                std::thread::sleep(SWEEP_EVERY);
            }
        });
        sweeping.map(drop).map_err(|error| ApiError::internal(format!("no thread for the sweeper: {error}")))
    }
}
