//! Commits that are larger than a transaction of etcd's, still all or nothing.
//!
//! 1. The parts are written under `parts/WRITER/`, where nothing reads them.
//! 2. `lock` is taken: no other commit is made while it is there.
//! 3. What the commit expects is checked. If it does not hold, the lock is released and nothing has changed.
//! 4. The lock says `apply`: from here on the commit is done. Each transaction applies one part and notes in the lock
//!    which is the next, so each part is applied once, by any store.
//! 5. The lock and the parts are removed. Readers do not look while the lock is there, so they see all of it or none.
//!
//! A lock that does not move for [`STILL`] has lost its writer: before 4 it is removed, after 4 any store goes on in
//! the writer's place. A writer that comes back finds that the lock has moved, and does nothing more.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::wire::{Compare, Kv, Op};
use super::{Applied, BYTES_MAX, Etcd, LIMIT, OPS_MAX, Writer, failed, malformed, wire};
use crate::{Expect, Revision, StoreError};

/// A lock that has not moved for so long has lost its writer.
const STILL: Duration = Duration::from_secs(3);

/// How often a lock is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Phase {
    Check,
    Apply,
}

/// What the key `lock` holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Lock {
    writer: String,
    phase: Phase,
    parts: usize,
    next: usize,
}

/// A key below the rows, and its value; none: it is deleted.
type Change = (String, Option<String>);

fn written<T: Serialize>(value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| StoreError::Failed(format!("etcd: {error}")))
}

fn lock_of(kv: &Kv) -> Result<Lock, StoreError> {
    serde_json::from_str(&kv.value).map_err(|error| malformed(format!("the key {}: {error}", kv.key)))
}

/// Changes in parts that a transaction holds each.
fn parts_of(ops: Vec<Op>) -> Result<Vec<String>, StoreError> {
    let (mut parts, mut part, mut len) = (Vec::new(), Vec::<Change>::new(), 0);
    for op in ops {
        let op_len = op.bytes();
        if part.len() == OPS_MAX || (!part.is_empty() && len + op_len > BYTES_MAX / 2) {
            parts.push(written(&std::mem::take(&mut part))?);
            len = 0;
        }
        len += op_len;
        part.push(match op {
            Op::Put(key, value) | Op::Lend(key, value, _) => (key, Some(value)),
            Op::Delete(key) | Op::DeleteAll(key) => (key, None),
        });
    }
    if !part.is_empty() {
        parts.push(written(&part)?);
    }
    if let Some(long) = parts.iter().find(|part| part.len() > BYTES_MAX + BYTES_MAX / 4) {
        let key = long.split('"').nth(1).unwrap_or_default();
        return Err(StoreError::Failed(format!(
            "etcd: the row {key} is longer than a cluster takes (1 MiB)"
        )));
    }
    Ok(parts)
}

impl Etcd {
    fn part_key(&self, writer: &str, at: usize) -> String {
        format!("{}{at:08}", self.names.parts(writer))
    }

    pub(super) fn commit_in_pieces(
        &self,
        writer: &mut Writer,
        expect: &[(String, Expect)],
        keys: &[&str],
        ops: Vec<Op>,
    ) -> Result<Revision, StoreError> {
        let parts = parts_of(ops)?;
        // Those of a commit that was given up.
        self.expect_applied(writer, &[], &[Op::DeleteAll(self.names.parts(&self.writer))])?;
        for (at, part) in parts.iter().enumerate() {
            self.expect_applied(writer, &[], &[Op::Put(self.part_key(&self.writer, at), part.clone())])?;
        }
        let name = self.names.lock();
        let lock = Lock { writer: self.writer.clone(), phase: Phase::Check, parts: parts.len(), next: 0 };
        let until = Instant::now() + LIMIT;
        loop {
            let at = self.take_lock(writer, &lock, until)?;
            let found = self.rows_of(keys)?;
            if let Some(conflict) = self.conflict(expect, &found) {
                let release = [Op::Delete(name.clone()), Op::DeleteAll(self.names.parts(&self.writer))];
                let _ = self.apply(writer, &[Compare::Changed(name, at)], &release, &[])?;
                return Err(conflict);
            }
            let lock = Lock { phase: Phase::Apply, ..lock.clone() };
            let begin = [Op::Put(name.clone(), written(&lock)?)];
            match self.apply(writer, &[Compare::Changed(name.clone(), at)], &begin, &[])? {
                Applied::At(at) => return self.go_on(writer, lock, at),
                // It took so long that another store took the lock away.
                Applied::Not(_) if Instant::now() < until => {}
                Applied::Not(_) => return Err(StoreError::Failed("etcd: writing: the lock was lost".into())),
            }
        }
    }

    fn expect_applied(
        &self,
        writer: &mut Writer,
        compare: &[Compare],
        ops: &[Op],
    ) -> Result<Revision, StoreError> {
        match self.apply(writer, compare, ops, &[])? {
            Applied::At(revision) => Ok(revision),
            Applied::Not(_) => Err(StoreError::Failed("etcd: writing: the writer's key moved".into())),
        }
    }

    fn take_lock(&self, writer: &mut Writer, lock: &Lock, until: Instant) -> Result<Revision, StoreError> {
        let name = self.names.lock();
        let take = [Op::Put(name.clone(), written(lock)?)];
        loop {
            match self.apply(
                writer,
                &[Compare::Created(name.clone(), 0)],
                &take,
                std::slice::from_ref(&name),
            )? {
                Applied::At(at) => return Ok(at),
                Applied::Not(found) => {
                    if let Some(other) = found.into_iter().next().flatten() {
                        self.settle_as(writer, &other)?;
                    }
                }
            }
            if Instant::now() > until {
                return Err(StoreError::Failed("etcd: writing: the lock is never free".into()));
            }
        }
    }

    fn rows_of<'a>(&self, keys: &[&'a str]) -> Result<BTreeMap<&'a str, Option<Kv>>, StoreError> {
        let mut found = BTreeMap::new();
        for keys in keys.chunks(OPS_MAX) {
            let ranges: Vec<_> = keys.iter().map(|key| wire::range(&self.row_key(key))).collect();
            let answer = self.client.repeat("kv/txn", &wire::look(&ranges), Instant::now() + LIMIT);
            let answer = answer.map_err(|failure| failed("reading", &failure))?;
            let answer = wire::txn_answer(&answer).map_err(malformed)?;
            found.extend(
                keys.iter().copied().zip(answer.ranges.into_iter().map(|range| range.into_iter().next())),
            );
        }
        Ok(found)
    }

    /// Applies what is left of a commit, and releases the lock, which is at `at`. Answers the commit's revision.
    fn go_on(&self, writer: &mut Writer, mut lock: Lock, mut at: Revision) -> Result<Revision, StoreError> {
        let name = self.names.lock();
        let of = lock.writer.clone();
        while lock.next < lock.parts {
            let key = self.part_key(&of, lock.next);
            let answer = self.client.repeat("kv/range", &wire::range(&key), Instant::now() + LIMIT);
            let answer = answer.map_err(|failure| failed("reading", &failure))?;
            let Some(part) = wire::kvs(&answer).map_err(malformed)?.into_iter().next() else {
                return self.wait_for_release();
            };
            let part: Vec<Change> = serde_json::from_str(&part.value)
                .map_err(|error| malformed(format!("the key {key}: {error}")))?;
            lock.next += 1;
            let mut ops = vec![Op::Put(name.clone(), written(&lock)?)];
            ops.extend(part.into_iter().map(|(key, value)| match value {
                Some(value) => Op::Put(key, value),
                None => Op::Delete(key),
            }));
            match self.apply(writer, &[Compare::Changed(name.clone(), at)], &ops, &[])? {
                Applied::At(revision) => at = revision,
                // Another store goes on in the place of this one.
                Applied::Not(_) => return self.wait_for_release(),
            }
        }
        let release = [Op::Delete(name.clone()), Op::DeleteAll(self.names.parts(&of))];
        match self.apply(writer, &[Compare::Changed(name, at)], &release, &[])? {
            Applied::At(revision) => Ok(revision),
            Applied::Not(_) => self.wait_for_release(),
        }
    }

    /// Another store finishes the commit: answers a revision at which it is whole.
    fn wait_for_release(&self) -> Result<Revision, StoreError> {
        let until = Instant::now() + LIMIT;
        loop {
            let answer = self.client.repeat("kv/txn", &wire::look(&[wire::range(&self.names.lock())]), until);
            let answer = answer.map_err(|failure| failed("reading", &failure))?;
            let answer = wire::txn_answer(&answer).map_err(malformed)?;
            if answer.ranges.iter().all(Vec::is_empty) {
                // The release is a change that the watch reports, at this revision or before.
                let newest = self.client.repeat("kv/range", &wire::newest_of(&self.names.writers()), until);
                let newest = newest.map_err(|failure| failed("reading", &failure))?;
                let newest = wire::kvs(&newest).map_err(malformed)?;
                return Ok(newest.first().map_or(answer.revision, |kv| kv.changed));
            }
            if Instant::now() > until {
                return Err(StoreError::Failed("etcd: a commit in pieces is not finished".into()));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    pub(super) fn settle(&self, lock: &Kv) -> Result<(), StoreError> {
        if self.is_released(lock)? {
            return Ok(());
        }
        self.settle_as(&mut self.committing.lock(), lock)
    }

    /// Waits as long as the writer of a commit in pieces goes on with it. Answers whether it has gone on.
    fn is_released(&self, lock: &Kv) -> Result<bool, StoreError> {
        let until = Instant::now() + STILL;
        while Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
            let now = self.client.repeat("kv/range", &wire::range(&self.names.lock()), until + LIMIT);
            let now = now.map_err(|failure| failed("reading", &failure))?;
            let now = wire::kvs(&now).map_err(malformed)?;
            if now.first().is_none_or(|now| now.changed != lock.changed) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits for a commit in pieces, and finishes or removes it if its writer does not go on.
    pub(super) fn settle_as(&self, writer: &mut Writer, lock: &Kv) -> Result<(), StoreError> {
        if self.is_released(lock)? {
            return Ok(());
        }
        let name = self.names.lock();
        let held = lock_of(lock)?;
        tracing::warn!(
            "etcd: the commit of {} does not go on: it is {}",
            held.writer,
            match held.phase {
                Phase::Check => "removed",
                Phase::Apply => "finished",
            }
        );
        match held.phase {
            Phase::Check => {
                self.apply(
                    writer,
                    &[Compare::Changed(name.clone(), lock.changed)],
                    &[Op::Delete(name)],
                    &[],
                )?;
                Ok(())
            }
            Phase::Apply => self.go_on(writer, held, lock.changed).map(drop),
        }
    }
}
