//! What a mirror copies, and what it says of itself.

use serde::{Deserialize, Serialize};

/// What the second side lacks at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MirrorCopy {
    /// What the disk keeps data for; the second side must be empty.
    #[default]
    Allocated,
    /// What the leaf itself keeps; the second side has the rest.
    Leaf,
    /// Everything; the second side may hold anything.
    Everything,
    /// Nothing: only what guests write from now on.
    Nothing,
}

/// Where a mirror stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MirrorState {
    /// The second side lacks something; guests' writes go to both.
    Copying,
    /// Both sides are the same.
    InSync,
    /// The second side was lost; the disk goes on without it.
    Degraded,
}

/// What a mirror says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorReport {
    /// The number of its job.
    pub job: u32,
    /// The second side.
    pub target: String,
    /// Where it stands.
    pub state: MirrorState,
    /// Why the second side was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Bytes that the second side lacks.
    pub dirty_bytes: u64,
    /// Bytes copied so far.
    pub copied_bytes: u64,
    /// Whether all that has to be copied is known.
    pub listed: bool,
    /// Bytes a second that the copy may move; 0 is no limit.
    pub rate: u64,
    /// Requests that the second side has not answered.
    pub unanswered: u64,
}

/// What a switch-over has done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorPivoted {
    /// The image that the disk is on now.
    pub image: String,
    /// Microseconds in which no request was taken.
    pub stalled_us: u64,
}
