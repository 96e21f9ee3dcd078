//! Rows in memory: for tests, and for daemons that need not remember.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::{Expect, Revision, Row, Store, StoreError, Txn};

/// Changed rows that are remembered for [`Store::changes`].
const LOG_MAX: usize = 100_000;

#[derive(Debug, Default)]
pub(crate) struct Rows {
    rows: BTreeMap<String, (String, Revision)>,
    /// The key that each remembered change was of.
    log: BTreeMap<(Revision, String), ()>,
    /// Changes up to here are forgotten.
    forgotten: Revision,
    revision: Revision,
}

/// Rows in memory.
#[derive(Debug, Default)]
pub struct Memory {
    rows: Mutex<Rows>,
    changed: Condvar,
}

impl Memory {
    /// These rows, as another store had them at this revision; changes before it are forgotten.
    pub(crate) fn with(rows: Vec<Row>, revision: Revision) -> Self {
        let rows = rows.into_iter().filter_map(|row| Some((row.key, (row.value?, row.revision))));
        let rows = Rows { rows: rows.collect(), revision, forgotten: revision, ..Rows::default() };
        Self { rows: Mutex::new(rows), changed: Condvar::new() }
    }
}

impl Rows {
    /// Takes changes of one commit.
    pub(crate) fn apply(&mut self, revision: Revision, puts: Vec<(String, String)>, deletes: Vec<String>) {
        self.revision = revision;
        for (key, value) in puts {
            self.log.insert((revision, key.clone()), ());
            self.rows.insert(key, (value, revision));
        }
        for key in deletes {
            if self.rows.remove(&key).is_some() {
                self.log.insert((revision, key), ());
            }
        }
        while self.log.len() > LOG_MAX {
            let Some(((oldest, _), ())) = self.log.pop_first() else { break };
            self.forgotten = self.forgotten.max(oldest);
        }
    }

    /// The last change of every row that was changed or deleted after `after`, in order.
    pub(crate) fn changes(&self, after: Revision) -> Result<Vec<Row>, StoreError> {
        if after < self.forgotten {
            return Err(StoreError::Forgotten(self.forgotten));
        }
        let mut last: BTreeMap<&String, Revision> = BTreeMap::new();
        for ((revision, key), ()) in self.log.range((after.saturating_add(1), String::new())..) {
            last.insert(key, *revision);
        }
        let row = |(key, revision): (&String, Revision)| Row {
            key: key.clone(),
            value: self.rows.get(key).map(|(value, _)| value.clone()),
            revision,
        };
        let mut found: Vec<Row> = last.into_iter().map(row).collect();
        found.sort_by(|a, b| (a.revision, &a.key).cmp(&(b.revision, &b.key)));
        Ok(found)
    }

    /// Changes up to here are forgotten.
    pub(crate) fn forget_before(&mut self, revision: Revision) {
        self.forgotten = self.forgotten.max(revision);
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = String> {
        self.rows.keys().cloned()
    }

    pub(crate) fn revision_of(&self, key: &str) -> Option<Revision> {
        self.rows.get(key).map(|(_, revision)| *revision)
    }

    fn row(&self, key: &str) -> Option<Row> {
        let (value, revision) = self.rows.get(key)?;
        Some(Row { key: key.to_owned(), value: Some(value.clone()), revision: *revision })
    }
}

impl Store for Memory {
    fn get(&self, key: &str) -> Result<Option<Row>, StoreError> {
        Ok(self.rows.lock().row(key))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Row>, StoreError> {
        let rows = self.rows.lock();
        let found = rows.rows.range(prefix.to_owned()..).take_while(|(key, _)| key.starts_with(prefix));
        Ok(found.filter_map(|(key, _)| rows.row(key)).collect())
    }

    fn commit(&self, txn: Txn) -> Result<Revision, StoreError> {
        let mut rows = self.rows.lock();
        for (key, expect) in &txn.expect {
            let at = rows.rows.get(key).map(|(_, revision)| *revision);
            let holds = match expect {
                Expect::Absent => at.is_none(),
                Expect::At(revision) => at == Some(*revision),
            };
            if !holds {
                return Err(StoreError::Conflict(key.clone(), at));
            }
        }
        let revision = rows.revision + 1;
        rows.apply(revision, txn.puts, txn.deletes);
        drop(rows);
        self.changed.notify_all();
        Ok(revision)
    }

    fn changes(&self, after: Revision, wait: Duration) -> Result<Vec<Row>, StoreError> {
        let until = Instant::now().checked_add(wait);
        let mut rows = self.rows.lock();
        loop {
            let found = rows.changes(after)?;
            if !found.is_empty() {
                return Ok(found);
            }
            let left = until.map_or(wait, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(Vec::new());
            }
            self.changed.wait_for(&mut rows, left);
        }
    }
}
