//! Commands that change the chain of a disk that goes on being used, and those about the jobs that do so.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tapio_types::LayerSpec;

use super::DiskCommand;
use crate::image_source::ImageSource;
use crate::images::{JobReport, SnapshotReport};
use crate::plain_path::plain_path;
use crate::{Errno, Result};

/// A new image becomes the leaf, and the present one its parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// Minor number.
    pub minor: u16,
    /// Where the new image is made.
    pub leaf: PathBuf,
    /// How long requests may be held back, in milliseconds.
    #[serde(default = "stall_ms")]
    pub stall_ms: u32,
}

/// How long a snapshot may hold requests back when nothing is said, in milliseconds.
const fn stall_ms() -> u32 {
    5_000
}

impl DiskCommand for Snapshot {
    type Reply = SnapshotReport;

    fn check(&self, _fds: usize) -> Result<()> {
        plain_path(&self.leaf, "image", usize::MAX)
    }
}

/// An image that has taken over the name of the leaf becomes the leaf: the caller made it as an empty child of the
/// present leaf and renamed both. `EINVAL` where the images are not so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapLeaf {
    /// Minor number.
    pub minor: u16,
    /// The new leaf, the leaf of before under its new name, and the images below it.
    pub images: Vec<LayerSpec>,
    /// The log of changed blocks that the disk goes on with, if it is another than before. The one of before is closed
    /// when the reply comes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
    /// How long requests may be held back, in milliseconds.
    #[serde(default = "stall_ms")]
    pub stall_ms: u32,
}

impl SwapLeaf {
    /// The error where the disk may have the new leaf, or get it later. After every other one it goes on as before.
    pub const UNKNOWN: Errno = Errno::EINPROGRESS;

    /// With the usual limits.
    pub fn of(minor: u16, images: Vec<LayerSpec>) -> Self {
        Self { minor, images, log: None, stall_ms: stall_ms() }
    }
}

impl DiskCommand for SwapLeaf {
    type Reply = SnapshotReport;

    fn check(&self, _fds: usize) -> Result<()> {
        ImageSource::Chain(self.images.clone()).check()?;
        self.log.as_deref().map_or(Ok(()), |log| plain_path(log, "log of changed blocks", usize::MAX))
    }
}

/// Merges an image into its parent: `ENOENT` without such an image, `EBUSY` while another change is at work, `ENOSPC`
/// where the space would not suffice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Commit {
    /// Minor number.
    pub minor: u16,
    /// Which image.
    pub image: PathBuf,
    /// Bytes a second that the copy may move; 0 is no limit.
    #[serde(default)]
    pub rate: u64,
    /// Begin also where the space may not suffice.
    #[serde(default)]
    pub force: bool,
}

impl DiskCommand for Commit {
    type Reply = JobReport;

    fn check(&self, _fds: usize) -> Result<()> {
        plain_path(&self.image, "image", usize::MAX)
    }
}

/// Long work on a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobList {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for JobList {
    type Reply = Vec<JobReport>;
    const IS_CONCURRENT: bool = true;
}

/// Stops a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobCancel {
    /// Minor number.
    pub minor: u16,
    /// The job.
    pub job: u32,
}

impl DiskCommand for JobCancel {
    type Reply = JobReport;
}

/// Sets the speed of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobRate {
    /// Minor number.
    pub minor: u16,
    /// The job.
    pub job: u32,
    /// Bytes a second; 0 is no limit.
    pub rate: u64,
}

impl DiskCommand for JobRate {
    type Reply = JobReport;
}
