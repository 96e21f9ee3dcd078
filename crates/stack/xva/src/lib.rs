//! XVA archives: a VM with its disks as one stream, as XenServer, XCP-ng and Xen Orchestra write and read it.
//!
//! ```text
//!   gzip or zstd or nothing
//!     tar, members without owner and time
//!       ova.xml                    records of the VM, its VBDs, VDIs, VIFs ...: `document`
//!       Ref:3/00000000             the first MiB of a disk
//!       Ref:3/00000000.xxhash      its XXH64; SHA-1 in `.checksum` of older writers
//!       Ref:3/00000007             zeros between two members are left out
//!       Ref:3/00000007.xxhash
//!       two blocks of zeros
//! ```
//!
//! The first and the last piece of a disk are always there. A piece of no bytes is a sign of life of a slow writer: its
//! number counts, the place on the disk does not move. So where a piece lies follows from the pieces before it
//! ([`Places`]), never from its number alone.
//!
//! Archives come from clients. Names of members are compared and never used as paths; every length is bounded before
//! memory is taken for it, also behind a decompressor. Decompressors themselves run in a process of their own
//! ([`decode`], [`Decoded`]).

mod compress;
mod decoded;
mod digest;
mod document;
mod error;
mod places;
mod reader;
mod tar;
mod value;
mod writer;

pub use compress::{Compression, Compressor, Decompressor, head};
pub use decoded::{Decoded, decode};
pub use document::{Document, Entry, Version};
pub use error::XvaError;
pub use places::Places;
pub use reader::{Chunk, Reader};
pub use tar::{Member, Members, end as end_members, put as put_member};
pub use writer::Writer;

/// Bytes of a piece of a disk, but the last.
pub const CHUNK_LEN: usize = 1 << 20;

/// Bytes of the longest piece that is read.
pub const CHUNK_LEN_MAX: usize = 4 << 20;

/// Bytes of the longest `ova.xml` that is read. That of a VM with a hundred snapshots has about four million.
pub const DOCUMENT_LEN_MAX: usize = 8 << 20;

/// Name of the first member.
pub const DOCUMENT: &str = "ova.xml";

/// The version of the archive that is written, and the only one that is read: sums of each piece behind it.
pub const EXPORT_VERSION: i64 = 2;
