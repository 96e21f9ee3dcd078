//! What a ring reports to administrators: counters, requests in flight, why it stands still.

use tapio_types::RingState;
use tapio_xen::blkif::RingError;

use super::mover::MoveCounts;
use super::persistent::PersistentCounts;

/// Why nothing more is taken from a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The guest broke its rules.
    Ring(RingError),
    /// The event channel failed, with this errno.
    Channel(i32),
    /// The hypervisor refused a whole call, with this errno: the domain is gone.
    Domain(i32),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let os = |errno: &i32| std::io::Error::from_raw_os_error(*errno);
        match self {
            Self::Ring(error) => error.fmt(f),
            Self::Channel(errno) => write!(f, "the event channel failed: {}", os(errno)),
            Self::Domain(errno) => write!(f, "the guest's memory cannot be reached any more: {}", os(errno)),
        }
    }
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounts {
    /// Requests taken.
    pub requests: u64,
    /// Requests answered.
    pub responses: u64,
    /// Requests of a former process that were repeated.
    pub repeated: u64,
    /// Notifications taken.
    pub kicks_in: u64,
    /// Notifications sent.
    pub kicks_out: u64,
    /// Requests that failed: senseless, without memory, at the disk.
    pub errors: [u64; 3],
    /// What moving cost.
    pub moves: MoveCounts,
    /// Of pages that stay mapped.
    pub persistent: PersistentCounts,
}

/// A request without an answer, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnderWay {
    /// What the guest calls it.
    pub id: u64,
    /// `BLKIF_OP_*`.
    pub op: u8,
    /// First sector of 512 bytes.
    pub sector: u64,
    /// Sectors of 512 bytes.
    pub sectors: u64,
    /// Nanoseconds since it was taken.
    pub age_ns: u64,
}

/// A ring at one moment.
#[derive(Clone, Debug)]
pub struct QueueReport {
    /// Where it stands.
    pub counters: RingState,
    /// Requests without an answer.
    pub in_flight: usize,
    /// The oldest of them.
    pub oldest: Vec<UnderWay>,
    /// What was counted.
    pub counts: QueueCounts,
    /// Why nothing is taken any more.
    pub broken: Option<Broken>,
}
