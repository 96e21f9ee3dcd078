//! VDIs move to another SR: what arrives, what is left, and what becomes of a move that fails.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use tapio_format::vhd::offline::{Chain, Image, OpenOptions};
use tapio_model::{NULL_REF, Value};

use super::live::{Load, plug, unplug};
use super::rig::{MIB, Rig};

pub(crate) fn move_params(vdi: &str, sr: &str) -> Vec<Value> {
    vec![vdi.into(), sr.into(), Value::string_map::<&str, &str>([])]
}

/// Writes a MiB of a byte into the image of a VDI that nothing uses.
pub(crate) fn put(rig: &Rig, dir: &str, vdi: &str, at: i64, byte: u8) {
    let mut image = Image::open(&rig.file(dir, vdi), OpenOptions::WRITE).expect("its image");
    image.write_at(at as u64, &vec![byte; MIB as usize]).and_then(|()| image.finish()).expect("room");
}

/// All that a disk holds which nothing writes.
pub(crate) fn whole(rig: &Rig, dir: &str, vdi: &str) -> Vec<u8> {
    let file = rig.file(dir, vdi);
    if file.extension().is_some_and(|kind| kind == "raw") {
        return std::fs::read(&file).expect("its file");
    }
    let chain = Chain::open(&file).expect("its chain");
    let mut bytes = vec![0; chain.virtual_len() as usize];
    chain.read_at(0, &mut bytes).expect("the whole disk");
    bytes
}

/// The byte in each MiB of a disk.
fn held(rig: &Rig, dir: &str, vdi: &str) -> Vec<u8> {
    whole(rig, dir, vdi).chunks(MIB as usize).map(|chunk| chunk[chunk.len() / 2]).collect()
}

fn snapshots_of(rig: &Rig, vdi: &str) -> Vec<String> {
    let all = rig.stack.db.find("VDI", "snapshot_of", vdi);
    all.iter().map(|snapshot| snapshot.reference.clone()).collect()
}

pub(crate) fn quiet(rig: &Rig, sr: &str) {
    let late = Value::string_map([("gc-quiet", "100000")]);
    rig.call("SR.set_other_config", vec![sr.into(), late]).expect("a number");
}

#[test]
fn a_chain_arrives_as_a_chain_and_leaves_nothing() {
    let rig = Rig::new();
    let (sr, to) = (rig.make_sr("sr"), rig.make_sr("to"));
    [&sr, &to].iter().for_each(|sr| quiet(&rig, sr));
    let vdi = rig.make_vdi(&sr, 8 * MIB);
    put(&rig, "sr", &vdi, 0, b'a');
    let first = rig.snapshot(&vdi);
    put(&rig, "sr", &vdi, 2 * MIB, b'b');
    rig.call("VDI.resize", vec![vdi.as_str().into(), (12 * MIB).into()]).expect("it grows");
    let second = rig.snapshot(&vdi);
    put(&rig, "sr", &vdi, 8 * MIB, b'c');
    put(&rig, "sr", &vdi, 0, b'd');
    let stays = rig.text("VDI.clone", vec![second.as_str().into(), Value::string_map::<&str, &str>([])]);
    let stays = stays.expect("a clone");
    let before: Vec<_> = [&vdi, &first, &second].map(|vdi| held(&rig, "sr", vdi)).into();
    let time = rig.vdi(&first).get("snapshot_time").clone();
    let taken = |dir: &str| -> u64 {
        let sizes = rig.images(dir).into_iter().map(|name| {
            use std::os::unix::fs::MetadataExt;
            std::fs::metadata(rig.dir.join(dir).join(name)).expect("an image").blocks() * 512
        });
        sizes.sum()
    };
    let was = taken("sr");
    let now = rig.text("VDI.pool_migrate", move_params(&vdi, &to)).expect("it moves");
    assert_ne!(now, vdi);
    for gone in [&vdi, &first, &second] {
        assert_eq!(rig.refused("VDI.get_uuid", vec![gone.as_str().into()]).0, "HANDLE_INVALID");
    }
    let moved = rig.vdi(&now);
    assert_eq!((moved.text("SR"), moved.text("name_label")), (to.as_str(), "disk"));
    assert_eq!(moved.get("other_config").as_map().expect("a map")["kept"].as_str(), Some("yes"));
    let mut snapshots = snapshots_of(&rig, &now);
    assert_eq!(snapshots.len(), 2, "its snapshots came along and are its own");
    snapshots.sort_by_key(|vdi| rig.vdi(vdi).int("virtual_size"));
    assert_eq!(rig.vdi(&snapshots[0]).get("snapshot_time"), &time);
    assert!(rig.vdi(&snapshots[0]).bool("is_a_snapshot"));
    let after: Vec<_> = [&now, &snapshots[0], &snapshots[1]].map(|vdi| held(&rig, "to", vdi)).into();
    assert_eq!(after, before);
    assert!(taken("to") <= was, "what they have in common is there once: {} and {was}", taken("to"));
    assert_eq!(held(&rig, "sr", &stays)[..3], [b'a', 0, b'b'], "a clone stays, with what it needs");
    rig.call("VDI.destroy", vec![stays.as_str().into()]).expect("it is not in use");
    assert!(rig.images("sr").is_empty(), "nothing is left: {:?}", rig.images("sr"));
    for (sr, dir) in [(&sr, "sr"), (&to, "to")] {
        rig.check(sr, dir);
        let hidden = std::fs::read_dir(rig.dir.join(dir)).expect("the SR's directory").flatten();
        assert!(!hidden.into_iter().any(|entry| entry.file_name().to_string_lossy().contains("continued")));
    }
    rig.call("VDI.destroy", vec![now.as_str().into()]).expect("it is an ordinary VDI");
    rig.check(&to, "to");
}

#[test]
fn what_cannot_move_is_told_why_and_stays() {
    let rig = Rig::new();
    let (sr, to) = (rig.make_sr("sr"), rig.make_sr("to"));
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    put(&rig, "sr", &vdi, 0, b'a');
    assert_eq!(rig.text("VDI.pool_migrate", move_params(&vdi, &sr)).expect("it is there"), vdi);
    assert_eq!(rig.refused("VDI.pool_migrate", move_params(&vdi, NULL_REF)).0, "HANDLE_INVALID");
    rig.call("VDI.enable_cbt", vec![vdi.as_str().into()]).expect("it is a VHD");
    let refused = rig.refused("VDI.pool_migrate", move_params(&vdi, &to));
    assert_eq!(refused, ("VDI_CBT_ENABLED".to_owned(), vec![vdi.clone()]));
    rig.call("VDI.disable_cbt", vec![vdi.as_str().into()]).expect("it is tracked");
    let format = Value::string_map([("dest-img-format", "qcow2")]);
    let refused = rig.refused("VDI.pool_migrate", vec![vdi.as_str().into(), to.as_str().into(), format]);
    assert_eq!(refused.0, "INVALID_VALUE");
    let pbd = rig.pbd(&to);
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    assert_eq!(rig.refused("VDI.pool_migrate", move_params(&vdi, &to)).0, "SR_NOT_ATTACHED");
    assert_eq!(held(&rig, "sr", &vdi)[0], b'a');
    rig.check(&sr, "sr");
}

#[test]
fn a_raw_disk_stays_raw_unless_another_format_is_asked_for() {
    let rig = Rig::new();
    let (sr, to) = (rig.make_sr("sr"), rig.make_sr("to"));
    let raw = rig.try_vdi(&sr, 4 * MIB, &[("type", "raw")]).expect("a raw VDI");
    std::os::unix::fs::FileExt::write_all_at(
        &File::options().write(true).open(rig.file("sr", &raw)).expect("its file"),
        &vec![b'r'; MIB as usize],
        MIB as u64,
    )
    .expect("room");
    let there = rig.text("VDI.pool_migrate", move_params(&raw, &to)).expect("it moves");
    assert!(rig.file("to", &there).extension().is_some_and(|ending| ending == "raw"));
    let format = Value::string_map([("dest-img-format", "vhd")]);
    let back = rig.text("VDI.pool_migrate", vec![there.as_str().into(), sr.as_str().into(), format]);
    let back = back.expect("it moves");
    assert!(rig.file("sr", &back).extension().is_some_and(|ending| ending == "vhd"));
    assert_eq!(held(&rig, "sr", &back), [0, b'r', 0, 0]);
    assert!(rig.images("to").is_empty());
    rig.check(&sr, "sr");
}

#[test]
fn a_disk_moves_while_it_is_written() {
    const SIZE: usize = 48 << 20;
    let rig = Rig::live();
    let (sr, to) = (rig.make_sr("sr"), rig.make_sr("to"));
    [&sr, &to].iter().for_each(|sr| quiet(&rig, sr));
    let vdi = rig.make_vdi(&sr, SIZE as i64);
    let (vbd, device) = match plug(&rig, &vdi, "RW") {
        Ok(plugged) => plugged,
        Err(error)
            if !PathBuf::from("/dev/fuse").exists() || !PathBuf::from("/dev/loop-control").exists() =>
        {
            println!("skipped: needs a local device by FUSE: {error} [storage::relocate]");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let load = Load::on(&device, SIZE);
    load.write_much();
    let snapshot = rig.snapshot(&vdi);
    load.write_much();
    let kept = whole(&rig, "sr", &snapshot);
    let there = rig.text("VDI.pool_migrate", move_params(&vdi, &to)).expect("it moves under load");
    assert_eq!(rig.get("VBD", &vbd).text("VDI"), there);
    assert!(rig.images("sr").is_empty(), "nothing is left: {:?}", rig.images("sr"));
    load.write_much();
    let later = rig.snapshot(&there);
    load.write_much();
    // And back, with both snapshots.
    let back = rig.text("VDI.pool_migrate", move_params(&there, &sr)).expect("it moves back");
    assert!(rig.images("to").is_empty(), "nothing is left: {:?}", rig.images("to"));
    assert_eq!(rig.refused("VDI.get_uuid", vec![later.as_str().into()]).0, "HANDLE_INVALID");
    let model = load.end();
    let mut now = Vec::new();
    File::open(&device).and_then(|mut file| file.read_to_end(&mut now)).expect("the device");
    assert!(now[..SIZE] == model[..], "what the guest reads is what it wrote");
    unplug(&rig, &vbd);
    assert!(whole(&rig, "sr", &back)[..SIZE] == model[..], "and so is what lies there");
    let mut snapshots = snapshots_of(&rig, &back);
    snapshots.sort_by_key(|vdi| rig.vdi(vdi).get("snapshot_time").as_int());
    assert_eq!(snapshots.len(), 2);
    assert!(snapshots.iter().any(|vdi| whole(&rig, "sr", vdi) == kept), "the first snapshot is as it was");
    assert!(rig.stack.storage.holders().is_empty());
    rig.check(&sr, "sr");
    rig.check(&to, "to");
}
