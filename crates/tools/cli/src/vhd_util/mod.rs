//! `vhd-util`: work on VHD images that no guest has open.
//!
//! Options, output lines and exit statuses are those of XenServer's tool, because other programs read them; the
//! status is
//! the error's number (22 for what is invalid). Errors are sentences where that tool prints its own: on standard
//! output,
//! but for `create`, `snapshot` and `key`. What differs on purpose stands in docs/original-tools.md.
//!
//! One file a command or a pair of them; `output` has what they share.

mod check;
mod coalesce;
mod create;
mod fill;
mod glob;
mod headers;
mod key;
mod modify;
mod output;
mod query;
mod read;
mod resize;
mod scan;
mod volumes;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use output::Failure;

/// Make, look at, change and merge VHD images.
///
/// Images are named by path; a disk and its snapshots form a chain in which each image knows its parent. No command
/// may be used on an image that a guest is writing to, except where its help says so.
#[derive(Debug, Parser)]
#[command(name = "vhd-util", disable_help_subcommand = true, max_term_width = 100)]
#[command(after_help = "Examples:\n  \
    vhd-util create -n disk.vhd -s 10240              a disk of 10 GiB that takes a few KiB\n  \
    vhd-util snapshot -n leaf.vhd -p disk.vhd         writes go to leaf.vhd from now on\n  \
    vhd-util query -n leaf.vhd -vsfp                  size, space taken, parent, hidden flag\n  \
    vhd-util scan -p -m '*.vhd'                       all chains here, as trees\n  \
    vhd-util coalesce -n leaf.vhd                     merge leaf.vhd into disk.vhd\n  \
    vhd-util check -n disk.vhd                        is it whole?")]
struct Arguments {
    /// Say what was overlooked while reading
    #[arg(long, global = true)]
    debug: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Create(create::Create),
    Snapshot(create::Snapshot),
    Query(query::Query),
    Read(read::Read),
    Set(modify::Set),
    Repair(fill::Repair),
    Resize(resize::Resize),
    Fill(fill::Fill),
    Coalesce(coalesce::Coalesce),
    Modify(modify::Modify),
    Scan(scan::Scan),
    Check(check::Check),
    Revert(resize::Revert),
    Key(key::Key),
    Copy(fill::Copy),
}

/// The commands in the order in which the usage line has them.
const COMMANDS: &str = "create | snapshot | query | read | set | repair | resize | fill | coalesce | modify | scan \
                        | check | revert | key | copy";

/// The definition of the command line, for help, completions and manual pages.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the tool on its arguments, the program's own name first.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let on_stdout = arguments.get(1).and_then(|command| command.to_str()).is_some_and(prints_errors);
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let done = if arguments.len() < 2 { usage(&mut out) } else { run_on(arguments, &mut out) };
    let flushed = out.flush().map_err(Failure::from);
    match done.and(flushed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report("vhd-util", on_stdout),
    }
}

/// Whether XenServer's tool prints the failures of this command on standard output.
fn prints_errors(command: &str) -> bool {
    COMMANDS.split(" | ").any(|known| known == command) && !["create", "snapshot", "key"].contains(&command)
}

fn usage(out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(out, "usage: vhd-util COMMAND [OPTIONS]\nCOMMAND := {{ {COMMANDS} }}")?;
    Ok(())
}

fn run_on(arguments: Vec<OsString>, out: &mut dyn Write) -> Result<(), Failure> {
    let matches = command().try_get_matches_from(arguments);
    let parsed = match matches.and_then(|matches| Arguments::from_arg_matches(&matches)) {
        Ok(parsed) => parsed,
        Err(error) if error.use_stderr() => {
            if matches!(error.kind(), clap::error::ErrorKind::InvalidSubcommand) {
                usage(out)?;
            }
            return Err(Failure::usage(error.render().ansi().to_string()));
        }
        Err(help) => {
            write!(out, "{}", output::for_reader(help.render().ansi().to_string(), &std::io::stdout()))?;
            return Ok(());
        }
    };
    let debug = parsed.debug;
    match parsed.command {
        Command::Create(arguments) => arguments.run(),
        Command::Snapshot(arguments) => arguments.run(debug),
        Command::Query(arguments) => arguments.run(debug, out),
        Command::Read(arguments) => arguments.run(out),
        Command::Set(arguments) => arguments.run(),
        Command::Repair(arguments) => arguments.run(),
        Command::Resize(arguments) => arguments.run(),
        Command::Fill(arguments) => arguments.run(),
        Command::Coalesce(arguments) => arguments.run(out),
        Command::Modify(arguments) => arguments.run(),
        Command::Scan(arguments) => arguments.run(out),
        Command::Check(arguments) => arguments.run(out),
        Command::Revert(arguments) => arguments.run(),
        Command::Key(arguments) => arguments.run(out),
        Command::Copy(arguments) => arguments.run(),
    }
}
