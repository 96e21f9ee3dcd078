//! `tapio-bench`, which `tapio bench` runs: ours beside the peers, in one run, on the same files, with one load
//! generator.
//!
//! ```text
//!   for each round, for each workload, for each server:         one measurement, so that other programs of
//!       Ground ─ image ─▶ Process ◀─ load ─ measure ─▶ Sample   the host disturb all of them alike
//!   Samples ─ median ─▶ Row ─ goals ─▶ Ratio ─▶ tables and JSON
//! ```
//!
//! * `workload`, `server`, `goals`: tables of what is run, by which server, and what is compared.
//! * `ground`, `process`, `measure`, `alone`: running it.
//! * `report`, `progress`: showing it; `common`: what all benchmarks are told, and what their reports begin with.
//! * `toolstack`, `xen`, `xenstore`: `tapio bench toolstack` and so on, runs of their own.
//!
//! Speeds are never a test: they are those of one host, at one moment. Ratios of one run are what may be compared.

mod alone;
mod common;
mod exported;
mod goals;
mod ground;
mod measure;
mod medians;
mod process;
mod progress;
mod report;
mod server;
mod toolstack;
mod workload;
mod xen;
mod xenstore;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tapio_control::{ControlError, Errno};

use common::Common;
use ground::{Ground, Sizes};
use measure::{INTERRUPTED, Job, Sample, interrupted, measure};
use medians::Row;
use progress::Progress;
use report::{Report, Setting, Skipped};
use server::{SERVERS, Server};
use tapio_report::failure::{self, Result};
use workload::{WORKLOADS, Workload};

/// Steps that are no workload, as `--only` names them.
const EXTRA: [&str; 2] = ["start", "memory"];

/// What else can be measured.
#[derive(Debug, Subcommand)]
enum What {
    /// Measure the toolstack: plugs, starts of VMs, calls, events, memory
    ///
    /// Starts a tapiod of its own in a directory that is removed at the end, with real disk processes and, but for one
    /// VM, simulated guests. It needs to be root, as tapiod does. Only ratios of one run mean anything.
    Toolstack(toolstack::ToolstackArguments),
    /// Measure the path of Xen's block rings, on any host
    ///
    /// Real disk processes serve block front ends of ours. Grants and event channels are a double of the hypervisor:
    /// memory that both sides map, and eventfds. So the costs of rings, requests, copies and wake-ups are real, and
    /// those of hypercalls are missing; see the end of '--help'.
    Xen(xen::XenArguments),
    /// Measure our xenstored beside the stock one: requests, transactions, listings of domains
    ///
    /// Both run without a hypervisor, at sockets in a directory that is removed at the end.
    Xenstore(xenstore::XenstoreArguments),
}

/// Measure speed and cost beside other servers on this host
///
/// Runs our disk process and the servers that are installed here (qemu-nbd, qemu-storage-daemon, nbdkit) in turn
/// on the same files under the same load, and prints rates, latencies, costs and ratios. Only ratios of one run
/// mean anything: other work on the host changes all speeds.
#[derive(Debug, Parser)]
#[command(name = "tapio bench", disable_version_flag = true, args_conflicts_with_subcommands = true)]
#[command(after_long_help = "Examples:
  tapio bench                                  everything, on a file system in memory: ten minutes
  tapio bench --dir /var/tmp                   on a disk, past the page cache where a server can
  tapio bench --only vhost --only q32          servers and workloads by parts of their names
  tapio bench --only start --only memory       what a process costs before it works
  tapio bench --quick --json -                 does it run at all, as JSON
  tapio bench toolstack                        the toolstack instead of the disks
  tapio bench xen                              the rings of Xen guests, without a hypervisor
  tapio bench xenstore                         our xenstored beside the stock one")]
struct Arguments {
    #[command(subcommand)]
    what: Option<What>,
    /// Where the images are made; they are removed at the end
    #[arg(long, default_value = "/dev/shm", value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    common: Common,
    /// Only servers or workloads with this in their names; may be given more than once
    #[arg(long, value_name = "SERVER|WORKLOAD")]
    only: Vec<String>,
}

/// What is run.
#[derive(Debug)]
struct Plan {
    workloads: Vec<Workload>,
    servers: Vec<(Server, PathBuf)>,
    starts: bool,
    memory: bool,
    time: Duration,
    warm_up: Duration,
    rounds: usize,
    skipped: Vec<Skipped>,
}

fn invalid(message: String) -> ControlError {
    ControlError::new(Errno::EINVAL, message)
}

fn failed(message: String) -> ControlError {
    ControlError::new(Errno::EIO, message)
}

/// Which names remain when `only` is asked for: those with one of its words in them, or all if no word fits any.
fn chosen<'a>(names: &[&'a str], only: &[String]) -> Vec<&'a str> {
    let fitting: Vec<_> =
        names.iter().copied().filter(|name| only.iter().any(|word| name.contains(word.as_str()))).collect();
    if fitting.is_empty() { names.to_vec() } else { fitting }
}

impl Plan {
    fn new(arguments: &Arguments) -> Result<Self> {
        let (time, rounds) = arguments.common.times((1.0, 5), (0.05, 1))?;
        let servers = SERVERS.map(|server| server.name);
        let steps: Vec<_> = WORKLOADS.iter().map(|workload| workload.name).chain(EXTRA).collect();
        for word in &arguments.only {
            if !servers.iter().chain(&steps).any(|name| name.contains(word.as_str())) {
                return Err(invalid(format!("'{word}' is in the name of no server and no workload"))
                    .next(format!("servers: {}; workloads: {}", servers.join(", "), steps.join(", "))));
            }
        }
        let (servers, steps) = (chosen(&servers, &arguments.only), chosen(&steps, &arguments.only));
        let mut plan = Self {
            workloads: WORKLOADS.into_iter().filter(|workload| steps.contains(&workload.name)).collect(),
            servers: Vec::new(),
            starts: steps.contains(&EXTRA[0]),
            memory: steps.contains(&EXTRA[1]),
            time,
            warm_up: (time / 4).min(Duration::from_millis(200)),
            rounds,
            skipped: Vec::new(),
        };
        let wanted =
            |server: &Server| servers.contains(&server.name) && !(arguments.common.quick && server.polls);
        for server in SERVERS.into_iter().filter(wanted) {
            match server.program() {
                Ok(program) => plan.servers.push((server, program)),
                Err(reason) => plan.skipped.push(Skipped { server: server.name, reason }),
            }
        }
        Ok(plan)
    }

    /// All measurements of a round, workload by workload.
    fn pairs(&self) -> impl Iterator<Item = (&Workload, &Server, &Path)> {
        self.workloads.iter().flat_map(move |workload| {
            let able = self.servers.iter().filter(move |(server, _)| server.takes(workload));
            able.map(move |(server, program)| (workload, server, program.as_path()))
        })
    }

    fn named(&self, names: &[&str]) -> Vec<Server> {
        let servers = self.servers.iter().map(|(server, _)| *server);
        servers.filter(|server| names.contains(&server.name)).collect()
    }
}

const fn sizes(quick: bool, in_memory: bool) -> Sizes {
    if quick {
        return Sizes { full_len: 64 << 20, fresh_len: 4 << 30, fresh_requests: 512 };
    }
    // On a disk each new block takes its whole space.
    let fresh_requests = if in_memory { 16 << 10 } else { 4 << 10 };
    Sizes { full_len: 1 << 30, fresh_len: fresh_requests * (4 << 20), fresh_requests }
}

fn main() -> ExitCode {
    // A reader that goes away, as `head`, ends the program quietly.
    // SAFETY: restoring the default action installs no code of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    match Arguments::try_parse() {
        Err(error) => failure::usage(&error),
        Ok(arguments) => match run(&arguments) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failure::report("tapio", &error),
        },
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.what {
        Some(What::Toolstack(arguments)) => return toolstack::run(arguments),
        Some(What::Xen(arguments)) => return xen::run(arguments),
        Some(What::Xenstore(arguments)) => return xenstore::run(arguments),
        None => {}
    }
    let plan = Plan::new(arguments)?;
    end_at_interrupt();
    let quick = arguments.common.quick;
    let ground = Ground::new(&arguments.dir, |in_memory| sizes(quick, in_memory))?;
    let setting = Setting {
        run: common::Setting::now(plan.time, plan.rounds),
        dir: arguments.dir.display().to_string(),
        in_memory: ground.in_memory,
        image_bytes: ground.sizes.full_len,
        fresh_image_bytes: ground.sizes.fresh_len,
        fresh_requests: ground.sizes.fresh_requests,
    };
    let report = execute(plan, &ground, setting, quick).map_err(failed)?;
    drop(ground);
    arguments.common.show(&report, &report.tables())
}

/// Ctrl-C ends the run after the current measurement.
fn end_at_interrupt() {
    // SAFETY: the handler only stores to an atomic.
    unsafe { libc::signal(libc::SIGINT, interrupt as *const () as libc::sighandler_t) };
}

extern "C" fn interrupt(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

fn execute(
    mut plan: Plan,
    ground: &Ground,
    setting: Setting,
    quick: bool,
) -> std::result::Result<Report, String> {
    let started = if plan.starts { plan.named(&alone::STARTED) } else { Vec::new() };
    let weighed = if plan.memory { plan.named(&alone::WEIGHED) } else { Vec::new() };
    let starts_each = if quick { 1 } else { 5 * plan.rounds };
    let mut progress = Progress::new(plan.pairs().count() * plan.rounds + started.len() + weighed.len());
    let mut samples: BTreeMap<(&str, &str), Vec<Sample>> = BTreeMap::new();
    let mut broken: BTreeMap<&'static str, String> = BTreeMap::new();
    'rounds: for round in 0..plan.rounds {
        for (workload, server, program) in plan.pairs() {
            if interrupted() {
                break 'rounds;
            }
            progress.begin(&format!("{} {}", workload.name, server.name));
            let sizes = &ground.sizes;
            let job = Job {
                workload: *workload,
                len: if workload.fresh { sizes.fresh_len } else { sizes.full_len },
                // An allocating run is bounded by its requests; a slow server by five times the time.
                time: if workload.fresh { plan.time * 5 } else { plan.time },
                requests_max: if workload.fresh { sizes.fresh_requests } else { u64::MAX },
                seed: 7 + round as u64,
            };
            let stand = ground.stand(server, Some(workload))?;
            match measure(server, program, &stand, &job, plan.warm_up) {
                Ok(sample) => samples.entry((workload.name, server.name)).or_default().push(sample),
                Err(reason) => {
                    broken.entry(server.name).or_insert_with(|| format!("{}: {reason}", workload.name));
                }
            }
        }
    }
    let (mut starts, mut memory) = (Vec::new(), Vec::new());
    for server in started.iter().filter(|_| !interrupted()) {
        progress.begin(&format!("start {}", server.name));
        match alone::start(ground, server, starts_each) {
            Ok(start) => starts.push(start),
            Err(reason) => drop(broken.entry(server.name).or_insert(reason)),
        }
    }
    for server in weighed.iter().filter(|_| !interrupted()) {
        progress.begin(&format!("memory {}", server.name));
        let idle_after = if quick { plan.time } else { alone::IDLE_AFTER };
        match alone::memory(ground, server, plan.time.min(Duration::from_secs(1)), idle_after) {
            Ok(found) => memory.extend(found),
            Err(reason) => drop(broken.entry(server.name).or_insert(reason)),
        }
    }
    progress.end();
    plan.skipped.extend(broken.into_iter().map(|(server, reason)| Skipped { server, reason }));
    let results: Vec<Row> = plan
        .pairs()
        .filter_map(|(workload, server, _)| {
            let samples = samples.get(&(workload.name, server.name))?;
            Some(Row::of(workload.name, server.name, samples))
        })
        .collect();
    let ratios = goals::ratios(&results);
    let skipped = plan.skipped;
    Ok(Report { setting, results, starts, memory, ratios, skipped, interrupted: interrupted() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_choose_servers_and_workloads_apart() {
        let only = ["vhost".to_owned(), "q32".to_owned()];
        assert_eq!(chosen(&["tapio-vhost-raw", "nbdkit-file"], &only), ["tapio-vhost-raw"]);
        assert_eq!(chosen(&["read-4k-q1", "write-4k-q32", "start"], &only), ["write-4k-q32"]);
        assert_eq!(chosen(&["a", "b"], &only), ["a", "b"]);
    }
}
