//! Changes of an open chain of images, and the jobs that do them: what can be asked, and what it answers.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How long a snapshot may hold requests back when nothing is said, in milliseconds.
pub(crate) const fn stall_ms() -> u32 {
    5_000
}

/// What is to be done with the images of an open disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageWork {
    /// A new image becomes the leaf, and the present one its parent.
    Snapshot {
        /// Where the new image is made.
        leaf: PathBuf,
        /// How long requests may be held back, in milliseconds.
        stall_ms: u32,
    },
    /// An image is merged into its parent and leaves the chain.
    Commit {
        /// Which one, by its path.
        image: PathBuf,
        /// Bytes a second that the copy may move; 0 is no limit.
        rate: u64,
        /// Begin also where the space may not suffice.
        force: bool,
    },
    /// What long work there is.
    Jobs,
    /// A job shall stop.
    JobCancel {
        /// Its number.
        job: u32,
    },
    /// A job may move this many bytes a second.
    JobRate {
        /// Its number.
        job: u32,
        /// Bytes a second; 0 is no limit.
        rate: u64,
    },
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ImageAnswer {
    /// The snapshot is taken.
    Snapshot(SnapshotReport),
    /// The job that does it.
    Job(JobReport),
    /// All jobs.
    Jobs(Vec<JobReport>),
}

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
