//! What a host with many plugged disks and VMs pays for them while nothing uses them.

use std::fs;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use super::MIB;
use super::counters::{Counters, Done, load_average, pss_kib};
use super::daemon::Daemon;
use super::starts::{all, destroy};

/// Bytes of each disk.
const DISK_LEN: u64 = 8 * MIB;
/// After the last plug: workers of plans end after ten idle seconds, queue threads give memory back.
const SETTLE: Duration = Duration::from_secs(15);
const SETTLE_QUICK: Duration = Duration::from_millis(100);

/// A daemon that nothing asks.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Quiet {
    pub pss_kib: u64,
    pub wakeups_per_second: f64,
    pub cpu_us_per_second: f64,
    pub threads: usize,
}

/// Idle disks, one of each idle VM.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    pub disks: usize,
    /// Disk processes that were found.
    pub processes: usize,
    pub seconds: f64,
    pub up_ms: f64,
    pub down_ms: f64,
    /// Of all disk processes together.
    pub disks_pss_kib: u64,
    pub disk_pss_kib: f64,
    /// Of its own threads, and of the kernel's for its rings.
    pub disk_wakeups_per_second: f64,
    pub disk_ring_wakeups_per_second: f64,
    pub disk_cpu_us_per_second: f64,
    /// Of the host at the end of that time.
    pub load_average: f64,
    /// Before there were any, and with them.
    pub daemon_before: Quiet,
    pub daemon: Quiet,
}

/// The numbers of the disk processes, as the daemon wrote them down.
fn disk_processes(daemon: &Daemon) -> Vec<u32> {
    let notes = fs::read_dir(daemon.place.run.join("run/disks")).into_iter().flatten().flatten();
    let notes = notes.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let pid = |text: String| serde_json::from_str::<Value>(&text).ok()?["process"]["pid"].as_u64();
    notes.filter_map(pid).filter_map(|pid| u32::try_from(pid).ok()).collect()
}

fn quiet(pid: u32, done: &Done, seconds: f64) -> Quiet {
    Quiet {
        pss_kib: pss_kib(&[pid]),
        wakeups_per_second: (done.first + done.others) as f64 / seconds,
        cpu_us_per_second: done.cpu_us / seconds,
        threads: done.threads,
    }
}

/// Starts so many VMs with a disk each, and looks at them for `time`; they are removed.
pub fn measure(daemon: &Daemon, disks: usize, time: Duration, quick: bool) -> Result<Idle, String> {
    let own = daemon.process.pid();
    let seconds = time.as_secs_f64();
    let settle = if quick { SETTLE_QUICK } else { SETTLE };
    std::thread::sleep(settle);
    let before = Counters::of(&[own]);
    std::thread::sleep(time);
    let daemon_before = quiet(own, &Counters::of(&[own]).since(&before), seconds);
    // The daemon closes a connection that is silent for so long.
    let client = &mut daemon.client()?;
    let mut vms = Vec::new();
    let mut vdis = Vec::new();
    for at in 0..disks {
        let vdi = daemon.make_vdi(client, &format!("idle {at}"), DISK_LEN)?;
        let vm = daemon.make_vm(client, "sim", json!({"sim-front": "vhost-user"}))?;
        daemon.make_vbd(client, &vm, &vdi, 0, false)?;
        vms.push(vm);
        vdis.push(vdi);
    }
    let up_ms = all(client, &vms, "Async.VM.start", &[json!(false), json!(false)])?;
    std::thread::sleep(settle);
    let pids = disk_processes(daemon);
    let (before, daemon_begun) = (Counters::of(&pids), Counters::of(&[own]));
    std::thread::sleep(time);
    let done = Counters::of(&pids).since(&before);
    let with_disks = quiet(own, &Counters::of(&[own]).since(&daemon_begun), seconds);
    // After the counters: reading the maps of a process wakes nothing in it, but takes its time.
    let (disks_pss_kib, load_average) = (pss_kib(&pids), load_average());
    let client = &mut daemon.client()?;
    let down_ms = all(client, &vms, "Async.VM.hard_shutdown", &[])?;
    for (vm, vdi) in vms.iter().zip(&vdis) {
        destroy(client, vm)?;
        client.call("VDI.destroy", &[json!(vdi)])?;
    }
    let each = |sum: f64| sum / pids.len().max(1) as f64;
    Ok(Idle {
        disks,
        processes: pids.len(),
        seconds,
        up_ms,
        down_ms,
        disks_pss_kib,
        disk_pss_kib: each(disks_pss_kib as f64),
        disk_wakeups_per_second: each((done.first + done.others) as f64 / seconds),
        disk_ring_wakeups_per_second: each(done.ring_workers as f64 / seconds),
        disk_cpu_us_per_second: each(done.cpu_us / seconds),
        load_average,
        daemon_before,
        daemon: with_disks,
    })
}
