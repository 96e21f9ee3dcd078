//! What one more plug at a time costs: memory of the daemon and its storage workers while plugs wait for their storage.
//!
//! A disk process is no part of it: the disk has it as long as it is plugged, however few are plugged at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde_json::json;

use super::MIB;
use super::counters::{pss_kib, workers};
use super::daemon::Daemon;
use super::starts::destroy;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);
/// How long the storage makes each plug wait: longer than a look at all the memory takes.
const LATENCY_MS: u64 = 400;

/// Plugs at a time, and the most memory that was seen during them.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Together {
    pub plugs: usize,
    pub pss_kib: u64,
}

/// The rows, and what they come to.
#[derive(Clone, Debug, Serialize)]
pub struct PlugMemory {
    pub rows: Vec<Together>,
    /// Of one more plug, by the least squares of the rows.
    pub plug_kib: f64,
}

/// The slope of the line through the rows.
fn slope(rows: &[Together]) -> f64 {
    let count = rows.len() as f64;
    let mean = |of: fn(&Together) -> f64| rows.iter().map(of).sum::<f64>() / count.max(1.0);
    let (x, y) = (mean(|row| row.plugs as f64), mean(|row| row.pss_kib as f64));
    let (mut above, mut below) = (0.0, 0.0);
    for row in rows {
        let across = row.plugs as f64 - x;
        above += across * (row.pss_kib as f64 - y);
        below += across * across;
    }
    if below > 0.0 { above / below } else { 0.0 }
}

/// Starts a VM with the most disks, with each number of plugs at a time.
pub fn measure(daemon: &Daemon, counts: &[usize]) -> Result<PlugMemory, String> {
    let client = &mut daemon.client()?;
    let most = counts.iter().copied().max().unwrap_or(1);
    let vm = daemon.make_vm(client, "sim", json!({"sim-front": "vhost-user"}))?;
    let mut vdis = Vec::new();
    for place in 0..most {
        let vdi = daemon.make_vdi(client, &format!("together {place}"), 8 * MIB)?;
        daemon.make_vbd(client, &vm, &vdi, place, false)?;
        vdis.push(vdi);
    }
    daemon.set_latency(client, LATENCY_MS)?;
    let own = daemon.process.pid();
    let mut rows = Vec::new();
    for plugs in counts {
        daemon.set_limits(client, *plugs, *plugs)?;
        let is_over = AtomicBool::new(false);
        let (started, pss_kib) = std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                let mut peak = 0;
                while !is_over.load(Ordering::Relaxed) {
                    let mut pids = workers(own);
                    pids.push(own);
                    peak = peak.max(pss_kib(&pids));
                    std::thread::sleep(LOOK);
                }
                peak
            });
            let started = client.call("VM.start", &[json!(vm), json!(false), json!(false)]);
            is_over.store(true, Ordering::Relaxed);
            (started, looks.join().unwrap_or(0))
        });
        started?;
        client.call("VM.hard_shutdown", &[json!(vm)])?;
        rows.push(Together { plugs: *plugs, pss_kib });
    }
    daemon.set_latency(client, 0)?;
    destroy(client, &vm)?;
    for vdi in vdis {
        client.call("VDI.destroy", &[json!(vdi)])?;
    }
    Ok(PlugMemory { plug_kib: slope(&rows), rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_more_plug_is_the_slope() {
        let rows = [(1, 1000), (10, 1180), (64, 2260)].map(|(plugs, pss_kib)| Together { plugs, pss_kib });
        assert!((slope(&rows) - 20.0).abs() < 1e-9);
        assert_eq!(slope(&rows[..1]), 0.0);
    }
}
