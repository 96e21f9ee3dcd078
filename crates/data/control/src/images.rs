//! What changes of an open chain of images, and the jobs that do them, answer.

use serde::{Deserialize, Serialize};

/// A snapshot that was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// The new leaf, as `type:/path`.
    pub leaf: String,
    /// The image that became its parent, as `type:/path`.
    pub parent: String,
    /// Microseconds for which requests were held back.
    pub stalled_us: u64,
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobStatus {
    /// At work.
    Running,
    /// Its copy is complete and stays so.
    Ready,
    /// It did what it was to do.
    Done,
    /// It was told to stop.
    Cancelled,
    /// It could not go on.
    Failed,
}

/// Long work on a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobReport {
    /// Its number.
    pub id: u32,
    /// `commit` or `mirror`.
    pub kind: String,
    /// The image it is about.
    pub subject: String,
    /// Where it stands.
    pub status: JobStatus,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes to do in all, as far as is known.
    pub total_bytes: u64,
    /// Bytes a second that it may move; 0 is no limit.
    pub rate: u64,
}
