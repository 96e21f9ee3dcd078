//! The file: made, locked, checked, copied.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, ffi};
use tapio_sys::successor;

use crate::{Memory, StoreError};

/// The application id of our SQLite files: "Tapi".
const APPLICATION: i64 = 0x5461_7069;

/// Version of the tables.
const SCHEMA: i64 = 1;

/// A larger file is checked without looking into every index, and is not copied.
const LARGE_LEN: u64 = 256 << 20;

const TABLES: &str = "
    CREATE TABLE rows (key TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE log (revision INTEGER NOT NULL, key TEXT NOT NULL, PRIMARY KEY (revision, key)) WITHOUT ROWID;
    CREATE TABLE meta (name TEXT PRIMARY KEY NOT NULL, value INTEGER NOT NULL) WITHOUT ROWID;
    INSERT INTO meta VALUES ('revision', 0), ('forgotten', 0);
";

pub(super) struct Opened {
    pub(super) writer: Connection,
    pub(super) reader: Connection,
    pub(super) lock: File,
    pub(super) backup_error: Option<String>,
}

/// `PATH` with something after its name.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// An error of SQLite with its file and the next step.
pub(super) fn failed(path: &Path, doing: &str, error: &rusqlite::Error) -> StoreError {
    let file = path.display();
    let next = match error.sqlite_error().map(|error| error.extended_code & 0xff) {
        Some(ffi::SQLITE_FULL) => "make room on its disk and repeat".to_owned(),
        Some(ffi::SQLITE_CORRUPT | ffi::SQLITE_NOTADB) => damage(path),
        Some(ffi::SQLITE_READONLY | ffi::SQLITE_PERM | ffi::SQLITE_CANTOPEN) => {
            "look at the permissions of the file and its directory, and whether its disk is read-only"
                .to_owned()
        }
        _ => "look at its disk and the kernel's log, and repeat".to_owned(),
    };
    StoreError::Failed(format!("{doing} {file}: {error}; {next}"))
}

fn damage(path: &Path) -> String {
    let backup = beside(path, ".backup");
    let has = if backup.is_file() { "replace it with the copy" } else { "there should be a copy at" };
    format!(
        "it is damaged: keep it for repair (sqlite3 {} .recover), {has} {}",
        path.display(),
        backup.display()
    )
}

fn io(path: &Path, doing: &str, error: &std::io::Error) -> StoreError {
    StoreError::Failed(format!(
        "{doing} {}: {error}; look at its directory, permissions and disk",
        path.display()
    ))
}

pub(super) fn open(path: &Path) -> Result<Opened, StoreError> {
    let lock = take_lock(path)?;
    let made = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = made.map_err(|error| io(path, "opening", &error))?;
    let data = file.metadata().map_err(|error| io(path, "looking at", &error))?;
    if data.permissions().mode() & 0o077 != 0 {
        let private = std::fs::Permissions::from_mode(0o600);
        file.set_permissions(private).map_err(|error| io(path, "setting the mode of", &error))?;
    }
    let is_new = data.len() == 0;
    let is_large = data.len() > LARGE_LEN;
    drop(file);

    let writer = connect(path, false)?;
    let told = |error: rusqlite::Error| failed(path, "opening", &error);
    let mut backup_error = None;
    if !is_new {
        check(path, &writer, is_large)?;
    }
    let version = version_of(path, &writer)?;
    if version == SCHEMA && !is_large {
        backup_error = back_up(path, &writer).err();
    } else if is_large {
        backup_error = Some(format!("{} is larger than {} MiB", path.display(), LARGE_LEN >> 20));
    }
    configure(&writer).map_err(told)?;
    if version == 0 {
        let made = writer.execute_batch(&format!(
            "BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA}; COMMIT;"
        ));
        made.map_err(|error| failed(path, "making", &error))?;
    }
    // The names of the file and its companions must survive, too.
    sync_dir(path).map_err(|error| io(path, "syncing the directory of", &error))?;
    let reader = connect(path, true)?;
    Ok(Opened { writer, reader, lock, backup_error })
}

/// One process at a time: a lock on a file beside it, because SQLite's own locks come and go.
pub(super) fn take_lock(path: &Path) -> Result<File, StoreError> {
    let lock_path = beside(path, ".lock");
    let opened =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&lock_path);
    let lock = opened.map_err(|error| io(&lock_path, "opening", &error))?;
    match successor::take_lock(&lock) {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(StoreError::Failed(format!(
            "{} is in use by another process, which holds {}; stop that one first",
            path.display(),
            lock_path.display()
        ))),
        Err(TryLockError::Error(error)) => Err(io(&lock_path, "locking", &error)),
    }
}

fn connect(path: &Path, is_reader: bool) -> Result<Connection, StoreError> {
    let access = if is_reader { OpenFlags::SQLITE_OPEN_READ_ONLY } else { OpenFlags::SQLITE_OPEN_READ_WRITE };
    let opened = Connection::open_with_flags(path, access | OpenFlags::SQLITE_OPEN_NO_MUTEX);
    let connection = opened.map_err(|error| failed(path, "opening", &error))?;
    // An operator may read with sqlite3 meanwhile.
    let bounded = connection.busy_timeout(Duration::from_secs(10));
    bounded.map_err(|error| failed(path, "opening", &error))?;
    Ok(connection)
}

/// Every row of a file whose file system is full: nothing is written, not even next to it. The index of SQLite's log is
/// in memory, which takes a connection that is alone.
pub(super) fn read_all(path: &Path) -> Result<Memory, StoreError> {
    let told = |error: rusqlite::Error| failed(path, "reading", &error);
    let connection = connect(path, false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(told)?;
    connection.pragma_update_and_check(None, "locking_mode", "EXCLUSIVE", |_| Ok(())).map_err(told)?;
    check(path, &connection, false)?;
    match version_of(path, &connection)? {
        0 => Err(StoreError::Failed(format!(
            "{}: nothing is stored yet and its file system is full; make room there",
            path.display()
        ))),
        _ => super::rows_of(&connection).map_err(told),
    }
}

fn configure(writer: &Connection) -> rusqlite::Result<()> {
    writer.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    writer.pragma_update(None, "synchronous", "FULL")?;
    writer.pragma_update(None, "wal_autocheckpoint", 1000)?;
    writer.pragma_update(None, "journal_size_limit", 16 << 20)
}

fn check(path: &Path, writer: &Connection, is_large: bool) -> Result<(), StoreError> {
    let pragma = if is_large { "PRAGMA quick_check(1)" } else { "PRAGMA integrity_check(1)" };
    let found: String =
        writer.query_row(pragma, [], |row| row.get(0)).map_err(|error| failed(path, "checking", &error))?;
    if found == "ok" {
        return Ok(());
    }
    let found = found.replace('\n', " ");
    Err(StoreError::Failed(format!("checking {}: {found}; {}", path.display(), damage(path))))
}

/// 0 for a file that is still empty.
fn version_of(path: &Path, writer: &Connection) -> Result<i64, StoreError> {
    let pragma = |name: &str| -> Result<i64, StoreError> {
        let value = writer.pragma_query_value(None, name, |row| row.get(0));
        value.map_err(|error| failed(path, "opening", &error))
    };
    let (version, application) = (pragma("user_version")?, pragma("application_id")?);
    let tables: i64 = writer
        .query_row("SELECT COUNT(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(|error| failed(path, "opening", &error))?;
    let file = path.display();
    match (application, version) {
        (0, 0) if tables == 0 => Ok(0),
        (APPLICATION, SCHEMA) => Ok(SCHEMA),
        (APPLICATION, newer) if newer > SCHEMA => Err(StoreError::Failed(format!(
            "{file} has version {newer} of the tables, this program knows {SCHEMA}: start the newer program, or move \
             the file away"
        ))),
        _ => Err(StoreError::Failed(format!(
            "{file} is a database of another program: move it away, or name another file"
        ))),
    }
}

/// Copies what was just found good, so that a later damage leaves something to go back to.
fn back_up(path: &Path, writer: &Connection) -> Result<(), String> {
    let (copy, new) = (beside(path, ".backup"), beside(path, ".backup.new"));
    let told = |what: String| format!("the copy {} was not renewed: {what}", copy.display());
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(told(error.to_string())),
        _ => {}
    }
    // Made empty first, for the mode: SQLite writes into an empty file.
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new);
    let file = made.map_err(|error| told(error.to_string()))?;
    let copied = writer.execute("VACUUM INTO ?1", [new.to_string_lossy()]).map_err(|error| error.to_string());
    let kept = copied.and_then(|_| {
        file.sync_all()
            .and_then(|()| std::fs::rename(&new, &copy))
            .and_then(|()| sync_dir(path))
            .map_err(|error| error.to_string())
    });
    kept.map_err(|what| {
        // Half a copy is worth nothing; the old one is still there.
        let _ = std::fs::remove_file(&new);
        told(what)
    })
}

fn sync_dir(path: &Path) -> std::io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}
