//! The batmap: one bit a block, set when every sector of the block is in the image, so that its bitmap need not be
//! read. An extension of tapdisk's creators from version 1.1 on; its header also carries the key's fingerprint.

use std::fmt;

use super::{Footer, Header, SECTOR_LEN, be32, be64, checksum, put};
use crate::error::{FormatError, FormatErrorKind, Result, corrupt};

/// The first eight bytes of a batmap header.
pub const COOKIE: [u8; 8] = *b"tdbatmap";
/// Version 1.2, which images made here carry.
pub const VERSION: u32 = 0x0001_0002;
/// Version 1.1, whose checksum took bytes as signed.
pub const VERSION_SIGNED: u32 = 0x0001_0001;
/// Bytes in a batmap header.
pub const HEADER_LEN: usize = 512;

const KEYHASH_AT: usize = 29;
const RESERVED_AT: usize = KEYHASH_AT + 65;
const RESERVED_LEN: usize = HEADER_LEN - RESERVED_AT;

/// Names the key that an encrypted image needs without giving it away: SHA-256 of nonce and key.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyHash {
    /// 1 where nonce and hash are set.
    pub cookie: u8,
    /// Random bytes hashed before the key.
    pub nonce: [u8; 32],
    /// The hash.
    pub hash: [u8; 32],
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyHash").field("set", &self.is_set()).finish_non_exhaustive()
    }
}

impl KeyHash {
    /// Whether the image is encrypted with a key of this hash.
    pub const fn is_set(&self) -> bool {
        self.cookie == 1
    }
}

/// A batmap header, field by field in the order on disk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BatmapHeader {
    /// `tdbatmap`.
    pub cookie: [u8; 8],
    /// Where the map is, in bytes.
    pub offset: u64,
    /// Sectors that the map takes.
    pub sectors: u32,
    /// [`VERSION`] or an older one.
    pub version: u32,
    /// The checksum of the map, not of this header.
    pub checksum: u32,
    /// A mark for any program's use, see `vhd-util set -f marker`.
    pub marker: u8,
    /// The key of an encrypted image.
    pub key_hash: KeyHash,
    /// Zero.
    pub reserved: [u8; RESERVED_LEN],
}

impl fmt::Debug for BatmapHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatmapHeader")
            .field("offset", &self.offset)
            .field("sectors", &self.sectors)
            .field("version", &self.version)
            .field("checksum", &self.checksum)
            .field("marker", &self.marker)
            .field("key_hash", &self.key_hash)
            .finish_non_exhaustive()
    }
}

impl BatmapHeader {
    /// A header for an empty map of `sectors` at `offset`.
    pub fn new(offset: u64, sectors: u32) -> Self {
        Self {
            cookie: COOKIE,
            offset,
            sectors,
            version: VERSION,
            checksum: checksum::of(&[]),
            marker: 0,
            key_hash: KeyHash::default(),
            reserved: [0; RESERVED_LEN],
        }
    }

    /// The fields as they stand, right or wrong.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Self {
        let mut header = Self::new(be64(bytes, 8), be32(bytes, 16));
        header.cookie.copy_from_slice(&bytes[..8]);
        header.version = be32(bytes, 20);
        header.checksum = be32(bytes, 24);
        header.marker = bytes[28];
        header.key_hash.cookie = bytes[KEYHASH_AT];
        header.key_hash.nonce.copy_from_slice(&bytes[KEYHASH_AT + 1..KEYHASH_AT + 33]);
        header.key_hash.hash.copy_from_slice(&bytes[KEYHASH_AT + 33..RESERVED_AT]);
        header.reserved.copy_from_slice(&bytes[RESERVED_AT..]);
        header
    }

    /// The batmap header in `bytes`, checked against the image's own header.
    ///
    /// # Errors
    /// `NotThisFormat` without a cookie; `Unsupported` with a version above 1.2; `Corrupt` where the map lies
    /// before this header's end or is too small for the table.
    pub fn decode(bytes: &[u8; HEADER_LEN], header: &Header) -> Result<Self> {
        let batmap = Self::parse(bytes);
        if batmap.cookie != COOKIE {
            return Err(FormatError::new(
                FormatErrorKind::NotThisFormat,
                "no batmap: 'tdbatmap' is not where one must begin",
            ));
        }
        if batmap.version > VERSION {
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                format!("batmap version {:#010x} is not known, only those to 1.2 are", batmap.version),
            ));
        }
        let first = header_offset(header) + HEADER_LEN as u64;
        let end = batmap.offset.checked_add(batmap.len()).filter(|&end| end <= i64::MAX.cast_unsigned());
        if batmap.offset < first || !batmap.offset.is_multiple_of(SECTOR_LEN) || end.is_none() {
            return Err(corrupt(format!("the batmap cannot be at byte {}", batmap.offset)));
        }
        if batmap.sectors < sectors_for(header.entries_max) {
            return Err(corrupt(format!(
                "a batmap of {} sectors is too small for {} blocks",
                batmap.sectors, header.entries_max
            )));
        }
        Ok(batmap)
    }

    /// The bytes on disk.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        put(&mut bytes, 0, &self.cookie);
        put(&mut bytes, 8, &self.offset.to_be_bytes());
        put(&mut bytes, 16, &self.sectors.to_be_bytes());
        put(&mut bytes, 20, &self.version.to_be_bytes());
        put(&mut bytes, 24, &self.checksum.to_be_bytes());
        bytes[28] = self.marker;
        bytes[KEYHASH_AT] = self.key_hash.cookie;
        put(&mut bytes, KEYHASH_AT + 1, &self.key_hash.nonce);
        put(&mut bytes, KEYHASH_AT + 33, &self.key_hash.hash);
        put(&mut bytes, RESERVED_AT, &self.reserved);
        bytes
    }

    /// Bytes that the map takes on disk.
    pub fn len(&self) -> u64 {
        u64::from(self.sectors) * SECTOR_LEN
    }

    /// Whether the map takes no space.
    pub fn is_empty(&self) -> bool {
        self.sectors == 0
    }

    /// The checksum that this header should carry for `map` in a disk of `virtual_len` bytes.
    ///
    /// Only the part of the map that the size needs is summed, rounded to sectors: what lies behind it does not
    /// count, as in every other implementation.
    pub fn map_checksum(&self, map: &[u8], virtual_len: u64) -> u32 {
        let covered = summed_len(virtual_len).min(map.len());
        if self.version == VERSION_SIGNED {
            checksum::of_signed(&map[..covered])
        } else {
            checksum::of(&map[..covered])
        }
    }
}

/// Where the batmap header of an image with this header is: right behind the table.
pub fn header_offset(header: &Header) -> u64 {
    header.table_offset.saturating_add((u64::from(header.entries_max) * 4).next_multiple_of(SECTOR_LEN))
}

/// Sectors of a map for `entries` blocks, at least one.
pub fn sectors_for(entries: u32) -> u32 {
    entries.div_ceil(8).div_ceil(SECTOR_LEN as u32).max(1)
}

/// Whether an image with this footer must have a batmap, so that one that cannot be read is damage.
pub fn is_required(footer: &Footer) -> bool {
    footer.may_have_batmap() && footer.creator_version >= 0x0001_0002
}

fn summed_len(virtual_len: u64) -> usize {
    let bytes = (virtual_len >> 24).max(1).next_multiple_of(SECTOR_LEN);
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_of_an_empty_map_is_what_the_reference_writes() {
        let bytes = BatmapHeader::new(2560, 1).encode();
        assert_eq!(&bytes[..28], b"tdbatmap\0\0\0\0\0\0\x0a\0\0\0\0\x01\0\x01\0\x02\xff\xff\xff\xff");
        assert!(bytes[28..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn decode_gives_back_every_byte() {
        let mut batmap = BatmapHeader::new(2560, 1);
        batmap.marker = 7;
        batmap.key_hash = KeyHash { cookie: 1, nonce: [3; 32], hash: [4; 32] };
        batmap.reserved[417] = 5;
        let bytes = batmap.encode();
        assert_eq!(BatmapHeader::decode(&bytes, &Header::new(32)).unwrap(), batmap);
    }

    #[test]
    fn senseless_fields_are_errors() {
        let header = Header::new(32);
        let decode = |change: fn(&mut BatmapHeader)| {
            let mut batmap = BatmapHeader::new(2560, 1);
            change(&mut batmap);
            BatmapHeader::decode(&batmap.encode(), &header).map_err(|error| error.kind())
        };
        assert!(decode(|_| ()).is_ok());
        assert_eq!(decode(|b| b.cookie[0] = 0), Err(FormatErrorKind::NotThisFormat));
        assert_eq!(decode(|b| b.version = 0x0001_0003), Err(FormatErrorKind::Unsupported));
        assert_eq!(decode(|b| b.offset = 2048), Err(FormatErrorKind::Corrupt));
        assert_eq!(decode(|b| b.offset = u64::MAX - 511), Err(FormatErrorKind::Corrupt));
        assert_eq!(decode(|b| b.sectors = 0), Err(FormatErrorKind::Corrupt));
    }

    #[test]
    fn the_checksum_covers_what_the_size_needs() {
        let batmap = BatmapHeader::new(2560, 2);
        let mut map = vec![0u8; 1024];
        map[600] = 1;
        assert_eq!(batmap.map_checksum(&map, 64 << 20), u32::MAX);
        assert_eq!(batmap.map_checksum(&map, 513 << 24), u32::MAX - 1);
        map[0] = 0x80;
        assert_eq!(batmap.map_checksum(&map, 64 << 20), !0x80);
        let signed = BatmapHeader { version: VERSION_SIGNED, ..batmap };
        assert_eq!(signed.map_checksum(&map, 64 << 20), !0xffff_ff80);
    }

    #[test]
    fn sizes_follow_the_table() {
        assert_eq!(sectors_for(0), 1);
        assert_eq!(sectors_for(4096), 1);
        assert_eq!(sectors_for(4097), 2);
        assert_eq!(sectors_for(1 << 20), 256);
        assert_eq!(header_offset(&Header::new(32)), 2048);
        assert_eq!(header_offset(&Header::new(1 << 20)), 1536 + (4 << 20));
    }
}
