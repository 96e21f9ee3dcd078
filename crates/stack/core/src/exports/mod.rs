//! VDIs that are read by NBD: `VDI.get_nbd_info`.
//!
//! The first client that asks for a VDI gets a disk process that opens its images for reading and serves them itself;
//! the daemon is not on the way of the data. The name of the export, `/<VDI>?session_id=<session>`, is a secret: the
//! process knows its digest, and the daemon takes the name from it when the session ends. The process goes on for as
//! long as it has clients, and then while a session may connect, for a bounded time (`lease`). It has the VDI open as a
//! read-only VBD has, so that garbage collection and forks of its chain pause it; an operation that needs the VDI for
//! itself ends an export without clients, and is refused by one that has some.

mod landing;
mod lease;
mod places;
mod serve;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tapio_model::{ApiError, Value};
use uuid::Uuid;

use crate::args::Args;
use crate::call::Handlers;
use crate::db::Db;
use crate::disks::Disks;
use crate::sessions::{Session, Sessions};
use crate::storage::{self, Storage};

pub(crate) use lease::listen;
pub(crate) use serve::recover;

/// A call to the exports.
type Call = crate::call::Call<Exports>;

/// The server's certificate, as clients and disk processes need it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Directory with `server-cert.pem` and `server-key.pem`.
    pub dir: PathBuf,
    /// The certificate's chain, as PEM.
    pub cert: String,
    /// A name the certificate is valid for.
    pub subject: String,
}

/// How exports behave.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// First and last TCP port.
    pub ports: (u16, u16),
    /// How long an export without clients stays while its sessions are open.
    pub lease: Duration,
    /// How long a client may neither ask for anything nor take anything.
    pub client_time: Duration,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self {
            ports: (10809, 11064),
            lease: Duration::from_secs(3600),
            client_time: Duration::from_secs(600),
        }
    }
}

type FindIdentity = dyn Fn() -> Result<Identity, String> + Send + Sync;

/// Exports of this host.
pub struct Exports {
    db: Arc<Db>,
    disks: Disks,
    storage: Arc<Storage>,
    sessions: Arc<Sessions>,
    options: RwLock<(ExportOptions, Option<Arc<FindIdentity>>)>,
    /// By the VDI's reference.
    open: Mutex<BTreeMap<String, Arc<Export>>>,
}

impl fmt::Debug for Exports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exports").finish_non_exhaustive()
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        // The thread that looks after them finds that there are none any more.
        self.disks.look_at_exports();
    }
}

/// A VDI that is exported.
#[derive(Debug)]
struct Export {
    /// The disk's name among those of this host.
    id: Uuid,
    /// The VDI's reference.
    vdi: String,
    /// Locked while the process is started, ended or given names.
    state: Mutex<State>,
    /// Its process did not answer when it was asked last: it is asked by a thread of its own.
    is_silent: AtomicBool,
}

impl Export {
    fn new(id: Uuid, vdi: &str, state: State) -> Self {
        Self { id, vdi: vdi.to_owned(), state: Mutex::new(state), is_silent: AtomicBool::new(false) }
    }
}

#[derive(Debug)]
struct State {
    /// It has been ended: a call that finds it looks again.
    is_over: bool,
    /// Sessions that may connect, by the names that they were given, and when that was.
    grants: BTreeMap<String, (Arc<Session>, Instant)>,
    /// When it was asked for, or had a client, last.
    used: Instant,
}

impl Exports {
    /// None is known yet.
    pub(crate) fn new(
        db: &Arc<Db>,
        disks: &Disks,
        storage: &Arc<Storage>,
        sessions: &Arc<Sessions>,
    ) -> Arc<Self> {
        let exports = Arc::new(Self {
            db: Arc::clone(db),
            disks: disks.clone(),
            storage: Arc::clone(storage),
            sessions: Arc::clone(sessions),
            options: RwLock::default(),
            open: Mutex::default(),
        });
        let weak = Arc::downgrade(&exports);
        storage
            .on_conflict(Box::new(move |vdi| weak.upgrade().is_some_and(|exports| exports.gives_way(vdi))));
        let weak = Arc::downgrade(&exports);
        sessions.on_change(Box::new(move || {
            if let Some(exports) = weak.upgrade() {
                exports.withdraw_names();
            }
        }));
        exports
    }

    /// How exports behave from now on, and where the certificate of those to come is found.
    pub fn configure(
        &self,
        options: ExportOptions,
        identity: impl Fn() -> Result<Identity, String> + Send + Sync + 'static,
    ) {
        *self.options.write() = (options, Some(Arc::new(identity)));
    }

    fn options(&self) -> ExportOptions {
        self.options.read().0
    }

    fn identity(&self) -> Result<Identity, ApiError> {
        let find = self.options.read().1.clone();
        let find = find.ok_or_else(|| ApiError::internal("this toolstack has no certificate for exports"))?;
        find().map_err(|why| ApiError::internal(format!("the certificate for exports: {why}")))
    }
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, exports: &Arc<Exports>) {
    let mut handlers = handlers.of(exports);
    handlers.on("VDI.get_nbd_info", get_nbd_info);
}

/// A record for each address at which the VDI can be read; none if no network is for NBD.
fn get_nbd_info(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let vdi = call.part.db.get("VDI", args.text(0)?)?;
    storage::has_data(&vdi)?;
    let places = places::of_this_host(&call.part.db);
    if places.is_empty() {
        return Ok(Value::Set(Vec::new()));
    }
    let identity = call.part.identity()?;
    let session = call.part.sessions.peek(&call.caller.session);
    let session = session.ok_or_else(|| ApiError::new("SESSION_INVALID", [call.caller.session.as_str()]))?;
    let name = format!("/{}?session_id={}", vdi.text("uuid"), session.reference);
    let export = serve::grant(call, &vdi, (&places, &identity), (&name, &session))?;
    let record = |address: &std::net::IpAddr| {
        Value::Map(BTreeMap::from([
            ("exportname".to_owned(), Value::string(&name)),
            ("address".to_owned(), Value::string(address.to_string())),
            ("port".to_owned(), Value::Int(export.port.into())),
            ("cert".to_owned(), Value::string(&identity.cert)),
            ("subject".to_owned(), Value::string(&identity.subject)),
        ]))
    };
    Ok(Value::Set(export.places.iter().map(|place| record(&place.address)).collect()))
}
