//! Processes of a daemon that outlive it: those of disks and guests.

use std::path::Path;

/// Processes that a daemon below `dir` has started: they have its directory in their environment. Its storage workers
/// end with it, and are its own as long as it lives.
pub fn left_behind(dir: &Path, daemon: u32) -> Vec<i32> {
    let mark = format!("TAPIO_RUN_DIR={}/", dir.display());
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let ours = |pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let is_marked = environment.split(|&byte| byte == 0).any(|line| line.starts_with(mark.as_bytes()));
        is_marked && u32::try_from(*pid) != Ok(daemon) && !is_worker_of(*pid, daemon)
    };
    pids.filter(ours).collect()
}

/// Kills them.
pub fn end_left_behind(dir: &Path, daemon: u32) {
    for pid in left_behind(dir, daemon) {
        // It carries the name of this test's directory.
        let _ = crate::process::signal(pid, libc::SIGKILL);
    }
}

/// Whether this is a storage worker of the daemon.
fn is_worker_of(pid: i32, daemon: u32) -> bool {
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let parent =
        status.lines().find_map(|line| line.strip_prefix("PPid:")).and_then(|pid| pid.trim().parse().ok());
    arguments.split(|&byte| byte == 0).nth(1) == Some(b"storage-worker") && parent == Some(daemon)
}
