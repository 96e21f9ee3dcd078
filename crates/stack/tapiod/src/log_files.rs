//! Logs in files that the daemon rotates. One is its own, if it is set, with the lines of its storage workers. The
//! other is that of disk processes, which go on without the daemon: they send their lines to a socket, on hosts that
//! have no journal.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_log::{Log, Rotated};

use crate::dirs::{OURS, PASSED, make_dir};
use crate::settings::Settings;

/// What the last lines of the log may take.
const SAID_WITHIN: Duration = Duration::from_secs(1);

/// Log of disk processes.
const DISKS: &str = "tapio-disk.log";

/// Where disk processes send their lines; none where the journal has them.
pub fn disk_socket(settings: &Settings) -> Option<PathBuf> {
    (!tapio_log::has_journal()).then(|| settings.run_dir.join("log"))
}

fn in_file(path: &Path, settings: &Settings) -> Result<Log, String> {
    let log = Rotated::open(path, settings.rotation).and_then(Log::in_file);
    log.map_err(|error| format!("{}: {error}", path.display()))
}

/// The daemon's log is the file that is set, if one is.
///
/// # Errors
/// It cannot be written.
pub fn begin_file(settings: &Settings) -> Result<(), String> {
    let Some(path) = &settings.log_file else { return Ok(()) };
    if let Some(dir) = path.parent() {
        make_dir(dir, OURS)?;
    }
    let log = in_file(path, settings)?;
    tapio_log::capture(log).map_err(|error: io::Error| format!("{}: {error}", path.display()))
}

/// Takes the lines of disk processes on a host that has no journal. A log that cannot be made stops no daemon.
pub fn receive(settings: &Settings) {
    let Some(socket) = disk_socket(settings) else { return };
    let begun = make_dir(settings.logs(), PASSED).and_then(|()| {
        let log = in_file(&settings.logs().join(DISKS), settings)?;
        tapio_log::receive(&socket, log).map_err(|error| format!("{}: {error}", socket.display()))
    });
    if let Err(why) = begun {
        tracing::warn!("disk processes say what they have to say to the system's log: {why}");
    }
}

/// Waits until the last lines are written.
pub fn flush() {
    tapio_log::flush_output(SAID_WITHIN);
}
