//! From a change to the store: changes that come while the store writes are written together by the next commit.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use parking_lot::MutexGuard;
use tapio_model::ApiError;
use tapio_store::{Expect, Revision, StoreError, Txn};

use super::change::{Key, Overlay, Staged};
use super::layout::Layout;
use super::object::Generation;
use super::tables::{Gone, Note, Tables, gone_key};
use super::{Db, rows};

/// Numbers that stay free between what is visible and what a commit will make visible, for changes of volatile fields
/// meanwhile.
const ROOM: Generation = 1 << 14;

/// How often a batch that met changes of other hosts is made anew.
const REBASES_MAX: usize = 16;

/// Numbers of a range that is reserved in the store at a time: after a crash the next run begins behind it.
pub(super) const PROMISE: Generation = 1 << 40;

/// The row that says up to where ends of objects are forgotten.
pub(super) const FORGOTTEN_KEY: &str = "/meta/forgotten";

/// The row with the end of the reserved range.
pub(super) const PROMISE_KEY: &str = "/meta/generation";

/// A change that waits for the store.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) number: u64,
    pub(super) staged: BTreeMap<Key, Staged>,
    pub(super) notes: BTreeMap<String, Option<String>>,
    pub(super) touched: Vec<Key>,
    pub(super) done: Arc<OnceLock<Result<(), ApiError>>>,
}

/// Changes on their way.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) overlay: Overlay,
    pub(super) queue: Vec<Queued>,
    pub(super) last: u64,
    pub(super) is_writing: bool,
    /// Threads that wait to take over what other hosts changed; they go before the next commit.
    pub(super) followers: usize,
    /// The first number that the commit in progress will use.
    pub(super) reserved: Option<Generation>,
    /// The end of the range that is reserved in the store, and the row's revision.
    pub(super) promised: (Generation, Revision),
}

impl Db {
    /// Makes changes visible that the store need not hear of; gives them back where a commit in progress leaves no
    /// number for them.
    pub(super) fn publish_volatile(
        &self,
        pending: &Pending,
        staged: BTreeMap<Key, Staged>,
        touched: Vec<Key>,
    ) -> Result<(), (BTreeMap<Key, Staged>, Vec<Key>)> {
        let mut tables = self.write();
        let generation = tables.generation + 1;
        if pending.reserved.is_some_and(|reserved| generation >= reserved) {
            return Err((staged, touched));
        }
        publish(&mut tables, generation, staged, &touched);
        drop(tables);
        self.announce();
        Ok(())
    }

    /// Queues a change and waits until it is durable, writing itself if no other thread is writing.
    pub(super) fn commit<'a>(
        &'a self,
        mut pending: MutexGuard<'a, Pending>,
        queued: Queued,
    ) -> Result<(), ApiError> {
        let done = Arc::clone(&queued.done);
        for (key, staged) in &queued.staged {
            pending.overlay.insert(key.clone(), (queued.number, staged.object.clone()));
        }
        pending.queue.push(queued);
        loop {
            if let Some(result) = done.get() {
                return result.clone();
            }
            if pending.is_writing || pending.followers > 0 {
                self.written.wait(&mut pending);
            } else {
                pending = self.write_batch(pending);
            }
        }
    }

    /// Writes everything queued by one commit.
    fn write_batch<'a>(&'a self, mut pending: MutexGuard<'a, Pending>) -> MutexGuard<'a, Pending> {
        let mut batch = std::mem::take(&mut pending.queue);
        let batch_len = batch.len();
        pending.is_writing = true;
        let (txn, first, forgotten, promise) = {
            let mut tables = self.write();
            let first = tables.generation + ROOM;
            let promised = pending.promised;
            let forgotten = std::mem::take(&mut tables.forgotten_rows);
            let last = first + batch.len() as Generation;
            let promise =
                (!self.layout.is_shared && last + PROMISE / 2 > promised.0).then_some(last + PROMISE);
            let txn = transaction(
                &tables,
                &self.layout,
                &batch,
                first,
                (&forgotten, promise.map(|to| (to, promised.1))),
            );
            (txn, first, forgotten, promise)
        };
        pending.reserved = Some(first);
        drop(pending);
        let mut answer = if txn == Txn::default() { Ok(None) } else { self.store.commit(txn).map(Some) };
        for _ in 0..REBASES_MAX {
            if !self.layout.is_shared || !matches!(answer, Err(StoreError::Conflict(..))) {
                break;
            }
            answer = self.rebase(&mut batch).and_then(|()| {
                let txn = transaction(&self.read(), &self.layout, &batch, first, (&[], None));
                if txn == Txn::default() { Ok(None) } else { self.store.commit(txn).map(Some) }
            });
        }
        let has_failed = batch.len() < batch_len;
        let mut pending = self.pending.lock();
        pending.is_writing = false;
        pending.reserved = None;
        match answer {
            Ok(revision) => {
                if let (Some(to), Some(revision)) = (promise, revision) {
                    pending.promised = (to, revision);
                }
                let mut newest = 0;
                let mut tables = self.write();
                for (at, mut queued) in batch.into_iter().enumerate() {
                    if let Some(revision) = revision {
                        note_revision(&mut queued, revision);
                        put_notes(&mut tables, &queued.notes, revision);
                    }
                    publish(&mut tables, first + at as Generation, queued.staged, &queued.touched);
                    newest = queued.number;
                    let _ = queued.done.set(Ok(()));
                }
                drop(tables);
                pending.overlay.retain(|_, (number, _)| *number > newest);
                if has_failed {
                    // What came meanwhile may rest on what has just failed: it fails with it.
                    for queued in std::mem::take(&mut pending.queue) {
                        let why =
                            "another host of the pool changed an object at the same moment: repeat the call";
                        let _ = queued.done.set(Err(ApiError::internal(why)));
                    }
                    pending.overlay.clear();
                }
                self.announce();
            }
            Err(error) => {
                let error = refused(&error);
                self.write().forgotten_rows.extend(forgotten);
                // What came meanwhile may rest on what has just failed: it fails with it.
                for queued in batch.into_iter().chain(std::mem::take(&mut pending.queue)) {
                    let _ = queued.done.set(Err(error.clone()));
                }
                pending.overlay.clear();
            }
        }
        self.written.notify_all();
        pending
    }
}

/// What a client reads when the store did not take a change.
pub(super) fn refused(error: &StoreError) -> ApiError {
    ApiError::internal(match error {
        StoreError::Failed(why) => {
            format!("the database did not take the change, nothing was changed: {why}")
        }
        fenced @ StoreError::Fenced(_) => format!(
            "the pool's database did not take the change, nothing was changed: {fenced}; repeat the call at the host \
             that decides for the pool"
        ),
        other => format!(
            "the database did not take the change, nothing was changed: {other}, by another process; stop the \
             process that writes to it and restart the daemon"
        ),
    })
}

fn publish(tables: &mut Tables, generation: Generation, staged: BTreeMap<Key, Staged>, touched: &[Key]) {
    tables.generation = generation;
    for ((_, reference), staged) in staged {
        match staged.object {
            Some(object) => tables.put(object, generation, staged.is_for_store),
            None => tables.remove(staged.class, &reference, generation),
        }
    }
    for (class, reference) in touched {
        tables.touch(class, reference, generation);
    }
}

/// One transaction of a batch: the last state of every object and note in it.
fn transaction(
    tables: &Tables,
    layout: &Layout,
    batch: &[Queued],
    first: Generation,
    (forgotten, promise): (&[String], Option<(Generation, Revision)>),
) -> Txn {
    let mut txn = Txn::default();
    let mut last: BTreeMap<&Key, (Generation, bool, &Staged)> = BTreeMap::new();
    let mut notes: BTreeMap<&String, &Option<String>> = BTreeMap::new();
    for (at, queued) in batch.iter().enumerate() {
        let generation = first + at as Generation;
        for (key, staged) in &queued.staged {
            let (of, is_for_store) = last.get(key).map_or((generation, false), |before| (before.0, before.1));
            // The time of its making is that of the first change of it here; one that ends was made earlier.
            let of = if staged.object.is_none() { generation } else { of };
            last.insert(key, (of, is_for_store || staged.is_for_store, staged));
        }
        notes.extend(&queued.notes);
    }
    for (key, (generation, is_for_store, staged)) in last {
        let durable = tables.get(key.0, &key.1).filter(|object| object.is_stored);
        let row = rows::key_of(staged.class, &key.1);
        match (&staged.object, durable) {
            _ if !is_for_store => {}
            (Some(object), durable) if object.is_stored => {
                let expect = durable.map_or(Expect::Absent, |durable| Expect::At(durable.revision));
                txn.expect.push((row.clone(), expect));
                txn.puts
                    .push((row, rows::encode(object, durable.map_or(generation, |durable| durable.created))));
            }
            (None, Some(durable)) => {
                txn.expect.push((row.clone(), Expect::At(durable.revision)));
                txn.deletes.push(row);
                let gone = Gone {
                    class: staged.class,
                    reference: key.1.clone(),
                    created: durable.created,
                    deleted: generation,
                    is_stored: true,
                };
                // Generations are a host's own: another could make nothing of them.
                if !layout.is_shared {
                    txn.puts.push((gone_key(&gone), durable.created.to_string()));
                }
            }
            _ => {}
        }
    }
    for (key, text) in notes {
        let row = format!("{}{key}", layout.notes);
        let durable = tables.notes.get(key);
        let expect = durable.map_or(Expect::Absent, |note| Expect::At(note.revision));
        match text {
            Some(text) => {
                txn.expect.push((row.clone(), expect));
                txn.puts.push((row, text.clone()));
            }
            None if durable.is_some() => {
                txn.expect.push((row.clone(), expect));
                txn.deletes.push(row);
            }
            None => {}
        }
    }
    if !forgotten.is_empty() && !layout.is_shared {
        txn.deletes.extend_from_slice(forgotten);
        txn.puts.push((FORGOTTEN_KEY.to_owned(), tables.forgotten().to_string()));
    }
    if let Some((to, revision)) = promise {
        txn.expect.push((PROMISE_KEY.to_owned(), Expect::At(revision)));
        txn.puts.push((PROMISE_KEY.to_owned(), to.to_string()));
    }
    txn
}

fn note_revision(queued: &mut Queued, revision: Revision) {
    for staged in queued.staged.values_mut().filter(|staged| staged.is_for_store) {
        if let Some(object) = &mut staged.object {
            Arc::make_mut(object).revision = revision;
        }
    }
}

fn put_notes(tables: &mut Tables, notes: &BTreeMap<String, Option<String>>, revision: Revision) {
    for (key, text) in notes {
        match text {
            Some(text) => {
                tables.notes.insert(key.clone(), Note { text: text.clone(), revision });
            }
            None => {
                tables.notes.remove(key);
            }
        }
    }
}
