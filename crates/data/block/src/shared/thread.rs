//! Queue threads of a disk process: when they begin, and how the others reach them.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_ring::uring::{SharedFile, Uring, UringConfig};
use tapio_ring::{Executor, Inbox, Io, Polling};

use super::exchange::Exchange;
use super::gate::QUEUE_THREADS_MAX;
use super::queue::{QueueCore, QueueOptions};
use super::view::Shared;
use crate::data_thread::{DataThread, Gone, Handle, Jobs, Owner};
use crate::front::Fronts;
use crate::io::DiskIo;
use crate::port::Geometry;

/// A thread that starts, or a data thread that is asked, answers within this time.
const START_MAX: Duration = Duration::from_secs(10);

/// Reaches a thread that serves queues or connections.
#[derive(Clone, Debug)]
pub enum QueueHandle {
    /// The one that has the images.
    Owner(Handle<Owner>),
    /// One beside it.
    Queue(Handle<DataThread>),
}

impl QueueHandle {
    /// Runs `job` on the thread and gives its result.
    ///
    /// # Errors
    /// The thread has ended or does not answer.
    pub fn call<T: Send + 'static>(
        &self,
        within: Duration,
        job: impl FnOnce(&DataThread) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        match self {
            Self::Owner(owner) => owner.call(within, |owner| job(owner)),
            Self::Queue(queue) => queue.call(within, job),
        }
    }

    /// Runs the future that `job` makes as a task of the thread and gives its result.
    ///
    /// # Errors
    /// As [`QueueHandle::call`].
    pub fn call_async<T, Fut>(
        &self,
        within: Duration,
        job: impl FnOnce(DataThread) -> Fut + Send + 'static,
    ) -> Result<T, Gone>
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        match self {
            Self::Owner(owner) => owner.call_async(within, |owner| job((*owner).clone())),
            Self::Queue(queue) => queue.call_async(within, job),
        }
    }
}

/// What a queue thread is started with: the owner's, see [`crate::DiskOptions`].
#[derive(Clone, Copy)]
pub(crate) struct ThreadOptions {
    pub queue_depth: usize,
    pub ring: UringConfig,
    pub polling: tapio_ring::PollingConfig,
    pub queue: QueueOptions,
    pub at_start: Option<fn()>,
    pub at_rest: Option<fn()>,
}

struct Running {
    handle: Handle<DataThread>,
    thread: JoinHandle<()>,
}

/// The queue threads of one disk.
pub(crate) struct QueueThreads {
    max: usize,
    options: ThreadOptions,
    running: Mutex<Vec<Running>>,
    clients: Arc<AtomicUsize>,
}

impl fmt::Debug for QueueThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueThreads").field("max", &self.max).finish_non_exhaustive()
    }
}

impl QueueThreads {
    /// None yet, for a disk that may have `max` threads, its owner among them.
    pub fn new(max: usize, options: ThreadOptions) -> Self {
        let max = max.clamp(1, QUEUE_THREADS_MAX + 1);
        Self { max, options, running: Mutex::default(), clients: Arc::default() }
    }

    pub const fn max(&self) -> usize {
        self.max
    }

    pub const fn clients(&self) -> &Arc<AtomicUsize> {
        &self.clients
    }

    /// Thread `number` of the disk, 0 being the owner. Threads between that do not run yet are started too.
    pub fn nth(&self, owner: &Handle<Owner>, number: usize) -> QueueHandle {
        let mut running = self.running.lock();
        // Of an encrypted image, or one on another host, they would pass on every request.
        let is_worth_it =
            running.len() >= number || owner.call(START_MAX, |owner| owner.core.can_be_shared()) == Ok(true);
        while is_worth_it && running.len() < number {
            match self.start(owner, running.len()) {
                Ok(started) => running.push(started),
                Err(why) => {
                    (self.options.queue.report)(&format!(
                        "no more threads for the disk: {why}; the {} that it has serve all its queues",
                        running.len() + 1
                    ));
                    break;
                }
            }
        }
        match number.checked_sub(1).and_then(|index| running.get(index)) {
            Some(found) => QueueHandle::Queue(found.handle.with_origin(owner.origin())),
            None => QueueHandle::Owner(owner.clone()),
        }
    }

    /// All threads of the disk, the owner first.
    pub fn all(&self, owner: &Handle<Owner>) -> Vec<QueueHandle> {
        let running = self.running.lock();
        let queues =
            running.iter().map(|running| QueueHandle::Queue(running.handle.with_origin(owner.origin())));
        std::iter::once(QueueHandle::Owner(owner.clone())).chain(queues).collect()
    }

    fn start(&self, owner: &Handle<Owner>, index: usize) -> Result<Running, String> {
        let gone = |gone: Gone| gone.to_string();
        let asked =
            owner.call(START_MAX, |owner| (owner.core.share(), owner.core.geometry())).map_err(gone)?;
        let (shared, Some(geometry)) = asked else { return Err("the disk is paused".into()) };
        let (handle, jobs) = Handle::pair().map_err(|error| format!("cannot make an eventfd: {error}"))?;
        let exchange = Exchange::new(index, owner.waker(), handle.waker());
        let (reply, answer) = sync_channel(1);
        let begin = Begin { options: self.options, shared, exchange: Arc::clone(&exchange), geometry, jobs };
        let thread = Builder::new()
            .name(format!("tapio-queue-{}", index + 1))
            .stack_size(256 << 10)
            .spawn(move || run(begin, &reply))
            .map_err(|error| format!("cannot start one: {error}"))?;
        answer.recv_timeout(START_MAX).unwrap_or_else(|_| Err("it did not start".into()))?;
        let added = owner.call(START_MAX, move |owner| {
            let front = owner.core.add_queue_thread(&exchange);
            front.map(|front| owner.fronts.add(front)).is_some()
        });
        match added.map_err(gone)? {
            true => Ok(Running { handle, thread }),
            false => {
                // Nobody knows it: it ends.
                let _ = handle.call(START_MAX, |thread| thread.port.tasks().stop());
                Err("the disk is paused".into())
            }
        }
    }

    /// Ends all of them; `within` is for all together. Waits for their ends if `join`.
    pub fn end(&self, within: Duration, join: bool) {
        let deadline = Instant::now() + within;
        for Running { handle, thread } in self.running.lock().drain(..) {
            let left = deadline.saturating_duration_since(Instant::now());
            let stopped = handle.call(left, |thread| thread.port.tasks().stop());
            if join && stopped.is_ok() {
                let _ = thread.join();
            }
        }
    }
}

/// Everything that a queue thread begins with.
struct Begin {
    options: ThreadOptions,
    shared: Arc<Shared<SharedFile>>,
    exchange: Arc<Exchange>,
    geometry: Geometry,
    jobs: Jobs<DataThread>,
}

/// A queue thread.
fn run(begin: Begin, started: &SyncSender<Result<(), String>>) {
    let Begin { options, shared, exchange, geometry, jobs } = begin;
    let uring = match Uring::new(options.ring) {
        Ok(uring) => uring,
        Err(error) => {
            let _ = started.send(Err(format!("io_uring cannot be set up: {error}")));
            return;
        }
    };
    if let Some(at_start) = options.at_start {
        at_start();
    }
    let inbox = Inbox::new(options.queue_depth);
    let io = DiskIo::new(uring.clone(), options.queue.report);
    let core = QueueCore::new(io, Rc::clone(&inbox), shared, exchange, options.queue);
    let polling = Rc::new(RefCell::new(Polling::new(options.polling)));
    let serving = Rc::clone(&core);
    let make = move |taken| Rc::clone(&serving).serve(taken);
    let tasks = Io::tasks(&uring).clone();
    let mut executor = Executor::new(tasks.clone(), inbox, make, Rc::clone(&polling));
    let port = core.port(geometry);
    let fronts = Fronts::on_thread(uring.pool().clone(), options.at_rest, Rc::default());
    fronts.add(core.front());
    let mut hooks = fronts.clone();
    let thread = DataThread { port, uring: uring.clone(), fronts, polling };
    tasks.spawn(jobs.serve(thread));
    drop(core);
    let _ = started.send(Ok(()));
    executor.run(&uring, &mut hooks);
}
