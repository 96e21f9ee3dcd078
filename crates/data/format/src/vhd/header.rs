//! The header of a dynamic or differencing disk: where the block table is and which image the parent is.
//!
//! As with the footer, the decoded form holds every byte of the encoded one.

use std::fmt;

use uuid::Uuid;

use super::locator::{self, LocatorEntry, decode_utf16};
use super::{
    BAT_ENTRIES_MAX, BLOCK_LEN, BLOCK_LEN_MIN, FOOTER_LEN, HEADER_LEN, PlatformCode, SECTOR_LEN, be32, be64,
    checksum, put,
};
use crate::error::{FormatError, FormatErrorKind, Result, corrupt, invalid};

/// The first eight bytes of a header.
pub const COOKIE: [u8; 8] = *b"cxsparse";
/// Header version 1.0, the only one.
pub const VERSION: u32 = 0x0001_0000;
/// Where the tools here put the block table.
pub const TABLE_OFFSET: u64 = (FOOTER_LEN + HEADER_LEN) as u64;

const CHECKSUM_AT: usize = 36;
const NAME_AT: usize = 64;
const NAME_LEN: usize = 512;
const LOCATORS_AT: usize = 576;
const RESERVED2_AT: usize = 768;
const RESERVED2_LEN: usize = HEADER_LEN - RESERVED2_AT;

/// A header, field by field in the order on disk.
#[derive(Clone, PartialEq, Eq)]
pub struct Header {
    /// `cxsparse`.
    pub cookie: [u8; 8],
    /// All ones: no further structure follows.
    pub data_offset: u64,
    /// Where the block table is, in bytes.
    pub table_offset: u64,
    /// [`VERSION`].
    pub version: u32,
    /// Entries in the block table. May be more than the size needs, to leave room for growth.
    pub entries_max: u32,
    /// Bytes of data in a block.
    pub block_len: u32,
    /// The checksum as it was read; [`Header::encode`] computes its own.
    pub checksum: u32,
    /// The parent's UUID. Nil in a differencing disk means a raw parent.
    pub parent_uuid: Uuid,
    /// The parent's time of modification when the child was made, see [`super::time`].
    pub parent_timestamp: u32,
    /// Zero.
    pub reserved1: u32,
    /// The parent's file name, UTF-16 big-endian, padded with zeros.
    pub parent_name: [u8; NAME_LEN],
    /// Where the parent may be found.
    pub locators: [LocatorEntry; locator::COUNT],
    /// Zero.
    pub reserved2: [u8; RESERVED2_LEN],
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Header")
            .field("table_offset", &self.table_offset)
            .field("entries_max", &self.entries_max)
            .field("block_len", &self.block_len)
            .field("parent_uuid", &self.parent_uuid)
            .field("parent_name", &self.parent_name())
            .finish_non_exhaustive()
    }
}

impl Header {
    /// A header without a parent for a table of `entries` blocks of 2 MiB, right behind it.
    pub fn new(entries: u32) -> Self {
        Self {
            cookie: COOKIE,
            data_offset: u64::MAX,
            table_offset: TABLE_OFFSET,
            version: VERSION,
            entries_max: entries,
            block_len: BLOCK_LEN,
            checksum: 0,
            parent_uuid: Uuid::nil(),
            parent_timestamp: 0,
            reserved1: 0,
            parent_name: [0; NAME_LEN],
            locators: [LocatorEntry::NONE; locator::COUNT],
            reserved2: [0; RESERVED2_LEN],
        }
    }

    /// The fields as they stand, right or wrong. For tools that show a damaged image.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Self {
        let mut header = Self::new(be32(bytes, 28));
        header.cookie.copy_from_slice(&bytes[..8]);
        header.data_offset = be64(bytes, 8);
        header.table_offset = be64(bytes, 16);
        header.version = be32(bytes, 24);
        header.block_len = be32(bytes, 32);
        header.checksum = be32(bytes, CHECKSUM_AT);
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[40..56]);
        header.parent_uuid = Uuid::from_bytes(uuid);
        header.parent_timestamp = be32(bytes, 56);
        header.reserved1 = be32(bytes, 60);
        header.parent_name.copy_from_slice(&bytes[NAME_AT..NAME_AT + NAME_LEN]);
        for (entry, bytes) in
            header.locators.iter_mut().zip(bytes[LOCATORS_AT..].chunks_exact(locator::ENTRY_LEN))
        {
            *entry = LocatorEntry::parse(bytes);
        }
        header.reserved2.copy_from_slice(&bytes[RESERVED2_AT..]);
        header
    }

    /// The header in `bytes`.
    ///
    /// # Errors
    /// `NotThisFormat` without a cookie; `Corrupt` with a wrong checksum, an unknown locator code, a block size
    /// that is no power of two or a table that is not on a sector; `Unsupported` with another version, and with
    /// blocks below [`BLOCK_LEN_MIN`] or above [`BLOCK_LEN`].
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self> {
        let header = Self::parse(bytes);
        if header.cookie != COOKIE {
            return Err(FormatError::new(
                FormatErrorKind::NotThisFormat,
                "no VHD header: 'cxsparse' is not where one must begin",
            ));
        }
        let right = checksum::without_field(bytes, CHECKSUM_AT);
        if header.checksum != right {
            return Err(corrupt(format!(
                "the header's checksum is {:#010x} and should be {right:#010x}",
                header.checksum
            )));
        }
        header.validate()?;
        Ok(header)
    }

    /// The bytes on disk, with the right checksum whatever [`Header::checksum`] says.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        put(&mut bytes, 0, &self.cookie);
        put(&mut bytes, 8, &self.data_offset.to_be_bytes());
        put(&mut bytes, 16, &self.table_offset.to_be_bytes());
        put(&mut bytes, 24, &self.version.to_be_bytes());
        put(&mut bytes, 28, &self.entries_max.to_be_bytes());
        put(&mut bytes, 32, &self.block_len.to_be_bytes());
        put(&mut bytes, 40, self.parent_uuid.as_bytes());
        put(&mut bytes, 56, &self.parent_timestamp.to_be_bytes());
        put(&mut bytes, 60, &self.reserved1.to_be_bytes());
        put(&mut bytes, NAME_AT, &self.parent_name);
        for (entry, bytes) in
            self.locators.iter().zip(bytes[LOCATORS_AT..].chunks_exact_mut(locator::ENTRY_LEN))
        {
            entry.encode_into(bytes);
        }
        put(&mut bytes, RESERVED2_AT, &self.reserved2);
        let sum = checksum::without_field(&bytes, CHECKSUM_AT);
        put(&mut bytes, CHECKSUM_AT, &sum.to_be_bytes());
        bytes
    }

    /// The checksum that the fields as they are should carry.
    pub fn expected_checksum(&self) -> u32 {
        be32(&self.encode(), CHECKSUM_AT)
    }

    /// The parent's file name as it was written: UTF-16 big-endian, or native in images by the oldest creator.
    ///
    /// `None` where it is not text.
    pub fn parent_name(&self) -> Option<String> {
        self.parent_name_in(u16::from_be_bytes)
    }

    /// The parent's file name in an image by creator "tap" version 0.1, which wrote it in its own byte order.
    pub fn parent_name_old(&self) -> Option<String> {
        self.parent_name_in(u16::from_le_bytes)
    }

    fn parent_name_in(&self, order: fn([u8; 2]) -> u16) -> Option<String> {
        decode_utf16(&self.parent_name, order)
    }

    /// Sets the parent's file name.
    ///
    /// # Errors
    /// `InvalidArgument` for a name longer than the field, 255 UTF-16 units and a final zero.
    pub fn set_parent_name(&mut self, name: &str) -> Result<()> {
        let units: Vec<u8> = name.encode_utf16().flat_map(u16::to_be_bytes).collect();
        if units.len() > NAME_LEN - 2 {
            return Err(invalid(format!("the parent's name '{name}' is longer than a VHD header holds")));
        }
        self.parent_name = [0; NAME_LEN];
        put(&mut self.parent_name, 0, &units);
        Ok(())
    }

    /// Table entries that a disk of `len` bytes needs.
    ///
    /// # Errors
    /// `Corrupt` where the table has fewer; `Unsupported` above [`BAT_ENTRIES_MAX`].
    pub fn entries_for(&self, len: u64) -> Result<u32> {
        let needed = len.div_ceil(u64::from(self.block_len));
        if needed > u64::from(self.entries_max) {
            return Err(corrupt(format!(
                "the block table has {} entries where a disk of {len} bytes needs {needed}",
                self.entries_max
            )));
        }
        u32::try_from(needed).ok().filter(|&entries| entries <= BAT_ENTRIES_MAX).ok_or_else(|| {
            FormatError::new(
                FormatErrorKind::Unsupported,
                format!("a table of {needed} blocks is larger than the {BAT_ENTRIES_MAX} that are read"),
            )
        })
    }

    fn validate(&self) -> Result<()> {
        if self.version != VERSION {
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                format!("VHD header version {:#010x} is not known, only 1.0 is", self.version),
            ));
        }
        if self.data_offset != u64::MAX {
            return Err(corrupt(format!(
                "the header's data offset is {:#x} and not all ones",
                self.data_offset
            )));
        }
        if !self.block_len.is_power_of_two() {
            return Err(corrupt(format!("a block size of {} bytes is no power of two", self.block_len)));
        }
        if !(BLOCK_LEN_MIN..=BLOCK_LEN).contains(&self.block_len) {
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                format!(
                    "a block size of {} bytes is not read, only {BLOCK_LEN_MIN} to {BLOCK_LEN}",
                    self.block_len
                ),
            ));
        }
        if !self.table_offset.is_multiple_of(SECTOR_LEN) || self.table_offset < FOOTER_LEN as u64 {
            return Err(corrupt(format!("the block table cannot be at byte {}", self.table_offset)));
        }
        let table_len = u64::from(self.entries_max) * 4;
        if self.table_offset.checked_add(table_len).is_none_or(|end| end > i64::MAX.cast_unsigned()) {
            return Err(corrupt("the block table lies behind the end of all files"));
        }
        for entry in &self.locators {
            if let PlatformCode::Other(code) = entry.code {
                return Err(corrupt(format!("parent locator code {code:#010x} is not known")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_header_is_what_the_reference_writes() {
        let bytes = Header::new(32).encode();
        assert_eq!(&bytes[..16], b"cxsparse\xff\xff\xff\xff\xff\xff\xff\xff");
        assert_eq!(&bytes[16..36], b"\0\0\0\0\0\0\x06\0\0\x01\0\0\0\0\0\x20\0\x20\0\0");
        assert!(bytes[40..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn decode_gives_back_every_byte() {
        let mut header = Header::new(1 << 20);
        header.parent_uuid = Uuid::new_v4();
        header.set_parent_name("a.vhd").unwrap();
        header.locators[2] = LocatorEntry {
            code: PlatformCode::W2ru,
            data_space: 512,
            data_len: 14,
            reserved: 0,
            data_offset: 4096,
        };
        header.reserved2[255] = 3;
        let bytes = header.encode();
        let read = Header::decode(&bytes).unwrap();
        assert_eq!(read.encode(), bytes);
        assert_eq!(read.parent_name().as_deref(), Some("a.vhd"));
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        let bytes = Header::new(32).encode();
        for at in 0..HEADER_LEN {
            let mut bad = bytes;
            bad[at] ^= 0x55;
            assert!(Header::decode(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn senseless_fields_are_errors() {
        type Change = fn(&mut Header);
        let cases: [(&str, Change); 7] = [
            ("version", |h| h.version = 0x0002_0000),
            ("data offset", |h| h.data_offset = 0),
            ("block size", |h| h.block_len = 3 << 19),
            ("large blocks", |h| h.block_len = 4 << 20),
            ("small blocks", |h| h.block_len = 512),
            ("table", |h| h.table_offset = u64::MAX - 511),
            ("locator", |h| h.locators[7].code = PlatformCode::Other(9)),
        ];
        for (name, change) in cases {
            let mut header = Header::new(32);
            change(&mut header);
            assert!(Header::decode(&header.encode()).is_err(), "{name}");
        }
    }

    #[test]
    fn entries_follow_the_size() {
        let header = Header::new(32);
        assert_eq!(header.entries_for(64 << 20).unwrap(), 32);
        assert_eq!(header.entries_for((62 << 20) + 1).unwrap(), 32);
        assert_eq!(header.entries_for((64 << 20) + 1).unwrap_err().kind(), FormatErrorKind::Corrupt);
        assert!(Header { entries_max: u32::MAX, block_len: 4096, ..header }.entries_for(1 << 40).is_err());
    }

    #[test]
    fn a_long_name_is_refused() {
        assert!(Header::new(1).set_parent_name(&"x".repeat(255)).is_ok());
        assert!(Header::new(1).set_parent_name(&"x".repeat(256)).is_err());
    }
}
