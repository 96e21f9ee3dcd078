//! API calls per second and their latencies, and what ten thousand disks cost.

use std::fs;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;

use super::client::{Client, Encoding, Transport};
use super::daemon::Daemon;
use super::{MIB, ms};
use crate::measure::interrupted;
use crate::medians::median;

/// Calls of one message over some connections.
#[derive(Clone, Debug, Serialize)]
pub struct Calls {
    pub method: &'static str,
    pub encoding: Encoding,
    pub door: Transport,
    pub connections: usize,
    pub calls: usize,
    pub calls_per_second: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// CPU time of the daemon for each call.
    pub server_cpu_us: Option<f64>,
}

/// What many disks cost.
#[derive(Clone, Debug, Serialize)]
pub struct Many {
    pub vdis: usize,
    /// `SR.scan` that finds them all.
    pub scan_ms: f64,
    pub get_all_records: Vec<AllRecords>,
}

/// `VDI.get_all_records` of all of them.
#[derive(Clone, Debug, Serialize)]
pub struct AllRecords {
    pub encoding: Encoding,
    pub ms: f64,
    pub bytes: usize,
}

const METHODS: [&str; 2] = ["VDI.get_name_label", "VDI.get_record"];

fn connect(daemon: &Daemon, door: Transport, encoding: Encoding) -> Result<Client, String> {
    match door {
        Transport::Unix => Client::unix(&daemon.socket(), encoding, &daemon.session),
        Transport::Https => {
            Client::https(&daemon.https, &daemon.place.certificate(), encoding, &daemon.session)
        }
    }
}

/// All combinations of message, encoding, [`Transport`], and number of connections.
pub fn rates(
    daemon: &Daemon,
    time: Duration,
    connections: &[usize],
    begin: &mut dyn FnMut(&str),
) -> Result<Vec<Calls>, String> {
    let vdi = daemon.make_vdi(&mut daemon.client()?, "asked about", 8 * MIB)?;
    let mut rows = Vec::new();
    for method in METHODS {
        for door in [Transport::Unix, Transport::Https] {
            for encoding in [Encoding::Json, Encoding::Xml] {
                for count in connections {
                    if interrupted() {
                        return Ok(rows);
                    }
                    begin(&format!("{method} over {count} connections"));
                    rows.push(rate(daemon, method, (door, encoding), *count, time, &vdi)?);
                }
            }
        }
    }
    Ok(rows)
}

fn rate(
    daemon: &Daemon,
    method: &'static str,
    (door, encoding): (Transport, Encoding),
    connections: usize,
    time: Duration,
    vdi: &str,
) -> Result<Calls, String> {
    let mut clients = Vec::new();
    for _ in 0..connections {
        let mut client = connect(daemon, door, encoding)?;
        let request = client.prepare(method, &[vdi]);
        // The first call is also the handshake.
        client.send(&request)?;
        clients.push((client, request));
    }
    let gate = Barrier::new(connections + 1);
    let before = daemon.process.cpu_us();
    let (took, results) = std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter_mut()
            .map(|(client, request)| {
                let gate = &gate;
                scope.spawn(move || {
                    gate.wait();
                    let (begun, mut times) = (Instant::now(), Vec::new());
                    let mut last = begun;
                    while last.duration_since(begun) < time || times.is_empty() {
                        client.send(request)?;
                        let now = Instant::now();
                        times.push(now.duration_since(last).as_secs_f64() * 1e6);
                        last = now;
                    }
                    Ok::<_, String>(times)
                })
            })
            .collect();
        gate.wait();
        let begun = Instant::now();
        let results: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        (begun.elapsed(), results)
    });
    let mut times = Vec::new();
    for result in results {
        times.extend(result.map_err(|_| "a thread of the load panicked")??);
    }
    let after = daemon.process.cpu_us();
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let cpu = before.zip(after).map(|(before, after)| (after - before) / times.len() as f64);
    Ok(Calls {
        method,
        encoding,
        door,
        connections,
        calls: times.len(),
        calls_per_second: times.len() as f64 / took.as_secs_f64(),
        p50_us: at(0.5),
        p99_us: at(0.99),
        server_cpu_us: cpu,
    })
}

/// Puts images into the SR's directory, lets them be found, and asks for them all; `on_found` is told between both.
pub fn many(daemon: &Daemon, vdis: usize, rounds: usize, on_found: &mut dyn FnMut()) -> Result<Many, String> {
    let client = &mut daemon.client()?;
    let first = daemon.make_vdi(client, "one of many", 8 * MIB)?;
    let uuid = client.text("VDI.get_uuid", &[json!(first)])?;
    let dir = daemon.place.sr();
    let image = dir.join(format!("{uuid}.vhd"));
    let bytes = fs::read(&image).map_err(|error| format!("{}: {error}", image.display()))?;
    for _ in 0..vdis {
        let path = dir.join(format!("{}.vhd", uuid::Uuid::new_v4()));
        fs::write(&path, &bytes).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let before = count(client)?;
    let begun = Instant::now();
    client.call("SR.scan", &[json!(daemon.sr)])?;
    let scan_ms = ms(begun.elapsed());
    let found = count(client)?.saturating_sub(before);
    if found != vdis {
        return Err(format!("SR.scan found {found} of {vdis} images"));
    }
    on_found();
    let mut get_all_records = Vec::new();
    for encoding in [Encoding::Json, Encoding::Xml] {
        let mut client = connect(daemon, Transport::Unix, encoding)?;
        let request = client.prepare("VDI.get_all_records", &[]);
        let (mut times, mut bytes) = (Vec::new(), 0);
        for _ in 0..rounds {
            let begun = Instant::now();
            bytes = client.send(&request)?;
            times.push(ms(begun.elapsed()));
        }
        get_all_records.push(AllRecords { encoding, ms: median(&mut times), bytes });
    }
    Ok(Many { vdis, scan_ms, get_all_records })
}

fn count(client: &mut Client) -> Result<usize, String> {
    let all = client.call("VDI.get_all", &[])?;
    Ok(all.as_array().map_or(0, Vec::len))
}
