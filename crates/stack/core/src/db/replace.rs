//! The rows of a store become those of a dump, by one commit.

use std::collections::BTreeMap;

use tapio_store::{Store, StoreError, Txn};

use super::commit::PROMISE_KEY;
use super::layout::HOSTS;
use super::tables::{Gone, gone_key};
use super::{Dump, Generation, NOTES, rows};

/// The row with the name of the last dump that a store took over.
const REPLACED_KEY: &str = "/meta/restored";

/// Journals that are no operation that is half done: measurements, the owners of tasks, PBDs that a start tries again.
const AT_REST: [&str; 3] = ["sr-use/", "task/owner/", "storage/pbd-wanted/"];

/// Journals that stay: measurements of SRs.
const STAYS: &str = "sr-use/";

/// What [`replace`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// The store has the objects of the dump.
    Now,
    /// It took this dump over before, and has gone on since.
    Before,
}

/// The part of a journal's key that its writer chose; none: the row is none of a journal.
fn note_of(key: &str, is_shared: bool) -> Option<&str> {
    match is_shared {
        false => key.strip_prefix(NOTES),
        true => key.strip_prefix(HOSTS)?.split_once("/note/").map(|(_, note)| note),
    }
}

/// What is half done: keys of journals, those of all hosts that share the store.
///
/// # Errors
/// The store's.
pub(crate) fn half_done(store: &dyn Store, is_shared: bool) -> Result<Vec<String>, StoreError> {
    let rows = store.list(if is_shared { HOSTS } else { NOTES })?;
    let notes = rows.iter().filter_map(|row| note_of(&row.key, is_shared));
    let is_half_done = |note: &&str| !AT_REST.iter().any(|prefix| note.starts_with(prefix));
    Ok(notes.filter(is_half_done).map(str::to_owned).collect())
}

/// Whether a store took the dump with this name over.
///
/// # Errors
/// The store's.
pub(crate) fn is_replaced(store: &dyn Store, name: &str) -> Result<bool, StoreError> {
    Ok(store.get(REPLACED_KEY)?.and_then(|row| row.value).as_deref() == Some(name))
}

/// Gives a store that no daemon of this host has open the objects of a dump, and those alone, whole or not at all.
/// `name` is that of this taking over: with the same it is done once.
///
/// # Errors
/// The store's: it is as it was.
pub(crate) fn replace(
    store: &dyn Store,
    dump: &Dump,
    name: &str,
    is_shared: bool,
) -> Result<Replaced, StoreError> {
    if is_replaced(store, name)? {
        return Ok(Replaced::Before);
    }
    // What is made now is younger than every token of a listener, and older than what the next run makes.
    let promised = store.get(PROMISE_KEY)?.and_then(|row| row.value?.parse::<Generation>().ok()).unwrap_or(1);
    let mut txn = Txn::default();
    let mut known = BTreeMap::new();
    for class in tapio_model::CLASSES.iter().filter(|class| class.persistent) {
        for row in store.list(&rows::prefix_of(class))? {
            known.insert(row.key.clone(), (*class, row));
        }
    }
    for object in &dump.objects {
        let key = rows::key_of(object.class, &object.reference);
        let before = known.remove(&key).map(|(_, row)| row);
        let created = before.as_ref().and_then(rows::created).unwrap_or(promised);
        let text = rows::encode(object, created);
        if before.and_then(|row| row.value).as_ref() != Some(&text) {
            txn.puts.push((key, text));
        }
    }
    for (key, (class, row)) in known {
        if !is_shared {
            let created = rows::created(&row).unwrap_or(1);
            let id = key.rsplit('/').next().unwrap_or_default();
            let reference = format!("OpaqueRef:{id}");
            let gone = Gone { class, reference, created, deleted: promised, is_stored: true };
            txn.puts.push((gone_key(&gone), created.to_string()));
        }
        txn.deletes.push(key);
    }
    for row in store.list(if is_shared { HOSTS } else { NOTES })? {
        if note_of(&row.key, is_shared).is_some_and(|note| !note.starts_with(STAYS)) {
            txn.deletes.push(row.key);
        }
    }
    txn.puts.push((REPLACED_KEY.to_owned(), name.to_owned()));
    store.commit(txn)?;
    Ok(Replaced::Now)
}
