//! Snapshots, clones and resizes: undisturbed, under a running disk, and with whatever can refuse.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tapio_format::vhd::offline::{CheckOptions, check_path};
use tapio_sm::ForkKind;
use tapio_types::Access;
use uuid::Uuid;

use crate::support::{Disk, MEANWHILE, Place, Watch, byte_of, fork, make, new_vdi, read, whole, write};

const MIB: u64 = 1 << 20;

fn check_all(place: &Place) {
    for name in place.files().iter().filter(|name| name.ends_with(".vhd")) {
        for report in check_path(&place.images().join(name), &CheckOptions::default()).unwrap() {
            assert!(report.is_valid(), "{name}: {report:?}");
        }
    }
}

#[test]
fn a_snapshot_keeps_what_was_and_the_disk_goes_on() {
    let place = Place::new();
    let sr = place.create();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    let made = fork(sr.as_ref(), vdi, ForkKind::Snapshot);
    let base = made.base.clone().unwrap();
    assert!(!base.managed && base.read_only && made.made.managed && made.origin.uuid == vdi);
    assert_eq!((made.made.parent, made.origin.parent), (Some(base.uuid), Some(base.uuid)));
    assert_eq!(made.made.sm_config["vhd-parent"], base.uuid.to_string());
    assert_eq!(made.made.virtual_size, made.origin.virtual_size);
    write(sr.as_ref(), vdi, 0, 2);
    write(sr.as_ref(), vdi, 4 * MIB, 3);
    assert_eq!((read(sr.as_ref(), vdi, 0), read(sr.as_ref(), made.made.uuid, 0)), (2, 1));
    assert_eq!(read(sr.as_ref(), made.made.uuid, 4 * MIB), 0);
    // Nothing was written to the snapshot: a clone of it needs no base copy of its own.
    let clone = fork(sr.as_ref(), made.made.uuid, ForkKind::Clone);
    assert_eq!((clone.base.is_none(), clone.made.parent), (true, Some(base.uuid)));
    write(sr.as_ref(), clone.made.uuid, 0, 8);
    assert_eq!((read(sr.as_ref(), clone.made.uuid, 0), read(sr.as_ref(), made.made.uuid, 0)), (8, 1));
    let single = fork(sr.as_ref(), vdi, ForkKind::Single);
    assert_eq!((single.made.uuid, single.made.parent), (vdi, single.base.map(|base| base.uuid)));
    assert_eq!((read(sr.as_ref(), vdi, 0), read(sr.as_ref(), vdi, 4 * MIB)), (2, 3));
    check_all(&place);
    assert_eq!(sr.scan(&Watch::default()).unwrap().len(), place.files().len(), "no journals are left");
}

#[test]
fn a_raw_disk_gets_a_leaf_and_keeps_its_data() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 5 * MIB, "raw");
    write(sr.as_ref(), vdi, MIB, 5);
    let made = fork(sr.as_ref(), vdi, ForkKind::Clone);
    let base = made.base.unwrap();
    assert_eq!((base.managed, base.sm_config["type"].as_str()), (false, "raw"));
    assert_eq!(made.origin.sm_config["vdi_type"], "vhd");
    assert_eq!((read(sr.as_ref(), vdi, MIB), read(sr.as_ref(), made.made.uuid, MIB)), (5, 5));
    write(sr.as_ref(), vdi, MIB, 6);
    assert_eq!((read(sr.as_ref(), vdi, MIB), read(sr.as_ref(), made.made.uuid, MIB)), (6, 5));
    let found = sr.scan(&ctx).unwrap();
    assert_eq!(found.iter().filter(|info| info.managed).count(), 2);
    assert!(!found.iter().find(|info| info.uuid == base.uuid).unwrap().managed);
    sr.destroy(&ctx, vdi).unwrap();
    sr.destroy(&ctx, made.made.uuid).unwrap();
    assert_eq!(place.files(), [""; 0]);
}

#[test]
fn a_chain_ends_at_thirty_images() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 2 * MIB, "vhd");
    let mut byte = 1;
    loop {
        write(sr.as_ref(), vdi, u64::from(byte) * 512, byte);
        match sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Single) {
            Ok(_) => byte += 1,
            Err(error) => {
                assert_eq!(error.code, "SR_BACKEND_FAILURE_109");
                break;
            }
        }
    }
    assert_eq!(byte, 30);
    let chain = sr.activate(&ctx, vdi, Access::ReadOnly).unwrap().chain;
    assert_eq!(chain.layers.len(), 30);
    assert!((1..=byte).all(|byte| byte_of(&chain, u64::from(byte) * 512) == byte));
    assert_eq!(place.files().len(), 30);
    sr.deactivate(&ctx, vdi).unwrap();
    sr.destroy(&ctx, vdi).unwrap();
    assert_eq!(place.files(), [""; 0], "no other image needed the chain");
}

#[test]
fn a_running_disk_waits_and_goes_on_with_the_new_leaf() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    let chain = sr.activate(&ctx, vdi, Access::ReadWrite).unwrap().chain;
    let disk = Disk { pauses_only: true, ..Disk::default() };
    disk.open(&whole(&chain));
    let disk = Arc::new(disk);
    ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
    disk.write(0, 1);
    let made = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap();
    disk.write(0, 2);
    disk.write(6 * MIB, 3);
    assert_eq!(disk.pauses.load(Ordering::Relaxed), 1);
    assert_eq!(disk.open.lock().unwrap().as_ref().unwrap().0.layers.len(), 2);
    assert_eq!((read(sr.as_ref(), made.made.uuid, 0), read(sr.as_ref(), made.made.uuid, 6 * MIB)), (1, 0));
    // Longer, by the process itself.
    assert_eq!(sr.resize(&ctx, vdi, 16 * MIB).unwrap().virtual_size, 16 * MIB);
    disk.write(15 * MIB, 4);
    *disk.open.lock().unwrap() = None;
    ctx.live.lock().unwrap().clear();
    sr.deactivate(&ctx, vdi).unwrap();
    assert_eq!([0, 6, 15].map(|at| read(sr.as_ref(), vdi, at * MIB)), [2, 3, 4]);
    check_all(&place);
}

#[test]
fn a_disk_that_refuses_leaves_everything_as_it_was() {
    for (format, refuses_pause) in [("vhd", true), ("vhd", false), ("raw", true)] {
        let place = Place::new();
        let sr = place.create();
        let ctx = Watch::default();
        let vdi = make(sr.as_ref(), 8 * MIB, format);
        write(sr.as_ref(), vdi, 0, 1);
        let before = place.files();
        let disk = if refuses_pause {
            Disk { refuses_pause, pauses_only: true, ..Disk::default() }
        } else {
            let chain = sr.activate(&ctx, vdi, Access::ReadWrite).unwrap().chain;
            let disk = Disk { pauses_only: true, ..Disk::default() };
            disk.open(&whole(&chain));
            disk.refuses_resume_once.store(true, Ordering::Relaxed);
            disk
        };
        let disk = Arc::new(disk);
        ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
        let error = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap_err();
        assert!(error.params[0].starts_with("no "), "{error}");
        let mut left = before;
        if refuses_pause {
            // It may be paused all the same: the next recovery looks after it.
            left.push(format!("clone_{vdi}"));
            left.sort();
        }
        assert_eq!(place.files(), left);
        if !refuses_pause {
            disk.write(0, 2);
            *disk.open.lock().unwrap() = None;
            sr.deactivate(&ctx, vdi).unwrap();
        }
        ctx.live.lock().unwrap().clear();
        assert!(sr.vdi(&ctx, vdi).unwrap().managed);
        assert_eq!(read(sr.as_ref(), vdi, 0), if refuses_pause { 1 } else { 2 });
        // And then it works.
        assert!(sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).is_ok());
        assert!(!place.files().contains(&format!("clone_{vdi}")));
        check_all(&place);
    }
}

/// A guest that goes on with the new leaf has written there before anybody knows that it does.
#[test]
fn a_fork_whose_disk_may_have_gone_on_is_not_undone() {
    for (format, loses_daemon) in [("vhd", false), ("vhd", true), ("raw", false), ("raw", true)] {
        let place = Place::new();
        let mut sr = place.create();
        let ctx = Watch::default();
        let vdi = make(sr.as_ref(), 8 * MIB, format);
        if format == "raw" {
            // A disk of the tests writes VHDs.
            write(sr.as_ref(), vdi, 6 * MIB, 1);
        }
        let chain = sr.activate(&ctx, vdi, Access::ReadWrite).unwrap().chain;
        let disk = Disk { loses_answer: true.into(), loses_daemon, pauses_only: true, ..Disk::default() };
        let disk = Arc::new(disk);
        ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
        if format == "vhd" {
            disk.open(&whole(&chain));
            disk.write(6 * MIB, 1);
        }
        let done = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot);
        assert_eq!(done.is_ok(), !loses_daemon, "{done:?}");
        disk.write(MIB, 2);
        if loses_daemon {
            assert!(place.files().contains(&format!("clone_{vdi}")), "{:?}", place.files());
            // The next daemon.
            disk.daemon_is_gone.store(false, Ordering::Relaxed);
            drop(sr);
            sr = place.driver("file").attach(&ctx, place.sr, &place.config).unwrap();
            sr.activate(&ctx, vdi, Access::ReadWrite).unwrap();
            assert!(disk.pauses.load(Ordering::Relaxed) > 1, "it was put in order");
        }
        assert!(!place.files().iter().any(|name| name.starts_with("clone_")), "{:?}", place.files());
        disk.write(2 * MIB, 3);
        assert_eq!(disk.open.lock().unwrap().as_ref().unwrap().0.layers.len(), 2);
        disk.close();
        ctx.live.lock().unwrap().clear();
        sr.deactivate(&ctx, vdi).unwrap();
        let held = [0, 1, 2, 6].map(|at| read(sr.as_ref(), vdi, at * MIB));
        assert_eq!(held, [MEANWHILE, 2, 3, 1], "{format}");
        check_all(&place);
    }
}

#[test]
fn a_disk_is_made_longer_and_never_shorter() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    for format in ["vhd", "raw"] {
        let vdi = make(sr.as_ref(), 4 * MIB, format);
        for at in [0, 2, 3] {
            write(sr.as_ref(), vdi, at * MIB, at as u8 + 1);
        }
        let grown = sr.resize(&ctx, vdi, 4096 * MIB + 1).unwrap();
        assert!(grown.virtual_size > 4096 * MIB && grown.virtual_size <= 4098 * MIB);
        assert!([0, 2, 3].iter().all(|at| read(sr.as_ref(), vdi, at * MIB) == *at as u8 + 1));
        assert_eq!(read(sr.as_ref(), vdi, 4095 * MIB), 0);
        assert_eq!(sr.resize(&ctx, vdi, MIB).unwrap_err().code, "SR_BACKEND_FAILURE_79");
        assert_eq!(sr.resize(&ctx, vdi, grown.virtual_size).unwrap().virtual_size, grown.virtual_size);
    }
    let vdi = make(sr.as_ref(), 4 * MIB, "vhd");
    assert_eq!(sr.resize(&ctx, vdi, (2040 << 30) + 1).unwrap_err().code, "SR_BACKEND_FAILURE_79");
    write(sr.as_ref(), vdi, 0, 1);
    let base = fork(sr.as_ref(), vdi, ForkKind::Single).base.unwrap().uuid;
    assert_eq!(sr.resize(&ctx, base, 8 * MIB).unwrap_err().code, "SR_BACKEND_FAILURE_110");
    let larger = sr.resize(&ctx, vdi, 8 * MIB).unwrap();
    assert_eq!(
        (larger.virtual_size, read(sr.as_ref(), vdi, 0), read(sr.as_ref(), vdi, 7 * MIB)),
        (8 * MIB, 1, 0)
    );
    check_all(&place);
}

#[test]
fn another_storage_managers_unfinished_merge_is_left_to_it() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let (vdi, other) = (make(sr.as_ref(), 4 * MIB, "vhd"), make(sr.as_ref(), 4 * MIB, "vhd"));
    std::fs::write(place.images().join(format!("leaf_{vdi}")), "x\n").unwrap();
    drop(sr);
    let sr = place.attach();
    for error in [
        sr.activate(&ctx, vdi, Access::ReadOnly).unwrap_err(),
        sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Clone).unwrap_err(),
        sr.destroy(&ctx, vdi).unwrap_err(),
    ] {
        assert!(error.params[1].contains(&format!("leaf_{vdi}")), "{error}");
    }
    let found = sr.scan(&ctx).unwrap();
    assert_eq!(found.iter().filter(|info| info.sm_config.contains_key("damaged")).count(), 1);
    assert!(sr.activate(&ctx, other, Access::ReadOnly).is_ok());
    assert!(place.images().join(format!("leaf_{vdi}")).exists());
}

#[test]
fn many_at_once_do_not_disturb_each_other() {
    let place = Place::new();
    let sr = place.create();
    let other = place.attach();
    let vdi = make(sr.as_ref(), 4 * MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for sr in [&sr, &other] {
            scope.spawn(|| {
                for _ in 0..6 {
                    let ctx = Watch::default();
                    let made = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap();
                    let new = sr.create(&ctx, &new_vdi(MIB, "vhd")).unwrap();
                    sr.destroy(&ctx, new.uuid).unwrap();
                    assert_eq!(read(sr.as_ref(), made.made.uuid, 0), 1);
                }
                stop.store(true, Ordering::Relaxed);
            });
        }
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for info in sr.scan(&Watch::default()).unwrap() {
                    assert!(!info.sm_config.contains_key("damaged"), "{info:?}");
                }
            }
        });
    });
    assert_eq!(sr.scan(&Watch::default()).unwrap().iter().filter(|info| info.managed).count(), 13);
    check_all(&place);
}
