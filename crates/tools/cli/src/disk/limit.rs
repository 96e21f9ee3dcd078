//! `tapio disk limit` and `tapio disk pool`: what disks may do, and what they share.

use std::fmt::Write;

use clap::Args;
use tapio_control::command as ask;
use tapio_control::{
    ControlError, Errno, LimitsReport, OwnClient, ProcessState, RunDir, ShareReport, processes,
};
use tapio_stat::ShmRoot;
use tapio_stat::pool::{PoolInfo, pools};
use tapio_types::IoLimits;

use super::REPLY_TIMEOUT;
use tapio_report::failure::{Result, print, print_json};

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio disk limit 3                                  show
  tapio disk limit 3 --iops 500 --read-bps 50MiB --burst 2s
  tapio disk limit 3 --off

The limits given replace all that were there before. Flushes count nowhere; discards and zeroing count as one
request of no bytes. Bytes may have a unit: KiB, MiB, GiB, TiB (or K, M, G, T) are powers of 1024, kB, MB, GB, TB
of 1000.")]
pub struct LimitArguments {
    /// Minor number
    minor: u16,
    /// Process; needed only where several have a disk of that number
    #[arg(short, long)]
    pid: Option<i32>,
    /// Requests a second
    #[arg(long, value_name = "COUNT")]
    iops: Option<String>,
    /// Bytes a second
    #[arg(long, value_name = "SIZE")]
    bps: Option<String>,
    /// Reads a second
    #[arg(long, value_name = "COUNT")]
    read_iops: Option<String>,
    /// Bytes read a second
    #[arg(long, value_name = "SIZE")]
    read_bps: Option<String>,
    /// Writes a second
    #[arg(long, value_name = "COUNT")]
    write_iops: Option<String>,
    /// Bytes written a second
    #[arg(long, value_name = "SIZE")]
    write_bps: Option<String>,
    /// How far the disk may run ahead after a rest: a time at its rates (2s, 500ms), or bytes
    #[arg(long, value_name = "TIME|SIZE")]
    burst: Option<String>,
    /// The same in requests
    #[arg(long, value_name = "COUNT")]
    burst_ios: Option<String>,
    /// Take all limits away
    #[arg(long, conflicts_with_all = [
        "iops", "bps", "read_iops", "read_bps", "write_iops", "write_bps", "burst", "burst_ios",
    ])]
    off: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

impl LimitArguments {
    /// The limits to set; `None` when they are only to be shown.
    fn limits(&self) -> Result<Option<IoLimits>> {
        let given = [
            ("iops", &self.iops),
            ("bps", &self.bps),
            ("read-iops", &self.read_iops),
            ("read-bps", &self.read_bps),
            ("write-iops", &self.write_iops),
            ("write-bps", &self.write_bps),
            ("burst", &self.burst),
            ("burst-ios", &self.burst_ios),
        ];
        let mut limits = IoLimits::default();
        let mut any = self.off;
        let invalid = |error: tapio_types::LimitError| ControlError::new(Errno::EINVAL, error.to_string());
        for (name, value) in given {
            if let Some(value) = value {
                limits.set(name, value).map_err(invalid)?;
                any = true;
            }
        }
        limits.check().map_err(invalid)?;
        Ok(any.then_some(limits))
    }
}

pub fn run(run: &RunDir, arguments: &LimitArguments) -> Result<()> {
    let minor = arguments.minor;
    let limits = arguments.limits()?;
    let mut client = find(run, minor, arguments.pid)?;
    if let Some(limits) = limits {
        client.call(&ask::SetLimits { minor, limits }, &[], REPLY_TIMEOUT)?;
    }
    let report = client.call(&ask::Limits { minor }, &[], REPLY_TIMEOUT)?;
    if arguments.json {
        return print_json(&report);
    }
    print(&text(&report))
}

/// The process that has a disk of that number.
pub(super) fn find(run: &RunDir, minor: u16, pid: Option<i32>) -> Result<OwnClient> {
    if let Some(pid) = pid {
        return OwnClient::connect(run, pid);
    }
    let mut found = Vec::new();
    for process in processes(run)? {
        let ProcessState::Live { .. } = process.state else { continue };
        // Foreign, or it ended between the two questions.
        let Ok(mut client) = OwnClient::connect(run, process.id) else { continue };
        let disks = client.call(&ask::List {}, &[], REPLY_TIMEOUT)?;
        if disks.iter().any(|disk| disk.minor == minor) {
            found.push(client);
        }
    }
    match (found.pop(), found.len()) {
        (Some(client), 0) => Ok(client),
        (Some(_), more) => {
            Err(ControlError::new(Errno::EINVAL, format!("{} processes have a disk {minor}", more + 1))
                .next("name one with --pid"))
        }
        (None, _) => Err(ControlError::new(Errno::ENODEV, format!("no process of ours has a disk {minor}"))
            .next("'tapio disk list' shows the disks there are")),
    }
}

fn text(report: &LimitsReport) -> String {
    let mut out = format!("limits: {}\n", report.limits);
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(
        out,
        "waited: {} requests, {:.1} ms together; {} wait now",
        report.delayed,
        report.delay_ns as f64 / 1e6,
        report.waiting
    );
    if let Some(pool) = &report.pool {
        let _ = writeln!(out, "pool: {} ({} pages, {} held by this disk)", pool.name, pool.pages, pool.held);
    }
    if !report.transfers.is_off() {
        let _ = writeln!(out, "transfers: {}", report.transfers);
    }
    if let Some(share) = &report.share {
        out.push_str(&share_text(share));
    }
    out
}

fn share_text(share: &ShareReport) -> String {
    if let Some(why) = &share.not_shared {
        return format!("device: not shared by Tapio, {why}\n");
    }
    let target = match share.spec.latency_us {
        0 => String::new(),
        us => format!(", latency target {us} us"),
    };
    let limit = match share.limit {
        Some(bytes) => format!("{} KiB in flight allowed", bytes >> 10),
        None => match share.even_percent {
            None => "no other disk competes now".into(),
            Some(100) => "even with the others now".into(),
            Some(percent) => format!("up to {percent} % of what the disk sends that is furthest behind"),
        },
    };
    format!(
        "device: {} ({} disks), weight {}{target}; {limit}, {} pieces waited {:.1} ms\n",
        share.device,
        share.disks,
        share.spec.weight,
        share.waited,
        share.waited_ns as f64 / 1e6
    )
}

/// The pools of this host and the disks that share them, read from shared memory.
pub fn show_pools(json: bool) -> Result<()> {
    let root = ShmRoot::from_env();
    let pools = pools(&root)
        .map_err(|error| ControlError::io(format_args!("cannot list {}", root.pools().display()), &error))?;
    if json {
        return print_json(&pools);
    }
    print(&pools.iter().map(pool_text).collect::<String>())
}

fn pool_text(pool: &PoolInfo) -> String {
    let free = pool.pages.saturating_sub(pool.used);
    let mut out =
        format!("pool: {} ({:4},{:4}) size {} free {free}\n", pool.name, pool.pages, pool.used, pool.pages);
    let _ = writeln!(out, "{:>8} {:>5} {:>6} {:>9}", "PID", "MINOR", "HELD", "WAITS FOR");
    for disk in &pool.disks {
        let _ = writeln!(out, "{:>8} {:>5} {:>6} {:>9}", disk.pid, disk.minor, disk.held, disk.waits_for);
    }
    out
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tapio_stat::pool::PoolDisk;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: LimitArguments,
    }

    fn limits(line: &str) -> Result<Option<IoLimits>> {
        let words = std::iter::once("limit").chain(line.split_whitespace());
        Line::try_parse_from(words).expect(line).arguments.limits()
    }

    #[test]
    fn what_is_given_is_set_and_nothing_given_shows() {
        assert_eq!(limits("3"), Ok(None));
        assert_eq!(limits("3 --off"), Ok(Some(IoLimits::default())));
        let given = limits("3 --iops 500 --read-bps 50MiB --burst 2s").expect("valid").expect("some");
        assert_eq!(given.to_string(), "iops=500,read-bps=50MiB,burst=2000ms");
        assert_eq!(limits("3 --burst 2s").expect_err("of what").errno, Errno::EINVAL);
        assert_eq!(limits("3 --bps fast").expect_err("no number").errno, Errno::EINVAL);
        assert!(Line::try_parse_from(["limit", "3", "--off", "--iops", "5"]).is_err());
    }

    #[test]
    fn limits_and_pools_are_printed() {
        let mut report =
            LimitsReport { delayed: 3, delay_ns: 2_500_000, waiting: 1, ..LimitsReport::default() };
        assert_eq!(text(&report), "limits: off\nwaited: 3 requests, 2.5 ms together; 1 wait now\n");
        report.pool = Some(tapio_control::PoolShare { name: "sr".into(), pages: 704, held: 5 });
        assert!(text(&report).ends_with("pool: sr (704 pages, 5 held by this disk)\n"));
        report.share = Some(ShareReport {
            device: "8-0".into(),
            disks: 2,
            spec: "latency-us=500".parse().expect("a share"),
            limit: Some(96 << 10),
            even_percent: Some(100),
            waited: 7,
            waited_ns: 1_500_000,
            not_shared: None,
        });
        let shared = "device: 8-0 (2 disks), weight 100, latency target 500 us; 96 KiB in flight allowed, 7 pieces \
                      waited 1.5 ms\n";
        assert!(text(&report).ends_with(shared), "{}", text(&report));
        let mut even = report.share.clone().expect("there");
        (even.limit, even.spec.latency_us) = (None, 0);
        report.share = Some(ShareReport { even_percent: Some(250), ..even });
        assert!(text(&report).contains("weight 100; up to 250 % of what"), "{}", text(&report));
        report.share =
            Some(ShareReport { not_shared: Some("bfq of sda does".into()), ..ShareReport::default() });
        assert!(text(&report).ends_with("device: not shared by Tapio, bfq of sda does\n"));
        let disks = vec![PoolDisk { pid: 77, minor: 3, held: 5, waits_for: 256 }];
        let pool = PoolInfo { name: "sr".into(), pages: 704, used: 374, disks };
        let lines = pool_text(&pool);
        assert!(lines.starts_with("pool: sr ( 704, 374) size 704 free 330\n"), "{lines}");
        assert!(lines.ends_with("      77     3      5       256\n"), "{lines}");
    }
}
