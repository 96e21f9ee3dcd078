//! What was seen of the rows: a copy in memory that the watch keeps current, with the order of the last changes.
//!
//! A commit that is larger than a transaction of etcd's is written in pieces under a lock ([`super::pieces`]). What the
//! watch sees meanwhile waits here and appears at once, as of the revision that released the lock: that is the revision
//! of the commit, and `actual` keeps by which revision etcd knows each of its rows.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::wire::{Event, Kv};
use crate::memory::Rows;
use crate::{Revision, Row, StoreError};

#[derive(Debug, Default)]
struct State {
    rows: Rows,
    /// Revisions up to here were seen.
    seen: Revision,
    /// Changes of a commit in pieces, while it is being written: key, value, revision at etcd.
    held: Option<Vec<(String, Option<String>, Revision)>>,
    /// Rows of commits in pieces: the commit's revision, and etcd's.
    actual: HashMap<String, (Revision, Revision)>,
}

/// The copy.
#[derive(Debug, Default)]
pub struct Mirror {
    state: Mutex<State>,
    changed: Condvar,
}

/// Names of the keys of a store.
#[derive(Clone, Debug)]
pub struct Names {
    pub prefix: String,
}

impl Names {
    /// Where the rows are.
    pub fn rows(&self) -> String {
        format!("{}/rows", self.prefix)
    }

    /// Held by the writer of a commit in pieces.
    pub fn lock(&self) -> String {
        format!("{}/lock", self.prefix)
    }

    /// The last commit of each writer.
    pub fn writers(&self) -> String {
        format!("{}/writer/", self.prefix)
    }

    /// Parts of a commit that a writer prepares.
    pub fn parts(&self, writer: &str) -> String {
        format!("{}/parts/{writer}/", self.prefix)
    }

    /// What hosts hold by a lease.
    pub fn held(&self, name: &str) -> String {
        format!("{}/held/{name}", self.prefix)
    }
}

impl Mirror {
    /// The rows as they are at a revision: what differs from what was seen before is a change. `is_new` says that there
    /// was nothing to see before.
    pub fn reset(&self, found: &[Kv], names: &Names, at: Revision) {
        let mut state = self.state.lock();
        let prefix = names.rows();
        let is_first = state.seen == 0;
        if is_first && !found.is_empty() {
            state.rows.forget_before(at);
        }
        state.held = None;
        let mut vanished: BTreeMap<String, ()> = state.rows.keys().map(|key| (key, ())).collect();
        for kv in found {
            let Some(key) = kv.key.strip_prefix(&prefix) else { continue };
            vanished.remove(key);
            let logical = state.logical(key, kv.changed);
            if state.rows.revision_of(key) != Some(logical) {
                state.actual.remove(key);
                state.rows.apply(kv.changed, vec![(key.to_owned(), kv.value.clone())], Vec::new());
            }
        }
        let gone: Vec<String> = vanished.into_keys().collect();
        if !gone.is_empty() {
            for key in &gone {
                state.actual.remove(key);
            }
            state.rows.apply(at, Vec::new(), gone);
        }
        state.seen = state.seen.max(at);
        drop(state);
        self.changed.notify_all();
    }

    /// Takes what a line of the watch has.
    pub fn take(&self, events: Vec<Event>, names: &Names, upto: Revision) {
        let (rows, lock) = (names.rows(), names.lock());
        let mut state = self.state.lock();
        let mut by_revision: BTreeMap<Revision, Vec<Event>> = BTreeMap::new();
        for event in events {
            by_revision.entry(event.revision).or_default().push(event);
        }
        for (revision, events) in by_revision {
            let (mut puts, mut deletes) = (Vec::new(), Vec::new());
            let mut is_released = false;
            for event in events {
                if event.key == lock {
                    match event.value {
                        Some(_) => drop(state.held.get_or_insert_default()),
                        None => is_released = true,
                    }
                } else if let Some(key) = event.key.strip_prefix(&rows) {
                    match event.value {
                        Some(value) => puts.push((key.to_owned(), value)),
                        None => deletes.push(key.to_owned()),
                    }
                }
            }
            let state = &mut *state;
            if let Some(held) = &mut state.held {
                held.extend(puts.drain(..).map(|(key, value)| (key, Some(value), revision)));
                held.extend(deletes.drain(..).map(|key| (key, None, revision)));
            }
            for key in puts.iter().map(|(key, _)| key).chain(&deletes) {
                state.actual.remove(key);
            }
            if is_released {
                for (key, value, at) in state.held.take().unwrap_or_default() {
                    match value {
                        Some(value) => {
                            state.actual.insert(key.clone(), (revision, at));
                            puts.push((key, value));
                        }
                        None => {
                            state.actual.remove(&key);
                            deletes.push(key);
                        }
                    }
                }
            }
            if !puts.is_empty() || !deletes.is_empty() {
                state.rows.apply(revision, puts, deletes);
            }
            state.seen = state.seen.max(revision);
        }
        state.seen = state.seen.max(upto);
        drop(state);
        self.changed.notify_all();
    }

    /// The last revision that was seen.
    pub fn seen(&self) -> Revision {
        self.state.lock().seen
    }

    /// Waits until a revision was seen. Answers whether it was.
    pub fn wait_for(&self, revision: Revision, until: Instant) -> bool {
        let mut state = self.state.lock();
        while state.seen < revision {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return state.seen >= revision;
            }
        }
        true
    }

    /// The revision of a row for the store's users, from etcd's.
    pub fn logical(&self, key: &str, actual: Revision) -> Revision {
        self.state.lock().logical(key, actual)
    }

    /// The revision of a row at etcd, from what the store's users know.
    pub fn actual(&self, key: &str, logical: Revision) -> Revision {
        let state = self.state.lock();
        state.actual.get(key).filter(|(known, _)| *known == logical).map_or(logical, |(_, actual)| *actual)
    }

    /// As [`crate::Store::changes`].
    pub fn changes(&self, after: Revision, wait: Duration) -> Result<Vec<Row>, StoreError> {
        let until = Instant::now().checked_add(wait);
        let mut state = self.state.lock();
        loop {
            let found = state.rows.changes(after)?;
            if !found.is_empty() {
                return Ok(found);
            }
            let left = until.map_or(wait, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(Vec::new());
            }
            self.changed.wait_for(&mut state, left);
        }
    }
}

impl State {
    fn logical(&self, key: &str, actual: Revision) -> Revision {
        self.actual.get(key).filter(|(_, known)| *known == actual).map_or(actual, |(logical, _)| *logical)
    }
}
