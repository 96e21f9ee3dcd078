//! `tapio-bench`, which `tapio bench` runs: ours beside the peers, in one run, on the same files, with one load
//! generator.
//!
//! ```text
//!   for each directory, each round, each workload, each server:  one measurement, so that other programs of
//!       Ground ─ image ─▶ Process ◀─ load ─ measure ─▶ Sample     the host disturb all servers alike
//!   Samples ─ median ─▶ Row ─ goals ─▶ Verdict ─▶ tables and JSON
//! ```
//!
//! * `workload`, `server`, `goals`: tables of what is run, by which server, and what is compared.
//! * `plan`, `rounds`: what a run does, and doing it in one directory.
//! * `ground`, `fresh`, `site`: the images, and what lies below them.
//! * `process`, `measure`, `virtqueues`, `exported`, `alone`: one measurement.
//! * `awake`, `environment`: the host's processors.
//! * `medians`, `verdict`, `report`, `progress`: what came of it; `common`: what all benchmarks are told, and what
//!   their reports begin with.
//! * `device`, `fairness`, `pool`, `queue`, `scale`, `thin`, `toolstack`, `transfers`, `xen`, `xenstore`: `tapio bench
//!   fairness` and so on, runs of their own.
//!
//! Speeds are never a test: they are those of one host, at one moment. Ratios of one run are what may be compared.

mod alone;
mod awake;
mod common;
mod device;
mod environment;
mod exported;
mod fairness;
mod fresh;
mod goals;
mod ground;
mod measure;
mod medians;
mod plan;
mod pool;
mod process;
mod progress;
mod queue;
mod report;
mod rounds;
mod scale;
mod server;
mod site;
mod thin;
mod toolstack;
mod transfers;
mod verdict;
mod virtqueues;
mod workload;
mod xen;
mod xenstore;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use clap::{Parser, Subcommand};
use tapio_control::{ControlError, Errno};
use tapio_report::failure::{self, Result};

use common::Common;
use measure::{INTERRUPTED, interrupted};
use plan::Plan;
use report::Report;

/// What else can be measured.
#[derive(Debug, Subcommand)]
enum What {
    /// Measure the toolstack: plugs, starts of VMs, calls, events, memory
    ///
    /// Starts a tapiod of its own in a directory that is removed at the end, with real disk processes and, but for one
    /// VM, simulated guests. It needs to be root, as tapiod does. Only ratios of one run mean anything.
    Toolstack(toolstack::ToolstackArguments),
    /// Measure a disk through Tapio beside the same disk without: raw, and as VHD
    ///
    /// On files of a directory, or on a block device, which is overwritten.
    Device(device::DeviceArguments),
    /// Measure how two disks on one device share it: large requests beside small ones
    ///
    /// Two disk processes with a block ring each write to files of one directory at the same time, with and without
    /// Tapio's sharing. Use a directory on the disk in question.
    Fairness(fairness::FairnessArguments),
    /// Measure disks whose logical volumes grow while they are written, beside disks that have all of their space
    ///
    /// Starts a tapiod of its own with an SR of logical volumes, on a device or on a loop device over a file. It needs
    /// to be root, device-mapper, lvm2 and a driver for local block devices (ublk, or the kernel's NBD client).
    Thin(thin::ThinArguments),
    /// Measure what the database of a pool costs: calls, events and a storm of starts, beside one host without a pool
    ///
    /// Starts tapiods and a member of etcd of its own, in directories that are removed at the end, with real disk
    /// processes and simulated guests. It needs to be root, as tapiod does, and etcd.
    Pool(pool::PoolArguments),
    /// Measure how many requests each layer holds on average, from 1 to 64 in flight: what 'tapio queue --sweep' starts
    ///
    /// A disk process serves a block ring of ours, as for a Xen guest; its image lies on the device to measure.
    Queue(queue::QueueArguments),
    /// Measure more and more disks of one SR that work at once: what all of them move, and what each of them does
    ///
    /// Disk processes with a block ring each on files of one directory, with one page pool, 1 to 100 of them busy.
    Scale(scale::ScaleArguments),
    /// Measure what it brings to split long requests and to merge neighbours, where it helps and where it does not
    ///
    /// A disk process with a block ring on servers of nbdkit with known limits, and on a file.
    Transfers(transfers::TransfersArguments),
    /// Measure the path of Xen's block rings, on any host
    ///
    /// Real disk processes serve block front ends of ours. Grants and event channels are a double of the hypervisor:
    /// memory that both sides map, and eventfds. So the costs of rings, requests, copies and wake-ups are real, and
    /// those of hypercalls are missing; see the end of '--help'.
    Xen(xen::XenArguments),
    /// Spin on every processor at idle priority, until killed: what '--keep-awake' starts
    #[command(name = awake::SPIN, hide = true)]
    Spin,
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
#[command(after_long_help = "\
Examples:
  tapio bench                                  everything, in memory and on a disk: an hour
  tapio bench --keep-awake                     the same in a VM, whose halted processors wake slowly
  tapio bench --dir /dev/shm --seconds 0.1     on a file system in memory: ten minutes
  tapio bench --dir /srv/ssd --dir /srv/hdd    on two disks, past the page cache where a server can
  tapio bench --only allocate                  writes that take new space: empty images of 64 GiB
  tapio bench --only vhost --only q32          servers and workloads by parts of their names
  tapio bench --only start --only memory       what a process costs before it works
  tapio bench --quick --json -                 does it run at all, as JSON
  tapio bench toolstack                        the toolstack instead of the disks
  tapio bench device --dir /srv/ssd            a disk through Tapio beside the same disk without
  tapio bench fairness --dir /srv/ssd          two disks that compete for a device
  tapio bench pool                             a pool of ten hosts on etcd beside one host on SQLite
  tapio bench scale --dir /srv/ssd             1 to 100 disks of one SR, all busy
  tapio bench thin --dir /srv/ssd              volumes that grow while they are written
  tapio bench transfers                        requests that are split or merged, where that helps and where not
  tapio bench xen                              the rings of Xen guests, without a hypervisor
  tapio bench xenstore                         our xenstored beside the stock one

Columns:
  IOPS, MB/s     requests per second, and 10^6 bytes per second
  p50 .. p99.9   microseconds that 50, 99 and 99.9 % of the requests did not exceed (at most 1.6 % too high)
  longest ms     milliseconds of the longest request of all rounds: the longest stall
  CPU us/req     microseconds of processor time of the server for each request; of file: of load and kernel together
  calls/req      system calls of the server for each request, counted in a short run of its own
  load us/req    microseconds of processor time of the load generator for each request
  load CPUs      processors that the load generator used. 'load busy' after a row: its threads had hardly a pause, so
                 that the server may be faster than the row says
  All but 'longest' are medians over the rounds.

A workload with x2 or x4 in its name uses 2 or 4 connections (NBD) or queues (vhost-user), each with its own thread.
'allocate' writes into an empty image of 64 GiB, for twice the time: the bare file is a sparse one.
Goals: 'MISSED' is printed after a comparison that is not as wanted. The exit status does not depend on it.")]
struct Arguments {
    #[command(subcommand)]
    what: Option<What>,
    /// Where the images are made; given more than once, everything is measured in each of them
    ///
    /// Without it: /dev/shm, and /var/tmp if that lies on a disk. A report has one part for each directory, which names
    /// the file system and the device. On a disk, images take up to 34 GB, at most half of what is free. They are
    /// removed at the end.
    #[arg(long, value_name = "DIR")]
    dir: Vec<PathBuf>,
    #[command(flatten)]
    common: Common,
    /// Only servers or workloads with this in their names; may be given more than once
    #[arg(long, value_name = "SERVER|WORKLOAD")]
    only: Vec<String>,
}

fn invalid(message: String) -> ControlError {
    ControlError::new(Errno::EINVAL, message)
}

fn failed(message: String) -> ControlError {
    ControlError::new(Errno::EIO, message)
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
        Some(What::Device(arguments)) => return device::run(arguments),
        Some(What::Fairness(arguments)) => return fairness::run(arguments),
        Some(What::Thin(arguments)) => return thin::run(arguments),
        Some(What::Queue(arguments)) => return queue::run(arguments),
        Some(What::Pool(arguments)) => return pool::run(arguments),
        Some(What::Scale(arguments)) => return scale::run(arguments),
        Some(What::Transfers(arguments)) => return transfers::run(arguments),
        Some(What::Xen(arguments)) => return xen::run(arguments),
        Some(What::Xenstore(arguments)) => return xenstore::run(arguments),
        Some(What::Spin) => {
            return awake::spin().map_err(|error| ControlError::io("cannot spin", &error));
        }
        None => {}
    }
    let plan = Plan::new(arguments)?;
    end_at_interrupt();
    let awake = arguments.common.awake()?;
    let mut report = Report::new(common::Setting::now(plan.time, plan.rounds, awake.is_some()));
    report.skipped.extend(plan.skipped.iter().cloned());
    for (index, dir) in plan.dirs.iter().enumerate() {
        if !interrupted() {
            rounds::run(&plan, dir, index == 0, &mut report)?;
        }
    }
    report.judge_alone();
    report.setting.environment.end();
    report.interrupted = interrupted();
    drop(awake);
    arguments.common.show(&report, &report.tables())
}

/// Ctrl-C, and the signal to end, end the run after the current measurement: it cleans up and reports what it has.
fn end_at_interrupt() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, interrupt as *const () as libc::sighandler_t) };
    }
}

extern "C" fn interrupt(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}
