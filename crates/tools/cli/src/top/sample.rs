//! From two readings of all disks' pages to what they do in between.

use std::collections::HashMap;
use std::time::Instant;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::Serialize;
use tapio_control::ControlError;
use tapio_report::failure::Result;
use tapio_stat::{Histogram, RequestKind, ShmRoot, Snapshot, Stage, disks};

/// All disks over one interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sample {
    /// The interval that the rates are of.
    pub interval_s: f64,
    pub disks: Vec<Row>,
    pub total: Row,
}

/// One disk over an interval, or all together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// Process that serves it; 0 for the total, as the minor number.
    pub pid: u32,
    pub minor: u32,
    /// As `type:/path`.
    pub image: String,
    /// Domains and devices it is published under, as `domid-devid`.
    pub vbds: Vec<String>,
    /// Requests answered.
    pub read_per_s: f64,
    pub write_per_s: f64,
    pub read_bytes_per_s: f64,
    pub write_bytes_per_s: f64,
    /// Of reads, writes and flushes; the 99th percentile is the ceiling of its power of two.
    pub latency_mean_ns: u64,
    pub latency_p99_ns: u64,
    /// Requests taken and not answered, at the end of the interval.
    pub in_flight_requests: u64,
    /// Most requests the disk holds at a time.
    pub queue_depth_requests: u64,
    /// Requests that wait for limits or pages, at the end of the interval.
    pub waiting_requests: u64,
    pub errors_per_s: f64,
    pub queues: Queues,
    #[serde(skip)]
    pub(super) latency: Histogram,
}

/// Requests in each layer, on average over those answered: their time there by the time that passed (Little's law).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Queues {
    pub queued_requests: f64,
    pub image_requests: f64,
    pub kernel_requests: f64,
    pub completing_requests: f64,
}

const TIMED: [RequestKind; 3] = [RequestKind::Read, RequestKind::Write, RequestKind::Flush];

fn add(sum: &mut Histogram, more: &Histogram) {
    for (sum, more) in sum.counts.iter_mut().zip(&more.counts) {
        *sum = sum.saturating_add(*more);
    }
    sum.sum_ns = sum.sum_ns.saturating_add(more.sum_ns);
}

/// What a stage counted, of all kinds.
fn stage(then: &Snapshot, now: &Snapshot, stage: Stage) -> Histogram {
    let mut all = Histogram::default();
    for kind in TIMED {
        if let (Some(then), Some(now)) = (then.histogram(kind, stage), now.histogram(kind, stage)) {
            add(&mut all, &now.since(then));
        }
    }
    all
}

/// What a disk did between two readings that are `seconds` apart.
pub fn row(then: &Snapshot, now: &Snapshot, seconds: f64) -> Row {
    // Nothing can be said of counters that went back, or of no time.
    let rate = |now: u64, then: u64| {
        if seconds > 0.0 { now.saturating_sub(then) as f64 / seconds } else { 0.0 }
    };
    let latency = stage(then, now, Stage::Total);
    let queue = |which| rate(stage(then, now, which).sum_ns, 0) / 1e9;
    let (read, write) = (now.kind(RequestKind::Read), now.kind(RequestKind::Write));
    let (read_then, write_then) = (then.kind(RequestKind::Read), then.kind(RequestKind::Write));
    Row {
        pid: now.pid,
        minor: now.minor,
        image: now.image.clone(),
        vbds: now.vbds.iter().map(|id| format!("{}-{}", id.domid, id.devid)).collect(),
        read_per_s: rate(read.completed, read_then.completed),
        write_per_s: rate(write.completed, write_then.completed),
        read_bytes_per_s: rate(read.bytes, read_then.bytes),
        write_bytes_per_s: rate(write.bytes, write_then.bytes),
        latency_mean_ns: latency.mean_ns(),
        latency_p99_ns: latency.quantile_ns(0.99),
        in_flight_requests: now.in_flight(),
        queue_depth_requests: now.queue_depth,
        waiting_requests: now.delays.waiting,
        errors_per_s: rate(now.errors(), then.errors()),
        queues: Queues {
            queued_requests: queue(Stage::Queued),
            image_requests: queue(Stage::Image),
            kernel_requests: queue(Stage::Kernel),
            completing_requests: queue(Stage::Completing),
        },
        latency,
    }
}

/// The sum; latencies are those of all requests together.
pub fn total(rows: &[Row]) -> Row {
    let mut sum = Row::default();
    for row in rows {
        sum.read_per_s += row.read_per_s;
        sum.write_per_s += row.write_per_s;
        sum.read_bytes_per_s += row.read_bytes_per_s;
        sum.write_bytes_per_s += row.write_bytes_per_s;
        sum.errors_per_s += row.errors_per_s;
        sum.in_flight_requests = sum.in_flight_requests.saturating_add(row.in_flight_requests);
        sum.queue_depth_requests = sum.queue_depth_requests.saturating_add(row.queue_depth_requests);
        sum.waiting_requests = sum.waiting_requests.saturating_add(row.waiting_requests);
        sum.queues.queued_requests += row.queues.queued_requests;
        sum.queues.image_requests += row.queues.image_requests;
        sum.queues.kernel_requests += row.queues.kernel_requests;
        sum.queues.completing_requests += row.queues.completing_requests;
        add(&mut sum.latency, &row.latency);
    }
    sum.latency_mean_ns = sum.latency.mean_ns();
    sum.latency_p99_ns = sum.latency.quantile_ns(0.99);
    sum
}

/// Process, minor number and time of making: a disk made again is another one.
type Key = (u32, u32, u64);

/// Keeps the last reading of every disk.
pub struct Sampler {
    root: ShmRoot,
    last: HashMap<Key, Snapshot>,
    sampled_at: Instant,
}

impl Sampler {
    /// Takes the first reading.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn new(root: ShmRoot) -> Result<Self> {
        let mut sampler = Self { root, last: HashMap::new(), sampled_at: Instant::now() };
        sampler.sample()?;
        Ok(sampler)
    }

    /// Reads all disks. One that is new has no rates yet; one that vanished drops out.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn sample(&mut self) -> Result<Sample> {
        let files = disks(&self.root).map_err(|error| {
            ControlError::io(format_args!("cannot list {}", self.root.pages().display()), &error)
                .next("run as the user of the disk processes, or set TAPIO_SHM_DIR to where they publish")
        })?;
        let (mut rows, mut read) = (Vec::new(), HashMap::new());
        // One interval for all, the one that is shown: pages are read within microseconds where nothing interrupts, and
        // where something does, a rate by the interval is still the number of requests.
        let now_at = Instant::now();
        let interval_s = now_at.duration_since(self.sampled_at).as_secs_f64();
        for now in files.iter().filter_map(|file| file.read().ok()).filter(|disk| is_served(disk.pid)) {
            let key = (now.pid, now.minor, now.created_unix_ns);
            rows.push(match self.last.get(&key) {
                Some(then) => row(then, &now, interval_s),
                None => row(&now, &now, 0.0),
            });
            read.insert(key, now);
        }
        self.last = read;
        self.sampled_at = now_at;
        Ok(Sample { interval_s, total: total(&rows), disks: rows })
    }
}

/// A killed process leaves its page behind until the next one cleans up.
pub fn is_served(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use tapio_stat::{DiskName, DiskStats, Stages};

    use super::*;

    fn disk(root: &ShmRoot, minor: u32, pid: u32) -> DiskStats {
        DiskStats::create(root, &DiskName { pid, minor, page: None }).expect("created")
    }

    #[test]
    fn rates_are_differences_over_time_and_the_total_is_their_sum() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let root = ShmRoot::new(dir.path());
        let stats = disk(&root, 1, std::process::id());
        let read = || disks(&root).expect("listed")[0].read().expect("a page");
        let then = read();
        let stages = Stages { kernel_ns: 500_000_000, image_ns: 1000, ..Stages::default() };
        for _ in 0..4 {
            stats.submitted(RequestKind::Read, 4096);
            stats.completed(RequestKind::Read, 4096, &stages, true);
        }
        stats.submitted(RequestKind::Write, 4096);
        let row = row(&then, &read(), 2.0);
        assert_eq!((row.read_per_s, row.read_bytes_per_s, row.write_per_s), (2.0, 8192.0, 0.0));
        assert_eq!((row.in_flight_requests, row.latency_mean_ns), (1, 500_001_000));
        assert!(row.latency_p99_ns >= 500_001_000);
        assert!((row.queues.kernel_requests - 1.0).abs() < 1e-9);
        let sum = total(&[row.clone(), row.clone()]);
        assert_eq!((sum.read_per_s, sum.in_flight_requests), (4.0, 2));
        assert_eq!(sum.latency_mean_ns, row.latency_mean_ns);
        assert_eq!(super::row(&read(), &then, 2.0).read_per_s, 0.0, "counters that go back");
        assert_eq!(super::row(&then, &read(), 0.0).read_per_s, 0.0, "no time");
    }

    #[test]
    fn disks_come_and_go() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let root = ShmRoot::new(dir.path());
        let first = disk(&root, 1, std::process::id());
        // No process has a number as high as this.
        let dead = disk(&root, 3, 1 << 30);
        let mut sampler = Sampler::new(root.clone()).expect("listed");
        first.submitted(RequestKind::Write, 4096);
        first.completed(RequestKind::Write, 4096, &Stages::default(), true);
        let second = disk(&root, 2, std::process::id());
        second.submitted(RequestKind::Write, 4096);
        second.completed(RequestKind::Write, 4096, &Stages::default(), true);
        let sample = sampler.sample().expect("listed");
        let minors: Vec<_> = sample.disks.iter().map(|row| (row.minor, row.write_per_s > 0.0)).collect();
        assert_eq!(minors, [(1, true), (2, false)], "a new disk has no rates yet");
        drop((first, dead));
        let sample = sampler.sample().expect("listed");
        assert_eq!(sample.disks.iter().map(|row| row.minor).collect::<Vec<_>>(), [2]);
        drop(second);
        assert_eq!(sampler.sample().expect("listed").disks, []);
    }
}
