//! The task that gathers everything that is ready into one send.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::rc::Rc;

use tapio_block::Point;

use super::connection::Connection;
use super::limits::{SEND_LEN_MAX, SEND_PIECES_MAX};
use super::reply::{Failure, ReplyWriter};
use super::slots::{Slot, SlotKind, Slots};
use super::wire::{Style, error};

/// Header bytes a batch starts with room for, and shrinks back to after an unusually large one.
const HEADER_LEN: usize = 8 << 10;

/// A batch with no more data than this is offered to the socket by a call of its own before the ring is asked. There
/// are no more calls for it, because the ring would need one to send and one to wait, but the replies leave before the
/// next reception is armed, and no completion has to be waited for: a tenth less CPU at depth 1.
const SEND_NOW_MAX: usize = 128 << 10;

/// Runs until the receiver has ended and everything it took is answered.
pub(super) async fn run(connection: Rc<Connection>) {
    let mut batch = Box::new(Batch::new(connection.session.style));
    while connection.wait_ready().await {
        batch.gather(&connection);
        if batch.failed_midway {
            connection.break_off();
        }
        connection.set_sending(true);
        let mut at_once = batch.data_len <= SEND_NOW_MAX;
        while !batch.is_sent() && !connection.is_broken() {
            let message = batch.message();
            if std::mem::take(&mut at_once) {
                // SAFETY: as below; the call is over when it returns.
                if let Ok(len) = unsafe { send_now(connection.fd(), message) } {
                    batch.advance(len);
                    connection.shared.note_progress();
                }
                continue;
            }
            // SAFETY: the message, its table and the headers live in the boxed batch, and the data in slots that are
            // freed only after this; all stay untouched until the operation, awaited here, has completed.
            let sent = unsafe { connection.uring.sendmsg(connection.fd(), message, libc::MSG_WAITALL) };
            match sent.await {
                Ok(len) => {
                    batch.advance(len);
                    connection.shared.note_progress();
                }
                Err(error) if is_transient(&error) => {}
                Err(_) => connection.break_off(),
            }
        }
        batch.release(&connection);
        connection.set_sending(false);
        connection.changed();
    }
    connection.close();
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

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
}

#[derive(Clone, Debug)]
enum Piece {
    /// A range of the headers.
    Header(Range<usize>),
    /// Memory of a slot.
    Data(*mut u8, usize),
}

/// Replies on their way out.
struct Batch {
    writer: ReplyWriter,
    headers: Vec<u8>,
    pieces: Vec<Piece>,
    table: Vec<libc::iovec>,
    /// Pieces of the table that have been sent whole.
    sent: usize,
    message: libc::msghdr,
    slots: Vec<u32>,
    data_len: usize,
    /// A read failed after its header had gone.
    failed_midway: bool,
}

impl Batch {
    fn new(style: Style) -> Self {
        Self {
            writer: ReplyWriter { style },
            headers: Vec::with_capacity(HEADER_LEN),
            pieces: Vec::with_capacity(SEND_PIECES_MAX),
            table: Vec::with_capacity(SEND_PIECES_MAX),
            sent: 0,
            // SAFETY: an all-zero msghdr is a valid value: no name, no pieces, no control data.
            message: unsafe { std::mem::zeroed() },
            slots: Vec::with_capacity(SEND_PIECES_MAX),
            data_len: 0,
            failed_midway: false,
        }
    }

    /// Takes what is ready, as much as one send should hold.
    fn gather(&mut self, connection: &Connection) {
        self.headers.clear();
        self.headers.shrink_to(HEADER_LEN);
        self.pieces.clear();
        self.slots.clear();
        (self.data_len, self.sent) = (0, 0);
        let mut ready = connection.ready.borrow_mut();
        let mut slots = connection.slots.borrow_mut();
        while self.pieces.len() + 2 <= SEND_PIECES_MAX && self.data_len + self.headers.len() < SEND_LEN_MAX {
            let Some(index) = ready.pop_front() else { break };
            self.put(&mut slots, index, connection);
            self.slots.push(index);
        }
        self.table.clear();
        for piece in &self.pieces {
            let (base, len) = match piece {
                Piece::Header(range) => (self.headers[range.clone()].as_ptr().cast_mut(), range.len()),
                Piece::Data(base, len) => (*base, *len),
            };
            self.table.push(libc::iovec { iov_base: base.cast(), iov_len: len });
        }
    }

    fn put(&mut self, slots: &mut Slots, index: u32, connection: &Connection) {
        let start = self.headers.len();
        let done = slots.at(index).kind == SlotKind::Read && slots.part_sent(index);
        let slot = slots.at(index);
        let with_data = self.put_header(slot, done, connection);
        let end = self.headers.len();
        match self.pieces.last_mut() {
            // Headers without data between them are one piece.
            Some(Piece::Header(range)) if range.end == start => range.end = end,
            _ if end > start => self.pieces.push(Piece::Header(start..end)),
            _ => {}
        }
        if let (true, Some(memory)) = (with_data, &slot.memory) {
            self.pieces.push(Piece::Data(memory.as_ptr(), memory.len()));
            self.data_len += memory.len();
        }
    }

    /// Writes what precedes a slot's data; says whether the data follows.
    fn put_header(&mut self, slot: &Slot, done: bool, connection: &Connection) -> bool {
        let (writer, out) = (self.writer, &mut self.headers);
        let (cookie, offset) = (slot.cookie, slot.request_offset);
        match (slot.kind, &slot.failure) {
            (SlotKind::Read, None) => {
                match writer.style {
                    Style::Simple => writer.simple(out, cookie, error::NONE),
                    _ => writer.data(out, cookie, offset, slot.at, slot.len, done),
                }
                return true;
            }
            (SlotKind::Stream { first }, None) => {
                if first {
                    writer.simple(out, cookie, error::NONE);
                }
                return true;
            }
            (SlotKind::Stream { first: false }, Some(_)) => self.failed_midway = true,
            (SlotKind::Stream { first: true }, Some(failure)) => {
                connection.stream_failed.set(true);
                writer.failure(out, cookie, offset, failure);
            }
            (SlotKind::Read, Some(failure)) if writer.style != Style::Simple => {
                writer.part_failure(out, cookie, offset, failure, slot.at, done);
            }
            (_, Some(failure)) => writer.failure(out, cookie, offset, failure),
            (SlotKind::Status, None) => {
                writer.extents(out, cookie, offset, super::handshake::ALLOCATION_ID, &slot.extents);
            }
            (SlotKind::EmptyRead, None) => writer.empty_read(out, cookie, offset),
            (_, None) => writer.success(out, cookie, offset),
        }
        if let Some(Failure::Disk { .. }) = slot.failure {
            connection.shared.note_failure();
        }
        false
    }

    fn is_sent(&self) -> bool {
        self.sent == self.table.len()
    }

    /// What is left to send, as the kernel wants it.
    fn message(&mut self) -> *const libc::msghdr {
        let left = &mut self.table[self.sent..];
        self.message.msg_iov = left.as_mut_ptr();
        self.message.msg_iovlen = left.len() as _;
        &raw const self.message
    }

    /// Notes that `len` bytes are gone.
    fn advance(&mut self, mut len: usize) {
        while let Some(piece) = self.table.get_mut(self.sent) {
            if len < piece.iov_len {
                piece.iov_base = piece.iov_base.cast::<u8>().wrapping_add(len).cast();
                piece.iov_len -= len;
                return;
            }
            len -= piece.iov_len;
            self.sent += 1;
        }
    }

    fn release(&mut self, connection: &Connection) {
        let mut slots = connection.slots.borrow_mut();
        for index in self.slots.drain(..) {
            connection.port.note(Point::Published, index.into(), 0);
            slots.free(index);
        }
        self.failed_midway = false;
    }
}
