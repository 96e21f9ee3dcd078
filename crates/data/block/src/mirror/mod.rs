//! A mirror: every change of a disk also goes to a second storage, and a copy brings over what was there before.
//!
//! ```text
//!   guest's write ──▶ range held ──┬──▶ chain                    both at once, from one copy of the bytes
//!                                  └──▶ far: place, task, timeout
//!   copier ── dirty granule ──▶ range held ──▶ read from the chain ──▶ far
//! ```
//!
//! The one invariant: **a granule that is not dirty, and on which no work is in flight, reads the same on both
//! sides.** It holds because
//!
//! - overlapping work is done one after the other, in the order in which it came ([`ranges`]): a copy never runs beside
//!   a write to the same bytes, and two writes to the same bytes reach both sides in the same order;
//! - both sides get the same bytes, from memory that the guest cannot change meanwhile;
//! - whatever did not end well on both sides makes its granules dirty before its range is given up: a guard
//!   ([`Changing`]) does that on every path out that does not say that both sides are the same;
//! - what the second side has answered but not made durable counts as dirty when that side is lost.
//!
//! A write to granules that are all dirty goes to the chain alone: the copier will come to them. Reads always come from
//! the chain. What a discard leaves is read from the chain, not guessed.
//!
//! ```text
//!   copying ◀──────────▶ in sync ──pivot──▶ ended: the disk goes on on the second side
//!      │  ▲                 │
//!   loss  resume           loss           cancel or pause, from anywhere ──▶ ended: the second side is closed
//!      ▼  │                 │
//!   degraded ◀──────────────┘             guests go on on the first side, dirty granules are noted
//! ```

mod far;
mod granules;
mod merge;
mod ranges;
mod run;
mod turns;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Notify, Segments, Storage, Tasks, Zeroing};
use tapio_types::{ChainSpec, Span};

use crate::chain::Chain;
use crate::job::{Job, JobState};
use crate::meter::Meter;
use crate::stages::Observer;

pub(crate) use far::check_len;
use far::{Far, Order};
pub use granules::GRANULE_LEN;
use granules::Granules;
pub(crate) use merge::parent_too_large;
use ranges::Ranges;
pub use run::Pivoted;
use turns::{Turn, Turns};

/// The largest piece that goes to the second side at once.
const PIECE_LEN: u64 = 1 << 20;
/// The largest piece of zeroes: no memory moves, but a storage may have to write them.
const ZERO_PIECE_LEN: u64 = 32 << 20;

/// What the second side lacks when a mirror begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CopyWhat {
    /// Nothing: another program copies. Only changes go there, as tapdisk's secondary image has it.
    Nothing,
    /// What the disk keeps data for; the second side must be empty, that is, read as zero.
    #[default]
    Allocated,
    /// What the leaf itself keeps; the second side has the content of the images below it.
    Leaf,
    /// Everything, zeroes included: the second side may hold anything.
    Everything,
}

/// How a mirror behaves.
#[derive(Clone, Debug)]
pub struct MirrorOptions {
    /// What is copied.
    pub copy: CopyWhat,
    /// Bytes a second that the copy may take; 0 is no limit. Guests' writes are not limited by it.
    pub rate: u64,
    /// How long the second side may take for one answer before it counts as lost.
    pub timeout: Duration,
}

impl Default for MirrorOptions {
    fn default() -> Self {
        Self { copy: CopyWhat::default(), rate: 0, timeout: Duration::from_secs(5) }
    }
}

/// Where a mirror stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorPhase {
    /// The second side lacks something; changes go to both.
    Copying,
    /// Both sides are the same, and each change is answered by both.
    InSync,
    /// The second side was lost; the disk goes on without it.
    Degraded,
    /// It is over.
    Ended,
}

/// What a mirror says of itself.
#[derive(Clone, Debug)]
pub struct MirrorStatus {
    /// The number of its job.
    pub job: u32,
    /// The second side.
    pub target: ChainSpec,
    /// Where it stands.
    pub phase: MirrorPhase,
    /// Why the second side was lost.
    pub failure: Option<FormatError>,
    /// Bytes that it lacks, in whole granules.
    pub dirty: u64,
    /// Bytes copied so far, without what guests wrote.
    pub copied: u64,
    /// Whether what has to be copied is known in full.
    pub listed: bool,
    /// Bytes a second that the copy may take; 0 is no limit.
    pub rate: u64,
    /// Requests that the second side has not answered.
    pub unanswered: usize,
}

/// What hears of a mirror.
pub(crate) struct Report {
    /// What people are told.
    pub say: fn(&str),
    /// Told when the second side is lost, and when it is lost no more.
    pub observer: Option<Rc<dyn Observer>>,
}

impl std::fmt::Debug for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Report").field("is_observed", &self.observer.is_some()).finish_non_exhaustive()
    }
}

/// A mirror of a disk.
#[derive(Debug)]
pub(crate) struct Mirror<S: Storage> {
    tasks: Tasks,
    report: Report,
    /// Bytes of the disk.
    len: u64,
    options: MirrorOptions,
    target: ChainSpec,
    /// The second side is what lies below the leaf of the first: see [`merge`].
    merges: bool,
    far: RefCell<Option<Rc<Far<S>>>>,
    /// What the second side lacks.
    dirty: RefCell<Granules>,
    /// What it has answered since a flush of it last began.
    unflushed: RefCell<Granules>,
    /// What it had answered when the flushes in flight began.
    flushing: RefCell<Granules>,
    flushes: Cell<u64>,
    ranges: Ranges,
    phase: Cell<MirrorPhase>,
    failure: RefCell<Option<FormatError>>,
    listed: Cell<bool>,
    cursor: Cell<u64>,
    /// Granules taken out of `dirty` and not copied yet, in runs.
    copying: Cell<usize>,
    turns: Turns,
    copiers: Cell<usize>,
    copied: Cell<u64>,
    /// There may be something to copy, or a copier has to end.
    more: Notify,
    job: Rc<Job>,
}

impl<S: Storage> Mirror<S> {
    /// A mirror of a disk of `len` bytes onto `far`, which was opened as `target` says.
    fn new(
        len: u64,
        far: Rc<Far<S>>,
        target: ChainSpec,
        (options, merges): (MirrorOptions, bool),
        job: Rc<Job>,
        (tasks, report): (Tasks, Report),
    ) -> Result<Rc<Self>> {
        let set = || Granules::new(len).map(RefCell::new);
        Ok(Rc::new(Self {
            report,
            len,
            options,
            target,
            merges,
            far: RefCell::new(Some(far)),
            dirty: set()?,
            unflushed: set()?,
            flushing: set()?,
            flushes: Cell::new(0),
            ranges: Ranges::new(tasks.clone()),
            phase: Cell::new(MirrorPhase::Copying),
            failure: RefCell::new(None),
            listed: Cell::new(false),
            cursor: Cell::new(0),
            copying: Cell::new(0),
            turns: Turns::new(tasks.clone()),
            copiers: Cell::new(0),
            copied: Cell::new(0),
            more: Notify::default(),
            job,
            tasks,
        }))
    }

    /// What it says of itself.
    pub fn status(&self) -> MirrorStatus {
        MirrorStatus {
            job: self.job.id(),
            target: self.target.clone(),
            phase: self.phase.get(),
            failure: self.failure.borrow().clone(),
            dirty: (self.dirty.borrow().count() * GRANULE_LEN).min(self.len),
            copied: self.copied.get(),
            listed: self.listed.get(),
            rate: self.job.info().rate,
            unanswered: self.far.borrow().as_ref().map_or(0, |far| far.unanswered()),
        }
    }

    fn set_phase(&self, phase: MirrorPhase) {
        self.phase.set(phase);
        if let Some(observer) = &self.report.observer {
            observer.mirror_lost(phase == MirrorPhase::Degraded);
        }
        let state = if phase == MirrorPhase::InSync { JobState::Ready } else { JobState::Running };
        // Also wakes the waiters for the mirror's job.
        self.job.set_state(state, &self.tasks);
        self.more.notify_all(&self.tasks);
    }

    /// The second side, while changes go there.
    fn far(&self) -> Option<Rc<Far<S>>> {
        match self.phase.get() {
            MirrorPhase::Copying | MirrorPhase::InSync => self.far.borrow().clone(),
            MirrorPhase::Degraded | MirrorPhase::Ended => None,
        }
    }

    /// Nothing is left to copy and no copy is in flight.
    fn is_clean(&self) -> bool {
        self.listed.get() && self.copying.get() == 0 && self.dirty.borrow().count() == 0
    }

    /// Notes that the second side lacks `span`.
    fn lacks(&self, span: Span) {
        self.dirty.borrow_mut().insert(span);
        match self.phase.get() {
            MirrorPhase::InSync => self.set_phase(MirrorPhase::Copying),
            MirrorPhase::Copying => self.more.notify_all(&self.tasks),
            MirrorPhase::Degraded | MirrorPhase::Ended => {}
        }
    }

    /// Notes that the second side has answered a change of `span`: it has it, until it is lost with what it did not
    /// make durable.
    fn has(&self, span: Span) {
        match self.phase.get() {
            MirrorPhase::Copying | MirrorPhase::InSync => self.unflushed.borrow_mut().insert(span),
            MirrorPhase::Degraded | MirrorPhase::Ended => self.lacks(span),
        }
    }

    /// The second side is lost: the disk goes on without it.
    fn degrade(&self, error: &FormatError) {
        if matches!(self.phase.get(), MirrorPhase::Degraded | MirrorPhase::Ended) {
            return;
        }
        if !self.merges {
            (self.report.say)(&format!("the mirror is lost, the disk goes on without it: {error}"));
        }
        *self.failure.borrow_mut() = Some(error.clone());
        let mut dirty = self.dirty.borrow_mut();
        dirty.absorb(&mut self.flushing.borrow_mut());
        dirty.absorb(&mut self.unflushed.borrow_mut());
        drop(dirty);
        if let Some(far) = &*self.far.borrow() {
            far.fail(error);
        }
        self.set_phase(MirrorPhase::Degraded);
    }

    /// A change of `span` begins, whose range is held: however it ends, it ends in one of two ways.
    const fn change(&self, span: Span) -> Changing<'_, S> {
        Changing { mirror: self, span, alike: Cell::new(false) }
    }

    /// Writes to both sides.
    ///
    /// # Errors
    /// Those of the chain.
    pub async fn write(&self, chain: &Chain<S>, span: Span, from: Segments, meter: &Meter) -> Result<()> {
        let mut done = 0;
        while done < span.len {
            let piece = span.skip(done).prefix(PIECE_LEN);
            self.write_piece(chain, piece, from.slice(done, piece.len), meter).await?;
            done += piece.len;
        }
        Ok(())
    }

    async fn write_piece(&self, chain: &Chain<S>, span: Span, from: Segments, meter: &Meter) -> Result<()> {
        let _held = self.ranges.hold(span).await;
        let change = self.change(span);
        let asked = match self.far() {
            // Dirty in full: the copier comes to it later.
            Some(far) if !self.dirty.borrow().has_all(span) => self.ask_write(&far, span, from).await,
            _ => None,
        };
        let near = match &asked {
            Some(asked) => chain.write_from(span, asked.memory(), meter).await.1,
            None => {
                self.lacks(span);
                chain.write(span, from, meter).await
            }
        };
        change.end(near, asked).await
    }

    async fn ask_write(&self, far: &Rc<Far<S>>, span: Span, from: Segments) -> Option<far::Asked<S>> {
        let asked = match far.memory(span.len).await {
            Ok(mut memory) => {
                from.copy_to(&mut memory);
                far.ask(Order::Write(span), Some(memory)).await
            }
            Err(error) => Err(error),
        };
        asked.map_err(|error| self.degrade(&error)).ok()
    }

    /// Makes a span read as zero on both sides.
    ///
    /// # Errors
    /// Those of the chain.
    pub async fn write_zeroes(
        &self,
        chain: &Chain<S>,
        span: Span,
        how: Zeroing,
        meter: &Meter,
    ) -> Result<()> {
        let mut left = span;
        while !left.is_empty() {
            let piece = left.prefix(ZERO_PIECE_LEN);
            let _held = self.ranges.hold(piece).await;
            let change = self.change(piece);
            let asked = match self.far() {
                Some(far) if !self.dirty.borrow().has_all(piece) => {
                    let asked = far.ask(Order::Zero(piece, how), None).await;
                    asked.map_err(|error| self.degrade(&error)).ok()
                }
                _ => None,
            };
            if asked.is_none() {
                self.lacks(piece);
            }
            let near = chain.write_zeroes(piece, how, meter).await;
            change.end(near, asked).await?;
            left = left.skip(piece.len);
        }
        Ok(())
    }

    /// Lets the chain let go of a span, and gives the second side what is there afterwards.
    ///
    /// # Errors
    /// Those of the chain.
    pub async fn discard(&self, chain: &Chain<S>, span: Span, meter: &Meter) -> Result<()> {
        let mut left = span;
        while !left.is_empty() {
            let piece = left.prefix(ZERO_PIECE_LEN);
            let _held = self.ranges.hold(piece).await;
            let change = self.change(piece);
            chain.discard(piece, meter).await?;
            let far = self.far().filter(|_| !self.dirty.borrow().has_all(piece));
            if let Some(far) = far
                && is_hole(chain, piece).await
            {
                let asked = far.ask(Order::Zero(piece, Zeroing::Unmap), None).await;
                change.end(Ok(()), asked.map_err(|error| self.degrade(&error)).ok()).await?;
            }
            // Anything else is copied: what is there afterwards is read from the chain.
            left = left.skip(piece.len);
        }
        Ok(())
    }

    /// Makes everything durable on both sides.
    ///
    /// # Errors
    /// Those of the chain.
    pub async fn sync(&self, chain: &Chain<S>, meter: &Meter) -> Result<()> {
        let Some(far) = self.far() else { return chain.sync(meter).await };
        let number = self.begin_flush();
        let asked = far.ask(Order::Flush, None).await;
        let near = chain.sync(meter).await;
        let ended = match asked {
            Ok(asked) => asked.answer().await,
            Err(error) => Err(error),
        };
        self.end_flush(number, ended);
        near
    }

    /// Makes everything durable on the second side.
    async fn sync_far(&self) {
        let Some(far) = self.far() else { return };
        let number = self.begin_flush();
        let ended = far.order(Order::Flush, None).await;
        self.end_flush(number, ended);
    }

    fn begin_flush(&self) -> u64 {
        self.flushing.borrow_mut().absorb(&mut self.unflushed.borrow_mut());
        self.flushes.set(self.flushes.get() + 1);
        self.flushes.get()
    }

    fn end_flush(&self, number: u64, ended: Result<()>) {
        match ended {
            // One that began later covers what this one did not, and clears for both.
            Ok(()) if number == self.flushes.get() => self.flushing.borrow_mut().clear(),
            Ok(()) => {}
            Err(error) => self.degrade(&error),
        }
    }

    /// Takes the next run of dirty granules, up to `len_max` bytes, for a copier, with its turn to write it.
    fn claim(&self, len_max: u64) -> Option<(Span, Turn<'_>)> {
        let run = self.peek(len_max)?;
        self.dirty.borrow_mut().remove(run);
        self.cursor.set(run.start + run.len);
        self.copying.set(self.copying.get() + 1);
        Some((run, self.turns.take()))
    }

    fn peek(&self, len_max: u64) -> Option<Span> {
        let dirty = self.dirty.borrow();
        dirty.next_run(self.cursor.get(), len_max, self.len).or_else(|| dirty.next_run(0, len_max, self.len))
    }

    /// Copies `run`, which was claimed, from the chain that the disk is on when its turn has come.
    async fn copy(&self, chain: &dyn Fn() -> Option<Rc<Chain<S>>>, run: Span, turn: Turn<'_>) {
        let held = self.ranges.hold(run).await;
        let change = self.change(run);
        let copied = match chain() {
            Some(chain) => self.transfer(&chain, run, turn).await,
            None => Err(FormatError::new(FormatErrorKind::Cancelled, "the disk is not running")),
        };
        match copied {
            Ok(()) => {
                change.alike();
                self.copied.set(self.copied.get() + run.len);
                self.job.advance(run.len);
            }
            Err(error) => {
                drop(change);
                self.degrade(&error);
            }
        }
        drop(held);
        self.copying.set(self.copying.get() - 1);
    }

    /// What does not differ by nature need not be copied: where a merge's leaf has nothing, both sides are one.
    async fn transfer(&self, chain: &Chain<S>, run: Span, turn: Turn<'_>) -> Result<()> {
        // The parent of a merge has most blocks, and is read through them meanwhile.
        let mut turn = Some(turn).filter(|_| !self.merges);
        if !self.merges {
            return self.transfer_all(chain, run, &mut turn).await;
        }
        let mut left = run;
        while !left.is_empty() {
            let (len, held) = chain.held_by_leaf(left).await?;
            if held {
                self.transfer_all(chain, left.prefix(len), &mut turn).await?;
            }
            left = left.skip(len);
        }
        Ok(())
    }

    /// The first write of the run waits for its turn, so that an image without the blocks gets them in the order of the
    /// disk; what follows lies in the same block, or is the only one of its kind for a while.
    async fn transfer_all(&self, chain: &Chain<S>, run: Span, turn: &mut Option<Turn<'_>>) -> Result<()> {
        let gone = || FormatError::new(FormatErrorKind::Cancelled, "the second side is gone");
        let far = self.far().ok_or_else(gone)?;
        let mut left = run;
        while !left.is_empty() {
            for extent in chain.extents(left, 32).await? {
                let piece = left.prefix(extent.len.min(PIECE_LEN));
                if extent.hole {
                    far.order(Order::Zero(piece, Zeroing::Unmap), None).await?;
                } else {
                    let memory = far.memory(piece.len).await?;
                    let (memory, read) = chain.read_into(piece, memory, &Meter::default()).await;
                    read?;
                    if let Some(turn) = &turn {
                        turn.comes().await;
                    }
                    let asked = far.ask(Order::Write(piece), Some(memory)).await?;
                    // The next in line may ask: what is asked first is begun first.
                    drop(turn.take());
                    asked.answer().await?;
                }
                left = left.skip(piece.len);
                if piece.len < extent.len {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Whether all of `span` surely reads as zero. A failure to find out says no, and the copier tries again.
async fn is_hole<S: Storage>(chain: &Chain<S>, span: Span) -> bool {
    let extents = chain.extents(span, 1).await.unwrap_or_default();
    extents.first().is_some_and(|extent| extent.hole && extent.len == span.len)
}

/// A change of both sides, or a copy from one to the other, that is in flight. On every path out the second side lacks
/// its span, unless it was said before that both sides are the same there.
struct Changing<'a, S: Storage> {
    mirror: &'a Mirror<S>,
    span: Span,
    alike: Cell<bool>,
}

impl<S: Storage> Changing<'_, S> {
    /// Both sides have it, or the second had it before it was lost.
    fn alike(&self) {
        self.alike.set(true);
        self.mirror.has(self.span);
    }

    /// The first side has answered, and the second is waited for if it was asked: the guest hears of the first only.
    /// By reference, because a future that takes the change has it twice, and a request's task is of a bounded size.
    async fn end(&self, near: Result<()>, asked: Option<far::Asked<S>>) -> Result<()> {
        let Some(asked) = asked else { return near };
        match (&near, asked.answer().await) {
            (Ok(()), Ok(())) => self.alike(),
            (Err(_), Ok(())) => {}
            (_, Err(error)) => {
                self.mirror.lacks(self.span);
                self.mirror.degrade(&error);
            }
        }
        near
    }
}

impl<S: Storage> Drop for Changing<'_, S> {
    fn drop(&mut self) {
        if !self.alike.get() {
            self.mirror.lacks(self.span);
        }
    }
}
