//! `tapio-endure`: our programs under everything that may happen to them, for minutes or hours.
//!
//! ```text
//!   main        legs, each with threads of its own, until the time is over or something is found
//!     |
//!   disk        a disk: a schedule of kills, snapshots, commits, mirrors and faults, drawn from the seed
//!     |
//!   load        its NBD clients: requests at random, every answer compared
//!     |
//!   model       what each sector has to hold
//!   xenstored   clients of our xenstored, each with a part of the tree that it knows
//!   snapshots   a disk of a VM whose snapshots come and go, and are merged
//!   toolstack   a daemon with VDIs and VMs, and what it has to show of them
//!   report      what was done and found
//! ```
//!
//! The programs under test are started as a user starts them; nothing of them is linked in but the NBD client.

mod disk;
mod load;
mod model;
mod random;
mod report;
mod snapshots;
mod toolstack;
mod xenstored;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use clap::Parser;

use crate::report::{Finding, Report, words_of};

/// Run Tapio's programs under verified load while they are killed, paused, moved, and their storage fails
///
/// Each leg is a disk of one kind with clients that read and write at random and compare every byte with a model, and
/// a schedule that is drawn from the seed: SIGKILL and a start, pause, live and offline snapshots, commits of inner
/// images and of the leaf, mirrors and pivots, growing, kills in the middle of each of these, full storages, EIO and
/// hangs. What was answered has to be there, flushed or not: no power is cut here. Images are checked by 'vhd-util
/// check', and read by qemu-img where it can. More legs do the same to tapio-xenstored and to tapiod, with models of
/// the tree, of the VDIs, and of a disk whose snapshots are merged.
///
/// The first byte that differs, or a command that answers what it may not, ends the run: it prints the leg, the step
/// and the last actions, keeps images and logs, and the exit status is 1. The same seed draws the same schedule; what
/// clients do in between depends on the host's speed. 2: wrong usage, or no leg can run here.
#[derive(Debug, Parser)]
#[command(
    name = "tapio-endure",
    version,
    after_long_help = "Examples:
  tapio-endure --minutes 60                             an hour of everything, a seed from the clock
  tapio-endure --seed 7 --minutes 2 --only chain,full
  tapio-endure --list                                   the legs
  TAPIO_BIN_DIR=target/release tapio-endure             other programs than those beside this one"
)]
struct Arguments {
    /// The schedule is drawn from it; printed first. Default: from the clock
    #[arg(long)]
    seed: Option<u64>,
    /// How long the run lasts
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Legs to run, as chain,full. Default: all that --list shows without a remark
    #[arg(long, value_delimiter = ',', value_name = "LEG")]
    only: Vec<String>,
    /// Where images, sockets and logs are kept. Default: the system's directory for temporary files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Do not print each action on standard error
    #[arg(long, short)]
    quiet: bool,
    /// Name the legs and what they do
    #[arg(long)]
    list: bool,
}

/// A part of the run.
struct Leg {
    name: &'static str,
    about: &'static str,
    by_default: bool,
    kind: LegKind,
}

#[derive(Clone, Copy)]
enum LegKind {
    Disk(&'static disk::DiskKind),
    Xenstored,
    Toolstack,
    Snapshots,
}

fn legs() -> Vec<Leg> {
    let disks = disk::KINDS.iter().map(|kind| Leg {
        name: kind.name,
        about: kind.about,
        by_default: kind.by_default,
        kind: LegKind::Disk(kind),
    });
    let others = [
        Leg {
            name: xenstored::NAME,
            about: "tapio-xenstored, killed and replaced by live updates under load",
            by_default: true,
            kind: LegKind::Xenstored,
        },
        Leg {
            name: toolstack::NAME,
            about: "tapiod with VDIs and VMs, killed with its disk processes in the middle of operations",
            by_default: true,
            kind: LegKind::Toolstack,
        },
        Leg {
            name: snapshots::NAME,
            about: "snapshots of a VM that writes come every second, go again, and are merged",
            by_default: true,
            kind: LegKind::Snapshots,
        },
    ];
    disks.chain(others).collect()
}

impl Leg {
    /// Runs until the run ends. `Err` is why it cannot run here.
    fn run(&self, dir: &Path, report: &Report) -> Result<(), String> {
        match self.kind {
            LegKind::Disk(kind) => disk::run(kind, dir, report),
            LegKind::Xenstored => xenstored::run(dir, report),
            LegKind::Toolstack => toolstack::run(dir, report),
            LegKind::Snapshots => snapshots::run(dir, report),
        }
    }
}

fn seed() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(1, |since| since.as_micros() as u64 % 1_000_000_000)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        for leg in legs() {
            let when = if leg.by_default { "" } else { "; only when it is named" };
            println!("{:<12} {}{when}", leg.name, leg.about);
        }
        return ExitCode::SUCCESS;
    }
    let known = |name: &String| legs().iter().any(|leg| leg.name == name);
    if let Some(unknown) = arguments.only.iter().find(|name| !known(name)) {
        eprintln!("tapio-endure: there is no leg '{unknown}': --list names them");
        return ExitCode::from(2);
    }
    if !(arguments.minutes > 0.0 && arguments.minutes < 1e6) {
        eprintln!("tapio-endure: --minutes needs a number above 0");
        return ExitCode::from(2);
    }
    let report = Report::new(arguments.seed.unwrap_or_else(seed), arguments.quiet);
    eprintln!("tapio-endure: seed {}, {} minutes", report.seed, arguments.minutes);
    let dir = arguments.dir.clone().unwrap_or_else(std::env::temp_dir);
    if let Err(error) = fs::create_dir_all(&dir) {
        eprintln!("tapio-endure: {} cannot be made: {error}; give another --dir", dir.display());
        return ExitCode::from(2);
    }
    let ran = run(&arguments, &dir, &report);
    if arguments.json {
        println!("{:#}", report.json());
    } else {
        print!("{}", report.text());
    }
    match (ran, report.is_clean()) {
        (_, false) => {
            println!("replay: tapio-endure --seed {} --minutes {}", report.seed, arguments.minutes);
            ExitCode::FAILURE
        }
        (0, true) => {
            eprintln!("tapio-endure: no leg can run here");
            ExitCode::from(2)
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Runs the legs side by side, and gives how many could run.
fn run(arguments: &Arguments, dir: &Path, report: &Report) -> usize {
    let chosen = |leg: &Leg| match arguments.only.as_slice() {
        [] => leg.by_default,
        only => only.iter().any(|only| only == leg.name),
    };
    let until = Instant::now() + Duration::from_secs_f64(arguments.minutes * 60.0);
    thread::scope(|scope| {
        let legs: Vec<_> = legs()
            .into_iter()
            .filter(chosen)
            .map(|leg| {
                scope.spawn(move || {
                    let ran = catch_unwind(AssertUnwindSafe(|| leg.run(dir, report)));
                    match ran.as_ref() {
                        Ok(Ok(())) => {}
                        Ok(Err(reason)) => report.leave_out(leg.name, reason),
                        Err(panic) => {
                            let what = words_of(panic.as_ref());
                            report.found(Finding { leg: leg.name.into(), step: 0, what });
                        }
                    }
                    matches!(ran, Ok(Ok(())))
                })
            })
            .collect();
        while Instant::now() < until && !report.is_ending() && !legs.iter().all(|leg| leg.is_finished()) {
            thread::sleep(Duration::from_millis(50));
        }
        report.end();
        legs.into_iter().filter_map(|leg| leg.join().ok()).filter(|ran| *ran).count()
    })
}
