//! A plugged disk on its data thread: requests, and the states between plug and unplug.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

use tapio_format::continuation::Move;
use tapio_format::live::vhd::{BITMAPS_KEPT, IntentPlace, SpaceMode};
use tapio_format::vhd::Keys;
use tapio_format::vhd::offline::ParentFacts;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Inbox, Io, Notify, Storage, Zeroing};
use tapio_stat::trace::Clock;
use tapio_types::{Access, ChainSpec, SECTOR_LEN, Span};

use crate::admission::{Admission, Origin, Taken};
use crate::chain::{Chain, LayerCounters};
use crate::job::Jobs;
use crate::meter::{Meter, StageTimes};
use crate::mirror::Mirror;
use crate::notes::Notes;
use crate::port::{AllocationMap, Geometry, Port};
use crate::request::{DiskError, Op, Request};
use crate::sectors::{count_for, in_units, settle};
use crate::shared::SharingSlot;
use crate::standby::{self, Redirected};
use crate::tap::{Tap, TapOptions};
use crate::timeouts::{Late, Place, REQUEST_TIMEOUT, RequestTimeouts};
use crate::trace::Trace;

/// How long a request that found the storage full waits before it tries again.
const NO_SPACE_RETRY_NS: u64 = 1_000_000_000;
/// How long a request that found the storage busy waits before it tries again, as in tapdisk ...
const BUSY_RETRY_NS: u64 = 1_000_000_000;
/// ... and how often, where no time limit ends it.
const BUSY_RETRIES_MAX: u32 = 100;

/// What a guest sees when the storage is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum NoSpace {
    /// The request fails with ENOSPC.
    #[default]
    Fail,
    /// The request waits until there is space.
    Wait,
}

/// How a disk behaves.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// When the storage is full.
    pub no_space: NoSpace,
    /// Whether new blocks get space at once.
    pub space: SpaceMode,
    /// Where the intent log is.
    pub intent: IntentPlace,
    /// What a child, the first path, records about its parent, the second, but for the parent's UUID.
    pub parent_facts: fn(&Path, &Path) -> Result<ParentFacts>,
    /// Where it is noted which image the disk goes on with, for the process that starts it next.
    pub notes: Notes,
    /// The keys of encrypted images.
    pub keys: Keys,
    /// How many bitmaps of each image stay in memory.
    pub bitmaps_kept: usize,
    /// Bytes of a sector as guests are told, 512 or 4096; what the images have without.
    pub sector_len: Option<u32>,
    /// How long a request may take; for ever without. See [`crate::Completion::give_up`].
    pub request_timeout: Option<Duration>,
    /// Where sentences for the log go. Called for changes of state and failures, never per request.
    pub report: fn(&str),
}

impl Default for CoreOptions {
    fn default() -> Self {
        Self {
            no_space: NoSpace::default(),
            space: SpaceMode::default(),
            intent: IntentPlace::default(),
            parent_facts: ParentFacts::names,
            notes: Notes::default(),
            keys: Keys::default(),
            bitmaps_kept: BITMAPS_KEPT,
            sector_len: None,
            request_timeout: Some(REQUEST_TIMEOUT),
            report: |line| eprintln!("{line}"),
        }
    }
}

/// The states of a plugged disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// Requests are served.
    Running,
    /// No new requests are taken; those in flight are drained.
    Draining,
    /// Nothing is in flight and the images are closed.
    Paused,
    /// Closed for good.
    Closed,
}

impl fmt::Display for DiskState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Draining => "draining",
            Self::Paused => "paused",
            Self::Closed => "closed",
        })
    }
}

/// Hears of every request; the statistics.
pub trait Observer {
    /// A request was taken.
    fn submitted(&self, origin: Origin, op: Op, bytes: u64);
    /// A request ended at `now_ns` of the data thread's clock.
    fn completed(&self, origin: Origin, op: Op, bytes: u64, stages: StageTimes, now_ns: u64, ok: bool);
}

/// A disk on its data thread.
pub struct Core<I: Io> {
    pub(crate) io: I,
    pub(crate) options: CoreOptions,
    pub(crate) inbox: Rc<Inbox<Taken>>,
    pub(crate) admission: Rc<Admission>,
    chain: RefCell<Option<Rc<Chain<I::Store>>>>,
    /// The other receivers of changes; `tapped` says in one load whether there are any.
    pub(crate) tap: RefCell<Option<Rc<Tap<I::Store>>>>,
    pub(crate) tapped: Cell<bool>,
    pub(crate) standby: standby::Slot<I::Store>,
    /// The disk had a standby that had not taken over when it was paused the last time.
    standby_waited: Cell<bool>,
    /// Moves of the disk that are still to be noted.
    pub(crate) owed_notes: RefCell<Vec<Move>>,
    /// The disk has moved to other images than those it was opened with.
    pub(crate) moved: Cell<bool>,
    state: Cell<DiskState>,
    /// What guests were told of sectors, for as long as the disk is there.
    sector_len: Cell<Option<u32>>,
    /// Requests that wait for space, outside of any chain.
    parked: Cell<usize>,
    /// Told when the disk gets into another state, and of ends of requests where something may wait for these: see
    /// [`Core::serve`].
    pub(crate) ended: Notify,
    jobs: Jobs,
    /// Which change of the chain is at work.
    pub(crate) changing: Cell<Option<&'static str>>,
    /// An image whose commit failed when the image above it was being put under another parent: the disk may say
    /// either. Until it is committed again no other image may be.
    pub(crate) unfinished: RefCell<Option<PathBuf>>,
    observer: RefCell<Option<Rc<dyn Observer>>>,
    failures: Cell<u64>,
    reported_ns: Cell<Option<u64>>,
    /// How the last pause ended, for the callers that joined it.
    paused: RefCell<Result<()>>,
    pub(crate) timeouts: RequestTimeouts,
    is_watched: Cell<bool>,
    pub(crate) trace: Rc<Trace>,
    /// Requests at work that need the image for themselves.
    pub(crate) holds: Cell<u32>,
    /// Queue threads, if the disk has any.
    pub(crate) sharing: SharingSlot<I>,
}

impl<I: Io> fmt::Debug for Core<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("state", &self.state.get()).finish_non_exhaustive()
    }
}

impl<I: Io> Core<I> {
    /// A disk without images yet, paused.
    pub fn new(io: I, inbox: Rc<Inbox<Taken>>, options: CoreOptions) -> Rc<Self> {
        inbox.set_open(false);
        let timeouts = RequestTimeouts::new(options.request_timeout, inbox.capacity());
        let admission = Admission::new(Rc::clone(&inbox), io.tasks().clone());
        Rc::new(Self {
            io,
            timeouts,
            is_watched: Cell::new(false),
            trace: Rc::default(),
            holds: Cell::new(0),
            sharing: SharingSlot::default(),
            options,
            inbox,
            admission,
            chain: RefCell::new(None),
            tap: RefCell::new(None),
            tapped: Cell::new(false),
            standby: RefCell::new(None),
            standby_waited: Cell::new(false),
            owed_notes: RefCell::default(),
            moved: Cell::new(false),
            state: Cell::new(DiskState::Paused),
            sector_len: Cell::new(None),
            parked: Cell::new(0),
            ended: Notify::default(),
            jobs: Jobs::default(),
            changing: Cell::new(None),
            unfinished: RefCell::new(None),
            observer: RefCell::new(None),
            failures: Cell::new(0),
            reported_ns: Cell::new(None),
            paused: RefCell::new(Ok(())),
        })
    }

    /// The state now.
    pub fn state(&self) -> DiskState {
        self.state.get()
    }

    /// What the open chain is.
    pub fn spec(&self) -> Option<ChainSpec> {
        self.chain.borrow().as_ref().map(|chain| chain.spec())
    }

    /// The open chain.
    pub(crate) fn chain(&self) -> Option<Rc<Chain<I::Store>>> {
        self.chain.borrow().clone()
    }

    /// Lets requests that are taken from now on see these images.
    pub(crate) fn replace_chain(&self, chain: impl Into<Rc<Chain<I::Store>>>) {
        *self.chain.borrow_mut() = Some(chain.into());
        self.look_at_sharing();
    }

    /// What each layer has done, leaf first.
    pub fn layer_counters(&self) -> Vec<LayerCounters> {
        self.chain.borrow().as_ref().map(|chain| chain.counters()).unwrap_or_default()
    }

    /// Requests that were answered with an error.
    pub fn failures(&self) -> u64 {
        self.failures.get()
    }

    /// Requests that wait for space now.
    pub fn waiting_for_space(&self) -> usize {
        self.parked.get()
    }

    /// Whether the disk had a standby that had not taken over when it was paused the last time.
    pub fn standby_waited(&self) -> bool {
        self.standby_waited.get()
    }

    /// Where requests wait for limits and for pages of a pool.
    pub const fn admission(&self) -> &Rc<Admission> {
        &self.admission
    }

    /// Jobs: long work in the background of the guest's requests.
    pub const fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// Requests that take longer than they may, and that the kernel does not give back.
    pub fn stuck(&self) -> usize {
        self.timeouts.stuck()
    }

    /// The request that is in flight for the longest, if time limits are kept: for people.
    pub(crate) fn longest_request(&self) -> Option<String> {
        self.timeouts.longest(self.io.now_ns())
    }

    /// Lets `observer` hear of every request from now on.
    pub fn observe(&self, observer: Rc<dyn Observer>) {
        *self.observer.borrow_mut() = Some(observer);
    }

    pub(crate) fn observer(&self) -> Option<Rc<dyn Observer>> {
        self.observer.borrow().clone()
    }

    /// A port for front ends. The disk must have images.
    pub fn port(self: &Rc<Self>) -> Option<Port> {
        let geometry = self.geometry()?;
        let map = Rc::new(Map(Rc::downgrade(self)));
        Some(Port::new(
            Rc::clone(&self.inbox),
            Rc::clone(&self.admission),
            self.io.tasks().clone(),
            geometry,
            map,
            Rc::clone(&self.trace),
        ))
    }

    /// The disk as a guest sees it, while it has images.
    pub fn geometry(&self) -> Option<Geometry> {
        let chain = self.chain.borrow();
        let chain = chain.as_ref()?;
        Some(Geometry {
            len: chain.len() / u64::from(self.sector_len()) * u64::from(self.sector_len()),
            logical_block_len: self.sector_len(),
            physical_block_len: 4096,
            read_only: chain.access() == Access::ReadOnly,
            transfer_max: 32 << 20,
        })
    }

    /// Bytes of a sector as guests are told.
    pub(crate) fn sector_len(&self) -> u32 {
        self.sector_len.get().unwrap_or(SECTOR_LEN as u32)
    }

    /// Settles what guests are told, once; images that are opened later have to serve it.
    fn settle_sectors(&self, chain: &Chain<I::Store>) -> Result<()> {
        let len = settle(chain, self.sector_len.get(), self.options.sector_len)?;
        self.sector_len.set(Some(len));
        Ok(())
    }

    /// Opens the images of `spec` and serves requests.
    ///
    /// # Errors
    /// An image cannot be opened, or does not belong to the one above it. The disk stays paused.
    pub async fn resume(self: &Rc<Self>, spec: &ChainSpec) -> Result<()> {
        self.resume_with(spec, &TapOptions::default()).await
    }

    /// [`Core::resume`] with the taps that the disk has from the first request on.
    ///
    /// # Errors
    /// As [`Core::resume`], for any of them.
    pub async fn resume_with(self: &Rc<Self>, spec: &ChainSpec, taps: &TapOptions) -> Result<()> {
        if self.state.get() != DiskState::Paused {
            let detail = format!("the disk is {}, not paused", self.state.get());
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        // Opening waits for the storage: another command may come meanwhile.
        let change = self.begin_change("opening the images")?;
        let overlaid = taps.standby.as_ref().is_some_and(|standby| standby.took_over);
        let chain = self.open_chain(spec, overlaid).await?;
        let opened = match self.check_keys(&chain).and_then(|()| self.settle_sectors(&chain)) {
            Ok(()) => self.open_tap(&chain, taps).await,
            Err(error) => Err(error),
        };
        let opened = match opened {
            Ok(()) if self.state.get() != DiskState::Paused => {
                self.close_tap().await;
                let detail = format!("the disk is {} meanwhile", self.state.get());
                Err(FormatError::new(FormatErrorKind::InvalidArgument, detail))
            }
            opened => opened,
        };
        if let Err(error) = opened {
            if let Err(error) = chain.close().await {
                (self.options.report)(&format!("not closed cleanly: {error}"));
            }
            return Err(error);
        }
        *self.chain.borrow_mut() = Some(Rc::new(chain));
        self.state.set(DiskState::Running);
        drop(change);
        let mirror = self.tap.borrow().as_ref().and_then(|tap| tap.mirror.clone());
        if let Some(mirror) = mirror {
            self.mirror_run(&mirror);
        }
        self.inbox.set_open(true);
        self.admission.opened();
        self.open_queue_threads();
        self.ended.notify_all(self.io.tasks());
        if self.timeouts.is_on() && !self.is_watched.replace(true) {
            self.io.tasks().spawn(Rc::clone(self).watch());
        }
        Ok(())
    }

    /// The task that cancels and reports requests that take too long.
    async fn watch(self: Rc<Self>) {
        loop {
            self.timeouts.next_look(self.io.tasks()).await;
            while let Some(late) = self.timeouts.next_late(self.io.tasks().turn_ns()) {
                match late {
                    Late::Cancel(task) => self.io.cancel(task),
                    Late::Stuck { what, .. } => (self.options.report)(&what),
                }
            }
            // Before an answer goes out, which is another task's.
            self.look_at_sharing();
            // A request that waits behind a late one may be late itself.
            self.ended.notify_all(self.io.tasks());
        }
    }

    /// Stops taking requests, waits for those in flight, and closes the images.
    ///
    /// # Errors
    /// The images could not be closed cleanly; they are closed all the same, and the next opening repairs them.
    pub async fn pause(&self) -> Result<()> {
        match self.state.get() {
            DiskState::Paused | DiskState::Closed => return Ok(()),
            DiskState::Running => self.state.set(DiskState::Draining),
            DiskState::Draining => {
                // Another pause is at work, perhaps closing already: it has ended when the state says so, and not when
                // there is nothing left to take from the chain.
                while self.state.get() == DiskState::Draining {
                    self.ended.wait(self.io.tasks()).await;
                }
                return self.paused.borrow().clone();
            }
        }
        self.drain_queue_threads().await;
        // Requests that were taken are served without waiting for their turn.
        self.admission.admit_all();
        self.inbox.set_open(false);
        self.ended.notify_all(self.io.tasks());
        self.jobs.stop_all(self.io.tasks()).await;
        while self.changing.get().is_some() {
            self.ended.wait(self.io.tasks()).await;
        }
        while self.inbox.in_flight() > self.parked.get() {
            self.ended.wait(self.io.tasks()).await;
        }
        let chain = self.chain.borrow_mut().take();
        self.take_images_back().await;
        // The next opening of the chain finds out which parent it is.
        self.unfinished.take();
        let result = match &chain {
            Some(chain) => chain.close().await,
            None => Ok(()),
        };
        drop(chain);
        self.standby_waited.set(self.has_waiting_standby());
        self.close_tap().await;
        // A caller that is told of the pause may open the images.
        self.io.closed().await;
        if let Err(error) = &result {
            (self.options.report)(&format!("not closed cleanly: {error}"));
        }
        *self.paused.borrow_mut() = result.clone();
        self.state.set(DiskState::Paused);
        self.ended.notify_all(self.io.tasks());
        result
    }

    /// Pauses for good: requests that wait for space fail.
    ///
    /// # Errors
    /// As [`Core::pause`].
    pub async fn close(&self) -> Result<()> {
        let result = self.pause().await;
        self.state.set(DiskState::Closed);
        self.ended.notify_all(self.io.tasks());
        while self.inbox.in_flight() > 0 {
            self.ended.wait(self.io.tasks()).await;
        }
        drop(self.admission.set_pages(None));
        result
    }

    /// Serves one request to its end.
    pub async fn serve(self: Rc<Self>, taken: Taken) {
        let Taken { request, origin, pages, client } = taken;
        let observer = self.observer.borrow().clone();
        let bytes = request.span.len;
        let started = self.io.tasks().turn_ns();
        if let Some(observer) = &observer {
            observer.submitted(origin, request.op, bytes);
        }
        let clock = self.trace.clock();
        let (meter, stamp) = (Meter::traced(clock), clock.map_or(0, Clock::now));
        let place = self.timeouts.begin(&request, self.io.tasks());
        let result = self.run(&request, &meter, place).await;
        let was_told = self.timeouts.end(place);
        if let Some(observer) = &observer {
            // The one clock that is read for a request; everything else goes by the turn's.
            let now_ns = self.io.now_ns();
            let stages = meter.stages(request.born_ns, started, now_ns);
            observer.completed(origin, request.op, bytes, stages, now_ns, result.is_ok());
        }
        if clock.is_some() {
            self.trace.served((client, request.tag), (request.op, bytes), stamp, &meter);
        }
        request.client.complete(request.tag, result);
        if self.admission.is_on() {
            self.admission.ended(pages);
        }
        self.admission.leaves();
        // A pause, a close and a change of the images wait for ends of requests while none is let in; and what touches
        // the same bytes as a change that was answered early waits for that one.
        if was_told || !self.inbox.is_open() || self.state.get() != DiskState::Running {
            self.ended.notify_all(self.io.tasks());
        }
    }

    async fn run(self: &Rc<Self>, request: &Request, meter: &Meter, place: Place) -> Result<(), DiskError> {
        let mut retries = 0;
        loop {
            while !(self.is_clear(request.span) || self.timeouts.is_over(place)) {
                self.ended.wait(self.io.tasks()).await;
            }
            let chain = self.chain.borrow().clone();
            let Some(chain) = chain else {
                if self.state.get() == DiskState::Closed {
                    return Err(DiskError::NoSpace);
                }
                // Parked for want of space when the disk was paused.
                self.park(place).await;
                continue;
            };
            check(request, &chain)?;
            if self.timeouts.is_over(place) {
                return Err(DiskError::Io(libc::ETIMEDOUT));
            }
            let error = match self.attempt(&chain, request, meter).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if error.kind() == FormatErrorKind::OutOfSpace && self.standby.borrow().is_some() {
                // Boxed: hundreds of request tasks have room for what every request needs.
                if Box::pin(self.elsewhere(chain, place)).await {
                    continue;
                }
            } else {
                drop(chain);
            }
            if self.timeouts.is_over(place) {
                self.failures.set(self.failures.get() + 1);
                self.note("a request took longer than it may and was cancelled", &error);
                return Err(DiskError::Io(libc::ETIMEDOUT));
            }
            if is_busy(&error) && retries < BUSY_RETRIES_MAX && self.may_retry(place) {
                retries += 1;
                self.note("the storage is busy, a request tries again", &error);
                let until = self.io.tasks().turn_ns() + BUSY_RETRY_NS;
                self.io.tasks().sleep_until(until).await;
                continue;
            }
            if error.kind() == FormatErrorKind::OutOfSpace && self.options.no_space == NoSpace::Wait {
                self.note("the storage is full, requests wait", &error);
                self.park(place).await;
                continue;
            }
            self.failures.set(self.failures.get() + 1);
            self.note("a request failed", &error);
            return Err(match error.kind() {
                FormatErrorKind::OutOfSpace => DiskError::NoSpace,
                FormatErrorKind::ReadOnly => DiskError::ReadOnly,
                FormatErrorKind::Unsupported => DiskError::Unsupported,
                _ => DiskError::Io(error.errno()),
            });
        }
    }

    /// Whether no change that was answered and is still in flight, on whichever thread, touches `span`.
    fn is_clear(&self, span: Span) -> bool {
        self.timeouts.is_clear(span) && self.is_clear_elsewhere(span)
    }

    /// A pause does not wait for a storage to become less busy.
    fn may_retry(&self, place: Place) -> bool {
        self.state.get() == DiskState::Running
            && self.timeouts.has_time(place, self.io.tasks().turn_ns(), BUSY_RETRY_NS)
    }

    /// Gives back or zeroes while no queue thread has a request of its own at the storage: its place may be given back,
    /// because of what the storage has there.
    async fn clear_alone(&self, chain: &Chain<I::Store>, request: &Request, meter: &Meter) -> Result<bool> {
        let _hold = self.hold_alone().await;
        clear(chain, request, meter).await
    }

    async fn attempt(&self, chain: &Chain<I::Store>, request: &Request, meter: &Meter) -> Result<()> {
        let span = request.span;
        if self.tapped.get() && request.op != Op::Read {
            let tap = self.tap.borrow().as_ref().map(Rc::clone).unwrap_or_default();
            tap.note(span);
            if let Some(mirror) = tap.mirror.clone() {
                // Boxed: hundreds of request tasks have room for what every request needs.
                return Box::pin(async move {
                    let _hold = match request.op {
                        Op::Discard | Op::WriteZeroes { .. } => Some(self.hold_alone().await),
                        Op::Read | Op::Write { .. } | Op::Flush => None,
                    };
                    mirrored(mirror, chain, request, meter).await
                })
                .await;
            }
        }
        let durable = match request.op {
            Op::Read => {
                chain.read(span, request.data, meter).await?;
                false
            }
            Op::Write { durable } => {
                chain.write(span, request.data, meter).await?;
                durable
            }
            Op::Flush => true,
            // Boxed, as above.
            Op::Discard | Op::WriteZeroes { .. } => Box::pin(self.clear_alone(chain, request, meter)).await?,
        };
        if durable { chain.sync(meter).await } else { Ok(()) }
    }

    /// A write found no space on `chain`: whether it is to be tried again, after a wait.
    async fn elsewhere(self: &Rc<Self>, chain: Rc<Chain<I::Store>>, place: Place) -> bool {
        let redirected = self.redirect(&chain);
        let tried = Rc::downgrade(&chain);
        drop(chain);
        match redirected {
            Redirected::Now => true,
            Redirected::Soon => self.wait_for_standby(tried, place).await,
            Redirected::Later => {
                self.park(place).await;
                true
            }
            Redirected::Nowhere => false,
        }
    }

    /// Waits as long as `waits` says so, which is asked whenever something has changed.
    pub(crate) async fn wait_aside(&self, place: Place, waits: impl Fn() -> bool) {
        self.timeouts.suspend(place);
        self.parked.set(self.parked.get() + 1);
        let tasks = self.io.tasks();
        self.ended.notify_all(tasks);
        while waits() {
            self.ended.wait(tasks).await;
        }
        self.parked.set(self.parked.get() - 1);
        self.timeouts.resume(place, tasks);
    }

    /// Waits a second, or until the state changes.
    async fn park(&self, place: Place) {
        self.timeouts.suspend(place);
        self.parked.set(self.parked.get() + 1);
        let tasks = self.io.tasks();
        self.ended.notify_all(tasks);
        let until = tasks.turn_ns() + NO_SPACE_RETRY_NS;
        while tasks.turn_ns() < until || matches!(self.state.get(), DiskState::Draining | DiskState::Paused) {
            if self.state.get() == DiskState::Closed {
                break;
            }
            match self.state.get() {
                DiskState::Running => self.ended.wait_until(tasks, until).await,
                _ => self.ended.wait(tasks).await,
            }
        }
        self.parked.set(self.parked.get() - 1);
        self.timeouts.resume(place, tasks);
    }

    /// A sentence for the log, at most one a second.
    fn note(&self, what: &str, error: &FormatError) {
        let now = self.io.tasks().turn_ns();
        if self.reported_ns.get().is_some_and(|then| now - then < 1_000_000_000) {
            return;
        }
        self.reported_ns.set(Some(now));
        (self.options.report)(&format!("{what}: {error}"));
    }
}

/// Whether the storage could not do it now, which says nothing about the next time. EIO is not among these: the
/// storage has tried before it reports that, and a guest that is told at once can act on it.
fn is_busy(error: &FormatError) -> bool {
    let busy = [libc::EBUSY, libc::EAGAIN, libc::EINTR, libc::ENOMEM, libc::ENOBUFS];
    error.kind() == FormatErrorKind::Io && busy.contains(&error.errno())
}

/// Gives back or zeroes; whether it must be durable then.
async fn clear<S: Storage>(chain: &Chain<S>, request: &Request, meter: &Meter) -> Result<bool> {
    let span = request.span;
    match request.op {
        Op::WriteZeroes { unmap, durable } => {
            chain.write_zeroes(span, if unmap { Zeroing::Unmap } else { Zeroing::Keep }, meter).await?;
            Ok(durable)
        }
        _ => {
            chain.discard(span, meter).await?;
            Ok(false)
        }
    }
}

/// A change, or a flush, of a disk that has a mirror.
async fn mirrored<S: Storage>(
    mirror: Rc<Mirror<S>>,
    chain: &Chain<S>,
    request: &Request,
    meter: &Meter,
) -> Result<()> {
    let span = request.span;
    let durable = match request.op {
        Op::Write { durable } => {
            mirror.write(chain, span, request.data, meter).await?;
            durable
        }
        Op::Discard => {
            mirror.discard(chain, span, meter).await?;
            false
        }
        Op::WriteZeroes { unmap, durable } => {
            let how = if unmap { Zeroing::Unmap } else { Zeroing::Keep };
            mirror.write_zeroes(chain, span, how, meter).await?;
            durable
        }
        Op::Read | Op::Flush => true,
    };
    if durable { mirror.sync(chain, meter).await } else { Ok(()) }
}

/// What a front end need not check.
fn check<S: Storage>(request: &Request, chain: &Chain<S>) -> Result<(), DiskError> {
    if request.op == Op::Flush {
        return Ok(());
    }
    if request.op != Op::Read && chain.access() == Access::ReadOnly {
        return Err(DiskError::ReadOnly);
    }
    if !request.span.is_aligned(SECTOR_LEN) {
        return Err(DiskError::Unaligned);
    }
    if !request.span.fits(chain.len()) {
        return Err(DiskError::OutOfRange);
    }
    let moves = matches!(request.op, Op::Read | Op::Write { .. });
    if moves && request.data.len() != request.span.len {
        return Err(DiskError::OutOfRange);
    }
    Ok(())
}

/// Answers what is allocated. Not the one that keeps the disk: its front ends are held by requests, which it holds.
struct Map<I: Io>(Weak<Core<I>>);

impl<I: Io> AllocationMap for Map<I> {
    fn extents(
        &self,
        span: tapio_types::Span,
        count_max: usize,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<Vec<crate::Extent>, DiskError>>>> {
        let core = self.0.upgrade();
        Box::pin(async move {
            let core = core.ok_or(DiskError::Io(libc::ESHUTDOWN))?;
            let chain = loop {
                let chain = core.chain.borrow().clone();
                match chain {
                    Some(chain) => break chain,
                    None if core.state.get() == DiskState::Closed => {
                        return Err(DiskError::Io(libc::ESHUTDOWN));
                    }
                    None => core.ended.wait(core.io.tasks()).await,
                }
            };
            if !span.fits(chain.len()) {
                return Err(DiskError::OutOfRange);
            }
            let unit = core.sector_len();
            let (timeouts, tasks) = (&core.timeouts, core.io.tasks());
            let place = timeouts.begin_question(span, tasks);
            let in_time = || !timeouts.is_over(place);
            let found = chain.extents_while(span, count_for(count_max, unit), &in_time).await;
            timeouts.end(place);
            let found = found.map_err(|error| DiskError::Io(error.errno()))?;
            let to_end = found.iter().map(|extent| extent.len).sum::<u64>() >= span.len;
            Ok(in_units(found, unit, count_max, to_end))
        })
    }
}
