//! The admission of a disk's requests: where they wait for their turn while it is limited or shares its SR's page pool.
//!
//! ```text
//!   guest's ring ──room()──▶ front end ──submit()──▶ admission ──▶ Inbox ──▶ serve()
//!     waits here, but for                               │ one of each client waits here, in order and in turn
//!     what waits in it                                  ▼
//!                              token buckets (bucket.rs), pages of the pool (pages.rs)
//! ```
//!
//! With neither limits nor a pool it is off: that costs a load for each request. With either, a client (a
//! queue, a connection) may have one request waiting here, the next to go (eight where reads and writes have limits
//! of their own, so that one does not wait behind the other); all others stay in the ring or the socket. Clients take
//! turns by what their requests cost, as in start-time fair queueing: each has a tag that grows with the cost, the
//! lowest goes first, and a client that was idle starts from now.
//!
//! A flush passes at once: it costs nothing, and everything that it is about has been answered. A thread wakes for
//! it only when a request waits there: by one timer, set for the moment at which that request may pass.

mod bucket;
mod pages;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use tapio_ring::{Inbox, Io, Notify, Tasks};
use tapio_types::IoLimits;

use super::Stage;
use crate::request::{DiskError, Op, Request};
use crate::taken::Taken;
use bucket::{Buckets, Way};
pub(crate) use pages::pages_of;
pub use pages::{PageSeat, Pages, PoolFacts};

/// Requests of one client that may wait here.
const WAITING_MAX: usize = 1;
/// The same where reads and writes are limited apart.
const WAITING_SPLIT_MAX: usize = 8;

/// A client of the disk: a queue or a connection.
#[derive(Debug, Default)]
pub(crate) struct Client {
    waiting: Cell<usize>,
    /// When its next request may start, in cost.
    tag: Cell<u64>,
}

struct Waiting {
    taken: Taken,
    client: Rc<Client>,
    way: Way,
    tag: u64,
    since_ns: u64,
}

/// What waiting for limits and pages came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delays {
    /// Requests that had to wait.
    pub requests: u64,
    /// For how long, together, in nanoseconds.
    pub time_ns: u64,
    /// Requests that wait now.
    pub waiting: u64,
}

#[derive(Default)]
struct State {
    limits: IoLimits,
    buckets: Option<Buckets>,
    pages: Option<Box<dyn Pages>>,
    waiting: Vec<Waiting>,
    /// The tag of the last that went.
    time: u64,
    delays: Delays,
}

/// See the module's documentation.
pub struct Admission {
    on: Cell<bool>,
    inbox: Rc<Inbox<Taken>>,
    tasks: Tasks,
    /// Told when there is room again.
    freed: Notify,
    state: RefCell<State>,
    /// Told when the time to look again has changed.
    clock: Notify,
    /// When the service looks again; `u64::MAX`: not by itself.
    alarm_ns: Cell<u64>,
    serving: Cell<bool>,
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("on", &self.on.get()).finish_non_exhaustive()
    }
}

const fn way(op: Op) -> Option<Way> {
    match op {
        Op::Read => Some(Way::Read),
        Op::Write { .. } | Op::Discard | Op::WriteZeroes { .. } => Some(Way::Write),
        Op::Flush => None,
    }
}

/// Bytes that a request moves: discards and zeroing move none.
const fn moved(request: &Request) -> u64 {
    match request.op {
        Op::Read | Op::Write { .. } => request.span.len,
        Op::Flush | Op::Discard | Op::WriteZeroes { .. } => 0,
    }
}

impl Admission {
    pub(crate) fn new(inbox: Rc<Inbox<Taken>>, tasks: Tasks) -> Rc<Self> {
        Rc::new(Self {
            on: Cell::new(false),
            inbox,
            tasks,
            freed: Notify::default(),
            state: RefCell::default(),
            clock: Notify::default(),
            alarm_ns: Cell::new(u64::MAX),
            serving: Cell::new(false),
        })
    }

    /// Whether requests may have to wait: the one load that it costs where they need not.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.get()
    }

    /// The limits in force.
    pub fn limits(&self) -> IoLimits {
        self.state.borrow().limits
    }

    /// What limits and the pool have cost.
    pub fn delays(&self) -> Delays {
        let state = self.state.borrow();
        Delays { waiting: state.waiting.len() as u64, ..state.delays }
    }

    /// Limits the disk from now on, or not any more; requests wait for their turn, most of them where the guest put
    /// them.
    pub fn set_limits(self: &Rc<Self>, limits: &IoLimits) {
        {
            let mut state = self.state.borrow_mut();
            let now = self.tasks.turn_ns();
            if let Some(buckets) = &mut state.buckets {
                buckets.fill(now, false);
            }
            let mut buckets = (!limits.is_off()).then(|| Buckets::new(limits, now));
            if let (Some(new), Some(old)) = (&mut buckets, &state.buckets) {
                new.inherit(old);
            }
            (state.limits, state.buckets) = (*limits, buckets);
        }
        self.changed();
    }

    /// Shares a pool from now on, or, with `None`, not any more; gives what it shared. Pages of requests in
    /// flight go back to the pool that they came from. The poller of the pool's bell calls [`Self::bell_rang`].
    pub fn set_pages(self: &Rc<Self>, pages: Option<Box<dyn Pages>>) -> Option<Box<dyn Pages>> {
        let old = std::mem::replace(&mut self.state.borrow_mut().pages, pages);
        self.changed();
        old
    }

    /// Whether queue threads must leave every request to this thread.
    pub(crate) fn is_here_alone(&self) -> bool {
        let state = self.state.borrow();
        state.buckets.is_some() || state.pages.as_ref().is_some_and(|pages| pages.seat().is_none())
    }

    /// The pool, for queue threads.
    pub(crate) fn seat(&self) -> Option<Arc<dyn PageSeat>> {
        self.state.borrow().pages.as_ref()?.seat()
    }

    /// A queue thread has given pages back, and a disk waits: another one, or this.
    pub(crate) fn given_elsewhere(&self) {
        self.with_pages(|pages| pages.wake_next());
        self.look();
    }

    /// Calls `look` with the pool, if there is one.
    pub(crate) fn with_pages<T>(&self, look: impl FnOnce(&mut dyn Pages) -> T) -> Option<T> {
        self.state.borrow_mut().pages.as_mut().map(|pages| look(pages.as_mut()))
    }

    /// Looks whether there are pages now.
    pub fn bell_rang(&self) {
        self.with_pages(|pages| pages.quiet());
        self.look();
    }

    fn changed(self: &Rc<Self>) {
        let on = {
            let state = self.state.borrow();
            state.buckets.is_some() || state.pages.is_some() || !state.waiting.is_empty()
        };
        self.on.set(on);
        if on && !self.serving.replace(true) {
            let admission = Rc::clone(self);
            self.tasks.spawn(async move { admission.serve().await });
        }
        self.look();
        self.freed.notify_all(&self.tasks);
    }

    /// How many requests `client` may submit now, of the `room` that the disk has.
    pub(crate) fn room(&self, client: &Client, room: usize) -> usize {
        let state = self.state.borrow();
        let split = state.buckets.as_ref().is_some_and(Buckets::is_split);
        let most = if split { WAITING_SPLIT_MAX } else { WAITING_MAX };
        // A request that waits here has its place inside already.
        room.saturating_sub(state.waiting.len()).min(most.saturating_sub(client.waiting.get()))
    }

    /// The pool that the disk shares.
    pub fn pool(&self) -> Option<PoolFacts> {
        self.with_pages(|pages| pages.facts())
    }

    /// Takes a request: it goes in now or waits.
    pub(crate) fn submit(&self, client: &Rc<Client>, taken: Taken) -> Result<(), Request> {
        let Some(way) = way(taken.request.op) else {
            return self.inbox.push(taken).map_err(|taken| taken.request);
        };
        let now = self.tasks.turn_ns();
        {
            let mut state = self.state.borrow_mut();
            if self.inbox.room() <= state.waiting.len() {
                return Err(taken.request);
            }
            // Time before this request came was rest, unless others waited.
            let waited = !state.waiting.is_empty();
            if let Some(buckets) = &mut state.buckets {
                buckets.fill(now, waited);
            }
            let cost = state.cost(way, &taken.request);
            let tag = client.tag.get().max(state.time);
            client.tag.set(tag.saturating_add(cost));
            client.waiting.set(client.waiting.get() + 1);
            state.waiting.push(Waiting { taken, client: Rc::clone(client), way, tag, since_ns: now });
        }
        self.look();
        Ok(())
    }

    /// A request is about to leave the disk: tells clients that wait for room, which was none. Where there was some,
    /// there is no waiter.
    pub(crate) fn leaves(&self) {
        if self.inbox.is_open() && self.inbox.room() <= self.state.borrow().waiting.len() {
            self.freed.notify_all(&self.tasks);
        }
    }

    /// The disk takes requests again.
    pub(crate) fn opened(&self) {
        self.freed.notify_all(&self.tasks);
    }

    /// Told when there is room where there was none, for all of the disk or for one client.
    pub(crate) const fn freed(&self) -> &Notify {
        &self.freed
    }

    /// A request that held pages has ended, or one that came in this way: others may go.
    fn ended(&self, pages: u32) {
        if pages > 0 {
            self.with_pages(|pool| pool.give(pages));
        }
        if !self.state.borrow().waiting.is_empty() {
            self.look();
        }
    }

    /// Lets go what may go; sets the clock for the rest.
    pub(crate) fn look(&self) {
        let next = self.admit();
        if next < self.alarm_ns.get() {
            self.clock.notify_all(&self.tasks);
        }
    }

    fn admit(&self) -> u64 {
        if !self.inbox.is_open() {
            // The opening of the inbox looks again.
            return u64::MAX;
        }
        let mut state = self.state.borrow_mut();
        let now = self.tasks.turn_ns();
        let waited = !state.waiting.is_empty();
        if let Some(buckets) = &mut state.buckets {
            buckets.fill(now, waited);
        }
        let mut went = false;
        let next = loop {
            match state.first(now) {
                Ok((index, pages)) => {
                    let waiting = state.go(index, pages, now);
                    went = true;
                    waiting.client.waiting.set(waiting.client.waiting.get() - 1);
                    // There is room: each waiting request has its place.
                    if let Err(taken) = self.inbox.push(waiting.taken) {
                        taken.request.answer(Err(DiskError::Io(libc::EAGAIN)));
                    }
                }
                Err(when) => break when,
            }
        };
        if state.waiting.is_empty()
            && let Some(pages) = &mut state.pages
        {
            pages.stop_waiting();
        }
        drop(state);
        if went {
            self.freed.notify_all(&self.tasks);
        }
        next
    }

    /// Lets everything in that waits, whatever it costs, which stays to be paid: before a pause, and when no
    /// task is left to let it in.
    pub(crate) fn admit_all(&self) {
        let mut state = self.state.borrow_mut();
        let now = self.tasks.turn_ns();
        while !state.waiting.is_empty() {
            let waiting = state.go(0, 0, now);
            waiting.client.waiting.set(waiting.client.waiting.get() - 1);
            if let Err(taken) = self.inbox.push(waiting.taken) {
                taken.request.answer(Err(DiskError::Io(libc::EAGAIN)));
            }
        }
        if let Some(pages) = &mut state.pages {
            pages.stop_waiting();
        }
        drop(state);
        self.freed.notify_all(&self.tasks);
    }

    /// The service: sleeps until the first in turn may go, or for ever.
    async fn serve(self: Rc<Self>) {
        loop {
            let next = self.admit();
            self.alarm_ns.set(next);
            if next == u64::MAX {
                self.clock.wait(&self.tasks).await;
            } else {
                self.clock.wait_until(&self.tasks, next).await;
            }
        }
    }
}

/// The turn of a request was before it had a task: [`Admission::submit`].
impl Stage for Admission {
    /// Pages of the pool.
    type Pass = u32;

    fn enter<I: Io>(&self, taken: &Taken, _io: &I) -> u32 {
        taken.pages
    }

    fn leave<I: Io>(&self, pages: u32, _result: Result<(), DiskError>, _io: &I) -> bool {
        if self.is_on() {
            self.ended(pages);
        }
        self.leaves();
        false
    }
}

impl State {
    /// What a request costs in turns: time where there are limits, pages where there is a pool alone.
    fn cost(&self, way: Way, request: &Request) -> u64 {
        match &self.buckets {
            Some(buckets) => buckets.price_ns(way, moved(request)).max(1),
            None => pages::pages_of(moved(request)).max(1).into(),
        }
    }

    /// The request that goes next, with its pages; or when to look again.
    fn first(&mut self, now: u64) -> Result<(usize, u32), u64> {
        let mut when = u64::MAX;
        let waits = match &self.buckets {
            Some(buckets) => [buckets.wait_ns(Way::Read), buckets.wait_ns(Way::Write)],
            None => [0; 2],
        };
        let mut best: Option<(u64, usize)> = None;
        for (index, waiting) in self.waiting.iter().enumerate() {
            let wait = waits[usize::from(waiting.way == Way::Write)];
            if wait > 0 {
                when = when.min(now.saturating_add(wait));
            } else if best.is_none_or(|(tag, _)| waiting.tag < tag) {
                best = Some((waiting.tag, index));
            }
        }
        let Some((_, index)) = best else { return Err(when) };
        let wanted = pages::pages_of(moved(&self.waiting[index].taken.request));
        let Some(pool) = self.pages.as_mut().filter(|_| wanted > 0) else { return Ok((index, 0)) };
        match pool.take(wanted, now) {
            Some(pages) => Ok((index, pages)),
            // A disk that returns pages rings; the time is only for processes that die meanwhile.
            None => Err(when.min(now.saturating_add(pool.retry_ns()))),
        }
    }

    fn go(&mut self, index: usize, pages: u32, now: u64) -> Waiting {
        // Order does not matter in the list: tags say which goes first, and those of one client grow.
        let mut waiting = self.waiting.remove(index);
        waiting.taken.pages = pages;
        self.time = self.time.max(waiting.tag);
        if let Some(buckets) = &mut self.buckets {
            buckets.charge(waiting.way, moved(&waiting.taken.request));
        }
        let waited = now.saturating_sub(waiting.since_ns);
        if waited > 0 {
            self.delays.requests += 1;
            self.delays.time_ns = self.delays.time_ns.wrapping_add(waited);
        }
        waiting
    }
}
