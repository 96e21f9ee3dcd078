//! `tapio bench toolstack`: what the toolstack costs, measured on a `tapiod` of its own.
//!
//! ```text
//!   Place ─▶ Daemon ◀─ Client ── plug      one disk, beside qemu-storage-daemon
//!                               ├─ starts   many disks in parallel beside one at a time; many VMs
//!                               ├─ snapshots what a guest notices of snapshots
//!                               ├─ events   many listeners
//!                               ├─ calls    calls per second; ten thousand disks
//!                               ├─ plug_memory  of one more plug at a time
//!                               └─ idle, density  what does nothing, and what it costs
//!   all of them ─▶ Report: tables, JSON, goals
//! ```
//!
//! Both sides of a ratio are measured in turn in the same run. The disk processes are real ones in every part; guests
//! are simulated but for one.

mod calls;
pub(super) mod client;
mod counters;
pub(super) mod daemon;
mod density;
mod events;
mod halting_guest;
mod idle;
mod plug;
mod plug_memory;
mod report;
mod report_idle;
mod snapshots;
pub(super) mod starts;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::common::{self, Common};
use super::measure::interrupted;
use super::progress::Progress;
use super::{failed, invalid};
use daemon::{Daemon, Place};
use report::{Memory, Report, Setting};
use starts::StartKind;
use tapio_report::failure::Result;

const MIB: u64 = 1 << 20;
/// Steps at a time on the host: enough that the limit of a VM is what counts.
const POOL: usize = 64;
/// The parts, as `--only` names them.
const PARTS: [&str; 11] =
    ["plug", "snapshots", "start", "real", "storm", "calls", "events", "vdis", "memory", "idle", "density"];
/// Parts that take minutes, which are run if they are named, or quickly.
const LONG: [&str; 2] = ["idle", "density"];
/// Plugs at a time, for the memory of one more.
const TOGETHER: [usize; 5] = [1, 10, 20, 40, 80];
/// XenServer's table has ten intervals of 30 s.
const INTERVALS: usize = 10;
const INTERVAL: Duration = Duration::from_secs(30);
const VBDS: [usize; 9] = [1, 2, 4, 8, 10, 20, 64, 128, 255];
/// The most that a run may be told to do.
const LATENCY_MAX_MS: u64 = 60_000;
const MACHINES_MAX: usize = 10_000;
const VDIS_MAX: usize = 1_000_000;
const IDLE_MAX: usize = 10_000;
const LISTENERS_MAX: usize = 1000;
/// `VBD.userdevice` ends at 254.
const VBDS_MAX: usize = 255;
/// What a plug waits for its storage, in milliseconds: what XenServer's own took, whose start of a VM with 8 disks
/// on local SSDs became two seconds shorter when the other seven no longer waited.
const LATENCY_MS: u64 = 285;
/// Snapshots of one disk at most: the chain of a VHD has an end.
const SNAPSHOTS: usize = 20;
/// Disks of each VM of the storm.
const STORM_DISKS: usize = 8;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio bench toolstack                          everything: some minutes
  tapio bench toolstack --only plug              one disk beside qemu-storage-daemon
  tapio bench toolstack --only start --latency-ms 100 --vbds 1,10,255
  tapio bench toolstack --only idle --idle 1000  a thousand idle disks
  tapio bench toolstack --only density           idle guests of QEMU, eleven minutes
  tapio bench toolstack --only density --kernel /boot/vmlinuz-6.1.0-44-cloud-amd64
                                                 the same, and Linux guests, 22 minutes
  tapio bench toolstack --quick --json -         does it run at all, as JSON

Without --only, 'idle' and 'density' are run by --quick alone. Only numbers of calls per second are measured for some time; the rest is repeated, plugs ten times as often.")]
pub struct ToolstackArguments {
    /// Where the database and the images are made; they are removed at the end
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    /// How long the simulated storage makes each plug wait; 285 without, as XenServer's did on local SSDs
    #[arg(long, value_name = "MILLISECONDS")]
    latency_ms: Option<u64>,
    /// Numbers of disks to start a VM with
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',')]
    vbds: Vec<usize>,
    /// VMs of the storm, each with 8 disks
    #[arg(long, value_name = "COUNT")]
    machines: Option<usize>,
    /// Listeners for events
    #[arg(long, value_name = "COUNT")]
    listeners: Option<usize>,
    /// Disks for VDI.get_all_records
    #[arg(long, value_name = "COUNT")]
    vdis: Option<usize>,
    /// Idle disks, each of an idle VM
    #[arg(long, value_name = "COUNT")]
    idle: Option<usize>,
    /// A kernel of Linux for 'density', with its modules beside it or in /lib/modules; only a guest that halts without
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
    /// Only these parts; may be given more than once
    #[arg(long, value_name = "PART", value_parser = PARTS)]
    only: Vec<String>,
}

/// What is run.
#[derive(Debug)]
struct Plan {
    latency_ms: u64,
    vbds: Vec<usize>,
    machines: usize,
    listeners: usize,
    vdis: usize,
    idle: usize,
    idle_time: Duration,
    together: Vec<usize>,
    kernel: Option<PathBuf>,
    intervals: (usize, Duration),
    quick: bool,
    time: Duration,
    rounds: usize,
    parts: Vec<&'static str>,
}

impl Plan {
    fn new(arguments: &ToolstackArguments) -> Result<Self> {
        let quick = arguments.common.quick;
        let (time, rounds) = arguments.common.times((1.0, 3), (0.05, 1))?;
        let or =
            |given: Option<usize>, full: usize, few: usize| given.unwrap_or(if quick { few } else { full });
        let vbds = match (arguments.vbds.as_slice(), quick) {
            ([], false) => VBDS.to_vec(),
            ([], true) => vec![1, 4],
            (given, _) => given.to_vec(),
        };
        let plan = Self {
            latency_ms: arguments.latency_ms.unwrap_or(if quick { 20 } else { LATENCY_MS }),
            vbds,
            machines: or(arguments.machines, 125, 3),
            listeners: or(arguments.listeners, 50, 4),
            vdis: or(arguments.vdis, 10_000, 50),
            idle: or(arguments.idle, 1_000, 4),
            idle_time: if quick { time } else { INTERVAL },
            together: if quick { vec![1, 4] } else { TOGETHER.to_vec() },
            kernel: arguments.kernel.clone(),
            intervals: if quick { (2, Duration::from_millis(200)) } else { (INTERVALS, INTERVAL) },
            quick,
            time,
            rounds,
            parts: PARTS
                .into_iter()
                .filter(|part| {
                    let is_long = LONG.contains(part) && !quick;
                    (arguments.only.is_empty() && !is_long) || arguments.only.iter().any(|word| word == part)
                })
                .collect(),
        };
        let counts = [
            (plan.machines, MACHINES_MAX, "--machines"),
            (plan.listeners, LISTENERS_MAX, "--listeners"),
            (plan.vdis, VDIS_MAX, "--vdis"),
            (plan.idle, IDLE_MAX, "--idle"),
        ];
        for (count, max, name) in counts {
            if !(1..=max).contains(&count) {
                return Err(invalid(format!("{name} goes from 1 to {max}")));
            }
        }
        if plan.latency_ms > LATENCY_MAX_MS {
            return Err(invalid(format!("--latency-ms goes to {LATENCY_MAX_MS}")));
        }
        if plan.vbds.iter().any(|count| !(1..=VBDS_MAX).contains(count)) {
            return Err(invalid(format!("--vbds are numbers from 1 to {VBDS_MAX}")));
        }
        Ok(plan)
    }

    fn has(&self, part: &str) -> bool {
        self.parts.contains(&part)
    }

    /// Steps for the progress line.
    fn steps(&self, connections: usize) -> usize {
        let of = |part: &str, steps: usize| if self.has(part) { steps } else { 0 };
        let starts = of("start", self.vbds.len()) + of("real", self.vbds.len());
        of("plug", 2)
            + of("snapshots", 3)
            + starts
            + of("storm", 1)
            + of("calls", 8 * connections)
            + of("events", 1)
            + of("vdis", 1)
            + of("memory", 1)
            + of("idle", 1)
            + of("density", 1)
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

pub fn run(arguments: &ToolstackArguments) -> Result<()> {
    let plan = Plan::new(arguments)?;
    super::end_at_interrupt();
    let awake = arguments.common.awake()?;
    let setting = Setting {
        run: common::Setting::now(plan.time, plan.rounds, awake.is_some()),
        dir: arguments.dir.display().to_string(),
        latency_ms: plan.latency_ms,
    };
    let place = Place::new(&arguments.dir).map_err(failed)?;
    let mut report = execute(&plan, place, setting).map_err(failed)?;
    report.setting.run.environment.end();
    report.judge();
    arguments.common.show(&report, &report.tables())
}

fn execute(plan: &Plan, place: Place, setting: Setting) -> std::result::Result<Report, String> {
    let connections = [1, 8];
    let mut progress = Progress::new(plan.steps(connections.len()));
    let kernels = plan.kernel.as_deref().and_then(std::path::Path::parent);
    let daemon = Daemon::start(place, kernels)?;
    let mut report = Report {
        setting,
        first_answer_ms: ms(daemon.start),
        plugs: Vec::new(),
        snapshots: Vec::new(),
        starts: Vec::new(),
        storm: None,
        calls: Vec::new(),
        events: None,
        many: None,
        plug_memory: None,
        idle: None,
        density: Vec::new(),
        memory: Vec::new(),
        goals: Vec::new(),
        skipped: Vec::new(),
        interrupted: false,
    };
    let begin = &mut |what: &str| progress.begin(what);
    let memory = |state: String| {
        let found = daemon.process.memory_kib();
        found.map(|(pss_kib, anonymous_kib)| Memory { state, pss_kib, anonymous_kib })
    };
    report.memory.extend(memory("idle, after its first start".into()));
    let goes_on = |part: &str| plan.has(part) && !interrupted();
    if goes_on("plug") {
        report.plugs = plug::measure(&daemon, 10 * plan.rounds, begin, &mut report.skipped)?;
    }
    if goes_on("snapshots") {
        let count = SNAPSHOTS.min(5 * plan.rounds);
        report.snapshots = snapshots::measure(&daemon, count, plan.time / 10, begin)?;
    }
    if goes_on("events") {
        begin("events");
        report.events = Some(events::measure(&daemon, plan.listeners, 10 * plan.rounds, plan.time)?);
    }
    if goes_on("calls") {
        report.calls = calls::rates(&daemon, plan.time, &connections, begin)?;
    }
    let mut vdis = Vec::new();
    for (part, kind) in [("start", StartKind::Latency), ("real", StartKind::Real)] {
        if goes_on(part) {
            let (counts, latency, rounds) = (&plan.vbds, plan.latency_ms, plan.rounds);
            report.starts.extend(starts::series(&daemon, kind, counts, latency, rounds, &mut vdis, begin)?);
        }
    }
    if goes_on("memory") {
        begin("memory of plugs");
        report.plug_memory = Some(plug_memory::measure(&daemon, &plan.together)?);
    }
    if goes_on("storm") {
        begin("storm");
        report.storm = Some(starts::storm(&daemon, plan.machines, STORM_DISKS, plan.latency_ms)?);
    }
    if goes_on("vdis") {
        begin("many disks");
        report.memory.extend(memory("before the many VDIs".into()));
        let found = &mut || report.memory.extend(memory(format!("with {} VDIs more", plan.vdis)));
        report.many = Some(calls::many(&daemon, plan.vdis, plan.rounds, found)?);
        report.memory.extend(memory("after VDI.get_all_records".into()));
    }
    if goes_on("idle") {
        begin("idle disks");
        daemon.set_limits(&mut daemon.client()?, POOL, starts::PER_VM)?;
        report.idle = Some(idle::measure(&daemon, plan.idle, plan.idle_time, plan.quick)?);
    }
    if goes_on("density") {
        begin("idle guests of QEMU");
        let (intervals, time) = plan.intervals;
        if plan.kernel.is_none() {
            let why = "idle Linux guests of QEMU: needs a kernel: name it with --kernel";
            report.skipped.push(why.to_owned());
        }
        match density::measure(&daemon, plan.kernel.as_deref(), intervals, time) {
            Ok(tables) => report.density = tables,
            Err(error) => report.skipped.push(format!("idle guests of QEMU: {error}")),
        }
    }
    progress.end();
    report.interrupted = interrupted();
    Ok(report)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: ToolstackArguments,
    }

    fn plan(words: &[&str]) -> Result<Plan> {
        let all = std::iter::once(&"bench").chain(words);
        Plan::new(&Line::try_parse_from(all).expect("it parses").arguments)
    }

    #[test]
    fn numbers_have_bounds_that_are_told() {
        for words in [
            ["--vbds", "0"],
            ["--vbds", "256"],
            ["--machines", "0"],
            ["--idle", "10001"],
            ["--listeners", "1001"],
            ["--seconds", "0"],
            ["--seconds", "nan"],
            ["--latency-ms", "60001"],
            ["--rounds", "0"],
        ] {
            let error = plan(&words).expect_err("refused").to_string();
            assert!(error.contains(words[0]), "{words:?}: {error}");
        }
    }

    #[test]
    fn parts_are_chosen_and_counted() {
        let all = plan(&[]).expect("the defaults are good");
        assert_eq!((all.parts.len(), all.vbds.last()), (PARTS.len() - LONG.len(), Some(&255)));
        assert_eq!(plan(&["--quick"]).expect("good").parts.len(), PARTS.len());
        assert_eq!(plan(&["--only", "idle"]).expect("good").parts, ["idle"]);
        let one = plan(&["--only", "plug", "--quick"]).expect("good");
        assert_eq!((one.parts.as_slice(), one.steps(2)), (["plug"].as_slice(), 2));
    }
}
