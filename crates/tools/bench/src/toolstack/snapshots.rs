//! What a guest notices of snapshots: the longest write while snapshots of its disk are made, by a swap of the leaf and
//! by a pause.

use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;
use tapio_front::vhost_user::driver::{Driver, DriverOptions};
use tapio_load::{Load, LoadReport, Mix};

use super::client::Client;
use super::daemon::Daemon;
use super::plug::Pair;
use super::{MIB, ms};
use crate::measure::interrupted;
use crate::medians::median;

/// Bytes that are written again and again, and of a write.
const SPAN_LEN: u64 = 16 * MIB;
const WRITE_LEN: u32 = 4096;
/// Writes in flight.
const DEPTH: u16 = 4;

/// The names of the rows.
const NONE: &str = "no snapshots";
const SWAP: &str = "snapshots, the leaf is swapped";
const PAUSE: &str = "snapshots, the disk is paused (changed blocks tracked)";

/// Snapshots of one disk under writes.
#[derive(Clone, Debug, Serialize)]
pub struct Snapshots {
    pub what: &'static str,
    pub snapshots: usize,
    /// Median of what the caller of `VDI.snapshot` waited; 0 without one.
    pub call_ms: f64,
    pub writes: u64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub longest_ms: f64,
}

/// As many snapshots of a disk that is written to as `count` says, one each `between`, in each of the ways.
pub fn measure(
    daemon: &Daemon,
    count: usize,
    between: Duration,
    begin: &mut dyn FnMut(&str),
) -> Result<Vec<Snapshots>, String> {
    let mut rows = Vec::new();
    for (what, count, is_tracked) in [(NONE, 0, false), (SWAP, count, false), (PAUSE, count, true)] {
        if interrupted() {
            break;
        }
        begin(what);
        rows.push(one(daemon, what, (count, between), is_tracked)?);
    }
    Ok(rows)
}

fn one(
    daemon: &Daemon,
    what: &'static str,
    (count, between): (usize, Duration),
    is_tracked: bool,
) -> Result<Snapshots, String> {
    let client = &mut daemon.client()?;
    let pair = Pair::make(daemon, client, "sim", json!({"sim-front": "vhost-user"}))?;
    let vdi = client.text("VBD.get_VDI", &[json!(pair.vbd)])?;
    if is_tracked {
        client.call("VDI.enable_cbt", &[json!(vdi)])?;
    }
    client.call("VBD.plug", &[json!(pair.vbd)])?;
    let socket = pair.socket(daemon)?;
    let options = DriverOptions { depth: DEPTH, buffer_len: WRITE_LEN, ..DriverOptions::default() };
    let said = |error: std::io::Error| error.to_string();
    let driver = Driver::connect(&socket, options).map_err(said)?;
    let mut queue = driver.start(0).map_err(said)?;
    // The first writes take space for blocks; what is measured comes after.
    let load = Load {
        mix: Mix::RandomWrite,
        block_len: WRITE_LEN,
        depth: DEPTH.into(),
        span_len: SPAN_LEN,
        time: between * 5,
        requests_max: u64::MAX,
        spin: false,
        seed: 1,
    };
    load.run(&mut queue).map_err(said)?;
    let load = Load { time: between * u32::try_from(count.max(10) + 2).unwrap_or(u32::MAX), ..load };
    let (report, calls) = thread::scope(|scope| {
        let loading = scope.spawn(|| load.run(&mut queue).map_err(said));
        let calls = snapshots(client, &vdi, count, between);
        let report = loading.join().map_err(|_| "a load thread panicked".to_owned())??;
        Ok::<(LoadReport, Vec<f64>), String>((report, calls?))
    })?;
    driver.stop(0).map_err(said)?;
    pair.end(client)?;
    if report.errors > 0 {
        return Err(format!("{what}: {} writes failed", report.errors));
    }
    Ok(row(what, &report, calls))
}

/// Makes snapshots; how long each call took.
fn snapshots(client: &mut Client, vdi: &str, count: usize, between: Duration) -> Result<Vec<f64>, String> {
    let mut calls = Vec::new();
    for _ in 0..count {
        thread::sleep(between);
        let begun = Instant::now();
        client.call("VDI.snapshot", &[json!(vdi), json!({})])?;
        calls.push(ms(begun.elapsed()));
    }
    Ok(calls)
}

fn row(what: &'static str, report: &LoadReport, mut calls: Vec<f64>) -> Snapshots {
    let us = |ns: u64| ns as f64 / 1e3;
    Snapshots {
        what,
        snapshots: calls.len(),
        call_ms: if calls.is_empty() { 0.0 } else { median(&mut calls) },
        writes: report.count,
        p50_us: us(report.latencies.quantile_ns(0.5)),
        p99_us: us(report.latencies.quantile_ns(0.99)),
        longest_ms: us(report.latencies.longest_ns()) / 1e3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_longest_write_and_the_middle_call() {
        let mut report = LoadReport::default();
        let now = Instant::now();
        for us in [10, 20, 3000] {
            report.note(now, now + Duration::from_micros(us), true);
        }
        let row = row(SWAP, &report, vec![7.0, 1.0, 2.0]);
        assert_eq!((row.snapshots, row.call_ms, row.writes, row.longest_ms), (3, 2.0, 3, 3.0));
        assert!(row.p50_us >= 20.0 && row.p50_us < 21.0, "{row:?}");
    }
}
