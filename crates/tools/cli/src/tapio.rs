//! The program under its own name.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;

use crate::{
    TOOLS, bench, bugreport, cbt_util, cpu, disk, doctor, domains, generate, profile, queue, tap_ctl,
    timeline, top, trace, vhd_util, xe, xsiostat,
};
use tapio_report::failure::{self, Result};

/// Storage virtualisation for any Linux host: disks from image chains, and the instruments around them.
///
/// The same program answers to xe, tap-ctl, xsiostat, vhd-util and cbt-util, either by a link of that name (see
/// 'tapio links') or as its first word: 'tapio tap-ctl list' is 'tap-ctl list'.
#[derive(Debug, Parser)]
#[command(
    name = "tapio",
    disable_version_flag = true,
    subcommand_required = true,
    arg_required_else_help = true
)]
#[command(after_long_help = "Examples:
  tapio vhd-util create -n /disks/a.vhd -s 1024     a sparse image of 1 GiB
  tapio-disk --image vhd:/disks/a.vhd --nbd-unix /run/a.sock
                                                    a process that serves it
  tapio disk list                                   which disks there are
  tapio xsiostat                                    what they do, every second
  tapio links /usr/local/bin                        the tools under their usual names")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Look at running disks and change them
    Disk(disk::DiskArguments),
    /// Show Xen's domains, their disks and network interfaces, and where these stand
    ///
    /// Everything is read from xenstore in one transaction, however many domains and disks there are.
    Domains(domains::DomainsArguments),
    /// Measure speed and cost beside other servers on this host
    ///
    /// Runs the program 'tapio-bench', which is built from the same sources and lies beside this one or in the search
    /// path.
    #[command(disable_help_flag = true)]
    Bench {
        /// 'tapio bench --help' lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Show what all disks of this host do, live
    ///
    /// Reads and writes, throughput, latency and queues, from the counters in shared memory that disk processes keep.
    Top(top::TopArguments),
    /// Show how many requests each layer of a VM's disks holds: guest, ring, disk process, device of this host
    ///
    /// With the rates, sizes and times of each layer side by side, every second.
    Queue(queue::QueueArguments),
    /// Show the processors of this host and what runs on them, and place disks and guests
    ///
    /// The table of xenpm get-cpu-topology. A policy keeps cores for disk processes, on the NUMA node of their guests.
    Cpu(cpu::CpuArguments),
    /// Follow single requests through a disk, and say where their time goes
    ///
    /// By request size, as a table, a picture or JSON. Histograms ('tapio disk stats') say how long stages take; this
    /// says which requests spend it there.
    Trace(trace::TraceArguments),
    /// Find out what a storage target is, where it is fast, and which settings suit it, before an SR is made on it
    ///
    /// Throughput over the address space, block size and queue depth, schedulers, the cost of flushes and discards; as
    /// text, JSON, pictures and a page. Reads alone unless '--destroy-contents' is given.
    Profile(Box<profile::ProfileArguments>),
    /// Find what is wrong with this host, an SR or the disks of a VM, and repair it
    ///
    /// Looks where the toolstack's records, the directories of SRs, images, disk processes and settings of the host
    /// disagree; changes nothing without '--repair --yes'.
    Doctor(doctor::DoctorArguments),
    /// Collect what support needs to know of this host, without secrets
    ///
    /// One archive of records, findings, lists of images, chains, figures of disks, settings and the ends of logs.
    Bugreport(bugreport::BugreportArguments),
    /// Draw what the steps of a task did, and when
    ///
    /// A line for each step: how long it waited for its turn, how long it worked, and a bar where it did.
    Timeline(timeline::TimelineArguments),
    /// Print completions for a shell
    ///
    /// For bash: 'tapio completions bash > /etc/bash_completion.d/tapio'. The tools under their own names have
    /// completions of their own: 'tapio completions bash tap-ctl'; those of xe come from 'xe completion bash'.
    Completions {
        /// The shell
        shell: Shell,
        /// The program to complete
        #[arg(default_value = "tapio", value_parser = ["tapio", "tap-ctl", "xsiostat", "vhd-util", "cbt-util"])]
        program: String,
    },
    /// Print the reference of XenAPI's classes, fields and messages as Markdown
    Reference,
    /// Write the manual pages of all commands into a directory
    Man {
        /// The directory; made if it does not exist
        dir: PathBuf,
    },
    /// Install links named xe, tap-ctl, xsiostat, vhd-util and cbt-util that lead to this program
    Links {
        /// The directory, as /usr/local/bin
        dir: PathBuf,
        /// Replace files of these names that are there already
        #[arg(long)]
        force: bool,
    },
    /// Print the version
    Version {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

/// The whole tree of commands, the tools included.
pub fn command() -> clap::Command {
    let mut command = Arguments::command();
    for tool in tools() {
        command = command.subcommand(tool);
    }
    command
}

/// The tools under their own names.
pub fn tools() -> [clap::Command; 5] {
    [xe::command(), tap_ctl::command(), xsiostat::command(), vhd_util::command(), cbt_util::command()]
}

/// All of them, for what is made from each.
pub fn programs() -> impl Iterator<Item = clap::Command> {
    tools().into_iter().chain([command()])
}

pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let parsed =
        command().try_get_matches_from(arguments).and_then(|matches| Arguments::from_arg_matches(&matches));
    let arguments = match parsed {
        Ok(arguments) => arguments,
        Err(error) => return failure::usage(&error),
    };
    match execute(arguments.command) {
        Ok(code) => code,
        Err(error) => failure::report("tapio", &error),
    }
}

fn execute(wanted: Command) -> Result<ExitCode> {
    let done = match wanted {
        // It fails in the words of xe.
        Command::Timeline(arguments) => return Ok(timeline::run(&arguments)),
        Command::Doctor(arguments) => return Ok(doctor::run(&arguments)),
        Command::Bugreport(arguments) => return Ok(bugreport::run(&arguments)),
        Command::Profile(arguments) => return Ok(profile::run(&arguments)),
        Command::Cpu(arguments) => return Ok(cpu::run(&arguments)),
        Command::Queue(arguments) => return Ok(queue::run(&arguments)),
        Command::Disk(arguments) => disk::run(arguments),
        Command::Domains(arguments) => domains::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Trace(arguments) => trace::run(arguments),
        Command::Bench { arguments } => bench::run(&arguments),
        Command::Completions { shell, program } => {
            let tool = tools().into_iter().find(|tool| tool.get_name() == program);
            generate::completions(shell, &program, tool.unwrap_or_else(command))
        }
        Command::Reference => failure::print(&tapio_model::reference()),
        Command::Man { dir } => generate::manual(&dir, programs()),
        Command::Links { dir, force } => generate::links(&dir, force),
        Command::Version { json } => version(json),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn version(json: bool) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    if json {
        return failure::print_json(&serde_json::json!({
            "version": version,
            "protocol": tapio_control::PROTOCOL_VERSION,
            "statistics": tapio_stat::PAGE_VERSION,
            "tools": TOOLS,
        }));
    }
    failure::print(&format!("tapio {version}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_of_commands_is_sound() {
        command().debug_assert();
        for tool in tools() {
            assert!(TOOLS.contains(&tool.get_name()));
            tool.debug_assert();
        }
    }

    /// Help that teaches: no command and no option without a word about it.
    #[test]
    fn everything_is_explained() {
        fn walk(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            assert!(command.get_about().is_some(), "{path} has no description");
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{path} {} has no help", argument.get_id());
            }
            for inner in command.get_subcommands() {
                walk(inner, &path);
            }
        }
        walk(&command(), "");
    }
}
