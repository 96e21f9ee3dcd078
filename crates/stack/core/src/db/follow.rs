//! A store that other hosts write too: what they changed is taken over, and changes that met theirs are made anew.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tapio_model::{ApiError, Class, Source, Value};
use tapio_store::{Expect, Revision, Row, Store, StoreError, Txn};
use uuid::Uuid;

use super::change::{Key, gone};
use super::commit::Queued;
use super::layout::notes_of;
use super::object::Object;
use super::tables::{Note, Tables};
use super::{Db, rows};

/// How long one wait for changes of other hosts lasts.
const WAIT: Duration = Duration::from_secs(5);

/// Pause after a store that does not answer.
const PAUSE: Duration = Duration::from_millis(500);

impl Db {
    /// Follows the changes that other hosts make in the store from `after` on, until the database is gone.
    ///
    /// # Errors
    /// There is no thread.
    pub fn follow(self: &Arc<Self>, after: Revision) -> std::io::Result<()> {
        self.followed.store(after, Ordering::Release);
        let (db, store) = (Arc::downgrade(self), Arc::clone(&self.store));
        let following = move || follow(&db, &*store, after);
        std::thread::Builder::new().name("db-follower".to_owned()).spawn(following).map(drop)
    }

    /// The revision of the store up to which the changes of other hosts are known.
    pub(crate) fn followed(&self) -> Revision {
        self.followed.load(Ordering::Acquire)
    }

    /// The store below.
    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Looks at an object as it is in the store now.
    ///
    /// # Errors
    /// The store's: nothing is known.
    pub(crate) fn look_again(&self, class: &str, reference: &str) -> Result<(), ApiError> {
        let class = super::change::class_named(class)?;
        let key = rows::key_of(class, reference);
        let row = self.store.get(&key).map_err(|error| super::commit::refused(&error))?;
        if self.layout.is_shared {
            self.take_over(vec![row.unwrap_or(Row { key, value: None, revision: Revision::MAX })]);
        }
        Ok(())
    }

    /// Takes notes of another host over, in one commit: those below `prefix` whose text `is_wanted`. Answers the texts.
    pub(crate) fn take_notes_of(
        &self,
        host: Uuid,
        prefix: &str,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>, ApiError> {
        let theirs = notes_of(host);
        let refused = |error: StoreError| super::commit::refused(&error);
        let mut rows = self.store.list(&format!("{theirs}{prefix}")).map_err(refused)?;
        rows.retain(|row| row.value.as_deref().is_some_and(&is_wanted));
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let mut pending = self.pending.lock();
        while pending.is_writing {
            self.written.wait(&mut pending);
        }
        let mut txn = Txn::default();
        for row in &rows {
            let (key, text) = (&row.key[theirs.len()..], row.value.clone().unwrap_or_default());
            txn.expect.push((row.key.clone(), Expect::At(row.revision)));
            txn.deletes.push(row.key.clone());
            txn.puts.push((format!("{}{key}", self.layout.notes), text));
        }
        let revision = self.store.commit(txn).map_err(refused)?;
        let mut tables = self.write();
        let mut taken = Vec::new();
        for row in rows {
            let text = row.value.unwrap_or_default();
            taken.push(text.clone());
            tables.notes.insert(row.key[theirs.len()..].to_owned(), Note { text, revision });
        }
        Ok(taken)
    }

    /// Takes over rows as they are in the store, where they are newer than what is known.
    pub(super) fn take_over(&self, found: Vec<Row>) {
        let mut pending = self.pending.lock();
        pending.followers += 1;
        while pending.is_writing {
            self.written.wait(&mut pending);
        }
        pending.followers -= 1;
        self.adopt(found);
        drop(pending);
        self.written.notify_all();
        self.announce();
    }

    /// The holder of `pending`, or the thread that writes, may do this.
    fn adopt(&self, found: Vec<Row>) {
        let mut tables = self.write();
        for row in found {
            if let Some(class) = class_of(&row.key) {
                adopt_object(&mut tables, class, &row);
            }
        }
    }

    /// All rows are read again, and what is not there any more is removed.
    fn reread(&self) -> Result<Revision, StoreError> {
        let before: Vec<Key> = {
            let tables = self.read();
            let stored = tapio_model::CLASSES.iter().filter(|class| class.persistent);
            let all = stored.flat_map(|class| tables.all(class.name).filter(|object| object.is_stored));
            all.map(|object| (object.class.name, object.reference.clone())).collect()
        };
        let found = self.store.list("/")?;
        let last = found.iter().map(|row| row.revision).max().unwrap_or_default();
        let there: BTreeSet<&str> = found.iter().map(|row| row.key.as_str()).collect();
        let mut vanished = Vec::new();
        for (class, reference) in before {
            let Some(class) = tapio_model::class(class) else { continue };
            let key = rows::key_of(class, &reference);
            if !there.contains(key.as_str()) {
                vanished.push(Row { key, value: None, revision: last });
            }
        }
        self.take_over(found);
        self.take_over(vanished);
        Ok(last)
    }

    /// After a conflict: looks at what other hosts made of the objects of a batch, and makes its changes anew on that.
    /// A change that cannot be fails, and with it all that rest on it.
    pub(super) fn rebase(&self, batch: &mut Vec<Queued>) -> Result<(), StoreError> {
        let mut keys: BTreeSet<Key> = BTreeSet::new();
        keys.extend(batch.iter().flat_map(|queued| queued.staged.keys().cloned()));
        let mut found = Vec::new();
        for (class, reference) in &keys {
            let Some(class) = tapio_model::class(class).filter(|class| class.persistent) else { continue };
            let key = rows::key_of(class, reference);
            let is_known = self.read().get(class.name, reference).is_some_and(|object| object.is_stored);
            match self.store.get(&key)? {
                Some(row) => found.push(row),
                None if is_known => found.push(Row { key, value: None, revision: Revision::MAX }),
                None => {}
            }
        }
        let pending = self.pending.lock();
        self.adopt(found);
        drop(pending);
        let tables = self.read();
        let mut now: HashMap<Key, Option<Arc<Object>>> = HashMap::new();
        let mut failed: BTreeSet<Key> = BTreeSet::new();
        batch.retain_mut(|queued| {
            let rests_on_failed = queued.staged.keys().any(|key| failed.contains(key));
            let anew =
                if rests_on_failed { Err(met_another("an object")) } else { anew(queued, &tables, &now) };
            match anew {
                Ok(objects) => {
                    for (key, object) in objects {
                        now.insert(key.clone(), object.clone());
                        if let Some(staged) = queued.staged.get_mut(&key) {
                            staged.object = object;
                        }
                    }
                    true
                }
                Err(error) => {
                    failed.extend(queued.staged.keys().cloned());
                    let _ = queued.done.set(Err(error));
                    false
                }
            }
        });
        Ok(())
    }
}

fn follow(db: &Weak<Db>, store: &dyn Store, mut after: Revision) {
    loop {
        let changes = store.changes(after, WAIT);
        let Some(db) = db.upgrade() else { return };
        match changes {
            Ok(found) => {
                after = found.last().map_or(after, |row| row.revision);
                if !found.is_empty() {
                    db.take_over(found);
                    db.followed.store(after, Ordering::Release);
                }
            }
            Err(StoreError::Forgotten(_)) => match db.reread() {
                Ok(last) => {
                    after = after.max(last);
                    db.followed.store(after, Ordering::Release);
                }
                Err(error) => {
                    tracing::warn!(%error, "the objects of other hosts are those of before");
                    std::thread::sleep(PAUSE);
                }
            },
            Err(error) => {
                tracing::warn!(%error, "changes of other hosts are not heard of");
                std::thread::sleep(PAUSE);
            }
        }
    }
}

fn class_of(key: &str) -> Option<&'static Class> {
    let name = key.strip_prefix('/')?.split_once('/')?.0;
    let is_named = |class: &&&Class| class.persistent && class.name.eq_ignore_ascii_case(name);
    tapio_model::CLASSES.iter().find(is_named).copied()
}

fn adopt_object(tables: &mut Tables, class: &'static Class, row: &Row) {
    let Some(id) = row.key.rsplit('/').next() else { return };
    let reference = format!("OpaqueRef:{id}");
    let known = tables.get(class.name, &reference).cloned();
    if known.as_ref().is_some_and(|known| !known.is_stored || known.revision >= row.revision) {
        return;
    }
    let generation = tables.generation + 1;
    if row.value.is_none() {
        if known.is_some() {
            tables.generation = generation;
            tables.remove(class, &reference, generation);
        }
        return;
    }
    let mut object = match rows::decode(class, row) {
        Ok(object) => object,
        Err(why) => {
            tracing::error!("{why}: a change of another host is not taken over");
            return;
        }
    };
    // What is not kept belongs to this host.
    if let Some(known) = &known {
        for (at, field) in class.fields.iter().enumerate() {
            if matches!(field.source, Source::Volatile) {
                object.values[at] = known.values[at].clone();
            }
        }
    }
    tables.generation = generation;
    tables.put(Arc::new(object), generation, true);
}

fn met_another(what: &str) -> ApiError {
    ApiError::internal(format!("another host of the pool changed {what} at the same moment: repeat the call"))
}

/// The objects of a change, made anew on what is there now.
fn anew(
    queued: &Queued,
    tables: &Tables,
    now: &HashMap<Key, Option<Arc<Object>>>,
) -> Result<BTreeMap<Key, Option<Arc<Object>>>, ApiError> {
    let mut made = BTreeMap::new();
    for (key, staged) in &queued.staged {
        let theirs = match now.get(key) {
            Some(object) => object.clone(),
            None => tables.get(key.0, &key.1).cloned(),
        };
        let object = match (&staged.base, &staged.object, theirs) {
            (None, Some(_), Some(_)) => {
                return Err(met_another(&format!("{} {}", key.0, key.1)));
            }
            (Some(_), Some(_), None) => return Err(gone(staged.class, &key.1)),
            (Some(base), Some(ours), Some(theirs)) => Some(Arc::new(merged(base, ours, &theirs)?)),
            (_, ours, _) => ours.clone(),
        };
        made.insert(key.clone(), object);
    }
    Ok(made)
}

/// The fields that `ours` changed since `base`, on top of `theirs`.
fn merged(base: &Object, ours: &Object, theirs: &Object) -> Result<Object, ApiError> {
    let mut object = theirs.clone();
    for (at, field) in base.class.fields.iter().enumerate() {
        let (base, ours, theirs) = (&base.values[at], &ours.values[at], &theirs.values[at]);
        let value = merged_value(base, ours, theirs).or_else(|| {
            let is_own = matches!(field.source, Source::Volatile);
            is_own.then(|| ours.clone())
        });
        let what = || format!("{}.{} of {}", object.class.name, field.name, object.reference);
        let value = value.ok_or_else(|| met_another(&what()))?;
        object.values[at] = value;
    }
    Ok(object)
}

fn merged_value(base: &Value, ours: &Value, theirs: &Value) -> Option<Value> {
    if ours == base || ours == theirs {
        return Some(theirs.clone());
    }
    if theirs == base {
        return Some(ours.clone());
    }
    let (Value::Map(base), Value::Map(ours), Value::Map(theirs)) = (base, ours, theirs) else { return None };
    let keys: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    let mut pairs = BTreeMap::new();
    for key in keys {
        let (was, our, their) = (base.get(key), ours.get(key), theirs.get(key));
        let value = match () {
            () if our == was || our == their => their,
            () if their == was => our,
            () => return None,
        };
        if let Some(value) = value {
            pairs.insert(key.clone(), value.clone());
        }
    }
    Some(Value::Map(pairs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_different_keys_are_both_there() {
        let map = |pairs: &[(&str, &str)]| {
            Value::string_map(pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())))
        };
        let (base, ours, theirs) =
            (map(&[("a", "1"), ("b", "1")]), map(&[("a", "2"), ("b", "1")]), map(&[("a", "1"), ("c", "1")]));
        assert_eq!(merged_value(&base, &ours, &theirs), Some(map(&[("a", "2"), ("c", "1")])));
        assert_eq!(merged_value(&base, &ours, &map(&[("a", "3")])), None);
        let text = Value::from;
        assert_eq!(merged_value(&text("x"), &text("y"), &text("x")), Some(text("y")));
        assert_eq!(merged_value(&text("x"), &text("x"), &text("z")), Some(text("z")));
        assert_eq!(merged_value(&text("x"), &text("y"), &text("z")), None);
    }
}
