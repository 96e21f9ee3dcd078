//! Child processes that cannot outlive a test or its deadline.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, kill_process, kill_process_group, set_parent_process_death_signal, test_kill_process,
};
use tapio_fixtures::stopped::until_stopped;

use crate::quiet_time::QuietTime;

/// How long an ordinary tool may take. Everything here is local and small; the margin is for a busy host.
pub const TOOL_LIMIT: Duration = Duration::from_secs(60);

/// Between two looks at something that has no event to wait for.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Asks the kernel to kill the child when the thread that started it ends, however it ends.
fn die_with_parent(command: &mut Command) {
    // SAFETY: prctl(PR_SET_PDEATHSIG) is async-signal-safe, takes no pointers, and touches only the new process.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
}

/// Waits for `ready` to answer `Some`, at most `limit` of quiet time; `None` when the time is over.
pub fn poll_until<T>(limit: Duration, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
    let mut waited = QuietTime::start();
    loop {
        if let Some(value) = ready() {
            return Some(value);
        }
        if waited.elapsed() >= limit {
            return None;
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

/// A program that ran to its end.
#[derive(Debug)]
pub struct Finished {
    /// What was run, for messages.
    pub what: String,
    /// How it ended; killed by signal 9 when the deadline passed.
    pub status: ExitStatus,
    /// Everything it wrote to standard output.
    pub stdout: String,
    /// Everything it wrote to standard error.
    pub stderr: String,
    /// From start to end.
    pub took: Duration,
}

impl Finished {
    /// Standard output of a program that must have succeeded.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.status.success(), "{self}");
        self.stdout
    }

    /// Standard error of a program that must have failed by itself: not by a signal, not by the deadline, not by a
    /// panic (exit code 101).
    #[track_caller]
    pub fn fails(self) -> String {
        let code = self.status.code();
        assert!(code.is_some_and(|code| code != 0 && code != 101), "expected an ordinary failure: {self}");
        self.stderr
    }
}

impl std::fmt::Display for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} ended with {} after {:.1} s\n--- stdout\n{}\n--- stderr\n{}",
            self.what,
            self.status,
            self.took.as_secs_f64(),
            self.stdout,
            self.stderr
        )
    }
}

/// Runs a command to its end, or kills it when `limit` is over.
#[track_caller]
pub fn run_within(command: &mut Command, limit: Duration) -> Finished {
    run_with_input(command, None, limit)
}

/// [`run_within`] with the limit of an ordinary tool.
#[track_caller]
pub fn run(command: &mut Command) -> Finished {
    run_within(command, TOOL_LIMIT)
}

/// [`run_within`] with bytes on standard input.
#[track_caller]
pub fn run_with_input(command: &mut Command, input: Option<File>, limit: Duration) -> Finished {
    let what = format!("{command:?}");
    let started = Instant::now();
    die_with_parent(command);
    command
        .stdin(input.map_or_else(Stdio::null, Stdio::from))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {what}: {error}"));
    let collect = |mut from: Box<dyn Read + Send>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            // A reader that fails has nothing more to give; what it gave is still worth showing.
            let _ = from.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let stdout = collect(Box::new(child.stdout.take().expect("stdout was piped")));
    let stderr = collect(Box::new(child.stderr.take().expect("stderr was piped")));
    let status = wait_or_kill(&mut child, limit);
    // A daemon started by the command may hold the pipes open for ever; by convention ours do not.
    Finished {
        what,
        status,
        stdout: stdout.join().expect("the reader of stdout does not panic"),
        stderr: stderr.join().expect("the reader of stderr does not panic"),
        took: started.elapsed(),
    }
}

fn wait_or_kill(child: &mut Child, limit: Duration) -> ExitStatus {
    let look = |child: &mut Child| child.try_wait().expect("a child of ours can be waited for");
    if let Some(status) = poll_until(limit, || look(child)) {
        return status;
    }
    kill_group(child.id());
    child.wait().expect("a killed child can be waited for")
}

/// Kills the process group that a child of ours leads: User-mode Linux and tools with helpers have several.
fn kill_group(leader: u32) {
    let Some(group) = i32::try_from(leader).ok().and_then(Pid::from_raw) else { return };
    // The group is one that this process made with `process_group(0)` and whose leader has not been waited for yet, so
    // its number cannot have been given to another group.
    let _ = kill_process_group(group, Signal::KILL);
}

/// Sends a signal, or with 0 asks whether one could be sent. A process that is stopped stands when this returns.
///
/// # Errors
/// There is no such process; it is another user's.
pub fn signal(pid: i32, signal: i32) -> std::io::Result<()> {
    let pid = Pid::from_raw(pid).filter(|_| pid > 0).ok_or(std::io::ErrorKind::NotFound)?;
    if signal == 0 {
        return Ok(test_kill_process(pid)?);
    }
    let signal = Signal::from_named_raw(signal).ok_or(std::io::ErrorKind::InvalidInput)?;
    kill_process(pid, signal)?;
    if signal == Signal::STOP {
        until_stopped(pid.as_raw_pid().cast_unsigned());
    }
    Ok(())
}

/// A process that runs beside the test. Dropping it kills its group and waits.
#[derive(Debug)]
pub struct Running {
    what: String,
    child: Child,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Running {
    /// Starts a command whose standard output and error go to the file `log`.
    #[track_caller]
    pub fn start(command: &mut Command, log: &Path) -> Self {
        let file =
            File::create(log).unwrap_or_else(|error| panic!("cannot create {}: {error}", log.display()));
        let copy = file.try_clone().expect("a file can be duplicated");
        command.stdout(file).stderr(copy);
        Self::start_raw(command, log)
    }

    /// Starts a command whose output the caller has already sent somewhere; `log` is what to show when it fails.
    #[track_caller]
    pub fn start_raw(command: &mut Command, log: &Path) -> Self {
        let what = format!("{command:?}");
        die_with_parent(command);
        let child = command
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {what}: {error}"));
        Self { what, child, log: log.to_path_buf(), ended: None }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The file with its output.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Everything written so far.
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map_or_else(
            |error| format!("(cannot read {}: {error})", self.log.display()),
            |bytes| String::from_utf8_lossy(&bytes).into_owned(),
        )
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("a child of ours can be waited for");
        }
        self.ended
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.ended().is_none()
    }

    /// Waits for `ready` while the process lives; panics with its output when it ends or the time is over.
    #[track_caller]
    pub fn wait_for<T>(&mut self, what: &str, limit: Duration, mut ready: impl FnMut() -> Option<T>) -> T {
        let outcome = poll_until(limit, || {
            if let Some(value) = ready() {
                return Some(Ok(value));
            }
            self.ended().map(Err)
        });
        match outcome {
            Some(Ok(value)) => value,
            Some(Err(status)) => {
                panic!("{} ended with {status} before {what}\n--- output\n{}", self.what, self.log())
            }
            None => panic!("{}: no {what} within {limit:?}\n--- output\n{}", self.what, self.log()),
        }
    }

    /// Waits for the end.
    #[track_caller]
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        match poll_until(limit, || self.ended()) {
            Some(status) => status,
            None => panic!("{} still runs after {limit:?}\n--- output\n{}", self.what, self.log()),
        }
    }

    /// Sends a signal. After SIGSTOP no thread of the process runs any more.
    pub fn signal(&mut self, signal: i32) {
        if self.ended().is_some() {
            return;
        }
        let pid = i32::try_from(self.pid()).expect("process ids are positive i32");
        // The child has not been waited for, so the id is still its own.
        self::signal(pid, signal).unwrap_or_else(|error| panic!("cannot signal {}: {error}", self.what));
    }

    /// Asks it to end (SIGTERM) and waits; panics when it does not, or dies of a signal other than that one.
    #[track_caller]
    pub fn stop(&mut self, limit: Duration) {
        self.signal(libc::SIGTERM);
        let status = self.wait(limit);
        let fine = status.success() || status.signal() == Some(libc::SIGTERM);
        assert!(fine, "{} ended with {status} when asked to stop\n--- output\n{}", self.what, self.log());
    }

    /// Kills it at once, as a crash does.
    pub fn kill(&mut self) {
        if self.ended().is_none() {
            kill_group(self.pid());
            self.ended = Some(self.child.wait().expect("a killed child can be waited for"));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            eprintln!("--- output of {}\n{}", self.what, self.log());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_hangs_is_killed_at_its_deadline() {
        let finished = run_within(Command::new("sleep").arg("60"), Duration::from_millis(200));
        assert_eq!(finished.status.signal(), Some(libc::SIGKILL));
        assert!(finished.took < Duration::from_secs(50), "{:?}", finished.took);
    }

    #[test]
    fn output_and_exit_code_are_kept_apart() {
        let finished = run(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]));
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\n", "err\n"));
        assert_eq!(finished.status.code(), Some(3));
        assert_eq!(finished.fails(), "err\n");
    }

    #[test]
    #[should_panic(expected = "before the moon")]
    fn waiting_for_a_process_that_has_ended_fails_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut running = Running::start(&mut Command::new("true"), &dir.path().join("log"));
        running.wait_for("the moon", Duration::from_secs(60), || None::<()>);
    }

    #[test]
    fn a_dropped_process_is_gone_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 300 & echo $!; wait"]);
        let mut running = Running::start(&mut shell, &dir.path().join("log"));
        let log = dir.path().join("log");
        let inner = running.wait_for("the child's id", TOOL_LIMIT, || {
            let text = std::fs::read_to_string(&log).ok()?;
            text.strip_suffix('\n')?.parse::<u32>().ok()
        });
        drop(running);
        let gone = poll_until(TOOL_LIMIT, || {
            // A killed orphan stays as a zombie where no init process reaps; either way it runs no longer.
            let stat = std::fs::read_to_string(format!("/proc/{inner}/stat")).unwrap_or_default();
            (stat.is_empty() || stat.contains(") Z ")).then_some(())
        });
        assert!(gone.is_some(), "process {inner} survived");
    }
}
