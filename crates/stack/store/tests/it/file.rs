//! SQLite's file: its mode, its lock, and what becomes of a bad one.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tapio_store::{Sqlite, Store, StoreError, Txn};

use crate::{put, value};

fn refusal(path: &Path) -> String {
    match Sqlite::open(path) {
        Err(StoreError::Failed(why)) => why,
        other => panic!("{other:?}"),
    }
}

/// A store with `rows` rows, closed again.
fn made(path: &Path, rows: usize) {
    let store = Sqlite::open(path).expect("a new store");
    let puts = (0..rows).map(|row| (format!("/row/{row:06}"), "x".repeat(200))).collect();
    store.commit(Txn { puts, ..Txn::default() }).expect("a commit");
}

#[test]
fn the_file_is_private_and_for_one_process() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let path = dir.path().join("db");
    let store = Sqlite::open(&path).expect("a new store");
    store.commit(put("/a", "1")).expect("a commit");
    for file in std::fs::read_dir(dir.path()).expect("a directory").flatten() {
        let mode = file.metadata().expect("a file").permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{:?}", file.file_name());
    }
    let why = refusal(&path);
    assert!(why.contains("in use by another process") && why.contains(&path.display().to_string()), "{why}");
    drop(store);
    let store = Sqlite::open(&path).expect("it is free again");
    assert_eq!(value(&store, "/a").map(|(value, _)| value), Some("1".into()));
}

#[test]
fn revisions_go_on_after_a_restart() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let path = dir.path().join("db");
    let first = Sqlite::open(&path).expect("a new store").commit(put("/a", "1")).expect("a commit");
    let store = Sqlite::open(&path).expect("a store");
    let second = store.commit(put("/a", "2")).expect("a commit");
    assert!(second > first);
    let seen = store.changes(first, std::time::Duration::ZERO).expect("it is remembered");
    assert_eq!(seen.len(), 1);
}

#[test]
fn a_copy_of_the_last_good_state_is_kept() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let (path, copy) = (dir.path().join("db"), dir.path().join("db.backup"));
    made(&path, 10);
    assert!(!copy.exists(), "there was nothing to copy");
    let store = Sqlite::open(&path).expect("a store");
    assert_eq!(store.backup_error(), None);
    store.commit(put("/later", "")).expect("a commit");
    drop(store);
    assert_eq!(std::fs::metadata(&copy).expect("a copy").permissions().mode() & 0o777, 0o600);
    std::fs::copy(&copy, dir.path().join("other")).expect("a copy of the copy");
    let other = Sqlite::open(&dir.path().join("other")).expect("the copy is a store");
    assert_eq!(other.list("/row/").expect("the store reads").len(), 10);
    assert_eq!(value(&other, "/later"), None);
}

#[test]
fn a_damaged_file_is_named_with_the_next_step() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let path = dir.path().join("db");
    made(&path, 2000);
    drop(Sqlite::open(&path).expect("it is good, and copied"));
    let good = std::fs::read(&path).expect("a file");
    assert!(good.len() > 20 * 4096, "{}", good.len());
    let mut wrecked = good.clone();
    for page in 3..good.len() / 4096 - 3 {
        wrecked[page * 4096..page * 4096 + 64].fill(0xa5);
    }
    let mut cut = good.clone();
    cut.truncate(good.len() / 2 + 100);
    for damaged in [
        wrecked,
        cut,
        b"no database at all, just some text that is longer than a header of one...................."
            .repeat(9),
    ] {
        std::fs::write(&path, &damaged).expect("a file");
        let why = refusal(&path);
        assert!(why.contains(&path.display().to_string()), "{why}");
        assert!(why.contains("damaged") && why.contains("db.backup"), "{why}");
        assert_eq!(std::fs::read(&path).expect("a file"), damaged, "it was not touched");
    }
    std::fs::copy(dir.path().join("db.backup"), &path).expect("the advice can be followed");
    let store = Sqlite::open(&path).expect("the copy is good");
    assert_eq!(store.list("/row/").expect("the store reads").len(), 2000);
}

#[test]
fn files_of_others_and_of_newer_versions_are_refused() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let other = dir.path().join("other");
    let connection = rusqlite::Connection::open(&other).expect("a database");
    connection.execute_batch("CREATE TABLE mine (x)").expect("a table");
    drop(connection);
    assert!(refusal(&other).contains("another program"), "{}", refusal(&other));
    let newer = dir.path().join("newer");
    made(&newer, 1);
    let connection = rusqlite::Connection::open(&newer).expect("a database");
    connection.pragma_update(None, "user_version", 7).expect("a version");
    drop(connection);
    assert!(refusal(&newer).contains("version 7"), "{}", refusal(&newer));
    let missing = dir.path().join("no/such/dir/db");
    assert!(refusal(&missing).contains("no/such/dir"), "{}", refusal(&missing));
}

#[test]
fn a_full_disk_refuses_and_changes_nothing() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let path = dir.path().join("db");
    let store = Sqlite::open(&path).expect("a new store");
    let at = store.commit(put("/a", "1")).expect("a commit");
    store.limit_to(64 << 10).expect("a bound");
    let mut big = put("/a", "2");
    big.puts.push(("/big".into(), "x".repeat(1 << 20)));
    match store.commit(big) {
        Err(StoreError::Failed(why)) => {
            assert!(why.contains("full") && why.contains("make room") && why.contains("db"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(value(&store, "/a"), Some(("1".into(), at)));
    assert_eq!(value(&store, "/big"), None);
    store.limit_to(64 << 20).expect("room again");
    store.commit(put("/a", "3")).expect("it goes on");
}
