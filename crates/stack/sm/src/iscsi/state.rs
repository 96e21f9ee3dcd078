//! Which SRs of this host use a target: a session is ended with its last user, and only if Tapio began it.
//!
//! ```text
//! RUN_DIR/iscsi/NAME/lock           held by the process that logs in or out
//! RUN_DIR/iscsi/NAME/held/HOLDER    an SR, or a look of the process whose number the name has
//! RUN_DIR/iscsi/NAME/sessions       "number portal" of those that Tapio uses, to find them again without a search
//! RUN_DIR/iscsi/NAME/began          portals of those that Tapio began
//! RUN_DIR/iscsi/NAME/before-PORTAL  the record of another program that was there before
//! ```
//!
//! The directory is gone after a reboot, as the sessions are.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tapio_types::ApiError;

use super::name::Portal;
use super::session::Session;
use crate::errors;
use crate::traits::Ctx;

/// A login of another process, with its retries.
const LOCK_TIMEOUT: Duration = Duration::from_secs(240);
const TURN: Duration = Duration::from_millis(5);
/// Begins the names of holders that are gone with their process.
const LOOK: &str = "look-";

/// What Tapio knows of a target, locked.
#[derive(Debug)]
pub(super) struct State {
    directory: PathBuf,
    lock: File,
}

impl Drop for State {
    fn drop(&mut self) {
        // A child that was forked meanwhile may hold a copy of the descriptor.
        let _ = self.lock.unlock();
    }
}

/// A holder that goes with this process.
pub(super) fn look() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{LOOK}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

impl State {
    /// Takes the lock of a target; waits for its holders until a deadline, or until the operation, if there is one, is
    /// cancelled.
    ///
    /// # Errors
    /// 37, `TASK_CANCELLED`.
    pub(super) fn lock(ctx: Option<&dyn Ctx>, run_dir: &Path, name: &str) -> Result<Self, ApiError> {
        let directory = run_dir.join("iscsi").join(name);
        let failed = |error: io::Error| errors::io(37, "cannot lock the target's", &directory, &error);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory.join("held"));
        let lock = made
            .and_then(|()| {
                let path = directory.join("lock");
                OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)
            })
            .map_err(failed)?;
        let until = Instant::now() + LOCK_TIMEOUT;
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { directory, lock }),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
            if ctx.is_some_and(Ctx::is_cancelled) {
                return Err(errors::cancelled());
            }
            if Instant::now() > until {
                let text = format!("another process has worked on {name} for {} s", LOCK_TIMEOUT.as_secs());
                return Err(errors::fail(37, text));
            }
            std::thread::sleep(TURN);
        }
    }

    fn failed(&self) -> impl Fn(io::Error) -> ApiError + '_ {
        |error| errors::io(37, "cannot write to", &self.directory, &error)
    }

    pub(super) fn add_holder(&self, holder: &str) -> Result<(), ApiError> {
        File::create(self.directory.join("held").join(holder)).map(drop).map_err(self.failed())
    }

    /// Removes a holder, and those whose processes are gone.
    pub(super) fn remove_holder(&self, holder: &str) {
        let _ = fs::remove_file(self.directory.join("held").join(holder));
        for name in self.holders() {
            let process = name.strip_prefix(LOOK).and_then(|rest| rest.split('-').next());
            if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
                let _ = fs::remove_file(self.directory.join("held").join(name));
            }
        }
    }

    pub(super) fn holders(&self) -> Vec<String> {
        let entries = fs::read_dir(self.directory.join("held")).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// Numbers of the sessions that were used last.
    pub(super) fn sessions(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.directory.join("sessions")).unwrap_or_default();
        text.lines().filter_map(|line| line.split(' ').next()?.parse().ok()).collect()
    }

    pub(super) fn note_sessions(&self, sessions: &[Session]) -> Result<(), ApiError> {
        let lines = sessions.iter().map(|session| format!("{} {}\n", session.id, session.node.portal));
        fs::write(self.directory.join("sessions"), lines.collect::<String>()).map_err(self.failed())
    }

    /// Portals of the sessions that Tapio began, or is about to begin.
    pub(super) fn began(&self) -> Vec<Portal> {
        let text = fs::read_to_string(self.directory.join("began")).unwrap_or_default();
        text.lines().filter_map(Portal::parse).collect()
    }

    pub(super) fn note_began(&self, portals: &[Portal]) -> Result<(), ApiError> {
        let lines = portals.iter().map(|portal| format!("{portal}\n"));
        fs::write(self.directory.join("began"), lines.collect::<String>()).map_err(self.failed())
    }

    fn before(&self, portal: Portal) -> PathBuf {
        self.directory.join(format!("before-{portal}"))
    }

    /// Keeps a record of another program, which may hold a password.
    pub(super) fn keep_before(&self, portal: Portal, text: &str) -> Result<(), ApiError> {
        let opened =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(self.before(portal));
        opened.and_then(|mut file| file.write_all(text.as_bytes())).map_err(self.failed())
    }

    pub(super) fn take_before(&self, portal: Portal) -> Option<String> {
        let text = fs::read_to_string(self.before(portal)).ok();
        let _ = fs::remove_file(self.before(portal));
        text
    }

    /// Nothing of the target is used any more.
    pub(super) fn clear(&self) {
        for name in ["sessions", "began"] {
            let _ = fs::remove_file(self.directory.join(name));
        }
    }
}
