//! Waiters and what they wait for: the ready list, the table of operations, timers and notifications.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::dropped::{Dropped, while_nothing_flies};

/// Names a task: its place in the slab of requests or among the services, and how often that place was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(u32);

const SERVICE_BIT: u32 = 1 << 31;

impl TaskId {
    /// No task: waking it does nothing.
    pub const NONE: Self = Self(u32::MAX);

    pub(crate) const fn request(index: u32) -> Self {
        Self(index)
    }

    pub(crate) const fn service(index: u32) -> Self {
        Self(index | SERVICE_BIT)
    }

    /// `Ok(index)` of a request, `Err(index)` of a service.
    pub(crate) const fn place(self) -> Result<u32, u32> {
        if self.0 & SERVICE_BIT == 0 { Ok(self.0) } else { Err(self.0 & !SERVICE_BIT) }
    }
}

/// An operation's place in the table with the number of its use, so that a late completion wakes no other task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpId(u64);

impl OpId {
    pub(crate) const fn from_u64(raw: u64) -> Self {
        Self(raw)
    }

    pub(crate) const fn to_u64(self) -> u64 {
        self.0
    }

    const fn index(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }
}

#[derive(Debug)]
struct OpSlot {
    generation: u32,
    task: TaskId,
    state: OpState,
    iovecs: Option<Box<[libc::iovec]>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpState {
    Free,
    Flying,
    Done(i32),
    /// Its future was dropped, which is a fault; the completion frees the slot.
    Orphan,
}

type ServiceFuture = Pin<Box<dyn Future<Output = ()>>>;

pub(crate) struct Inner {
    pub(crate) ready: RefCell<VecDeque<TaskId>>,
    pub(crate) current: Cell<TaskId>,
    ops: RefCell<Vec<OpSlot>>,
    ops_free: RefCell<Vec<u32>>,
    pub(crate) ops_flying: Cell<usize>,
    /// Of these, operations of the storage.
    pub(crate) ops_at_storage: Cell<u32>,
    timers: RefCell<BinaryHeap<Reverse<(u64, TaskId)>>>,
    pub(crate) now_ns: Cell<u64>,
    pub(crate) services: RefCell<Vec<Option<ServiceFuture>>>,
    services_free: RefCell<Vec<u32>>,
    pub(crate) services_alive: Cell<usize>,
    pub(crate) stop: Cell<bool>,
}

/// The tasks of one data thread. A cheap handle; every part of the thread holds one.
#[derive(Clone)]
pub struct Tasks {
    pub(crate) inner: Rc<Inner>,
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks")
            .field("ready", &self.inner.ready.borrow().len())
            .field("ops_flying", &self.inner.ops_flying.get())
            .finish_non_exhaustive()
    }
}

impl Tasks {
    /// An empty set with room for `ops` operations before it must grow.
    pub(crate) fn new(ops: usize) -> Self {
        let inner = Inner {
            ready: RefCell::new(VecDeque::with_capacity(ops)),
            current: Cell::new(TaskId::NONE),
            ops: RefCell::new(Vec::with_capacity(ops)),
            ops_free: RefCell::new(Vec::with_capacity(ops)),
            ops_flying: Cell::new(0),
            ops_at_storage: Cell::new(0),
            timers: RefCell::new(BinaryHeap::with_capacity(16)),
            now_ns: Cell::new(0),
            services: RefCell::new(Vec::with_capacity(8)),
            services_free: RefCell::new(Vec::with_capacity(8)),
            services_alive: Cell::new(0),
            stop: Cell::new(false),
        };
        Self { inner: Rc::new(inner) }
    }

    /// Whether both are handles of one thread's tasks.
    #[cfg(feature = "doubles")]
    pub(crate) fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.inner, &other.inner)
    }

    /// The task that runs now.
    pub fn current(&self) -> TaskId {
        self.inner.current.get()
    }

    /// Lets `task` run again. Waking one that is not waiting is harmless: it looks and waits again.
    pub fn wake(&self, task: TaskId) {
        if task != TaskId::NONE {
            self.inner.ready.borrow_mut().push_back(task);
        }
    }

    /// Starts a long-lived task: a connection, a job, a timer. Allocates; not for requests.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) -> TaskId {
        let mut services = self.inner.services.borrow_mut();
        let index = self.inner.services_free.borrow_mut().pop().unwrap_or_else(|| {
            services.push(None);
            services.len() as u32 - 1
        });
        services[index as usize] = Some(Box::pin(future));
        self.inner.services_alive.set(self.inner.services_alive.get() + 1);
        let id = TaskId::service(index);
        self.wake(id);
        id
    }

    /// Asks the executor to return once no task and no operation is left.
    pub fn stop(&self) {
        self.inner.stop.set(true);
    }

    /// Nanoseconds of a clock that never goes back, read once a turn: good for statistics and coarse time-outs.
    pub fn turn_ns(&self) -> u64 {
        self.inner.now_ns.get()
    }

    /// Waits until the clock of the thread has reached `when_ns`.
    pub fn sleep_until(&self, when_ns: u64) -> Sleep {
        Sleep { tasks: self.clone(), when_ns, armed: false }
    }

    /// Lets every other ready task run first.
    pub fn yield_now(&self) -> Yield {
        Yield { tasks: self.clone(), yielded: false }
    }

    pub(crate) fn finish_service(&self, index: u32) {
        self.inner.services_free.borrow_mut().push(index);
        self.inner.services_alive.set(self.inner.services_alive.get() - 1);
    }

    /// Drops every service where it stands, at the end of the thread. What the kernel still works on stays for good.
    pub(crate) fn drop_services(&self) {
        let services = std::mem::take(&mut *self.inner.services.borrow_mut());
        if self.inner.ops_flying.get() > 0 {
            std::mem::forget(services);
        } else {
            while_nothing_flies(|| drop(services));
        }
    }

    /// The earliest timer, in nanoseconds of the thread's clock.
    pub(crate) fn next_timer(&self) -> Option<u64> {
        self.inner.timers.borrow().peek().map(|Reverse((when, _))| *when)
    }

    /// Wakes every task whose time has come.
    pub(crate) fn fire_timers(&self, now_ns: u64) {
        loop {
            let task = {
                let mut timers = self.inner.timers.borrow_mut();
                match timers.peek() {
                    Some(Reverse((when, task))) if *when <= now_ns => {
                        let task = *task;
                        timers.pop();
                        task
                    }
                    _ => return,
                }
            };
            self.wake(task);
        }
    }

    /// Takes a place in the table for an operation of the current task.
    pub(crate) fn start_op(&self) -> OpId {
        let mut ops = self.inner.ops.borrow_mut();
        let index = self.inner.ops_free.borrow_mut().pop().unwrap_or_else(|| {
            ops.push(OpSlot { generation: 0, task: TaskId::NONE, state: OpState::Free, iovecs: None });
            ops.len() as u32 - 1
        });
        let slot = &mut ops[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.task = self.inner.current.get();
        slot.state = OpState::Flying;
        self.inner.ops_flying.set(self.inner.ops_flying.get() + 1);
        OpId(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// The operations that `task` waits for.
    pub(crate) fn ops_of(&self, task: TaskId) -> Vec<OpId> {
        let ops = self.inner.ops.borrow();
        let flying = ops.iter().enumerate().filter(|(_, op)| op.state == OpState::Flying && op.task == task);
        flying.map(|(index, op)| OpId(u64::from(op.generation) << 32 | index as u64)).collect()
    }

    /// The iovec table of an operation, made at its first use and kept.
    pub(crate) fn with_iovecs<R>(&self, op: OpId, fill: impl FnOnce(&mut [libc::iovec]) -> R) -> R {
        const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut ops = self.inner.ops.borrow_mut();
        let table = ops[op.index()].iovecs.get_or_insert_with(|| vec![EMPTY; IOVECS_MAX].into_boxed_slice());
        fill(table)
    }

    /// Notes the result of an operation and wakes its task.
    pub(crate) fn complete_op(&self, op: OpId, result: i32) {
        let mut ops = self.inner.ops.borrow_mut();
        let Some(slot) = ops.get_mut(op.index()) else { return };
        if u64::from(slot.generation) != op.0 >> 32 {
            return;
        }
        match slot.state {
            OpState::Flying => {
                slot.state = OpState::Done(result);
                self.inner.ready.borrow_mut().push_back(slot.task);
            }
            OpState::Orphan => {
                slot.state = OpState::Free;
                self.inner.ops_free.borrow_mut().push(op.index() as u32);
            }
            OpState::Free | OpState::Done(_) => return,
        }
        self.inner.ops_flying.set(self.inner.ops_flying.get() - 1);
    }

    fn take_result(&self, op: OpId) -> Option<i32> {
        let mut ops = self.inner.ops.borrow_mut();
        let slot = &mut ops[op.index()];
        match slot.state {
            OpState::Done(result) => {
                slot.state = OpState::Free;
                self.inner.ops_free.borrow_mut().push(op.index() as u32);
                Some(result)
            }
            _ => {
                slot.task = self.inner.current.get();
                None
            }
        }
    }

    /// The future of an operation was dropped. Whether the operation was in flight, which it is from then on without a
    /// waiter.
    fn orphan_op(&self, op: OpId) -> bool {
        let mut ops = self.inner.ops.borrow_mut();
        let slot = &mut ops[op.index()];
        if u64::from(slot.generation) != op.0 >> 32 {
            return false;
        }
        match slot.state {
            OpState::Flying => {
                slot.state = OpState::Orphan;
                return true;
            }
            OpState::Done(_) => {
                slot.state = OpState::Free;
                self.inner.ops_free.borrow_mut().push(op.index() as u32);
            }
            OpState::Free | OpState::Orphan => {}
        }
        false
    }

    /// Nothing that is in flight uses memory any more, or has an end: the process that began it was killed.
    #[cfg(feature = "doubles")]
    pub(crate) fn lose_ops(&self) {
        let mut ops = self.inner.ops.borrow_mut();
        for (index, slot) in ops.iter_mut().enumerate() {
            if matches!(slot.state, OpState::Flying | OpState::Orphan) {
                // A new number: neither a completion nor the future that waits for it means this place any more.
                (slot.generation, slot.state) = (slot.generation.wrapping_add(1), OpState::Free);
                self.inner.ops_free.borrow_mut().push(index as u32);
            }
        }
        self.inner.ops_flying.set(0);
    }
}

/// The most pieces handed to the kernel in one operation; longer lists go in several.
pub(crate) const IOVECS_MAX: usize = 256;

/// An operation in flight. Started when made; awaiting it gives the kernel's result (negative: an errno).
#[must_use = "an operation must be awaited: its memory is in use until then"]
pub(crate) struct Op {
    tasks: Tasks,
    id: OpId,
    finished: bool,
    is_at_storage: bool,
}

impl Op {
    pub(crate) fn new(tasks: &Tasks, id: OpId) -> Self {
        Self { tasks: tasks.clone(), id, finished: false, is_at_storage: false }
    }

    /// It is the storage's: a thread that sleeps meanwhile waits for I/O. Counted until this is dropped.
    pub(crate) fn at_storage(mut self) -> Self {
        self.is_at_storage = true;
        self.tasks.inner.ops_at_storage.set(self.tasks.inner.ops_at_storage.get() + 1);
        self
    }
}

impl Future for Op {
    type Output = i32;

    fn poll(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<i32> {
        match self.tasks.take_result(self.id) {
            Some(result) => {
                self.finished = true;
                Poll::Ready(result)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        if self.is_at_storage {
            self.tasks.inner.ops_at_storage.set(self.tasks.inner.ops_at_storage.get() - 1);
        }
        if !self.finished && self.tasks.orphan_op(self.id) {
            Dropped::Operation.note();
        }
    }
}

/// See [`Tasks::sleep_until`].
#[derive(Debug)]
pub struct Sleep {
    tasks: Tasks,
    when_ns: u64,
    armed: bool,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<()> {
        if self.tasks.inner.now_ns.get() >= self.when_ns {
            return Poll::Ready(());
        }
        if !self.armed {
            self.armed = true;
            let entry = Reverse((self.when_ns, self.tasks.current()));
            self.tasks.inner.timers.borrow_mut().push(entry);
        }
        Poll::Pending
    }
}

/// See [`Tasks::yield_now`].
#[derive(Debug)]
pub struct Yield {
    tasks: Tasks,
    yielded: bool,
}

impl Future for Yield {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<()> {
        if self.yielded {
            return Poll::Ready(());
        }
        self.yielded = true;
        self.tasks.wake(self.tasks.current());
        Poll::Pending
    }
}

/// A list of tasks that wait for the same thing. Keeps its memory, so waiting allocates only while it grows.
#[derive(Debug, Default)]
pub struct Notify {
    waiting: RefCell<Vec<TaskId>>,
    epoch: Cell<u64>,
}

impl Notify {
    /// Wakes all waiters.
    pub fn notify_all(&self, tasks: &Tasks) {
        self.epoch.set(self.epoch.get().wrapping_add(1));
        for task in self.waiting.borrow_mut().drain(..) {
            tasks.wake(task);
        }
    }

    /// Waits for the next [`Notify::notify_all`]. Callers test their condition before and after, in a loop.
    pub fn wait<'a>(&'a self, tasks: &'a Tasks) -> NotifyWait<'a> {
        NotifyWait { notify: self, tasks, epoch: self.epoch.get(), queued: false, until_ns: None }
    }

    /// [`Notify::wait`] that ends at `until_ns` of the thread's clock at the latest.
    pub fn wait_until<'a>(&'a self, tasks: &'a Tasks, until_ns: u64) -> NotifyWait<'a> {
        NotifyWait { notify: self, tasks, epoch: self.epoch.get(), queued: false, until_ns: Some(until_ns) }
    }
}

/// See [`Notify::wait`].
#[derive(Debug)]
pub struct NotifyWait<'a> {
    notify: &'a Notify,
    tasks: &'a Tasks,
    epoch: u64,
    queued: bool,
    until_ns: Option<u64>,
}

impl Future for NotifyWait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<()> {
        if self.notify.epoch.get() != self.epoch {
            return Poll::Ready(());
        }
        if let Some(until_ns) = self.until_ns {
            if self.tasks.inner.now_ns.get() >= until_ns {
                return Poll::Ready(());
            }
            if !self.queued {
                let entry = Reverse((until_ns, self.tasks.current()));
                self.tasks.inner.timers.borrow_mut().push(entry);
            }
        }
        if !self.queued {
            self.queued = true;
            self.notify.waiting.borrow_mut().push(self.tasks.current());
        }
        Poll::Pending
    }
}
