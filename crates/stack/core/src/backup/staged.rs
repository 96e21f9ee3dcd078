//! A dump that takes the place of the database at the next start of the daemon.
//!
//! ```text
//!   database.restore         what is to come: a line with the name of this restore, then the dump
//!   database.before-restore  the objects of before, as a dump
//!   database.refused         a dump that a start did not take
//! ```
//!
//! 1. The file has its name when it is whole (step `pool-restore:staged`); the daemon starts again.
//! 2. The objects of before are written (`pool-restore:kept`).
//! 3. One commit replaces all objects and names the restore (`pool-restore:committed`).
//! 4. The file is removed.
//!
//! A start that finds the file does 2 to 4; behind a kill in 3 and 4 the store knows the restore by its name, and only
//! 4 is left. So the objects are those of before or those of the dump.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tapio_store::{Etcd, Store};
use uuid::Uuid;

use crate::db::{Dump, Replaced, half_done, replace};
use crate::plan::steps::step;

const STAGED: &str = "database.restore";
const BEFORE: &str = "database.before-restore";
const REFUSED: &str = "database.refused";

/// Where keys of hosts that live are in etcd.
const LIVING: &str = "hosts/";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    restore: Uuid,
}

/// Writes a file that only its owner reads, whole or not at all.
pub(super) fn write(dir: &Path, name: &str, parts: &[&[u8]]) -> io::Result<()> {
    let part = dir.join(format!("{name}.part"));
    let _ = fs::remove_file(&part);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&part)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.sync_all()?;
    fs::rename(&part, dir.join(name))?;
    File::open(dir)?.sync_all()
}

/// Puts an order and what it is about where the next start takes them from.
///
/// # Errors
/// The file cannot be written: a sentence.
pub(super) fn put_order(dir: &Path, name: &str, order: &impl Serialize, rest: &[u8]) -> Result<(), String> {
    let order = serde_json::to_string(order).map_err(|error| error.to_string())?;
    write(dir, name, &[order.as_bytes(), b"\n", rest]).map_err(|error| {
        // What a client is told that it failed must not come later.
        let _ = fs::remove_file(dir.join(name));
        format!("{}: {error}", dir.join(name).display())
    })
}

/// The order at the beginning of such a file, and what is behind it.
///
/// # Errors
/// A sentence.
pub(super) fn order_of<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<(T, &'a [u8]), String> {
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("it is cut off")?;
    let (first, rest) = bytes.split_at(end);
    let order = serde_json::from_slice(first).map_err(|error| format!("its first line: {error}"))?;
    Ok((order, &rest[1..]))
}

/// Puts a dump where the next start takes it from.
///
/// # Errors
/// The file cannot be written: a sentence.
pub(super) fn stage(dir: &Path, dump: &Dump) -> Result<(), String> {
    put_order(dir, STAGED, &Order { restore: Uuid::new_v4() }, dump.text().as_bytes())?;
    step("pool-restore:staged");
    Ok(())
}

/// Whether a dump waits for a start.
pub fn is_staged(state_dir: &Path) -> bool {
    state_dir.join(STAGED).exists()
}

fn read(bytes: &[u8]) -> Result<(String, Dump), String> {
    let (order, dump): (Order, _) = order_of(bytes)?;
    Ok((order.restore.to_string(), Dump::parse(dump)?))
}

/// Why a store does not take a dump now.
pub(super) fn hindrance(store: &dyn Store, pool: Option<(&Etcd, Uuid)>) -> Result<Option<String>, String> {
    let told = |error: tapio_store::StoreError| error.to_string();
    let half_done = half_done(store, pool.is_some()).map_err(told)?;
    if let Some(note) = half_done.first() {
        return Ok(Some(format!("an operation is half done ({note})")));
    }
    let Some((etcd, own)) = pool else { return Ok(None) };
    let holders = etcd.holders(LIVING).map_err(told)?;
    let own = own.to_string();
    let other =
        holders.iter().map(|(key, ..)| key.rsplit('/').next().unwrap_or_default()).find(|host| *host != own);
    Ok(other.map(|host| format!("the host {host} of the pool lives")))
}

/// Writes the objects of a store, as a dump.
pub(super) fn keep_before(state_dir: &Path, store: &dyn Store) -> Result<(), String> {
    let before = Dump::of_store(store)?;
    let written = write(state_dir, BEFORE, &[before.text().as_bytes()]);
    written.map_err(|error| format!("{}: {error}", state_dir.join(BEFORE).display()))
}

/// Takes a dump over that waits, into a store that no daemon of this host has open. `pool` names the cluster that the
/// store is, and this host.
///
/// # Errors
/// The store's, a file's: a sentence. The daemon is not to start: the dump is to come before anything changes.
pub fn take_over(state_dir: &Path, store: &dyn Store, pool: Option<(&Etcd, Uuid)>) -> Result<(), String> {
    let path = state_dir.join(STAGED);
    let failed = |why: &dyn std::fmt::Display| {
        format!(
            "the database of {} cannot be put in place: {why}; put that right, or remove the file to start with the \
             database of before",
            path.display()
        )
    };
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(&error)),
    };
    let set_aside = |why: &str| {
        let aside = state_dir.join(REFUSED);
        fs::rename(&path, &aside)
            .and_then(|()| File::open(state_dir)?.sync_all())
            .map_err(|error| failed(&error))?;
        tracing::error!(
            "the database is the one of before; that of {} was not taken: {why}",
            aside.display()
        );
        Ok(())
    };
    let (name, dump) = match read(&bytes) {
        Ok(read) => read,
        Err(why) => return set_aside(&why),
    };
    let is_shared = pool.is_some();
    if !crate::db::is_replaced(store, &name).map_err(|error| failed(&error))? {
        if let Some(why) = hindrance(store, pool).map_err(|why| failed(&why))? {
            return set_aside(&why);
        }
        keep_before(state_dir, store).map_err(|why| failed(&why))?;
        step("pool-restore:kept");
    }
    let done = replace(store, &dump, &name, is_shared).map_err(|error| failed(&error))?;
    step("pool-restore:committed");
    fs::remove_file(&path)
        .and_then(|()| File::open(state_dir)?.sync_all())
        .map_err(|error| failed(&error))?;
    if done == Replaced::Now {
        let (objects, date) = (dump.objects.len(), &dump.date);
        let before = state_dir.join(BEFORE);
        tracing::warn!(
            "the database is that of the dump of {date} now, with {objects} objects; that of before is in {}",
            before.display()
        );
    }
    Ok(())
}
