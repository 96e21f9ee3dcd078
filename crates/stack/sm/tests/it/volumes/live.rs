//! Running disks: what becomes of one whose worker dies under it, and of one that does not swap its leaf as it should.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tapio_sm::{ForkKind, RoomSpare, RoomWanted, Sr};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use super::kills::dies_at_step;
use super::stories::{Before, before};
use super::{MIB, Volumes};
use crate::support::{Disk, MEANWHILE, NextEnd, NextSwap, Watch, byte_of, make, read, whole, write};

/// Attaches the SR with a disk that has run on, or waits, and lets its guest write: how many images it has then.
fn goes_on(before: &Before, disk: &Arc<Disk>, what: &str) -> usize {
    let ctx = Watch::default();
    ctx.live.lock().unwrap().insert(before.vdi, Arc::clone(disk));
    let sr = before.place.attach(&ctx);
    disk.write(1024, 9);
    let (chain, leaf) = disk.open.lock().unwrap().take().expect("it runs");
    drop(leaf);
    disk.close();
    assert_eq!([0, 1024, 4 * MIB].map(|at| byte_of(&chain, at)), [1, 9, 2], "{what}");
    ctx.live.lock().unwrap().clear();
    drop(sr);
    let sr = before.place.attach(&Watch::default());
    before.place.check(sr.as_ref(), what);
    assert_eq!([0, 1024].map(|at| read(sr.as_ref(), before.vdi, at)), [1, 9], "{what}");
    chain.layers.len()
}

#[test]
fn a_disk_that_waited_when_its_worker_died_goes_on() {
    let stories = [
        ("fork-pause-live", "lv:fork-journal", 1),
        ("fork-pause-live", "lv:fork-paused", 1),
        ("fork-pause-live", "lv:fork-base-named", 1),
        ("fork-pause-live", "lv:fork-leaf-named", 2),
        ("fork-pause-live", "lv:fork-hidden", 2),
        ("fork-tracked-pause-live", "lv:fork-log-named", 3),
        ("fork-tracked-live", "lv:fork-log-named", 2),
        ("fork-tracked-live", "lv:fork-log-switched", 2),
        ("fork-tracked-live", "lv:fork-leaf-swapped", 3),
        ("fork-tracked-live", "lv:fork-log-linked", 3),
        ("merge-live", "lv:relink-paused", 2),
        ("merge-live", "lv:relink-child", 2),
        ("leaf-live", "lv:leaf-paused", 2),
        ("leaf-live", "lv:leaf-old-named", 2),
        ("leaf-live", "lv:leaf-named", 1),
    ];
    for (change, step, images) in stories {
        let Some(before) = before(change) else { return };
        assert!(dies_at_step(&before, change, step), "{change} at {step}");
        before.place.host.reload().unwrap();
        let found = goes_on(&before, &Arc::new(Disk::default()), &format!("{change} at {step}"));
        assert_eq!(found, images, "{change} at {step}");
    }
}

#[test]
fn a_disk_that_ran_on_when_its_worker_died_has_the_right_images() {
    for (step, has_leaf, images) in [
        ("lv:fork-held", false, 1),
        ("lv:fork-base-named", false, 1),
        ("lv:fork-leaf-named", false, 2),
        ("lv:fork-leaf-swapped", true, 2),
        ("lv:fork-hidden", true, 2),
    ] {
        let Some(before) = before("fork-live") else { return };
        assert!(dies_at_step(&before, "fork-live", step), "{step}");
        before.place.host.reload().unwrap();
        // What the disk of a process that did not die has open, whatever it is called now.
        let own = format!("VHD-{}", before.vdi);
        let known =
            [&own, &format!("VHD-{}", before.beside), &format!("VHD-{}", before.other)].map(String::clone);
        let names = before.place.names();
        let base = names.iter().find(|name| name.starts_with("VHD-") && !known.contains(name));
        let layer = |name: &str| LayerSpec { kind: ImageKind::Vhd, path: before.place.host.path(name) };
        let layers = match base {
            Some(base) if has_leaf => vec![layer(&own), layer(base)],
            Some(base) => vec![layer(base)],
            None => vec![layer(&own)],
        };
        let chain = ChainSpec { layers, access: Access::ReadWrite };
        let disk = Arc::new(Disk::start(&whole(&chain)));
        disk.write(512, 7);
        assert_eq!(goes_on(&before, &disk, step), images, "{step}");
        let sr = before.place.attach(&Watch::default());
        assert_eq!(read(sr.as_ref(), before.vdi, 512), 7, "{step}");
    }
}

/// An SR, a VDI with 1 at 0, and its running disk.
type Running = (Volumes, Box<dyn Sr>, Uuid, Watch, Arc<Disk>);

fn running(disk: Disk) -> Option<Running> {
    let place = Volumes::new()?;
    let sr = place.create();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    let ctx = Watch::default();
    let disk = Arc::new(disk);
    disk.open(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap());
    ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
    Some((place, sr, vdi, ctx, disk))
}

#[test]
fn a_running_disk_swaps_its_leaf_without_a_pause() {
    let Some((place, sr, vdi, ctx, disk)) = running(Disk::default()) else { return };
    let snapshot = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made.uuid;
    disk.write(0, 2);
    assert_eq!((disk.swaps.load(Ordering::Relaxed), disk.pauses.load(Ordering::Relaxed)), (1, 0));
    ctx.live.lock().unwrap().clear();
    disk.close();
    sr.deactivate(&ctx, vdi).unwrap();
    place.check(sr.as_ref(), "swapped");
    assert_eq!([read(sr.as_ref(), vdi, 0), read(sr.as_ref(), snapshot, 0)], [2, 1]);
}

#[test]
fn a_disk_that_does_not_swap_its_leaf_is_paused_for_it() {
    for next in [NextSwap::Refused, NextSwap::Unheard, NextSwap::AnswerLost, NextSwap::Dies] {
        let disk = Disk { next_swap: Some(next).into(), ..Disk::default() };
        let Some((place, sr, vdi, ctx, disk)) = running(disk) else { return };
        let snapshot = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made.uuid;
        let paused = if next == NextSwap::Dies { 0 } else { 1 };
        assert_eq!(disk.pauses.load(Ordering::Relaxed), paused, "{next:?}");
        disk.write(512, 3);
        ctx.live.lock().unwrap().clear();
        disk.close();
        sr.deactivate(&ctx, vdi).unwrap();
        place.check(sr.as_ref(), &format!("{next:?}"));
        let first = if next == NextSwap::AnswerLost { MEANWHILE } else { 1 };
        assert_eq!([0, 512].map(|at| read(sr.as_ref(), vdi, at)), [first, 3], "{next:?}");
        assert_eq!([0, 512].map(|at| read(sr.as_ref(), snapshot, at)), [1, 0], "{next:?}");
    }
}

#[test]
fn a_disk_that_neither_swaps_nor_pauses_is_left_alone() {
    let disk = Disk { next_swap: Some(NextSwap::Unheard).into(), refuses_pause: true, ..Disk::default() };
    let Some((place, sr, vdi, ctx, disk)) = running(disk) else { return };
    sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap_err();
    disk.write(512, 3);
    assert!(place.names().iter().any(|name| name.starts_with("clone_")), "{:?}", place.names());
    // The SR goes on once the disk is gone.
    ctx.live.lock().unwrap().clear();
    disk.close();
    sr.deactivate(&ctx, vdi).unwrap();
    drop(sr);
    let sr = place.attach(&Watch::default());
    place.check(sr.as_ref(), "left alone");
    assert_eq!([0, 512].map(|at| read(sr.as_ref(), vdi, at)), [1, 3]);
}

#[test]
fn an_sr_without_room_for_a_disk_says_so_as_often_as_it_is_asked() {
    let Some(mut place) = Volumes::new() else { return };
    place.config.insert("allocation".into(), "thin".into());
    place.config.insert("allocation-quantum".into(), "8MiB".into());
    let sr = place.create();
    let vdi = make(sr.as_ref(), 1024 * MIB, "vhd");
    for _ in 0..4 {
        make(sr.as_ref(), 52 * MIB, "raw");
    }
    let ctx = Watch::default();
    let disk = Arc::new(Disk::start(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap()));
    ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
    let wanted = [RoomWanted { vdi, len: 512 * MIB }];
    let made = sr.make_room(&ctx, &wanted).unwrap();
    // It gets what is left.
    assert!(made.longer.len() == 1 && made.is_short && made.is_tight && !made.is_full, "{made:?}");
    for _ in 0..2 {
        let made = sr.make_room(&ctx, &wanted).unwrap();
        assert!(made.is_full && made.longer.is_empty() && made.refused.is_empty(), "{made:?}");
    }
    disk.write(0, 1);
    disk.close();
    ctx.live.lock().unwrap().clear();
    // What it does not hold is there for others.
    sr.deactivate(&ctx, vdi).unwrap();
    place.check(sr.as_ref(), "full");
    disk.open(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap());
    ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
    let len = sr.vdi(&ctx, vdi).unwrap().physical_utilisation;
    let made = sr.make_room(&ctx, &[RoomWanted { vdi, len: len + 1 }]).unwrap();
    assert!(made.longer.len() == 1 && !made.is_short && !made.is_tight && !made.is_full, "{made:?}");
    ctx.live.lock().unwrap().clear();
    disk.close();
    sr.deactivate(&ctx, vdi).unwrap();
    assert_eq!(read(sr.as_ref(), vdi, 0), 1);
    place.check(sr.as_ref(), "room again");
}

#[test]
fn volumes_become_longer_one_by_one_after_one_cannot() {
    let Some(mut place) = Volumes::new() else { return };
    place.config.insert("allocation".into(), "thin".into());
    for key in ["allocation-quantum", "allocation-quantum-max"] {
        place.config.insert(key.into(), "4MiB".into());
    }
    let sr = place.create();
    let ctx = Watch::default();
    let mut disks = Vec::new();
    let mut wanted = Vec::new();
    for _ in 0..3 {
        let vdi = make(sr.as_ref(), 256 * MIB, "vhd");
        let disk = Arc::new(Disk::start(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap()));
        ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
        let len = sr.vdi(&ctx, vdi).unwrap().physical_utilisation;
        wanted.push(RoomWanted { vdi, len: len + 1 });
        disks.push((vdi, disk, len));
    }
    // The double gives no volume more than it has places for, which LVM's free space does not show.
    wanted[1].len = 80 * MIB;
    let made = sr.make_room(&ctx, &wanted).unwrap();
    let longer: Vec<_> = made.longer.iter().map(|info| (info.uuid, info.physical_utilisation)).collect();
    let expected = [0, 2].map(|at| (disks[at].0, disks[at].2 + 4 * MIB));
    assert_eq!(longer, expected, "{made:?}");
    assert_eq!(made.refused.iter().map(|(vdi, _)| *vdi).collect::<Vec<_>>(), [disks[1].0], "{made:?}");
    assert!(!place.names().iter().any(|name| name.starts_with("inflate_")), "{:?}", place.names());
    ctx.live.lock().unwrap().clear();
    for (vdi, disk, _) in disks {
        disk.write(0, 1);
        disk.close();
        sr.deactivate(&ctx, vdi).unwrap();
        assert_eq!(read(sr.as_ref(), vdi, 0), 1);
    }
    place.check(sr.as_ref(), "one of three cannot");
}

#[test]
fn a_disk_that_does_not_end_its_image_keeps_its_volume() {
    for next in [NextEnd::Refused, NextEnd::Unheard, NextEnd::AnswerLost] {
        let Some(mut place) = Volumes::new() else { return };
        place.config.insert("allocation".into(), "thin".into());
        place.config.insert("allocation-quantum".into(), "8MiB".into());
        let sr = place.create();
        let (vdi, ctx) = (make(sr.as_ref(), 64 * MIB, "vhd"), Watch::default());
        let disk = Arc::new(Disk { next_end: Some(next).into(), ..Disk::default() });
        disk.open(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap());
        disk.write(0, 1);
        ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
        let len = sr.vdi(&ctx, vdi).unwrap().physical_utilisation;
        let spare = [RoomSpare { vdi, enough: 7 * MIB }];
        let taken = sr.take_room(&ctx, &spare).unwrap();
        assert!(taken.shorter.is_empty() && taken.refused.len() == 1, "{next:?}: {taken:?}");
        let has_journal = place.names().iter().any(|name| name.starts_with("inflate_"));
        assert_eq!(has_journal, next != NextEnd::Refused, "{next:?}: {:?}", place.names());
        // Whatever it did, it has all of its volume when the SR is used next; then its room is taken.
        assert!(sr.make_room(&ctx, &[RoomWanted { vdi, len: 1 }]).unwrap().longer.is_empty());
        assert_eq!(sr.vdi(&ctx, vdi).unwrap().physical_utilisation, len, "{next:?}");
        disk.write(512, 2);
        assert_eq!(sr.take_room(&ctx, &spare).unwrap().shorter.len(), 1, "{next:?}");
        disk.write(1024, 3);
        ctx.live.lock().unwrap().clear();
        disk.close();
        sr.deactivate(&ctx, vdi).unwrap();
        place.check(sr.as_ref(), &format!("{next:?}"));
        assert_eq!([0, 512, 1024].map(|at| read(sr.as_ref(), vdi, at)), [1, 2, 3], "{next:?}");
    }
}

#[test]
fn a_thick_disk_and_one_that_is_paused_only_keep_their_volumes() {
    let Some((place, sr, vdi, ctx, disk)) = running(Disk::default()) else { return };
    let spare = [RoomSpare { vdi, enough: 7 * MIB }];
    assert_eq!(sr.take_room(&ctx, &spare).unwrap(), tapio_sm::RoomTaken::default());
    ctx.live.lock().unwrap().clear();
    disk.close();
    sr.deactivate(&ctx, vdi).unwrap();
    place.check(sr.as_ref(), "thick");
    let Some(mut place) = Volumes::new() else { return };
    place.config.insert("allocation".into(), "thin".into());
    place.config.insert("allocation-quantum".into(), "8MiB".into());
    let sr = place.create();
    let (vdi, ctx) = (make(sr.as_ref(), 128 * MIB, "vhd"), Watch::default());
    let disk = Arc::new(Disk { pauses_only: true, ..Disk::default() });
    disk.open(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap());
    ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
    let taken = sr.take_room(&ctx, &[RoomSpare { vdi, enough: 7 * MIB }]).unwrap();
    assert!(taken.shorter.is_empty() && taken.refused.len() == 1, "{taken:?}");
    ctx.live.lock().unwrap().clear();
    disk.close();
    sr.deactivate(&ctx, vdi).unwrap();
    place.check(sr.as_ref(), "pauses only");
}
