//! A remote export as a storage.
//!
//! Requests are pipelined over one connection, or several where the server says that they see one coherent disk. When a
//! connection is lost, what had no answer is asked again on another or on the next one; while there is none, requests
//! wait as long as the target says. A silent server is treated as a lost one if the target has a time limit.
//!
//! # What a lost connection means for data
//!
//! Asking again is safe: a request without an answer guarantees nothing, and doing it twice is doing it once. What is
//! not safe is a write that *was* answered, and not flushed: a server that was restarted may have lost it, and the
//! protocol has no way to tell a restart from a broken cable. So after a reconnection with such writes the next flush
//! fails with EIO, once, like `fsync` on a file whose pages could not be written; the guest then knows that something
//! is gone. `unflushed=keep` leaves that out, for servers that are known to keep what they answered.
//!
//! One hazard remains, and is the protocol's: a server that was *silent*, not dead, may still execute what it has of a
//! connection that was closed, after newer writes through another one. It can happen only with a time limit
//! (`timeout=`), or when the network between breaks while the server goes on and is slow; so there is no time limit
//! unless one is asked for.

mod connection;
mod dial;
mod operation;
mod receiver;
mod redial;
mod sender;
mod slots;
mod status;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use tapio_ring::uring::Uring;
use tapio_ring::{Io, Notify, PageBuf, Segments, Storage, StorageInfo, Tasks, Zeroing};
use tapio_types::{Access, Span};

use connection::{Connection, Facts};
use dial::Dialled;
use operation::{Effect, Operation, Request};
use slots::{Ask, Outcome, SLOTS, SlotState, Slots};
use status::Status;

use crate::client::ExportInfo;
use crate::target::{Endpoint, Target};
use crate::tls::TlsClient;
use crate::wire::{Style, command, command_flag, transmission_flag};

/// A range that is zeroed by one request: a server that writes zeroes by hand shall still answer in time.
const ZERO_LEN_MAX: u64 = 128 << 20;
/// Zeroes written by hand go in pieces of this size.
const ZERO_PIECE: usize = 256 << 10;
/// A question about extents covers at least this much, so that the next ones need not be asked.
const STATUS_LEN: u64 = 1 << 30;

/// What the tasks of a storage have in common.
pub(crate) struct Inner {
    uring: Uring,
    target: Target,
    tls: Option<TlsClient>,
    access: Access,
    report: fn(&str),
    facts: Cell<Facts>,
    slots: RefCell<Slots>,
    /// Requests that wait to be sent.
    queue: RefCell<VecDeque<u32>>,
    /// Connections in use.
    connections: RefCell<Vec<Rc<Connection>>>,
    next_number: Cell<u64>,
    /// Something is in the queue, or a connection changed: senders look.
    work: Notify,
    /// A place for a request is free.
    freed: Notify,
    /// A request was queued: the watch looks.
    busy: Notify,
    /// The storage is being closed.
    stopped: Notify,
    closing: Cell<bool>,
    /// Since when there has been no connection.
    down_since: Cell<Option<u64>>,
    /// For too long: requests fail.
    refusing: Cell<bool>,
    last_failure: RefCell<String>,
    /// Writes answered so far, and how many of them a flush has covered.
    written: Cell<u64>,
    flushed: Cell<u64>,
    /// Writes answered when a connection was lost, if not all of them were flushed.
    suspect: Cell<Option<u64>>,
    /// Such writes may be gone, and no flush has said so yet.
    writes_lost: Cell<bool>,
    /// Writes in flight, and how many there have been.
    writing: Cell<u64>,
    changes: Cell<u64>,
    status: RefCell<Status>,
}

impl Inner {
    fn tasks(&self) -> &Tasks {
        self.uring.tasks()
    }

    fn has(&self, flag: u16) -> bool {
        self.facts.get().flags & flag != 0
    }

    /// A sender waits for something to send; false when its connection is of no use any more.
    async fn wait_work(&self, connection: &Connection) -> bool {
        while !connection.is_broken() {
            if !self.queue.borrow().is_empty() {
                return true;
            }
            self.work.wait(self.tasks()).await;
        }
        false
    }

    /// Whether other connections may take something of what waits.
    fn has_work_for_others(&self) -> bool {
        !self.queue.borrow().is_empty() && self.connections.borrow().len() > 1
    }

    /// A request has ended: its task is woken.
    fn finish(&self, index: u32) {
        let task = {
            let mut slots = self.slots.borrow_mut();
            let slot = slots.at(index);
            slot.state = SlotState::Done;
            slot.task
        };
        self.tasks().wake(task);
    }

    /// A flush went well.
    fn flushed(&self, covered: u64) -> io::Result<()> {
        self.flushed.set(self.flushed.get().max(covered));
        if self.writes_lost.take() {
            let why = format!(
                "{}: the server may have lost writes that it had answered, when the connection was lost",
                self.target
            );
            return Err(io::Error::other(why));
        }
        Ok(())
    }

    fn error(&self, outcome: Outcome) -> io::Error {
        match outcome {
            Outcome::Refused(errno) => io::Error::from_raw_os_error(errno),
            Outcome::Silent => io::Error::new(
                io::ErrorKind::TimedOut,
                format!("{}: the server does not answer", self.target),
            ),
            Outcome::Done | Outcome::Unreachable => {
                let why = format!("{} is unreachable: {}", self.target, self.last_failure.borrow());
                io::Error::new(io::ErrorKind::NotConnected, why)
            }
        }
    }
}

/// An export of an NBD server, used through the ring of one thread. Dropping it says goodbye.
pub struct NbdStore {
    inner: Rc<Inner>,
}

impl std::fmt::Debug for NbdStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NbdStore").field("target", &self.inner.target).finish_non_exhaustive()
    }
}

impl Drop for NbdStore {
    fn drop(&mut self) {
        self.inner.close();
    }
}

impl NbdStore {
    /// Connects to `target`, by one attempt, and keeps connected from then on. `report` gets a line for each connection
    /// that is lost or made again.
    ///
    /// # Errors
    /// The server cannot be reached or refuses; the export is read-only but shall be written, or has larger blocks than
    /// a disk.
    pub async fn open(uring: &Uring, target: Target, access: Access, report: fn(&str)) -> io::Result<Self> {
        let host = match &target.endpoint {
            Endpoint::Tcp { host, .. } => host.as_str(),
            Endpoint::Unix(_) => "localhost",
        };
        let tls = target.tls.as_ref().map(|options| TlsClient::load(options, host)).transpose()?;
        let first = dial::dial(uring, &target, tls.as_ref()).await?;
        Self::begin(uring, target, tls, access, report, first)
    }

    /// A storage on a connection that is there already, with extents if it has structured replies: for fuzzers
    /// alone.
    #[doc(hidden)]
    pub fn over(
        uring: &Uring,
        target: Target,
        fd: OwnedFd,
        style: Style,
        export: ExportInfo,
    ) -> io::Result<Self> {
        let allocation = (style != Style::Simple).then_some(1);
        let first = Dialled { fd, export, style, allocation, tls: None };
        Self::begin(uring, target, None, Access::ReadWrite, |_| {}, first)
    }

    fn begin(
        uring: &Uring,
        target: Target,
        tls: Option<TlsClient>,
        access: Access,
        report: fn(&str),
        first: Dialled,
    ) -> io::Result<Self> {
        let facts = Facts::of(&first, access)?;
        let many = facts.flags & transmission_flag::CAN_MULTI_CONN != 0;
        let count = if many { target.connections } else { 1 };
        let timeout_ns = target.timeout.map(|timeout| timeout.as_nanos() as u64);
        let inner = Rc::new(Inner {
            uring: uring.clone(),
            target,
            tls,
            access,
            report,
            facts: Cell::new(facts),
            slots: RefCell::new(Slots::new()),
            queue: RefCell::new(VecDeque::with_capacity(SLOTS)),
            connections: RefCell::default(),
            next_number: Cell::new(0),
            work: Notify::default(),
            freed: Notify::default(),
            busy: Notify::default(),
            stopped: Notify::default(),
            closing: Cell::new(false),
            down_since: Cell::new(None),
            refusing: Cell::new(false),
            last_failure: RefCell::default(),
            written: Cell::new(0),
            flushed: Cell::new(0),
            suspect: Cell::new(None),
            writes_lost: Cell::new(false),
            writing: Cell::new(0),
            changes: Cell::new(0),
            status: RefCell::default(),
        });
        let mut next = Some(inner.enter(first)?);
        for _ in 0..count {
            uring.tasks().spawn(redial::run(Rc::clone(&inner), next.take()));
        }
        if let Some(timeout_ns) = timeout_ns {
            uring.tasks().spawn(Rc::clone(&inner).watch(timeout_ns));
        }
        Ok(Self { inner })
    }

    /// What it is connected to.
    pub fn target(&self) -> &Target {
        &self.inner.target
    }

    /// Connections in use now.
    pub fn connections(&self) -> usize {
        self.inner.connections.borrow().len()
    }

    fn request(&self, ask: Ask, kind: Effect) -> Request<'_> {
        Request::new(&self.inner, ask, kind)
    }

    fn transfer(&self, command: u16, at: u64, data: Segments) -> Request<'_> {
        let ask = Ask { command, flags: 0, offset: at, len: data.len(), data };
        self.request(ask, if command == command::WRITE { Effect::Change } else { Effect::Plain })
    }

    /// What one request may carry is one; more goes in parts.
    fn move_data(&self, command: u16, at: u64, data: Segments) -> Operation<'_> {
        match data.len() {
            0 => Operation::DONE,
            len if len > self.inner.facts.get().payload_max => {
                Operation::Many(Box::pin(self.transfer_in_parts(command, at, data)))
            }
            _ => Operation::One(self.transfer(command, at, data)),
        }
    }

    async fn transfer_in_parts(&self, command: u16, at: u64, data: Segments) -> io::Result<()> {
        let max = self.inner.facts.get().payload_max;
        let mut done = 0;
        while done < data.len() {
            let piece = data.slice(done, (data.len() - done).min(max));
            self.transfer(command, at + done, piece).await?;
            done += piece.len();
        }
        Ok(())
    }

    fn check(&self, at: u64, len: u64) -> io::Result<()> {
        if Span::new(at, len).fits(self.len()) {
            return Ok(());
        }
        let why = format!("{len} bytes at {at} are not inside an export of {} bytes", self.len());
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    }

    fn check_writable(&self) -> io::Result<()> {
        match self.inner.access {
            Access::ReadWrite => Ok(()),
            Access::ReadOnly => Err(io::Error::from_raw_os_error(libc::EROFS)),
        }
    }

    async fn zero_in_parts(&self, span: Span, flags: u16) -> io::Result<()> {
        let mut left = span;
        while !left.is_empty() {
            let piece = left.prefix(ZERO_LEN_MAX);
            let (offset, len) = (piece.start, piece.len);
            let command = command::WRITE_ZEROES;
            self.request(Ask { command, flags, offset, len, data: Segments::EMPTY }, Effect::Change).await?;
            left = left.skip(len);
        }
        Ok(())
    }

    async fn zero_by_hand(&self, span: Span) -> io::Result<()> {
        let piece_len = ZERO_PIECE.min(self.inner.facts.get().payload_max as usize);
        let mut zeroes = PageBuf::zeroed(piece_len.min(span.len as usize));
        let mut left = span;
        while !left.is_empty() {
            let len = left.len.min(zeroes.len() as u64);
            let written;
            (zeroes, written) = self.write_from(left.start, zeroes, 0..len as usize).await;
            written?;
            left = left.skip(len);
        }
        Ok(())
    }

    /// Asks where there is data, if that is not known.
    async fn ask_status(&self, span: Span) -> (u64, bool) {
        let inner = &*self.inner;
        loop {
            {
                let status = inner.status.borrow();
                if status.useless || span.is_empty() {
                    return (span.len, true);
                }
                if !status.busy {
                    if let Some(run) = status.run(span) {
                        return run;
                    }
                    break;
                }
            }
            inner.freed.wait(inner.tasks()).await;
        }
        let len = span.len.max(STATUS_LEN).min(self.len().saturating_sub(span.start));
        let (changes, quiet) = (inner.changes.get(), inner.writing.get() == 0);
        inner.status.borrow_mut().begin(span.start);
        let command = command::BLOCK_STATUS;
        let ask = Ask { command, flags: 0, offset: span.start, len, data: Segments::EMPTY };
        let asked = self.request(ask, Effect::Plain).await;
        let mut status = inner.status.borrow_mut();
        status.busy = false;
        let refused = asked.as_ref().is_err_and(|error| error.raw_os_error().is_some());
        status.useless |= refused;
        let run = if asked.is_ok() { status.run(span) } else { None };
        if asked.is_err() || !quiet || changes != inner.changes.get() {
            status.forget();
        }
        drop(status);
        inner.freed.notify_all(inner.tasks());
        run.unwrap_or((span.len, true))
    }
}

// SAFETY: a request's slot is answered, and its memory forgotten, before its future ends.
unsafe impl Storage for NbdStore {
    fn info(&self) -> StorageInfo {
        StorageInfo {
            align: self.inner.facts.get().align,
            sector_len: self.inner.facts.get().align.max(512),
            resizable: false,
            fresh_reads_zero: false,
            promises_space: false,
        }
    }

    fn len(&self) -> u64 {
        self.inner.facts.get().len
    }

    async fn data_run(&self, span: Span) -> (u64, bool) {
        let status = self.inner.status.borrow();
        if status.busy { (span.len, true) } else { status.run(span).unwrap_or((span.len, true)) }
    }

    async fn known_runs(&self, span: Span, _count_max: usize) -> Vec<(u64, bool)> {
        vec![self.ask_status(span).await]
    }

    fn read(&self, at: u64, into: Segments) -> impl Future<Output = io::Result<()>> {
        match self.check(at, into.len()) {
            Ok(()) => self.move_data(command::READ, at, into),
            Err(error) => Operation::failed(error),
        }
    }

    fn write(&self, at: u64, from: Segments) -> impl Future<Output = io::Result<()>> {
        if let Err(error) = self.check_writable() {
            return Operation::failed(error);
        }
        if !Span::new(at, from.len()).fits(self.len()) {
            return Operation::failed(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.move_data(command::WRITE, at, from)
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> {
        let inner = &*self.inner;
        // A server without FLUSH says that answered is durable. What is only read here another may have written before.
        if !inner.has(transmission_flag::SEND_FLUSH) {
            return Operation::DONE;
        }
        let (command, data) = (command::FLUSH, Segments::EMPTY);
        let ask = Ask { command, flags: 0, offset: 0, len: 0, data };
        Operation::One(self.request(ask, Effect::Flush { covered: inner.written.get() }))
    }

    fn zero(&self, span: Span, how: Zeroing) -> impl Future<Output = io::Result<()>> {
        if let Err(error) = self.check_writable().and_then(|()| self.check(span.start, span.len)) {
            return Operation::failed(error);
        }
        if !self.inner.has(transmission_flag::SEND_WRITE_ZEROES) {
            return Operation::Many(Box::pin(self.zero_by_hand(span)));
        }
        let flags = match how {
            Zeroing::Unmap | Zeroing::Discard => 0,
            Zeroing::Keep => command_flag::NO_HOLE,
        };
        Operation::Many(Box::pin(self.zero_in_parts(span, flags)))
    }

    async fn allocate(&self, span: Span, _space: bool) -> io::Result<()> {
        let fits = span.fits(self.len());
        if fits { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) }
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        if len == self.len() {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::Unsupported, "an NBD export cannot be resized by its client"))
    }
}
