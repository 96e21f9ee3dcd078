//! `cbt-util`: logs of changed blocks that no disk is open on.
//!
//! Options and output are those of XenServer's tool, because other programs read them; errors are sentences on standard
//! error, and the exit status is the error's number (22 for what is invalid).

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand};
use tapio_control::{ControlError, Errno};
use tapio_format::FormatError;
use tapio_format::cbt::{Log, LogHeader};
use tapio_types::Access;
use uuid::Uuid;

use crate::number;
use tapio_report::failure::{self, Result};

/// Make, look at, change and join logs of changed blocks.
///
/// A log has one bit for each 64 KiB of a disk. It is in use while the disk is open: 'tap-ctl create -C LOG'. No
/// command but 'get' may be used on a log meanwhile.
#[derive(Debug, Parser)]
#[command(name = "cbt-util", disable_help_subcommand = true, max_term_width = 100)]
#[command(after_help = "Examples:\n  \
    cbt-util create -n disk.cbtlog -s 10737418240     a log for a disk of 10 GiB\n  \
    cbt-util set -n disk.cbtlog -f 1                  it is complete\n  \
    cbt-util get -n disk.cbtlog -b | xxd              which blocks have changed, lowest bit first\n  \
    cbt-util coalesce -p older.cbtlog -c disk.cbtlog  disk.cbtlog has the changes of both")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make an empty log, or empty one that is there
    Create {
        /// The log
        #[arg(short = 'n', value_name = "FILE")]
        name: PathBuf,
        /// Size of the disk in bytes
        #[arg(short = 's', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "BYTES")]
        size: u64,
    },
    /// Change what a log says of itself
    Set(Set),
    /// Print one thing that a log says
    Get(Get),
    /// Add the changes of a log to the one that came after it
    Coalesce {
        /// The earlier log, which is only read
        #[arg(short = 'p', value_name = "PARENT")]
        parent: PathBuf,
        /// The later log, which has the changes of both afterwards
        #[arg(short = 'c', value_name = "CHILD")]
        child: PathBuf,
    },
}

#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("change").required(true).multiple(true)
        .args(["parent", "child", "consistent", "size"])
)]
struct Set {
    /// The log
    #[arg(short = 'n', value_name = "FILE")]
    name: PathBuf,
    /// UUID of the log before this one
    #[arg(short = 'p', value_name = "UUID")]
    parent: Option<Uuid>,
    /// UUID of the log after this one
    #[arg(short = 'c', value_name = "UUID")]
    child: Option<Uuid>,
    /// Whether the log is complete
    #[arg(short = 'f', value_name = "0|1", value_parser = flag, allow_hyphen_values = true)]
    consistent: Option<i32>,
    /// Size of the disk in bytes, which has grown: the new blocks are unchanged
    #[arg(short = 's', value_parser = number::unsigned, allow_hyphen_values = true, value_name = "BYTES")]
    size: Option<u64>,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["parent", "child", "consistent", "size", "bitmap"]))]
struct Get {
    /// The log
    #[arg(short = 'n', value_name = "FILE")]
    name: PathBuf,
    /// Print the UUID of the log before this one
    #[arg(short = 'p')]
    parent: bool,
    /// Print the UUID of the log after this one
    #[arg(short = 'c')]
    child: bool,
    /// Print whether the log is complete: 0 or 1
    #[arg(short = 'f')]
    consistent: bool,
    /// Print the size of the disk in bytes
    #[arg(short = 's')]
    size: bool,
    /// Write the bits as they are, lowest first
    #[arg(short = 'b')]
    bitmap: bool,
}

/// 0 or 1, read as C's `atoi` reads it.
fn flag(text: &str) -> std::result::Result<i32, String> {
    match number::signed(text) {
        Ok(0) => Ok(0),
        Ok(1) => Ok(1),
        _ => Err("a log is complete, 1, or not, 0".into()),
    }
}

/// The definition of the command line, for help, completions and manual pages.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the tool on its arguments, the program's own name first.
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    if arguments.len() < 2 {
        println!("usage: cbt-util COMMAND [OPTIONS]\nCOMMAND := {{ create | set | get | coalesce }}");
        println!("'cbt-util --help' explains them.");
        return failure::status(Errno::EINVAL);
    }
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => return failure::usage(&error),
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let done = execute(arguments.command, &mut out);
    let done = done.and(out.flush().map_err(|error| output(&error)));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report("cbt-util", &error),
    }
}

fn output(error: &std::io::Error) -> ControlError {
    ControlError::io("writing the output", error)
}

/// A failure of the log, with the number it stands for.
fn failed(error: &FormatError) -> ControlError {
    ControlError::new(Errno::new(error.errno()), error.to_string())
}

/// The same of a log that is only read: a directory opens, and then cannot be read.
fn unread(error: &FormatError) -> ControlError {
    let error = failed(error);
    if error.errno == Errno::EISDIR { ControlError { errno: Errno::EIO, ..error } } else { error }
}

fn execute(command: Command, out: &mut dyn Write) -> Result<()> {
    match command {
        Command::Create { name, size } => {
            Log::create(&name, size).map(|_| ()).map_err(|error| failed(&error))
        }
        Command::Set(set) => set.run().map_err(|error| failed(&error.with_path(&set.name))),
        Command::Get(get) => get.run(out),
        Command::Coalesce { parent, child } => {
            let earlier = Log::open(&parent, Access::ReadOnly).map_err(|error| unread(&error))?;
            let mut later = Log::open(&child, Access::ReadWrite).map_err(|error| failed(&error))?;
            later.absorb(&earlier).map_err(|error| failed(&error.with_path(&child)))
        }
    }
}

impl Set {
    fn run(&self) -> std::result::Result<(), FormatError> {
        // Whether the log is complete is said of one whose bitmap is cut off, too.
        let mut log = Log::open_header(&self.name, Access::ReadWrite)?;
        if let Some(size) = self.size {
            log.check_whole()?;
            log.grow(size)?;
        }
        let before = *log.header();
        let header = LogHeader {
            parent: self.parent.unwrap_or(before.parent),
            child: self.child.unwrap_or(before.child),
            consistent: self.consistent.unwrap_or(before.consistent),
            ..before
        };
        if header == before { Ok(()) } else { log.set_header(header) }
    }
}

/// Why a bitmap was not printed whole.
enum Unprinted {
    Log(FormatError),
    Output(std::io::Error),
}

impl From<FormatError> for Unprinted {
    fn from(error: FormatError) -> Self {
        Self::Log(error)
    }
}

impl Get {
    fn run(&self, out: &mut dyn Write) -> Result<()> {
        let log = Log::open_header(&self.name, Access::ReadOnly).map_err(|error| unread(&error))?;
        if self.bitmap {
            log.check_whole().map_err(|error| failed(&error.with_path(&self.name)))?;
            let printed = log.read_bitmap(|piece| out.write_all(piece).map_err(Unprinted::Output));
            return printed.map_err(|error| match error {
                Unprinted::Log(error) => failed(&error.with_path(&self.name)),
                Unprinted::Output(error) => output(&error),
            });
        }
        let header = log.header();
        let printed = if self.parent {
            writeln!(out, "{}", header.parent)
        } else if self.child {
            writeln!(out, "{}", header.child)
        } else if self.consistent {
            writeln!(out, "{}", header.consistent)
        } else {
            writeln!(out, "{}", header.size)
        };
        printed.map_err(|error| output(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &str, dir: &std::path::Path) -> Result<Vec<u8>> {
        let words = line.split_whitespace().map(|word| word.replace("DIR", dir.to_str().expect("UTF-8")));
        let arguments = Arguments::try_parse_from(std::iter::once("cbt-util".to_owned()).chain(words));
        let mut out = Vec::new();
        execute(arguments.expect("a valid command line").command, &mut out)?;
        Ok(out)
    }

    #[test]
    fn logs_are_made_changed_joined_and_shown() {
        let scratch = tempfile::tempdir().expect("a directory can be made");
        let dir = scratch.path();
        let text = |line: &str| String::from_utf8(said(line, dir).expect(line)).expect("text");
        text("create -n DIR/a -s 67108864");
        text("create -n DIR/b -s 67108864");
        assert_eq!(std::fs::metadata(dir.join("a")).expect("made").len(), 176);
        let (one, two) = ("11111111-2222-3333-4444-555555555555", "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee");
        text(&format!("set -n DIR/a -p {one} -c {two} -f 1"));
        text("set -n DIR/a -f 0 -s 134217728");
        assert_eq!(text("get -n DIR/a -p"), format!("{one}\n"));
        assert_eq!(text("get -n DIR/a -c"), format!("{two}\n"));
        assert_eq!(text("get -n DIR/a -f"), "0\n");
        assert_eq!(text("get -n DIR/a -s"), "134217728\n");
        let mut bytes = std::fs::read(dir.join("b")).expect("there");
        (bytes[48], bytes[175]) = (0x81, 0x80);
        std::fs::write(dir.join("b"), bytes).expect("written");
        text("coalesce -p DIR/b -c DIR/a");
        let bits = said("get -n DIR/a -b", dir).expect("printed");
        assert_eq!((bits.len(), bits[0], bits[127], bits[128]), (256, 0x81, 0x80, 0));
        assert_eq!(said("coalesce -p DIR/a -c DIR/b", dir).expect_err("smaller").errno, Errno::EINVAL);
        assert_eq!(said("set -n DIR/a -s 5", dir).expect_err("smaller").errno, Errno::EINVAL);
        assert_eq!(said("get -n DIR/none -f", dir).expect_err("missing").errno, Errno::ENOENT);
        let lock = Log::open(&dir.join("a"), Access::ReadWrite).expect("opens");
        assert_eq!(said("set -n DIR/a -f 1", dir).expect_err("in use").errno, Errno::EBUSY);
        assert_eq!(text("get -n DIR/a -f"), "0\n");
        drop(lock);
        text("create -n DIR/a -s 65536");
        assert_eq!(text("get -n DIR/a -s"), "65536\n");
    }

    #[test]
    fn exactly_one_thing_is_shown() {
        for line in
            ["get -n a", "get -n a -p -c", "get -p", "create -n a", "set -f 1", "set -n a -f 2", "fly"]
        {
            let words = std::iter::once("cbt-util").chain(line.split_whitespace());
            assert!(Arguments::try_parse_from(words).expect_err(line).use_stderr(), "{line}");
        }
    }
}
