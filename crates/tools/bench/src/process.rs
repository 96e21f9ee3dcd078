//! A server process, and what the kernel counts of it.

use std::fs;
use std::io;
use std::mem::size_of;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

/// How long a server may take to end before it is killed.
const END_MAX: Duration = Duration::from_secs(5);
/// Where the kernel says the number of the trace point of system calls; the second is its place on older systems.
const TRACE_POINTS: [&str; 2] = [
    "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id",
    "/sys/kernel/debug/tracing/events/raw_syscalls/sys_enter/id",
];

/// A child that ends with this value, and with this process however that ends.
#[derive(Debug)]
pub struct Process {
    child: Child,
    ended: bool,
}

impl Process {
    /// Starts it in a group of its own, so that an interrupt from the terminal comes to us alone.
    pub fn start(command: &mut Command, errors: fs::File) -> io::Result<Self> {
        let parent = std::process::id();
        // SAFETY: prctl and getppid are async-signal-safe and take no memory.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have died before the request was made.
                if std::os::unix::process::parent_id() != parent {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                Ok(())
            });
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::from(errors))
            .process_group(0)
            .spawn()?;
        Ok(Self { child, ended: false })
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        if !self.ended {
            self.ended = !matches!(self.child.try_wait(), Ok(None));
        }
        self.ended
    }

    /// Asks it to end and waits; how long that took.
    pub fn end(&mut self) -> Duration {
        let begin = Instant::now();
        if !self.ended {
            // The child has not been waited for, so the number is still its own.
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            while !self.has_ended() {
                if begin.elapsed() > END_MAX {
                    let _ = self.child.kill();
                    let _ = self.child.wait();
                    self.ended = true;
                } else {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        }
        begin.elapsed()
    }

    /// CPU time of all its threads so far, those that have ended included, in microseconds.
    pub fn cpu_us(&self) -> Option<f64> {
        let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: both results are ours to be written.
        let failed = unsafe {
            libc::clock_getcpuclockid(self.pid() as libc::pid_t, &raw mut clock) != 0
                || libc::clock_gettime(clock, &raw mut time) != 0
        };
        (!failed).then(|| time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3)
    }

    /// Its memory: proportional share and the anonymous part of that, in KiB.
    pub fn memory_kib(&self) -> Option<(u64, u64)> {
        let text = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid())).ok()?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().trim_end_matches(" kB").parse().ok()
        };
        Some((field("Pss:")?, field("Pss_Anon:")?))
    }

    /// Begins to count its system calls, where the kernel lets us.
    pub fn count_calls(&self) -> Option<CallCounter> {
        CallCounter::of(self.pid())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// Counts the system calls of the threads that a process has, and of those that these start.
///
/// The trace point makes each call of the host a little slower while it is open, so nothing is timed meanwhile.
#[derive(Debug)]
pub struct CallCounter {
    counters: Vec<OwnedFd>,
}

impl CallCounter {
    fn of(pid: u32) -> Option<Self> {
        let id = TRACE_POINTS.iter().find_map(|path| fs::read_to_string(path).ok())?;
        let id: u64 = id.trim().parse().ok()?;
        let mut counters = Vec::new();
        for task in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
            let task: libc::pid_t = task.ok()?.file_name().to_str()?.parse().ok()?;
            // A thread may end before it is counted.
            counters.extend(open_counter(id, task));
        }
        (!counters.is_empty()).then_some(Self { counters })
    }

    /// Calls so far.
    pub fn total(&self) -> Option<u64> {
        let mut total: u64 = 0;
        for counter in &self.counters {
            let mut bytes = [0; 8];
            let mut file = fs::File::from(counter.try_clone().ok()?);
            io::Read::read_exact(&mut file, &mut bytes).ok()?;
            total = total.saturating_add(u64::from_ne_bytes(bytes));
        }
        Some(total)
    }
}

/// `struct perf_event_attr` of `linux/perf_event.h` in its first published size, and what is said in it.
fn open_counter(trace_point: u64, task: libc::pid_t) -> Option<OwnedFd> {
    const TYPE_TRACEPOINT: u64 = 2;
    const INHERIT: u64 = 1 << 1;
    const CLOSE_ON_EXEC: libc::c_ulong = 1 << 3;
    let mut attributes = [0u64; 8];
    // The type in the low half of the first word and the size in the high one, on the little-endian processors that
    // this is for; elsewhere the kernel refuses the size and nothing is counted.
    attributes[0] = TYPE_TRACEPOINT | (size_of::<[u64; 8]>() as u64) << 32;
    attributes[1] = trace_point;
    attributes[5] = INHERIT;
    // SAFETY: the attributes are as long as their size field says, and outlive the call.
    let fd =
        unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), task, -1, -1, CLOSE_ON_EXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Some(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).ok()?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn null() -> fs::File {
        fs::OpenOptions::new().write(true).open("/dev/null").expect("the null device")
    }

    /// However busy the host is.
    fn until(reached: impl Fn() -> bool) {
        let begin = Instant::now();
        while !reached() {
            assert!(begin.elapsed() < Duration::from_secs(60), "not within a minute");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_process_is_measured_and_ends_when_told() {
        let mut process = Process::start(Command::new("sleep").arg("30"), null()).expect("sleep starts");
        let (share, anonymous) = process.memory_kib().expect("its memory is readable");
        assert!(share > 0 && anonymous <= share);
        until(|| process.cpu_us().expect("its time is readable") > 0.0);
        assert!(!process.has_ended());
        assert!(process.end() < END_MAX);
        assert!(process.has_ended());
    }

    #[test]
    fn calls_are_counted_where_the_kernel_allows() {
        let script = "while :; do :; read -r line < /proc/self/stat; done";
        let process = Process::start(Command::new("sh").args(["-c", script]), null()).expect("sh starts");
        let Some(calls) = process.count_calls() else {
            println!("skipped: needs CAP_PERFMON and tracefs");
            return;
        };
        until(|| calls.total().expect("readable") > 100);
    }
}
