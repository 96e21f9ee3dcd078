//! io_uring as the driver of a data thread.

mod command;
mod file;
mod lock;
mod offload;
mod open_file;
mod restrict;
mod sleep;
mod socket;

use std::cell::{Cell, RefCell};
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use io_uring::types::CancelBuilder;
use io_uring::{IoUring, cqueue, opcode, squeue};
use tapio_types::Access;

use crate::buffer::Pool;
use crate::executor::Driver;
use crate::storage::Io;
use crate::tasks::{Op, OpId, TaskId, Tasks};

pub use command::{COMMAND_LEN, CommandRing};
pub use file::UringFile;
pub use lock::{LOCK_RETRY, LockHolder, WriterLock, lock_may_come};
use offload::Helpers;
use open_file::OpenedFile;
pub use open_file::{Caching, SharedFile, sector_len_of};
use sleep::Sleep;
pub use socket::PollStream;

/// When the clock of all rings of the process began: data threads that serve one disk compare times.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Completions with this mark have no waiter: notifications that cannot usefully fail.
const FORGET: u64 = u64::MAX;
/// How long a thread that ends waits for the kernel to let go of its memory.
const QUIESCE_MAX: Duration = Duration::from_secs(2);

/// Sizes of a data thread's ring.
#[derive(Clone, Copy, Debug)]
pub struct UringConfig {
    /// Entries of the submission queue, a power of two. A batch larger than this is submitted in parts.
    pub entries: u32,
    /// Bytes of the buffer pool, at most; taken only while they are used.
    pub pool_len: usize,
    /// Whether files are opened past the page cache.
    pub caching: Caching,
}

impl Default for UringConfig {
    fn default() -> Self {
        Self { entries: 128, pool_len: 32 << 20, caching: Caching::Direct }
    }
}

/// What the ring has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UringCounters {
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Times the thread slept in the kernel.
    pub sleeps: u64,
    /// Operations that completed.
    pub completions: u64,
}

pub(crate) struct Inner {
    ring: RefCell<IoUring>,
    tasks: Tasks,
    pool: Pool,
    caching: Caching,
    counters: Cell<UringCounters>,
    helpers: Helpers,
    sleep: Sleep,
}

/// The ring of one data thread: a cheap handle. Made and used on that thread alone.
#[derive(Clone)]
pub struct Uring {
    inner: Rc<Inner>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("counters", &self.inner.counters.get()).finish_non_exhaustive()
    }
}

impl Uring {
    /// Sets up a ring for the calling thread.
    ///
    /// Completions are delivered only when this thread asks (`DEFER_TASKRUN`), so that the kernel never interrupts
    /// it, and a flag in shared memory says when asking is worth a call (`TASKRUN_FLAG`), which is what spinning reads.
    pub fn new(config: UringConfig) -> io::Result<Self> {
        // Stages of requests tell a time from none by zero, so that it has to run a moment before the first.
        LazyLock::force(&START);
        let mut builder = IoUring::builder();
        builder
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_defer_taskrun()
            .setup_submit_all()
            .setup_r_disabled()
            .setup_cqsize(config.entries * 4);
        let ring = builder.build(config.entries)?;
        restrict::enable(&ring)?;
        let pool = Pool::new(config.pool_len)?;
        // A kernel that refuses registered buffers or ring descriptors costs speed, not function.
        let registered = ring.submitter().register_buffers_sparse(pool.chunks() as u32).is_ok();
        let inner = Inner {
            sleep: Sleep::on(&ring),
            ring: RefCell::new(ring),
            tasks: Tasks::new(config.entries as usize * 2),
            pool,
            caching: config.caching,
            counters: Cell::new(UringCounters::default()),
            helpers: Helpers::default(),
        };
        let uring = Self { inner: Rc::new(inner) };
        if registered {
            let weak = Rc::downgrade(&uring.inner);
            uring.inner.pool.set_registrar(Box::new(move |chunk, memory| {
                weak.upgrade().is_some_and(|inner| inner.register_chunk(chunk, memory))
            }));
        }
        Ok(uring)
    }

    /// The pool of page-aligned memory of this thread.
    pub fn pool(&self) -> &Pool {
        &self.inner.pool
    }

    /// What the ring has cost so far.
    pub fn counters(&self) -> UringCounters {
        self.inner.counters.get()
    }

    /// Queues an operation; it reaches the kernel with the turn's batch.
    ///
    /// # Safety
    /// Everything `entry` points to stays valid until the operation has completed.
    pub(crate) unsafe fn start(&self, build: impl FnOnce(OpId) -> squeue::Entry) -> Op {
        let tasks = &self.inner.tasks;
        let id = tasks.start_op();
        let entry = build(id).user_data(id.to_u64());
        // SAFETY: the caller vouches for the memory behind the entry.
        unsafe { self.push(entry) };
        Op::new(tasks, id)
    }

    /// Queues an operation whose result has no reader.
    ///
    /// # Safety
    /// As [`Uring::start`], with no task to tell when it is over: the memory must be static, the descriptor is
    /// resolved when the batch is submitted.
    pub(crate) unsafe fn start_forgotten(&self, entry: squeue::Entry) {
        // SAFETY: the caller vouches for the memory behind the entry.
        unsafe { self.push(entry.user_data(FORGET)) };
    }

    unsafe fn push(&self, entry: squeue::Entry) {
        let mut ring = self.inner.ring.borrow_mut();
        loop {
            // SAFETY: the caller vouches for the memory behind the entry.
            if unsafe { ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // Full: hand over what is there. An error here (EBUSY, EINTR, EAGAIN) means try again.
            self.inner.count(|counters| counters.enters += 1);
            if let Err(error) = ring.submit() {
                assert!(transient(&error), "io_uring refused a full submission queue: {error}");
            }
        }
    }

    fn reap(&self) -> bool {
        let mut ring = self.inner.ring.borrow_mut();
        let mut count = 0;
        for entry in ring.completion() {
            count += 1;
            // Another completion of the same operation will follow: that this one woke the thread is all there is to
            // it.
            if entry.user_data() != FORGET && !cqueue::more(entry.flags()) {
                self.inner.tasks.complete_op(OpId::from_u64(entry.user_data()), entry.result());
            }
        }
        self.inner.count(|counters| counters.completions += count);
        count > 0
    }
}

fn transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EINTR | libc::EAGAIN | libc::ETIME))
}

impl Inner {
    fn count(&self, change: impl FnOnce(&mut UringCounters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    fn register_chunk(&self, chunk: u16, memory: Option<(*mut u8, usize)>) -> bool {
        let (base, len) = memory.unwrap_or((std::ptr::null_mut(), 0));
        let piece = libc::iovec { iov_base: base.cast(), iov_len: len };
        let ring = self.ring.borrow();
        // SAFETY: the chunk is part of the pool's mapping, which lives as long as the ring: both are in `Inner`.
        unsafe { ring.submitter().register_buffers_update(u32::from(chunk), &[piece], None) }.is_ok()
    }
}

impl Io for Uring {
    type Store = UringFile;
    type Share = SharedFile;

    fn share(&self, store: &UringFile) -> Option<SharedFile> {
        store.share()
    }

    fn adopt(&self, share: &SharedFile) -> UringFile {
        UringFile::adopt(self, share)
    }

    async fn open(&self, path: &Path, access: Access) -> io::Result<UringFile> {
        let (name, caching) = (path.to_path_buf(), self.inner.caching);
        let closer = self.inner.helpers.closer();
        let opened = self.offload(move || OpenedFile::open(&name, access, caching, closer)).await??;
        Ok(UringFile::of(self, opened))
    }

    async fn closed(&self) {
        self.files_closed().await;
    }

    async fn offload<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        Self::offload(self, work).await
    }

    fn tasks(&self) -> &Tasks {
        &self.inner.tasks
    }

    fn now_ns(&self) -> u64 {
        START.elapsed().as_nanos() as u64
    }

    fn cancel(&self, task: TaskId) {
        for op in self.inner.tasks.ops_of(task) {
            let entry = opcode::AsyncCancel::new(op.to_u64()).build();
            // SAFETY: a cancellation refers to no memory.
            unsafe { self.start_forgotten(entry) };
        }
    }
}

impl Driver for Uring {
    fn now_ns(&self) -> u64 {
        Io::now_ns(self)
    }

    fn turn(&self, wait: bool, until_ns: Option<u64>) -> bool {
        let result = {
            let mut ring = self.inner.ring.borrow_mut();
            let (queued, nudge) = {
                let queue = ring.submission();
                (!queue.is_empty(), queue.taskrun() || queue.cq_overflow())
            };
            let wait = wait && ring.completion().is_empty();
            if wait || queued || nudge {
                self.inner.count(|counters| {
                    counters.enters += 1;
                    counters.sleeps += u64::from(wait);
                });
                if wait {
                    let left = until_ns.map(|until| until.saturating_sub(Io::now_ns(self)));
                    let is_idle = self.inner.tasks.inner.ops_at_storage.get() == 0;
                    self.inner.sleep.wait(&mut ring, left.map(Duration::from_nanos), is_idle)
                } else {
                    ring.submit()
                }
            } else {
                Ok(0)
            }
        };
        if let Err(error) = result {
            assert!(transient(&error), "io_uring_enter failed: {error}");
        }
        self.reap()
    }

    fn has_completions(&self) -> bool {
        let mut ring = self.inner.ring.borrow_mut();
        let flagged = {
            let queue = ring.submission();
            queue.taskrun() || queue.cq_overflow()
        };
        flagged || !ring.completion().is_empty()
    }

    fn can_spin(&self) -> bool {
        true
    }

    fn quiesce(&self) {
        let begin = Instant::now();
        while self.inner.tasks.inner.ops_flying.get() > 0 && begin.elapsed() < QUIESCE_MAX {
            let entry = opcode::AsyncCancel2::new(CancelBuilder::any()).build();
            // SAFETY: a cancellation refers to no memory.
            unsafe { self.start_forgotten(entry) };
            self.turn(true, Some(Io::now_ns(self) + 10_000_000));
        }
        if self.inner.tasks.inner.ops_flying.get() > 0 {
            // A request is stuck in the kernel, which may still write to its memory: that memory must stay.
            self.inner.tasks.drop_services();
            std::mem::forget(Rc::clone(&self.inner));
        }
    }
}
