//! The daemon is killed at every named place of every operation; the next one finishes or undoes what was half done.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tapio_core::db::Db;
use tapio_format::vhd::offline::{Chain, Image, OpenOptions};
use tapio_model::{NULL_REF, Value};
use tapio_store::Sqlite;

use super::relocate::{move_params, put, whole};
use super::rig::{MIB, Rig};

/// The child's directory; also what makes it one.
const DIR: &str = "TAPIO_TEST_STORAGE_DIR";

/// Children that run at the same time.
const PARALLEL: usize = 2;

fn none() -> Value {
    Value::string_map::<&str, &str>([])
}

fn open(dir: &Path) -> Rig {
    let store = Sqlite::open(&dir.join("state.db")).expect("the store opens");
    Rig::on(dir, Db::open(Arc::new(store)).expect("the records are read"))
}

/// What the child was told had succeeded.
struct Log(PathBuf);

impl Log {
    fn tell(&self, what: &str) {
        let file = fs::File::options().create(true).append(true).open(&self.0);
        file.and_then(|mut file| writeln!(file, "{what}")).expect("the log");
    }

    fn made(&self, name: &str, reference: &str) {
        self.tell(&format!("made {name} {reference}"));
    }
}

/// Every operation of the storage part once, each acknowledged in the log.
fn story(dir: &Path) {
    let (rig, log) = (open(dir), Log(dir.join("log")));
    let sr = rig.make_sr("sr");
    log.made("sr", &sr);
    let raw = rig.try_vdi(&sr, 4 * MIB, &[("type", "raw")]).expect("a raw VDI");
    let file = fs::File::options().write(true).open(rig.file("sr", &raw)).expect("its file");
    file.write_all_at(&vec![b'a'; MIB as usize], 0).expect("room");
    log.made("raw", &raw);
    let vdi = rig.text("VDI.copy", Rig::copy_params(&raw, &sr)).expect("a copy");
    log.made("vdi", &vdi);
    let snapshot = rig.snapshot(&vdi);
    log.made("snapshot", &snapshot);
    let clone = rig.text("VDI.clone", vec![snapshot.as_str().into(), none()]).expect("a clone");
    log.made("clone", &clone);
    let single = Value::string_map([("type", "single")]);
    rig.call("VDI.snapshot", vec![vdi.as_str().into(), single]).expect("a base copy");
    rig.call("VDI.resize", vec![vdi.as_str().into(), (6 * MIB).into()]).expect("it grows");
    log.tell("grown vdi");
    let into = rig.make_vdi(&sr, 4 * MIB);
    log.made("into", &into);
    rig.text("VDI.copy", vec![raw.as_str().into(), NULL_REF.into(), NULL_REF.into(), into.as_str().into()])
        .expect("a copy into one that is there");
    log.tell("filled into");
    let (uuid, location) =
        (rig.vdi(&clone).text("uuid").to_owned(), rig.vdi(&clone).text("location").to_owned());
    rig.call("VDI.forget", vec![clone.as_str().into()]).expect("it is not in use");
    let flag = || Value::Bool(false);
    let mut params: Vec<Value> =
        vec![uuid.as_str().into(), "again".into(), "".into(), sr.as_str().into(), "user".into()];
    params.extend([flag(), flag(), none(), location.as_str().into()]);
    rig.text("VDI.introduce", params).expect("it is not known");
    log.tell("introduced clone");
    let tracked = rig.make_vdi(&sr, 4 * MIB);
    log.made("tracked", &tracked);
    rig.call("VDI.enable_cbt", vec![tracked.as_str().into()]).expect("it is no snapshot");
    log.tell("tracks tracked");
    let old = rig.snapshot(&tracked);
    log.made("old", &old);
    rig.call("VDI.data_destroy", vec![old.as_str().into()]).expect("it is tracked");
    log.tell("reduced old");
    relocate(&rig, &log, &sr);
    collect(&rig, &log, &sr);
    log.tell("going snapshot");
    rig.call("VDI.destroy", vec![snapshot.as_str().into()]).expect("it goes");
    log.tell("gone snapshot");
    let pbd = rig.pbd(&sr);
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    rig.call("PBD.plug", vec![pbd.as_str().into()]).expect("it is there");
    let other = rig.make_sr("other");
    log.made("other", &other);
    log.tell("going other");
    rig.call("SR.destroy", vec![other.as_str().into()]).expect("it is empty");
    log.tell("gone other");
}

/// Bytes of the disk that is moved, by which it is known.
const MOVED: i64 = 10 * MIB;

/// A disk and its snapshot are moved to another SR.
fn relocate(rig: &Rig, log: &Log, sr: &str) {
    let away = rig.make_sr("away");
    log.made("away", &away);
    let vdi = rig.make_vdi(sr, MOVED);
    put(rig, "sr", &vdi, 0, b'v');
    rig.snapshot(&vdi);
    put(rig, "sr", &vdi, 4 * MIB, b'w');
    log.tell("about to move");
    rig.text("VDI.pool_migrate", move_params(&vdi, &away)).expect("it moves");
    log.tell("moved");
}

/// The disk is at one place, with its snapshot and all that both hold.
fn look_at_moved(rig: &Rig, has: &dyn Fn(&str) -> bool, place: &str) {
    if !has("about to move") {
        return;
    }
    let all = rig.stack.db.all("VDI");
    let all: Vec<_> =
        all.iter().filter(|vdi| vdi.bool("managed") && vdi.int("virtual_size") == MOVED).collect();
    assert_eq!(all.len(), 2, "{place}: the disk and its snapshot: {all:?}");
    let (snapshot, disk) = match all[0].bool("is_a_snapshot") {
        true => (all[0], all[1]),
        false => (all[1], all[0]),
    };
    assert_eq!(snapshot.text("snapshot_of"), disk.reference, "{place}");
    assert_eq!(snapshot.text("SR"), disk.text("SR"), "{place}");
    let pbd = rig.pbd(disk.text("SR"));
    let is_away = rig.get("PBD", &pbd).map("device_config")["location"].ends_with("away");
    assert!(is_away || !has("moved"), "{place}: it was moved");
    let dir = if is_away { "away" } else { "sr" };
    let bytes = |vdi: &str| {
        let bytes = whole(rig, dir, vdi);
        [bytes[0], bytes[4 * MIB as usize]]
    };
    assert_eq!(bytes(&disk.reference), *b"vw", "{place}");
    assert_eq!(bytes(&snapshot.reference), [b'v', 0], "{place}");
}

/// Every job of a garbage collection once.
fn collect(rig: &Rig, log: &Log, sr: &str) {
    let (unset, single) = (none, || Value::string_map([("type", "single")]));
    let config = Value::string_map([("gc-quiet", "100000")]);
    rig.call("SR.set_other_config", vec![sr.into(), config]).expect("a number");
    let write = |vdi: &str, at: u64, len: usize| {
        let mut image = Image::open(&rig.file("sr", vdi), OpenOptions::WRITE).expect("its image");
        for at in (at..at + len as u64).step_by(MIB as usize) {
            image.write_at(at, &vec![b'm'; len.min(MIB as usize)]).expect("room");
        }
        image.finish().expect("room");
    };
    // Two base copies, the upper one larger than the table of the lower one, with a snapshot on it; and the disk holds
    // more than is merged while a guest waits.
    let merged = rig.make_vdi(sr, 4 * MIB);
    write(&merged, 0, 512);
    log.made("merged", &merged);
    rig.call("VDI.snapshot", vec![merged.as_str().into(), single()]).expect("a base copy");
    rig.call("VDI.resize", vec![merged.as_str().into(), (300 * MIB).into()]).expect("it grows");
    write(&merged, 1 << 20, 512);
    let kept = rig.text("VDI.snapshot", vec![merged.as_str().into(), unset()]).expect("a snapshot");
    log.made("kept", &kept);
    write(&merged, 256 << 20, 24 << 20);
    log.tell("written merged");
    finish(rig, sr);
    // The disk alone is left on its base copy.
    log.tell("going kept");
    rig.call("VDI.destroy", vec![kept.as_str().into()]).expect("it goes");
    log.tell("gone kept");
    // A base copy that nothing needs, as a storage that failed leaves it.
    let lost = rig.make_vdi(sr, 4 * MIB);
    write(&lost, 0, 512);
    rig.call("VDI.snapshot", vec![lost.as_str().into(), single()]).expect("a base copy");
    let file = rig.file("sr", &lost);
    rig.call("VDI.forget", vec![lost.as_str().into()]).expect("it is not in use");
    fs::remove_file(file).expect("it is there");
    finish(rig, sr);
}

/// Collects an SR until nothing is left to do.
fn finish(rig: &Rig, sr: &str) {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let left = rig.call("SR.collect_garbage", vec![sr.into(), false.into()]).expect("it is attached");
        let is_over = left.as_set().is_some_and(|lines| lines.is_empty());
        while rig.stack.storage.is_collecting(sr) {
            assert!(Instant::now() < until, "the collection does not end: {left:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        if is_over {
            return;
        }
        assert!(Instant::now() < until, "something is left: {left:?}");
    }
}

/// The story: to its end, or, as the child of another test, to where it is killed.
#[test]
fn child() {
    if let Some(dir) = std::env::var_os(DIR) {
        return story(Path::new(&dir));
    }
    let scratch = tempfile::tempdir().expect("a scratch directory");
    story(scratch.path());
    look(scratch.path(), "the end");
}

/// Runs the story in a process of its own; whether it came to the place.
fn run(dir: &Path, place: &str) -> bool {
    let program = std::env::current_exe().expect("this program");
    let mut child = Command::new(program);
    child.args(["kill::child", "--exact", "--test-threads=1"]).env(DIR, dir).env("TAPIO_DIE_AT", place);
    let output = child.stdin(Stdio::null()).output().expect("it starts");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(137) => true,
        Some(0) => false,
        other => panic!("{place}: the story ended with {other:?}: {said}"),
    }
}

/// What a VDI reads as, by a copy into a raw image.
fn contents(rig: &Rig, sr: &str, vdi: &str) -> Vec<u8> {
    let raw = rig.try_vdi(sr, rig.vdi(vdi).int("virtual_size"), &[("type", "raw")]).expect("a raw VDI");
    rig.text("VDI.copy", vec![vdi.into(), NULL_REF.into(), NULL_REF.into(), raw.as_str().into()])
        .expect("a copy");
    let bytes = fs::read(rig.file("sr", &raw)).expect("its file");
    rig.call("VDI.destroy", vec![raw.as_str().into()]).expect("it goes");
    bytes
}

/// The disk of [`collect`] holds what was written to it, and zeros beside that.
fn look_at_merged(rig: &Rig, vdi: &str, place: &str) {
    let chain = Chain::open(&rig.file("sr", vdi)).unwrap_or_else(|error| panic!("{place}: {error}"));
    let holds = |at: u64, len: usize, byte: u8| {
        let mut found = vec![!byte; len];
        chain.read_at(at, &mut found).unwrap_or_else(|error| panic!("{place}: {error}"));
        assert!(found == vec![byte; len], "{place}: byte {at} and behind it are not {byte}");
    };
    for (at, len, byte) in [
        (0, 512, b'm'),
        (512, (1 << 20) - 512, 0),
        (1 << 20, 512, b'm'),
        ((1 << 20) + 512, 3 << 20, 0),
        (255 << 20, 1 << 20, 0),
        (256 << 20, 24 << 20, b'm'),
        (280 << 20, 1 << 20, 0),
    ] {
        holds(at, len, byte);
    }
}

/// A daemon starts on what is left: everything that was acknowledged is there, nothing is half done.
fn look(dir: &Path, place: &str) {
    let log = fs::read_to_string(dir.join("log")).unwrap_or_default();
    let made: BTreeMap<&str, &str> =
        log.lines().filter_map(|line| line.strip_prefix("made ")?.split_once(' ')).collect();
    let has = |what: &str| log.lines().any(|line| line == what);
    let rig = open(dir);
    for (name, reference) in &made {
        let class = if matches!(*name, "sr" | "other" | "away") { "SR" } else { "VDI" };
        let is_there = rig.stack.db.get(class, reference).is_ok();
        if has(&format!("gone {name}")) {
            assert!(!is_there, "{place}: {name} was destroyed");
        } else if !has(&format!("going {name}")) && *name != "clone" {
            assert!(is_there, "{place}: {name} was made");
        }
    }
    // What was being copied is copied in the background.
    let until = Instant::now() + Duration::from_secs(120);
    while !rig.stack.db.notes("storage/copy-into/").is_empty() {
        assert!(Instant::now() < until, "{place}: the copy does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    let srs = rig.stack.db.all("SR");
    for sr in &srs {
        let pbd = rig.pbd(&sr.reference);
        // A daemon that was killed while it unplugged has unplugged.
        rig.call("PBD.plug", vec![pbd.as_str().into()]).unwrap_or_else(|error| panic!("{place}: {error}"));
        let location = &rig.get("PBD", &pbd).map("device_config")["location"];
        let name = Path::new(location).file_name().expect("a name").to_string_lossy().into_owned();
        rig.check(&sr.reference, &name);
        assert!(sr.text("name_label") == "files", "{place}: {sr:?}");
        // An image that a scan found has no name: one that no client asked for.
        for vdi in rig.stack.db.find("VDI", "SR", &sr.reference).iter().filter(|vdi| vdi.bool("managed")) {
            assert!(["disk", "again"].contains(&vdi.text("name_label")), "{place}: an orphan: {vdi:?}");
        }
    }
    look_at_moved(&rig, &has, place);
    if let Some(sr) = made.get("sr") {
        let is_filled = has("filled into") || place.starts_with("vdi-copy:into");
        for name in ["raw", "vdi", "snapshot", "clone", "into"] {
            if name == "into" && !is_filled {
                continue;
            }
            let Some(vdi) = made.get(name).filter(|vdi| rig.stack.db.get("VDI", vdi).is_ok()) else {
                continue;
            };
            let bytes = contents(&rig, sr, vdi);
            assert!(bytes[..MIB as usize].iter().all(|byte| *byte == b'a'), "{place}: contents of {name}");
            assert!(bytes[MIB as usize..].iter().all(|byte| *byte == 0), "{place}: end of {name}");
        }
        if has("grown vdi") {
            assert!(rig.vdi(made["vdi"]).int("virtual_size") >= 6 * MIB, "{place}");
        }
        if let Some(merged) = made.get("merged").filter(|_| has("written merged")) {
            look_at_merged(&rig, merged, place);
            finish(&rig, sr);
            look_at_merged(&rig, merged, place);
            if has("gone kept") {
                assert_eq!(rig.vdi(merged).text("parent"), NULL_REF, "{place}: it stands alone");
            }
        }
        if let Some(tracked) = made.get("tracked") {
            assert!(!has("tracks tracked") || rig.vdi(tracked).bool("cbt_enabled"), "{place}");
        }
        if let (Some(tracked), Some(old)) = (made.get("tracked"), made.get("old")) {
            let is_reduced = rig.vdi(old).text("type") == "cbt_metadata";
            assert!(is_reduced || !(has("reduced old") || place.starts_with("vdi-data-destroy")), "{place}");
            assert!(rig.vdi(old).bool("cbt_enabled"), "{place}");
            let listed = rig.text("VDI.list_changed_blocks", vec![(*old).into(), (*tracked).into()]);
            assert_eq!(listed.unwrap_or_else(|error| panic!("{place}: {error}")), "AAAAAAAAAAA=", "{place}");
        }
        if has("introduced clone") {
            assert_eq!(rig.vdi(made["clone"]).text("name_label"), "again", "{place}");
        }
        // And it goes on.
        let vdi = rig.make_vdi(sr, 4 * MIB);
        let snapshot = rig.snapshot(&vdi);
        for gone in [&vdi, &snapshot] {
            rig.call("VDI.destroy", vec![gone.as_str().into()]).expect("it goes");
        }
        rig.check(sr, "sr");
    }
}

fn kill_at(places: &[&str]) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let missed = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                while let Some(place) = places.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let scratch = tempfile::tempdir().expect("a scratch directory");
                    if run(scratch.path(), place) {
                        look(scratch.path(), place);
                    } else {
                        missed.lock().expect("no panic").push((*place).to_owned());
                    }
                }
            });
        }
    });
    missed.into_inner().expect("no panic")
}

#[test]
fn at_every_place_of_the_toolstack() {
    let places: Vec<_> = tapio_core::storage::STEPS.iter().map(|step| step.name).collect();
    let missed = kill_at(&places);
    assert!(missed.is_empty(), "the story never came to {missed:?}");
}

#[test]
fn at_every_place_of_the_driver() {
    // The story's SR is a directory: it would come to no place of these, and run to its end for each.
    let is_elsewhere = |name: &str| ["lv:", "rbd-", "external:"].iter().any(|start| name.starts_with(start));
    let places: Vec<_> =
        tapio_sm::STEPS.iter().map(|(name, _)| *name).filter(|name| !is_elsewhere(name)).collect();
    let missed = kill_at(&places);
    // Disks that run, devices and empty disks have tests of their own beside the driver.
    assert!(places.len() - missed.len() >= 12, "the story came to few places only: it missed {missed:?}");
}
