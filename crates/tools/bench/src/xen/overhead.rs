//! Where the time of a guest's request goes, by its size, and what the host alone takes for the same.

use std::time::Duration;

use tapio_front::vhost_user::driver::{Driver, DriverOptions};
use tapio_load::{Load, Mix, Ring};
use tapio_stat::trace::{EVENTS_DEFAULT, TraceRing, requests};
use tapio_types::Movement;

use super::case::{Backing, PAGE, front};
use super::guest::{Disk, Guest, Setup};
use super::report::{One, Report, Skipped, Traced, Way};
use super::{Place, Plan, interrupted};
use crate::medians::median;
use crate::progress::Progress;
use tapio_load::bare_file;
use tapio_report::trace::HostTimes;
use tapio_report::trace::rows;

/// Bytes of the requests.
const SIZES: [u32; 7] = [512, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Ways to the disk.
const WAYS: [Way; 4] = [Way::Blkif, Way::Persistent, Way::Map, Way::VhostUser];
/// Requests in flight.
const DEPTHS: [u32; 2] = [1, 8];

pub fn run(plan: &Plan, place: &Place<'_>, report: &mut Report) {
    let sizes: &[u32] = if plan.quick { &[512, 4096, 1 << 20] } else { &SIZES };
    let depths = if plan.quick { &DEPTHS[..1] } else { &DEPTHS[..] };
    let mut progress = Progress::new(2 * WAYS.len() * depths.len() * sizes.len());
    for &depth in depths {
        for (way, write) in WAYS.into_iter().flat_map(|way| [(way, false), (way, true)]) {
            let mut traced = Traced { way, depth, write, ..Traced::default() };
            for &bytes in sizes {
                if interrupted() {
                    break;
                }
                let op = if write { "write" } else { "read" };
                let what = format!("overhead {} {bytes} bytes, depth {depth}, {op}", way.name());
                progress.begin(&what);
                match one(plan, place, way, (write, bytes, depth)) {
                    Ok(one) => traced.add(one),
                    Err(reason) => report.skipped.push(Skipped::of(&what, reason)),
                }
            }
            report.overhead.push(traced);
        }
    }
    progress.end();
}

/// Write or read, bytes of a request, requests in flight.
type Shape = (bool, u32, u32);

fn one(plan: &Plan, place: &Place<'_>, way: Way, shape: Shape) -> Result<One, String> {
    let (_, bytes, depth) = shape;
    let image = place.image(Backing::Raw)?;
    match way {
        Way::Blkif | Way::Persistent | Way::Map => {
            let movement = match way {
                Way::Persistent => Movement::Persistent,
                Way::Map => Movement::Map,
                _ => Movement::Copy,
            };
            let front = front(movement, bytes.div_ceil(PAGE), bytes, depth);
            let setup = Setup { image, front, movement, polls: false, pool: None, share: None };
            let Guest { mut disk, mut queues, front: _front } =
                Guest::start(&place.program, place.ground, 1, &setup)?;
            let queue = queues.first_mut().ok_or("the guest has no ring")?;
            measured(plan, place, &mut disk, queue, shape)
        }
        Way::VhostUser => {
            let mut disk = Disk::start(&place.program, place.ground, 1, (&image, None, None))?;
            let socket = place.ground.run_dir().join("vhost");
            disk.serve(&socket)?;
            let options = DriverOptions {
                queue_size: 256,
                depth: u16::try_from(depth).unwrap_or(u16::MAX),
                buffer_len: bytes,
                ..DriverOptions::default()
            };
            let driver = Driver::connect(&socket, options).map_err(|error| error.to_string())?;
            let mut queue = driver.start(0).map_err(|error| error.to_string())?;
            let one = measured(plan, place, &mut disk, &mut queue, shape);
            driver.stop(0).map_err(|error| error.to_string())?;
            one
        }
    }
}

/// Runs the load with and without a trace in turn; the last trace is what is shown.
fn measured(
    plan: &Plan,
    place: &Place<'_>,
    disk: &mut Disk,
    queue: &mut impl Ring,
    shape: Shape,
) -> Result<One, String> {
    let (write, bytes, depth) = shape;
    let time = plan.time / 2;
    let load = Load {
        mix: if write { Mix::RandomWrite } else { Mix::RandomRead },
        block_len: bytes,
        depth,
        span_len: place.ground.sizes.full_len,
        time,
        requests_max: u64::MAX,
        spin: false,
        seed: 9,
    };
    let mut load = |ring: &TraceRing, time: Duration| {
        let done = Load { time, ..load }.run_watched(queue, ring);
        done.map(|report| report.count).map_err(|error| error.to_string())
    };
    // The front end writes its own points in all runs, into memory that has no reader where the disk is not traced.
    let made = || TraceRing::private(EVENTS_DEFAULT).map_err(|error| error.to_string());
    let (idle, ring) = (made()?, made()?);
    load(&idle, time / 5)?;
    let (mut off, mut on) = (Vec::new(), Vec::new());
    let mut last = None;
    for round in 1..=plan.rounds {
        off.push(load(&idle, time)? as f64);
        disk.trace(EVENTS_DEFAULT)?;
        on.push(load(if round == plan.rounds { &ring } else { &idle }, time)? as f64);
        last = Some(disk.traced()?);
    }
    let traced = last.ok_or("no round was run")?;
    let found = requests(&traced, Some(&ring.data()));
    // Those at the beginning whose other half was overwritten are left out.
    let whole: Vec<_> = found.into_iter().filter(|request| request.front).collect();
    let mut row = rows(&whole, traced.rate.ns_per_tick).into_iter().next();
    let host = bare_file::random(&place.ground.raw()?, bytes.into(), depth, write, time);
    if let (Some(row), Ok(sample)) = (&mut row, &host) {
        row.host = Some(HostTimes::of(depth, &sample.load));
    }
    let seconds = time.as_secs_f64().max(1e-9);
    Ok(One {
        row,
        rates: [median(&mut off) / seconds, median(&mut on) / seconds],
        clock: traced.clock.name(),
    })
}
