//! How much a disk may do: requests and bytes a second, and how far it may run ahead.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::size::{exact_bytes, parse_bytes};

/// How long at its rate a disk may run ahead after a rest, if no burst is configured: long enough that a late
/// wake-up costs nothing, short enough that no second has more than two percent too much.
pub const BURST_MS_DEFAULT: u32 = 20;
/// Most requests a second that can be asked for.
pub const IOPS_MAX: u64 = 1_000_000_000;
/// Most bytes a second that can be asked for: 1 PiB.
pub const BPS_MAX: u64 = 1 << 50;
/// Longest burst in milliseconds: an hour.
pub const BURST_MS_MAX: u32 = 3_600_000;

/// The limits of a disk. 0 means: no such limit.
///
/// A request counts where it belongs: reads as reads, everything that changes the disk as writes, both in the total.
/// Flushes count nowhere. Discards and zeroing count as one request of no bytes, whatever their length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct IoLimits {
    /// Requests a second, reads and writes together.
    pub iops: u64,
    /// Bytes a second, reads and writes together.
    pub bps: u64,
    /// Reads a second.
    pub read_iops: u64,
    /// Bytes read a second.
    pub read_bps: u64,
    /// Writes a second.
    pub write_iops: u64,
    /// Bytes written a second.
    pub write_bps: u64,
    /// How far the disk may run ahead after a rest, as milliseconds at its rates; 0 is [`BURST_MS_DEFAULT`].
    pub burst_ms: u32,
    /// The same in requests, for all limits of requests; 0 goes by the time.
    pub burst_ios: u64,
    /// The same in bytes, for all limits of bytes; 0 goes by the time.
    pub burst_bytes: u64,
}

/// Why a limit cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitError(String);

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LimitError {}

impl IoLimits {
    /// Whether nothing is limited.
    pub const fn is_off(&self) -> bool {
        self.rates_are_zero()
    }

    const fn rates_are_zero(&self) -> bool {
        self.iops | self.bps | self.read_iops | self.read_bps | self.write_iops | self.write_bps == 0
    }

    /// How far ahead a bucket of this rate may run, in the rate's unit.
    pub const fn burst_of(&self, rate: u64, bytes: bool) -> u64 {
        let own = if bytes { self.burst_bytes } else { self.burst_ios };
        if own > 0 {
            return own;
        }
        let ms = if self.burst_ms == 0 { BURST_MS_DEFAULT } else { self.burst_ms };
        (rate as u128 * ms as u128 / 1000) as u64
    }

    /// Whether the numbers are in their ranges.
    ///
    /// # Errors
    /// The first one that is not, with its range.
    pub fn check(&self) -> Result<(), LimitError> {
        let requests = [
            ("iops", self.iops),
            ("read-iops", self.read_iops),
            ("write-iops", self.write_iops),
            ("burst-ios", self.burst_ios),
        ];
        let bytes = [
            ("bps", self.bps),
            ("read-bps", self.read_bps),
            ("write-bps", self.write_bps),
            ("burst-bytes", self.burst_bytes),
        ];
        for (list, max) in [(requests, IOPS_MAX), (bytes, BPS_MAX)] {
            if let Some((name, value)) = list.iter().find(|(_, value)| *value > max) {
                return Err(LimitError(format!(
                    "{name} {value} is too much: give at most {max}, or 0 for none"
                )));
            }
        }
        if self.burst_ms > BURST_MS_MAX {
            return Err(LimitError(format!(
                "a burst of {} ms is too long: give at most an hour",
                self.burst_ms
            )));
        }
        if self.rates_are_zero() && (self.burst_ms > 0 || self.burst_ios > 0 || self.burst_bytes > 0) {
            return Err(LimitError("a burst needs a limit that it belongs to, as iops=500".into()));
        }
        Ok(())
    }

    /// Sets what `name` stands for, as the command line and `tapio disk limit` call it.
    ///
    /// # Errors
    /// No such name, or no such value.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), LimitError> {
        match name {
            "iops" => self.iops = count(name, value)?,
            "bps" => self.bps = size(name, value)?,
            "read-iops" => self.read_iops = count(name, value)?,
            "read-bps" => self.read_bps = size(name, value)?,
            "write-iops" => self.write_iops = count(name, value)?,
            "write-bps" => self.write_bps = size(name, value)?,
            "burst-ios" => self.burst_ios = count(name, value)?,
            "burst-bytes" => self.burst_bytes = size(name, value)?,
            "burst" => match milliseconds(value) {
                Some(ms) => self.burst_ms = ms,
                None if value.ends_with('m') => {
                    let why = format!("a burst of '{value}' is minutes or MiB: write it as 60s or 1MiB");
                    return Err(LimitError(why));
                }
                None => self.burst_bytes = size(name, value)?,
            },
            _ => {
                return Err(LimitError(format!(
                    "'{name}' is no limit: iops, bps, read-iops, read-bps, write-iops, write-bps, burst, burst-ios \
                     and burst-bytes are"
                )));
            }
        }
        Ok(())
    }
}

/// `iops=500,read-bps=50MiB,burst=2s`; `off` for no limits.
impl FromStr for IoLimits {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let mut limits = Self::default();
        if text == "off" {
            return Ok(limits);
        }
        let mut seen: Vec<&str> = Vec::new();
        for part in text.split(',') {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| LimitError(format!("'{part}' is no limit: write it as iops=500")))?;
            if seen.contains(&name) {
                return Err(LimitError(format!("'{name}' was given twice")));
            }
            seen.push(name);
            limits.set(name, value)?;
        }
        limits.check()?;
        Ok(limits)
    }
}

/// As [`IoLimits::from_str`] reads it.
impl fmt::Display for IoLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_off() {
            return f.write_str("off");
        }
        let mut comma = "";
        let mut put = |f: &mut fmt::Formatter<'_>, name: &str, value: String| {
            let put = write!(f, "{comma}{name}={value}");
            comma = ",";
            put
        };
        for (name, value, bytes) in [
            ("iops", self.iops, false),
            ("bps", self.bps, true),
            ("read-iops", self.read_iops, false),
            ("read-bps", self.read_bps, true),
            ("write-iops", self.write_iops, false),
            ("write-bps", self.write_bps, true),
            ("burst-ios", self.burst_ios, false),
            ("burst-bytes", self.burst_bytes, true),
        ] {
            if value > 0 {
                put(f, name, if bytes { exact_bytes(value) } else { value.to_string() })?;
            }
        }
        if self.burst_ms > 0 {
            put(f, "burst", format!("{}ms", self.burst_ms))?;
        }
        Ok(())
    }
}

fn count(name: &str, value: &str) -> Result<u64, LimitError> {
    value.parse().map_err(|_| LimitError(format!("'{name}' needs a whole number, not '{value}'")))
}

fn size(name: &str, value: &str) -> Result<u64, LimitError> {
    parse_bytes(value).map_err(|_| {
        LimitError(format!("'{name}' needs a number of bytes, as 1048576 or 50MiB, not '{value}'"))
    })
}

/// `2s` or `500ms`.
fn milliseconds(value: &str) -> Option<u32> {
    if let Some(ms) = value.strip_suffix("ms") {
        return ms.parse().ok();
    }
    value.strip_suffix('s')?.parse::<u32>().ok()?.checked_mul(1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_they_are_written() {
        for text in [
            "off",
            "iops=500",
            "iops=500,bps=100MiB,burst=2000ms",
            "read-iops=1,read-bps=4KiB,write-iops=7,write-bps=1000001,burst-ios=12,burst-bytes=3GiB,burst=5ms",
        ] {
            assert_eq!(text.parse::<IoLimits>().map(|limits| limits.to_string()), Ok(text.to_owned()));
        }
        let limits: IoLimits = "bps=50MB,burst=2s".parse().expect("limits");
        assert_eq!(
            (limits.bps, limits.burst_ms, limits.burst_of(limits.bps, true)),
            (50_000_000, 2000, 100_000_000)
        );
        assert_eq!("bps=1".parse::<IoLimits>().map(|limits| limits.burst_of(1_000_000, true)), Ok(20_000));
    }

    #[test]
    fn nonsense_is_refused_with_a_reason() {
        for (text, reason) in [
            ("", "is no limit"),
            ("iops", "is no limit"),
            ("iops=", "whole number"),
            ("iops=-1", "whole number"),
            ("iops=5k", "whole number"),
            ("bps=ten", "number of bytes"),
            ("bps=99999999999GiB", "number of bytes"),
            ("bps=2TiB,bps=1", "given twice"),
            ("iops=1000000001", "at most"),
            ("bps=2048TiB", "at most"),
            ("burst=2s", "needs a limit"),
            ("iops=5,burst=5000s", "at most an hour"),
            ("iops=5,burst=5h", "number of bytes"),
            ("bps=5,burst=5m", "minutes or MiB"),
            ("speed=5", "'speed' is no limit"),
        ] {
            let error = text.parse::<IoLimits>().expect_err(text).to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
