//! How a data thread sleeps. An idle one does not "wait for I/O".
//!
//! The kernel counts a thread that waits in `io_uring_enter` as waiting for I/O (`iowait` and `procs_blocked` of
//! `/proc/stat`, the pressure of `/proc/pressure/io`) while anything of its ring is in flight. A disk that waits for
//! its guest always has a poll or a receive in flight, so that a host with one idle disk would look like one whose
//! storage is too slow. It is counted here what is in flight at the storage, and only that is waited for as I/O.
//!
//! Kernels from 6.15 on are told at each wait (`IORING_ENTER_NO_IOWAIT`). On older ones a thread whose sleep has timed
//! out sleeps in poll(2) from then on, which costs calls only where nothing happens.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring};
use tapio_sys::poll;

use super::Uring;
use crate::tasks::Op;

/// What a thread knows of its sleep.
pub(super) struct Sleep {
    /// Whether the kernel takes `IORING_ENTER_NO_IOWAIT`.
    is_told: Cell<bool>,
    /// Operations in flight at the storage.
    at_storage: Cell<u32>,
    /// The last sleep ended at its limit, without a completion.
    timed_out: Cell<bool>,
}

impl Sleep {
    pub(super) fn of(ring: &IoUring) -> Self {
        Self {
            is_told: Cell::new(ring.params().is_feature_no_iowait()),
            at_storage: Cell::new(0),
            timed_out: Cell::new(false),
        }
    }

    /// Hands over what was queued, and waits for a completion, at most `limit`.
    pub(super) fn wait(&self, ring: &mut IoUring, limit: Option<Duration>) -> io::Result<usize> {
        let timespec = limit.map(Timespec::from);
        let args = timespec.as_ref().map(|timespec| SubmitArgs::new().timespec(timespec));
        if self.at_storage.get() == 0 {
            if self.is_told.get() {
                let queued = ring.submission().len() as u32;
                let flags = EnterFlags::GETEVENTS | EnterFlags::NO_IOWAIT;
                // SAFETY: the entries were vouched for when they were queued; the argument, if there is one, is what
                // `EXT_ARG` says, and lives longer than the call.
                return unsafe {
                    match &args {
                        Some(args) => ring.submitter().enter(
                            queued,
                            1,
                            (flags | EnterFlags::EXT_ARG).bits(),
                            Some(args),
                        ),
                        None => ring.submitter().enter::<libc::sigset_t>(queued, 1, flags.bits(), None),
                    }
                };
            }
            if self.timed_out.get() {
                ring.submit()?;
                // SAFETY: the ring is open for as long as it is borrowed.
                let fd = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
                poll::any(&mut [poll::PollFd::new(&fd, poll::PollFlags::IN)], limit)?;
                // The work of the completions that woke it.
                return ring.submit();
            }
        }
        match &args {
            Some(args) => ring.submitter().submit_with_args(1, args),
            None => ring.submit_and_wait(1),
        }
    }

    /// Whether a completion ended the sleep.
    pub(super) fn ended(&self, completed: bool) {
        self.timed_out.set(!completed);
    }
}

/// An operation of the storage, counted until it has ended or is given up.
struct AtStorage<'a>(&'a Cell<u32>);

impl<'a> AtStorage<'a> {
    fn begin(count: &'a Cell<u32>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for AtStorage<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Uring {
    /// Waits for an operation of the storage.
    pub(super) async fn at_storage(&self, op: Op) -> i32 {
        let _counted = AtStorage::begin(&self.inner.sleep.at_storage);
        op.await
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::path::{Path, PathBuf};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use io_uring::{opcode, types};

    use super::*;
    use crate::executor::Driver;
    use crate::uring::UringConfig;
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
    fn blocked_while_idle(prepare: impl Fn(&Sleep) + Copy + Send) -> Option<usize> {
        let (tell, told) = mpsc::channel();
        let (readers, writers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| io::pipe().expect("a pipe")).unzip();
        thread::scope(|scope| {
            for reader in &readers {
                let tell = tell.clone();
                scope.spawn(move || {
                    let Ok(uring) = Uring::new(UringConfig { entries: 4, ..UringConfig::default() }) else {
                        tell.send(None).expect("it listens");
                        return;
                    };
                    prepare(&uring.inner.sleep);
                    let fd = types::Fd(reader.as_raw_fd());
                    let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
                    // SAFETY: the entry refers to no memory.
                    let op = unsafe { uring.start(|_| entry) };
                    let own = std::fs::read_link("/proc/thread-self").expect("proc(5)");
                    let polling = std::rc::Rc::new(std::cell::RefCell::new(Polling::new(PollingConfig::OFF)));
                    let inbox: std::rc::Rc<Inbox<()>> = Inbox::new(1);
                    let mut executor = Executor::new(uring.tasks().clone(), inbox, |()| async {}, polling);
                    // A first sleep that times out.
                    uring.turn(true, Some(Driver::now_ns(&uring) + 1_000_000));
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
        let Some(told) = blocked_while_idle(|_| ()) else {
            println!("skipped: no io_uring");
            return;
        };
        let polled = blocked_while_idle(|sleep| sleep.is_told.set(false)).expect("rings");
        assert!(told < THREADS / 2 && polled < THREADS / 2, "{told} and {polled} wait for I/O");
        // With an operation at the storage they wait for it, and the count shows it.
        let at_storage = blocked_while_idle(|sleep| sleep.at_storage.set(1)).expect("rings");
        assert!(at_storage >= THREADS, "{at_storage} wait for I/O");
    }
}
