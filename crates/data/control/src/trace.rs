//! Traces of requests, as the control socket knows them.

use serde::{Deserialize, Serialize};
use tapio_stat::trace::{EVENTS_MAX, EVENTS_MIN};

use crate::{ControlError, Errno, Result};

/// Where a trace is, or what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceReport {
    /// Process that writes it.
    pub pid: u32,
    /// Minor number.
    pub minor: u16,
    /// Whether events are being written.
    pub running: bool,
    /// Events so far, those that were overwritten included.
    pub written: u64,
}

/// Whether a trace can have so many events.
///
/// # Errors
/// `EINVAL` with what it can have.
pub(crate) fn check_events(events: u32) -> Result<()> {
    if events.is_power_of_two() && (EVENTS_MIN..=EVENTS_MAX).contains(&events) {
        return Ok(());
    }
    Err(ControlError::new(Errno::EINVAL, format!("a trace of {events} events"))
        .next(format!("give a power of two from {EVENTS_MIN} to {EVENTS_MAX}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_powers_of_two_are_sizes() {
        assert!(check_events(EVENTS_MIN).is_ok() && check_events(EVENTS_MAX).is_ok());
        for bad in [0, 1, 255, 257, EVENTS_MAX + 1, u32::MAX] {
            assert_eq!(check_events(bad).expect_err("no size").errno, Errno::EINVAL, "{bad}");
        }
    }
}
