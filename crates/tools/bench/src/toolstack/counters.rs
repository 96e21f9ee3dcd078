//! What the kernel counts of processes that are not ours (proc(5)).

use std::collections::BTreeMap;
use std::fs;

/// The kernel's own threads of a process, for operations of its rings that block. Each looks for work every five
/// seconds for as long as the ring is there.
const RING_WORKER: &str = "iou-wrk";

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Thread {
    /// Times that it went to sleep, and so was woken.
    wakeups: u64,
    cpu_us: f64,
    is_first: bool,
    is_ring_worker: bool,
}

/// What the threads of some processes have done so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    threads: BTreeMap<u32, Thread>,
    reads: u64,
    writes: u64,
}

/// What they did meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Done {
    /// Wake-ups of first threads: an emulator's main loop, whose timers and descriptors were due.
    pub first: u64,
    /// Those of all others, but for the kernel's own.
    pub others: u64,
    /// Those of the kernel's threads for the rings.
    pub ring_workers: u64,
    /// System calls that read and write (`syscr`, `syscw`).
    pub reads: u64,
    pub writes: u64,
    /// Time on a processor, in microseconds.
    pub cpu_us: f64,
    /// Threads now.
    pub threads: usize,
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

impl Counters {
    /// Of these processes together; nothing of those that have ended.
    pub fn of(pids: &[u32]) -> Self {
        let mut found = Self::default();
        for pid in pids {
            for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
                let dir = task.path();
                let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
                let Some(tid) = task.file_name().to_str().and_then(|name| name.parse().ok()) else {
                    continue;
                };
                // Its time on a processor in nanoseconds comes first.
                let on_cpu =
                    read("schedstat").split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
                let thread = Thread {
                    wakeups: field(&read("status"), "voluntary_ctxt_switches").unwrap_or(0),
                    cpu_us: on_cpu.unwrap_or(0.0) / 1e3,
                    is_first: tid == *pid,
                    is_ring_worker: read("comm").starts_with(RING_WORKER),
                };
                found.threads.insert(tid, thread);
            }
            let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
            found.reads += field(&io, "syscr").unwrap_or(0);
            found.writes += field(&io, "syscw").unwrap_or(0);
        }
        found
    }

    /// What was done since `before`; a thread that has ended since takes its numbers with it.
    pub fn since(&self, before: &Self) -> Done {
        let mut done = Done {
            reads: self.reads.saturating_sub(before.reads),
            writes: self.writes.saturating_sub(before.writes),
            threads: self.threads.len(),
            ..Done::default()
        };
        for (tid, now) in &self.threads {
            let was = before.threads.get(tid).copied().unwrap_or_default();
            let wakeups = now.wakeups.saturating_sub(was.wakeups);
            match now {
                Thread { is_ring_worker: true, .. } => done.ring_workers += wakeups,
                Thread { is_first: true, .. } => done.first += wakeups,
                _ => done.others += wakeups,
            }
            done.cpu_us += (now.cpu_us - was.cpu_us).max(0.0);
        }
        done
    }
}

/// The proportional share of memory of processes, in KiB; nothing where none can be asked.
pub fn pss_kib(pids: &[u32]) -> u64 {
    let of = |pid: &u32| field(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?, "Pss");
    pids.iter().filter_map(of).sum()
}

/// Whether all threads of a process but its first are asleep.
pub fn do_others_sleep(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let others = threads.filter(|task| task.file_name().to_str() != Some(&pid.to_string()));
    let mut states = others.filter_map(|task| {
        // The name before it may have anything in it.
        let text = fs::read_to_string(task.path().join("stat")).ok()?;
        text.rsplit_once(") ")?.1.chars().next()
    });
    states.all(|state| state == 'S')
}

/// The storage workers of a daemon: its children of that name.
pub fn workers(daemon: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{daemon}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children = lists.collect::<Vec<_>>().join(" ");
    let is_worker = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).nth(1) == Some(b"storage-worker")
    };
    children.split_whitespace().filter_map(|word| word.parse().ok()).filter(is_worker).collect()
}

/// The load average of the last minute.
pub fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_counted() {
        let own = std::process::id();
        let before = Counters::of(&[own]);
        std::thread::sleep(std::time::Duration::from_millis(2));
        let done = Counters::of(&[own]).since(&before);
        assert!(done.threads > 0 && done.first + done.others > 0 && pss_kib(&[own]) > 0, "{done:?}");
        assert_eq!(Counters::of(&[0]), Counters::default());
        assert!(workers(own).is_empty());
    }

    #[test]
    fn a_thread_that_ends_takes_only_its_own_numbers() {
        let thread =
            |wakeups, is_ring_worker| Thread { wakeups, cpu_us: 1.0, is_first: false, is_ring_worker };
        let of = |threads: &[(u32, Thread)]| Counters {
            threads: threads.iter().copied().collect(),
            reads: 2,
            writes: 0,
        };
        let before = of(&[(1, thread(100, false)), (2, thread(5, false))]);
        let now = of(&[(2, thread(7, false)), (3, thread(4, true)), (4, thread(1, false))]);
        let done = now.since(&before);
        assert_eq!((done.others, done.ring_workers, done.reads, done.threads), (3, 4, 0, 3));
    }
}
