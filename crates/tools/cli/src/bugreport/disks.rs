//! Disk processes: each is asked on a thread of its own, so that one which is stopped keeps no other from answering.

use std::fs;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Instant;

use serde_json::{Value, json};
use tapio_control::RunDir;

use super::limit::{Limit, wrong};
use crate::disk;

/// All disk processes with their disks.
pub(super) fn list(limit: &Limit) -> Result<Value, String> {
    let run = RunDir::from_env();
    let names = fs::read_dir(run.path()).map_err(wrong(run.path()))?;
    let names = names.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut waiting: Vec<i32> = names.filter_map(|name| RunDir::pid_in(&name)).collect();
    waiting.sort_unstable();
    let (sender, receiver) = mpsc::channel();
    for pid in waiting.clone() {
        let (sender, run) = (sender.clone(), run.clone());
        let started = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
            let answer =
                disk::disks_of(&run, pid).map(|(program, disks)| json!({"program": program, "disks": disks}));
            sender.send((pid, answer.map_err(|error| error.to_string())))
        });
        started.map_err(|error| format!("no thread: {error}"))?;
    }
    let until = Instant::now() + limit.left();
    let mut found = Vec::new();
    while !waiting.is_empty() {
        let Ok((pid, answer)) = receiver.recv_timeout(until.saturating_duration_since(Instant::now())) else {
            break;
        };
        waiting.retain(|other| *other != pid);
        let mut row = answer.unwrap_or_else(|why| json!({"error": why}));
        row["pid"] = pid.into();
        row["process"] = state(pid).into();
        found.push(row);
    }
    found.extend(
        waiting.into_iter().map(|pid| json!({"pid": pid, "process": state(pid), "error": "no answer"})),
    );
    found.sort_by_key(|row| row["pid"].as_i64());
    Ok(found.into())
}

/// Paths of the leaves of a list.
pub(super) fn images(list: &Value) -> Vec<PathBuf> {
    let rows = list.as_array().into_iter().flatten();
    let disks = rows.flat_map(|row| row["disks"].as_array().into_iter().flatten());
    let paths = disks.filter_map(|disk| disk["image"].as_str()?.split_once(':').map(|(_, path)| path));
    paths.filter(|path| path.starts_with('/')).map(PathBuf::from).collect()
}

/// The kernel's word for a process: `S (sleeping)`, `T (stopped)`.
fn state(pid: i32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("State:"));
    line.map_or("gone", str::trim).to_owned()
}
