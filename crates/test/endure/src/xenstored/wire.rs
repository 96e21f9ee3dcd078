//! A client of xenstored as the protocol has it, a request at a time; nothing of it is shared with the daemon.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// What a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RequestKind {
    Directory = 1,
    Read = 2,
    TransactionStart = 6,
    TransactionEnd = 7,
    Write = 11,
    Remove = 13,
}

const ERROR: u32 = 16;

/// Type, request, transaction and length, each a word in the order of this host.
const HEADER_LEN: usize = 16;

/// The longest payload.
const PAYLOAD_MAX: usize = 4096;

/// Why there is no answer, or none that was hoped for.
#[derive(Debug)]
pub enum Failure {
    /// The connection.
    Io(io::Error),
    /// The daemon says so, as `ENOENT`.
    Refused(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Refused(name) => f.write_str(name),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A connection.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    requests: u32,
}

impl Client {
    /// Connects; an answer has to come within `limit`.
    pub fn connect(socket: &Path, limit: Duration) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        Ok(Self { stream, requests: 0 })
    }

    fn ask(&mut self, kind: RequestKind, transaction: u32, payload: &[u8]) -> Result<Vec<u8>, Failure> {
        self.requests += 1;
        let words = [kind as u32, self.requests, transaction, payload.len() as u32];
        let message: Vec<u8> =
            words.iter().flat_map(|word| word.to_ne_bytes()).chain(payload.iter().copied()).collect();
        self.stream.write_all(&message)?;
        let mut header = [0; HEADER_LEN];
        self.stream.read_exact(&mut header)?;
        let word = |index: usize| u32::from_ne_bytes(header.as_chunks::<4>().0[index]);
        let (answer, request, len) = (word(0), word(1), word(3) as usize);
        let odd = |what: String| Err(Failure::Refused(what));
        if request != self.requests || len > PAYLOAD_MAX {
            return odd(format!(
                "an answer of {len} bytes to request {request} instead of {}",
                self.requests
            ));
        }
        let mut payload = vec![0; len];
        self.stream.read_exact(&mut payload)?;
        match answer {
            ERROR => odd(String::from_utf8_lossy(&payload).trim_end_matches('\0').to_owned()),
            answer if answer == kind as u32 => Ok(payload),
            answer => odd(format!("an answer of kind {answer} to {kind:?}")),
        }
    }

    fn named(path: &str) -> Vec<u8> {
        [path.as_bytes(), &[0]].concat()
    }

    /// The value of a node.
    pub fn read(&mut self, transaction: u32, path: &str) -> Result<Vec<u8>, Failure> {
        self.ask(RequestKind::Read, transaction, &Self::named(path))
    }

    /// The names of its children.
    pub fn directory(&mut self, transaction: u32, path: &str) -> Result<Vec<String>, Failure> {
        let names = self.ask(RequestKind::Directory, transaction, &Self::named(path))?;
        let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    /// Gives a node a value, and makes it and those above it where they are missing.
    pub fn write(&mut self, transaction: u32, path: &str, value: &[u8]) -> Result<(), Failure> {
        self.ask(RequestKind::Write, transaction, &[&Self::named(path), value].concat()).map(drop)
    }

    /// Removes a node with all below it.
    pub fn remove(&mut self, transaction: u32, path: &str) -> Result<(), Failure> {
        self.ask(RequestKind::Remove, transaction, &Self::named(path)).map(drop)
    }

    /// Begins a transaction.
    pub fn begin(&mut self) -> Result<u32, Failure> {
        let number = self.ask(RequestKind::TransactionStart, 0, &[0])?;
        let number = String::from_utf8_lossy(&number).trim_end_matches('\0').parse();
        number.map_err(|_| Failure::Refused("a transaction without a number".into()))
    }

    /// Ends it.
    pub fn end(&mut self, transaction: u32, commit: bool) -> Result<(), Failure> {
        self.ask(RequestKind::TransactionEnd, transaction, if commit { b"T\0" } else { b"F\0" }).map(drop)
    }
}
