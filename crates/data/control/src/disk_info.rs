//! What a front end tells its guest of a disk.

use serde::{Deserialize, Serialize};

/// What a disk looks like to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskInfo {
    /// Length in units of 512 bytes, whatever the sectors are, as tapdisk has it.
    pub sectors: u64,
    /// Bytes of a sector as guests are told.
    pub sector_size: u32,
    /// Bit 0 CD-ROM, 1 removable, 2 read only.
    pub info: u32,
}

impl DiskInfo {
    /// Bit of a disk that refuses writes.
    pub const READ_ONLY: u32 = 4;

    /// Bytes.
    pub const fn len(&self) -> u64 {
        self.sectors.saturating_mul(512)
    }

    /// Whether it has none.
    pub const fn is_empty(&self) -> bool {
        self.sectors == 0
    }
}
