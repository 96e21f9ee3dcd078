//! What every store does.

use std::time::{Duration, Instant};

use tapio_fixtures::waiting::Caller;
use tapio_store::{Expect, StoreError, Txn};

use crate::{each, each_of_one_host, put, put_if, value};

const NOW: Duration = Duration::ZERO;

#[test]
fn a_row_is_what_was_committed_last() {
    each(|store| {
        assert_eq!(value(store, "/a"), None);
        let first = store.commit(put("/a", "1")).expect("a commit");
        assert_eq!(value(store, "/a"), Some(("1".into(), first)));
        let second = store.commit(put("/a", "2")).expect("a commit");
        assert!(second > first);
        assert_eq!(value(store, "/a"), Some(("2".into(), second)));
        store
            .commit(Txn { deletes: vec!["/a".into(), "/never".into()], ..Txn::default() })
            .expect("a commit");
        assert_eq!(value(store, "/a"), None);
    });
}

#[test]
fn an_expectation_that_fails_changes_nothing() {
    each(|store| {
        let at = store.commit(put("/a", "1")).expect("a commit");
        for (expect, now) in [(Expect::Absent, Some(at)), (Expect::At(at + 1), Some(at))] {
            let txn = Txn {
                expect: vec![("/a".into(), expect)],
                puts: vec![("/a".into(), "x".into()), ("/b".into(), "x".into())],
                deletes: vec!["/a".into()],
            };
            match store.commit(txn) {
                Err(StoreError::Conflict(key, revision)) => assert_eq!((key.as_str(), revision), ("/a", now)),
                other => panic!("{other:?}"),
            }
        }
        match store.commit(put_if("/b", Expect::At(at), "x")) {
            Err(StoreError::Conflict(key, revision)) => assert_eq!((key.as_str(), revision), ("/b", None)),
            other => panic!("{other:?}"),
        }
        assert_eq!(value(store, "/a"), Some(("1".into(), at)));
        assert_eq!(value(store, "/b"), None);
        let next = store.commit(put_if("/a", Expect::At(at), "2")).expect("the expectation holds");
        store.commit(put_if("/b", Expect::Absent, "1")).expect("the expectation holds");
        assert_eq!(value(store, "/a"), Some(("2".into(), next)));
    });
}

#[test]
fn a_prefix_lists_its_rows_in_order() {
    each(|store| {
        for key in
            ["/vdi/2", "/vdi/1", "/vdi/10", "/vdj/1", "/vd", "/vdi", "/vdi/\u{10ffff}", "/vdi0", "/sr/1"]
        {
            store.commit(put(key, key)).expect("a commit");
        }
        let list = |prefix: &str| -> Vec<String> {
            store.list(prefix).expect("the store reads").into_iter().map(|row| row.key).collect()
        };
        assert_eq!(list("/vdi/"), ["/vdi/1", "/vdi/10", "/vdi/2", "/vdi/\u{10ffff}"]);
        assert_eq!(list("/vdi/1"), ["/vdi/1", "/vdi/10"]);
        assert_eq!(list("/vdi/\u{10ffff}"), ["/vdi/\u{10ffff}"]);
        assert_eq!(list("/x"), Vec::<String>::new());
        assert_eq!(list("").len(), 9);
        // A pattern's signs are letters like others.
        assert_eq!(list("%"), Vec::<String>::new());
    });
}

#[test]
fn changes_are_each_row_once_in_order() {
    each(|store| {
        let start = store.commit(put("/start", "")).expect("a commit");
        store.commit(put("/a", "1")).expect("a commit");
        let b = store.commit(put("/b", "1")).expect("a commit");
        let both = Txn { puts: vec![("/c".into(), "1".into()), ("/a".into(), "2".into())], ..Txn::default() };
        let both = store.commit(both).expect("a commit");
        store.commit(Txn { deletes: vec!["/c".into()], ..Txn::default() }).expect("a commit");
        let seen = store.changes(start, NOW).expect("it is remembered");
        let seen: Vec<_> =
            seen.iter().map(|row| (row.key.as_str(), row.value.as_deref(), row.revision)).collect();
        assert_eq!(&seen[..2], [("/b", Some("1"), b), ("/a", Some("2"), both)]);
        assert_eq!((seen[2].0, seen[2].1), ("/c", None));
        assert_eq!(seen.len(), 3);
        assert_eq!(store.changes(seen[2].2, NOW).expect("it is remembered"), []);
        let refused = store.commit(put_if("/a", Expect::Absent, "x"));
        assert!(refused.is_err());
        assert_eq!(store.changes(seen[2].2, NOW).expect("it is remembered"), []);
    });
}

#[test]
fn a_waiter_for_a_change_gets_it() {
    each(|store| {
        let start = store.commit(put("/a", "1")).expect("a commit");
        let began = Instant::now();
        let nothing = store.changes(start, Duration::from_millis(60)).expect("it is remembered");
        assert!(nothing.is_empty() && began.elapsed() >= Duration::from_millis(60));
        let caller = Caller::default();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| caller.calls(|| store.changes(start, Duration::from_secs(600))));
            caller.until_it_waits();
            store.commit(put("/b", "1")).expect("a commit");
            let seen = waiting.join().expect("no panic").expect("it is remembered");
            assert_eq!(seen.iter().map(|row| row.key.as_str()).collect::<Vec<_>>(), ["/b"]);
        });
        assert!(began.elapsed() < Duration::from_secs(300), "the commit ended the wait");
    });
}

#[test]
fn what_the_log_forgot_is_said() {
    // One commit of many rows, as the log counts rows.
    let rows = |from: u32, to: u32| Txn {
        puts: (from..to).map(|n| (format!("/n/{n}"), String::new())).collect(),
        ..Txn::default()
    };
    each_of_one_host(|store| {
        let first = store.commit(rows(0, 60_000)).expect("a commit");
        let second = store.commit(rows(0, 60_000)).expect("a commit");
        // SQLite's log is cut now and then.
        for _ in 0..600 {
            store.commit(put("/x", "")).expect("a commit");
        }
        match store.changes(first - 1, NOW) {
            Err(StoreError::Forgotten(oldest)) => assert_eq!(oldest, first),
            other => panic!("{:?}", other.map(|rows| rows.len())),
        }
        assert_eq!(store.changes(first, NOW).expect("it is remembered").len(), 60_001);
        assert_eq!(store.changes(second, NOW).expect("it is remembered").len(), 1);
    });
}
