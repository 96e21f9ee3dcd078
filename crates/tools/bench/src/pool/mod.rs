//! `tapio bench pool`: what the database of a pool costs, beside that of one host.
//!
//! ```text
//!   Site on SQLite:  one tapiod
//!   Site on etcd:    one member of etcd ◀─ tapiod (decides) ◀─ calls, and listeners
//!                                       ◀─ tapiod …         ◀─ listeners
//! ```
//!
//! Calls and events are measured in turn on both sites. A storm starts all VMs of all hosts at once, each with a disk
//! process of its own.

mod hosts;

use std::fmt::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use tapio_report::failure::Result;

use super::common::{CUT_SHORT, Common, Setting};
use super::measure::interrupted;
use super::medians::median;
use super::progress::Progress;
use super::toolstack::client::Client;
use super::toolstack::daemon::Daemon;
use super::toolstack::starts;
use super::{end_at_interrupt, failed};
use hosts::Site;

/// What a change may take until a listener has it.
const HEARD_MAX: Duration = Duration::from_secs(30);
/// Bytes of each disk.
const DISK_LEN: u64 = 8 << 20;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio bench pool                           ten hosts with a hundred VMs each: some minutes
  tapio bench pool --hosts 3 --vms 10        a small one
  tapio bench pool --quick --json -          does it run at all, as JSON

Rows: 'read' is VM.get_record, 'write' VM.set_name_description, 'create' VM.create, each one at a time over the UNIX
socket of the host that decides. 'event' is the time from a write to the answer of event.from on the same host, 'event
elsewhere' on another one. Milliseconds, medians over all calls, and how many times SQLite's they take.
Storm: all VMs are started at once through the host that decides, each with one disk.")]
pub struct PoolArguments {
    /// Where databases and images are made; they are removed at the end
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    /// Hosts of the pool
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(2..=32))]
    hosts: Option<u8>,
    /// VMs of each host
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1000))]
    vms: Option<u16>,
    #[command(flatten)]
    common: Common,
}

/// Something that was timed on both sites, in milliseconds.
#[derive(Clone, Debug, Serialize)]
struct Row {
    what: &'static str,
    sqlite_ms: Option<f64>,
    etcd_ms: f64,
}

/// All VMs of a site at once.
#[derive(Clone, Debug, Serialize)]
struct Storm {
    database: &'static str,
    hosts: usize,
    vms: usize,
    up_ms: f64,
    down_ms: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    setting: Setting,
    dir: String,
    hosts: usize,
    rows: Vec<Row>,
    storms: Vec<Storm>,
    interrupted: bool,
}

impl Report {
    fn tables(&self) -> String {
        let mut out = self.setting.line(&format!("{}, {} hosts, one member of etcd", self.dir, self.hosts));
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(out, "\n{:16} {:>10} {:>10} {:>8}", "ms", "SQLite", "etcd", "ratio");
        for row in &self.rows {
            let (sqlite, ratio) = match row.sqlite_ms {
                Some(sqlite) => (format!("{sqlite:.3}"), format!("{:.2}", row.etcd_ms / sqlite.max(1e-6))),
                None => ("–".into(), "–".into()),
            };
            let _ = writeln!(out, "{:16} {sqlite:>10} {:>10.3} {ratio:>8}", row.what, row.etcd_ms);
        }
        let _ = writeln!(
            out,
            "\n{:16} {:>6} {:>6} {:>10} {:>8} {:>10}",
            "storm", "hosts", "VMs", "up ms", "VMs/s", "down ms"
        );
        for storm in &self.storms {
            let rate = storm.vms as f64 / (storm.up_ms / 1e3).max(1e-6);
            let (name, hosts, vms) = (storm.database, storm.hosts, storm.vms);
            let (up, down) = (storm.up_ms, storm.down_ms);
            let _ = writeln!(out, "{name:16} {hosts:>6} {vms:>6} {up:>10.0} {rate:>8.1} {down:>10.0}");
        }
        if self.interrupted {
            out.push_str(CUT_SHORT);
        }
        out
    }
}

pub fn run(arguments: &PoolArguments) -> Result<()> {
    let quick = arguments.common.quick;
    let (time, rounds) = arguments.common.times((0.5, 5), (0.05, 1))?;
    let hosts = usize::from(arguments.hosts.unwrap_or(if quick { 2 } else { 10 }));
    let vms = usize::from(arguments.vms.unwrap_or(if quick { 2 } else { 100 }));
    end_at_interrupt();
    let awake = arguments.common.awake()?;
    let mut report = Report {
        setting: Setting::now(time, rounds, awake.is_some()),
        dir: arguments.dir.display().to_string(),
        hosts,
        rows: Vec::new(),
        storms: Vec::new(),
        interrupted: false,
    };
    measure(arguments, (time, rounds), (hosts, vms), &mut report).map_err(failed)?;
    report.setting.environment.end();
    report.interrupted = interrupted();
    arguments.common.show(&report, &report.tables())
}

/// Times in milliseconds of one kind, on one site.
type Times = Vec<f64>;

fn measure(
    arguments: &PoolArguments,
    (time, rounds): (Duration, usize),
    (hosts, vms): (usize, usize),
    report: &mut Report,
) -> std::result::Result<(), String> {
    let mut progress = Progress::new(2 + rounds + 2);
    progress.begin("one host on SQLite");
    let alone = Site::alone(&arguments.dir)?;
    progress.begin("hosts on etcd");
    let pool = Site::pool(&arguments.dir, hosts, &mut |count| {
        eprintln!("tapio bench: {count} of {hosts} hosts are in the pool");
    })?;
    let sites = [&alone, &pool];
    let mut calls: [[Times; 3]; 2] = Default::default();
    let mut events: [Times; 3] = Default::default();
    for _ in 0..rounds {
        if interrupted() {
            return Ok(());
        }
        progress.begin("calls and events");
        for (site, times) in sites.iter().zip(&mut calls) {
            one_by_one(site.first(), time, times)?;
        }
        events[0].extend(heard(alone.first(), alone.first(), time)?);
        events[1].extend(heard(pool.first(), pool.first(), time)?);
        events[2].extend(heard(pool.first(), pool.last(), time)?);
    }
    let [mut sqlite, mut etcd] = calls;
    for (at, what) in ["read", "write", "create"].into_iter().enumerate() {
        let (sqlite_ms, etcd_ms) = (Some(median(&mut sqlite[at])), median(&mut etcd[at]));
        report.rows.push(Row { what, sqlite_ms, etcd_ms });
    }
    let [mut one, mut same, mut other] = events;
    report.rows.push(Row { what: "event", sqlite_ms: Some(median(&mut one)), etcd_ms: median(&mut same) });
    report.rows.push(Row { what: "event elsewhere", sqlite_ms: None, etcd_ms: median(&mut other) });
    for (site, database) in sites.into_iter().zip(["SQLite", "etcd"]) {
        if interrupted() {
            return Ok(());
        }
        progress.begin("storm");
        report.storms.push(storm(site, database, vms)?);
    }
    progress.end();
    Ok(())
}

fn ms(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}

/// Reads, writes and creations, a third of the time each.
fn one_by_one(daemon: &Daemon, time: Duration, times: &mut [Times; 3]) -> std::result::Result<(), String> {
    let client = &mut daemon.client()?;
    let vm = daemon.make_vm(client, "sim", json!({}))?;
    let mut number = 0_u64;
    let mut made = Vec::new();
    for (at, times) in times.iter_mut().enumerate() {
        let begun = Instant::now();
        while begun.elapsed() < time / 3 || times.is_empty() {
            number += 1;
            let call = Instant::now();
            match at {
                0 => drop(client.call("VM.get_record", &[json!(vm)])?),
                1 => drop(client.call("VM.set_name_description", &[json!(vm), json!(number.to_string())])?),
                _ => made.push(daemon.make_vm(client, "sim", json!({}))?),
            }
            times.push(ms(call));
        }
    }
    made.push(vm);
    for vm in made {
        client.call("VM.destroy", &[json!(vm)])?;
    }
    Ok(())
}

/// From calls that change a VM on `at` to the answer of `event.from` on `by`.
fn heard(at: &Daemon, by: &Daemon, time: Duration) -> std::result::Result<Times, String> {
    let client = &mut at.client()?;
    let vm = at.make_vm(client, "sim", json!({}))?;
    let told = &mut Listener::new(by, &vm)?;
    let mut times = Times::new();
    let (begun, mut number) = (Instant::now(), 0_u64);
    while begun.elapsed() < time || times.is_empty() {
        number += 1;
        let text = number.to_string();
        let mut waited = None;
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| told.wait(&text));
            // It waits by now: what is measured is not its way to the call.
            std::thread::sleep(Duration::from_millis(5));
            let change = Instant::now();
            let changed = client.call("VM.set_name_description", &[json!(vm), json!(text)]);
            let heard = waiting.join().map_err(|_| "a listener panicked".to_owned()).flatten();
            waited = Some(changed.and(heard).map(|heard| heard.duration_since(change).as_secs_f64() * 1e3));
        });
        times.extend(waited.transpose()?);
    }
    client.call("VM.destroy", &[json!(vm)])?;
    Ok(times)
}

/// A client that waits for changes of one VM.
struct Listener {
    client: Client,
    class: Value,
    token: String,
}

impl Listener {
    fn new(daemon: &Daemon, vm: &str) -> std::result::Result<Self, String> {
        let mut listener =
            Self { client: daemon.client()?, class: json!([format!("vm/{vm}")]), token: String::new() };
        listener.wait("")?;
        Ok(listener)
    }

    /// Waits until the VM's description is this text; when that was known.
    fn wait(&mut self, text: &str) -> std::result::Result<Instant, String> {
        let until = Instant::now() + HEARD_MAX;
        while Instant::now() < until {
            let params = [self.class.clone(), json!(self.token), json!(2.0)];
            let answer = self.client.call("event.from", &params)?;
            let now = Instant::now();
            answer["token"].as_str().ok_or("event.from gave no token")?.clone_into(&mut self.token);
            let events = answer["events"].as_array().map(Vec::as_slice).unwrap_or_default();
            if events.iter().any(|event| event["snapshot"]["name_description"] == text) {
                return Ok(now);
            }
        }
        Err(format!("a listener has not heard of a change within {HEARD_MAX:?}"))
    }
}

/// Starts the VMs of all hosts at once, and ends them.
fn storm(site: &Site, database: &'static str, vms: usize) -> std::result::Result<Storm, String> {
    let daemon = site.first();
    let client = &mut daemon.client()?;
    let mut by_host = Vec::new();
    for (host, sr) in site.places(client)? {
        let record =
            json!({"name_label": "shared", "SR": sr, "virtual_size": DISK_LEN.to_string(), "type": "user"});
        let vdi = client.text("VDI.create", &[record])?;
        for _ in 0..vms {
            let vm = daemon.make_vm(client, "sim", json!({}))?;
            daemon.make_vbd(client, &vm, &vdi, 0, true)?;
            by_host.push((host.clone(), vm));
        }
    }
    let begun = Instant::now();
    let mut tasks = Vec::new();
    for (host, vm) in &by_host {
        let params = [json!(vm), json!(host), json!(false), json!(false)];
        tasks.push(client.text("Async.VM.start_on", &params)?);
    }
    starts::wait(client, "VM.start_on", &tasks)?;
    let up_ms = ms(begun);
    let all: Vec<String> = by_host.iter().map(|(_, vm)| vm.clone()).collect();
    let down_ms = starts::all(client, &all, "Async.VM.hard_shutdown", &[])?;
    Ok(Storm { database, hosts: by_host.len() / vms, vms: by_host.len(), up_ms, down_ms })
}
