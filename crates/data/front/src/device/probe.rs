//! What this host has for local devices, and why it lacks the rest.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;

use tapio_types::DeviceHow;

use super::fuse::open_fuse;

/// What was found out about one kind of device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The kind.
    pub how: DeviceHow,
    /// Why it does not work here and what to do about that; `None` where it works.
    pub missing: Option<Missing>,
}

/// Why a kind of device does not work here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// What is not there.
    pub why: String,
    /// What to do next.
    pub next: &'static str,
}

impl Missing {
    pub(super) fn new(why: impl Into<String>, next: &'static str) -> Self {
        Self { why: why.into(), next }
    }
}

/// Why a device node cannot be opened.
fn node(path: &str, error: &io::Error, load: &'static str) -> Missing {
    let next = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => "run as root; in a container the device has to be allowed",
        _ => load,
    };
    Missing::new(format!("{path}: {error}"), next)
}

fn fuse() -> Result<(), Missing> {
    open_fuse().map_err(|error| node("/dev/fuse", &error, "load the driver: modprobe fuse"))?;
    if may_mount() {
        return Ok(());
    }
    Err(Missing::new("this process may not mount (CAP_SYS_ADMIN)", "run as root"))
}

/// Whether the process has CAP_SYS_ADMIN, by the mask of its effective capabilities.
fn may_mount() -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & SYS_ADMIN != 0)
}

fn loop_device() -> Result<(), Missing> {
    let path = "/dev/loop-control";
    let opened = OpenOptions::new().read(true).write(true).open(Path::new(path));
    opened.map(drop).map_err(|error| node(path, &error, "load the driver: modprobe loop"))
}

fn look(how: DeviceHow) -> Result<(), Missing> {
    match how {
        DeviceHow::Ublk => ublk(),
        DeviceHow::Nbd => nbd(),
        DeviceHow::Fuse => fuse().and_then(|()| loop_device()),
        DeviceHow::FuseFile => fuse(),
        DeviceHow::Auto => choose().map(drop),
    }
}

fn ublk() -> Result<(), Missing> {
    let path = super::ublk::CONTROL;
    let opened = OpenOptions::new().read(true).write(true).open(path);
    let load = "load the driver: modprobe ublk_drv (Linux 6.0 or later with CONFIG_BLK_DEV_UBLK)";
    opened.map_err(|error| node(path, &error, load))?;
    super::ublk::usable().map_err(|error| {
        Missing::new(error.message, "Linux 6.5 or later is needed, and io_uring must be allowed")
    })
}

fn nbd() -> Result<(), Missing> {
    super::nbd::usable().map_err(|error| {
        let next = match error.errno {
            libc::EBUSY => {
                "disconnect one of the devices, or load the driver with more: modprobe nbd nbds_max=64"
            }
            libc::EPERM | libc::EACCES => "run as root",
            _ => "load the driver: modprobe nbd",
        };
        Missing::new(error.message, next)
    })
}

/// Looks at every kind, in the order in which `auto` prefers them.
pub fn probe() -> Vec<Found> {
    [DeviceHow::Ublk, DeviceHow::Nbd, DeviceHow::Fuse, DeviceHow::FuseFile]
        .into_iter()
        .map(|how| Found { how, missing: look(how).err() })
        .collect()
}

/// The kind that `auto` stands for here.
///
/// # Errors
/// No kind works: all reasons.
pub fn choose() -> Result<DeviceHow, Missing> {
    let mut reasons = Vec::new();
    for how in [DeviceHow::Ublk, DeviceHow::Nbd, DeviceHow::Fuse] {
        match look(how) {
            Ok(()) => return Ok(how),
            Err(missing) => reasons.push(format!("{how}: {}", missing.why)),
        }
    }
    Err(Missing::new(
        format!("no kind of local device works here ({})", reasons.join("; ")),
        "'tapio disk device probe' says what each needs",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_looked_at_and_a_missing_one_says_why() {
        let found = probe();
        assert_eq!(
            found.iter().map(|found| found.how.name()).collect::<Vec<_>>(),
            ["ublk", "nbd", "fuse", "fuse-file"]
        );
        for found in &found {
            if let Some(missing) = &found.missing {
                assert!(!missing.why.is_empty() && !missing.next.is_empty(), "{found:?}");
            }
        }
        // What `auto` takes is the first that works, or the reasons of all.
        let first = found.iter().find(|found| found.missing.is_none() && found.how != DeviceHow::FuseFile);
        match choose() {
            Ok(how) => assert_eq!(Some(how), first.map(|found| found.how)),
            Err(missing) => assert!(first.is_none() && missing.why.contains("ublk"), "{missing:?}"),
        }
    }

    #[test]
    fn a_refused_node_asks_for_root_and_a_missing_one_for_the_driver() {
        let of = |errno| node("/dev/x", &io::Error::from_raw_os_error(errno), "load it").next;
        assert_eq!(of(libc::ENOENT), "load it");
        assert!(of(libc::EACCES).contains("root"));
    }
}
