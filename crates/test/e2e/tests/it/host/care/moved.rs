//! Disks that arrive: every byte, their snapshots, their chains; and what becomes of the images that they had.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use tapio_e2e::client::random_file;
use tapio_e2e::disk::text;
use tapio_e2e::world::World;

use super::load::{Load, Model};
use super::{Care, LEN, has_devices};

#[test]
fn a_disk_in_use_moves_with_its_snapshots_and_back_to_an_emptied_sr() {
    if !has_devices() {
        return;
    }
    let care = Care::new(World::new());
    let (near, far) = (care.default_sr(), care.sr("far"));
    let vdi = care.disk(&near, &["other-config:kept=yes"]);
    let plugged = care.plug(&vdi);
    let load = Load::on(&plugged.device, Model::empty(LEN));
    load.writes(200);
    let snapshot = |vdi: &str| {
        load.still(|model| (care.value(&["vdi-snapshot", &format!("uuid={vdi}")]), model.clone()))
    };
    let (first, held_first) = snapshot(&vdi);
    load.writes(100);
    let (second, held_second) = snapshot(&vdi);
    load.writes(100);
    let time = care.param("vdi", &first, "snapshot-time");
    // Both may be of one second.
    care.value(&["vdi-param-set", &format!("uuid={first}"), "name-label=first"]);

    let there = care.migrate(&vdi, &far, &[]);
    assert_eq!(care.disk_of(&plugged), there, "the VBD leads to the new VDI");
    assert_ne!(there, vdi);
    assert_eq!(care.images("sr"), Vec::<String>::new(), "nothing is left of it");
    for gone in [&vdi, &first, &second] {
        assert_eq!(care.value(&["vdi-list", &format!("uuid={gone}"), "--minimal"]), "");
    }
    assert_eq!(care.param("vdi", &there, "other-config"), "kept: yes");
    load.writes(200);

    // The snapshots are those of the new disk, of the time at which they were made, and on the images that it has too.
    let snapshots = care.value(&["vdi-list", &format!("snapshot-of={there}"), "--minimal"]);
    let snapshots: Vec<&str> = snapshots.split(',').collect();
    assert_eq!(snapshots.len(), 2, "{snapshots:?}");
    let is_first = |vdi: &&&str| care.param("vdi", vdi, "name-label") == "first";
    let moved_first = snapshots.iter().find(is_first).expect("the name stays");
    assert_eq!(care.param("vdi", moved_first, "snapshot-time"), time);
    let moved_second = snapshots.iter().find(|vdi| *vdi != moved_first).expect("there are two");
    care.holds(moved_first, &held_first);
    care.holds(moved_second, &held_second);
    // Leaf and second snapshot have a base copy in common; the first one has the base copy below it.
    assert_eq!(care.parent("far", moved_second), care.parent("far", &there));
    let below = care.parent("far", &care.parent("far", moved_second));
    assert_eq!(care.parent("far", moved_first), below);

    // All of the SR goes back, with a disk beside it that nothing uses, and a raw one.
    let (other, held) = (care.disk(&far, &[]), care.world.scratch.join("other.raw"));
    random_file(&held, LEN as u64);
    let raw = care.disk(&far, &["sm-config:type=raw"]);
    for vdi in [&other, &raw] {
        care.value(&["vdi-import", &format!("uuid={vdi}"), &format!("filename={}", text(&held))]);
    }
    let (uuid, to) = (format!("uuid={far}"), format!("destination-sr-uuid={near}"));
    assert_eq!(care.value(&["sr-evacuate", &uuid, &to]), "");
    assert_eq!(care.images("far"), Vec::<String>::new());
    assert_eq!(care.value(&["vdi-list", &format!("sr-uuid={far}"), "--minimal"]), "");
    load.writes(100);
    let back = care.disk_of(&plugged);
    assert_eq!(care.param("vdi", &back, "sr-uuid"), near);
    let snapshots = care.value(&["vdi-list", &format!("snapshot-of={back}"), "--minimal"]);
    let snapshots: Vec<&str> = snapshots.split(',').collect();
    let first = snapshots.iter().find(is_first).expect("the name stays");
    care.holds(first, &held_first);
    let model = load.end();
    model.compare("the device", File::open(&plugged.device).expect("it is plugged"));
    care.unplug(&plugged);
    care.holds(&back, &model);
    care.is_valid("sr");
    care.is_healthy(&[&near, &far]);

    // The others, byte by byte; the raw one is raw still.
    let managed = care.value(&["vdi-list", &format!("sr-uuid={near}"), "managed=true", "--minimal"]);
    let others: Vec<&str> =
        managed.split(',').filter(|vdi| *vdi != back && !snapshots.contains(vdi)).collect();
    assert_eq!(others.len(), 2, "{managed}");
    let want = fs::read(&held).expect("the file");
    for vdi in &others {
        let file = care.world.scratch.join(&format!("{vdi}.out"));
        care.value(&["vdi-export", &format!("uuid={vdi}"), &format!("filename={}", text(&file))]);
        assert!(fs::read(&file).expect("it was exported") == want, "{vdi} is another disk");
    }
    let raws = others.iter().filter(|vdi| care.world.scratch.join(&format!("sr/{vdi}.raw")).exists());
    assert_eq!(raws.count(), 1);
    assert_eq!(care.value(&["sr-destroy", &uuid]), "", "nothing is in it");
    care.world.finish();
}

#[test]
fn a_disk_in_use_becomes_thick_thin_and_whole() {
    if !has_devices() {
        return;
    }
    let care = Care::new(World::new());
    let sr = care.default_sr();
    let vdi = care.disk(&sr, &[]);
    let plugged = care.plug(&vdi);
    let load = Load::on(&plugged.device, Model::empty(LEN));
    load.writes(200);
    let (snapshot, held) =
        load.still(|model| (care.value(&["vdi-snapshot", &format!("uuid={vdi}")]), model.clone()));
    let time = care.param("vdi", &snapshot, "snapshot-time");
    load.writes(100);

    // The lowest image has the space of the whole disk; what lies above it is as it was.
    let thick = care.value(&["vdi-convert", &format!("uuid={vdi}"), "allocation=thick"]);
    assert_eq!(care.disk_of(&plugged), thick);
    load.writes(100);
    let raw = care.files("sr").into_iter().find(|path| path.extension().is_some_and(|end| end == "raw"));
    let taken = fs::metadata(raw.expect("a raw image")).expect("it is there").blocks() * 512;
    assert!(taken >= LEN as u64, "{taken} bytes are taken");
    let thin = care.value(&["vdi-convert", &format!("uuid={thick}"), "allocation=thin"]);
    load.writes(100);
    assert!(care.files("sr").iter().all(|path| path.extension().is_none_or(|end| end != "raw")));

    // Random writes have scattered the blocks of its base; made anew, they are in order.
    let scattered = |vdi: &str| {
        let said = care.value(&["vdi-fragmentation", &format!("uuid={vdi}")]);
        let field = |name: &str| {
            let line = said.lines().find_map(|line| line.trim().strip_prefix(name));
            let value = line.and_then(|line| line.split_once(": ")).map(|(_, value)| value.trim());
            value.and_then(|value| value.parse::<u64>().ok()).unwrap_or_else(|| panic!("no {name} in {said}"))
        };
        (field("runs ("), field("runs-in-order"), field("blocks"))
    };
    let alone = care.disk(&sr, &[]);
    let second = care.plug(&alone);
    let written = Load::on(&second.device, Model::empty(LEN));
    written.writes(100);
    // What is written while it is made anew takes its place as it comes: the disk is in use, and still.
    let model = written.end();
    let (runs, least, blocks) = scattered(&alone);
    assert!(runs > least && blocks > 1, "{runs} runs of {blocks} blocks, {least} are enough");
    let whole = care.value(&["vdi-defragment", &format!("uuid={alone}")]);
    assert_eq!(care.disk_of(&second), whole);
    model.compare("the device", File::open(&second.device).expect("it is plugged"));
    care.unplug(&second);
    // Neighbours that are copied at the same time may change places.
    let (after, least, _) = scattered(&whole);
    assert!(after < runs && after <= least + 2, "{runs} runs became {after}, and {least} are enough");
    care.holds(&whole, &model);

    let model = load.end();
    care.unplug(&plugged);
    care.holds(&thin, &model);
    let snapshot = care.value(&["vdi-list", &format!("snapshot-of={thin}"), "--minimal"]);
    assert_eq!(care.param("vdi", &snapshot, "snapshot-time"), time);
    care.holds(&snapshot, &held);
    care.is_valid("sr");
    care.is_healthy(&[&sr]);
    // Use is noted once in half an hour: there is no rate yet, and it says so.
    let said = care.value(&["sr-capacity", &format!("uuid={sr}")]);
    let field = |name: &str| said.lines().any(|line| line.contains(name) && line.ends_with(": unknown"));
    assert!(field("growth-per-day") && field("full-at-the-present-rate"), "{said}");
    care.world.finish();
}
