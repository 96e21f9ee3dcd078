//! Copies of the database on SRs, and what is brought back from them.
//!
//! An SR with `SR.enable_database_replication` has a VDI of type `metadata` ([`layout`]). The database is written there
//! some seconds after it changed; an SR that fails makes a message, and nothing waits for it. A host that has the SR,
//! of another pool, opens such a database as a session (`VDI.open_database`) that reads the objects of then, and
//! recovers VMs from it ([`recover`]): their records, with the disks that lie on SRs here.

mod layout;
mod recover;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tapio_model::{ApiError, Asked, ImageFormat, Value};

use crate::basics::messages::tell;
use crate::call::{Args, Call, Handlers};
use crate::db::{Db, Dump, Object};
use crate::plan::steps::step;
use crate::pool::Pool;
use crate::sessions::Sessions;
use crate::storage::{Storage, replica as vdis, transfer};
use crate::vms::Vms;

pub use layout::{ReplicaHead, newest, replica_of};

/// Changes within so long are written together.
const EVERY: Duration = Duration::from_secs(3);

/// What the storage puts in front of an export.
const EXPORT_HEAD_LEN: usize = 16;

/// The field that says whose database a VDI has.
const OF_POOL: &str = "metadata_of_pool";

/// How the last write of a VDI ended.
#[derive(Default)]
struct Written {
    /// Of the objects that it has.
    print: Option<[u8; 32]>,
    has_failed: bool,
}

/// The part of the toolstack that copies its database to SRs.
pub struct Replicas {
    db: Arc<Db>,
    storage: Arc<Storage>,
    vms: Arc<Vms>,
    pool: Arc<Pool>,
    sessions: Arc<Sessions>,
    /// By VDI. One VDI is written or read at a time.
    written: Mutex<BTreeMap<String, Written>>,
}

impl std::fmt::Debug for Replicas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replicas").finish_non_exhaustive()
    }
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, replicas: &Arc<Replicas>) {
    let mut handlers = handlers.of(replicas);
    handlers
        .on("SR.enable_database_replication", |call, args| enable(call, args.text(0)?).map(|()| Value::Void));
    handlers.on("SR.disable_database_replication", |call, args| {
        disable(call, args.text(0)?).map(|()| Value::Void)
    });
    handlers.on("SR.assert_supports_database_replication", |call, args| {
        vdis::assert_supports(&call.to(&call.part.storage), args.text(0)?).map(|()| Value::Void)
    });
    handlers.on("VDI.open_database", open_database);
    recover::register(&mut handlers);
}

/// Begins to write what changes, as long as there is the toolstack.
///
/// # Errors
/// There is no thread.
pub(crate) fn listen(replicas: &Arc<Replicas>) -> Result<(), ApiError> {
    let weak = Arc::downgrade(replicas);
    let thread = std::thread::Builder::new().name("replicas".to_owned());
    let writing = thread.spawn(move || {
        let mut seen = None;
        loop {
            std::thread::sleep(EVERY);
            let Some(replicas) = weak.upgrade() else { return };
            // One host of a pool writes. One that decides again later knows nothing of what others wrote meanwhile.
            if !replicas.pool.decides() {
                seen = None;
                replicas.written.lock().clear();
                continue;
            }
            let now = replicas.db.generation();
            if seen != Some(now) || replicas.is_behind() {
                replicas.turn();
                seen = Some(now);
            }
        }
    });
    writing
        .map(drop)
        .map_err(|error| ApiError::internal(format!("no thread for copies of the database: {error}")))
}

fn wrong(why: impl std::fmt::Display) -> ApiError {
    ApiError::new("COULD_NOT_IMPORT_DATABASE", [why.to_string()])
}

impl Replicas {
    pub(crate) fn new(
        db: &Arc<Db>,
        storage: &Arc<Storage>,
        vms: &Arc<Vms>,
        pool: &Arc<Pool>,
        sessions: &Arc<Sessions>,
    ) -> Self {
        Self {
            db: Arc::clone(db),
            storage: Arc::clone(storage),
            vms: Arc::clone(vms),
            pool: Arc::clone(pool),
            sessions: Arc::clone(sessions),
            written: Mutex::default(),
        }
    }

    /// The pool.
    fn own_pool(&self) -> Result<Arc<Object>, ApiError> {
        self.db.all("pool").into_iter().next().ok_or_else(|| ApiError::internal("there is no pool"))
    }

    /// VDIs of this pool's database, all or those of an SR.
    fn vdis(&self, sr: Option<&str>) -> Result<Vec<Arc<Object>>, ApiError> {
        let mut found = self.db.find("VDI", OF_POOL, &self.own_pool()?.reference);
        found.retain(|vdi| sr.is_none_or(|sr| vdi.text("SR") == sr));
        Ok(found)
    }

    /// Whether a write did not end well.
    fn is_behind(&self) -> bool {
        self.written.lock().values().any(|written| written.print.is_none())
    }

    /// Writes the database to each of its VDIs that does not have it as it is now. Comes every few seconds by itself.
    pub fn turn(&self) {
        // One host of a pool writes.
        if !self.pool.decides() {
            return;
        }
        let Ok(vdis) = self.vdis(None) else { return };
        if vdis.is_empty() {
            return;
        }
        let dump = self.db.dump();
        let print = dump.print();
        let mut text = None;
        for vdi in vdis {
            if self.written.lock().get(&vdi.reference).is_some_and(|written| written.print == Some(print)) {
                continue;
            }
            let text = text.get_or_insert_with(|| dump.text());
            let done = self.write(&vdi.reference, text.as_bytes(), print);
            self.tell(&vdi, done);
        }
    }

    fn write(&self, vdi: &str, text: &[u8], print: [u8; 32]) -> Result<(), ApiError> {
        let call = Call::own(&self.storage);
        let pool = self.own_pool()?.uuid()?;
        let mut written = self.written.lock();
        let heads = layout::heads(&mut |at, len| get(&call, vdi, at, len))?;
        let [(text_at, text), (head_at, head)] =
            layout::writes(heads, pool, text).map_err(ApiError::internal)?;
        put(&call, vdi, text_at, &text)?;
        step("replica:text-written");
        put(&call, vdi, head_at, &head)?;
        step("replica:written");
        written.entry(vdi.to_owned()).or_default().print = Some(print);
        Ok(())
    }

    /// Notes how a write ended; a message about the first that fails, and about the first behind it that does not.
    fn tell(&self, vdi: &Object, done: Result<(), ApiError>) {
        // Something else has the VDI, or its SR, for a moment.
        let is_busy = |error: &ApiError| matches!(&*error.code, "VDI_IN_USE" | "OTHER_OPERATION_IN_PROGRESS");
        let is_gone = self.db.get("VDI", &vdi.reference).is_err();
        let mut all = self.written.lock();
        if is_gone {
            all.remove(&vdi.reference);
            return;
        }
        let written = all.entry(vdi.reference.clone()).or_default();
        let before = written.has_failed;
        let (name, priority, body) = match &done {
            Ok(()) => {
                written.has_failed = false;
                ("METADATA_LUN_HEALTHY", 4, "the database is written to the SR again".to_owned())
            }
            Err(error) => {
                written.has_failed |= !is_busy(error);
                written.print = None;
                let body = format!("the database cannot be written to the VDI {}: {error}", vdi.text("uuid"));
                ("METADATA_LUN_BROKEN", 3, body)
            }
        };
        let now = written.has_failed;
        drop(all);
        let mut noted = Ok(());
        if vdi.bool("metadata_latest") == now || (done.is_ok() && !vdi.bool("metadata_latest")) {
            noted = self.db.set("VDI", &vdi.reference, "metadata_latest", Value::Bool(!now));
        }
        if now != before {
            if now {
                tracing::warn!("{body}");
            }
            let sr = self.db.get("SR", vdi.text("SR")).map(|sr| sr.text("uuid").to_owned());
            noted = noted.and(sr.and_then(|sr| tell(&self.db, name, priority, "SR", &sr, &body).map(drop)));
        }
        if let Err(error) = noted {
            tracing::warn!(%error, "it could not be noted how a copy of the database was written");
        }
    }

    /// The database in a VDI.
    ///
    /// # Errors
    /// `COULD_NOT_IMPORT_DATABASE`; those of an export.
    fn read(&self, vdi: &str) -> Result<Dump, ApiError> {
        let size = u64::try_from(self.db.get("VDI", vdi)?.int("virtual_size")).unwrap_or_default();
        if size < layout::VDI_LEN {
            return Err(wrong(format!("the VDI has {size} bytes, fewer than one that holds a database")));
        }
        let call = Call::own(&self.storage);
        let _written = self.written.lock();
        let found = newest(&mut |at, len| get(&call, vdi, at, len))?;
        let (_, text) = found.ok_or_else(|| wrong("the VDI does not hold a database that is whole"))?;
        Dump::parse(&text).map_err(wrong)
    }
}

fn pair() -> Result<(UnixStream, UnixStream), ApiError> {
    UnixStream::pair()
        .map_err(|error| ApiError::internal(format!("a socket for a copy of the database: {error}")))
}

/// Writes sectors, which are durable then.
fn put(call: &Call<Storage>, vdi: &str, at: u64, bytes: &[u8]) -> Result<(), ApiError> {
    let (mut ours, theirs) = pair()?;
    let asked = Asked::Import {
        vdi: Some(vdi.to_owned()),
        sr: None,
        format: ImageFormat::Raw,
        start: at,
        len: Some(bytes.len() as u64),
    };
    std::thread::scope(|scope| {
        // A storage that refuses reads nothing, and says why.
        scope.spawn(move || drop(ours.write_all(bytes)));
        transfer::import(call, &asked, theirs.into(), &mut |_| {}).map(drop)
    })
}

/// Reads bytes.
fn get(call: &Call<Storage>, vdi: &str, at: u64, len: usize) -> Result<Vec<u8>, ApiError> {
    let (mut ours, theirs) = pair()?;
    let asked = Asked::Export { vdi: vdi.to_owned(), base: None, format: ImageFormat::Raw, start: at };
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || {
            let mut bytes = vec![0; len];
            let read = ours.read_exact(&mut [0; EXPORT_HEAD_LEN]).and_then(|()| ours.read_exact(&mut bytes));
            // What follows is not wanted, and the export ends with its reader.
            read.is_ok().then_some(bytes)
        });
        let sent = transfer::export(call, &asked, theirs.into(), &mut |_| {}, &|| true);
        match (reading.join().ok().flatten(), sent) {
            (Some(bytes), _) => Ok(bytes),
            (None, Err(error)) => Err(error),
            (None, Ok(_)) => Err(wrong("the VDI is shorter than one that holds a database")),
        }
    })
}

/// Lets an SR have the database; it has it when this has ended.
fn enable(call: &Call<Replicas>, sr: &str) -> Result<(), ApiError> {
    let (replicas, storage) = (&call.part, call.to(&call.part.storage));
    vdis::assert_supports(&storage, sr)?;
    if !replicas.vdis(Some(sr))?.is_empty() {
        return Ok(());
    }
    let vdi = vdis::create(&storage, sr, layout::VDI_LEN, &replicas.own_pool()?.reference)?;
    let dump = replicas.db.dump();
    let done = replicas.write(&vdi, dump.text().as_bytes(), dump.print());
    if let Err(error) = done {
        // It is of no use, and the client hears why.
        if let Err(error) = vdis::destroy(&storage, &vdi) {
            tracing::warn!(vdi, %error, "a VDI for the database stays, and is written to later");
        }
        return Err(error);
    }
    replicas.db.set("VDI", &vdi, "metadata_latest", Value::Bool(true))
}

/// Takes the database off an SR.
fn disable(call: &Call<Replicas>, sr: &str) -> Result<(), ApiError> {
    let replicas = &call.part;
    replicas.db.get("SR", sr)?;
    for vdi in replicas.vdis(Some(sr))? {
        // No write comes between.
        let mut written = replicas.written.lock();
        vdis::destroy(&call.to(&replicas.storage), &vdi.reference)?;
        written.remove(&vdi.reference);
    }
    Ok(())
}

fn open_database(call: &Call<Replicas>, args: &Args) -> Result<Value, ApiError> {
    let vdi = call.part.db.get("VDI", args.text(0)?)?;
    let dump = call.part.read(&vdi.reference)?;
    let view = Db::of_dump(&dump)?;
    call.part.sessions.open_view(&call.caller, Arc::new(view)).map(Value::String)
}
