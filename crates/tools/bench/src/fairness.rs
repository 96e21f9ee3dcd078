//! `tapio bench fairness`: two disks on one device, one with large requests and one with small ones.
//!
//! ```text
//!   case:  dd bs=1408K ─ ring ─▶ tapio-disk ─▶ file ┐
//!                                                   ├─ one device; both at once, with sharing and without, in turn
//!          dd bs=88K   ─ ring ─▶ tapio-disk ─▶ file ┘
//! ```

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tapio_control::{ControlError, Errno, ShareSpec};
use tapio_load::{Load, Mix};
use tapio_report::failure::Result;
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

/// Bytes of a direct request of a block ring.
const DIRECT: u32 = 11 * PAGE;
/// What the goal allows: the faster disk's rate over the slower one's, and the loss of the total.
const RATIO_MAX: f64 = 1.5;
const KEPT_MIN: f64 = 0.95;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio bench fairness --dir /srv/ssd                 all cases: two minutes
  tapio bench fairness --dir /srv/ssd --only direct   requests of 44 KiB, as guests without indirect requests make them
  tapio bench fairness --quick --json -               does it run at all, as JSON

Columns: MB/s (10^6 bytes) of the large and of the small writer, the ratio of both, their total, and the total beside
the one without sharing. Medians over the rounds.")]
pub struct FairnessArguments {
    /// Where the images are made, on the device in question; they are removed at the end
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    common: Common,
    /// Only cases with this in their names; may be given more than once
    #[arg(long, value_name = "CASE")]
    only: Vec<String>,
    /// Bytes of each of the two images, in MiB
    #[arg(long, default_value_t = 256, value_name = "MIB", value_parser = clap::value_parser!(u64).range(4..65536))]
    size: u64,
}

/// One side: requests in flight and the bytes of each.
type Side = (u32, u32);

/// Two writers.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    title: &'static str,
    sides: [Side; 2],
}

const CASES: [Case; 3] = [
    Case {
        name: "direct",
        title: "bs=1408K beside bs=88K, in requests of 44 KiB",
        sides: [(32, DIRECT), (2, DIRECT)],
    },
    Case {
        name: "large",
        title: "bs=1408K beside bs=88K, each in one request",
        sides: [(1, 32 * DIRECT), (1, 2 * DIRECT)],
    },
    Case { name: "depth", title: "32 beside 1 in flight, 44 KiB", sides: [(32, DIRECT), (1, DIRECT)] },
];

/// One run of both at once: bytes a second of each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Rates([f64; 2]);

impl Rates {
    fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    fn ratio(&self) -> f64 {
        self.0[0] / self.0[1].max(1.0)
    }
}

/// Medians of one case, with sharing or without.
#[derive(Clone, Debug, Serialize)]
struct Row {
    case: &'static str,
    title: &'static str,
    shared: bool,
    large_bytes_per_second: f64,
    small_bytes_per_second: f64,
    ratio: f64,
    total_bytes_per_second: f64,
    /// Of the total without sharing.
    kept: Option<f64>,
    rounds: usize,
}

impl Row {
    fn of(case: &Case, shared: bool, rates: &[Rates], free: &[Rates]) -> Self {
        let middle = |of: &[Rates], value: &dyn Fn(&Rates) -> f64| {
            median(&mut of.iter().map(value).collect::<Vec<_>>())
        };
        let total = middle(rates, &Rates::total);
        Self {
            case: case.name,
            title: case.title,
            shared,
            large_bytes_per_second: middle(rates, &|rates| rates.0[0]),
            small_bytes_per_second: middle(rates, &|rates| rates.0[1]),
            ratio: middle(rates, &Rates::ratio),
            total_bytes_per_second: total,
            kept: (shared && !free.is_empty()).then(|| total / middle(free, &Rates::total).max(1.0)),
            rounds: rates.len(),
        }
    }

    fn misses(&self) -> bool {
        self.shared && (self.ratio >= RATIO_MAX || self.kept.is_some_and(|kept| kept < KEPT_MIN))
    }
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    setting: Setting,
    site: String,
    /// The shared device, as disk processes name it, or why there is none.
    device: String,
    rows: Vec<Row>,
    interrupted: bool,
}

impl Report {
    fn tables(&self) -> String {
        let mut out = self.setting.line(&self.site);
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(out, "device: {}\n", self.device);
        let _ = writeln!(
            out,
            "{:9} {:8} {:>9} {:>9} {:>7} {:>9} {:>7}",
            "case", "sharing", "large", "small", "ratio", "total", "kept"
        );
        for row in &self.rows {
            let mb = |rate: f64| rate / 1e6;
            let kept = row.kept.map_or_else(String::new, |kept| format!("{:.1} %", kept * 100.0));
            let _ = writeln!(
                out,
                "{:9} {:8} {:>9.2} {:>9.2} {:>7.2} {:>9.2} {kept:>7}{}",
                row.case,
                if row.shared { "on" } else { "off" },
                mb(row.large_bytes_per_second),
                mb(row.small_bytes_per_second),
                row.ratio,
                mb(row.total_bytes_per_second),
                if row.misses() { "  MISSED" } else { "" }
            );
        }
        if self.interrupted {
            out.push_str(CUT_SHORT);
        }
        out
    }
}

pub fn run(arguments: &FairnessArguments) -> Result<()> {
    let (time, rounds) = arguments.common.times((10.0, 3), (0.2, 1))?;
    check_only(&arguments.only, &CASES.map(|case| case.name), "case")?;
    end_at_interrupt();
    let program = super::server::ours().map_err(|why| ControlError::new(Errno::ENOENT, why))?;
    let awake = arguments.common.awake()?;
    let len = if arguments.common.quick { 4 << 20 } else { arguments.size << 20 };
    let sizes = Sizes { full_len: len, fresh_len: len, fresh_requests_max: 0, fresh_space_max: 0 };
    let ground = Ground::new(&arguments.dir, |_, _| sizes)?;
    let images = images(&ground, len)?;
    let cases: Vec<Case> = CASES.into_iter().filter(|case| wanted(&arguments.only, case.name)).collect();
    let mut progress = Progress::new(cases.len() * rounds * 2);
    let mut found: BTreeMap<(&str, bool), Vec<Rates>> = BTreeMap::new();
    let mut device = String::new();
    'rounds: for _ in 0..rounds {
        for (case, shared) in cases.iter().flat_map(|case| [(case, false), (case, true)]) {
            if interrupted() {
                break 'rounds;
            }
            progress.begin(&format!("{} {}", case.name, if shared { "on" } else { "off" }));
            let share = ShareSpec { off: !shared, ..ShareSpec::default() };
            let (rates, name) = both(&program, &ground, &images, case, share, time, len).map_err(failed)?;
            found.entry((case.name, shared)).or_default().push(rates);
            if shared {
                device = name;
            }
        }
    }
    progress.end();
    let of = |name, shared| found.get(&(name, shared)).map(Vec::as_slice).unwrap_or_default();
    let rows = cases.iter().flat_map(|case| [(case, false), (case, true)]);
    let rows = rows.filter(|(case, shared)| !of(case.name, *shared).is_empty());
    let rows = rows.map(|(case, shared)| Row::of(case, shared, of(case.name, shared), of(case.name, false)));
    let mut report = Report {
        rows: rows.collect(),
        site: ground.site.line(),
        setting: Setting::now(time, rounds, awake.is_some()),
        device,
        interrupted: interrupted(),
    };
    report.setting.environment.end();
    drop(ground);
    arguments.common.show(&report, &report.tables())
}

fn images(ground: &Ground, len: u64) -> Result<[PathBuf; 2]> {
    let images = [0, 1].map(|index| ground.dir().join(format!("share-{index}.raw")));
    for image in &images {
        let written = fs::File::create(image).and_then(|mut file| {
            let data = vec![0x5a; 1 << 20];
            (0..len >> 20).try_for_each(|_| std::io::Write::write_all(&mut file, &data))?;
            file.sync_all()
        });
        written
            .map_err(|error| ControlError::io(format_args!("cannot write {}", image.display()), &error))?;
    }
    Ok(images)
}

/// Runs both writers at once.
fn both(
    program: &std::path::Path,
    ground: &Ground,
    images: &[PathBuf; 2],
    case: &Case,
    share: ShareSpec,
    time: Duration,
    span_len: u64,
) -> std::result::Result<(Rates, String), String> {
    let mut guests = Vec::new();
    for (number, (image, (depth, bytes))) in images.iter().zip(case.sides).enumerate() {
        let setup = Setup {
            image: format!("aio:{}", image.display()),
            front: front(Movement::Copy, bytes.div_ceil(PAGE), bytes, depth),
            movement: Movement::Copy,
            polls: false,
            // Large enough never to be full.
            pool: Some("fairness:4096".into()),
            share: Some(share),
        };
        guests.push(Guest::start(program, ground, number as u32 + 1, &setup)?);
    }
    let load = |(depth, block_len): Side, time| Load {
        mix: Mix::SequentialWrite,
        block_len,
        depth,
        span_len,
        time,
        requests_max: u64::MAX,
        spin: false,
        seed: 0,
    };
    // Shares settle first, as they would have in a load that lasts.
    let settle = time.min(Duration::from_secs(3));
    let barrier = Barrier::new(guests.len());
    let rates = std::thread::scope(|scope| {
        let threads: Vec<_> = guests
            .iter_mut()
            .zip(case.sides)
            .map(|(guest, side)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    // Without a pause between: the other one would be alone meanwhile.
                    load::run(guest, &load(side, settle))?;
                    load::run(guest, &load(side, time))
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| {
            let outcome = thread.join().unwrap_or_else(|_| Err("a load thread panicked".into()))?;
            match outcome.report.errors {
                0 => Ok(outcome.report.rate()),
                errors => Err(format!("{errors} requests failed")),
            }
        });
        joined.collect::<std::result::Result<Vec<f64>, String>>()
    })?;
    let bytes = case.sides.map(|(_, bytes)| f64::from(bytes));
    let shared = guests[0].disk.share()?;
    let device = shared.not_shared.map_or_else(
        || format!("{} ({} disks share it)", shared.device, shared.disks),
        |why| format!("not shared, {why}"),
    );
    Ok((Rates([rates[0] * bytes[0], rates[1] * bytes[1]]), device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_the_medians_and_misses_a_goal() {
        let rates = |large, small| Rates([large, small]);
        let free = [rates(80e6, 10e6), rates(90e6, 10e6), rates(85e6, 9e6)];
        let fair = [rates(46e6, 44e6), rates(60e6, 31e6), rates(50e6, 42e6)];
        let row = Row::of(&CASES[0], true, &fair, &free);
        assert!((row.ratio - 50.0 / 42.0).abs() < 1e-9, "{row:?}");
        assert!((row.kept.expect("known") - 91.0 / 94.0).abs() < 1e-9, "{row:?}");
        assert!(!row.misses());
        assert!(Row::of(&CASES[0], true, &free, &free).misses(), "uneven");
        let slow = fair.map(|Rates([large, small])| rates(large / 2.0, small / 2.0));
        assert!(Row::of(&CASES[0], true, &slow, &free).misses(), "slow");
        let off = Row::of(&CASES[0], false, &free, &free);
        assert!(!off.misses() && off.kept.is_none());
    }
}
