//! A client of xenstored: blocking, with a time limit, over the daemon's socket or the kernel's device.
//!
//! ```text
//!   Client, Transaction ── Nodes: read, write, directory … ──▶ exchange ──▶ link: socket or /dev/xen/xenbus
//!                                  many requests, one wait       │ events that come between are kept
//!                                                                ▼ next_event, wait_event
//! ```
//!
//! What is asked together is sent together: a hundred reads cost one round trip, not a hundred.

mod error;
mod link;
mod nodes;
mod transaction;

pub use error::XsError;
pub use nodes::Nodes;
pub use transaction::Transaction;

use std::collections::{HashSet, VecDeque};
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path as FilePath;
use std::time::{Duration, Instant};

use super::wire::{Decoder, Errno, Header, MessageKind, Request, reply};
use link::Link;

/// How long an answer may take: the daemon is busy for milliseconds, never for this long.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Requests in flight at once. It bounds what a daemon has to keep for us.
const WINDOW: usize = 64;
/// Events kept, at most. Equal ones that were not taken yet are kept once, so this is far above any number of nodes.
const EVENTS_MAX: usize = 1 << 20;

/// A watch that was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watch {
    /// What it watches.
    pub path: String,
    /// What comes back in its events.
    pub token: String,
}

/// Something below a watch changed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WatchEvent {
    /// The node.
    pub path: String,
    /// The watch's token.
    pub token: String,
}

/// What a client has asked so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests of every kind, begins and ends of transactions among them.
    pub requests: u64,
    /// Transactions begun.
    pub transactions: u64,
    /// Times it waited for answers; requests that are asked together are one.
    pub round_trips: u64,
}

impl std::ops::Sub for Counts {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(before.requests),
            transactions: self.transactions.saturating_sub(before.transactions),
            round_trips: self.round_trips.saturating_sub(before.round_trips),
        }
    }
}

/// Where answers go that were read.
type AnswerTaker<'a> = dyn FnMut(Header, &[u8]) -> Result<(), XsError> + 'a;

/// What a request was answered with.
pub type Answer = Result<Vec<u8>, Errno>;

/// A connection to xenstored.
///
/// It belongs to one thread. Where it fails with anything but [`XsError::Refused`], it is of no more use; watches and
/// open transactions are gone with it.
#[derive(Debug)]
pub struct Client {
    link: Link,
    decoder: Decoder,
    next_request: u32,
    events: VecDeque<WatchEvent>,
    /// The same events: what is waiting already is not queued again.
    waiting: HashSet<WatchEvent>,
    timeout: Duration,
    counts: Counts,
}

impl Client {
    /// The xenstore of this host: `XENSTORED_PATH`, else the socket in `XENSTORED_RUNDIR` or `/run/xenstored`, else
    /// the kernel's device, as libxenstore does.
    ///
    /// # Errors
    /// None of them is there.
    pub fn open() -> Result<Self, XsError> {
        Link::open().map(Self::over)
    }

    /// Connects to a socket, or opens a device that speaks the same protocol.
    ///
    /// # Errors
    /// It is not there.
    pub fn connect(path: &FilePath) -> Result<Self, XsError> {
        Link::connect(path).map(Self::over)
    }

    /// Uses a stream socket that is connected already.
    ///
    /// # Errors
    /// It cannot be made non-blocking.
    pub fn from_socket(socket: OwnedFd) -> Result<Self, XsError> {
        Link::from_socket(socket).map(Self::over)
    }

    fn over(link: Link) -> Self {
        Self {
            link,
            decoder: Decoder::new(),
            next_request: 1,
            events: VecDeque::new(),
            waiting: HashSet::new(),
            timeout: TIMEOUT,
            counts: Counts::default(),
        }
    }

    /// How long an answer may take, from now on; 30 s otherwise.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Where it is connected.
    pub fn address(&self) -> &str {
        self.link.address()
    }

    /// What it has asked so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Becomes readable when there may be an event: take events with [`Client::next_event`] until there is none, and
    /// only then wait for it.
    pub fn raw_fd(&self) -> RawFd {
        self.link.raw_fd()
    }

    /// Does something in a transaction, and repeats it as long as other clients change the same nodes meanwhile.
    /// Nothing is changed if it fails.
    ///
    /// # Errors
    /// What `work` fails with; [`XsError::Contended`] if others were in the way thirty times.
    pub fn transaction<T>(
        &mut self,
        work: impl FnMut(&mut Transaction<'_>) -> Result<T, XsError>,
    ) -> Result<T, XsError> {
        transaction::run(self, work)
    }

    /// Reports changes to `path` and everything below it. One event comes at once.
    ///
    /// # Errors
    /// `EEXIST` if there is this very watch, `E2BIG` if there are too many.
    pub fn watch(&mut self, path: &str, token: &str) -> Result<Watch, XsError> {
        self.done(&Request::Watch { path, token: token.as_bytes(), depth: None })?;
        Ok(Watch { path: path.into(), token: token.into() })
    }

    /// Ends a watch. Events that came before are still there.
    ///
    /// # Errors
    /// `ENOENT` if there is no such watch.
    pub fn unwatch(&mut self, watch: &Watch) -> Result<(), XsError> {
        self.done(&Request::Unwatch { path: &watch.path, token: watch.token.as_bytes() })
    }

    /// An event that is there, without waiting for one.
    ///
    /// # Errors
    /// The connection failed.
    pub fn next_event(&mut self) -> Result<Option<WatchEvent>, XsError> {
        if self.events.is_empty() {
            self.read_available(&mut |_, _| Ok(()))?;
        }
        Ok(self.take_event())
    }

    /// Waits for an event; `None` once `until` has passed.
    ///
    /// # Errors
    /// The connection failed.
    pub fn wait_event(&mut self, until: Option<Instant>) -> Result<Option<WatchEvent>, XsError> {
        loop {
            if let Some(event) = self.next_event()? {
                return Ok(Some(event));
            }
            if !self.link.wait(false, until)? {
                return Ok(None);
            }
        }
    }

    fn take_event(&mut self) -> Option<WatchEvent> {
        let event = self.events.pop_front()?;
        self.waiting.remove(&event);
        Some(event)
    }

    /// Introduces a domain to xenstored: the frame of its ring and its event channel.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn introduce(&mut self, domid: u32, gfn: u64, port: u32) -> Result<(), XsError> {
        self.done(&Request::Introduce { domid, gfn, port })
    }

    /// Releases a domain that has gone.
    ///
    /// # Errors
    /// The daemon refuses, as for a domain that it does not know.
    pub fn release(&mut self, domid: u32) -> Result<(), XsError> {
        self.done(&Request::Release { domid })
    }

    /// Whether a domain has a ring to xenstored.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn is_introduced(&mut self, domid: u32) -> Result<bool, XsError> {
        let payload = self.one(&Request::IsDomainIntroduced { domid })?;
        Ok(payload.first() == Some(&b'T'))
    }

    /// Where the nodes of a domain are.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn domain_path(&mut self, domid: u32) -> Result<String, XsError> {
        let payload = self.one(&Request::GetDomainPath { domid })?;
        Ok(reply::read_text(MessageKind::GetDomainPath, &payload)?)
    }

    /// A command of the daemon's own, as `["check"]` or `["log", "on"]`.
    ///
    /// # Errors
    /// It does not know it.
    pub fn control(&mut self, words: &[&str]) -> Result<String, XsError> {
        let arguments = reply::strings(words);
        let payload = self.one(&Request::Control { arguments: &arguments })?;
        Ok(reply::read_text(MessageKind::Control, &payload)?)
    }

    /// Sends requests and collects their answers, in the order of the requests.
    pub(crate) fn exchange(
        &mut self,
        transaction: u32,
        requests: &[Request<'_>],
    ) -> Result<Vec<Answer>, XsError> {
        // The round of another transaction may have died in the middle: answers to earlier numbers are skipped.
        let first = self.next_request;
        let mut frames = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            let mut frame = Vec::new();
            request
                .frame(first.wrapping_add(index as u32), transaction, &mut frame)
                .map_err(|error| XsError::Nonsense(format!("{}: {error}", error::what(request))))?;
            frames.push(frame);
        }
        self.next_request = first.wrapping_add(requests.len() as u32);
        self.counts.requests += requests.len() as u64;
        self.counts.round_trips += u64::from(!requests.is_empty());
        let deadline = Instant::now() + self.timeout;
        let mut answers: Vec<Option<Answer>> = vec![None; requests.len()];
        let (mut sent, mut answered) = (0, 0);
        while answered < requests.len() {
            while sent < frames.len() && sent - answered < WINDOW {
                let end = frames.len().min(answered + WINDOW);
                match self.link.send(&mut frames[sent..end])? {
                    0 => break,
                    count => sent += count,
                }
            }
            self.read_available(&mut |header: Header, payload: &[u8]| {
                let index = header.request.wrapping_sub(first) as usize;
                // An answer that was waited for in vain, or to a request that was not sent: not ours.
                let Some(place) = answers.get_mut(index).filter(|place| index < sent && place.is_none())
                else {
                    return Ok(());
                };
                let asked = requests[index].kind();
                *place = Some(match MessageKind::from_number(header.kind) {
                    Some(MessageKind::Error) => Err(read_errno(payload)),
                    kind if kind == Some(asked) => Ok(payload.to_vec()),
                    _ => return Err(XsError::odd(&requests[index], header.kind)),
                });
                answered += 1;
                Ok(())
            })?;
            let more_to_send = sent < frames.len() && sent - answered < WINDOW;
            if answered < requests.len() && !self.link.wait(more_to_send, Some(deadline))? {
                let late = answers.iter().position(Option::is_none).unwrap_or_default();
                return Err(XsError::Timeout { what: error::what(&requests[late]), after: self.timeout });
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Reads what is there: events are kept, answers go to `answer`.
    fn read_available(&mut self, answer: &mut AnswerTaker<'_>) -> Result<(), XsError> {
        let mut bytes = [0; 16 << 10];
        while let Some(len) = self.link.receive(&mut bytes)? {
            self.decoder.push(&bytes[..len]);
            while let Some(message) = self.decoder.next()? {
                if message.kind() != Some(MessageKind::WatchEvent) {
                    answer(message.header, message.payload)?;
                    continue;
                }
                let (path, token) = reply::read_event(message.payload)?;
                let event = WatchEvent { path, token: String::from_utf8_lossy(&token).into_owned() };
                if self.events.len() >= EVENTS_MAX {
                    return Err(XsError::Nonsense(format!("{EVENTS_MAX} events that were not requested")));
                }
                if self.waiting.insert(event.clone()) {
                    self.events.push_back(event);
                }
            }
            if len < bytes.len() {
                break;
            }
        }
        Ok(())
    }

    fn one(&mut self, request: &Request<'_>) -> Result<Vec<u8>, XsError> {
        let answers = self.exchange(0, std::slice::from_ref(request))?;
        match answers.into_iter().next() {
            Some(Ok(payload)) => Ok(payload),
            Some(Err(errno)) => Err(XsError::refused(errno, request)),
            None => Err(XsError::Nonsense("no answer".into())),
        }
    }

    fn done(&mut self, request: &Request<'_>) -> Result<(), XsError> {
        self.one(request).map(drop)
    }
}

fn read_errno(payload: &[u8]) -> Errno {
    reply::read_text(MessageKind::Error, payload).map_or(Errno::EIO, |name| Errno::from_name(&name))
}

impl Nodes for Client {
    fn ask(&mut self, requests: &[Request<'_>]) -> Result<Vec<Answer>, XsError> {
        self.exchange(0, requests)
    }
}

#[cfg(test)]
mod tests;
