//! Counters and latencies from shared memory.

use std::fmt::Write;

use clap::Args;
use serde::Serialize;
use tapio_control::{BlkifReport, ControlError, Errno};
use tapio_stat::{BUCKETS, Histogram, RequestKind, STAGES, ShmRoot, Snapshot, Stage, bucket_floor, disks};

use super::rings;
use tapio_report::failure::{Result, print, print_json};

#[derive(Debug, Args)]
pub struct StatsArguments {
    /// Only disks of this process
    #[arg(short, long)]
    pid: Option<u32>,
    /// Only the disk of this minor number
    #[arg(short, long)]
    minor: Option<u32>,
    /// Also draw how the times are spread
    #[arg(long)]
    histogram: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &StatsArguments) -> Result<()> {
    let root = ShmRoot::from_env();
    let files = disks(&root).map_err(|error| {
        ControlError::io(format_args!("cannot list {}", root.pages().display()), &error)
            .next("run as the user of the disk processes")
    })?;
    let mut snapshots: Vec<Snapshot> = files.iter().filter_map(|file| file.read().ok()).collect();
    snapshots.retain(|disk| arguments.pid.is_none_or(|pid| disk.pid == pid));
    snapshots.retain(|disk| arguments.minor.is_none_or(|minor| disk.minor == minor));
    let rings: Vec<Vec<BlkifReport>> = snapshots.iter().map(rings::ask).collect();
    if arguments.json {
        let disks = snapshots.iter().zip(&rings).map(|(snapshot, blkif)| WithRings { snapshot, blkif });
        return print_json(&disks.collect::<Vec<_>>());
    }
    if snapshots.is_empty() && (arguments.pid.is_some() || arguments.minor.is_some()) {
        return Err(ControlError::new(Errno::ENODEV, "no such disk publishes statistics")
            .next("'tapio disk list' shows the disks there are"));
    }
    let text = |(disk, rings): (&Snapshot, &Vec<BlkifReport>)| {
        table(disk, arguments.histogram) + &rings.iter().map(rings::text).collect::<String>()
    };
    print(&snapshots.iter().zip(&rings).map(text).collect::<Vec<_>>().join("\n"))
}

/// A disk with the devices of Xen guests behind it.
#[derive(Serialize)]
struct WithRings<'a> {
    #[serde(flatten)]
    snapshot: &'a Snapshot,
    #[serde(skip_serializing_if = "<[BlkifReport]>::is_empty")]
    blkif: &'a [BlkifReport],
}

/// A time with three digits or so, in the unit that suits it.
pub(crate) fn time(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

fn table(disk: &Snapshot, histogram: bool) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(out, "pid {} minor {}: {}", disk.pid, disk.minor, disk.image);
    let _ = writeln!(
        out,
        "{:<12} {:>12} {:>12} {:>9} {:>9} {:>16}",
        "", "SUBMITTED", "COMPLETED", "IN FLIGHT", "ERRORS", "BYTES"
    );
    for kind in RequestKind::ALL {
        let counts = disk.kind(kind);
        let _ = writeln!(
            out,
            "{:<12} {:>12} {:>12} {:>9} {:>9} {:>16}",
            kind.name(),
            counts.submitted,
            counts.completed,
            counts.submitted.saturating_sub(counts.completed),
            counts.errors,
            counts.bytes
        );
    }
    let poll = &disk.poll;
    let _ = writeln!(
        out,
        "polling: {} spinning, {} hits, {} misses; {} wake-ups, {} ring entries, {} times out of requests",
        time(poll.spin_ns),
        poll.hits,
        poll.misses,
        poll.wakeups,
        poll.enters,
        poll.out_of_requests
    );
    let delays = &disk.delays;
    if !disk.limits.is_off() || delays.requests > 0 || delays.waiting > 0 {
        let _ = writeln!(
            out,
            "limits: {}; {} requests waited {} together, {} wait now",
            disk.limits,
            delays.requests,
            time(delays.time_ns),
            delays.waiting
        );
    }
    for kind in [RequestKind::Read, RequestKind::Write, RequestKind::Flush] {
        if disk.histogram(kind, Stage::Total).is_some_and(|total| total.count() > 0) {
            latencies(&mut out, disk, kind, histogram);
        }
    }
    out
}

/// Quantiles are the ceilings of their buckets, powers of two.
fn latencies(out: &mut String, disk: &Snapshot, kind: RequestKind, histogram: bool) {
    let _ = writeln!(
        out,
        "{:<12} {:>10} {:>10} {:>10} {:>10} {:>10}",
        kind.name(),
        "MEAN",
        "P50",
        "P90",
        "P99",
        "P99.9"
    );
    for stage in Stage::ALL {
        let Some(of) = disk.histogram(kind, stage) else { continue };
        let quantiles: Vec<_> =
            [0.5, 0.9, 0.99, 0.999].iter().map(|share| time(of.quantile_ns(*share))).collect();
        let _ = writeln!(
            out,
            "  {:<10} {:>10} {:>10} {:>10} {:>10} {:>10}",
            stage.name(),
            time(of.mean_ns()),
            quantiles[0],
            quantiles[1],
            quantiles[2],
            quantiles[3]
        );
    }
    if histogram {
        let stages: [&Histogram; STAGES] = std::array::from_fn(|stage| &disk.latency[kind as usize][stage]);
        draw(out, stages[STAGES - 1]);
    }
}

/// A bar per bucket of the whole time, from the first to the last that is used.
fn draw(out: &mut String, histogram: &Histogram) {
    let used = |bucket: &usize| histogram.counts[*bucket] > 0;
    let (Some(first), Some(last)) = ((0..BUCKETS).find(used), (0..BUCKETS).rfind(used)) else { return };
    let most = histogram.counts.iter().copied().max().unwrap_or(1).max(1);
    for bucket in first..=last {
        let count = histogram.counts[bucket];
        let len = (count as f64 / most as f64 * 40.0).ceil() as usize;
        let _ = writeln!(out, "    from {:>9} {count:>12} {}", time(bucket_floor(bucket)), "#".repeat(len));
    }
}

#[cfg(test)]
mod tests {
    use tapio_stat::{DiskName, DiskStats, Stages};

    use super::*;

    #[test]
    fn times_have_the_unit_that_suits_them() {
        let all: Vec<_> = [0, 999, 1_500, 2_000_000, 3_500_000_000].map(time).into();
        assert_eq!(all, ["0 ns", "999 ns", "1.5 us", "2.0 ms", "3.5 s"]);
    }

    #[test]
    fn the_table_shows_what_was_counted() {
        let mut stats = DiskStats::private(&DiskName { pid: 7, minor: 3, page: None }).expect("memory");
        stats.set_image("vhd:/a");
        let stages = Stages { queued_ns: 1_000, image_ns: 2_000, kernel_ns: 60_000, completing_ns: 500 };
        for _ in 0..10 {
            stats.submitted(RequestKind::Read, 4096);
            stats.completed(RequestKind::Read, 4096, &stages, true);
        }
        assert!(!table(&stats.view().snapshot(), false).contains("limits:"));
        stats.set_limits(&"iops=500,burst-ios=9".parse().expect("limits"));
        stats.set_delays(&tapio_stat::DelayCounts { requests: 4, time_ns: 1_500, waiting: 1 });
        let text = table(&stats.view().snapshot(), true);
        assert!(
            text.contains("limits: iops=500,burst-ios=9; 4 requests waited 1.5 us together, 1 wait now\n"),
            "{text}"
        );
        assert!(text.starts_with("pid 7 minor 3: vhd:/a\n"), "{text}");
        assert!(
            text.contains("read                   10           10         0         0            40960"),
            "{text}"
        );
        assert!(text.contains("  kernel        60.0 us    65.5 us"), "{text}");
        assert!(
            text.contains("from   32.8 us           10 ########################################"),
            "{text}"
        );
        assert_eq!(text.matches("P99.9").count(), 1, "only reads were counted: {text}");
    }
}
