//! What has been received and not been looked at yet.

use std::os::fd::RawFd;

use tapio_ring::Segments;
use tapio_ring::uring::Uring;

use super::connection::End;
use super::limits::{INPUT_LEN_LARGE, INPUT_LEN_SMALL, INPUT_SHORT_MAX};
use super::memory::{Held, Memory};

/// The input buffer of a connection: small while that is enough, large for a client that sends much at once.
#[derive(Debug)]
pub struct Input {
    small: Box<[u8]>,
    large: Option<Held>,
    start: usize,
    end: usize,
    shorts: u32,
    wants_large: bool,
}

impl Input {
    /// An empty buffer.
    pub fn new() -> Self {
        let small = vec![0; INPUT_LEN_SMALL].into_boxed_slice();
        Self { small, large: None, start: 0, end: 0, shorts: 0, wants_large: false }
    }

    fn buffer(&self) -> &[u8] {
        match &self.large {
            Some(large) => large,
            None => &self.small,
        }
    }

    fn buffer_mut(&mut self) -> &mut [u8] {
        match &mut self.large {
            Some(large) => &mut *large,
            None => &mut self.small,
        }
    }

    /// What is there.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer()[self.start..self.end]
    }

    /// Takes `len` bytes off the front; there must be that many.
    pub fn consume(&mut self, len: usize) {
        assert!(len <= self.end - self.start, "consumed more than was received");
        self.start += len;
    }

    /// Makes the buffer the right one and moves what is there to its front.
    fn settle(&mut self, memory: &Memory) {
        let kept = self.start..self.end;
        let len = kept.len();
        if self.wants_large
            && self.large.is_none()
            && let Some(mut large) = memory.take(INPUT_LEN_LARGE)
        {
            large[..len].copy_from_slice(&self.small[kept]);
            (self.large, self.start, self.end) = (Some(large), 0, len);
            return;
        }
        if !self.wants_large
            && len <= self.small.len()
            && let Some(large) = self.large.take()
        {
            self.small[..len].copy_from_slice(&large[kept]);
            (self.start, self.end) = (0, len);
            return;
        }
        if self.start > 0 {
            self.buffer_mut().copy_within(kept, 0);
            (self.start, self.end) = (0, len);
        }
    }

    /// Receives more; fails at the end of the stream.
    pub async fn fill(&mut self, uring: &Uring, fd: RawFd, memory: &Memory) -> Result<(), End> {
        self.settle(memory);
        let end = self.end;
        let room = &mut self.buffer_mut()[end..];
        let room_len = room.len();
        debug_assert!(room_len > 0, "headers are shorter than the buffer");
        // SAFETY: the buffer belongs to this connection's task, which awaits the operation while it holds it.
        let into = unsafe { Segments::from_raw(room.as_mut_ptr(), room_len as u64) };
        let len = receive(uring, fd, into, false).await?;
        self.end += len;
        let full = len == room_len;
        let short = len < INPUT_LEN_SMALL;
        self.shorts = if short { self.shorts.saturating_add(1) } else { 0 };
        self.wants_large = full || (self.wants_large && self.shorts < INPUT_SHORT_MAX);
        Ok(())
    }

    /// Fills `into` from what is there and then from the socket, past the buffer.
    pub async fn read_exact(&mut self, uring: &Uring, fd: RawFd, into: &mut Held) -> Result<(), End> {
        let len = into.len().min(self.end - self.start);
        into[..len].copy_from_slice(&self.bytes()[..len]);
        self.consume(len);
        let rest = (into.len() - len) as u64;
        if rest >= INPUT_LEN_LARGE as u64 / 4 {
            // Large payloads come past the buffer anyway: what a large one would take of the next is copied twice.
            self.wants_large = false;
        }
        if rest > 0 {
            // SAFETY: `into` is borrowed until the operation has ended, whose future is polled to its end.
            let got = receive(uring, fd, unsafe { into.segments().slice(len as u64, rest) }, true).await?;
            if got as u64 != rest {
                return Err(End::Vanished);
            }
        }
        Ok(())
    }

    /// Reads past `len` bytes.
    pub async fn skip(&mut self, uring: &Uring, fd: RawFd, memory: &Memory, len: u64) -> Result<(), End> {
        let mut left = len;
        loop {
            let here = left.min((self.end - self.start) as u64);
            self.consume(here as usize);
            left -= here;
            if left == 0 {
                return Ok(());
            }
            self.fill(uring, fd, memory).await?;
        }
    }
}

/// One reception; with `all`, a shorter one means the end of the stream.
async fn receive(uring: &Uring, fd: RawFd, into: Segments, all: bool) -> Result<usize, End> {
    loop {
        match uring.recv(fd, into, all).await {
            Ok(0) => return Err(End::Vanished),
            Ok(len) => return Ok(len),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(_) => return Err(End::Vanished),
        }
    }
}
