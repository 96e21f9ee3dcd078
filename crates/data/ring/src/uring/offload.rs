//! Calls that may block, on helper threads.
//!
//! Opening, locking, looking into, cutting, removing and closing files, and making names durable, wait for a file
//! system: for its journal, for space to be freed, for a server. For some of them the ring has no operation, for others
//! only on new kernels. A helper thread is started when a call finds none free, and ends when it was free for a second;
//! it inherits the restrictions of the data thread. While [`THREADS_MAX`] calls hang, further ones wait.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Uring;

/// Room for paths, file system calls and one image's metadata.
const STACK_LEN: usize = 256 << 10;
/// The most helpers of one data thread. Their stacks count where a process has a limit of memory.
const THREADS_MAX: usize = 8;
/// How long a helper waits for its next call.
const FREE_MAX: Duration = Duration::from_secs(1);

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    /// Calls that no helper has taken yet, with their numbers.
    calls: VecDeque<(u64, Work)>,
    last: u64,
    /// Helpers, and those of them that wait for a call.
    threads: usize,
    free: usize,
    /// The data thread has ended: helpers that wait end too.
    is_closed: bool,
    /// Files that are being closed.
    closing: usize,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    called: Condvar,
    closed: Condvar,
}

impl Shared {
    /// Hands `work` to a helper; gives its number.
    ///
    /// # Errors
    /// There is no helper and none can be started: the work comes back.
    fn start(self: &Arc<Self>, work: Work) -> Result<u64, Work> {
        let mut queue = self.queue.lock();
        queue.last += 1;
        let number = queue.last;
        queue.calls.push_back((number, work));
        if queue.free >= queue.calls.len() {
            self.called.notify_one();
            return Ok(number);
        }
        if queue.threads == THREADS_MAX {
            return Ok(number);
        }
        queue.threads += 1;
        drop(queue);
        let helper = Helper(Arc::clone(self));
        let run = move || help(&helper);
        if Builder::new().name("tapio-aside".into()).stack_size(STACK_LEN).spawn(run).is_ok() {
            return Ok(number);
        }
        // The closure has ended with the thread that there is not, and the helper with the closure.
        if self.queue.lock().threads > 0 { Ok(number) } else { self.forget(number).map_or(Ok(number), Err) }
    }

    /// Takes back a call that no helper has taken.
    fn forget(&self, number: u64) -> Option<Work> {
        let calls = &mut self.queue.lock().calls;
        let index = calls.iter().position(|(other, _)| *other == number)?;
        calls.remove(index).map(|(_, work)| work)
    }
}

/// The helper threads of one data thread.
#[derive(Default)]
pub(super) struct Helpers(Arc<Shared>);

impl Helpers {
    /// What closes files by these helpers.
    pub(super) fn closer(&self) -> Closer {
        Closer(Arc::clone(&self.0))
    }
}

/// Closes files by the helpers of the thread that opened them, whatever thread lets go of them last, and also after
/// that thread has ended.
#[derive(Clone)]
pub(super) struct Closer(Arc<Shared>);

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closer").finish_non_exhaustive()
    }
}

impl Closer {
    /// Counts a file that is being closed, until this is dropped.
    pub(super) fn closing(&self) -> Closing {
        self.0.queue.lock().closing += 1;
        Closing(Arc::clone(&self.0))
    }

    /// Runs `work` on a helper.
    pub(super) fn run(&self, work: impl FnOnce() + Send + 'static) {
        if let Err(work) = self.0.start(Box::new(work)) {
            work();
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.0.queue.lock().is_closed = true;
        self.0.called.notify_all();
    }
}

/// A helper, counted until it ends, also if its work panics.
struct Helper(Arc<Shared>);

impl Drop for Helper {
    fn drop(&mut self) {
        self.0.queue.lock().threads -= 1;
    }
}

/// The life of a helper.
fn help(Helper(shared): &Helper) {
    let mut queue = shared.queue.lock();
    loop {
        if let Some((_, work)) = queue.calls.pop_front() {
            drop(queue);
            work();
            queue = shared.queue.lock();
            continue;
        }
        if queue.is_closed {
            return;
        }
        queue.free += 1;
        let late = shared.called.wait_for(&mut queue, FREE_MAX).timed_out();
        queue.free -= 1;
        if late && queue.calls.is_empty() {
            return;
        }
    }
}

/// A file that is being closed.
pub(super) struct Closing(Arc<Shared>);

impl fmt::Debug for Closing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closing").finish_non_exhaustive()
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.queue.lock().closing -= 1;
        self.0.closed.notify_all();
    }
}

/// What a helper and the task that waits for it share.
struct Place<T> {
    result: Mutex<Option<T>>,
    event: OwnedFd,
}

/// Marks a call as ended when it is dropped, also if its work panicked.
struct Ended<T>(Arc<Place<T>>);

impl<T> Drop for Ended<T> {
    fn drop(&mut self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes; the descriptor is the place's.
        let _ = unsafe { libc::write(self.0.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

impl Uring {
    /// Runs `work` on a helper thread, while the tasks of this thread go on.
    ///
    /// # Errors
    /// No event counter can be made, the work panicked, or it took longer than its request may: it goes on then, and
    /// nothing hears of its end.
    pub async fn offload<T, F>(&self, work: F) -> io::Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        let place = Arc::new(Place { result: Mutex::new(None), event });
        let there = Arc::clone(&place);
        let run = move || {
            let ended = Ended(there);
            let result = work();
            *ended.0.result.lock() = Some(result);
        };
        match self.inner.helpers.0.start(Box::new(run)) {
            Ok(number) => {
                if let Err(error) = self.poll(place.event.as_raw_fd(), libc::POLLIN).await {
                    self.inner.helpers.0.forget(number);
                    return Err(error);
                }
            }
            // No thread to be had: late is better than never.
            Err(run) => run(),
        }
        let result = place.result.lock().take();
        result.ok_or_else(|| io::Error::other("the thread of a blocking call panicked"))
    }

    /// Waits until every file that was given up before is closed, and its lock released.
    pub async fn files_closed(&self) {
        let shared = Arc::clone(&self.inner.helpers.0);
        if shared.queue.lock().closing == 0 {
            return;
        }
        let wait = move || {
            let mut queue = shared.queue.lock();
            while queue.closing > 0 {
                shared.closed.wait(&mut queue);
            }
        };
        // Without an event counter they are closed all the same.
        let _ = self.offload(wait).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::sync_channel;
    use std::time::{Duration, Instant};

    use super::THREADS_MAX;
    use crate::uring::{Uring, UringConfig};
    use crate::{Executor, Inbox, Io, Polling, PollingConfig};

    /// Runs `test` on a ring; where there is none, nothing.
    fn on_ring<Fut: Future<Output = ()> + 'static>(test: impl FnOnce(Uring) -> Fut) {
        let Ok(uring) = Uring::new(UringConfig::default()) else { return };
        let inbox: Rc<Inbox<()>> = Inbox::new(1);
        let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
        let mut executor = Executor::new(uring.tasks().clone(), inbox, |()| async {}, polling);
        executor.block_on(&uring, &mut (), test(uring.clone()));
    }

    #[test]
    fn tasks_go_on_while_a_call_blocks() {
        on_ring(|uring| async move {
            let (release, blocked) = sync_channel::<u32>(1);
            let released = Rc::new(Cell::new(false));
            let seen = Rc::clone(&released);
            // Ends only because this task runs while the call waits for it.
            uring.tasks().spawn(async move {
                seen.set(true);
                release.send(7).expect("the call waits");
            });
            let told = uring.offload(move || blocked.recv()).await.expect("a thread");
            assert!(released.get());
            assert_eq!(told, Ok(7));
            let failed = uring.offload(|| -> u32 { panic!("as planned") }).await;
            assert!(failed.is_err());
        });
    }

    #[test]
    fn calls_that_follow_each_other_share_a_thread() {
        on_ring(|uring| async move {
            let first = uring.offload(|| std::thread::current().id()).await.expect("a thread");
            for _ in 0..10 {
                // It says that it is free after it has given its answer.
                while uring.inner.helpers.0.queue.lock().free == 0 {
                    std::thread::yield_now();
                }
                assert_eq!(uring.offload(|| std::thread::current().id()).await.expect("a thread"), first);
            }
        });
    }

    #[test]
    fn calls_that_hang_take_so_many_threads_and_no_more_and_the_rest_waits() {
        on_ring(|uring| async move {
            let running = Arc::new(AtomicUsize::new(0));
            let ended = Rc::new(Cell::new(0));
            let (held, hold) = sync_channel::<()>(0);
            let hold = Arc::new(parking_lot::Mutex::new(hold));
            for _ in 0..THREADS_MAX + 3 {
                let (hold, running, ended) = (Arc::clone(&hold), Arc::clone(&running), Rc::clone(&ended));
                let calling = uring.clone();
                uring.tasks().spawn(async move {
                    let hang = move || {
                        running.fetch_add(1, Ordering::SeqCst);
                        hold.lock().recv().expect_err("only its end is waited for");
                    };
                    calling.offload(hang).await.expect("a thread");
                    ended.set(ended.get() + 1);
                });
            }
            while running.load(Ordering::SeqCst) < THREADS_MAX {
                uring.tasks().yield_now().await;
            }
            {
                let queue = uring.inner.helpers.0.queue.lock();
                assert_eq!((queue.threads, queue.calls.len()), (THREADS_MAX, 3));
            }
            drop(held);
            while ended.get() < THREADS_MAX + 3 {
                uring.tasks().yield_now().await;
            }
            assert_eq!(running.load(Ordering::SeqCst), THREADS_MAX + 3);
        });
    }

    #[test]
    fn a_call_that_is_cancelled_before_it_began_never_does() {
        on_ring(|uring| async move {
            let (held, hold) = sync_channel::<()>(0);
            let hold = Arc::new(parking_lot::Mutex::new(hold));
            for _ in 0..THREADS_MAX {
                let (calling, hold) = (uring.clone(), Arc::clone(&hold));
                uring.tasks().spawn(async move {
                    calling.offload(move || hold.lock().recv().is_ok()).await.expect("a thread");
                });
            }
            let (calling, ran) = (uring.clone(), Arc::new(AtomicUsize::new(0)));
            let (runs, failed) = (Arc::clone(&ran), Rc::new(Cell::new(false)));
            let seen = Rc::clone(&failed);
            let task = uring.tasks().spawn(async move {
                let count = move || runs.fetch_add(1, Ordering::SeqCst);
                seen.set(calling.offload(count).await.is_err());
            });
            let queued =
                || uring.inner.helpers.0.queue.lock().calls.iter().any(|(n, _)| *n == THREADS_MAX as u64 + 1);
            while !queued() {
                uring.tasks().yield_now().await;
            }
            uring.cancel(task);
            while !failed.get() {
                uring.tasks().yield_now().await;
            }
            assert!(!queued());
            drop(held);
            uring.offload(|| ()).await.expect("a thread");
            assert_eq!(ran.load(Ordering::SeqCst), 0);
        });
    }

    #[test]
    fn a_helper_without_work_ends() {
        on_ring(|uring| async move {
            uring.offload(|| ()).await.expect("a thread");
            let begin = Instant::now();
            while uring.inner.helpers.0.queue.lock().threads > 0 {
                assert!(begin.elapsed() < Duration::from_secs(60), "it stays");
                std::thread::sleep(Duration::from_millis(20));
            }
            uring.offload(|| ()).await.expect("another thread");
        });
    }
}
