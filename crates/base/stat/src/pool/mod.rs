//! Page pools: what the disks of one storage repository may have in flight together, and each disk's part of it.
//!
//! A pool is a small file in shared memory, `tapio-pool/NAME`. A disk takes pages of 4 KiB for the data of a request
//! before the request goes on, and gives them back when it is answered, so that all the disks of an SR together never
//! have more data in flight than the pool has pages, and a greedy disk leaves the others theirs. `ledger` says how
//! pages are shared, `layout` where the words are, `segment` which process makes and removes the file.
//!
//! A disk that waits for pages sleeps in its ring: a disk that gives pages back writes a byte into its bell, a FIFO
//! `tapio-pool/.NAME.SLOT`.

mod info;
pub(crate) mod layout;
mod ledger;
mod member;
pub(crate) mod owner;
mod segment;

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

pub use info::{PoolDisk, PoolInfo, parse_pool, pools};
pub use layout::{PAGES_MAX, SEGMENT_LEN, SLOTS as POOL_DISKS_MAX};
pub use ledger::{GRACE_NS, STARVED_NS};
pub use member::{PoolMember, PoolSeat, join};
pub use segment::clean_pools;

/// Pages of a pool if no number is configured: 64 requests of 11 pages, as XenServer had per SR.
pub const PAGES_DEFAULT: u32 = 704;
/// Bytes of a page.
pub const POOL_PAGE_LEN: u64 = 4096;
/// Longest name.
const NAME_LEN_MAX: usize = 64;

/// The name of a pool: the UUID of an SR, or any other word of letters, digits, `-`, `.` and `_`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolName(String);

impl PoolName {
    /// The word.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PoolName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        if name.is_empty() || name.len() > NAME_LEN_MAX || name.starts_with('.') || !name.bytes().all(plain) {
            return Err(format!(
                "'{}' cannot name a pool: use the UUID of the SR, or up to {NAME_LEN_MAX} letters, digits, '-', '.', \
                 '_'",
                name.escape_default()
            ));
        }
        Ok(Self(name.to_owned()))
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
