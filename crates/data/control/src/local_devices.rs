//! What the disk program says of local devices: which kinds work here, and what dead processes left.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tapio_types::DeviceHow;

use crate::{ControlError, Errno, Result, disk_program};

/// What was found out about one kind of device, as `tapio-disk --print-devices` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalDeviceKind {
    /// The kind.
    pub how: DeviceHow,
    /// Whether it works here.
    pub usable: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What to do about that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Which kinds of local device work on this host.
///
/// # Errors
/// The disk program cannot be run.
pub fn local_device_kinds() -> Result<Vec<LocalDeviceKind>> {
    ask("--print-devices")
}

/// Takes away the local devices of dead processes, and with `waiting` those that wait for theirs to come back: their
/// users get errors. Answers what was taken away.
///
/// # Errors
/// The disk program cannot be run, or what it says.
pub fn clean_local_devices(waiting: bool) -> Result<Vec<PathBuf>> {
    ask(if waiting { "--clean-devices=waiting" } else { "--clean-devices=dead" })
}

/// Runs the disk program, which prints JSON.
fn ask<T: DeserializeOwned>(option: impl AsRef<OsStr>) -> Result<T> {
    let program = disk_program();
    let output = Command::new(&program)
        .arg(option)
        .output()
        .map_err(|error| ControlError::io(format_args!("cannot run {}", program.display()), &error))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let errno = output.status.code().filter(|code| *code > 0).map_or(Errno::EIO, Errno::new);
        return Err(ControlError::new(errno, format!("{}: {}", program.display(), said.trim())));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| {
        ControlError::new(Errno::EPROTO, format!("{} printed something else: {error}", program.display()))
    })
}

/// Prints what [`ask`] reads.
///
/// # Errors
/// Standard output is closed or full.
pub fn print_local_devices(value: &impl Serialize) -> Result<()> {
    let written = serde_json::to_writer(std::io::stdout(), value);
    written.map_err(|error| ControlError::io("printing what was found", &error.into()))
}
