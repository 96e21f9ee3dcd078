//! Blocks that are given back, and what becomes of their places.
//!
//! A guest that no longer needs a block gives it back: the block is unallocated in memory at once. On disk it takes
//! these steps, each of which leaves an image that reads the same:
//!
//! ```text
//!   leaving   the table on disk still has the block, whose data were made zero before. Where every new block is
//!             whole, a write to it meanwhile takes the place back. With the next batch its bit in the batmap is
//!             cleared and made durable, then its table entry; and until no record of the block is left in the
//!             intent log, it gets no other place.
//!   cooling   a request that began earlier may still be reading or writing at the old place
//! free      no request holds the place: what is left there is punched out of the file, and a new block may have it
//! ```
//!
//! A place is used again like one at the end of the file: its bitmap and, in a file, its data read as zero, and that
//! is durable before the first write goes there.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use tapio_ring::{Storage, Zeroing};
use tapio_types::{SECTOR_LEN, Span};

use super::intent::Intent;
use super::traffic::Visits;
use super::{VhdLayer, Writer};
use crate::error::Result;
use crate::vhd::layout;

/// Blocks that may be leaving before a request that gives another back waits for a batch.
const LEAVING_MAX: usize = 4096;
/// Free places that are remembered. More are found again by looking at the table.
const FREE_MAX: usize = 16384;

/// How far a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No batch has it yet.
    Fresh,
    /// A batch is writing its removal.
    Taken,
    /// Its removal is durable, but records of it may be left in the intent log.
    Logged,
}

#[derive(Clone, Copy, Debug)]
struct Leaving {
    sector: u32,
    /// Every sector of it is there and zero.
    blank: bool,
    stage: Stage,
}

/// What was given back.
#[derive(Debug, Default)]
pub(super) struct Freed {
    leaving: RefCell<BTreeMap<u32, Leaving>>,
    /// A block that is leaving has data that are not zero.
    has_data: Cell<bool>,
    /// Places that the table no longer names: those freed in this epoch, and in the one before.
    cooling: [RefCell<Vec<u32>>; 2],
    /// Places that no request holds, not yet punched out.
    left: RefCell<Vec<u32>>,
    places: RefCell<BTreeSet<u32>>,
    /// There were more places than are remembered.
    forgotten: Cell<bool>,
}

/// What the storage keeps at the place of a block, as [`VhdLayer::look`] has found.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    sector: u32,
    /// Of the writes to the block, if none was in flight.
    mark: Option<u64>,
    is_hole: bool,
}

/// What giving a block a place found.
pub(super) enum Again {
    /// The block is not leaving.
    No,
    /// Its removal is on its way to the disk: wait for that.
    Wait,
    /// It has its place again.
    Back(u32),
}

impl Freed {
    /// Whether every removal is durable and forgotten.
    pub(super) fn is_settled(&self) -> bool {
        self.leaving.borrow().is_empty()
    }

    /// Whether so many are leaving that they should be waited for.
    pub(super) fn is_crowded(&self) -> bool {
        self.leaving.borrow().len() >= LEAVING_MAX
    }

    /// What the next batch removes: their blocks.
    pub(super) fn take(&self) -> Vec<u32> {
        let mut leaving = self.leaving.borrow_mut();
        let taken = leaving.iter_mut().filter(|(_, one)| one.stage != Stage::Taken).map(|(&block, one)| {
            one.stage = if one.stage == Stage::Fresh { Stage::Taken } else { one.stage };
            block
        });
        taken.collect()
    }

    /// The batch with `blocks` is durable. `forgotten`: no record from before it is left in the intent log.
    pub(super) fn gone(&self, blocks: &[u32], forgotten: bool) {
        let mut leaving = self.leaving.borrow_mut();
        for block in blocks {
            if let Some(one) = leaving.get_mut(block) {
                one.stage = Stage::Logged;
                if forgotten {
                    self.cooling[0].borrow_mut().push(one.sector);
                    leaving.remove(block);
                }
            }
        }
    }

    /// The batch with `blocks` failed: what it removed may or may not be gone.
    pub(super) fn not_gone(&self, blocks: &[u32]) {
        let mut leaving = self.leaving.borrow_mut();
        for block in blocks {
            if let Some(one) = leaving.get_mut(block).filter(|one| one.stage == Stage::Taken) {
                one.stage = Stage::Fresh;
            }
        }
    }

    /// `(block, sector)` of those among the entries from `first` that are leaving and in no batch: to the disk they
    /// are still there.
    pub(super) fn for_each_fresh(&self, first: u32, count: u32, mut each: impl FnMut(u32, u32)) {
        let leaving = self.leaving.borrow();
        if leaving.is_empty() {
            return;
        }
        for (&block, one) in leaving.range(first..first.saturating_add(count)) {
            if one.stage == Stage::Fresh {
                each(block, one.sector);
            }
        }
    }

    /// Lets places go on to the next step as far as `visits` allows.
    fn advance(&self, visits: &Visits) {
        let [fresh, old] = &self.cooling;
        while visits.earlier_left() {
            self.left.borrow_mut().append(&mut old.borrow_mut());
            if fresh.borrow().is_empty() {
                return;
            }
            visits.change_shift();
            fresh.swap(old);
        }
    }

    /// Free places, the lowest, so that the end of the file can come down; at most `count`.
    pub(super) fn lowest(&self, count: u32) -> Vec<u32> {
        self.places.borrow().iter().take(count as usize).copied().collect()
    }

    /// How many places are free.
    pub(super) fn count(&self) -> u64 {
        self.places.borrow().len() as u64
    }

    /// The place is not free any more.
    pub(super) fn taken(&self, sector: u32) {
        self.places.borrow_mut().remove(&sector);
    }

    /// The first place that a new block may have, or that was one's.
    pub(super) fn first_place(&self) -> Option<u32> {
        let mut first = self.places.borrow().first().copied();
        self.for_each_pending(|sector| first = Some(first.map_or(sector, |known| known.min(sector))));
        first
    }

    /// Where the last of all places ends that are free or were a block's, by what `end` says of each; zero without any.
    pub(super) fn end(&self, end: impl Fn(u32) -> u64) -> u64 {
        let mut last = self.places.borrow().last().map_or(0, |&sector| end(sector));
        self.for_each_pending(|sector| last = last.max(end(sector)));
        last
    }

    /// Where the last place ends that was a block's and is not free yet; zero without any.
    pub(super) fn pending_end(&self, end: impl Fn(u32) -> u64) -> u64 {
        let mut last = 0;
        self.for_each_pending(|sector| last = last.max(end(sector)));
        last
    }

    /// Forgets the free places that end behind `limit`; where the last of the others ends, zero without any.
    pub(super) fn keep_until(&self, limit: u64, end: impl Fn(u32) -> u64) -> u64 {
        let mut places = self.places.borrow_mut();
        places.retain(|&sector| end(sector) <= limit);
        places.last().map_or(0, |&sector| end(sector))
    }

    /// A place that was to be used again is not: it is punched out and free once more.
    pub(super) fn not_taken(&self, sector: u32) {
        self.left.borrow_mut().push(sector);
    }

    /// Takes a place that no request holds.
    pub(super) fn put(&self, sector: u32) {
        let mut places = self.places.borrow_mut();
        if places.len() < FREE_MAX {
            places.insert(sector);
        } else {
            self.forgotten.set(true);
        }
    }

    /// Whether looking at the table may find places that are not remembered.
    pub(super) fn has_forgotten(&self) -> bool {
        self.forgotten.replace(false)
    }

    /// Every place that is neither in the table nor free.
    fn for_each_pending(&self, mut each: impl FnMut(u32)) {
        self.leaving.borrow().values().for_each(|one| each(one.sector));
        self.cooling.iter().for_each(|list| list.borrow().iter().for_each(|sector| each(*sector)));
        self.left.borrow().iter().for_each(|sector| each(*sector));
    }
}

impl<S: Storage> VhdLayer<S> {
    /// The block that holds the byte `at`, and the span of the disk that it keeps.
    pub fn block_span(&self, at: u64) -> (u32, Span) {
        let (block, within) = self.block_of(at);
        let start = at - within;
        (block, Span::new(start, self.block_len().min(self.virtual_len().saturating_sub(start))))
    }

    /// Asks the storage what it keeps at the place of `block`. Writes go on meanwhile, and what they change is seen by
    /// [`VhdLayer::give_back`].
    pub async fn look(&self, block: u32) -> Look {
        let unknown = Look { sector: 0, mark: None, is_hole: false };
        // A hole in an encrypted image is not zero, and a write in flight may fill one.
        let mark = if self.cipher.is_some() { None } else { self.flying.quiet_mark(block) };
        let (Some(sector), Some(_)) = (self.table.sector(block), mark) else { return unknown };
        let place = Span::new(self.data_offset(sector), self.block_len());
        let (len, is_data) = self.store.data_run(place).await;
        Look { sector, mark, is_hole: !is_data && len == place.len }
    }

    /// Whether `block` could be given back: it has a place, and with `all` clear the storage keeps nothing of it that a
    /// reader could see, as `look` has found. `all`: the caller has just made every sector of it zero, or does not need
    /// it.
    pub fn may_give_back(&self, block: u32, all: bool, look: Look) -> bool {
        let (Some(_), Some(sector)) = (&self.writer, self.table.sector(block)) else { return false };
        all || self.is_hole(block, sector, look)
    }

    /// Whether the storage keeps nothing at the place of `block`: it was so at a look, and no write has begun since.
    fn is_hole(&self, block: u32, sector: u32, look: Look) -> bool {
        let is_as_seen = look.sector == sector && look.mark == self.flying.quiet_mark(block);
        look.is_hole && is_as_seen
    }

    /// Gives `block` back if [`VhdLayer::may_give_back`]. Where the image has a parent, the caller knows that the
    /// layers below read as zero there. Returns whether [`VhdLayer::settle`] must be awaited.
    pub fn give_back(&self, block: u32, all: bool, look: Look) -> bool {
        let Some(writer) = self.writer.as_ref().filter(|_| self.may_give_back(block, all, look)) else {
            return false;
        };
        let Some(sector) = self.table.sector(block) else { return false };
        // A write in flight may still put data there, and one that ended since a sector was made zero has done so: they
        // come before what gave the block back.
        let is_zero = self.is_hole(block, sector, look);
        let leaving = Leaving { sector, blank: is_zero && self.table.is_full(block), stage: Stage::Fresh };
        self.table.clear(block);
        self.bitmaps.borrow_mut().remove(block);
        writer.dirty.borrow_mut().mark_table(block);
        writer.freed.leaving.borrow_mut().insert(block, leaving);
        writer.freed.has_data.set(writer.freed.has_data.get() || !is_zero);
        self.note_dirty(writer);
        self.watch_spare(writer);
        writer.freed.is_crowded()
    }

    /// Whether data that a guest does not see any more could come back if the process died: before a reply says that
    /// they read as zero, [`VhdLayer::forget_freed`] must be awaited.
    pub fn has_freed_data(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| writer.freed.has_data.get())
    }

    /// Waits until no block that was given back can come back when the process dies.
    ///
    /// # Errors
    /// The storage's.
    pub async fn forget_freed(&self) -> Result<()> {
        let Some(writer) = &self.writer else { return Ok(()) };
        while !writer.freed.is_settled() {
            self.sync().await?;
        }
        writer.freed.has_data.set(false);
        Ok(())
    }

    /// Gives `block` the place back that it is leaving, where that is still possible. The intent log has room.
    pub(super) fn take_back(&self, writer: &Writer, block: u32) -> Again {
        let mut all = writer.freed.leaving.borrow_mut();
        let Some(&leaving) = all.get(&block) else { return Again::No };
        // Only where "present and zero" is the same as "not present" there is nothing else to be put back.
        if leaving.stage != Stage::Fresh || !leaving.blank || !writer.whole_blocks {
            return Again::Wait;
        }
        let sector = leaving.sector;
        all.remove(&block);
        drop(all);
        self.table.set_sector(block, sector);
        self.table.set_full(block);
        // A batch being written may have passed the block over, and its records will be cleared with that batch.
        let mut dirty = writer.dirty.borrow_mut();
        dirty.mark_table(block);
        dirty.mark_whole(block);
        let fits = writer.log.append(Intent { block, sector, first: 0, count: 0 });
        debug_assert!(fits, "room was tested above");
        Again::Back(sector)
    }

    /// Punches out what is left at places that no request holds any more.
    pub(super) async fn reclaim(&self, writer: &Writer) {
        writer.freed.advance(&writer.visits);
        let is_file = self.store.info().resizable;
        loop {
            let Some(sector) = writer.freed.left.borrow_mut().pop() else { return };
            if is_file {
                // One that cannot be punched stays as it is: it is zeroed again before it is used.
                let _ = self.store.zero(self.place_span(sector), Zeroing::Unmap).await;
            }
            writer.freed.put(sector);
        }
    }

    /// The bytes of a place.
    pub(super) fn place_span(&self, sector: u32) -> Span {
        Span::new(u64::from(sector) * SECTOR_LEN, layout::block_span_len(self.header.borrow().block_len))
    }

    /// Makes a free place what a fresh one at the end of the file is; not yet durable.
    pub(super) async fn renew(&self, sector: u32) -> std::io::Result<()> {
        let mut span = self.place_span(sector);
        if !self.store.info().resizable {
            // Of a device nothing is expected but an empty bitmap.
            span.len = self.bitmap_len;
        }
        self.store.zero(span, Zeroing::Unmap).await
    }

    /// Looks for places between the blocks that no block has.
    pub(super) fn find_places(&self, writer: &Writer, tail: u64) -> Result<()> {
        let span_len = layout::block_span_len(self.header.borrow().block_len);
        let begin = layout::metadata_end(&self.header.borrow(), self.batmap.as_ref());
        let used = u64::from(self.table.allocated()) * span_len;
        if tail.saturating_sub(begin) < used + span_len {
            return Ok(());
        }
        let mut taken: Vec<u32> = Vec::with_capacity(self.table.allocated() as usize);
        self.table.for_each_allocated(|_, sector| taken.push(sector));
        writer.freed.for_each_pending(|sector| taken.push(sector));
        writer.reserve.for_each_ready(|sector| taken.push(sector));
        taken.sort_unstable();
        let mut at = begin;
        for next in taken.into_iter().map(|sector| u64::from(sector) * SECTOR_LEN).chain([tail]) {
            loop {
                let sector = layout::place_block(at, self.header.borrow().block_len)?;
                let end = self.place_span(sector).end().unwrap_or(u64::MAX);
                if end > next {
                    break;
                }
                writer.freed.put(sector);
                at = end;
            }
            at = at.max(next.saturating_add(span_len));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leave(freed: &Freed, block: u32) {
        let leaving = Leaving { sector: block * 10, blank: true, stage: Stage::Fresh };
        freed.leaving.borrow_mut().insert(block, leaving);
    }

    fn fresh(freed: &Freed) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        freed.for_each_fresh(0, u32::MAX, |block, sector| found.push((block, sector)));
        found
    }

    #[test]
    fn a_place_is_free_when_its_removal_is_durable_and_it_has_no_visitor() {
        let (freed, visits) = (Freed::default(), Visits::default());
        leave(&freed, 1);
        let reader = visits.enter();
        let batch = freed.take();
        leave(&freed, 2);
        assert_eq!((batch.as_slice(), fresh(&freed)), (&[1][..], vec![(2, 20)]));
        freed.not_gone(&batch);
        assert_eq!(fresh(&freed), [(1, 10), (2, 20)]);
        let batch = freed.take();
        // Records may be left: the blocks may not have another place yet.
        freed.gone(&batch, false);
        assert!(!freed.is_settled());
        freed.advance(&visits);
        let batch = freed.take();
        assert_eq!(batch, [1, 2]);
        freed.gone(&batch, true);
        assert!(freed.is_settled());
        freed.advance(&visits);
        assert!(freed.left.borrow().is_empty(), "a reader is still there");
        drop(reader);
        freed.advance(&visits);
        assert_eq!(*freed.left.borrow(), [10, 20]);
    }
}
