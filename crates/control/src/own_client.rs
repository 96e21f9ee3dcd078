//! The asking side of our own protocol.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::own::{Command, Hello, LINE_LEN_MAX, PROTOCOL_VERSION, Reply};
use crate::paths::RunDir;
use crate::socket::{Deadline, receive, send_all, wait};
use crate::{ControlError, Errno, Result};

/// Longest answer: histograms of a thousand disks.
const REPLY_LEN_MAX: usize = 64 * LINE_LEN_MAX;

/// A conversation with a disk process of ours.
#[derive(Debug)]
pub struct OwnClient {
    stream: UnixStream,
    socket: PathBuf,
    hello: Hello,
    next_id: u64,
    rest: Vec<u8>,
}

impl OwnClient {
    /// Connects and greets.
    ///
    /// # Errors
    /// Nobody listens, or who listens does not speak this protocol (`EPROTO`), as a foreign tapdisk.
    pub fn connect(run: &RunDir, id: i32) -> Result<Self> {
        let socket = run.socket(id);
        let stream = UnixStream::connect(&socket).map_err(|error| {
            ControlError::io(format_args!("connecting to {}", socket.display()), &error)
                .next("'tapio disk list' shows the processes there are")
        })?;
        Self::over(stream, socket)
    }

    /// Greets on a stream that is connected already; `socket` is for messages.
    #[doc(hidden)]
    pub fn over(stream: UnixStream, socket: PathBuf) -> Result<Self> {
        let mut client = Self {
            stream,
            socket,
            hello: Hello {
                version: 0,
                features: Vec::new(),
                program: String::new(),
                program_version: String::new(),
                pid: 0,
            },
            next_id: 1,
            rest: Vec::new(),
        };
        client.hello = client
            .call(&Command::Hello { version: PROTOCOL_VERSION }, &[], Some(Duration::from_secs(10)))
            .map_err(|error| match error.errno {
                Errno::ECONNRESET | Errno::EPIPE | Errno::ETIMEDOUT => client
                    .error(Errno::EPROTO, "it does not speak this protocol")
                    .next("it may be a foreign tapdisk: use tap-ctl"),
                _ => error,
            })?;
        Ok(client)
    }

    /// What the process said of itself.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Asks one thing; descriptors go along.
    ///
    /// # Errors
    /// What the process answers, or `ETIMEDOUT`.
    pub fn call<T: DeserializeOwned>(
        &mut self,
        command: &Command,
        fds: &[BorrowedFd<'_>],
        timeout: Option<Duration>,
    ) -> Result<T> {
        let deadline = Deadline::after(timeout);
        let id = self.next_id;
        self.next_id += 1;
        let mut value = serde_json::to_value(command)
            .map_err(|error| self.error(Errno::EINVAL, &format!("the command cannot be written: {error}")))?;
        value["id"] = id.into();
        let mut line = value.to_string();
        line.push('\n');
        if line.len() > LINE_LEN_MAX {
            return Err(self.error(Errno::EMSGSIZE, "the command is too long"));
        }
        send_all(&self.stream, line.as_bytes(), fds, deadline).map_err(|error| self.io("sending", &error))?;
        let line = self.line(deadline)?;
        let reply: Reply = serde_json::from_slice(&line)
            .map_err(|error| self.error(Errno::EPROTO, &format!("its answer was not understood: {error}")))?;
        if let Some(error) = reply.error {
            return Err(error.into());
        }
        if reply.id != id {
            return Err(self.error(Errno::EPROTO, "it answered another question"));
        }
        T::deserialize(reply.ok.unwrap_or(Value::Null))
            .map_err(|error| self.error(Errno::EPROTO, &format!("its answer was not understood: {error}")))
    }

    fn line(&mut self, deadline: Deadline) -> Result<Vec<u8>> {
        use std::os::fd::AsFd;
        let mut searched = 0;
        loop {
            if let Some(end) = self.rest[searched..].iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.rest.drain(..=searched + end).collect();
                line.pop();
                return Ok(line);
            }
            searched = self.rest.len();
            if searched > REPLY_LEN_MAX {
                return Err(self.error(Errno::EMSGSIZE, "its answer does not end"));
            }
            let ready = wait([(self.stream.as_fd(), libc::POLLIN)], deadline);
            if ready.map_err(|error| self.io("waiting", &error))? == [false] {
                return Err(self.io("waiting for the answer", &io::ErrorKind::TimedOut.into()));
            }
            let mut bytes = [0; 16 * 1024];
            match receive(&self.stream, &mut bytes, &mut Vec::new()) {
                Ok(0) => return Err(self.io("waiting for the answer", &io::ErrorKind::UnexpectedEof.into())),
                Ok(len) => self.rest.extend_from_slice(&bytes[..len]),
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(self.io("waiting for the answer", &error)),
            }
        }
    }

    fn error(&self, errno: Errno, why: &str) -> ControlError {
        ControlError::new(errno, format!("{}: {why}", self.socket.display()))
    }

    fn io(&self, doing: &str, error: &io::Error) -> ControlError {
        ControlError::io(format_args!("{}: {doing}", self.socket.display()), error)
    }
}
