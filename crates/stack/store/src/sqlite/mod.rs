//! Rows in a file of SQLite: what operators can look at with `sqlite3`.
//!
//! Commits that come while one is being written are written together by the next one, in one transaction of SQLite
//! and one sync of the disk; each still succeeds or fails alone.

mod deferring;
mod file;

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rusqlite::{Connection, OptionalExtension, params};

use crate::{Expect, Memory, Revision, Row, Store, StoreError, Txn};

pub use deferring::DeferringStore;

/// Changed rows that the log remembers.
const LOG_MAX: u64 = 100_000;

/// Commits between two cuts of the log.
const CUT_EVERY: u64 = 512;

type Answer = Result<Revision, StoreError>;

#[derive(Debug)]
struct Waiting {
    txn: Txn,
    answer: Arc<OnceLock<Answer>>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Vec<Waiting>,
    is_writing: bool,
}

/// Rows in a file of SQLite. One process has it open at a time.
pub struct Sqlite {
    path: PathBuf,
    writer: Mutex<Connection>,
    reader: Mutex<Connection>,
    queue: Mutex<Queue>,
    /// A waiter's commit was answered, or a new writer is wanted.
    answered: Condvar,
    /// The last commit.
    revision: (Mutex<Revision>, Condvar),
    batches: AtomicU64,
    backup_error: Option<String>,
    /// Held until the store is closed; declared last, so that it goes last.
    _lock: File,
}

impl fmt::Debug for Sqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqlite").field("path", &self.path).finish_non_exhaustive()
    }
}

/// SQLite counts in signed numbers.
fn signed(revision: Revision) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

impl Sqlite {
    /// Opens the file, or makes it: mode 0600, locked, checked. What was found good is copied to `PATH.backup`
    /// before anything is changed.
    ///
    /// # Errors
    /// Another process has it open, it is damaged, a newer version made it, or the disk fails.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let opened = file::open(path)?;
        let revision =
            last_revision(&opened.writer).map_err(|error| file::failed(path, "reading", &error))?;
        Ok(Self {
            path: path.to_owned(),
            writer: Mutex::new(opened.writer),
            reader: Mutex::new(opened.reader),
            queue: Mutex::default(),
            answered: Condvar::new(),
            revision: (Mutex::new(revision), Condvar::new()),
            batches: AtomicU64::new(0),
            backup_error: opened.backup_error,
            _lock: opened.lock,
        })
    }

    /// Why no copy was made at start; the store works without.
    pub fn backup_error(&self) -> Option<&str> {
        self.backup_error.as_deref()
    }

    /// Transactions of SQLite so far, each with one sync of the disk: many commits may share one.
    pub fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    /// Bounds the file, as a disk would: what does not fit is refused. Rounded up to pages; for tests.
    ///
    /// # Errors
    /// The database below.
    #[doc(hidden)]
    pub fn limit_to(&self, bytes: u64) -> Result<(), StoreError> {
        let set = || {
            let writer = self.writer.lock();
            let page: i64 = writer.pragma_query_value(None, "page_size", |row| row.get(0))?;
            let pages = i64::try_from(bytes).unwrap_or(i64::MAX) / page.max(1);
            writer.query_row(&format!("PRAGMA max_page_count = {}", pages + 1), [], |_| Ok(()))
        };
        set().map_err(|error| self.failed("bounding", &error))
    }

    fn failed(&self, doing: &str, error: &rusqlite::Error) -> StoreError {
        file::failed(&self.path, doing, error)
    }

    /// Every row.
    fn all_rows(&self) -> Result<Memory, StoreError> {
        rows_of(&self.reader.lock()).map_err(|error| self.failed("reading", &error))
    }

    /// Applies transactions in their order, all or none.
    fn commit_all(&self, txns: &[Txn]) -> Result<(), StoreError> {
        let txns: Vec<&Txn> = txns.iter().collect();
        let mut answers = Vec::with_capacity(txns.len());
        let before = *self.revision.0.lock();
        let written = write_batch(&mut self.writer.lock(), &txns, before, &mut answers);
        let revision = written.map_err(|error| self.failed("writing", &error))?;
        *self.revision.0.lock() = revision;
        self.revision.1.notify_all();
        match answers.into_iter().find_map(Result::err) {
            Some(conflict) => Err(conflict),
            None => Ok(()),
        }
    }

    /// Writes everything that waits by one transaction.
    fn write(&self, batch: Vec<Waiting>) {
        let mut answers = Vec::with_capacity(batch.len());
        let txns: Vec<&Txn> = batch.iter().map(|waiting| &waiting.txn).collect();
        self.batches.fetch_add(1, Ordering::Relaxed);
        let before = *self.revision.0.lock();
        let written = write_batch(&mut self.writer.lock(), &txns, before, &mut answers);
        match written {
            Ok(revision) => {
                *self.revision.0.lock() = revision;
                self.revision.1.notify_all();
                for (waiting, answer) in batch.into_iter().zip(answers) {
                    let _ = waiting.answer.set(answer);
                }
            }
            Err(error) => {
                for waiting in batch {
                    let _ = waiting.answer.set(Err(self.failed("writing", &error)));
                }
            }
        }
    }
}

/// Every row, as they are held in memory.
fn rows_of(connection: &Connection) -> rusqlite::Result<Memory> {
    let mut query = connection.prepare("SELECT key, value, revision FROM rows")?;
    let rows = query.query_map([], row_of)?.collect::<rusqlite::Result<Vec<Row>>>()?;
    Ok(Memory::with(rows, last_revision(connection)?))
}

fn last_revision(connection: &Connection) -> rusqlite::Result<Revision> {
    let last: i64 =
        connection.query_row("SELECT value FROM meta WHERE name = 'revision'", [], |row| row.get(0))?;
    Ok(u64::try_from(last).unwrap_or_default())
}

/// Applies transactions one after another; one whose expectations fail changes nothing. Answers the last revision.
fn write_batch(
    writer: &mut Connection,
    txns: &[&Txn],
    before: Revision,
    answers: &mut Vec<Answer>,
) -> rusqlite::Result<Revision> {
    let all = writer.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    let mut revision = before;
    let mut statements = Statements::prepare(&all)?;
    for txn in txns {
        if let Some(conflict) = statements.conflict_of(txn)? {
            answers.push(Err(conflict));
            continue;
        }
        revision += 1;
        statements.apply(txn, revision)?;
        answers.push(Ok(revision));
    }
    drop(statements);
    if revision == before {
        return Ok(before);
    }
    all.execute("UPDATE meta SET value = ?1 WHERE name = 'revision'", [signed(revision)])?;
    if revision / CUT_EVERY != before / CUT_EVERY {
        cut_log(&all)?;
    }
    all.commit()?;
    Ok(revision)
}

/// What every transaction of a batch needs, prepared once for all of them.
struct Statements<'a> {
    look: rusqlite::Statement<'a>,
    put: rusqlite::Statement<'a>,
    delete: rusqlite::Statement<'a>,
    log: rusqlite::Statement<'a>,
}

impl<'a> Statements<'a> {
    fn prepare(all: &'a Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            look: all.prepare("SELECT revision FROM rows WHERE key = ?1")?,
            put: all.prepare(
                "INSERT INTO rows (key, value, revision) VALUES (?1, ?2, ?3)
                 ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision",
            )?,
            delete: all.prepare("DELETE FROM rows WHERE key = ?1")?,
            log: all.prepare("INSERT OR IGNORE INTO log (revision, key) VALUES (?1, ?2)")?,
        })
    }

    fn conflict_of(&mut self, txn: &Txn) -> rusqlite::Result<Option<StoreError>> {
        for (key, expect) in &txn.expect {
            let at: Option<i64> = self.look.query_row([key], |row| row.get(0)).optional()?;
            let at = at.map(|at| u64::try_from(at).unwrap_or_default());
            let holds = match expect {
                Expect::Absent => at.is_none(),
                Expect::At(revision) => at == Some(*revision),
            };
            if !holds {
                return Ok(Some(StoreError::Conflict(key.clone(), at)));
            }
        }
        Ok(None)
    }

    fn apply(&mut self, txn: &Txn, revision: Revision) -> rusqlite::Result<()> {
        for (key, value) in &txn.puts {
            self.put.execute(params![key, value, signed(revision)])?;
            self.log.execute(params![signed(revision), key])?;
        }
        for key in &txn.deletes {
            if self.delete.execute([key])? > 0 {
                self.log.execute(params![signed(revision), key])?;
            }
        }
        Ok(())
    }
}

/// Forgets all but the last [`LOG_MAX`] changed rows, whole commits at a time.
fn cut_log(all: &Connection) -> rusqlite::Result<()> {
    let newest_that_goes: Option<i64> = all
        .query_row(
            "SELECT revision FROM log ORDER BY revision DESC, key DESC LIMIT 1 OFFSET ?1",
            [signed(LOG_MAX)],
            |row| row.get(0),
        )
        .optional()?;
    if let Some(revision) = newest_that_goes {
        all.execute("DELETE FROM log WHERE revision <= ?1", [revision])?;
        all.execute("UPDATE meta SET value = ?1 WHERE name = 'forgotten'", [revision])?;
    }
    Ok(())
}

fn row_of(row: &rusqlite::Row<'_>) -> rusqlite::Result<Row> {
    let revision: i64 = row.get(2)?;
    Ok(Row { key: row.get(0)?, value: row.get(1)?, revision: u64::try_from(revision).unwrap_or_default() })
}

/// The first key behind all that start with `prefix`; none where there is no such key.
fn behind(prefix: &str) -> Option<String> {
    let mut end: Vec<char> = prefix.chars().collect();
    while let Some(last) = end.pop() {
        let next = (last as u32 + 1..=char::MAX as u32).find_map(char::from_u32);
        if let Some(next) = next {
            end.push(next);
            return Some(end.into_iter().collect());
        }
    }
    None
}

impl Store for Sqlite {
    fn get(&self, key: &str) -> Result<Option<Row>, StoreError> {
        let read = || {
            let reader = self.reader.lock();
            let mut query = reader.prepare("SELECT key, value, revision FROM rows WHERE key = ?1")?;
            query.query_row([key], row_of).optional()
        };
        read().map_err(|error| self.failed("reading", &error))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Row>, StoreError> {
        let read = || {
            let reader = self.reader.lock();
            let end = behind(prefix);
            let mut query = reader.prepare(
                "SELECT key, value, revision FROM rows
                 WHERE key >= ?1 AND (?2 IS NULL OR key < ?2) ORDER BY key",
            )?;
            query.query_map(params![prefix, end], row_of)?.collect::<rusqlite::Result<Vec<Row>>>()
        };
        read().map_err(|error| self.failed("reading", &error))
    }

    fn commit(&self, txn: Txn) -> Result<Revision, StoreError> {
        let answer = Arc::new(OnceLock::new());
        let mut queue = self.queue.lock();
        queue.waiting.push(Waiting { txn, answer: Arc::clone(&answer) });
        loop {
            if answer.get().is_some() {
                break;
            }
            if queue.is_writing {
                self.answered.wait(&mut queue);
                continue;
            }
            queue.is_writing = true;
            let batch = std::mem::take(&mut queue.waiting);
            drop(queue);
            self.write(batch);
            queue = self.queue.lock();
            queue.is_writing = false;
            self.answered.notify_all();
        }
        drop(queue);
        match answer.get() {
            Some(Ok(revision)) => Ok(*revision),
            Some(Err(error)) => Err(error.clone()),
            None => Err(StoreError::Failed(format!("{}: a commit was not answered", self.path.display()))),
        }
    }

    fn changes(&self, after: Revision, wait: Duration) -> Result<Vec<Row>, StoreError> {
        let until = Instant::now().checked_add(wait);
        loop {
            let mut last = self.revision.0.lock();
            while *last <= after {
                let left = until.map_or(wait, |until| until.saturating_duration_since(Instant::now()));
                if left.is_zero() {
                    return Ok(Vec::new());
                }
                self.revision.1.wait_for(&mut last, left);
            }
            drop(last);
            let found = self.read_changes(after)?;
            // A commit may have changed nothing: then there is more to wait for.
            if !found.is_empty() || until.is_none_or(|until| until <= Instant::now()) {
                return Ok(found);
            }
            let mut last = self.revision.0.lock();
            let left = until.map_or(wait, |until| until.saturating_duration_since(Instant::now()));
            self.revision.1.wait_for(&mut last, left.min(Duration::from_millis(50)));
        }
    }
}

impl Sqlite {
    fn read_changes(&self, after: Revision) -> Result<Vec<Row>, StoreError> {
        let read = || -> rusqlite::Result<Result<Vec<Row>, Revision>> {
            let mut reader = self.reader.lock();
            // One snapshot for both questions.
            let reader = reader.transaction()?;
            let forgotten: i64 =
                reader.query_row("SELECT value FROM meta WHERE name = 'forgotten'", [], |row| row.get(0))?;
            let forgotten = u64::try_from(forgotten).unwrap_or_default();
            if after < forgotten {
                return Ok(Err(forgotten));
            }
            let mut query = reader.prepare(
                "SELECT log.key, rows.value, MAX(log.revision) FROM log LEFT JOIN rows ON rows.key = log.key
                 WHERE log.revision > ?1 GROUP BY log.key ORDER BY MAX(log.revision), log.key",
            )?;
            query.query_map([signed(after)], row_of)?.collect::<rusqlite::Result<_>>().map(Ok)
        };
        read().map_err(|error| self.failed("reading", &error))?.map_err(StoreError::Forgotten)
    }
}
