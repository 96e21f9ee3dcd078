//! Commands that set how a disk runs: polling, limits, transfers, traces.

use serde::{Deserialize, Serialize};
use tapio_stat::trace::EVENTS_DEFAULT;
use tapio_types::{IoLimits, TransferSizes};

use super::{DiskCommand, Done};
use crate::limits::{LimitsReport, check_limits};
use crate::polling::Polling;
use crate::share::ShareSpec;
use crate::trace::{TraceReport, check_events};
use crate::{ControlError, Errno, Result};

/// Adaptive polling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetPolling {
    /// Minor number.
    pub minor: u16,
    /// Longest spin in microseconds; 0 is off.
    pub max_us: u32,
    /// Spin only while this percentage of the host is idle.
    pub idle_percent: u8,
}

impl SetPolling {
    /// For a disk.
    pub const fn of(minor: u16, polling: Polling) -> Self {
        Self { minor, max_us: polling.max_us, idle_percent: polling.idle_percent }
    }

    /// What is set.
    pub const fn polling(&self) -> Polling {
        Polling { max_us: self.max_us, idle_percent: self.idle_percent }
    }
}

impl DiskCommand for SetPolling {
    type Reply = Done;

    fn check(&self, _fds: usize) -> Result<()> {
        self.polling().check()
    }
}

/// What the disk may do, from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetLimits {
    /// Minor number.
    pub minor: u16,
    /// All limits; those left out are none.
    pub limits: IoLimits,
}

impl DiskCommand for SetLimits {
    type Reply = Done;

    fn check(&self, _fds: usize) -> Result<()> {
        check_limits(&self.limits)
    }
}

/// How the disk shares its device, from now on. One that shares none keeps it for nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetShare {
    /// Minor number.
    pub minor: u16,
    /// What it counts beside others, 1 to 1000.
    pub weight: u32,
    /// Its latency target in microseconds; 0: none.
    pub latency_us: u64,
}

impl SetShare {
    /// For a disk.
    pub const fn of(minor: u16, spec: ShareSpec) -> Self {
        Self { minor, weight: spec.weight, latency_us: spec.latency_us }
    }
}

impl DiskCommand for SetShare {
    type Reply = Done;

    fn check(&self, _fds: usize) -> Result<()> {
        ShareSpec { off: false, weight: self.weight, latency_us: self.latency_us }.check()
    }
}

/// How the disk's requests go to its storage, from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetTransfers {
    /// Minor number.
    pub minor: u16,
    /// All sizes; those left out are off.
    pub sizes: TransferSizes,
}

impl DiskCommand for SetTransfers {
    type Reply = Done;

    fn check(&self, _fds: usize) -> Result<()> {
        self.sizes.check().map_err(|why| ControlError::new(Errno::EINVAL, why))
    }
}

/// What the disk may do, and what that has cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for Limits {
    type Reply = LimitsReport;
    const IS_CONCURRENT: bool = true;
}

/// Notes when requests pass where, from now on, in a ring in shared memory: `ENOMEM` where that has no room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceStart {
    /// Minor number.
    pub minor: u16,
    /// How many events are kept, a power of two.
    #[serde(default = "events")]
    pub events: u32,
}

const fn events() -> u32 {
    EVENTS_DEFAULT
}

impl DiskCommand for TraceStart {
    type Reply = TraceReport;

    fn check(&self, _fds: usize) -> Result<()> {
        check_events(self.events)
    }
}

/// Notes nothing more; what was noted stays readable. `EINVAL` without a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceStop {
    /// Minor number.
    pub minor: u16,
    /// It does not stay, and its memory is given back.
    #[serde(default)]
    pub forget: bool,
}

impl DiskCommand for TraceStop {
    type Reply = TraceReport;
}
