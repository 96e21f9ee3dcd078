//! The disk below the store is full, and a daemon that ended is followed by another.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tapio_core::Toolstack;
use tapio_core::db::Db;
use tapio_core::storage;
use tapio_model::{ApiError, Value};
use tapio_store::{Memory, Revision, Row, Sqlite, Store, StoreError, Txn};
use tapio_types::Access;

use super::rig::{self, MIB, Rig};

/// A store that takes so many commits more, then none.
struct Filling {
    inner: Memory,
    left: Arc<AtomicI64>,
}

impl Store for Filling {
    fn get(&self, key: &str) -> Result<Option<Row>, StoreError> {
        self.inner.get(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Row>, StoreError> {
        self.inner.list(prefix)
    }

    fn commit(&self, txn: Txn) -> Result<Revision, StoreError> {
        if self.left.fetch_sub(1, Ordering::SeqCst) <= 0 {
            return Err(StoreError::Failed("writing state.db: no space left on the device".into()));
        }
        self.inner.commit(txn)
    }

    fn changes(&self, after: Revision, wait: Duration) -> Result<Vec<Row>, StoreError> {
        self.inner.changes(after, wait)
    }
}

const PLENTY: i64 = 1 << 40;

#[test]
fn a_store_that_is_full_at_any_moment_harms_nothing() {
    let none = || Value::string_map::<&str, &str>([]);
    type Story = (&'static str, fn(&Rig, &str, &str) -> Result<Value, ApiError>);
    let stories: [Story; 7] = [
        ("create", |rig, sr, _| rig.try_vdi(sr, 4 * MIB, &[]).map(Value::String)),
        ("destroy", |rig, _, vdi| rig.call("VDI.destroy", vec![vdi.into()])),
        ("resize", |rig, _, vdi| rig.call("VDI.resize", vec![vdi.into(), (8 * MIB).into()])),
        ("copy", |rig, sr, vdi| rig.call("VDI.copy", Rig::copy_params(vdi, sr))),
        ("unplug", |rig, sr, _| rig.call("PBD.unplug", vec![rig.pbd(sr).into()])),
        ("scan", |rig, sr, _| {
            let found = rig.dir.join(format!("sr/{}.raw", uuid::Uuid::new_v4()));
            std::fs::File::create(found).and_then(|file| file.set_len(MIB as u64)).expect("a new image");
            rig.call("SR.scan", vec![sr.into()])
        }),
        ("snapshot", |rig, _, vdi| {
            rig.call("VDI.snapshot", vec![vdi.into(), Value::string_map::<&str, &str>([])])
        }),
    ];
    for (name, story) in stories {
        for room in 0.. {
            let scratch = tempfile::tempdir().expect("a scratch directory");
            let left = Arc::new(AtomicI64::new(PLENTY));
            let store = Filling { inner: Memory::default(), left: Arc::clone(&left) };
            let rig = Rig::on(scratch.path(), Db::open(Arc::new(store)).expect("an empty one"));
            let sr = rig.make_sr("sr");
            let vdi = rig.make_vdi(&sr, 4 * MIB);
            left.store(room, Ordering::SeqCst);
            let answer = story(&rig, &sr, &vdi);
            let was_enough = left.load(Ordering::SeqCst) >= 0;
            left.store(PLENTY, Ordering::SeqCst);
            let object = rig.get("SR", &sr);
            assert!(object.map("current_operations").is_empty(), "{name} {room}: nothing runs");
            // What could not be finished or undone for want of room is when the SR is attached again.
            rig.call("PBD.unplug", vec![rig.pbd(&sr).into()]).expect("it is not in use");
            crate::rig::recover(&rig.stack).expect("there is room");
            rig.call("PBD.plug", vec![rig.pbd(&sr).into()]).expect("it is there");
            rig.check(&sr, "sr");
            if name != "destroy" {
                rig.call("VDI.snapshot", vec![vdi.as_str().into(), none()]).expect("and it goes on");
            }
            if was_enough {
                answer.unwrap_or_else(|error| panic!("{name}: {room} commits are enough: {error}"));
                assert!(room > 0, "{name} writes something");
                break;
            }
            assert!(room < 20, "{name} never ends");
        }
    }
}

fn open(dir: &Path) -> Rig {
    let store = Sqlite::open(&dir.join("state.db")).expect("the store opens");
    Rig::on(dir, Db::open(Arc::new(store)).expect("the records are read"))
}

/// VBDs that hold VDIs; no disk process runs for them.
const ONE: &str = "OpaqueRef:7b0d4d3e-6f0c-4a57-9a5e-0c5b1f5a2d01";
const WRITER: &str = "OpaqueRef:7b0d4d3e-6f0c-4a57-9a5e-0c5b1f5a2d02";

#[test]
fn a_restarted_daemon_knows_the_holders_of_every_vdi() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let (sr, vdi, other) = {
        let rig = open(scratch.path());
        let sr = rig.make_sr("sr");
        let (vdi, other) = (rig.make_vdi(&sr, 4 * MIB), rig.make_vdi(&sr, 4 * MIB));
        for (vdi, holder, access) in [
            (&vdi, WRITER, Access::ReadWrite),
            (&other, ONE, Access::ReadOnly),
            (&other, "two", Access::ReadOnly),
        ] {
            drop(
                storage::activate(&rig.own_call(), &rig.vdi(vdi), holder, access)
                    .expect("it has no other holder"),
            );
        }
        storage::deactivate(&rig.own_call(), &other, "two").expect("it lets go");
        (sr, vdi, other)
    };
    {
        // Storage alone: it is not known yet which holders still run.
        let store = Sqlite::open(&scratch.path().join("state.db")).expect("the store opens");
        let db = Db::open(Arc::new(store)).expect("the records are read");
        let stack = Toolstack::new(rig::config(scratch.path()), db);
        crate::rig::recover(&stack).expect("attached again");
        let mut holders = stack.storage.holders();
        holders.sort_by(|one, other| one.1.cmp(&other.1));
        let one = (other.clone(), ONE.to_owned(), Access::ReadOnly);
        assert_eq!(holders, [one, (vdi.clone(), WRITER.into(), Access::ReadWrite)]);
        let record = stack.db.get("VDI", &vdi).expect("it is there");
        let allowed = record.get("allowed_operations").as_set().expect("a set");
        assert!(!allowed.contains(&"destroy".into()) && allowed.contains(&"snapshot".into()), "{allowed:?}");
        assert!(record.map("sm_config").iter().any(|(key, value)| key.starts_with("host_") && value == "RW"));
    }
    // No disk process runs for them, so the recovery of VMs gives them up.
    let rig = open(scratch.path());
    assert!(rig.stack.storage.holders().is_empty());
    assert!(!rig.vdi(&vdi).map("sm_config").keys().any(|key| key.starts_with("host_")));
    for vdi in [&vdi, &other] {
        rig.call("VDI.destroy", vec![vdi.as_str().into()]).expect("it is not in use");
    }
    rig.check(&sr, "sr");
}
