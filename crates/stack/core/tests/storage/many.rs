//! Ten thousand disks.

use std::time::Instant;

use tapio_model::Value;

use super::rig::{MIB, Rig};

#[test]
fn a_scan_of_many_images_is_one_change() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let one = rig.try_vdi(&sr, MIB, &[("type", "raw")]).expect("a raw VDI");
    let dir = rig.dir.join("sr");
    const MANY: usize = 10_000;
    for _ in 0..MANY {
        let file = std::fs::File::create(dir.join(format!("{}.raw", uuid::Uuid::new_v4()))).expect("a file");
        file.set_len(MIB as u64).expect("a sparse file");
    }
    let began = Instant::now();
    rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan");
    println!("a scan that finds {MANY} new images: {:?}", began.elapsed());
    let vdis = rig.stack.db.find("VDI", "SR", &sr);
    assert_eq!(vdis.len(), MANY + 1);
    let born: std::collections::BTreeSet<_> =
        vdis.iter().filter(|vdi| vdi.reference != one).map(|vdi| vdi.created).collect();
    assert_eq!(born.len(), 1, "all at once");
    let before = rig.stack.db.generation();
    let began = Instant::now();
    rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan");
    println!("a scan that finds nothing new: {:?}", began.elapsed());
    let changed = rig.stack.db.find("VDI", "SR", &sr).into_iter().filter(|vdi| vdi.modified > before).count();
    assert_eq!(changed, 0, "nothing changed");
    assert_eq!(rig.get("SR", &sr).get("virtual_allocation"), &Value::Int((MANY as i64 + 1) * MIB));
}
