//! Random transactions against a map.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use tapio_store::{Expect, Memory, Revision, Row, Sqlite, Store, StoreError, Txn};

const KEYS: usize = 6;

#[derive(Clone, Debug)]
struct Step {
    /// Key, and how far the expected revision is from the true one; none for an expectation of absence.
    expect: Vec<(usize, Option<u64>)>,
    puts: Vec<(usize, u8)>,
    deletes: Vec<usize>,
}

fn step() -> impl Strategy<Value = Step> {
    let expect = (0..KEYS, prop_oneof![3 => Just(Some(0)), 1 => Just(Some(1)), 2 => Just(None)]);
    (
        prop::collection::vec(expect, 0..3),
        prop::collection::vec((0..KEYS, any::<u8>()), 0..4),
        prop::collection::vec(0..KEYS, 0..2),
    )
        .prop_map(|(expect, puts, deletes)| Step { expect, puts, deletes })
}

fn key(at: usize) -> String {
    format!("/key/{at}")
}

#[derive(Default)]
struct Model {
    rows: BTreeMap<String, (String, Revision)>,
    /// The last change of every key that ever was.
    last: BTreeMap<String, Revision>,
}

impl Model {
    fn txn(&self, step: &Step) -> Txn {
        let expect = |(at, off): &(usize, Option<u64>)| {
            let key = key(*at);
            let expect = match (off, self.rows.get(&key)) {
                (Some(off), Some((_, revision))) => Expect::At(revision + off),
                (Some(off), None) => Expect::At(*off),
                (None, _) => Expect::Absent,
            };
            (key, expect)
        };
        Txn {
            expect: step.expect.iter().map(expect).collect(),
            puts: step.puts.iter().map(|(at, value)| (key(*at), value.to_string())).collect(),
            deletes: step.deletes.iter().map(|at| key(*at)).collect(),
        }
    }

    fn conflict(&self, txn: &Txn) -> Option<(String, Option<Revision>)> {
        txn.expect.iter().find_map(|(key, expect)| {
            let at = self.rows.get(key).map(|(_, revision)| *revision);
            let holds = match expect {
                Expect::Absent => at.is_none(),
                Expect::At(revision) => at == Some(*revision),
            };
            (!holds).then(|| (key.clone(), at))
        })
    }

    fn apply(&mut self, txn: &Txn, revision: Revision) {
        for (key, value) in &txn.puts {
            self.rows.insert(key.clone(), (value.clone(), revision));
            self.last.insert(key.clone(), revision);
        }
        for key in &txn.deletes {
            if self.rows.remove(key).is_some() {
                self.last.insert(key.clone(), revision);
            }
        }
    }

    fn changes(&self, after: Revision) -> Vec<Row> {
        let mut changed: Vec<Row> = self
            .last
            .iter()
            .filter(|(_, revision)| **revision > after)
            .map(|(key, revision)| Row {
                key: key.clone(),
                value: self.rows.get(key).map(|(value, _)| value.clone()),
                revision: *revision,
            })
            .collect();
        changed.sort_by(|a, b| (a.revision, &a.key).cmp(&(b.revision, &b.key)));
        changed
    }
}

fn follow(store: &dyn Store, steps: &[Step]) {
    let mut model = Model::default();
    let mut revisions = vec![0];
    for step in steps {
        let txn = model.txn(step);
        match (store.commit(txn.clone()), model.conflict(&txn)) {
            (Ok(revision), None) => {
                assert!(revision > revisions[revisions.len() - 1]);
                revisions.push(revision);
                model.apply(&txn, revision);
            }
            (Err(StoreError::Conflict(key, at)), Some(expected)) => assert_eq!((key, at), expected),
            (answer, conflict) => panic!("{answer:?} where {conflict:?} was expected of {txn:?}"),
        }
    }
    for at in 0..KEYS {
        let row = store
            .get(&key(at))
            .expect("the store reads")
            .map(|row| (row.value.expect("a value"), row.revision));
        assert_eq!(row, model.rows.get(&key(at)).cloned());
    }
    for after in revisions {
        assert_eq!(store.changes(after, Duration::ZERO).expect("all is remembered"), model.changes(after));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn memory_is_a_map(steps in prop::collection::vec(step(), 1..40)) {
        follow(&Memory::default(), &steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 25, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sqlite_is_a_map(steps in prop::collection::vec(step(), 1..25)) {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let path = dir.path().join("db");
        follow(&Sqlite::open(&path).expect("a new store"), &steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn etcd_is_a_map(steps in prop::collection::vec(step(), 1..25)) {
        if let Some(store) = crate::etcd::fresh() {
            // A transaction of etcd's names a key once: one that makes a row and deletes it leaves no trace.
            let once = |step: Step| Step {
                puts: step.puts.into_iter().filter(|(at, _)| !step.deletes.contains(at)).collect(),
                ..step
            };
            follow(&store, &steps.into_iter().map(once).collect::<Vec<_>>());
        }
    }
}
