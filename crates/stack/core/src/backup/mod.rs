//! The database as a file: sent, and taken from one.
//!
//! A restore replaces all objects, so nothing may rest on those of before: it is refused while VMs run, disks or
//! unknown SRs are attached, tasks are pending. It is read wholly, compared, and left for the next start of the daemon,
//! which puts it in place before it opens the database ([`take_over`]); what is attached and runs is found again as by
//! any start.
//!
//! A backup of a host has the files of its daemon beside the database (`archive.rs`), and comes back in the same way
//! (`placed.rs`).

mod archive;
mod differences;
mod files;
mod hindrances;
pub(crate) mod host;
mod placed;
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
use host::FileReport;

pub use archive::{ACCOUNTS, CERTIFICATE, HOST_ARCHIVE_LEN_MAX, HostArchive, SETTINGS, sealed_host};
pub use files::HostFile;
pub use placed::{is_host_staged, take_host_over};
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
    files: OnceLock<Vec<HostFile>>,
}

impl std::fmt::Debug for Backups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backups").field("is_restoring", &self.is_restoring).finish_non_exhaustive()
    }
}

/// What a client is told of a restore.
#[derive(Debug, Serialize)]
struct Report<'a> {
    /// Of the dump.
    pool: String,
    version: String,
    date: String,
    objects: usize,
    #[serde(flatten)]
    differences: Differences,
    /// What becomes of the daemon's files, of a backup of a host.
    #[serde(skip_serializing_if = "<[FileReport]>::is_empty")]
    files: &'a [FileReport],
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
            files: OnceLock::new(),
        }
    }

    /// The daemon's files that a backup of this host has.
    pub fn have_files(&self, files: Vec<HostFile>) {
        let _ = self.files.set(files);
    }

    fn files(&self) -> &[HostFile] {
        self.files.get().map_or(&[], Vec::as_slice)
    }

    /// How the daemon starts again.
    pub fn restart_by(&self, restart: impl Fn() + Send + Sync + 'static) {
        let _ = self.restart.set(Box::new(restart));
    }

    /// Begins a start of the daemon, which takes what waits.
    pub(crate) fn restart(&self) {
        if let Some(restart) = self.restart.get() {
            tracing::info!("a dump or a backup takes the place of what there is: starting again");
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
    to: (OwnedFd, Accepted<'_>),
    is_taken: &dyn Fn() -> bool,
) -> Result<(), ApiError> {
    let text = call.part.db.dump().text();
    if text.len() > DUMP_LEN_MAX {
        let why = format!("the database has {} bytes as a dump, and {DUMP_LEN_MAX} are read", text.len());
        return Err(ApiError::internal(why));
    }
    send(call, text.as_bytes(), to, is_taken)
}

/// Sends a client these bytes.
fn send(
    call: &Call<Backups>,
    bytes: &[u8],
    (data, accepted): (OwnedFd, Accepted<'_>),
    is_taken: &dyn Fn() -> bool,
) -> Result<(), ApiError> {
    let cancelled = || ApiError::bare("TASK_CANCELLED");
    let mut client = Client::new(data, &call.progress)?;
    accepted(None);
    client.write_all(bytes).map_err(|_| cancelled())?;
    drop(client);
    if is_taken() { Ok(()) } else { Err(cancelled()) }
}

/// Everything that a client sends, up to one byte more than `max`.
fn receive(
    call: &Call<Backups>,
    (data, accepted): (OwnedFd, Accepted<'_>),
    max: usize,
) -> Result<(Client, Vec<u8>), ApiError> {
    let mut client = Client::new(data, &call.progress)?;
    accepted(None);
    let mut bytes = Vec::new();
    let limit = u64::try_from(max).unwrap_or(u64::MAX).saturating_add(1);
    Read::by_ref(&mut client)
        .take(limit)
        .read_to_end(&mut bytes)
        .map_err(|_| ApiError::bare("TASK_CANCELLED"))?;
    Ok((client, bytes))
}

/// `PUT /pool/xmldbdump`: looks at a dump, and leaves it for the next start unless it is a dry run. The client is sent
/// a report.
///
/// # Errors
/// The dump is damaged or of another pool, something is in the way: the database is not changed.
pub(crate) fn import(
    call: &Call<Backups>,
    how: (bool, bool),
    from: (OwnedFd, Accepted<'_>),
) -> Result<(), ApiError> {
    let (mut client, bytes) = receive(call, from, DUMP_LEN_MAX)?;
    let then = Dump::parse(&bytes)
        .map_err(|why| ApiError::new("INVALID_VALUE", ["database dump".to_owned(), why]))?;
    drop(bytes);
    let stage = || staged::stage(&call.part.state_dir, &then);
    let report = look(call, how, Wanted { then: &then, odd: Vec::new(), files: &[], stage: &stage })?;
    // A client that went away has missed it.
    let _ = client.write_all(report.as_bytes());
    Ok(())
}

/// What is to take the place of what there is.
struct Wanted<'a> {
    then: &'a Dump,
    /// What is odd about more than the dump.
    odd: Vec<String>,
    files: &'a [FileReport],
    /// Leaves it for the next start.
    stage: &'a dyn Fn() -> Result<(), String>,
}

/// Compares, and leaves it for the next start unless it is a dry run; the report, as JSON.
fn look(
    call: &Call<Backups>,
    (dry_run, force): (bool, bool),
    wanted: Wanted<'_>,
) -> Result<String, ApiError> {
    let (backups, then) = (&call.part, wanted.then);
    backups.check()?;
    let mut closed = None;
    if !dry_run {
        if backups.is_restoring.swap(true, Ordering::AcqRel) {
            return Err(backups.busy());
        }
        closed = Some(Closed(&backups.is_restoring));
    }
    let now = backups.db.dump();
    let mut odd = hindrances::oddities(backups, &now, then);
    odd.extend(wanted.odd);
    let own = call.progress.task().unwrap_or_default();
    let hindrances = hindrances::all(backups, &now, then, own)?;
    if !dry_run {
        if !hindrances.is_empty() {
            return Err(refusal(&hindrances, ""));
        }
        if !odd.is_empty() && !force {
            return Err(refusal(&odd, ". A dry run says what would change; force=true takes it as it is"));
        }
        (wanted.stage)().map_err(ApiError::internal)?;
        // Until the daemon has ended.
        std::mem::forget(closed.take());
    }
    drop(closed);
    let report = Report {
        pool: then.pool().to_owned(),
        version: then.version.clone(),
        date: then.date.clone(),
        objects: then.objects.len(),
        differences: differences::between(&now, then),
        files: wanted.files,
        odd,
        hindrances,
        dry_run,
        restarts: !dry_run && backups.restart.get().is_some(),
    };
    serde_json::to_string(&report).map_err(|error| ApiError::internal(error.to_string()))
}
