//! Commands about the room of a disk on a device that becomes longer.

use serde::{Deserialize, Serialize};

use super::DiskCommand;
use crate::Errno;
use crate::room::RoomReport;

/// Looks whether the device of the leaf has become longer, and says how its room stands; none where the disk does not
/// ask for room, because it has none that could become more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LookForRoom {
    /// Minor number.
    pub minor: u16,
}

/// Ends the leaf at the byte `to` of its device, which the disk knows to have `from` bytes. When that is answered, the
/// owner of the device may cut off what is behind: the disk uses nothing of it, and the footer is at `to` alone. Guests
/// notice nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shorten {
    /// Minor number.
    pub minor: u16,
    /// Bytes of the device as the disk knows it.
    pub from: u64,
    /// Bytes of it that the disk is to need, a multiple of 4096.
    pub to: u64,
}

impl Shorten {
    /// The errors after which nothing has changed: there is a block behind that end, or another change is at work.
    pub const REFUSED: [Errno; 2] = [Errno::EINVAL, Errno::EBUSY];
}

impl DiskCommand for Shorten {
    type Reply = ();
}

impl DiskCommand for LookForRoom {
    type Reply = Option<RoomReport>;
    // It waits for one read of a device, and a pause waits for requests that wait for what this finds.
    const IS_CONCURRENT: bool = true;
}
