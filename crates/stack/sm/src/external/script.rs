//! A program of a plugin: run once, fed, bounded in time and in what it prints.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tapio_sys::poll::{self, PollFd, PollFlags};
use tapio_sys::process::{self, Signal};
use tapio_types::ApiError;

use super::trusted;
use crate::errors;
use crate::traits::Ctx;
use crate::worker::UNFINISHED;

/// Bytes that a program may print on standard output: the list of the volumes of an SR, or a bitmap.
pub(super) const OUTPUT_MAX: usize = 16 << 20;
/// Bytes of its standard error that are kept, its end.
const STDERR_KEPT: usize = 64 << 10;
/// Lines of standard error that are logged of one call, and characters of each.
const LINES_LOGGED: usize = 20;
const LINE_LOGGED: usize = 500;
/// How long a program that was killed may take to end, and how long the words of one that ended are waited for.
const GRACE: Duration = Duration::from_secs(1);
/// How often a caller that cancels is looked for.
const LOOK: Duration = Duration::from_millis(100);
/// How often the daemon hears that the worker is alive.
pub(super) const BEAT: Duration = Duration::from_secs(1);
/// A program's search path.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What is run.
pub(super) struct Script<'a> {
    /// The program's file.
    pub(super) program: &'a Path,
    /// What is done, for people: `SR.attach` of which plugin.
    pub(super) doing: &'a str,
    /// Its arguments.
    pub(super) arguments: &'a [&'a str],
    /// Variables of its environment, which has nothing else of ours.
    pub(super) environment: &'a [(&'a str, &'a str)],
    /// Its standard input.
    pub(super) input: &'a [u8],
    /// How long it may take.
    pub(super) limit: Duration,
}

/// What a program that has ended said.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) status: ExitStatus,
    pub(super) stdout: Vec<u8>,
    /// The end of it, with nothing unprintable.
    pub(super) stderr: String,
}

impl Said {
    /// How it ended, for people.
    pub(super) fn end(&self) -> String {
        match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("ended with status {code}"),
            (_, Some(signal)) => format!("was ended by signal {signal}"),
            _ => "ended".to_owned(),
        }
    }

    /// Its last words, for an error.
    pub(super) fn last_words(&self) -> String {
        match self.stderr.trim() {
            "" => "it printed nothing on standard error".to_owned(),
            text => text
                .lines()
                .rev()
                .take(3)
                .collect::<Vec<_>>()
                .into_iter()
                .rev()
                .collect::<Vec<_>>()
                .join(" / "),
        }
    }
}

/// Text of a plugin, for people: bounded, and without control characters.
pub(super) fn printable(bytes: &[u8], max: usize) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(max)]);
    let mut shown: String =
        text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '?' } else { c }).collect();
    if bytes.len() > max {
        shown.push_str(" ...");
    }
    shown
}

struct Running {
    child: Child,
    pidfd: OwnedFd,
}

impl Running {
    /// Ends it with all of its group.
    fn kill(&mut self) {
        // What has gone already is what was wanted.
        let _ = process::signal_group(self.child.id(), Signal::KILL);
        let _ = self.child.kill();
        if poll::is_readable(&self.pidfd, GRACE).unwrap_or(false) {
            let _ = self.child.wait();
        } else {
            tracing::error!(
                pid = self.child.id(),
                "a program of a storage plugin was killed and does not end"
            );
        }
    }
}

/// A pipe that is read without waiting.
struct Tail<R> {
    pipe: Option<R>,
    bytes: Vec<u8>,
    /// Bytes of its end that are kept; none: all.
    kept: Option<usize>,
}

impl<R: Read + AsFd> Tail<R> {
    fn new(pipe: Option<R>, kept: Option<usize>) -> io::Result<Self> {
        if let Some(pipe) = &pipe {
            unblock(pipe)?;
        }
        Ok(Self { pipe, bytes: Vec::new(), kept })
    }

    /// Takes what is there.
    fn read(&mut self) {
        let mut piece = [0; 16 << 10];
        // A writer that is never slow must not keep the loop from looking at the clock.
        for _ in 0..64 {
            let Some(pipe) = &mut self.pipe else { return };
            match pipe.read(&mut piece) {
                Ok(0) => self.pipe = None,
                Ok(len) => self.bytes.extend_from_slice(&piece[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.pipe = None,
            }
            if let Some(kept) = self.kept.filter(|kept| self.bytes.len() > 2 * kept) {
                self.bytes.drain(..self.bytes.len() - kept);
            }
            if self.kept.is_none() && self.bytes.len() > OUTPUT_MAX {
                return;
            }
        }
    }
}

fn unblock(pipe: &impl AsFd) -> io::Result<()> {
    fcntl_setfl(pipe, fcntl_getfl(pipe)? | OFlags::NONBLOCK).map_err(io::Error::from)
}

/// Runs it to its end.
///
/// # Errors
/// It is not there, is not to be trusted, or cannot be started: nothing was changed. It took too long, printed too much
/// or was cancelled: it was killed, and [`crate::worker::is_unfinished`].
pub(super) fn run(ctx: &dyn Ctx, script: &Script<'_>) -> Result<Said, ApiError> {
    let refused = |why: &dyn fmt::Display| {
        errors::fail(202, format_args!("{}: {}: {why}", script.doing, script.program.display()))
    };
    trusted::program(script.program).map_err(|why| refused(&why))?;
    let mut child = start(script).map_err(|error| refused(&format_args!("it cannot be started: {error}")))?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let pidfd = process::open(child.id()).map_err(|error| {
        let _ = child.kill();
        let _ = child.wait();
        refused(&error)
    })?;
    let mut running = Running { child, pidfd };
    let prepared = (|| {
        if let Some(pipe) = &stdin {
            unblock(pipe)?;
        }
        Ok((Tail::new(stdout, None)?, Tail::new(stderr, Some(STDERR_KEPT))?))
    })();
    let (mut out, mut err) = prepared.map_err(|error: io::Error| {
        running.kill();
        refused(&error)
    })?;
    let stopped = feed(ctx, script, &running, stdin, (&mut out, &mut err));
    let stderr = printable(&err.bytes[err.bytes.len().saturating_sub(STDERR_KEPT)..], STDERR_KEPT);
    log(script, &stderr);
    if let Err(stopped) = stopped {
        running.kill();
        return Err(stopped.told(script, &stderr));
    }
    let status = running.child.wait().map_err(|error| refused(&error))?;
    Ok(Said { status, stdout: out.bytes, stderr })
}

fn start(script: &Script<'_>) -> io::Result<Child> {
    Command::new(script.program)
        .args(script.arguments)
        .env_clear()
        .envs([("PATH", PATH), ("LC_ALL", "C.UTF-8"), ("HOME", "/")])
        .envs(script.environment.iter().copied())
        .current_dir("/")
        .stdin(if script.input.is_empty() { Stdio::null() } else { Stdio::piped() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // It is killed with what it started, and hears no signal from a terminal.
        .process_group(0)
        .spawn()
}

/// Why a program was not let go on.
enum Stopped {
    Late,
    Flood,
    Cancelled,
    Broken(io::Error),
}

impl Stopped {
    fn told(self, script: &Script<'_>, stderr: &str) -> ApiError {
        let (doing, program) = (script.doing, script.program.display());
        let words =
            stderr.trim().lines().last().map_or_else(String::new, |line| format!("; it said: {line}"));
        let text = match self {
            Self::Cancelled => {
                return ApiError::new(
                    "TASK_CANCELLED",
                    [String::new(), String::new(), UNFINISHED.to_owned()],
                );
            }
            Self::Late => format!(
                "{doing}: {program} had not ended after {} s and was killed{words}; see to its storage, then repeat",
                script.limit.as_secs()
            ),
            Self::Flood => format!(
                "{doing}: {program} printed more than {} MiB and was killed{words}; ask its vendor",
                OUTPUT_MAX >> 20
            ),
            Self::Broken(error) => format!("{doing}: {program} cannot be waited for: {error}; it was killed"),
        };
        errors::fail_with(47, text, UNFINISHED)
    }
}

/// Feeds it and reads what it prints, until it has ended.
fn feed<O: Read + AsFd, E: Read + AsFd>(
    ctx: &dyn Ctx,
    script: &Script<'_>,
    running: &Running,
    mut stdin: Option<impl Write + AsFd>,
    (out, err): (&mut Tail<O>, &mut Tail<E>),
) -> Result<(), Stopped> {
    let until = Instant::now() + script.limit;
    let (mut input, mut beat) = (script.input, Instant::now());
    let mut ended: Option<Instant> = None;
    loop {
        let now = Instant::now();
        if out.bytes.len() > OUTPUT_MAX {
            return Err(Stopped::Flood);
        }
        if ended.is_some_and(|at| (out.pipe.is_none() && err.pipe.is_none()) || now >= at + GRACE) {
            // What it left in the background may hold its pipes as long as it likes.
            return Ok(());
        }
        if now >= until && ended.is_none() {
            return Err(Stopped::Late);
        }
        if ctx.is_cancelled() {
            return Err(Stopped::Cancelled);
        }
        if now >= beat + BEAT {
            // It has its own deadline here, whatever the daemon's for a silent worker.
            ctx.progress(0.0);
            beat = now;
        }
        let mut fds = Vec::with_capacity(4);
        fds.extend(stdin.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::OUT)));
        fds.extend(out.pipe.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        fds.extend(err.pipe.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        if ended.is_none() {
            fds.push(PollFd::new(&running.pidfd, PollFlags::IN));
        }
        let left = if ended.is_some() { LOOK } else { until.saturating_duration_since(now) };
        match poll::any(&mut fds, Some(LOOK.min(left))) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(Stopped::Broken(error)),
            _ => {}
        }
        drop(fds);
        if let Some(pipe) = &mut stdin {
            match pipe.write(input) {
                Ok(len) => input = &input[len..],
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                // It does not read it all, and says itself what it misses.
                Err(_) => input = &[],
            }
            if input.is_empty() {
                stdin = None;
            }
        }
        out.read();
        err.read();
        if ended.is_none() && poll::is_readable(&running.pidfd, Duration::ZERO).unwrap_or(false) {
            ended = Some(Instant::now());
        }
    }
}

fn log(script: &Script<'_>, stderr: &str) {
    let lines: Vec<&str> = stderr.lines().filter(|line| !line.trim().is_empty()).collect();
    let from = lines.len().saturating_sub(LINES_LOGGED);
    for line in &lines[from..] {
        let line: String = line.chars().take(LINE_LOGGED).collect();
        tracing::info!(target: "tapio_sm::plugin", doing = script.doing, "{line}");
    }
}
