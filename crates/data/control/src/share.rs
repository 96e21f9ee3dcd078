//! How a disk shares its device with others: as the own protocol names it.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tapio_stat::share::{WEIGHT_DEFAULT, WEIGHT_MAX};

use crate::{ControlError, Errno, Result};

/// Longest latency target: a minute.
const LATENCY_US_MAX: u64 = 60_000_000;

/// A disk's part of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ShareSpec {
    /// It takes what the kernel gives it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub off: bool,
    /// What it counts beside others, 1 to 1000.
    #[serde(default = "weight_default")]
    pub weight: u32,
    /// Mean latency in microseconds that its requests to the device shall have; 0: none in particular.
    #[serde(default)]
    pub latency_us: u64,
}

const fn weight_default() -> u32 {
    WEIGHT_DEFAULT
}

/// What is not asked to share is left to the kernel.
impl Default for ShareSpec {
    fn default() -> Self {
        Self { off: true, weight: WEIGHT_DEFAULT, latency_us: 0 }
    }
}

impl ShareSpec {
    /// Refuses impossible numbers.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong.
    pub fn check(&self) -> Result<()> {
        let invalid = |text: String| Err(ControlError::new(Errno::EINVAL, text));
        if !(1..=WEIGHT_MAX).contains(&self.weight) {
            return invalid(format!("a disk weighs 1 to {WEIGHT_MAX}, not {}", self.weight));
        }
        if self.latency_us > LATENCY_US_MAX {
            return invalid(format!(
                "a latency target has up to {LATENCY_US_MAX} microseconds, not {}",
                self.latency_us
            ));
        }
        Ok(())
    }
}

/// `off`, or `weight=300,latency-us=2000`.
impl FromStr for ShareSpec {
    type Err = ControlError;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = || {
            ControlError::new(Errno::EINVAL, format!("'{text}' is no share of a device"))
                .next("write 'off', or 'weight=N', 'latency-us=N' or both with a comma between")
        };
        if text == "off" {
            return Ok(Self::default());
        }
        let mut spec = Self { off: false, ..Self::default() };
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(invalid)?;
            match name {
                "weight" => spec.weight = value.parse().map_err(|_| invalid())?,
                "latency-us" => spec.latency_us = value.parse().map_err(|_| invalid())?,
                _ => return Err(invalid()),
            }
        }
        spec.check()?;
        Ok(spec)
    }
}

/// How a disk shares its device now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareReport {
    /// What is set.
    pub spec: ShareSpec,
    /// The device, by the numbers of its disks; empty if the disk shares none.
    pub device: String,
    /// Why it shares none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_shared: Option<String>,
    /// Disks that share it, this one included.
    pub disks: u64,
    /// Bytes that it may have in flight now, because another disk misses its latency target.
    pub limit: Option<u64>,
    /// What it may send beside each of the others, by weight, in 100, while others compete: 100 is even.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub even_percent: Option<u64>,
    /// Pieces of requests that had to wait for others.
    pub waited: u64,
    /// For how long, together, in nanoseconds.
    pub waited_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_read_and_nonsense_refused() {
        let spec = |text: &str| text.parse::<ShareSpec>();
        assert_eq!(spec("off"), Ok(ShareSpec::default()));
        assert_eq!(
            spec("weight=300,latency-us=2000"),
            Ok(ShareSpec { off: false, weight: 300, latency_us: 2000 })
        );
        for text in ["", "weight", "weight=0", "weight=1001", "weight=a", "latency-us=60000001", "size=3"] {
            assert_eq!(spec(text).expect_err(text).errno, Errno::EINVAL);
        }
        let read: ShareSpec = serde_json::from_str("{}").expect("all have defaults");
        assert_eq!(read, ShareSpec { off: false, ..ShareSpec::default() });
    }
}
