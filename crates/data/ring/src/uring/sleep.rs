//! How a data thread sleeps. An idle one does not "wait for I/O".
//!
//! The kernel counts a thread that waits in `io_uring_enter` as waiting for I/O (`iowait` and `procs_blocked` of
//! `/proc/stat`, the pressure of `/proc/pressure/io`) while anything of its ring is in flight. A disk that waits for
//! its guest always has a poll or a receive in flight, so that a host with one idle disk would look like one whose
//! storage is too slow. It is counted here what is in flight at the storage, and only that is waited for as I/O.
//!
//! Kernels from 6.15 on are told at each wait (`IORING_ENTER_NO_IOWAIT`). On older ones a thread whose sleep has timed
//! out once waits for an eventfd of the ring from then on, until something completes: that costs calls only where
//! nothing happens. The eventfd, not the ring's own descriptor: completions whose work is deferred to this thread do
//! not always wake a poll of that.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring};
use rustix::event::{EventfdFlags, eventfd};
use tapio_sys::poll;

/// Which kind of wait the kernel does not count as I/O.
enum Quiet {
    /// `IORING_ENTER_NO_IOWAIT`.
    Told,
    /// The ring's eventfd.
    Eventfd(OwnedFd),
}

/// What a thread knows of its sleep.
pub(super) struct Sleep {
    quiet: Quiet,
    /// The last sleep ended at its limit, without a completion.
    timed_out: Cell<bool>,
}

impl Sleep {
    /// For a ring that is not enabled yet.
    ///
    /// # Errors
    /// No eventfd, on a kernel that needs one.
    pub(super) fn of(ring: &IoUring, is_told: bool) -> io::Result<Self> {
        let quiet = if is_told {
            Quiet::Told
        } else {
            let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            ring.submitter().register_eventfd(fd.as_raw_fd())?;
            Quiet::Eventfd(fd)
        };
        Ok(Self { quiet, timed_out: Cell::new(false) })
    }

    /// Hands over what was queued, and waits for a completion, at most `limit`. `is_idle`: nothing is at the storage.
    pub(super) fn wait(
        &self,
        ring: &mut IoUring,
        limit: Option<Duration>,
        is_idle: bool,
    ) -> io::Result<usize> {
        let timespec = limit.map(Timespec::from);
        let args = timespec.as_ref().map(|timespec| SubmitArgs::new().timespec(timespec));
        match (&self.quiet, &args) {
            (Quiet::Told, Some(args)) if is_idle => {
                let queued = ring.submission().len() as u32;
                let flags = EnterFlags::GETEVENTS | EnterFlags::NO_IOWAIT | EnterFlags::EXT_ARG;
                // SAFETY: the entries were vouched for when they were queued; the argument is of the kind that the flag
                // says, and lives longer than the call.
                unsafe { ring.submitter().enter(queued, 1, flags.bits(), Some(args)) }
            }
            (Quiet::Told, None) if is_idle => {
                let queued = ring.submission().len() as u32;
                let flags = EnterFlags::GETEVENTS | EnterFlags::NO_IOWAIT;
                // SAFETY: the entries were vouched for when they were queued; there is no argument.
                unsafe { ring.submitter().enter::<libc::sigset_t>(queued, 1, flags.bits(), None) }
            }
            (Quiet::Eventfd(fd), _) if is_idle && self.timed_out.get() => {
                ring.completion().enable_eventfd();
                let slept = sleep_on(fd, ring, limit);
                ring.completion().disable_eventfd();
                slept
            }
            (_, Some(args)) => ring.submitter().submit_with_args(1, args),
            (_, None) => ring.submit_and_wait(1),
        }
    }

    /// Whether a completion ended the sleep.
    pub(super) fn ended(&self, completed: bool) {
        self.timed_out.set(!completed);
    }
}

/// Waits for the ring's eventfd, which is enabled.
fn sleep_on(fd: &OwnedFd, ring: &mut IoUring, limit: Option<Duration>) -> io::Result<usize> {
    // What completes from here on rings; what did before is seen after this call, which is a barrier.
    ring.submit()?;
    let is_there = {
        let queue = ring.submission();
        queue.taskrun() || queue.cq_overflow()
    };
    if !is_there && ring.completion().is_empty() {
        poll::any(&mut [poll::PollFd::new(fd, poll::PollFlags::IN)], limit)?;
        // Nothing to read: it has timed out.
        let _ = rustix::io::read(fd, &mut [0; 8]);
    }
    // Deferred work of completions is done by a call.
    ring.submit()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::Write;
    use std::path::{Path, PathBuf};
    use std::rc::Rc;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use io_uring::{opcode, types};

    use super::*;
    use crate::executor::Driver;
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
    fn blocked_while_idle(is_told: bool, at_storage: u32) -> Option<usize> {
        let (tell, told) = mpsc::channel();
        let (readers, writers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| io::pipe().expect("a pipe")).unzip();
        thread::scope(|scope| {
            for reader in &readers {
                let tell = tell.clone();
                scope.spawn(move || {
                    let config = UringConfig { entries: 4, ..UringConfig::default() };
                    let Ok(uring) =
                        Uring::with(config, |ring| is_told && ring.params().is_feature_no_iowait())
                    else {
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
        let Some(told) = blocked_while_idle(true, 0) else {
            println!("skipped: no io_uring");
            return;
        };
        let with_eventfd = blocked_while_idle(false, 0).expect("rings");
        assert!(told < THREADS / 2 && with_eventfd < THREADS / 2, "{told} and {with_eventfd} wait for I/O");
        // With an operation at the storage they wait for it, and the count shows it.
        let at_storage = blocked_while_idle(true, 1).expect("rings");
        assert!(at_storage >= THREADS, "{at_storage} wait for I/O");
    }
}
