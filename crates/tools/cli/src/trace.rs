//! `tapio trace`: where the time of single requests goes, in disks that are in use.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::Serialize;
use tapio_control::command::{self as ask, DiskCommand};
use tapio_control::{ControlError, Errno, OwnClient, RunDir};
use tapio_stat::trace::{EVENTS_DEFAULT, Point, TraceData, TraceError, read_trace, requests};
use tapio_stat::{RequestKind, ShmRoot};

use crate::disk::Which;
use tapio_load::bare_file;
use tapio_report::failure::{Result, print, print_json};
use tapio_report::plot;
use tapio_report::trace::{self as table, HostTimes, Row, Trim, trimmed_rows};

/// Longest wait for an answer that does not depend on the guest's requests.
const REPLY_TIMEOUT: Option<Duration> = Some(Duration::from_secs(30));
/// Requests of a row below which the host alone is not measured beside it.
const ROW_MIN: usize = 16;
/// How long the host alone is measured for each size.
const HOST_TIME: Duration = Duration::from_millis(300);

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio trace run -p 4711 -m 0                       a second, then the table
  tapio trace run -p 4711 -m 0 --time 5 --svg where.svg
  tapio trace run -p 4711 -m 0 --beside /disks/a.raw the host's own reads of that file beside it
  tapio trace run -p 4711 -m 0 --trim 20 --series all.csv --series-svg all.svg
  tapio trace start -p 4711 -m 0 --events 1048576
  tapio trace report -p 4711 -m 0 --json             as often as wanted, also while it runs
  tapio trace stop -p 4711 -m 0 --forget

The steps of a request, without a gap:
  to-back-end   from the front end's submit until the disk process took it (front ends of 'tapio bench' only)
  copy-in       until its data was copied from the guest, or mapped (Xen)
  admission     until the disk began with it: checks, limits, page pool, its turn
  image         in the image layer: lookup, metadata, space; all of a request that needs no storage
  submit        until the kernel was entered, with all that had come by then
  kernel        until the thread saw what the kernel has completed
  wake          until the request's own task had the result
  finish        until the disk was done: metadata that had to follow
  copy-out      until its data was copied to the guest, or its pages let go (Xen)
  publish       until its answer was visible, or sent
  to-front-end  until the front end had seen it (front ends of 'tapio bench' only)

Tracing costs some tens of nanoseconds a point while it is on, and a load while it is off. The trace is a ring in
shared memory that is overwritten when it is full: a report is about the last requests.")]
pub struct TraceArguments {
    #[command(subcommand)]
    command: Command,
}

/// What a report looks like.
#[derive(Clone, Debug, Args)]
struct Form {
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Write a picture of it there
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Read this file by io_uring past the page cache, with the sizes and the depth that were found, and show how long
    /// that takes; it is never written
    #[arg(long, value_name = "FILE")]
    beside: Option<PathBuf>,
    /// Of each row, leave out so many of the fastest and of the slowest requests; a twentieth of either without
    #[arg(long, value_name = "COUNT")]
    trim: Option<usize>,
    /// Write the requests one by one there, as CSV: also the first ones, which are slower
    #[arg(long, value_name = "FILE")]
    series: Option<PathBuf>,
    /// Write a picture of how long the requests took, one by one
    #[arg(long, value_name = "FILE")]
    series_svg: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Trace a disk for a while and say where the time went
    Run {
        #[command(flatten)]
        which: Which,
        /// How long, in seconds
        #[arg(long, default_value_t = 1.0, value_name = "SECONDS", value_parser = seconds)]
        time: f64,
        /// How many events are kept, a power of two; a request has about ten
        #[arg(long, default_value_t = EVENTS_DEFAULT, value_name = "COUNT")]
        events: u32,
        #[command(flatten)]
        form: Form,
    },
    /// Begin a trace; one that is there is forgotten
    Start {
        #[command(flatten)]
        which: Which,
        /// How many events are kept, a power of two; a request has about ten
        #[arg(long, default_value_t = EVENTS_DEFAULT, value_name = "COUNT")]
        events: u32,
    },
    /// End a trace; it can still be reported
    Stop {
        #[command(flatten)]
        which: Which,
        /// Remove it, and give its memory back
        #[arg(long)]
        forget: bool,
    },
    /// Say where the time of the traced requests went
    ///
    /// Read from shared memory: the process is not asked.
    Report {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        form: Form,
    },
}

fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("'{text}' is no number of seconds from 0.001 to 3600")),
    }
}

/// What a trace says.
#[derive(Debug, Serialize)]
struct Report {
    pid: u32,
    minor: u32,
    /// Whether it was still being written.
    running: bool,
    clock: &'static str,
    /// Events that were read, and events that had been overwritten before.
    events: usize,
    lost: u64,
    requests: usize,
    rows: Vec<Row>,
}

pub fn run(arguments: TraceArguments) -> Result<()> {
    let run = RunDir::from_env();
    match arguments.command {
        Command::Run { which, time, events, form } => {
            let minor = which.minor;
            tell(&run, which.pid, &ask::TraceStart { minor, events })?;
            std::thread::sleep(Duration::from_secs_f64(time));
            tell(&run, which.pid, &ask::TraceStop { minor, forget: false })?;
            let data = read(which);
            // Whatever became of reading it.
            tell(&run, which.pid, &ask::TraceStop { minor, forget: true })?;
            show(&data?, &form)
        }
        Command::Start { which, events } => {
            tell(&run, which.pid, &ask::TraceStart { minor: which.minor, events }).map(drop)
        }
        Command::Stop { which, forget } => {
            let stopped = tell(&run, which.pid, &ask::TraceStop { minor: which.minor, forget })?;
            print(&format!("{} events\n", stopped.written))
        }
        Command::Report { which, form } => show(&read(which)?, &form),
    }
}

fn tell<C: DiskCommand>(run: &RunDir, pid: i32, command: &C) -> Result<C::Reply> {
    OwnClient::connect(run, pid)?.call(command, &[], REPLY_TIMEOUT)
}

fn read(which: Which) -> Result<TraceData> {
    let (pid, minor) = (which.pid.unsigned_abs(), which.minor);
    read_trace(&ShmRoot::from_env(), pid, minor.into()).map_err(|error| match error {
        TraceError::Io(error) if error.kind() == std::io::ErrorKind::NotFound => {
            ControlError::new(Errno::ENOENT, format!("disk {minor} of process {pid} has no trace"))
                .next("begin one with 'tapio trace start'")
        }
        TraceError::Io(error) => ControlError::io(format_args!("reading the trace of disk {minor}"), &error),
        TraceError::Layout(_) => ControlError::new(Errno::EPROTO, error.to_string()),
    })
}

fn show(data: &TraceData, form: &Form) -> Result<()> {
    let found = requests(data, None);
    let trim = form.trim.map_or_else(Trim::default, Trim::Requests);
    let mut rows = trimmed_rows(&found, data.rate.ns_per_tick, trim);
    if let Some(path) = &form.series {
        let text = table::series(&found, data.rate.ns_per_tick);
        std::fs::write(path, text)
            .map_err(|error| ControlError::io(format_args!("cannot write {}", path.display()), &error))?;
    }
    if let Some(path) = &form.series_svg {
        let title = format!("disk {} of process {}: requests one by one", data.minor, data.pid);
        plot::write(path, &table::series_picture(&found, &title))?;
    }
    if let Some(file) = &form.beside {
        for row in &mut rows {
            row.host = host_of(row, file)?;
        }
    }
    if let Some(path) = &form.svg {
        let title = format!("disk {} of process {}: where the time of requests goes", data.minor, data.pid);
        plot::write(path, &table::picture(&rows, &title))?;
    }
    let report = Report {
        pid: data.pid,
        minor: data.minor,
        running: data.running,
        clock: data.clock.name(),
        events: data.events.len(),
        lost: data.lost,
        requests: found.len(),
        rows,
    };
    if form.json {
        return print_json(&report);
    }
    let taken = data.events.iter().filter(|event| event.point == Point::Taken).count();
    let mut text = format!(
        "pid {} minor {}: {} requests, {} events ({} overwritten before), by {}\n",
        report.pid, report.minor, report.requests, report.events, report.lost, report.clock
    );
    if report.requests == 0 {
        text.push_str(if taken == 0 { "no request came\n" } else { "no request ended\n" });
        return print(&text);
    }
    text.push_str(&table::table(&report.rows));
    print(&text)
}

/// What the host alone takes for the reads of a row.
fn host_of(row: &Row, file: &Path) -> Result<Option<HostTimes>> {
    if row.kind != RequestKind::Read || row.requests < ROW_MIN || row.bytes == 0 {
        return Ok(None);
    }
    let depth = (row.depth.round() as u32).clamp(1, 256);
    let measured = bare_file::random(file, row.bytes, depth, false, HOST_TIME).map_err(|error| {
        ControlError::io(format_args!("cannot read {} past the page cache", file.display()), &error)
    })?;
    Ok(Some(HostTimes::of(depth, &measured.load)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_bounded() {
        assert_eq!(seconds("0.5"), Ok(0.5));
        for bad in ["", "0", "-1", "nan", "inf", "4000", "1s"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
