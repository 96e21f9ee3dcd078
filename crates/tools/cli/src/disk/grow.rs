//! `tapio disk grow`: a larger disk.

use std::path::Path;

use clap::Args;
use serde::Serialize;
use tapio_control::command as ask;
use tapio_control::{ControlError, Errno, OwnClient, ProcessState, RunDir, processes};
use tapio_types::parse_bytes;

use super::REPLY_TIMEOUT;
use tapio_report::failure::{Result, print, print_json};

#[derive(Debug, Args)]
pub struct GrowArguments {
    /// The disk: its minor number, or the control socket of a process with one disk
    #[arg(value_name = "MINOR|SOCKET")]
    disk: String,
    /// Its new size, as 20GiB, 512M or in bytes; a VHD is rounded up to 2 MiB
    #[arg(value_parser = parse_bytes)]
    size: u64,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// What came of it.
#[derive(Debug, Serialize)]
struct Grown {
    pid: i32,
    minor: u16,
    /// Bytes.
    len: u64,
}

pub fn run(run: &RunDir, arguments: &GrowArguments) -> Result<()> {
    let (pid, mut process, minor) = find(run, &arguments.disk)?;
    // Data may have to be moved, which takes as long as it takes.
    let info = process.call(&ask::Grow { minor, len: arguments.size }, &[], None)?;
    let grown = Grown { pid, minor, len: info.len() };
    if arguments.json {
        return print_json(&grown);
    }
    print(&format!("disk {minor} has {} bytes\n", grown.len))
}

/// The process that has the disk, and its number there.
fn find(run: &RunDir, disk: &str) -> Result<(i32, OwnClient, u16)> {
    let minor: Option<u16> = disk.parse().ok();
    for process in processes(run)? {
        let ProcessState::Live { pid } = process.state else { continue };
        if minor.is_none() && run.socket(process.id) != Path::new(disk) {
            continue;
        }
        // A foreign process, or one that has just ended, is none that could be asked.
        let Ok(mut client) = OwnClient::connect(run, process.id) else { continue };
        let disks = client.call(&ask::List {}, &[], REPLY_TIMEOUT)?;
        match (minor, disks.as_slice()) {
            (Some(minor), disks) if disks.iter().any(|disk| disk.minor == minor) => {
                return Ok((pid, client, minor));
            }
            (None, [only]) => return Ok((pid, client, only.minor)),
            (None, disks) => {
                let said = format!("process {pid} has {} disks", disks.len());
                return Err(ControlError::new(Errno::EINVAL, said).next("name the disk by its minor number"));
            }
            (Some(_), _) => {}
        }
    }
    Err(ControlError::new(Errno::ENODEV, format!("there is no disk '{disk}' of a process of ours"))
        .next("'tapio disk list' shows which there are"))
}
