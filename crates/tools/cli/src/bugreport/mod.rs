//! `tapio bugreport`: what support needs to know of a host, as one archive without secrets.
//!
//! ```text
//! collect   what is asked, in which order      records  what is taken of records, by a list
//! limit     how long each part may take        host     of settings and mounts, by lists
//! archive   members, and what is missing       files    logs and directories
//! chains    trees of images                    disks    disk processes
//! redact    the second line: texts that have no structure
//! ```

mod archive;
mod chains;
mod collect;
mod disks;
mod files;
mod host;
mod limit;
mod records;
mod redact;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

pub use self::redact::Redactor;

use crate::xe::Failure;
use tapio_report::failure;

/// No archive was written.
const FAILED: u8 = 2;

/// Options of `tapio bugreport`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Exit status: 0 the archive was written; 2 it was not.

What could not be had is a line in the member 'missing.txt'. Secrets are left out; look into the archive before you \
give it away: names, addresses and logs are in it.")]
pub struct BugreportArguments {
    /// The archive; a file of this name must not exist
    #[arg(long, short, value_name = "FILE", default_value = "tapio-bugreport.tar.gz")]
    output: PathBuf,
    /// Settings of the daemon
    #[arg(long, value_name = "FILE", default_value = "/etc/tapio/tapiod.conf")]
    settings: PathBuf,
    /// Directory of the daemon's sockets and logs
    #[arg(long, value_name = "DIR", default_value = "/run/tapio")]
    run_dir: PathBuf,
    /// Directory of logs where no journal is
    #[arg(long, value_name = "DIR", default_value = "/var/log/tapio")]
    log_dir: PathBuf,
    /// How long one part may take
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    part_limit: u64,
    /// A log beside those that are found; can be given again
    #[arg(long, value_name = "FILE")]
    log: Vec<PathBuf>,
    /// Print the members as JSON
    #[arg(long)]
    json: bool,
    /// Where to connect, as 'xe' takes it: -s SERVER, -u USER, --socket PATH ...
    #[arg(last = true, value_name = "XE OPTION")]
    xe: Vec<String>,
}

impl BugreportArguments {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.part_limit)
    }
}

pub fn run(arguments: &BugreportArguments) -> ExitCode {
    match write(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error.report();
            ExitCode::from(FAILED)
        }
    }
}

/// Writes an archive about this host, whose toolstack listens at `socket`.
///
/// # Errors
/// The file is there already, or cannot be written.
pub fn archive_of_host(output: PathBuf, socket: &Path) -> Result<(), Failure> {
    let run_dir = socket.parent().unwrap_or(Path::new("/run/tapio")).to_owned();
    write(&BugreportArguments {
        output,
        settings: "/etc/tapio/tapiod.conf".into(),
        run_dir,
        log_dir: "/var/log/tapio".into(),
        part_limit: 30,
        log: Vec::new(),
        json: false,
        xe: vec!["--socket".into(), socket.display().to_string()],
    })
}

fn write(arguments: &BugreportArguments) -> Result<(), Failure> {
    let wrong = |error: std::io::Error| {
        Failure::other(format!("writing {}: {error}; name another file", arguments.output.display()))
    };
    let mut archive = archive::Archive::create(&arguments.output).map_err(wrong)?;
    archive.shows_progress = !arguments.json && std::io::stderr().is_terminal();
    let members = collect::all(arguments, &mut archive).and_then(|()| archive.end());
    let members = members.map_err(|error| {
        // Half an archive is of no use.
        let _ = std::fs::remove_file(&arguments.output);
        wrong(error)
    })?;
    let text = if arguments.json {
        let row = |(name, len): &(String, usize)| serde_json::json!({"name": name, "bytes": len});
        format!("{:#}\n", serde_json::Value::from(members.iter().map(row).collect::<Vec<_>>()))
    } else {
        format!("{}: {} members\n", arguments.output.display(), members.len())
    };
    failure::print(&text).map_err(|error| Failure::other(error.to_string()))
}
