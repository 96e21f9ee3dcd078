//! Keeps the processors of the host from halting while a run is made.
//!
//! To wake a halted virtual processor costs 50 to 100 microseconds on many hosts, which hides every difference between
//! servers that sleep between requests. A thread of the scheduling class `SCHED_IDLE` spins on each processor: any
//! other thread takes the processor from it at once, and it never halts. The threads belong to a process of their own,
//! so that their time is not counted as the load generator's; the kernel ends that process when this one ends, however
//! it does.

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::process::Command;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tapio_sys::process::Stat;

use super::process::Process;

/// The hidden command of this program that spins.
pub const SPIN: &str = "spin";

/// The processors do not halt until this is dropped.
#[derive(Debug)]
pub struct Awake {
    /// Ended when it is dropped.
    _process: Process,
}

impl Awake {
    /// Starts to spin, and waits until every processor has its thread.
    ///
    /// # Errors
    /// This program cannot be started again, or may not spin.
    pub fn start() -> io::Result<Self> {
        let errors = File::options().write(true).open("/dev/null")?;
        let program = std::env::current_exe()?;
        let mut process = Process::start(Command::new(program).arg(SPIN), errors)?;
        let wanted = processors()?.len();
        while spinning(process.pid()) < wanted {
            if process.has_ended() {
                return Err(io::Error::other("the process that spins has ended"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Self { _process: process })
    }
}

/// The threads of a process that are of the class `SCHED_IDLE`.
fn spinning(pid: u32) -> usize {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let threads = tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok());
    threads.filter(|tid| Stat::of_thread(pid, *tid).is_ok_and(|stat| stat.policy == libc::SCHED_IDLE)).count()
}

fn processors() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect())
}

/// What the process that spins does, until it is killed.
///
/// # Errors
/// Its threads may not be of the class or on the processor that they are meant for.
pub fn spin() -> io::Result<()> {
    let threads: Vec<_> =
        processors()?.into_iter().map(|processor| std::thread::spawn(move || on(processor))).collect();
    for thread in threads {
        thread.join().map_err(|_| io::Error::other("a thread that spins panicked"))??;
    }
    Ok(())
}

fn on(processor: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    sched_setaffinity(None, &set)?;
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameters outlive the call, which is about the calling thread.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut turns = 0u64;
    loop {
        // Not the instruction for spinning: on virtual processors it may leave to the hypervisor, as halting does.
        turns = black_box(turns.wrapping_add(1));
    }
}
