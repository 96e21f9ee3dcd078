//! The seeded simulator: a host with disks that tear, reorder, fail, fill up, stall and lose power; and its clock.
//!
//! The tasks of a data thread run on it unchanged. Everything that happens is drawn from one seed, so that a failure
//! is replayed by
//! its number. What a storage may do here, and why it is fair:
//!
//! | event | what may happen | because |
//! |---|---|---|
//! | write in flight or done, not flushed, power cut | each sector on its own: old or new | volatile caches, torn transfers |
//! | length, zeroing and space, not flushed, power cut | a prefix of them survives, in order | file systems journal metadata in order |
//! | flush done | everything done before it began survives | that is what it guarantees |
//! | process killed | what is done stays, what is in flight happens or not | the kernel goes on |
//! | operations in flight | end in any order, some very late | queues, retries |
//! | a file breaks | every operation on it fails, or is stuck | storage that dies |
//! | connection to a remote file lost | what was in flight is done again later, or fails; the server may have been restarted, which is a power cut for that file, and then the next flush fails | see `tapio_nbd::NbdStore` |
//! | EIO, ENOSPC | by plan, also in the middle of a write | media, quotas |
//!
//! A sector (512 bytes, or what [`SimHost::set_sector_len`] says) is never torn: that is what disks guarantee and what
//! VHD relies on.

mod file;
mod host;
#[cfg(test)]
mod long_sectors;
mod random;

pub use file::{Durable, SimFile};
pub use host::{Broken, Faults, Latency, Sim, SimHost, SimShare, SimStore};
pub use random::Random;
