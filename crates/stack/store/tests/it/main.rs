//! One suite against every store, and what is special about SQLite's file and about etcd.

mod conformance;
mod etcd;
mod file;
mod full;
mod kill;
mod model;
mod writers;

use tapio_store::{Expect, Memory, Revision, Sqlite, Store, Txn};

/// Runs a case against each kind of store.
fn each(case: impl Fn(&dyn Store)) {
    each_of_one_host(&case);
    if let Some(store) = etcd::fresh() {
        case(&store);
    }
}

/// Runs a case against each kind of store that one host has for itself.
fn each_of_one_host(case: impl Fn(&dyn Store)) {
    case(&Memory::default());
    let dir = tempfile::tempdir().expect("a scratch directory");
    case(&Sqlite::open(&dir.path().join("db")).expect("a new store"));
}

fn put(key: &str, value: &str) -> Txn {
    Txn { puts: vec![(key.into(), value.into())], ..Txn::default() }
}

fn put_if(key: &str, expect: Expect, value: &str) -> Txn {
    Txn { expect: vec![(key.into(), expect)], ..put(key, value) }
}

fn value(store: &dyn Store, key: &str) -> Option<(String, Revision)> {
    let row = store.get(key).expect("the store reads")?;
    assert_eq!(row.key, key);
    Some((row.value.expect("a row that is there has a value"), row.revision))
}
