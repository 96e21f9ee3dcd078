//! A store whose file system may be full when it is opened: rows are read all the same, and commits are taken again
//! once there is room.
//!
//! While there is none, the rows are held in memory. What the start of the owner commits is applied there, and kept for
//! the file: the first commit after the start that finds room opens the file and writes what was kept, in one
//! transaction, before its own. When the process ends before that, it is as if it had been killed before those commits:
//! the next start does them again. Commits after the start are refused until then.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use super::{Sqlite, file};
use crate::{Memory, Revision, Row, Store, StoreError, Txn};

/// Room that must be there before the file is opened again: for the log of SQLite, its index, and what was kept.
const ROOM_LEN: usize = 1 << 20;

/// Rows held in memory while the file system is full.
struct Held {
    rows: Memory,
    /// What the start committed, for the file.
    kept: Mutex<Vec<Txn>>,
    why: String,
    /// The file where it could be opened.
    sqlite: Option<Sqlite>,
    /// The store's lock where it could not.
    lock: Option<File>,
}

enum State {
    Open(Sqlite),
    Held(Held),
    /// Between the two, for as long as the lock is held; and when the file could not be opened again.
    Closed,
}

/// Rows in a file of SQLite, on a file system that may be full.
pub struct DeferringStore {
    path: PathBuf,
    state: RwLock<State>,
    /// Whether the owner is still starting.
    is_starting: Mutex<bool>,
}

impl fmt::Debug for DeferringStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferringStore").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Whether there is room in the file's directory; the cause where not.
fn room(path: &Path) -> Result<(), String> {
    let probe = file::beside(path, ".room");
    let write = || {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&probe)?;
        file.write_all(&vec![0xff; ROOM_LEN])?;
        file.sync_all()
    };
    let written = write();
    let _ = std::fs::remove_file(&probe);
    match written {
        Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            Err(format!("the file system of {} is full ({error})", path.display()))
        }
        // Anything else is said by what it hinders.
        _ => Ok(()),
    }
}

impl DeferringStore {
    /// Opens the file, or, where its file system is full, what it holds. The owner starts until [`Store::started`].
    ///
    /// # Errors
    /// As [`Sqlite::open`], where the cause is another one, or nothing was ever stored.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let state = match Sqlite::open(path) {
            Ok(sqlite) => State::Open(sqlite),
            Err(error) => match room(path) {
                Ok(()) => return Err(error),
                Err(why) => {
                    let lock = file::take_lock(path)?;
                    let rows = file::read_all(path)?;
                    State::Held(Held { rows, kept: Mutex::default(), why, sqlite: None, lock: Some(lock) })
                }
            },
        };
        Ok(Self { path: path.to_owned(), state: RwLock::new(state), is_starting: Mutex::new(true) })
    }

    /// Why nothing can be written now.
    pub fn full(&self) -> Option<String> {
        match &*self.state.read() {
            State::Held(held) => Some(held.why.clone()),
            State::Open(_) | State::Closed => None,
        }
    }

    /// Why no copy was made when the file was opened.
    pub fn backup_error(&self) -> Option<String> {
        match &*self.state.read() {
            State::Open(sqlite) => sqlite.backup_error().map(str::to_owned),
            State::Held(_) | State::Closed => None,
        }
    }

    fn closed(&self) -> StoreError {
        StoreError::Failed(format!("{} could not be opened again; restart its daemon", self.path.display()))
    }

    /// Holds the rows in memory from now on, where the file system is full.
    fn hold(&self) -> bool {
        let mut state = self.state.write();
        let State::Open(sqlite) = &*state else { return matches!(&*state, State::Held(_)) };
        let Err(why) = room(&self.path) else { return false };
        let Ok(rows) = sqlite.all_rows() else { return false };
        if let State::Open(sqlite) = std::mem::replace(&mut *state, State::Closed) {
            *state =
                State::Held(Held { rows, kept: Mutex::default(), why, sqlite: Some(sqlite), lock: None });
        }
        true
    }

    /// Writes what was kept, where there is room again.
    fn write_kept(&self) -> Result<(), StoreError> {
        if matches!(&*self.state.read(), State::Open(_)) {
            return Ok(());
        }
        let mut state = self.state.write();
        let State::Held(held) = &mut *state else { return Ok(()) };
        if let Err(why) = room(&self.path) {
            held.why = why;
            let why = &held.why;
            return Err(StoreError::Failed(format!(
                "{why}: what is stored can be read, nothing can be changed; make room there and repeat"
            )));
        }
        let sqlite = match held.sqlite.take() {
            Some(sqlite) => sqlite,
            None => {
                // The file takes the lock itself.
                drop(held.lock.take());
                Sqlite::open(&self.path).inspect_err(|_| held.lock = file::take_lock(&self.path).ok())?
            }
        };
        let written = sqlite.commit_all(&held.kept.lock());
        if let Err(error) = written {
            held.sqlite = Some(sqlite);
            return Err(error);
        }
        *state = State::Open(sqlite);
        Ok(())
    }
}

impl Store for DeferringStore {
    fn get(&self, key: &str) -> Result<Option<Row>, StoreError> {
        match &*self.state.read() {
            State::Open(sqlite) => sqlite.get(key),
            State::Held(held) => held.rows.get(key),
            State::Closed => Err(self.closed()),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Row>, StoreError> {
        match &*self.state.read() {
            State::Open(sqlite) => sqlite.list(prefix),
            State::Held(held) => held.rows.list(prefix),
            State::Closed => Err(self.closed()),
        }
    }

    fn commit(&self, txn: Txn) -> Result<Revision, StoreError> {
        let is_starting = *self.is_starting.lock();
        if !is_starting {
            self.write_kept()?;
        }
        let refused = match &*self.state.read() {
            State::Open(sqlite) if !is_starting => return sqlite.commit(txn),
            State::Open(sqlite) => match sqlite.commit(txn.clone()) {
                Err(error @ StoreError::Failed(_)) => error,
                answer => return answer,
            },
            State::Held(held) if is_starting => return held.commit(txn),
            State::Held(held) => return Err(StoreError::Failed(held.why.clone())),
            State::Closed => return Err(self.closed()),
        };
        if !self.hold() {
            return Err(refused);
        }
        match &*self.state.read() {
            State::Held(held) => held.commit(txn),
            _ => Err(refused),
        }
    }

    /// A waiting call delays a change of the state, so it waits for a short time at most; the caller asks again.
    fn changes(&self, after: Revision, wait: Duration) -> Result<Vec<Row>, StoreError> {
        let wait = wait.min(Duration::from_millis(100));
        match &*self.state.read() {
            State::Open(sqlite) => sqlite.changes(after, wait),
            State::Held(held) => held.rows.changes(after, wait),
            State::Closed => Err(self.closed()),
        }
    }

    fn is_durable(&self) -> bool {
        matches!(&*self.state.read(), State::Open(_))
    }

    fn started(&self) {
        *self.is_starting.lock() = false;
    }
}

impl Held {
    fn commit(&self, txn: Txn) -> Result<Revision, StoreError> {
        let mut kept = self.kept.lock();
        let revision = self.rows.commit(txn.clone())?;
        kept.push(txn);
        Ok(revision)
    }
}
