//! Forks of running disks that swap their leaf, and whatever can go wrong with that.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tapio_format::vhd::offline::{CheckOptions, Image, OpenOptions, check_path};
use tapio_sm::{Fork, ForkKind, Sr};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use crate::support::{Disk, MEANWHILE, NextSwap, Place, Watch, make, read, whole};

const MIB: u64 = 1 << 20;

/// An SR with a VDI that a running disk writes to.
struct Running {
    place: Place,
    sr: Box<dyn Sr>,
    ctx: Watch,
    vdi: Uuid,
    disk: Arc<Disk>,
}

impl Running {
    fn new(disk: Disk) -> Self {
        let (place, ctx) = (Place::new(), Watch::default());
        let sr = place.create();
        let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
        disk.open(&whole(&sr.activate(&ctx, vdi, Access::ReadWrite).unwrap().chain));
        let disk = Arc::new(disk);
        ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
        disk.write(6 * MIB, 1);
        Self { place, sr, ctx, vdi, disk }
    }

    fn snapshot(&self) -> Result<Fork, ApiError> {
        self.sr.fork(&self.ctx, self.vdi, Uuid::new_v4(), ForkKind::Snapshot)
    }

    fn images(&self) -> usize {
        self.disk.open.lock().unwrap().as_ref().expect("it runs").0.layers.len()
    }

    fn counts(&self) -> [u64; 2] {
        [&self.disk.swaps, &self.disk.pauses].map(|count| count.load(Ordering::Relaxed))
    }

    fn has_journal(&self) -> bool {
        self.place.files().contains(&format!("clone_{}", self.vdi))
    }

    /// Ends the disk; answers what the VDI holds at these places, in MiB.
    fn end<const N: usize>(&self, at: [u64; N]) -> [u8; N] {
        self.disk.close();
        self.ctx.live.lock().unwrap().clear();
        self.sr.deactivate(&self.ctx, self.vdi).unwrap();
        for name in self.place.files() {
            for report in check_path(&self.place.images().join(&name), &CheckOptions::default()).unwrap() {
                assert!(report.is_valid(), "{name}: {report:?}");
                assert_eq!(report.findings.len(), 0, "{name}: {report:?}");
            }
        }
        at.map(|at| read(self.sr.as_ref(), self.vdi, at * MIB))
    }
}

#[test]
fn a_running_disk_goes_on_without_a_pause() {
    let it = Running::new(Disk::default());
    let first = it.snapshot().unwrap();
    it.disk.write(0, 2);
    let second = it.snapshot().unwrap();
    it.disk.write(0, 3);
    assert_eq!((it.counts(), it.images(), it.has_journal()), ([2, 0], 3, false));
    for fork in [&first, &second] {
        let base = fork.base.as_ref().expect("a base copy");
        assert!(!base.managed && fork.origin.managed && fork.made.managed);
        assert_eq!(fork.made.parent, Some(base.uuid));
        let image = it.place.images().join(format!("{}.vhd", base.uuid));
        assert_eq!(Image::open(&image, OpenOptions::READ).unwrap().footer().hidden, 1);
    }
    let held = |fork: &Fork| [0, 6].map(|at| read(it.sr.as_ref(), fork.made.uuid, at * MIB));
    assert_eq!((held(&first), held(&second)), ([0, 1], [2, 1]));
    assert_eq!(it.end([0, 6]), [3, 1]);
}

#[test]
fn a_disk_that_refuses_goes_on_as_if_nothing_was_asked() {
    let it = Running::new(Disk::default());
    let before = it.place.files();
    *it.disk.next_swap.lock().unwrap() = Some(NextSwap::Refused);
    let error = it.snapshot().unwrap_err();
    assert_eq!(error.params[0], "no swap");
    assert_eq!((it.counts(), it.images(), it.place.files()), ([0, 0], 1, before));
    it.disk.write(0, 2);
    it.snapshot().unwrap();
    assert_eq!(it.end([0, 6]), [2, 1]);
}

#[test]
fn a_disk_that_does_not_answer_is_closed_and_goes_on_as_before() {
    let it = Running::new(Disk::default());
    let before = it.place.files();
    *it.disk.next_swap.lock().unwrap() = Some(NextSwap::Unheard);
    it.snapshot().unwrap_err();
    assert_eq!((it.counts(), it.images(), it.place.files()), ([0, 1], 1, before));
    it.disk.write(0, 2);
    it.snapshot().unwrap();
    assert_eq!(it.end([0, 6]), [2, 1]);
}

#[test]
fn a_disk_that_answers_nothing_at_all_is_put_in_order_later() {
    let it = Running::new(Disk { refuses_pause: true, ..Disk::default() });
    *it.disk.next_swap.lock().unwrap() = Some(NextSwap::Unheard);
    it.snapshot().unwrap_err();
    // It still writes to what the new leaf lies on, and nothing of that is touched.
    assert!(it.has_journal());
    assert_eq!(it.images(), 1);
    it.disk.write(0, 2);
    it.disk.die();
    it.ctx.live.lock().unwrap().clear();
    let found = it.sr.scan(&it.ctx).unwrap();
    assert!(!it.has_journal());
    assert_eq!(found.iter().filter(|info| info.managed).count(), 2, "{found:?}");
    assert_eq!(it.end([0, 6]), [2, 1]);
}

/// A guest that goes on with the new leaf has written there before anybody knows that it does.
#[test]
fn a_swap_whose_answer_is_lost_is_not_undone() {
    for loses_daemon in [false, true] {
        let it = Running::new(Disk { loses_daemon, ..Disk::default() });
        *it.disk.next_swap.lock().unwrap() = Some(NextSwap::AnswerLost);
        let done = it.snapshot();
        assert_eq!((done.is_ok(), it.has_journal()), (!loses_daemon, loses_daemon), "{done:?}");
        it.disk.write(MIB, 2);
        if loses_daemon {
            // The next daemon.
            it.disk.daemon_is_gone.store(false, Ordering::Relaxed);
            it.sr.scan(&it.ctx).unwrap();
        }
        assert_eq!((it.has_journal(), it.images()), (false, 2));
        it.disk.write(2 * MIB, 3);
        assert_eq!(it.end([0, 1, 2, 6]), [MEANWHILE, 2, 3, 1], "{loses_daemon}");
    }
}

#[test]
fn a_process_that_dies_at_the_swap_is_replaced_on_the_new_leaf() {
    let it = Running::new(Disk::default());
    *it.disk.next_swap.lock().unwrap() = Some(NextSwap::Dies);
    let made = it.snapshot().unwrap().made;
    assert_eq!((it.images(), it.has_journal()), (2, false));
    it.disk.write(0, 2);
    assert_eq!([0, 6].map(|at| read(it.sr.as_ref(), made.uuid, at * MIB)), [0, 1]);
    assert_eq!(it.end([0, 6]), [2, 1]);
}
