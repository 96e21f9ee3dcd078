//! `tapio bench queue`: the average queue of each layer, while more and more requests are in flight.
//!
//! The same four places as in `tapio queue`: the front end from submission to answer (a guest's block layer), the ring,
//! the disk process, the block device of the host.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use tapio_control::{ControlError, Errno};
use tapio_load::{Load, LoadReport, Mix};
use tapio_report::failure::Result;
use tapio_report::plot::{self, Axis, Line, Lines};
use tapio_report::queue::{BlockCounters, HostDevice};
use tapio_stat::{RequestKind, Snapshot, Stage};
use tapio_types::Movement;
use tapio_xen::blkfront::FrontOptions;

use super::common::{CUT_SHORT, Common, Setting};
use super::ground::{Ground, Sizes};
use super::measure::interrupted;
use super::medians::median;
use super::progress::Progress;
use super::xen::case::front;
use super::xen::guest::{Guest, Setup};
use super::{end_at_interrupt, failed};

/// Requests in flight.
const DEPTHS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Bytes of a request, as in the measurement that this one repeats.
const BLOCK: u32 = 4096;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio bench queue --dir /srv/ssd             a table
  tapio bench queue --dir /srv/ssd --svg a.svg and a picture

The load reads 4 KiB after 4 KiB. Columns are average numbers of requests: what the front end had in flight, what was
in its ring as the disk process saw it, in the disk process, and in the block device below the image (with the load of
everything else on it; '-' where the directory lies on none).")]
pub struct QueueArguments {
    /// Where the image is made, on the device to measure; it is removed at the end
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    common: Common,
    /// Write a picture of the queues there
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Average requests in each layer; rates are those of the front end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Queues {
    iops: f64,
    guest: f64,
    ring: f64,
    process: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    depth: u32,
    #[serde(flatten)]
    queues: Queues,
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    setting: Setting,
    site: String,
    block_len: u32,
    /// Of the host, below the image.
    device: Option<String>,
    rows: Vec<Row>,
    interrupted: bool,
}

impl Report {
    fn tables(&self) -> String {
        let mut out = self.setting.line(&self.site);
        let device = self.device.as_deref().unwrap_or("none");
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(
            out,
            "average requests in each layer; reads of {} bytes; device: {device}\n",
            self.block_len
        );
        let _ = writeln!(
            out,
            "{:>8} {:>10} {:>8} {:>8} {:>8} {:>8}",
            "depth", "IOPS", "guest", "ring", "process", "device"
        );
        for Row { depth, queues } in &self.rows {
            let device = queues.device.map_or_else(|| "-".to_owned(), |queue| format!("{queue:.2}"));
            let _ = writeln!(
                out,
                "{depth:>8} {:>10.0} {:>8.2} {:>8.2} {:>8.2} {device:>8}",
                queues.iops, queues.guest, queues.ring, queues.process
            );
        }
        if self.interrupted {
            out.push_str(CUT_SHORT);
        }
        out
    }

    fn picture(&self) -> String {
        let line = |name: &str, of: &dyn Fn(&Queues) -> Option<f64>| Line {
            name: name.to_owned(),
            points: self
                .rows
                .iter()
                .filter_map(|row| Some((f64::from(row.depth), of(&row.queues)?)))
                .collect(),
        };
        let lines = vec![
            line("guest (front end)", &|queues| Some(queues.guest)),
            line("ring", &|queues| Some(queues.ring)),
            line("disk process", &|queues| Some(queues.process)),
            line("block device of the host", &|queues| queues.device),
        ];
        Lines {
            title: format!("Average queue of each layer, reads of {} bytes", self.block_len),
            x: Axis::log("requests in flight, as the load was told"),
            y: Axis::log("requests in the layer, on average"),
            lines: lines.into_iter().filter(|line| !line.points.is_empty()).collect(),
        }
        .svg()
    }
}

/// All counters at one moment.
struct Reading {
    at: Instant,
    disk: Snapshot,
    device: Option<BlockCounters>,
}

impl Reading {
    fn now(guest: &Guest, device: Option<&HostDevice>) -> std::result::Result<Self, String> {
        Ok(Self {
            disk: guest.disk.counters()?,
            device: device.and_then(HostDevice::read),
            at: Instant::now(),
        })
    }
}

/// The queues between two readings, around a load.
fn queues(then: &Reading, now: &Reading, load: &LoadReport) -> Queues {
    let seconds = now.at.duration_since(then.at).as_secs_f64().max(1e-9);
    let grown_ns = |now: u64, then: u64| now.saturating_sub(then) as f64 / 1e9 / seconds;
    let total = |disk: &Snapshot| {
        let of = |kind| disk.histogram(kind, Stage::Total).map_or(0, |total| total.sum_ns);
        of(RequestKind::Read).saturating_add(of(RequestKind::Write))
    };
    let ring = |disk: &Snapshot| disk.rings.first().map_or(0, |ring| ring.request_ns);
    let device = now.device.zip(then.device).map(|(now, then)| now.flow(&then, seconds).queue);
    Queues {
        iops: load.count as f64 / seconds,
        guest: load.latencies.sum_ns() as f64 / 1e9 / seconds,
        ring: grown_ns(ring(&now.disk), ring(&then.disk)),
        process: grown_ns(total(&now.disk), total(&then.disk)),
        device,
    }
}

fn one(
    guest: &mut Guest,
    device: Option<&HostDevice>,
    load: Load,
    warm_up: Duration,
) -> std::result::Result<Queues, String> {
    let queue = guest.queues.first_mut().ok_or("the guest has no ring")?;
    Load { time: warm_up, ..load }.run(queue).map_err(|error| error.to_string())?;
    let then = Reading::now(guest, device)?;
    let queue = guest.queues.first_mut().ok_or("the guest has no ring")?;
    let report = load.run(queue).map_err(|error| error.to_string())?;
    if report.errors > 0 {
        return Err(format!("{} requests failed", report.errors));
    }
    let now = Reading::now(guest, device)?;
    Ok(queues(&then, &now, &report))
}

pub fn run(arguments: &QueueArguments) -> Result<()> {
    let (time, rounds) = arguments.common.times((1.0, 3), (0.05, 1))?;
    end_at_interrupt();
    let program = super::server::ours().map_err(|why| ControlError::new(Errno::ENOENT, why))?;
    let awake = arguments.common.awake()?;
    let len = if arguments.common.quick { 4 << 20 } else { 1 << 30 };
    let sizes = Sizes { full_len: len, fresh_len: len, fresh_requests_max: 0, fresh_space_max: 0 };
    let ground = Ground::new(&arguments.dir, |_, _| sizes)?;
    let image = ground.raw().map_err(failed)?;
    let device = HostDevice::of(&image);
    let mut report = Report {
        setting: Setting::now(time, rounds, awake.is_some()),
        site: ground.site.line(),
        block_len: BLOCK,
        device: device.as_ref().map(|device| device.name.clone()),
        rows: Vec::new(),
        interrupted: false,
    };
    let mut progress = Progress::new(DEPTHS.len() * rounds);
    for depth in DEPTHS {
        let mut found = Vec::new();
        for _ in 0..rounds {
            if interrupted() {
                break;
            }
            progress.begin(&format!("depth {depth}"));
            let setup = Setup {
                image: format!("aio:{}", image.display()),
                // A page of ring holds 32.
                front: FrontOptions {
                    order: u32::from(depth > 32),
                    ..front(Movement::Copy, 1, BLOCK, depth)
                },
                movement: Movement::Copy,
                polls: false,
                pool: None,
                share: None,
            };
            let load = Load {
                mix: Mix::SequentialRead,
                block_len: BLOCK,
                depth,
                span_len: len,
                time,
                requests_max: u64::MAX,
                spin: false,
                seed: 1,
            };
            let mut guest = Guest::start(&program, &ground, 1, &setup).map_err(failed)?;
            found.push(one(&mut guest, device.as_ref(), load, time / 5).map_err(failed)?);
        }
        if found.is_empty() {
            break;
        }
        let middle = |of: &dyn Fn(&Queues) -> f64| median(&mut found.iter().map(of).collect::<Vec<f64>>());
        let queues = Queues {
            iops: middle(&|queues| queues.iops),
            guest: middle(&|queues| queues.guest),
            ring: middle(&|queues| queues.ring),
            process: middle(&|queues| queues.process),
            device: device.as_ref().map(|_| middle(&|queues| queues.device.unwrap_or(0.0))),
        };
        report.rows.push(Row { depth, queues });
    }
    progress.end();
    report.interrupted = interrupted();
    report.setting.environment.end();
    drop((ground, awake));
    if let Some(path) = &arguments.svg {
        plot::write(path, &report.picture())?;
    }
    arguments.common.show(&report, &report.tables())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_that_nothing_counts_is_no_line() {
        let queues = Queues { iops: 5200.0, guest: 0.96, ring: 0.8, process: 0.71, device: None };
        let mut report = Report {
            setting: Setting::now(Duration::from_secs(1), 1, false),
            site: "somewhere".into(),
            block_len: BLOCK,
            device: None,
            rows: vec![Row { depth: 1, queues }, Row { depth: 2, queues }],
            interrupted: false,
        };
        let line = |report: &Report| report.tables().lines().last().unwrap_or_default().to_owned();
        assert_eq!(line(&report), "       2       5200     0.96     0.80     0.71        -");
        assert!(!report.picture().contains("block device"));
        report.rows[1].queues.device = Some(0.61);
        assert!(line(&report).ends_with("    0.61"), "{}", line(&report));
        assert!(report.picture().contains("block device") && report.picture().starts_with("<svg"));
    }
}
