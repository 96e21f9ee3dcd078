//! Finding disk processes and what they serve.

use std::fs;
use std::io;

use serde::Serialize;
use tapio_sys::process::exists;

use crate::client::Client;
use crate::paths::RunDir;
use crate::{ControlError, Errno, Result};

/// A process that has a control socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The number in the socket's name.
    pub id: i32,
    /// Whether a process answers there.
    pub state: ProcessState,
}

/// Whether a process answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// It does, and gives this number.
    Live {
        /// Process number.
        pid: i32,
    },
    /// No process listens on the socket: its process died without removing it.
    Stale,
    /// A process listens and does not answer as expected.
    Silent(ControlError),
}

/// One line of `tap-ctl list`. A process without disks has only a number, an unattached minor number has only
/// that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ListRow {
    /// Process.
    pub pid: Option<i32>,
    /// Minor number.
    pub minor: Option<i32>,
    /// State bits.
    pub state: Option<i32>,
    /// Image type.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Image path.
    pub path: Option<String>,
}

/// All processes with a control socket, by number.
///
/// # Errors
/// The directory exists and cannot be listed.
pub fn processes(run: &RunDir) -> Result<Vec<Process>> {
    let mut ids = socket_ids(run)?;
    ids.sort_unstable();
    Ok(ids.into_iter().filter_map(|id| Some(Process { id, state: state_of(run, id)? })).collect())
}

fn socket_ids(run: &RunDir) -> Result<Vec<i32>> {
    let unlisted =
        |error: &io::Error| ControlError::io(format_args!("cannot list {}", run.path().display()), error);
    let entries = match fs::read_dir(run.path()) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(unlisted(&error)),
    };
    let mut ids = Vec::new();
    for entry in entries {
        let name = entry.map_err(|error| unlisted(&error))?.file_name();
        ids.extend(name.to_str().filter(|name| name.starts_with("ctl")).and_then(RunDir::pid_in));
    }
    Ok(ids)
}

/// `None` when the socket vanished meanwhile.
fn state_of(run: &RunDir, id: i32) -> Option<ProcessState> {
    match Client::new(run, id).pid() {
        Ok(pid) => Some(ProcessState::Live { pid }),
        Err(error) if error.errno == Errno::ENOENT => None,
        Err(error) if error.errno == Errno::ECONNREFUSED => Some(ProcessState::Stale),
        Err(error) => Some(ProcessState::Silent(error)),
    }
}

/// Removes the sockets that dead processes left; tells their numbers.
///
/// # Errors
/// The directory cannot be listed.
pub fn remove_stale_sockets(run: &RunDir) -> Result<Vec<i32>> {
    let mut removed = Vec::new();
    for id in socket_ids(run)? {
        // A process binds its socket under its own number only, so a number without a process cannot come back to
        // life between these two steps unless it is a new process, which replaces the file itself.
        if !u32::try_from(id).is_ok_and(exists)
            && state_of(run, id) == Some(ProcessState::Stale)
            && fs::remove_file(run.socket(id)).is_ok()
        {
            removed.push(id);
        }
    }
    Ok(removed)
}

/// All disks of all processes, processes without disks, and minor numbers that are not attached.
///
/// # Errors
/// A directory exists and cannot be listed. Processes that do not answer are left out.
pub fn list(run: &RunDir) -> Result<Vec<ListRow>> {
    let mut free = run.minors().allocated()?;
    let mut rows = Vec::new();
    for process in processes(run)? {
        let ProcessState::Live { pid } = process.state else { continue };
        let disks = disks_of(run, process.id, pid);
        free.retain(|minor| !disks.iter().any(|disk| disk.minor == Some(i32::from(*minor))));
        rows.extend(disks);
    }
    rows.extend(free.into_iter().map(|minor| ListRow { minor: Some(minor.into()), ..ListRow::default() }));
    Ok(rows)
}

/// The disks of one process; nothing when it does not answer.
///
/// # Errors
/// None at present: a process that is not there has no disks.
pub fn list_process(run: &RunDir, id: i32) -> Result<Vec<ListRow>> {
    match state_of(run, id) {
        Some(ProcessState::Live { pid }) => Ok(disks_of(run, id, pid)),
        _ => Ok(Vec::new()),
    }
}

fn disks_of(run: &RunDir, id: i32, pid: i32) -> Vec<ListRow> {
    let mut rows: Vec<ListRow> = Client::new(run, id)
        .list()
        .unwrap_or_default()
        .into_iter()
        .map(|disk| {
            let image = disk.path.split_once(':');
            ListRow {
                pid: Some(pid),
                minor: Some(disk.minor),
                state: Some(disk.state),
                kind: image.map(|(kind, _)| kind.to_owned()),
                path: image.map(|(_, path)| path.to_owned()),
            }
        })
        .collect();
    rows.sort_by_key(|row| row.minor);
    if rows.is_empty() {
        rows.push(ListRow { pid: Some(pid), ..ListRow::default() });
    }
    rows
}
