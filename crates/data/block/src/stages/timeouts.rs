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

use tapio_ring::{Io, Notify, TaskId, Tasks};
use tapio_types::Span;

use super::Stage;
use crate::request::{Completion, DiskError, Op, Request};
use crate::taken::Taken;

/// What tapdisk allows a request.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Between asking the kernel to cancel a request and reporting that it did not.
const GRACE_NS: u64 = 1_000_000_000;

/// How far a request that takes too long has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
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

/// A request in flight, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// What it does.
    pub op: Op,
    /// Where.
    pub span: Span,
    /// How long it has been in the storage.
    pub age_ns: u64,
}

struct Watched {
    progress: Progress,
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
    /// There is a task that looks for late requests.
    is_watched: Cell<bool>,
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
            progress: Progress::Free,
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
            is_watched: Cell::new(false),
            wake: Notify::default(),
            stuck: Cell::new(0),
            fences: Cell::new(0),
        }
    }

    /// Whether there is a limit at all.
    const fn is_on(&self) -> bool {
        self.limit_ns.is_some()
    }

    /// Whether a task is to be started that looks for late requests: once, if there is a limit.
    pub(crate) fn begin_watch(&self) -> bool {
        self.is_on() && !self.is_watched.replace(true)
    }

    /// Requests that the kernel did not cancel in time.
    pub(crate) fn stuck(&self) -> usize {
        self.stuck.get()
    }

    /// Which request has been in flight for the longest, and for how long, in words. Those that wait for space are not.
    pub(crate) fn longest(&self, now_ns: u64) -> Option<String> {
        let places = self.places.borrow();
        let longest = places.iter().filter(|watched| watched.progress != Progress::Free);
        let longest = longest.min_by_key(|watched| watched.begun_ns)?;
        let ms = now_ns.saturating_sub(longest.begun_ns) / 1_000_000;
        let span = longest.span;
        let place = match longest.op {
            Op::Flush => String::new(),
            _ => format!(" of {} bytes at {}", span.len, span.start),
        };
        Some(format!("the longest, {}{place}, has taken {ms} ms so far", name(longest.op)))
    }

    /// The requests in flight that began first, at most so many. Those that wait for space are not.
    pub(crate) fn oldest(&self, now_ns: u64, count: usize) -> Vec<InFlight> {
        let places = self.places.borrow();
        let mut watched: Vec<&Watched> =
            places.iter().filter(|watched| watched.progress != Progress::Free).collect();
        watched.sort_unstable_by_key(|watched| watched.begun_ns);
        let report = |watched: &&Watched| InFlight {
            op: watched.op,
            span: watched.span,
            age_ns: now_ns.saturating_sub(watched.begun_ns),
        };
        watched.iter().take(count).map(report).collect()
    }

    /// A request begins, as the current task.
    pub(crate) fn begin(&self, request: &Request, tasks: &Tasks) -> Place {
        self.watch(request.op, request.span, Some((request.client(), request.tag)), tasks)
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
            progress: Progress::Waiting,
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
        if watched.progress >= Progress::Stuck {
            self.stuck.set(self.stuck.get() - 1);
        }
        let was_told = watched.progress == Progress::Told && changes(watched.op);
        if was_told {
            self.fences.set(self.fences.get() - 1);
        }
        watched.progress = Progress::Free;
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
            watched.progress = Progress::Free;
        }
    }

    /// It goes on, and its time begins anew.
    pub(crate) fn resume(&self, place: Place, tasks: &Tasks) {
        if let Some(watched) = self.places.borrow_mut().get_mut(place.0 as usize) {
            (watched.progress, watched.begun_ns) = (Progress::Waiting, tasks.turn_ns());
            if !self.is_awake.replace(true) {
                self.wake.notify_all(tasks);
            }
        }
    }

    /// Whether the time of a request is over: what it failed with is then no news.
    pub(crate) fn is_over(&self, place: Place) -> bool {
        self.places.borrow().get(place.0 as usize).is_some_and(|watched| watched.progress > Progress::Waiting)
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
                watched.progress == Progress::Told && changes(watched.op) && watched.span.overlaps(span)
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
        let due = |watched: &Watched| match watched.progress {
            Progress::Waiting => Some(watched.begun_ns.saturating_add(limit_ns)),
            Progress::Cancelled => Some(watched.begun_ns.saturating_add(limit_ns).saturating_add(GRACE_NS)),
            Progress::Free | Progress::Stuck | Progress::Told => None,
        };
        self.places.borrow().iter().filter_map(due).min()
    }

    /// The next request whose time is over at `now_ns`, taken one step further.
    pub(crate) fn next_late(&self, now_ns: u64) -> Option<Late> {
        let limit_ns = self.limit_ns?;
        let mut places = self.places.borrow_mut();
        let late = |watched: &Watched| {
            let grace_ns = match watched.progress {
                Progress::Waiting => 0,
                Progress::Cancelled => GRACE_NS,
                Progress::Free | Progress::Stuck | Progress::Told => return false,
            };
            watched.begun_ns.saturating_add(limit_ns).saturating_add(grace_ns) <= now_ns
        };
        let index = places.iter().position(late)?;
        let watched = &mut places[index];
        if watched.progress == Progress::Waiting {
            watched.progress = Progress::Cancelled;
            return Some(Late::Cancel(watched.task));
        }
        watched.progress = Progress::Stuck;
        self.stuck.set(self.stuck.get() + 1);
        let (op, span, tag, client) = (watched.op, watched.span, watched.tag, watched.client.clone());
        let seconds = now_ns.saturating_sub(watched.begun_ns) / 1_000_000_000;
        // The client may look at the disk meanwhile.
        drop(places);
        let told = client.is_some_and(|client| client.give_up(tag));
        if told {
            self.places.borrow_mut()[index].progress = Progress::Told;
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

impl Stage for RequestTimeouts {
    type Pass = Place;

    fn enter<I: Io>(&self, taken: &Taken, io: &I) -> Place {
        self.begin(&taken.request, io.tasks())
    }

    fn holds(&self, taken: &Taken) -> bool {
        !self.is_clear(taken.request.span)
    }

    fn leave<I: Io>(&self, place: Place, _result: Result<(), DiskError>, _io: &I) -> bool {
        self.end(place)
    }
}

#[cfg(test)]
mod tests {
    use tapio_ring::sim::{Sim, SimHost};

    use super::super::asked::{Client, answer, asked, run};
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);
    const S: u64 = 1_000_000_000;
    const WRITE: Op = Op::Write { durable: false };

    fn simulated() -> (Sim, RequestTimeouts, Rc<Client>) {
        let client = Rc::new(Client { gives_up: true, ..Client::default() });
        (SimHost::new(1).process(), RequestTimeouts::new(Some(LIMIT), 2), client)
    }

    /// Takes what is late at `now_ns` one step further: how many are to be cancelled, and the sentences about others.
    fn look(timeouts: &RequestTimeouts, now_ns: u64) -> (usize, Vec<String>) {
        let (mut cancelled, mut told) = (0, Vec::new());
        while let Some(late) = timeouts.next_late(now_ns) {
            match late {
                Late::Cancel(_) => cancelled += 1,
                Late::Stuck { what, .. } => told.push(what),
            }
        }
        (cancelled, told)
    }

    #[test]
    fn an_answered_change_holds_back_what_touches_its_bytes_until_it_has_ended() {
        let (sim, timeouts, client) = simulated();
        let late = asked(&client, WRITE, 8192, 4096);
        let place = timeouts.enter(&late, &sim);
        let begun = sim.tasks().turn_ns();
        assert_eq!(look(&timeouts, begun + 10 * S - 1), (0, vec![]));
        assert!(!timeouts.is_over(place));
        assert_eq!(look(&timeouts, begun + 10 * S), (1, vec![]));
        assert!(timeouts.is_over(place) && timeouts.stuck() == 0);
        // Nothing waits for it as long as it has no answer.
        let (same, beside) = (asked(&client, Op::Read, 12_287, 1), asked(&client, WRITE, 12_288, 512));
        assert!(!timeouts.holds(&same) && !timeouts.has_fences());
        let (cancelled, told) = look(&timeouts, begun + 11 * S);
        assert_eq!((cancelled, told.len(), client.given_up.borrow().as_slice()), (0, 1, [8192].as_slice()));
        assert!(told[0].contains("11 s") && told[0].contains("answered with ETIMEDOUT"), "{}", told[0]);
        assert!(timeouts.holds(&same) && !timeouts.holds(&beside));
        assert_eq!((timeouts.stuck(), timeouts.has_fences()), (1, true));
        // Its end may have been waited for.
        assert!(timeouts.leave(place, Ok(()), &sim));
        assert!(!timeouts.holds(&same) && !timeouts.has_fences() && timeouts.stuck() == 0);
        [late, same, beside].into_iter().for_each(answer);
    }

    #[test]
    fn a_read_that_was_answered_and_a_write_that_was_not_hold_nothing_back() {
        let (sim, timeouts, client) = simulated();
        let patient = Rc::<Client>::default();
        let (read, write) = (asked(&client, Op::Read, 0, 4096), asked(&patient, WRITE, 4096, 4096));
        let places = [&read, &write].map(|taken| timeouts.enter(taken, &sim));
        // The table is full: what comes next is not watched.
        let third = asked(&client, WRITE, 0, 512);
        let unwatched = timeouts.enter(&third, &sim);
        assert!(unwatched == Place::NONE);
        let begun = sim.tasks().turn_ns();
        assert_eq!(look(&timeouts, begun + 10 * S).0, 2);
        let (_, told) = look(&timeouts, begun + 11 * S);
        assert_eq!((told.len(), timeouts.stuck(), timeouts.has_fences()), (2, 2, false));
        assert!(told[1].contains("the guest waits for it"), "{}", told[1]);
        assert!(!timeouts.holds(&third) && !timeouts.is_over(unwatched));
        for place in places {
            assert!(!timeouts.leave(place, Ok(()), &sim));
        }
        assert!(!timeouts.leave(unwatched, Ok(()), &sim));
        assert_eq!(timeouts.stuck(), 0);
        [read, write, third].into_iter().for_each(answer);
    }

    #[test]
    fn time_aside_does_not_count_and_begins_anew() {
        let (sim, timeouts, client) = simulated();
        let taken = asked(&client, WRITE, 0, 512);
        let place = timeouts.enter(&taken, &sim);
        timeouts.suspend(place);
        let begun = sim.tasks().turn_ns();
        assert_eq!(look(&timeouts, begun + 100 * S), (0, vec![]));
        let tasks = sim.tasks().clone();
        run(&sim, async move { tasks.sleep_until(begun + 100 * S).await });
        timeouts.resume(place, sim.tasks());
        assert!(timeouts.has_time(place, begun + 100 * S, 10 * S - 1));
        assert!(!timeouts.has_time(place, begun + 100 * S, 10 * S));
        assert_eq!(look(&timeouts, begun + 110 * S - 1), (0, vec![]));
        assert_eq!(look(&timeouts, begun + 110 * S), (1, vec![]));
        assert!(!timeouts.leave(place, Ok(()), &sim));
        answer(taken);
    }

    #[test]
    fn without_a_limit_nothing_is_watched() {
        let (sim, client) = (SimHost::new(1).process(), Rc::default());
        let timeouts = RequestTimeouts::new(None, 2);
        let taken = asked(&client, WRITE, 0, 512);
        let place = timeouts.enter(&taken, &sim);
        assert!(place == Place::NONE && !timeouts.begin_watch() && !timeouts.holds(&taken));
        assert_eq!(look(&timeouts, u64::MAX), (0, vec![]));
        assert!(timeouts.has_time(place, 0, u64::MAX) && timeouts.longest(0).is_none());
        answer(taken);
    }
}
