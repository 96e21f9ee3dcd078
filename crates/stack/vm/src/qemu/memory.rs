//! Memory and devices of a guest, into a socket and out of one, as QEMU's migration writes them.
//!
//! The guest is paused meanwhile, so nothing changes while it is written, and the disks' processes have answered all
//! that it had asked of them: QEMU stops each device when it stops the processors. The emulator that reads was started
//! with the same command line, and has the same disks in the same places.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use serde_json::json;
use tapio_types::ApiError;

use super::{DriverVm, soon};
use crate::console::cause;
use crate::errors::{bad_power_state, failed};
use crate::place::Phase;
use crate::poll::poll;

/// The emulator's name for the socket.
const FD_NAME: &str = "memory";

/// How often the emulator is asked how far it is: it writes hundreds of megabytes a second.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes a second that the emulator may write: as many as it can, because its guest waits.
const BANDWIDTH: u64 = 1 << 40;

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

/// Waits for the end of a migration.
fn wait(guest: &DriverVm, what: &str, is_cancelled: &dyn Fn() -> bool) -> Result<(), ApiError> {
    let told = |why: String| failed(guest.vm, what, cause(&guest.place, &why));
    loop {
        if guest.process().is_none_or(|process| process.has_ended()) {
            return Err(told("its emulator has ended".to_owned()));
        }
        match outcome(&guest.run("query-migrate", json!({}))?) {
            Some(Outcome::Done) => return Ok(()),
            Some(Outcome::Failed(why)) => return Err(failed(guest.vm, what, why)),
            None if is_cancelled() => {
                guest.run("migrate_cancel", json!({}))?;
                return Err(ApiError::new("TASK_CANCELLED", [""]));
            }
            None => drop(poll(&mut [], Instant::now() + LOOK)),
        }
    }
}

fn hand_over(guest: &DriverVm, socket: &OwnedFd) -> Result<(), ApiError> {
    let arguments = json!({ "fdname": FD_NAME });
    let given = guest.qmp()?.run_with("getfd", arguments, Some(socket.as_fd()), soon());
    given.map(drop).map_err(|error| failed(guest.vm, "its emulator does not take a socket", error))
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
    wait(guest, "its memory cannot be written", is_cancelled)
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
    wait(guest, "its memory cannot be read", &|| false)?;
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
    }
}
