//! Programs of the system: run with a timeout, and their failures reported.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tapio_sys::{poll, process};

/// What a program said.
#[derive(Debug)]
pub(crate) struct Output {
    /// Exit status; none where a signal ended it.
    pub(crate) status: Option<i32>,
    /// Standard output.
    pub(crate) stdout: String,
    /// Standard error, its end where it is long.
    pub(crate) stderr: String,
}

/// Why a program could not be run.
#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    /// It is not installed.
    pub(crate) is_missing: bool,
}

impl Failure {
    /// For another reason; `what` is a sentence.
    pub(crate) const fn new(what: String) -> Self {
        Self { what, is_missing: false }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// A user's search path may lack the directories of administrators' programs.
const PLACES: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin";
/// How often it is looked whether a program has ended, if there is no other way.
const TURN: Duration = Duration::from_millis(5);
/// How much of what a program prints is kept.
const KEPT_MAX: usize = 64 << 10;
/// The same of a program that prints a table, of which all is wanted.
const TABLE_MAX: usize = 64 << 20;

/// Runs `program`; its deadline is `limit` from now.
///
/// # Errors
/// It is not installed, cannot be started, or does not end in time (it is killed then).
pub(crate) fn run(program: &str, arguments: &[&str], limit: Duration) -> Result<Output, Failure> {
    run_with(program, arguments, None, Input::Nothing, (limit, KEPT_MAX))
}

/// As [`run_well`], of a program that prints a table, which may be long.
///
/// # Errors
/// As [`run_well`].
pub(crate) fn run_for_table(program: &str, arguments: &[&str], limit: Duration) -> Result<String, Failure> {
    well(program, run_with(program, arguments, None, Input::Nothing, (limit, TABLE_MAX))?)
}

/// What a program has as its standard input.
enum Input<'a> {
    Nothing,
    /// Something that is shorter than a pipe holds.
    Bytes(&'a [u8]),
    /// A file that it does not read, and has open as long as it runs.
    Held(File),
}

fn run_with(
    program: &str,
    arguments: &[&str],
    variable: Option<(&str, &str)>,
    input: Input<'_>,
    (limit, kept_max): (Duration, usize),
) -> Result<Output, Failure> {
    let path = match std::env::var("PATH") {
        Ok(path) => format!("{path}:{PLACES}"),
        Err(_) => PLACES.into(),
    };
    let (stdin, bytes) = match input {
        Input::Nothing | Input::Bytes([]) => (Stdio::null(), &[][..]),
        Input::Bytes(bytes) => (Stdio::piped(), bytes),
        Input::Held(file) => (Stdio::from(file), &[][..]),
    };
    let started = Command::new(program)
        .args(arguments)
        .env("PATH", &path)
        .env("LC_ALL", "C")
        // LVM's programs warn about every descriptor that the daemon inherited.
        .env("LVM_SUPPRESS_FD_WARNINGS", "1")
        .envs(variable)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = started.map_err(|error| {
        let is_missing = error.kind() == std::io::ErrorKind::NotFound;
        let what = if is_missing {
            format!("the program '{program}' is not installed")
        } else {
            format!("cannot start '{program}': {error}")
        };
        Failure { what, is_missing }
    })?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read it says itself what it misses.
        let _ = stdin.write_all(bytes);
    }
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let reader = |pipe: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let mut piece = [0; 4096];
            let Some(mut pipe) = pipe else { return bytes };
            while let Ok(len) = pipe.read(&mut piece) {
                if len == 0 {
                    break;
                }
                bytes.extend_from_slice(&piece[..len]);
                if bytes.len() > 2 * kept_max {
                    bytes.drain(..bytes.len() - kept_max);
                }
            }
            bytes
        })
    };
    let out = reader(out.map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
    let err = reader(err.map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
    let until = Instant::now() + limit;
    let process = process::open(child.id());
    let status = loop {
        let left = until.saturating_duration_since(Instant::now());
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if !left.is_zero() => wait(process.as_ref().ok(), left),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                let what = format!("'{program}' had not ended after {} s and was killed", limit.as_secs());
                return Err(Failure { what, is_missing: false });
            }
        }
    };
    let text = |thread: std::thread::JoinHandle<Vec<u8>>| {
        String::from_utf8_lossy(&thread.join().unwrap_or_default()).into_owned()
    };
    Ok(Output { status: status.code(), stdout: text(out), stderr: text(err) })
}

/// Waits until a process ends, for `left` at most, or a moment where the kernel does not tell its end.
fn wait(process: Option<&OwnedFd>, left: Duration) {
    match process.map(|process| poll::is_readable(process, left)) {
        Some(Ok(_)) => {}
        Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
        _ => std::thread::sleep(TURN.min(left)),
    }
}

/// As [`run`], and a failure unless it ends with status 0: a sentence with what it printed last.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_well(program: &str, arguments: &[&str], limit: Duration) -> Result<String, Failure> {
    run_fed(program, arguments, None, &[], limit)
}

/// As [`run_well`], of a program that has `file` open as long as it runs, and with it the lock that this has; with a
/// variable of the environment.
///
/// # Errors
/// As [`run_well`].
pub(crate) fn run_holding(
    program: &str,
    arguments: &[&str],
    variable: Option<(&str, &str)>,
    file: Option<File>,
    limit: Duration,
) -> Result<String, Failure> {
    let input = file.map_or(Input::Nothing, Input::Held);
    well(program, run_with(program, arguments, variable, input, (limit, KEPT_MAX))?)
}

/// As [`run_well`], with a variable of the environment, and something short on standard input: a secret, which is
/// no argument that other users see.
///
/// # Errors
/// As [`run_well`].
pub(crate) fn run_fed(
    program: &str,
    arguments: &[&str],
    variable: Option<(&str, &str)>,
    input: &[u8],
    limit: Duration,
) -> Result<String, Failure> {
    well(program, run_with(program, arguments, variable, Input::Bytes(input), (limit, KEPT_MAX))?)
}

/// What a program printed, where it ended with status 0.
fn well(program: &str, output: Output) -> Result<String, Failure> {
    if output.status == Some(0) {
        return Ok(output.stdout);
    }
    let said = [output.stderr.trim(), output.stdout.trim()].into_iter().find(|text| !text.is_empty());
    let last: Vec<&str> = said.unwrap_or("it printed nothing").lines().rev().take(3).collect();
    let last: Vec<&str> = last.into_iter().rev().map(str::trim).collect();
    let status = output.status.map_or_else(|| "a signal".into(), |status| format!("status {status}"));
    let what = format!("'{program}' ended with {status}: {}", last.join(" / "));
    Err(Failure { what, is_missing: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

    #[test]
    fn what_a_program_prints_is_heard() {
        assert_eq!(run_well("echo", &["a b"], REPLY_TIMEOUT).unwrap(), "a b\n");
        let failed = run_well("sh", &["-c", "echo no room >&2; exit 3"], REPLY_TIMEOUT).unwrap_err();
        assert!(failed.to_string().contains("status 3: no room"), "{failed}");
        let missing = run("no-such-program-here", &[], REPLY_TIMEOUT).unwrap_err();
        assert!(missing.is_missing && missing.to_string().contains("not installed"), "{missing}");
    }

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let started = Instant::now();
        let failed = run("sleep", &["60"], Duration::from_millis(50)).unwrap_err();
        assert!(failed.to_string().contains("killed"), "{failed}");
        assert!(started.elapsed() < Duration::from_secs(30));
    }
}
