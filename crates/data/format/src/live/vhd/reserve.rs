//! Space for new blocks, set aside ahead of need.
//!
//! On a file: the file grows by a run of blocks in one step, the file system guarantees that the new range reads as
//! zero, a footer is
//! written at the new end, and all that is made durable *before* the first of those blocks is used. The old footer
//! stays
//! where it is until the new one is durable, in a gap that no block uses; so a process that opens the file after a
//! power cut finds a footer at its end. On a device the footer never moves and the bitmaps of the run are zeroed.
//!
//! The next run begins when three eighths of the last are used, and one that came too late makes its successor twice as
//! long: the length of a run follows from how many blocks are taken while one is made. A reserve that no write took
//! anything from for a while is given back, and the file ends behind its last block again, as after closing:
//!
//! | step | what | why it must come here |
//! |---|---|---|
//! | 1 | no place of the reserve can be taken any more | the footer goes where the first of them begins |
//! | 2 | a footer is written there, durable | a file that is cut to any length from here on ends in a footer |
//! | 3 | the intent log has the length of now and the one to come | a process that dies before or after step 4 has one |
//! | 4 | the file is cut behind that footer | |
//! | 5 | the next run begins there | |

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use tapio_ring::{Notify, PageBuf, Storage};
use tapio_types::{SECTOR_LEN, Span};

use super::{VhdLayer, Writer};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::vhd::{FOOTER_LEN as FOOTER_BYTES, layout};

const FOOTER_LEN: u64 = FOOTER_BYTES as u64;
/// Blocks in the first run, if not more are wanted at once.
const STEP_MIN: u32 = 4;
/// Blocks in the largest run: 1 GiB of 2 MiB blocks. File systems hold back all writes to a file while they reserve
/// space for it, about 5 ms for as much (ext4).
const STEP_MAX: u32 = 512;
/// A run that lasted longer has a shorter successor.
const LASTS_NS: u64 = 1_000_000_000;
/// A reserve that nothing was taken from for so long is given back.
const KEPT_NS: u64 = 10_000_000_000;

/// Space for new blocks.
#[derive(Debug)]
pub(super) struct Reserve {
    /// Sectors where the bitmap of a new block may go; durable and zero.
    ready: RefCell<VecDeque<u32>>,
    /// Where the next run begins, in bytes.
    tail: Cell<u64>,
    /// Blocks in the next run.
    step: Cell<u32>,
    /// Fewer places than this are few.
    few: Cell<u32>,
    /// When the last run began.
    ran_ns: Cell<u64>,
    /// When a place was taken last.
    taken_ns: Cell<u64>,
    /// Whether the file system is asked for the space itself, or only for the address range.
    pub(super) space: bool,
    pub(super) busy: Cell<bool>,
    /// Tasks that wait for space: the service must make some now, or say why it cannot.
    wanted: Cell<u32>,
    failure: RefCell<Option<FormatError>>,
    failures: Cell<u64>,
    work: Notify,
    pub(super) done: Notify,
}

impl Reserve {
    pub(super) fn new(tail: u64, space: bool) -> Self {
        Self {
            ready: RefCell::default(),
            tail: Cell::new(tail),
            step: Cell::new(STEP_MIN),
            few: Cell::new(0),
            ran_ns: Cell::new(0),
            taken_ns: Cell::new(0),
            space,
            busy: Cell::new(false),
            wanted: Cell::new(0),
            failure: RefCell::new(None),
            failures: Cell::new(0),
            work: Notify::default(),
            done: Notify::default(),
        }
    }

    /// Where the first place that is ready begins, in bytes.
    pub(super) fn first_place(&self) -> Option<u64> {
        self.ready.borrow().iter().min().map(|&sector| u64::from(sector) * SECTOR_LEN)
    }

    /// Places that are ready.
    pub(super) fn ready(&self) -> u32 {
        self.ready.borrow().len() as u32
    }

    /// When a place was taken last, in nanoseconds.
    pub(super) fn taken_ns(&self) -> u64 {
        self.taken_ns.get()
    }

    /// A place for a block, if one is ready.
    pub(super) fn take(&self) -> Option<u32> {
        self.ready.borrow_mut().pop_front()
    }

    /// Every place that is ready.
    pub(super) fn for_each_ready(&self, mut each: impl FnMut(u32)) {
        self.ready.borrow().iter().for_each(|&sector| each(sector));
    }

    /// Forgets the places that end behind `limit`; where the last of the others ends, zero without any.
    pub(super) fn keep_until(&self, limit: u64, end: impl Fn(u32) -> u64) -> u64 {
        let mut ready = self.ready.borrow_mut();
        let before = ready.len();
        ready.retain(|&sector| end(sector) <= limit);
        if ready.len() < before {
            // The next run begins when these are used up, and is a short one.
            self.few.set(0);
            self.step.set(STEP_MIN);
        }
        ready.iter().map(|&sector| end(sector)).max().unwrap_or(0)
    }

    pub(super) fn set_tail(&self, tail: u64) {
        self.tail.set(tail);
    }

    /// Where the reserved space ends, in bytes.
    pub(super) fn tail(&self) -> u64 {
        self.tail.get()
    }

    /// There is room again: the next run begins before the last is used up.
    pub(super) fn may_go_on(&self, tasks: &tapio_ring::Tasks) {
        self.few.set(self.few.get().max(STEP_MIN));
        self.work.notify_all(tasks);
    }

    fn is_low(&self) -> bool {
        self.wanted.get() > 0 || self.ready.borrow().len() < self.few.get() as usize
    }

    /// A run of `count` blocks is there; with `late`, tasks had to wait for it, or nearly.
    fn ran(&self, count: u32, late: bool) {
        self.few.set(count - count * 3 / 8);
        self.step.set(if late { (count * 2).min(STEP_MAX) } else { count });
    }
}

impl<S: Storage> VhdLayer<S> {
    /// Waits until the service has tried to make room once more; then the caller looks again, because another may have
    /// taken what there is, or given its block a place.
    pub(super) async fn wait_for_space(&self) -> Result<()> {
        let reserve = &self.writer()?.reserve;
        let before = reserve.failures.get();
        reserve.wanted.set(reserve.wanted.get() + 1);
        reserve.work.notify_all(&self.tasks);
        reserve.done.wait(&self.tasks).await;
        if reserve.failures.get() != before && reserve.ready.borrow().is_empty() {
            let failure = reserve.failure.borrow().clone();
            let failure = failure
                .unwrap_or_else(|| FormatError::new(FormatErrorKind::OutOfSpace, "no space for a new block"));
            if failure.kind() == FormatErrorKind::OutOfSpace {
                self.missed_room(self.writer()?);
            }
            return Err(failure);
        }
        Ok(())
    }

    /// Wakes the service because the reserve may have run low.
    pub(super) fn watch_reserve(&self, writer: &Writer) {
        writer.reserve.taken_ns.set(self.tasks.turn_ns());
        if writer.reserve.is_low() && !writer.reserve.busy.get() {
            writer.reserve.work.notify_all(&self.tasks);
        }
    }

    /// The service that keeps the reserve filled. Sleeps while no block is allocated.
    pub(super) async fn keep_reserve(self: Rc<Self>) {
        let Some(writer) = &self.writer else { return };
        let reserve = &writer.reserve;
        while !writer.closing.get() {
            let due = reserve.taken_ns.get() + KEPT_NS;
            let is_idle = !reserve.is_low() && self.tasks.turn_ns() >= due;
            if !reserve.is_low() && (reserve.ready.borrow().is_empty() || !self.store.info().resizable) {
                reserve.work.wait(&self.tasks).await;
                continue;
            }
            if !reserve.is_low() && !is_idle {
                reserve.work.wait_until(&self.tasks, due).await;
                continue;
            }
            if reserve.busy.get() {
                // The image is being grown, which moves the end of the file as well.
                reserve.done.wait(&self.tasks).await;
                continue;
            }
            reserve.busy.set(true);
            if is_idle {
                // What fails is tried again as much later.
                reserve.taken_ns.set(self.tasks.turn_ns());
                let _ = Box::pin(self.give_reserve_back(writer)).await;
                reserve.busy.set(false);
                reserve.done.notify_all(&self.tasks);
                continue;
            }
            // A waiter that finds nothing afterwards asks again; one that is slow to look must not make this loop spin.
            let wanted = reserve.wanted.replace(0);
            let result = self.make_room(writer, wanted).await;
            reserve.busy.set(false);
            let failed = result.is_err();
            if let Err(error) = result {
                *reserve.failure.borrow_mut() = Some(error);
                reserve.failures.set(reserve.failures.get() + 1);
            }
            reserve.done.notify_all(&self.tasks);
            if failed && writer.closing.get() {
                // The closing task has rung already.
                break;
            } else if failed {
                // Another attempt at once would fail as well; the next request that needs a block asks.
                reserve.work.wait(&self.tasks).await;
            } else {
                // Waiters take what they need before the reserve is looked at again.
                self.tasks.yield_now().await;
            }
        }
        // The remaining waiters must not wait for ever.
        reserve.failures.set(reserve.failures.get() + 1);
        reserve.done.notify_all(&self.tasks);
        writer.service_ends(&self.tasks);
    }

    pub(super) fn end_reserve_service(&self, writer: &Writer) {
        writer.reserve.work.notify_all(&self.tasks);
    }

    /// Sets aside a run of blocks; a shorter one when the storage is nearly full.
    async fn make_room(&self, writer: &Writer, wanted: u32) -> Result<()> {
        let reserve = &writer.reserve;
        self.reclaim(writer).await;
        let spoken_for = self.table.allocated() + reserve.ready.borrow().len() as u32;
        let left = self.table.len().saturating_sub(spoken_for);
        if left == 0 {
            // Every block has its place: nothing will ever be low again.
            reserve.few.set(0);
            return Ok(());
        }
        let now = self.tasks.turn_ns();
        if wanted == 0 && now - reserve.ran_ns.replace(now) > LASTS_NS {
            reserve.step.set((reserve.step.get() / 2).max(STEP_MIN));
        }
        let step = reserve.step.get().max(wanted.saturating_mul(2)).min(STEP_MAX);
        let mut count = step.min(left);
        loop {
            let made = match self.reuse(writer, count).await {
                Ok(0) => self.make_run(writer, count).await,
                reused => reused,
            };
            match made {
                Ok(made) => {
                    let rest = (reserve.ready.borrow().len() as u32).saturating_sub(made);
                    reserve.ran(made, wanted > 0 || reserve.wanted.get() > 0 || rest < made / 4);
                    return Ok(());
                }
                Err(error) if error.kind() == FormatErrorKind::OutOfSpace && count > 1 => {
                    count /= 4;
                    count = count.max(1);
                }
                // Another look finds places that there was no room to remember.
                Err(error) if error.kind() == FormatErrorKind::OutOfSpace && writer.freed.has_forgotten() => {
                    self.find_places(writer, reserve.tail.get())?;
                }
                Err(error) => {
                    // What is left is used up before the storage is asked again.
                    reserve.few.set(0);
                    reserve.step.set(STEP_MIN);
                    return Err(error);
                }
            }
        }
    }

    /// Gives back a reserve that nothing is taken from.
    async fn give_reserve_back(&self, writer: &Writer) -> Result<()> {
        let reserve = &writer.reserve;
        let places = std::mem::take(&mut *reserve.ready.borrow_mut());
        let end =
            self.data_end().max(writer.freed.end(|sector| self.place_span(sector).end().unwrap_or(u64::MAX)));
        if let Err(error) = self.trim_to(end, reserve.tail.get()).await {
            reserve.ready.borrow_mut().extend(places);
            return Err(error);
        }
        reserve.set_tail(end);
        self.will_have(writer, 0);
        reserve.few.set(0);
        reserve.step.set(STEP_MIN);
        places.into_iter().filter(|&sector| u64::from(sector) * SECTOR_LEN < end).for_each(|sector| {
            writer.freed.not_taken(sector);
        });
        self.reclaim(writer).await;
        Ok(())
    }

    /// Makes up to `count` places ready that blocks had before; says how many.
    async fn reuse(&self, writer: &Writer, count: u32) -> Result<u32> {
        let is_file = self.store.info().resizable;
        let places = writer.freed.lowest(count);
        for &sector in &places {
            let at = u64::from(sector) * SECTOR_LEN;
            let failed = |what: &'static str| move |error| FormatError::io(what, error).with_offset(at);
            self.renew(sector).await.map_err(failed("cannot clear the place of a new block"))?;
            if is_file && writer.reserve.space {
                // As for a place at the end of the file.
                let promised = self.store.allocate(self.place_span(sector), true).await;
                promised.map_err(failed("cannot set space aside for a new block"))?;
            }
        }
        if places.is_empty() {
            return Ok(0);
        }
        self.promise_bitmaps(writer, &places).await?;
        self.flush().await?;
        places.iter().for_each(|&sector| writer.freed.taken(sector));
        let made = places.len() as u32;
        writer.reserve.ready.borrow_mut().extend(places);
        Ok(made)
    }

    /// Where a file only grows in length, data may find the storage full, and the guest gets an error. Metadata of data
    /// that was accepted may not: bitmaps get their space now.
    async fn promise_bitmaps(&self, writer: &Writer, places: &[u32]) -> Result<()> {
        if writer.reserve.space || !self.store.info().resizable {
            return Ok(());
        }
        if writer.whole_early() {
            return self.write_wholes(writer, places.iter().copied()).await;
        }
        for &sector in places {
            let (span, _) = self.bitmap_span(writer, sector);
            let promised = self.store.allocate(span, true).await;
            promised.map_err(|error| {
                let what = "cannot set space aside for the bitmap of a new block";
                FormatError::io(what, error).with_offset(span.start)
            })?;
        }
        Ok(())
    }

    /// Notes in the log that the file has its length, or is about to have this one if that is more. Apart from
    /// [`Self::make_run`], whose future is part of every request's task.
    fn will_have(&self, writer: &Writer, new_len: u64) {
        let len = self.store.len();
        writer.log.will_have_len(len, len.max(new_len));
    }

    /// Makes `count` places ready at the end of the storage; says how many.
    async fn make_run(&self, writer: &Writer, count: u32) -> Result<u32> {
        let block_len = self.header.borrow().block_len;
        let resizable = self.store.info().resizable;
        let begin = writer.reserve.tail.get();
        // The footer that a file has at `begin` is left alone.
        let mut end = if resizable { begin + FOOTER_LEN } else { begin };
        let mut places = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let sector = layout::place_block(end, block_len)?;
            places.push(sector);
            end = u64::from(sector) * SECTOR_LEN + layout::block_span_len(block_len);
        }
        // The footer ends a block of the file system, so that it is written with all of it, as bitmaps are.
        let tail = if writer.pages { end + layout::DATA_ALIGN - FOOTER_LEN } else { end };
        let whole = Span::new(begin, tail + FOOTER_LEN - begin);
        let failed = |what: &'static str| move |error| FormatError::io(what, error).with_offset(begin);
        self.will_have(writer, tail + FOOTER_LEN);
        self.store
            .allocate(whole, writer.reserve.space)
            .await
            .map_err(failed("cannot set space aside for new blocks"))?;
        if resizable {
            self.promise_bitmaps(writer, &places).await?;
            self.write_footer_after(end, tail).await?;
            self.will_have(writer, 0);
        } else {
            let len = self.bitmap_len as usize;
            let mut zeroes = PageBuf::zeroed(len);
            for &sector in &places {
                let written;
                (zeroes, written) =
                    self.store.write_from(u64::from(sector) * SECTOR_LEN, zeroes, 0..len).await;
                written.map_err(failed("cannot clear the bitmap of a new block"))?;
            }
        }
        self.store.flush().await.map_err(failed("cannot make space for new blocks durable"))?;
        writer.reserve.ready.borrow_mut().extend(places);
        writer.reserve.tail.set(tail);
        Ok(count)
    }

    /// Writes the footer at `at`.
    pub(super) async fn write_footer(&self, at: u64) -> Result<()> {
        self.write_footer_after(at, at).await
    }

    /// Writes the footer at `at`, and zeroes from `from` on before it.
    async fn write_footer_after(&self, from: u64, at: u64) -> Result<()> {
        let before = (at - from) as usize;
        let mut page = PageBuf::zeroed(before + FOOTER_BYTES);
        page[before..].copy_from_slice(&self.footer.borrow().encode());
        let len = page.len();
        let (_, written) = self.store.write_from(from, page, 0..len).await;
        written.map_err(|error| FormatError::io("cannot write the footer", error).with_offset(at))
    }
}
