//! Snapshots of running disks whose changed blocks are tracked: the disk swaps its leaf and its log, and whatever ends
//! at whichever step, no list lacks a block that differs.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tapio_sm::{ForkKind, OpenSpec, Sr};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use crate::support::{Disk, NextSwap, Place, Watch, blocks_of, make, read, write};

const MIB: u64 = 1 << 20;
/// Blocks of 64 KiB in a MiB.
const BLOCKS: u64 = 16;

/// Steps of a snapshot of a running disk that is tracked, in their order.
const STEPS: &[&str] = &[
    "fork:journal",
    "fork:linked",
    "fork:leaf-made",
    "fork:sibling-made",
    "fork:log-made",
    "fork:held",
    "fork:log-named",
    "fork:log-switched",
    "fork:swapped",
    "fork:leaf-swapped",
    "fork:log-linked",
    "fork:hidden",
    "fork:resumed",
    "fork:done",
];

/// An SR with a VDI whose changes since the snapshot `first` are noted by a running disk.
struct Running {
    place: Place,
    sr: Box<dyn Sr>,
    ctx: Watch,
    vdi: Uuid,
    first: Uuid,
    disk: Arc<Disk>,
}

/// What a guest writes, and where: each in a block of its own.
const BEFORE: (u64, u8) = (MIB, 2);
const MEANWHILE: (u64, u8) = (2 * MIB, 3);
const SUCCESSOR: (u64, u8) = (3 * MIB, 4);
const AFTER: (u64, u8) = (5 * MIB, 5);
const ALL: [(u64, u8); 4] = [BEFORE, MEANWHILE, SUCCESSOR, AFTER];

impl Running {
    fn new() -> Self {
        let (place, ctx) = (Place::new(), Watch::default());
        let sr = place.create();
        let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
        write(sr.as_ref(), vdi, 0, 1);
        sr.track_changes(&ctx, vdi, true).unwrap();
        let first = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made.uuid;
        let disk = Arc::new(Disk::start(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap()));
        ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
        disk.write(BEFORE.0, BEFORE.1);
        Self { place, sr, ctx, vdi, first, disk }
    }

    fn snapshot(&self) -> Result<Uuid, tapio_types::ApiError> {
        let forked = self.sr.fork(&self.ctx, self.vdi, Uuid::new_v4(), ForkKind::Snapshot)?;
        assert!(forked.made.cbt_enabled && forked.origin.cbt_enabled);
        Ok(forked.made.uuid)
    }

    fn changed(&self, from: Uuid, to: Uuid) -> BTreeSet<u64> {
        blocks_of(&self.sr.changed_blocks(&Watch::default(), from, to).unwrap())
    }

    fn counts(&self) -> [u64; 2] {
        [&self.disk.swaps, &self.disk.pauses].map(|count| count.load(Ordering::Relaxed))
    }

    /// What has the names of the VDI's leaf and log, which a process opens that takes the place of one that died.
    fn by_name(&self) -> OpenSpec {
        let top = self.place.images().join(format!("{}.vhd", self.vdi));
        let log = self.place.images().join(format!("{}.cbtlog", self.vdi));
        assert!(log.exists(), "{:?}", self.place.files());
        let leaf = LayerSpec { kind: ImageKind::Vhd, path: top };
        OpenSpec { chain: ChainSpec { layers: vec![leaf], access: Access::ReadWrite }, log: Some(log) }
    }

    /// A block that differs between two VDIs is in the list from one to the other.
    fn check_list(&self, from: Uuid, to: Uuid, what: &str) {
        let listed = self.changed(from, to);
        for (at, _) in ALL {
            let differs = read(self.sr.as_ref(), from, at) != read(self.sr.as_ref(), to, at);
            let block = at / (64 << 10);
            assert!(!differs || listed.contains(&block), "{what}: {block} is not in {listed:?}");
        }
    }
}

#[test]
fn a_tracked_disk_goes_on_without_a_pause() {
    let it = Running::new();
    let second = it.snapshot().unwrap();
    it.disk.write(MEANWHILE.0, MEANWHILE.1);
    // Another fork leaves the log alone.
    let clone = it.sr.fork(&it.ctx, it.vdi, Uuid::new_v4(), ForkKind::Clone).unwrap().made;
    assert!(!clone.cbt_enabled);
    it.disk.write(SUCCESSOR.0, SUCCESSOR.1);
    let third = it.snapshot().unwrap();
    it.disk.write(AFTER.0, AFTER.1);
    let fourth = it.snapshot().unwrap();
    assert_eq!(it.counts(), [4, 0]);
    assert_eq!(it.changed(it.first, second), BTreeSet::from([BLOCKS]));
    assert_eq!(it.changed(second, third), BTreeSet::from([2 * BLOCKS, 3 * BLOCKS]));
    assert_eq!(it.changed(third, fourth), BTreeSet::from([5 * BLOCKS]));
    assert_eq!(it.changed(it.first, fourth), BTreeSet::from([1, 2, 3, 5].map(|at| at * BLOCKS)));
    assert!(it.ctx.noticed().is_empty());
    assert!(!it.place.files().iter().any(|name| name.starts_with("clone_") || name.ends_with(".new")));
}

#[test]
fn a_tracked_disk_that_refuses_keeps_its_log() {
    for next in [NextSwap::Refused, NextSwap::Unheard] {
        let it = Running::new();
        let before = it.place.files();
        *it.disk.next_swap.lock().unwrap() = Some(next);
        it.snapshot().unwrap_err();
        assert_eq!(it.place.files(), before, "{next:?}");
        it.disk.write(MEANWHILE.0, MEANWHILE.1);
        let second = it.snapshot().unwrap();
        assert_eq!(it.changed(it.first, second), BTreeSet::from([BLOCKS, 2 * BLOCKS]), "{next:?}");
    }
}

#[test]
fn what_a_guest_wrote_while_an_answer_was_lost_is_listed() {
    for next in [NextSwap::AnswerLost, NextSwap::Dies] {
        let it = Running::new();
        *it.disk.next_swap.lock().unwrap() = Some(next);
        let second = it.snapshot().unwrap();
        it.disk.write(MEANWHILE.0, MEANWHILE.1);
        let third = it.snapshot().unwrap();
        it.check_list(it.first, second, "to the snapshot");
        let listed = it.changed(second, third);
        // With the answer also what was written while it was on its way, to the first sector.
        let expected = if next == NextSwap::AnswerLost { vec![0, 2 * BLOCKS] } else { vec![2 * BLOCKS] };
        assert_eq!(listed, BTreeSet::from_iter(expected), "{next:?}");
        // What a process knew that died is lost: everything counts as changed.
        let is_all = it.changed(it.first, second).len() as u64 == 8 * BLOCKS;
        assert_eq!(is_all, next == NextSwap::Dies);
    }
}

/// What ends at a step beside the worker of the SR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    /// Nothing: the disk goes on as it was, and its guest writes.
    Worker,
    /// The disk's process, and another takes its place, and its guest writes.
    Replaced,
    /// The disk's process, for good.
    Disk,
}

#[test]
fn no_list_lacks_a_block_whatever_ends_at_whichever_step() {
    for step in STEPS {
        for ends in [Ends::Worker, Ends::Replaced, Ends::Disk] {
            let mut it = Running::new();
            it.ctx.panic_at = Some(step);
            let other = Uuid::new_v4();
            let forked = catch_unwind(AssertUnwindSafe(|| {
                drop(it.sr.fork(&it.ctx, it.vdi, other, ForkKind::Snapshot));
            }));
            assert!(forked.is_err(), "{step}: no such step");
            it.ctx.panic_at = None;
            let what = format!("{step}, {ends:?}: {:?}", it.place.files());
            if ends != Ends::Disk {
                it.disk.write(MEANWHILE.0, MEANWHILE.1);
            }
            if ends != Ends::Worker {
                it.disk.die();
            }
            if ends == Ends::Replaced {
                it.disk.open(&it.by_name());
                it.disk.write(SUCCESSOR.0, SUCCESSOR.1);
            }
            if ends == Ends::Disk {
                it.ctx.live.lock().unwrap().clear();
            }
            // The next worker.
            it.sr = it.place.driver("file").attach(&it.ctx, it.place.sr, &it.place.config).unwrap();
            let found = it.sr.scan(&it.ctx).unwrap();
            assert!(!it.place.files().iter().any(|name| name.starts_with("clone_")), "{what}");
            match ends {
                Ends::Disk => {
                    it.sr.deactivate(&it.ctx, it.vdi).unwrap();
                    write(it.sr.as_ref(), it.vdi, AFTER.0, AFTER.1);
                }
                Ends::Worker | Ends::Replaced => it.disk.write(AFTER.0, AFTER.1),
            }
            let last = it.snapshot().unwrap();
            it.check_list(it.first, last, &what);
            if let Some(made) = found.iter().find(|info| info.uuid == other && info.cbt_enabled) {
                assert!(made.managed, "{what}");
                it.check_list(it.first, other, &what);
                it.check_list(other, last, &what);
            }
            // Nothing was written to no purpose: with a disk that goes on, all that is listed was written.
            if ends == Ends::Worker {
                let wrote = BTreeSet::from([BLOCKS, 2 * BLOCKS, 5 * BLOCKS]);
                assert_eq!(it.changed(it.first, last), wrote, "{what}");
            }
            let wrote = match ends {
                Ends::Worker => vec![BEFORE, MEANWHILE, AFTER],
                Ends::Replaced => vec![BEFORE, MEANWHILE, SUCCESSOR, AFTER],
                Ends::Disk => vec![BEFORE, AFTER],
            };
            for (at, byte) in wrote {
                assert_eq!(read(it.sr.as_ref(), last, at), byte, "{what}");
            }
        }
    }
}

/// A snapshot is finished for clients when its logs lead to each other. One that goes meanwhile takes no block along.
#[test]
fn a_snapshot_that_goes_before_the_logs_are_linked_takes_no_block_along() {
    for step in ["fork:log-switched", "fork:swapped", "fork:leaf-swapped", "fork:log-linked", "fork:hidden"] {
        let mut it = Running::new();
        let second = it.snapshot().unwrap();
        it.disk.write(MEANWHILE.0, MEANWHILE.1);
        it.ctx.panic_at = Some(step);
        let forked = catch_unwind(AssertUnwindSafe(|| {
            drop(it.sr.fork(&it.ctx, it.vdi, Uuid::new_v4(), ForkKind::Snapshot));
        }));
        assert!(forked.is_err(), "{step}: no such step");
        it.ctx.panic_at = None;
        // The same worker goes on: nothing was attached anew.
        it.disk.write(SUCCESSOR.0, SUCCESSOR.1);
        it.sr.destroy(&it.ctx, second).unwrap();
        it.disk.write(AFTER.0, AFTER.1);
        let last = it.snapshot().unwrap();
        let listed = it.changed(it.first, last);
        let wrote = BTreeSet::from([1, 2, 3, 5].map(|at| at * BLOCKS));
        assert!(listed.is_superset(&wrote), "{step}: {listed:?}");
    }
}
