//! What runs on this host: disk processes, guests, and where.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;
use tapio_report::queue::HostDevice;
use tapio_stat::{ShmRoot, disks};
use tapio_types::{ImageKind, parse_type_and_path};

use super::topology::Cpus;

/// A process with its threads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Process {
    pub pid: u32,
    pub threads: Vec<Thread>,
}

/// A thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Thread {
    pub tid: u32,
    pub name: String,
    /// The processor it ran on last.
    pub cpu: usize,
    /// Those it may run on.
    pub allowed: Cpus,
}

/// A disk process, with the disks that it serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DiskProcess {
    #[serde(flatten)]
    pub process: Process,
    /// As `minor image`.
    pub disks: Vec<String>,
    /// Domains of the guests.
    pub domids: BTreeSet<u32>,
    /// NUMA node of the block device below its first image.
    pub device_node: Option<usize>,
}

/// The processor in `/proc/PID/task/TID/stat`, and the thread's name.
fn parse_stat(text: &str) -> Option<(String, usize)> {
    // The name stands in parentheses and may hold any.
    let (head, rest) = text.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_owned();
    // Field 39, of which the first behind the name is the third.
    Some((name, rest.split_ascii_whitespace().nth(36)?.parse().ok()?))
}

fn affinity(tid: u32) -> Option<Cpus> {
    let tid = Pid::from_raw(i32::try_from(tid).ok()?)?;
    let set = sched_getaffinity(Some(tid)).ok()?;
    Some((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

impl Process {
    /// That of a number; `None` if it is gone.
    pub fn of(pid: u32) -> Option<Self> {
        let mut threads = Vec::new();
        for entry in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
            let Some(tid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let Ok(text) = fs::read_to_string(entry.path().join("stat")) else { continue };
            let (Some((name, cpu)), Some(allowed)) = (parse_stat(&text), affinity(tid)) else { continue };
            threads.push(Thread { tid, name, cpu, allowed });
        }
        threads.sort_by_key(|thread| thread.tid);
        Some(Self { pid, threads })
    }

    /// Ties all threads to these processors; threads that they start later are tied as well.
    ///
    /// # Errors
    /// The kernel's: the process is another user's, or none of the processors is there.
    pub fn pin(&self, cpus: &Cpus) -> std::io::Result<()> {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|cpu| set.set(*cpu));
        for tid in self.threads.iter().filter_map(|thread| Pid::from_raw(i32::try_from(thread.tid).ok()?)) {
            match sched_setaffinity(Some(tid), &set) {
                // It has ended since.
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// All disk processes that publish counters.
pub fn disk_processes(root: &ShmRoot) -> std::io::Result<Vec<DiskProcess>> {
    let mut found: BTreeMap<u32, DiskProcess> = BTreeMap::new();
    for disk in disks(root)?.iter().filter_map(|file| file.read().ok()) {
        let Some(process) = Process::of(disk.pid).filter(|process| !process.threads.is_empty()) else {
            continue;
        };
        let entry =
            found.entry(disk.pid).or_insert_with(|| DiskProcess { process, ..DiskProcess::default() });
        entry.disks.push(format!("{} {}", disk.minor, disk.image));
        entry.domids.extend(disk.vbds.iter().map(|vbd| vbd.domid).filter(|domid| *domid > 0));
        entry.device_node = entry.device_node.or_else(|| node_of_image(&disk.image));
    }
    Ok(found.into_values().collect())
}

/// The NUMA node of the block device below an image of this host.
fn node_of_image(image: &str) -> Option<usize> {
    let layer = parse_type_and_path(image).ok()?;
    if !matches!(layer.kind, ImageKind::Raw | ImageKind::Vhd) {
        return None;
    }
    HostDevice::of(Path::new(&layer.path))?.numa_node()
}

/// Processes of guests: emulators whose command line or directory names the VM.
pub fn guest_processes(vms: &BTreeSet<String>) -> BTreeMap<String, Vec<Process>> {
    let mut found: BTreeMap<String, Vec<Process>> = BTreeMap::new();
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        let dir = PathBuf::from(format!("/proc/{pid}"));
        let name = fs::read_to_string(dir.join("comm")).unwrap_or_default();
        if !["qemu-system", "linux", "vmlinux", "uml"].iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        let line = fs::read(dir.join("cmdline")).unwrap_or_default();
        let place = fs::read_link(dir.join("cwd")).unwrap_or_default();
        let text = format!("{} {}", String::from_utf8_lossy(&line), place.display());
        if let Some(vm) = vms.iter().find(|vm| text.contains(vm.as_str()))
            && let Some(process) = Process::of(pid)
        {
            found.entry(vm.clone()).or_default().push(process);
        }
    }
    found
}

/// The node where most pages of a process are, from the text of `/proc/PID/numa_maps`.
fn parse_numa_maps(text: &str) -> Option<usize> {
    let mut pages: BTreeMap<usize, u64> = BTreeMap::new();
    for word in text.split_ascii_whitespace() {
        if let Some((node, count)) = word.strip_prefix('N').and_then(|word| word.split_once('='))
            && let (Ok(node), Ok(count)) = (node.parse(), count.parse::<u64>())
        {
            let sum = pages.entry(node).or_default();
            *sum = sum.saturating_add(count);
        }
    }
    pages.into_iter().max_by_key(|(node, count)| (*count, usize::MAX - node)).map(|(node, _)| node)
}

/// The node where most of a guest's memory is.
pub fn memory_node(processes: &[Process]) -> Option<usize> {
    let first = processes.first()?;
    parse_numa_maps(&fs::read_to_string(format!("/proc/{}/numa_maps", first.pid)).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_this_process_are_found_where_they_may_run() {
        let own = Process::of(std::process::id()).expect("it runs");
        assert!(!own.threads.is_empty());
        assert!(own.threads.iter().all(|thread| !thread.allowed.is_empty()), "{own:?}");
        // Where they may run already.
        own.pin(&own.threads[0].allowed).expect("it may");
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 17 5 0";
        assert_eq!(parse_stat(stat), Some(("a) b".into(), 5)), "names hold anything");
        assert_eq!(parse_stat("7 (a) S 1"), None);
        assert_eq!(Process::of(1 << 30), None);
    }

    #[test]
    fn memory_is_where_most_pages_are() {
        let text = "7f00 default anon=5 dirty=5 N0=2 N1=3\n7f01 bind:1 anon=9 N1=9 kernelpagesize_kB=4\n";
        assert_eq!(parse_numa_maps(text), Some(1));
        assert_eq!(parse_numa_maps(""), None);
    }
}
