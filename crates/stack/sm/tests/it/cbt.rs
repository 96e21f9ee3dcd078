//! Logs of changed blocks: which blocks are said to have changed, and what happens to the logs.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tapio_format::cbt::{HEADER_LEN, Log, log_len};
use tapio_sm::{ForkKind, Import, Sr, StreamFormat, VdiInfo};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use crate::support::{Disk, Place, Watch, blocks_of, make, read, write};

const MIB: u64 = 1 << 20;
/// Blocks of 64 KiB in a MiB.
const BLOCKS: u64 = 16;

fn tracked(sr: &dyn Sr) -> Uuid {
    let vdi = make(sr, 8 * MIB, "vhd");
    assert!(sr.track_changes(&Watch::default(), vdi, true).unwrap().cbt_enabled);
    vdi
}

fn snapshot(sr: &dyn Sr, vdi: Uuid) -> Uuid {
    let made = sr.fork(&Watch::default(), vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made;
    assert!(made.cbt_enabled);
    made.uuid
}

fn changed(sr: &dyn Sr, from: Uuid, to: Uuid) -> Vec<u64> {
    let text = sr.changed_blocks(&Watch::default(), from, to).unwrap();
    blocks_of(&text).into_iter().collect()
}

fn code(result: Result<String, ApiError>) -> String {
    result.unwrap_err().code.to_string()
}

fn at(place: &Place, vdi: Uuid) -> std::path::PathBuf {
    place.images().join(format!("{vdi}.cbtlog"))
}

fn info(sr: &dyn Sr, vdi: Uuid) -> VdiInfo {
    sr.scan(&Watch::default()).unwrap().into_iter().find(|info| info.uuid == vdi).expect("it is there")
}

#[test]
fn what_changed_between_two_snapshots_is_known() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = tracked(sr.as_ref());
    write(sr.as_ref(), vdi, 0, 1);
    let first = snapshot(sr.as_ref(), vdi);
    write(sr.as_ref(), vdi, 2 * MIB, 2);
    let second = snapshot(sr.as_ref(), vdi);
    write(sr.as_ref(), vdi, 3 * MIB, 3);
    write(sr.as_ref(), vdi, 0, 4);
    let third = snapshot(sr.as_ref(), vdi);
    write(sr.as_ref(), vdi, 7 * MIB, 5);
    assert_eq!(changed(sr.as_ref(), first, second), [2 * BLOCKS]);
    assert_eq!(changed(sr.as_ref(), second, third), [0, 3 * BLOCKS]);
    assert_eq!(changed(sr.as_ref(), first, third), [0, 2 * BLOCKS, 3 * BLOCKS]);
    assert_eq!(changed(sr.as_ref(), third, vdi), [7 * BLOCKS]);
    // In the order of bits that clients know: block 0 is the highest bit of the first byte.
    let text = sr.changed_blocks(&ctx, second, third).unwrap();
    assert_eq!(text, "gAAAAAAAgAAAAAAAAAAAAA==");
    for (from, to) in [(first, first), (second, first), (vdi, third)] {
        assert_eq!(code(sr.changed_blocks(&ctx, from, to)), "SR_BACKEND_FAILURE_460");
    }
    let other = make(sr.as_ref(), 8 * MIB, "vhd");
    assert_eq!(code(sr.changed_blocks(&ctx, first, other)), "SR_BACKEND_FAILURE_460");
    let clone = sr.fork(&ctx, second, Uuid::new_v4(), ForkKind::Clone).unwrap();
    assert!(!clone.made.cbt_enabled && info(sr.as_ref(), second).cbt_enabled);
    // The data of one goes, and what is known of it stays. Then it goes as a whole, and its changes are still known.
    let gone = sr.destroy_data(&ctx, second).unwrap();
    assert!(gone.is_metadata && gone.cbt_enabled && gone.virtual_size == 8 * MIB);
    assert_eq!(info(sr.as_ref(), second), gone);
    assert!(sr.activate(&ctx, second, Access::ReadOnly).is_err());
    assert_eq!(changed(sr.as_ref(), first, second), [2 * BLOCKS]);
    sr.destroy(&ctx, second).unwrap();
    assert_eq!(changed(sr.as_ref(), first, third), [0, 2 * BLOCKS, 3 * BLOCKS]);
    let single = sr.fork(&ctx, vdi, vdi, ForkKind::Single).unwrap();
    assert!(single.made.cbt_enabled);
    assert_eq!(changed(sr.as_ref(), third, vdi), [7 * BLOCKS]);
    // An SR that only a log is left of is not empty.
    drop(sr);
    let sr = place.attach();
    assert_eq!(changed(sr.as_ref(), first, vdi), [0, 2 * BLOCKS, 3 * BLOCKS, 7 * BLOCKS]);
    assert!(!sr.track_changes(&ctx, vdi, false).unwrap().cbt_enabled);
    assert_eq!(code(sr.changed_blocks(&ctx, third, vdi)), "SR_BACKEND_FAILURE_460");
    let next = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made;
    assert!(!next.cbt_enabled);
}

#[test]
fn a_raw_vdi_has_no_log() {
    let place = Place::new();
    let sr = place.create();
    let vdi = make(sr.as_ref(), 8 * MIB, "raw");
    let error = sr.track_changes(&Watch::default(), vdi, true).unwrap_err();
    assert_eq!(error.code, "SR_BACKEND_FAILURE_66");
    assert_eq!(place.files(), [format!("{vdi}.raw")]);
    let plain = make(sr.as_ref(), 8 * MIB, "vhd");
    assert_eq!(sr.destroy_data(&Watch::default(), plain).unwrap_err().code, "SR_BACKEND_FAILURE_66");
    assert!(sr.track_changes(&Watch::default(), plain, false).is_ok(), "it is so already");
}

#[test]
fn a_running_disk_changes_its_log_at_the_snapshot() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    let disk = Arc::new(Disk::start(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap()));
    ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
    let has_log = || disk.log.lock().unwrap().is_some();
    assert!(!has_log());
    sr.track_changes(&ctx, vdi, true).unwrap();
    assert!(has_log());
    let snapshot = || sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made.uuid;
    disk.write(0, 1);
    let first = snapshot();
    disk.write(MIB, 2);
    let second = snapshot();
    disk.write(2 * MIB, 3);
    sr.resize(&ctx, vdi, 16 * MIB).unwrap();
    disk.write(15 * MIB, 4);
    let third = snapshot();
    assert_eq!(changed(sr.as_ref(), first, second), [BLOCKS]);
    assert_eq!(changed(sr.as_ref(), second, third), [2 * BLOCKS, 15 * BLOCKS]);
    assert_eq!(changed(sr.as_ref(), first, third), [BLOCKS, 2 * BLOCKS, 15 * BLOCKS]);
    // What is in memory of the log cannot be listed.
    assert_eq!(code(sr.changed_blocks(&ctx, third, vdi)), "VDI_IN_USE");
    // The log of the last snapshot goes into that of the running disk.
    disk.write(5 * MIB, 5);
    sr.destroy(&ctx, third).unwrap();
    let fourth = snapshot();
    assert_eq!(changed(sr.as_ref(), second, fourth), [2 * BLOCKS, 5 * BLOCKS, 15 * BLOCKS]);
    sr.track_changes(&ctx, vdi, false).unwrap();
    assert!(!has_log());
    disk.close();
    ctx.live.lock().unwrap().clear();
    sr.deactivate(&ctx, vdi).unwrap();
    assert!(!place.files().contains(&format!("cbt_{vdi}")));
    assert_eq!(read(sr.as_ref(), vdi, 15 * MIB), 4);
}

#[test]
fn a_disk_that_does_not_go_on_with_a_log_goes_on_without() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    let disk = Disk::start(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap());
    let disk = Disk { pauses_only: true, ..disk };
    disk.refuses_resume_once.store(true, std::sync::atomic::Ordering::Relaxed);
    let disk = Arc::new(disk);
    ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
    sr.track_changes(&ctx, vdi, true).unwrap_err();
    disk.write(0, 1);
    assert_eq!(place.files(), [format!("{vdi}.vhd")]);
    // And a snapshot that it does not go on from leaves the log as it was, with all that it has.
    sr.track_changes(&ctx, vdi, true).unwrap();
    let first = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made.uuid;
    disk.write(MIB, 2);
    disk.refuses_resume_once.store(true, std::sync::atomic::Ordering::Relaxed);
    let before = place.files();
    sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap_err();
    assert_eq!(place.files(), before);
    disk.write(2 * MIB, 3);
    let second = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made.uuid;
    assert_eq!(changed(sr.as_ref(), first, second), [BLOCKS, 2 * BLOCKS]);
}

/// What becomes of a disk whose process died, and what may happen before the next one starts.
#[test]
fn after_a_kill_everything_has_changed() {
    let everything: BTreeSet<u64> = (0..8 * BLOCKS).collect();
    for next in ["a process", "a snapshot", "a list", "a destroy", "a copy"] {
        let place = Place::new();
        let sr = place.create();
        let ctx = Watch::default();
        let vdi = tracked(sr.as_ref());
        let first = snapshot(sr.as_ref(), vdi);
        let disk = Disk::start(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap());
        disk.write(MIB, 1);
        disk.die();
        sr.deactivate(&ctx, vdi).unwrap();
        let listed = match next {
            "a list" => sr.changed_blocks(&ctx, first, vdi).unwrap(),
            "a destroy" => {
                // The log before it goes into one that is not complete.
                let zeroth = first;
                let between = snapshot(sr.as_ref(), vdi);
                let last = snapshot(sr.as_ref(), vdi);
                sr.destroy(&ctx, between).unwrap();
                sr.changed_blocks(&ctx, zeroth, last).unwrap()
            }
            "a copy" => {
                let from = make(sr.as_ref(), 8 * MIB, "vhd");
                let chain = sr.activate(&ctx, from, Access::ReadOnly).unwrap().chain;
                sr.fill(&ctx, vdi, &chain, None).unwrap();
                sr.changed_blocks(&ctx, first, vdi).unwrap()
            }
            _ => {
                if next == "a process" {
                    write(sr.as_ref(), vdi, 2 * MIB, 2);
                }
                let second = snapshot(sr.as_ref(), vdi);
                sr.changed_blocks(&ctx, first, second).unwrap()
            }
        };
        assert_eq!(blocks_of(&listed), everything, "{next}");
        // From here on it is known again.
        let second = snapshot(sr.as_ref(), vdi);
        write(sr.as_ref(), vdi, 3 * MIB, 3);
        assert_eq!(changed(sr.as_ref(), second, vdi), [3 * BLOCKS], "{next}");
    }
}

#[test]
fn a_copy_into_a_vdi_is_in_its_log() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let from = make(sr.as_ref(), 8 * MIB, "vhd");
    write(sr.as_ref(), from, 0, 1);
    let base = snapshot_without_log(sr.as_ref(), from);
    write(sr.as_ref(), from, 5 * MIB, 2);
    let vdi = tracked(sr.as_ref());
    let first = snapshot(sr.as_ref(), vdi);
    let chain = |vdi: Uuid| sr.activate(&ctx, vdi, Access::ReadOnly).unwrap().chain;
    sr.fill(&ctx, vdi, &chain(from), Some(&chain(base))).unwrap();
    assert_eq!(changed(sr.as_ref(), first, vdi), [5 * BLOCKS]);
    sr.fill(&ctx, vdi, &chain(from), None).unwrap();
    assert_eq!(changed(sr.as_ref(), first, vdi), [0, 5 * BLOCKS]);
    // One that is broken off may have written anything.
    ctx.cancelled.store(true, std::sync::atomic::Ordering::Relaxed);
    sr.fill(&ctx, vdi, &chain(from), None).unwrap_err();
    assert_eq!(changed(sr.as_ref(), first, vdi).len() as u64, 8 * BLOCKS);
}

#[test]
fn what_is_imported_into_a_vdi_is_in_its_log() {
    let place = Place::new();
    let sr = place.create();
    let vdi = tracked(sr.as_ref());
    let first = snapshot(sr.as_ref(), vdi);
    let import = |len: usize, sent: usize| {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let what = Import { into: vdi, format: StreamFormat::Raw, start: 5 * MIB, len: Some(len as u64) };
        let sender = std::thread::spawn(move || ours.write_all(&vec![7; sent]));
        let imported = sr.import(&Watch::default(), &what, theirs.into());
        sender.join().unwrap().unwrap();
        imported
    };
    import(4096, 4096).unwrap();
    assert_eq!(changed(sr.as_ref(), first, vdi), [5 * BLOCKS]);
    // What came before the client was gone is noted as well.
    import(3 << 20, 2 << 20).unwrap_err();
    let listed = changed(sr.as_ref(), first, vdi);
    assert!((5 * BLOCKS..7 * BLOCKS).all(|block| listed.contains(&block)), "{listed:?}");
    let after = sr.activate(&Watch::default(), vdi, Access::ReadOnly);
    after.expect("the VDI can be used again");
}

fn snapshot_without_log(sr: &dyn Sr, vdi: Uuid) -> Uuid {
    sr.fork(&Watch::default(), vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made.uuid
}

/// A VM that goes back to a snapshot gets a clone of its disk, and the disk that it had is destroyed.
#[test]
fn a_disk_that_goes_back_begins_anew() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = tracked(sr.as_ref());
    let zeroth = snapshot(sr.as_ref(), vdi);
    write(sr.as_ref(), vdi, MIB, 1);
    let first = snapshot(sr.as_ref(), vdi);
    write(sr.as_ref(), vdi, 2 * MIB, 2);
    let back = sr.fork(&ctx, first, Uuid::new_v4(), ForkKind::Clone).unwrap().made;
    assert!(!back.cbt_enabled);
    sr.destroy(&ctx, vdi).unwrap();
    sr.track_changes(&ctx, back.uuid, true).unwrap();
    for from in [zeroth, first] {
        assert_eq!(code(sr.changed_blocks(&ctx, from, back.uuid)), "SR_BACKEND_FAILURE_460");
    }
    // What was known of the snapshots is known still.
    assert_eq!(changed(sr.as_ref(), zeroth, first), [BLOCKS]);
    let second = snapshot(sr.as_ref(), back.uuid);
    write(sr.as_ref(), back.uuid, 3 * MIB, 3);
    assert_eq!(changed(sr.as_ref(), second, back.uuid), [3 * BLOCKS]);
}

#[test]
fn a_disk_grows_between_two_snapshots() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = tracked(sr.as_ref());
    write(sr.as_ref(), vdi, MIB, 1);
    let first = snapshot(sr.as_ref(), vdi);
    write(sr.as_ref(), vdi, 7 * MIB, 2);
    sr.resize(&ctx, vdi, 64 * MIB).unwrap();
    write(sr.as_ref(), vdi, 60 * MIB, 3);
    let second = snapshot(sr.as_ref(), vdi);
    assert_eq!(changed(sr.as_ref(), first, second), [7 * BLOCKS, 60 * BLOCKS]);
    // An image that is longer than its log, as after a kill between the two.
    sr.resize(&ctx, vdi, 128 * MIB).unwrap();
    let log = std::fs::File::options().write(true).open(at(&place, vdi)).unwrap();
    log.set_len(log_len(64 * MIB)).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&log, &(64 * MIB).to_le_bytes(), 40).unwrap();
    write(sr.as_ref(), vdi, 127 * MIB, 4);
    assert_eq!(changed(sr.as_ref(), second, vdi), [127 * BLOCKS]);
    // A log that is shorter than the one before it belongs to another disk.
    let last = snapshot(sr.as_ref(), vdi);
    let mut log = Log::create(&at(&place, last), 8 * MIB).unwrap();
    let header = tapio_format::cbt::LogHeader { consistent: 1, parent: second, child: vdi, ..*log.header() };
    log.set_header(header).unwrap();
    assert_eq!(code(sr.changed_blocks(&ctx, second, last)), "SR_BACKEND_FAILURE_459");
}

#[test]
fn a_damaged_log_is_replaced_by_one_that_says_everything() {
    for damage in ["empty", "short", "cut off", "huge"] {
        let place = Place::new();
        let sr = place.create();
        let ctx = Watch::default();
        let vdi = tracked(sr.as_ref());
        let first = snapshot(sr.as_ref(), vdi);
        let path = at(&place, vdi);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        match damage {
            "empty" => file.set_len(0).unwrap(),
            "short" => file.set_len(20).unwrap(),
            "cut off" => file.set_len(HEADER_LEN as u64 + 1).unwrap(),
            _ => std::os::unix::fs::FileExt::write_all_at(&file, &u64::MAX.to_le_bytes(), 40).unwrap(),
        }
        drop(file);
        assert_eq!(code(sr.changed_blocks(&ctx, first, vdi)), "SR_BACKEND_FAILURE_459", "{damage}");
        write(sr.as_ref(), vdi, MIB, 1);
        let second = snapshot(sr.as_ref(), vdi);
        assert_eq!(changed(sr.as_ref(), first, second).len() as u64, 8 * BLOCKS, "{damage}");
        assert_eq!(read(sr.as_ref(), second, MIB), 1);
    }
    // Logs that lead in a circle lead nowhere else.
    let place = Place::new();
    let sr = place.create();
    let (vdi, other) = (tracked(sr.as_ref()), tracked(sr.as_ref()));
    let first = snapshot(sr.as_ref(), vdi);
    let mut log = Log::open(&at(&place, vdi), Access::ReadWrite).unwrap();
    let header = tapio_format::cbt::LogHeader { child: first, ..*log.header() };
    log.set_header(header).unwrap();
    assert_eq!(code(sr.changed_blocks(&Watch::default(), first, other)), "SR_BACKEND_FAILURE_460");
    // A link is no log, wherever it leads.
    let place = Place::new();
    let sr = place.create();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    std::os::unix::fs::symlink("/etc/hostname", at(&place, vdi)).unwrap();
    assert!(sr.activate(&Watch::default(), vdi, Access::ReadWrite).unwrap().log.is_none());
}

/// The daemon died while a disk waited for its log to change; the disk lives.
#[test]
fn a_disk_that_waited_for_its_log_goes_on() {
    for has_log in [false, true] {
        let place = Place::new();
        let sr = place.create();
        let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
        if has_log {
            sr.track_changes(&Watch::default(), vdi, true).unwrap();
        }
        std::fs::write(place.images().join(format!("cbt_{vdi}")), "\n").unwrap();
        std::fs::write(place.images().join(format!("{vdi}.cbtlog.new")), "").unwrap();
        drop(sr);
        let (ctx, disk) = (Watch::default(), Arc::new(Disk::default()));
        ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
        let sr = place.driver("file").attach(&ctx, place.sr, &place.config).unwrap();
        assert_eq!(disk.log.lock().unwrap().is_some(), has_log);
        disk.write(0, 1);
        disk.close();
        assert_eq!(place.files().len(), 1 + usize::from(has_log), "{:?}", place.files());
        assert_eq!(read(sr.as_ref(), vdi, 0), 1);
    }
}
