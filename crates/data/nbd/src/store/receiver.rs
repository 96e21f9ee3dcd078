//! The task that reads replies and puts their data where it belongs.
//!
//! Replies with little data come many at a time into a buffer. The data of a large one is received straight into the
//! memory of its request, and with the same call what follows it into the buffer.

use std::cmp::min;

use tapio_ring::Segments;

use super::Inner;
use super::connection::Connection;
use super::slots::Outcome;
use crate::wire::{Reader, ReplyHeader, Style, allocation, chunk, command, error, parse_reply};

/// The buffer for headers and small data.
const INPUT_LEN: usize = 64 << 10;
/// Pieces of a request's memory in one reception.
const PIECES_MAX: usize = 64;
/// The longest error message that is read past.
const MESSAGE_LEN_MAX: u64 = 64 << 10;
/// The longest answer to BLOCK_STATUS that is read past.
const STATUS_LEN_MAX: u64 = 32 << 20;

/// Why a connection ended, for people.
type End = String;

/// Runs until the connection is of no use any more; says why.
pub(super) async fn run(inner: &Inner, connection: &Connection) -> End {
    let mut receiver = Receiver {
        inner,
        connection,
        input: vec![0; INPUT_LEN].into_boxed_slice(),
        start: 0,
        end: 0,
        table: Box::new([libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX + 1]),
        // SAFETY: an all-zero msghdr is a valid value.
        message: Box::new(unsafe { std::mem::zeroed() }),
    };
    loop {
        if let Err(end) = receiver.reply().await {
            return end;
        }
    }
}

struct Receiver<'a> {
    inner: &'a Inner,
    connection: &'a Connection,
    input: Box<[u8]>,
    start: usize,
    end: usize,
    table: Box<[libc::iovec; PIECES_MAX + 1]>,
    message: Box<libc::msghdr>,
}

fn protocol<T>(what: &str) -> Result<T, End> {
    Err(format!("the server does not keep to the protocol: {what}"))
}

impl Receiver<'_> {
    fn bytes(&self) -> &[u8] {
        &self.input[self.start..self.end]
    }

    /// Receives more behind what is there.
    async fn fill(&mut self) -> Result<(), End> {
        self.input.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        self.receive(Segments::EMPTY).await.map(drop)
    }

    /// Receives into `into`, as far as that has not too many pieces, and behind it into the buffer, which has been
    /// settled to its front. Returns how many bytes went to `into`.
    async fn receive(&mut self, into: Segments) -> Result<u64, End> {
        let (mut count, mut direct) = (0, 0);
        into.for_each(|base, len| {
            if count < PIECES_MAX {
                self.table[count] = libc::iovec { iov_base: base.cast(), iov_len: len };
                count += 1;
                direct += len as u64;
            }
        });
        if direct == into.len() {
            let room = &mut self.input[self.end..];
            self.table[count] = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            count += 1;
        }
        loop {
            if self.connection.is_broken() {
                return Err("closed by this side".to_owned());
            }
            self.message.msg_iov = self.table.as_mut_ptr();
            self.message.msg_iovlen = count;
            let message = &raw mut *self.message;
            // SAFETY: message, table and buffer are boxed and belong to this task, and the memory of `into` to a
            // request that has no end before this task says so; none is touched before the operation, awaited here,
            // is over.
            match unsafe { self.inner.uring.recvmsg(self.connection.fd(), message) }.await {
                Ok(0) => return Err("the server closed the connection".to_owned()),
                Ok(len) => {
                    let (len, direct) = (len as u64, min(len as u64, direct));
                    self.end += (len - direct) as usize;
                    return Ok(direct);
                }
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
                Err(error) => return Err(format!("receiving failed: {error}")),
            }
        }
    }

    /// Fills `into` with the next bytes of the stream.
    async fn deliver(&mut self, into: Segments) -> Result<(), End> {
        let here = min(into.len(), (self.end - self.start) as u64);
        into.slice(0, here).copy_from(&self.input[self.start..self.start + here as usize]);
        self.start += here as usize;
        let mut done = here;
        while done < into.len() {
            // The buffer is empty: all of it was taken.
            (self.start, self.end) = (0, 0);
            done += self.receive(into.slice(done, into.len() - done)).await?;
        }
        Ok(())
    }

    /// Takes the next `N` bytes of the stream.
    async fn take<const N: usize>(&mut self) -> Result<[u8; N], End> {
        while self.end - self.start < N {
            self.fill().await?;
        }
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.bytes()[..N]);
        self.start += N;
        Ok(bytes)
    }

    /// Reads past the next `len` bytes.
    async fn skip(&mut self, len: u64) -> Result<(), End> {
        let mut left = len;
        loop {
            let here = min(left, (self.end - self.start) as u64);
            self.start += here as usize;
            left -= here;
            if left == 0 {
                return Ok(());
            }
            self.fill().await?;
        }
    }

    /// One reply, or one chunk of a reply.
    async fn reply(&mut self) -> Result<(), End> {
        let style = self.connection.style;
        let (header, len) = loop {
            match parse_reply(style, self.bytes()) {
                Ok(Some(found)) => break found,
                Ok(None) => self.fill().await?,
                Err(wrong) => return protocol(&wrong.to_string()),
            }
        };
        self.start += len;
        let cookie = match header {
            ReplyHeader::Simple { cookie, .. } | ReplyHeader::Chunk { cookie, .. } => cookie,
        };
        let Some(index) = self.inner.slots.borrow_mut().find(cookie, self.connection.number) else {
            return protocol("a reply to a request that was not made");
        };
        match header {
            ReplyHeader::Simple { error, .. } => self.simple(style, index, error).await,
            ReplyHeader::Chunk { flags, kind, len, .. } => self.chunk(index, flags, kind, len).await,
        }
    }

    async fn simple(&mut self, style: Style, index: u32, error: u32) -> Result<(), End> {
        let (command, data) = self.asked(index);
        let has_data = matches!(command, command::READ | command::BLOCK_STATUS);
        if error != error::NONE {
            self.note_error(index, error)?;
        } else if has_data {
            if style != Style::Simple || command != command::READ {
                return protocol("a simple reply where data comes in chunks");
            }
            self.deliver(data).await?;
        }
        self.answered(index)
    }

    fn asked(&self, index: u32) -> (u16, Segments) {
        let mut slots = self.inner.slots.borrow_mut();
        let ask = &slots.at(index).ask;
        (ask.command, ask.data)
    }

    /// The server has said all there is to say on a request.
    fn answered(&self, index: u32) -> Result<(), End> {
        let ready = {
            let mut slots = self.inner.slots.borrow_mut();
            let slot = slots.at(index);
            slot.answered = true;
            !slot.sending
        };
        if ready {
            self.inner.finish(index);
        }
        Ok(())
    }

    fn note_error(&self, index: u32, error: u32) -> Result<(), End> {
        if error == error::SHUTDOWN {
            // It will not do this any more; another one, or the same after its restart, may.
            return Err("the server is shutting down".to_owned());
        }
        let mut slots = self.inner.slots.borrow_mut();
        let slot = slots.at(index);
        if slot.outcome == Outcome::Done {
            slot.outcome = Outcome::Refused(errno(error));
        }
        Ok(())
    }

    async fn chunk(&mut self, index: u32, flags: u16, kind: u16, len: u64) -> Result<(), End> {
        let (command, data) = self.asked(index);
        match kind {
            chunk::NONE if len == 0 => {}
            chunk::OFFSET_DATA if command == command::READ && len >= 8 => {
                let offset = u64::from_be_bytes(self.take::<8>().await?);
                let into = self.place(index, offset, len - 8, data)?;
                self.deliver(into).await?;
            }
            chunk::OFFSET_HOLE if command == command::READ && len == 12 => {
                let bytes = self.take::<12>().await?;
                let mut reader = Reader(&bytes);
                let (offset, hole) = (reader.u64().unwrap_or(0), reader.u32().unwrap_or(0));
                self.place(index, offset, u64::from(hole), data)?.fill_zero();
            }
            chunk::BLOCK_STATUS
                if command == command::BLOCK_STATUS && (4..=STATUS_LEN_MAX).contains(&len) =>
            {
                self.skip(4).await?;
                if !(len - 4).is_multiple_of(8) {
                    return protocol("a list of extents of an odd length");
                }
                for _ in 0..(len - 4) / 8 {
                    let bytes = self.take::<8>().await?;
                    let mut reader = Reader(&bytes);
                    let (run, flags) = (reader.u32().unwrap_or(0), reader.u32().unwrap_or(0));
                    self.extent(u64::from(run), flags)?;
                }
            }
            chunk::BLOCK_STATUS_EXT
                if command == command::BLOCK_STATUS && (8..=STATUS_LEN_MAX).contains(&len) =>
            {
                let bytes = self.take::<8>().await?;
                let count = u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
                if len - 8 != u64::from(count) * 16 {
                    return protocol("a list of extents of another length than it says");
                }
                for _ in 0..count {
                    let bytes = self.take::<16>().await?;
                    let mut reader = Reader(&bytes);
                    let (run, flags) = (reader.u64().unwrap_or(0), reader.u64().unwrap_or(0));
                    self.extent(run, flags as u32)?;
                }
            }
            kind if kind & chunk::ERROR_BIT != 0 && (6..=MESSAGE_LEN_MAX).contains(&len) => {
                let bytes = self.take::<4>().await?;
                // The server's message is text for a user; nothing here shows it.
                self.skip(len - 4).await?;
                self.note_error(index, u32::from_be_bytes(bytes))?;
            }
            _ => return protocol("a chunk that does not belong to its request"),
        }
        if flags & chunk::DONE == 0 {
            return Ok(());
        }
        {
            let mut slots = self.inner.slots.borrow_mut();
            let slot = slots.at(index);
            let whole = slot.ask.command != command::READ || slot.got == slot.ask.len;
            if slot.outcome == Outcome::Done && !whole {
                return protocol("a reply without all of the data");
            }
        }
        self.answered(index)
    }

    /// Where a piece of a read's data goes.
    fn place(&self, index: u32, offset: u64, len: u64, data: Segments) -> Result<Segments, End> {
        let mut slots = self.inner.slots.borrow_mut();
        let slot = slots.at(index);
        let at = offset.wrapping_sub(slot.ask.offset);
        // A server that sends the same place twice cannot make the sum right.
        let fits = at <= data.len() && len <= data.len() - at && slot.got + len <= data.len();
        if !fits || len == 0 {
            return protocol("data that was not asked for");
        }
        slot.got += len;
        Ok(data.slice(at, len))
    }

    fn extent(&self, len: u64, flags: u32) -> Result<(), End> {
        if len == 0 {
            return protocol("an extent without length");
        }
        self.inner.status.borrow_mut().add(len, flags & allocation::ZERO == 0);
        Ok(())
    }
}

/// The errno for an error of the protocol, whose numbers are its own.
fn errno(error: u32) -> i32 {
    match error {
        error::PERM => libc::EROFS,
        error::NOMEM => libc::ENOMEM,
        error::INVAL => libc::EINVAL,
        error::NOSPC => libc::ENOSPC,
        error::OVERFLOW => libc::EOVERFLOW,
        error::NOTSUP => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}
