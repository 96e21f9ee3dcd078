//! Talks to the small agent in a guest (`guest/agent`): a line `NUMBER COMMAND...`, answered by a line
//! `NUMBER ok TEXT` or `NUMBER no TEXT`. One exchange at a time. A line with another number is of an earlier exchange,
//! and is dropped.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};
use tapio_types::ApiError;
use uuid::Uuid;

use crate::console::open_pipe;
use crate::errors::{failed, quiesce};
use crate::facts::{DISKS_MAX, GuestDisk, GuestFacts};
use crate::poll::{poll, polled};

/// Longest line of an agent.
const LINE_LEN_MAX: usize = 4096;

/// How long a guest that was just started may take until its agent answers.
pub(crate) const HELLO_LIMIT: Duration = Duration::from_secs(30);

/// How an agent is reached.
#[derive(Clone, Debug)]
pub(crate) enum Way {
    /// Two named pipes: commands, answers.
    Pipes(PathBuf, PathBuf),
    /// A UNIX socket.
    Socket(PathBuf),
}

/// Why an agent did not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It has not answered in time; whether it has ever said anything.
    Silent(bool),
    /// It answered no: why.
    No(String),
}

#[derive(Debug)]
enum Line {
    Pipes(File, File),
    Socket(UnixStream),
}

impl Line {
    fn open(way: &Way) -> io::Result<Self> {
        match way {
            Way::Pipes(commands, answers) => Ok(Self::Pipes(open_pipe(commands)?, open_pipe(answers)?)),
            Way::Socket(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_nonblocking(true)?;
                Ok(Self::Socket(stream))
            }
        }
    }

    fn fd(&self) -> RawFd {
        match self {
            Self::Pipes(_, answers) => answers.as_raw_fd(),
            Self::Socket(stream) => stream.as_raw_fd(),
        }
    }

    fn send(&mut self, text: &str) -> io::Result<()> {
        match self {
            Self::Pipes(commands, _) => commands.write_all(text.as_bytes()),
            Self::Socket(stream) => stream.write_all(text.as_bytes()),
        }
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Pipes(_, answers) => answers.read(into),
            Self::Socket(stream) => stream.read(into),
        }
    }
}

#[derive(Debug, Default)]
struct Inner {
    line: Option<Line>,
    /// Bytes after the last whole line.
    rest: Vec<u8>,
    next: u64,
    /// It has said something since we know it.
    greeted: bool,
}

/// A guest's agent.
#[derive(Debug)]
pub(crate) struct Agent {
    way: Way,
    /// None while an exchange is in flight.
    inner: Mutex<Option<Inner>>,
    free: Condvar,
}

impl Agent {
    /// Nothing is opened yet.
    pub(crate) fn new(way: Way) -> Self {
        // Numbers of another daemon's questions must not be ours.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let next = u64::from(now.subsec_micros()) + now.as_secs() * 1_000_000;
        let inner = Inner { next, ..Inner::default() };
        Self { way, inner: Mutex::new(Some(inner)), free: Condvar::new() }
    }

    /// Opens the way early, so that the agent's greeting is not lost.
    pub(crate) fn listen(&self) {
        if let Some(inner) = self.inner.lock().as_mut() {
            inner.line = Line::open(&self.way).ok();
        }
    }

    /// Whether it has ever said something, or says something by `until`.
    pub(crate) fn is_there(&self, until: Instant) -> bool {
        !matches!(self.ask("ping", until), Err(Refusal::Silent(_)))
    }

    /// Asks and waits for the answer: the text after `ok`.
    pub(crate) fn ask(&self, command: &str, until: Instant) -> Result<String, Refusal> {
        let mut slot = self.inner.lock();
        let mut inner = loop {
            if let Some(inner) = slot.take() {
                break inner;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Refusal::Silent(true));
            }
            self.free.wait_for(&mut slot, left);
        };
        drop(slot);
        let answer = inner.exchange(&self.way, command, until);
        *self.inner.lock() = Some(inner);
        self.free.notify_one();
        answer
    }
}

/// What agents of guests that have ours are asked about the guest, apart from its disks.
impl Agent {
    /// What the guest reports of itself; none by an agent of an earlier version.
    pub(crate) fn facts(&self, vm: Uuid, until: Instant) -> Result<Option<GuestFacts>, ApiError> {
        match self.ask("facts", until) {
            Ok(words) => Ok(Some(GuestFacts::of_words(&words))),
            // One that is still starting, or does not know the question.
            Err(Refusal::Silent(false) | Refusal::No(_)) => Ok(None),
            Err(Refusal::Silent(true)) => {
                Err(failed(vm, "its guest is not known", "the agent has not answered in time"))
            }
        }
    }

    /// What the guest's disks have counted.
    pub(crate) fn disks(&self, vm: Uuid, until: Instant) -> Result<Vec<GuestDisk>, ApiError> {
        let mut disks = Vec::new();
        while disks.len() < DISKS_MAX {
            let said = self.ask(&format!("disks {}", disks.len()), until);
            let part = GuestDisk::of_words(
                &said.map_err(|why| failed(vm, "what its disks have counted is not known", why))?,
            );
            if part.is_empty() {
                break;
            }
            disks.extend(part);
        }
        Ok(disks)
    }

    /// Freezes the guest's file systems.
    pub(crate) fn freeze(&self, vm: Uuid, until: Instant) -> Result<(), ApiError> {
        self.ask("freeze", until).map(drop).map_err(|why| not_quiet(vm, why))
    }

    /// Thaws them; whether any was frozen.
    pub(crate) fn thaw(&self, vm: Uuid, until: Instant) -> Result<bool, ApiError> {
        let thawed = self.ask("thaw", until).map_err(|why| not_quiet(vm, why))?;
        Ok(thawed.parse::<u64>().is_ok_and(|count| count > 0))
    }

    /// Discards what the guest's file systems do not use.
    pub(crate) fn trim(&self, vm: Uuid, until: Instant) -> Result<Option<u64>, ApiError> {
        let trimmed = self.ask("trim", until);
        trimmed
            .map(|bytes| bytes.parse().ok())
            .map_err(|why| failed(vm, "its file systems are not trimmed", why))
    }
}

fn not_quiet(vm: Uuid, why: Refusal) -> ApiError {
    match why {
        Refusal::Silent(true) => quiesce("PLUGIN_DEOS_NOT_RESPOND", vm, why),
        Refusal::Silent(false) => quiesce("NOT_SUPPORTED", vm, "no agent answers in this guest"),
        Refusal::No(text) => quiesce("FAILED", vm, text),
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent(_) => f.write_str("the guest's agent has not answered in time"),
            Self::No(text) => f.write_str(text),
        }
    }
}

impl Inner {
    fn exchange(&mut self, way: &Way, command: &str, until: Instant) -> Result<String, Refusal> {
        debug_assert!(!command.contains('\n'), "one command, one line");
        self.next += 1;
        let number = self.next.to_string();
        // A guest that is still starting loses what comes before its agent listens: asked again, with the number
        // that the agent has not seen or will not do twice.
        let mut ask_again = Duration::from_millis(200);
        loop {
            if self.line.is_none() {
                self.rest.clear();
                self.line = Line::open(way).ok();
            }
            let mut wait = until;
            if let Some(line) = &mut self.line {
                if !self.greeted {
                    // Only until the agent has sent its first line.
                    wait = until.min(Instant::now() + ask_again);
                    ask_again = (ask_again * 2).min(Duration::from_secs(2));
                }
                if line.send(&format!("{number} {command}\n")).is_err() {
                    self.line = None;
                }
            }
            if self.line.is_none() {
                wait = until.min(Instant::now() + Duration::from_millis(50));
                poll(&mut [], wait);
            } else if let Some(answer) = self.answer(&number, wait) {
                return answer;
            }
            if Instant::now() >= until {
                return Err(Refusal::Silent(self.greeted));
            }
        }
    }

    /// Reads lines until the answer; none when there is none by `until` or the way is closed.
    fn answer(&mut self, number: &str, until: Instant) -> Option<Result<String, Refusal>> {
        loop {
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                let text = String::from_utf8_lossy(&line);
                let mut words = text.trim().splitn(3, ' ');
                let (of, verdict, rest) = (words.next(), words.next(), words.next().unwrap_or_default());
                self.greeted |= matches!(verdict, Some("ok" | "no"));
                if of != Some(number) {
                    continue;
                }
                match verdict {
                    Some("ok") => return Some(Ok(rest.trim().to_owned())),
                    Some("no") => return Some(Err(Refusal::No(rest.trim().to_owned()))),
                    _ => {}
                }
            }
            if self.rest.len() > LINE_LEN_MAX {
                self.rest.clear();
            }
            let line = self.line.as_mut()?;
            if !poll(&mut [polled(line.fd(), libc::POLLIN)], until) {
                return None;
            }
            let mut bytes = [0; 512];
            match line.receive(&mut bytes) {
                Ok(0) => {
                    self.line = None;
                    return None;
                }
                Ok(read) => self.rest.extend_from_slice(&bytes[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    self.line = None;
                    return None;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn answers_are_matched_by_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let listener = UnixListener::bind(&path).unwrap();
        let guest = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for _ in 0..2 {
                let line = lines.next().unwrap().unwrap();
                let (number, command) = line.split_once(' ').unwrap();
                let verdict = if command == "bind 3" { "ok vda" } else { "no it is mounted" };
                stream.write_all(format!("noise\n17 ok late\n{number} {verdict}\n").as_bytes()).unwrap();
            }
        });
        let agent = Agent::new(Way::Socket(path));
        assert_eq!(agent.ask("bind 3", soon()), Ok("vda".into()));
        assert_eq!(agent.ask("unbind 3", soon()), Err(Refusal::No("it is mounted".into())));
        guest.join().unwrap();
        let now = Instant::now();
        assert_eq!(agent.ask("ping", now + Duration::from_millis(100)), Err(Refusal::Silent(true)));
        assert!(now.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn an_agent_that_does_not_listen_yet_is_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let way = Way::Pipes(dir.path().join("c"), dir.path().join("a"));
        let agent = Agent::new(way);
        assert_eq!(
            agent.ask("ping", Instant::now() + Duration::from_millis(50)),
            Err(Refusal::Silent(false))
        );
        let (mut commands, mut answers) =
            (open_pipe(&dir.path().join("c")).unwrap(), open_pipe(&dir.path().join("a")).unwrap());
        // What was said before the guest's serial line existed is gone.
        let _ = commands.read(&mut [0; 256]).unwrap();
        let guest = thread::spawn(move || {
            poll(&mut [polled(commands.as_raw_fd(), libc::POLLIN)], soon());
            let mut bytes = [0; 256];
            let len = commands.read(&mut bytes).unwrap();
            let text = String::from_utf8_lossy(&bytes[..len]).into_owned();
            let number = text.split(' ').next().unwrap();
            answers.write_all(format!("{number} ok\n").as_bytes()).unwrap();
        });
        assert!(agent.is_there(soon()));
        guest.join().unwrap();
    }
}
