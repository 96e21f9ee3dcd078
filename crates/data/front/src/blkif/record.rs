//! The record of requests in flight, in memory that survives this process.
//!
//! A ring alone does not say which requests have no answer: responses lie on top of requests, in any order. So each
//! request is copied into a file in shared memory when it is taken. After this process was killed, the next one that
//! serves the ring repeats what has no answer; the guest cannot tell.
//!
//! | step | what is stored | what a death right before it means |
//! |---|---|---|
//! | take | the bytes of the request, its place in line, then its state, *taken* | the request is still in the ring |
//! | answer | the number of the response, then the state, *answered* | nothing was seen: it is repeated |
//! | | the ring's `rsp_prod`, by which the guest sees the batch | as above, for all of the batch |
//! | | `shown`, the number that is in the ring now | the guest has seen the batch: it is not repeated |
//! | | states of the batch, *free* | as above |
//!
//! A request whose state is *answered* was seen if its response's number lies before `rsp_prod`. `rsp_prod` is the
//! guest's to write, so it is believed only between `shown` and what the record itself could have shown next.
//!
//! ```text
//!   0     magic u64, version u32, queues u32, entries of a queue u32, ring size u32
//!   queue 0 at 64:
//!     0   identity u64 (of grants, port and layout), shown u32
//!     64  entries, 128 bytes each: state u32, response u32, line u64, 112 bytes of the request
//!   queue 1 follows
//! ```

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tapio_sys::lock::try_lock;
use tapio_sys::shm::{PrivateDir, SharedMemory};
use tapio_xen::blkif::{REQUEST_LEN_MAX, Slot};

const MAGIC: u64 = u64::from_le_bytes(*b"tapioblk");
const VERSION: u32 = 1;
const HEADER_LEN: usize = 64;
const QUEUE_HEADER_LEN: usize = 64;
const ENTRY_LEN: usize = 128;

const AT_VERSION: usize = 8;
const AT_QUEUES: usize = 12;
const AT_ENTRIES: usize = 16;
const AT_SHOWN: usize = 8;
const AT_RESPONSE: usize = 4;
const AT_LINE: usize = 8;
const AT_REQUEST: usize = 16;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const ANSWERED: u32 = 2;

const fn queue_len(entries: u32) -> usize {
    QUEUE_HEADER_LEN + ENTRY_LEN * entries as usize
}

/// Shared memory, with the file that it is of.
#[derive(Debug)]
struct Memory {
    shared: SharedMemory,
    /// Its lock says that the writer lives.
    _file: Option<File>,
}

impl Memory {
    fn private(len: usize) -> io::Result<Self> {
        Ok(Self { shared: SharedMemory::anonymous(len)?, _file: None })
    }

    fn of(file: File, len: usize) -> io::Result<Self> {
        Ok(Self { shared: SharedMemory::of(&file, len)?, _file: Some(file) })
    }

    fn len(&self) -> usize {
        self.shared.len()
    }

    fn base(&self) -> NonNull<u8> {
        self.shared.base()
    }

    fn u32(&self, at: usize) -> &AtomicU32 {
        assert!(at + 4 <= self.len() && at.is_multiple_of(4), "inside the record");
        // SAFETY: inside the mapping and aligned, as just checked; accessed by atomics alone.
        unsafe { AtomicU32::from_ptr(self.base().as_ptr().add(at).cast()) }
    }

    fn u64(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= self.len() && at.is_multiple_of(8), "inside the record");
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.base().as_ptr().add(at).cast()) }
    }
}

/// The record of a device: a part for each of its rings.
#[derive(Debug)]
pub struct Record {
    memory: Arc<Memory>,
    path: Option<PathBuf>,
    queues: u32,
    entries: u32,
    /// What a former process left is here.
    inherited: bool,
}

impl Record {
    /// A record that dies with the process.
    ///
    /// # Errors
    /// No memory.
    pub fn private(queues: u32, entries: u32) -> io::Result<Self> {
        let len = HEADER_LEN + queue_len(entries) * queues as usize;
        let memory = Arc::new(Memory::private(len)?);
        Ok(Self { memory, path: None, queues, entries, inherited: false }.fresh())
    }

    /// Opens the record at `path`, or makes one for `queues` rings of `entries` slots. `keep`: what a former process
    /// left there is wanted, if it is of that shape.
    ///
    /// # Errors
    /// Another process has it (`AlreadyExists`), the file has another owner, or there is no room.
    pub fn open(path: &Path, queues: u32, entries: u32, keep: bool) -> io::Result<Self> {
        let name = path.file_name().and_then(|name| name.to_str()).ok_or(io::ErrorKind::InvalidInput)?;
        let file = PrivateDir::open(path.parent().unwrap_or(path))?.file_or_new(name)?;
        let facts = file.metadata()?;
        if !try_lock(&file)? {
            let why = format!("another process serves this device: it has {} open", path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        let len = HEADER_LEN + queue_len(entries) * queues as usize;
        let was_there = facts.len() == len as u64;
        if !was_there {
            file.set_len(0)?;
            file.set_len(len as u64)?;
        }
        let memory = Arc::new(Memory::of(file, len)?);
        let path = Some(path.to_path_buf());
        let record = Self { memory, path, queues, entries, inherited: was_there && keep };
        let has = |at: usize, value: u32| record.memory.u32(at).load(Ordering::Relaxed) == value;
        let fits = record.memory.u64(0).load(Ordering::Acquire) == MAGIC
            && has(AT_VERSION, VERSION)
            && has(AT_QUEUES, queues)
            && has(AT_ENTRIES, entries);
        Ok(if record.inherited && fits { record } else { record.fresh() })
    }

    /// Forgets everything.
    fn fresh(mut self) -> Self {
        self.inherited = false;
        let memory = &self.memory;
        memory.u64(0).store(0, Ordering::Release);
        for at in (8..memory.len() / 8 * 8).step_by(8) {
            memory.u64(at).store(0, Ordering::Relaxed);
        }
        memory.u32(AT_VERSION).store(VERSION, Ordering::Relaxed);
        memory.u32(AT_QUEUES).store(self.queues, Ordering::Relaxed);
        memory.u32(AT_ENTRIES).store(self.entries, Ordering::Relaxed);
        memory.u64(0).store(MAGIC, Ordering::Release);
        self
    }

    /// Whether what a former process left is here.
    pub fn is_inherited(&self) -> bool {
        self.inherited
    }

    /// The part of ring `index`.
    ///
    /// # Panics
    /// There is no such ring.
    pub fn queue(&self, index: u32) -> RecordQueue {
        assert!(index < self.queues, "a part for each ring");
        RecordQueue {
            memory: Arc::clone(&self.memory),
            base: HEADER_LEN + queue_len(self.entries) * index as usize,
            entries: self.entries,
            line: 0,
        }
    }

    /// Removes the file: nothing is in flight any more.
    pub fn remove(&self) {
        if let Some(path) = &self.path {
            // Gone already means that a clean-up removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// What a former process took and did not answer: entry and bytes of each request, in the order in which they were
/// taken.
pub type Left = Vec<(u32, Slot)>;

/// Why what is left in a record cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// It is of other grants, another port or another layout.
    Identity,
    /// It shows responses up to `shown`, and the ring up to `rsp_prod`: they belong to different lives.
    Numbers {
        /// In the record.
        shown: u32,
        /// In the ring.
        rsp_prod: u32,
    },
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Identity => f.write_str("the requests that were left behind are of another ring"),
            Self::Numbers { shown, rsp_prod } => {
                write!(
                    f,
                    "the requests that were left behind end at response {shown}, the ring at {rsp_prod}"
                )
            }
        }
    }
}

/// The part of one ring.
#[derive(Debug)]
pub struct RecordQueue {
    memory: Arc<Memory>,
    base: usize,
    entries: u32,
    line: u64,
}

impl RecordQueue {
    fn entry(&self, index: u32) -> usize {
        assert!(index < self.entries, "entries are given out below their number");
        self.base + QUEUE_HEADER_LEN + ENTRY_LEN * index as usize
    }

    fn state(&self, index: u32) -> &AtomicU32 {
        self.memory.u32(self.entry(index))
    }

    fn shown(&self) -> &AtomicU32 {
        self.memory.u32(self.base + AT_SHOWN)
    }

    /// Makes the part that of a ring which stands at `rsp_prod` with nothing in flight.
    pub fn begin(&mut self, identity: u64, rsp_prod: u32) {
        for index in 0..self.entries {
            self.state(index).store(FREE, Ordering::Relaxed);
        }
        self.shown().store(rsp_prod, Ordering::Relaxed);
        self.memory.u64(self.base).store(identity, Ordering::Release);
        self.line = 0;
    }

    /// Finishes a batch that was cut off between its publication and its last step, and gives what was left behind by
    /// a process whose ring stands at `rsp_prod` now.
    ///
    /// # Errors
    /// It is of another ring. Nothing was changed.
    pub fn recover(&mut self, identity: u64, rsp_prod: u32) -> Result<Left, Mismatch> {
        if self.memory.u64(self.base).load(Ordering::Acquire) != identity {
            return Err(Mismatch::Identity);
        }
        let shown = self.shown().load(Ordering::Relaxed);
        let answered = |queue: &Self| {
            (0..queue.entries).filter(|index| queue.state(*index).load(Ordering::Acquire) == ANSWERED).count()
        };
        // The batch that was being answered is all that the ring may be ahead.
        if rsp_prod.wrapping_sub(shown) as usize > answered(self) {
            return Err(Mismatch::Numbers { shown, rsp_prod });
        }
        // Before an entry becomes free, so that a process that dies here is recovered after in the same way.
        self.shown().store(rsp_prod, Ordering::Release);
        let mut left = Vec::new();
        for index in 0..self.entries {
            let at = self.entry(index);
            match self.state(index).load(Ordering::Acquire) {
                FREE => continue,
                ANSWERED => {
                    let response = self.memory.u32(at + AT_RESPONSE).load(Ordering::Relaxed);
                    let distance = rsp_prod.wrapping_sub(response);
                    if (1..=self.entries).contains(&distance) {
                        self.state(index).store(FREE, Ordering::Relaxed);
                        continue;
                    }
                    self.state(index).store(TAKEN, Ordering::Relaxed);
                }
                TAKEN => {}
                _ => {
                    self.state(index).store(FREE, Ordering::Relaxed);
                    continue;
                }
            }
            let mut slot = Slot([0; REQUEST_LEN_MAX]);
            for (word, bytes) in slot.0.chunks_exact_mut(8).enumerate() {
                let value = self.memory.u64(at + AT_REQUEST + word * 8).load(Ordering::Relaxed);
                bytes.copy_from_slice(&value.to_ne_bytes());
            }
            left.push((self.memory.u64(at + AT_LINE).load(Ordering::Relaxed), index, slot));
        }
        left.sort_unstable_by_key(|(line, index, _)| (*line, *index));
        self.line = left.last().map_or(0, |(line, ..)| line.wrapping_add(1));
        Ok(left.into_iter().map(|(_, index, slot)| (index, slot)).collect())
    }

    /// A request was taken; entry `index` is free.
    #[inline]
    pub fn take(&mut self, index: u32, slot: &Slot) {
        let at = self.entry(index);
        for (word, bytes) in slot.0.chunks_exact(8).enumerate() {
            let value = u64::from_ne_bytes([
                bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
            ]);
            self.memory.u64(at + AT_REQUEST + word * 8).store(value, Ordering::Relaxed);
        }
        self.memory.u64(at + AT_LINE).store(self.line, Ordering::Relaxed);
        self.line = self.line.wrapping_add(1);
        self.state(index).store(TAKEN, Ordering::Release);
    }

    /// The request of entry `index` is answered by response `response`, which the guest does not see yet.
    #[inline]
    pub fn answer(&mut self, index: u32, response: u32) {
        self.memory.u32(self.entry(index) + AT_RESPONSE).store(response, Ordering::Relaxed);
        self.state(index).store(ANSWERED, Ordering::Release);
    }

    /// The guest sees all responses before `rsp_prod`, those of `batch` among them.
    #[inline]
    pub fn published(&mut self, batch: &[u32], rsp_prod: u32) {
        self.shown().store(rsp_prod, Ordering::Release);
        for index in batch {
            self.state(*index).store(FREE, Ordering::Release);
        }
    }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
