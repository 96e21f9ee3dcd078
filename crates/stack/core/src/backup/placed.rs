//! A host's archive that takes the place of its database and its daemon's files at the next start.
//!
//! ```text
//!   host.restore     what is to come: a line with the name of this restore and its files, then the archive
//!   host.restoring   the same, once a start has begun with it
//!   host.refused     an archive that a start did not take
//!   FILE.before-restore, database.before-restore   what was there before
//! ```
//!
//! 1. The file has its name when it is whole (step `host-restore:staged`); the daemon starts again.
//! 2. The start reads it wholly once more, looks for what is in the way, and renames it (`host-restore:begun`).
//! 3. Each file is kept and replaced by a rename (`host-restore:server.pem`, `host-restore:accounts`).
//! 4. The objects of before are kept, and one commit replaces all of them (`host-restore:database`).
//! 5. `tapiod.conf` is replaced (`host-restore:tapiod.conf`): last, because it says where the database is.
//! 6. `host.restoring` is removed, and the daemon starts again with what is there now.
//!
//! A start that finds `host.restoring` does 3 to 6, whatever was done before: a file that is as it is to be stays, and
//! the store knows the restore by its name. So after 1 the host is as it was or as in its archive, once a start ended.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tapio_store::{Etcd, Store};
use uuid::Uuid;

use super::archive::{ACCOUNTS, CERTIFICATE, HostArchive, SETTINGS};
use super::files::HostFile;
use super::staged::{hindrance, keep_before, order_of, put_order};
use crate::db::{is_replaced, replace};
use crate::plan::steps::step;

const STAGED: &str = "host.restore";
const BEGUN: &str = "host.restoring";
const REFUSED: &str = "host.refused";

/// What the file of before is called, behind its name.
const BEFORE: &str = ".before-restore";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    restore: Uuid,
    /// Names of files that are replaced.
    files: Vec<String>,
}

/// Puts an archive where the next start takes it from.
///
/// # Errors
/// The file cannot be written: a sentence.
pub(super) fn stage(dir: &Path, files: &[&str], archive: &[u8]) -> Result<(), String> {
    let files = files.iter().map(|name| (*name).to_owned()).collect();
    put_order(dir, STAGED, &Order { restore: Uuid::new_v4(), files }, archive)?;
    step("host-restore:staged");
    Ok(())
}

/// Whether an archive waits for a start.
pub fn is_host_staged(state_dir: &Path) -> bool {
    [STAGED, BEGUN].iter().any(|name| state_dir.join(name).exists())
}

fn read(bytes: &[u8]) -> Result<(Order, HostArchive), String> {
    let (order, archive) = order_of(bytes)?;
    Ok((order, HostArchive::parse(archive)?))
}

fn sync(dir: &Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Begins with an archive that waits; whether there is one to go on with.
fn begin(
    state_dir: &Path,
    store: &dyn Store,
    pool: Option<(&Etcd, Uuid)>,
    failed: &dyn Fn(&dyn std::fmt::Display) -> String,
) -> Result<bool, String> {
    let path = state_dir.join(STAGED);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(failed(&error)),
    };
    let why = match read(&bytes) {
        Err(why) => Some(why),
        Ok(_) => hindrance(store, pool).map_err(|why| failed(&why))?,
    };
    let name = if why.is_some() { REFUSED } else { BEGUN };
    let moved = fs::rename(&path, state_dir.join(name)).and_then(|()| sync(state_dir));
    moved.map_err(|error| failed(&error))?;
    if let Some(why) = why {
        let aside = state_dir.join(REFUSED);
        tracing::error!("this host is as before; the backup in {} was not taken: {why}", aside.display());
        return Ok(false);
    }
    step("host-restore:begun");
    Ok(true)
}

/// The name of a file with something behind it.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// Replaces a file, and keeps that of before; one that is as it is to be stays.
fn put(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().unwrap_or_else(|| Path::new("/"));
    let mut mode = 0o600;
    match fs::read(path) {
        Ok(now) if now == bytes => return Ok(()),
        Ok(now) => {
            mode = fs::metadata(path)?.permissions().mode() & 0o777;
            whole(&beside(path, BEFORE), &now, mode)?;
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    whole(path, bytes, mode)?;
    sync(dir)
}

/// Writes a file, whole or not at all.
fn whole(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    let part = beside(path, ".part");
    let _ = fs::remove_file(&part);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&part)?;
    file.write_all(bytes)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()?;
    fs::rename(&part, path)
}

/// Takes an archive over that waits: into a store that no daemon of this host has open, and into the files of the
/// daemon. `pool` names the cluster that the store is, and this host. True: the daemon is to start again.
///
/// # Errors
/// The store's, a file's: a sentence. The daemon is not to start: the archive is to come before anything changes.
pub fn take_host_over(
    state_dir: &Path,
    store: &dyn Store,
    pool: Option<(&Etcd, Uuid)>,
    files: &[HostFile],
) -> Result<bool, String> {
    let begun = state_dir.join(BEGUN);
    let failed = |why: &dyn std::fmt::Display| {
        format!(
            "the backup of this host in {} cannot be put in place: {why}; put that right, or remove {STAGED} and \
             {BEGUN} there to start with what there is",
            state_dir.display()
        )
    };
    if !begun.exists() && !begin(state_dir, store, pool, &failed)? {
        return Ok(false);
    }
    let bytes = fs::read(&begun).map_err(|error| failed(&error))?;
    let (order, archive) = read(&bytes).map_err(|why| failed(&why))?;
    drop(bytes);
    let put_named = |name: &str| -> Result<(), String> {
        let file =
            files.iter().find(|file| file.name == name && order.files.iter().any(|named| named == name));
        let bytes = archive.files.iter().find(|(known, _)| *known == name);
        let (Some(file), Some((_, bytes))) = (file, bytes) else { return Ok(()) };
        put(&file.path, bytes).map_err(|error| failed(&format!("{}: {error}", file.path.display())))
    };
    put_named(CERTIFICATE)?;
    step("host-restore:server.pem");
    put_named(ACCOUNTS)?;
    step("host-restore:accounts");
    let name = order.restore.to_string();
    if !is_replaced(store, &name).map_err(|error| failed(&error))? {
        keep_before(state_dir, store).map_err(|why| failed(&why))?;
    }
    replace(store, &archive.dump, &name, pool.is_some()).map_err(|error| failed(&error))?;
    step("host-restore:database");
    put_named(SETTINGS)?;
    step("host-restore:tapiod.conf");
    fs::remove_file(&begun).and_then(|()| sync(state_dir)).map_err(|error| failed(&error))?;
    tracing::warn!(
        "this host is as in its backup of {} now; what was there before is in database{BEFORE} in {}, and beside each \
         file",
        archive.date,
        state_dir.display()
    );
    Ok(true)
}
