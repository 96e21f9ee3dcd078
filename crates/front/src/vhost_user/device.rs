//! The data side of a connection: its queues as one front end of the disk, and how the control thread reaches them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tapio_block::{FrontEnd, FrontId, Geometry, Gone, Remote, World};
use tapio_ring::uring::Uring;

use super::Log;
use super::event::{Kick, Notifier};
use super::memory::GuestMemory;
use super::queue::{Queue, QueueSetup};
use super::vring::RingError;

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
    fn stop(&self, index: usize) -> Result<Option<u16>, Gone>;
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
}

thread_local! {
    /// The devices of this data thread, by the number of their connection: what belongs to the thread stays on it.
    static DEVICES: RefCell<BTreeMap<u64, Rc<Device>>> = const { RefCell::new(BTreeMap::new()) };
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Waits for kicks of one queue.
struct Watch {
    kick: Rc<Kick>,
    stop: Rc<Cell<bool>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.set(true);
        // The watching task holds the descriptor until it sees the mark. Should the descriptor not take the poke, its
        // counter is full, and the task wakes up for that.
        let _ = self.kick.poke();
    }
}

struct Entry {
    queue: Rc<Queue>,
    watch: Watch,
}

/// The queues of one connection.
struct Device {
    queues: RefCell<Vec<Option<Entry>>>,
    front: Cell<Option<FrontId>>,
    /// Which queue is asked first: moves on, so that none starves where room is scarce.
    first: Cell<usize>,
    writeback: Rc<Cell<bool>>,
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
        let watch = Watch { kick: Rc::new(kick), stop: Rc::new(Cell::new(false)) };
        let (kick, stop, uring) = (Rc::clone(&watch.kick), Rc::clone(&watch.stop), uring.clone());
        let (device, queue) = (Rc::downgrade(self), Rc::downgrade(queue));
        let tasks = tapio_ring::Io::tasks(&uring).clone();
        tasks.spawn(async move {
            if let Err(error) = wait_for_kicks(&uring, &kick, &stop).await
                && let (Some(device), Some(queue)) = (device.upgrade(), queue.upgrade())
            {
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

/// Waits for one kick after the other. The loop of the thread looks into every ring whenever it wakes up, so that
/// there is nothing to do about a kick but to be woken by it.
async fn wait_for_kicks(uring: &Uring, kick: &Kick, stop: &Cell<bool>) -> io::Result<()> {
    let mut value = Box::new(0);
    loop {
        if !kick.blocking {
            uring.poll(kick.raw(), libc::POLLIN).await?;
            if stop.get() {
                return Ok(());
            }
        }
        let read = uring.read_event(kick.raw(), &mut value).await;
        if stop.get() {
            return Ok(());
        }
        match read {
            Ok(0) => return Err(io::Error::from_raw_os_error(libc::EPIPE)),
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
            Err(error) => return Err(error),
        }
    }
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

/// The data side of a connection, as its control thread holds it. [`RemoteDevice::detach`] ends it.
#[derive(Debug)]
pub struct RemoteDevice {
    remote: Remote,
    id: u64,
}

impl RemoteDevice {
    /// Adds a device with room for `queues` queues to the disk.
    pub fn attach(remote: Remote, queues: usize, log: Log) -> Result<Self, Gone> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        remote.call(CALL_MAX, move |world| {
            let device = Rc::new(Device {
                queues: RefCell::new((0..queues).map(|_| None).collect()),
                front: Cell::new(None),
                first: Cell::new(0),
                writeback: Rc::new(Cell::new(true)),
                log,
            });
            device.front.set(Some(world.fronts.add(Box::new(DeviceFront(Rc::clone(&device))))));
            DEVICES.with_borrow_mut(|devices| devices.insert(id, device));
        })?;
        Ok(Self { remote, id })
    }

    /// Takes the device off the disk: nothing new is taken, what is in flight is answered, memory is let go. Where a
    /// storage is stuck, its requests are left to end by themselves, unanswered. Tells whether everything ended.
    pub fn detach(&self) -> Result<bool, Gone> {
        let drained = self.each(DRAIN_MAX, |_, device| async move {
            for queue in device.all() {
                queue.halt();
            }
            for queue in device.all() {
                queue.settled().await;
            }
        });
        let id = self.id;
        self.remote.call(CALL_MAX, move |world| {
            if let Some(device) = DEVICES.with_borrow_mut(|devices| devices.remove(&id)) {
                for queue in device.all() {
                    queue.kill();
                }
                device.queues.borrow_mut().clear();
                if let Some(front) = device.front.take() {
                    world.fronts.remove(front);
                }
            }
        })?;
        Ok(drained.is_ok())
    }

    fn with<T: Send + 'static>(
        &self,
        job: impl FnOnce(&World, &Rc<Device>) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        let id = self.id;
        let answer = self.remote.call(CALL_MAX, move |world| find(id).map(|device| job(world, &device)))?;
        answer.ok_or(Gone::Ended)
    }

    fn each<T, Fut>(
        &self,
        within: Duration,
        job: impl FnOnce(World, Rc<Device>) -> Fut + Send + 'static,
    ) -> Result<T, Gone>
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let id = self.id;
        let answer = self.remote.call_async(within, move |world| async move {
            match find(id) {
                Some(device) => Some(job(world, device).await),
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
        self.remote.call(CALL_MAX, |world| world.port.geometry())
    }

    fn start(&self, setup: QueueSetup, kick: Kick) -> Result<Result<(), RingError>, Gone> {
        self.with(move |world, device| {
            let index = setup.index;
            let queue = Rc::new(Queue::new(setup, world.port.client(), Rc::clone(&device.writeback))?);
            let watch = device.watch(&world.uring, &queue, kick);
            device.queues.borrow_mut()[index] = Some(Entry { queue, watch });
            Ok(())
        })
    }

    fn stop(&self, index: usize) -> Result<Option<u16>, Gone> {
        self.each(DRAIN_MAX, move |_, device| async move {
            let queue = device.queue(index)?;
            queue.halt();
            queue.settled().await;
            device.queues.borrow_mut()[index] = None;
            Some(queue.next_avail())
        })
    }

    fn set_memory(&self, memory: Arc<GuestMemory>, drain: bool) -> Result<(), Gone> {
        self.each(DRAIN_MAX, move |_, device| async move {
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
        })
    }

    fn set_enabled(&self, index: usize, enabled: bool) -> Result<(), Gone> {
        self.with(move |_, device| {
            if let Some(queue) = device.queue(index) {
                queue.set_enabled(enabled);
            }
        })
    }

    fn set_call(&self, index: usize, call: Option<Arc<Notifier>>) -> Result<(), Gone> {
        self.with(move |_, device| {
            if let Some(queue) = device.queue(index) {
                queue.set_call(call);
            }
        })
    }

    fn set_err(&self, index: usize, err: Option<Arc<Notifier>>) -> Result<(), Gone> {
        self.with(move |_, device| {
            if let Some(queue) = device.queue(index) {
                queue.set_err(err);
            }
        })
    }

    fn set_kick(&self, index: usize, kick: Kick) -> Result<(), Gone> {
        self.with(move |world, device| {
            let Some(queue) = device.queue(index) else { return };
            let watch = device.watch(&world.uring, &queue, kick);
            if let Some(Some(entry)) = device.queues.borrow_mut().get_mut(index) {
                entry.watch = watch;
            }
        })
    }

    fn set_writeback(&self, writeback: bool) -> Result<(), Gone> {
        self.with(move |_, device| device.writeback.set(writeback))
    }
}
