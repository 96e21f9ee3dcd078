//! What an SR wants of the queues of its devices, as its `other_config` says.
//!
//! | key | value |
//! |---|---|
//! | `scheduler` | `none`, `mq-deadline`, `kyber`, `bfq`; the old names `noop`, `deadline`, `cfq` |
//! | `scheduler-tunables` | as `read_expire=200,fifo_batch=8`: files of `queue/iosched` |
//! | `nr_requests` | requests that the scheduler keeps, 4 to 65536 |
//! | `read_ahead_kb` | KiB that are read ahead, 0 to 1048576 |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::below::Layer;
use super::host::Kind;

const SCHEDULER: &str = "scheduler";
const TUNABLES: &str = "scheduler-tunables";
const NR_REQUESTS: &str = "nr_requests";
const READ_AHEAD_KB: &str = "read_ahead_kb";

/// Keys of `SR.other_config` that are read here.
pub const KEYS: [&str; 4] = [SCHEDULER, TUNABLES, NR_REQUESTS, READ_AHEAD_KB];

/// Names that XenServer's releases had, and what they are now.
const OLD_NAMES: [(&str, &str); 3] = [("noop", "none"), ("deadline", "mq-deadline"), ("cfq", "bfq")];
const SCHEDULERS: [&str; 4] = ["none", "mq-deadline", "kyber", "bfq"];
/// Tunables of one scheduler are about a dozen.
const TUNABLES_MAX: usize = 32;
const NR_REQUESTS_RANGE: (u32, u32) = (4, 65_536);
const READ_AHEAD_RANGE: (u32, u32) = (0, 1 << 20);

/// Types of SR whose files lie in a file system of the host's own, or on a server: nothing is set there unasked.
const ON_FILES: [&str; 4] = ["file", "iso", "nfs", "smb"];
/// Types whose devices are behind a server or an array, which has many disks and schedules by itself.
const ON_ARRAYS: [&str; 7] = ["iscsi", "lvmoiscsi", "hba", "lvmohba", "lvmofcoe", "rbd", "linstor"];

/// What is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The I/O scheduler.
    pub scheduler: Option<String>,
    /// Files of `queue/iosched` with their values.
    pub tunables: BTreeMap<String, String>,
    /// Requests that the scheduler keeps.
    pub nr_requests: Option<u32>,
    /// KiB that are read ahead.
    pub read_ahead_kb: Option<u32>,
}

/// A value that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Of `other_config`.
    pub key: &'static str,
    /// What it is.
    pub value: String,
    /// What is expected.
    pub why: String,
}

impl Settings {
    /// Reads them.
    ///
    /// # Errors
    /// The first value that cannot be.
    pub fn of(other_config: &BTreeMap<String, String>) -> Result<Self, Refused> {
        let text =
            |key: &str| other_config.get(key).map(|value| value.trim()).filter(|value| !value.is_empty());
        Ok(Self {
            scheduler: text(SCHEDULER).map(scheduler).transpose()?,
            tunables: text(TUNABLES).map(tunables).transpose()?.unwrap_or_default(),
            nr_requests: text(NR_REQUESTS)
                .map(|value| number(NR_REQUESTS, value, NR_REQUESTS_RANGE))
                .transpose()?,
            read_ahead_kb: text(READ_AHEAD_KB)
                .map(|value| number(READ_AHEAD_KB, value, READ_AHEAD_RANGE))
                .transpose()?,
        })
    }

    /// Whether nothing is asked for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn scheduler(value: &str) -> Result<String, Refused> {
    let now = OLD_NAMES.iter().find(|(old, _)| *old == value).map_or(value, |(_, now)| now);
    SCHEDULERS.contains(&now).then(|| now.to_owned()).ok_or_else(|| Refused {
        key: SCHEDULER,
        value: value.to_owned(),
        why: format!("one of {} is expected", SCHEDULERS.join(", ")),
    })
}

fn tunables(value: &str) -> Result<BTreeMap<String, String>, Refused> {
    let refused = |why: &str| Refused { key: TUNABLES, value: value.to_owned(), why: why.to_owned() };
    let mut found = BTreeMap::new();
    for pair in value.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let (name, number) = pair
            .split_once('=')
            .ok_or_else(|| refused("NAME=NUMBER with commas between them is expected"))?;
        let is_name =
            !name.is_empty() && name.len() < 64 && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        let is_number = !number.is_empty() && number.len() < 20 && number.bytes().all(|b| b.is_ascii_digit());
        if !is_name || !is_number {
            return Err(refused("names of tunables have small letters and '_', their values digits"));
        }
        found.insert(name.to_owned(), number.to_owned());
    }
    if found.len() > TUNABLES_MAX { Err(refused("at most 32 tunables are expected")) } else { Ok(found) }
}

fn number(key: &'static str, value: &str, (min, max): (u32, u32)) -> Result<u32, Refused> {
    let found = value.parse().ok().filter(|number| (min..=max).contains(number));
    found.ok_or_else(|| Refused { key, value: value.to_owned(), why: format!("{min} to {max} is expected") })
}

/// Schedulers that a device gets if its SR asks for none, the preferred one first; none: it stays as it is.
pub(super) fn default_schedulers(sr_type: &str, layer: &Layer) -> &'static [&'static str] {
    if layer.is_below_file || ON_FILES.contains(&sr_type) || !layer.is_disk {
        return &[];
    }
    match layer.kind {
        Kind::Cd | Kind::Memory => &[],
        Kind::Rotating if !ON_ARRAYS.contains(&sr_type) => &["bfq", "mq-deadline"],
        _ => &["none"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn old_names_are_understood_and_nonsense_is_refused() {
        for (old, now) in OLD_NAMES.into_iter().chain(SCHEDULERS.map(|name| (name, name))) {
            let found = Settings::of(&map(&[(SCHEDULER, old)])).unwrap();
            assert_eq!(found.scheduler.as_deref(), Some(now));
        }
        let all =
            map(&[(TUNABLES, "read_expire=200, fifo_batch=8"), (NR_REQUESTS, "64"), (READ_AHEAD_KB, "0")]);
        let found = Settings::of(&all).unwrap();
        assert_eq!((found.nr_requests, found.read_ahead_kb), (Some(64), Some(0)));
        assert_eq!(found.tunables["fifo_batch"], "8");
        assert!(Settings::of(&map(&[("gc", "false"), (SCHEDULER, "")])).unwrap().is_empty());
        for (key, value) in [
            (SCHEDULER, "fastest"),
            (TUNABLES, "read_expire"),
            (TUNABLES, "../x=1"),
            (TUNABLES, "read_expire=-1"),
            (NR_REQUESTS, "3"),
            (NR_REQUESTS, "many"),
            (READ_AHEAD_KB, "1048577"),
        ] {
            let refused = Settings::of(&map(&[(key, value)])).unwrap_err();
            assert!(
                refused.key == key && refused.value == value && refused.why.contains("expected")
                    || key == TUNABLES
            );
        }
    }

    #[test]
    fn defaults_go_by_kind_and_type() {
        let layer = |kind, is_below_file| Layer { name: "sda".into(), kind, is_disk: true, is_below_file };
        let of = |sr_type, kind| default_schedulers(sr_type, &layer(kind, false));
        assert_eq!(of("ext", Kind::Rotating), ["bfq", "mq-deadline"]);
        assert_eq!(of("lvm", Kind::SolidState), ["none"]);
        assert_eq!(of("lvmoiscsi", Kind::Rotating), ["none"]);
        assert_eq!(of("udev", Kind::San), ["none"]);
        assert!(of("file", Kind::Rotating).is_empty() && of("udev", Kind::Cd).is_empty());
        assert!(default_schedulers("ext", &layer(Kind::Rotating, true)).is_empty());
    }
}
