//! The QEMU Machine Protocol (docs/interop/qmp-spec.rst): a line of JSON per command, answer and event.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};

use super::balloon;
use crate::poll::{poll, polled};
use crate::supervise::{STACK_LEN, Stop};

/// What the emulator calls the port of the guest agent, and its end on the host.
pub(super) const AGENT_PORT: &str = "qga";

/// Longest line of an emulator.
const LINE_LEN_MAX: usize = 8 << 20;

/// How long it may take to take a command.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// What became of a device that was to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is gone.
    Gone,
    /// The guest keeps it.
    Kept,
}

/// Why a command did not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum QmpError {
    /// The emulator said no: class and description.
    Refused(String, String),
    /// It has not answered in time.
    Late,
    /// The connection is gone, and the emulator with it.
    Closed,
}

impl fmt::Display for QmpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(_, text) => f.write_str(text),
            Self::Late => f.write_str("the emulator has not answered in time"),
            Self::Closed => f.write_str("the emulator has ended"),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    waiting: BTreeSet<u64>,
    replies: BTreeMap<u64, Result<Value, QmpError>>,
    fates: BTreeMap<String, Fate>,
    /// Why the guest ended, once it has.
    ended: Option<String>,
    is_closed: bool,
}

/// A connection to an emulator.
#[derive(Debug)]
pub(super) struct Qmp {
    stream: Mutex<UnixStream>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Reads lines from a stream without ever waiting longer than it is told to.
struct Lines {
    stream: UnixStream,
    rest: Vec<u8>,
}

impl Lines {
    /// The next line; none when the other side has gone or sends nonsense.
    fn next(&mut self, stop: Option<&Stop>, until: Option<Instant>) -> Option<Value> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return serde_json::from_slice(&line).ok();
            }
            if self.rest.len() > LINE_LEN_MAX {
                return None;
            }
            let mut fds = [
                polled(self.stream.as_raw_fd(), libc::POLLIN),
                polled(stop.map_or(-1, Stop::fd), libc::POLLIN),
            ];
            let far = Instant::now() + Duration::from_secs(3600);
            if !poll(&mut fds, until.unwrap_or(far)) && until.is_some() || fds[1].revents != 0 {
                return None;
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return None,
                Ok(len) => self.rest.extend_from_slice(&bytes[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
    }
}

/// What a guest did that the toolstack follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// It has opened the port of its agent.
    Agent,
    /// It has so many bytes of memory now.
    Memory(u64),
}

/// What a line tells of that.
fn told(line: &Value) -> Option<Told> {
    let is_agent = line["event"] == "VSERPORT_CHANGE"
        && line["data"]["id"] == AGENT_PORT
        && line["data"]["open"] == true;
    if is_agent { Some(Told::Agent) } else { balloon::changed(line).map(Told::Memory) }
}

impl Qmp {
    /// Connects to an emulator as soon as it listens, and starts the thread that reads what it says. `on_event` is
    /// called with what the toolstack follows.
    pub(super) fn connect(
        path: &Path,
        stop: Arc<Stop>,
        until: Instant,
        on_event: Box<dyn Fn(Told) + Send>,
    ) -> io::Result<Arc<Self>> {
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => poll(&mut [], until.min(Instant::now() + Duration::from_millis(5))),
            };
        };
        stream.set_write_timeout(Some(SEND_LIMIT))?;
        let reading = stream.try_clone()?;
        // Both ends of the clone share this; writes that would wait are repeated in `send`.
        let mut lines = Lines { stream: reading, rest: Vec::new() };
        let no_greeting = || io::Error::other("it does not greet as an emulator does");
        lines
            .next(Some(&stop), Some(until))
            .filter(|greeting| greeting.get("QMP").is_some())
            .ok_or_else(no_greeting)?;
        let qmp =
            Arc::new(Self { stream: Mutex::new(stream), state: Mutex::default(), changed: Condvar::new() });
        let reader = Arc::clone(&qmp);
        thread::Builder::new().name("qmp".into()).stack_size(STACK_LEN).spawn(move || {
            while let Some(line) = lines.next(Some(&stop), None) {
                if let Some(told) = told(&line) {
                    on_event(told);
                }
                reader.take(line);
            }
            reader.state.lock().is_closed = true;
            reader.changed.notify_all();
        })?;
        let told = |error: QmpError| io::Error::other(error.to_string());
        qmp.run("qmp_capabilities", json!({}), until).map_err(told)?;
        Ok(qmp)
    }

    /// An answer or an event.
    fn take(&self, mut line: Value) {
        let mut state = self.state.lock();
        if let Some(id) = line.get("id").and_then(Value::as_u64) {
            // A reply after its command's timeout has no waiter.
            if state.waiting.remove(&id) {
                let text = |error: &Value, key: &str| error[key].as_str().unwrap_or_default().to_owned();
                let reply = match line.get("error") {
                    Some(error) => Err(QmpError::Refused(text(error, "class"), text(error, "desc"))),
                    None => Ok(line["return"].take()),
                };
                state.replies.insert(id, reply);
            }
        } else if let Some(event) = line.get("event").and_then(Value::as_str) {
            let device = || line["data"]["device"].as_str().map(str::to_owned);
            match event {
                "DEVICE_DELETED" => state.fates.extend(device().map(|id| (id, Fate::Gone))),
                "DEVICE_UNPLUG_GUEST_ERROR" => state.fates.extend(device().map(|id| (id, Fate::Kept))),
                "GUEST_PANICKED" => state.ended = Some("guest-panic".into()),
                "SHUTDOWN" => {
                    let reason = line["data"]["reason"].as_str().unwrap_or("unknown").to_owned();
                    state.ended.get_or_insert(reason);
                    drop(state);
                    // The paused emulator waits until the reason has been read here.
                    let _ = self.send("{\"execute\":\"quit\"}\n");
                    self.changed.notify_all();
                    return;
                }
                _ => {}
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    fn send(&self, line: &str) -> io::Result<()> {
        self.stream.lock().write_all(line.as_bytes())
    }

    /// Sends a line, and a descriptor with its first byte.
    fn send_with(&self, line: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        let mut stream = self.stream.lock();
        let until = Instant::now() + SEND_LIMIT;
        let sent = loop {
            match tapio_sys::socket::send(&*stream, line.as_bytes(), &[fd]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                    poll(&mut [polled(stream.as_raw_fd(), libc::POLLOUT)], until);
                }
                sent => break sent?,
            }
        };
        stream.write_all(&line.as_bytes()[sent..])
    }

    /// Runs a command; its answer.
    pub(super) fn run(&self, command: &str, arguments: Value, until: Instant) -> Result<Value, QmpError> {
        self.run_with(command, arguments, None, until)
    }

    /// [`Self::run`], with a descriptor that the emulator gets.
    pub(super) fn run_with(
        &self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        until: Instant,
    ) -> Result<Value, QmpError> {
        let id = {
            let mut state = self.state.lock();
            state.next += 1;
            let id = state.next;
            state.waiting.insert(id);
            id
        };
        let line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string() + "\n";
        let sent = match fd {
            Some(fd) => self.send_with(&line, fd),
            None => self.send(&line),
        };
        let mut state = self.state.lock();
        loop {
            if let Some(reply) = state.replies.remove(&id) {
                return reply;
            }
            let left = until.saturating_duration_since(Instant::now());
            let failure = match () {
                () if state.is_closed || sent.is_err() => QmpError::Closed,
                () if left.is_zero() => QmpError::Late,
                () => {
                    self.changed.wait_for(&mut state, left);
                    continue;
                }
            };
            state.waiting.remove(&id);
            return Err(failure);
        }
    }

    /// Earlier events of a device do not count any more.
    pub(super) fn forget_fate(&self, device: &str) {
        self.state.lock().fates.remove(device);
    }

    /// Waits for what becomes of a device; none without an event by `until`.
    pub(super) fn fate(&self, device: &str, until: Instant) -> Option<Fate> {
        let mut state = self.state.lock();
        loop {
            if let Some(fate) = state.fates.remove(device) {
                return Some(fate);
            }
            let left = until.saturating_duration_since(Instant::now());
            if state.is_closed || left.is_zero() {
                return None;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Why the guest ended, when the connection has ended too or at `until`.
    pub(super) fn end(&self, until: Instant) -> Option<String> {
        let mut state = self.state.lock();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.is_closed || left.is_zero() {
                return state.ended.clone();
            }
            self.changed.wait_for(&mut state, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn answers_events_and_silence_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let emulator = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"{\"QMP\": {}}\n").unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut names = Vec::new();
            for line in lines {
                let asked: Value = serde_json::from_str(&line.unwrap()).unwrap();
                let name = asked["execute"].as_str().unwrap().to_owned();
                let reply = match name.as_str() {
                    "silence" => continue,
                    "wrong" => {
                        json!({"id": asked["id"], "error": {"class": "GenericError", "desc": "no such"}})
                    }
                    _ => json!({"id": asked["id"], "return": {"of": name}}),
                };
                let event = json!({"event": "DEVICE_DELETED", "data": {"device": "d1"}});
                let other = json!({"event": "DEVICE_UNPLUG_GUEST_ERROR", "data": {"device": "d2"}});
                stream.write_all(format!("{event}\n{other}\n{reply}\n").as_bytes()).unwrap();
                names.push(name.clone());
                if name == "last" {
                    let end = json!({"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}});
                    stream.write_all(format!("{end}\n").as_bytes()).unwrap();
                }
                if name == "quit" {
                    break;
                }
            }
            names
        });
        let stop = Stop::new().unwrap();
        let qmp = Qmp::connect(&path, stop, soon(), Box::new(|_| ())).unwrap();
        assert_eq!(qmp.run("query-status", json!({}), soon()).unwrap()["of"], "query-status");
        let refused = qmp.run("wrong", json!({}), soon()).unwrap_err();
        assert_eq!(refused, QmpError::Refused("GenericError".into(), "no such".into()));
        assert_eq!(qmp.run("silence", json!({}), Instant::now()), Err(QmpError::Late));
        assert_eq!(qmp.fate("d1", soon()), Some(Fate::Gone));
        assert_eq!(qmp.fate("d1", Instant::now()), None);
        assert_eq!(qmp.fate("d2", soon()), Some(Fate::Kept));
        qmp.run("last", json!({}), soon()).unwrap();
        let names = emulator.join().unwrap();
        assert_eq!(names.last().map(String::as_str), Some("quit"), "{names:?}");
        assert_eq!(qmp.end(soon()).as_deref(), Some("guest-reset"));
        assert_eq!(qmp.run("query-status", json!({}), soon()), Err(QmpError::Closed));
    }

    #[test]
    fn a_peer_that_does_not_greet_is_no_emulator() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let other = thread::spawn(move || listener.accept().unwrap().0.write_all(b"hello\n").unwrap());
        let stop = Stop::new().unwrap();
        assert!(Qmp::connect(&path, stop.clone(), soon(), Box::new(|_| ())).is_err());
        other.join().unwrap();
        let begun = Instant::now();
        let until = begun + Duration::from_millis(50);
        let none = Qmp::connect(&dir.path().join("none"), stop, until, Box::new(|_| ()));
        assert!(none.is_err() && begun.elapsed() < Duration::from_secs(30));
    }
}
