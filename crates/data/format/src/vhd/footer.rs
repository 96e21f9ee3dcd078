//! The footer: 512 bytes at the end of every image, and a copy at the start of those that have a header.
//!
//! The decoded form holds every byte of the encoded one, so decoding and encoding an intact footer gives it back
//! exactly, whatever program made it.

use std::fmt;

use uuid::Uuid;

use super::{BitOrder, FOOTER_LEN, Geometry, be16, be32, be64, checksum, put, time};
use crate::error::{FormatError, FormatErrorKind, Result, corrupt};

/// The first eight bytes of a footer.
pub const COOKIE: [u8; 8] = *b"conectix";
/// In place of the cookie while a journalled operation runs: the image must not be opened.
pub const COOKIE_DISABLED: [u8; 8] = *b"v_poison";
/// The feature bit that is always set.
pub const FEATURE_RESERVED: u32 = 2;
/// The feature bit of a temporary disk.
pub const FEATURE_TEMPORARY: u32 = 1;
/// Format version 1.0, the only one.
pub const VERSION: u32 = 0x0001_0000;
/// The data offset of a fixed disk, which has no header.
pub const NO_HEADER: u64 = u64::MAX;
/// The creator's name in images made here, the same as in tapdisk's: their extensions hold for ours.
pub const CREATOR_APP: [u8; 4] = *b"tap\0";
/// The creator's version in images made here: 1.3, which has a batmap of version 1.2.
pub const CREATOR_VERSION: u32 = 0x0001_0003;

const CHECKSUM_AT: usize = 64;
const HIDDEN_AT: usize = 85;
const RESERVED_AT: usize = 86;
const RESERVED_LEN: usize = FOOTER_LEN - RESERVED_AT;

/// What kind of disk an image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskType {
    /// All data in place, a footer behind it.
    Fixed,
    /// Blocks allocated as they are written; what was never written reads as zeros.
    Dynamic,
    /// As dynamic; what was never written here is read from the parent.
    Differencing,
    /// A number that the specification reserves.
    Other(u32),
}

impl DiskType {
    /// From the number on disk.
    pub const fn from_code(code: u32) -> Self {
        match code {
            2 => Self::Fixed,
            3 => Self::Dynamic,
            4 => Self::Differencing,
            other => Self::Other(other),
        }
    }

    /// The number on disk.
    pub const fn code(self) -> u32 {
        match self {
            Self::Fixed => 2,
            Self::Dynamic => 3,
            Self::Differencing => 4,
            Self::Other(code) => code,
        }
    }

    /// Whether the image has a header and a block table.
    pub const fn is_dynamic(self) -> bool {
        matches!(self, Self::Dynamic | Self::Differencing)
    }

    /// The kind in words, as `vhd-util read -p` prints it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fixed => "Fixed hard disk",
            Self::Dynamic => "Dynamic hard disk",
            Self::Differencing => "Differencing hard disk",
            Self::Other(_) => "Unknown type",
        }
    }
}

/// Which of an image's footers was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FooterSource {
    /// The last 512 bytes.
    Primary,
    /// The last 511 bytes, as Microsoft's early tools wrote it.
    Short,
    /// The copy at byte 0.
    Backup,
}

/// A flaw that was noticed and overlooked while reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tolerance {
    /// The checksum holds only with the hidden flag clear: creators 0.1 and 1.1 set the flag without it.
    HiddenNotInChecksum,
    /// The primary footer is unusable, the copy at the start was used.
    BackupFooter,
    /// The footer is one byte short.
    ShortFooter,
    /// The hidden flag was taken from the copy at the start, where creators 0.1 and 1.1 put it.
    HiddenFromBackup,
    /// The batmap header does not hold; the image is read without its batmap.
    NoBatmap,
    /// The batmap's checksum is wrong; the image is read without its batmap.
    BatmapChecksum,
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HiddenNotInChecksum => "the footer's checksum does not count the hidden flag",
            Self::BackupFooter => "the primary footer is unusable, its copy was used",
            Self::ShortFooter => "the footer is 511 bytes long",
            Self::HiddenFromBackup => "the hidden flag is in the footer's copy",
            Self::NoBatmap => "the batmap header is unusable",
            Self::BatmapChecksum => "the batmap's checksum is wrong",
        })
    }
}

/// A footer, field by field in the order on disk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Footer {
    /// `conectix`, or `v_poison` while disabled.
    pub cookie: [u8; 8],
    /// [`FEATURE_RESERVED`] and perhaps [`FEATURE_TEMPORARY`].
    pub features: u32,
    /// [`VERSION`].
    pub version: u32,
    /// Where the header is; [`NO_HEADER`] for a fixed disk.
    pub data_offset: u64,
    /// When it was made, see [`time`].
    pub timestamp: u32,
    /// The program that made it.
    pub creator_app: [u8; 4],
    /// That program's version, major in the upper half.
    pub creator_version: u32,
    /// The system that it ran on.
    pub creator_os: u32,
    /// Virtual size at creation in bytes.
    pub original_len: u64,
    /// Virtual size now in bytes.
    pub current_len: u64,
    /// Geometry for the size.
    pub geometry: Geometry,
    /// The kind of disk.
    pub disk_type: DiskType,
    /// The checksum as it was read; [`Footer::encode`] computes its own.
    pub checksum: u32,
    /// Names this very image.
    pub uuid: Uuid,
    /// Not zero for a disk of a suspended VM. No tool here sets it.
    pub saved: u8,
    /// Not zero for a node that is not shown because it waits to be coalesced.
    pub hidden: u8,
    /// Zero in images by known creators.
    pub reserved: [u8; RESERVED_LEN],
}

impl fmt::Debug for Footer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Footer")
            .field("disk_type", &self.disk_type)
            .field("uuid", &self.uuid)
            .field("current_len", &self.current_len)
            .field("data_offset", &self.data_offset)
            .field("creator_app", &String::from_utf8_lossy(&self.creator_app))
            .field("creator_version", &self.creator_version)
            .field("hidden", &self.hidden)
            .field("disabled", &self.is_disabled())
            .finish_non_exhaustive()
    }
}

impl Footer {
    /// A footer as every new image here gets it: a fresh UUID, the present time, creator "tap" 1.3.
    pub fn new(disk_type: DiskType, len: u64) -> Self {
        Self {
            cookie: COOKIE,
            features: FEATURE_RESERVED,
            version: VERSION,
            data_offset: if disk_type.is_dynamic() { FOOTER_LEN as u64 } else { NO_HEADER },
            timestamp: time::now(),
            creator_app: CREATOR_APP,
            creator_version: CREATOR_VERSION,
            creator_os: 0,
            original_len: len,
            current_len: len,
            geometry: Geometry::for_len(len),
            disk_type,
            checksum: 0,
            uuid: Uuid::new_v4(),
            saved: 0,
            hidden: 0,
            reserved: [0; RESERVED_LEN],
        }
    }

    /// The fields as they stand, right or wrong. For tools that show a damaged image.
    pub fn parse(bytes: &[u8; FOOTER_LEN]) -> Self {
        let mut footer = Self {
            cookie: [0; 8],
            features: be32(bytes, 8),
            version: be32(bytes, 12),
            data_offset: be64(bytes, 16),
            timestamp: be32(bytes, 24),
            creator_app: [0; 4],
            creator_version: be32(bytes, 32),
            creator_os: be32(bytes, 36),
            original_len: be64(bytes, 40),
            current_len: be64(bytes, 48),
            geometry: Geometry::from_u32(be32(bytes, 56)),
            disk_type: DiskType::from_code(be32(bytes, 60)),
            checksum: be32(bytes, CHECKSUM_AT),
            uuid: Uuid::nil(),
            saved: bytes[84],
            hidden: bytes[HIDDEN_AT],
            reserved: [0; RESERVED_LEN],
        };
        footer.cookie.copy_from_slice(&bytes[..8]);
        footer.creator_app.copy_from_slice(&bytes[28..32]);
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[68..84]);
        footer.uuid = Uuid::from_bytes(uuid);
        footer.reserved.copy_from_slice(&bytes[RESERVED_AT..]);
        footer
    }

    /// The footer in `bytes`, with the flaw that was overlooked if there was one.
    ///
    /// # Errors
    /// `NotThisFormat` without a cookie; `Corrupt` with a wrong checksum; `Unsupported` with another version, an
    /// unknown kind of disk, or more bytes than 32-bit sector numbers reach. A disabled image decodes: ask
    /// [`Footer::is_disabled`].
    pub fn decode(bytes: &[u8; FOOTER_LEN]) -> Result<(Self, Option<Tolerance>)> {
        let footer = Self::parse(bytes);
        if footer.cookie != COOKIE && footer.cookie != COOKIE_DISABLED {
            return Err(FormatError::new(
                FormatErrorKind::NotThisFormat,
                "no VHD footer: 'conectix' is not where one must begin",
            ));
        }
        let tolerance = footer.verify_checksum(bytes)?;
        if footer.version >> 16 != VERSION >> 16 {
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                format!("VHD format version {:#010x} is not known, only 1.0 is", footer.version),
            ));
        }
        if let DiskType::Other(code) = footer.disk_type {
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                format!("disk type {code} is not known: 2 fixed, 3 dynamic and 4 differencing are"),
            ));
        }
        if footer.current_len > i64::MAX.cast_unsigned() {
            return Err(corrupt(format!("a virtual size of {} bytes cannot be", footer.current_len)));
        }
        Ok((footer, tolerance))
    }

    /// The footer in the 511 bytes that some early images end with; the missing last byte reads as zero.
    ///
    /// # Errors
    /// As [`Footer::decode`].
    pub fn decode_short(bytes: &[u8; FOOTER_LEN - 1]) -> Result<(Self, Option<Tolerance>)> {
        let mut whole = [0; FOOTER_LEN];
        put(&mut whole, 0, bytes);
        let (footer, _) = Self::decode(&whole)?;
        Ok((footer, Some(Tolerance::ShortFooter)))
    }

    /// The bytes on disk, with the right checksum whatever [`Footer::checksum`] says.
    pub fn encode(&self) -> [u8; FOOTER_LEN] {
        let mut bytes = [0; FOOTER_LEN];
        put(&mut bytes, 0, &self.cookie);
        put(&mut bytes, 8, &self.features.to_be_bytes());
        put(&mut bytes, 12, &self.version.to_be_bytes());
        put(&mut bytes, 16, &self.data_offset.to_be_bytes());
        put(&mut bytes, 24, &self.timestamp.to_be_bytes());
        put(&mut bytes, 28, &self.creator_app);
        put(&mut bytes, 32, &self.creator_version.to_be_bytes());
        put(&mut bytes, 36, &self.creator_os.to_be_bytes());
        put(&mut bytes, 40, &self.original_len.to_be_bytes());
        put(&mut bytes, 48, &self.current_len.to_be_bytes());
        put(&mut bytes, 56, &self.geometry.to_u32().to_be_bytes());
        put(&mut bytes, 60, &self.disk_type.code().to_be_bytes());
        put(&mut bytes, 68, self.uuid.as_bytes());
        bytes[84] = self.saved;
        bytes[HIDDEN_AT] = self.hidden;
        put(&mut bytes, RESERVED_AT, &self.reserved);
        let sum = checksum::without_field(&bytes, CHECKSUM_AT);
        put(&mut bytes, CHECKSUM_AT, &sum.to_be_bytes());
        bytes
    }

    /// The checksum that the fields as they are should carry.
    pub fn expected_checksum(&self) -> u32 {
        be32(&self.encode(), CHECKSUM_AT)
    }

    /// Whether a journalled operation has disabled the image.
    pub fn is_disabled(&self) -> bool {
        self.cookie == COOKIE_DISABLED
    }

    /// Whether tapdisk, its tools or ours made the image, so that their extensions hold.
    pub fn is_by_tapdisk(&self) -> bool {
        self.creator_app.starts_with(b"tap")
    }

    /// Whether the creator set the hidden flag outside the checksum, and in the copy at the start only.
    pub fn is_old_creator(&self) -> bool {
        self.is_by_tapdisk() && matches!(self.creator_version, 0x0000_0001 | 0x0001_0001)
    }

    /// The order of bits in block bitmaps.
    pub fn bit_order(&self) -> BitOrder {
        if self.is_by_tapdisk() && self.creator_version == 0x0000_0001 {
            BitOrder::LsbFirst
        } else {
            BitOrder::MsbFirst
        }
    }

    /// Whether the image may have a batmap; from creator version 1.2 on it always has one.
    pub fn may_have_batmap(&self) -> bool {
        self.disk_type.is_dynamic() && self.is_by_tapdisk() && self.creator_version > 0x0000_0001
    }

    /// The same image under another virtual size: current size and geometry change, nothing else.
    #[must_use]
    pub fn resized(&self, len: u64) -> Self {
        Self { current_len: len, geometry: Geometry::for_len(len), ..*self }
    }

    fn verify_checksum(&self, bytes: &[u8; FOOTER_LEN]) -> Result<Option<Tolerance>> {
        let right = checksum::without_field(bytes, CHECKSUM_AT);
        if right == self.checksum {
            return Ok(None);
        }
        if self.hidden != 0 && self.is_old_creator() {
            let mut shown = *bytes;
            shown[HIDDEN_AT] = 0;
            if checksum::without_field(&shown, CHECKSUM_AT) == self.checksum {
                return Ok(Some(Tolerance::HiddenNotInChecksum));
            }
        }
        Err(corrupt(format!("the footer's checksum is {:#010x} and should be {right:#010x}", self.checksum)))
    }
}

/// The major and minor part of a version field.
pub fn version_parts(version: u32) -> (u16, u16) {
    let bytes = version.to_be_bytes();
    (be16(&bytes, 0), be16(&bytes, 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Footer {
        Footer::new(DiskType::Dynamic, 64 << 20)
    }

    #[test]
    fn a_new_footer_is_what_the_reference_writes() {
        let bytes = sample().encode();
        assert_eq!(&bytes[..24], b"conectix\0\0\0\x02\0\x01\0\0\0\0\0\0\0\0\x02\0");
        assert_eq!(&bytes[28..40], b"tap\0\0\x01\0\x03\0\0\0\0");
        assert_eq!(&bytes[40..60], b"\0\0\0\0\x04\0\0\0\0\0\0\0\x04\0\0\0\x03\xc3\x08\x11");
        assert_eq!(&bytes[60..64], b"\0\0\0\x03");
        assert!(bytes[84..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn decode_gives_back_every_byte() {
        let mut footer = sample();
        footer.reserved[425] = 9;
        footer.saved = 1;
        let bytes = footer.encode();
        let (read, tolerance) = Footer::decode(&bytes).unwrap();
        assert_eq!((read.encode(), tolerance), (bytes, None));
        assert_eq!(read.checksum, read.expected_checksum());
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        let bytes = sample().encode();
        for at in 0..FOOTER_LEN {
            let mut bad = bytes;
            bad[at] ^= 0x55;
            assert!(Footer::decode(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn old_creators_hide_without_the_checksum_and_new_ones_may_not() {
        for (version, fine) in [(1, true), (0x0001_0001, true), (0x0001_0002, false), (0x0001_0003, false)] {
            let mut bytes = Footer { creator_version: version, ..sample() }.encode();
            bytes[HIDDEN_AT] = 1;
            match Footer::decode(&bytes) {
                Ok((footer, tolerance)) => {
                    assert!(fine && footer.hidden == 1);
                    assert_eq!(tolerance, Some(Tolerance::HiddenNotInChecksum));
                }
                Err(error) => assert!(!fine && error.kind() == FormatErrorKind::Corrupt, "{version:#x}"),
            }
        }
    }

    #[test]
    fn a_short_footer_decodes() {
        let bytes = sample().encode();
        let mut short = [0; 511];
        short.copy_from_slice(&bytes[..511]);
        assert_eq!(Footer::decode_short(&short).unwrap().1, Some(Tolerance::ShortFooter));
    }

    #[test]
    fn a_disabled_image_decodes_and_says_so() {
        let footer = Footer { cookie: COOKIE_DISABLED, ..sample() };
        assert!(Footer::decode(&footer.encode()).unwrap().0.is_disabled());
    }

    #[test]
    fn foreign_bytes_are_named_as_such() {
        assert_eq!(Footer::decode(&[0; 512]).unwrap_err().kind(), FormatErrorKind::NotThisFormat);
        let odd = Footer { disk_type: DiskType::Other(5), ..sample() };
        assert_eq!(Footer::decode(&odd.encode()).unwrap_err().kind(), FormatErrorKind::Unsupported);
        let future = Footer { version: 0x0002_0000, ..sample() };
        assert_eq!(Footer::decode(&future.encode()).unwrap_err().kind(), FormatErrorKind::Unsupported);
    }
}
