//! tapback, which connects guests to disk processes: started if no process serves the back end, and found again
//! by the lock that it holds as long as it does.

use std::fs::{self, OpenOptions, TryLockError};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_types::ApiError;

use super::device::BACKEND;
use crate::poll::poll;
use crate::settings::Settings;

/// How long it may take to begin.
const START_LIMIT: Duration = Duration::from_secs(10);

/// One start at a time.
static STARTING: Mutex<()> = Mutex::new(());

fn lock_file(settings: &Settings) -> PathBuf {
    settings.xen.control_dir.join(format!("tapback-{BACKEND}.lock"))
}

/// Whether a process holds the lock.
fn is_served(settings: &Settings) -> io::Result<bool> {
    let file = match OpenOptions::new().read(true).open(lock_file(settings)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    // What is locked here is unlocked when the file is closed.
    match file.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Makes sure that a tapback process serves the disks of guests.
///
/// # Errors
/// The program is not there, ends at once, or does not begin.
pub(super) fn ensure(settings: &Settings) -> Result<(), ApiError> {
    let Some(program) = &settings.xen.tapback else { return Ok(()) };
    let told = |what: String| ApiError::internal(format!("driver xen: {what}"));
    let path = lock_file(settings);
    let _starting = STARTING.lock();
    let served = || is_served(settings).map_err(|error| told(format!("{}: {error}", path.display())));
    if served()? {
        return Ok(());
    }
    let log = settings.log_dir.join("tapback.log");
    let opened = fs::create_dir_all(&settings.log_dir)
        .and_then(|()| OpenOptions::new().append(true).create(true).open(&log))
        .and_then(|out| Ok((out.try_clone()?, out)));
    let (out, err) = opened.map_err(|error| told(format!("{}: {error}", log.display())))?;
    let has_journal = tapio_log::is_journal();
    let mut command = Command::new(program);
    command.args(["--backend-name", BACKEND]);
    if !has_journal {
        // It rotates the file itself, and stays longer than this daemon.
        let rotation = settings.rotation;
        command.arg("--log-file").arg(&log).arg(format!("--log-size={}", rotation.len_max));
        command.arg(format!("--log-kept={}", rotation.kept));
    }
    command.env("TAPIO_RUN_DIR", &settings.xen.control_dir);
    if let Some(store) = &settings.xen.store {
        command.env("XENSTORED_PATH", store);
    }
    // It stays when this daemon ends: guests go on.
    command.process_group(0).stdin(Stdio::null());
    match has_journal {
        // The journal keeps the stream when this daemon has ended.
        true => command.stdout(Stdio::inherit()).stderr(Stdio::inherit()),
        false => command.stdout(out).stderr(err),
    };
    let mut child = command.spawn().map_err(|error| {
        told(format!(
            "no program serves the disks of guests ({}), and {} does not start: {error}; install it, or set 'tapback' \
             to its path, or to 'none' if another one serves them",
            path.display(),
            program.display()
        ))
    })?;
    let until = Instant::now() + START_LIMIT;
    let pid = child.id().to_string();
    // Asking for the lock while it takes it would be in its way: it writes its number there when it has it.
    let has_begun = || fs::read_to_string(&path).is_ok_and(|written| written.trim() == pid);
    loop {
        if has_begun() && served()? {
            // This thread collects its exit status, as long as this daemon is its parent.
            let waiting = std::thread::Builder::new().name("tapback".into());
            let _ = waiting.stack_size(64 << 10).spawn(move || child.wait());
            return Ok(());
        }
        let why = match child.try_wait() {
            Ok(Some(status)) => format!("it ended with {status}"),
            _ if Instant::now() >= until => {
                let _ = child.kill();
                let _ = child.wait();
                format!("it has not begun to serve within {START_LIMIT:?}")
            }
            _ => {
                poll(&mut [], Instant::now() + Duration::from_millis(10));
                continue;
            }
        };
        let said = match has_journal {
            true => "see the daemon's journal".to_owned(),
            false => crate::console::last_lines(&log, 4).replace('\n', " | "),
        };
        return Err(told(format!("{}: {why}; it said: {said}", program.display())));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A program that does `body`, and counts its starts.
    fn fake(dir: &Path, body: &str) -> PathBuf {
        let program = dir.join("tapback");
        let script = format!("#!/bin/sh\necho start >>{}/starts\n{body}\n", dir.display());
        tapio_fixtures::program(&program, script.as_bytes());
        program
    }

    fn settings(dir: &Path, body: &str) -> Settings {
        let mut settings = Settings::new(&dir.join("run"));
        settings.xen.tapback = Some(fake(dir, body));
        settings.xen.control_dir = dir.to_path_buf();
        settings
    }

    #[test]
    fn it_is_started_once_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        // It locks the file as tapback does, until the test's directory is gone.
        let body = "lock=$TAPIO_RUN_DIR/tapback-vbd3.lock; exec 9>>$lock; flock 9; echo $$ >$lock
            while [ -e $lock ]; do sleep 0.1; done";
        let settings = settings(dir.path(), body);
        ensure(&settings).unwrap();
        assert!(is_served(&settings).unwrap());
        ensure(&settings).unwrap();
        let starts = fs::read_to_string(dir.path().join("starts")).unwrap();
        assert_eq!(starts.lines().count(), 1, "it is not started beside itself");
    }

    #[test]
    fn one_that_does_not_serve_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = settings(dir.path(), "echo no xenstore here >&2; exit 3");
        let error = ensure(&settings).unwrap_err().to_string();
        assert!(error.contains("no xenstore here") && error.contains("exit status: 3"), "{error}");
        settings.xen.tapback = Some("/no/such/tapback".into());
        let error = ensure(&settings).unwrap_err().to_string();
        assert!(error.contains("/no/such/tapback") && error.contains("'none'"), "{error}");
        settings.xen.tapback = None;
        ensure(&settings).expect("another process serves");
    }
}
