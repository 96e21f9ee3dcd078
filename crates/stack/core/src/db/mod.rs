//! The objects, in memory and in the store.
//!
//! Readers see what is durable. A change works on a newer view, which holds what others changed before it and the
//! store is still writing, so that changes need not wait for each other's commits; it is answered, and visible, when
//! the store has it. Changes of volatile fields alone go past the store.

mod change;
mod commit;
mod dump;
mod follow;
mod history;
mod layout;
mod object;
mod replace;
mod rows;
mod tables;

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tapio_model::{ApiError, Class, Value};
use tapio_store::{Expect, Memory, Store, StoreError, Txn};
use tokio::sync::watch;

use change::class_named;
use commit::{FORGOTTEN_KEY, PROMISE, PROMISE_KEY, Pending, Queued};
use layout::Layout;
use tables::{Gone, Note, Tables};

pub use change::Change;
pub(crate) use dump::sum as sum_of;
pub use dump::{DUMP_LEN_MAX, Dump, sealed};
pub use history::{Happening, History, Operation};
pub use object::{Generation, Object, reference_of};
pub use replace::Replaced;
pub(crate) use replace::{half_done, is_replaced, replace};
pub(crate) use rows::{from_json, to_json};

/// Where rows that belong to no object lie in the store.
const NOTES: &str = "/note/";

/// Where the ends of objects lie in the store.
const GONE: &str = "/gone/";

/// All objects.
pub struct Db {
    pending: Mutex<Pending>,
    /// The store answered.
    written: Condvar,
    tables: RwLock<Tables>,
    store: Arc<dyn Store>,
    layout: Layout,
    /// Up to where the changes of other hosts are known.
    followed: AtomicU64,
    /// The reference of this host, where several share the store.
    host: Option<String>,
    /// Wakes the async tasks that wait for a change.
    news: watch::Sender<Generation>,
    /// Wakes the threads that wait for a change.
    changed: (Mutex<()>, Condvar),
}

impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Db").finish_non_exhaustive()
    }
}

impl Default for Db {
    /// A database on memory alone.
    fn default() -> Self {
        // There is no next run, so no range needs to be reserved.
        let mut tables = Tables::default();
        tables.generation = 1;
        Self::load(Arc::new(Memory::default()), (Generation::MAX, 0), tables)
    }
}

impl Db {
    fn load(store: Arc<dyn Store>, promised: (Generation, tapio_store::Revision), tables: Tables) -> Self {
        let generation = tables.generation;
        let pending = Pending { promised, ..Pending::default() };
        Self {
            pending: Mutex::new(pending),
            written: Condvar::new(),
            tables: RwLock::new(tables),
            store,
            layout: Layout { notes: NOTES.to_owned(), is_shared: false },
            followed: AtomicU64::new(0),
            host: None,
            news: watch::Sender::new(generation),
            changed: (Mutex::new(()), Condvar::new()),
        }
    }

    /// The database of a store. The store has no other writer.
    ///
    /// # Errors
    /// The store fails, or holds a row that is not ours: the row, the cause and the next step.
    pub fn open(store: Arc<dyn Store>) -> Result<Self, ApiError> {
        let failed = |error: StoreError| ApiError::internal(format!("the database cannot be read: {error}"));
        let damaged = |why: String| {
            let next = "put it right, or restore the store's backup, and start again";
            ApiError::internal(format!("the database cannot be read: {why}; {next}"))
        };
        let promise = store.get(PROMISE_KEY).map_err(failed)?;
        let read = |text: &str| text.parse::<Generation>().ok();
        let started = match promise.as_ref().and_then(|row| row.value.as_deref()) {
            Some(text) => read(text).ok_or_else(|| damaged(format!("row {PROMISE_KEY} is no number")))?,
            None => 0,
        };
        let expect = promise.map_or(Expect::Absent, |row| Expect::At(row.revision));
        let mut started = started;
        let mut promised = promise_behind(&*store, started, expect)?;
        if !store.is_durable() {
            // The reservation ends with the process: the next run may begin where this one should. Numbers that follow
            // the clock are used once, and a token with one is not taken for one of another run.
            started = started.max(clocked());
            promised = promise_behind(&*store, started, Expect::At(promised.1))?;
        }
        let mut tables = Tables::default();
        tables.started = started;
        tables.generation = started + 1;
        let forgotten = store.get(FORGOTTEN_KEY).map_err(failed)?.and_then(|row| read(row.value.as_deref()?));
        tables.forget_before(forgotten.unwrap_or_default());
        for class in tapio_model::CLASSES.iter().filter(|class| class.persistent) {
            for row in store.list(&rows::prefix_of(class)).map_err(failed)? {
                let mut object = rows::decode(class, &row).map_err(damaged)?;
                object.modified = started + 1;
                tables.insert(Arc::new(object), None);
            }
        }
        for row in store.list(NOTES).map_err(failed)? {
            let note = Note { text: row.value.unwrap_or_default(), revision: row.revision };
            tables.notes.insert(row.key[NOTES.len()..].to_owned(), note);
        }
        for row in store.list(GONE).map_err(failed)? {
            if let Some(gone) = read_gone(&row) {
                tables.note_gone(gone);
            }
        }
        Ok(Self::load(store, promised, tables))
    }

    /// The database of a store that other hosts of a pool write too, for the host with this UUID. Numbers of changes
    /// follow the clock: a token of an earlier run, or of another host, is not taken for one of this run.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_shared(store: Arc<dyn Store>, host: uuid::Uuid) -> Result<Self, ApiError> {
        let failed = |error: StoreError| ApiError::internal(format!("the database cannot be read: {error}"));
        let damaged = |why: String| ApiError::internal(format!("the database cannot be read: {why}"));
        let layout = Layout { notes: layout::notes_of(host), is_shared: true };
        let mut tables = Tables::default();
        tables.started = clocked();
        tables.generation = tables.started + 1;
        tables.forget_before(tables.started);
        for class in tapio_model::CLASSES.iter().filter(|class| class.persistent) {
            for row in store.list(&rows::prefix_of(class)).map_err(failed)? {
                let mut object = rows::decode(class, &row).map_err(damaged)?;
                object.created = 1;
                object.modified = tables.generation;
                tables.insert(Arc::new(object), None);
            }
        }
        for row in store.list(&layout.notes).map_err(failed)? {
            let note = Note { text: row.value.unwrap_or_default(), revision: row.revision };
            tables.notes.insert(row.key[layout.notes.len()..].to_owned(), note);
        }
        let loaded = Self::load(store, (Generation::MAX, 0), tables);
        Ok(Self { layout, host: Some(reference_of(host)), ..loaded })
    }

    /// The reference of this host, if several share the store.
    pub fn own_host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    /// The objects of a dump, on memory alone.
    ///
    /// # Errors
    /// A row of the dump is none.
    pub(crate) fn of_dump(dump: &Dump) -> Result<Self, ApiError> {
        let store = Arc::new(Memory::default());
        let told = |error: StoreError| ApiError::internal(format!("a database that is opened: {error}"));
        replace(&*store, dump, "opened", false).map_err(told)?;
        Self::open(store)
    }

    /// The start is over; see [`Store::started`].
    pub(crate) fn started(&self) {
        self.store.started();
    }

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read()
    }

    /// Only the holder of `pending` may write. So the maker of a change may read as often as it likes.
    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write()
    }

    /// Wakes all waiters for a change, although there may be none: they check their other conditions.
    pub fn announce(&self) {
        let generation = self.read().generation;
        self.news.send_replace(generation);
        drop(self.changed.0.lock());
        self.changed.1.notify_all();
    }

    /// Makes several changes at once: when `make` answers with success they are all in the store, otherwise nothing
    /// changed. `make` sees its own changes, and no others are made meanwhile; it must not block.
    ///
    /// # Errors
    /// What `make` answers, or the store's.
    pub fn change<T>(
        &self,
        make: impl FnOnce(&mut Change<'_>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut pending = self.pending.lock();
        let tables = self.read();
        let mut change = Change::new(&tables, &pending.overlay);
        let answer = make(&mut change)?;
        let Change { mut staged, notes, mut touched, saw_pending, .. } = change;
        let is_on_pending =
            saw_pending.get() || staged.keys().chain(&touched).any(|key| pending.overlay.contains_key(key));
        drop(tables);
        if !is_on_pending && notes.is_empty() && !staged.values().any(|staged| staged.is_for_store) {
            if staged.is_empty() && touched.is_empty() {
                return Ok(answer);
            }
            match self.publish_volatile(&pending, staged, touched) {
                Ok(()) => return Ok(answer),
                Err(back) => (staged, touched) = back,
            }
        }
        pending.last += 1;
        let number = pending.last;
        self.commit(pending, Queued { number, staged, notes, touched, done: Arc::new(OnceLock::new()) })?;
        Ok(answer)
    }

    /// An object.
    ///
    /// # Errors
    /// `HANDLE_INVALID`.
    pub fn get(&self, class: &str, reference: &str) -> Result<Arc<Object>, ApiError> {
        let class = class_named(class)?;
        let found = self.read().get(class.name, reference).cloned();
        found.ok_or_else(|| change::gone(class, reference))
    }

    /// The objects of a class.
    pub fn all(&self, class: &str) -> Vec<Arc<Object>> {
        let Some(class) = tapio_model::class(class) else { return Vec::new() };
        self.read().all(class.name).cloned().collect()
    }

    /// How many objects a class has.
    pub fn count(&self, class: &str) -> usize {
        tapio_model::class(class).map_or(0, |class| self.read().count(class.name))
    }

    /// The objects of a class whose field is this text (a reference, a name). By index for references, `name_label`
    /// and `uuid`, otherwise by looking at all.
    pub fn find(&self, class: &str, field: &str, text: &str) -> Vec<Arc<Object>> {
        let Some(class) = tapio_model::class(class) else { return Vec::new() };
        self.read().find(class, field, text)
    }

    /// The object with this UUID.
    ///
    /// # Errors
    /// `UUID_INVALID`.
    pub fn by_uuid(&self, class: &str, uuid: &str) -> Result<Arc<Object>, ApiError> {
        let class = class_named(class)?;
        let found = self.read().find(class, "uuid", uuid).into_iter().next();
        found.ok_or_else(|| ApiError::new("UUID_INVALID", [class.name, uuid]))
    }

    /// [`Change::create`] alone.
    ///
    /// # Errors
    /// As there.
    pub fn create(&self, class: &str, fields: &[(&str, Value)]) -> Result<String, ApiError> {
        self.change(|change| change.create(class, fields))
    }

    /// [`Change::set`] alone.
    ///
    /// # Errors
    /// As there.
    pub fn set(
        &self,
        class: &str,
        reference: &str,
        field: &str,
        value: impl Into<Value>,
    ) -> Result<(), ApiError> {
        self.change(|change| change.set(class, reference, field, value))
    }

    /// [`Change::destroy`] alone.
    ///
    /// # Errors
    /// As there.
    pub fn destroy(&self, class: &str, reference: &str) -> Result<(), ApiError> {
        self.change(|change| change.destroy(class, reference))
    }

    /// The journal's rows whose key starts with `prefix`, by key; see [`Change::put_note`].
    pub fn notes(&self, prefix: &str) -> Vec<(String, String)> {
        let tables = self.read();
        let found = tables.notes.range(prefix.to_owned()..).take_while(|(key, _)| key.starts_with(prefix));
        found.map(|(key, note)| (key.clone(), note.text.clone())).collect()
    }

    /// The number of the last change.
    pub fn generation(&self) -> Generation {
        self.read().generation
    }

    /// Waits until something changes after `after`, a caller of [`Self::announce`], or `until`; answers the number
    /// of the last change.
    pub fn wait(&self, after: Generation, until: Instant) -> Generation {
        let mut lock = self.changed.0.lock();
        let generation = self.generation();
        if generation > after {
            return generation;
        }
        let left = until.saturating_duration_since(Instant::now());
        self.changed.1.wait_for(&mut lock, left);
        drop(lock);
        self.generation()
    }

    /// Hears of every change.
    pub fn watch(&self) -> watch::Receiver<Generation> {
        self.news.subscribe()
    }

    /// The record of an object, inverse fields filled in.
    pub fn record(&self, object: &Object) -> Value {
        self.read().record(object)
    }

    /// About as many bytes the records of these objects have as text: together, and the largest.
    pub(crate) fn text_len(&self, objects: &[Arc<Object>]) -> (usize, usize) {
        let tables = self.read();
        objects
            .iter()
            .map(|object| tables.record_len(object))
            .fold((0, 0), |(sum, most), len| (sum + len, most.max(len)))
    }

    /// About as many bytes one field has as text.
    pub(crate) fn field_len(&self, object: &Object, field: &str) -> usize {
        let tables = self.read();
        let at = object.position(field);
        let found = at.and_then(|at| Some((object.class.fields.get(at)?, object.values.get(at)?)));
        found.map_or(0, |(field, value)| tables.field_len(object, field, value))
    }

    /// One field of an object, inverse fields too; none where the class has no such field.
    pub fn value(&self, object: &Object, field: &str) -> Option<Value> {
        let at = object.position(field)?;
        Some(self.read().value(object, &object.class.fields[at], object.values.get(at)?))
    }
}

/// Reserves the range of numbers behind `started` in the store: the next run begins behind every number that this one
/// may use.
fn promise_behind(
    store: &dyn Store,
    started: Generation,
    expect: Expect,
) -> Result<(Generation, tapio_store::Revision), ApiError> {
    let to = started + PROMISE;
    let txn = Txn {
        expect: vec![(PROMISE_KEY.to_owned(), expect)],
        puts: vec![(PROMISE_KEY.to_owned(), to.to_string())],
        deletes: Vec::new(),
    };
    let revision = store.commit(txn).map_err(|error| commit::refused(&error))?;
    Ok((to, revision))
}

/// A number that follows the clock, behind the reserved ranges of all earlier runs: 256 numbers a microsecond.
fn clocked() -> Generation {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (1 << 62) + u64::try_from(since.as_micros()).unwrap_or_default().min(1 << 53) * 256
}

/// The end of an object from its row; none for one of a class that this version does not know.
fn read_gone(row: &tapio_store::Row) -> Option<Gone> {
    let mut parts = row.key.strip_prefix(GONE)?.split('/');
    let deleted = parts.next()?.parse().ok()?;
    let class: &'static Class = tapio_model::class(parts.next()?)?;
    let reference = format!("OpaqueRef:{}", parts.next()?);
    let created = row.value.as_deref()?.parse().ok()?;
    Some(Gone { class, reference, created, deleted, is_stored: true })
}
