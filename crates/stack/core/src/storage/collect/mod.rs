//! The garbage collection of SRs: when it begins, what runs, and how it gives way.
//!
//! What is to be done is planned by [`tapio_sm::collect`] and done by the driver. Here is one collection at a time for
//! each SR, on a thread of its own that exists while it runs:
//!
//! ```text
//! schedule    some quiet time after a VDI was removed, forked or copied, and after the SR was attached
//! look        the SR as a plan needs it
//! round       plan, do the first job, plan again, until nothing is left; the task that clients see
//! job         one job: which objects it takes, for how long, what it writes into the records
//! request     SR.collect_garbage
//! disks       those of one VM, for a caller that waits
//! stop        how it is told to end
//! ```
//!
//! The long part of a merge takes no object: everything that clients do goes on. For the short part, in which chains
//! change, a job takes the disks concerned, as a disk process does that opens an image: a client's call waits for it,
//! and is not refused. Where a disk is taken the job is put off. What ends the SR, or an image, ends the collection
//! first.

mod disks;
mod job;
mod look;
mod request;
mod round;
mod schedule;
mod stop;

pub(super) use disks::merge_disks_of;
pub(super) use look::{Memory, view};
pub(super) use request::register;
pub(super) use schedule::{Collector, HeldOff};

use std::time::Duration;

use tapio_model::ApiError;

use crate::db::Object;

/// In `SR.other_config`: seconds from a change to the collection.
pub(super) const QUIET: &str = "gc-quiet";
/// In `SR.other_config`: bytes a second that a merge copies at most.
pub(super) const RATE: &str = "gc-rate";

/// Seconds from a change to the collection, if the SR says nothing; as sm.
const QUIET_DEFAULT: Duration = Duration::from_secs(300);

/// The quiet time of an SR.
fn quiet(sr: &Object) -> Duration {
    number(sr, QUIET).map_or(QUIET_DEFAULT, Duration::from_secs)
}

/// Bytes a second that a merge copies at most; 0 for as fast as it goes.
fn rate(sr: &Object) -> u64 {
    number(sr, RATE).unwrap_or(0)
}

fn number(sr: &Object, key: &str) -> Option<u64> {
    sr.get("other_config").as_map()?.get(key)?.as_str()?.parse().ok()
}

/// Refuses a setting that is no number: it would be noticed by nobody.
///
/// # Errors
/// `INVALID_VALUE`.
pub(super) fn check_settings(config: &std::collections::BTreeMap<String, String>) -> Result<(), ApiError> {
    for key in [QUIET, RATE] {
        if let Some(value) = config.get(key).filter(|value| value.parse::<u64>().is_err()) {
            return Err(ApiError::new("INVALID_VALUE", [format!("other_config:{key}"), value.clone()]));
        }
    }
    Ok(())
}
