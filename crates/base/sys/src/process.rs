//! Whether a process is there, and which one it is.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
pub use rustix::process::Signal;
use rustix::process::{
    Pid, PidfdFlags, WaitId, WaitIdOptions, kill_process, kill_process_group, pidfd_open, pidfd_send_signal,
    test_kill_process, waitid,
};

/// What `/proc/PID/stat` says of a process (proc_pid_stat(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Field 3: its state, a letter.
    pub state: u8,
    /// Field 6: the session it belongs to.
    pub session: i32,
    /// Field 22: when it began, in clock ticks since the host did. With its number this names a process for good.
    pub start: u64,
    /// Field 41: its scheduling class (sched(7)).
    pub policy: i32,
}

impl Stat {
    /// Of the process `pid`.
    ///
    /// # Errors
    /// `NotFound` where there is no such process; `InvalidData` where the line cannot be understood.
    pub fn of(pid: u32) -> io::Result<Self> {
        Self::read(&format!("/proc/{pid}/stat"))
    }

    /// Of the thread `tid` of the process `pid`.
    ///
    /// # Errors
    /// Those of [`Stat::of`].
    pub fn of_thread(pid: u32, tid: u32) -> io::Result<Self> {
        Self::read(&format!("/proc/{pid}/task/{tid}/stat"))
    }

    /// Of this process.
    ///
    /// # Errors
    /// Those of [`Stat::of`].
    pub fn of_this() -> io::Result<Self> {
        Self::read("/proc/self/stat")
    }

    fn read(path: &str) -> io::Result<Self> {
        let line = fs::read_to_string(path)?;
        Self::parse(&line)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{path} is not understood")))
    }

    fn parse(line: &str) -> Option<Self> {
        // The name may hold anything, but it ends at the last parenthesis.
        let mut fields = line.get(line.rfind(')')? + 1..)?.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let session = fields.nth(2)?.parse().ok()?;
        let start = fields.nth(15)?.parse().ok()?;
        Some(Self { state, session, start, policy: fields.nth(18)?.parse().ok()? })
    }

    /// Whether it has ended, and its parent has not asked how: it holds nothing any more.
    pub const fn has_ended(self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }
}

/// The number as the kernel takes it; none for one that no process has.
fn number(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// Whether a process has this number; also one that has ended and was not waited for.
pub fn exists(pid: u32) -> bool {
    number(pid).is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}

/// Whether a process of this number runs. One that cannot be looked at is taken to run.
pub fn is_running(pid: u32) -> bool {
    match Stat::of(pid) {
        Ok(stat) => !stat.has_ended(),
        Err(_) => exists(pid),
    }
}

/// Sends a signal to a process.
///
/// # Errors
/// There is no such process; it is another user's.
pub fn signal(pid: u32, signal: Signal) -> io::Result<()> {
    Ok(kill_process(number(pid).ok_or(io::ErrorKind::NotFound)?, signal)?)
}

/// Sends a signal to all processes of a group.
///
/// # Errors
/// There is none; they are another user's.
pub fn signal_group(leader: u32, signal: Signal) -> io::Result<()> {
    Ok(kill_process_group(number(leader).ok_or(io::ErrorKind::NotFound)?, signal)?)
}

/// Sends a signal to the process of a descriptor of [`open`].
///
/// # Errors
/// It has ended; it is another user's.
pub fn signal_to(process: &impl AsFd, signal: Signal) -> io::Result<()> {
    Ok(pidfd_send_signal(process, signal)?)
}

/// Whether this process may do what root may.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The user as which this process acts.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A descriptor of a process, which becomes readable when it ends, and whose process no other can be taken for
/// (pidfd_open(2)).
///
/// # Errors
/// There is no such process; too many descriptors.
pub fn open(pid: u32) -> io::Result<OwnedFd> {
    Ok(pidfd_open(number(pid).ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?)
}

/// Takes the end of a process from the kernel, if it is a child of this one and has ended.
pub fn reap(process: &impl AsFd) {
    // Children of others are theirs.
    let _ = waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_kernel_is_understood_whatever_the_name_is() {
        let line = "42 (a) S 1 (b)) R 1 43 44 0 -1 4194560 1 0 0 0 7 8 0 0 20 0 1 0 123456 1000 2 3 \
                    0 0 0 0 0 0 0 0 0 0 0 0 17 1 0 5 0";
        assert_eq!(Stat::parse(line), Some(Stat { state: b'R', session: 44, start: 123_456, policy: 5 }));
        for bad in ["", "42 (x)", "42 (x) R 1", "no parenthesis"] {
            assert_eq!(Stat::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_process_that_ended_exists_until_it_is_waited_for_but_does_not_run() {
        let own = std::process::id();
        assert!(exists(own) && is_running(own));
        assert_eq!(Stat::of(own).expect("it is there").start, Stat::of_this().expect("it is there").start);
        let mut child = std::process::Command::new("true").spawn().expect("a child");
        let pid = child.id();
        while is_running(pid) {
            std::thread::yield_now();
        }
        assert!(exists(pid), "it was not waited for");
        reap(&open(pid).expect("it is there"));
        assert!(!exists(pid) && !is_running(pid) && open(pid).is_err());
        child.wait().expect_err("another took its end");
        assert!(!exists(0) && !exists(u32::MAX) && !is_running(u32::MAX));
    }
}
