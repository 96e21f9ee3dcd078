//! From counters to rates.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tapio_control::ControlError;
use tapio_stat::pool::{PoolInfo, pools};
use tapio_stat::{
    DiskFile, FLAG_LOW_MEMORY, FileState, PublishedStats, ShmRoot, VbdDir, VbdFiles, VbdId, disks, vbds,
};
use tapio_types::RingState;

use tapio_report::failure::Result;

/// Bytes of a megabyte here.
const MB: f64 = 1e6;

/// Which disks to look at; an empty list takes all.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub domids: Vec<u32>,
    pub vbdids: Vec<u32>,
}

impl Filter {
    pub fn takes(&self, domid: u32, vbdid: u32) -> bool {
        (self.domids.is_empty() || self.domids.contains(&domid))
            && (self.vbdids.is_empty() || self.vbdids.contains(&vbdid))
    }
}

/// All disks at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// One per disk, by its numbers.
    pub vbds: Vec<Counted>,
}

/// What one disk counted over the interval before the sample, and where it stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    pub domid: u32,
    pub vbdid: u32,
    /// Process that serves it.
    pub pid: u32,
    /// Length of the interval.
    pub elapsed_ns: u64,
    /// Requests taken and answered in it.
    pub read_submitted: u64,
    pub read_completed: u64,
    pub read_sectors: u64,
    pub read_ticks_us: u64,
    pub write_submitted: u64,
    pub write_completed: u64,
    pub write_sectors: u64,
    pub write_ticks_us: u64,
    /// Requests in flight at the moment.
    pub read_in_flight: u64,
    pub write_in_flight: u64,
    /// Slots of the guest's ring, all and used; of a front end without a ring, the disk's queue.
    pub ring_total: u32,
    pub ring_used: u32,
    /// Answers come from the reserve of memory.
    pub low_memory: bool,
    /// Page pool; none where the disk shares none.
    pub pool: Option<Pool>,
}

/// The same as rates, as all formats have them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    pub domid: u32,
    pub vbdid: u32,
    /// Process that serves it.
    pub pid: u32,
    /// Length of the interval, in milliseconds.
    pub elapsed_ms: f64,
    /// Requests taken, a second.
    pub read_per_s: f64,
    pub write_per_s: f64,
    /// Requests answered, a second.
    pub read_done_per_s: f64,
    pub write_done_per_s: f64,
    /// Megabytes a second.
    pub read_mb_per_s: f64,
    pub write_mb_per_s: f64,
    /// Requests in flight, on average.
    pub read_queue: f64,
    pub write_queue: f64,
    /// Requests in flight at the moment.
    pub read_in_flight: u64,
    pub write_in_flight: u64,
    /// Slots of the guest's ring, all and used.
    pub ring_total: u32,
    pub ring_used: u32,
    /// Answers come from the reserve of memory.
    pub low_memory: bool,
    /// Page pool; none where the disk shares none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
}

/// A sample as a line of JSON has it.
#[derive(Debug, Serialize)]
pub struct Rates {
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// A row per disk.
    pub vbds: Vec<Row>,
}

impl Sample {
    /// As rates.
    pub fn rates(&self) -> Rates {
        Rates { time_ms: self.time_ms, vbds: self.vbds.iter().map(Counted::row).collect() }
    }
}

impl Counted {
    /// As rates; all zero over no time.
    pub fn row(&self) -> Row {
        let seconds = self.elapsed_ns as f64 / 1e9;
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        Row {
            domid: self.domid,
            vbdid: self.vbdid,
            pid: self.pid,
            elapsed_ms: self.elapsed_ns as f64 / 1e6,
            read_per_s: per_second(self.read_submitted),
            write_per_s: per_second(self.write_submitted),
            read_done_per_s: per_second(self.read_completed),
            write_done_per_s: per_second(self.write_completed),
            read_mb_per_s: per_second(self.read_sectors) * 512.0 / MB,
            write_mb_per_s: per_second(self.write_sectors) * 512.0 / MB,
            read_queue: per_second(self.read_ticks_us) / 1e6,
            write_queue: per_second(self.write_ticks_us) / 1e6,
            read_in_flight: self.read_in_flight,
            write_in_flight: self.write_in_flight,
            ring_total: self.ring_total,
            ring_used: self.ring_used,
            low_memory: self.low_memory,
            pool: self.pool.clone(),
        }
    }
}

/// The page pool of an SR.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pool {
    /// UUID of the SR.
    pub name: String,
    /// Pages.
    pub total: u32,
    /// Pages in use.
    pub used: u32,
}

/// What a disk counted between two readings.
pub fn counted(
    id: VbdId,
    pid: u32,
    (then, now): (&PublishedStats, &PublishedStats),
    elapsed: Duration,
) -> Counted {
    // Counters that go back belong to another disk of the same numbers: nothing can be said then.
    Counted {
        domid: id.domid,
        vbdid: id.devid,
        pid,
        elapsed_ns: u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX),
        read_submitted: now.read_submitted.saturating_sub(then.read_submitted),
        read_completed: now.read_completed.saturating_sub(then.read_completed),
        read_sectors: now.read_sectors.saturating_sub(then.read_sectors),
        read_ticks_us: now.read_ticks_us.saturating_sub(then.read_ticks_us),
        write_submitted: now.write_submitted.saturating_sub(then.write_submitted),
        write_completed: now.write_completed.saturating_sub(then.write_completed),
        write_sectors: now.write_sectors.saturating_sub(then.write_sectors),
        write_ticks_us: now.write_ticks_us.saturating_sub(then.write_ticks_us),
        read_in_flight: now.read_submitted.saturating_sub(now.read_completed),
        write_in_flight: now.write_submitted.saturating_sub(now.write_completed),
        low_memory: now.flags & FLAG_LOW_MEMORY != 0,
        ..Counted::default()
    }
}

struct Tracked {
    files: VbdFiles,
    /// Our page, and the minor number of the disk, where it is one of ours.
    page: Option<(DiskFile, u32)>,
    last: PublishedStats,
    read_at: Instant,
}

impl Tracked {
    /// Where the guest's ring stands: now, in our page. A foreign tapdisk has it in a text that is some seconds old.
    fn ring(&self) -> Option<RingState> {
        match &self.page {
            Some((page, _)) => page.read().ok()?.ring(self.files.vbd.id),
            None => self.files.ring(),
        }
    }
}

/// Our page of a disk, and its minor number.
fn page_of(root: &ShmRoot, vbd: &VbdDir) -> Option<(DiskFile, u32)> {
    disks(root).ok()?.into_iter().find_map(|file| {
        let page = file.read().ok()?;
        (page.pid == vbd.pid && page.vbds.contains(&vbd.id)).then_some((file, page.minor))
    })
}

fn pool_of(pools: &[PoolInfo], pid: u32, minor: u32) -> Option<Pool> {
    let shares = |pool: &&PoolInfo| pool.disks.iter().any(|disk| disk.pid == pid && disk.minor == minor);
    pools.iter().find(shares).map(|pool| Pool { name: pool.name.clone(), total: pool.pages, used: pool.used })
}

/// Keeps the last reading of every disk.
pub struct Sampler {
    root: ShmRoot,
    filter: Filter,
    tracked: Vec<Tracked>,
}

impl Sampler {
    pub fn new(root: ShmRoot, filter: Filter) -> Self {
        Self { root, filter, tracked: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.tracked.is_empty()
    }

    /// Looks for disks that are not known yet. Those that vanish before they can be read are left out.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn scan(&mut self) -> Result<()> {
        let found = vbds(&self.root).map_err(|error| {
            ControlError::io(format_args!("cannot list {}", self.root.path().display()), &error)
                .next("set TAPIO_SHM_DIR to where disks publish their statistics")
        })?;
        self.tracked.retain(|tracked| tracked.files.state() == FileState::Linked);
        for vbd in found {
            let known = self.tracked.iter().any(|tracked| tracked.files.vbd == vbd);
            if known || !self.filter.takes(vbd.id.domid, vbd.id.devid) {
                continue;
            }
            let Ok(files) = VbdFiles::open(&self.root, &vbd) else { continue };
            let Ok(last) = files.counters() else { continue };
            let page = page_of(&self.root, &vbd);
            self.tracked.push(Tracked { files, page, last, read_at: Instant::now() });
        }
        self.tracked.sort_by_key(|tracked| tracked.files.vbd.id);
        Ok(())
    }

    /// Reads all disks; those whose file was removed drop out.
    pub fn sample(&mut self) -> Sample {
        let time_ms =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        // Without pools this lists a directory that is not there.
        let pools = pools(&self.root).unwrap_or_default();
        let mut vbds = Vec::with_capacity(self.tracked.len());
        self.tracked.retain_mut(|tracked| {
            if tracked.files.state() == FileState::Unlinked {
                return false;
            }
            let Ok(now) = tracked.files.counters() else { return false };
            let read_at = Instant::now();
            let elapsed = read_at.duration_since(tracked.read_at);
            let VbdDir { id, pid } = tracked.files.vbd;
            let mut row = counted(id, pid, (&tracked.last, &now), elapsed);
            if let Some(ring) = tracked.ring() {
                row.ring_total = ring.size;
                row.ring_used = ring.used().min(ring.size);
            }
            row.pool = tracked.page.as_ref().and_then(|(_, minor)| pool_of(&pools, pid, *minor));
            (tracked.last, tracked.read_at) = (now, read_at);
            vbds.push(row);
            true
        });
        Sample { time_ms, vbds }
    }
}

#[cfg(test)]
mod tests {
    use tapio_stat::{DiskName, DiskStats, RequestKind, Stages, VbdPages};
    use tapio_types::RingState;

    use super::*;

    #[test]
    fn rates_are_differences_over_time() {
        let then = PublishedStats { read_submitted: 100, read_completed: 90, ..PublishedStats::default() };
        let now = PublishedStats {
            read_submitted: 1100,
            read_completed: 1098,
            read_sectors: 2_000_000 / 512,
            read_ticks_us: 1_420_000,
            write_submitted: 4,
            write_completed: 1,
            flags: 1,
            ..PublishedStats::default()
        };
        let id = VbdId { domid: 5, devid: 51728 };
        let row = counted(id, 9, (&then, &now), Duration::from_secs(2)).row();
        assert_eq!((row.read_per_s, row.read_done_per_s, row.write_per_s), (500.0, 504.0, 2.0));
        assert!((row.read_mb_per_s - 1.0).abs() < 0.001);
        assert!((row.read_queue - 0.71).abs() < 1e-9);
        assert_eq!((row.read_in_flight, row.write_in_flight, row.low_memory), (2, 3, true));
    }

    #[test]
    fn counters_that_go_back_and_no_time_at_all_give_zero() {
        let then = PublishedStats { read_submitted: 100, ..PublishedStats::default() };
        let id = VbdId { domid: 0, devid: 0 };
        let none = PublishedStats::default();
        assert_eq!(counted(id, 1, (&then, &none), Duration::from_secs(1)).row().read_per_s, 0.0);
        assert_eq!(counted(id, 1, (&none, &then), Duration::ZERO).row().read_per_s, 0.0);
    }

    fn disk(root: &ShmRoot, minor: u32, id: VbdId) -> DiskStats {
        let name = DiskName { pid: 4000 + minor, minor, page: None };
        let mut stats = DiskStats::create(root, &name).expect("created");
        let pages = VbdPages::create(root, 4000 + minor, minor, id, false).expect("pages");
        stats.add_vbd(pages).expect("room");
        stats
    }

    #[test]
    fn disks_come_and_go() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let root = ShmRoot::new(dir.path());
        let mut sampler = Sampler::new(root.clone(), Filter::default());
        sampler.scan().expect("listed");
        assert!(sampler.is_empty());

        let mut first = disk(&root, 1, VbdId { domid: 0, devid: 1 });
        sampler.scan().expect("listed");
        first.submitted(RequestKind::Write, 4096);
        first.ring(0, &RingState { size: 128, req_prod: 9, rsp_prod: 4, ..RingState::default() }, 0);
        let second = disk(&root, 2, VbdId { domid: 3, devid: 51712 });
        let sample = sampler.sample();
        assert_eq!(sample.vbds.len(), 1, "not looked for yet");
        let row = &sample.vbds[0];
        assert_eq!(row.write_submitted, 1);
        assert_eq!((row.write_in_flight, row.ring_total, row.ring_used, row.pid), (1, 128, 5, 4001));

        // The page has it at once, the text after seconds.
        first.ring(0, &RingState { size: 128, req_prod: 99, rsp_prod: 4, ..RingState::default() }, 1);
        let row = &sampler.sample().vbds[0];
        assert_eq!((row.ring_total, row.ring_used), (128, 95));

        sampler.scan().expect("listed");
        first.completed(RequestKind::Write, 4096, &Stages::default(), true);
        assert_eq!(sampler.sample().vbds.iter().map(|row| row.domid).collect::<Vec<_>>(), [0, 3]);
        drop(first);
        assert_eq!(sampler.sample().vbds.iter().map(|row| row.domid).collect::<Vec<_>>(), [3]);
        drop(second);
        assert_eq!(sampler.sample().vbds, []);
        assert!(sampler.is_empty());
    }

    #[test]
    fn a_disk_plugged_again_under_its_numbers_is_a_new_one() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let root = ShmRoot::new(dir.path());
        let id = VbdId { domid: 0, devid: 1 };
        let mut sampler = Sampler::new(root.clone(), Filter::default());
        let old = disk(&root, 1, id);
        sampler.scan().expect("listed");
        drop(old);
        let new = disk(&root, 1, id);
        new.submitted(RequestKind::Read, 4096);
        sampler.scan().expect("listed");
        new.submitted(RequestKind::Read, 4096);
        let sample = sampler.sample();
        assert_eq!(sample.vbds.len(), 1);
        assert_eq!(sample.vbds[0].read_in_flight, 2);
    }

    #[test]
    fn a_disk_that_shares_a_pool_says_so() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let root = ShmRoot::new(dir.path());
        let name = DiskName { pid: std::process::id(), minor: 4, page: None };
        let mut stats = DiskStats::create(&root, &name).expect("created");
        let id = VbdId { domid: 2, devid: 51712 };
        stats
            .add_vbd(VbdPages::create(&root, std::process::id(), 4, id, false).expect("pages"))
            .expect("room");
        let other = disk(&root, 1, VbdId { domid: 0, devid: 1 });
        let sr = "sr".parse().expect("a name");
        let mut member = tapio_stat::pool::join(&root, &sr, None, 4).expect("joined");
        assert_eq!(member.take(374, 0), Some(374));
        let mut sampler = Sampler::new(root, Filter::default());
        sampler.scan().expect("listed");
        let sample = sampler.sample();
        assert_eq!(sample.vbds[0].pool, None);
        assert_eq!(sample.vbds[1].pool, Some(Pool { name: "sr".into(), total: 704, used: 374 }));
        drop((member, other));
    }

    #[test]
    fn filters_choose_domains_and_devices() {
        let filter = Filter { domids: vec![5, 6], vbdids: vec![51712] };
        assert!(filter.takes(5, 51712) && filter.takes(6, 51712));
        assert!(!filter.takes(5, 51728) && !filter.takes(7, 51712));
        assert!(Filter::default().takes(0, 0));
    }
}
