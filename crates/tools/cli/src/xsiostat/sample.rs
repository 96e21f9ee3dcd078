//! From counters to rates.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tapio_control::ControlError;
use tapio_stat::pool::{PoolInfo, pools};
use tapio_stat::{FLAG_LOW_MEMORY, FileState, PublishedStats, ShmRoot, VbdDir, VbdFiles, VbdId, disks, vbds};

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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// A row per disk, by its numbers.
    pub vbds: Vec<Row>,
}

/// One disk over the interval before the sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub domid: u32,
    pub vbdid: u32,
    /// Process that serves it.
    pub pid: u32,
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
    /// Slots of the guest's ring, all and used; 0 where there is no ring.
    pub ring_total: u32,
    pub ring_used: u32,
    /// Answers come from the reserve of memory.
    pub low_memory: bool,
    /// Page pool; none where the disk shares none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
}

/// The page pool of an SR.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// UUID of the SR.
    pub name: String,
    /// Pages.
    pub total: u32,
    /// Pages in use.
    pub used: u32,
}

/// Computes a row from two readings that are `seconds` apart.
pub fn row(id: VbdId, pid: u32, then: &PublishedStats, now: &PublishedStats, seconds: f64) -> Row {
    // Counters that go back belong to another disk of the same numbers: nothing can be said then.
    let per_second = |now: u64, then: u64| {
        if seconds > 0.0 { now.saturating_sub(then) as f64 / seconds } else { 0.0 }
    };
    Row {
        domid: id.domid,
        vbdid: id.devid,
        pid,
        read_per_s: per_second(now.read_submitted, then.read_submitted),
        write_per_s: per_second(now.write_submitted, then.write_submitted),
        read_done_per_s: per_second(now.read_completed, then.read_completed),
        write_done_per_s: per_second(now.write_completed, then.write_completed),
        read_mb_per_s: per_second(now.read_sectors, then.read_sectors) * 512.0 / MB,
        write_mb_per_s: per_second(now.write_sectors, then.write_sectors) * 512.0 / MB,
        read_queue: per_second(now.read_ticks_us, then.read_ticks_us) / 1e6,
        write_queue: per_second(now.write_ticks_us, then.write_ticks_us) / 1e6,
        read_in_flight: now.read_submitted.saturating_sub(now.read_completed),
        write_in_flight: now.write_submitted.saturating_sub(now.write_completed),
        low_memory: now.flags & FLAG_LOW_MEMORY != 0,
        ..Row::default()
    }
}

struct Tracked {
    files: VbdFiles,
    /// Minor number of the disk, where it is one of ours.
    minor: Option<u32>,
    last: PublishedStats,
    read_at: Instant,
}

/// The minor number behind the numbers of a disk: our own pages say both.
fn minor_of(root: &ShmRoot, vbd: &VbdDir) -> Option<u32> {
    let pages = disks(root).ok()?;
    let mut snapshots = pages.iter().filter_map(|page| page.read().ok());
    snapshots.find(|page| page.pid == vbd.pid && page.vbds.contains(&vbd.id)).map(|page| page.minor)
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
            let minor = minor_of(&self.root, &vbd);
            self.tracked.push(Tracked { files, minor, last, read_at: Instant::now() });
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
            let seconds = read_at.duration_since(tracked.read_at).as_secs_f64();
            let mut row = row(tracked.files.vbd.id, tracked.files.vbd.pid, &tracked.last, &now, seconds);
            if let Some(ring) = tracked.files.ring() {
                row.ring_total = ring.size;
                row.ring_used = ring.used().min(ring.size);
            }
            row.pool = tracked.minor.and_then(|minor| pool_of(&pools, tracked.files.vbd.pid, minor));
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
        let row = row(VbdId { domid: 5, devid: 51728 }, 9, &then, &now, 2.0);
        assert_eq!((row.read_per_s, row.read_done_per_s, row.write_per_s), (500.0, 504.0, 2.0));
        assert!((row.read_mb_per_s - 1.0).abs() < 0.001);
        assert!((row.read_queue - 0.71).abs() < 1e-9);
        assert_eq!((row.read_in_flight, row.write_in_flight, row.low_memory), (2, 3, true));
    }

    #[test]
    fn counters_that_go_back_and_no_time_at_all_give_zero() {
        let then = PublishedStats { read_submitted: 100, ..PublishedStats::default() };
        let id = VbdId { domid: 0, devid: 0 };
        assert_eq!(row(id, 1, &then, &PublishedStats::default(), 1.0).read_per_s, 0.0);
        assert_eq!(row(id, 1, &PublishedStats::default(), &then, 0.0).read_per_s, 0.0);
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
        assert!(row.write_per_s > 0.0);
        assert_eq!((row.write_in_flight, row.ring_total, row.ring_used, row.pid), (1, 128, 5, 4001));

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
