//! Many writers at once.

use std::sync::Barrier;
use std::time::Duration;

use tapio_store::{Expect, Sqlite, Store, StoreError, Txn};

use crate::{each, put, put_if, value};

#[test]
fn counters_miss_no_increment() {
    const WRITERS: usize = 8;
    const TIMES: usize = 25;
    each(|store| {
        store.commit(put("/shared", "0")).expect("a commit");
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                scope.spawn(move || {
                    for _ in 0..TIMES {
                        loop {
                            let (text, revision) = value(store, "/shared").expect("it is there");
                            let next = (text.parse::<u32>().expect("a number") + 1).to_string();
                            let mut txn = put_if("/shared", Expect::At(revision), &next);
                            txn.puts.push((format!("/own/{writer}"), next));
                            match store.commit(txn) {
                                Ok(_) => break,
                                Err(StoreError::Conflict(..)) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                    }
                });
            }
        });
        let all = (WRITERS * TIMES).to_string();
        assert_eq!(value(store, "/shared").map(|(text, _)| text), Some(all.clone()));
        let own = store.list("/own/").expect("the store reads");
        assert_eq!(own.len(), WRITERS);
        assert!(
            own.iter().any(|row| row.value.as_deref() == Some(&all)),
            "the last wrote its own row with it"
        );
    });
}

#[test]
fn commits_that_come_together_share_a_sync_and_fail_alone() {
    const WRITERS: usize = 64;
    const TIMES: usize = 10;
    let dir = tempfile::tempdir().expect("a scratch directory");
    let store = Sqlite::open(&dir.path().join("db")).expect("a new store");
    let at = store.commit(put("/taken", "")).expect("a commit");
    let before = store.batches();
    let gate = Barrier::new(WRITERS);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (store, gate) = (&store, &gate);
            scope.spawn(move || {
                gate.wait();
                for time in 0..TIMES {
                    let key = format!("/{writer}/{time}");
                    if writer % 4 == 0 {
                        // One in four must fail, wherever it is in a batch.
                        let mut txn = put_if("/taken", Expect::At(at + 1), "x");
                        txn.puts.push((key, String::new()));
                        assert!(matches!(store.commit(txn), Err(StoreError::Conflict(..))));
                    } else {
                        store
                            .commit(put_if(&key, Expect::Absent, "x"))
                            .expect("no other writer has this key");
                    }
                }
            });
        }
    });
    let rows = store.list("/").expect("the store reads");
    assert_eq!(rows.len(), 1 + WRITERS * TIMES * 3 / 4);
    let mut revisions: Vec<_> = rows.iter().map(|row| row.revision).collect();
    revisions.sort_unstable();
    revisions.dedup();
    assert_eq!(revisions.len(), rows.len(), "each commit has a revision of its own");
    let batches = store.batches() - before;
    assert!(batches < (WRITERS * TIMES / 3) as u64, "{} commits took {batches} syncs", WRITERS * TIMES);
}

#[test]
fn a_reader_that_follows_misses_nothing() {
    const ROWS: usize = 300;
    each(|store| {
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut seen = std::collections::BTreeSet::new();
                let mut after = 0;
                while seen.len() < ROWS {
                    let rows = store.changes(after, Duration::from_secs(20)).expect("it is remembered");
                    assert!(!rows.is_empty(), "the writers are not done");
                    for row in rows {
                        assert!(row.revision > after || seen.is_empty());
                        after = after.max(row.revision);
                        assert!(seen.insert(row.key), "a row that changed once comes once");
                    }
                }
            });
            for writer in 0..3 {
                scope.spawn(move || {
                    for at in 0..ROWS / 3 {
                        let txn =
                            Txn { puts: vec![(format!("/{writer}/{at}"), String::new())], ..Txn::default() };
                        store.commit(txn).expect("a commit");
                    }
                });
            }
            reader.join().expect("no panic");
        });
    });
}
