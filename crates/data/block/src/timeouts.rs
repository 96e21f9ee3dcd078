//! How long a request may take, and what becomes of one that takes longer.
//!
//! | after | what happens |
//! |---|---|
//! | the time limit | the kernel is asked to cancel the request; if it can, the request fails with ETIMEDOUT |
//! | a second more | the kernel still has the request's memory. A client whose memory is the process' own ([`Completion::give_up`]) answers its guest with ETIMEDOUT and keeps the memory aside; one whose memory is the guest's waits, as for hardware that hangs |
//! | the kernel's answer | the memory is free again |
//!
//! A write that was answered so may still reach the storage. Until it has, whatever touches the same bytes waits
//! ([`RequestTimeouts::is_clear`]): otherwise it could overwrite what the guest wrote there afterwards.
//!
//! On the path of a request this costs a few stores in a table made at the start. One timer serves all requests; it
//! sleeps as long as the time limit and is not set while there are none.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use tapio_ring::{Notify, TaskId, Tasks};
use tapio_types::Span;

use crate::request::{Completion, Op, Request};

/// What tapdisk allows a request.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Between asking the kernel to cancel a request and reporting that it did not.
const GRACE_NS: u64 = 1_000_000_000;

/// How far a request that takes too long has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// The place is free, or its request waits for something that is not the kernel: space.
    Free,
    /// Within its time.
    Waiting,
    /// Its time is over, and the kernel was asked to cancel it.
    Cancelled,
    /// The kernel did not, and the guest waits.
    Stuck,
    /// The kernel did not, and the guest has its answer.
    Told,
}

struct Watched {
    stage: Stage,
    begun_ns: u64,
    op: Op,
    span: Span,
    tag: u64,
    task: TaskId,
    client: Option<Rc<dyn Completion>>,
}

/// A request's place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(u32);

impl Place {
    /// Of a request that is not watched.
    const NONE: Self = Self(u32::MAX);
}

/// A request whose time is over.
pub(crate) enum Late {
    /// The kernel is to cancel what this task waits for.
    Cancel(TaskId),
    /// It did not.
    Stuck {
        /// A sentence about it.
        what: String,
        /// What it may still change although it was answered.
        told: Option<Span>,
    },
}

/// The requests in flight and how long they have been.
pub(crate) struct RequestTimeouts {
    limit_ns: Option<u64>,
    places: RefCell<Vec<Watched>>,
    free: RefCell<Vec<u32>>,
    /// The timer is set, or about to be.
    is_awake: Cell<bool>,
    wake: Notify,
    /// Requests that the kernel did not cancel.
    stuck: Cell<usize>,
    /// Of these, changes that were answered: see [`RequestTimeouts::is_clear`].
    fences: Cell<usize>,
}

const fn changes(op: Op) -> bool {
    matches!(op, Op::Write { .. } | Op::Discard | Op::WriteZeroes { .. })
}

const fn name(op: Op) -> &'static str {
    match op {
        Op::Read => "a read",
        Op::Write { .. } => "a write",
        Op::Flush => "a flush",
        Op::Discard => "a discard",
        Op::WriteZeroes { .. } => "a write of zeroes",
    }
}

impl RequestTimeouts {
    /// For up to `count` requests; without a limit nothing is watched.
    pub(crate) fn new(limit: Option<Duration>, count: usize) -> Self {
        let limit_ns = limit.map(|limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
        let count = if limit.is_some() { count } else { 0 };
        let empty = |_| Watched {
            stage: Stage::Free,
            begun_ns: 0,
            op: Op::Flush,
            span: Span::default(),
            tag: 0,
            task: TaskId::NONE,
            client: None,
        };
        Self {
            limit_ns,
            places: RefCell::new((0..count).map(empty).collect()),
            free: RefCell::new((0..count as u32).rev().collect()),
            is_awake: Cell::new(false),
            wake: Notify::default(),
            stuck: Cell::new(0),
            fences: Cell::new(0),
        }
    }

    /// Whether there is a limit at all.
    pub(crate) const fn is_on(&self) -> bool {
        self.limit_ns.is_some()
    }

    /// Requests that the kernel did not cancel in time.
    pub(crate) fn stuck(&self) -> usize {
        self.stuck.get()
    }

    /// Which request has been in flight for the longest, and for how long, in words. Those that wait for space are not.
    pub(crate) fn longest(&self, now_ns: u64) -> Option<String> {
        let places = self.places.borrow();
        let longest = places.iter().filter(|watched| watched.stage != Stage::Free);
        let longest = longest.min_by_key(|watched| watched.begun_ns)?;
        let ms = now_ns.saturating_sub(longest.begun_ns) / 1_000_000;
        let span = longest.span;
        let place = match longest.op {
            Op::Flush => String::new(),
            _ => format!(" of {} bytes at {}", span.len, span.start),
        };
        Some(format!("the longest, {}{place}, has taken {ms} ms so far", name(longest.op)))
    }

    /// A request begins, as the current task.
    pub(crate) fn begin(&self, request: &Request, tasks: &Tasks) -> Place {
        self.watch(request.op, request.span, Some((&request.client, request.tag)), tasks)
    }

    /// A question of what is allocated begins, as the current task.
    pub(crate) fn begin_question(&self, span: Span, tasks: &Tasks) -> Place {
        self.watch(Op::Read, span, None, tasks)
    }

    fn watch(&self, op: Op, span: Span, client: Option<(&Rc<dyn Completion>, u64)>, tasks: &Tasks) -> Place {
        if self.limit_ns.is_none() {
            return Place::NONE;
        }
        let Some(index) = self.free.borrow_mut().pop() else { return Place::NONE };
        self.places.borrow_mut()[index as usize] = Watched {
            stage: Stage::Waiting,
            begun_ns: tasks.turn_ns(),
            op,
            span,
            tag: client.map_or(0, |(_, tag)| tag),
            task: tasks.current(),
            client: client.map(|(client, _)| Rc::clone(client)),
        };
        if !self.is_awake.replace(true) {
            self.wake.notify_all(tasks);
        }
        Place(index)
    }

    /// A request has ended; true if it is a change that was answered before.
    pub(crate) fn end(&self, place: Place) -> bool {
        let mut places = self.places.borrow_mut();
        let Some(watched) = places.get_mut(place.0 as usize) else { return false };
        if watched.stage >= Stage::Stuck {
            self.stuck.set(self.stuck.get() - 1);
        }
        let was_told = watched.stage == Stage::Told && changes(watched.op);
        if was_told {
            self.fences.set(self.fences.get() - 1);
        }
        watched.stage = Stage::Free;
        watched.client = None;
        self.free.borrow_mut().push(place.0);
        was_told
    }

    /// Whether there are changes that were answered and are still in flight.
    pub(crate) const fn has_fences(&self) -> bool {
        self.fences.get() > 0
    }

    /// A request waits for space, which takes as long as it takes.
    pub(crate) fn suspend(&self, place: Place) {
        if let Some(watched) = self.places.borrow_mut().get_mut(place.0 as usize) {
            watched.stage = Stage::Free;
        }
    }

    /// It goes on, and its time begins anew.
    pub(crate) fn resume(&self, place: Place, tasks: &Tasks) {
        if let Some(watched) = self.places.borrow_mut().get_mut(place.0 as usize) {
            (watched.stage, watched.begun_ns) = (Stage::Waiting, tasks.turn_ns());
            if !self.is_awake.replace(true) {
                self.wake.notify_all(tasks);
            }
        }
    }

    /// Whether the time of a request is over: what it failed with is then no news.
    pub(crate) fn is_over(&self, place: Place) -> bool {
        self.places.borrow().get(place.0 as usize).is_some_and(|watched| watched.stage > Stage::Waiting)
    }

    /// Whether a request that failed may be tried again in `after_ns`.
    pub(crate) fn has_time(&self, place: Place, now_ns: u64, after_ns: u64) -> bool {
        let begun_ns = self.places.borrow().get(place.0 as usize).map(|watched| watched.begun_ns);
        match (self.limit_ns, begun_ns) {
            (Some(limit_ns), Some(begun_ns)) => {
                now_ns.saturating_add(after_ns) < begun_ns.saturating_add(limit_ns)
            }
            _ => true,
        }
    }

    /// Whether no change that was answered and is still in flight touches `span`. One load where there is none.
    pub(crate) fn is_clear(&self, span: Span) -> bool {
        self.fences.get() == 0
            || !self.places.borrow().iter().any(|watched| {
                watched.stage == Stage::Told
                    && changes(watched.op)
                    && watched.span.start < span.start.saturating_add(span.len)
                    && span.start < watched.span.start.saturating_add(watched.span.len)
            })
    }

    /// Waits until something may be late.
    pub(crate) async fn next_look(&self, tasks: &Tasks) {
        loop {
            match self.due_ns() {
                Some(due_ns) => return tasks.sleep_until(due_ns).await,
                None => {
                    self.is_awake.set(false);
                    self.wake.wait(tasks).await;
                }
            }
        }
    }

    fn due_ns(&self) -> Option<u64> {
        let limit_ns = self.limit_ns?;
        let due = |watched: &Watched| match watched.stage {
            Stage::Waiting => Some(watched.begun_ns.saturating_add(limit_ns)),
            Stage::Cancelled => Some(watched.begun_ns.saturating_add(limit_ns).saturating_add(GRACE_NS)),
            Stage::Free | Stage::Stuck | Stage::Told => None,
        };
        self.places.borrow().iter().filter_map(due).min()
    }

    /// The next request whose time is over at `now_ns`, taken one step further.
    pub(crate) fn next_late(&self, now_ns: u64) -> Option<Late> {
        let limit_ns = self.limit_ns?;
        let mut places = self.places.borrow_mut();
        let late = |watched: &Watched| {
            let grace_ns = match watched.stage {
                Stage::Waiting => 0,
                Stage::Cancelled => GRACE_NS,
                Stage::Free | Stage::Stuck | Stage::Told => return false,
            };
            watched.begun_ns.saturating_add(limit_ns).saturating_add(grace_ns) <= now_ns
        };
        let index = places.iter().position(late)?;
        let watched = &mut places[index];
        if watched.stage == Stage::Waiting {
            watched.stage = Stage::Cancelled;
            return Some(Late::Cancel(watched.task));
        }
        watched.stage = Stage::Stuck;
        self.stuck.set(self.stuck.get() + 1);
        let (op, span, tag, client) = (watched.op, watched.span, watched.tag, watched.client.clone());
        let seconds = now_ns.saturating_sub(watched.begun_ns) / 1_000_000_000;
        // The client may look at the disk meanwhile.
        drop(places);
        let told = client.is_some_and(|client| client.give_up(tag));
        if told {
            self.places.borrow_mut()[index].stage = Stage::Told;
            if changes(op) {
                self.fences.set(self.fences.get() + 1);
            }
        }
        let guest = if told { "it was answered with ETIMEDOUT" } else { "the guest waits for it" };
        let what = format!(
            "{op:?} of {} bytes at {} has been in the storage for {seconds} s and cannot be cancelled: {guest}",
            span.len, span.start
        );
        Some(Late::Stuck { what, told: (told && changes(op)).then_some(span) })
    }
}
