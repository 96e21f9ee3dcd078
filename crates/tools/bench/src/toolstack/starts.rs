//! How much is gained by plugging disks in parallel, and how long a storm of VM starts takes.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::client::Client;
use super::daemon::Daemon;
use super::{MIB, POOL, ms};
use crate::measure::interrupted;
use crate::medians::median;

/// Steps at a time for one VM: XenServer's number, and our default.
pub const PER_VM: usize = 10;
/// Between two looks at a task.
const LOOK: Duration = Duration::from_millis(5);

/// What the disks of a series are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StartKind {
    /// Each takes a known time to be plugged, as a slow storage does, beside the work for its disk process.
    Latency,
    /// VHDs behind vhost-user sockets: nothing but work.
    Real,
}

/// Starts of a VM with so many disks.
#[derive(Clone, Debug, Serialize)]
pub struct Start {
    pub kind: StartKind,
    pub vbds: usize,
    /// With one step at a time for the VM.
    pub serial_ms: f64,
    /// With ten.
    pub parallel_ms: f64,
    pub speed_up: f64,
    /// Disks by rounds of ten; for work alone, not more than there are processors.
    pub ideal: f64,
    pub of_ideal: f64,
}

/// Many VMs started at once, and ended.
#[derive(Clone, Debug, Serialize)]
pub struct Storm {
    pub machines: usize,
    pub disks: usize,
    pub latency_ms: u64,
    /// Steps at a time on the host.
    pub pool: usize,
    pub up_ms: f64,
    pub down_ms: f64,
    /// What the latency alone takes with so many steps at a time.
    pub ideal_ms: f64,
}

fn platform(kind: StartKind) -> Value {
    match kind {
        StartKind::Latency => json!({}),
        StartKind::Real => json!({"sim-front": "vhost-user"}),
    }
}

/// Starts and ends the VM; returns how long the start took.
fn start(client: &mut Client, vm: &str) -> Result<Duration, String> {
    let begun = Instant::now();
    client.call("VM.start", &[json!(vm), json!(false), json!(false)])?;
    let took = begun.elapsed();
    client.call("VM.hard_shutdown", &[json!(vm)])?;
    Ok(took)
}

pub fn destroy(client: &mut Client, vm: &str) -> Result<(), String> {
    let vbds = client.call("VM.get_VBDs", &[json!(vm)])?;
    for vbd in vbds.as_array().into_iter().flatten() {
        client.call("VBD.destroy", std::slice::from_ref(vbd))?;
    }
    client.call("VM.destroy", &[json!(vm)]).map(drop)
}

/// The largest speed-up that so many disks can have.
fn ideal(kind: StartKind, vbds: usize) -> f64 {
    let rounds = vbds as f64 / vbds.div_ceil(PER_VM) as f64;
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    if kind == StartKind::Real { rounds.min(processors) } else { rounds }
}

/// A start with each number of disks; they are made as they are needed, in `vdis`.
pub fn series(
    daemon: &Daemon,
    kind: StartKind,
    counts: &[usize],
    latency_ms: u64,
    rounds: usize,
    vdis: &mut Vec<String>,
    begin: &mut dyn FnMut(&str),
) -> Result<Vec<Start>, String> {
    let client = &mut daemon.client()?;
    daemon.set_latency(client, if kind == StartKind::Latency { latency_ms } else { 0 })?;
    let mut rows = Vec::new();
    for count in counts {
        if interrupted() {
            break;
        }
        begin(&format!("start with {count} disks"));
        while vdis.len() < *count {
            vdis.push(daemon.make_vdi(client, &format!("disk {}", vdis.len()), 8 * MIB)?);
        }
        let vm = daemon.make_vm(client, "sim", platform(kind))?;
        for (place, vdi) in vdis.iter().take(*count).enumerate() {
            daemon.make_vbd(client, &vm, vdi, place, false)?;
        }
        daemon.set_limits(client, POOL, 1)?;
        let serial = ms(start(client, &vm)?);
        daemon.set_limits(client, POOL, PER_VM)?;
        let mut times = Vec::new();
        for _ in 0..rounds {
            times.push(ms(start(client, &vm)?));
        }
        destroy(client, &vm)?;
        let parallel = median(&mut times);
        let (speed_up, ideal) = (serial / parallel.max(1e-3), ideal(kind, *count));
        rows.push(Start {
            kind,
            vbds: *count,
            serial_ms: serial,
            parallel_ms: parallel,
            speed_up,
            ideal,
            of_ideal: speed_up / ideal,
        });
    }
    daemon.set_latency(client, 0)?;
    Ok(rows)
}

/// Calls a message for each VM as a task, and waits for all; returns how long that took.
pub fn all(client: &mut Client, vms: &[String], method: &str, more: &[Value]) -> Result<f64, String> {
    let begun = Instant::now();
    let mut tasks = Vec::new();
    for vm in vms {
        let mut params = vec![json!(vm)];
        params.extend_from_slice(more);
        tasks.push(client.text(method, &params)?);
    }
    wait(client, method, &tasks)?;
    Ok(ms(begun.elapsed()))
}

/// Waits for tasks, all of one method.
pub fn wait(client: &mut Client, method: &str, tasks: &[String]) -> Result<(), String> {
    for task in tasks {
        loop {
            match client.text("task.get_status", &[json!(task)])?.as_str() {
                "pending" => std::thread::sleep(LOOK),
                "success" => break,
                other => {
                    let info = client.call("task.get_error_info", &[json!(task)])?;
                    return Err(format!("{method} ended with {other}: {info}"));
                }
            }
        }
    }
    Ok(())
}

/// Starts `machines` VMs with `disks` each, all at once; they share read-only disks.
pub fn storm(daemon: &Daemon, machines: usize, disks: usize, latency_ms: u64) -> Result<Storm, String> {
    let client = &mut daemon.client()?;
    let mut vdis = Vec::new();
    for at in 0..disks {
        vdis.push(daemon.make_vdi(client, &format!("shared {at}"), 8 * MIB)?);
    }
    let mut vms = Vec::new();
    for _ in 0..machines {
        let vm = daemon.make_vm(client, "sim", platform(StartKind::Latency))?;
        for (place, vdi) in vdis.iter().enumerate() {
            daemon.make_vbd(client, &vm, vdi, place, true)?;
        }
        vms.push(vm);
    }
    daemon.set_limits(client, POOL, PER_VM)?;
    daemon.set_latency(client, latency_ms)?;
    let up_ms = all(client, &vms, "Async.VM.start", &[json!(false), json!(false)])?;
    let down_ms = all(client, &vms, "Async.VM.hard_shutdown", &[])?;
    daemon.set_latency(client, 0)?;
    for vm in &vms {
        destroy(client, vm)?;
    }
    let ideal_ms = latency_ms as f64 * (machines * disks).div_ceil(POOL) as f64;
    Ok(Storm { machines, disks, latency_ms, pool: POOL, up_ms, down_ms, ideal_ms })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ideal_is_bounded_by_the_limit_and_by_the_processors() {
        assert_eq!(ideal(StartKind::Latency, 1), 1.0);
        assert_eq!(ideal(StartKind::Latency, 10), 10.0);
        assert_eq!(ideal(StartKind::Latency, 255), 255.0 / 26.0);
        assert_eq!(ideal(StartKind::Real, 1), 1.0);
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        assert_eq!(ideal(StartKind::Real, 64), processors.min(64.0 / 7.0));
    }
}
