//! The intent log: what the metadata on disk still lacks, in memory that outlives the process.
//!
//! A write to a new block or a new sector is answered when its data has reached the kernel; bitmap and table follow
//! in a batch, at the guest's next flush or a second later. If the *host* dies in between, the write is lost, as any
//! write that
//! was not flushed may be. If only the *process* dies, the guest goes on and must not lose anything that it was told is
//! written: so every such write first leaves a record here, in shared memory. Who opens the image next applies the
//! records.
//!
//! ```text
//!   0   magic  version  capacity  uuid of the image
//!   64  generation of half 0     72  generation of half 1
//!   128 half 0: records          ... half 1: records
//! ```
//!
//! A record is 16 bytes: block, sector of its bitmap, first sector, count of sectors, tag. It is valid while its tag
//! equals the
//! generation of its half, so that clearing a half is one store. A batch takes one half while new records go to the
//! other.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use uuid::Uuid;

use crate::error::{FormatError, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"TapioInt");
const VERSION: u32 = 1;
const HEADER_LEN: usize = 128;
const RECORD_LEN: usize = 16;
/// Records a half holds.
pub(super) const CAPACITY: u32 = 4096;
/// Bytes of a log.
pub(super) const INTENT_LEN: usize = HEADER_LEN + 2 * CAPACITY as usize * RECORD_LEN;

/// Where disk processes keep their intent logs: on a memory file system, but not among the counters, which the next
/// process clears away when their owner is dead. These are worth something only then.
pub fn directory() -> PathBuf {
    let root = std::env::var_os("TAPIO_SHM_DIR").map_or_else(|| PathBuf::from("/dev/shm"), PathBuf::from);
    root.join("tapio-intent")
}

/// The name of the log of an image.
pub fn file_name(uuid: Uuid) -> String {
    uuid.to_string()
}

/// How many records the log in the file `path` holds for the image `uuid`; none without such a file.
pub fn owed(path: &Path, uuid: Uuid) -> usize {
    std::fs::read(path).map_or(0, |bytes| count(&bytes, uuid))
}

/// How many records for the image `uuid` are in the bytes of a log.
pub fn count(bytes: &[u8], uuid: Uuid) -> usize {
    records(bytes, uuid).unwrap_or(0)
}

/// [`count`]; `None` if it is no log of this image.
fn records(bytes: &[u8], uuid: Uuid) -> Option<usize> {
    let word = |at: usize| {
        bytes.get(at..at + 4).map_or(0, |word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
    };
    let (high, low) = uuid.as_u64_pair();
    let is_ours = bytes.len() == INTENT_LEN
        && bytes[..8] == MAGIC.to_ne_bytes()
        && (word(8), word(12)) == (VERSION, CAPACITY)
        && bytes[16..24] == high.to_ne_bytes()
        && bytes[24..32] == low.to_ne_bytes();
    if !is_ours {
        return None;
    }
    let of_half = |half: u32| {
        let tag = word(64 + half as usize * 8);
        (0..CAPACITY).take_while(|&index| word(IntentLog::record_at(half, index) + 12) == tag).count()
    };
    Some(of_half(0) + of_half(1))
}

/// Memory for an intent log.
#[derive(Debug)]
pub(super) struct IntentMemory {
    base: NonNull<u8>,
    keep: Keep,
}

#[derive(Debug)]
enum Keep {
    Heap { _memory: Arc<HeapMemory> },
    Mapped { path: PathBuf },
}

/// Memory of the simulator: outlives the simulated process, not the simulated host.
#[derive(Debug)]
pub(super) struct HeapMemory(Vec<AtomicU64>);

impl HeapMemory {
    /// Zeroed memory for one log.
    pub fn new() -> Arc<Self> {
        Arc::new(Self((0..INTENT_LEN / 8).map(|_| AtomicU64::new(0)).collect()))
    }
}

impl HeapMemory {
    /// How many records the log holds for the image `uuid`, if it is in use for it.
    fn records(&self, uuid: Uuid) -> Option<usize> {
        let bytes: Vec<u8> =
            self.0.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        records(&bytes, uuid)
    }
}

/// The logs of a simulated host, one for each image.
#[derive(Debug, Default)]
pub struct HeapLogs(Mutex<BTreeMap<Uuid, Arc<HeapMemory>>>);

impl HeapLogs {
    fn of(&self, uuid: Uuid) -> Arc<HeapMemory> {
        // A panic elsewhere leaves a whole map behind the lock.
        let mut logs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(logs.entry(uuid).or_insert_with(HeapMemory::new))
    }
}

/// Where the intent logs of images that are opened for writing live.
#[derive(Clone, Debug, Default)]
pub enum IntentPlace {
    /// In memory of this process: a killed process loses writes that were answered but not flushed.
    #[default]
    Private,
    /// In this directory, on a memory file system, under each image's uuid.
    Directory(PathBuf),
    /// In this memory: the simulator's.
    Memory(Arc<HeapLogs>),
}

impl IntentPlace {
    /// Memory for the log of the image `uuid`.
    ///
    /// # Errors
    /// The directory or the file cannot be made.
    pub(super) fn memory(&self, uuid: Uuid) -> Result<IntentMemory> {
        match self {
            Self::Private => Ok(IntentMemory::heap(&HeapMemory::new())),
            Self::Memory(logs) => Ok(IntentMemory::heap(&logs.of(uuid))),
            Self::Directory(directory) => {
                let path = directory.join(file_name(uuid));
                let made = std::fs::create_dir_all(directory).and_then(|()| IntentMemory::file(&path));
                made.map_err(|error| FormatError::io("cannot make the intent log", error).with_path(&path))
            }
        }
    }

    /// Whether a process had the image `uuid` open for writing and died: its metadata may lack something, and what was
    /// written to it need not be durable.
    pub fn is_left(&self, uuid: Uuid) -> bool {
        match self {
            Self::Private => false,
            Self::Memory(logs) => logs.of(uuid).records(uuid).is_some(),
            Self::Directory(directory) => std::fs::read(directory.join(file_name(uuid)))
                .is_ok_and(|bytes| records(&bytes, uuid).is_some()),
        }
    }
}

impl IntentMemory {
    /// A log on the heap: lost with the process unless somebody else holds `memory`.
    pub fn heap(memory: &Arc<HeapMemory>) -> Self {
        // Atomics may be written through a shared reference, and the vector is never resized.
        let base = NonNull::from(memory.0.as_slice()).cast();
        Self { base, keep: Keep::Heap { _memory: Arc::clone(memory) } }
    }

    /// A log in the file `path`, which lies in shared memory; made if it is not there.
    ///
    /// # Errors
    /// The file cannot be made or mapped.
    pub fn file(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)?;
        if file.metadata()?.len() != INTENT_LEN as u64 {
            file.set_len(0)?;
            file.set_len(INTENT_LEN as u64)?;
        }
        Ok(Self { base: map(&file)?, keep: Keep::Mapped { path: path.to_path_buf() } })
    }
}

fn map(file: &File) -> io::Result<NonNull<u8>> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new shared mapping of a file of this length; no existing memory is touched.
    let base =
        unsafe { libc::mmap(std::ptr::null_mut(), INTENT_LEN, protection, flags, file.as_raw_fd(), 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(io::Error::last_os_error)
}

impl Drop for IntentMemory {
    fn drop(&mut self) {
        if let Keep::Mapped { .. } = self.keep {
            // SAFETY: mapped in `map` with this length; the log that used it is gone.
            unsafe { libc::munmap(self.base.as_ptr().cast(), INTENT_LEN) };
        }
    }
}

/// Something that the metadata on disk lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Intent {
    /// The block.
    pub(super) block: u32,
    /// Where its bitmap is.
    pub(super) sector: u32,
    /// The sectors of it that are present now; none for a block that is present as a whole.
    pub(super) first: u16,
    pub(super) count: u16,
}

/// The log of one image.
#[derive(Debug)]
pub(super) struct IntentLog {
    memory: IntentMemory,
    active: Cell<u32>,
    used: [Cell<u32>; 2],
}

impl IntentLog {
    /// Takes over the log in `memory`: what a process that died left for this image, or a fresh one.
    pub(super) fn adopt(memory: IntentMemory, uuid: Uuid) -> (Self, Vec<Intent>) {
        let log = Self { memory, active: Cell::new(0), used: [Cell::new(0), Cell::new(0)] };
        let mut left = Vec::new();
        if log.word(0).load(Ordering::Acquire) == MAGIC
            && log.word32(8).load(Ordering::Relaxed) == VERSION
            && log.word32(12).load(Ordering::Relaxed) == CAPACITY
            && log.uuid() == uuid
        {
            for half in 0..2 {
                let tag = log.tag(half);
                left.extend((0..CAPACITY).map_while(|index| log.record(half, index, tag)));
            }
        } else {
            // Another image's, or fresh memory: nothing in it may come to life later.
            for half in 0..2 {
                log.clear(half);
            }
        }
        log.word(0).store(0, Ordering::Release);
        log.word32(8).store(VERSION, Ordering::Relaxed);
        log.word32(12).store(CAPACITY, Ordering::Relaxed);
        let (high, low) = uuid.as_u64_pair();
        log.word(16).store(high, Ordering::Relaxed);
        log.word(24).store(low, Ordering::Relaxed);
        log.word(0).store(MAGIC, Ordering::Release);
        // What was left stays valid until it has been applied and made durable: new records go behind it.
        for half in 0..2 {
            let tag = log.tag(half);
            let count = (0..CAPACITY).take_while(|&index| log.record(half, index, tag).is_some()).count();
            log.used[half as usize].set(count as u32);
        }
        (log, left)
    }

    /// Adds a record; false when the active half is full.
    pub(super) fn append(&self, intent: Intent) -> bool {
        let half = self.active.get();
        let index = self.used[half as usize].get();
        if index == CAPACITY {
            return false;
        }
        let at = Self::record_at(half, index);
        self.word32(at).store(intent.block, Ordering::Relaxed);
        self.word32(at + 4).store(intent.sector, Ordering::Relaxed);
        let range = u32::from(intent.first) << 16 | u32::from(intent.count);
        self.word32(at + 8).store(range, Ordering::Relaxed);
        self.word32(at + 12).store(self.tag(half), Ordering::Release);
        self.used[half as usize].set(index + 1);
        true
    }

    /// Records in the active half.
    pub(super) fn used(&self) -> u32 {
        self.used[self.active.get() as usize].get()
    }

    /// Lets new records go to the other half, which must be clear; returns the half that a batch now covers.
    pub(super) fn switch(&self) -> u32 {
        let half = self.active.get();
        self.active.set(1 - half);
        half
    }

    /// The batch that covers this half is durable.
    pub(super) fn clear(&self, half: u32) {
        let generation = self.word(64 + half as usize * 8);
        // The tag is the low half and must not be zero, which is what unused memory holds.
        let next = generation.load(Ordering::Relaxed) + 1;
        let next = if next as u32 == 0 { next + 1 } else { next };
        generation.store(next, Ordering::Release);
        self.used[half as usize].set(0);
    }

    /// Everything is durable, what records of batches that failed say included.
    pub(super) fn clear_all(&self) {
        for half in 0..2 {
            self.clear(half);
        }
    }

    /// The image was closed cleanly: the log is not needed any more.
    pub(super) fn remove(&self) {
        self.clear_all();
        self.word(0).store(0, Ordering::Release);
        if let Keep::Mapped { path } = &self.memory.keep {
            // A log that stays is empty, and so harmless.
            let _ = std::fs::remove_file(path);
        }
    }

    fn tag(&self, half: u32) -> u32 {
        let generation = self.word(64 + half as usize * 8).load(Ordering::Acquire) as u32;
        if generation == 0 {
            // Fresh memory.
            self.word(64 + half as usize * 8).store(1, Ordering::Release);
            return 1;
        }
        generation
    }

    fn record(&self, half: u32, index: u32, tag: u32) -> Option<Intent> {
        let at = Self::record_at(half, index);
        if self.word32(at + 12).load(Ordering::Acquire) != tag {
            return None;
        }
        let range = self.word32(at + 8).load(Ordering::Relaxed);
        Some(Intent {
            block: self.word32(at).load(Ordering::Relaxed),
            sector: self.word32(at + 4).load(Ordering::Relaxed),
            first: (range >> 16) as u16,
            count: range as u16,
        })
    }

    const fn record_at(half: u32, index: u32) -> usize {
        HEADER_LEN + (half * CAPACITY + index) as usize * RECORD_LEN
    }

    fn uuid(&self) -> Uuid {
        Uuid::from_u64_pair(self.word(16).load(Ordering::Relaxed), self.word(24).load(Ordering::Relaxed))
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= INTENT_LEN);
        // SAFETY: inside the memory, aligned, and reached only through atomics while the log lives.
        unsafe { &*self.memory.base.as_ptr().add(at).cast() }
    }

    fn word32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= INTENT_LEN);
        // SAFETY: as in `word`.
        unsafe { &*self.memory.base.as_ptr().add(at).cast() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intent(block: u32) -> Intent {
        Intent { block, sector: block + 100, first: 3, count: 4096 }
    }

    #[test]
    fn records_outlive_the_log_that_wrote_them() {
        let (memory, uuid) = (HeapMemory::new(), Uuid::from_u128(7));
        let (log, left) = IntentLog::adopt(IntentMemory::heap(&memory), uuid);
        assert!(left.is_empty());
        assert!(log.append(intent(1)) && log.append(intent(2)));
        assert_eq!((memory.records(uuid), memory.records(Uuid::nil())), (Some(2), None));
        drop(log);
        let (log, left) = IntentLog::adopt(IntentMemory::heap(&memory), uuid);
        assert_eq!(left, [intent(1), intent(2)]);
        let half = log.switch();
        assert!(log.append(intent(3)));
        log.clear(half);
        drop(log);
        let (_, left) = IntentLog::adopt(IntentMemory::heap(&memory), uuid);
        assert_eq!(left, [intent(3)]);
    }

    #[test]
    fn another_image_finds_nothing() {
        let memory = HeapMemory::new();
        let (log, _) = IntentLog::adopt(IntentMemory::heap(&memory), Uuid::from_u128(7));
        assert!(log.append(intent(1)));
        drop(log);
        let (_, left) = IntentLog::adopt(IntentMemory::heap(&memory), Uuid::from_u128(8));
        assert!(left.is_empty());
    }

    #[test]
    fn a_full_half_takes_no_more_until_it_is_cleared() {
        let (log, _) = IntentLog::adopt(IntentMemory::heap(&HeapMemory::new()), Uuid::nil());
        assert!((0..CAPACITY).all(|block| log.append(intent(block))));
        assert!(!log.append(intent(0)));
        let half = log.switch();
        assert!(log.append(intent(0)));
        log.clear(half);
        assert_eq!((log.used(), log.used[half as usize].get()), (1, 0));
    }
}
