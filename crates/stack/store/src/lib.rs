//! Where the toolstack keeps its objects.
//!
//! Rows of text under keys as `/vdi/UUID`. Every change is compare-and-set and atomic over the rows it names; what
//! was answered with success survives a power cut.

mod etcd;
mod memory;
mod sqlite;

use std::fmt;
use std::time::Duration;

#[doc(hidden)]
pub use etcd::wire as etcd_wire;
pub use etcd::{Etcd, EtcdOptions, Lease, Taken};
pub use memory::Memory;
pub use sqlite::{DeferringStore, Sqlite};

/// Number of a change; grows by at least one with every commit.
pub type Revision = u64;

/// One row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// As `/vdi/2c7f...`.
    pub key: String,
    /// What is kept there; none where a change says that it was deleted.
    pub value: Option<String>,
    /// The commit that last changed it.
    pub revision: Revision,
}

/// What must hold for a row when a transaction is applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    /// There is no such row.
    Absent,
    /// Its last change is this one.
    At(Revision),
}

/// A set of changes that happen together or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Txn {
    /// Checked first; a key without an expectation is written blindly.
    pub expect: Vec<(String, Expect)>,
    /// New values.
    pub puts: Vec<(String, String)>,
    /// Rows that go.
    pub deletes: Vec<String>,
}

/// Why the store did not do it.
#[derive(Clone, Debug)]
pub enum StoreError {
    /// An expectation did not hold: the key, and what its revision is (none: it is not there).
    Conflict(String, Option<Revision>),
    /// `changes` was asked about a time that the log no longer holds; the oldest it can start from.
    Forgotten(Revision),
    /// This process may not write any more: another has, or may have, what it held under this key.
    Fenced(String),
    /// The disk below, a full one for example: what was done, on which file, the cause.
    Failed(String),
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conflict(key, Some(at)) => write!(f, "{key} was changed by commit {at} meanwhile"),
            Self::Conflict(key, None) => write!(f, "{key} is not there any more"),
            Self::Forgotten(oldest) => write!(f, "changes before commit {oldest} are not kept"),
            Self::Fenced(key) => write!(f, "this host does not hold {key} any more"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for StoreError {}

/// A place for rows. One conformance suite runs against all of them.
pub trait Store: Send + Sync {
    /// One row.
    ///
    /// # Errors
    /// The disk below.
    fn get(&self, key: &str) -> Result<Option<Row>, StoreError>;

    /// The rows whose key starts with `prefix`, by key.
    ///
    /// # Errors
    /// The disk below.
    fn list(&self, prefix: &str) -> Result<Vec<Row>, StoreError>;

    /// Checks and applies; when it answers, the change is on disk.
    ///
    /// # Errors
    /// [`StoreError::Conflict`], or the disk below; then nothing is changed.
    fn commit(&self, txn: Txn) -> Result<Revision, StoreError>;

    /// The last change of every row that was changed or deleted after `after`, in order; waits for one as long as
    /// `wait` where there is none.
    ///
    /// # Errors
    /// [`StoreError::Forgotten`], or the disk below.
    fn changes(&self, after: Revision, wait: Duration) -> Result<Vec<Row>, StoreError>;

    /// Whether commits that were answered survive the end of the process.
    fn is_durable(&self) -> bool {
        true
    }

    /// The owner has started: from now on a commit that cannot be made durable is refused.
    fn started(&self) {}
}
