use std::mem::forget;
use tapio_types::RingState;

use super::*;
use crate::{PublishedStats, Stage, VbdFiles, clean_stale, disks, parse_published, vbds};

fn root() -> (tempfile::TempDir, ShmRoot) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = ShmRoot::new(dir.path());
    (dir, root)
}

fn name(minor: u32) -> DiskName {
    DiskName { pid: 99_999_999, minor, page: None }
}

const STAGES_OF_ONE: Stages = Stages { queued_ns: 100, image_ns: 200, kernel_ns: 50_000, completing_ns: 300 };

#[test]
fn one_call_updates_every_layout() {
    let (_dir, root) = root();
    let mut stats = DiskStats::create(&root, &name(3)).expect("created");
    let id = VbdId { domid: 5, devid: 51728 };
    let slot = stats.add_vbd(VbdPages::create(&root, 99_999_999, 3, id, true).expect("pages")).expect("room");
    stats.set_image("vhd:/a.vhd");
    stats.submitted(RequestKind::Read, 4096);
    stats.submitted(RequestKind::Write, 8192);
    stats.submitted(RequestKind::Flush, 0);
    stats.completed(RequestKind::Read, 4096, &STAGES_OF_ONE, true);
    stats.completed(RequestKind::Write, 8192, &STAGES_OF_ONE, false);
    stats.out_of_requests(slot);

    let snapshot = disks(&root).expect("listed")[0].read().expect("a page");
    assert_eq!((snapshot.pid, snapshot.minor, snapshot.image.as_str()), (99_999_999, 3, "vhd:/a.vhd"));
    assert_eq!((&snapshot.vbds[..], &snapshot.rings[..]), (&[id][..], &[crate::RingUse::default()][..]));
    assert_eq!(snapshot.in_flight(), 1);
    assert_eq!(snapshot.kind(RequestKind::Write).errors, 1);
    assert_eq!(snapshot.kind(RequestKind::Read).bytes, 4096);
    assert_eq!(
        snapshot.histogram(RequestKind::Read, Stage::Kernel).expect("timed").counts[bucket_of(50_000)],
        1
    );
    assert_eq!(snapshot.histogram(RequestKind::Read, Stage::Total).expect("timed").sum_ns, 50_600);
    assert_eq!(snapshot.histogram(RequestKind::Flush, Stage::Total).expect("timed").count(), 0);
    assert_eq!(snapshot.histogram(RequestKind::Discard, Stage::Total), None);
    assert_eq!(stats.view().snapshot(), snapshot);

    let expected = PublishedStats {
        version: 1,
        oo_reqs: 1,
        read_submitted: 1,
        read_completed: 1,
        read_sectors: 8,
        read_ticks_us: 50,
        write_submitted: 1,
        write_completed: 1,
        write_sectors: 16,
        write_ticks_us: 50,
        io_errors: 1,
        flags: 0,
    };
    for file in ["vdi-3", "nbd-3", "vbd-5-51728"] {
        let bytes = fs::read(root.process(99_999_999).join(file)).expect(file);
        assert_eq!(bytes.len(), 4096, "{file}");
        let counted = PublishedStats { oo_reqs: 1, ..parse_published(&bytes).expect("long enough") };
        assert_eq!(counted, expected, "{file}");
    }
    let found = vbds(&root).expect("listed");
    assert_eq!(found.len(), 1);
    let files = VbdFiles::open(&root, &found[0]).expect("opened");
    let statistics = files.statistics().expect("statistics");
    assert_eq!((statistics.rd_req, statistics.rd_sect, statistics.wr_sect, statistics.f_req), (1, 8, 16, 1));
    assert_eq!(files.ring(), Some(RingState::default()));
}

#[test]
fn fast_requests_do_not_lose_their_time_to_rounding() {
    let (_dir, root) = root();
    let stats = DiskStats::create(&root, &name(0)).expect("created");
    let fast = Stages { kernel_ns: 900, ..Stages::default() };
    for _ in 0..1000 {
        stats.submitted(RequestKind::Read, 4096);
        stats.completed(RequestKind::Read, 512, &fast, true);
    }
    let bytes = fs::read(root.process(99_999_999).join("vdi-0")).expect("file");
    assert_eq!(parse_published(&bytes).expect("long enough").read_ticks_us, 900);
}

#[test]
fn everything_is_removed_with_the_disk_and_readers_notice() {
    let (_dir, root) = root();
    let mut stats = DiskStats::create(&root, &name(1)).expect("created");
    let other = DiskStats::create(&root, &name(2)).expect("a second disk of the process");
    let id = VbdId { domid: 0, devid: 1 };
    let slot =
        stats.add_vbd(VbdPages::create(&root, 99_999_999, 1, id, false).expect("pages")).expect("room");
    let found = vbds(&root).expect("listed");
    let files = VbdFiles::open(&root, &found[0]).expect("opened");
    let view = stats.view();
    assert_eq!(files.state(), crate::FileState::Linked);

    drop(stats.remove_vbd(slot).expect("was there"));
    assert_eq!(files.state(), crate::FileState::Unlinked);
    assert!(!root.vbd(0, 1).exists());
    assert!(stats.remove_vbd(slot).is_none());
    assert!(view.snapshot().vbds.is_empty());

    drop(stats);
    assert!(root.process(99_999_999).join("vdi-2").exists(), "the other disk stays");
    drop(other);
    assert!(!root.process(99_999_999).exists());
    assert_eq!(disks(&root).expect("listed").len(), 0);
    let again = DiskStats::create(&root, &name(1)).expect("the name is free again");
    drop(view);
    assert_eq!(disks(&root).expect("listed").len(), 1, "an old view takes no new file away");
    drop(again);
}

#[test]
fn what_a_dead_process_left_is_removed_and_the_living_stay() {
    let (_dir, root) = root();
    let living = DiskStats::create(&root, &DiskName { pid: 1, minor: 7, page: None }).expect("created");
    let mut dead = DiskStats::create(&root, &name(9)).expect("created");
    let id = VbdId { domid: 0, devid: 9 };
    dead.add_vbd(VbdPages::create(&root, 99_999_999, 9, id, true).expect("pages")).expect("room");
    // A death keeps the files and loses the locks.
    for file in [
        root.pages().join("99999999.9"),
        root.process(99_999_999).join("vdi-9"),
        root.process(99_999_999).join("nbd-9"),
    ] {
        relink(&file);
    }
    for file in ["statistics", "io_ring"] {
        relink(&root.vbd(0, 9).join(file));
    }
    relink(&root.process(99_999_999).join("vbd-0-9"));
    forget(dead);

    // Published a moment before the death: the page does not name it yet.
    let late = VbdPages::create(&root, 99_999_999, 9, VbdId { domid: 7, devid: 7 }, false).expect("pages");
    for file in ["statistics", "io_ring"] {
        relink(&root.vbd(7, 7).join(file));
    }
    relink(&root.process(99_999_999).join("vbd-7-7"));
    forget(late);
    // Its number belongs to another process now: nothing may be touched.
    let reused = DiskStats::create(&root, &DiskName { pid: std::process::id(), minor: 3, page: None })
        .expect("created");
    let page = format!("{}.3", std::process::id());
    relink(&root.pages().join(&page));
    relink(&root.process(std::process::id()).join("vdi-3"));
    forget(reused);

    assert_eq!(clean_stale(&root).expect("cleaned").disks, ["99999999.9"]);
    assert!(root.pages().join(&page).exists() && root.process(std::process::id()).join("vdi-3").exists());
    assert!(!root.vbd(7, 7).exists());
    assert!(!root.process(99_999_999).exists() && !root.vbd(0, 9).exists());
    assert_eq!(disks(&root).expect("listed").len(), 2);
    assert_eq!(clean_stale(&root).expect("cleaned").disks, [""; 0]);
    drop(living);
}

/// Replaces a file by an unlocked copy.
fn relink(path: &std::path::Path) {
    let bytes = fs::read(path).expect("readable");
    fs::remove_file(path).expect("removable");
    fs::write(path, bytes).expect("writable");
}

#[test]
fn a_link_and_a_directory_that_all_may_write_are_refused() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let (dir, root) = root();
    symlink("/tmp", root.process(99_999_999)).expect("symlink");
    let error = DiskStats::create(&root, &name(0)).expect_err("must refuse a link");
    assert!(error.to_string().contains("td3-99999999"), "{error}");
    fs::remove_file(root.process(99_999_999)).expect("removed");
    fs::create_dir(root.process(99_999_999)).expect("made");
    fs::set_permissions(root.process(99_999_999), fs::Permissions::from_mode(0o777)).expect("changed");
    DiskStats::create(&root, &name(0)).expect_err("must refuse a directory that all may write");
    drop(dir);
}

#[test]
fn what_a_living_process_publishes_is_not_replaced() {
    let (_dir, root) = root();
    let id = VbdId { domid: 5, devid: 51712 };
    let first = VbdPages::create(&root, 99_999_999, 0, id, false).expect("pages");
    let error = VbdPages::create(&root, 99_999_998, 0, id, false).expect_err("the numbers are taken");
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    assert!(!root.process(99_999_998).exists(), "nothing is left of the attempt");
    assert!(root.vbd(5, 51712).join("statistics").exists());
    drop(first);
    VbdPages::create(&root, 99_999_998, 0, id, false).expect("free again");
}

#[test]
fn names_of_pages_are_checked() {
    let (_dir, root) = root();
    for bad in ["", "../x", "a/b", ".hidden", &"x".repeat(65)] {
        let name = DiskName { page: Some(bad.to_owned()), ..name(0) };
        assert!(DiskStats::create(&root, &name).is_err(), "{bad:?}");
    }
    let uuid = "0b25f1b1-8f4f-4be3-9d21-2f2a0a4a1a11".to_owned();
    let stats = DiskStats::create(&root, &DiskName { page: Some(uuid.clone()), ..name(0) }).expect("created");
    assert_eq!(disks(&root).expect("listed")[0].name(), uuid);
    drop(stats);
}

#[test]
fn the_slots_end_somewhere() {
    let mut stats = DiskStats::private(&name(0)).expect("memory");
    for devid in 0..VBD_SLOTS as u32 {
        let pages = VbdPages::private(VbdId { domid: 0, devid }).expect("memory");
        assert_eq!(stats.add_vbd(pages).expect("room"), devid as usize);
    }
    let pages = VbdPages::private(VbdId { domid: 0, devid: 99 }).expect("memory");
    assert_eq!(stats.add_vbd(pages).expect_err("full").id().devid, 99);
    stats.submitted_by(VBD_SLOTS + 1, RequestKind::Read, 4096);
    assert_eq!(stats.view().snapshot().in_flight(), 1, "a request without a slot still counts for the disk");
}

#[test]
fn requests_count_for_one_number_or_for_all() {
    let (_dir, root) = root();
    let mut stats = DiskStats::create(&root, &name(0)).expect("created");
    let ids = [VbdId { domid: 0, devid: 0 }, VbdId { domid: 5, devid: 51712 }];
    for id in ids {
        stats.add_vbd(VbdPages::create(&root, 99_999_999, 0, id, false).expect("pages")).expect("room");
    }
    stats.submitted(RequestKind::Read, 4096);
    stats.completed(RequestKind::Read, 512, &STAGES_OF_ONE, true);
    stats.submitted_by(1, RequestKind::Read, 4096);
    stats.completed_by(1, RequestKind::Read, 512, &STAGES_OF_ONE, true);
    for slot in 0..2 {
        stats.ring(slot, &RingState { size: 8, req_prod: 2, rsp_prod: 1, ..RingState::default() }, 0);
    }
    let files: Vec<_> =
        vbds(&root).expect("listed").iter().map(|vbd| VbdFiles::open(&root, vbd).expect("opened")).collect();
    let reads: Vec<_> = files.iter().map(|files| files.counters().expect("read").read_completed).collect();
    assert_eq!(reads, [1, 2]);
    assert!(files.iter().all(|files| files.ring().is_some_and(|ring| ring.used() == 1)));
    assert_eq!(stats.view().snapshot().kind(RequestKind::Read).completed, 2);
    let poll =
        crate::PollCounts { spin_ns: 1, hits: 2, misses: 3, wakeups: 4, enters: 5, out_of_requests: 9 };
    stats.set_poll(&poll);
    assert_eq!(stats.view().snapshot().poll, crate::PollCounts { out_of_requests: 0, ..poll });
}

#[test]
fn the_ring_is_written_rarely_and_once_more_when_it_is_empty() {
    let (_dir, root) = root();
    let mut stats = DiskStats::create(&root, &name(0)).expect("created");
    let id = VbdId { domid: 0, devid: 0 };
    let slot =
        stats.add_vbd(VbdPages::create(&root, 99_999_999, 0, id, false).expect("pages")).expect("room");
    let files = VbdFiles::open(&root, &vbds(&root).expect("listed")[0]).expect("opened");
    let busy =
        RingState { size: 256, req_prod: 10, req_cons: 10, rsp_prod: 7, rsp_pvt: 7, ..RingState::default() };
    let later = RingState { req_prod: 20, rsp_prod: 15, ..busy };
    let empty = RingState { req_prod: 21, rsp_prod: 21, ..busy };
    stats.ring(slot, &busy, 0);
    assert_eq!(files.ring(), Some(busy));
    stats.ring(slot, &later, 1_000_000_000);
    assert_eq!(files.ring(), Some(busy), "too soon");
    assert_eq!(stats.view().snapshot().ring(id), Some(later), "the page has it at once");
    assert_eq!(stats.view().snapshot().ring(VbdId { domid: 1, devid: 0 }), None);
    // Three requests for a second.
    let busy_ns = |stats: &DiskStats| stats.view().snapshot().ring_use(id).expect("published").request_ns;
    assert_eq!(busy_ns(&stats), 3_000_000_000);
    stats.ring(slot, &empty, 2_000_000_000);
    assert_eq!(files.ring(), Some(empty), "an idle ring must not look stuck");
    stats.ring(slot, &later, 3_000_000_000);
    assert_eq!(files.ring(), Some(empty));
    stats.ring(slot, &later, 5_000_000_000);
    assert_eq!(files.ring(), Some(later));
}

#[test]
fn readers_see_sense_while_a_writer_counts() {
    let (_dir, root) = root();
    let mut stats = DiskStats::create(&root, &name(0)).expect("created");
    let file = crate::DiskFile::open(&root, "99999999.0").expect("opened");
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let reader = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let mut last = 0;
            while !stop.load(Ordering::Relaxed) {
                let snapshot = file.read().expect("always a page");
                let now = snapshot.kind(RequestKind::Read).completed;
                assert!(now >= last, "{now} after {last}");
                last = now;
                assert!(["", "vhd:/one.vhd", "vhd:/second.vhd"].contains(&snapshot.image.as_str()));
            }
        }
    });
    for round in 0..2000 {
        stats.set_image(if round % 2 == 0 { "vhd:/one.vhd" } else { "vhd:/second.vhd" });
        for _ in 0..20 {
            stats.submitted(RequestKind::Read, 4096);
            stats.completed(RequestKind::Read, 4096, &STAGES_OF_ONE, true);
        }
    }
    stop.store(true, Ordering::Relaxed);
    reader.join().expect("no assertion failed");
    assert_eq!(stats.view().snapshot().kind(RequestKind::Read).completed, 40_000);
}
