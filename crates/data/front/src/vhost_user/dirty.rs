//! The log of a live migration: a bit for every page of guest memory that we wrote.
//!
//! Format: vhost-user protocol, section *Migration*: pages of 4096 bytes by guest address, eight to a byte, lowest bit
//! first, set by an atomic or, because the front end takes bits out meanwhile.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use super::event::Notifier;
use super::memory::{MapError, Mapping};

/// Bytes that one bit stands for.
pub const LOG_PAGE_LEN: u64 = 4096;
/// The longest log taken: enough for 2^47 bytes of guest memory.
const LOG_LEN_MAX: u64 = 1 << 32;

/// A log in memory that the front end shares.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Arc<Mapping>,
    /// How to tell the front end that there are new bits, if it wants to know.
    call: Option<Arc<Notifier>>,
    /// Bits were set since it was told.
    news: AtomicBool,
}

impl DirtyLog {
    /// Maps a log of `len` bytes at `offset` of `file`: `SET_LOG_BASE`.
    pub fn map(file: &OwnedFd, offset: u64, len: u64) -> Result<Mapping, String> {
        if len == 0 || len > LOG_LEN_MAX {
            return Err(format!("a dirty log of {len} bytes; 1 to {LOG_LEN_MAX} are possible"));
        }
        Mapping::new(file.as_fd(), offset, len)
            .map_err(|error: MapError| format!("the dirty log cannot be mapped: {error}"))
    }

    /// A log that signals new bits by `call`.
    pub fn new(mapping: Arc<Mapping>, call: Option<Arc<Notifier>>) -> Self {
        Self { mapping, call, news: AtomicBool::new(false) }
    }

    /// Sets the bits of `len` bytes at guest address `at`. What lies past the end of the log has no bit: the front end
    /// was refused such a log when it gave it.
    pub fn mark(&self, at: u64, len: u64) {
        let Some(last) = len.checked_sub(1).and_then(|more| at.checked_add(more)) else { return };
        for page in at / LOG_PAGE_LEN..=last / LOG_PAGE_LEN {
            if page / 8 >= self.mapping.len() {
                return;
            }
            // SAFETY: the byte lies inside the mapping, which is accessed by atomic operations alone.
            let byte = unsafe { AtomicU8::from_ptr(self.mapping.as_ptr().add((page / 8) as usize)) };
            byte.fetch_or(1 << (page % 8), Ordering::Relaxed);
        }
        if self.call.is_some() {
            self.news.store(true, Ordering::Relaxed);
        }
    }

    /// Notifies the front end of new bits, once for all since the last time.
    pub fn tell(&self) {
        if let Some(call) = &self.call
            && self.news.swap(false, Ordering::Relaxed)
        {
            call.signal();
        }
    }
}

/// What a queue has to log, and where.
#[derive(Clone, Debug)]
pub struct Logging {
    /// The log.
    pub log: Arc<DirtyLog>,
    /// Guest address by which writes to the used ring (the device's event word of a packed ring) are logged, if they
    /// are.
    pub ring: Option<u64>,
    /// Guest address of a packed ring's descriptors, which hold its answers.
    pub desc: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::super::memory::tests::memfd;
    use super::*;
    use std::os::unix::fs::FileExt;

    fn bytes(file: &OwnedFd, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        std::fs::File::from(file.try_clone().unwrap()).read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn every_page_that_is_touched_has_its_bit_and_no_other() {
        let file = memfd(4096);
        let log = DirtyLog::new(Arc::new(DirtyLog::map(&file, 0, 4).unwrap()), None);
        log.mark(0, 1);
        log.mark(4096 * 9 + 4095, 2);
        log.mark(4096 * 20, 4096);
        log.mark(4096 * 31, 1 << 40);
        log.mark(4096 * 32, 4096);
        log.mark(5, 0);
        log.mark(u64::MAX, 1);
        log.mark(u64::MAX, 2);
        assert_eq!(bytes(&file, 5), [0x01, 0x06, 0x10, 0x80, 0x00]);
    }

    #[test]
    fn the_front_end_is_told_once_for_many_bits() {
        use std::io::Read;
        let event = super::super::event::eventfd().unwrap();
        let mut seen = std::fs::File::from(event.try_clone().unwrap());
        let file = memfd(4096);
        let call = Some(Arc::new(Notifier::new(event).unwrap()));
        let log = DirtyLog::new(Arc::new(DirtyLog::map(&file, 0, 4096).unwrap()), call);
        log.tell();
        assert!(seen.read(&mut [0; 8]).is_err(), "nothing to tell");
        log.mark(0, 8192);
        log.mark(0, 1);
        log.tell();
        log.tell();
        let mut value = [0; 8];
        seen.read_exact(&mut value).unwrap();
        assert_eq!(u64::from_ne_bytes(value), 1);
    }

    #[test]
    fn impossible_logs_are_refused() {
        let file = memfd(4096);
        for (offset, len) in [(0, 0), (0, 4097), (4096, 1), (0, u64::MAX), (u64::MAX, 1)] {
            assert!(DirtyLog::map(&file, offset, len).is_err(), "{offset} {len}");
        }
    }
}
