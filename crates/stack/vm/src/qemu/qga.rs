//! qemu-guest-agent in a guest, over a serial port of virtio: a line of JSON per command and per answer
//! (QEMU, docs/interop/qemu-ga.rst and `qga/qapi-schema.json`).
//!
//! Each exchange connects anew and begins with `guest-sync-delimited`, after which nothing of an earlier exchange is
//! left in the pipe. Everything that comes is the guest's: it is bounded by [`ANSWER_LEN_MAX`] and by a deadline.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use crate::facts::{ANSWER_LEN_MAX, GuestFacts, answer};

/// Sent first: ends what an agent may have read half of. An agent sends it before the answer of the synchronisation.
const DELIMITER: u8 = 0xff;

/// Why an agent did not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// It has not answered in time.
    Silent,
    /// It answered with an error, or with nonsense: what.
    Refused(String),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent => f.write_str("the guest agent has not answered in time"),
            Self::Refused(why) => f.write_str(why),
        }
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::Silent,
            _ => Self::Refused(format!("the guest agent's port: {error}")),
        }
    }
}

/// A conversation.
#[derive(Debug)]
pub(super) struct Conversation {
    stream: UnixStream,
    rest: Vec<u8>,
    until: Instant,
}

impl Conversation {
    /// Connects and synchronises.
    ///
    /// # Errors
    /// No agent answers by `until`.
    pub(super) fn begin(path: &Path, until: Instant) -> Result<Self, Trouble> {
        let stream = UnixStream::connect(path)?;
        let mut this = Self { stream, rest: Vec::new(), until };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let id = (now.as_micros() & 0x7fff_ffff) as u64;
        let mut hello = vec![DELIMITER];
        hello.extend(json!({"execute": "guest-sync-delimited", "arguments": {"id": id}}).to_string().bytes());
        hello.push(b'\n');
        this.send(&hello)?;
        loop {
            this.skip_to_delimiter()?;
            // An answer to an earlier synchronisation may come first.
            let line = this.line()?;
            if answer(&line).ok().and_then(|id| id.as_u64()) == Some(id) {
                return Ok(this);
            }
        }
    }

    fn left(&self) -> Result<Duration, Trouble> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Trouble::Silent) } else { Ok(left) }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Trouble> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        Ok(self.stream.write_all(bytes)?)
    }

    /// Reads some more.
    fn more(&mut self) -> Result<(), Trouble> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        let mut bytes = [0; 16 << 10];
        match self.stream.read(&mut bytes) {
            Ok(0) => Err(Trouble::Refused("the guest agent's port was closed".into())),
            Ok(len) => {
                self.rest.extend_from_slice(&bytes[..len]);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn skip_to_delimiter(&mut self) -> Result<(), Trouble> {
        loop {
            if let Some(at) = self.rest.iter().position(|byte| *byte == DELIMITER) {
                self.rest.drain(..=at);
                return Ok(());
            }
            // What comes before it is of no use, however much it is.
            self.rest.clear();
            self.more()?;
        }
    }

    fn line(&mut self) -> Result<Vec<u8>, Trouble> {
        let mut looked = 0;
        loop {
            if let Some(at) = self.rest[looked..].iter().position(|byte| *byte == b'\n') {
                let line = self.rest.drain(..=looked + at).collect();
                return Ok(line);
            }
            looked = self.rest.len();
            if looked > ANSWER_LEN_MAX {
                let why = format!("the guest agent's answer is longer than {ANSWER_LEN_MAX} bytes");
                return Err(Trouble::Refused(why));
            }
            self.more()?;
        }
    }

    /// Sends a command that is not answered when it works.
    pub(super) fn order(&mut self, command: &str, arguments: &Value) -> Result<(), Trouble> {
        let line = json!({"execute": command, "arguments": arguments}).to_string() + "\n";
        self.send(line.as_bytes())
    }

    /// Asks, and reads the answer.
    pub(super) fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value, Trouble> {
        self.order(command, arguments)?;
        let line = self.line()?;
        answer(&line).map_err(Trouble::Refused)
    }

    /// Everything that the guest reports. A command that an agent does not have leaves its part out.
    pub(super) fn facts(&mut self) -> Result<GuestFacts, Trouble> {
        let mut facts = GuestFacts::default();
        let nothing = json!({});
        let info = self.ask("guest-info", &nothing)?;
        facts.read_info(&info);
        let mut part = |command: &str| match self.ask(command, &nothing) {
            Ok(said) => Ok(said),
            Err(Trouble::Refused(_)) => Ok(Value::Null),
            Err(Trouble::Silent) => Err(Trouble::Silent),
        };
        facts.read_os(&part("guest-get-osinfo")?);
        facts.read_host_name(&part("guest-get-host-name")?);
        facts.read_interfaces(&part("guest-network-get-interfaces")?);
        facts.read_file_systems(&part("guest-get-fsinfo")?);
        let blocks = part("guest-get-memory-blocks")?;
        facts.read_memory(&blocks, &part("guest-get-memory-block-info")?);
        Ok(facts)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};
    use std::thread;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// An agent that sends these bytes when it has read something.
    fn lying(say: Vec<u8>) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qga");
        let listener = UnixListener::bind(&path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            while stream.write_all(&say).is_ok() && !say.is_empty() {}
            // Open until the other side goes.
            let _ = stream.read(&mut [0; 4096]);
        });
        (dir, path)
    }

    #[test]
    fn a_guest_that_lies_is_bounded() {
        let short = || Instant::now() + Duration::from_millis(200);
        for say in [Vec::new(), b"x".repeat(4096), b"\xff{\"return\": 5}\n".to_vec()] {
            let (_dir, path) = lying(say);
            assert_eq!(Conversation::begin(&path, short()).unwrap_err(), Trouble::Silent);
        }
        let (_dir, path) = lying([&[0xff_u8], &b"[".repeat(1 << 16)[..]].concat());
        let refused = Conversation::begin(&path, soon()).unwrap_err();
        assert!(matches!(refused, Trouble::Refused(ref why) if why.contains("longer")), "{refused}");
    }

    /// The real program, on this host.
    #[test]
    fn the_real_agent_is_understood() {
        let program =
            ["/usr/sbin/qemu-ga", "/usr/bin/qemu-ga"].into_iter().find(|path| Path::new(path).exists());
        let Some(program) = program else {
            println!("skipped: needs qemu-ga [the_real_agent_is_understood]");
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qga");
        let mut child = Command::new(program)
            .args(["-m", "unix-listen", "-p"])
            .arg(&path)
            .arg("-t")
            .arg(dir.path())
            .arg("-f")
            .arg(dir.path().join("pid"))
            .args(["-b", "guest-shutdown,guest-fsfreeze-freeze,guest-exec"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let until = soon();
        let facts = loop {
            match Conversation::begin(&path, until).and_then(|mut agent| agent.facts()) {
                Ok(facts) => break Ok(facts),
                Err(why) if Instant::now() >= until || matches!(child.try_wait(), Ok(Some(_))) => {
                    break Err(why);
                }
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        // A second conversation finds it as the first one left it.
        let again =
            Conversation::begin(&path, until).and_then(|mut agent| agent.ask("guest-ping", &json!({})));
        child.kill().unwrap();
        child.wait().unwrap();
        let facts = facts.unwrap();
        assert_eq!((facts.agent.as_str(), again), ("qemu-guest-agent", Ok(json!({}))));
        assert!(
            !facts.version.is_empty() && !facts.kernel.is_empty() && !facts.host_name.is_empty(),
            "{facts:?}"
        );
        assert!(!facts.can_freeze, "it was told not to: {facts:?}");
    }
}
