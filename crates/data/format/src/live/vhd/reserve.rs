//! Space for new blocks, set aside ahead of need.
//!
//! On a file: the file grows by a run of blocks in one step, the file system guarantees that the new range reads as
//! zero, a footer is
//! written at the new end, and all that is made durable *before* the first of those blocks is used. The old footer
//! stays
//! where it is until the new one is durable, in a gap that no block uses; so a process that opens the file after a
//! power cut finds a footer at its end. On a device the footer never moves and the bitmaps of the run are zeroed.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use tapio_ring::{Notify, PageBuf, Storage};
use tapio_types::{SECTOR_LEN, Span};

use super::{VhdLayer, Writer};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::vhd::{FOOTER_LEN as FOOTER_BYTES, layout};

const FOOTER_LEN: u64 = FOOTER_BYTES as u64;
/// Blocks in the first run. Each run is twice the last, because an image that grows fast will go on growing.
const STEP_MIN: u32 = 4;
/// Blocks in the largest run: 512 MiB of 2 MiB blocks.
const STEP_MAX: u32 = 256;

/// Space for new blocks.
#[derive(Debug)]
pub(super) struct Reserve {
    /// Sectors where the bitmap of a new block may go; durable and zero.
    ready: RefCell<VecDeque<u32>>,
    /// Where the next run begins, in bytes.
    tail: Cell<u64>,
    step: Cell<u32>,
    /// Whether the file system is asked for the space itself, or only for the address range.
    space: bool,
    pub(super) busy: Cell<bool>,
    /// A task waits for space: the service must make some now, or say why it cannot.
    wanted: Cell<bool>,
    failure: RefCell<Option<FormatError>>,
    failures: Cell<u64>,
    work: Notify,
    pub(super) done: Notify,
}

impl Reserve {
    pub(super) fn new(tail: u64, space: bool) -> Self {
        Self {
            ready: RefCell::new(VecDeque::with_capacity(STEP_MAX as usize * 2)),
            tail: Cell::new(tail),
            step: Cell::new(STEP_MIN),
            space,
            busy: Cell::new(false),
            wanted: Cell::new(false),
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

    /// A place for a block, if one is ready.
    pub(super) fn take(&self) -> Option<u32> {
        self.ready.borrow_mut().pop_front()
    }

    /// Every place that is ready.
    pub(super) fn for_each_ready(&self, mut each: impl FnMut(u32)) {
        self.ready.borrow().iter().for_each(|&sector| each(sector));
    }

    pub(super) fn set_tail(&self, tail: u64) {
        self.tail.set(tail);
    }

    /// Where the reserved space ends, in bytes.
    pub(super) fn tail(&self) -> u64 {
        self.tail.get()
    }

    fn is_low(&self) -> bool {
        self.wanted.get()
            || (self.step.get() > STEP_MIN && self.ready.borrow().len() < self.step.get() as usize / 4)
    }
}

impl<S: Storage> VhdLayer<S> {
    /// Waits until the service has tried to make room once more; then the caller looks again, because another may have
    /// taken what there is, or given its block a place.
    pub(super) async fn wait_for_space(&self) -> Result<()> {
        let reserve = &self.writer()?.reserve;
        let before = reserve.failures.get();
        reserve.wanted.set(true);
        reserve.work.notify_all(&self.tasks);
        reserve.done.wait(&self.tasks).await;
        if reserve.failures.get() != before && reserve.ready.borrow().is_empty() {
            let failure = reserve.failure.borrow().clone();
            return Err(failure.unwrap_or_else(|| {
                FormatError::new(FormatErrorKind::OutOfSpace, "no space for a new block")
            }));
        }
        Ok(())
    }

    /// Wakes the service because the reserve may have run low.
    pub(super) fn watch_reserve(&self, writer: &Writer) {
        if writer.reserve.is_low() && !writer.reserve.busy.get() {
            writer.reserve.work.notify_all(&self.tasks);
        }
    }

    /// The service that keeps the reserve filled. Sleeps while no block is allocated.
    pub(super) async fn keep_reserve(self: Rc<Self>) {
        let Some(writer) = &self.writer else { return };
        let reserve = &writer.reserve;
        while !writer.closing.get() {
            if !reserve.is_low() {
                reserve.work.wait(&self.tasks).await;
                continue;
            }
            if reserve.busy.get() {
                // The image is being grown, which moves the end of the file as well.
                reserve.done.wait(&self.tasks).await;
                continue;
            }
            reserve.busy.set(true);
            // A waiter that finds nothing afterwards asks again; one that is slow to look must not make this loop spin.
            reserve.wanted.set(false);
            let result = self.make_room(writer).await;
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
    async fn make_room(&self, writer: &Writer) -> Result<()> {
        let reserve = &writer.reserve;
        self.reclaim(writer).await;
        let spoken_for = self.table.allocated() + reserve.ready.borrow().len() as u32;
        let left = self.table.len().saturating_sub(spoken_for);
        if left == 0 {
            // Every block has its place: nothing will ever be low again.
            reserve.step.set(STEP_MIN);
            return Ok(());
        }
        let mut count = reserve.step.get().min(left);
        loop {
            let made = match self.reuse(writer, count).await {
                Ok(false) => self.make_run(writer, count).await,
                reused => reused.map(drop),
            };
            match made {
                Ok(()) => {
                    reserve.step.set((reserve.step.get() * 2).min(STEP_MAX));
                    return Ok(());
                }
                Err(error) if error.kind() == FormatErrorKind::OutOfSpace && count > 1 => {
                    count /= 4;
                    count = count.max(1);
                    reserve.step.set(STEP_MIN);
                }
                // Another look finds places that there was no room to remember.
                Err(error) if error.kind() == FormatErrorKind::OutOfSpace && writer.freed.has_forgotten() => {
                    self.find_places(writer, reserve.tail.get())?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes up to `count` places ready that blocks had before; says whether there were any.
    async fn reuse(&self, writer: &Writer, count: u32) -> Result<bool> {
        let is_file = self.store.info().resizable;
        let places = writer.freed.lowest(count);
        for &sector in &places {
            let at = u64::from(sector) * SECTOR_LEN;
            let failed = |what: &'static str| move |error| FormatError::io(what, error).with_offset(at);
            self.renew(sector).await.map_err(failed("cannot clear the place of a new block"))?;
            if is_file {
                // As for a place at the end of the file.
                let span = self.place_span(sector);
                let promised = if writer.reserve.space { span } else { span.prefix(self.bitmap_len) };
                let promised = self.store.allocate(promised, true).await;
                promised.map_err(failed("cannot set space aside for a new block"))?;
            }
        }
        if places.is_empty() {
            return Ok(false);
        }
        self.flush().await?;
        places.iter().for_each(|&sector| writer.freed.taken(sector));
        writer.reserve.ready.borrow_mut().extend(places);
        Ok(true)
    }

    /// Notes in the log that the file has its length, or is about to have this one if that is more. Apart from
    /// [`Self::make_run`], whose future is part of every request's task.
    fn will_have(&self, writer: &Writer, new_len: u64) {
        let len = self.store.len();
        writer.log.will_have_len(len, len.max(new_len));
    }

    async fn make_run(&self, writer: &Writer, count: u32) -> Result<()> {
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
        let whole = Span::new(begin, end + FOOTER_LEN - begin);
        let failed = |what: &'static str| move |error| FormatError::io(what, error).with_offset(begin);
        self.will_have(writer, end + FOOTER_LEN);
        self.store
            .allocate(whole, writer.reserve.space)
            .await
            .map_err(failed("cannot set space aside for new blocks"))?;
        if resizable {
            if !writer.reserve.space {
                // Data may find the storage full, and the guest gets an error. Metadata of data that was accepted may
                // not.
                for &sector in &places {
                    let bitmap = Span::new(u64::from(sector) * SECTOR_LEN, self.bitmap_len);
                    let promised = self.store.allocate(bitmap, true).await;
                    promised.map_err(failed("cannot set space aside for the bitmap of a new block"))?;
                }
            }
            self.write_footer(end).await?;
            self.will_have(writer, 0);
        } else {
            let zeroes = PageBuf::zeroed(self.bitmap_len as usize);
            for &sector in &places {
                // SAFETY: the page is owned here until the operation has ended, whose future is polled to its end.
                let written = self
                    .store
                    .write(u64::from(sector) * SECTOR_LEN, unsafe {
                        zeroes.segments(self.bitmap_len as usize)
                    })
                    .await;
                written.map_err(failed("cannot clear the bitmap of a new block"))?;
            }
        }
        self.store.flush().await.map_err(failed("cannot make space for new blocks durable"))?;
        writer.reserve.ready.borrow_mut().extend(places);
        writer.reserve.tail.set(end);
        Ok(())
    }

    /// Writes the footer at `at`.
    pub(super) async fn write_footer(&self, at: u64) -> Result<()> {
        let mut page = PageBuf::zeroed(FOOTER_BYTES);
        page.copy_from_slice(&self.footer.borrow().encode());
        // SAFETY: the page is owned here until the operation has ended, whose future is polled to its end.
        let written = self.store.write(at, unsafe { page.segments(FOOTER_BYTES) }).await;
        written.map_err(|error| FormatError::io("cannot write the footer", error).with_offset(at))
    }
}
