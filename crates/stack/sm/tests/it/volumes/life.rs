//! Stories without a kill.

use tapio_sm::ForkKind;
use tapio_types::Access;

use super::{MIB, Volumes};
use crate::support::{Watch, fork, make, read, write};

#[test]
fn an_sr_of_volumes_is_made_used_and_erased() {
    let Some(place) = Volumes::new() else { return };
    let sr = place.create();
    let ctx = Watch::default();
    assert_eq!(place.names(), ["MGT"]);
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    let raw = make(sr.as_ref(), 8 * MIB, "raw");
    assert_eq!([0, 4 * MIB].map(|at| read(sr.as_ref(), raw, at)), [0, 0], "what others left is cleared");
    write(sr.as_ref(), vdi, 0, 1);
    write(sr.as_ref(), raw, 4 * MIB, 2);
    let snapshot = fork(sr.as_ref(), vdi, ForkKind::Snapshot).made.uuid;
    let clone = fork(sr.as_ref(), raw, ForkKind::Clone).made.uuid;
    write(sr.as_ref(), vdi, 0, 3);
    write(sr.as_ref(), raw, 4 * MIB, 4);
    let sum = |vdi, at| read(sr.as_ref(), vdi, at);
    assert_eq!([sum(vdi, 0), sum(snapshot, 0)], [3, 1]);
    assert_eq!([sum(raw, 4 * MIB), sum(clone, 4 * MIB)], [4, 2]);
    let larger = sr.resize(&ctx, vdi, 16 * MIB).unwrap();
    assert_eq!(larger.virtual_size, 16 * MIB);
    write(sr.as_ref(), vdi, 14 * MIB, 5);
    place.check(sr.as_ref(), "used");
    // A volume that is open is not taken away.
    let with = sr.activate(&ctx, vdi, Access::ReadWrite).unwrap();
    let open = std::fs::File::open(&with.chain.layers[0].path).unwrap();
    let (sr, refused) = sr.detach(&ctx).unwrap_err();
    assert_eq!(refused.code, "VDI_IN_USE");
    drop(open);
    sr.deactivate(&ctx, vdi).unwrap();
    sr.detach(&ctx).map_err(|(_, error)| error).unwrap();
    assert!(place.host.reachable().is_empty());
    let sr = place.attach(&ctx);
    assert_eq!([read(sr.as_ref(), vdi, 14 * MIB), read(sr.as_ref(), clone, 4 * MIB)], [5, 2]);
    for vdi in [snapshot, clone, raw, vdi] {
        sr.destroy(&ctx, vdi).unwrap();
    }
    assert_eq!(place.names(), ["MGT"]);
    sr.erase(&ctx).map_err(|(_, error)| error).unwrap();
    assert!(place.names().is_empty());
    // What is on the device is no SR any more.
    assert!(place.driver("lvm").probe(&ctx, &place.config).unwrap().results[0].sr.is_none());
}

#[test]
fn snapshots_are_told_by_an_sr_that_is_taken_in_again() {
    let Some(place) = Volumes::new() else { return };
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    sr.rename(&ctx, vdi, "a <name>", "what it is").unwrap();
    assert_eq!(sr.rename(&ctx, vdi, "a\u{1}b", "").unwrap_err().code, "SR_BACKEND_FAILURE_447");
    let snapshot = fork(sr.as_ref(), vdi, ForkKind::Snapshot).made.uuid;
    let clone = fork(sr.as_ref(), snapshot, ForkKind::Clone).made.uuid;
    sr.rename(&ctx, snapshot, "before", "").unwrap();
    sr.detach(&ctx).map_err(|(_, error)| error).unwrap();
    let sr = place.attach(&ctx);
    let found = sr.scan(&ctx).unwrap();
    let of = |vdi| {
        let info = found.iter().find(|info| info.uuid == vdi).unwrap();
        let told = info.told.clone().unwrap();
        (info.name_label.clone().unwrap_or_default(), told.name_description.clone(), *told)
    };
    let (name, description, told) = of(vdi);
    assert_eq!((&*name, &*description, told.snapshot_of), ("a <name>", "what it is", None));
    let (name, _, told) = of(snapshot);
    assert_eq!((&*name, told.snapshot_of), ("before", Some(vdi)));
    assert!(told.snapshot_time.starts_with("20") && told.snapshot_time.ends_with('Z'), "{told:?}");
    assert_eq!(of(clone).2.snapshot_of, None, "a clone of a snapshot is none");
}
