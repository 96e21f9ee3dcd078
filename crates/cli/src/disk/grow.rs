//! `tapio disk grow`: a larger disk.

use std::path::Path;

use clap::Args;
use serde::Serialize;
use tapio_control::{
    Command as Ask, ControlError, DiskEntry, DiskInfo, Errno, OwnClient, ProcessState, RunDir, processes,
};

use super::SOON;
use crate::failure::{Result, print, print_json};

#[derive(Debug, Args)]
pub struct Arguments {
    /// The disk: its minor number, or the control socket of a process with one disk
    #[arg(value_name = "MINOR|SOCKET")]
    disk: String,
    /// Its new size, as 20GiB, 512M or in bytes; a VHD is rounded up to 2 MiB
    #[arg(value_parser = size)]
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

/// Bytes of a size with a binary unit.
fn size(text: &str) -> std::result::Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.strip_suffix("iB").unwrap_or(unit) {
        "" | "B" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(format!("'{unit}' is not a unit: use KiB, MiB, GiB, TiB or nothing for bytes")),
    };
    let number: u64 = number.parse().map_err(|_| format!("'{text}' is not a size, as 20GiB"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is larger than any disk"))
}

pub fn run(run: &RunDir, arguments: &Arguments) -> Result<()> {
    let (pid, mut process, minor) = find(run, &arguments.disk)?;
    // Data may have to be moved, which takes as long as it takes.
    let info: DiskInfo = process.call(&Ask::Grow { minor, len: arguments.size }, &[], None)?;
    let grown = Grown { pid, minor, len: info.sectors * u64::from(info.sector_size) };
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
        let disks: Vec<DiskEntry> = client.call(&Ask::List {}, &[], SOON)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        for (text, bytes) in [
            ("512", 512),
            ("1K", 1 << 10),
            ("3MiB", 3 << 20),
            ("20GiB", 20 << 30),
            ("2T", 2 << 40),
            ("7B", 7),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for odd in ["", "GiB", "1.5G", "-1", "1 G", "1GB", "99999999T", "1g"] {
            assert!(size(odd).is_err(), "{odd}");
        }
    }
}
