//! Counters and latency histograms of a disk in shared memory, and their reader.
//!
//! ```text
//!   data thread ──stores──▶ DiskStats ──▶ tapio/<name>            our page: counters, log2 histograms
//!                              │  └─────▶ td3-<pid>/vdi-<minor>   the published layout, 96 bytes
//!                              └────────▶ VbdPages ──▶ td3-<pid>/vbd-<domid>-<devid>, td3-<pid>/nbd-<minor>
//!                                                  └─▶ vbd3-<domid>-<devid>/{statistics,io_ring}
//!   xsiostat, tap-ctl, /metrics ──read──▶ the same files, with no question to the process
//! ```
//!
//! One thread writes: every counter is a plain relaxed load and store, so that counting a request costs a few
//! nanoseconds, takes no lock, allocates nothing and makes no system call. A reader may therefore see one counter
//! of a request before another. For rates and histograms that is harmless; what identifies the disk is written
//! before the magic number and the one string that may change later, the image, is guarded by a generation count.
//!
//! The files live below `/dev/shm`, or the directory that `TAPIO_SHM_DIR` names. The writer holds an
//! advisory lock on each of its files for life, so a page whose lock can be taken was left behind by a process that
//! died: the next one that starts removes it and what it names ([`clean_stale`]).
//!
//! [`trace`] follows single requests, for as long as a reader asks for that.
//! [`pool`] is what disks share: the pages that those of one storage repository may have in flight. [`share`] is how
//! those on one device share its throughput.
//!
//! This crate must never depend on the data path: it is linked into readers too.

mod histogram;
mod page;
pub mod pool;
mod published;
mod reader;
mod ring_text;
pub mod share;
mod shm;
mod stale;
pub mod trace;
mod vbd;
mod writer;

pub use histogram::{BUCKETS, Histogram, bucket_floor, bucket_of};
pub use page::{IMAGE_LEN_MAX, PAGE_LEN, PAGE_VERSION, ParsePageError, VBD_SLOTS, parse_page};
pub use published::{
    FLAG_LOW_MEMORY, PUBLISHED_LEN, PublishedStats, STATISTICS_LEN, VbdStatistics, parse_published,
    parse_statistics,
};
pub use reader::{DiskFile, ReadError, VbdDir, VbdFiles, disks, domid_max, vbds};
pub use ring_text::{RING_TEXT_LEN_MAX, parse_ring_text, ring_text};
pub use shm::{FileState, ShmRoot};
pub use stale::{Cleaned, clean_stale};
pub use vbd::{VbdId, VbdPages};
pub use writer::{DiskName, DiskStats, StatsView};

use serde::{Deserialize, Serialize};
use tapio_types::{IoLimits, RingState};

/// What a request does. The order is that of the arrays in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RequestKind {
    /// Data to the guest.
    Read,
    /// Data from the guest.
    Write,
    /// Everything acknowledged so far must be durable.
    Flush,
    /// The range is not needed any more.
    Discard,
    /// The range must read as zeroes.
    WriteZeroes,
}

/// Kinds of request.
pub const KINDS: usize = 5;
/// Kinds that have histograms: reads, writes and flushes.
pub const TIMED_KINDS: usize = 3;
/// Stages of a request, the total included.
pub const STAGES: usize = 5;

impl RequestKind {
    /// All of them, in the order of the page.
    pub const ALL: [Self; KINDS] = [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes];

    /// The field's name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write-zeroes",
        }
    }
}

/// Where a request can spend its time. The order is that of the arrays in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Taken from the guest, not yet started.
    Queued,
    /// In the image layer: lookup, allocation, metadata.
    Image,
    /// Between submission to the kernel and its completion.
    Kernel,
    /// From the last completion of the kernel to the answer in the guest's ring.
    Completing,
    /// The sum.
    Total,
}

impl Stage {
    /// All of them, in the order of the page.
    pub const ALL: [Self; STAGES] = [Self::Queued, Self::Image, Self::Kernel, Self::Completing, Self::Total];

    /// The field's name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Image => "image",
            Self::Kernel => "kernel",
            Self::Completing => "completing",
            Self::Total => "total",
        }
    }
}

/// How long one request stayed in each stage, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// See [`Stage::Queued`].
    pub queued_ns: u64,
    /// See [`Stage::Image`].
    pub image_ns: u64,
    /// See [`Stage::Kernel`].
    pub kernel_ns: u64,
    /// See [`Stage::Completing`].
    pub completing_ns: u64,
}

impl Stages {
    /// The sum, which stays at the largest number rather than wrapping.
    pub const fn total_ns(&self) -> u64 {
        self.queued_ns
            .saturating_add(self.image_ns)
            .saturating_add(self.kernel_ns)
            .saturating_add(self.completing_ns)
    }

    /// In the order of [`Stage::ALL`].
    pub const fn in_order(&self) -> [u64; STAGES] {
        [self.queued_ns, self.image_ns, self.kernel_ns, self.completing_ns, self.total_ns()]
    }
}

/// What happened to the requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindCounts {
    /// Taken from the guest.
    pub submitted: u64,
    /// Answered, well or badly.
    pub completed: u64,
    /// Answered with an error.
    pub errors: u64,
    /// Bytes of the answered requests.
    pub bytes: u64,
}

/// What waiting cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PollCounts {
    /// Time spent spinning, in nanoseconds.
    pub spin_ns: u64,
    /// Spins that found work.
    pub hits: u64,
    /// Spins that ended with nothing.
    pub misses: u64,
    /// Sleeps that ended.
    pub wakeups: u64,
    /// System calls that entered the kernel's ring.
    pub enters: u64,
    /// Times a request had to stay in the guest's ring for lack of room.
    pub out_of_requests: u64,
}

/// What waiting for limits and for pages came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelayCounts {
    /// Requests that had to wait for their turn.
    pub requests: u64,
    /// For how long, together, in nanoseconds.
    pub time_ns: u64,
    /// Requests that wait now, but for those that are still in the guest's ring.
    pub waiting: u64,
}

/// A ring, and what was in it over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingUse {
    /// Where it stands.
    #[serde(flatten)]
    pub state: RingState,
    /// Requests in it times nanoseconds, as often as the disk looked: its growth over time is the average use.
    pub request_ns: u64,
}

/// All a page says at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Process that writes the page.
    pub pid: u32,
    /// Minor number of the disk in that process.
    pub minor: u32,
    /// When the disk was made, in nanoseconds since 1970.
    pub created_unix_ns: u64,
    /// The leaf, as `type:/path`; empty while nothing is open.
    pub image: String,
    /// Domain and device numbers under which the disk is published.
    pub vbds: Vec<VbdId>,
    /// Where the ring behind each of `vbds` stands now; one without a guest's ring has the disk's queue.
    #[serde(default)]
    pub rings: Vec<RingUse>,
    /// Most requests the disk holds at one time.
    pub queue_depth: u64,
    /// Per kind, in the order of [`RequestKind::ALL`].
    pub kinds: [KindCounts; KINDS],
    /// Polling, sleeping and system calls.
    pub poll: PollCounts,
    /// Histograms of reads, writes and flushes by stage, in the orders of [`RequestKind::ALL`] and [`Stage::ALL`].
    pub latency: [[Histogram; STAGES]; TIMED_KINDS],
    /// Limits in force.
    pub limits: IoLimits,
    /// What waiting for limits and for pages came to.
    pub delays: DelayCounts,
    /// Whether the disk answers from its reserve of memory.
    #[serde(default)]
    pub low_memory: bool,
    /// Whether the second side of its mirror was lost, and the mirror is there still.
    #[serde(default)]
    pub mirror_lost: bool,
}

impl Snapshot {
    /// Where the ring behind these numbers stands; `None` if the disk is not published under them.
    pub fn ring(&self, vbd: VbdId) -> Option<RingState> {
        self.ring_use(vbd).map(|ring| ring.state)
    }

    /// The same, with what was in it over time.
    pub fn ring_use(&self, vbd: VbdId) -> Option<RingUse> {
        self.rings.get(self.vbds.iter().position(|id| *id == vbd)?).copied()
    }

    /// Counts of one kind.
    pub fn kind(&self, kind: RequestKind) -> &KindCounts {
        &self.kinds[kind as usize]
    }

    /// The histogram of one stage; `None` for kinds that have none.
    pub fn histogram(&self, kind: RequestKind, stage: Stage) -> Option<&Histogram> {
        self.latency.get(kind as usize).map(|stages| &stages[stage as usize])
    }

    /// Requests taken and not yet answered.
    pub fn in_flight(&self) -> u64 {
        let waiting = |counts: &KindCounts| counts.submitted.saturating_sub(counts.completed);
        self.kinds.iter().fold(0, |sum: u64, counts| sum.saturating_add(waiting(counts)))
    }

    /// Errors of all kinds.
    pub fn errors(&self) -> u64 {
        self.kinds.iter().fold(0, |sum: u64, counts| sum.saturating_add(counts.errors))
    }
}
