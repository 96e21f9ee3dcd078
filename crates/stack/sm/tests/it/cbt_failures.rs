//! Logs of changed blocks that cannot be written: what they are for goes on, and no list lacks a block.

use std::sync::Arc;

use tapio_format::cbt::Log;
use tapio_sm::{ForkKind, Notice, Sr};
use tapio_types::Access;
use uuid::Uuid;

use crate::support::{Busy, Disk, Place, Watch, blocks_of, make, read, write};

const MIB: u64 = 1 << 20;
/// Blocks of 64 KiB in a MiB.
const BLOCKS: u64 = 16;

/// A VDI that is tracked, with a snapshot, and 1 written at 1 MiB since.
struct Tracked {
    place: Place,
    sr: Box<dyn Sr>,
    ctx: Watch,
    vdi: Uuid,
    first: Uuid,
}

impl Tracked {
    fn new() -> Self {
        let (place, ctx) = (Place::new(), Watch::default());
        let sr = place.create();
        let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
        sr.track_changes(&ctx, vdi, true).unwrap();
        let first = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made.uuid;
        write(sr.as_ref(), vdi, MIB, 1);
        assert_eq!(ctx.noticed(), []);
        Self { place, sr, ctx, vdi, first }
    }

    fn log(&self, vdi: Uuid) -> std::path::PathBuf {
        self.place.images().join(format!("{vdi}.cbtlog"))
    }

    /// The log of the VDI cannot be opened for writing any more.
    fn block(&self) -> Busy {
        Busy::put(&self.log(self.vdi))
    }

    fn snapshot(&self) -> tapio_sm::VdiInfo {
        self.sr.fork(&self.ctx, self.vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made
    }

    fn is_tracked(&self) -> bool {
        self.sr.vdi(&self.ctx, self.vdi).unwrap().cbt_enabled
    }

    fn changed(&self, to: Uuid) -> Result<Vec<u64>, String> {
        let listed = self.sr.changed_blocks(&self.ctx, self.first, to);
        listed.map(|text| blocks_of(&text).into_iter().collect()).map_err(|error| error.code.to_string())
    }

    /// It is tracked no longer; once it is again, no list begins before that.
    fn check_ended(self, notice: Notice) {
        assert!(!self.is_tracked());
        assert!(!self.log(self.vdi).exists());
        let told = self.ctx.noticed();
        assert!(told.contains(&(self.vdi, notice)), "{told:?}");
        self.sr.track_changes(&self.ctx, self.vdi, true).unwrap();
        assert_eq!(self.changed(self.vdi), Err("SR_BACKEND_FAILURE_460".to_owned()));
        let second = self.snapshot();
        assert_eq!(self.changed(second.uuid), Err("SR_BACKEND_FAILURE_460".to_owned()));
        write(self.sr.as_ref(), self.vdi, 2 * MIB, 2);
        let third = self.snapshot().uuid;
        let listed = self.sr.changed_blocks(&self.ctx, second.uuid, third).unwrap();
        assert_eq!(blocks_of(&listed).into_iter().collect::<Vec<_>>(), [2 * BLOCKS]);
        assert_eq!(read(self.sr.as_ref(), third, MIB), 1);
        assert_eq!(self.ctx.noticed(), []);
    }
}

#[test]
fn a_snapshot_whose_new_log_cannot_be_made_is_made() {
    let it = Tracked::new();
    let busy = Busy::put(&it.place.images().join(format!("{}.cbtlog.new", it.vdi)));
    let second = it.snapshot();
    assert!(!second.cbt_enabled && it.is_tracked());
    assert_eq!(it.ctx.noticed(), [(it.vdi, Notice::SnapshotUntracked)]);
    drop(busy);
    assert_eq!(read(it.sr.as_ref(), second.uuid, MIB), 1);
    write(it.sr.as_ref(), it.vdi, 3 * MIB, 3);
    // The next one is tracked, and has all since the last that was.
    let third = it.snapshot();
    assert!(third.cbt_enabled);
    assert_eq!(it.changed(third.uuid), Ok(vec![BLOCKS, 3 * BLOCKS]));
    assert_eq!(it.ctx.noticed(), []);
}

#[test]
fn a_snapshot_whose_old_log_cannot_be_written_is_made() {
    for is_live in [false, true] {
        let it = Tracked::new();
        let mut disk = None;
        if is_live {
            let with = it.sr.activate(&it.ctx, it.vdi, Access::ReadWrite).unwrap();
            let running = Arc::new(Disk { pauses_only: true, ..Disk::start(&with) });
            it.ctx.live.lock().unwrap().insert(it.vdi, Arc::clone(&running));
            disk = Some(running);
        }
        let busy = it.block();
        let second = it.snapshot();
        assert!(!second.cbt_enabled);
        if let Some(disk) = disk {
            assert!(disk.log.lock().unwrap().is_none() && disk.open.lock().unwrap().is_some(), "it goes on");
            disk.close();
            it.ctx.live.lock().unwrap().clear();
            it.sr.deactivate(&it.ctx, it.vdi).unwrap();
        }
        drop(busy);
        assert_eq!(read(it.sr.as_ref(), second.uuid, MIB), 1);
        it.check_ended(Notice::SnapshotUntracked);
    }
}

/// A disk that goes on has a new log in any case: what cannot be used is the one that the snapshot was to get.
#[test]
fn a_disk_that_swaps_its_log_is_tracked_further_when_the_old_one_cannot_be_written() {
    let it = Tracked::new();
    let disk = Arc::new(Disk::start(&it.sr.activate(&it.ctx, it.vdi, Access::ReadWrite).unwrap()));
    it.ctx.live.lock().unwrap().insert(it.vdi, Arc::clone(&disk));
    let busy = it.block();
    let second = it.snapshot();
    assert!(!second.cbt_enabled && it.is_tracked() && disk.log.lock().unwrap().is_some());
    assert_eq!(it.ctx.noticed(), [(it.vdi, Notice::SnapshotUntracked)]);
    drop(busy);
    disk.write(3 * MIB, 3);
    let third = it.snapshot();
    disk.write(5 * MIB, 5);
    let fourth = it.snapshot();
    assert!(third.cbt_enabled && fourth.cbt_enabled);
    // No list goes past the log that is lost; from there on all is known.
    for to in [second.uuid, third.uuid, fourth.uuid] {
        assert_eq!(it.changed(to), Err("SR_BACKEND_FAILURE_460".to_owned()));
    }
    let listed = it.sr.changed_blocks(&it.ctx, third.uuid, fourth.uuid).unwrap();
    assert_eq!(blocks_of(&listed).into_iter().collect::<Vec<_>>(), [5 * BLOCKS]);
    // One that leads to a log which does not lead back takes nothing along when it goes.
    it.sr.destroy(&it.ctx, it.first).unwrap();
    let listed = it.sr.changed_blocks(&it.ctx, third.uuid, fourth.uuid).unwrap();
    assert_eq!(blocks_of(&listed).into_iter().collect::<Vec<_>>(), [5 * BLOCKS]);
    assert_eq!(it.ctx.noticed(), []);
}

#[test]
fn a_disk_whose_log_cannot_be_written_opens_without() {
    let it = Tracked::new();
    let _busy = it.block();
    assert!(it.sr.activate(&it.ctx, it.vdi, Access::ReadWrite).unwrap().log.is_none());
    it.sr.deactivate(&it.ctx, it.vdi).unwrap();
    it.check_ended(Notice::LogGone);
}

#[test]
fn a_disk_whose_log_cannot_be_written_grows() {
    for is_live in [false, true] {
        let it = Tracked::new();
        let mut disk = None;
        if is_live {
            let running = Arc::new(Disk::start(&it.sr.activate(&it.ctx, it.vdi, Access::ReadWrite).unwrap()));
            it.ctx.live.lock().unwrap().insert(it.vdi, Arc::clone(&running));
            disk = Some(running);
        }
        let busy = it.block();
        let grown = it.sr.resize(&it.ctx, it.vdi, 16 * MIB).unwrap();
        assert_eq!((grown.virtual_size, grown.cbt_enabled), (16 * MIB, false));
        if let Some(disk) = disk {
            disk.write(15 * MIB, 7);
            disk.close();
            it.ctx.live.lock().unwrap().clear();
            it.sr.deactivate(&it.ctx, it.vdi).unwrap();
            assert_eq!(read(it.sr.as_ref(), it.vdi, 15 * MIB), 7);
        }
        drop(busy);
        it.check_ended(Notice::ResizeUntracked);
    }
}

#[test]
fn tracking_ends_and_a_vdi_goes_although_its_log_cannot_be_written() {
    let it = Tracked::new();
    let _busy = it.block();
    assert!(!it.sr.track_changes(&it.ctx, it.vdi, false).unwrap().cbt_enabled);
    it.sr.track_changes(&it.ctx, it.vdi, true).unwrap();
    assert_eq!(it.changed(it.vdi), Err("SR_BACKEND_FAILURE_460".to_owned()));
    let it = Tracked::new();
    let _busy = it.block();
    it.sr.destroy(&it.ctx, it.vdi).unwrap();
    assert!(it.sr.vdi(&it.ctx, it.vdi).is_err() && !it.log(it.vdi).exists());
    let header = *Log::open_header(&it.log(it.first), Access::ReadOnly).unwrap().header();
    assert!(header.child.is_nil());
}

#[test]
fn an_incomplete_log_is_told_of_once_where_a_list_has_it() {
    let it = Tracked::new();
    let die = || {
        let disk = Disk::start(&it.sr.activate(&it.ctx, it.vdi, Access::ReadWrite).unwrap());
        disk.die();
        it.sr.deactivate(&it.ctx, it.vdi).unwrap();
    };
    die();
    let second = it.snapshot().uuid;
    assert_eq!(it.ctx.noticed(), [(it.vdi, Notice::LogIncomplete)]);
    assert_eq!(it.changed(second).unwrap().len() as u64, 8 * BLOCKS);
    // And of one that the next process finds.
    die();
    it.sr.activate(&it.ctx, it.vdi, Access::ReadWrite).unwrap();
    it.sr.deactivate(&it.ctx, it.vdi).unwrap();
    assert_eq!(it.ctx.noticed(), [(it.vdi, Notice::LogIncomplete)]);
    // What came before the first snapshot is in no list, and nobody is told of it.
    it.sr.track_changes(&it.ctx, it.vdi, false).unwrap();
    it.sr.track_changes(&it.ctx, it.vdi, true).unwrap();
    die();
    it.snapshot();
    assert_eq!(it.ctx.noticed(), []);
}

/// A log in the place of one that was lost has nothing of what came before, whatever leads to it.
#[test]
fn a_log_that_was_begun_anew_ends_a_list() {
    let it = Tracked::new();
    let mut log = Log::create(&it.log(it.vdi), 8 * MIB).unwrap();
    let header = tapio_format::cbt::LogHeader { consistent: 1, ..*log.header() };
    log.set_header(header).unwrap();
    drop(log);
    assert_eq!(it.changed(it.vdi), Err("SR_BACKEND_FAILURE_460".to_owned()));
}
