//! Histories of VMs, SRs and the host, sampled all the time, for clients that draw curves as XenServer's do.
//!
//! ```text
//!   pages of counters, records, /proc ── sampler ──> histories ── answers, data sources
//!                                                        |    └── alarms: messages to the administrator
//!                                                        └─────── files: what outlives the daemon
//! ```
//!
//! Each of the three has a thread of its own, so that a file system that hangs delays no sample. No disk process and
//! no storage is asked: the sampler reads pages in shared memory. Each history has a lock, which is held while rows
//! are added or copied, and never while a text is made of them. Memory is bounded: see [`SOURCES_MAX`].

mod alarms;
mod answer;
mod disks;
mod files;
mod host;
mod sampler;
mod sources;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tapio_history::{History, Kind, Layout, Sample, Source};
use uuid::Uuid;

pub(crate) use host::samples as host_samples;

use crate::basics::this_host;
use crate::call::Handlers;
use crate::config::Config;
use crate::db::{Db, Object};
use crate::disks::Disks;

/// Seconds between samples.
const STEP_S: u32 = 5;

/// Seconds between samples, for tests.
const STEP_VARIABLE: &str = "TAPIO_SAMPLE_S";

/// Sources of all histories together. One with all its rows takes 3,096 bytes (four times as many where
/// `create_min_max_in_new_VM_RRDs` is set), so that histories never take more than some 250 MB.
const SOURCES_MAX: usize = 65_536;

/// What a history is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Host,
    Vm(Uuid),
    Sr(Uuid),
}

impl Owner {
    /// Of the VM, SR or host that this is; other hosts have their own daemon.
    fn of(db: &Db, class: &str, object: &Object) -> Option<Self> {
        match class {
            "host" => (object.reference == this_host(db)).then_some(Self::Host),
            "VM" => object.uuid().ok().map(Self::Vm),
            "SR" => object.uuid().ok().map(Self::Sr),
            _ => None,
        }
    }

    /// The object; none: it is gone.
    fn object(self, db: &Db) -> Option<Arc<Object>> {
        match self {
            Self::Host => db.get("host", &this_host(db)).ok(),
            Self::Vm(uuid) => db.by_uuid("VM", &uuid.to_string()).ok(),
            Self::Sr(uuid) => db.by_uuid("SR", &uuid.to_string()).ok(),
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Vm(uuid) => write!(f, "vm-{uuid}"),
            Self::Sr(uuid) => write!(f, "sr-{uuid}"),
        }
    }
}

/// A history that others use too.
type Shared = Arc<Mutex<History>>;

/// Histories of all objects.
#[derive(Debug)]
pub struct Histories {
    db: Arc<Db>,
    disks: Disks,
    layout: Layout,
    all: Mutex<BTreeMap<Owner, Shared>>,
    /// Where they are kept.
    dir: PathBuf,
    /// Held by the one that writes files.
    writing: Mutex<files::Written>,
    /// Held while the text of an answer is made: one at a time, so that their memory is bounded.
    turn: Mutex<()>,
}

/// Values of one moment, by their owners.
type Samples = BTreeMap<Owner, Vec<Sample>>;

impl Histories {
    pub(crate) fn new(config: &Config, db: &Arc<Db>, disks: &Disks) -> Self {
        let step_s = std::env::var(STEP_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(STEP_S);
        Self {
            db: Arc::clone(db),
            disks: disks.clone(),
            layout: Layout::new(step_s, false),
            all: Mutex::default(),
            dir: config.state_dir.join("history"),
            writing: Mutex::default(),
            turn: Mutex::default(),
        }
    }

    /// All of them. No lock is held when this returns.
    fn list(&self) -> Vec<(Owner, Shared)> {
        self.all.lock().iter().map(|(owner, history)| (*owner, Arc::clone(history))).collect()
    }

    /// Sources of all histories, and the bytes that they take.
    pub(crate) fn held(&self) -> (usize, usize) {
        self.list().iter().fold((0, 0), |(sources, bytes), (_, history)| {
            let history = history.lock();
            (sources + history.count(), bytes + history.held_len())
        })
    }

    /// The history of one object, once it was sampled.
    fn of(&self, owner: Owner) -> Option<Shared> {
        self.all.lock().get(&owner).map(Arc::clone)
    }

    /// The history of one object as it is now; an object of which nothing was sampled has an empty one.
    fn copy(&self, owner: Owner) -> History {
        self.of(owner).map_or_else(|| History::new(self.layout.clone(), 0), |history| history.lock().clone())
    }
}

/// One value; name, text for people and units.
fn sample(
    (name, doc, units): (impl Into<String>, &'static str, &'static str),
    kind: Kind,
    value: f64,
) -> Sample {
    let source = Source {
        name: name.into().into(),
        doc: doc.into(),
        units: units.into(),
        kind,
        min: 0.0,
        max: f64::INFINITY,
    };
    Sample { source, value, begins: false }
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, histories: &Arc<Histories>) {
    answer::register(handlers, histories);
    sources::register(handlers, histories);
}

/// Starts the threads of this part. They end with the toolstack.
pub(crate) fn listen(histories: &Arc<Histories>) {
    sampler::start(histories);
    files::start(histories);
    alarms::start(histories);
}
