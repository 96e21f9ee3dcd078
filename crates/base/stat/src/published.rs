//! The published layout of a disk's counters, which other tools than ours read and write.
//!
//! Every field is little endian; a file is one page, of which the first 96 bytes are used.
//!
//! | offset | field | |
//! |---|---|---|
//! | 0 | `version` u32 | 1 in `vbd-*` files |
//! | 8 | `oo_reqs` | times there was no room for a request |
//! | 16, 24 | reads submitted, completed | |
//! | 32 | sectors read | 512 bytes each |
//! | 40 | read time | sum over requests, in microseconds |
//! | 48, 56, 64, 72 | the same four of writes | |
//! | 80 | `io_errors` | |
//! | 88 | `flags` | bit 0: low-memory mode |
//!
//! `vbd3-<domid>-<devid>/statistics` is an older form: seven numbers in a row.

use serde::Serialize;

/// Bytes of the counters in a `vdi-*`, `vbd-*` or `nbd-*` file.
pub const PUBLISHED_LEN: usize = 96;
/// Bytes of the counters in a `statistics` file.
pub const STATISTICS_LEN: usize = 56;
/// The disk answers from its reserve of memory.
pub const FLAG_LOW_MEMORY: u64 = 1;

pub(crate) const VERSION: u32 = 1;
/// Offsets of the counters, in units of eight bytes.
pub(crate) mod slot {
    pub const OO_REQS: usize = 1;
    pub const READ: usize = 2;
    pub const WRITE: usize = 6;
    pub const IO_ERRORS: usize = 10;
    pub const SUBMITTED: usize = 0;
    pub const COMPLETED: usize = 1;
    pub const SECTORS: usize = 2;
    pub const TICKS: usize = 3;
}

/// The counters of a published file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PublishedStats {
    /// Layout number; foreign `vdi-*` files leave it 0.
    pub version: u32,
    /// Times there was no room for a request.
    pub oo_reqs: u64,
    /// Reads taken from the guest.
    pub read_submitted: u64,
    /// Reads answered.
    pub read_completed: u64,
    /// Sectors of 512 bytes read.
    pub read_sectors: u64,
    /// Time of all reads, in microseconds.
    pub read_ticks_us: u64,
    /// Writes taken from the guest.
    pub write_submitted: u64,
    /// Writes answered.
    pub write_completed: u64,
    /// Sectors of 512 bytes written.
    pub write_sectors: u64,
    /// Time of all writes, in microseconds.
    pub write_ticks_us: u64,
    /// Requests answered with an error.
    pub io_errors: u64,
    /// See [`FLAG_LOW_MEMORY`].
    pub flags: u64,
}

/// The seven numbers of a `statistics` file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VbdStatistics {
    /// Discards.
    pub ds_req: u64,
    /// Flushes.
    pub f_req: u64,
    /// Times there was no room for a request.
    pub oo_req: u64,
    /// Reads.
    pub rd_req: u64,
    /// Sectors read.
    pub rd_sect: u64,
    /// Writes.
    pub wr_req: u64,
    /// Sectors written.
    pub wr_sect: u64,
}

/// Little-endian words of a file, as far as it goes.
fn word(bytes: &[u8], index: usize) -> Option<u64> {
    let at = index.checked_mul(8)?;
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// Reads the first [`PUBLISHED_LEN`] bytes of a file; `None` when there are fewer.
pub fn parse_published(bytes: &[u8]) -> Option<PublishedStats> {
    let four = |first: usize| -> Option<[u64; 4]> {
        Some([
            word(bytes, first + slot::SUBMITTED)?,
            word(bytes, first + slot::COMPLETED)?,
            word(bytes, first + slot::SECTORS)?,
            word(bytes, first + slot::TICKS)?,
        ])
    };
    let [read_submitted, read_completed, read_sectors, read_ticks_us] = four(slot::READ)?;
    let [write_submitted, write_completed, write_sectors, write_ticks_us] = four(slot::WRITE)?;
    Some(PublishedStats {
        version: (word(bytes, 0)? & 0xffff_ffff) as u32,
        oo_reqs: word(bytes, slot::OO_REQS)?,
        read_submitted,
        read_completed,
        read_sectors,
        read_ticks_us,
        write_submitted,
        write_completed,
        write_sectors,
        write_ticks_us,
        io_errors: word(bytes, slot::IO_ERRORS)?,
        flags: word(bytes, 11)?,
    })
}

/// Reads the first [`STATISTICS_LEN`] bytes of a `statistics` file; `None` when there are fewer.
pub fn parse_statistics(bytes: &[u8]) -> Option<VbdStatistics> {
    Some(VbdStatistics {
        ds_req: word(bytes, 0)?,
        f_req: word(bytes, 1)?,
        oo_req: word(bytes, 2)?,
        rd_req: word(bytes, 3)?,
        rd_sect: word(bytes, 4)?,
        wr_req: word(bytes, 5)?,
        wr_sect: word(bytes, 6)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_stand_where_the_layout_says() {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&1u32.to_le_bytes());
        bytes.extend_from_slice(&0u32.to_le_bytes());
        for value in 10u64..21 {
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        assert_eq!(bytes.len(), PUBLISHED_LEN);
        let stats = parse_published(&bytes).expect("96 bytes");
        let expected = PublishedStats {
            version: 1,
            oo_reqs: 10,
            read_submitted: 11,
            read_completed: 12,
            read_sectors: 13,
            read_ticks_us: 14,
            write_submitted: 15,
            write_completed: 16,
            write_sectors: 17,
            write_ticks_us: 18,
            io_errors: 19,
            flags: 20,
        };
        assert_eq!(stats, expected);
        assert_eq!(parse_published(&bytes[..PUBLISHED_LEN - 1]), None);
    }

    #[test]
    fn statistics_are_seven_numbers() {
        let bytes: Vec<u8> = (1u64..=7).flat_map(u64::to_le_bytes).collect();
        let stats = parse_statistics(&bytes).expect("56 bytes");
        assert_eq!((stats.ds_req, stats.oo_req, stats.wr_sect), (1, 3, 7));
        assert_eq!(parse_statistics(&bytes[..STATISTICS_LEN - 1]), None);
    }
}
