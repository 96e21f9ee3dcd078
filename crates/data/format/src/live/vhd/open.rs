//! Opening a VHD: reading its metadata, checking it, and putting right what a power cut or a killed process left.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_ring::{Notify, PageBuf, Storage, Tasks};
use tapio_types::{Access, SECTOR_LEN};

use super::bitmaps::Bitmaps;
use super::commit::Dirty;
use super::freed::Freed;
use super::intent::{Intent, IntentLog, IntentPlace, Left};
use super::reserve::Reserve;
use super::room::{Room, RoomPlace};
use super::table::BlockTable;
use super::traffic::{Flying, Visits};
use super::{VhdLayer, Writer};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::live::group::GroupRun;
use crate::live::layer::Layer;
use crate::live::raw::RawLayer;
use crate::vhd::mark::{Mark, unmarked};
use crate::vhd::{
    BatmapHeader, DiskType, FOOTER_LEN, Footer, HEADER_LEN, Header, Keys, batmap, bitmap, layout,
};

/// The table is read in pieces of this size.
const TABLE_PIECE: usize = 256 << 10;

/// Whether new blocks get real space from the file system at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SpaceMode {
    /// Where the file system can reserve space without touching it.
    #[default]
    Auto,
    /// Always: a full disk shows when a block is set aside, never in the middle of it.
    Promised,
    /// Never: a block takes only what is written to it.
    Sparse,
}

/// How to open an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Whether it will be written.
    pub access: Access,
    /// Whether new blocks get space at once.
    pub space: SpaceMode,
    /// Where the intent log is.
    pub intent: IntentPlace,
    /// Among these is the key of an encrypted image.
    pub keys: Keys,
    /// How many bitmaps stay in memory: [`super::BITMAPS_KEPT`], fewer in tests.
    pub bitmaps_kept: usize,
    /// Where room is asked for that a device has not.
    pub room: RoomPlace,
}

/// An open image and what had to be tolerated or put right.
#[derive(Debug)]
pub struct Opened<S: Storage> {
    /// The image.
    pub layer: Layer<S>,
    /// One sentence each, for the log.
    pub remarks: Vec<String>,
}

fn corrupt(detail: impl Into<std::borrow::Cow<'static, str>>) -> FormatError {
    FormatError::new(FormatErrorKind::Corrupt, detail)
}

/// Opens the VHD in `store`.
///
/// # Errors
/// `NotThisFormat`, `Unsupported`, `Corrupt`, `Disabled`, or the storage's.
pub async fn open<S: Storage>(store: S, tasks: &Tasks, options: &OpenOptions) -> Result<Opened<S>> {
    let mut remarks = Vec::new();
    let (footer, from_backup) = read_footer(&store, &mut remarks).await?;
    if footer.is_disabled() {
        let detail =
            "a resize of this image was broken off: finish it with 'vhd-util revert' and its journal first";
        return Err(FormatError::new(FormatErrorKind::Disabled, detail));
    }
    if !footer.disk_type.is_dynamic() {
        // Early creators wrote footers of 511 bytes.
        if footer.current_len.checked_add(FOOTER_LEN as u64 - 1).is_none_or(|need| need > store.len()) {
            return Err(corrupt(format!(
                "a fixed disk of {} bytes does not fit in a file of {}: it is truncated",
                footer.current_len,
                store.len()
            )));
        }
        let layer = Layer::Raw(RawLayer::fixed_vhd(store, whole_sectors(&footer)));
        return Ok(Opened { layer, remarks });
    }
    let vhd = read_metadata(store, tasks, (footer, from_backup), options, &mut remarks).await?;
    if options.access == Access::ReadOnly {
        return Ok(Opened { layer: Layer::Vhd(Rc::new(vhd)), remarks });
    }
    let layer = make_writable(vhd, options, &mut remarks).await?;
    Ok(Opened { layer: Layer::Vhd(layer), remarks })
}

async fn read_exact<S: Storage, const N: usize>(store: &S, at: u64, what: &str) -> Result<[u8; N]> {
    // Offsets come out of the image itself.
    let fits = at.checked_add(N as u64).is_some_and(|end| end <= store.len());
    if !fits || !at.is_multiple_of(SECTOR_LEN) {
        let len = store.len();
        return Err(corrupt(format!("the {what} cannot be at byte {at} of {len}; see 'vhd-util check'")));
    }
    let (page, read) = store.read_into(at, PageBuf::zeroed(N), 0..N).await;
    read.map_err(|error| FormatError::io(format!("cannot read the {what}"), error).with_offset(at))?;
    let mut bytes = [0; N];
    bytes.copy_from_slice(&page[..N]);
    Ok(bytes)
}

/// The footer: at the end, else cut by a byte at the end, else the copy at the beginning. Says whether it is the copy.
async fn read_footer<S: Storage>(store: &S, remarks: &mut Vec<String>) -> Result<(Footer, bool)> {
    const LEN: u64 = FOOTER_LEN as u64;
    let len = store.len();
    if len < LEN {
        let detail = format!("{len} bytes are too few for a VHD");
        return Err(FormatError::new(FormatErrorKind::NotThisFormat, detail));
    }
    let primary = if len.is_multiple_of(SECTOR_LEN) {
        Footer::decode(&read_exact(store, len - LEN, "footer").await?)
    } else if (len - (LEN - 1)).is_multiple_of(SECTOR_LEN) {
        Footer::decode_short(&read_exact(store, len - (LEN - 1), "footer").await?)
    } else {
        Err(corrupt(format!("a length of {len} bytes leaves no place for a footer at the end")))
    };
    let why = match primary {
        Ok((footer, tolerance)) => {
            remarks.extend(tolerance.map(|tolerance| tolerance.to_string()));
            return Ok((unmarked(&footer), false));
        }
        Err(why) => why,
    };
    let copy: [u8; FOOTER_LEN] = read_exact(store, 0, "copy of the footer").await?;
    match Footer::decode(&copy) {
        Ok((footer, tolerance)) if footer.disk_type.is_dynamic() => {
            remarks
                .push(format!("the footer at the end is not usable ({why}); its copy at the beginning is"));
            remarks.extend(tolerance.map(|tolerance| tolerance.to_string()));
            Ok((unmarked(&footer), true))
        }
        _ => Err(why),
    }
}

/// Bytes of the disk. A last piece shorter than a sector, which the footer of a child of a raw file may count, is not
/// part of it, as for tapdisk.
const fn whole_sectors(footer: &Footer) -> u64 {
    footer.current_len / SECTOR_LEN * SECTOR_LEN
}

async fn read_metadata<S: Storage>(
    store: S,
    tasks: &Tasks,
    (footer, footer_is_copy): (Footer, bool),
    options: &OpenOptions,
    remarks: &mut Vec<String>,
) -> Result<VhdLayer<S>> {
    let bytes: [u8; HEADER_LEN] = read_exact(&store, footer.data_offset, "header").await?;
    let header = Header::decode(&bytes)?;
    let entries = header.entries_for(footer.current_len)?;
    let table = BlockTable::new(entries);
    read_table(&store, &header, &table).await?;
    let (batmap, batmap_is_wrong) = read_batmap(&store, &footer, &header, &table, remarks).await?;
    let cipher = match &batmap {
        Some(batmap) => options.keys.cipher_for(&batmap.key_hash)?,
        None => None,
    };
    let mut vhd = VhdLayer {
        tasks: tasks.clone(),
        block_shift: header.block_len.trailing_zeros(),
        bitmap_len: layout::bitmap_len(header.block_len),
        bit_order: footer.bit_order(),
        has_parent: footer.disk_type == DiskType::Differencing,
        cipher,
        bitmaps: RefCell::new(Bitmaps::new(options.bitmaps_kept)),
        flying: Flying::new(options.access == Access::ReadWrite),
        writer: None,
        store,
        len: Cell::new(whole_sectors(&footer)),
        footer: RefCell::new(footer),
        header: RefCell::new(header),
        batmap,
        batmap_is_wrong,
        footer_is_copy,
        is_marked: false,
        table,
    };
    vhd.check_table(options.access)?;
    vhd.is_marked = vhd.copy_of_footer().await?.as_ref().is_some_and(|copy| Mark::on(copy).is_some());
    Ok(vhd)
}

async fn read_table<S: Storage>(store: &S, header: &Header, table: &BlockTable) -> Result<()> {
    let len = (u64::from(table.len()) * 4).next_multiple_of(SECTOR_LEN);
    if header.table_offset.checked_add(len).is_none_or(|end| end > store.len()) {
        let detail = format!(
            "the block table at byte {} does not fit in a file of {}",
            header.table_offset,
            store.len()
        );
        return Err(corrupt(detail));
    }
    let mut page = PageBuf::zeroed(TABLE_PIECE.min(len as usize));
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(page.len() as u64) as usize;
        let at = header.table_offset + done;
        let read;
        (page, read) = store.read_into(at, page, 0..piece).await;
        read.map_err(|error| FormatError::io("cannot read the block table", error).with_offset(at))?;
        let first = (done / 4) as u32;
        for (index, bytes) in page[..piece].chunks_exact(4).enumerate() {
            let sector = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let block = first + index as u32;
            if sector != crate::vhd::UNALLOCATED && block < table.len() {
                table.set_sector(block, sector);
            }
        }
        done += piece as u64;
    }
    Ok(())
}

async fn read_batmap<S: Storage>(
    store: &S,
    footer: &Footer,
    header: &Header,
    table: &BlockTable,
    remarks: &mut Vec<String>,
) -> Result<(Option<BatmapHeader>, bool)> {
    let at = batmap::header_offset(header);
    if !footer.may_have_batmap() || at + batmap::HEADER_LEN as u64 > store.len() {
        return Ok((None, false));
    }
    let batmap = match BatmapHeader::decode(&read_exact(store, at, "batmap header").await?, header) {
        Ok(batmap) => batmap,
        Err(error) => {
            if batmap::is_required(footer) {
                remarks.push(format!("the batmap is not usable and is ignored: {error}"));
            }
            return Ok((None, false));
        }
    };
    let len = (u64::from(table.len()).div_ceil(8))
        .next_multiple_of(SECTOR_LEN)
        .max(batmap_summed(footer))
        .min(batmap.len());
    if batmap.offset + len > store.len() {
        remarks.push("the batmap lies past the end of the file and is ignored".into());
        return Ok((None, false));
    }
    let page = PageBuf::zeroed(len as usize);
    let (page, read) = store.read_into(batmap.offset, page, 0..len as usize).await;
    read.map_err(|error| FormatError::io("cannot read the batmap", error).with_offset(batmap.offset))?;
    let map = &page[..len as usize];
    if batmap.map_checksum(map, footer.current_len) != batmap.checksum {
        remarks
            .push("the batmap's checksum is wrong: it is ignored, the bitmaps of the blocks are used".into());
        return Ok((Some(batmap), true));
    }
    table.for_each_allocated(|block, _| {
        if (block as usize) < map.len() * 8 && bitmap::test(map, block as usize) {
            table.set_full(block);
        }
    });
    Ok((Some(batmap), false))
}

/// Bytes of the map that the checksum covers at least.
fn batmap_summed(footer: &Footer) -> u64 {
    (footer.current_len >> 24).max(1).next_multiple_of(SECTOR_LEN)
}

impl<S: Storage> VhdLayer<S> {
    /// Every block lies behind the metadata and inside the file; for a writer, no two share a byte.
    fn check_table(&self, access: Access) -> Result<()> {
        let span_sectors = layout::block_span_len(self.header.borrow().block_len) / SECTOR_LEN;
        // Where parent locators are is no concern of a reader of data; some tools put them behind it.
        let batmap_end = self.batmap.as_ref().map_or(0, |batmap| batmap.offset + batmap.len());
        let begin = batmap::header_offset(&self.header.borrow()).max(batmap_end) / SECTOR_LEN;
        let end = self.store.len() / SECTOR_LEN;
        let mut wrong = None;
        let mut places = Vec::new();
        self.table.for_each_allocated(|block, sector| {
            let sector = u64::from(sector);
            if wrong.is_none() && (sector < begin || sector + span_sectors > end) {
                wrong = Some((block, sector));
            }
            if access == Access::ReadWrite {
                places.push((sector as u32, block));
            }
        });
        if let Some((block, sector)) = wrong {
            let place = if sector < begin {
                "inside the metadata"
            } else {
                "past the end of the file: it is truncated"
            };
            return Err(corrupt(format!(
                "block {block} at sector {sector} lies {place}; see 'vhd-util check'"
            )));
        }
        places.sort_unstable();
        for pair in places.windows(2) {
            let ((one, block), (other, second)) = (pair[0], pair[1]);
            if u64::from(other - one) < span_sectors {
                return Err(corrupt(format!(
                    "blocks {block} and {second} overlap at sector {other}: writing would damage one of them; see
  'vhd-util check'"
                )));
            }
        }
        Ok(())
    }

    /// Whether the data of every block begins and ends on a multiple of [`layout::DATA_ALIGN`], as in images of ours.
    fn data_is_aligned(&self) -> bool {
        let mut aligned = self.block_len().is_multiple_of(layout::DATA_ALIGN);
        self.table.for_each_allocated(|_, sector| {
            aligned &= self.data_offset(sector).is_multiple_of(layout::DATA_ALIGN);
        });
        aligned
    }

    /// Applies what a process that died left in the log, all of which fits.
    fn apply(&self, left: &[Intent], dirty: &mut Dirty, whole_blocks: bool) {
        for intent in left {
            let (block, sector) = (intent.block, intent.sector);
            let is_new = self.table.sector(block).is_none();
            if is_new {
                self.table.set_sector(block, sector);
                dirty.mark_table(block);
            }
            if whole_blocks && intent.count == 0 {
                // Also where the entry is there: it may have come before the bitmap.
                self.table.set_full(block);
                dirty.mark_whole(block);
            } else if is_new {
                self.insert_bitmap(block, &vec![0; self.bitmap_len as usize]);
                // On disk it may be that of a block that was given back there.
                if let Some(entry) = self.bitmaps.borrow_mut().entry(block) {
                    entry.dirty = true;
                    dirty.mark_bitmap(block);
                }
            }
        }
    }

    /// The second pass of [`VhdLayer::apply`]: the sectors inside blocks, whose bitmaps may have to be read first.
    async fn apply_sectors(&self, left: &[Intent], dirty: &RefCell<Dirty>) -> Result<()> {
        for intent in left {
            let (block, first, count) = (intent.block, intent.first as usize, intent.count as usize);
            if count == 0 || self.table.is_full(block) {
                continue;
            }
            self.load(block).await?;
            if let Some(entry) = self.bitmaps.borrow_mut().entry(block) {
                bitmap::set_range(&mut entry.bits, first, count);
                if !std::mem::replace(&mut entry.dirty, true) {
                    dirty.borrow_mut().mark_bitmap(block);
                }
            }
        }
        Ok(())
    }
}

/// What of `left` is to be applied: all of it or nothing.
async fn believed<S: Storage>(
    vhd: &VhdLayer<S>,
    log: &IntentLog,
    left: Left,
    remarks: &mut Vec<String>,
) -> Result<Vec<Intent>> {
    let count = left.intents.len();
    if count == 0 {
        return Ok(Vec::new());
    }
    match vhd.fits(&left).await? {
        Ok(()) => {
            log.will_have_len(vhd.store.len(), vhd.store.len());
            remarks.push(format!(
                "the process that had this image open died: {count} writes that it still owed are put in place"
            ));
            Ok(left.intents)
        }
        Err(why) => {
            let aside = log.set_aside();
            let aside =
                aside.map_err(|error| FormatError::io("cannot set a stale intent log aside", error))?;
            let kept =
                aside.map_or_else(String::new, |aside| format!("; its log is kept in {}", aside.display()));
            remarks.push(format!(
                "a process on this host that had this image open died, and {count} of its writes, answered but never \
                 flushed, are not put in place: {why}. The image stays as that program left it{kept}"
            ));
            Ok(Vec::new())
        }
    }
}

async fn make_writable<S: Storage>(
    mut vhd: VhdLayer<S>,
    options: &OpenOptions,
    remarks: &mut Vec<String>,
) -> Result<Rc<VhdLayer<S>>> {
    let info = vhd.store.info();
    // In an encrypted image zero bytes are the encryption of something else.
    let whole_blocks = info.fresh_reads_zero && !vhd.has_parent && vhd.cipher.is_none();
    let uuid = vhd.uuid();
    let space = match options.space {
        SpaceMode::Auto => info.promises_space,
        SpaceMode::Promised => true,
        SpaceMode::Sparse => false,
    };
    let memory = options.intent.memory(uuid, vhd.store.inode())?;
    let (log, left) = IntentLog::adopt(memory, uuid);
    let left = believed(&vhd, &log, left, remarks).await?;
    let pages = info.resizable && vhd.data_is_aligned();
    let mut dirty = Dirty::new(vhd.table.len());
    vhd.apply(&left, &mut dirty, whole_blocks);
    let writer = Writer {
        whole_blocks,
        pages,
        reserve: Reserve::new(0, space),
        room: Room::new(&options.room).filter(|_| !info.resizable),
        dirty: RefCell::new(dirty),
        freed: Freed::default(),
        visits: Visits::default(),
        log,
        syncs: GroupRun::default(),
        writeback: Notify::default(),
        batch_began: Notify::default(),
        batch_failed: Cell::new(false),
        sleeping: Cell::new(super::Sleeping::No),
        closing: Cell::new(false),
        owes_table: Cell::new(false),
        unrecorded: Cell::new(0),
        settled: Cell::new(0),
        services: Cell::new(0),
        service_ended: Notify::default(),
    };
    vhd.apply_sectors(&left, &writer.dirty).await?;
    vhd.writer = Some(writer);
    vhd.sync().await?;
    if vhd.batmap_is_wrong {
        // The power went while it was written. What is known to be whole is in the bitmaps too.
        vhd.write_batmap().await?;
        vhd.sync().await?;
    }
    // A reserve that was not used up, or a footer that did not make it: the end of the file is made as it should be,
    // so that
    // space set aside from now on is fresh and zero.
    let end = vhd.data_end();
    let neat = vhd.store.len() == end + FOOTER_LEN as u64 && !vhd.footer_is_copy;
    if info.resizable && !neat {
        remarks.push("the image was not closed: the end of the file is put in order".into());
        vhd.trim_tail(u64::MAX).await?;
    }
    if !info.resizable && vhd.footer_is_copy {
        vhd.write_footer(vhd.store.len() - FOOTER_LEN as u64).await?;
        vhd.sync().await?;
    }
    if let Some(writer) = &vhd.writer {
        vhd.claim(writer, remarks).await?;
        if !left.is_empty() {
            // Both halves are durable.
            writer.log.clear_all();
        }
    }
    if let Some(batmap) = vhd.batmap.as_ref().filter(|_| info.resizable) {
        // Written at closing, when there may be no space left. A storage that cannot reserve it loses nothing by it.
        let at = batmap::header_offset(&vhd.header.borrow());
        let _ = vhd.store.allocate(tapio_types::Span::new(at, batmap.offset + batmap.len() - at), true).await;
    }
    let vhd = Rc::new(vhd);
    if let Some(writer) = &vhd.writer {
        writer.reserve.set_tail(end);
        vhd.find_places(writer, end)?;
        writer.services.set(2);
        vhd.tasks.spawn(Rc::clone(&vhd).keep_reserve());
        vhd.tasks.spawn(Rc::clone(&vhd).keep_written());
    }
    Ok(vhd)
}
