//! Settings of the kernel and of devices below SRs, and the file system of the logs.
//!
//! Everything is read below a root, which is `/` but for tests. What cannot be read is no finding: a VM has no
//! governor, a network file system no device.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::Finding;

/// Governors that hold the clock low.
const SAVING: [&str; 2] = ["powersave", "conservative"];
/// Microseconds to leave an idle state, from which it costs single requests much.
const IDLE_EXIT_US: u64 = 100;
/// KiB.
const READ_AHEAD_MAX: u64 = 4096;

pub(super) fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// Looks at a host whose files are below `root`; `srs` are attached SRs with their directories.
pub fn find(root: &Path, srs: &[(Uuid, PathBuf)]) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(governor(root));
    found.extend(idle_states(root));
    found.extend(logs(&root.join("var/log")));
    let mounts = text(&root.join("proc/self/mountinfo")).unwrap_or_default();
    for (sr, directory) in srs {
        let Ok(real) = fs::canonicalize(directory) else { continue };
        found.extend(soft(&mounts, &real).map(|finding| finding.of_sr(*sr)));
        if let Ok(data) = fs::metadata(&real) {
            let device = data.dev();
            let device = format!("{}:{}", libc::major(device), libc::minor(device));
            found.extend(of_device(root, &device).into_iter().map(|finding| finding.of_sr(*sr)));
        }
    }
    found
}

fn governor(root: &Path) -> Option<Finding> {
    let path = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
    let governor = text(&root.join(path))?;
    // With this driver the processor itself decides, whatever the governor is called.
    let driver = text(&root.join(path).with_file_name("scaling_driver")).unwrap_or_default();
    let is_saving = SAVING.contains(&governor.as_str()) && driver != "intel_pstate";
    is_saving.then(|| Finding::new("cpu-governor", "cpu0", format!("the governor is '{governor}'")))
}

fn idle_states(root: &Path) -> Option<Finding> {
    let states = fs::read_dir(root.join("sys/devices/system/cpu/cpu0/cpuidle")).ok()?;
    let mut deep: Vec<(u64, String)> = states
        .flatten()
        .filter(|state| number(&state.path().join("disable")).unwrap_or(0) == 0)
        .filter_map(|state| Some((number(&state.path().join("latency"))?, text(&state.path().join("name"))?)))
        .filter(|(latency, _)| *latency > IDLE_EXIT_US)
        .collect();
    deep.sort();
    let (latency, name) = deep.pop()?;
    Some(Finding::new("cpu-idle-deep", "cpu0", format!("state {name} takes {latency} us to leave")))
}

/// What is wrong with the queue of the device with this number, or of the disk whose partition it is.
fn of_device(root: &Path, device: &str) -> Vec<Finding> {
    let Ok(place) = fs::canonicalize(root.join("sys/dev/block").join(device)) else { return Vec::new() };
    let own = place.join("queue");
    let queue = if own.is_dir() { own } else { place.parent().unwrap_or(Path::new("/")).join("queue") };
    let disk = queue.parent().and_then(Path::file_name).unwrap_or_default().display().to_string();
    let rotates = number(&queue.join("rotational")) == Some(1);
    let mut found = Vec::new();
    let scheduler = text(&queue.join("scheduler")).unwrap_or_default();
    let chosen = scheduler.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    if let Some(chosen) = chosen.filter(|chosen| !rotates && *chosen == "bfq") {
        found.push(Finding::new("disk-scheduler", &disk, format!("its scheduler is '{chosen}'")));
    }
    if let Some(ahead) = number(&queue.join("read_ahead_kb")).filter(|ahead| *ahead > READ_AHEAD_MAX) {
        found.push(Finding::new("disk-read-ahead", &disk, format!("{ahead} KiB are read ahead")));
    }
    if rotates && text(&queue.join("write_cache")).as_deref() == Some("write through") {
        found.push(Finding::new("write-cache-off", &disk, "it rotates, and its write cache is off"));
    }
    found
}

/// The file system that a directory lies in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    pub(super) point: String,
    kind: String,
    pub(super) options: String,
}

impl Mount {
    pub(super) fn has(&self, wanted: &str) -> bool {
        self.options.split(',').any(|option| option == wanted)
    }

    /// Whether its storage is a server on the network.
    pub(super) fn is_network(&self) -> bool {
        matches!(&*self.kind, "nfs" | "nfs4" | "cifs" | "smb3")
    }
}

/// What the kernel says of the mount of a directory: that with the longest mount point that leads to it.
pub(super) fn mount_of(mountinfo: &str, directory: &Path) -> Option<Mount> {
    let parsed = mountinfo.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let point = before.split(' ').nth(4)?;
        let mut after = after.split(' ');
        let (kind, _, options) = (after.next()?, after.next()?, after.next()?);
        let [point, kind, options] = [point, kind, options].map(str::to_owned);
        directory.starts_with(&point).then_some(Mount { point, kind, options })
    });
    parsed.max_by_key(|mount| mount.point.len())
}

/// An NFS mount with `soft` and no time limit of its own.
pub fn soft(mountinfo: &str, directory: &Path) -> Option<Finding> {
    let mount = mount_of(mountinfo, directory)?;
    // The kernel always lists a time; 600 tenths of a second is the default.
    let is_unset = !mount.options.contains("timeo=") || mount.has("timeo=600");
    let detail = || format!("mounted with {}", mount.options);
    (mount.kind.starts_with("nfs") && mount.has("soft") && is_unset)
        .then(|| Finding::new("network-soft", &mount.point, detail()))
}

fn logs(directory: &Path) -> Option<Finding> {
    let stat = rustix::fs::statvfs(directory).ok()?;
    log_full(directory, stat.f_blocks, stat.f_bavail)
}

/// Less than a twentieth of the blocks is free.
pub fn log_full(directory: &Path, blocks: u64, free: u64) -> Option<Finding> {
    (blocks > 0 && free < blocks / 20)
        .then(|| Finding::new("log-full", directory.display(), format!("{free} of {blocks} blocks are free")))
}
