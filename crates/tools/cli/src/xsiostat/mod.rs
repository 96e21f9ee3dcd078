//! `xsiostat`: what virtual disks do, every second, from shared memory.
//!
//! Reads the files of our disk processes and of a foreign tapdisk alike, without asking any process. A sample is
//! computed once (`sample`) and then printed in one of the formats (`format`) or written to a file (`record`), from
//! which it can be printed again in any format.

mod format;
mod record;
mod sample;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{ArgAction, CommandFactory, Parser};
use tapio_control::{ControlError, Errno};
use tapio_stat::{PublishedStats, ShmRoot, VbdId};

use format::Format;
use sample::{Filter, Sample, Sampler};
use tapio_report::failure::{self, Result};

/// The first sample comes after this.
const FIRST: Duration = Duration::from_millis(100);

/// Print the I/O statistics of virtual disks.
///
/// Each sample has a row for every virtual disk: requests and megabytes (10^6) a second, and the average number of
/// requests in flight. Disks are known by domain and device; without a hypervisor the domain is 0 and the device is
/// the disk's minor number. A disk that is unplugged drops out.
#[derive(Debug, Parser)]
#[command(name = "xsiostat", disable_version_flag = true, disable_help_flag = true)]
#[command(after_long_help = "Examples:
  xsiostat -s                       every second, including disks plugged later
  xsiostat -d 5 -d 6 -i 200         the disks of two domains, five times a second
  xsiostat -s -o /var/tmp/io.log    print and keep
  xsiostat --replay /var/tmp/io.log --format 6.1
  xsiostat --replay /var/tmp/io.log --format csv > io.csv

Formats: 6.5 has rates and queue lengths; 2016 adds the low-memory mode; 6.1 groups disks by page pool
and shows slots of the guest's ring (BLKBKRING, total and used) and requests in flight instead; csv has all
columns, under a line of their names.

A file written by -o is binary and has all that the formats need: --replay prints it in any of them. Slots and
pages are of the moment of the sample.

TAPIO_SHM_DIR names the directory that is read (default /dev/shm).")]
struct Arguments {
    /// Print the options in short
    #[arg(short = 'h', action = ArgAction::SetTrue)]
    short_help: bool,
    /// Print this text
    #[arg(long, action = ArgAction::HelpLong)]
    help: Option<bool>,
    /// Look for new disks before every sample
    #[arg(short)]
    scan: bool,
    /// Only disks of this domain; may be repeated
    #[arg(short = 'd', value_name = "DOMID", action = ArgAction::Append)]
    domids: Vec<u32>,
    /// Only this device; may be repeated
    #[arg(short = 'v', value_name = "VBDID", action = ArgAction::Append)]
    vbdids: Vec<u32>,
    /// Milliseconds between samples
    #[arg(short, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    interval: u64,
    /// Also write the samples to this file
    #[arg(short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// End after this many samples
    #[arg(short, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// How to print
    #[arg(long, value_enum, default_value_t = Format::V65)]
    format: Format,
    /// Print a line of JSON per sample instead
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// Print the samples of a file instead of new ones
    #[arg(long, value_name = "FILE", conflicts_with_all = ["scan", "interval", "output"])]
    replay: Option<PathBuf>,
}

/// The definition, for help, completions and pages.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// As the original names itself.
const NAME: &str = "XenServer Storage I/O Stats";

/// The banner above the help.
fn banner() -> String {
    let line = "-".repeat(NAME.len() + 2);
    format!("{line}\n {NAME}\n{line}\n")
}

/// What `-h` prints: the original's options in the original's order.
fn usage(program: &str) -> String {
    format!(
        "Usage: {program} [ -hs ] [ -i <interval> ] [ -o <out_file> ] [ -d <domain_id> [ ... ] ] [ -v <vbd_id> [ ... ] ]
  -h            Print this text; --help prints more.
  -s            Look for new VBDs before each sample.
  -d            Only this domain ('tapio domains --list' has the numbers).
  -v            Only this VBD ('tapio domains' shows those of each domain).
  -i interval   Milliseconds between samples (1000 = 1s, default=1000).
  -o out_file   Also write the samples to this file, in binary format.
"
    )
}

pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let program = arguments.first().map_or("xsiostat".into(), |name| name.to_string_lossy().into_owned());
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) if error.use_stderr() => {
            eprint!("{error}");
            return ExitCode::FAILURE;
        }
        Err(help) => {
            eprint!("{}{help}", banner());
            return ExitCode::SUCCESS;
        }
    };
    if arguments.short_help {
        eprint!("{}{}", banner(), usage(&program));
        return ExitCode::SUCCESS;
    }
    match execute(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            failure::report("xsiostat", &error);
            ExitCode::FAILURE
        }
    }
}

fn execute(arguments: &Arguments) -> Result<()> {
    if arguments.format == Format::Csv && !arguments.json {
        failure::print(format::CSV_HEAD)?;
    }
    let filter = Filter { domids: arguments.domids.clone(), vbdids: arguments.vbdids.clone() };
    match &arguments.replay {
        Some(file) => replay(arguments, &filter, file),
        None => watch(arguments, filter),
    }
}

fn show(arguments: &Arguments, sample: &Sample) -> Result<()> {
    if arguments.json {
        return failure::print(&(record::line(&sample.rates())? + "\n"));
    }
    failure::print(&format::text(arguments.format, sample))
}

fn replay(arguments: &Arguments, filter: &Filter, file: &std::path::Path) -> Result<()> {
    let count = arguments.count.unwrap_or(u64::MAX);
    let mut shown = 0;
    for sample in record::Reader::open(file)? {
        let mut sample = sample?;
        sample.vbds.retain(|vbd| filter.takes(vbd.domid, vbd.vbdid));
        if sample.vbds.is_empty() {
            continue;
        }
        show(arguments, &sample)?;
        shown += 1;
        if shown >= count {
            break;
        }
    }
    Ok(())
}

fn watch(arguments: &Arguments, filter: Filter) -> Result<()> {
    let mut file = match &arguments.output {
        Some(path) => Some(record::Writer::create(path, arguments.interval)?),
        None => None,
    };
    let mut sampler = Sampler::new(ShmRoot::from_env(), filter);
    sampler.scan()?;
    let interval = Duration::from_millis(arguments.interval);
    let mut due = Instant::now() + FIRST;
    let mut waiting_said = false;
    let mut shown = 0;
    while arguments.count.is_none_or(|count| shown < count) {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        // A process that was stopped for a while goes on from now instead of catching up.
        due = (due + interval).max(Instant::now());
        if arguments.scan {
            sampler.scan()?;
        } else if sampler.is_empty() {
            // Not an error of this program, and nothing will change.
            let said = writeln!(io::stderr(), "No VBDs to report and 'scan' flag not set.");
            return said.map_err(|error| ControlError::io("writing", &error));
        }
        let sample = sampler.sample();
        if sample.vbds.is_empty() {
            if arguments.scan && !waiting_said {
                failure::print("Waiting for VBDs to be plugged.\n")?;
            }
            waiting_said = arguments.scan;
            continue;
        }
        waiting_said = false;
        if let Some(file) = &mut file {
            file.write(&sample)?;
        }
        show(arguments, &sample)?;
        shown += 1;
    }
    Ok(())
}

/// What `--replay` prints of a file with these bytes, in every format.
///
/// # Errors
/// A sentence about the first sample that is not understood.
pub fn replay_text(bytes: &[u8]) -> std::result::Result<String, String> {
    let path = std::path::Path::new("replay");
    let samples = record::Reader::over(bytes, path).map_err(|error| error.to_string())?;
    let mut out = String::new();
    for sample in samples {
        out.push_str(&all_formats(&sample.map_err(|error| error.to_string())?));
    }
    Ok(out)
}

/// The same of the bytes of one sample, without the checksum before them: mutations of a file seldom have a right one.
pub fn replay_body_text(body: &[u8]) -> Option<String> {
    record::sample_of(body).map(|sample| all_formats(&sample))
}

fn all_formats(sample: &Sample) -> String {
    [Format::V61, Format::V65, Format::V2016, Format::Csv].map(|format| format::text(format, sample)).concat()
}

/// What is printed of a disk with these two readings, `seconds` apart, in every format; and the sample as a file
/// has it.
pub fn rates_text(then: &PublishedStats, now: &PublishedStats, seconds: f64) -> String {
    let elapsed = Duration::from_secs_f64(seconds);
    let row = sample::counted(VbdId { domid: 1, devid: 51712 }, 1, (then, now), elapsed);
    let sample = Sample { time_ms: 0, vbds: vec![row] };
    let mut out = all_formats(&sample);
    out.push_str(&record::line(&sample.rates()).unwrap_or_default());
    out
}

/// A file as `-o` writes it, with two samples of two disks of which one shares a page pool: a seed for fuzzers.
pub fn replay_seed() -> Vec<u8> {
    let disk = |domid, pool| sample::Counted {
        domid,
        vbdid: 51712,
        pid: 9,
        elapsed_ns: 1_000_000_000,
        read_submitted: 56,
        read_completed: 55,
        read_sectors: 4928,
        read_ticks_us: 710_000,
        read_in_flight: 2,
        ring_total: 32,
        ring_used: 2,
        low_memory: true,
        pool,
        ..sample::Counted::default()
    };
    let pool = sample::Pool { name: "sr".into(), total: 704, used: 374 };
    let at = |time_ms| Sample { time_ms, vbds: vec![disk(5, Some(pool.clone())), disk(6, None)] };
    record::file_of(1000, &[at(1000), at(2000)])
}

/// An error that names a file.
fn about_file(doing: &str, path: &std::path::Path, error: &io::Error) -> ControlError {
    ControlError::io(format_args!("{doing} {}", path.display()), error)
}

/// A file that is not what it should be.
fn bad_file(path: &std::path::Path, at: u64, why: &str) -> ControlError {
    ControlError::new(Errno::EINVAL, format!("{}, byte {at}: {why}", path.display()))
        .next("give a file that 'xsiostat -o' wrote")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_banner_is_as_wide_as_its_text() {
        let line = "-----------------------------";
        assert_eq!(banner(), format!("{line}\n XenServer Storage I/O Stats\n{line}\n"));
    }

    #[test]
    fn all_options_are_there() {
        let parse = |line: &str| Arguments::try_parse_from(line.split_whitespace());
        let arguments =
            parse("xsiostat -s -d 5 -d 6 -v 51712 -i 200 -o /f -c 3 --format 6.1").expect("valid");
        assert!(arguments.scan);
        assert_eq!((arguments.domids, arguments.vbdids, arguments.interval), (vec![5, 6], vec![51712], 200));
        assert_eq!((arguments.count, arguments.format), (Some(3), Format::V61));
        for bad in [
            "xsiostat -s -s",
            "xsiostat -i 5 -i 6",
            "xsiostat -i 0",
            "xsiostat -o a -o b",
            "xsiostat --format 7",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
