//! Which holders may have a VDI open, and what runs together.

use tapio_core::storage;
use tapio_fixtures::waiting::Caller;
use tapio_model::Value;
use tapio_types::Access::{ReadOnly, ReadWrite};

use super::rig::{MIB, Rig};

fn code<T>(answer: Result<T, tapio_model::ApiError>) -> String {
    answer.map(drop).expect_err("it must be refused").code.into_owned()
}

#[test]
fn one_writer_or_many_readers() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let (storage, call) = (&rig.stack.storage, rig.own_call());
    let tag = || rig.vdi(&vdi).map("sm_config").get(&format!("host_{}", rig.host)).cloned();
    for reader in 0..20 {
        let opening =
            storage::activate(&call, &rig.vdi(&vdi), &format!("vbd {reader}"), ReadOnly).expect("a reader");
        assert_eq!(opening.with.chain.layers.len(), 1);
    }
    assert_eq!(tag().as_deref(), Some("RO"));
    assert_eq!(code(storage::activate(&call, &rig.vdi(&vdi), "writer", ReadWrite)), "VDI_IN_USE");
    assert_eq!(
        rig.refused("VDI.destroy", vec![vdi.as_str().into()]),
        ("VDI_IN_USE".into(), vec![vdi.clone(), "destroy".into()])
    );
    assert_eq!(rig.refused("PBD.unplug", vec![rig.pbd(&sr).into()]).0, "VDI_IN_USE");
    assert_eq!(
        rig.words("VDI", &vdi, "allowed_operations"),
        ["clone", "copy", "snapshot", "update", "generate_config", "enable_cbt", "disable_cbt"]
    );
    let snapshot = vec![vdi.as_str().into(), Value::string_map::<&str, &str>([])];
    // The driver refuses it: there is no disk process that could be given the new chain.
    assert_eq!(rig.refused("VDI.snapshot", snapshot).0, "VDI_IN_USE");
    for reader in 0..20 {
        storage::deactivate(&call, &vdi, &format!("vbd {reader}")).expect("it lets go");
        storage::deactivate(&call, &vdi, &format!("vbd {reader}")).expect("once more counts nothing");
    }
    assert_eq!(tag(), None);
    assert!(rig.words("VDI", &vdi, "allowed_operations").contains(&"destroy".to_owned()));
    drop(storage::activate(&call, &rig.vdi(&vdi), "writer", ReadWrite).expect("a writer"));
    drop(storage::activate(&call, &rig.vdi(&vdi), "writer", ReadWrite).expect("the same once more"));
    assert_eq!(tag().as_deref(), Some("RW"));
    assert_eq!(code(storage::activate(&call, &rig.vdi(&vdi), "reader", ReadOnly)), "VDI_IN_USE");
    assert_eq!(storage.holders(), [(vdi.clone(), "writer".to_owned(), ReadWrite)]);
    assert_eq!(code(rig.call("VDI.copy", Rig::copy_params(&vdi, &sr))), "VDI_IN_USE");
    assert_eq!(rig.refused("VDI.set_sharable", vec![vdi.as_str().into(), true.into()]).0, "VDI_IN_USE");
    storage::deactivate(&call, &vdi, "writer").expect("it lets go");
    rig.call("VDI.set_read_only", vec![vdi.as_str().into(), true.into()]).expect("it is not in use");
    assert_eq!(code(storage::activate(&call, &rig.vdi(&vdi), "writer", ReadWrite)), "VDI_READONLY");
    assert!(storage.holders().is_empty() && rig.stack.db.notes("storage/").is_empty());
}

#[test]
fn writers_share_plain_bytes_where_they_may() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let (storage, call) = (&rig.stack.storage, rig.own_call());
    let (vhd, raw) =
        (rig.make_vdi(&sr, 4 * MIB), rig.try_vdi(&sr, 4 * MIB, &[("type", "raw")]).expect("raw"));
    for vdi in [&vhd, &raw] {
        rig.call("VDI.set_sharable", vec![vdi.as_str().into(), true.into()]).expect("it is not in use");
        drop(storage::activate(&call, &rig.vdi(vdi), "one", ReadWrite).expect("the first"));
    }
    drop(storage::activate(&call, &rig.vdi(&raw), "two", ReadWrite).expect("bytes can be shared"));
    // Two writers of one VHD would each have their own idea of its blocks.
    assert_eq!(code(storage::activate(&call, &rig.vdi(&vhd), "two", ReadWrite)), "VDI_IN_USE");
    assert_eq!(storage.holders().len(), 3);
}

#[test]
fn a_chain_stays_while_it_is_opened_or_closed() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let closing = storage::closing(&rig.own_call(), &vdi).expect("it has no other holder");
    let caller = Caller::default();
    std::thread::scope(|scope| {
        let params = vec![vdi.as_str().into(), Value::Map(Default::default())];
        let snapshot = scope.spawn(|| caller.calls(|| rig.call("VDI.snapshot", params)));
        // Until the chain is closed.
        caller.until_it_waits();
        drop(closing);
        snapshot.join().expect("no panic").expect("a snapshot");
    });
}

#[test]
fn disks_are_made_in_parallel() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let vdi = rig.make_vdi(&sr, 4 * MIB);
                let snapshot = rig.snapshot(&vdi);
                rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan between");
                rig.call("VDI.destroy", vec![snapshot.as_str().into()]).expect("it goes");
            });
        }
    });
    assert_eq!(rig.stack.db.find("VDI", "SR", &sr).iter().filter(|vdi| vdi.bool("managed")).count(), 8);
    rig.check(&sr, "sr");
}
