//! Rows in an etcd cluster, which several hosts share. etcd decides what happened in which order; nothing of that is
//! done here.
//!
//! Keys below the prefix: `rows/...` are the rows; `writer/NAME` names the last commit of each writer, so that a commit
//! whose answer was lost is recognised, and so that no request that comes late is done twice; `lock` and `parts/...`
//! belong to commits that are larger than a transaction of etcd's; `held/...` lives as long as the lease of its holder.

mod http;
mod lease;
mod mirror;
mod pieces;
mod watch;
pub mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;

use crate::{Expect, Revision, Row, Store, StoreError, Txn};
use http::{Client, Failure};
use mirror::{Mirror, Names};
use wire::{Compare, Kv, Op};

pub use http::EtcdOptions;
pub use lease::{Lease, Taken};

/// Deadline of a read and of a commit: longer than an election, a restart of a member and a slow disk.
const LIMIT: Duration = Duration::from_secs(30);

/// Changes of one transaction; etcd refuses more than 128, and some are our own.
const OPS_MAX: usize = 110;

/// Comparisons of one transaction.
const COMPARES_MAX: usize = 110;

/// Bytes of one transaction; etcd refuses more than 1.5 MiB.
const BYTES_MAX: usize = 1 << 20;

/// Rows of one page of a list.
const PAGE: usize = 2_000;

/// What a writer knows of its own commits.
#[derive(Debug, Default)]
struct Writer {
    /// The revision of its last commit; none: it was not looked for yet.
    changed: Option<Revision>,
    /// Names each commit.
    serial: u64,
}

/// Rows in an etcd cluster.
pub struct Etcd {
    client: Arc<Client>,
    names: Names,
    writer: String,
    /// Commits of one process go one after the other; the database gathers what comes meanwhile.
    committing: Mutex<Writer>,
    mirror: Arc<Mirror>,
    /// What must still be held when this process writes: key and the revision that made it.
    fences: Mutex<Vec<(String, Revision)>>,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd")
            .field("client", &self.client)
            .field("prefix", &self.names.prefix)
            .finish_non_exhaustive()
    }
}

/// What a transaction came to.
enum Applied {
    /// It was applied by this revision.
    At(Revision),
    /// Something did not hold: what each of the keys that were asked about is.
    Not(Vec<Option<Kv>>),
}

/// All rows, or why they cannot be read now.
enum Look {
    Rows(Vec<Kv>, Revision),
    /// A commit in pieces is being written.
    Locked,
}

fn failed(doing: &str, failure: &Failure) -> StoreError {
    let next = match failure {
        Failure::Refused(8, _) => {
            "; make room: compact and defragment the cluster (etcdctl compact, defrag, alarm disarm)"
        }
        _ => "",
    };
    StoreError::Failed(format!("etcd: {doing}: {failure}{next}"))
}

fn malformed(why: String) -> StoreError {
    StoreError::Failed(format!("etcd: an answer is not understood: {why}"))
}

/// All rows as they are at one moment.
async fn look_at_all(client: &Client, names: &Names, limit: Duration) -> Result<Look, String> {
    let prefix = names.rows();
    let (mut rows, mut at, mut from) = (Vec::new(), 0, prefix.clone());
    loop {
        let look = [wire::range(&names.lock()), wire::range_of(&prefix, &from, PAGE, at)];
        let answer =
            client.send("kv/txn", &wire::look(&look), limit).await.map_err(|failure| failure.to_string())?;
        let answer = wire::txn_answer(&answer)?;
        let [locks, found] = <[Vec<Kv>; 2]>::try_from(answer.ranges).map_err(|_| "a range is missing")?;
        // Later pages are of the revision of the first.
        if at == 0 {
            at = answer.revision;
            if !locks.is_empty() {
                return Ok(Look::Locked);
            }
        }
        rows.extend(found);
        match rows.last() {
            Some(last) if answer.more => from = format!("{}\0", last.key),
            _ => return Ok(Look::Rows(rows, at)),
        }
    }
}

impl Etcd {
    /// The store of a cluster; it is read once, and then followed.
    ///
    /// # Errors
    /// An option is wrong, or the cluster does not answer: a sentence.
    pub fn open(options: &EtcdOptions) -> Result<Self, StoreError> {
        let client = Arc::new(Client::new(options).map_err(StoreError::Failed)?);
        let names = Names { prefix: options.prefix.trim_end_matches('/').to_owned() };
        let mirror = Arc::new(Mirror::default());
        let store = Self {
            client: Arc::clone(&client),
            names: names.clone(),
            writer: options.writer.clone(),
            committing: Mutex::default(),
            mirror: Arc::clone(&mirror),
            fences: Mutex::default(),
        };
        let (rows, at) = store.all_rows("")?;
        mirror.reset(&rows, &names, at);
        client.spawn(watch::follow(Arc::downgrade(&client), Arc::downgrade(&mirror), names));
        Ok(store)
    }

    /// The revision up to which all changes were seen.
    pub fn seen(&self) -> Revision {
        self.mirror.seen()
    }

    fn writer_key(&self) -> String {
        format!("{}{}", self.names.writers(), self.writer)
    }

    fn row_key(&self, key: &str) -> String {
        format!("{}{key}", self.names.rows())
    }

    /// Reads; a commit in pieces that is being written is waited for, and finished if its writer does not.
    fn look(&self, ranges: &[Value]) -> Result<(Vec<Vec<Kv>>, Revision, bool), StoreError> {
        let until = Instant::now() + LIMIT;
        loop {
            let mut all = vec![wire::range(&self.names.lock())];
            all.extend_from_slice(ranges);
            let answer = self.client.repeat("kv/txn", &wire::look(&all), until);
            let answer = answer.map_err(|failure| failed("reading", &failure))?;
            let answer = wire::txn_answer(&answer).map_err(malformed)?;
            let mut found = answer.ranges.into_iter();
            match found.next().and_then(|locks| locks.into_iter().next()) {
                Some(lock) => self.settle(&lock)?,
                None => return Ok((found.collect(), answer.revision, answer.more)),
            }
        }
    }

    /// The rows whose key starts with `prefix`, as they were at one revision.
    fn all_rows(&self, prefix: &str) -> Result<(Vec<Kv>, Revision), StoreError> {
        let prefix = self.row_key(prefix);
        let until = Instant::now() + LIMIT;
        let (first, at, mut more) = self.look(&[wire::range_of(&prefix, &prefix, PAGE, 0)])?;
        let mut rows: Vec<Kv> = first.into_iter().flatten().collect();
        while more {
            let Some(last) = rows.last() else { break };
            let next = [wire::range_of(&prefix, &format!("{}\0", last.key), PAGE, at)];
            let answer = self.client.repeat("kv/txn", &wire::look(&next), until);
            let answer = match answer {
                // The revision of the first page is compacted.
                Err(Failure::Refused(11, _)) => return self.all_rows_again(&prefix),
                answer => answer.map_err(|failure| failed("reading", &failure))?,
            };
            let answer = wire::txn_answer(&answer).map_err(malformed)?;
            more = answer.more;
            rows.extend(answer.ranges.into_iter().flatten());
        }
        Ok((rows, at))
    }

    fn all_rows_again(&self, full: &str) -> Result<(Vec<Kv>, Revision), StoreError> {
        let rows = self.names.rows();
        self.all_rows(full.strip_prefix(rows.as_str()).unwrap_or_default())
    }

    /// Applies changes in one transaction, if `compare` and all fences hold. An answer that is lost is looked for: the
    /// writer's own key says which of its transactions was the last, and a transaction is done only behind the one that
    /// was the last when it was made. So one that arrives late finds another there and does nothing.
    fn apply(
        &self,
        writer: &mut Writer,
        compare: &[Compare],
        ops: &[Op],
        reads: &[String],
    ) -> Result<Applied, StoreError> {
        let fences = self.fences.lock().clone();
        self.apply_by(&fences, writer, compare, ops, reads)
    }

    /// The same, if these fences hold.
    fn apply_by(
        &self,
        fences: &[(String, Revision)],
        writer: &mut Writer,
        compare: &[Compare],
        ops: &[Op],
        reads: &[String],
    ) -> Result<Applied, StoreError> {
        let own = self.writer_key();
        writer.serial += 1;
        let serial = format!("{} {}", uuid::Uuid::new_v4(), writer.serial);
        let mut ops = ops.to_vec();
        ops.push(Op::Put(own.clone(), serial.clone()));
        let mut asked = vec![own.clone()];
        asked.extend(fences.iter().map(|(key, _)| key.clone()));
        asked.extend_from_slice(reads);
        let until = Instant::now() + LIMIT;
        let mut limit = Duration::from_secs(1);
        loop {
            let mut all = vec![Compare::Changed(own.clone(), writer.changed.unwrap_or_default())];
            all.extend(fences.iter().map(|(key, made)| Compare::Created(key.clone(), *made)));
            all.extend_from_slice(compare);
            let answer = match self.client.once("kv/txn", &wire::txn(&all, &ops, &asked), limit) {
                Ok(answer) => wire::txn_answer(&answer).map_err(malformed)?,
                Err(Failure::Unknown(why)) if Instant::now() < until => {
                    tracing::debug!("etcd: writing: {why}; looking whether it was done");
                    limit = (limit * 2).min(Duration::from_secs(8));
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
                Err(failure) => return Err(failed("writing", &failure)),
            };
            if answer.succeeded {
                writer.changed = Some(answer.revision);
                return Ok(Applied::At(answer.revision));
            }
            let mut found = answer.ranges.into_iter().map(|range| range.into_iter().next());
            let last = found.next().flatten();
            let changed = last.as_ref().map_or(0, |last| last.changed);
            if writer.changed != Some(changed) {
                writer.changed = Some(changed);
                if last.is_some_and(|last| last.value == serial) {
                    return Ok(Applied::At(changed));
                }
                continue;
            }
            for ((key, made), held) in fences.iter().zip(found.by_ref()) {
                if held.is_none_or(|held| held.created != *made) {
                    return Err(StoreError::Fenced(key.clone()));
                }
            }
            return Ok(Applied::Not(found.collect()));
        }
    }

    /// Waits until what this store answers to [`Store::changes`] has a revision.
    fn see(&self, revision: Revision) -> Result<(), StoreError> {
        if self.mirror.wait_for(revision, Instant::now() + LIMIT) {
            return Ok(());
        }
        let why = "is written, but the watch does not report it";
        Err(StoreError::Failed(format!("etcd: commit {revision} {why}")))
    }

    fn row(&self, kv: Kv) -> Option<Row> {
        let key = kv.key.strip_prefix(&self.names.rows())?.to_owned();
        let revision = self.mirror.logical(&key, kv.changed);
        Some(Row { key, value: Some(kv.value), revision })
    }

    /// The expectation that does not hold, if there is one.
    fn conflict(
        &self,
        expect: &[(String, Expect)],
        found: &BTreeMap<&str, Option<Kv>>,
    ) -> Option<StoreError> {
        expect.iter().find_map(|(key, expect)| {
            let at = found.get(key.as_str()).and_then(Option::as_ref).map(|kv| kv.changed);
            let holds = match expect {
                Expect::Absent => at.is_none(),
                Expect::At(revision) => at.is_some_and(|at| at == self.mirror.actual(key, *revision)),
            };
            (!holds).then(|| StoreError::Conflict(key.clone(), at.map(|at| self.mirror.logical(key, at))))
        })
    }
}

/// What a transaction does to each row, once: of two changes of a row the later counts, and of a put and a delete the
/// delete.
fn ops_of(txn: &Txn, key_of: impl Fn(&str) -> String) -> Vec<Op> {
    let mut last: BTreeMap<&String, Option<&String>> = BTreeMap::new();
    last.extend(txn.puts.iter().map(|(key, value)| (key, Some(value))));
    last.extend(txn.deletes.iter().map(|key| (key, None)));
    let op = |(key, value): (&String, Option<&String>)| match value {
        Some(value) => Op::Put(key_of(key), value.clone()),
        None => Op::Delete(key_of(key)),
    };
    last.into_iter().map(op).collect()
}

impl Store for Etcd {
    fn get(&self, key: &str) -> Result<Option<Row>, StoreError> {
        let (found, _, _) = self.look(&[wire::range(&self.row_key(key))])?;
        Ok(found.into_iter().flatten().next().and_then(|kv| self.row(kv)))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Row>, StoreError> {
        let (rows, _) = self.all_rows(prefix)?;
        Ok(rows.into_iter().filter_map(|kv| self.row(kv)).collect())
    }

    fn commit(&self, txn: Txn) -> Result<Revision, StoreError> {
        let ops = ops_of(&txn, |key| self.row_key(key));
        let keys: Vec<&str> = {
            let mut keys: Vec<&str> = txn.expect.iter().map(|(key, _)| key.as_str()).collect();
            keys.sort_unstable();
            keys.dedup();
            keys
        };
        let mut writer = self.committing.lock();
        let len: usize = ops.iter().map(Op::bytes).sum();
        if ops.len() > OPS_MAX || txn.expect.len() > COMPARES_MAX || len > BYTES_MAX {
            let revision = self.commit_in_pieces(&mut writer, &txn.expect, &keys, ops)?;
            // The rows of such a commit have its revision once it was seen whole.
            self.see(revision)?;
            return Ok(revision);
        }
        let mut compare = vec![Compare::Created(self.names.lock(), 0)];
        compare.extend(txn.expect.iter().map(|(key, expect)| match expect {
            Expect::Absent => Compare::Changed(self.row_key(key), 0),
            // Compared with 0 a row would have to be absent; no row has that revision, nor this.
            Expect::At(0) => Compare::Changed(self.row_key(key), i64::MAX as Revision),
            Expect::At(revision) => Compare::Changed(self.row_key(key), self.mirror.actual(key, *revision)),
        }));
        let mut reads = vec![self.names.lock()];
        reads.extend(keys.iter().map(|key| self.row_key(key)));
        let until = Instant::now() + LIMIT;
        loop {
            let mut found = match self.apply(&mut writer, &compare, &ops, &reads)? {
                Applied::At(revision) => return Ok(revision),
                Applied::Not(found) => found.into_iter(),
            };
            if let Some(lock) = found.next().flatten() {
                self.settle_as(&mut writer, &lock)?;
                // What is expected may have another revision now.
                continue;
            }
            let found: BTreeMap<&str, Option<Kv>> = keys.iter().copied().zip(found).collect();
            if let Some(conflict) = self.conflict(&txn.expect, &found) {
                return Err(conflict);
            }
            if Instant::now() > until {
                return Err(StoreError::Failed("etcd: writing: it never held still".into()));
            }
        }
    }

    fn changes(&self, after: Revision, wait: Duration) -> Result<Vec<Row>, StoreError> {
        if wait.is_zero() {
            // What was committed before this call is in its answer.
            let newest = wire::newest_of(&self.names.writers());
            let answer = self.client.repeat("kv/range", &newest, Instant::now() + LIMIT);
            let answer = answer.map_err(|failure| failed("reading", &failure))?;
            let newest = wire::kvs(&answer).map_err(malformed)?;
            self.see(newest.first().map_or(0, |kv| kv.changed))?;
        }
        self.mirror.changes(after, wait)
    }
}
