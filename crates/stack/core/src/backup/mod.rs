//! The database as a file: sent, and taken from one.
//!
//! A restore replaces all objects, so nothing may rest on those of before: it is refused while VMs run, disks or
//! unknown SRs are attached, tasks are pending. It is read wholly, compared, and left for the next start of the daemon,
//! which puts it in place before it opens the database ([`take_over`]); what is attached and runs is found again as by
//! any start.

mod differences;
mod hindrances;
mod staged;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use serde::Serialize;
use tapio_model::ApiError;

use crate::call::Call;
use crate::db::{DUMP_LEN_MAX, Db, Dump};
use crate::pool::Pool;
use crate::storage::transfer::Accepted;
use crate::vms::archive::client::Client;
use differences::Differences;

pub use staged::{is_staged, take_over};

/// Ends the daemon so that it starts again.
type Restart = Box<dyn Fn() + Send + Sync>;

/// The part of the toolstack that sends and takes its database.
pub struct Backups {
    db: Arc<Db>,
    pool: Arc<Pool>,
    state_dir: PathBuf,
    /// Whether a dump is being taken, or waits for the next start: nothing else changes the objects.
    is_restoring: AtomicBool,
    restart: OnceLock<Restart>,
}

impl std::fmt::Debug for Backups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backups").field("is_restoring", &self.is_restoring).finish_non_exhaustive()
    }
}

/// What a client is told of a restore.
#[derive(Debug, Serialize)]
struct Report {
    /// Of the dump.
    pool: String,
    version: String,
    date: String,
    objects: usize,
    #[serde(flatten)]
    differences: Differences,
    /// What is odd about the dump.
    odd: Vec<String>,
    /// What is in the way, of a dry run.
    hindrances: Vec<String>,
    dry_run: bool,
    /// Whether the daemon starts again by itself.
    restarts: bool,
}

/// Lets other changes in again.
struct Closed<'a>(&'a AtomicBool);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// As many sentences as an error says.
const TOLD_MAX: usize = 5;

fn refusal(why: &[String], next: &str) -> ApiError {
    let more = why.len().saturating_sub(TOLD_MAX);
    let mut text = why.iter().take(TOLD_MAX).cloned().collect::<Vec<_>>().join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    text.push_str(next);
    ApiError::new("OPERATION_NOT_ALLOWED", [text])
}

impl Backups {
    pub(crate) fn new(state_dir: PathBuf, db: &Arc<Db>, pool: &Arc<Pool>) -> Self {
        Self {
            db: Arc::clone(db),
            pool: Arc::clone(pool),
            state_dir,
            is_restoring: AtomicBool::new(false),
            restart: OnceLock::new(),
        }
    }

    /// How the daemon starts again.
    pub fn restart_by(&self, restart: impl Fn() + Send + Sync + 'static) {
        let _ = self.restart.set(Box::new(restart));
    }

    /// Begins a start of the daemon, which takes the dump that waits.
    pub(crate) fn restart(&self) {
        if let Some(restart) = self.restart.get() {
            tracing::info!("a dump takes the place of the database: starting again");
            restart();
        }
    }

    /// Nothing is changed while a dump is taken, or waits.
    ///
    /// # Errors
    /// `OTHER_OPERATION_IN_PROGRESS`.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        match self.is_restoring.load(Ordering::Acquire) {
            true => Err(self.busy()),
            false => Ok(()),
        }
    }

    fn busy(&self) -> ApiError {
        let pool = self.db.all("pool").first().map(|pool| pool.reference.clone()).unwrap_or_default();
        ApiError::new("OTHER_OPERATION_IN_PROGRESS", ["pool", &pool, "restore_database", ""])
    }
}

/// `GET /pool/xmldbdump`: sends all objects.
///
/// # Errors
/// The client has gone; the database is longer than a restore takes.
pub(crate) fn export(
    call: &Call<Backups>,
    (data, accepted): (OwnedFd, Accepted<'_>),
    is_taken: &dyn Fn() -> bool,
) -> Result<(), ApiError> {
    let text = call.part.db.dump().text();
    if text.len() > DUMP_LEN_MAX {
        let why = format!("the database has {} bytes as a dump, and {DUMP_LEN_MAX} are read", text.len());
        return Err(ApiError::internal(why));
    }
    let cancelled = || ApiError::bare("TASK_CANCELLED");
    let mut client = Client::new(data, &call.progress)?;
    accepted(None);
    client.write_all(text.as_bytes()).map_err(|_| cancelled())?;
    drop(client);
    if is_taken() { Ok(()) } else { Err(cancelled()) }
}

/// `PUT /pool/xmldbdump`: looks at a dump, and leaves it for the next start unless it is a dry run. The client is sent
/// a report.
///
/// # Errors
/// The dump is damaged or of another pool, something is in the way: the database is not changed.
pub(crate) fn import(
    call: &Call<Backups>,
    (dry_run, force): (bool, bool),
    (data, accepted): (OwnedFd, Accepted<'_>),
) -> Result<(), ApiError> {
    let mut client = Client::new(data, &call.progress)?;
    accepted(None);
    let mut bytes = Vec::new();
    let limit = u64::try_from(DUMP_LEN_MAX).unwrap_or(u64::MAX).saturating_add(1);
    Read::by_ref(&mut client)
        .take(limit)
        .read_to_end(&mut bytes)
        .map_err(|_| ApiError::bare("TASK_CANCELLED"))?;
    let report = look(call, (dry_run, force), &bytes)?;
    drop(bytes);
    let text = serde_json::to_string(&report).map_err(|error| ApiError::internal(error.to_string()))?;
    // A client that went away has missed it.
    let _ = client.write_all(text.as_bytes());
    Ok(())
}

fn look(call: &Call<Backups>, (dry_run, force): (bool, bool), bytes: &[u8]) -> Result<Report, ApiError> {
    let backups = &call.part;
    let then = Dump::parse(bytes)
        .map_err(|why| ApiError::new("INVALID_VALUE", ["database dump".to_owned(), why]))?;
    backups.check()?;
    let mut closed = None;
    if !dry_run {
        if backups.is_restoring.swap(true, Ordering::AcqRel) {
            return Err(backups.busy());
        }
        closed = Some(Closed(&backups.is_restoring));
    }
    let now = backups.db.dump();
    let odd = hindrances::oddities(backups, &now, &then);
    let own = call.progress.task().unwrap_or_default();
    let hindrances = hindrances::all(backups, &now, &then, own)?;
    if !dry_run {
        if !hindrances.is_empty() {
            return Err(refusal(&hindrances, ""));
        }
        if !odd.is_empty() && !force {
            return Err(refusal(&odd, ". A dry run says what would change; force=true takes it as it is"));
        }
        staged::stage(&backups.state_dir, &then).map_err(ApiError::internal)?;
        // Until the daemon has ended.
        std::mem::forget(closed.take());
    }
    drop(closed);
    Ok(Report {
        pool: then.pool().to_owned(),
        version: then.version.clone(),
        date: then.date.clone(),
        objects: then.objects.len(),
        differences: differences::between(&now, &then),
        odd,
        hindrances,
        dry_run,
        restarts: !dry_run && backups.restart.get().is_some(),
    })
}
