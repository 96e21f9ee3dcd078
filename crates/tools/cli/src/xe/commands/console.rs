//! `console`: the terminal of a VM.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use serde_json::Value;
use tapio_sys::poll::{self, PollFd, PollFlags};

use super::select::machines;
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::Session;
use crate::xe::tunnel::tunnel;

pub(super) static COMMANDS: &[Command] = &[command(
    "console",
    &[],
    &["vm", "until", "timeout"],
    "Connects to the terminal of a VM; Ctrl-] leaves it. Input that is no terminal is typed, and \
     output shown until a line starts with 'until', for 'timeout' seconds at most",
    run,
)];

/// What leaves the terminal: Ctrl-].
const LEAVE: u8 = 0x1d;
/// How long output is shown after the end of an input that is no terminal.
const TIMEOUT_DEFAULT: &str = "5";

fn run(session: &Session) -> Result<()> {
    let vm = machines(session, &["until", "timeout"])?.remove(0);
    let consoles = session.call("VM.get_consoles", &[vm.into()])?;
    let mut terminal = None;
    for console in consoles.as_array().into_iter().flatten().filter_map(Value::as_str) {
        if session.text("console.get_protocol", &[console.into()])? == "vt100" {
            terminal = Some(console);
        }
    }
    let console = terminal
        .ok_or_else(|| Failure::other("the VM has no console: is it running, with platform:hvm_serial?"))?;
    let location = session.text("console.get_location", &[console.into()])?;
    let told = |error: io::Error| Failure::other(format!("{location}: {error}"));
    let line = match location.strip_prefix("tty:") {
        Some(path) => open(path).map_err(|error| {
            Failure::other(format!(
                "{location}: {error}; this console is reached on the host of its VM, as root"
            ))
        })?,
        None => File::from(OwnedFd::from(tunnel(&session.client, &format!("/console?ref={console}"))?)),
    };
    if io::stdin().is_terminal() {
        interactive(line).map_err(told)
    } else {
        scripted(session, line, &location)
    }
}

/// Opens a terminal of this host.
fn open(path: &str) -> io::Result<File> {
    let terminal = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path)?;
    // What is typed reaches the guest as it is; it echoes itself.
    Raw::of(&terminal)?.keep();
    Ok(terminal)
}

/// A terminal as it was before, put back when this goes.
struct Raw<T: AsFd> {
    terminal: T,
    before: Option<Termios>,
}

impl<T: AsFd> Raw<T> {
    fn of(terminal: T) -> io::Result<Self> {
        let before = tcgetattr(&terminal)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&terminal, OptionalActions::Now, &raw)?;
        Ok(Self { terminal, before: Some(before) })
    }

    /// It stays as it is now.
    fn keep(mut self) {
        self.before = None;
    }
}

impl<T: AsFd> Drop for Raw<T> {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(&self.terminal, OptionalActions::Now, before);
        }
    }
}

fn interactive(line: File) -> io::Result<()> {
    eprintln!("Ctrl-] leaves the console.");
    let raw = Raw::of(io::stdin())?;
    let mut typed = line.try_clone()?;
    let (left, leaving) = UnixStream::pair()?;
    std::thread::spawn(move || {
        // Closed when this ends, which ends the other loop, too.
        let _leaving = leaving;
        let mut stdin = io::stdin();
        let mut bytes = [0; 256];
        while let Ok(count @ 1..) = stdin.read(&mut bytes) {
            let leave = bytes[..count].iter().position(|byte| *byte == LEAVE);
            if typed.write_all(&bytes[..leave.unwrap_or(count)]).is_err() || leave.is_some() {
                break;
            }
        }
    });
    show(line, |_| false, None, Some(&left))?;
    drop(raw);
    eprintln!();
    Ok(())
}

/// Waits until one of them can be read, or `until`: which can.
fn readable(line: &File, left: Option<&UnixStream>, until: Option<Instant>) -> io::Result<(bool, bool)> {
    let limit = until.map(|until| until.saturating_duration_since(Instant::now()));
    let mut fds = vec![PollFd::new(line, PollFlags::IN)];
    fds.extend(left.map(|left| PollFd::new(left, PollFlags::IN)));
    match poll::any(&mut fds, limit) {
        Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
        _ => {}
    }
    let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
    Ok((is_ready(0), is_ready(1)))
}

fn scripted(session: &Session, mut line: File, path: &str) -> Result<()> {
    let told = |error: io::Error| Failure::other(format!("{path}: {error}"));
    let seconds = session.or("timeout", TIMEOUT_DEFAULT);
    let seconds: f64 =
        seconds.parse().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds)).ok_or_else(|| {
            Failure::other(format!("timeout: '{seconds}' is no number of seconds from 0 to 86400"))
        })?;
    let mut input = Vec::new();
    io::stdin().take(1 << 20).read_to_end(&mut input).map_err(told)?;
    line.write_all(&input).map_err(told)?;
    let until = session.arguments.get("until");
    let limit = Instant::now() + Duration::from_secs_f64(seconds);
    let is_last = |text: &str| until.is_some_and(|until| text.starts_with(until));
    let ended = show(line, is_last, Some(limit), None);
    match (ended.map_err(told)?, until) {
        (false, Some(until)) => {
            Err(Failure::other(format!("no line of the console started with '{until}' within {seconds} s")))
        }
        _ => Ok(()),
    }
}

/// Copies to standard output until the console ends, `limit`, a sign on `left`, or a line that `is_last`; whether
/// that came.
fn show(
    mut from: File,
    is_last: impl Fn(&str) -> bool,
    limit: Option<Instant>,
    left: Option<&UnixStream>,
) -> io::Result<bool> {
    let mut stdout = io::stdout();
    let (mut line, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        if limit.is_some_and(|limit| Instant::now() >= limit) {
            return Ok(false);
        }
        let (has_come, has_left) = readable(&from, left, limit)?;
        if has_left {
            return Ok(false);
        }
        if !has_come {
            continue;
        }
        let count = match from.read(&mut bytes) {
            Ok(0) => return Ok(false),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // A terminal whose other end is gone.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return Ok(false),
            Err(error) => return Err(error),
        };
        stdout.write_all(&bytes[..count])?;
        stdout.flush()?;
        for byte in &bytes[..count] {
            if !matches!(byte, b'\r' | b'\n') {
                line.push(*byte);
                continue;
            }
            if is_last(&String::from_utf8_lossy(&line)) {
                return Ok(true);
            }
            line.clear();
        }
    }
}
