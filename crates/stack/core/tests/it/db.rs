//! The database of objects on its store.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tapio_core::db::Db;
use tapio_fixtures::waiting::Caller;
use tapio_model::Value;
use tapio_store::{Memory, Revision, Row, Store, StoreError, Txn};

use crate::world::needed;

/// A store in memory that can be slow and full, and counts.
#[derive(Default)]
pub struct Shaky {
    inner: Memory,
    pub is_full: AtomicBool,
    pub delay_ms: AtomicU64,
    pub commits: AtomicU64,
    /// Held by a test to hold a commit up.
    pub gate: Mutex<()>,
}

impl Store for Shaky {
    fn get(&self, key: &str) -> Result<Option<Row>, StoreError> {
        self.inner.get(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Row>, StoreError> {
        self.inner.list(prefix)
    }

    fn commit(&self, txn: Txn) -> Result<Revision, StoreError> {
        self.commits.fetch_add(1, Ordering::SeqCst);
        drop(self.gate.lock());
        std::thread::sleep(Duration::from_millis(self.delay_ms.load(Ordering::SeqCst)));
        if self.is_full.load(Ordering::SeqCst) {
            return Err(StoreError::Failed("writing /x/db: database or disk is full; make room".into()));
        }
        self.inner.commit(txn)
    }

    fn changes(&self, after: Revision, wait: Duration) -> Result<Vec<Row>, StoreError> {
        self.inner.changes(after, wait)
    }
}

fn shaky() -> (Arc<Shaky>, Arc<Db>) {
    let store = Arc::new(Shaky::default());
    let db = Db::open(Arc::clone(&store) as _).expect("an empty store opens");
    (store, Arc::new(db))
}

fn vm(db: &Db, name: &str) -> String {
    db.create("VM", &needed("VM", &[("name_label", name.into())])).expect("a VM")
}

#[test]
fn a_hundred_writers_share_commits() {
    const WRITERS: usize = 100;
    let (store, db) = shaky();
    let vms: Vec<String> = (0..WRITERS).map(|n| vm(&db, &n.to_string())).collect();
    let before = store.commits.load(Ordering::SeqCst);
    for time in 0..3_i64 {
        // The store is slow: it does the first commit until the changes of all others wait.
        let slow = store.gate.lock().expect("no panic");
        let callers: Vec<Caller> = (0..WRITERS).map(|_| Caller::default()).collect();
        std::thread::scope(|scope| {
            for (vm, caller) in vms.iter().zip(&callers) {
                let db = &db;
                scope.spawn(move || {
                    caller.calls(|| db.set("VM", vm, "user_version", time + 7)).expect("a field");
                    assert_eq!(db.get("VM", vm).expect("it is there").int("user_version"), time + 7);
                });
            }
            callers.iter().for_each(Caller::until_it_waits);
            drop(slow);
        });
    }
    let commits = store.commits.load(Ordering::SeqCst) - before;
    assert!(commits <= 30, "300 changes took {commits} commits");
    let again = Db::open(store as _).expect("it opens again");
    for vm in vms {
        assert_eq!(again.get("VM", &vm).expect("it is kept").int("user_version"), 9);
    }
}

#[test]
fn changes_of_one_object_build_on_each_other() {
    let (store, db) = shaky();
    let vm = vm(&db, "counter");
    store.delay_ms.store(1, Ordering::SeqCst);
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                for _ in 0..10 {
                    db.change(|change| {
                        let next = change.get("VM", &vm)?.int("user_version") + 1;
                        change.set("VM", &vm, "user_version", next)
                    })
                    .expect("a change");
                }
            });
        }
    });
    assert_eq!(db.get("VM", &vm).expect("it is there").int("user_version"), 200);
}

#[test]
fn no_reader_sees_what_is_not_durable() {
    let (store, db) = shaky();
    let vm = vm(&db, "old");
    let held = store.gate.lock().expect("no panic");
    let generation = db.generation();
    let caller = Caller::default();
    let builds = || {
        db.change(|change| {
            assert_eq!(change.get("VM", &vm)?.text("name_label"), "new");
            assert_eq!(change.find("VM", "name_label", "new").len(), 1);
            assert_eq!(change.find("VM", "name_label", "old").len(), 0);
            change.set("VM", &vm, "name_label", "newer")
        })
    };
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| db.set("VM", &vm, "name_label", "new"));
        while store.commits.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        assert_eq!(db.get("VM", &vm).expect("it is there").text("name_label"), "old");
        assert_eq!(db.find("VM", "name_label", "new").len(), 0);
        assert_eq!(db.generation(), generation);
        // What others do to volatile fields does not wait for the store.
        let other = db.all("host");
        assert!(other.is_empty());
        db.change(|change| change.create_volatile("task", &[])).expect("a volatile object");
        assert!(db.generation() > generation);
        // A later change builds on the pending one, and neither is visible.
        let second = scope.spawn(|| caller.calls(builds));
        caller.until_it_waits();
        assert_eq!(db.get("VM", &vm).expect("it is there").text("name_label"), "old");
        drop(held);
        writing.join().expect("no panic").expect("a change");
        second.join().expect("no panic").expect("a change");
    });
    assert_eq!(db.get("VM", &vm).expect("it is there").text("name_label"), "newer");
    assert_eq!(db.find("VM", "name_label", "newer").len(), 1);
}

#[test]
fn a_full_disk_changes_nothing_and_is_named() {
    let (store, db) = shaky();
    let vm_ref = vm(&db, "kept");
    let generation = db.generation();
    store.is_full.store(true, Ordering::SeqCst);
    let error = db.set("VM", &vm_ref, "name_label", "lost").expect_err("the disk is full");
    assert_eq!(error.code, "INTERNAL_ERROR");
    assert!(
        error.params[0].contains("disk is full") && error.params[0].contains("/x/db"),
        "{}",
        error.params[0]
    );
    db.create("VM", &needed("VM", &[])).expect_err("the disk is full");
    db.destroy("VM", &vm_ref).expect_err("the disk is full");
    assert_eq!(db.generation(), generation);
    assert_eq!(db.all("VM").len(), 1);
    assert_eq!(db.get("VM", &vm_ref).expect("it is there").text("name_label"), "kept");
    // Volatile fields go past the store.
    db.set("VM", &vm_ref, "allowed_operations", Value::strings(["start"])).expect("no row is written");
    store.is_full.store(false, Ordering::SeqCst);
    db.set("VM", &vm_ref, "name_label", "again").expect("there is room");
    let again = Db::open(store as _).expect("it opens again");
    assert_eq!(again.get("VM", &vm_ref).expect("it is kept").text("name_label"), "again");
}

#[test]
fn what_rests_on_a_failed_change_fails_with_it() {
    let (store, db) = shaky();
    let vm = vm(&db, "base");
    let held = store.gate.lock().expect("no panic");
    let caller = Caller::default();
    let reads = || db.change(|change| Ok(change.get("VM", &vm)?.text("name_label").to_owned()));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| db.set("VM", &vm, "name_label", "first"));
        while store.commits.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        let answer_of_pending = scope.spawn(|| caller.calls(reads));
        // It has read what is pending, and waits for that.
        caller.until_it_waits();
        store.is_full.store(true, Ordering::SeqCst);
        drop(held);
        first.join().expect("no panic").expect_err("the disk is full");
        answer_of_pending.join().expect("no panic").expect_err("it read what never came to be");
    });
    store.is_full.store(false, Ordering::SeqCst);
    assert_eq!(
        db.change(|change| Ok(change.get("VM", &vm)?.text("name_label").to_owned())),
        Ok("base".into())
    );
}

#[test]
fn a_change_happens_whole_or_not_at_all() {
    let (_, db) = shaky();
    let one = vm(&db, "one");
    let generation = db.generation();
    db.change(|change| {
        change.set("VM", &one, "name_label", "other")?;
        change.create("VM", &needed("VM", &[]))?;
        change.destroy("VM", "OpaqueRef:no")
    })
    .expect_err("the last step fails");
    assert_eq!(db.generation(), generation);
    assert_eq!(db.all("VM").len(), 1);
    assert_eq!(db.get("VM", &one).expect("it is there").text("name_label"), "one");
    db.set("VM", &one, "name_label", "one").expect("the same again");
    assert_eq!(db.generation(), generation, "the same value is no change");
}

#[test]
fn notes_are_written_with_the_objects() {
    let (store, db) = shaky();
    let vm = db
        .change(|change| {
            change.put_note("make/1", "half");
            change.put_note("make/2", "half");
            change.put_note("other/1", "x");
            change.create("VM", &needed("VM", &[]))
        })
        .expect("a change");
    store.is_full.store(true, Ordering::SeqCst);
    db.change(|change| {
        change.drop_note("make/1");
        Ok(())
    })
    .expect_err("the disk is full");
    store.is_full.store(false, Ordering::SeqCst);
    let notes = |db: &Db, prefix: &str| db.notes(prefix).into_iter().map(|(key, _)| key).collect::<Vec<_>>();
    assert_eq!(notes(&db, "make/"), ["make/1", "make/2"]);
    db.change(|change| {
        change.drop_note("make/1");
        change.drop_note("make/never");
        change.put_note("make/2", "more");
        change.destroy("VM", &vm)
    })
    .expect("a change");
    let again = Db::open(store as _).expect("it opens again");
    assert_eq!(again.notes("make/"), [("make/2".to_owned(), "more".to_owned())]);
    assert_eq!(notes(&again, ""), ["make/2", "other/1"]);
    assert!(again.all("VM").is_empty());
}

#[test]
fn rows_of_other_versions_are_understood_and_kept() {
    let store = Arc::new(Memory::default());
    let uuid = "6d6c7a2e-31b5-4b0c-9a3e-2f6d5a3a4f10";
    let put = |key: &str, value: &str| {
        let txn = Txn { puts: vec![(key.into(), value.into())], ..Txn::default() };
        store.commit(txn).expect("a commit");
    };
    let key = format!("/vm/{uuid}");
    put(&key, &format!(r#"{{"uuid":"{uuid}","name_label":"n","field_of_2031":{{"x":[1]}}}}"#));
    put("/class_of_2031/1", "{}");
    let db = Db::open(Arc::clone(&store) as _).expect("it opens");
    let vm = db.by_uuid("VM", uuid).expect("it is there").reference.clone();
    assert_eq!(db.get("VM", &vm).expect("it is there").get("order"), &Value::Int(0));
    db.set("VM", &vm, "name_label", "m").expect("a field");
    let row = store.get(&key).expect("the store reads").and_then(|row| row.value).expect("it is there");
    assert!(row.contains(r#""field_of_2031":{"x":[1]}"#) && row.contains(r#""name_label":"m""#), "{row}");
    assert!(store.get("/class_of_2031/1").expect("the store reads").is_some());

    for (key, value, told) in [
        (key.as_str(), "{", "no JSON object"),
        (key.as_str(), r#"{"uuid":"1"}"#, "says that its uuid is '1'"),
        (&*key, &*format!(r#"{{"uuid":"{uuid}","VCPUs_max":"many"}}"#), "VCPUs_max"),
        ("/meta/generation", "many", "no number"),
    ] {
        put(key, value);
        let error = Db::open(Arc::clone(&store) as _).expect_err("it is damaged");
        assert!(error.params[0].contains(told) && error.params[0].contains("restore"), "{}", error.params[0]);
    }
}

/// What this thread has had of a processor: a busy host does not change it (the first field of
/// `/proc/PID/schedstat`).
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("proc is mounted");
    let first = stat.split(' ').next().and_then(|field| field.parse().ok());
    Duration::from_nanos(first.expect("a number"))
}

#[test]
fn ten_thousand_disks_are_listed_without_a_search_for_each() {
    let db = Db::default();
    let sr = db.create("SR", &needed("SR", &[])).expect("an SR");
    let vdis = db
        .change(|change| {
            let fields = needed("VDI", &[("SR", sr.as_str().into())]);
            (0..10_000).map(|_| change.create("VDI", &fields)).collect::<Result<Vec<_>, _>>()
        })
        .expect("many disks");
    let began = processor_time();
    let records: Vec<Value> = db.all("VDI").iter().map(|vdi| db.record(vdi)).collect();
    assert_eq!(records.len(), 10_000);
    assert_eq!(db.find("VDI", "SR", &sr).len(), 10_000);
    for vdi in &vdis {
        let vbds = db.find("VBD", "VDI", vdi);
        assert!(vbds.is_empty());
    }
    // A search among all for each would be a hundred million looks: minutes in this build.
    let took = processor_time() - began;
    assert!(took < Duration::from_secs(60), "{took:?}");
    let sr = db.record(&db.get("SR", &sr).expect("it is there"));
    assert_eq!(sr.as_map().expect("a record")["VDIs"].as_set().expect("a set").len(), 10_000);
}
