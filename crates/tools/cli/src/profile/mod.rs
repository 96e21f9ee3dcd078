//! `tapio profile`: what a storage target is, where it is fast, and which settings suit it.

mod scratch_disk;
mod signals;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use tapio_control::{ControlError, Errno};
use tapio_profile::{
    AgeingOptions, Options, Pace, Parts, Profile, Progress, ScanOptions, SweepOptions, ageing, profile,
    report, target,
};
use tapio_report::failure::{self, Result, print, print_json};

use scratch_disk::ScratchDisk;

/// Seconds of a run.
const SECONDS: f64 = 300.0;
const SECONDS_QUICK: f64 = 30.0;
/// Parts of the bar.
const PARTS: u64 = 1000;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio profile /dev/sdb                             reads alone; five minutes
  tapio profile /dev/sdb --quick --html sdb.html     half a minute, and a page with pictures
  tapio profile /dev/sdb --destroy-contents          writes, discards and zeroing too: its data is lost
  tapio profile UUID-OF-AN-SR --json                 a VDI is made there, measured, and destroyed
  tapio profile /dev/sdb --write-settings sdb.conf && \\
    xe sr-create type=ext name-label=fast device-config:device=/dev/sdb settings=sdb.conf

Ctrl-C ends a run early: the report is of what was measured by then. The scheduler of the device is as before then.
docs/profile.md says what the figures mean.")]
pub struct ProfileArguments {
    /// A block device, a file, or the UUID of an SR
    target: String,
    /// How long it may take; 300 unless given, 30 with --quick
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<f64>,
    /// Fewer places, sizes and depths
    #[arg(long)]
    quick: bool,
    /// Measure writes, discards and zeroing too: everything that the target holds is lost
    #[arg(long)]
    destroy_contents: bool,
    /// Places over the address space; 256 unless given, 64 with --quick
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    points: Option<u32>,
    /// Reads of 1 MiB in each place; 100 unless given, 10 with --quick
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    reads: Option<u32>,
    /// No more requests in flight than this
    #[arg(long, value_name = "COUNT", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=8192))]
    depth_max: u32,
    /// Measure these parts alone; with commas
    #[arg(long, value_name = "PART", value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Megabytes of the VDI that is made in an SR
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(16..=1_048_576))]
    scratch_mib: u64,
    /// Instead of a profile: throughput over time, with and without TRIM
    #[arg(long, requires = "destroy_contents", conflicts_with_all = ["html", "dat", "write_settings", "only"])]
    ageing: bool,
    /// Of --ageing: percent of the target that are never written, each in runs of its own; with commas
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_values_t = [0, 25], requires = "ageing",
        value_parser = clap::value_parser!(u32).range(0..=90))]
    spare: Vec<u32>,
    /// Of --ageing: how often throughput is measured in each run
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Write a page there that contains everything, pictures too
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the pictures into this directory, as SVG
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
    /// Write lines 'size bs qd tp' of random reads there: bytes in flight, bytes of a request, requests, KiB/s
    #[arg(long, value_name = "FILE")]
    dat: Option<PathBuf>,
    /// Write the settings there that 'xe sr-create settings=FILE' takes
    #[arg(long, value_name = "FILE")]
    write_settings: Option<PathBuf>,
    /// For an SR, where to connect, as 'xe' takes it: -s SERVER, -u USER, --socket PATH ...
    #[arg(last = true, value_name = "XE OPTION")]
    xe: Vec<String>,
}

/// Parts of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Throughput over the address space
    Scan,
    /// Stripes, by two reads at a time
    Geometry,
    /// Block size and queue depth
    Sweep,
    /// The schedulers of the device, one after the other
    Schedulers,
    /// Flushes, discards, zeroing
    Costs,
}

fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("'{text}' is no number of seconds from 0.1 to 86400")),
    }
}

/// Runs the command.
pub fn run(arguments: &ProfileArguments) -> ExitCode {
    let stop = signals::stop_on_signals();
    if arguments.ageing {
        let done = aged(arguments, stop);
        return done.map_or_else(|error| failure::report("tapio profile", &error), |()| ExitCode::SUCCESS);
    }
    let done = measured(arguments, stop).and_then(|profile| {
        write_files(arguments, &profile)?;
        if arguments.json { print_json(&profile) } else { print(&report::text(&profile)) }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report("tapio profile", &error),
    }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36 && uuid::Uuid::try_parse(text).is_ok()
}

fn aged(arguments: &ProfileArguments, stop: &AtomicBool) -> Result<()> {
    let open = target::open(Path::new(&arguments.target), true)?;
    let options = AgeingOptions { spare: arguments.spare.clone(), rounds: arguments.rounds as usize };
    let bar = bar(arguments);
    let tell = |progress: Progress<'_>| show(&bar, progress);
    let found = ageing(&arguments.target, &open, &options, &Pace::new(stop, time(arguments), &tell))?;
    bar.finish_and_clear();
    if let Some(dir) = &arguments.svg {
        make(dir)?;
        write(&dir.join("ageing.svg"), &found.svg())?;
    }
    if arguments.json { print_json(&found) } else { print(&found.text()) }
}

fn bar(arguments: &ProfileArguments) -> ProgressBar {
    let bar = match std::io::stderr().is_terminal() && !arguments.json {
        true => ProgressBar::new(PARTS),
        false => ProgressBar::hidden(),
    };
    let style = ProgressStyle::with_template("[{bar:40}] {percent:>3} %  {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("#>."));
    bar
}

fn show(bar: &ProgressBar, progress: Progress<'_>) {
    bar.set_position((progress.share * PARTS as f64) as u64);
    bar.set_message(format!("{}, {} s left", progress.what, progress.left.as_secs()));
}

fn time(arguments: &ProfileArguments) -> Duration {
    let usual = if arguments.quick { SECONDS_QUICK } else { SECONDS };
    Duration::from_secs_f64(arguments.seconds.unwrap_or(usual))
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text)
        .map_err(|error| ControlError::io(format_args!("cannot write {}", path.display()), &error))
}

fn make(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir)
        .map_err(|error| ControlError::io(format_args!("cannot make {}", dir.display()), &error))
}

fn measured(arguments: &ProfileArguments, stop: &AtomicBool) -> Result<Profile> {
    let (bar, time) = (bar(arguments), time(arguments));
    let tell = |progress: Progress<'_>| show(&bar, progress);
    let done = if is_uuid(&arguments.target) {
        let failed = |error: crate::xe::Failure| {
            let text = error.text(&|_| None);
            ControlError::new(Errno::EIO, format!("SR {}: {}", arguments.target, text.trim_end()))
        };
        let disk = ScratchDisk::make(&arguments.target, arguments.scratch_mib << 20, &arguments.xe)
            .map_err(failed)?;
        let done = disk.path().map_err(failed).and_then(|path| {
            scratch_disk::fill(&path, stop)?;
            // It was made for this.
            let mut open = target::open(&path, true)?;
            profile(&arguments.target, &mut open, &options(arguments, true), &Pace::new(stop, time, &tell))
        });
        let ended = disk.end().map_err(failed);
        done.and_then(|profile| ended.map(|()| profile))
    } else {
        let mut open = target::open(Path::new(&arguments.target), arguments.destroy_contents)?;
        let options = options(arguments, arguments.destroy_contents);
        profile(&arguments.target, &mut open, &options, &Pace::new(stop, time, &tell))
    };
    bar.finish_and_clear();
    done
}

fn options(arguments: &ProfileArguments, destroy: bool) -> Options {
    let or = |given: Option<u32>, usual: usize, quick: usize| match (given, arguments.quick) {
        (Some(given), _) => given as usize,
        (None, false) => usual,
        (None, true) => quick,
    };
    let wants = |part: Part| arguments.only.is_empty() || arguments.only.contains(&part);
    Options {
        scan: ScanOptions { points: or(arguments.points, 256, 64), reads: or(arguments.reads, 100, 10) },
        sweep: SweepOptions { quick: arguments.quick, depth_max: arguments.depth_max },
        destroy,
        parts: Parts {
            scan: wants(Part::Scan),
            geometry: wants(Part::Geometry),
            sweep: wants(Part::Sweep),
            // A VDI's own device has a scheduler that no guest's disk has.
            schedulers: wants(Part::Schedulers) && !is_uuid(&arguments.target),
            costs: wants(Part::Costs),
        },
    }
}

fn write_files(arguments: &ProfileArguments, profile: &Profile) -> Result<()> {
    if let Some(path) = &arguments.html {
        write(path, &report::page(profile))?;
    }
    if let Some(path) = &arguments.dat {
        write(path, &profile.dat())?;
    }
    if let Some(path) = &arguments.write_settings {
        write(path, &profile.advice.file(&profile.target))?;
    }
    if let Some(dir) = &arguments.svg {
        make(dir)?;
        for picture in report::pictures(profile) {
            write(&dir.join(format!("{}.svg", picture.name)), &picture.svg)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_an_sr_and_a_path_is_none() {
        assert!(is_uuid("c67132ec-0b1f-3a69-0305-6450bfccd790"));
        assert!(!is_uuid("/dev/sdb") && !is_uuid("c67132ec0b1f3a6903056450bfccd790"));
        assert_eq!(seconds("0.5"), Ok(0.5));
        assert!(["0", "-1", "nan", "1e9", "x"].iter().all(|bad| seconds(bad).is_err()));
    }
}
