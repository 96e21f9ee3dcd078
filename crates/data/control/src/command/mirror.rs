//! Commands about a mirror: a second storage to which every change goes too.

use serde::{Deserialize, Serialize};

use super::{DiskCommand, Done};
use crate::image_source::ImageSource;
use crate::mirror::{MirrorCopy, MirrorPivoted, MirrorReport};
use crate::{ControlError, Errno, Result};

/// Longest timeout of the second storage.
const TIMEOUT_MS_MAX: u32 = 3_600_000;

/// Begins a mirror: every change goes to a second storage too, and what is there already is copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorStart {
    /// Minor number.
    pub minor: u16,
    /// The second storage.
    pub target: ImageSource,
    /// What is copied.
    #[serde(default)]
    pub copy: MirrorCopy,
    /// Bytes a second that the copy may move; 0 is no limit.
    #[serde(default)]
    pub rate: u64,
    /// Milliseconds that the second storage may take for an answer before it is lost.
    #[serde(default = "timeout_ms", alias = "patience_ms")]
    pub timeout_ms: u32,
}

const fn timeout_ms() -> u32 {
    MirrorStart::TIMEOUT_MS
}

impl MirrorStart {
    /// The timeout if none is given.
    pub const TIMEOUT_MS: u32 = 5_000;
}

impl DiskCommand for MirrorStart {
    type Reply = MirrorReport;

    fn check(&self, _fds: usize) -> Result<()> {
        if !(1..=TIMEOUT_MS_MAX).contains(&self.timeout_ms) {
            return Err(ControlError::new(
                Errno::EINVAL,
                format!("a timeout of {} ms is not from 1 to {TIMEOUT_MS_MAX}", self.timeout_ms),
            ));
        }
        self.target.check()
    }
}

/// Where the mirror stands; null without one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorStatus {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for MirrorStatus {
    type Reply = Option<MirrorReport>;
    const IS_CONCURRENT: bool = true;
}

/// Goes on with a mirror whose second storage was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorResume {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for MirrorResume {
    type Reply = Done;
}

/// Lets the copy move so many bytes a second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorRate {
    /// Minor number.
    pub minor: u16,
    /// Bytes a second; 0 is no limit.
    pub rate: u64,
}

impl DiskCommand for MirrorRate {
    type Reply = Done;
}

/// Switches over to the second storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorPivot {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for MirrorPivot {
    type Reply = MirrorPivoted;
}

/// Ends the mirror and keeps the first storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorCancel {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for MirrorCancel {
    type Reply = Done;
}
