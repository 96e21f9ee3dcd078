//! A VHD in use.
//!
//! # Order of writes
//!
//! A write of a guest to a new block, or to a sector that its block did not have, is answered when its *data* is
//! written.
//! The mapping in memory shows it at once; bitmap and table on disk follow in a batch (`commit`). Of each batch:
//!
//! 1. the data is made durable, if a bitmap of the batch would otherwise show a sector before its data is safe;
//! 2. bitmaps and table entries are written, in any order among themselves;
//! 3. they are made durable, and only now is a flush of the guest answered.
//!
//! A table entry may come before everything else, because the space it points to was set aside earlier
//! (`reserve`) in a way that survives a power cut, with a bitmap that says "nothing here".
//!
//! In an image without a parent, on storage whose fresh bytes read as zero, "present and zero" and "not present" are
//! the same
//! to a reader. There a new block is present as a whole from the start, step 1 is not needed, and its later writes
//! touch no metadata.
//!
//! What the process owes to the disk between an answer and its batch is in the [`intent`] log. Blocks that a guest
//! gives back go the other way: see `freed`.

mod batmap;
mod bitmaps;
mod claim;
mod commit;
mod empty;
mod freed;
mod grow;
pub mod intent;
mod open;
mod relink;
mod reserve;
mod room;
mod shared;
mod shorten;
mod table;
mod traffic;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_ring::{Notify, Storage, Tasks};
use tapio_types::{SECTOR_LEN, Span};
use uuid::Uuid;

use super::group::GroupRun;
use super::mapping::{Extent, Lookup, Place};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::vhd::crypt::DiskCipher;
use crate::vhd::{BatmapHeader, BitOrder, Footer, Header, bitmap, layout};
use bitmaps::Bitmaps;
use commit::Dirty;
use freed::{Again, Freed};
use intent::{CAPACITY, Intent, IntentLog};
use reserve::Reserve;
use room::Room;
use table::BlockTable;
use traffic::{Flying, Visits};

pub use bitmaps::BITMAPS_KEPT;
pub use freed::Look;
pub use intent::{HeapLogs, IntentPlace};
pub use open::{OpenOptions, Opened, SpaceMode, open};
pub use room::{AHEAD_MAX, AHEAD_MIN, AskForRoom, RoomFacts, RoomGauge, RoomPlace, RoomWanted};
pub use shared::SharedMap;
pub use traffic::Visit;

/// An open dynamic or differencing VHD.
#[derive(Debug)]
pub struct VhdLayer<S> {
    store: S,
    tasks: Tasks,
    footer: RefCell<Footer>,
    /// Bytes of the disk, as the footer has them.
    len: Cell<u64>,
    header: RefCell<Header>,
    batmap: Option<BatmapHeader>,
    /// Its checksum did not fit when the image was opened.
    batmap_is_wrong: bool,
    /// The one at the end was not usable when the image was opened.
    footer_is_copy: bool,
    /// The copy of the footer had a writer's mark.
    is_marked: bool,
    block_shift: u32,
    bitmap_len: u64,
    bit_order: BitOrder,
    /// A missing sector is the parent's; otherwise it reads as zero.
    has_parent: bool,
    /// Sectors that are present are encrypted by this.
    cipher: Option<Box<DiskCipher>>,
    table: BlockTable,
    bitmaps: RefCell<Bitmaps>,
    flying: Flying,
    /// Present while the image is open for writing.
    writer: Option<Writer>,
}

/// What only a writer needs.
#[derive(Debug)]
struct Writer {
    /// New blocks count as present as a whole; see the module's text.
    whole_blocks: bool,
    /// A bitmap is written together with the gap before it: see [`VhdLayer::bitmap_span`].
    pages: bool,
    reserve: Reserve,
    /// Present where a device becomes longer when it is asked for.
    room: Option<Room>,
    dirty: RefCell<Dirty>,
    freed: Freed,
    visits: Visits,
    log: IntentLog,
    syncs: GroupRun,
    /// Work for the task that writes metadata back by itself.
    writeback: Notify,
    /// A batch began, and with it an empty half of the log; or one failed.
    batch_began: Notify,
    /// The last batch failed.
    batch_failed: Cell<bool>,
    sleeping: Cell<Sleeping>,
    closing: Cell<bool>,
    /// The table on disk may lack blocks that are here: no write is answered before a batch has put that right.
    owes_table: Cell<bool>,
    /// Writes so far that found no room in the log ...
    unrecorded: Cell<u64>,
    /// ... and how many of them are durable with their metadata.
    settled: Cell<u64>,
    services: Cell<u32>,
    service_ended: Notify,
}

impl Writer {
    /// The bitmap of a place in the reserve says already that all of the block is there, which is as good as nothing
    /// there: a file whose space is not reserved gets it for its bitmaps by being written, so this costs nothing.
    const fn whole_early(&self) -> bool {
        self.whole_blocks && self.pages && !self.reserve.space
    }
}

/// What the service that writes metadata back waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sleeping {
    /// It is awake.
    No,
    /// Anything to write.
    UntilDirty,
    /// Its time, or a log that fills up.
    UntilDue,
}

impl<S: Storage> VhdLayer<S> {
    /// The storage below.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Bytes of the disk.
    pub fn virtual_len(&self) -> u64 {
        self.len.get()
    }

    /// The image's identity.
    pub fn uuid(&self) -> Uuid {
        self.footer.borrow().uuid
    }

    /// What its sectors are encrypted by.
    pub fn cipher(&self) -> Option<&DiskCipher> {
        self.cipher.as_deref()
    }

    /// A request begins that looks places up and uses them later. Until what is returned is dropped, no place that it
    /// may know is given to another block.
    pub fn enter(&self) -> Option<Visit<'_>> {
        self.writer.as_ref().map(|writer| writer.visits.enter())
    }

    /// Whether a process had the image open for writing and died, or the power went: its metadata may lack something,
    /// and what was written to it need not be durable. Opening it for writing and closing it puts that right.
    pub const fn is_disordered(&self) -> bool {
        self.is_marked || self.batmap_is_wrong || self.footer_is_copy
    }

    /// The parent's identity; nil for a raw parent. `None` where there is no parent.
    pub fn parent_uuid(&self) -> Option<Uuid> {
        self.has_parent.then_some(self.header.borrow().parent_uuid)
    }

    const fn block_len(&self) -> u64 {
        1 << self.block_shift
    }

    fn block_of(&self, at: u64) -> (u32, u64) {
        ((at >> self.block_shift) as u32, at & (self.block_len() - 1))
    }

    fn data_offset(&self, sector: u32) -> u64 {
        u64::from(sector) * SECTOR_LEN + self.bitmap_len
    }

    const fn absent(&self) -> Place {
        if self.has_parent { Place::Parent } else { Place::Zero }
    }

    /// Where the beginning of `want`, which lies inside the disk, is.
    pub fn lookup(&self, want: Span) -> Lookup {
        let (block, within) = self.block_of(want.start);
        let len = want.len.min(self.block_len() - within);
        let Some(sector) = self.table.sector(block) else {
            self.publish_absent(block);
            let blocks = (within + want.len).div_ceil(self.block_len()).min(u64::from(u32::MAX)) as u32;
            let run = self.table.unallocated_run(block, blocks);
            let len = want.len.min(u64::from(run) * self.block_len() - within);
            return Lookup::Extent(Extent { len, place: self.absent() });
        };
        let data = Place::Data { offset: self.data_offset(sector) + within };
        if self.table.is_full(block) {
            self.publish_full(block, sector);
            return Lookup::Extent(Extent { len, place: data });
        }
        let mut bitmaps = self.bitmaps.borrow_mut();
        let Some(entry) = bitmaps.entry(block) else { return Lookup::Miss { block } };
        let first = (within / SECTOR_LEN) as usize;
        let end = ((within + len).div_ceil(SECTOR_LEN)) as usize;
        let Some((present, count)) = bitmap::run(&entry.bits, first, end) else {
            return Lookup::Miss { block };
        };
        let len = len.min((first + count) as u64 * SECTOR_LEN - within);
        Lookup::Extent(Extent { len, place: if present { data } else { self.absent() } })
    }

    /// Reads the bitmap of `block` into memory.
    ///
    /// # Errors
    /// The storage's.
    pub async fn load(&self, block: u32) -> Result<()> {
        let Some(sector) = self.table.sector(block) else { return Ok(()) };
        let len = self.bitmap_len as usize;
        let page = tapio_ring::PageBuf::zeroed(len);
        let at = u64::from(sector) * SECTOR_LEN;
        // What is read now must not be put in later than what comes after it.
        let changes = self.writer.is_some();
        if changes {
            self.flying.begin(block);
        }
        let (mut page, read) = self.store.read_into(at, page, 0..len).await;
        if changes {
            self.flying.end(block);
        }
        read.map_err(|error| {
            FormatError::io(format!("cannot read the bitmap of block {block}"), error).with_offset(at)
        })?;
        let bits = &mut page[..len];
        self.bit_order.swap(bits);
        // Given back, or given back and allocated again, while it was read.
        if self.table.sector(block) != Some(sector) {
            return Ok(());
        }
        self.insert_bitmap(block, bits);
        if bitmap::all_set(bits, 0, (self.block_len() / SECTOR_LEN) as usize) && self.is_clean(block) {
            self.table.set_full(block);
        }
        Ok(())
    }

    fn insert_bitmap(&self, block: u32, bits: &[u8]) {
        self.bitmaps.borrow_mut().insert(block, bits, &self.flying);
    }

    fn is_clean(&self, block: u32) -> bool {
        self.bitmaps.borrow_mut().entry(block).is_some_and(|entry| !entry.dirty)
    }

    fn writer(&self) -> Result<&Writer> {
        self.writer
            .as_ref()
            .ok_or_else(|| FormatError::new(FormatErrorKind::ReadOnly, "the image is open for reading only"))
    }

    /// The place to write the beginning of `want` to, if that needs no waiting. Every span it gives is handed to
    /// [`VhdLayer::written`] or [`VhdLayer::not_written`] later.
    pub fn prepare_now(&self, want: Span) -> Option<Extent> {
        let writer = self.writer.as_ref()?;
        let (block, within) = self.block_of(want.start);
        let len = want.len.min(self.block_len() - within);
        let sector = match self.table.sector(block) {
            Some(sector) => sector,
            None => self.assign(writer, block)?,
        };
        if self.table.is_full(block) {
            self.publish_full(block, sector);
        } else {
            self.bitmaps.borrow_mut().entry(block)?;
        }
        self.flying.begin(block);
        Some(Extent { len, place: Place::Data { offset: self.data_offset(sector) + within } })
    }

    /// [`VhdLayer::prepare_now`], waiting for a bitmap or for space.
    ///
    /// # Errors
    /// No space; the storage's; not open for writing.
    pub async fn prepare(self: &Rc<Self>, want: Span) -> Result<Extent> {
        let writer = self.writer()?;
        loop {
            if let Some(extent) = self.prepare_now(want) {
                return Ok(extent);
            }
            let (block, _) = self.block_of(want.start);
            if self.table.sector(block).is_some() {
                self.load(block).await?;
            } else if !writer.freed.is_settled() {
                self.sync().await?;
            } else if writer.log.used() >= CAPACITY {
                self.wait_for_log(writer, CAPACITY).await?;
            } else {
                self.wait_for_space().await?;
            }
        }
    }

    /// Gives `block` a place out of the reserve.
    fn assign(&self, writer: &Writer, block: u32) -> Option<u32> {
        if writer.log.used() >= CAPACITY {
            return None;
        }
        if !writer.freed.is_settled() {
            match self.take_back(writer, block) {
                Again::No => {}
                Again::Wait => return None,
                Again::Back(sector) => {
                    self.note_dirty(writer);
                    return Some(sector);
                }
            }
        }
        let sector = writer.reserve.take()?;
        self.table.set_sector(block, sector);
        let mut dirty = writer.dirty.borrow_mut();
        dirty.mark_table(block);
        if writer.whole_blocks {
            self.table.set_full(block);
            if writer.whole_early() {
                dirty.batmap = true;
            } else {
                dirty.mark_whole(block);
            }
            let fits = writer.log.append(Intent { block, sector, first: 0, count: 0 });
            debug_assert!(fits, "room was tested above");
        } else {
            drop(dirty);
            self.insert_bitmap(block, &vec![0; self.bitmap_len as usize]);
        }
        self.note_dirty(writer);
        self.watch_reserve(writer);
        self.watch_room(writer);
        Some(sector)
    }

    /// The data of `span`, a span that `prepare` gave the place at `offset`, is written: it is visible from now on.
    /// Returns whether [`VhdLayer::settle`] must be awaited before the guest is answered.
    pub fn written(&self, span: Span, offset: u64) -> bool {
        let Some(writer) = self.writer.as_ref() else { return false };
        let (block, within) = self.block_of(span.start);
        self.flying.end(block);
        if self.table.is_full(block) {
            return writer.must_settle();
        }
        // A block that was given back meanwhile: the write came first, and is gone with the block.
        let Some(sector) =
            self.table.sector(block).filter(|&sector| self.data_offset(sector) + within == offset)
        else {
            return false;
        };
        let mut bitmaps = self.bitmaps.borrow_mut();
        let Some(entry) = bitmaps.entry(block) else { return false };
        let (first, count) = ((within / SECTOR_LEN) as usize, (span.len / SECTOR_LEN) as usize);
        if bitmap::all_set(&entry.bits, first, count) {
            return writer.must_settle();
        }
        bitmap::set_range(&mut entry.bits, first, count);
        if bitmap::all_set(&entry.bits, 0, (self.block_len() / SECTOR_LEN) as usize) {
            self.table.set_full(block);
        }
        let mut dirty = writer.dirty.borrow_mut();
        if !std::mem::replace(&mut entry.dirty, true) {
            dirty.mark_bitmap(block);
        }
        let intent = Intent { block, sector, first: first as u16, count: count as u16 };
        if !writer.log.append(intent) {
            dirty.overflow = true;
            writer.unrecorded.set(writer.unrecorded.get() + 1);
        }
        let overflow = dirty.overflow;
        drop(dirty);
        self.note_dirty(writer);
        overflow || writer.must_settle()
    }

    /// The write to a span that `prepare` gave a place failed: nothing becomes visible.
    pub fn not_written(&self, span: Span) {
        self.flying.end(self.block_of(span.start).0);
    }
}

impl<S> VhdLayer<S> {
    /// Where every block and every piece of metadata ends, in bytes; a new block may begin here.
    fn data_end(&self) -> u64 {
        let header = self.header.borrow();
        let span_len = layout::block_span_len(header.block_len);
        let mut end = layout::metadata_end(&header, self.batmap.as_ref()).next_multiple_of(SECTOR_LEN);
        self.table.for_each_allocated(|_, sector| end = end.max(u64::from(sector) * SECTOR_LEN + span_len));
        end
    }
}
