//! Bringing bitmaps and table entries to disk, in batches and in order.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use tapio_ring::{PageBuf, Storage, Tasks};
use tapio_types::{SECTOR_LEN, Span};

use super::{CAPACITY, Sleeping, VhdLayer, Writer};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::vhd::{BitOrder, FOOTER_LEN, bitmap, layout};

/// Metadata that no flush writes is written back after this long.
const WRITEBACK_AFTER_NS: u64 = 1_000_000_000;
/// Metadata writes in flight at once.
const PARALLEL: usize = 32;
/// Records in the log that begin a batch before its time: few enough that a batch takes milliseconds, and that the
/// other half of the log is far from full when it ends.
const BATCH_AT: u32 = CAPACITY / 4;
/// Records beyond which answers wait for the next batch to begin: what is in flight still finds room in the log.
const CROWDED_AT: u32 = CAPACITY / 4 * 3;
/// Table sectors this close to each other are written in one piece, with what lies between.
const TABLE_GAP: u32 = 8;
/// The longest piece of the table written at once, in sectors.
const TABLE_PIECE: u32 = 256;
const ENTRIES_PER_SECTOR: u32 = SECTOR_LEN as u32 / 4;

/// What the disk does not know yet.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    /// One bit a sector of the table.
    table: Vec<u64>,
    table_any: bool,
    /// Blocks whose bitmap has new bits.
    bitmaps: Vec<u32>,
    /// New blocks that are present as a whole, whose bitmap on disk is still empty.
    wholes: Vec<u32>,
    /// The intent log was full: answers wait for the next batch.
    pub(super) overflow: bool,
    /// Blocks became present as a whole since the batmap on disk was written.
    pub(super) batmap: bool,
}

impl Dirty {
    pub(super) fn new(entries: u32) -> Self {
        let sectors = entries.div_ceil(ENTRIES_PER_SECTOR) as usize;
        Self { table: vec![0; sectors.div_ceil(64)], ..Self::default() }
    }

    pub(super) fn mark_table(&mut self, block: u32) {
        let sector = block / ENTRIES_PER_SECTOR;
        self.table[sector as usize / 64] |= 1 << (sector % 64);
        self.table_any = true;
    }

    pub(super) fn mark_bitmap(&mut self, block: u32) {
        self.bitmaps.push(block);
        self.batmap = true;
    }

    pub(super) fn mark_whole(&mut self, block: u32) {
        self.wholes.push(block);
        self.batmap = true;
    }

    fn is_clean(&self) -> bool {
        !self.table_any && self.bitmaps.is_empty() && self.wholes.is_empty()
    }

    /// The table has `entries` now.
    pub(super) fn grow(&mut self, entries: u32) {
        let sectors = entries.div_ceil(ENTRIES_PER_SECTOR) as usize;
        self.table.resize(self.table.len().max(sectors.div_ceil(64)), 0);
    }
}

/// One batch: what it writes, taken at one moment.
struct Batch {
    half: u32,
    table: Vec<(u32, u32)>,
    bitmaps: Vec<(u32, Box<[u8]>)>,
    wholes: Vec<u32>,
    /// Blocks that were given back.
    freed: Vec<u32>,
    /// The other half of the log had no records when this batch was taken.
    is_last: bool,
    /// It writes what [`Writer::owes_table`] was set for.
    pays: bool,
    /// [`Writer::unrecorded`] when it was taken.
    unrecorded: u64,
}

impl Writer {
    pub(super) fn is_clean(&self) -> bool {
        self.dirty.borrow().is_clean() && self.freed.is_settled()
    }

    /// Whether a writer must await [`VhdLayer::settle`].
    pub(super) fn must_settle(&self) -> bool {
        self.log.used() >= BATCH_AT || self.owes_table.get()
    }

    /// Whether a kill of the process takes no sector away that a block has in memory: what the disk lacks is in the
    /// log.
    pub(super) fn is_recorded(&self) -> bool {
        self.unrecorded.get() == self.settled.get() && !self.owes_table.get()
    }

    pub(super) fn service_ends(&self, tasks: &Tasks) {
        self.services.set(self.services.get() - 1);
        self.service_ended.notify_all(tasks);
    }
}

impl<S: Storage> VhdLayer<S> {
    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// The storage's; then everything is still marked as not written, and the next call tries again.
    pub async fn sync(&self) -> Result<()> {
        match &self.writer {
            None => Ok(()),
            Some(writer) => writer.syncs.join(&self.tasks, || self.flush_or_commit(writer)).await,
        }
    }

    /// Waits while the intent log has no room: the answer to a write that has no record must wait for its batch.
    /// Starts a batch
    /// early when the log fills up.
    ///
    /// # Errors
    /// The storage's.
    pub async fn settle(&self) -> Result<()> {
        let Some(writer) = &self.writer else { return Ok(()) };
        if writer.dirty.borrow().overflow || writer.owes_table.get() || writer.freed.is_crowded() {
            return Box::pin(self.sync()).await;
        }
        self.note_dirty(writer);
        if writer.log.used() >= CROWDED_AT {
            return self.wait_for_log(writer, CROWDED_AT).await;
        }
        Ok(())
    }

    /// Waits until the log holds fewer than `records`: for the end of the batch that is being written, not for the one
    /// that begins then.
    pub(super) async fn wait_for_log(&self, writer: &Writer, records: u32) -> Result<()> {
        while writer.log.used() >= records {
            if writer.batch_failed.get() || writer.closing.get() {
                // The service tries again later; here its error is wanted.
                return Box::pin(self.sync()).await;
            }
            self.note_dirty(writer);
            writer.batch_began.wait(&self.tasks).await;
        }
        Ok(())
    }

    /// Wakes the service that writes back, if what it waits for has come. Costs two loads when it has not.
    pub(super) fn note_dirty(&self, writer: &Writer) {
        let wakes = match writer.sleeping.get() {
            Sleeping::No => false,
            Sleeping::UntilDirty => true,
            Sleeping::UntilDue => writer.log.used() >= BATCH_AT,
        };
        if wakes {
            writer.sleeping.set(Sleeping::No);
            writer.writeback.notify_all(&self.tasks);
        }
    }

    pub(super) async fn flush(&self) -> Result<()> {
        self.store
            .flush()
            .await
            .map_err(|error| FormatError::io("cannot make the image's data durable", error))
    }

    async fn flush_or_commit(&self, writer: &Writer) -> Result<()> {
        if writer.is_clean() {
            return self.flush().await;
        }
        // Boxed: every request task has room for a flush, and only one at a time commits.
        Box::pin(self.commit(writer)).await
    }

    async fn commit(&self, writer: &Writer) -> Result<()> {
        let batch = self.take_batch(writer);
        writer.batch_began.notify_all(&self.tasks);
        let result = async {
            // Before its entry is gone: a block that is not there must not be called full.
            self.clear_in_batmap(&batch.freed).await?;
            // Data first: a bitmap must never show a sector whose data could still be lost.
            if !batch.bitmaps.is_empty() {
                self.flush().await?;
            }
            self.write_batch(writer, &batch).await?;
            self.flush().await
        }
        .await;
        self.unpin(&batch);
        writer.batch_failed.set(result.is_err());
        match &result {
            Ok(()) => {
                if batch.pays {
                    writer.owes_table.set(false);
                }
                writer.settled.set(batch.unrecorded);
                writer.log.clear(batch.half);
                writer.freed.gone(&batch.freed, batch.is_last);
            }
            Err(_) => {
                self.return_batch(writer, batch);
                writer.batch_began.notify_all(&self.tasks);
            }
        }
        result
    }

    /// Takes what is dirty now. Bitmaps are copied: bits that are set later belong to data this batch does not wait
    /// for.
    fn take_batch(&self, writer: &Writer) -> Batch {
        let mut dirty = writer.dirty.borrow_mut();
        let mut cache = self.bitmaps.borrow_mut();
        dirty.overflow = false;
        let half = writer.log.switch();
        let is_last = writer.log.used() == 0;
        let bitmaps = dirty.bitmaps.drain(..).filter_map(|block| {
            let entry = cache.entry(block)?;
            entry.dirty = false;
            // Until the batch is durable a reader must find these bits here, not on disk.
            entry.pinned = true;
            let mut bits = entry.bits.clone();
            self.bit_order.swap(&mut bits);
            Some((block, bits))
        });
        let bitmaps = bitmaps.collect();
        let wholes = std::mem::take(&mut dirty.wholes);
        let table = dirty_ranges(&mut dirty.table);
        dirty.table_any = false;
        Batch {
            half,
            table,
            bitmaps,
            wholes,
            freed: writer.freed.take(),
            is_last,
            pays: writer.owes_table.get(),
            unrecorded: writer.unrecorded.get(),
        }
    }

    fn unpin(&self, batch: &Batch) {
        let mut cache = self.bitmaps.borrow_mut();
        for (block, _) in &batch.bitmaps {
            if let Some(entry) = cache.entry(*block) {
                entry.pinned = false;
            }
        }
    }

    /// A batch failed: all of it is dirty again. Its records stay in force in their half of the log, and new ones go
    /// behind
    /// them there once that half is active again: applying a record twice does no harm.
    fn return_batch(&self, writer: &Writer, batch: Batch) {
        writer.freed.not_gone(&batch.freed);
        let mut dirty = writer.dirty.borrow_mut();
        for (first, count) in batch.table {
            for sector in first..first + count {
                dirty.mark_table(sector * ENTRIES_PER_SECTOR);
            }
        }
        for block in batch.wholes {
            dirty.mark_whole(block);
        }
        let mut cache = self.bitmaps.borrow_mut();
        for (block, _) in batch.bitmaps {
            if let Some(entry) = cache.entry(block)
                && !std::mem::replace(&mut entry.dirty, true)
            {
                dirty.mark_bitmap(block);
            }
        }
    }

    async fn write_batch(&self, writer: &Writer, batch: &Batch) -> Result<()> {
        let bitmaps = batch.bitmaps.iter().filter_map(|(block, bits)| {
            let (span, within) = self.bitmap_span(writer, self.table.sector(*block)?);
            let mut page = PageBuf::zeroed(span.len as usize);
            page[within..].copy_from_slice(bits);
            Some(self.write_page(span, page, "cannot write a bitmap"))
        });
        run_all(bitmaps, PARALLEL).await?;
        let wholes = batch.wholes.iter().filter_map(|&block| self.table.sector(block));
        self.write_wholes(writer, wholes).await?;
        let mut page = PageBuf::zeroed(TABLE_PIECE as usize * SECTOR_LEN as usize);
        let table_offset = self.header.borrow().table_offset;
        for &(first, count) in &batch.table {
            let len = count as usize * SECTOR_LEN as usize;
            let (block, blocks) = (first * ENTRIES_PER_SECTOR, count * ENTRIES_PER_SECTOR);
            self.table.encode(block, &mut page[..len]);
            // Given back since the batch was taken: on disk they stay until theirs.
            writer.freed.for_each_fresh(block, blocks, |freed, sector| {
                let at = (freed - block) as usize * 4;
                page[at..at + 4].copy_from_slice(&sector.to_be_bytes());
            });
            let at = table_offset + u64::from(first) * SECTOR_LEN;
            let written;
            (page, written) = self.store.write_from(at, page, 0..len).await;
            written
                .map_err(|error| FormatError::io("cannot write the block table", error).with_offset(at))?;
        }
        Ok(())
    }

    /// Where the bitmap at `sector` is written to, and where in that span it lies.
    ///
    /// File systems have blocks of 4096 bytes. Where one of them has never been written, a write of a part of it waits
    /// for everything in flight to the file and holds back all that comes after it (ext4, xfs). So a bitmap goes
    /// together with the gap before it, which is there because the data behind it are aligned, and belongs to nothing:
    /// all blocks end on such a border, metadata end before it, and of the file's footers only one that does not count
    /// any more may be there.
    pub(super) fn bitmap_span(&self, writer: &Writer, sector: u32) -> (Span, usize) {
        let at = u64::from(sector) * SECTOR_LEN;
        let page = at - at % layout::DATA_ALIGN;
        let begin = || layout::metadata_end(&self.header.borrow(), self.batmap.as_ref());
        if writer.pages && page >= begin() {
            (Span::new(page, at + self.bitmap_len - page), (at - page) as usize)
        } else {
            (Span::new(at, self.bitmap_len), 0)
        }
    }

    /// Writes into the bitmaps at `sectors` that every sector of their blocks is there.
    pub(super) async fn write_wholes(
        &self,
        writer: &Writer,
        sectors: impl Iterator<Item = u32>,
    ) -> Result<()> {
        let len = self.bitmap_len as usize;
        let mut ones = PageBuf::zeroed(layout::DATA_ALIGN.max(self.bitmap_len) as usize);
        let last = ones.len() - len;
        bitmap::set_range(&mut ones[last..], 0, (self.block_len() / SECTOR_LEN) as usize);
        if self.bit_order == BitOrder::LsbFirst {
            self.bit_order.swap(&mut ones[last..]);
        }
        let ones = Rc::new(ones);
        let writes = sectors.map(|sector| {
            let (span, _) = self.bitmap_span(writer, sector);
            let (ones, len) = (Rc::clone(&ones), ones.len());
            async move {
                let (_, written) =
                    self.store.write_from(span.start, ones, len - span.len as usize..len).await;
                written.map_err(|error| {
                    FormatError::io("cannot write the bitmap of a new block", error).with_offset(span.start)
                })
            }
        });
        run_all(writes, PARALLEL).await
    }

    async fn write_page(&self, span: Span, page: PageBuf, what: &'static str) -> Result<()> {
        let (_, written) = self.store.write_from(span.start, page, 0..span.len as usize).await;
        written.map_err(|error| FormatError::io(what, error).with_offset(span.start))
    }

    /// The service that writes metadata back when no flush does. Sleeps while there is nothing to write.
    pub(super) async fn keep_written(self: Rc<Self>) {
        let Some(writer) = &self.writer else { return };
        while !writer.closing.get() {
            if writer.is_clean() {
                writer.sleeping.set(Sleeping::UntilDirty);
                writer.writeback.wait(&self.tasks).await;
                continue;
            }
            self.pause_writeback(writer, BATCH_AT).await;
            // A failure is told to the guest at its next flush; here it is only tried again later.
            if writer.closing.get() {
                break;
            }
            match self.sync().await {
                Ok(()) => self.reclaim(writer).await,
                Err(_) => self.pause_writeback(writer, u32::MAX).await,
            }
        }
        writer.service_ends(&self.tasks);
    }

    /// Waits a while, or until the log holds `records`.
    async fn pause_writeback(&self, writer: &Writer, records: u32) {
        let due = self.tasks.turn_ns() + WRITEBACK_AFTER_NS;
        while !writer.closing.get() && writer.log.used() < records && self.tasks.turn_ns() < due {
            writer.sleeping.set(Sleeping::UntilDue);
            writer.writeback.wait_until(&self.tasks, due).await;
        }
    }

    /// Ends the services, makes everything durable and leaves the image as other tools expect it: batmap true,
    /// footer right behind
    /// the data, nothing after it.
    ///
    /// # Errors
    /// The storage's. The image is then as after a power cut: valid, to be put in order at the next opening.
    pub async fn close(&self) -> Result<()> {
        let Some(writer) = &self.writer else { return Ok(()) };
        writer.closing.set(true);
        writer.writeback.notify_all(&self.tasks);
        self.end_reserve_service(writer);
        self.end_room_service(writer);
        while writer.services.get() > 0 {
            writer.service_ended.wait(&self.tasks).await;
        }
        self.forget_freed().await?;
        self.sync().await?;
        self.reclaim(writer).await;
        // Records of a batch that failed may be left; the last one has put all of that in place.
        writer.log.clear_all();
        if writer.dirty.borrow().batmap {
            self.write_batmap().await?;
            writer.dirty.borrow_mut().batmap = false;
        }
        self.trim_tail(writer.reserve.tail()).await?;
        self.release().await?;
        writer.log.remove();
        Ok(())
    }

    /// Puts the footer right behind the data of a file that may be longer, and cuts the rest off.
    pub(super) async fn trim_tail(&self, from: u64) -> Result<()> {
        self.trim_to(self.data_end(), from).await
    }

    /// Puts the footer of a file, which may be at `from`, to `end`, and cuts off what is behind it.
    pub(super) async fn trim_to(&self, end: u64, from: u64) -> Result<()> {
        let failed = |what: &'static str| move |error| FormatError::io(what, error);
        let len = end + FOOTER_LEN as u64;
        if self.store.info().resizable && (from != end || self.store.len() != len) {
            match self.write_footer(end).await {
                // On a full storage the reserve stays as it is, with the footer behind it: valid, only longer.
                Err(error) if error.kind() == FormatErrorKind::OutOfSpace => {
                    return self.store.flush().await.map_err(failed("cannot make the image durable"));
                }
                written => written?,
            }
            self.store.flush().await.map_err(failed("cannot make the footer durable"))?;
            if let Some(writer) = &self.writer {
                writer.log.will_have_len(self.store.len(), len);
            }
            self.store.set_len(len).await.map_err(failed("cannot cut the file to its length"))?;
        }
        self.store.flush().await.map_err(failed("cannot make the image durable"))
    }
}

/// The sectors marked in `marks` as runs of `(first, count)`, near ones joined; clears the marks.
fn dirty_ranges(marks: &mut [u64]) -> Vec<(u32, u32)> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for (index, word) in marks.iter_mut().enumerate() {
        while *word != 0 {
            let sector = index as u32 * 64 + word.trailing_zeros();
            *word &= *word - 1;
            match ranges.last_mut() {
                Some((first, count))
                    if sector - (*first + *count) <= TABLE_GAP && sector - *first < TABLE_PIECE =>
                {
                    *count = sector - *first + 1;
                }
                _ => ranges.push((sector, 1)),
            }
        }
    }
    ranges
}

/// Runs futures, `most` of them at a time, and gives the first error: none is begun after it, and none is dropped with
/// an operation in flight.
pub(super) async fn run_all<F: Future<Output = Result<()>>>(
    futures: impl Iterator<Item = F>,
    most: usize,
) -> Result<()> {
    let mut waiting = futures.fuse();
    let mut flying: Vec<Pin<Box<F>>> = Vec::with_capacity(most);
    let mut result = Ok(());
    poll_fn(|context| {
        loop {
            while result.is_ok() && flying.len() < most {
                let Some(future) = waiting.next() else { break };
                flying.push(Box::pin(future));
            }
            if flying.is_empty() {
                return Poll::Ready(());
            }
            let before = flying.len();
            flying.retain_mut(|future| match future.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(outcome) => {
                    if result.is_ok() {
                        result = outcome;
                    }
                    false
                }
            });
            if flying.len() == before {
                return Poll::Pending;
            }
        }
    })
    .await;
    result
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn all_futures_run_however_many_end_at_once() {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for (count, most) in [(0, 4), (3, 4), (4, 4), (8, 4), (9, 4), (100, 32)] {
            let (flying, ended) = (Cell::new(0), Cell::new(0));
            let futures = (0..count).map(|_| async {
                flying.set(flying.get() + 1);
                assert!(flying.get() <= most, "{} at once", flying.get());
                let mut polled = false;
                poll_fn(
                    |_| if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending },
                )
                .await;
                flying.set(flying.get() - 1);
                ended.set(ended.get() + 1);
                Ok(())
            });
            let mut all = Box::pin(run_all(futures, most));
            while all.as_mut().poll(&mut context).is_pending() {}
            assert_eq!(ended.get(), count);
        }
    }

    #[test]
    fn no_future_begins_after_an_error_and_those_that_began_end() {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let ended = Cell::new(0);
        let futures = (0..9).map(|index| {
            let ended = &ended;
            async move {
                let mut polled = index == 1;
                poll_fn(
                    |_| if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending },
                )
                .await;
                ended.set(ended.get() + 1);
                let failed = FormatError::new(FormatErrorKind::OutOfSpace, "full");
                if index == 1 { Err(failed) } else { Ok(()) }
            }
        });
        let mut all = Box::pin(run_all(futures, 4));
        let result = loop {
            if let Poll::Ready(result) = all.as_mut().poll(&mut context) {
                break result;
            }
        };
        assert_eq!(
            (result.map_err(|error| error.kind()), ended.get()),
            (Err(FormatErrorKind::OutOfSpace), 4)
        );
    }

    #[test]
    fn near_sectors_of_the_table_go_in_one_piece() {
        let mut dirty = Dirty::new(128 * 1000);
        for sector in [0, 3, 4, 20, 500, 999] {
            dirty.mark_table(sector * ENTRIES_PER_SECTOR);
        }
        assert_eq!(dirty_ranges(&mut dirty.table), [(0, 5), (20, 1), (500, 1), (999, 1)]);
        assert!(dirty_ranges(&mut dirty.table).is_empty());
    }
}
