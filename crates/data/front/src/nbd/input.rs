//! What has been received and not been looked at yet.

use std::ops::Range;
use std::os::fd::RawFd;

use tapio_ring::uring::Uring;
use tapio_ring::{MemoryMut, PageBuf};

use super::connection::End;
use super::limits::{INPUT_LEN_LARGE, INPUT_LEN_SMALL, INPUT_SHORT_MAX};
use super::memory::{Held, Memory};

const NOT_RECEIVING: &str = "looked at only while nothing is received";

/// The input buffer of a connection: small while that is enough, large for a client that sends much at once.
#[derive(Debug)]
pub struct Input {
    /// Not there while it is received into.
    small: Option<PageBuf>,
    large: Option<Held>,
    start: usize,
    end: usize,
    shorts: u32,
    wants_large: bool,
}

impl Input {
    /// An empty buffer.
    pub fn new() -> Self {
        Self {
            small: Some(PageBuf::zeroed(INPUT_LEN_SMALL)),
            large: None,
            start: 0,
            end: 0,
            shorts: 0,
            wants_large: false,
        }
    }

    fn buffer(&self) -> &[u8] {
        match &self.large {
            Some(large) => large,
            None => self.small(),
        }
    }

    fn small(&self) -> &PageBuf {
        self.small.as_ref().expect(NOT_RECEIVING)
    }

    fn small_mut(&mut self) -> &mut PageBuf {
        self.small.as_mut().expect(NOT_RECEIVING)
    }

    fn buffer_mut(&mut self) -> &mut [u8] {
        match &mut self.large {
            Some(large) => &mut *large,
            None => self.small.as_mut().expect(NOT_RECEIVING),
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
            large[..len].copy_from_slice(&self.small()[kept]);
            (self.large, self.start, self.end) = (Some(large), 0, len);
            return;
        }
        if !self.wants_large
            && len <= self.small().len()
            && let Some(large) = self.large.take()
        {
            self.small_mut()[..len].copy_from_slice(&large[kept]);
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
        let room_len = self.buffer().len() - end;
        debug_assert!(room_len > 0, "headers are shorter than the buffer");
        let received = if let Some(large) = &mut self.large {
            let (buffer, received) = receive(uring, fd, large.lend(), end..end + room_len, false).await;
            large.put_back(buffer);
            received
        } else {
            let small = self.small.take().expect(NOT_RECEIVING);
            let (small, received) = receive(uring, fd, small, end..end + room_len, false).await;
            self.small = Some(small);
            received
        };
        let len = received?;
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
            let place = len..into.len();
            let (buffer, received) = receive(uring, fd, into.lend(), place, true).await;
            into.put_back(buffer);
            if received? as u64 != rest {
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

/// One reception into `place` of `memory`, which comes back; with `all`, a shorter one means the end of the stream.
async fn receive<B: MemoryMut>(
    uring: &Uring,
    fd: RawFd,
    mut memory: B,
    place: Range<usize>,
    all: bool,
) -> (B, Result<usize, End>) {
    loop {
        let received;
        (memory, received) = uring.recv(fd, memory, place.clone(), all).await;
        match received {
            Ok(0) => return (memory, Err(End::Vanished)),
            Ok(len) => return (memory, Ok(len)),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(_) => return (memory, Err(End::Vanished)),
        }
    }
}
