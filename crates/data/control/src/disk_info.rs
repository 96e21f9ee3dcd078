//! What a front end tells its guest of a disk.

use serde::{Deserialize, Serialize};

/// What a disk looks like to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskInfo {
    /// Length in sectors.
    pub sectors: u64,
    /// Bytes of a sector.
    pub sector_size: u32,
    /// Bit 0 CD-ROM, 1 removable, 2 read only.
    pub info: u32,
}

impl DiskInfo {
    /// Bit of a disk that refuses writes.
    pub const READ_ONLY: u32 = 4;
}
