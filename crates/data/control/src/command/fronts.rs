//! Commands about the ways to reach a disk.

use serde::{Deserialize, Serialize};
use tapio_stat::VbdId;

use super::{DiskCommand, Done};
use crate::disk_report::FrontEntry;
use crate::front::Front;
use crate::{ControlError, Errno, Result};

/// Adds a way to reach the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontAdd {
    /// Minor number.
    pub minor: u16,
    /// How; it names descriptors that came along by index.
    pub front: Front,
    /// Numbers to publish it under; domain 0 and the minor number without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vbd: Option<VbdId>,
}

impl DiskCommand for FrontAdd {
    type Reply = FrontEntry;

    fn check(&self, fds: usize) -> Result<()> {
        self.front.check(fds)
    }
}

/// Removes a front end: `ENOENT` without such a front end, `EBUSY` for a device in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontRemove {
    /// Minor number.
    pub minor: u16,
    /// Its id.
    pub front: u32,
    /// Also a device of this host that is in use.
    #[serde(default)]
    pub force: bool,
}

impl DiskCommand for FrontRemove {
    type Reply = Done;
}

/// Notifies the server of a front end when the disk may have another size, by a byte on the socket that comes along, as
/// long as there is the front end or until another socket comes. Answers size and kind of the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontFollow {
    /// Minor number.
    pub minor: u16,
    /// Its id.
    pub front: u32,
}

impl DiskCommand for FrontFollow {
    type Reply = crate::DiskInfo;

    fn check(&self, fds: usize) -> Result<()> {
        if fds == 1 {
            return Ok(());
        }
        Err(ControlError::new(
            Errno::EINVAL,
            format!(
                "a front end that follows a disk needs one socket, but {fds} descriptors came with the request"
            ),
        ))
    }
}

/// How the disk is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontList {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for FrontList {
    type Reply = Vec<FrontEntry>;
    const IS_CONCURRENT: bool = true;
}
