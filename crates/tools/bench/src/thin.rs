//! `tapio bench thin`: disks whose volumes grow while they are written, beside disks that have all of their space.
//!
//! ```text
//!   loop device or --device ─ lvm SR of a tapiod of our own ─┬─ thin disks    all written at once, sequentially,
//!                                                            └─ thick disks   in turn with the others
//! ```
//!
//! Both are empty VHDs at first, so both allocate blocks; only one waits for its volume.

use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use tapio_load::{Load, LoadReport, Mix, bare_file};
use tapio_report::failure::Result;

use super::common::{CUT_SHORT, Common, Setting};
use super::measure::interrupted;
use super::medians::median;
use super::progress::Progress;
use super::toolstack::client::Client;
use super::toolstack::daemon::{Daemon, Place};
use super::{end_at_interrupt, failed};

const MIB: u64 = 1 << 20;
/// Bytes of a request, and requests in flight for each disk.
const BLOCK: u32 = 256 << 10;
const DEPTH: u32 = 8;
/// What the goals allow: the rate beside that of thick disks, and the 99th percentile of a write.
const RATE_MIN: f64 = 0.9;
const STALL_MAX_MS: f64 = 50.0;
/// Bytes of the SR for each disk at least, where they are not those of a device.
const FREE_MIN: u64 = 8 << 30;
/// How long a disk may take to write all that it is to write.
const TIME_MAX: Duration = Duration::from_secs(3600);

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio bench thin --device /dev/nvme1n1        on a device, which is overwritten
  tapio bench thin --dir /srv/ssd               on a loop device over a file of that directory
  tapio bench thin --dir /dev/shm --quick       does it run at all

Columns: MB/s (10^6 bytes) of all disks together, the median and the 99th percentile of a write in ms, the longest, and
the bytes that the volumes take for each byte that was written.")]
pub struct ThinArguments {
    /// Where the file of the loop device is made, and the database; both are removed at the end
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    /// A device for the SR, which is overwritten; a loop device over a file without
    #[arg(long, value_name = "DEVICE")]
    device: Option<PathBuf>,
    /// Disks that are written at once
    #[arg(long, default_value_t = 4, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..64))]
    disks: u64,
    /// What is written to each disk, in MiB; 2048 without, 64 with --quick
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(8..1_048_576))]
    size: Option<u64>,
    #[command(flatten)]
    common: Common,
}

/// A device of the SR; a loop device ends with this value.
struct Device {
    path: PathBuf,
    is_loop: bool,
}

impl Device {
    fn of(arguments: &ThinArguments, place: &Place, bytes: u64) -> std::result::Result<Self, String> {
        if let Some(path) = &arguments.device {
            return Ok(Self { path: path.clone(), is_loop: false });
        }
        let file = place.dir.join("device");
        File::create(&file)
            .and_then(|made| made.set_len(bytes))
            .map_err(|error| format!("cannot make {}: {error}", file.display()))?;
        let setup =
            |more: &[&str]| Command::new("losetup").args(more).args(["-f", "--show"]).arg(&file).output();
        // A file system in memory has no direct I/O.
        let made = match setup(&["--direct-io=on"]) {
            Ok(made) if made.status.success() => Ok(made),
            _ => setup(&[]),
        };
        let made = made.map_err(|error| format!("losetup does not run: {error}"))?;
        if !made.status.success() {
            return Err(format!(
                "no loop device over {}: {}; name a device with --device",
                file.display(),
                String::from_utf8_lossy(&made.stderr).trim()
            ));
        }
        Ok(Self { path: String::from_utf8_lossy(&made.stdout).trim().into(), is_loop: true })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.is_loop {
            let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
        }
    }
}

/// One run of all disks of a kind at once.
#[derive(Clone, Debug, Default)]
struct Run {
    rate: f64,
    p50_ms: f64,
    p99_ms: f64,
    longest_ms: f64,
    /// Bytes of volumes for each byte written.
    space: f64,
}

/// Medians of one kind.
#[derive(Clone, Debug, Serialize)]
struct Row {
    allocation: &'static str,
    bytes_per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
    /// Of all rounds.
    longest_ms: f64,
    space: f64,
    rounds: usize,
}

impl Row {
    fn of(allocation: &'static str, runs: &[Run]) -> Self {
        let middle = |value: &dyn Fn(&Run) -> f64| median(&mut runs.iter().map(value).collect::<Vec<_>>());
        Self {
            allocation,
            bytes_per_second: middle(&|run| run.rate),
            p50_ms: middle(&|run| run.p50_ms),
            p99_ms: middle(&|run| run.p99_ms),
            longest_ms: runs.iter().map(|run| run.longest_ms).fold(0.0, f64::max),
            space: middle(&|run| run.space),
            rounds: runs.len(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    setting: Setting,
    device: String,
    disks: u64,
    bytes_per_disk: u64,
    rows: Vec<Row>,
    /// The rate of thin disks over that of thick ones.
    rate_ratio: f64,
    interrupted: bool,
}

impl Report {
    fn tables(&self) -> String {
        let how =
            format!("{} disks of {} MiB at once on {}", self.disks, self.bytes_per_disk / MIB, self.device);
        let mut out = self.setting.line(&how);
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(
            out,
            "{:10} {:>9} {:>9} {:>9} {:>11} {:>7}",
            "allocation", "MB/s", "p50 ms", "p99 ms", "longest ms", "space"
        );
        for row in &self.rows {
            let misses = row.allocation == "thin" && row.p99_ms > STALL_MAX_MS;
            let _ = writeln!(
                out,
                "{:10} {:>9.1} {:>9.2} {:>9.2} {:>11.1} {:>7.2}{}",
                row.allocation,
                row.bytes_per_second / 1e6,
                row.p50_ms,
                row.p99_ms,
                row.longest_ms,
                row.space,
                if misses { "  MISSED" } else { "" }
            );
        }
        let missed = if self.rate_ratio < RATE_MIN { "  MISSED" } else { "" };
        let _ = writeln!(out, "thin over thick: {:.2}{missed}", self.rate_ratio);
        if self.interrupted {
            out.push_str(CUT_SHORT);
        }
        out
    }
}

/// The SR, and the control domain that has its disks.
struct Ground {
    daemon: Daemon,
    sr: String,
    host_vm: String,
    disks: u64,
    bytes: u64,
}

impl Ground {
    fn new(daemon: Daemon, device: &Path, disks: u64, bytes: u64) -> std::result::Result<Self, String> {
        let mut client = daemon.client()?;
        let first = |found: &Value, what: &str| -> std::result::Result<String, String> {
            let mut all = found.as_object().into_iter().flatten();
            all.next().map(|(name, _)| name.clone()).ok_or_else(|| format!("there is no {what}"))
        };
        let hosts = client.call("host.get_all_records", &[])?;
        let vms =
            client.call("VM.get_all_records_where", &[json!(r#"field "is_control_domain" = "true""#)])?;
        let config = json!({"device": device.display().to_string()});
        let allocation = json!({"allocation": "thin"});
        let sr = client.text(
            "SR.create",
            &[
                json!(first(&hosts, "host")?),
                config,
                json!("0"),
                json!("thin"),
                json!(""),
                json!("lvm"),
                json!(""),
                json!(false),
                allocation,
            ],
        )?;
        Ok(Self { sr, host_vm: first(&vms, "control domain")?, daemon, disks, bytes })
    }

    /// Makes disks, has them written all at once, and removes them.
    fn run(&self, allocation: &str) -> std::result::Result<Run, String> {
        let mut client = self.daemon.client()?;
        let mut made = Vec::new();
        for index in 0..self.disks {
            made.push(self.plug(&mut client, allocation, index)?);
        }
        let start = Barrier::new(made.len());
        let begun = Instant::now();
        let reports: Vec<std::io::Result<LoadReport>> = std::thread::scope(|scope| {
            let writers: Vec<_> =
                made.iter().map(|(_, _, node)| scope.spawn(|| self.write(node, &start))).collect();
            let lost = || Err(std::io::Error::other("a writer ended in a defect"));
            writers.into_iter().map(|writer| writer.join().unwrap_or_else(|_| lost())).collect()
        });
        let took = begun.elapsed().as_secs_f64();
        let mut all = LoadReport::default();
        for report in reports {
            all.add(&report.map_err(|error| format!("writing to a {allocation} disk: {error}"))?);
        }
        let written = (all.count * u64::from(BLOCK)) as f64;
        let mut held = 0.0;
        for (vdi, vbd, _) in &made {
            let size = client.call("VDI.get_physical_utilisation", &[json!(vdi)])?;
            held += size.as_str().and_then(|text| text.parse().ok()).or(size.as_f64()).unwrap_or(0.0);
            client.call("VBD.unplug", &[json!(vbd)])?;
            client.call("VBD.destroy", &[json!(vbd)])?;
            client.call("VDI.destroy", &[json!(vdi)])?;
        }
        let ms = |share: f64| all.latencies.quantile_ns(share) as f64 / 1e6;
        Ok(Run {
            rate: written / took.max(1e-9),
            p50_ms: ms(0.5),
            p99_ms: ms(0.99),
            longest_ms: ms(1.0),
            space: held / written.max(1.0),
        })
    }

    /// A disk, and its VBD and node.
    fn plug(
        &self,
        client: &mut Client,
        allocation: &str,
        index: u64,
    ) -> std::result::Result<(String, String, PathBuf), String> {
        let vdi = client.text(
            "VDI.create",
            &[json!({
                "name_label": format!("{allocation} {index}"), "SR": self.sr, "type": "user",
                "virtual_size": self.bytes.to_string(), "sm_config": {"allocation": allocation},
            })],
        )?;
        let vbd = client.text(
            "VBD.create",
            &[json!({"VM": self.host_vm, "VDI": vdi, "userdevice": "autodetect", "mode": "RW", "type": "Disk"})],
        )?;
        client.call("VBD.plug", &[json!(vbd)])?;
        let name = client.text("VBD.get_device", &[json!(vbd)])?;
        Ok((vdi, vbd, Path::new("/dev").join(name)))
    }

    fn write(&self, node: &Path, start: &Barrier) -> std::io::Result<LoadReport> {
        let load = Load {
            mix: Mix::SequentialWrite,
            block_len: BLOCK,
            depth: DEPTH,
            span_len: self.bytes,
            time: TIME_MAX,
            requests_max: self.bytes / u64::from(BLOCK),
            spin: false,
            seed: 1,
        };
        start.wait();
        bare_file::run(node, &load, true).map(|report| report.load)
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        let Ok(mut client) = self.daemon.client() else { return };
        if let Err(error) = client.call("SR.destroy", &[json!(self.sr)]) {
            eprintln!("tapio bench: the SR stays: {error}");
        }
    }
}

pub fn run(arguments: &ThinArguments) -> Result<()> {
    let (time, rounds) = arguments.common.times((1.0, 5), (0.1, 1))?;
    end_at_interrupt();
    let awake = arguments.common.awake()?;
    let bytes = arguments.size.unwrap_or(if arguments.common.quick { 64 } else { 2048 }) * MIB;
    let place = Place::new(&arguments.dir).map_err(failed)?;
    // For disks of one kind at a time. As an SR of thin disks has, most is free: how far volumes grow ahead follows
    // from that. The file has holes there.
    let device = Device::of(arguments, &place, arguments.disks * (bytes * 4).max(FREE_MIN) + 256 * MIB);
    let device = device.map_err(failed)?;
    let ground = Daemon::start(place, None)
        .and_then(|daemon| Ground::new(daemon, &device.path, arguments.disks, bytes))
        .map_err(failed)?;
    let mut progress = Progress::new(rounds * 2);
    let (mut thin, mut thick) = (Vec::new(), Vec::new());
    'rounds: for _ in 0..rounds {
        for (allocation, runs) in [("thin", &mut thin), ("thick", &mut thick)] {
            if interrupted() {
                break 'rounds;
            }
            progress.begin(allocation);
            runs.push(ground.run(allocation).map_err(failed)?);
        }
    }
    progress.end();
    drop(ground);
    let rows: Vec<Row> = [("thin", &thin), ("thick", &thick)]
        .into_iter()
        .filter(|(_, runs)| !runs.is_empty())
        .map(|(allocation, runs)| Row::of(allocation, runs))
        .collect();
    let rate = |at: usize| rows.get(at).map_or(0.0, |row| row.bytes_per_second);
    let report = Report {
        setting: Setting::now(time, rounds, awake.is_some()),
        device: device.path.display().to_string(),
        disks: arguments.disks,
        bytes_per_disk: bytes,
        rate_ratio: rate(0) / rate(1).max(1.0),
        rows,
        interrupted: interrupted(),
    };
    let tables = report.tables();
    arguments.common.show(&report, &tables)
}
