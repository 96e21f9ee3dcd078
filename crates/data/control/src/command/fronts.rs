//! Commands about the ways to reach a disk.

use std::fmt;

use serde::{Deserialize, Serialize};
use tapio_stat::VbdId;

use super::{DiskCommand, Done};
use crate::disk_report::FrontEntry;
use crate::front::{Front, check_export};
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

/// Names of a guarded export that clients may use at a time, and names whose clients one command cuts off.
pub const EXPORT_NAMES_MAX: usize = 256;

/// A name by which a client may use a guarded export: a client that has it can read the disk.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretName(pub String);

impl fmt::Debug for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretName")
    }
}

/// Says by which names clients may connect to a guarded export from now on, in the place of those before. Clients that
/// are connected stay, but those by a name of `cut`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontAdmit {
    /// Minor number.
    pub minor: u16,
    /// Its id.
    pub front: u32,
    /// All names that are valid from now on.
    pub names: Vec<SecretName>,
    /// Names whose clients are disconnected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cut: Vec<SecretName>,
}

impl DiskCommand for FrontAdmit {
    type Reply = Done;

    fn check(&self, _fds: usize) -> Result<()> {
        for names in [&self.names, &self.cut] {
            if names.len() > EXPORT_NAMES_MAX {
                let why = format!("{} names of an export: at most {EXPORT_NAMES_MAX}", names.len());
                return Err(ControlError::new(Errno::E2BIG, why));
            }
            names.iter().try_for_each(|name| check_export(&name.0))?;
        }
        Ok(())
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
