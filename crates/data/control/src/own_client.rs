//! The asking side of our own protocol.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tapio_sys::poll::PollFlags;

use crate::command::{self, Command, DiskCommand};
use crate::own::{Hello, LINE_LEN_MAX, PROTOCOL_VERSION, Reply};
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

fn connected(socket: &Path) -> Result<UnixStream> {
    UnixStream::connect(socket).map_err(|error| {
        ControlError::io(format_args!("connecting to {}", socket.display()), &error)
            .next("'tapio disk list' shows the processes there are")
    })
}

impl OwnClient {
    /// Connects and greets.
    ///
    /// # Errors
    /// No process listens; or the listener says nothing (`ETIMEDOUT`), or does not speak this protocol (`EPROTO`), as a
    /// foreign tapdisk.
    pub fn connect(run: &RunDir, id: i32) -> Result<Self> {
        let socket = run.socket(id);
        Self::over(connected(&socket)?, socket)
    }

    /// Connects, greets and asks the first thing in one go; the answer is what it answers.
    ///
    /// # Errors
    /// As [`Self::connect`], and what the process answers.
    pub fn connect_and_call<C: DiskCommand>(
        run: &RunDir,
        id: i32,
        command: &C,
        timeout: Option<Duration>,
    ) -> Result<(Self, C::Reply)> {
        let socket = run.socket(id);
        let mut client = Self::of(connected(&socket)?, socket);
        let commands = [command::Hello { version: PROTOCOL_VERSION }.into(), command.clone().into()];
        let mut answers = client.call_all(&commands, timeout).map_err(|error| client.foreign(error))?;
        let (answer, hello) = (answers.pop().unwrap_or_default(), answers.pop().unwrap_or_default());
        client.hello = Hello::deserialize(hello).map_err(|error| {
            client.error(Errno::EPROTO, &format!("its greeting was not understood: {error}"))
        })?;
        let answer = client.understood(answer)?;
        Ok((client, answer))
    }

    /// Asks several things in one go: what follows one that fails is asked all the same. Answers as many answers.
    ///
    /// # Errors
    /// The first that the process answers, or `ETIMEDOUT`.
    pub fn call_all(&mut self, commands: &[Command], timeout: Option<Duration>) -> Result<Vec<Value>> {
        let deadline = Deadline::after(timeout);
        let first = self.next_id;
        let mut lines = String::new();
        for command in commands {
            let line = self.line_of(command)?;
            lines.push_str(&line);
        }
        send_all(&self.stream, lines.as_bytes(), &[], deadline)
            .map_err(|error| self.io("sending", &error))?;
        let (mut answers, mut failure) = (Vec::new(), None);
        for id in first..self.next_id {
            match self.reply(id, deadline)? {
                Ok(answer) => answers.push(answer),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(answers), Err)
    }

    /// Greets on a stream that is connected already; `socket` is for messages.
    #[doc(hidden)]
    pub fn over(stream: UnixStream, socket: PathBuf) -> Result<Self> {
        let mut client = Self::of(stream, socket);
        client.hello = client
            .call(&command::Hello { version: PROTOCOL_VERSION }, &[], Some(Duration::from_secs(10)))
            .map_err(|error| client.foreign(error))?;
        Ok(client)
    }

    fn of(stream: UnixStream, socket: PathBuf) -> Self {
        Self {
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
        }
    }

    /// What the failure of a greeting means. A foreign tapdisk hangs up; a process that is silent may be one of ours
    /// that has not had its turn.
    fn foreign(&self, error: ControlError) -> ControlError {
        match error.errno {
            Errno::ECONNRESET | Errno::EPIPE => self
                .error(Errno::EPROTO, "it does not speak this protocol")
                .next("it may be a foreign tapdisk: use tap-ctl"),
            _ => error,
        }
    }

    /// What the process said of itself.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Asks one thing; descriptors go along.
    ///
    /// # Errors
    /// What the process answers, or `ETIMEDOUT`.
    pub fn call<C: DiskCommand>(
        &mut self,
        command: &C,
        fds: &[BorrowedFd<'_>],
        timeout: Option<Duration>,
    ) -> Result<C::Reply> {
        self.ask(command, fds, timeout)?
    }

    /// As [`Self::call`]; the inner error is what the process answers.
    ///
    /// # Errors
    /// The conversation failed: what became of the command is not known.
    pub fn ask<C: DiskCommand>(
        &mut self,
        command: &C,
        fds: &[BorrowedFd<'_>],
        timeout: Option<Duration>,
    ) -> Result<Result<C::Reply>> {
        let deadline = Deadline::after(timeout);
        let id = self.next_id;
        let line = self.line_of(&command.clone().into())?;
        send_all(&self.stream, line.as_bytes(), fds, deadline).map_err(|error| self.io("sending", &error))?;
        match self.reply(id, deadline)? {
            Ok(answer) => self.understood(answer).map(Ok),
            Err(error) => Ok(Err(error)),
        }
    }

    fn understood<T: DeserializeOwned>(&self, answer: Value) -> Result<T> {
        T::deserialize(answer)
            .map_err(|error| self.error(Errno::EPROTO, &format!("its answer was not understood: {error}")))
    }

    /// A command as a line with the next number.
    fn line_of(&mut self, command: &Command) -> Result<String> {
        let mut value = serde_json::to_value(command)
            .map_err(|error| self.error(Errno::EINVAL, &format!("the command cannot be written: {error}")))?;
        value["id"] = self.next_id.into();
        let mut line = value.to_string();
        line.push('\n');
        if line.len() > LINE_LEN_MAX {
            return Err(self.error(Errno::EMSGSIZE, "the command is too long"));
        }
        self.next_id += 1;
        Ok(line)
    }

    /// What the process answers to the command of a number; the outer error is about the conversation.
    fn reply(&mut self, id: u64, deadline: Deadline) -> Result<Result<Value>> {
        let line = self.line(deadline)?;
        let reply: Reply = serde_json::from_slice(&line)
            .map_err(|error| self.error(Errno::EPROTO, &format!("its answer was not understood: {error}")))?;
        if let Some(error) = reply.error {
            return Ok(Err(error.into()));
        }
        if reply.id != id {
            return Err(self.error(Errno::EPROTO, "it answered another question"));
        }
        Ok(Ok(reply.ok.unwrap_or(Value::Null)))
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
            let ready = wait([(self.stream.as_fd(), PollFlags::IN)], deadline);
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_silent_peer_is_not_taken_for_a_foreign_tapdisk() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let run = RunDir::new(dir.path());
        let listener = UnixListener::bind(run.socket(7)).expect("bound");
        let ask = |timeout| {
            let asked = OwnClient::connect_and_call(&run, 7, &command::List {}, Some(timeout));
            asked.map(drop).expect_err("no answer")
        };
        // In the listener's queue, as before a process that is stopped or starved.
        assert_eq!(ask(Duration::from_millis(20)).errno, Errno::ETIMEDOUT);
        drop(listener.accept().expect("the first"));
        let hangs_up = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("the second");
            let _ = io::Read::read(&mut stream, &mut [0; 16]);
        });
        let error = ask(Duration::from_secs(60));
        assert_eq!(error.errno, Errno::EPROTO);
        assert!(error.to_string().contains("foreign tapdisk"), "{error}");
        hangs_up.join().expect("it hung up");
    }
}
