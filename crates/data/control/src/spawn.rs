//! Starting a disk process and learning its number.
//!
//! The program puts itself into the background and prints the path of its control socket on standard output; its
//! parent then ends with status 0. A foreign tapdisk does the same. With `--detach` it is one process instead of two, a
//! child of its starter.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use tapio_sys::poll::PollFlags;

use crate::paths::RunDir;
use crate::socket::{Deadline, receive, wait};
use crate::{ControlError, Errno, Result};

/// Attempts when a debug signal meets a process that is just starting.
const ATTEMPTS: u32 = 5;
/// Longest output that is looked at.
const OUTPUT_MAX: usize = 16 * 1024;

/// How to start it.
#[derive(Clone, Debug)]
pub struct SpawnOptions {
    /// The program.
    pub program: PathBuf,
    /// Its arguments; a foreign tapdisk takes none.
    pub arguments: Vec<String>,
    /// Added to its environment.
    pub environment: Vec<(String, String)>,
    /// How long it may take.
    pub timeout: Duration,
    /// It stays a child of the caller, which must wait for its end: a start costs one process instead of two.
    pub is_child: bool,
}

impl SpawnOptions {
    /// The program without arguments, within half a minute.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            timeout: Duration::from_secs(30),
            is_child: false,
        }
    }
}

/// The disk program: `TAPIO_DISK`, else `tapio-disk` beside this program, else the one in the search path.
pub fn disk_program() -> PathBuf {
    if let Some(program) = std::env::var_os("TAPIO_DISK").filter(|program| !program.is_empty()) {
        return program.into();
    }
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("tapio-disk")));
    match beside {
        Some(beside) if beside.exists() => beside,
        _ => Path::new("tapio-disk").to_path_buf(),
    }
}

/// Starts a disk process in the background; answers its number.
///
/// # Errors
/// The program cannot be started, fails, or does not say its socket in time.
pub fn spawn(options: &SpawnOptions) -> Result<i32> {
    let mut attempt = 1;
    loop {
        let (status, output) = run(options)?;
        if status.success() {
            return printed_pid(&output).ok_or_else(|| {
                failed(options, Errno::EPROTO, "it did not print its control socket", &output)
            });
        }
        match (status.signal(), status.code()) {
            (Some(libc::SIGUSR1), _) if attempt < ATTEMPTS => attempt += 1,
            (Some(signal), _) => {
                return Err(failed(options, Errno::EINTR, &format!("signal {signal} ended it"), &output));
            }
            (None, code) => {
                let errno = Errno::new(code.unwrap_or(libc::EIO));
                return Err(failed(options, errno, &errno.text(), &output));
            }
        }
    }
}

/// The number of the process in the line that names its control socket. Words about what it found when it started may
/// come before, by way of standard error.
fn printed_pid(output: &str) -> Option<i32> {
    output.lines().find_map(RunDir::pid_in)
}

fn failed(options: &SpawnOptions, errno: Errno, why: &str, output: &str) -> ControlError {
    let lines: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let said = lines.join("; ");
    let said = if said.is_empty() { String::new() } else { format!(" (it said: {said})") };
    ControlError::new(errno, format!("{} did not start: {why}{said}", options.program.display()))
}

fn run(options: &SpawnOptions) -> Result<(ExitStatus, String)> {
    let cannot = |error: &io::Error| {
        ControlError::io(format_args!("cannot start {}", options.program.display()), error)
            .next("set TAPIO_DISK to the disk program")
    };
    // A socket pair rather than a pipe, because reading it has a deadline.
    let (ours, theirs) = UnixStream::pair().map_err(|error| cannot(&error))?;
    let theirs: std::os::fd::OwnedFd = theirs.into();
    let errors = theirs.try_clone().map_err(|error| cannot(&error))?;
    let mut command = Command::new::<&OsStr>(options.program.as_ref());
    command.envs(options.environment.iter().map(|(name, value)| (name, value)));
    command
        .args(options.is_child.then_some("--detach"))
        .args(&options.arguments)
        .stdin(Stdio::null())
        .stdout(theirs)
        .stderr(errors);
    let mut child = command.spawn().map_err(|error| cannot(&error))?;
    // The builder holds our copies of the far end, and the end of the output is what tells that all was said.
    drop(command);
    let deadline = Deadline::after(Some(options.timeout));
    let output = read_start(&ours, deadline);
    let Ok(output) = output else {
        // It is our own child and has not been waited for, so the number is still its own.
        let _ = child.kill();
        let _ = child.wait();
        return Err(failed(options, Errno::ETIMEDOUT, &format!("no word in {:?}", options.timeout), ""));
    };
    if options.is_child && is_complete(output.as_bytes()) {
        return Ok((ExitStatus::default(), output));
    }
    let status = child.wait().map_err(|error| cannot(&error))?;
    Ok((status, output))
}

/// Whether what was read holds the whole line that names the control socket.
fn is_complete(output: &[u8]) -> bool {
    let end = output.iter().rposition(|&byte| byte == b'\n');
    end.is_some_and(|end| printed_pid(&String::from_utf8_lossy(&output[..end])).is_some())
}

/// All lines up to the one that names the control socket, or all there is when the other end closes.
fn read_start(from: &UnixStream, deadline: Deadline) -> io::Result<String> {
    let mut output = Vec::new();
    while output.len() < OUTPUT_MAX && !is_complete(&output) {
        if wait([(from.as_fd(), PollFlags::IN)], deadline)? == [false] {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut bytes = [0; 1024];
        match receive(from, &mut bytes, &mut Vec::new()) {
            Ok(0) => break,
            Ok(len) => output.extend_from_slice(&bytes[..len]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            // The other end was closed with something of ours unread: all there is was read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break,
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&output).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(dir: &Path, text: &str) -> SpawnOptions {
        let program = dir.join("program");
        // Written by another process. A descriptor of this one may for a moment be that of a process which another
        // test starts as well, and a file that is open for writing is not executed (ETXTBSY).
        let mut write = Command::new("sh");
        write.args(["-c", "printf '%s' \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(&program);
        let written = write.arg(format!("#!/bin/sh\n{text}\n")).status().expect("a shell");
        assert!(written.success(), "{written}");
        SpawnOptions { timeout: Duration::from_secs(60), ..SpawnOptions::new(program) }
    }

    #[test]
    fn the_printed_socket_names_the_process() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let options = script(dir.path(), "echo /run/blktap-control/ctl4711; exec >/dev/null 2>&1");
        assert_eq!(spawn(&options), Ok(4711));
    }

    #[test]
    fn a_child_that_lives_on_does_not_hold_us_up() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let options = script(dir.path(), "(sleep 100 &) ; echo /run/ctl12");
        let begun = std::time::Instant::now();
        assert_eq!(spawn(&options), Ok(12));
        assert!(begun.elapsed() < Duration::from_secs(90));
    }

    #[test]
    fn a_child_that_stays_is_not_waited_for_and_one_that_fails_is() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let text = "[ \"$1\" = --detach ] || exit 22\necho /run/ctl14; exec sleep 100";
        let begun = std::time::Instant::now();
        assert_eq!(spawn(&SpawnOptions { is_child: true, ..script(dir.path(), text) }), Ok(14));
        assert!(begun.elapsed() < Duration::from_secs(90));
        let failing = SpawnOptions { is_child: true, ..script(dir.path(), "echo no room >&2; exit 28") };
        assert_eq!(spawn(&failing).expect_err("status 28").errno, Errno::ENOSPC);
    }

    #[test]
    fn words_before_the_socket_are_no_failure() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let text =
            "echo /dev/loop1 of a dead process taken away >&2; sleep 0.1; echo /run/ctl13\n(sleep 100 &)";
        let begun = std::time::Instant::now();
        assert_eq!(spawn(&script(dir.path(), text)), Ok(13));
        assert!(begun.elapsed() < Duration::from_secs(90));
        let failing =
            spawn(&script(dir.path(), "echo one >&2; echo two >&2; exit 28")).expect_err("status 28");
        assert!(failing.message.contains("one; two"), "{failing}");
    }

    #[test]
    fn failures_are_told_apart() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let failing = spawn(&script(dir.path(), "echo no room >&2; exit 28")).expect_err("status 28");
        assert_eq!(failing.errno, Errno::ENOSPC);
        assert!(failing.message.contains("no room"), "{failing}");
        let killed = spawn(&script(dir.path(), "kill -TERM $$")).expect_err("killed");
        assert_eq!(killed.errno, Errno::EINTR);
        let babble = spawn(&script(dir.path(), "echo hello")).expect_err("no socket");
        assert_eq!(babble.errno, Errno::EPROTO);
        let mut slow = script(dir.path(), "exec sleep 100");
        slow.timeout = Duration::from_millis(100);
        assert_eq!(spawn(&slow).expect_err("silent").errno, Errno::ETIMEDOUT);
        assert_eq!(spawn(&SpawnOptions::new("/nonexistent/x")).expect_err("missing").errno, Errno::ENOENT);
    }

    #[test]
    fn a_debug_signal_during_the_start_is_forgiven() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let marker = dir.path().join("once");
        let text = format!("[ -e {0} ] || {{ : > {0}; kill -USR1 $$; }}\necho /run/ctl99", marker.display());
        assert_eq!(spawn(&script(dir.path(), &text)), Ok(99));
    }
}
