//! What a disk may do, and the page pool that it shares: as the own protocol names them.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tapio_stat::pool::{PAGES_MAX, PoolName};
use tapio_types::{IoLimits, TransferSizes};

use crate::share::ShareReport;
use crate::{ControlError, Errno, Result};

/// A page pool to share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct PoolSpec {
    /// Its name: the UUID of the SR.
    pub name: String,
    /// Pages of 4 KiB; what the pool has, or the default of a new one, without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages: Option<u32>,
}

impl PoolSpec {
    /// The name, once both parts are in order.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong.
    pub fn check(&self) -> Result<PoolName> {
        let invalid = |text: String| ControlError::new(Errno::EINVAL, text);
        if let Some(pages) = self.pages.filter(|pages| !(1..=PAGES_MAX).contains(pages)) {
            return Err(invalid(format!("a pool has 1 to {PAGES_MAX} pages, not {pages}")));
        }
        self.name.parse().map_err(invalid)
    }
}

/// `NAME` or `NAME:PAGES`.
impl FromStr for PoolSpec {
    type Err = ControlError;

    fn from_str(text: &str) -> Result<Self> {
        let spec = match text.split_once(':') {
            None => Self { name: text.to_owned(), pages: None },
            Some((name, pages)) => {
                let pages = pages.parse().map_err(|_| {
                    ControlError::new(Errno::EINVAL, format!("'{pages}' is no number of pages"))
                        .next("write the pool as NAME or NAME:PAGES")
                })?;
                Self { name: name.to_owned(), pages: Some(pages) }
            }
        };
        spec.check()?;
        Ok(spec)
    }
}

/// What a disk is limited to, and what that has cost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsReport {
    /// In force.
    pub limits: IoLimits,
    /// Requests that had to wait for their turn.
    pub delayed: u64,
    /// For how long, together, in nanoseconds.
    pub delay_ns: u64,
    /// Requests that wait at the disk now; others may wait in the guest's ring behind them.
    pub waiting: u64,
    /// The page pool that the disk shares.
    pub pool: Option<PoolShare>,
    /// The device that it shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<ShareReport>,
    /// How its requests go to its storage.
    #[serde(default, skip_serializing_if = "TransferSizes::is_off")]
    pub transfers: TransferSizes,
}

/// A disk's part of its pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolShare {
    /// The pool.
    pub name: String,
    /// Its pages.
    pub pages: u32,
    /// Those that this disk holds.
    pub held: u32,
}

/// Refuses impossible numbers, from every client.
pub(crate) fn check_limits(limits: &IoLimits) -> Result<()> {
    limits.check().map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_a_name_with_or_without_pages() {
        let spec = |text: &str| text.parse::<PoolSpec>();
        let uuid = "164d3080-00a6-2b08-69f7-8c3fc75cba07";
        assert_eq!(spec(uuid), Ok(PoolSpec { name: uuid.into(), pages: None }));
        assert_eq!(spec("a:704"), Ok(PoolSpec { name: "a".into(), pages: Some(704) }));
        for bad in ["", ":5", "a:", "a:x", "a:0", "a:65536", "../a", "a:-1", ".a"] {
            assert_eq!(spec(bad).expect_err(bad).errno, Errno::EINVAL, "{bad}");
        }
    }
}
