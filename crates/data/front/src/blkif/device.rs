//! The rings of a device as one front end of the disk, on the data thread.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use tapio_block::{DataThread, FrontEnd, FrontId};
use tapio_ring::uring::{PollStream, Uring};
use tapio_ring::{Io, Tasks};
use tapio_types::RingState;
use tapio_xen::Channel;

use super::queue::Queue;
use super::report::Broken;
use super::{Log, OnRing};

/// Notifications without a request, one after the other, from which on a guest is listened to at intervals.
const STORM: u32 = 16;
/// The interval.
const STORM_PAUSE_NS: u64 = 5_000_000;
/// How often rings are looked at in which requests wait or are in flight without progress.
const TICK_NS: u64 = 5_000_000_000;

thread_local! {
    /// The devices of this data thread, by number.
    static DEVICES: RefCell<BTreeMap<u64, Rc<Device>>> = const { RefCell::new(BTreeMap::new()) };
}

/// The device of that number, if it is still there.
pub fn find(id: u64) -> Option<Rc<Device>> {
    DEVICES.with_borrow(|devices| devices.get(&id).cloned())
}

/// Waits for notifications of one ring, until it is dropped.
#[derive(Debug)]
struct Watch {
    state: Rc<WatchState>,
}

#[derive(Debug, Default)]
struct WatchState {
    stop: Cell<bool>,
    storm: Cell<bool>,
    stream: RefCell<Option<PollStream>>,
}

impl WatchState {
    fn cancel(&self) {
        if let Some(stream) = &*self.stream.borrow() {
            stream.cancel();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.state.stop.set(true);
        self.state.cancel();
    }
}

struct Entry {
    queue: Rc<Queue>,
    watch: Watch,
    /// Requests taken when it was armed last.
    requests: Cell<u64>,
    /// Notifications since then that brought none.
    idle_kicks: Cell<u32>,
    reported: Cell<bool>,
}

/// The rings of one device.
pub struct Device {
    entries: RefCell<Vec<Entry>>,
    front: Cell<Option<FrontId>>,
    /// Which ring is asked first: moves on, so that none starves where room is scarce.
    first: Cell<usize>,
    tasks: Tasks,
    log: Log,
    on_ring: Option<OnRing>,
    /// A timer runs for rings in which something waits.
    ticks: Cell<bool>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("rings", &self.entries.borrow().len()).finish_non_exhaustive()
    }
}

impl Device {
    /// Adds a device to the disk, under number `id`.
    pub fn attach(
        data_thread: &DataThread,
        id: u64,
        queues: Vec<(Rc<Queue>, Rc<Channel>)>,
        log: Log,
        on_ring: Option<OnRing>,
    ) {
        let device = Rc::new(Self {
            entries: RefCell::default(),
            front: Cell::new(None),
            first: Cell::new(0),
            tasks: data_thread.port.tasks().clone(),
            log,
            on_ring,
            ticks: Cell::new(false),
        });
        for (queue, channel) in queues {
            let watch = device.watch(&data_thread.uring, &queue, channel);
            device.entries.borrow_mut().push(Entry {
                queue,
                watch,
                requests: Cell::new(0),
                idle_kicks: Cell::new(0),
                reported: Cell::new(false),
            });
        }
        device.front.set(Some(data_thread.fronts.add(Box::new(DeviceFront(Rc::clone(&device))))));
        DEVICES.with_borrow_mut(|devices| devices.insert(id, device));
    }

    /// Takes device `id` off the disk. Returns whether no request is left for the next process that serves its rings.
    pub fn remove(data_thread: &DataThread, id: u64) -> bool {
        let Some(device) = DEVICES.with_borrow_mut(|devices| devices.remove(&id)) else { return true };
        let clean = device.queues().iter().all(|queue| queue.is_clean());
        for queue in device.queues() {
            queue.kill();
        }
        device.entries.borrow_mut().clear();
        if let Some(front) = device.front.take() {
            data_thread.fronts.remove(front);
        }
        clean
    }

    /// Its rings.
    pub fn queues(&self) -> Vec<Rc<Queue>> {
        self.entries.borrow().iter().map(|entry| Rc::clone(&entry.queue)).collect()
    }

    fn watch(&self, uring: &Uring, queue: &Rc<Queue>, channel: Rc<Channel>) -> Watch {
        let state = Rc::new(WatchState::default());
        let (seen, uring, queue) = (Rc::clone(&state), uring.clone(), Rc::downgrade(queue));
        uring.tasks().clone().spawn(async move {
            let error = listen(&uring, &channel, &seen).await;
            if let (Some(error), Some(queue)) = (error, queue.upgrade()) {
                queue.break_down(Broken::Channel(error.raw_os_error().unwrap_or(libc::EIO)));
            }
        });
        Watch { state }
    }

    fn report(&self, entry: &Entry) {
        if !entry.reported.get()
            && let Some(why) = entry.queue.broken()
        {
            entry.reported.set(true);
            (self.log)(&format!("{:?} takes no requests until the guest connects anew: {why}", entry.queue));
        }
    }

    /// Where the rings stand, all together.
    fn counters(&self) -> RingState {
        let mut all = RingState::default();
        for entry in self.entries.borrow().iter() {
            let one = entry.queue.counters();
            all.size += one.size;
            for (sum, number) in [
                (&mut all.req_prod, one.req_prod),
                (&mut all.req_cons, one.req_cons),
                (&mut all.req_event, one.req_event),
                (&mut all.rsp_prod, one.rsp_prod),
                (&mut all.rsp_pvt, one.rsp_pvt),
                (&mut all.rsp_event, one.rsp_event),
            ] {
                *sum = sum.wrapping_add(number);
            }
        }
        all
    }

    /// Calls `on_ring`, if there is one, with where the rings stand.
    pub fn tell(&self, now_ns: Option<u64>) {
        if let Some(on_ring) = &self.on_ring {
            on_ring(&self.counters(), now_ns);
        }
    }

    /// Has it told now and then while something is in the rings and nothing comes of it.
    fn tick(self: &Rc<Self>) {
        if self.on_ring.is_none() || self.ticks.get() {
            return;
        }
        let all = self.counters();
        if all.req_prod == all.rsp_prod {
            return;
        }
        self.ticks.set(true);
        let (device, tasks) = (Rc::downgrade(self), self.tasks.clone());
        self.tasks.spawn(async move {
            tasks.sleep_until(tasks.turn_ns() + TICK_NS).await;
            if let Some(device) = device.upgrade() {
                device.ticks.set(false);
                device.tell(Some(tasks.turn_ns()));
            }
        });
    }
}

/// Has the thread woken by every notification: its loop looks into every ring whenever it wakes up. Gives what went
/// wrong, or nothing once it was stopped.
async fn listen(uring: &Uring, channel: &Channel, state: &WatchState) -> Option<io::Error> {
    while !state.stop.get() {
        if state.storm.replace(false) {
            uring.tasks().sleep_until(uring.now_ns() + STORM_PAUSE_NS).await;
            continue;
        }
        let (name, ended) = uring.poll_stream(channel.raw_fd());
        state.stream.replace(Some(name));
        let error = ended.await;
        state.stream.replace(None);
        // The kernel ends a stream by itself when it cannot note a wake-up: it is begun anew, and looks first.
        let again = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS | libc::EOVERFLOW));
        if !state.stop.get() && !state.storm.get() && !again {
            return Some(error);
        }
    }
    None
}

/// The hooks of the data thread's loop.
struct DeviceFront(Rc<Device>);

impl FrontEnd for DeviceFront {
    fn pull(&mut self) -> bool {
        let device = &self.0;
        let entries = device.entries.borrow();
        let (count, first) = (entries.len(), device.first.get());
        let mut pulled = false;
        for step in 0..count {
            pulled |= entries[(first + step) % count].queue.pull();
        }
        if pulled {
            device.first.set((first + 1) % count);
        }
        pulled
    }

    fn publish(&mut self) {
        let answered =
            self.0.entries.borrow().iter().fold(false, |answered, entry| answered | entry.queue.publish());
        if answered {
            self.0.tell(Some(self.0.tasks.turn_ns()));
        }
    }

    fn peek(&self) -> bool {
        self.0.entries.borrow().iter().any(|entry| entry.queue.peek())
    }

    fn arm(&mut self) -> bool {
        let mut waiting = false;
        for entry in self.0.entries.borrow().iter() {
            let kicks = entry.queue.kicks();
            waiting |= entry.queue.arm();
            self.0.report(entry);
            if entry.queue.kicks() == kicks {
                continue;
            }
            // A guest that notifies and asks nothing costs a wake-up each time, but not without end.
            let requests = entry.queue.requests();
            let idle =
                if entry.requests.replace(requests) == requests { entry.idle_kicks.get() + 1 } else { 0 };
            entry.idle_kicks.set(idle);
            if idle >= STORM && !waiting {
                entry.watch.state.storm.set(true);
                entry.watch.state.cancel();
            }
        }
        if !waiting {
            self.0.tick();
        }
        waiting
    }

    fn disarm(&mut self) {
        // The guest notifies when its producer passes the event index, which does not move until the thread arms again.
    }
}
