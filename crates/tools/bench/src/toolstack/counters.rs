//! What the kernel counts of processes that are not ours (proc(5)).

use std::fs;

/// What the threads of one or more processes have done so far, and what they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Times that a thread went to sleep, and so was woken.
    pub wakeups: u64,
    /// The same of first threads alone: an emulator's sleeps until a timer or a descriptor is due.
    pub wakeups_of_first: u64,
    /// System calls that read and write (`syscr`, `syscw`).
    pub reads: u64,
    pub writes: u64,
    /// Time on a processor, in microseconds.
    pub cpu_us: f64,
    pub threads: usize,
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

impl Counters {
    /// Of one process; nothing where it has ended.
    pub fn of(pid: u32) -> Self {
        let mut found = Self::default();
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let dir = task.path();
            let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
            let switches = field(&read("status"), "voluntary_ctxt_switches").unwrap_or(0);
            found.wakeups += switches;
            if task.file_name().to_str() == Some(&pid.to_string()) {
                found.wakeups_of_first += switches;
            }
            // Its time on a processor in nanoseconds comes first.
            let on_cpu =
                read("schedstat").split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
            found.cpu_us += on_cpu.unwrap_or(0.0) / 1e3;
            found.threads += 1;
        }
        let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        found.reads = field(&io, "syscr").unwrap_or(0);
        found.writes = field(&io, "syscw").unwrap_or(0);
        found
    }

    /// Of all of them together.
    pub fn sum(pids: &[u32]) -> Self {
        pids.iter().map(|pid| Self::of(*pid)).fold(Self::default(), |sum, one| Self {
            wakeups: sum.wakeups + one.wakeups,
            wakeups_of_first: sum.wakeups_of_first + one.wakeups_of_first,
            reads: sum.reads + one.reads,
            writes: sum.writes + one.writes,
            cpu_us: sum.cpu_us + one.cpu_us,
            threads: sum.threads + one.threads,
        })
    }

    /// What was done since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            wakeups: self.wakeups.saturating_sub(before.wakeups),
            wakeups_of_first: self.wakeups_of_first.saturating_sub(before.wakeups_of_first),
            reads: self.reads.saturating_sub(before.reads),
            writes: self.writes.saturating_sub(before.writes),
            cpu_us: (self.cpu_us - before.cpu_us).max(0.0),
            threads: self.threads,
        }
    }
}

/// The proportional share of memory of processes, in KiB; nothing where none can be asked.
pub fn pss_kib(pids: &[u32]) -> u64 {
    let of = |pid: &u32| field(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?, "Pss");
    pids.iter().filter_map(of).sum()
}

/// The storage workers of a daemon: its children of that name.
pub fn workers(daemon: u32) -> Vec<u32> {
    let children = format!("/proc/{daemon}/task");
    let lists = fs::read_dir(children).into_iter().flatten().flatten();
    let lists = lists.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let pids = lists
        .flat_map(|list| list.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<u32>>());
    let is_worker = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).nth(1) == Some(b"storage-worker")
    };
    pids.filter(is_worker).collect()
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
        let before = Counters::of(own);
        std::thread::sleep(std::time::Duration::from_millis(2));
        let done = Counters::sum(&[own]).since(&before);
        assert!(before.threads > 0 && done.wakeups > 0 && pss_kib(&[own]) > 0, "{done:?}");
        assert_eq!(Counters::of(0), Counters::default());
        assert!(workers(own).is_empty());
    }
}
