//! The table of exports, which changes while clients come and go.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tapio_block::DiskHandle;

use super::guard::{Guard, Key, key_of};
use super::handshake::{Catalog, Described, Listed, Refusal};
use super::limits::{CONNECTIONS_MAX, DATA_THREAD_TIME, EXPORTS_MAX};
use super::session::Permit;
use super::wire::STRING_LEN_MAX;

/// A disk under the name that clients know it by.
#[derive(Clone, Debug)]
pub struct Export {
    /// At most 4096 bytes of UTF-8 without NUL; may be empty.
    pub name: String,
    /// For people; the same bounds.
    pub description: String,
    /// The disk.
    pub disk: DiskHandle,
    /// Whether writes are refused here, whatever the disk allows.
    pub read_only: bool,
    /// Whether the disk zeroes faster than it writes: FAST_ZERO is refused otherwise.
    pub fast_zero: bool,
    /// Clients at once; the server as a whole takes 64.
    pub connections_max: usize,
    /// With one the export is in no list, and only clients with one of its secret names find it.
    pub guard: Option<Arc<Guard>>,
}

impl Export {
    /// A writable export without a description.
    pub fn new(name: impl Into<String>, disk: DiskHandle) -> Self {
        let (name, description) = (name.into(), String::new());
        Self {
            name,
            description,
            disk,
            read_only: false,
            fast_zero: false,
            connections_max: CONNECTIONS_MAX,
            guard: None,
        }
    }
}

/// Why the table was not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportError {
    /// The name or description is longer than the protocol allows or contains NUL.
    BadName(String),
    /// There is an export of this name.
    Exists(String),
    /// There are as many exports as there may be.
    TooMany,
    /// There is no export of this name.
    Unknown(String),
    /// Clients are connected.
    InUse {
        /// The export.
        name: String,
        /// How many.
        count: usize,
    },
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadName(name) => write!(
                f,
                "'{}' cannot name or describe an export: at most {STRING_LEN_MAX} bytes, no NUL",
                name.chars().take(80).collect::<String>().escape_debug()
            ),
            Self::Exists(name) => write!(f, "there is an export '{name}' already: remove it first"),
            Self::TooMany => write!(f, "there are {EXPORTS_MAX} exports already: remove one first"),
            Self::Unknown(name) => write!(f, "there is no export '{name}'"),
            Self::InUse { name, count } => {
                write!(f, "export '{name}' has {count} connections: disconnect them or force the removal")
            }
        }
    }
}

impl std::error::Error for ExportError {}

/// An export with its clients counted.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) export: Export,
    pub(super) connections: Arc<AtomicUsize>,
    /// Whether its clients wait; those that come later too.
    pub(super) held: Arc<AtomicBool>,
    /// Whether it has been taken out: a client that found it before comes too late.
    pub(super) removed: AtomicBool,
}

/// All exports of a server.
#[derive(Debug, Default)]
pub(super) struct Exports {
    table: Mutex<BTreeMap<String, Arc<Entry>>>,
    /// Clients of all exports.
    connections: Arc<AtomicUsize>,
}

impl Exports {
    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Entry>>> {
        // Every change is a single call on the map: a panic elsewhere cannot leave it half done.
        self.table.lock()
    }

    pub(super) fn add(&self, export: Export) -> Result<(), ExportError> {
        for text in [&export.name, &export.description] {
            if text.len() > STRING_LEN_MAX || text.contains('\0') {
                return Err(ExportError::BadName(text.clone()));
            }
        }
        let mut table = self.table();
        if table.contains_key(&export.name) {
            return Err(ExportError::Exists(export.name));
        }
        if table.len() >= EXPORTS_MAX {
            return Err(ExportError::TooMany);
        }
        let name = export.name.clone();
        let entry = Entry {
            export,
            connections: Arc::default(),
            held: Arc::default(),
            removed: AtomicBool::new(false),
        };
        table.insert(name, Arc::new(entry));
        Ok(())
    }

    /// Takes an export out, so that no new client finds it.
    pub(super) fn remove(&self, name: &str, force: bool) -> Result<Arc<Entry>, ExportError> {
        let mut table = self.table();
        let entry = table.get(name).ok_or_else(|| ExportError::Unknown(name.to_string()))?;
        let count = entry.connections.load(Ordering::Relaxed);
        if count > 0 && !force {
            return Err(ExportError::InUse { name: name.to_string(), count });
        }
        entry.removed.store(true, Ordering::Release);
        table.remove(name).ok_or_else(|| ExportError::Unknown(name.to_string()))
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.table().keys().cloned().collect()
    }

    /// The export that this server knows by this name.
    pub(super) fn get(&self, name: &str) -> Option<Arc<Entry>> {
        self.table().get(name).map(Arc::clone)
    }

    /// The export that a client means by a name, and the key by which it was found if that is secret.
    fn find(&self, name: &str) -> Option<(Arc<Entry>, Option<Key>)> {
        let table = self.table();
        let key = key_of(name);
        let admits =
            |entry: &&Arc<Entry>| entry.export.guard.as_ref().is_some_and(|guard| guard.admits(&key));
        if let Some(entry) = table.values().find(admits) {
            return Some((Arc::clone(entry), Some(key)));
        }
        let is_open = |entry: &&Arc<Entry>| entry.export.guard.is_none();
        let found = match table.get(name).filter(is_open) {
            Some(entry) => Some(Arc::clone(entry)),
            // The only export is the default one; and a nameless one answers to any name, as tapdisk's does, whose
            // clients make names up.
            None => {
                let only = table.values().next().filter(|_| table.len() == 1).filter(is_open);
                only.filter(|only| name.is_empty() || only.export.name.is_empty()).map(Arc::clone)
            }
        };
        found.map(|entry| (entry, None))
    }
}

/// What a client chose, with its place taken.
#[derive(Debug)]
pub(super) struct Entered {
    pub(super) entry: Arc<Entry>,
    pub(super) permit: Permit,
    /// The secret name by which it was found.
    pub(super) key: Option<Key>,
}

/// The table as one handshake sees it.
#[derive(Debug)]
pub(super) struct Visit<'a> {
    exports: &'a Exports,
    pub(super) entered: Option<Entered>,
}

impl<'a> Visit<'a> {
    pub(super) const fn new(exports: &'a Exports) -> Self {
        Self { exports, entered: None }
    }
}

impl Catalog for Visit<'_> {
    fn list(&self) -> Vec<Listed> {
        let table = self.exports.table();
        let listed = |entry: &Arc<Entry>| Listed {
            name: entry.export.name.clone(),
            description: entry.export.description.clone(),
        };
        table.values().filter(|entry| entry.export.guard.is_none()).map(listed).collect()
    }

    fn find(&mut self, name: &str, enter: bool) -> Result<Described, Refusal> {
        let (entry, key) = self.exports.find(name).ok_or(Refusal::Unknown)?;
        let export = &entry.export;
        // Asked anew each time: the disk may have been resized.
        let geometry = export
            .disk
            .call(DATA_THREAD_TIME, |data_thread| data_thread.port.geometry())
            .map_err(|_| Refusal::Down)?;
        let described = Described {
            name: export.name.clone(),
            description: export.description.clone(),
            len: geometry.len,
            block_len_min: geometry.logical_block_len,
            block_len_preferred: geometry.physical_block_len,
            read_only: export.read_only || geometry.read_only,
            fast_zero: export.fast_zero,
        };
        if enter {
            let places =
                [(&self.exports.connections, CONNECTIONS_MAX), (&entry.connections, export.connections_max)];
            let permit = Permit::take(&places).ok_or(Refusal::Busy)?;
            self.entered = Some(Entered { entry, permit, key });
        }
        Ok(described)
    }
}
