//! The data side of a connection: its queues as one front end of the disk, and how the control thread reaches them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tapio_block::{DataThread, DiskHandle, FrontEnd, FrontId, Geometry, Gone, Port, QueueHandle};
use tapio_ring::uring::{PollStream, Uring};

use super::Log;
use super::dirty::Logging;
use super::event::{Kick, Notifier};
use super::memory::GuestMemory;
use super::queue::{Queue, QueueSetup};
use super::ring_error::RingError;

/// The data thread answers questions within this time, or it is gone.
const CALL_MAX: Duration = Duration::from_secs(10);
/// Requests in flight end within this time, or their storage is stuck.
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// What a session asks of the data thread; a trait so that the session's own logic is tested without one.
pub trait DataSide {
    /// The disk as it is now.
    fn geometry(&self) -> Result<Geometry, Gone>;
    /// Starts a queue.
    fn start(&self, setup: QueueSetup, kick: Kick) -> Result<Result<(), RingError>, Gone>;
    /// Stops a queue: takes nothing more, waits for what is in flight, tells where the ring is to be read on.
    fn stop(&self, index: usize) -> Result<Option<u32>, Gone>;
    /// Exchanges guest memory; `drain` waits for everything in flight first, because memory goes away.
    fn set_memory(&self, memory: Arc<GuestMemory>, drain: bool) -> Result<(), Gone>;
    /// Allows or forbids a running queue to take requests.
    fn set_enabled(&self, index: usize, enabled: bool) -> Result<(), Gone>;
    /// Another descriptor for interrupts of a running queue.
    fn set_call(&self, index: usize, call: Option<Arc<Notifier>>) -> Result<(), Gone>;
    /// Another descriptor for errors of a running queue.
    fn set_err(&self, index: usize, err: Option<Arc<Notifier>>) -> Result<(), Gone>;
    /// Another descriptor for kicks of a running queue.
    fn set_kick(&self, index: usize, kick: Kick) -> Result<(), Gone>;
    /// Whether writes are answered before they are durable.
    fn set_writeback(&self, writeback: bool) -> Result<(), Gone>;
    /// Where a running queue logs what it writes, or that it no longer has to.
    fn set_logging(&self, index: usize, logging: Option<Logging>) -> Result<(), Gone>;
}

thread_local! {
    /// The devices of this data thread, by the number of their connection: what belongs to the thread stays on it.
    static DEVICES: RefCell<BTreeMap<u64, Rc<Device>>> = const { RefCell::new(BTreeMap::new()) };
}

thread_local! {
    /// [`watch_geometry`] runs on this data thread.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Notifies every device of the thread that the disk's geometry has changed. One task for all of them, as long as the
/// thread lives: front ends come and go.
async fn watch_geometry(port: Port) {
    let mut known = port.geometry();
    loop {
        known = port.geometry_changed(known).await;
        DEVICES.with_borrow(|devices| {
            devices.values().flat_map(|device| &device.news).for_each(Notifier::signal);
        });
    }
}

/// Waits for kicks of one queue, until it is dropped.
struct Watch {
    stop: Rc<Cell<bool>>,
    stream: Rc<RefCell<Option<PollStream>>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.set(true);
        if let Some(stream) = &*self.stream.borrow() {
            stream.cancel();
        }
    }
}

struct Entry {
    queue: Rc<Queue>,
    watch: Watch,
}

/// The queues of one connection that one thread serves.
struct Device {
    queues: RefCell<Vec<Option<Entry>>>,
    front: Cell<Option<FrontId>>,
    /// Which queue is asked first: moves on, so that none starves where room is scarce.
    first: Cell<usize>,
    writeback: Rc<Cell<bool>>,
    /// Signalled when the configuration space has changed; one part of the device does that.
    news: Option<Notifier>,
    log: Log,
}

impl Device {
    fn queue(&self, index: usize) -> Option<Rc<Queue>> {
        self.queues.borrow().get(index).and_then(|entry| entry.as_ref().map(|entry| Rc::clone(&entry.queue)))
    }

    fn all(&self) -> Vec<Rc<Queue>> {
        self.queues.borrow().iter().flatten().map(|entry| Rc::clone(&entry.queue)).collect()
    }

    fn watch(self: &Rc<Self>, uring: &Uring, queue: &Rc<Queue>, kick: Kick) -> Watch {
        let watch = Watch { stop: Rc::default(), stream: Rc::default() };
        let (stop, stream, uring) = (Rc::clone(&watch.stop), Rc::clone(&watch.stream), uring.clone());
        let (device, queue) = (Rc::downgrade(self), Rc::downgrade(queue));
        let tasks = tapio_ring::Io::tasks(&uring).clone();
        tasks.spawn(async move {
            let error = wait_for_kicks(&uring, &kick, &stop, &stream).await;
            if let (Some(error), Some(device), Some(queue)) = (error, device.upgrade(), queue.upgrade()) {
                let why = RingError::Kick(error.raw_os_error().unwrap_or(libc::EIO));
                queue.break_down(why);
                device.report(&queue);
            }
        });
        watch
    }

    fn report(&self, queue: &Queue) {
        if let Some(error) = queue.broken() {
            (self.log)(&format!("{queue:?} is broken and stays so until the guest resets it: {error}"));
        }
    }
}

/// Has the thread woken by every kick. Its loop looks into every ring whenever it wakes up, so that there is nothing
/// to do about a kick but to be woken by it: the descriptor is not even read, which costs no operation per kick.
/// Gives what went wrong, or nothing once it was stopped.
async fn wait_for_kicks(
    uring: &Uring,
    kick: &Kick,
    stop: &Cell<bool>,
    stream: &RefCell<Option<PollStream>>,
) -> Option<io::Error> {
    while !stop.get() {
        let (name, ended) = uring.poll_stream(kick.raw());
        stream.replace(Some(name));
        let error = ended.await;
        // The kernel ends a stream by itself when it cannot note a wake-up: it is begun anew, and looks first.
        if !stop.get()
            && !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS | libc::EOVERFLOW))
        {
            return Some(error);
        }
    }
    None
}

/// The hooks of the data thread's loop; see [`Device`].
struct DeviceFront(Rc<Device>);

impl FrontEnd for DeviceFront {
    fn pull(&mut self) -> bool {
        let queues = self.0.queues.borrow();
        let count = queues.len();
        let first = self.0.first.get();
        let mut pulled = false;
        for step in 0..count {
            if let Some(entry) = &queues[(first + step) % count] {
                let broken = entry.queue.broken().is_some();
                pulled |= entry.queue.pull();
                if !broken {
                    self.0.report(&entry.queue);
                }
            }
        }
        if pulled {
            self.0.first.set((first + 1) % count);
        }
        pulled
    }

    fn publish(&mut self) {
        self.0.queues.borrow().iter().flatten().for_each(|entry| entry.queue.publish());
    }

    fn peek(&self) -> bool {
        self.0.queues.borrow().iter().flatten().any(|entry| entry.queue.peek())
    }

    fn arm(&mut self) -> bool {
        self.0.queues.borrow().iter().flatten().fold(false, |waiting, entry| waiting | entry.queue.arm())
    }

    fn disarm(&mut self) {
        self.0.queues.borrow().iter().flatten().for_each(|entry| entry.queue.disarm());
    }
}

/// A device on the threads of its disk that serve its queues: queue `n` on thread `n` modulo their number.
#[derive(Debug)]
struct Threads {
    /// Threads that the device may have.
    max: usize,
    /// Those that it is on: the disk's owner, and others from the first start of one of their queues on.
    list: Vec<QueueHandle>,
}

/// The data side of a connection, as its control thread holds it. [`RemoteDevice::detach`] ends it.
pub struct RemoteDevice {
    disk: DiskHandle,
    id: u64,
    queues: usize,
    log: Log,
    threads: Mutex<Threads>,
    writeback: AtomicBool,
}

impl fmt::Debug for RemoteDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteDevice")
            .field("id", &self.id)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl RemoteDevice {
    /// Adds a device with room for `queues` queues to the disk. `news` is signalled when the configuration space has
    /// changed.
    pub fn attach(disk: DiskHandle, queues: usize, news: Notifier, log: Log) -> Result<Self, Gone> {
        let owner = disk.queue(0);
        let device = Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            queues,
            log,
            threads: Mutex::new(Threads { max: queues.min(disk.threads_max()).max(1), list: Vec::new() }),
            disk,
            writeback: AtomicBool::new(true),
        };
        device.attach_to(&owner, Some(news))?;
        device.threads.lock().list.push(owner);
        Ok(device)
    }

    fn attach_to(&self, thread: &QueueHandle, news: Option<Notifier>) -> Result<(), Gone> {
        let (id, queues, log) = (self.id, self.queues, Arc::clone(&self.log));
        let writeback = self.writeback.load(Ordering::Relaxed);
        thread.call(CALL_MAX, move |data_thread| {
            let is_first = news.is_some();
            let device = Rc::new(Device {
                queues: RefCell::new((0..queues).map(|_| None).collect()),
                front: Cell::new(None),
                first: Cell::new(0),
                writeback: Rc::new(Cell::new(writeback)),
                news,
                log,
            });
            if is_first && !WATCHED.replace(true) {
                data_thread.port.tasks().spawn(watch_geometry(data_thread.port.clone()));
            }
            device.front.set(Some(data_thread.fronts.add(Box::new(DeviceFront(Rc::clone(&device))))));
            DEVICES.with_borrow_mut(|devices| devices.insert(id, device));
        })
    }

    /// The thread of a queue; `start` adds the device to it if it is not there yet.
    fn thread_of(&self, index: usize, start: bool) -> Result<QueueHandle, Gone> {
        let mut threads = self.threads.lock();
        let wanted = index % threads.max;
        while start && threads.list.len() <= wanted {
            let next = self.disk.queue(threads.list.len());
            if matches!(next, QueueHandle::Owner(_)) {
                // There is no other one to be had: as many as there are serve all queues from now on.
                threads.max = threads.list.len();
                break;
            }
            self.attach_to(&next, None)?;
            threads.list.push(next);
        }
        let wanted = index % threads.max;
        Ok(threads.list.get(wanted).unwrap_or(&threads.list[0]).clone())
    }

    fn threads(&self) -> Vec<QueueHandle> {
        self.threads.lock().list.clone()
    }

    /// Takes the device off the disk: nothing new is taken, what is in flight is answered, memory is let go. Where a
    /// storage is stuck, its requests are left to end by themselves, unanswered. Tells whether everything ended.
    pub fn detach(&self) -> Result<bool, Gone> {
        let threads = self.threads();
        let halted = self.on_all(CALL_MAX, |_, device| async move {
            for queue in device.all() {
                queue.halt();
            }
        });
        let drained = halted.and_then(|()| {
            self.on_all(DRAIN_MAX, |_, device| async move {
                for queue in device.all() {
                    queue.settled().await;
                }
            })
        });
        let id = self.id;
        for thread in threads {
            thread.call(CALL_MAX, move |data_thread| {
                if let Some(device) = DEVICES.with_borrow_mut(|devices| devices.remove(&id)) {
                    for queue in device.all() {
                        queue.kill();
                    }
                    device.queues.borrow_mut().clear();
                    if let Some(front) = device.front.take() {
                        data_thread.fronts.remove(front);
                    }
                }
            })?;
        }
        Ok(drained.is_ok())
    }

    /// Does something on every thread that the device is on, one after the other.
    fn on_all<Fut>(
        &self,
        within: Duration,
        job: impl Fn(DataThread, Rc<Device>) -> Fut + Clone + Send + 'static,
    ) -> Result<(), Gone>
    where
        Fut: Future<Output = ()> + 'static,
    {
        self.threads().iter().try_for_each(|thread| self.each(thread, within, job.clone()))
    }

    fn with<T: Send + 'static>(
        &self,
        thread: &QueueHandle,
        job: impl FnOnce(&DataThread, &Rc<Device>) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        let id = self.id;
        let answer =
            thread.call(CALL_MAX, move |data_thread| find(id).map(|device| job(data_thread, &device)))?;
        answer.ok_or(Gone::Ended)
    }

    fn each<T, Fut>(
        &self,
        thread: &QueueHandle,
        within: Duration,
        job: impl FnOnce(DataThread, Rc<Device>) -> Fut + Send + 'static,
    ) -> Result<T, Gone>
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let id = self.id;
        let answer = thread.call_async(within, move |data_thread| async move {
            match find(id) {
                Some(device) => Some(job(data_thread, device).await),
                None => None,
            }
        })?;
        answer.ok_or(Gone::Ended)
    }
}

fn find(id: u64) -> Option<Rc<Device>> {
    DEVICES.with_borrow(|devices| devices.get(&id).cloned())
}

impl DataSide for RemoteDevice {
    fn geometry(&self) -> Result<Geometry, Gone> {
        self.disk.call(CALL_MAX, |data_thread| data_thread.port.geometry())
    }

    fn start(&self, setup: QueueSetup, kick: Kick) -> Result<Result<(), RingError>, Gone> {
        let index = setup.index;
        self.with(&self.thread_of(index, true)?, move |data_thread, device| {
            let queue = Rc::new(Queue::new(setup, data_thread.port.client(), Rc::clone(&device.writeback))?);
            let watch = device.watch(&data_thread.uring, &queue, kick);
            device.queues.borrow_mut()[index] = Some(Entry { queue, watch });
            Ok(())
        })
    }

    fn stop(&self, index: usize) -> Result<Option<u32>, Gone> {
        self.each(&self.thread_of(index, false)?, DRAIN_MAX, move |_, device| async move {
            let queue = device.queue(index)?;
            queue.halt();
            queue.settled().await;
            device.queues.borrow_mut()[index] = None;
            Some(queue.base())
        })
    }

    fn set_memory(&self, memory: Arc<GuestMemory>, drain: bool) -> Result<(), Gone> {
        self.on_all(DRAIN_MAX, move |_, device| {
            let memory = Arc::clone(&memory);
            async move {
                if drain {
                    for queue in device.all() {
                        queue.set_held(true);
                    }
                    for queue in device.all() {
                        queue.settled().await;
                    }
                }
                for queue in device.all() {
                    queue.set_memory(&memory);
                    queue.set_held(false);
                    device.report(&queue);
                }
            }
        })
    }

    fn set_enabled(&self, index: usize, enabled: bool) -> Result<(), Gone> {
        self.with(&self.thread_of(index, false)?, move |_, device| {
            if let Some(queue) = device.queue(index) {
                queue.set_enabled(enabled);
            }
        })
    }

    fn set_call(&self, index: usize, call: Option<Arc<Notifier>>) -> Result<(), Gone> {
        self.with(&self.thread_of(index, false)?, move |_, device| {
            if let Some(queue) = device.queue(index) {
                queue.set_call(call);
            }
        })
    }

    fn set_err(&self, index: usize, err: Option<Arc<Notifier>>) -> Result<(), Gone> {
        self.with(&self.thread_of(index, false)?, move |_, device| {
            if let Some(queue) = device.queue(index) {
                queue.set_err(err);
            }
        })
    }

    fn set_kick(&self, index: usize, kick: Kick) -> Result<(), Gone> {
        self.with(&self.thread_of(index, false)?, move |data_thread, device| {
            let Some(queue) = device.queue(index) else { return };
            let watch = device.watch(&data_thread.uring, &queue, kick);
            if let Some(Some(entry)) = device.queues.borrow_mut().get_mut(index) {
                entry.watch = watch;
            }
        })
    }

    fn set_writeback(&self, writeback: bool) -> Result<(), Gone> {
        self.writeback.store(writeback, Ordering::Relaxed);
        self.threads()
            .iter()
            .try_for_each(|thread| self.with(thread, move |_, device| device.writeback.set(writeback)))
    }

    fn set_logging(&self, index: usize, logging: Option<Logging>) -> Result<(), Gone> {
        self.with(&self.thread_of(index, false)?, move |_, device| {
            if let Some(queue) = device.queue(index) {
                queue.set_logging(logging);
            }
        })
    }
}
