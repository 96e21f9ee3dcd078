//! `tap-ctl`: commands, options, output and exit status as the controllers of disk processes expect them.
//!
//! Works with our disk process and with a foreign tapdisk, by the tapdisk protocol alone.

mod commands;
mod list;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use tapio_control::{ControlError, Errno, RunDir};

use tapio_report::failure::{self, Result};

/// Commands in the order in which they are listed.
const NAMES: [&str; 13] = [
    "list", "allocate", "free", "create", "destroy", "spawn", "attach", "detach", "open", "close", "pause",
    "unpause", "stats",
];

/// Control disk processes.
///
/// A disk has a process (-p) and in it a minor number (-m). 'create' does everything that makes one: it allocates a
/// number, starts a process, attaches the number and opens the image; 'destroy' undoes it. Errors are printed on
/// standard error, and the exit status is the system's error number.
#[derive(Debug, Parser)]
#[command(name = "tap-ctl", disable_version_flag = true, disable_help_subcommand = true)]
#[command(after_long_help = "Examples:
  tap-ctl create -a vhd:/disks/a.vhd                start a process for an image
  tap-ctl list                                      which there are
  tap-ctl pause -p 4711 -m 0                        drain it and close its files
  tap-ctl unpause -p 4711 -m 0 -a vhd:/disks/b.vhd  go on with another image
  tap-ctl destroy -p 4711 -m 0                      end it

States are bits: 0x1 dead, 0x2 closed, 0x4 quiesce requested, 0x8 quiesced, 0x10 pause requested,
0x20 paused, 0x40 shutdown requested, 0x200 resume failed. A paused disk shows 0x2a.

TAPIO_RUN_DIR names the directory of control sockets (default /run/blktap-control), TAPIO_DISK the
program that 'spawn' and 'create' start (default: tapio-disk beside this one).")]
struct Arguments {
    /// Say on standard error what each disk process is asked, and how long it takes
    #[arg(long, global = true)]
    debug: bool,
    #[command(subcommand)]
    command: Command,
}

/// Which disk.
#[derive(Clone, Copy, Debug, Args)]
struct Which {
    /// Process
    #[arg(short)]
    pid: i32,
    /// Minor number
    #[arg(short)]
    minor: u16,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List processes, disks and allocated numbers that are not attached
    ///
    /// On a terminal a table of pid, minor number, state, type and file; into a pipe lines of 'key=value', where what
    /// is not known is left out.
    List {
        /// Only disks of this process
        #[arg(short)]
        pid: Option<i32>,
        /// Only the disk of this minor number
        #[arg(short)]
        minor: Option<i32>,
        /// Only disks of this image type
        #[arg(short = 't', value_name = "TYPE")]
        kind: Option<String>,
        /// Only the disk with this file
        #[arg(short)]
        file: Option<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Take a free minor number and print the path of its marker
    Allocate,
    /// Give a minor number back
    Free {
        /// Minor number
        #[arg(short)]
        minor: u16,
    },
    /// Allocate, spawn, attach and open in one step; prints the path of the marker
    Create(Create),
    /// Close, detach and free in one step
    Destroy {
        #[command(flatten)]
        which: Which,
        /// Seconds to wait for requests in flight
        #[arg(short, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
    /// Start a disk process and print its pid
    Spawn,
    /// Make a disk in a process
    Attach {
        #[command(flatten)]
        which: Which,
    },
    /// Forget a disk; the process ends with its last one
    Detach {
        #[command(flatten)]
        which: Which,
    },
    /// Open an image
    Open(Open),
    /// Close the image
    Close {
        #[command(flatten)]
        which: Which,
        /// Do not wait for requests in flight
        #[arg(short)]
        force: bool,
        /// Seconds to wait for requests in flight
        #[arg(short, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
    /// Wait until all requests are answered and close the files; the guest waits
    Pause {
        #[command(flatten)]
        which: Which,
        /// Seconds to wait for requests in flight
        #[arg(short, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
    /// Go on, with another image if one is given
    Unpause {
        #[command(flatten)]
        which: Which,
        /// Another image
        #[arg(short = 'a', value_name = "TYPE:PATH")]
        image: Option<String>,
        /// Second image
        #[arg(short = '2', value_name = "TYPE:PATH")]
        secondary: Option<String>,
        /// Keep a log of changed blocks there
        #[arg(short = 'c', value_name = "LOGFILE")]
        log: Option<String>,
    },
    /// Print the statistics of a disk as a line of JSON
    ///
    /// Images are listed leaf first. 'tapio disk stats' shows latencies too.
    Stats {
        #[command(flatten)]
        which: Which,
    },
}

/// How to open an image.
#[derive(Debug, Args)]
struct Image {
    /// The image, as vhd:/disks/a.vhd or aio:/disks/a.raw
    #[arg(short = 'a', value_name = "TYPE:PATH")]
    image: String,
    /// Refuse writes
    #[arg(short = 'R')]
    read_only: bool,
    /// Read parents through the page cache
    #[arg(short = 'D')]
    page_cache: bool,
    /// Share the open parents of that minor number
    #[arg(short = 'e', value_name = "MINOR")]
    parents_of: Option<u32>,
    /// Cache reads on the leaf
    #[arg(short = 'r')]
    leaf_cache: bool,
    /// Second image: a mirror, or with -s the place to go on when the first is full
    #[arg(short = '2', value_name = "TYPE:PATH")]
    secondary: Option<String>,
    /// Go on with the second image when the first is full
    #[arg(short = 's')]
    standby: bool,
    /// Seconds that the storage may take for a request before it fails; 120 without
    #[arg(short = 't', value_name = "SECONDS")]
    timeout: Option<u16>,
    /// Keep a log of changed blocks there
    #[arg(short = 'C', value_name = "LOGFILE")]
    log: Option<String>,
}

#[derive(Debug, Args)]
struct Create {
    #[command(flatten)]
    image: Image,
    /// Accepted for compatibility: there is no device to name
    #[arg(short = 'd', value_name = "NAME")]
    device: Option<String>,
}

#[derive(Debug, Args)]
struct Open {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    image: Image,
    /// Read the key of an encrypted image from standard input: exactly 32 or 64 bytes
    #[arg(short = 'E')]
    encrypted: bool,
}

/// The definition, for help, completions and pages.
pub fn command() -> clap::Command {
    Arguments::command()
}

pub fn run(arguments: Vec<OsString>) -> ExitCode {
    if arguments.len() < 2 {
        println!("usage: tap-ctl COMMAND [OPTIONS]\nCOMMAND := {{ {} }}", NAMES.join(" | "));
        println!("'tap-ctl --help' explains them.");
        return ExitCode::SUCCESS;
    }
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => return failure::usage(&error),
    };
    let run = RunDir::from_env();
    let begun = std::time::Instant::now();
    let name = format!("{:?}", arguments.command);
    let result = execute(&run, arguments.command);
    if arguments.debug {
        let outcome = match &result {
            Ok(()) => "done".to_owned(),
            Err(error) => error.errno.name().to_owned(),
        };
        eprintln!("tap-ctl: {name} in {}: {outcome} after {:?}", run.path().display(), begun.elapsed());
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report("tap-ctl", &error),
    }
}

fn execute(run: &RunDir, command: Command) -> Result<()> {
    match command {
        Command::List { pid, minor, kind, file, json } => {
            list::run(run, &list::Filter { pid, minor, kind, file }, json)
        }
        Command::Allocate => commands::allocate(run),
        Command::Free { minor } => run.minors().free(minor),
        Command::Create(Create { image, device: _ }) => commands::create(run, &image),
        Command::Destroy { which, timeout } => commands::destroy(run, which, timeout),
        Command::Spawn => commands::spawn(),
        Command::Attach { which } => {
            which.client(run).attach(which.minor).map_err(|error| which.unexpected(run, error))
        }
        Command::Detach { which } => {
            which.client(run).detach(which.minor).map_err(|error| which.unexpected(run, error))
        }
        Command::Open(Open { which, image, encrypted }) => commands::open(run, which, &image, encrypted),
        Command::Close { which, force, timeout } => {
            which.client(run).close(which.minor, force, commands::seconds(timeout))
        }
        Command::Pause { which, timeout } => {
            let paused = which.client(run).pause(which.minor, commands::seconds(timeout));
            paused.map_err(|error| which.unknown(run, error))
        }
        Command::Unpause { which, image, secondary, log } => {
            let resumed = commands::unpause(run, which, image, secondary, log);
            resumed.map_err(|error| which.unknown(run, error))
        }
        Command::Stats { which } => {
            let stats = which.client(run).stats(which.minor);
            let text = stats.map_err(|error| which.unexpected(run, error))?;
            failure::print(&(text + "\n"))
        }
    }
}

impl Which {
    fn client(self, run: &RunDir) -> tapio_control::Client {
        tapio_control::Client::new(run, self.pid)
    }

    /// [`Which::unexpected`] of a request whose other refusals are answers.
    fn unknown(self, run: &RunDir, error: ControlError) -> ControlError {
        if error.errno == Errno::ENODEV { self.unexpected(run, error) } else { error }
    }

    /// A refusal as XenServer's `tap-ctl` ends with it: it knows an error as no answer to these requests, and
    /// scripts know
    /// 22. What keeps the process from being asked has a number of its own.
    fn unexpected(self, run: &RunDir, error: ControlError) -> ControlError {
        let refusals = [Errno::ENODEV, Errno::EEXIST, Errno::EBUSY, Errno::ENOENT, Errno::EAGAIN];
        if refusals.contains(&error.errno) && run.socket(self.pid).exists() {
            return ControlError { errno: Errno::EINVAL, ..error };
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> std::result::Result<Arguments, clap::Error> {
        Arguments::try_parse_from(std::iter::once("tap-ctl").chain(line.split_whitespace()))
    }

    #[test]
    fn every_command_of_the_list_exists_with_its_options() {
        let defined: Vec<_> =
            command().get_subcommands().map(|command| command.get_name().to_owned()).collect();
        assert_eq!(defined, NAMES);
        for line in [
            "list",
            "list -p 1 -m 2 -t vhd -f /a",
            "list --json",
            "allocate",
            "free -m 3",
            "create -a vhd:/a -d name -R -e 4 -r -2 nbd:/s -s -t 30 -D -C /log",
            "destroy -p 1 -m 2 -t 5",
            "spawn",
            "attach -p1 -m2",
            "detach -m 2 -p 1",
            "open -p 1 -m 2 -a vhd:/a -R -D -e 1 -r -2 nbd:/s -s -t 9 -C /log -E",
            "close -p 1 -m 2 -f -t 5",
            "pause -p 1 -m 2 -t 5",
            "unpause -p 1 -m 2 -a vhd:/b -2 nbd:/s -c /log",
            "stats -p 1 -m 2",
            "--debug stats -p 1 -m 2",
            "stats -p 1 --debug -m 2",
        ] {
            if let Err(error) = parse(line) {
                panic!("{line}: {error}");
            }
        }
    }

    #[test]
    fn missing_or_absurd_arguments_are_refused() {
        for line in [
            "free",
            "attach -p 1",
            "open -p 1 -m 2",
            "create",
            "stats -p x -m 1",
            "pause -p 1 -m 70000",
            "fly",
        ] {
            assert!(parse(line).expect_err(line).use_stderr(), "{line}");
        }
    }
}
