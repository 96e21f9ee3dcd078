//! `tapio bench scale`: more and more disks of one SR, all busy at once.
//!
//! ```text
//!   ring ─▶ tapio-disk ─▶ image ┐
//!   ring ─▶ tapio-disk ─▶ image ├─ one directory, one page pool; 1, 2, 5 ... 100 of them work, all others are idle
//!   ...                         ┘
//! ```
//!
//! What all of them move together must not fall as more of them work, and of those that do the same the fastest must
//! not get much more than the slowest.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tapio_control::{ControlError, Errno, ShareSpec};
use tapio_load::{Load, Mix};
use tapio_report::failure::Result;
use tapio_report::plot::{self, Axis, Line, Lines, Points};
use tapio_types::Movement;

use super::common::{CUT_SHORT, Common, Setting, check_only, wanted};
use super::ground::{Ground, Sizes};
use super::measure::interrupted;
use super::medians::median;
use super::progress::Progress;
use super::xen::case::{PAGE, front};
use super::xen::guest::{Guest, Setup};
use super::xen::load;
use super::{end_at_interrupt, failed};

/// How many work at once.
const COUNTS: [usize; 7] = [1, 2, 5, 10, 20, 50, 100];
const COUNTS_QUICK: [usize; 2] = [1, 3];
/// Pages of the SR's pool, as in XenServer: fewer than a request of 4 MiB has.
const POOL_PAGES: u32 = 704;
/// Bytes of each image.
const IMAGE_LEN: u64 = 16 << 20;
/// What the goal allows the fastest to have more than the slowest.
const SPREAD_MAX: f64 = 1.02;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio bench scale --dir /srv/ssd                       all loads, 1 to 100 disks: a quarter of an hour
  tapio bench scale --dir /srv/ssd --only read-4m --svg /tmp/pictures
  tapio bench scale --quick --json -                     does it run at all, as JSON

Columns: disks that work at once, MB/s (10^6 bytes) of all of them together, of the slowest and of the fastest, and the
fastest beside the slowest. Medians over the rounds. 'FELL' stands where the best total of all rounds is below the worst
one of fewer disks, 'UNEVEN' where all disks do the same and the fastest gets more than 2 % more than the slowest. In
the load 'mixed' disks read or write, in requests of 4 KiB to 4 MiB.")]
pub struct ScaleArguments {
    /// Where the images are made, on the device in question; they are removed at the end
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    common: Common,
    /// Only loads with this in their names; may be given more than once
    #[arg(long, value_name = "LOAD")]
    only: Vec<String>,
    /// Disks, at most
    #[arg(long, default_value_t = 100, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=250))]
    disks: u16,
    /// Write two pictures of each load there: totals, and what each disk moved
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
    /// How the disks share the device, as for 'tapio-disk --share': 'off', or 'weight=N'
    #[arg(long, value_name = "SHARE")]
    share: Option<ShareSpec>,
}

/// What each disk does: the disk with number N does the one with number N modulo their number.
struct Work {
    name: &'static str,
    title: &'static str,
    loads: &'static [(Mix, u32)],
}

const WORKS: [Work; 5] = [
    Work {
        name: "read-4m",
        title: "sequential reads of 4 MiB, one at a time",
        loads: &[(Mix::SequentialRead, 4 << 20)],
    },
    Work {
        name: "write-4m",
        title: "sequential writes of 4 MiB, one at a time",
        loads: &[(Mix::SequentialWrite, 4 << 20)],
    },
    Work {
        name: "read-64k",
        title: "random reads of 64 KiB, one at a time",
        loads: &[(Mix::RandomRead, 64 << 10)],
    },
    Work {
        name: "read-4k",
        title: "random reads of 4 KiB, one at a time",
        loads: &[(Mix::RandomRead, 4 << 10)],
    },
    Work {
        name: "mixed",
        title: "reads and writes of 4 KiB to 4 MiB, one at a time",
        loads: &[
            (Mix::SequentialRead, 4 << 20),
            (Mix::RandomWrite, 4 << 10),
            (Mix::RandomRead, 64 << 10),
            (Mix::SequentialWrite, 1 << 20),
            (Mix::RandomRead, 4 << 10),
        ],
    },
];

impl Work {
    fn load(&self, disk: usize, time: Duration) -> Load {
        let (mix, block_len) = self.loads[disk % self.loads.len()];
        Load {
            mix,
            block_len,
            depth: 1,
            span_len: IMAGE_LEN,
            time,
            requests_max: u64::MAX,
            spin: false,
            seed: disk as u64,
        }
    }
}

/// Medians of one load on so many disks.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    load: &'static str,
    title: &'static str,
    disks: usize,
    /// Bytes a second of all disks together: in the middle, least and most of all rounds.
    total: f64,
    total_least: f64,
    total_most: f64,
    /// Bytes a second of each disk, in the round in the middle.
    each: Vec<f64>,
    /// The fastest beside the slowest.
    spread: f64,
    /// The total is less than that of fewer disks, in all rounds.
    fell: bool,
    /// The disks do the same and one gets more.
    uneven: bool,
}

impl Row {
    /// Of the bytes a second of each disk in each round.
    fn of(work: &Work, rounds: &[Vec<f64>], before: &[Self]) -> Self {
        let sums: Vec<f64> = rounds.iter().map(|each| each.iter().sum()).collect();
        let total = median(&mut sums.clone());
        let distance = |round: usize| (sums[round] - total).abs();
        let middle = (0..rounds.len()).min_by(|a, b| distance(*a).total_cmp(&distance(*b)));
        let each = middle.and_then(|round| rounds.get(round)).cloned().unwrap_or_default();
        let extremes = |of: &[f64]| {
            let least = of.iter().copied().fold(f64::INFINITY, f64::min);
            (least, of.iter().copied().fold(0.0, f64::max))
        };
        let spread = |each: &Vec<f64>| extremes(each).1 / extremes(each).0.max(1.0);
        let spread = median(&mut rounds.iter().map(spread).collect::<Vec<_>>());
        let (total_least, total_most) = extremes(&sums);
        let disks = each.len();
        Self {
            load: work.name,
            title: work.title,
            disks,
            total,
            total_least,
            total_most,
            each,
            spread,
            fell: before.iter().any(|row| row.load == work.name && total_most < row.total_least),
            uneven: work.loads.len() == 1 && disks > 1 && spread > SPREAD_MAX,
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    setting: Setting,
    site: String,
    /// The device, as the disks name it, and how many share it; or why they do not.
    device: String,
    pool_pages: u32,
    rows: Vec<Row>,
    interrupted: bool,
}

impl Report {
    fn tables(&self) -> String {
        let mut out = self.setting.line(&self.site);
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(out, "device: {}; page pool of {} pages\n", self.device, self.pool_pages);
        let _ = writeln!(
            out,
            "{:9} {:>6} {:>10} {:>10} {:>10} {:>8}",
            "load", "disks", "total", "slowest", "fastest", "spread"
        );
        for row in &self.rows {
            let slowest = row.each.iter().copied().fold(f64::INFINITY, f64::min);
            let fastest = row.each.iter().copied().fold(0.0, f64::max);
            let _ = writeln!(
                out,
                "{:9} {:>6} {:>10.2} {:>10.3} {:>10.3} {:>8.3}{}{}",
                row.load,
                row.disks,
                row.total / 1e6,
                slowest / 1e6,
                fastest / 1e6,
                row.spread,
                if row.fell { "  FELL" } else { "" },
                if row.uneven { "  UNEVEN" } else { "" }
            );
        }
        if self.interrupted {
            out.push_str(CUT_SHORT);
        }
        out
    }

    /// Totals of one load over the number of disks.
    fn totals(&self, load: &str) -> String {
        let rows = || self.rows.iter().filter(|row| row.load == load);
        let line = |name: &str, of: &dyn Fn(&Row) -> f64| Line {
            name: name.to_owned(),
            points: rows().map(|row| (row.disks as f64, of(row) / 1e6)).collect(),
        };
        Lines {
            title: rows().next().map_or_else(String::new, |row| format!("All disks: {}", row.title)),
            x: Axis::log("disks that work at once"),
            y: Axis::linear("MB/s"),
            lines: vec![
                line("median of the rounds", &|row| row.total),
                line("least", &|row| row.total_least),
                line("most", &|row| row.total_most),
            ],
        }
        .svg()
    }

    /// What each disk moved, for each number of disks.
    fn each(&self, load: &str) -> String {
        let rows = || self.rows.iter().filter(|row| row.load == load);
        let line = |row: &Row| Line {
            name: format!("{} disks", row.disks),
            points: (1..).zip(&row.each).map(|(disk, rate)| (f64::from(disk), rate / 1e6)).collect(),
        };
        Points(Lines {
            title: rows().next().map_or_else(String::new, |row| format!("Each disk: {}", row.title)),
            x: Axis::linear("number of the disk"),
            y: Axis::log("MB/s"),
            lines: rows().map(line).collect(),
        })
        .svg()
    }
}

pub fn run(arguments: &ScaleArguments) -> Result<()> {
    let (time, rounds) = arguments.common.times((10.0, 3), (0.2, 1))?;
    check_only(&arguments.only, &WORKS.map(|work| work.name), "load")?;
    end_at_interrupt();
    let program = super::server::ours().map_err(|why| ControlError::new(Errno::ENOENT, why))?;
    let awake = arguments.common.awake()?;
    let counts = if arguments.common.quick { &COUNTS_QUICK[..] } else { &COUNTS[..] };
    let most = usize::from(arguments.disks);
    let mut counts: Vec<usize> = counts.iter().copied().filter(|count| *count < most).collect();
    counts.push(most.min(if arguments.common.quick { COUNTS_QUICK[1] } else { most }));
    counts.dedup();
    let sizes = Sizes { full_len: IMAGE_LEN, fresh_len: 0, fresh_requests_max: 0, fresh_space_max: 0 };
    let ground = Ground::new(&arguments.dir, |_, _| sizes)?;
    let images = images(&ground, counts.last().copied().unwrap_or(1))?;
    let works: Vec<Work> = WORKS.into_iter().filter(|work| wanted(&arguments.only, work.name)).collect();
    let mut report = Report {
        setting: Setting::now(time, rounds, awake.is_some()),
        site: ground.site.line(),
        device: String::new(),
        pool_pages: POOL_PAGES,
        rows: Vec::new(),
        interrupted: false,
    };
    let mut progress = Progress::new(works.len() * counts.len() * rounds);
    for work in &works {
        let mut guests = start(&program, &ground, &images, work, arguments.share).map_err(failed)?;
        // Now: a connection that says nothing for long is closed.
        report.device = device(&mut guests).map_err(failed)?;
        let mut found = vec![Vec::new(); counts.len()];
        'rounds: for _ in 0..rounds {
            for (count, found) in counts.iter().zip(&mut found) {
                if interrupted() {
                    break 'rounds;
                }
                progress.begin(&format!("{} {count}", work.name));
                found.push(together(&mut guests[..*count], work, time).map_err(failed)?);
            }
        }
        for found in found.iter().filter(|found| !found.is_empty()) {
            report.rows.push(Row::of(work, found, &report.rows));
        }
    }
    progress.end();
    report.interrupted = interrupted();
    report.setting.environment.end();
    drop((ground, awake));
    if let Some(dir) = &arguments.svg {
        fs::create_dir_all(dir)
            .map_err(|error| ControlError::io(format_args!("cannot make {}", dir.display()), &error))?;
        for work in works.iter().filter(|work| report.rows.iter().any(|row| row.load == work.name)) {
            plot::write(&dir.join(format!("scale-{}.svg", work.name)), &report.totals(work.name))?;
            plot::write(&dir.join(format!("scale-{}-each.svg", work.name)), &report.each(work.name))?;
        }
    }
    arguments.common.show(&report, &report.tables())
}

fn images(ground: &Ground, count: usize) -> Result<Vec<PathBuf>> {
    let data = vec![0x5a; IMAGE_LEN as usize];
    let write = |index: usize| {
        let path = ground.dir().join(format!("scale-{index}.raw"));
        fs::write(&path, &data)
            .and_then(|()| fs::File::open(&path)?.sync_all())
            .map(|()| path.clone())
            .map_err(|error| ControlError::io(format_args!("cannot write {}", path.display()), &error))
    };
    (0..count).map(write).collect()
}

fn start(
    program: &Path,
    ground: &Ground,
    images: &[PathBuf],
    work: &Work,
    share: Option<ShareSpec>,
) -> std::result::Result<Vec<Guest>, String> {
    let guest = |(index, image): (usize, &PathBuf)| {
        let bytes = work.load(index, Duration::ZERO).block_len;
        let setup = Setup {
            image: format!("aio:{}", image.display()),
            front: front(Movement::Copy, bytes.div_ceil(PAGE), bytes, 1),
            movement: Movement::Copy,
            polls: false,
            pool: Some(format!("scale:{POOL_PAGES}")),
            share,
        };
        Guest::start(program, ground, index as u32 + 1, &setup)
    };
    images.iter().enumerate().map(guest).collect()
}

/// The device, and how many disks share it.
fn device(guests: &mut [Guest]) -> std::result::Result<String, String> {
    let Some(guest) = guests.first_mut() else { return Ok(String::new()) };
    let share = guest.disk.share()?;
    let shared = format!("{} ({} disks share it)", share.device, share.disks);
    Ok(share.not_shared.map_or(shared, |why| format!("not shared by Tapio, {why}")))
}

/// Bytes a second of each.
fn together(guests: &mut [Guest], work: &Work, time: Duration) -> std::result::Result<Vec<f64>, String> {
    let barrier = Barrier::new(guests.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = guests
            .iter_mut()
            .enumerate()
            .map(|(index, guest)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    // What is in flight at the end still counts: the others work as long.
                    load::run(guest, &work.load(index, time / 10))?;
                    load::run(guest, &work.load(index, time))
                })
            })
            .collect();
        let joined = threads.into_iter().enumerate().map(|(index, thread)| {
            let outcome = thread.join().unwrap_or_else(|_| Err("a load thread panicked".into()))?;
            match outcome.report.errors {
                0 => Ok(outcome.report.rate() * f64::from(work.load(index, time).block_len)),
                errors => Err(format!("{errors} requests of disk {} failed", index + 1)),
            }
        });
        joined.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_total_falls_only_outside_of_the_noise_and_only_equals_are_compared() {
        let (same, mixed) = (&WORKS[0], &WORKS[4]);
        let one = Row::of(same, &[vec![100e6], vec![90e6], vec![110e6]], &[]);
        assert_eq!((one.total, one.total_least, one.total_most), (100e6, 90e6, 110e6));
        assert!(!one.fell && !one.uneven);
        let within = Row::of(same, &[vec![45e6, 47e6], vec![40e6, 40e6]], std::slice::from_ref(&one));
        assert!(!within.fell && within.uneven, "{within:?}");
        let below = Row::of(same, &[vec![44e6, 44e6], vec![40e6, 40e6]], std::slice::from_ref(&one));
        assert!(below.fell && !below.uneven, "{below:?}");
        assert!(!Row::of(mixed, &[vec![4e6, 40e6]], std::slice::from_ref(&one)).fell, "another load");
        assert!(!Row::of(mixed, &[vec![4e6, 40e6]], &[]).uneven);
    }

    #[test]
    fn both_pictures_have_what_the_table_has() {
        let rows =
            vec![Row::of(&WORKS[0], &[vec![100e6]], &[]), Row::of(&WORKS[0], &[vec![50e6, 51e6]], &[])];
        let report = Report {
            setting: Setting::now(Duration::from_secs(1), 1, false),
            site: "somewhere".into(),
            device: "8-0 (2 disks share it)".into(),
            pool_pages: POOL_PAGES,
            rows,
            interrupted: false,
        };
        assert!(report.tables().ends_with("    1.020\n"), "{}", report.tables());
        for (picture, name) in [(report.totals("read-4m"), "All disks"), (report.each("read-4m"), "2 disks")]
        {
            assert!(picture.starts_with("<svg") && picture.contains(name), "{picture}");
        }
    }
}
