//! `console`: the terminal of a machine.

use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::select::machines;
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[command(
    "console",
    &[],
    &["vm", "until", "timeout"],
    "Connects to the terminal of a machine of this host; Ctrl-] leaves it. Input that is no terminal is typed, and \
     output shown until a line starts with 'until', for 'timeout' seconds at most",
    run,
)];

/// What leaves the terminal: Ctrl-].
const LEAVE: u8 = 0x1d;
/// How long output is shown after the end of an input that is no terminal.
const TIMEOUT_DEFAULT: &str = "5";

fn run(session: &Session) -> Result<()> {
    let machine = machines(session, &["until", "timeout"])?.remove(0);
    let consoles = session.call("VM.get_consoles", &[machine.into()])?;
    let console = consoles.as_array().and_then(|all| all.first()).and_then(Value::as_str);
    let console = console.ok_or_else(|| Failure::other("the machine has no console: is it running?"))?;
    let location = session.text("console.get_location", &[console.into()])?;
    let path = location.strip_prefix("unix:").ok_or_else(|| {
        Failure::other(format!("the console is at '{location}', which only a viewer for it can show"))
    })?;
    let told = |error: std::io::Error| {
        Failure::other(format!("{path}: {error}; consoles are reached on the machine's own host, as root"))
    };
    let stream = UnixStream::connect(path).map_err(told)?;
    if std::io::stdin().is_terminal() {
        interactive(stream).map_err(told)
    } else {
        scripted(session, stream, path)
    }
}

/// The terminal as it was before, put back when this goes.
struct Raw(libc::termios);

impl Raw {
    fn new() -> std::io::Result<Self> {
        let fd = std::io::stdin().as_raw_fd();
        // SAFETY: termios is plain data, and the kernel fills it.
        let mut before: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is to a live termios.
        if unsafe { libc::tcgetattr(fd, &raw mut before) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let mut raw = before;
        // SAFETY: as above.
        unsafe { libc::cfmakeraw(&raw mut raw) };
        // SAFETY: as above.
        if unsafe { libc::tcsetattr(fd, libc::TCSANOW, &raw const raw) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: the pointer is to a live termios.
        unsafe { libc::tcsetattr(std::io::stdin().as_raw_fd(), libc::TCSANOW, &raw const self.0) };
    }
}

fn interactive(stream: UnixStream) -> std::io::Result<()> {
    eprintln!("Ctrl-] leaves the console.");
    let raw = Raw::new()?;
    let mut typed = stream.try_clone()?;
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin();
        let mut bytes = [0; 256];
        while let Ok(count @ 1..) = stdin.read(&mut bytes) {
            let leave = bytes[..count].iter().position(|byte| *byte == LEAVE);
            if typed.write_all(&bytes[..leave.unwrap_or(count)]).is_err() || leave.is_some() {
                break;
            }
        }
        // Ends the other loop, too.
        let _ = typed.shutdown(Shutdown::Both);
    });
    show(stream, |_| false, None)?;
    drop(raw);
    eprintln!();
    Ok(())
}

fn scripted(session: &Session, mut stream: UnixStream, path: &str) -> Result<()> {
    let told = |error: std::io::Error| Failure::other(format!("{path}: {error}"));
    let seconds = session.or("timeout", TIMEOUT_DEFAULT);
    let seconds: f64 =
        seconds.parse().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds)).ok_or_else(|| {
            Failure::other(format!("timeout: '{seconds}' is no number of seconds from 0 to 86400"))
        })?;
    let mut input = Vec::new();
    std::io::stdin().take(1 << 20).read_to_end(&mut input).map_err(told)?;
    stream.write_all(&input).map_err(told)?;
    let until = session.arguments.get("until");
    let limit = Instant::now() + Duration::from_secs_f64(seconds);
    let ended = show(stream, |line| until.is_some_and(|until| line.starts_with(until)), Some(limit));
    match (ended.map_err(told)?, until) {
        (false, Some(until)) => {
            Err(Failure::other(format!("no line of the console started with '{until}' within {seconds} s")))
        }
        _ => Ok(()),
    }
}

/// Copies to standard output until the other side ends, `limit`, or a line that `is_last`; whether that came.
fn show(
    mut stream: UnixStream,
    is_last: impl Fn(&str) -> bool,
    limit: Option<Instant>,
) -> std::io::Result<bool> {
    let mut stdout = std::io::stdout();
    let (mut line, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        if let Some(limit) = limit {
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            stream.set_read_timeout(Some(left))?;
        }
        let count = match stream.read(&mut bytes) {
            Ok(0) => return Ok(false),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
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
