//! Counting on the data thread: what the disk tells its observer goes into shared memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_block::{Observer, Op, StageTimes, World};
use tapio_stat::{DiskStats, Kind, PollCounts, RingState, Stages};

/// Requests between two looks at what the ring and polling have cost.
const POLL_EVERY: u32 = 256;

/// The counters of the disk of this data thread.
pub struct Counter {
    stats: RefCell<DiskStats>,
    world: World,
    depth: u32,
    submitted: Cell<u32>,
    completed: Cell<u32>,
}

thread_local! {
    /// So that jobs on the data thread find the counters of its disk.
    static HERE: RefCell<Option<Rc<Counter>>> = const { RefCell::new(None) };
}

/// Hears nothing: what is left when the counters were taken away.
struct Deaf;

impl Observer for Deaf {
    fn submitted(&self, _op: Op, _bytes: u64) {}
    fn completed(&self, _op: Op, _bytes: u64, _stages: StageTimes, _now_ns: u64, _ok: bool) {}
}

impl Counter {
    /// Begins to count. Called on the data thread.
    pub fn install(world: &World, stats: DiskStats, depth: u32) -> Rc<dyn Observer> {
        let counter = Rc::new(Self {
            stats: RefCell::new(stats),
            world: world.clone(),
            depth,
            submitted: Cell::new(0),
            completed: Cell::new(0),
        });
        HERE.set(Some(Rc::clone(&counter)));
        counter
    }

    /// Ends counting. Called on the data thread; whoever drops what comes back removes the files.
    pub fn remove() -> Rc<dyn Observer> {
        HERE.set(None);
        Rc::new(Deaf)
    }

    /// Looks at or changes the counters of this data thread's disk.
    pub fn with<T>(run: impl FnOnce(&mut DiskStats) -> T) -> Option<T> {
        HERE.with_borrow(|here| here.as_ref().map(|counter| run(&mut counter.stats.borrow_mut())))
    }

    /// Copies what waiting has cost so far.
    pub fn refresh(world: &World) {
        Self::with(|stats| stats.set_poll(&poll_counts(world)));
    }
}

fn poll_counts(world: &World) -> PollCounts {
    let (ring, polling) = (world.uring.counters(), world.polling_counters());
    PollCounts {
        spin_ns: polling.spin_ns,
        hits: polling.hits,
        misses: polling.misses,
        wakeups: ring.sleeps,
        enters: ring.enters,
        out_of_requests: 0,
    }
}

const fn kind(op: Op) -> Kind {
    match op {
        Op::Read => Kind::Read,
        Op::Write { .. } => Kind::Write,
        Op::Flush => Kind::Flush,
        Op::Discard => Kind::Discard,
        Op::WriteZeroes { .. } => Kind::WriteZeroes,
    }
}

impl Observer for Counter {
    fn submitted(&self, op: Op, bytes: u64) {
        self.submitted.set(self.submitted.get().wrapping_add(1));
        self.stats.borrow().submitted(kind(op), bytes);
    }

    fn completed(&self, op: Op, bytes: u64, stages: StageTimes, now_ns: u64, ok: bool) {
        let completed = self.completed.get().wrapping_add(1);
        self.completed.set(completed);
        let mut stats = self.stats.borrow_mut();
        let stages = Stages {
            queued_ns: stages.queued_ns,
            image_ns: stages.image_ns,
            kernel_ns: stages.kernel_ns,
            completing_ns: stages.completing_ns,
        };
        stats.completed(kind(op), bytes, &stages, ok);
        let submitted = self.submitted.get();
        let ring = RingState {
            nr_ents: self.depth,
            req_prod: submitted,
            req_cons: submitted,
            rsp_prod: completed,
            rsp_pvt: completed,
            ..RingState::default()
        };
        stats.rings(&ring, now_ns);
        if completed.is_multiple_of(POLL_EVERY) {
            stats.set_poll(&poll_counts(&self.world));
        }
    }
}
