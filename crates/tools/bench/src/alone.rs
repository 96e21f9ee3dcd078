//! What a server costs before and after its work: starting, ending, memory.

use std::time::Duration;

use serde::Serialize;
use tapio_load::Mix;

use super::ground::Ground;
use super::measure::{Job, Running, first_answer, interrupted};
use super::medians::median;
use super::server::{Backing, Server};
use super::workload::{WORKLOADS, Workload};

/// Servers whose start is timed.
pub const STARTED: [&str; 4] = ["tapio-nbd-raw", "qemu-nbd-raw", "qsd-nbd-raw", "nbdkit-file"];
/// Servers whose memory is read.
pub const WEIGHED: [&str; 6] =
    ["tapio-nbd-raw", "tapio-nbd-vhd", "qemu-nbd-raw", "qemu-nbd-vpc", "qsd-nbd-raw", "nbdkit-file"];
/// After this long without a request a server is idle; ours gives memory back after one second.
pub const IDLE_AFTER: Duration = Duration::from_millis(1500);

/// The states in which memory is read.
pub const OPENED: &str = "opened";
const AFTER_TRAFFIC: &str = "after traffic";
const LARGEST_OPENED: &str = "2040 GiB VHD, opened";
pub const LARGEST_AFTER_TRAFFIC: &str = "2040 GiB VHD, after traffic";

/// Medians of starting and ending.
#[derive(Clone, Debug, Serialize)]
pub struct Start {
    pub server: &'static str,
    pub times: usize,
    /// From the start of the program to the answer to a first read.
    pub first_answer_ms: f64,
    /// From the signal to end until the process is gone.
    pub close_ms: f64,
}

/// Memory of one idle process.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    pub server: &'static str,
    /// What it had done before.
    pub state: &'static str,
    /// Proportional set size: shared pages count for their share.
    pub pss_kib: u64,
    /// The part of that which belongs to no file.
    pub anonymous_kib: u64,
}

/// Starts and ends a server some times.
pub fn start(ground: &Ground, server: &Server, times: usize) -> Result<Start, String> {
    let program = server.program()?;
    let stand = ground.stand(server, None)?;
    let (mut starts, mut closes) = (Vec::new(), Vec::new());
    for _ in 0..times.max(1) {
        if interrupted() {
            break;
        }
        let (mut running, client, took) = Running::start(server, &program, &stand, first_answer)?;
        starts.push(took.as_secs_f64() * 1e3);
        client.disconnect().map_err(|error| format!("{}: {error}", server.name))?;
        closes.push(running.process.end().as_secs_f64() * 1e3);
    }
    Ok(Start {
        server: server.name,
        times: starts.len(),
        first_answer_ms: median(&mut starts),
        close_ms: median(&mut closes),
    })
}

/// Weighs a server, `idle_after` its first answer and again after some traffic; a VHD is one with the largest table.
pub fn memory(
    ground: &Ground,
    server: &Server,
    busy: Duration,
    idle_after: Duration,
) -> Result<Vec<Memory>, String> {
    let program = server.program()?;
    let mut all = Vec::new();
    let mut weigh = |running: &Running, state| {
        std::thread::sleep(idle_after);
        let (pss_kib, anonymous_kib) = running
            .process
            .memory_kib()
            .ok_or_else(|| format!("{}: its memory cannot be read", server.name))?;
        all.push(Memory { server: server.name, state, pss_kib, anonymous_kib });
        Ok::<_, String>(())
    };
    let stand =
        if server.backing == Backing::Vhd { ground.largest()? } else { ground.stand(server, None)? };
    let (running, mut client, _) = Running::start(server, &program, &stand, first_answer)?;
    let states = match server.backing {
        Backing::Vhd => [LARGEST_OPENED, LARGEST_AFTER_TRAFFIC],
        _ => [OPENED, AFTER_TRAFFIC],
    };
    weigh(&running, states[0])?;
    let write = Workload { mix: Mix::RandomWrite, ..WORKLOADS[1] };
    // Few of the largest image's blocks: the memory of its table is meant, not the size of its file.
    let job = |workload| Job { workload, len: stand.len, time: busy, requests_max: 4096, seed: 5 };
    running.load(&job(write), Duration::from_millis(1))?;
    running.load(&job(WORKLOADS[1]), busy)?;
    // As guests do from time to time. What was never flushed a server may have to keep in memory.
    client.flush().map_err(|error| format!("{}: {error}", server.name))?;
    weigh(&running, states[1])?;
    drop(client);
    Ok(all)
}
