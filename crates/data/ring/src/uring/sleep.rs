//! How a data thread sleeps. An idle one does not "wait for I/O".
//!
//! The kernel counts a thread that waits in `io_uring_enter` as waiting for I/O (`iowait` and `procs_blocked` of
//! `/proc/stat`, the pressure of `/proc/pressure/io`) while anything of its ring is in flight. A disk that waits for
//! its guest always has a poll or a receive in flight, so that a host with one idle disk would look like one whose
//! storage is too slow. It is counted what is in flight at the storage, and only that is waited for as I/O. Kernels
//! from 6.15 on are told at each wait (`IORING_ENTER_NO_IOWAIT`); older ones count as they do.

use std::io;
use std::time::Duration;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring};

/// Hands over what was queued, and waits for a completion, at most `limit`. `is_idle`: nothing is at the storage.
pub(super) fn wait(ring: &mut IoUring, limit: Option<Duration>, is_idle: bool) -> io::Result<usize> {
    let timespec = limit.map(Timespec::from);
    let args = timespec.as_ref().map(|timespec| SubmitArgs::new().timespec(timespec));
    if !(is_idle && ring.params().is_feature_no_iowait()) {
        return match &args {
            Some(args) => ring.submitter().submit_with_args(1, args),
            None => ring.submit_and_wait(1),
        };
    }
    let queued = ring.submission().len() as u32;
    let flags = EnterFlags::GETEVENTS | EnterFlags::NO_IOWAIT;
    match &args {
        Some(args) => {
            let flags = flags | EnterFlags::EXT_ARG;
            // SAFETY: the entries were vouched for when they were queued; the argument is of the kind that the flag
            // says, and lives longer than the call.
            unsafe { ring.submitter().enter(queued, 1, flags.bits(), Some(args)) }
        }
        // SAFETY: the entries were vouched for when they were queued; there is no argument.
        None => unsafe { ring.submitter().enter::<libc::sigset_t>(queued, 1, flags.bits(), None) },
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::path::{Path, PathBuf};
    use std::rc::Rc;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use io_uring::{opcode, types};

    use super::*;
    use crate::uring::{Uring, UringConfig};
    use crate::{Executor, Inbox, Io, Polling, PollingConfig};

    /// More than other programs of the host have, that wait for I/O at one moment.
    const THREADS: usize = 64;

    fn procs_blocked() -> usize {
        let stat = std::fs::read_to_string("/proc/stat").expect("proc(5)");
        let line = stat.lines().find_map(|line| line.strip_prefix("procs_blocked "));
        line.and_then(|count| count.parse().ok()).expect("a count")
    }

    fn is_asleep(thread: &Path) -> bool {
        let stat = std::fs::read_to_string(Path::new("/proc").join(thread).join("stat")).expect("it lives");
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
    }

    /// The fewest threads of the host that wait for I/O while `THREADS` of ours sleep on rings with a poll in flight.
    fn blocked_while_idle(at_storage: u32) -> Option<usize> {
        let (tell, told) = mpsc::channel();
        let (readers, writers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| io::pipe().expect("a pipe")).unzip();
        thread::scope(|scope| {
            for reader in &readers {
                let tell = tell.clone();
                scope.spawn(move || {
                    let config = UringConfig { entries: 4, ..UringConfig::default() };
                    let Ok(uring) = Uring::new(config) else {
                        tell.send(None).expect("it listens");
                        return;
                    };
                    uring.inner.tasks.inner.ops_at_storage.set(at_storage);
                    let fd = types::Fd(reader.as_raw_fd());
                    let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
                    // SAFETY: the entry refers to no memory.
                    let op = unsafe { uring.start(|_| entry) };
                    let own = std::fs::read_link("/proc/thread-self").expect("proc(5)");
                    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
                    let inbox: Rc<Inbox<()>> = Inbox::new(1);
                    let mut executor = Executor::new(uring.tasks().clone(), inbox, |()| async {}, polling);
                    tell.send(Some(own)).expect("it listens");
                    executor.block_on(&uring, &mut (), async move { assert!(op.await > 0, "readable") });
                });
            }
            let threads: Option<Vec<PathBuf>> =
                (0..THREADS).map(|_| told.recv().expect("a thread")).collect();
            let fewest = threads.map(|threads| {
                let until = Instant::now() + Duration::from_secs(60);
                while !threads.iter().all(|thread| is_asleep(thread)) {
                    assert!(Instant::now() < until, "they do not go to sleep");
                    thread::sleep(Duration::from_millis(5));
                }
                let looks = (0..50).map(|_| {
                    thread::sleep(Duration::from_millis(2));
                    procs_blocked()
                });
                looks.min().unwrap_or_default()
            });
            for mut writer in writers {
                writer.write_all(b"x").expect("written");
            }
            fewest
        })
    }

    #[test]
    fn an_idle_thread_is_not_counted_as_waiting_for_io() {
        let is_told = Uring::new(UringConfig::default())
            .is_ok_and(|uring| uring.inner.ring.borrow().params().is_feature_no_iowait());
        if !is_told {
            println!("skipped: needs Linux 6.15");
            return;
        }
        let idle = blocked_while_idle(0).expect("rings");
        assert!(idle < THREADS / 2, "{idle} wait for I/O");
        // With an operation at the storage they wait for it, and the count shows it.
        let at_storage = blocked_while_idle(1).expect("rings");
        assert!(at_storage >= THREADS, "{at_storage} wait for I/O");
    }
}
