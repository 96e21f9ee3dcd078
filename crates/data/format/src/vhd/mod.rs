//! Virtual Hard Disk, as Microsoft published it and as XenServer's tools extended it.
//!
//! ```text
//! 0        512   copy of the footer
//! 512     1024   header (dynamic and differencing disks)
//! 1536     ...   block allocation table (BAT): one big-endian u32 a block, in sectors
//!          512   batmap header          \ only by creator "tap", version above 0.1
//!          ...   batmap: one bit a block / "every sector of this block is here"
//!          ...   parent locators (differencing disks)
//!          ...   blocks: [bitmap, one bit a sector][data on a 4096-byte boundary]
//! end-512  512   footer
//! ```
//!
//! The modules next to this one are pure functions on bytes, so that the live path, the offline tools and the
//! fuzzers share one understanding of the format. All integers on disk are big-endian.

pub mod bat;
pub mod batmap;
pub mod bitmap;
pub mod checksum;
pub mod crypt;
pub mod footer;
pub mod geometry;
pub mod header;
pub mod journal;
pub mod keys;
pub mod layout;
pub mod locator;
pub mod mark;
pub mod offline;
pub mod stream;
pub mod time;

pub use bat::{Bat, UNALLOCATED};
pub use batmap::{BatmapHeader, KeyHash};
pub use bitmap::BitOrder;
pub use footer::{DiskType, Footer, FooterSource, Tolerance};
pub use geometry::Geometry;
pub use header::Header;
pub use keys::Keys;
pub use layout::Layout;
pub use locator::{LocatorEntry, PlatformCode};
pub use mark::Mark;

/// Bytes in a sector.
pub const SECTOR_LEN: u64 = 512;
/// Bytes in a footer.
pub const FOOTER_LEN: usize = 512;
/// Bytes in a header of a dynamic or differencing disk.
pub const HEADER_LEN: usize = 1024;
/// The block size of every image made here, and the largest that is read.
pub const BLOCK_LEN: u32 = 2 << 20;
/// The smallest block size that is read.
///
/// The format allows any power of two; below one page a table for 2 TiB would take more than two gigabytes.
pub const BLOCK_LEN_MIN: u32 = 4096;
/// The most table entries that are read: 2 TiB in blocks of 128 KiB, a table of 64 MiB.
pub const BAT_ENTRIES_MAX: u32 = 16 << 20;
/// The most images in a chain.
pub const CHAIN_DEPTH_MAX: usize = 30;
/// The largest virtual size: as many blocks as a table may have. 32 TiB.
///
/// Of those, blocks find a place as long as 32-bit sector numbers reach it, 2 TiB of data; an SR makes no disk that
/// could come to that.
pub const VIRTUAL_LEN_MAX: u64 = BAT_ENTRIES_MAX as u64 * BLOCK_LEN as u64;

pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(word)
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(word)
}

pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}
