//! Parent locators: up to eight ways in which a differencing disk says where its parent is.
//!
//! Every writer known here stores a path relative to the child in each of them, whatever the code's name says.

use std::borrow::Cow;

use super::{SECTOR_LEN, be32, be64, put};
use crate::error::{FormatError, FormatErrorKind, Result, corrupt};

/// Bytes in one locator entry of the header.
pub const ENTRY_LEN: usize = 24;
/// Locators in a header.
pub const COUNT: usize = 8;
/// The most bytes of encoded path that are read: twice the longest path in UTF-16.
pub const PATH_LEN_MAX: u32 = 16 << 10;
/// The most space that one locator may claim.
pub const SPACE_LEN_MAX: u64 = 1 << 20;

/// How a locator's path is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlatformCode {
    /// The entry is not used.
    None,
    /// `Wi2r`, deprecated.
    Wi2r,
    /// `Wi2k`, deprecated.
    Wi2k,
    /// `W2ru`: relative Windows path, UTF-16LE.
    W2ru,
    /// `W2ku`: absolute Windows path by the specification, UTF-16LE.
    W2ku,
    /// `Mac `: an alias record, never read here.
    Mac,
    /// `MacX`: a `file://` URL, UTF-8.
    MacX,
    /// Any other number: the header is not valid.
    Other(u32),
}

impl PlatformCode {
    /// From the number on disk.
    pub const fn from_code(code: u32) -> Self {
        match &code.to_be_bytes() {
            [0, 0, 0, 0] => Self::None,
            b"Wi2r" => Self::Wi2r,
            b"Wi2k" => Self::Wi2k,
            b"W2ru" => Self::W2ru,
            b"W2ku" => Self::W2ku,
            b"Mac " => Self::Mac,
            b"MacX" => Self::MacX,
            _ => Self::Other(code),
        }
    }

    /// The number on disk.
    pub const fn code(self) -> u32 {
        u32::from_be_bytes(match self {
            Self::None => [0; 4],
            Self::Wi2r => *b"Wi2r",
            Self::Wi2k => *b"Wi2k",
            Self::W2ru => *b"W2ru",
            Self::W2ku => *b"W2ku",
            Self::Mac => *b"Mac ",
            Self::MacX => *b"MacX",
            Self::Other(code) => return code,
        })
    }

    /// The name that `vhd-util read -p` prints.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "PLAT_CODE_NONE",
            Self::Wi2r => "PLAT_CODE_WI2R",
            Self::Wi2k => "PLAT_CODE_WI2K",
            Self::W2ru => "PLAT_CODE_W2RU",
            Self::W2ku => "PLAT_CODE_W2KU",
            Self::Mac => "PLAT_CODE_MAC",
            Self::MacX => "PLAT_CODE_MACX",
            Self::Other(_) => "UNKNOWN",
        }
    }

    /// Whether paths under this code can be read.
    pub const fn is_readable(self) -> bool {
        matches!(self, Self::MacX | Self::W2ku | Self::W2ru)
    }
}

/// One locator entry of the header: where the encoded path is and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocatorEntry {
    /// How the path is encoded.
    pub code: PlatformCode,
    /// Space set aside; see [`LocatorEntry::space_len`] for its unit.
    pub data_space: u32,
    /// Bytes of encoded path.
    pub data_len: u32,
    /// Zero.
    pub reserved: u32,
    /// Where the path is in the image, in bytes.
    pub data_offset: u64,
}

impl LocatorEntry {
    /// An entry that is not used.
    pub const NONE: Self =
        Self { code: PlatformCode::None, data_space: 0, data_len: 0, reserved: 0, data_offset: 0 };

    pub(crate) fn parse(bytes: &[u8]) -> Self {
        Self {
            code: PlatformCode::from_code(be32(bytes, 0)),
            data_space: be32(bytes, 4),
            data_len: be32(bytes, 8),
            reserved: be32(bytes, 12),
            data_offset: be64(bytes, 16),
        }
    }

    pub(crate) fn encode_into(&self, bytes: &mut [u8]) {
        put(bytes, 0, &self.code.code().to_be_bytes());
        put(bytes, 4, &self.data_space.to_be_bytes());
        put(bytes, 8, &self.data_len.to_be_bytes());
        put(bytes, 12, &self.reserved.to_be_bytes());
        put(bytes, 16, &self.data_offset.to_be_bytes());
    }

    /// Space set aside for the path in bytes.
    ///
    /// The specification counts sectors; all writers known here, Microsoft's among them, store bytes. A number
    /// below 512 is therefore taken as sectors, a multiple of 512 as bytes.
    ///
    /// # Errors
    /// `Corrupt` for any other number and for absurdly large ones.
    pub fn space_len(&self) -> Result<u64> {
        let stored = u64::from(self.data_space);
        let len = if stored < SECTOR_LEN {
            stored * SECTOR_LEN
        } else if stored.is_multiple_of(SECTOR_LEN) {
            stored
        } else {
            return Err(corrupt(format!(
                "a locator's space of {stored} is neither sectors nor whole sectors"
            )));
        };
        if len > SPACE_LEN_MAX {
            return Err(corrupt(format!("a locator's space of {len} bytes is more than {SPACE_LEN_MAX}")));
        }
        Ok(len)
    }

    /// Where the encoded path is: offset and length in bytes, checked against the entry's own space.
    ///
    /// # Errors
    /// `Corrupt` where the path is longer than its space, than [`PATH_LEN_MAX`], or empty.
    pub fn path_span(&self) -> Result<(u64, usize)> {
        let space = self.space_len()?;
        if self.data_len == 0 || self.data_len > PATH_LEN_MAX || u64::from(self.data_len) > space {
            return Err(corrupt(format!(
                "a locator's path of {} bytes does not fit its space of {space} bytes",
                self.data_len
            )));
        }
        if self.data_offset.checked_add(space).is_none() {
            return Err(corrupt("a locator lies behind the end of all files"));
        }
        Ok((self.data_offset, self.data_len as usize))
    }
}

/// `path` as a locator of `code` stores it.
///
/// # Errors
/// `InvalidArgument` for a path too long to store and one that UTF-16 cannot hold; `Unsupported` for a code that
/// is never written.
pub fn encode_path(code: PlatformCode, path: &str) -> Result<Vec<u8>> {
    if path.is_empty() || path.contains('\0') {
        return Err(FormatError::new(
            FormatErrorKind::InvalidArgument,
            "a parent's path is empty or contains a zero byte",
        ));
    }
    let bytes = match code {
        PlatformCode::MacX => format!("file://{path}").into_bytes(),
        PlatformCode::W2ku | PlatformCode::W2ru => {
            path.replace('/', "\\").encode_utf16().flat_map(u16::to_le_bytes).collect()
        }
        other => {
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                format!("parent locators of code {} are not written", other.as_str()),
            ));
        }
    };
    if bytes.len() > PATH_LEN_MAX as usize {
        return Err(FormatError::new(
            FormatErrorKind::InvalidArgument,
            format!("a parent's path of {} bytes is longer than a locator holds", bytes.len()),
        ));
    }
    Ok(bytes)
}

/// The path that the bytes of a locator of `code` name, with `/` between its parts.
///
/// # Errors
/// `Corrupt` for bytes that are not of that encoding; `Unsupported` for codes that are never read.
pub fn decode_path(code: PlatformCode, bytes: &[u8]) -> Result<String> {
    let path = match code {
        PlatformCode::MacX => {
            let text = std::str::from_utf8(bytes).map_err(|_| corrupt("a MacX locator is not UTF-8"))?;
            let text = text.trim_end_matches('\0');
            let path = text
                .strip_prefix("file://")
                .ok_or_else(|| corrupt(format!("a MacX locator must begin with file://, not '{text}'")))?;
            Cow::Borrowed(path)
        }
        PlatformCode::W2ku | PlatformCode::W2ru => {
            let text = decode_utf16(bytes, u16::from_le_bytes)
                .ok_or_else(|| corrupt(format!("a {} locator is not UTF-16", code.as_str())))?;
            let path = text.replace('\\', "/");
            Cow::Owned(match path.strip_prefix("C:").or_else(|| path.strip_prefix("c:")) {
                Some(rest) => rest.to_string(),
                None => path,
            })
        }
        other => {
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                format!("parent locators of code {} are not read", other.as_str()),
            ));
        }
    };
    if path.is_empty() || path.contains('\0') {
        return Err(corrupt("a parent locator names an empty path or one with a zero byte"));
    }
    Ok(path.into_owned())
}

/// Text in UTF-16 up to its first zero character; `None` where it is not UTF-16.
pub(crate) fn decode_utf16(bytes: &[u8], order: fn([u8; 2]) -> u16) -> Option<String> {
    let units = bytes.chunks_exact(2).map(|pair| order([pair[0], pair[1]])).take_while(|&unit| unit != 0);
    char::decode_utf16(units).collect::<std::result::Result<String, _>>().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paths_of_a_sibling_are_encoded_as_the_reference_does() {
        assert_eq!(encode_path(PlatformCode::MacX, "./a.vhd").unwrap(), b"file://./a.vhd");
        let wide = encode_path(PlatformCode::W2ku, "./a.vhd").unwrap();
        assert_eq!(wide, b".\0\\\0a\0.\0v\0h\0d\0");
        assert_eq!(wide.len(), 14);
    }

    #[test]
    fn every_encoding_comes_back() {
        for code in [PlatformCode::MacX, PlatformCode::W2ku, PlatformCode::W2ru] {
            for path in ["./a.vhd", "../x/ä-日本-😀.vhd", "/dev/VG_XenStorage-1/VHD-2"] {
                assert_eq!(decode_path(code, &encode_path(code, path).unwrap()).unwrap(), path);
            }
        }
    }

    #[test]
    fn drive_letters_and_final_zeros_are_dropped() {
        let wide: Vec<u8> = "C:\\x\\a.vhd\0junk".encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert_eq!(decode_path(PlatformCode::W2ku, &wide).unwrap(), "/x/a.vhd");
        assert_eq!(decode_path(PlatformCode::MacX, b"file:///a\0\0").unwrap(), "/a");
    }

    #[test]
    fn bad_bytes_are_errors() {
        for bytes in [&b"http://x"[..], b"file://", b"\xff\xfe", b"", b"file://a\0b"] {
            assert!(decode_path(PlatformCode::MacX, bytes).is_err(), "{bytes:?}");
        }
        assert!(decode_path(PlatformCode::W2ru, &[0x00, 0xd8, b'a', 0]).is_err());
        assert!(decode_path(PlatformCode::Wi2k, b"x").is_err());
        assert!(encode_path(PlatformCode::MacX, "").is_err());
        assert!(encode_path(PlatformCode::MacX, &"x".repeat(20_000)).is_err());
    }

    #[test]
    fn space_is_sectors_below_512_and_bytes_above() {
        let entry = |space, len| LocatorEntry {
            code: PlatformCode::MacX,
            data_space: space,
            data_len: len,
            reserved: 0,
            data_offset: 3072,
        };
        assert_eq!(entry(1, 14).space_len().unwrap(), 512);
        assert_eq!(entry(512, 14).space_len().unwrap(), 512);
        assert_eq!(entry(1024, 14).path_span().unwrap(), (3072, 14));
        assert!(entry(513, 14).space_len().is_err());
        assert!(entry(u32::MAX - 511, 14).space_len().is_err());
        assert!(entry(1, 513).path_span().is_err());
        assert!(entry(0, 1).path_span().is_err());
    }

    #[test]
    fn codes_round_trip() {
        for code in [0, 0x5769_3272, 0x5769_326b, 0x5732_7275, 0x5732_6b75, 0x4d61_6320, 0x4d61_6358, 77] {
            assert_eq!(PlatformCode::from_code(code).code(), code);
        }
    }
}
