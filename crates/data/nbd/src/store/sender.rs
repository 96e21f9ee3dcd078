//! The task that gathers the requests that wait for a connection into one send.

use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

use tapio_ring::Segments;

use super::Inner;
use super::connection::Connection;
use super::slots::{SLOTS, SlotState};
use crate::wire::{RequestHeader, Style, command, command_flag, put_request};

/// Pieces of one send, as the kernel takes them (UIO_MAXIOV is 1024).
const PIECES_MAX: usize = 512;
/// Bytes of one send: as much as sockets take without waiting, so that replies are looked at in between.
const BATCH_LEN_MAX: u64 = 4 << 20;

/// Runs until the connection is broken.
pub(super) async fn run(inner: Rc<Inner>, connection: Rc<Connection>) {
    let mut batch = Box::new(Batch::new(connection.style));
    while batch.rest.is_some() || inner.wait_work(&connection).await {
        batch.gather(&inner, &connection);
        // What fits into the socket's buffer is there after one call, before anything else is waited for.
        let mut at_once = true;
        while !batch.is_sent() && !connection.is_broken() {
            let message = batch.message();
            let sent = if std::mem::take(&mut at_once) {
                // SAFETY: as below; the call is over when it returns.
                unsafe { send_now(connection.fd(), message) }
            } else {
                // SAFETY: the message, its table and the headers live in the boxed batch, and the data in requests that
                // are not answered before this has completed (`Slot::sending`).
                unsafe { inner.uring.sendmsg(connection.fd(), message, libc::MSG_WAITALL) }.await
            };
            match sent {
                Ok(len) => batch.advance(len),
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
                Err(error) => inner.break_off(&connection, &format!("sending failed: {error}")),
            }
        }
        batch.release(&inner);
        if connection.is_broken() {
            break;
        }
        if batch.rest.is_none() && inner.has_work_for_others() {
            // What is left is the share of the others, which have been woken and have not run yet.
            inner.tasks().yield_now().await;
        }
    }
    batch.rest = None;
    connection.sender_gone.set(true);
    connection.changed.notify_all(inner.tasks());
}

/// Sends what fits into the socket's buffer now.
///
/// # Safety
/// The message and the memory it names are valid.
unsafe fn send_now(fd: RawFd, message: *const libc::msghdr) -> io::Result<usize> {
    // SAFETY: the caller vouches for the message.
    let sent = unsafe { libc::sendmsg(fd, message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Requests on their way out.
struct Batch {
    style: Style,
    /// Never grows: it has room for the headers of all requests there can be, so what points into it stays right.
    headers: Vec<u8>,
    table: Vec<libc::iovec>,
    /// Pieces of the table that have been sent whole.
    sent: usize,
    message: libc::msghdr,
    /// Requests that end with this batch, whose memory is free then.
    ending: Vec<u32>,
    /// What did not fit of the last one's data.
    rest: Option<(u32, Segments)>,
}

impl Batch {
    fn new(style: Style) -> Self {
        Self {
            style,
            headers: Vec::with_capacity(SLOTS * style.request_len()),
            table: Vec::with_capacity(PIECES_MAX),
            sent: 0,
            // SAFETY: an all-zero msghdr is a valid value: no name, no pieces, no control data.
            message: unsafe { std::mem::zeroed() },
            ending: Vec::with_capacity(SLOTS),
            rest: None,
        }
    }

    /// Takes what waits, as far as there is room.
    fn gather(&mut self, inner: &Inner, connection: &Connection) {
        self.headers.clear();
        self.table.clear();
        self.ending.clear();
        self.sent = 0;
        let mut len = 0;
        if let Some((index, data)) = self.rest.take() {
            len += self.put_data(index, data);
        }
        let now_ns = inner.tasks().turn_ns();
        let mut slots = inner.slots.borrow_mut();
        let mut queue = inner.queue.borrow_mut();
        // An equal share for each connection: the others have been woken too.
        let mut share = queue.len().div_ceil(inner.connections.borrow().len().max(1));
        while share > 0 && self.rest.is_none() && len < BATCH_LEN_MAX && self.table.len() + 2 < PIECES_MAX {
            let Some(index) = queue.pop_front() else { break };
            share -= 1;
            let cookie = slots.cookie(index);
            let slot = slots.at(index);
            (slot.state, slot.sent_ns) = (SlotState::Flying(connection.number), now_ns);
            let ask = slot.ask;
            let is_write = ask.command == command::WRITE;
            let payload =
                if self.style == Style::Extended && is_write { command_flag::PAYLOAD_LEN } else { 0 };
            let header = RequestHeader {
                flags: ask.flags | payload,
                command: ask.command,
                cookie,
                offset: ask.offset,
                len: ask.len,
            };
            self.put_header(&header);
            if is_write {
                slot.sending = true;
                len += self.put_data(index, ask.data);
            }
        }
    }

    fn put_header(&mut self, header: &RequestHeader) {
        let start = self.headers.len();
        debug_assert!(self.headers.capacity() - start >= self.style.request_len());
        put_request(self.style, header, &mut self.headers);
        let base = self.headers[start..].as_mut_ptr().cast::<libc::c_void>();
        let len = self.headers.len() - start;
        match self.table.last_mut() {
            // Headers of requests without data stand one after the other.
            Some(last) if last.iov_base.wrapping_byte_add(last.iov_len) == base => last.iov_len += len,
            _ => self.table.push(libc::iovec { iov_base: base, iov_len: len }),
        }
    }

    /// Puts data into the table as far as it has room; returns how many bytes.
    fn put_data(&mut self, index: u32, data: Segments) -> u64 {
        let mut put = 0;
        data.for_each(|base, len| {
            if self.table.len() < PIECES_MAX {
                self.table.push(libc::iovec { iov_base: base.cast(), iov_len: len });
                put += len as u64;
            }
        });
        if put < data.len() {
            self.rest = Some((index, data.slice(put, data.len() - put)));
        } else {
            self.ending.push(index);
        }
        put
    }

    fn is_sent(&self) -> bool {
        self.sent == self.table.len()
    }

    fn message(&mut self) -> *const libc::msghdr {
        let left = &mut self.table[self.sent..];
        self.message.msg_iov = left.as_mut_ptr();
        self.message.msg_iovlen = left.len();
        &raw const self.message
    }

    fn advance(&mut self, mut len: usize) {
        while len > 0
            && let Some(piece) = self.table.get_mut(self.sent)
        {
            let step = len.min(piece.iov_len);
            piece.iov_base = piece.iov_base.wrapping_byte_add(step);
            piece.iov_len -= step;
            len -= step;
            self.sent += usize::from(piece.iov_len == 0);
        }
    }

    /// The kernel has let go of the memory of what was sent.
    fn release(&mut self, inner: &Inner) {
        for index in self.ending.drain(..) {
            let answered = {
                let mut slots = inner.slots.borrow_mut();
                let slot = slots.at(index);
                slot.sending = false;
                slot.answered
            };
            if answered {
                inner.finish(index);
            }
        }
    }
}
