//! Counting on the data thread: what the disk tells its observer goes into shared memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_block::{Observer, Op, Origin, Owner, StageTimes};
use tapio_stat::{DelayCounts, DiskStats, PollCounts, Stages, VBD_SLOTS};
use tapio_types::RingState;

/// Requests between two looks at what the ring and polling have cost.
const POLL_EVERY: u32 = 256;

/// The counters of the disk of this data thread.
pub struct Counter {
    stats: RefCell<DiskStats>,
    data_thread: Owner,
    depth: u32,
    /// Requests of each number under which the disk is published, and at the end of all: as its ring has them.
    rings: [Ring; VBD_SLOTS + 1],
    /// Numbers behind which there is a guest's ring, which says itself where it stands.
    real: [Cell<bool>; VBD_SLOTS],
}

/// Requests, counted freely modulo 2^32.
#[derive(Default)]
struct Ring {
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
    fn submitted(&self, _origin: Origin, _op: Op, _bytes: u64) {}
    fn completed(&self, _: Origin, _op: Op, _bytes: u64, _stages: StageTimes, _now_ns: u64, _ok: bool) {}
}

impl Counter {
    /// Begins to count. Called on the data thread.
    pub fn install(data_thread: &Owner, stats: DiskStats, depth: u32) -> Rc<dyn Observer> {
        let counter = Rc::new(Self {
            stats: RefCell::new(stats),
            data_thread: data_thread.clone(),
            depth,
            rings: Default::default(),
            real: Default::default(),
        });
        HERE.set(Some(Rc::clone(&counter)));
        counter
    }

    /// Ends counting. Called on the data thread; the drop of what it returns removes the files.
    pub fn remove() -> Rc<dyn Observer> {
        HERE.set(None);
        Rc::new(Deaf)
    }

    /// Looks at or changes the counters of this data thread's disk.
    pub fn with<T>(run: impl FnOnce(&mut DiskStats) -> T) -> Option<T> {
        HERE.with_borrow(|here| here.as_ref().map(|counter| run(&mut counter.stats.borrow_mut())))
    }

    /// Publishes the state of the guest's ring behind number `slot`: after a batch, at time `now_ns`; at once, with
    /// `None`, if a report was requested.
    pub fn ring_of(slot: usize, ring: &RingState, now_ns: Option<u64>) {
        HERE.with_borrow(|here| {
            let Some((counter, real)) = here.as_ref().and_then(|here| Some((here, here.real.get(slot)?)))
            else {
                return;
            };
            real.set(true);
            let mut stats = counter.stats.borrow_mut();
            match now_ns {
                Some(now_ns) => stats.ring(slot, ring, now_ns),
                None => stats.ring_at_once(slot, ring),
            }
        });
    }

    /// There is no guest's ring behind number `slot` any more.
    pub fn no_ring(slot: usize) {
        HERE.with_borrow(|here| {
            if let Some(real) = here.as_ref().and_then(|here| here.real.get(slot)) {
                real.set(false);
            }
        });
    }

    /// Copies what waiting has cost so far.
    pub fn refresh(data_thread: &Owner) {
        Self::with(|stats| {
            stats.set_poll(&poll_counts(data_thread));
            stats.set_limits(&data_thread.admission().limits());
            stats.set_delays(&delay_counts(data_thread));
        });
    }
}

fn poll_counts(data_thread: &Owner) -> PollCounts {
    let (ring, polling) = (data_thread.uring.counters(), data_thread.polling_counters());
    PollCounts {
        spin_ns: polling.spin_ns,
        hits: polling.hits,
        misses: polling.misses,
        wakeups: ring.sleeps,
        enters: ring.enters,
        out_of_requests: 0,
    }
}

fn delay_counts(data_thread: &Owner) -> DelayCounts {
    let delays = data_thread.admission().delays();
    DelayCounts { requests: delays.requests, time_ns: delays.time_ns, waiting: delays.waiting }
}

impl Counter {
    /// Requests between taken and answered as a ring has them, for a front end that has none.
    fn queue(&self, ring: &Ring) -> RingState {
        let (submitted, completed) = (ring.submitted.get(), ring.completed.get());
        RingState {
            size: self.depth,
            req_prod: submitted,
            req_cons: submitted,
            rsp_prod: completed,
            rsp_pvt: completed,
            ..RingState::default()
        }
    }

    /// Numbers behind which there is no guest's ring: of these, the one that a request came by, or all.
    fn without_ring(&self, slot: usize) -> impl Iterator<Item = usize> {
        (0..VBD_SLOTS).filter(move |at| slot == VBD_SLOTS || *at == slot).filter(|at| !self.real[*at].get())
    }

    /// The ring of a request: of the number it came by, or of all of them together.
    fn ring(&self, origin: Origin) -> (&Ring, usize) {
        let index = origin.index().filter(|index| *index < VBD_SLOTS).unwrap_or(VBD_SLOTS);
        (&self.rings[index], index)
    }
}

impl Observer for Counter {
    fn submitted(&self, origin: Origin, op: Op, bytes: u64) {
        let (ring, slot) = self.ring(origin);
        ring.submitted.set(ring.submitted.get().wrapping_add(1));
        let stats = self.stats.borrow();
        if slot < VBD_SLOTS {
            stats.submitted_by(slot, op.kind(), bytes);
        } else {
            stats.submitted(op.kind(), bytes);
        }
        let queue = self.queue(ring);
        let now_ns = self.data_thread.port.tasks().turn_ns();
        self.without_ring(slot).for_each(|slot| stats.ring_now(slot, &queue, now_ns));
    }

    fn completed(&self, origin: Origin, op: Op, bytes: u64, stages: StageTimes, now_ns: u64, ok: bool) {
        let (ring, slot) = self.ring(origin);
        let completed = ring.completed.get().wrapping_add(1);
        ring.completed.set(completed);
        let mut stats = self.stats.borrow_mut();
        let stages = Stages {
            queued_ns: stages.queued_ns,
            image_ns: stages.image_ns,
            kernel_ns: stages.kernel_ns,
            completing_ns: stages.completing_ns,
        };
        let queue = self.queue(ring);
        if slot < VBD_SLOTS {
            stats.completed_by(slot, op.kind(), bytes, &stages, ok);
        } else {
            stats.completed(op.kind(), bytes, &stages, ok);
        }
        self.without_ring(slot).for_each(|slot| stats.ring(slot, &queue, now_ns));
        if completed.is_multiple_of(POLL_EVERY) {
            stats.set_poll(&poll_counts(&self.data_thread));
        }
        if self.data_thread.admission().is_on() {
            stats.set_delays(&delay_counts(&self.data_thread));
        }
    }

    fn mirror_lost(&self, is_lost: bool) {
        self.stats.borrow().mirror_lost(is_lost);
    }
}
