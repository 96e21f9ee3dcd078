//! SRs are evacuated, disks made thin, thick and whole again; moves that fail leave nothing.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use tapio_model::Value;

use super::faulty::until;
use super::live::{Load, plug, unplug};
use super::relocate::{move_params, put, quiet, whole};
use super::rig::{MIB, Rig};

fn none() -> Value {
    Value::string_map::<&str, &str>([])
}

#[test]
fn an_sr_is_evacuated_and_what_stays_is_named() {
    let rig = Rig::new();
    let (sr, to) = (rig.make_sr("sr"), rig.make_sr("to"));
    [&sr, &to].iter().for_each(|sr| quiet(&rig, sr));
    let (chain, alone, tracked) =
        (rig.make_vdi(&sr, 8 * MIB), rig.make_vdi(&sr, 4 * MIB), rig.make_vdi(&sr, 4 * MIB));
    put(&rig, "sr", &chain, 0, b'a');
    let snapshot = rig.snapshot(&chain);
    put(&rig, "sr", &chain, 2 * MIB, b'b');
    rig.text("VDI.clone", vec![snapshot.as_str().into(), none()]).expect("a clone");
    put(&rig, "sr", &alone, MIB, b'c');
    rig.call("VDI.enable_cbt", vec![tracked.as_str().into()]).expect("it is a VHD");
    let both = || vec![sr.as_str().into(), to.as_str().into()];
    assert_eq!(
        rig.refused("SR.evacuate", vec![sr.as_str().into(), sr.as_str().into()]).0,
        "OPERATION_NOT_ALLOWED"
    );
    let (code, params) = rig.refused("SR.evacuate", both());
    assert_eq!((code.as_str(), params[0].as_str()), ("SR_NOT_EVACUATED", sr.as_str()));
    let uuid = rig.vdi(&tracked).text("uuid").to_owned();
    let said = &params[1];
    assert!(
        said.contains(&uuid) && said.contains("VDI_CBT_ENABLED") && said.contains("vdi-disable-cbt"),
        "{said}"
    );
    assert_eq!(rig.stack.db.find("VDI", "SR", &sr).len(), 1, "all others are gone");
    assert_eq!(
        rig.images("to").len(),
        5,
        "the disk, its snapshot, the clone, what they share; and the other"
    );
    rig.call("VDI.disable_cbt", vec![tracked.as_str().into()]).expect("it is tracked");
    rig.call("SR.evacuate", both()).expect("nothing is in the way");
    assert!(rig.images("sr").is_empty(), "{:?}", rig.images("sr"));
    assert!(rig.stack.db.find("VDI", "SR", &sr).is_empty());
    let there = rig.stack.db.find("VDI", "SR", &to);
    let mut held: Vec<_> = there
        .iter()
        .filter(|vdi| vdi.bool("managed"))
        .map(|vdi| {
            let bytes = whole(&rig, "to", &vdi.reference);
            [0, MIB, 2 * MIB].map(|at| bytes[at as usize])
        })
        .collect();
    held.sort_unstable();
    assert_eq!(held, [[0, 0, 0], [0, b'c', 0], [b'a', 0, 0], [b'a', 0, 0], [b'a', 0, b'b']]);
    rig.check(&sr, "sr");
    rig.check(&to, "to");
    let pbd = rig.pbd(&sr);
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("nothing is in use");
}

#[test]
fn a_disk_becomes_thick_and_thin_again() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 16 * MIB);
    put(&rig, "sr", &vdi, 3 * MIB, b'x');
    let before = whole(&rig, "sr", &vdi);
    let taken = |vdi: &str| std::fs::metadata(rig.file("sr", vdi)).expect("its image").blocks() * 512;
    let convert = |vdi: &str, to: &str| rig.text("VDI.convert", vec![vdi.into(), to.into()]);
    assert_eq!(rig.refused("VDI.convert", vec![vdi.as_str().into(), "fat".into()]).0, "INVALID_VALUE");
    let thick = convert(&vdi, "thick").expect("there is room");
    assert!(rig.file("sr", &thick).extension().is_some_and(|kind| kind == "raw"));
    assert!(taken(&thick) >= 16 << 20, "all of its space is taken: {}", taken(&thick));
    assert!(whole(&rig, "sr", &thick) == before);
    let thin = convert(&thick, "thin").expect("there is room");
    assert!(rig.file("sr", &thin).extension().is_some_and(|kind| kind == "vhd"));
    assert!(taken(&thin) < 4 << 20, "one block holds something: {}", taken(&thin));
    assert!(whole(&rig, "sr", &thin) == before);
    assert_eq!(rig.vdi(&thin).map("sm_config").get("allocation"), None);
    assert_eq!(rig.images("sr").len(), 1);
    rig.check(&sr, "sr");
    let asked = rig.try_vdi(&sr, MIB, &[("type", "vhd"), ("allocation", "thick")]);
    assert_eq!(asked.expect_err("a VHD is never thick").code, "SR_BACKEND_FAILURE_66");
}

#[test]
fn blocks_come_in_order_again() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 16 * MIB);
    for (at, byte) in [(12, b'd'), (8, b'c'), (4, b'b'), (2, b'y'), (0, b'a')] {
        put(&rig, "sr", &vdi, at * MIB, byte);
    }
    let before = whole(&rig, "sr", &vdi);
    let found = |vdi: &str| {
        let found = rig.call("VDI.get_fragmentation", vec![vdi.into()]).expect("it is there").to_string_map();
        ["blocks", "runs", "runs-in-order"].map(|name| found[name].parse::<u64>().expect("a number"))
    };
    assert_eq!(found(&vdi), [5, 5, 3], "backwards, with two gaps");
    let made = rig.text("VDI.defragment", vec![vdi.as_str().into()]).expect("there is room");
    assert_eq!(found(&made), [5, 3, 3]);
    assert!(whole(&rig, "sr", &made) == before);
    rig.check(&sr, "sr");
}

/// A file system in memory, as long as the test.
struct Mounted(PathBuf);

impl Mounted {
    /// None where this host mounts nothing.
    fn at(dir: PathBuf, size: &str) -> Option<Self> {
        std::fs::create_dir_all(&dir).expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(&dir);
        mount.output().is_ok_and(|output| output.status.success()).then_some(Self(dir))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_move_to_a_full_sr_leaves_the_disk_where_it_is() {
    let rig = Rig::live();
    let Some(_small) = Mounted::at(rig.dir.join("small"), "12m") else {
        println!("skipped: needs to mount a file system in memory [storage::care]");
        return;
    };
    let (sr, to) = (rig.make_sr("sr"), rig.make_sr("small"));
    let vdi = rig.make_vdi(&sr, 32 * MIB);
    for at in 0..16 {
        put(&rig, "sr", &vdi, at * 2 * MIB, b'z');
    }
    let before = whole(&rig, "sr", &vdi);
    // Nobody has looked at the image since, so that it does not fit is found when half of it is there.
    let (code, _) = rig.refused("VDI.pool_migrate", move_params(&vdi, &to));
    assert!(code.starts_with("SR_BACKEND_FAILURE"), "{code}");
    assert!(rig.images("small").is_empty(), "{:?}", rig.images("small"));
    rig.call("VDI.update", vec![vdi.as_str().into()]).expect("it is there");
    assert_eq!(rig.refused("VDI.pool_migrate", move_params(&vdi, &to)).0, "SR_FULL");
    assert!(whole(&rig, "sr", &vdi) == before);
    // The same of a disk in use, whose new image becomes full while it is mirrored.
    let used = rig.make_vdi(&sr, 32 * MIB);
    let Ok((vbd, device)) = plug(&rig, &used, "RW") else {
        println!("skipped: needs a local device by FUSE [storage::care]");
        return;
    };
    let load = Load::on(&device, 32 << 20);
    load.write_much();
    let (code, params) = rig.refused("VDI.pool_migrate", move_params(&used, &to));
    assert_eq!((code.as_str(), params[0].as_str()), ("MIRROR_FAILED", used.as_str()), "{params:?}");
    assert!(rig.images("small").is_empty(), "{:?}", rig.images("small"));
    assert_eq!(rig.get("VBD", &vbd).text("VDI"), used);
    load.write_much();
    let model = load.end();
    let mut now = Vec::new();
    File::open(&device).and_then(|mut file| file.read_to_end(&mut now)).expect("the device");
    assert!(now[..32 << 20] == model[..], "the guest noticed nothing");
    unplug(&rig, &vbd);
    for (sr, dir) in [(&sr, "sr"), (&to, "small")] {
        rig.check(sr, dir);
    }
    let pbd = rig.pbd(&to);
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("nothing is in use");
}

#[test]
fn a_move_that_is_cancelled_leaves_every_disk_at_one_place() {
    let rig = Rig::new();
    let (sr, to) = (rig.make_sr("sr"), rig.make_sr("to"));
    let vdi = rig.make_vdi(&sr, 128 * MIB);
    for at in 0..64 {
        put(&rig, "sr", &vdi, at * 2 * MIB, b'q');
    }
    let task = rig.text("Async.VDI.pool_migrate", move_params(&vdi, &to)).expect("a task");
    until("the first images", || !rig.images("to").is_empty());
    // It may be over by now.
    let _ = rig.call("task.cancel", vec![task.as_str().into()]);
    let status = || rig.get("task", &task).text("status").to_owned();
    until("the end of the task", || !["pending", "cancelling"].contains(&status().as_str()));
    let (stays, leaves) = if status() == "cancelled" { ("sr", "to") } else { ("to", "sr") };
    assert_eq!((rig.images(stays).len(), rig.images(leaves).len()), (1, 0), "{}", status());
    let there = rig.stack.db.all("VDI");
    assert_eq!(there.len(), 1);
    assert!(whole(&rig, stays, &there[0].reference)[MIB as usize - 1] == b'q');
    rig.check(&sr, "sr");
    rig.check(&to, "to");
}
