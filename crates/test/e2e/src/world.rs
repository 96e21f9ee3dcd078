//! A daemon with all that it has started, which ends with the test, whatever became of it; and stories told to it by
//! programs of Python's (`tests/python`).

use std::process::Command;
use std::time::Duration;

use crate::disk::text;
use crate::left_behind::{end_left_behind, left_behind};
use crate::process::{poll_until, run_within};
use crate::scratch::Scratch;
use crate::tools::{our, repository};
use crate::toolstack::{Daemon, DaemonOptions, python_xenapi};

/// What one story may take.
const STORY_LIMIT: Duration = Duration::from_secs(150);

/// A daemon on a directory of its own.
#[derive(Debug)]
pub struct World {
    daemon: Option<Daemon>,
    /// Where it keeps everything.
    pub scratch: Scratch,
}

impl World {
    /// Starts one with HTTPS, a default SR of files and the account `alice` of a pool administrator.
    #[track_caller]
    pub fn new() -> Self {
        Self::with(|options| options)
    }

    /// The same, started with more.
    #[track_caller]
    pub fn with(change: impl FnOnce(DaemonOptions) -> DaemonOptions) -> Self {
        let scratch = Scratch::on_disk();
        let options = change(DaemonOptions::new(&scratch).tls().default_sr());
        let world = Self { daemon: Some(options.start()), scratch };
        world.daemon().add_user("alice", "pool-admin", "correct horse");
        world
    }

    /// The daemon.
    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs until the end")
    }

    /// Whether the daemon has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.daemon.as_mut().is_none_or(|daemon| !daemon.process.is_running())
    }

    /// Kills the daemon, if it runs still, and starts another one on the same state.
    #[track_caller]
    pub fn kill_and_restart(&mut self) {
        self.daemon = self.daemon.take().map(Daemon::kill_and_restart);
    }

    /// Kills the daemon, if it runs still, and starts another one on the same state in another way.
    #[track_caller]
    pub fn restart_with(&mut self, change: impl FnOnce(DaemonOptions) -> DaemonOptions) {
        self.daemon = self.daemon.take().map(|mut daemon| {
            daemon.process.kill();
            change(daemon.options.clone()).start()
        });
    }

    /// Ends the daemon in order, and starts another one on the same state.
    #[track_caller]
    pub fn stop_and_restart(&mut self, limit: Duration) {
        self.daemon = self.daemon.take().map(|mut daemon| {
            daemon.process.stop(limit);
            daemon.options.start()
        });
    }

    /// Runs a program of `tests/python`, which must end with the word `done`; answers what it printed.
    ///
    /// Without Python's `XenAPI` it can still be told to speak JSON-RPC.
    #[track_caller]
    pub fn story(&self, program: &str, args: &[&str]) -> String {
        let daemon = self.daemon();
        let mut command = Command::new("python3");
        command.arg(repository().join("crates/test/e2e/tests/python").join(program)).args(args);
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("TAPIO_SOCKET", &daemon.socket);
        command.env("TAPIO_HTTP", &daemon.http);
        command.env("TAPIO_HTTPS", daemon.https.as_deref().expect("HTTPS is served"));
        if let Some(wheel) = python_xenapi() {
            command.env("XENAPI_WHEEL", wheel);
        }
        let said = run_within(&mut command, STORY_LIMIT).ok();
        assert_eq!(said.lines().last(), Some("done"), "{said}");
        said
    }

    /// `tapio xe` against it, without settings of the user that runs the test.
    pub fn xe(&self) -> Command {
        let mut command = Command::new(our("tapio"));
        command.arg("xe").env("TAPIO_SOCKET", &self.daemon().socket).env("HOME", self.scratch.path());
        for name in ["XDG_CONFIG_HOME", "XE_EXTRA_ARGS", "XE_PASSWORD"] {
            command.env_remove(name);
        }
        command
    }

    /// Ends it: no process of a disk or a guest may be left.
    #[track_caller]
    pub fn finish(mut self) {
        let left = poll_until(Duration::from_secs(60), || {
            let left = left_behind(self.scratch.path(), self.daemon().process.pid());
            left.is_empty().then_some(())
        });
        let pids = left_behind(self.scratch.path(), self.daemon().process.pid());
        assert!(left.is_some(), "processes {pids:?} are left");
        self.daemon.take().expect("it runs until the end").stop();
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let daemon = self.daemon.take().map(|daemon| daemon.process.pid());
        end_left_behind(self.scratch.path(), daemon.unwrap_or(0));
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
        let below = text(self.scratch.path());
        let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        for place in places.filter(|place| place.starts_with(below)) {
            let _ = run_within(Command::new("umount").arg("-l").arg(place), STORY_LIMIT);
        }
    }
}
