//! `tapio disk room`: disks on volumes that grow while they are written.

use std::fmt::Write;

use clap::Args;
use serde::Serialize;
use tapio_control::command as ask;
use tapio_control::{OwnClient, ProcessState, ROOM, Result as Asked, RoomReport, RunDir, processes};

use super::REPLY_TIMEOUT;
use tapio_report::failure::{Result, print, print_json};

const MIB: f64 = (1 << 20) as f64;

#[derive(Debug, Args)]
pub struct RoomArguments {
    /// Only the disk with this minor number
    #[arg(value_name = "MINOR")]
    minor: Option<u16>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// A disk that asks for room.
#[derive(Debug, Serialize)]
struct Row {
    pid: i32,
    minor: u16,
    image: Option<String>,
    #[serde(flatten)]
    room: RoomReport,
}

pub fn run(run: &RunDir, arguments: &RoomArguments) -> Result<()> {
    let mut rows = Vec::new();
    for process in processes(run)? {
        let ProcessState::Live { pid } = process.state else { continue };
        // One that has just ended, or is not of ours, has no such disk.
        if let Ok(found) = rows_of(run, pid, arguments.minor) {
            rows.extend(found);
        }
    }
    rows.sort_by_key(|row| row.minor);
    if arguments.json {
        return print_json(&rows);
    }
    print(&table(&rows))
}

fn rows_of(run: &RunDir, pid: i32, only: Option<u16>) -> Asked<Vec<Row>> {
    let mut client = OwnClient::connect(run, pid)?;
    if !client.hello().features.iter().any(|feature| feature == ROOM) {
        return Ok(Vec::new());
    }
    let mut rows = Vec::new();
    for disk in client.call(&ask::List {}, &[], REPLY_TIMEOUT)? {
        if disk.image.is_none() || only.is_some_and(|only| only != disk.minor) {
            continue;
        }
        if let Some(room) = client.call(&ask::LookForRoom { minor: disk.minor }, &[], REPLY_TIMEOUT)? {
            rows.push(Row { pid, minor: disk.minor, image: disk.image, room });
        }
    }
    Ok(rows)
}

fn table(rows: &[Row]) -> String {
    let mut out = format!(
        "{:>5} {:>12} {:>12} {:>12} {:>12} {:>11} {:>6}  IMAGE\n",
        "MINOR", "VOLUME-MiB", "USED-MiB", "AHEAD-MiB", "WANTED-MiB", "WAITING-ms", "GROWN"
    );
    for row in rows {
        let mib = |bytes: u64| bytes as f64 / MIB;
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".into());
        let wanted = (row.room.wanted > 0).then(|| format!("{:.1}", mib(row.room.wanted)));
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{:>5} {:>12.1} {:>12.1} {:>12.1} {:>12} {:>11} {:>6}  {}",
            row.minor,
            mib(row.room.len),
            mib(row.room.used),
            mib(row.room.ahead),
            or_dash(wanted),
            or_dash(row.room.waiting_ms.map(|ms| ms.to_string())),
            row.room.grown,
            row.image.as_deref().unwrap_or("-"),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_what_a_disk_waits_for() {
        let room = RoomReport { len: 8 << 20, used: 6 << 20, ahead: 8 << 20, ..RoomReport::default() };
        let waiting = RoomReport { wanted: 20 << 20, waiting_ms: Some(1500), grown: 2, ..room };
        let image = Some("vhd:/dev/g/VHD-1".to_owned());
        let rows = [
            Row { pid: 1, minor: 0, image: image.clone(), room },
            Row { pid: 1, minor: 12, image, room: waiting },
        ];
        let words: Vec<Vec<String>> =
            table(&rows).lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect();
        assert_eq!(words[1], ["0", "8.0", "6.0", "8.0", "-", "-", "0", "vhd:/dev/g/VHD-1"]);
        assert_eq!(words[2], ["12", "8.0", "6.0", "8.0", "20.0", "1500", "2", "vhd:/dev/g/VHD-1"]);
    }
}
