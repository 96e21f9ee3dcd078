//! The rings of a device that one thread of the disk serves, as one of that thread's front ends.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use tapio_block::{DataThread, FrontEnd, FrontId};
use tapio_ring::uring::{PollStream, Uring};
use tapio_ring::{Io, Tasks};
use tapio_types::RingState;
use tapio_xen::Channel;

use super::queue::Queue;
use super::report::{Broken, QueueReport};
use super::standing::{self, Standing};
use super::{Log, OnRing};

/// Notifications without a request, one after the other, from which on a guest is listened to at intervals.
const STORM: u32 = 16;
/// The interval.
const STORM_PAUSE_NS: u64 = 5_000_000;
/// How often rings are looked at in which requests wait or are in flight without progress: how old statistics of
/// them can become.
const TICK_NS: u64 = 250_000_000;
/// How long the owner may not know where rings of other threads stand.
const DELAY_NS: u64 = 100_000_000;

thread_local! {
    /// The devices of this thread, by number.
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

/// Which thread tells where the rings stand.
pub enum Telling {
    /// Nothing asks for it.
    Nowhere,
    /// This is the disk's owner, which tells of all rings.
    Here {
        /// What it calls.
        on_ring: OnRing,
        /// The rings that it does not serve itself, if there are some.
        others: Option<Arc<Standing>>,
    },
    /// The owner is, by what this thread puts there.
    Owner {
        /// Shared with it.
        standing: Arc<Standing>,
        /// The place of this thread.
        part: usize,
    },
}

/// The rings of one device that this thread serves.
pub struct Device {
    entries: RefCell<Vec<Entry>>,
    front: Cell<Option<FrontId>>,
    /// Which ring is asked first: moves on, so that none starves where room is scarce.
    first: Cell<usize>,
    tasks: Tasks,
    log: Log,
    telling: Telling,
    /// A timer runs for rings in which something waits.
    ticks: Cell<bool>,
    /// A timer runs that wakes the owner if it does not know then.
    wakes: Cell<bool>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("rings", &self.entries.borrow().len()).finish_non_exhaustive()
    }
}

impl Device {
    /// Adds a device to the thread, under number `id`.
    pub fn attach(
        data_thread: &DataThread,
        id: u64,
        queues: Vec<(Rc<Queue>, Rc<Channel>)>,
        log: Log,
        telling: Telling,
    ) {
        let device = Rc::new(Self {
            entries: RefCell::default(),
            front: Cell::new(None),
            first: Cell::new(0),
            tasks: data_thread.port.tasks().clone(),
            log,
            telling,
            ticks: Cell::new(false),
            wakes: Cell::new(false),
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
        device.tell(Some(device.tasks.turn_ns()));
        DEVICES.with_borrow_mut(|devices| devices.insert(id, device));
    }

    /// Takes device `id` off the thread. Returns whether no request is left for the next process that serves its rings.
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

    /// Every ring with its place in the device, for people.
    pub fn reports(&self, oldest_max: usize) -> Vec<(usize, QueueReport)> {
        let now_ns = self.tasks.turn_ns();
        let report = |entry: &Entry| (entry.queue.index(), entry.queue.report(now_ns, oldest_max));
        self.entries.borrow().iter().map(report).collect()
    }

    /// Where the rings stand, all together; on the disk's owner with those of other threads.
    fn counters(&self) -> RingState {
        let others = match &self.telling {
            Telling::Here { others: Some(others), .. } => others.all(),
            _ => RingState::default(),
        };
        self.entries.borrow().iter().fold(others, |all, entry| standing::sum(all, entry.queue.counters()))
    }

    /// Calls `on_ring`, if there is one, with where the rings stand; or has the owner do it.
    pub fn tell(&self, now_ns: Option<u64>) {
        match &self.telling {
            Telling::Nowhere => {}
            Telling::Here { on_ring, .. } => on_ring(&self.counters(), now_ns),
            Telling::Owner { standing, part } => standing.put(*part, &self.counters()),
        }
    }

    /// Has the owner look soon at what it was told, if it does not by itself.
    fn wake_owner(self: &Rc<Self>) {
        if !matches!(self.telling, Telling::Owner { .. }) || self.wakes.replace(true) {
            return;
        }
        let (device, tasks) = (Rc::downgrade(self), self.tasks.clone());
        self.tasks.spawn(async move {
            tasks.sleep_until(tasks.turn_ns() + DELAY_NS).await;
            if let Some(device) = device.upgrade()
                && let Telling::Owner { standing, .. } = &device.telling
            {
                device.wakes.set(false);
                standing.wake();
            }
        });
    }

    /// Has it told now and then while something is in the rings and nothing comes of it.
    fn tick(self: &Rc<Self>) {
        if matches!(self.telling, Telling::Nowhere) || self.ticks.get() {
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
                device.wake_owner();
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

/// The hooks of the thread's loop.
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
        let news = match &self.0.telling {
            Telling::Here { others: Some(others), .. } => others.has_news(),
            _ => false,
        };
        if answered || news {
            self.0.tell(Some(self.0.tasks.turn_ns()));
        }
        if answered {
            self.0.wake_owner();
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
            // What the guest put into its rings and this thread cannot take is seen too.
            self.0.tell(Some(self.0.tasks.turn_ns()));
            self.0.tick();
        }
        waiting
    }

    fn disarm(&mut self) {
        // The guest notifies when its producer passes the event index, which does not move until the thread arms again.
    }
}
