//! How a data thread sleeps. An idle one does not "wait for I/O".
//!
//! The kernel counts a thread that waits in `io_uring_enter` as waiting for I/O (`iowait` and `procs_blocked` of
//! `/proc/stat`, the pressure of `/proc/pressure/io`) while anything of its ring is in flight. A disk that waits for
//! its guest always has a poll or a receive in flight, so that a host with one idle disk would look like one whose
//! storage is too slow. It is counted what is in flight at the storage, and only that is waited for as I/O. Kernels
//! from 6.15 on are told at each wait (`IORING_ENTER_NO_IOWAIT`). On older ones a thread that got nothing for
//! [`COUNTED_MAX`] sleeps on an event counter that the ring rings meanwhile, which is never counted and costs five more
//! calls.

use std::cell::{Cell, OnceCell};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::Duration;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring};

/// On kernels that cannot be told, an idle thread is counted so long at most, each time that it falls asleep.
const COUNTED_MAX: Duration = Duration::from_millis(10);

/// How the thread of one ring sleeps.
#[derive(Debug)]
pub(super) struct Sleep {
    /// The kernel can be told that the thread does not wait for I/O.
    is_told: Cell<bool>,
    /// Made at the first use.
    bell: OnceCell<File>,
}

impl Sleep {
    pub(super) fn on(ring: &IoUring) -> Self {
        Self { is_told: Cell::new(ring.params().is_feature_no_iowait()), bell: OnceCell::new() }
    }

    /// Hands over what was queued, and waits for a completion, at most `limit`. `is_idle`: nothing is at the storage.
    pub(super) fn wait(
        &self,
        ring: &mut IoUring,
        limit: Option<Duration>,
        is_idle: bool,
    ) -> io::Result<usize> {
        match (is_idle, self.is_told.get()) {
            (false, _) => wait_counted(ring, limit),
            (true, true) => wait_uncounted(ring, limit),
            (true, false) => self.wait_hardly_counted(ring, limit),
        }
    }

    fn wait_hardly_counted(&self, ring: &mut IoUring, limit: Option<Duration>) -> io::Result<usize> {
        let short = limit.map_or(COUNTED_MAX, |limit| limit.min(COUNTED_MAX));
        let taken = match wait_counted(ring, Some(short)) {
            Ok(taken) => taken,
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => 0,
            Err(error) => return Err(error),
        };
        let left = limit.map(|limit| limit - short);
        if left == Some(Duration::ZERO) || !ring.submission().is_empty() || !ring.completion().is_empty() {
            return Ok(taken);
        }
        if !self.bell_is_on(ring) {
            return wait_counted(ring, left);
        }
        // What came before it could ring, does not.
        let is_late = ring.submission().taskrun() || !ring.completion().is_empty();
        let rung = if is_late { Ok(()) } else { self.bell.get().map_or(Ok(()), |bell| readable(bell, left)) };
        self.turn_bell_off(ring);
        rung?;
        // What rang becomes a completion when the kernel is entered for it.
        // SAFETY: nothing is handed over; there is no argument.
        let entered =
            unsafe { ring.submitter().enter::<libc::sigset_t>(0, 0, EnterFlags::GETEVENTS.bits(), None) };
        entered.map(|_| taken)
    }

    /// Lets the ring ring; whether it does.
    fn bell_is_on(&self, ring: &IoUring) -> bool {
        if self.bell.get().is_none()
            && let Ok(bell) = event_counter()
        {
            let _ = self.bell.set(bell);
        }
        self.bell.get().is_some_and(|bell| ring.submitter().register_eventfd(bell.as_raw_fd()).is_ok())
    }

    fn turn_bell_off(&self, ring: &IoUring) {
        // Neither can fail in a way that matters: it was on, and it need not have rung.
        let _ = ring.submitter().unregister_eventfd();
        if let Some(mut bell) = self.bell.get() {
            let _ = bell.read(&mut [0; 8]);
        }
    }
}

fn wait_counted(ring: &IoUring, limit: Option<Duration>) -> io::Result<usize> {
    match limit.map(Timespec::from) {
        Some(limit) => ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&limit)),
        None => ring.submit_and_wait(1),
    }
}

fn wait_uncounted(ring: &mut IoUring, limit: Option<Duration>) -> io::Result<usize> {
    let timespec = limit.map(Timespec::from);
    let queued = ring.submission().len() as u32;
    let flags = EnterFlags::GETEVENTS | EnterFlags::NO_IOWAIT;
    match &timespec {
        Some(timespec) => {
            let (args, flags) = (SubmitArgs::new().timespec(timespec), flags | EnterFlags::EXT_ARG);
            // SAFETY: the entries were vouched for when they were queued; the argument is of the kind that the flag
            // says, and lives longer than the call.
            unsafe { ring.submitter().enter(queued, 1, flags.bits(), Some(&args)) }
        }
        // SAFETY: the entries were vouched for when they were queued; there is no argument.
        None => unsafe { ring.submitter().enter::<libc::sigset_t>(queued, 1, flags.bits(), None) },
    }
}

/// A counter that is never waited for by reading it.
fn event_counter() -> io::Result<File> {
    // SAFETY: the call has no memory of ours.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made, and nothing else knows it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Waits until `file` can be read, at most `limit`.
fn readable(file: &File, limit: Option<Duration>) -> io::Result<()> {
    let mut poll = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let limit = limit.map(|limit| libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: limit.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: there is one descriptor; the time is none, or lives longer than the call.
    match unsafe { libc::ppoll(&raw mut poll, 1, limit, std::ptr::null()) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::Write;
    use std::os::fd::OwnedFd;
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

    /// A ring, if there are any here; with `is_told` as on new kernels, if this is one.
    fn uring(config: UringConfig, is_told: bool) -> io::Result<Uring> {
        let uring = Uring::new(config)?;
        let known = &uring.inner.sleep.is_told;
        known.set(known.get() && is_told);
        Ok(uring)
    }

    /// The fewest threads of the host that wait for I/O while `THREADS` of ours sleep on rings with a poll in flight,
    /// with or without what new kernels can be told. None where there are no rings.
    fn blocked_while_idle(at_storage: u32, is_told: bool) -> Option<usize> {
        let (tell, told) = mpsc::channel();
        let (readers, writers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| io::pipe().expect("a pipe")).unzip();
        thread::scope(|scope| {
            for reader in &readers {
                let tell = tell.clone();
                scope.spawn(move || {
                    let config = UringConfig { entries: 4, ..UringConfig::default() };
                    let Ok(uring) = uring(config, is_told) else {
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
        for is_told in [true, false] {
            let Some(idle) = blocked_while_idle(0, is_told) else {
                println!("skipped: needs io_uring");
                return;
            };
            assert!(idle < THREADS / 2, "{idle} wait for I/O; told: {is_told}");
            // With an operation at the storage they wait for it, and the count shows it.
            let at_storage = blocked_while_idle(1, is_told).expect("rings");
            assert!(at_storage >= THREADS, "{at_storage} wait for I/O; told: {is_told}");
        }
    }

    /// Polls `fd` on a ring of its own that cannot tell the kernel anything; how long the thread was asleep.
    fn slept_until_readable(fd: &OwnedFd, limit: Option<Duration>) -> (bool, Duration) {
        let uring = uring(UringConfig { entries: 4, ..UringConfig::default() }, false).expect("a ring");
        let entry = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32).build();
        // SAFETY: the entry refers to no memory.
        let op = unsafe { uring.start(|_| entry) };
        let begin = Instant::now();
        let until = limit.map(|limit| Io::now_ns(&uring) + limit.as_nanos() as u64);
        let completed = uring.turn(true, until);
        let slept = begin.elapsed();
        if completed {
            let inbox: Rc<Inbox<()>> = Inbox::new(1);
            let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
            let mut executor = Executor::new(uring.tasks().clone(), inbox, |()| async {}, polling);
            executor.block_on(&uring, &mut (), async move { assert!(op.await > 0, "readable") });
        } else {
            uring.quiesce();
            drop(op);
        }
        (completed, slept)
    }

    #[test]
    fn a_thread_that_is_not_counted_wakes_up_for_completions_and_for_its_time() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        let reader = OwnedFd::from(reader);
        let limit = COUNTED_MAX * 3;
        let (completed, slept) = slept_until_readable(&reader, Some(limit));
        assert!(!completed && slept >= limit, "{completed} after {slept:?}");
        let own = std::fs::read_link("/proc/thread-self").expect("proc(5)");
        let late = thread::spawn(move || {
            // Asleep for longer than it may be counted.
            let mut looks = 0;
            while looks < 5 {
                thread::sleep(COUNTED_MAX);
                looks = if is_asleep(&own) { looks + 1 } else { 0 };
            }
            writer.write_all(b"x").expect("written");
            writer
        });
        assert!(slept_until_readable(&reader, None).0);
        // What is there already is not slept for.
        drop(late.join().expect("it wrote"));
        assert!(slept_until_readable(&reader, None).0);
    }
}
