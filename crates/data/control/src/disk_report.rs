//! What a disk process says of its disks.

use serde::{Deserialize, Serialize};
use tapio_stat::{Snapshot, VbdId};

use crate::blkif::BlkifReport;
use crate::front::Front;
use crate::room::RoomReport;

/// Life of a disk as the tapdisk protocol shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VbdState {
    /// Attached, or open and serving.
    Running,
    /// A pause waits for the requests in flight.
    Pausing,
    /// Paused; the images are closed.
    Paused,
    /// A resume failed: the images are closed and may be resumed again.
    ResumeFailed,
    /// Being closed.
    Closing,
    /// Attached, and its image was closed.
    Closed,
}

impl VbdState {
    /// The bits of the tapdisk protocol.
    pub const fn bits(self) -> i32 {
        match self {
            Self::Running => 0,
            // PAUSE_REQUESTED
            Self::Pausing => 0x10,
            // PAUSED, QUIESCED and CLOSED
            Self::Paused => 0x2a,
            // the same and RESUME_FAILED
            Self::ResumeFailed => 0x22a,
            // SHUTDOWN_REQUESTED
            Self::Closing => 0x40,
            // CLOSED
            Self::Closed => 0x2,
        }
    }
}

/// One disk in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskEntry {
    /// Minor number.
    pub minor: u16,
    /// Where it stands.
    pub state: VbdState,
    /// `type:/path` as it was opened; `None` when nothing is open.
    pub image: Option<String>,
    /// Writes are refused.
    pub read_only: bool,
    /// How it is reached.
    pub fronts: Vec<FrontEntry>,
}

/// The full statistics that were asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DiskReports {
    /// Of one disk.
    One(Box<DiskReport>),
    /// Of all disks.
    All(Vec<DiskReport>),
}

/// The full statistics of a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskReport {
    /// Minor number.
    pub minor: u16,
    /// Where it stands.
    pub state: VbdState,
    /// Counters and histograms; `None` when nothing is open.
    pub counters: Option<Snapshot>,
    /// Requests taken and not yet answered.
    pub in_flight: u64,
    /// Of these, requests that have taken longer than they may and that the storage does not give back.
    pub stuck: u64,
    /// Operations, requests and their memory that the process has dropped before their end, over all of its disks: a
    /// fault of the program.
    #[serde(default)]
    pub dropped: u64,
    /// Of these, requests that are in the storage, those that began first: 64 at most, and none if requests have no
    /// time limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestReport>,
    /// Images, leaf first, with the sectors each served.
    pub images: Vec<ImageReport>,
    /// The taps of the disk: a second image, a log of changed blocks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<String>,
    /// Xen guests' devices: rings, requests in flight, what moving data costs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blkif: Vec<BlkifReport>,
    /// The room of a disk on a device that becomes longer when it asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<RoomReport>,
}

/// A request in flight in a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RequestReport {
    /// What it does: `read`, `write`, `flush`, `discard`, `write-zeroes`.
    pub op: String,
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// How long it has been in the storage, in microseconds.
    pub age_us: u64,
}

/// One image of a chain in a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageReport {
    /// `type:/path`.
    pub image: String,
    /// Sectors read here.
    pub sectors_read: u64,
    /// Sectors written here.
    pub sectors_written: u64,
}

/// A way to reach a disk, as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontEntry {
    /// Name by which it is removed.
    pub id: u32,
    /// How.
    pub front: Front,
    /// Numbers under which it is published for xsiostat.
    pub vbd: VbdId,
    /// Clients at this moment.
    pub connections: u32,
}
