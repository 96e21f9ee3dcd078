//! The loop of a data thread.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::VecDeque;
use std::future::Future;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::dropped::while_nothing_flies;
use crate::hooks::Hooks;
use crate::polling::Polling;
use crate::tasks::{TaskId, Tasks};

/// What moves operations and time: io_uring or the simulator.
pub trait Driver {
    /// The clock, in nanoseconds.
    fn now_ns(&self) -> u64;
    /// Hands over what was queued and collects completions; waits for at least one where `wait` says so, but not
    /// past the time `until_ns`. Returns whether anything completed.
    fn turn(&self, wait: bool, until_ns: Option<u64>) -> bool;
    /// Whether a completion can be collected; cheap enough to spin on.
    fn has_completions(&self) -> bool;
    /// Whether spinning makes sense: not in simulated time.
    fn can_spin(&self) -> bool;
    /// Cancels what is in flight and waits until the kernel holds nothing of ours.
    fn quiesce(&self);
}

/// Where front ends put requests for the executor to start. Bounded by the slab behind it.
#[derive(Debug)]
pub struct Inbox<R> {
    queue: RefCell<VecDeque<R>>,
    running: Cell<usize>,
    capacity: usize,
    open: Cell<bool>,
}

impl<R> Inbox<R> {
    /// An inbox for at most `capacity` requests in flight.
    pub fn new(capacity: usize) -> Rc<Self> {
        Rc::new(Self {
            queue: RefCell::new(VecDeque::with_capacity(capacity)),
            running: Cell::new(0),
            capacity,
            open: Cell::new(true),
        })
    }

    /// How many requests may be pushed now. Front ends leave the rest where the guest put it.
    pub fn room(&self) -> usize {
        if !self.open.get() {
            return 0;
        }
        self.capacity - self.running.get() - self.queue.borrow().len()
    }

    /// Takes a request; the caller has asked [`Inbox::room`]. Hands it back when there is none.
    pub fn push(&self, request: R) -> Result<(), R> {
        if self.room() == 0 {
            return Err(request);
        }
        self.queue.borrow_mut().push_back(request);
        Ok(())
    }

    /// Requests taken and not yet completed.
    pub fn in_flight(&self) -> usize {
        self.running.get() + self.queue.borrow().len()
    }

    /// The most there may be.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Closes or opens the gate: with the gate closed there is no room for requests, and those in flight end.
    pub fn set_open(&self, open: bool) {
        self.open.set(open);
    }

    /// Whether the gate is open.
    pub fn is_open(&self) -> bool {
        self.open.get()
    }
}

/// A place for a request's future: memory that is not touched before it is used, so that a deep queue that is never
/// filled costs
/// nothing.
type Slot<F> = UnsafeCell<MaybeUninit<F>>;

/// Runs the tasks of one data thread.
///
/// Requests have one concrete future type, made by `make` and stored in a slab of fixed size: starting one
/// allocates nothing.
pub struct Executor<R, F, M> {
    tasks: Tasks,
    inbox: Rc<Inbox<R>>,
    slots: Box<[MaybeUninit<Slot<F>>]>,
    /// Which slots hold a future.
    alive: Box<[bool]>,
    free: Vec<u32>,
    make: M,
    polling: Rc<RefCell<Polling>>,
    /// Grows with each step of a request, and with each batch that a hook pulled.
    requests: u64,
}

impl<R, F, M> std::fmt::Debug for Executor<R, F, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor")
            .field("tasks", &self.tasks)
            .field("slots", &self.slots.len())
            .finish_non_exhaustive()
    }
}

/// After this long without work a thread lets go of the memory that only work needs.
const REST_AFTER_NS: u64 = 1_000_000_000;
/// Rounds of running tasks before the kernel is asked again, however much is ready.
const ROUNDS_MAX: usize = 8;

impl<R, F, M> Executor<R, F, M>
where
    F: Future<Output = ()>,
    M: Fn(R) -> F,
{
    /// An executor whose requests come from `inbox` and become tasks by `make`.
    pub fn new(tasks: Tasks, inbox: Rc<Inbox<R>>, make: M, polling: Rc<RefCell<Polling>>) -> Self {
        let count = inbox.capacity();
        let slots = Box::new_uninit_slice(count);
        let alive = vec![false; count].into_boxed_slice();
        // The last index first out: the slots that were used last are used again, and stay in the cache.
        let free = (0..count as u32).rev().collect();
        Self { tasks, inbox, slots, alive, free, make, polling, requests: 0 }
    }

    /// Runs until [`Tasks::stop`] was called and every request has completed. Services are dropped at the end,
    /// when the kernel holds nothing of theirs.
    pub fn run(&mut self, driver: &impl Driver, hooks: &mut impl Hooks) {
        self.tasks.inner.now_ns.set(driver.now_ns());
        let mut worked = true;
        let mut rested = false;
        // From when a second without requests counts. Services do not move it: a timer that is due every half second
        // would keep the memory of a load for ever.
        let mut quiet_since = driver.now_ns();
        let mut requests = self.requests;
        // When the wait that is slept through began; only while polling is on.
        let mut since = None;
        loop {
            worked |= self.run_rounds(hooks);
            hooks.publish();
            if self.tasks.inner.stop.get() && self.inbox.in_flight() == 0 {
                break;
            }
            if !self.tasks.inner.ready.borrow().is_empty() {
                driver.turn(false, None);
                self.tick(driver);
                hooks.turned();
                continue;
            }
            if worked && driver.can_spin() && self.polling.borrow().wants() {
                driver.turn(false, None);
                // What was submitted just now may have completed at once: its tasks run before anything waits.
                let ready = || !self.tasks.inner.ready.borrow().is_empty();
                since = if ready() { None } else { self.spin(driver, hooks) };
                self.tick(driver);
                hooks.turned();
                if since.is_none() || ready() {
                    driver.turn(false, None);
                    continue;
                }
            }
            if hooks.arm() {
                worked = true;
                hooks.disarm();
                continue;
            }
            if worked {
                rested = false;
            }
            worked = false;
            if requests != self.requests {
                requests = self.requests;
                quiet_since = self.tasks.turn_ns();
            }
            let timer = self.tasks.next_timer();
            // An idle thread waits for ever; one that was busy a moment ago looks once more, to give memory back.
            let rest_at = (!rested && driver.can_spin()).then_some(quiet_since + REST_AFTER_NS);
            let until = match (timer, rest_at) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            let completed = driver.turn(true, until);
            self.tick(driver);
            hooks.turned();
            // Timers end a sleep too, but spinning does not look for them.
            if completed && let Some(since) = since.take() {
                self.polling.borrow_mut().waited(self.tasks.turn_ns().saturating_sub(since));
            }
            if !completed && rest_at.is_some_and(|at| driver.now_ns() >= at) {
                rested = true;
                quiet_since = driver.now_ns();
                hooks.rest();
            }
            hooks.disarm();
        }
        self.end(driver);
    }

    /// Ends every service where it stands, once the kernel holds nothing of theirs. Services hold what they work on,
    /// and that
    /// holds the tasks: without this a thread that ends early would keep its files open.
    pub fn end(&mut self, driver: &impl Driver) {
        driver.quiesce();
        self.tasks.drop_services();
    }

    /// Runs until `future` has a result: before the loop proper, and in tests.
    pub fn block_on<T: 'static>(
        &mut self,
        driver: &impl Driver,
        hooks: &mut impl Hooks,
        future: impl Future<Output = T> + 'static,
    ) -> T {
        let value = self.block_on_until(driver, hooks, future, &|| false);
        value.expect("nothing stops it before its end")
    }

    /// [`Executor::block_on`] that gives up, in the middle of everything, when `stop` says so: the simulator's power
    /// cut.
    pub fn block_on_until<T: 'static>(
        &mut self,
        driver: &impl Driver,
        hooks: &mut impl Hooks,
        future: impl Future<Output = T> + 'static,
        stop: &dyn Fn() -> bool,
    ) -> Option<T> {
        let result = Rc::new(RefCell::new(None));
        let slot = Rc::clone(&result);
        self.tasks.spawn(async move {
            *slot.borrow_mut() = Some(future.await);
        });
        self.tasks.inner.now_ns.set(driver.now_ns());
        loop {
            self.run_rounds(hooks);
            hooks.publish();
            if let Some(value) = result.borrow_mut().take() {
                return Some(value);
            }
            if stop() {
                return None;
            }
            let wait = self.tasks.inner.ready.borrow().is_empty() && !hooks.arm();
            driver.turn(wait, self.tasks.next_timer());
            self.tick(driver);
            hooks.disarm();
        }
    }

    /// Runs what can run now and waits for nothing: for a simulated thread beside the one that lets time pass. Says
    /// whether anything ran.
    #[cfg(feature = "doubles")]
    pub fn step(&mut self, driver: &impl Driver, hooks: &mut impl Hooks) -> bool {
        self.tick(driver);
        let worked = self.run_rounds(hooks);
        hooks.publish();
        worked
    }

    fn tick(&self, driver: &impl Driver) {
        let now = driver.now_ns();
        self.tasks.inner.now_ns.set(now);
        self.tasks.fire_timers(now);
    }

    fn run_rounds(&mut self, hooks: &mut impl Hooks) -> bool {
        let mut worked = false;
        for _ in 0..ROUNDS_MAX {
            let ran = self.run_ready();
            let pulled = hooks.turn();
            let started = self.start_requests();
            worked |= ran || pulled || started;
            if pulled {
                self.requests = self.requests.wrapping_add(1);
            }
            if !(ran || pulled || started) {
                break;
            }
        }
        worked
    }

    fn run_ready(&mut self) -> bool {
        let count = self.tasks.inner.ready.borrow().len();
        for _ in 0..count {
            let Some(task) = self.tasks.inner.ready.borrow_mut().pop_front() else { break };
            match task.place() {
                Ok(index) => self.poll_request(index),
                Err(index) => self.poll_service(index),
            }
        }
        count > 0
    }

    fn start_requests(&mut self) -> bool {
        let mut started = false;
        loop {
            let Some(index) = self.free.last().copied() else { return started };
            let Some(request) = self.inbox.queue.borrow_mut().pop_front() else { return started };
            self.free.pop();
            self.inbox.running.set(self.inbox.running.get() + 1);
            let future = (self.make)(request);
            // SAFETY: the slot is free, so nothing refers into it; this thread alone touches the slab, and writing a
            // future into uninitialised memory drops nothing.
            unsafe { (*self.place(index)).write(future) };
            self.alive[index as usize] = true;
            self.poll_request(index);
            started = true;
        }
    }

    fn poll_request(&mut self, index: u32) {
        if !self.alive.get(index as usize).is_some_and(|alive| *alive) {
            return;
        }
        self.requests = self.requests.wrapping_add(1);
        // SAFETY: the slot holds a future, written in `start_requests`. The slab is boxed and never moves one; it is
        // borrowed
        // here alone, because a running request can reach the inbox but not the slab.
        let future = unsafe { (*self.place(index)).assume_init_mut() };
        self.tasks.inner.current.set(TaskId::request(index));
        let mut context = Context::from_waker(Waker::noop());
        // SAFETY: as above, the future stays where it is until it is dropped in place.
        let poll = unsafe { Pin::new_unchecked(future) }.poll(&mut context);
        self.tasks.inner.current.set(TaskId::NONE);
        if poll == Poll::Ready(()) {
            self.drop_request(index);
            self.free.push(index);
            self.inbox.running.set(self.inbox.running.get() - 1);
        }
    }

    /// Where the future of a slot is.
    fn place(&self, index: u32) -> *mut MaybeUninit<F> {
        // An `UnsafeCell` of uninitialised memory is as good as uninitialised memory.
        UnsafeCell::raw_get(self.slots[index as usize].as_ptr())
    }

    fn drop_request(&mut self, index: u32) {
        self.alive[index as usize] = false;
        // SAFETY: the slot held a future and does not any more; nothing refers to it.
        unsafe { (*self.place(index)).assume_init_drop() };
    }

    fn poll_service(&self, index: u32) {
        let taken = self.tasks.inner.services.borrow_mut().get_mut(index as usize).and_then(Option::take);
        let Some(mut future) = taken else { return };
        self.tasks.inner.current.set(TaskId::service(index));
        let mut context = Context::from_waker(Waker::noop());
        let poll = future.as_mut().poll(&mut context);
        self.tasks.inner.current.set(TaskId::NONE);
        if poll == Poll::Ready(()) {
            self.tasks.finish_service(index);
        } else {
            self.tasks.inner.services.borrow_mut()[index as usize] = Some(future);
        }
    }

    /// Spins for as long as that is worth it. Returns `None` when there is work, or else when the wait for it began.
    fn spin(&self, driver: &impl Driver, hooks: &impl Hooks) -> Option<u64> {
        let found = || driver.has_completions() || hooks.peek();
        let mut polling = self.polling.borrow_mut();
        let begin = driver.now_ns();
        let mut window = polling.window_ns();
        if window == 0 {
            // Not worth it, or not allowed: one look, because that is cheaper than arming.
            return (!found()).then_some(begin);
        }
        // A timer is not kept waiting.
        if let Some(timer) = self.tasks.next_timer() {
            window = window.min(timer.saturating_sub(begin));
        }
        loop {
            let hit = (0..64).any(|_| {
                found() || {
                    std::hint::spin_loop();
                    false
                }
            });
            let spent = driver.now_ns() - begin;
            if hit || spent >= window {
                polling.spun(spent, hit);
                if hit {
                    polling.waited(spent);
                }
                return (!hit).then_some(begin);
            }
        }
    }
}

impl<R, F, M> Drop for Executor<R, F, M> {
    /// Requests are dropped only where the thread has come to its end, or its process was killed: [`Executor::run`]
    /// waits for them.
    fn drop(&mut self) {
        let queued = std::mem::take(&mut *self.inbox.queue.borrow_mut());
        if self.tasks.inner.ops_flying.get() > 0 {
            // What the kernel has may be theirs.
            std::mem::forget((std::mem::take(&mut self.slots), queued));
            return;
        }
        let (alive, slots) = (&mut self.alive, &mut self.slots);
        while_nothing_flies(|| {
            drop(queued);
            for (alive, slot) in alive.iter_mut().zip(slots).filter(|(alive, _)| **alive) {
                *alive = false;
                let place = slot.as_mut_ptr().cast::<F>();
                // SAFETY: the slot holds a future, and the slab is going.
                unsafe { place.drop_in_place() };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::polling::{PollingConfig, PollingCounters};

    /// A guest that sends its next request so long after the answer to the one before, on a clock that goes on only
    /// when it is looked at and while the thread sleeps.
    struct Guest {
        tasks: Tasks,
        waits_ns: RefCell<VecDeque<u64>>,
        now_ns: Cell<u64>,
        due_ns: Cell<u64>,
        sleeps: Cell<u64>,
        reads: Cell<u64>,
        rests: Cell<u64>,
    }

    /// What a look costs, and what being woken does.
    const LOOK_NS: u64 = 50;
    const WAKE_UP_NS: u64 = 5_000;

    impl Driver for &Guest {
        fn now_ns(&self) -> u64 {
            self.reads.set(self.reads.get() + 1);
            self.now_ns.get()
        }
        fn turn(&self, wait: bool, until_ns: Option<u64>) -> bool {
            if !wait {
                return false;
            }
            self.sleeps.set(self.sleeps.get() + 1);
            let until = until_ns.unwrap_or(u64::MAX);
            let end = self.due_ns.get().max(self.now_ns.get()) + WAKE_UP_NS;
            self.now_ns.set(end.min(until));
            end <= until
        }
        fn has_completions(&self) -> bool {
            false
        }
        fn can_spin(&self) -> bool {
            true
        }
        fn quiesce(&self) {}
    }

    impl Hooks for &Guest {
        fn turn(&mut self) -> bool {
            if self.now_ns.get() < self.due_ns.get() {
                return false;
            }
            match self.waits_ns.borrow_mut().pop_front() {
                Some(wait) => self.due_ns.set(self.now_ns.get() + wait),
                None => self.tasks.stop(),
            }
            true
        }
        fn peek(&self) -> bool {
            self.now_ns.set(self.now_ns.get() + LOOK_NS);
            self.now_ns.get() >= self.due_ns.get()
        }
        fn rest(&mut self) {
            self.rests.set(self.rests.get() + 1);
        }
    }

    /// Runs until the guest has sent everything; gives sleeps, readings of the clock and what polling has counted.
    fn serve(max_ns: u64, waits_us: &[u64]) -> (u64, u64, PollingCounters) {
        let (guest, counters) = serve_beside(max_ns, waits_us, None);
        (guest.sleeps.get(), guest.reads.get(), counters)
    }

    /// [`serve`] beside a service that wakes up so often.
    fn serve_beside(max_ns: u64, waits_us: &[u64], every_ns: Option<u64>) -> (Guest, PollingCounters) {
        let tasks = Tasks::new(8);
        if let Some(every_ns) = every_ns {
            let tasks_there = tasks.clone();
            tasks.spawn(async move {
                loop {
                    tasks_there.sleep_until(tasks_there.turn_ns() + every_ns).await;
                }
            });
        }
        let polling = Rc::new(RefCell::new(Polling::new(PollingConfig { max_ns, idle_min_percent: 0 })));
        let guest = Guest {
            tasks: tasks.clone(),
            waits_ns: RefCell::new(waits_us.iter().map(|wait_us| wait_us * 1_000).collect()),
            now_ns: Cell::new(0),
            due_ns: Cell::new(0),
            sleeps: Cell::new(0),
            reads: Cell::new(0),
            rests: Cell::new(0),
        };
        let inbox = Inbox::<()>::new(1);
        let mut executor = Executor::new(tasks, inbox, |()| std::future::ready(()), Rc::clone(&polling));
        executor.run(&&guest, &mut &guest);
        let counters = polling.borrow().counters();
        (guest, counters)
    }

    #[test]
    fn services_do_not_keep_the_memory_of_requests() {
        let (idle, _) = serve_beside(0, &[1_000, 5_000_000], None);
        assert_eq!(idle.rests.get(), 1);
        // A timer that is always nearer than a second does not put the rest off.
        let (beside, _) = serve_beside(0, &[1_000, 4_500_000], Some(400_000_000));
        assert_eq!(beside.rests.get(), 4, "each second, as long as it works");
        // Requests do.
        let (busy, _) = serve_beside(0, &[600_000; 10], Some(400_000_000));
        assert_eq!(busy.rests.get(), 0);
    }

    #[test]
    fn how_long_it_slept_decides_whether_a_thread_spins() {
        let (sleeps, _, counters) = serve(32_000, &[20; 100]);
        assert_eq!((sleeps, counters.hits, counters.misses), (0, 100, 0));
        let (sleeps, _, counters) = serve(32_000, &[1_000; 100]);
        assert_eq!((sleeps, counters.hits, counters.misses), (100, 0, 4));
        let fast_again: Vec<u64> = [[1_000; 10], [20; 10]].concat();
        let (sleeps, _, counters) = serve(32_000, &fast_again);
        assert_eq!((sleeps, counters.hits, counters.misses), (11, 9, 4));
        // The thread wakes up to give memory back meanwhile, and the wait goes on.
        let (sleeps, _, counters) = serve(32_000, &[2_000_000, 2_000_000, 2_000_000, 2_000_000, 1_000]);
        assert_eq!((sleeps, counters.misses), (9, 4));
    }

    #[test]
    fn without_polling_the_clock_is_read_no_more_often_for_it() {
        let (sleeps, reads, counters) = serve(0, &[20; 100]);
        assert_eq!((sleeps, counters), (100, PollingCounters::default()));
        // At the start; for each sleep, until when it lasts, its end, and whether the thread is idle.
        assert!(reads <= 1 + 3 * sleeps, "{reads}");
    }
}
