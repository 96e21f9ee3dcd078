//! Commands about the room of a disk on a device that becomes longer.

use serde::{Deserialize, Serialize};

use super::DiskCommand;
use crate::room::RoomReport;

/// Looks whether the device of the leaf has become longer, and says how its room stands; none where the disk does not
/// ask for room, because it has none that could become more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LookForRoom {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for LookForRoom {
    type Reply = Option<RoomReport>;
    // It waits for one read of a device, and a pause waits for requests that wait for what this finds.
    const IS_CONCURRENT: bool = true;
}
