//! A connection in use, and what becomes of requests when it is lost.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::{Rc, Weak};

use rustix::net::SendFlags;
use tapio_ring::Notify;
use tapio_types::Access;

use super::Inner;
use super::dial::Dialled;
use super::slots::{Outcome, SlotState};
use crate::target::Unflushed;
use crate::tls::Status;
use crate::wire::{RequestHeader, Style, command, put_request, transmission_flag};

/// Connections that may be lost under a request before the request is what is wrong.
const LOSSES_MAX: u8 = 16;
/// Times a server may be silent on a request.
const SILENCES_MAX: u8 = 2;

/// A connection in the transmission phase.
#[derive(Debug)]
pub(super) struct Connection {
    /// Its number among the connections of the storage.
    pub(super) number: u64,
    pub(super) style: Style,
    fd: OwnedFd,
    tls: Option<Status>,
    broken: Cell<bool>,
    why: RefCell<String>,
    pub(super) sender_gone: Cell<bool>,
    pub(super) changed: Notify,
}

impl Connection {
    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.get()
    }

    /// What ended its TLS, if that failed.
    pub(super) fn tls_failure(&self) -> Option<String> {
        self.tls.as_ref().and_then(Status::failure).map(|failure| failure.to_string())
    }

    /// Sends the disconnect request if the socket has room, so that the server does not take the end for a loss.
    fn say_goodbye(&self) {
        let header = RequestHeader { flags: 0, command: command::DISC, cookie: 0, offset: 0, len: 0 };
        let mut bytes = Vec::new();
        put_request(self.style, &header, &mut bytes);
        // A server that does not read it sees the end of the stream.
        let _ = rustix::net::send(&self.fd, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

impl Inner {
    /// Takes a connection into use, if it leads to the export that was opened.
    pub(super) fn enter(&self, dialled: Dialled) -> io::Result<Rc<Connection>> {
        if self.closing.get() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let (old, new) = (self.facts.get(), Facts::of(&dialled, self.access)?);
        if new.len < old.len {
            let why = format!("the export has shrunk from {} to {} bytes", old.len, new.len);
            return Err(io::Error::other(why));
        }
        let missing =
            old.flags & !new.flags & (transmission_flag::SEND_FLUSH | transmission_flag::SEND_WRITE_ZEROES);
        if missing != 0 || new.payload_max < old.payload_max || new.align > old.align {
            return Err(io::Error::other("the export can do less than when it was opened"));
        }
        self.facts.set(Facts { len: new.len, ..old });
        if let Some(written) = self.suspect.take()
            && written > self.flushed.get()
            && self.target.unflushed == Unflushed::Fail
        {
            self.writes_lost.set(true);
            (self.report)(&format!(
                "{}: the server may have been restarted with writes that were answered and not flushed; the next \
                 flush fails",
                self.target
            ));
        }
        let number = self.next_number.get();
        self.next_number.set(number + 1);
        let connection = Rc::new(Connection {
            number,
            style: dialled.style,
            fd: dialled.fd,
            tls: dialled.tls,
            broken: Cell::new(false),
            why: RefCell::default(),
            sender_gone: Cell::new(false),
            changed: Notify::default(),
        });
        self.status.borrow_mut().useless = dialled.allocation.is_none();
        self.connections.borrow_mut().push(Rc::clone(&connection));
        if let Some(since) = self.down_since.take() {
            let seconds = (self.tasks().turn_ns() - since) as f64 / 1e9;
            (self.report)(&format!("{}: connected again after {seconds:.1} s", self.target));
        }
        self.refusing.set(false);
        self.work.notify_all(self.tasks());
        Ok(connection)
    }

    /// Ends a connection: both of its tasks notice.
    pub(super) fn break_off(&self, connection: &Connection, why: &str) {
        if connection.broken.replace(true) {
            return;
        }
        why.clone_into(&mut connection.why.borrow_mut());
        // An error means that the peer is gone already.
        let _ = rustix::net::shutdown(&connection.fd, rustix::net::Shutdown::Both);
        self.work.notify_all(self.tasks());
    }

    /// Lets the connections go, and with them the tasks.
    pub(super) fn close(&self) {
        self.closing.set(true);
        for connection in self.connections.borrow().iter() {
            connection.say_goodbye();
            self.break_off(connection, "closed");
        }
        self.stopped.notify_all(self.tasks());
        self.busy.notify_all(self.tasks());
    }

    /// What a lost connection had in flight goes to the next, or fails.
    pub(super) fn lost(self: &Rc<Self>, connection: &Rc<Connection>) {
        self.connections.borrow_mut().retain(|other| !Rc::ptr_eq(other, connection));
        let mut ended = Vec::new();
        {
            let mut slots = self.slots.borrow_mut();
            let mut queue = self.queue.borrow_mut();
            for (index, slot) in slots.iter_mut() {
                if slot.state != SlotState::Flying(connection.number) {
                    continue;
                }
                slot.sending = false;
                slot.losses += 1;
                if slot.answered {
                    ended.push(index);
                } else if slot.silences >= SILENCES_MAX {
                    slot.outcome = Outcome::Silent;
                    ended.push(index);
                } else if slot.losses > LOSSES_MAX {
                    slot.outcome = Outcome::Unreachable;
                    ended.push(index);
                } else {
                    // Reads and writes alike: the caller got no reply, so doing it again changes nothing.
                    (slot.state, slot.got, slot.outcome) = (SlotState::Queued, 0, Outcome::Done);
                    queue.push_back(index);
                }
            }
        }
        for index in ended {
            self.finish(index);
        }
        if self.closing.get() {
            return;
        }
        if self.written.get() > self.flushed.get() && self.has(transmission_flag::SEND_FLUSH) {
            self.suspect.set(Some(self.written.get()));
        }
        let why = connection.why.borrow().clone();
        (self.report)(&format!("{}: connection lost: {why}", self.target));
        self.note_failure(&why);
        if self.connections.borrow().is_empty() {
            self.down();
        } else {
            self.work.notify_all(self.tasks());
        }
    }

    /// No connection is left.
    fn down(self: &Rc<Self>) {
        let now = self.tasks().turn_ns();
        self.down_since.set(Some(now));
        let limit = self.target.reconnect.as_nanos() as u64;
        if limit == 0 {
            return self.refuse();
        }
        let me: Weak<Self> = Rc::downgrade(self);
        let tasks = self.tasks().clone();
        self.tasks().spawn(async move {
            tasks.sleep_until(now + limit).await;
            if let Some(inner) = me.upgrade()
                && inner.down_since.get() == Some(now)
            {
                inner.refuse();
            }
        });
    }

    /// Requests have waited long enough: they fail, and so do new ones until there is a connection again.
    fn refuse(&self) {
        self.refusing.set(true);
        (self.report)(&format!("{}: requests fail: {}", self.target, self.last_failure.borrow()));
        loop {
            let Some(index) = self.queue.borrow_mut().pop_front() else { break };
            self.slots.borrow_mut().at(index).outcome = Outcome::Unreachable;
            self.finish(index);
        }
        self.freed.notify_all(self.tasks());
    }

    pub(super) fn note_failure(&self, why: &str) {
        why.clone_into(&mut self.last_failure.borrow_mut());
    }

    /// Cuts connections on which a request has waited too long for its answer. Sleeps as long as nothing is in flight.
    pub(super) async fn watch(self: Rc<Self>, limit_ns: u64) {
        while !self.closing.get() {
            let oldest = {
                let mut slots = self.slots.borrow_mut();
                let flying = slots.iter_mut().filter_map(|(_, slot)| match slot.state {
                    SlotState::Flying(_) => Some(slot.sent_ns),
                    _ => None,
                });
                flying.min()
            };
            let tasks = self.tasks();
            let Some(oldest) = oldest else {
                self.busy.wait(tasks).await;
                // It is queued, perhaps not sent yet: the first look comes when the first answer could be late.
                self.stopped.wait_until(tasks, tasks.turn_ns() + limit_ns).await;
                continue;
            };
            if tasks.turn_ns() < oldest + limit_ns {
                self.stopped.wait_until(tasks, oldest + limit_ns).await;
                continue;
            }
            self.cut_silent(limit_ns);
            tasks.yield_now().await;
        }
    }

    fn cut_silent(&self, limit_ns: u64) {
        let now = self.tasks().turn_ns();
        let mut silent = Vec::new();
        for (_, slot) in self.slots.borrow_mut().iter_mut() {
            if let SlotState::Flying(number) = slot.state
                && now >= slot.sent_ns + limit_ns
            {
                // Counted once: the connection is about to end, and with it this flight.
                slot.silences += 1;
                slot.sent_ns = now;
                silent.push(number);
            }
        }
        let connections = self.connections.borrow().clone();
        for connection in connections.iter().filter(|connection| silent.contains(&connection.number)) {
            self.break_off(connection, &format!("no answer within {} s", limit_ns / 1_000_000_000));
        }
    }
}

/// What is known of the export.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// Bytes.
    pub(super) len: u64,
    /// [`transmission_flag`]s.
    pub(super) flags: u16,
    /// Bytes that one request may carry.
    pub(super) payload_max: u64,
    /// Bytes to which requests must be aligned: 1, or 512 to 4096.
    pub(super) align: u32,
}

/// The longest blocks of an export that are sectors of a disk.
const BLOCK_LEN_MAX: u32 = 4096;

impl Facts {
    pub(super) fn of(dialled: &Dialled, access: Access) -> io::Result<Self> {
        let export = &dialled.export;
        if access == Access::ReadWrite && export.flags & transmission_flag::READ_ONLY != 0 {
            return Err(io::Error::new(
                io::ErrorKind::ReadOnlyFilesystem,
                "the server offers the export read-only: open it read-only too",
            ));
        }
        if i64::try_from(export.len).is_err() {
            return Err(io::Error::other(format!("an export of {} bytes is too large", export.len)));
        }
        let (min, max) = match export.block_lens {
            Some((min, _, max)) => (min, max),
            None => (1, crate::wire::PAYLOAD_LEN_MAX),
        };
        if !min.is_power_of_two() || min > BLOCK_LEN_MAX {
            let why = format!(
                "the export takes only blocks of {min} bytes, a disk has sectors of {BLOCK_LEN_MAX} at most: put a \
                 server with smaller blocks before it (nbdkit --filter=blocksize)"
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let payload_max = max.min(crate::wire::PAYLOAD_LEN_MAX) / 4096 * 4096;
        if payload_max == 0 {
            return Err(io::Error::other(format!("the server's largest request has {max} bytes")));
        }
        let align = if min > 1 { min.max(512) } else { 1 };
        Ok(Self { len: export.len, flags: export.flags, payload_max: u64::from(payload_max), align })
    }
}
