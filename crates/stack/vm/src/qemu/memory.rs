//! Memory and devices of a guest, into a socket and out of one, as QEMU's migration writes them.
//!
//! A guest that is suspended is paused meanwhile, so nothing changes while it is written. One that goes to another host
//! runs: pages that it, or the processes of its disks, write after they were sent are sent again, and the guest is
//! stopped for the last of them. Either way the disks' processes have answered all that it had asked of them: QEMU
//! stops each device when it stops the processors. The emulator that reads was started with the same command line, and
//! has the same disks in the same places.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use serde_json::json;
use tapio_types::ApiError;

use super::command::MACHINE;
use super::{DriverVm, balloon, soon, uefi};
use crate::console::cause;
use crate::errors::{bad_power_state, failed, lacks_feature};
use crate::place::Phase;
use crate::poll::poll;
use crate::traits::{MEMORY_MAX, VCPUS_MAX, VCPUS_NOW};

/// The emulator's name for the socket.
const FD_NAME: &str = "memory";

/// How often the emulator is asked how far it is: it writes hundreds of megabytes a second.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes a second that the emulator may write: as many as it can, because its guest waits.
const BANDWIDTH: u64 = 1 << 40;

/// Milliseconds for which a guest that goes to another host may be stopped for the last of its memory.
const DOWNTIME_MS: u64 = 150;

/// How a migration ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Failed(String),
}

/// What `query-migrate` tells; nothing while it goes on.
fn outcome(answer: &serde_json::Value) -> Option<Outcome> {
    match answer["status"].as_str() {
        Some("completed") => Some(Outcome::Done),
        Some("failed") => {
            let why = answer["error-desc"].as_str().unwrap_or("the emulator does not say why");
            Some(Outcome::Failed(why.to_owned()))
        }
        Some("cancelled") => Some(Outcome::Failed("it was cancelled".to_owned())),
        _ => None,
    }
}

/// The fraction that is sent, of what there is now.
fn fraction(answer: &serde_json::Value) -> Option<f64> {
    let number = |key: &str| answer["ram"][key].as_u64();
    let (total, left) = (number("total")?, number("remaining")?);
    (total > 0).then(|| 1.0 - left.min(total) as f64 / total as f64)
}

/// Waits for the end of a migration. One that is cancelled has ended, too.
fn wait(
    guest: &DriverVm,
    what: &str,
    is_cancelled: &dyn Fn() -> bool,
    told: &dyn Fn(f64),
) -> Result<(), ApiError> {
    let failing = |why: String| failed(guest.vm, what, cause(&guest.place, &why));
    let mut was_cancelled = false;
    loop {
        if guest.process().is_none_or(|process| process.has_ended()) {
            return Err(failing("its emulator has ended".to_owned()));
        }
        let answer = guest.run("query-migrate", json!({}))?;
        match outcome(&answer) {
            Some(_) if was_cancelled => return Err(ApiError::new("TASK_CANCELLED", [""])),
            Some(Outcome::Done) => return Ok(()),
            Some(Outcome::Failed(why)) => return Err(failed(guest.vm, what, why)),
            None if !was_cancelled && is_cancelled() => {
                guest.run("migrate_cancel", json!({}))?;
                was_cancelled = true;
            }
            None => {
                if let Some(fraction) = fraction(&answer) {
                    told(fraction);
                }
                poll(&mut [], Instant::now() + LOOK);
            }
        }
    }
}

fn hand_over(guest: &DriverVm, socket: &OwnedFd) -> Result<(), ApiError> {
    let arguments = json!({ "fdname": FD_NAME });
    let given = guest.qmp()?.run_with("getfd", arguments, Some(socket.as_fd()), soon());
    given.map(drop).map_err(|error| failed(guest.vm, "its emulator does not take a socket", error))
}

/// The versioned machine type of a guest, as `pc-i440fx-7.2`: an alias such as `pc` is another one in another version
/// of the emulator, whose devices do not understand what these have written.
///
/// # Errors
/// The emulator's.
fn machine(guest: &DriverVm) -> Result<String, ApiError> {
    let found = guest.run("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    let kind = found.as_str().and_then(|name| name.strip_suffix("-machine"));
    let kind = kind.ok_or_else(|| failed(guest.vm, "its emulator does not name its machine type", &found));
    kind.map(str::to_owned)
}

/// The keys of [`MADE`](crate::traits::MADE) of a guest.
///
/// # Errors
/// The emulator's.
fn made(guest: &DriverVm) -> Result<BTreeMap<String, String>, ApiError> {
    let (present, most) = guest.processors()?;
    let memory = balloon::most(&guest.saved().spec).map(|bytes| (MEMORY_MAX, (bytes >> 20).to_string()));
    let keys = [(VCPUS_MAX, most.to_string()), (VCPUS_NOW, present.to_string())].into_iter().chain(memory);
    Ok(keys.map(|(key, value)| (key.to_owned(), value)).collect())
}

/// The word for what a guest was made as.
///
/// # Errors
/// The emulator's.
pub(super) fn saved_as(guest: &DriverVm) -> Result<String, ApiError> {
    Ok(super::made::word(&machine(guest)?, &made(guest)?))
}

/// Writes what a paused guest is.
///
/// # Errors
/// The guest is not paused; the emulator's; `TASK_CANCELLED`. The guest is paused still.
pub(super) fn save(guest: &DriverVm, to: OwnedFd, is_cancelled: &dyn Fn() -> bool) -> Result<(), ApiError> {
    if guest.phase() != Phase::Paused {
        return Err(bad_power_state(guest.vm, "Paused", "Running"));
    }
    guest.run("migrate-set-parameters", json!({ "max-bandwidth": BANDWIDTH }))?;
    hand_over(guest, &to)?;
    // The reader sees the end when the emulator closes it.
    drop(to);
    guest.run("migrate", json!({ "uri": format!("fd:{FD_NAME}") }))?;
    wait(guest, "its memory cannot be written", is_cancelled, &|_| ())
}

/// Whether a guest can go to another host while it runs.
///
/// # Errors
/// `VM_LACKS_FEATURE`.
pub(super) fn check_migrate(guest: &DriverVm) -> Result<(), ApiError> {
    if matches!(uefi::of(&guest.saved().spec), Ok(None)) {
        return Ok(());
    }
    let why = "the variables of its UEFI firmware are kept by the host that it runs on: shut it down and start it \
               there (xe vm-start on=HOST)";
    Err(lacks_feature(guest.vm, why.to_owned()))
}

/// The machine type, whether its processors are emulated, and what [`made`] tells: memory and devices are of these.
///
/// # Errors
/// The emulator's.
pub(super) fn made_as(guest: &DriverVm) -> Result<BTreeMap<String, String>, ApiError> {
    let found = guest.run("query-kvm", json!({}))?;
    let accel = if found["enabled"].as_bool() == Some(true) { "kvm" } else { "tcg" };
    let mut keys = made(guest)?;
    keys.extend([(MACHINE.to_owned(), machine(guest)?), ("accel".to_owned(), accel.to_owned())]);
    Ok(keys)
}

/// Writes what a guest is that runs; it is paused then.
///
/// # Errors
/// The guest does not run; the emulator's; `TASK_CANCELLED`. The guest may be stopped all the same.
pub(super) fn migrate(
    guest: &DriverVm,
    to: OwnedFd,
    is_cancelled: &dyn Fn() -> bool,
    told: &dyn Fn(f64),
) -> Result<(), ApiError> {
    if guest.phase() != Phase::Running {
        return Err(bad_power_state(guest.vm, "Running", "Paused"));
    }
    // One that writes faster than the network takes is slowed down, step by step, until it does not.
    let slows = json!([{ "capability": "auto-converge", "state": true }]);
    guest.run("migrate-set-capabilities", json!({ "capabilities": slows }))?;
    let limits = json!({ "max-bandwidth": BANDWIDTH, "downtime-limit": DOWNTIME_MS });
    guest.run("migrate-set-parameters", limits)?;
    hand_over(guest, &to)?;
    // The reader sees the end when the emulator closes it.
    drop(to);
    guest.run("migrate", json!({ "uri": format!("fd:{FD_NAME}") }))?;
    wait(guest, "its memory cannot be sent", is_cancelled, told)?;
    guest.change(|saved| saved.phase = Phase::Paused)
}

/// Reads it into an emulator that waits for it; the guest is paused then.
///
/// # Errors
/// The emulator's, which may end: what it reads is not of such a VM, or was cut off.
pub(super) fn load(guest: &DriverVm, from: OwnedFd) -> Result<(), ApiError> {
    // An emulator that cannot read it ends. That is told here, and is no crash of a guest.
    guest.change(|saved| saved.is_ending = true)?;
    hand_over(guest, &from)?;
    drop(from);
    guest.run("migrate-incoming", json!({ "uri": format!("fd:{FD_NAME}") }))?;
    wait(guest, "its memory cannot be read", &|| false, &|_| ())?;
    guest.set_links()?;
    // As for a guest that was started here: a reboot is an event for the daemon.
    guest.run("set-action", json!({ "reboot": "shutdown" }))?;
    guest.change(|saved| {
        saved.phase = Phase::Paused;
        saved.is_ending = false;
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_migration_is_seen() {
        assert_eq!(outcome(&json!({})), None);
        assert_eq!(outcome(&json!({ "status": "active", "ram": {} })), None);
        assert_eq!(outcome(&json!({ "status": "completed" })), Some(Outcome::Done));
        let failed = json!({ "status": "failed", "error-desc": "Unable to write to socket" });
        assert_eq!(outcome(&failed), Some(Outcome::Failed("Unable to write to socket".to_owned())));
        assert!(matches!(outcome(&json!({ "status": "cancelled" })), Some(Outcome::Failed(_))));
        assert_eq!(outcome(&json!({ "status": "cancelling" })), None);
    }

    #[test]
    fn how_much_is_sent_is_told_once_it_is_known() {
        assert_eq!(fraction(&json!({ "status": "setup" })), None);
        assert_eq!(fraction(&json!({ "ram": { "total": 0, "remaining": 0 } })), None);
        assert_eq!(fraction(&json!({ "ram": { "total": 400, "remaining": 100 } })), Some(0.75));
        assert_eq!(fraction(&json!({ "ram": { "total": 400, "remaining": 900 } })), Some(0.0));
    }
}
