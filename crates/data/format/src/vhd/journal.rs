//! The journal of a resize: what stood in the image where it is going to be overwritten.
//!
//! ```text
//! 0     512  header: cookie, the image's UUID, where its footer was, counts and offsets
//! 512   ...  entries of metadata: footer, its copy, header, locators, table, batmap header, batmap
//! ...   ...  entries of data
//! ```
//!
//! An entry is 32 bytes and the bytes to be put back, whole sectors. Everything is big-endian but the end of the
//! journal in the header, which its inventors forgot to swap and which therefore is little-endian.

use uuid::Uuid;

use super::{be32, be64, put};
use crate::error::{FormatError, FormatErrorKind, Result, corrupt};

/// The first eight bytes of a journal.
pub const COOKIE: [u8; 8] = *b"vjournal";
/// The first eight bytes of an entry.
pub const ENTRY_COOKIE: u64 = 0xaaaa_1234_4321_aaaa;
/// Bytes in a journal's header.
pub const HEADER_LEN: usize = 512;
/// Bytes in an entry before its payload.
pub const ENTRY_LEN: usize = 32;
/// The most bytes that one entry is read with: a table for 2 TiB in small blocks is 64 MiB.
pub const PAYLOAD_LEN_MAX: u32 = 64 << 20;
/// The most entries that are read: metadata, and a sector or more of every block.
pub const ENTRIES_MAX: u32 = 1 << 20;

/// What an entry puts back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryKind {
    /// The footer at the end.
    Footer,
    /// The footer's copy.
    FooterCopy,
    /// The header.
    Header,
    /// A parent locator.
    Locator,
    /// The block table.
    Table,
    /// The batmap's header.
    BatmapHeader,
    /// The batmap.
    Batmap,
    /// Blocks.
    Data,
}

impl EntryKind {
    const ALL: [Self; 8] = [
        Self::Footer,
        Self::FooterCopy,
        Self::Header,
        Self::Locator,
        Self::Table,
        Self::BatmapHeader,
        Self::Batmap,
        Self::Data,
    ];

    /// From the number on disk.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get((code as usize).checked_sub(1)?).copied()
    }

    /// The number on disk.
    pub const fn code(self) -> u32 {
        self as u32 + 1
    }

    /// Whether it is one of the image's two footers, which come back last.
    pub const fn is_footer(self) -> bool {
        matches!(self, Self::Footer | Self::FooterCopy)
    }
}

/// A journal's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalHeader {
    /// The UUID of the image.
    pub uuid: Uuid,
    /// Where the image's footer was, in bytes: the image ends behind it again when all is put back.
    pub footer_offset: u64,
    /// Entries of data.
    pub data_entries: u32,
    /// Entries of metadata.
    pub metadata_entries: u32,
    /// Where the entries of data begin.
    pub data_offset: u64,
    /// Where the entries of metadata begin.
    pub metadata_offset: u64,
    /// The end of the journal in bytes.
    pub end: u64,
}

impl JournalHeader {
    /// The header in `bytes`.
    ///
    /// # Errors
    /// `NotThisFormat` without a cookie, `Corrupt` for offsets behind the end and absurd counts.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self> {
        if bytes[..8] != COOKIE {
            return Err(FormatError::new(
                FormatErrorKind::NotThisFormat,
                "no journal: it does not begin with 'vjournal'",
            ));
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[8..24]);
        let mut end = [0; 8];
        end.copy_from_slice(&bytes[56..64]);
        let header = Self {
            uuid: Uuid::from_bytes(uuid),
            footer_offset: be64(bytes, 24),
            data_entries: be32(bytes, 32),
            metadata_entries: be32(bytes, 36),
            data_offset: be64(bytes, 40),
            metadata_offset: be64(bytes, 48),
            end: u64::from_le_bytes(end),
        };
        if header.data_offset > header.end || header.metadata_offset > header.end {
            return Err(corrupt("the journal's entries begin behind its end"));
        }
        if header.data_entries.max(header.metadata_entries) > ENTRIES_MAX {
            return Err(corrupt(format!("a journal of {} entries cannot be", header.data_entries)));
        }
        if header.footer_offset > i64::MAX.cast_unsigned() - 512 {
            return Err(corrupt(format!("the footer cannot have been at byte {}", header.footer_offset)));
        }
        Ok(header)
    }

    /// The bytes on disk.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        put(&mut bytes, 0, &COOKIE);
        put(&mut bytes, 8, self.uuid.as_bytes());
        put(&mut bytes, 24, &self.footer_offset.to_be_bytes());
        put(&mut bytes, 32, &self.data_entries.to_be_bytes());
        put(&mut bytes, 36, &self.metadata_entries.to_be_bytes());
        put(&mut bytes, 40, &self.data_offset.to_be_bytes());
        put(&mut bytes, 48, &self.metadata_offset.to_be_bytes());
        put(&mut bytes, 56, &self.end.to_le_bytes());
        bytes
    }
}

/// An entry without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: EntryKind,
    /// Bytes of payload, whole sectors.
    pub len: u32,
    /// Where in the image they belong.
    pub offset: u64,
    /// The checksum over entry and payload.
    pub checksum: u32,
    /// The last four bytes, which mean nothing. Other writers leave there what their memory held, and sum it.
    pub padding: [u8; 4],
}

impl Entry {
    /// An entry for `payload`, which belongs at byte `offset` of the image.
    pub fn new(kind: EntryKind, offset: u64, payload: &[u8]) -> Self {
        let mut entry = Self { kind, len: payload.len() as u32, offset, checksum: 0, padding: [0; 4] };
        entry.checksum = entry.expected_checksum(payload);
        entry
    }

    /// The entry in `bytes`.
    ///
    /// # Errors
    /// `Corrupt` without a cookie, for an unknown kind, and for a length that is not whole sectors or absurd.
    pub fn decode(bytes: &[u8; ENTRY_LEN]) -> Result<Self> {
        let (code, len, offset) = (be32(bytes, 8), be32(bytes, 12), be64(bytes, 16));
        if be64(bytes, 0) != ENTRY_COOKIE {
            return Err(corrupt("an entry of the journal does not begin as one"));
        }
        if len == 0 || !len.is_multiple_of(512) || len > PAYLOAD_LEN_MAX {
            return Err(corrupt(format!("an entry of the journal cannot have {len} bytes")));
        }
        if offset > i64::MAX.cast_unsigned() - u64::from(len) {
            return Err(corrupt(format!("an entry of the journal cannot belong at byte {offset}")));
        }
        let kind = EntryKind::from_code(code)
            .ok_or_else(|| corrupt(format!("an entry of the journal is of the unknown kind {code}")))?;
        let padding = [bytes[28], bytes[29], bytes[30], bytes[31]];
        Ok(Self { kind, len, offset, checksum: be32(bytes, 24), padding })
    }

    /// The bytes on disk.
    pub fn encode(&self) -> [u8; ENTRY_LEN] {
        let mut bytes = [0; ENTRY_LEN];
        put(&mut bytes, 0, &ENTRY_COOKIE.to_be_bytes());
        put(&mut bytes, 8, &self.kind.code().to_be_bytes());
        put(&mut bytes, 12, &self.len.to_be_bytes());
        put(&mut bytes, 16, &self.offset.to_be_bytes());
        put(&mut bytes, 24, &self.checksum.to_be_bytes());
        put(&mut bytes, 28, &self.padding);
        bytes
    }

    /// The checksum that an entry with this payload should carry: a plain sum, the same in any byte order.
    pub fn expected_checksum(&self, payload: &[u8]) -> u32 {
        let plain = Self { checksum: 0, ..*self }.encode();
        let sum = |bytes: &[u8]| bytes.iter().fold(0u32, |sum, &byte| sum.wrapping_add(u32::from(byte)));
        !sum(&plain).wrapping_add(sum(payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_with_its_one_odd_field() {
        let header = JournalHeader {
            uuid: Uuid::new_v4(),
            footer_offset: 4608,
            data_entries: 2,
            metadata_entries: 9,
            data_offset: 9000,
            metadata_offset: 512,
            end: 0x0102_0304,
        };
        let bytes = header.encode();
        assert_eq!(JournalHeader::decode(&bytes).unwrap(), header);
        assert_eq!(bytes[56..64], [4, 3, 2, 1, 0, 0, 0, 0]);
        assert!(JournalHeader::decode(&JournalHeader { end: 511, ..header }.encode()).is_err());
        assert!(JournalHeader::decode(&JournalHeader { data_entries: u32::MAX, ..header }.encode()).is_err());
        assert!(JournalHeader::decode(&[0; HEADER_LEN]).is_err());
    }

    #[test]
    fn an_entry_knows_its_payload() {
        let payload = vec![0xff; 1024];
        let entry = Entry::new(EntryKind::Batmap, 2560, &payload);
        assert_eq!(Entry::decode(&entry.encode()).unwrap(), entry);
        assert_eq!(entry.expected_checksum(&payload), entry.checksum);
        assert_ne!(entry.expected_checksum(&[0; 1024]), entry.checksum);
        let dirty = Entry { padding: [1, 2, 3, 4], ..entry };
        assert_eq!(Entry::decode(&dirty.encode()).unwrap(), dirty);
        assert_eq!(dirty.expected_checksum(&payload), entry.checksum - 10, "the padding is summed");
        let mut moved = entry;
        moved.offset += 512;
        assert_ne!(moved.expected_checksum(&payload), entry.checksum);
        for (code, kind) in (1..=8).zip(EntryKind::ALL) {
            assert_eq!((EntryKind::from_code(code), kind.code()), (Some(kind), code));
        }
    }

    #[test]
    fn odd_entries_are_errors() {
        let entry = Entry::new(EntryKind::Data, 0, &[0; 512]);
        for (at, value) in [(0, 1), (11, 9), (11, 0), (12, 0x70), (15, 1), (16, 0x80)] {
            let mut bytes = entry.encode();
            bytes[at] = value;
            assert!(Entry::decode(&bytes).is_err(), "byte {at}");
        }
    }
}
