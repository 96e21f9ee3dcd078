//! `tapio bench device`: a disk through Tapio beside the same disk without.
//!
//! ```text
//!   bare:   load ─ io_uring, O_DIRECT ─▶ file or device
//!   raw:    load ─ ring ─▶ tapio-disk ─▶ the same file or device
//!   vhd:    load ─ ring ─▶ tapio-disk ─▶ a VHD in that directory, or on that device, whose blocks are all there
//!   lvm:    the same, of a VHD on a logical volume of that device
//!   ext:    the same, of a VHD on an ext4 file system of that device
//! ```

mod below;

use std::fmt::Write;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use tapio_control::{ControlError, Errno};
use tapio_format::vhd::offline::{self, Shape};
use tapio_load::{Load, Mix, bare_file};
use tapio_report::failure::Result;
use tapio_report::plot::{self, Bar, Group, Stacks};
use tapio_types::Movement;
use tapio_xen::blkfront::Command;

use super::common::{CUT_SHORT, Common, Setting, check_only, wanted};
use super::ground::{Ground, Sizes};
use super::measure::interrupted;
use super::medians::median;
use super::progress::Progress;
use super::xen::case::{PAGE, front};
use super::xen::guest::{Guest, Setup};
use super::{end_at_interrupt, failed, invalid};
use below::{Below, Kind};

/// What the goal wants of the raw path beside the bare one.
const RAW_MIN: f64 = 0.9;
const MIB: u64 = 1 << 20;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio bench device --dir /srv/ssd              files of a directory: raw, and VHD on that file system
  tapio bench device --device /dev/sdb           a device, which is overwritten: direct, and a VHD on it, on a logical
                                                 volume of it (needs lvm2 and device-mapper), and on ext4
  tapio bench device --quick --json -            does it run at all, as JSON

Columns: MB/s (10^6 bytes) of the median round, and that beside the bare path of the same load. 'dd' writes 8000 MiB one
after the other, eight requests of 1 MiB at a time as the kernel's writeback does, and makes them durable at the end, as
dd bs=1M count=8000 conv=fdatasync,notrunc; the time of both counts. 'MISSED' stands where the raw path has less than
nine tenths of the bare one.")]
pub struct DeviceArguments {
    /// Where the images are made; they are removed at the end
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    /// A block device to measure instead: all of it may be overwritten. It has a tenth more than --size at least
    #[arg(long, value_name = "DEVICE")]
    device: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
    /// Only loads with this in their names; may be given more than once
    #[arg(long, value_name = "LOAD")]
    only: Vec<String>,
    /// Bytes of each disk, in MiB
    #[arg(long, default_value_t = 1024, value_name = "MIB", value_parser = clap::value_parser!(u64).range(16..1 << 20))]
    size: u64,
    /// MiB that 'dd' writes; 16 with --quick
    #[arg(long, default_value_t = 8000, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..1 << 20))]
    dd: u64,
    /// Write a picture of the ratios there
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// One load.
struct Work {
    name: &'static str,
    title: &'static str,
    mix: Mix,
    block_len: u32,
    depth: u32,
    /// So many bytes are written and made durable, rather than for a time.
    durable: bool,
}

const fn work(name: &'static str, title: &'static str, mix: Mix, block_len: u32, depth: u32) -> Work {
    Work { name, title, mix, block_len, depth, durable: false }
}

const WORKS: [Work; 7] = [
    work("read-1m", "1 MiB sequential read, depth 1", Mix::SequentialRead, 1 << 20, 1),
    work("read-1m-q8", "1 MiB sequential read, depth 8", Mix::SequentialRead, 1 << 20, 8),
    work("write-1m", "1 MiB sequential write, depth 1", Mix::SequentialWrite, 1 << 20, 1),
    work("read-4k", "4 KiB random read, depth 1", Mix::RandomRead, 4096, 1),
    work("read-4k-q32", "4 KiB random read, depth 32", Mix::RandomRead, 4096, 32),
    work("write-4k-q32", "4 KiB random write, depth 32", Mix::RandomWrite, 4096, 32),
    Work { durable: true, ..work("dd", "dd, durable at the end", Mix::SequentialWrite, 1 << 20, 8) },
];

/// One way to the disk.
#[derive(Clone, Debug)]
struct Way {
    name: &'static str,
    path: PathBuf,
    /// How `tapio-disk` names it; nothing: without Tapio.
    image: Option<String>,
}

/// Ways that are there at the same time: a device holds one thing at a time.
struct Turn {
    /// What is made on a device for them, whose path is theirs.
    below: Option<(Kind, PathBuf)>,
    ways: Vec<Way>,
}

impl Turn {
    /// All of a device.
    fn of_device(device: &Path) -> Vec<Self> {
        let of = |name, image| Way { name, path: device.to_path_buf(), image };
        let raw = of("raw", Some(format!("aio:{}", device.display())));
        let vhd = of("vhd", Some(format!("vhd:{}", device.display())));
        let over = |kind, name| Self {
            below: Some((kind, device.to_path_buf())),
            ways: vec![Way { name, path: PathBuf::new(), image: None }],
        };
        vec![
            Self { below: None, ways: vec![of("bare", None), raw] },
            Self { below: None, ways: vec![vhd] },
            over(Kind::Lvm, "lvm"),
            over(Kind::Ext, "ext"),
        ]
    }

    /// Those of a directory.
    fn of_dir(dir: &Path) -> Self {
        let (raw, vhd) = (dir.join("device.raw"), dir.join("device.vhd"));
        let image = |kind: &str, path: &Path| Some(format!("{kind}:{}", path.display()));
        let ways = vec![
            Way { name: "bare", path: raw.clone(), image: None },
            Way { name: "raw", image: image("aio", &raw), path: raw },
            Way { name: "vhd", image: image("vhd", &vhd), path: vhd },
        ];
        Self { below: None, ways }
    }

    /// The ways, and what has to stay as long as they are used.
    fn begin(&self, ground: &Ground) -> std::result::Result<(Option<Below>, Vec<Way>), String> {
        let Some((kind, device)) = &self.below else { return Ok((None, self.ways.clone())) };
        let below = Below::new(*kind, device, ground.run_dir())?;
        let image = Some(format!("vhd:{}", below.path.display()));
        let over = |way: &Way| Way { name: way.name, path: below.path.clone(), image: image.clone() };
        let ways = self.ways.iter().map(over).collect();
        Ok((Some(below), ways))
    }
}

/// Medians of one load by one way.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    load: &'static str,
    title: &'static str,
    way: &'static str,
    bytes_per_second: f64,
    /// Beside the bare way; 1 of that itself.
    ratio: f64,
    rounds: usize,
}

impl Row {
    fn misses(&self) -> bool {
        self.way == "raw" && self.ratio < RAW_MIN
    }
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    setting: Setting,
    site: String,
    rows: Vec<Row>,
    /// Ways that this host cannot go, and why.
    skipped: Vec<String>,
    interrupted: bool,
}

impl Report {
    fn tables(&self) -> String {
        let mut out = self.setting.line(&self.site);
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(out, "\n{:32} {:6} {:>10} {:>8}", "load", "way", "MB/s", "ratio");
        for row in &self.rows {
            let missed = if row.misses() { "  MISSED" } else { "" };
            let rate = row.bytes_per_second / 1e6;
            let _ = writeln!(out, "{:32} {:6} {rate:>10.2} {:>8.3}{missed}", row.title, row.way, row.ratio);
        }
        for why in &self.skipped {
            let _ = writeln!(out, "skipped: {why}");
        }
        if self.interrupted {
            out.push_str(CUT_SHORT);
        }
        out
    }

    fn picture(&self) -> String {
        let of = |work: &Work| Group {
            name: work.name.to_owned(),
            bars: self
                .rows
                .iter()
                .filter(|row| row.load == work.name)
                .map(|row| Bar { name: row.way.to_owned(), parts: vec![row.ratio] })
                .collect(),
        };
        Stacks {
            title: "Throughput beside the disk without Tapio".into(),
            y: "ratio to the bare disk".into(),
            series: vec!["ratio".into()],
            own_scales: false,
            groups: WORKS.iter().map(of).filter(|group| !group.bars.is_empty()).collect(),
        }
        .svg()
    }
}

pub fn run(arguments: &DeviceArguments) -> Result<()> {
    let (time, rounds) = arguments.common.times((3.0, 5), (0.1, 1))?;
    check_only(&arguments.only, &WORKS.map(|work| work.name), "load")?;
    end_at_interrupt();
    let program = super::server::ours().map_err(|why| ControlError::new(Errno::ENOENT, why))?;
    let awake = arguments.common.awake()?;
    let quick = arguments.common.quick;
    let len = if quick { 16 * MIB } else { arguments.size * MIB };
    let written = if quick { 16 } else { arguments.dd };
    let sizes = Sizes { full_len: len, fresh_len: 0, fresh_requests_max: 0, fresh_space_max: 0 };
    let ground = Ground::new(&arguments.dir, |_, _| sizes)?;
    let works: Vec<Work> = WORKS.into_iter().filter(|work| wanted(&arguments.only, work.name)).collect();
    let site =
        arguments.device.as_ref().map_or_else(|| ground.site.line(), |device| device.display().to_string());
    let mut report = Report {
        setting: Setting::now(time, rounds, awake.is_some()),
        site,
        rows: Vec::new(),
        skipped: Vec::new(),
        interrupted: false,
    };
    let turns = match &arguments.device {
        Some(device) => {
            claim(device)?;
            Turn::of_device(device)
        }
        None => vec![Turn::of_dir(ground.dir())],
    };
    let mut found: Vec<(&'static str, &'static str, f64)> = Vec::new();
    let all = turns.iter().map(|turn| turn.ways.len()).sum::<usize>();
    let mut progress = Progress::new(all * works.len() * rounds);
    'turns: for turn in &turns {
        // Dropped after what uses it.
        let (_below, ways) = match turn.begin(&ground) {
            Ok(begun) => begun,
            Err(why) => {
                report.skipped.push(format!("{}: {why}", turn.ways[0].name));
                continue;
            }
        };
        for way in &ways {
            prepare(&program, &ground, way, len).map_err(failed)?;
        }
        for _ in 0..rounds {
            for (work, way) in works.iter().flat_map(|work| ways.iter().map(move |way| (work, way))) {
                if interrupted() {
                    break 'turns;
                }
                progress.begin(&format!("{} {}", work.name, way.name));
                ground.settle().map_err(failed)?;
                let rate = one(&program, &ground, way, work, (len, written, time)).map_err(failed)?;
                found.push((work.name, way.name, rate));
            }
        }
    }
    progress.end();
    report.interrupted = interrupted();
    report.rows = works.iter().flat_map(|work| rows(work, &found)).collect();
    report.setting.environment.end();
    drop((ground, awake));
    if let Some(path) = &arguments.svg {
        plot::write(path, &report.picture())?;
    }
    arguments.common.show(&report, &report.tables())
}

fn rows(work: &Work, found: &[(&'static str, &'static str, f64)]) -> Vec<Row> {
    let of = |way: &str| -> Vec<f64> {
        found.iter().filter(|one| one.0 == work.name && one.1 == way).map(|one| one.2).collect()
    };
    let bare = median(&mut of("bare"));
    let row = |way: &'static str| {
        let mut rates = of(way);
        let rounds = rates.len();
        let rate = median(&mut rates);
        let ratio = rate / bare.max(1.0);
        (rounds > 0).then_some(Row {
            load: work.name,
            title: work.title,
            way,
            bytes_per_second: rate,
            ratio,
            rounds,
        })
    };
    ["bare", "raw", "vhd", "lvm", "ext"].into_iter().filter_map(row).collect()
}

/// Refuses what is no block device, or in use.
fn claim(device: &Path) -> Result<()> {
    let is_block = fs::metadata(device).is_ok_and(|found| found.file_type().is_block_device());
    if !is_block {
        return Err(invalid(format!("{} is no block device", device.display()))
            .next("give one that may be overwritten, or a directory with --dir"));
    }
    // The kernel refuses what is mounted, or held by device-mapper and the like.
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_EXCL).open(device);
    opened.map(drop).map_err(|error| {
        ControlError::io(format_args!("cannot overwrite {}", device.display()), &error)
            .next("unmount it, or name another device")
    })
}

/// Fills the disk, so that every block of it is there.
fn prepare(program: &Path, ground: &Ground, way: &Way, len: u64) -> std::result::Result<(), String> {
    let text = |error: io::Error| format!("{}: {error}", way.path.display());
    let is_device = fs::metadata(&way.path).is_ok_and(|found| found.file_type().is_block_device());
    match &way.image {
        Some(image) if image.starts_with("vhd:") => {
            offline::create(&way.path, &Shape::Dynamic, len, 0).map_err(|error| error.to_string())?;
        }
        _ if is_device => return Ok(()),
        Some(_) => return Ok(()),
        None => {
            let file = File::create(&way.path).map_err(text)?;
            file.set_len(len).map_err(text)?;
        }
    }
    let fill = Work { durable: true, ..work("fill", "", Mix::SequentialWrite, 1 << 20, 8) };
    one(program, ground, way, &fill, (len, len / MIB, Duration::from_secs(3600))).map(drop)
}

/// Bytes a second.
fn one(
    program: &Path,
    ground: &Ground,
    way: &Way,
    work: &Work,
    (len, written, time): (u64, u64, Duration),
) -> std::result::Result<f64, String> {
    let load = Load {
        mix: work.mix,
        block_len: work.block_len,
        depth: work.depth,
        span_len: len,
        time: if work.durable { Duration::from_secs(3600) } else { time },
        requests_max: if work.durable { written } else { u64::MAX },
        spin: false,
        seed: 0,
    };
    let text = |error: io::Error| format!("{} of {}: {error}", work.name, way.path.display());
    let (report, took) = match &way.image {
        None => {
            let begin = Instant::now();
            // A file system in memory has no page cache to go past.
            let report = match bare_file::run(&way.path, &load, true) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    bare_file::run(&way.path, &load, false)
                }
                done => done,
            };
            let report = report.map_err(text)?.load;
            if work.durable {
                let file = OpenOptions::new().write(true).open(&way.path).map_err(text)?;
                file.sync_data().map_err(text)?;
            }
            (report, begin.elapsed())
        }
        Some(image) => {
            let setup = Setup {
                image: image.clone(),
                front: front(Movement::Copy, work.block_len.div_ceil(PAGE), work.block_len, work.depth),
                movement: Movement::Copy,
                polls: false,
                pool: None,
                share: None,
            };
            let mut guest = Guest::start(program, ground, 1, &setup)?;
            let queue = guest.queues.first_mut().ok_or("the guest has no ring")?;
            let begin = Instant::now();
            let report = load.run(queue).map_err(text)?;
            if work.durable {
                queue.ask(&Command::Flush).map_err(text)?;
            }
            (report, begin.elapsed())
        }
    };
    if report.errors > 0 {
        return Err(format!("{} requests of {} failed on {}", report.errors, work.name, way.path.display()));
    }
    let took = if work.durable { took } else { report.time };
    Ok(report.count as f64 * f64::from(work.block_len) / took.as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_the_bare_way_and_only_the_raw_one_has_a_goal() {
        let found = [("dd", "bare", 100e6), ("dd", "raw", 85e6), ("dd", "vhd", 50e6), ("dd", "bare", 100e6)];
        let made = rows(&WORKS[6], &found);
        assert_eq!(
            made.iter().map(|row| (row.way, row.rounds)).collect::<Vec<_>>(),
            [("bare", 2), ("raw", 1), ("vhd", 1)]
        );
        assert_eq!(made.iter().map(Row::misses).collect::<Vec<_>>(), [false, true, false]);
        assert!((made[1].ratio - 0.85).abs() < 1e-9 && rows(&WORKS[0], &found).is_empty());
        let report = Report {
            setting: Setting::now(Duration::from_secs(1), 1, false),
            site: "somewhere".into(),
            rows: made,
            skipped: vec!["lvm: no device-mapper".into()],
            interrupted: false,
        };
        assert!(report.tables().contains("MISSED") && report.tables().contains("skipped: lvm"));
        assert!(report.picture().starts_with("<svg") && report.picture().contains("dd"));
    }

    #[test]
    fn a_file_or_a_directory_is_no_device_to_overwrite() {
        let error = claim(Path::new("/")).expect_err("a directory");
        assert!(error.to_string().contains("no block device"), "{error}");
    }
}
