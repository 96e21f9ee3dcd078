//! A queue thread's part in a request.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tapio_ring::{Inbox, Io};
use tapio_types::{Access, SECTOR_LEN, Span};

use super::counts::{Counted, Counts, Uncounted};
use super::exchange::{Exchange, Handed, ToOwner, ToQueue};
use super::gate::Open;
use super::handed::AtOwner;
use super::view::{Shared, View};
use crate::chain::{Chain, LayerCounters};
use crate::front::FrontEnd;
use crate::meter::Meter;
use crate::port::{AllocationMap, Extent, Geometry, Port};
use crate::request::{DiskError, Op, Request};
use crate::stages::{Admission, Late, RequestTimeouts, pages_of};
use crate::taken::Taken;

/// The images as this thread has them.
struct LocalView<I: Io> {
    id: u64,
    chain: Chain<I::Store>,
    /// What the owner was told of the work of each.
    told: RefCell<Vec<LayerCounters>>,
    /// The owner sees by it that this thread still has the images: dropped after them.
    given: Arc<View<I::Share>>,
}

/// What a queue thread does as its disk's owner does it: see [`crate::CoreOptions`].
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// How long a request may take.
    pub request_timeout: Option<Duration>,
    /// Where sentences for the log go.
    pub report: fn(&str),
}

/// A disk on one of its queue threads.
pub struct QueueCore<I: Io> {
    io: I,
    inbox: Rc<Inbox<Taken>>,
    shared: Arc<Shared<I::Share>>,
    exchange: Arc<Exchange>,
    view: RefCell<Option<Rc<LocalView<I>>>>,
    requests: AtOwner<Result<(), DiskError>>,
    questions: AtOwner<Result<Vec<Extent>, DiskError>>,
    uncounted: Uncounted,
    timeouts: RequestTimeouts,
    report: fn(&str),
    /// Limits are the owner's: requests that they are for go there.
    admission: Rc<Admission>,
    port: RefCell<Option<Port>>,
    /// The owner waits until it has everything that this thread had.
    must_be_quiet: Cell<bool>,
}

impl<I: Io> fmt::Debug for QueueCore<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueCore").field("exchange", &self.exchange).finish_non_exhaustive()
    }
}

/// A request inside the gate. Leaves when it is dropped.
struct Inside<'a, I: Io> {
    core: &'a QueueCore<I>,
    view: Rc<LocalView<I>>,
    /// Pages of the pool that it holds.
    pages: u32,
    /// Bytes that it has at the device, and since when, where disks that share it are counted.
    counted: Option<(u64, u64)>,
}

impl<I: Io> Drop for Inside<'_, I> {
    fn drop(&mut self) {
        if self.pages > 0
            && let Some(seat) = &self.view.given.seat
            && seat.give(self.pages)
        {
            self.core.exchange.tell_owner(ToOwner::Pages);
        }
        if let (Some(share), Some((bytes, began_ns))) = (&self.view.given.share, self.counted) {
            let now = self.core.io.tasks().turn_ns();
            share.end(bytes, began_ns, now);
            // Looking at the other disks is the owner's.
            if share.take_due(now) {
                self.core.exchange.tell_owner(ToOwner::Share);
            }
        }
        if self.core.shared.gate.leave(self.core.exchange.index) {
            self.core.exchange.tell_owner(ToOwner::Look);
        }
    }
}

impl<I: Io> QueueCore<I> {
    /// The disk on the thread of `io`, which takes requests from `inbox`, not before the owner says so.
    pub fn new(
        io: I,
        inbox: Rc<Inbox<Taken>>,
        shared: Arc<Shared<I::Share>>,
        exchange: Arc<Exchange>,
        options: QueueOptions,
    ) -> Rc<Self> {
        inbox.set_open(false);
        let timeouts = RequestTimeouts::new(options.request_timeout, inbox.capacity());
        let admission = Admission::new(Rc::clone(&inbox), io.tasks().clone());
        let core = Rc::new(Self {
            io,
            inbox,
            shared,
            exchange,
            view: RefCell::default(),
            requests: AtOwner::default(),
            questions: AtOwner::default(),
            uncounted: Uncounted::default(),
            timeouts,
            report: options.report,
            admission,
            port: RefCell::default(),
            must_be_quiet: Cell::new(false),
        });
        core.io.tasks().spawn(Rc::clone(&core).keep_counting());
        if core.timeouts.begin_watch() {
            core.io.tasks().spawn(Rc::clone(&core).watch());
        }
        core
    }

    /// A port for front ends, to a disk that is `geometry`.
    pub fn port(self: &Rc<Self>, geometry: Geometry) -> Port {
        let tasks = self.io.tasks().clone();
        let map = Rc::new(Map(Rc::downgrade(self)));
        let (inbox, admission) = (Rc::clone(&self.inbox), Rc::clone(&self.admission));
        let port = Port::new(inbox, admission, tasks, geometry, map, Rc::default());
        *self.port.borrow_mut() = Some(port.clone());
        port
    }

    /// The end of the mailboxes at this thread.
    pub fn front(self: &Rc<Self>) -> Box<dyn FrontEnd> {
        Box::new(FromOwner { core: Rc::clone(self), letters: Vec::new() })
    }

    /// Serves one request to its end.
    pub async fn serve(self: Rc<Self>, taken: Taken) {
        let result = match self.serve_here(&taken).await {
            Some(result) => result,
            None => {
                let slot = self.hand_over(&taken);
                self.requests.answer(slot).await
            }
        };
        taken.request.answer(result);
        self.admission.leaves();
    }

    /// Serves a request if this thread may and can; `None` if not, and then nothing has happened that cannot happen
    /// again.
    async fn serve_here(&self, taken: &Taken) -> Option<Result<(), DiskError>> {
        let request = &taken.request;
        let inside = self.enter(request)?;
        let started = self.io.tasks().turn_ns();
        let meter = Meter::default();
        let place = self.timeouts.begin(request, self.io.tasks());
        let chain = &inside.view.chain;
        let moved = match request.op {
            Op::Read => chain.read(request.span, request.data(), &meter).await,
            _ => chain.write(request.span, request.data(), &meter).await,
        };
        let is_over = self.timeouts.is_over(place);
        if self.timeouts.end(place) {
            self.shared.untell(request.span);
            self.exchange.tell_owner(ToOwner::Look);
        }
        drop(inside);
        match moved {
            Ok(()) => {}
            // Its time is over. The client has its answer, or gets it now, as from the owner.
            Err(_) if is_over => return Some(Err(DiskError::Io(libc::ETIMEDOUT))),
            // A block that only the owner knows, or a failure, of which the owner finds out what it is.
            Err(_) => return None,
        }
        let ended_ns = self.io.now_ns();
        let stages = meter.stages(request.born_ns, started, ended_ns);
        let counted =
            Counted { origin: taken.origin, op: request.op, bytes: request.span.len, stages, ended_ns };
        if self.uncounted.add(counted, self.io.tasks()) {
            self.tell_counts();
        }
        Some(Ok(()))
    }

    /// Enters the gate, if the request is one for this thread.
    fn enter(&self, request: &Request) -> Option<Inside<'_, I>> {
        let open = match request.op {
            Op::Read => Open::Reads,
            Op::Write { durable: false } => Open::Everything,
            _ => return None,
        };
        let view = self.current_view()?;
        match self.shared.gate.enter(self.exchange.index, view.id, open) {
            Ok(()) => {}
            Err(wake) => {
                if wake {
                    self.exchange.tell_owner(ToOwner::Look);
                }
                return None;
            }
        }
        let mut inside = Inside { core: self, view, pages: 0, counted: None };
        let chain = &inside.view.chain;
        let is_right = request.span.is_aligned(SECTOR_LEN)
            && request.span.fits(chain.len())
            && request.data_len() == request.span.len
            && (request.op == Op::Read || chain.access() == Access::ReadWrite);
        // What is wrong is the owner's to say.
        if !is_right {
            return None;
        }
        if let Some(seat) = &inside.view.given.seat {
            // A request that has to wait does so at the owner.
            inside.pages = seat.take_free(pages_of(request.span.len))?;
        }
        if let Some(share) = inside.view.given.share.as_ref().filter(|share| share.is_shared()) {
            // What may have to wait does so at the owner.
            if share.competes() {
                return None;
            }
            let now = self.io.tasks().turn_ns();
            share.begin(request.span.len, now);
            inside.counted = Some((request.span.len, now));
        }
        Some(inside)
    }

    /// The images that the gate lets in; what this thread had before goes.
    fn current_view(&self) -> Option<Rc<LocalView<I>>> {
        let id = self.shared.gate.view();
        let mut mine = self.view.borrow_mut();
        if let Some(view) = mine.as_ref().filter(|view| view.id == id) {
            return Some(Rc::clone(view));
        }
        if id == 0 {
            return None;
        }
        let view = self.shared.view.lock().clone().filter(|view| view.id == id)?;
        let chain = view.chain(&self.io);
        let told = RefCell::new(vec![LayerCounters::default(); chain.links().len()]);
        let view = Rc::new(LocalView { id, chain, told, given: view });
        *mine = Some(Rc::clone(&view));
        Some(view)
    }

    fn hand_over(&self, taken: &Taken) -> u32 {
        let Taken { request, origin, client, .. } = taken;
        let receiver = (Rc::clone(request.client()), request.tag);
        let slot = self.requests.begin(self.io.tasks(), Some(receiver));
        self.exchange.tell_owner(ToOwner::Request(Handed {
            op: request.op,
            span: request.span,
            data: request.data().elsewhere(),
            born_ns: request.born_ns,
            slot,
            origin: *origin,
            client: *client,
            gives_up: request.client().gives_up(),
        }));
        self.look_whether_quiet();
        slot
    }

    /// Tells the owner, if it waits for that, that it has every request there is.
    fn look_whether_quiet(&self) {
        if self.must_be_quiet.get() && self.inbox.in_flight() <= self.requests.count() {
            self.must_be_quiet.set(false);
            self.exchange.tell_owner(ToOwner::Quiet);
        }
    }

    fn tell_counts(&self) {
        let requests = self.uncounted.take();
        let mut counts = Counts { requests, ..Counts::default() };
        if let Some(view) = &*self.view.borrow() {
            let now = view.chain.counters();
            counts.view = view.id;
            counts.layers = now.iter().zip(&*view.told.borrow()).map(|(now, told)| now.since(told)).collect();
            *view.told.borrow_mut() = now;
        }
        self.exchange.tell_owner(ToOwner::Counts(counts));
    }

    async fn keep_counting(self: Rc<Self>) {
        loop {
            self.uncounted.due(self.io.tasks()).await;
            self.tell_counts();
        }
    }

    /// The task that cancels and reports requests of this thread that take too long.
    async fn watch(self: Rc<Self>) {
        loop {
            self.timeouts.next_look(self.io.tasks()).await;
            while let Some(late) = self.timeouts.next_late(self.io.tasks().turn_ns()) {
                match late {
                    Late::Cancel(task) => self.io.cancel(task),
                    Late::Stuck { what, told } => {
                        // Before the answer goes out, which is another task's.
                        if let Some(span) = told {
                            self.shared.tell(span);
                        }
                        (self.report)(&what);
                    }
                }
            }
            self.exchange.stuck.store(self.timeouts.stuck(), Ordering::Relaxed);
        }
    }
}

/// Letters from the owner, on the queue thread.
struct FromOwner<I: Io> {
    core: Rc<QueueCore<I>>,
    letters: Vec<ToQueue>,
}

impl<I: Io> FromOwner<I> {
    fn read(&self, letter: ToQueue) {
        let core = &*self.core;
        let tasks = core.io.tasks();
        match letter {
            ToQueue::Done(slot, result) => core.requests.done(slot, result, tasks),
            ToQueue::Extents(slot, result) => core.questions.done(slot, result, tasks),
            ToQueue::GiveUp(slot) => {
                if let Some((client, tag)) = core.requests.client(slot) {
                    client.give_up(tag);
                }
            }
            ToQueue::Geometry(geometry) => {
                if let Some(port) = &*core.port.borrow() {
                    port.set_geometry(geometry);
                }
                core.exchange.known_len.store(geometry.len, Ordering::Release);
                core.exchange.tell_owner(ToOwner::Look);
            }
            ToQueue::SetOpen(open) => {
                core.inbox.set_open(open);
                core.must_be_quiet.set(!open);
                core.look_whether_quiet();
                core.admission.opened();
            }
            ToQueue::Forget => {
                core.tell_counts();
                core.view.take();
                core.exchange.tell_owner(ToOwner::Look);
            }
        }
    }
}

impl<I: Io> FrontEnd for FromOwner<I> {
    fn pull(&mut self) -> bool {
        let mut letters = std::mem::take(&mut self.letters);
        self.core.exchange.to_queue.take(&mut letters);
        let any = !letters.is_empty();
        letters.drain(..).for_each(|letter| self.read(letter));
        self.letters = letters;
        any
    }

    fn publish(&mut self) {
        self.core.look_whether_quiet();
    }

    fn peek(&self) -> bool {
        !self.core.exchange.to_queue.is_empty()
    }

    fn arm(&mut self) -> bool {
        !self.core.exchange.to_queue.arm()
    }

    fn disarm(&mut self) {
        self.core.exchange.to_queue.disarm();
    }
}

/// Asks the owner what is allocated. Not the one that keeps the disk, which has a port.
struct Map<I: Io>(Weak<QueueCore<I>>);

impl<I: Io> AllocationMap for Map<I> {
    fn hurry(&self) {
        if let Some(core) = self.0.upgrade().filter(|core| core.requests.count() > 0) {
            core.exchange.tell_owner(ToOwner::Hurry);
        }
    }

    fn extents(
        &self,
        span: Span,
        count_max: usize,
    ) -> Pin<Box<dyn Future<Output = Result<Vec<Extent>, DiskError>>>> {
        let core = self.0.upgrade();
        Box::pin(async move {
            let core = core.ok_or(DiskError::Io(libc::ESHUTDOWN))?;
            let slot = core.questions.begin(core.io.tasks(), None);
            core.exchange.tell_owner(ToOwner::Extents { slot, span, count_max });
            core.questions.answer(slot).await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::DiskIo;

    #[test]
    fn a_request_task_is_small() {
        let len = crate::task_len::of(|(core, request): (Rc<QueueCore<DiskIo>>, Taken)| core.serve(request));
        assert!(len <= 4096, "a request task takes {len} bytes; a queue thread has hundreds of them");
    }
}
