//! The log of changed blocks: one bit for each 64 KiB of a disk that was written since the log was made.
//!
//! ```text
//!   0    16  uuid of the log before this one        all little-endian, as tapdisk writes them on x86-64
//!   16   16  uuid of the log after this one
//!   32    4  consistent: 0 while a disk is open on it, and after that process died
//!   36    4  padding
//!   40    8  size of the disk in bytes
//!   48       one bit a block, block n in byte n / 8 with the value 1 << n % 8
//! ```
//!
//! What changed is a superset of what differs: a bit is set before its block is written, and stays if that fails. On a
//! logical volume the log begins the volume and the rest is unused.

use std::ops::Range;
use std::path::Path;

use tapio_types::{Access, Span};
use uuid::Uuid;

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::medium::{FileMedium, Medium};

/// Bytes before the bitmap.
pub const HEADER_LEN: usize = 48;
/// Bytes that one bit stands for.
pub const BLOCK_LEN: u64 = 64 << 10;
/// The largest disk a log is made for or read of, in bytes: its bitmap has 128 MiB.
pub const SIZE_MAX: u64 = 64 << 40;
/// How much of a bitmap is worked on at once.
const PIECE_LEN: usize = 1 << 20;

/// What stands before the bitmap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogHeader {
    /// The log before this one; nil for none.
    pub parent: Uuid,
    /// The log after this one; nil for none.
    pub child: Uuid,
    /// Whether the bitmap is complete: 1, or 0 while it may not be.
    pub consistent: i32,
    /// Bytes of the disk.
    pub size: u64,
}

impl LogHeader {
    /// Reads the beginning of a log.
    ///
    /// # Errors
    /// As [`LogHeader::decode_any`], and where it is of a disk of more than [`SIZE_MAX`] bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let header = Self::decode_any(bytes)?;
        header.check_size()?;
        Ok(header)
    }

    fn check_size(&self) -> Result<()> {
        let size = self.size;
        if size <= SIZE_MAX {
            return Ok(());
        }
        let detail =
            format!("it says that its disk has {size} bytes, which is more than the {SIZE_MAX} allowed");
        Err(FormatError::new(FormatErrorKind::Corrupt, detail))
    }

    /// Reads the beginning of a log, whatever size it names.
    ///
    /// # Errors
    /// It is too short.
    pub fn decode_any(bytes: &[u8]) -> Result<Self> {
        let Some(bytes) = bytes.first_chunk::<HEADER_LEN>() else {
            let detail =
                format!("it has {} bytes, a log of changed blocks at least {HEADER_LEN}", bytes.len());
            return Err(FormatError::new(FormatErrorKind::NotThisFormat, detail).with_errno(libc::EIO));
        };
        let part = |at: usize| -> [u8; 16] { std::array::from_fn(|index| bytes[at + index]) };
        Ok(Self {
            parent: Uuid::from_bytes(part(0)),
            child: Uuid::from_bytes(part(16)),
            consistent: i32::from_le_bytes(std::array::from_fn(|index| bytes[32 + index])),
            size: u64::from_le_bytes(std::array::from_fn(|index| bytes[40 + index])),
        })
    }

    /// The beginning of a log.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..16].copy_from_slice(self.parent.as_bytes());
        bytes[16..32].copy_from_slice(self.child.as_bytes());
        bytes[32..36].copy_from_slice(&self.consistent.to_le_bytes());
        bytes[40..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }
}

/// Bytes of the bitmap of a disk of `size` bytes.
pub const fn bitmap_len(size: u64) -> u64 {
    size.div_ceil(BLOCK_LEN).div_ceil(8)
}

/// Bytes of the whole log of a disk of `size` bytes.
pub const fn log_len(size: u64) -> u64 {
    HEADER_LEN as u64 + bitmap_len(size)
}

/// The blocks that `span` touches.
pub const fn blocks_of(span: Span) -> Range<u64> {
    if span.is_empty() {
        return 0..0;
    }
    span.start / BLOCK_LEN..span.start.saturating_add(span.len - 1) / BLOCK_LEN + 1
}

/// Sets the bits of `blocks`, as far as the bitmap has them; returns which of its bytes hold bits that were not set.
pub fn set_blocks(bitmap: &mut [u8], blocks: Range<u64>) -> Range<usize> {
    let end = blocks.end.min(bitmap.len() as u64 * 8);
    let (mut first, mut last) = (usize::MAX, 0);
    let mut block = blocks.start;
    while block < end {
        let (byte, bit) = ((block / 8) as usize, block % 8);
        let count = (8 - bit).min(end - block);
        let bits = (0xff >> (8 - count)) << bit;
        if bitmap[byte] & bits as u8 != bits as u8 {
            bitmap[byte] |= bits as u8;
            first = first.min(byte);
            last = byte + 1;
        }
        block += count;
    }
    if first == usize::MAX { 0..0 } else { first..last }
}

/// A log that no disk is open on.
#[derive(Debug)]
pub struct Log<M> {
    medium: M,
    header: LogHeader,
}

fn check_size(size: u64) -> Result<()> {
    if (1..=SIZE_MAX).contains(&size) {
        return Ok(());
    }
    let detail = format!("a log is made for a disk of 1 to {SIZE_MAX} bytes, not of {size}");
    Err(FormatError::new(FormatErrorKind::InvalidArgument, detail))
}

fn reading(error: std::io::Error) -> FormatError {
    FormatError::io("cannot read", error)
}

fn writing(error: std::io::Error) -> FormatError {
    FormatError::io("cannot write", error)
}

impl Log<FileMedium> {
    /// Opens the log at `path`.
    ///
    /// # Errors
    /// It cannot be opened, is no log, or a disk is open on it and it is to be written.
    pub fn open(path: &Path, access: Access) -> Result<Self> {
        Self::open_on(FileMedium::open(path, access)?).map_err(|error| error.with_path(path))
    }

    /// Opens the log at `path` for what stands before its bitmap, which may be cut off.
    ///
    /// # Errors
    /// It cannot be opened, is too short for a header, or a disk is open on it and it is to be written.
    pub fn open_header(path: &Path, access: Access) -> Result<Self> {
        Self::header_on(FileMedium::open(path, access)?).map_err(|error| error.with_path(path))
    }

    /// Makes an empty log for a disk of `size` bytes at `path`: a new file, or over what is there.
    ///
    /// # Errors
    /// It cannot be made, or a disk is open on what is there.
    pub fn create(path: &Path, size: u64) -> Result<Self> {
        check_size(size)?;
        let opened = match FileMedium::open(path, Access::ReadWrite) {
            Err(error) if error.kind() == FormatErrorKind::Missing => FileMedium::create_new(path),
            other => other,
        };
        Self::create_on(opened?, size).map_err(|error| error.with_path(path))
    }
}

impl<M: Medium> Log<M> {
    /// The log on `medium`.
    ///
    /// # Errors
    /// It is no log, or shorter than it says.
    pub fn open_on(medium: M) -> Result<Self> {
        let log = Self::header_on(medium)?;
        log.check_whole()?;
        Ok(log)
    }

    fn header_on(medium: M) -> Result<Self> {
        let len = medium.len().map_err(reading)?;
        let mut bytes = vec![0; HEADER_LEN.min(usize::try_from(len).unwrap_or(HEADER_LEN))];
        medium.read_at(0, &mut bytes).map_err(reading)?;
        Ok(Self { header: LogHeader::decode_any(&bytes)?, medium })
    }

    /// Whether the bitmap is there for the size that the log names.
    ///
    /// # Errors
    /// It is not.
    pub fn check_whole(&self) -> Result<()> {
        self.header.check_size()?;
        let (len, size) = (self.medium.len().map_err(reading)?, self.header.size);
        if log_len(size) <= len {
            return Ok(());
        }
        let detail = format!(
            "it is for a disk of {size} bytes, which takes a log of {}, and has only {len}",
            log_len(size)
        );
        Err(FormatError::new(FormatErrorKind::Corrupt, detail).with_errno(libc::EIO))
    }

    /// Makes an empty log on `medium`, whatever it holds.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn create_on(medium: M, size: u64) -> Result<Self> {
        check_size(size)?;
        let mut log = Self { medium, header: LogHeader { size, ..LogHeader::default() } };
        if log.medium.is_device() {
            log.zero(0, log_len(size))?;
        } else {
            log.medium.set_len(0).map_err(writing)?;
            log.medium.set_len(log_len(size)).map_err(writing)?;
        }
        log.set_header(log.header)?;
        Ok(log)
    }

    fn zero(&mut self, from: u64, to: u64) -> Result<()> {
        self.medium.zero(Span::new(from, to - from)).map_err(writing)
    }

    /// What stands before the bitmap.
    pub const fn header(&self) -> &LogHeader {
        &self.header
    }

    /// Changes it, but for the size; durable when this ends.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn set_header(&mut self, header: LogHeader) -> Result<()> {
        let header = LogHeader { size: self.header.size, ..header };
        self.medium.write_at(0, &header.encode()).map_err(writing)?;
        self.medium.flush().map_err(writing)?;
        self.header = header;
        Ok(())
    }

    /// Makes it a log of a disk of `size` bytes, which is not smaller; the new blocks are unchanged.
    ///
    /// # Errors
    /// It would become smaller; those of the medium, with the log as before.
    pub fn grow(&mut self, size: u64) -> Result<()> {
        check_size(size)?;
        if size < self.header.size {
            let detail =
                format!("it is for a disk of {} bytes and does not become smaller", self.header.size);
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        let (old, new) = (log_len(self.header.size), log_len(size));
        // The room first: a log that is killed here is the old one.
        if self.medium.is_device() {
            self.zero(old, new)?;
        } else {
            self.medium.set_len(old).and_then(|()| self.medium.set_len(new)).map_err(writing)?;
        }
        self.medium.flush().map_err(writing)?;
        let before = self.header.size;
        self.header.size = size;
        self.set_header(self.header).inspect_err(|_| self.header.size = before)
    }

    /// Calls `each` with the bitmap, piece by piece.
    ///
    /// # Errors
    /// Those of the medium and of `each`.
    pub fn read_bitmap<E: From<FormatError>>(
        &self,
        mut each: impl FnMut(&[u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let mut piece = vec![0; PIECE_LEN];
        let (mut at, end) = (HEADER_LEN as u64, log_len(self.header.size));
        while at < end {
            let len = (end - at).min(PIECE_LEN as u64) as usize;
            self.medium.read_at(at, &mut piece[..len]).map_err(reading)?;
            each(&piece[..len])?;
            at += len as u64;
        }
        Ok(())
    }

    /// Calls `change` with the bitmap, piece by piece, and writes what it makes of each; durable when this ends.
    fn change_bitmap(&mut self, mut change: impl FnMut(u64, &mut [u8])) -> Result<()> {
        let mut piece = vec![0; PIECE_LEN];
        let (mut at, end) = (HEADER_LEN as u64, log_len(self.header.size));
        while at < end {
            let mine = &mut piece[..(end - at).min(PIECE_LEN as u64) as usize];
            self.medium.read_at(at, mine).map_err(reading)?;
            change(at - HEADER_LEN as u64, mine);
            self.medium.write_at(at, mine).map_err(writing)?;
            at += mine.len() as u64;
        }
        self.medium.flush().map_err(writing)
    }

    /// Sets the bit of every block of the disk: everything counts as changed.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn set_all(&mut self) -> Result<()> {
        let blocks = self.header.size.div_ceil(BLOCK_LEN);
        self.change_bitmap(|first, piece| {
            set_blocks(piece, 0..blocks.saturating_sub(first * 8));
        })
    }

    /// Adds the bits of `changed`, which has the order of the bitmap and may be shorter. Bits of blocks that the disk
    /// does not have are left out.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn add(&mut self, changed: &[u8]) -> Result<()> {
        let blocks = self.header.size.div_ceil(BLOCK_LEN);
        self.change_bitmap(|first, piece| {
            let theirs = changed.get(usize::try_from(first).unwrap_or(usize::MAX)..).unwrap_or_default();
            piece.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine |= theirs);
            let last = (first + piece.len() as u64) * 8;
            if let Some(byte) = piece.last_mut().filter(|_| last > blocks) {
                *byte &= 0xff >> (last - blocks).min(8);
            }
        })
    }

    /// Adds what changed in `earlier`, a log of the same disk before this one. Repeating it changes nothing.
    ///
    /// # Errors
    /// That log is of a larger disk; those of the media.
    pub fn absorb<N: Medium>(&mut self, earlier: &Log<N>) -> Result<()> {
        if earlier.header.size > self.header.size {
            let detail = format!(
                "the parent is for a disk of {} bytes, the child for one of {}: a disk does not become smaller",
                earlier.header.size, self.header.size
            );
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        let mut at = HEADER_LEN as u64;
        let mut piece = vec![0; PIECE_LEN];
        earlier.read_bitmap(|theirs| {
            let mine = &mut piece[..theirs.len()];
            self.medium.read_at(at, mine).map_err(reading)?;
            mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine |= theirs);
            self.medium.write_at(at, mine).map_err(writing)?;
            at += theirs.len() as u64;
            Ok::<_, FormatError>(())
        })?;
        self.medium.flush().map_err(writing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_as_the_tool_of_xenserver_makes_it() {
        let log = Log::create_on(Vec::new(), 64 << 20).unwrap();
        assert_eq!(log.medium.len(), 176);
        assert_eq!(log.medium[40..48], (64u64 << 20).to_le_bytes());
        assert!(log.medium[..40].iter().chain(&log.medium[48..]).all(|byte| *byte == 0));
        let header = LogHeader {
            parent: Uuid::from_u128(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff),
            child: Uuid::from_u128(7),
            consistent: 1,
            size: 123,
        };
        let bytes = header.encode();
        assert_eq!(bytes[..3], [0x00, 0x11, 0x22]);
        assert_eq!(bytes[32..36], [1, 0, 0, 0]);
        assert_eq!(LogHeader::decode(&bytes).unwrap(), header);
    }

    #[test]
    fn bits_are_where_tapdisk_has_them() {
        // Words of 64 bits, little-endian: the same as bytes with the lowest bit first.
        for first in 0..70u64 {
            for count in 0..70u64 {
                let mut bitmap = [0u8; 18];
                let touched = set_blocks(&mut bitmap, first..first + count);
                for block in 0..144u64 {
                    let word = u64::from_le_bytes(std::array::from_fn(|index| {
                        *bitmap.get((block / 64 * 8) as usize + index).unwrap_or(&0)
                    }));
                    let set = (first..first + count).contains(&block);
                    assert_eq!(word >> (block % 64) & 1 == 1, set, "{first}+{count}: {block}");
                    assert!(!set || touched.contains(&((block / 8) as usize)));
                }
                assert!(set_blocks(&mut bitmap, first..first + count).is_empty());
            }
        }
        assert_eq!(set_blocks(&mut [0; 2], 10..u64::MAX), 1..2);
        assert_eq!(blocks_of(Span::new(BLOCK_LEN - 1, 2)), 0..2);
        assert_eq!(blocks_of(Span::new(5, 0)), 0..0);
        assert_eq!(blocks_of(Span::new(u64::MAX, u64::MAX)).end, u64::MAX / BLOCK_LEN + 1);
    }

    #[test]
    fn everything_or_some_blocks_are_marked_within_the_disk() {
        let mut log = Log::create_on(Vec::new(), 11 * BLOCK_LEN + 1).unwrap();
        log.add(&[0b101, 0xff, 0xff]).unwrap();
        assert_eq!(log.medium[HEADER_LEN..], [0b101, 0b1111]);
        log.add(&[0b10]).unwrap();
        assert_eq!(log.medium[HEADER_LEN..], [0b111, 0b1111]);
        log.set_all().unwrap();
        assert_eq!(log.medium[HEADER_LEN..], [0xff, 0b1111]);
        // More than one piece of a bitmap.
        let size = (PIECE_LEN as u64 + 2) * 8 * BLOCK_LEN - 3 * BLOCK_LEN;
        let mut large = Log::create_on(Vec::new(), size).unwrap();
        large.set_all().unwrap();
        let bits: u32 = large.medium[HEADER_LEN..].iter().map(|byte| byte.count_ones()).sum();
        assert_eq!(u64::from(bits), size / BLOCK_LEN);
    }

    #[test]
    fn a_log_grows_with_its_disk_and_takes_in_the_one_before() {
        let mut parent = Log::create_on(Vec::new(), 10 * BLOCK_LEN).unwrap();
        parent.medium[HEADER_LEN] = 0b1010_0001;
        let mut child = Log::create_on(Vec::new(), 20 * BLOCK_LEN + 1).unwrap();
        child.medium[HEADER_LEN] = 0b0000_0011;
        child.medium[HEADER_LEN + 2] = 0b1_0000;
        child.absorb(&parent).unwrap();
        assert_eq!(child.medium[HEADER_LEN..], [0b1010_0011, 0, 0b1_0000]);
        assert_eq!(parent.absorb(&child).unwrap_err().kind(), FormatErrorKind::InvalidArgument);
        // What lies behind the old end is not taken for changes.
        parent.medium.extend([0xff; 9]);
        parent.grow(40 * BLOCK_LEN).unwrap();
        assert_eq!(parent.medium[HEADER_LEN..], [0b1010_0001, 0, 0, 0, 0]);
        assert_eq!(parent.header().size, 40 * BLOCK_LEN);
        assert!(parent.grow(BLOCK_LEN).is_err());
        let mut bits = 0;
        Log::open_on(parent.medium)
            .unwrap()
            .read_bitmap(|piece| {
                bits += piece.len();
                Ok::<_, FormatError>(())
            })
            .unwrap();
        assert_eq!(bits, 5);
    }

    #[test]
    fn what_is_no_log_is_refused_in_a_sentence() {
        let kind = |bytes: Vec<u8>| Log::open_on(bytes).unwrap_err().kind();
        assert_eq!(kind(vec![0; 47]), FormatErrorKind::NotThisFormat);
        let header = LogHeader { size: BLOCK_LEN, ..LogHeader::default() };
        assert_eq!(kind(header.encode().to_vec()), FormatErrorKind::Corrupt);
        assert_eq!(kind(vec![0xff; 4096]), FormatErrorKind::Corrupt);
        assert!(Log::create_on(Vec::new(), 0).is_err() && Log::create_on(Vec::new(), SIZE_MAX + 1).is_err());
    }
}
