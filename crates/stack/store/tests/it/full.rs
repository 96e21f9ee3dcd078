//! A store on a file system that is full when it is opened.

use std::path::Path;
use std::process::Command;

use tapio_store::{DeferringStore, Expect, Sqlite, Store, StoreError, Txn};

use crate::{put, put_if, value};

/// A small file system in memory; unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    /// None, and a line about it, where nothing can be mounted.
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "small"]).arg(dir.path()).output();
        if mounted.is_ok_and(|mounted| mounted.status.success()) {
            return Some(Self(dir));
        }
        println!("skipped: needs root to mount a tmpfs [store::full]");
        None
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes all the room there is.
    fn fill(&self) {
        use std::io::Write;
        let mut file = std::fs::File::create(self.path().join("ballast")).expect("a file");
        for len in [4096, 1] {
            while file.write_all(&vec![1; len]).is_ok() {}
        }
    }

    fn free(&self) {
        std::fs::remove_file(self.path().join("ballast")).expect("the ballast goes");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).output();
    }
}

fn failed(answer: Result<u64, StoreError>) -> String {
    match answer {
        Err(StoreError::Failed(why)) => why,
        other => panic!("{other:?}"),
    }
}

/// What the start commits is kept for the file, the rest is refused; then there is room, and both are there.
fn serves_and_recovers(small: &Small, path: &Path) {
    let store = DeferringStore::open(path).expect("it opens");
    let before = value(&store, "/a").expect("what was stored is read");
    assert_eq!(before.0, "1");
    let at = store.commit(put_if("/a", Expect::At(before.1), "2")).expect("the start may commit");
    store.commit(put("/by-the-start", "x")).expect("the start may commit");
    assert_eq!(value(&store, "/a"), Some(("2".into(), at)));
    assert!(store.full().is_some_and(|why| why.contains("full")) && !store.is_durable());
    store.started();
    for _ in 0..3 {
        let why = failed(store.commit(put("/b", "1")));
        assert!(
            why.contains("full") && why.contains("make room") && why.contains(&path.display().to_string()),
            "{why}"
        );
        assert_eq!((value(&store, "/b"), value(&store, "/a").map(|(_, at)| at)), (None, Some(at)));
    }
    small.free();
    let refused = store.commit(put_if("/a", Expect::At(before.1), "3"));
    assert!(matches!(refused, Err(StoreError::Conflict(key, now)) if key == "/a" && now == Some(at)));
    store.commit(put_if("/a", Expect::At(at), "3")).expect("there is room");
    assert!(store.is_durable() && store.full().is_none());
    drop(store);
    let store = Sqlite::open(path).expect("a store");
    assert_eq!(value(&store, "/a").map(|(value, _)| value), Some("3".into()));
    assert_eq!(value(&store, "/by-the-start").map(|(value, _)| value), Some("x".into()));
}

#[test]
fn a_store_that_was_closed_is_read_and_written_once_there_is_room() {
    let Some(small) = Small::mount() else { return };
    let path = small.path().join("db");
    Sqlite::open(&path).expect("a new store").commit(put("/a", "1")).expect("a commit");
    small.fill();
    assert!(
        Sqlite::open(&path).is_err() || Sqlite::open(&path).is_ok_and(|db| db.commit(put("/c", "")).is_err())
    );
    serves_and_recovers(&small, &path);
}

#[test]
fn what_a_kill_left_in_the_log_is_read() {
    let Some(small) = Small::mount() else { return };
    let path = small.path().join("db");
    drop(Sqlite::open(&path).expect("a new store"));
    let store = Sqlite::open(&path).expect("a store");
    let puts = (0..50).map(|row| (format!("/row/{row}"), "y".repeat(500))).collect();
    store.commit(Txn { puts, ..put("/a", "1") }).expect("a commit");
    store.commit(put("/a", "1")).expect("a commit");
    // As a kill leaves them: a database, its log, and no index of it.
    for name in ["db", "db-wal"] {
        std::fs::copy(small.path().join(name), small.path().join(format!("killed-{name}"))).expect("a copy");
    }
    assert!(small.path().join("killed-db-wal").metadata().expect("a log").len() > 0);
    drop(store);
    let path = small.path().join("killed-db");
    small.fill();
    let store = DeferringStore::open(&path).expect("it opens");
    assert_eq!(store.list("/row/").expect("rows").len(), 50);
    drop(store);
    serves_and_recovers(&small, &path);
}

#[test]
fn a_file_system_that_fills_up_later_refuses_and_goes_on() {
    let Some(small) = Small::mount() else { return };
    let path = small.path().join("db");
    let store = DeferringStore::open(&path).expect("a new store");
    store.commit(put("/a", "1")).expect("a commit");
    store.started();
    small.fill();
    let big = || Txn { puts: vec![("/big".into(), "x".repeat(3 << 20))], ..Txn::default() };
    assert!(failed(store.commit(big())).contains("make room"));
    assert_eq!(value(&store, "/a").map(|(value, _)| value), Some("1".into()));
    small.free();
    store.commit(put("/a", "2")).expect("there is room");
}

#[test]
fn a_new_store_needs_room() {
    let Some(small) = Small::mount() else { return };
    small.fill();
    let why = match DeferringStore::open(&small.path().join("db")) {
        Err(StoreError::Failed(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(why.contains("nothing is stored yet") && why.contains("make room"), "{why}");
}
