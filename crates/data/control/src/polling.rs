//! Adaptive polling, as commands name it.

use serde::{Deserialize, Serialize};

use crate::{ControlError, Errno, Result};

/// Adaptive polling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Polling {
    /// Longest spin in microseconds; 0 is off.
    pub max_us: u32,
    /// Spin only while at least this share of the host is idle, in percent.
    pub idle_percent: u8,
}

impl Polling {
    /// Whether it is possible.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong.
    pub(crate) fn check(&self) -> Result<()> {
        if self.max_us > 1_000_000 || self.idle_percent > 100 {
            return Err(ControlError::new(
                Errno::EINVAL,
                format!("polling for {} us above {} % idle", self.max_us, self.idle_percent),
            )
            .next("give at most 1000000 us and 100 %"));
        }
        Ok(())
    }
}
