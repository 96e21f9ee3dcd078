//! The page that a domain shares with us (`docs/misc/xenstore-ring.txt`).
//!
//! ```text
//!   0      1024    2048      2052      2056      2060      2064      2068        2072   2076
//!   from   to      consumed  produced  consumed  produced  features  connection  error  event channel
//!   guest  guest   by us     by it     by it     by us
//! ```
//!
//! The guest may write anywhere at any time. Each index is read once and judged; no byte is looked at twice.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use tapio_xen::{Channel, Mapped};

/// Bytes of each direction.
pub const RING_LEN: usize = 1024;
const TO_GUEST: usize = RING_LEN;
const REQUEST_CONSUMED: usize = 2048;
const REQUEST_PRODUCED: usize = 2052;
const REPLY_CONSUMED: usize = 2056;
const REPLY_PRODUCED: usize = 2060;
const FEATURES: usize = 2064;
const CONNECTION: usize = 2068;
const ERROR: usize = 2072;
/// Bytes that are used of the page.
pub const PAGE_USED: usize = 2080;

/// Why a ring is served no more, as the guest finds it in its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RingError {
    /// The event channel is broken, or the guest does not take what is there for it.
    Communication = 1,
    /// More was produced than there is room, or more consumed than was produced.
    Index = 2,
    /// A request that no message holds.
    Protocol = 3,
}

/// Where a ring's page is.
pub enum Page {
    /// Granted by the domain.
    Granted(Mapped),
    /// This kernel's own, mapped from a file.
    File(FilePage),
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Granted(_) => "Granted",
            Self::File(_) => "File",
        })
    }
}

/// A page of a file, mapped until it is dropped.
#[derive(Debug)]
pub struct FilePage {
    base: *mut u8,
}

impl FilePage {
    /// The first page of an open file.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn map(file: &impl AsRawFd) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), 4096, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self { base: base.cast() })
        }
    }
}

impl FilePage {
    /// Where it is.
    pub fn address(&self) -> *mut u8 {
        self.base
    }

    /// Memory of our own that stays in place.
    ///
    /// # Errors
    /// This process may not lock memory.
    pub fn locked() -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_LOCKED | libc::MAP_POPULATE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self { base: base.cast() })
        }
    }
}

impl Drop for FilePage {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`; nothing else refers to it.
        unsafe { libc::munmap(self.base.cast(), 4096) };
    }
}

/// A domain's ring.
#[derive(Debug)]
pub struct Ring {
    page: Page,
    channel: Channel,
    failed: Option<RingError>,
}

impl Ring {
    /// The ring in a page of at least 4096 bytes.
    ///
    /// # Errors
    /// The page is too short.
    pub fn new(page: Page, channel: Channel) -> io::Result<Self> {
        let long = match &page {
            Page::Granted(mapped) => mapped.len() >= PAGE_USED,
            Page::File(_) => true,
        };
        if !long {
            return Err(io::Error::other("the page of a xenstore ring is shorter than 4096 bytes"));
        }
        Ok(Self { page, channel, failed: None })
    }

    fn base(&self) -> *mut u8 {
        match &self.page {
            Page::Granted(mapped) => mapped.as_ptr(),
            Page::File(page) => page.base,
        }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset.is_multiple_of(4) && offset + 4 <= PAGE_USED);
        // SAFETY: inside the page, which is aligned and mapped as long as `self`; the other side writes it as well, so
        // it is only touched atomically.
        unsafe { &*self.base().add(offset).cast::<AtomicU32>() }
    }

    /// Our end of the event channel.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Another end for the same page.
    pub fn set_channel(&mut self, channel: Channel) {
        self.channel = channel;
    }

    /// Why it is served no more.
    pub fn failed(&self) -> Option<RingError> {
        self.failed
    }

    /// Publishes the features of the server.
    pub fn offer(&self, features: u32) {
        self.word(FEATURES).store(features, Ordering::Relaxed);
        if features & crate::domains::FEATURE_ERROR != 0 {
            self.word(ERROR).store(0, Ordering::Relaxed);
        }
    }

    /// Appends what the guest has written.
    ///
    /// # Errors
    /// It claims more than the ring holds; the ring has failed.
    pub fn read(&mut self, out: &mut Vec<u8>) -> Result<usize, RingError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let consumed = self.word(REQUEST_CONSUMED).load(Ordering::Relaxed);
        let produced = self.word(REQUEST_PRODUCED).load(Ordering::Acquire);
        let count = produced.wrapping_sub(consumed) as usize;
        if count > RING_LEN {
            return Err(self.fail(RingError::Index));
        }
        let from = consumed as usize % RING_LEN;
        let first = count.min(RING_LEN - from);
        out.reserve(count);
        let end = out.len();
        // SAFETY: both pieces lie in the first kilobyte of the page; there is room for `count` bytes behind the end of
        // `out`, all of which are written. Whatever the guest writes meanwhile is some byte.
        unsafe {
            let to = out.as_mut_ptr().add(end);
            std::ptr::copy_nonoverlapping(self.base().add(from), to, first);
            std::ptr::copy_nonoverlapping(self.base(), to.add(first), count - first);
            out.set_len(end + count);
        }
        self.word(REQUEST_CONSUMED).store(produced, Ordering::Release);
        Ok(count)
    }

    /// Writes as much as there is room for.
    ///
    /// # Errors
    /// The guest claims to have read what was not written; the ring has failed.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, RingError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let produced = self.word(REPLY_PRODUCED).load(Ordering::Relaxed);
        let consumed = self.word(REPLY_CONSUMED).load(Ordering::Acquire);
        let used = produced.wrapping_sub(consumed) as usize;
        if used > RING_LEN {
            return Err(self.fail(RingError::Index));
        }
        let count = bytes.len().min(RING_LEN - used);
        let to = produced as usize % RING_LEN;
        let first = count.min(RING_LEN - to);
        // SAFETY: both pieces lie in the second kilobyte of the page, and `bytes` has `count` bytes.
        unsafe {
            let page = self.base().add(TO_GUEST);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), page.add(to), first);
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(first), page, count - first);
        }
        self.word(REPLY_PRODUCED).store(produced.wrapping_add(count as u32), Ordering::Release);
        Ok(count)
    }

    /// Wakes the guest.
    pub fn notify(&mut self) {
        // A guest may look before it is woken: what was written comes first.
        fence(Ordering::SeqCst);
        if self.channel.notify().is_err() {
            self.fail(RingError::Communication);
        }
    }

    /// Whether the guest wants to begin anew.
    pub fn wants_reset(&self) -> bool {
        self.word(CONNECTION).load(Ordering::Acquire) == 1
    }

    /// Begins anew: nothing is in the ring.
    pub fn reset(&mut self) {
        for offset in [REQUEST_CONSUMED, REQUEST_PRODUCED, REPLY_CONSUMED, REPLY_PRODUCED, ERROR] {
            self.word(offset).store(0, Ordering::Relaxed);
        }
        self.failed = None;
        self.word(CONNECTION).store(0, Ordering::Release);
        self.notify();
    }

    /// Serves it no more, and says why in the page.
    pub fn fail(&mut self, error: RingError) -> RingError {
        if self.failed.is_none() {
            self.failed = Some(error);
            self.word(ERROR).store(error as u32, Ordering::Release);
            // A guest that is not notified harms itself alone.
            let _ = self.channel.notify();
        }
        error
    }
}

/// A guest's side of a ring, for tests and benchmarks: it can do everything right and everything wrong.
#[derive(Debug)]
pub struct GuestRing {
    ring: Ring,
}

impl GuestRing {
    /// The same page and the other end of the channel.
    ///
    /// # Errors
    /// The page is too short.
    pub fn new(page: Page, channel: Channel) -> io::Result<Self> {
        Ok(Self { ring: Ring::new(page, channel)? })
    }

    /// Its end of the channel.
    pub fn channel(&self) -> &Channel {
        &self.ring.channel
    }

    /// Writes an index or another word, whatever that breaks.
    pub fn poke(&self, offset: usize, value: u32) {
        self.ring.word(offset & (PAGE_USED - 4) & !3).store(value, Ordering::SeqCst);
    }

    /// Reads a word.
    pub fn peek(&self, offset: usize) -> u32 {
        self.ring.word(offset & !3).load(Ordering::SeqCst)
    }

    /// Writes as much as there is room for, and wakes the daemon.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let produced = self.peek(REQUEST_PRODUCED);
        let room = RING_LEN - (produced.wrapping_sub(self.peek(REQUEST_CONSUMED)) as usize).min(RING_LEN);
        let count = bytes.len().min(room);
        for (index, byte) in bytes[..count].iter().enumerate() {
            let at = (produced as usize + index) % RING_LEN;
            // SAFETY: inside the first kilobyte of the page.
            unsafe { self.ring.base().add(at).write_volatile(*byte) };
        }
        self.poke(REQUEST_PRODUCED, produced.wrapping_add(count as u32));
        let _ = self.ring.channel.notify();
        count
    }

    /// Takes what is there, and wakes the daemon.
    pub fn read(&mut self) -> Vec<u8> {
        let consumed = self.peek(REPLY_CONSUMED);
        let count = (self.peek(REPLY_PRODUCED).wrapping_sub(consumed) as usize).min(RING_LEN);
        let mut bytes = Vec::with_capacity(count);
        for index in 0..count {
            let at = TO_GUEST + (consumed as usize + index) % RING_LEN;
            // SAFETY: inside the second kilobyte of the page.
            bytes.push(unsafe { self.ring.base().add(at).read_volatile() });
        }
        self.poke(REPLY_CONSUMED, consumed.wrapping_add(count as u32));
        let _ = self.ring.channel.notify();
        bytes
    }
}
