//! Versions of hosts: those of one minor version work together in a pool.
//!
//! So hosts are upgraded one after the other while the others, and all guests, go on. Within a minor version nothing
//! changes that two hosts share: rows keep the types of their fields (`db::rows` keeps those that it does not know),
//! calls between hosts and the forms on storages stay what they are. Another minor version comes when all daemons are
//! stopped.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use tapio_model::{ApiError, Value};

use crate::db::{Db, Object};

/// The key of `pool.other_config` that tells products of hosts of different versions, as XenServer's does.
const IN_PROGRESS: &str = "rolling_upgrade_in_progress";

/// A version of Tapio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl FromStr for Version {
    type Err = String;

    /// Three numbers; what follows them after `-` or `+` does not count.
    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split(['-', '+']).next().unwrap_or_default();
        let numbers: Vec<u32> = numbers.split('.').map_while(|number| number.parse().ok()).collect();
        match numbers[..] {
            [major, minor, patch] => Ok(Self { major, minor, patch }),
            _ => Err(format!("'{text}' is no version MAJOR.MINOR.PATCH")),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Version {
    /// That of this program. `TAPIO_VERSION` makes it another, for tests of pools.
    pub(crate) fn own() -> Self {
        static OWN: OnceLock<Version> = OnceLock::new();
        *OWN.get_or_init(|| {
            let told = std::env::var("TAPIO_VERSION").ok().and_then(|text| text.parse().ok());
            let built = || env!("CARGO_PKG_VERSION").parse();
            told.map_or_else(built, Ok).unwrap_or(Version { major: 0, minor: 0, patch: 0 })
        })
    }

    /// That of a host, as it said at its last start.
    pub(crate) fn of(host: &Object) -> Option<Self> {
        host.map("software_version").get("product_version")?.parse().ok()
    }

    /// Whether hosts of both may be in one pool at a time.
    pub(crate) fn works_with(self, other: Self) -> bool {
        (self.major, self.minor) == (other.major, other.minor)
    }

    /// Why a host that runs keeps this version out of its pool.
    pub(super) fn refusal(self, other: Self, address: &str) -> Option<String> {
        (!self.works_with(other)).then(|| {
            format!(
                "this is Tapio {self}, and host {address} of the pool runs {other}: hosts work together within one minor \
                 version; install {other} here, or stop the daemons of the other hosts (their guests go on), install \
                 {self} there, and start them"
            )
        })
    }
}

/// A guest takes nothing back that a newer version gave it.
///
/// # Errors
/// `VM_HOST_INCOMPATIBLE_VERSION_MIGRATE`: the host is older than this one.
pub(crate) fn refuse_older(vm: &str, host: &Object) -> Result<(), ApiError> {
    match Version::of(host) {
        Some(theirs) if theirs < Version::own() => {
            Err(ApiError::new("VM_HOST_INCOMPATIBLE_VERSION_MIGRATE", [&host.reference, vm]))
        }
        _ => Ok(()),
    }
}

/// The pool's record says whether hosts differ.
pub(super) fn tell(db: &Db, hosts: &[Arc<Object>]) -> Result<(), ApiError> {
    let mut versions = hosts.iter().filter_map(|host| Version::of(host));
    let first = versions.next();
    let differs = versions.any(|version| Some(version) != first);
    let is_right = |pool: &Object| pool.map("other_config").contains_key(IN_PROGRESS) == differs;
    if db.all("pool").iter().all(|pool| is_right(pool)) {
        return Ok(());
    }
    db.change(|change| {
        for pool in change.all("pool").iter().filter(|pool| !is_right(pool)) {
            let mut config = pool.map("other_config");
            match differs {
                true => drop(config.insert(IN_PROGRESS.to_owned(), "true".to_owned())),
                false => drop(config.remove(IN_PROGRESS)),
            }
            change.set("pool", &pool.reference, "other_config", Value::string_map(config))?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_one_minor_version_work_together() {
        let version = |text: &str| text.parse::<Version>().expect("a version");
        assert!(version("1.2.9") < version("1.10.0"));
        assert_eq!(version("1.2.3-rc1").to_string(), "1.2.3");
        for text in ["", "1", "1.2", "1.2.x", "1.2.3.4", "v1.2.3"] {
            assert!(text.parse::<Version>().is_err(), "{text}");
        }
        assert_eq!(version("1.2.0").refusal(version("1.2.7"), "h"), None);
        for other in ["1.3.0", "2.2.0"] {
            let why = version("1.2.0").refusal(version(other), "10.0.0.2").expect("it is refused");
            assert!(why.contains("10.0.0.2") && why.contains(other) && why.contains("1.2.0"), "{why}");
        }
        assert_eq!(Version::own().to_string(), env!("CARGO_PKG_VERSION"));
    }
}
