//! An image in the hands of a tool: everything read and understood but the data.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tapio_types::Access;

use super::footer::read_footer;
use crate::continuation::check_not_below_standby;
use crate::error::{FormatError, FormatErrorKind, Result, corrupt};
use crate::live::vhd::intent;
use crate::medium::{FileMedium, Medium};
use crate::vhd::footer::NO_HEADER;
use crate::vhd::{
    BAT_ENTRIES_MAX, Bat, BatmapHeader, BitOrder, DiskType, FOOTER_LEN, Footer, FooterSource, HEADER_LEN,
    Header, Mark, SECTOR_LEN, Tolerance, batmap, bitmap, layout,
};

/// How an image is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// Whether it will be written.
    pub access: Access,
    /// Open even while a journalled operation has it disabled: for reading what is there, and for `revert`.
    pub ignore_disabled: bool,
    /// Believe the copy of the footer at the start and not the footer at the end.
    pub use_backup: bool,
}

impl OpenOptions {
    /// Reading an image that is whole.
    pub const READ: Self = Self { access: Access::ReadOnly, ignore_disabled: false, use_backup: false };
    /// Reading whatever can be read, as the tools do that only look.
    pub const LOOK: Self = Self { access: Access::ReadOnly, ignore_disabled: true, use_backup: false };
    /// Writing an image that is whole.
    pub const WRITE: Self = Self { access: Access::ReadWrite, ignore_disabled: false, use_backup: false };
}

/// The batmap in memory: its header and its bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batmap {
    /// The header as it stands on disk.
    pub header: BatmapHeader,
    /// One bit a block, whole sectors.
    pub map: Vec<u8>,
}

/// An open image.
///
/// Fixed disks have neither header nor table. The table holds the entries that the virtual size needs, not those
/// kept for growth.
#[derive(Debug)]
pub struct Image<M> {
    pub(super) medium: M,
    pub(super) path: PathBuf,
    pub(super) footer: Footer,
    pub(super) source: FooterSource,
    pub(super) header: Option<Header>,
    pub(super) bat: Bat,
    pub(super) batmap: Option<Batmap>,
    pub(super) tolerances: Vec<Tolerance>,
    /// The first byte behind all metadata and blocks, those not yet in the table on disk included.
    pub(super) end: u64,
    pub(super) pending: Pending,
    /// Blocks whose every sector is here by now, on disk, and whose bit in the batmap is still clear.
    pub(super) full: Vec<u32>,
}

/// What was written but is not yet visible: see `write`.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Bitmaps in the usual order by block, with the sector of the block's bitmap.
    pub bitmaps: BTreeMap<u32, PendingBitmap>,
}

#[derive(Debug)]
pub(super) struct PendingBitmap {
    pub map: Vec<u8>,
    pub sector: u32,
    /// Whether the table does not have the block yet.
    pub is_new: bool,
}

impl Image<FileMedium> {
    /// Opens the image at `path`.
    ///
    /// # Errors
    /// Those of the system and of [`Image::open_on`], with the path.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self> {
        let medium = FileMedium::open(path, options.access)?;
        let image = Self::open_on(medium, path, options)?;
        if options.access == Access::ReadWrite {
            image.check_settled()?;
            check_not_below_standby(path)?;
        }
        Ok(image)
    }

    /// Whether the image says all that was written to it. One whose disk process was killed may lack the metadata of
    /// writes that a guest was told are done; they are in the intent log, and opening the disk once puts them in place.
    ///
    /// # Errors
    /// With EBUSY where it does not.
    pub fn check_settled(&self) -> Result<()> {
        use std::os::unix::fs::MetadataExt;
        let found = std::fs::metadata(&self.path);
        let found = found.map_err(|error| FormatError::io("cannot look at the image", error))?;
        let inode = if found.is_file() { found.ino() } else { 0 };
        let log = intent::directory().join(intent::file_name(self.footer.uuid, inode));
        let mut copy = [0; FOOTER_LEN];
        // A fixed disk of less has no copy, and no log.
        let copy = self.read_bytes(0, &mut copy).ok().and_then(|()| Footer::decode(&copy).ok());
        let owed = intent::owed(&log, self.footer.uuid, copy.and_then(|(copy, _)| Mark::on(&copy)));
        let owed = owed.map_err(|error| FormatError::io("cannot read the image's intent log", error))?;
        if owed == 0 {
            return Ok(());
        }
        let detail = format!(
            "has {owed} writes of a disk process that are not in its metadata yet: pause the disk, or if its process
  died, \
             open it once with 'tapio-disk' (they are in {})",
            log.display()
        );
        Err(FormatError::io(detail, std::io::Error::from_raw_os_error(libc::EBUSY)).with_path(&self.path))
    }
}

impl<M: Medium> Image<M> {
    /// Opens the image on `medium`; `path` is for messages and for finding its parent.
    ///
    /// # Errors
    /// `NotThisFormat` without a usable footer; `Disabled` while a journal is open; `Corrupt` and `Unsupported` as
    /// the decoders say, and where the table lies outside of the file.
    pub fn open_on(medium: M, path: &Path, options: OpenOptions) -> Result<Self> {
        Self::open_inner(medium, path, options).map_err(|error| error.with_path(path))
    }

    fn open_inner(medium: M, path: &Path, options: OpenOptions) -> Result<Self> {
        let len = medium.len().map_err(|error| FormatError::io("cannot find the length", error))?;
        let (mut footer, source, mut tolerances) = read_footer(&medium, options.use_backup)?;
        if footer.is_disabled() && !options.ignore_disabled {
            return Err(FormatError::new(
                FormatErrorKind::Disabled,
                "a resize was broken off half-way: run 'vhd-util revert' with its journal",
            ));
        }
        let mut image = Self {
            path: path.to_path_buf(),
            source,
            header: None,
            bat: Bat::default(),
            batmap: None,
            tolerances: Vec::new(),
            end: footer.current_len,
            pending: Pending::default(),
            full: Vec::new(),
            footer,
            medium,
        };
        if footer.disk_type.is_dynamic() {
            if footer.is_old_creator() && source != FooterSource::Backup {
                let copy = image.read_array::<FOOTER_LEN>(0).map(|bytes| Footer::parse(&bytes));
                if let Some(copy) = copy.ok().filter(|copy| copy.hidden != footer.hidden) {
                    footer.hidden = copy.hidden;
                    tolerances.push(Tolerance::HiddenFromBackup);
                }
                image.footer = footer;
            }
            image.read_dynamic(len, &mut tolerances)?;
            if options.access == Access::ReadWrite {
                image.check_writable(len)?;
            }
        } else if footer.current_len > len.saturating_sub(FOOTER_LEN as u64 - 1) {
            return Err(corrupt(format!(
                "a fixed disk of {} bytes does not fit a file of {len} bytes: it was cut off",
                footer.current_len
            )));
        }
        image.tolerances = tolerances;
        Ok(image)
    }

    fn read_dynamic(&mut self, len: u64, tolerances: &mut Vec<Tolerance>) -> Result<()> {
        let at = self.footer.data_offset;
        if at == NO_HEADER || at > len {
            return Err(corrupt(format!("the header cannot be at byte {at} of {len}")));
        }
        let header =
            Header::decode(&self.read_array::<HEADER_LEN>(at)?).map_err(|error| error.with_offset(at))?;
        let count = header.entries_for(self.footer.current_len)?;
        debug_assert!(count <= BAT_ENTRIES_MAX);
        let table_len = count as usize * 4;
        if header.table_offset.saturating_add(table_len as u64) > len {
            return Err(corrupt(format!(
                "the block table at byte {} does not fit a file of {len} bytes: it was cut off",
                header.table_offset
            )));
        }
        let mut table = vec![0; table_len];
        self.read_bytes(header.table_offset, &mut table)?;
        self.bat = Bat::decode(&table, count)?;
        if self.footer.may_have_batmap() {
            self.batmap = self.read_batmap(&header, len, tolerances);
        }
        self.end = layout::metadata_end(&header, self.batmap.as_ref().map(|batmap| &batmap.header));
        let block_len = layout::block_span_len(header.block_len);
        if let Some(last) = self.bat.allocated().map(|(_, sector)| sector).max() {
            self.end = self.end.max(u64::from(last) * SECTOR_LEN + block_len);
        }
        self.header = Some(header);
        Ok(())
    }

    /// Refuses metadata and a table that lie behind the end: new blocks would be put behind that place.
    ///
    /// Only the bitmap must be there. A block whose data reach beyond the end is what a crash of a writer leaves that
    /// lets the file grow by the sectors it writes.
    fn check_writable(&self, len: u64) -> Result<()> {
        let Some(header) = &self.header else { return Ok(()) };
        let metadata_end = layout::metadata_end(header, self.batmap.as_ref().map(|batmap| &batmap.header));
        if metadata_end > len {
            return Err(corrupt(format!(
                "its metadata end at byte {metadata_end}, behind the end of {len} bytes: look with 'vhd-util check'"
            )));
        }
        let bitmap_len = layout::bitmap_len(header.block_len);
        match self.bat.allocated().find(|(_, sector)| u64::from(*sector) * SECTOR_LEN + bitmap_len > len) {
            Some((block, sector)) => Err(corrupt(format!(
                "block {block} at sector {sector} lies behind the end of {len} bytes: look with 'vhd-util check'"
            ))),
            None => Ok(()),
        }
    }

    /// The batmap, or `None` where it cannot be trusted: a reader loses nothing but speed without it.
    fn read_batmap(&self, header: &Header, len: u64, tolerances: &mut Vec<Tolerance>) -> Option<Batmap> {
        let required = batmap::is_required(&self.footer);
        let at = batmap::header_offset(header);
        let found = self
            .read_array::<{ batmap::HEADER_LEN }>(at)
            .and_then(|bytes| BatmapHeader::decode(&bytes, header))
            .ok()
            .filter(|found| found.offset.saturating_add(found.len()) <= len);
        let Some(found) = found else {
            if required {
                tolerances.push(Tolerance::NoBatmap);
            }
            return None;
        };
        let mut map = vec![0; batmap::sectors_for(header.entries_max) as usize * SECTOR_LEN as usize];
        self.read_bytes(found.offset, &mut map).ok()?;
        if found.map_checksum(&map, self.footer.current_len) != found.checksum {
            tolerances.push(Tolerance::BatmapChecksum);
            return None;
        }
        Some(Batmap { header: found, map })
    }

    /// A batmap made from the bitmaps, where the one on disk does not fit its checksum: a write of it was broken off.
    ///
    /// # Errors
    /// Those of the medium.
    pub(super) fn batmap_anew(&self) -> Result<Option<Batmap>> {
        let Some(header) =
            self.header.as_ref().filter(|_| self.tolerances.contains(&Tolerance::BatmapChecksum))
        else {
            return Ok(None);
        };
        let found = BatmapHeader::decode(&self.read_array(batmap::header_offset(header))?, header)?;
        let mut map = vec![0; found.len() as usize];
        for (block, _) in self.bat.allocated() {
            if self.bitmap_on_disk(block)?.is_some_and(|bits| bitmap::all_set(&bits, 0, self.block_sectors()))
            {
                bitmap::set(&mut map, block as usize);
            }
        }
        Ok(Some(Batmap { header: found, map }))
    }

    /// The footer in force.
    pub fn footer(&self) -> &Footer {
        &self.footer
    }

    /// Where the footer was found.
    pub fn footer_source(&self) -> FooterSource {
        self.source
    }

    /// The header of a dynamic or differencing disk.
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// The block table; empty in a fixed disk.
    pub fn bat(&self) -> &Bat {
        &self.bat
    }

    /// The batmap, where there is one that holds.
    pub fn batmap(&self) -> Option<&Batmap> {
        self.batmap.as_ref()
    }

    /// What was overlooked while opening.
    pub fn tolerances(&self) -> &[Tolerance] {
        &self.tolerances
    }

    /// The path given when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The medium below.
    pub fn medium(&self) -> &M {
        &self.medium
    }

    /// The medium below, given back; what was not committed is lost.
    pub fn into_medium(self) -> M {
        self.medium
    }

    /// Bytes of the disk, whole sectors. A last piece shorter than a sector, which the footer of a child of a raw file
    /// may count, is not part of the disk, as for tapdisk.
    pub fn virtual_len(&self) -> u64 {
        self.footer.current_len / SECTOR_LEN * SECTOR_LEN
    }

    /// Bytes that the image needs: up to the end of its data, and the footer.
    pub fn physical_len(&self) -> u64 {
        let end = if self.footer.disk_type.is_dynamic() {
            self.end
        } else {
            // A short footer alone has 511 bytes.
            self.medium.len().unwrap_or(self.end + FOOTER_LEN as u64).saturating_sub(FOOTER_LEN as u64)
        };
        end + FOOTER_LEN as u64
    }

    /// Blocks in the image.
    pub fn allocated_blocks(&self) -> u32 {
        u32::try_from(self.bat.allocated().count()).unwrap_or(u32::MAX)
    }

    /// Bytes of data in a block; a fixed disk is treated as one of the usual size.
    pub fn block_len(&self) -> u32 {
        self.header.as_ref().map_or(crate::vhd::BLOCK_LEN, |header| header.block_len)
    }

    /// Sectors of data in a block.
    pub fn block_sectors(&self) -> usize {
        self.block_len() as usize / SECTOR_LEN as usize
    }

    /// Whether it is a differencing disk whose parent is a raw file or device.
    pub fn has_raw_parent(&self) -> bool {
        self.footer.disk_type == DiskType::Differencing
            && self.header.as_ref().is_some_and(|header| header.parent_uuid.is_nil())
    }

    /// The parent's file name as the header has it.
    pub fn parent_name(&self) -> Option<String> {
        let header = self.header.as_ref()?;
        match self.footer.bit_order() {
            BitOrder::MsbFirst => header.parent_name(),
            BitOrder::LsbFirst => header.parent_name_old(),
        }
        .filter(|name| !name.is_empty())
    }

    /// The sector of the block's bitmap, blocks not yet in the table on disk included.
    pub(super) fn block_sector(&self, block: u32) -> Option<u32> {
        self.bat.entry(block).or_else(|| self.pending.bitmaps.get(&block).map(|pending| pending.sector))
    }

    /// Whether the batmap says that every sector of the block is here.
    pub fn is_block_full(&self, block: u32) -> bool {
        self.bat.entry(block).is_some()
            && self.batmap.as_ref().is_some_and(|batmap| bitmap::test(&batmap.map, block as usize))
    }

    /// The block's bitmap in the usual order, or `None` where the block is not in the image.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn bitmap(&self, block: u32) -> Result<Option<Vec<u8>>> {
        if let Some(pending) = self.pending.bitmaps.get(&block) {
            return Ok(Some(pending.map.clone()));
        }
        if self.is_block_full(block) {
            return Ok(Some(vec![0xff; layout::bitmap_len(self.block_len()) as usize]));
        }
        self.bitmap_on_disk(block)
    }

    /// The block's bitmap as it stands on disk, whatever the batmap says.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn bitmap_on_disk(&self, block: u32) -> Result<Option<Vec<u8>>> {
        let Some(sector) = self.bat.entry(block) else { return Ok(None) };
        let mut map = vec![0; layout::bitmap_len(self.block_len()) as usize];
        self.read_bytes(u64::from(sector) * SECTOR_LEN, &mut map)?;
        self.footer.bit_order().swap(&mut map);
        Ok(Some(map))
    }

    /// Where the data of the block begins, in bytes.
    pub fn data_offset(&self, block: u32) -> Option<u64> {
        let sector = self.block_sector(block)?;
        Some(u64::from(sector) * SECTOR_LEN + layout::bitmap_len(self.block_len()))
    }

    pub(super) fn read_bytes(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.medium
            .read_at(at, into)
            .map_err(|error| {
                FormatError::io(format!("cannot read {} bytes", into.len()), error).with_offset(at)
            })
            .map_err(|error| error.with_path(&self.path))
    }

    pub(super) fn write_bytes(&mut self, at: u64, from: &[u8]) -> Result<()> {
        self.medium
            .write_at(at, from)
            .map_err(|error| {
                FormatError::io(format!("cannot write {} bytes", from.len()), error).with_offset(at)
            })
            .map_err(|error| error.with_path(&self.path))
    }

    pub(super) fn flush(&mut self) -> Result<()> {
        self.medium.flush().map_err(|error| FormatError::io("cannot flush", error).with_path(&self.path))
    }

    pub(super) fn medium_len(&self) -> Result<u64> {
        self.medium
            .len()
            .map_err(|error| FormatError::io("cannot find the length", error).with_path(&self.path))
    }

    fn read_array<const N: usize>(&self, at: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_bytes(at, &mut bytes)?;
        Ok(bytes)
    }
}
