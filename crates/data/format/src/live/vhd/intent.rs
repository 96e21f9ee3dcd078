//! The intent log: what the metadata on disk still lacks, in memory that outlives the process.
//!
//! A write to a new block or a new sector is answered when its data has reached the kernel; bitmap and table follow
//! in a batch, at the guest's next flush or a second later. If the *host* dies in between, the write is lost, as any
//! write that
//! was not flushed may be. If only the *process* dies, the guest goes on and must not lose anything that it was told is
//! written: so every such write first leaves a record here, in shared memory. The next process that opens the image
//! applies the records.
//!
//! A log belongs to one state of one image: to what the process left that wrote it. The image shows that state by the
//! process's mark in it ([`crate::vhd::mark`]), which every other writer destroys, and by its length. `claim` compares
//! them before any record is believed.
//!
//! ```text
//!   0   magic  version  capacity  uuid of the image
//!   32  mark in the image, and the one that is about to replace it
//!   48  length of the image, and the one that it is about to have
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
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use tapio_sys::shm::{PrivateDir, SharedMemory};
use uuid::Uuid;

use crate::error::{FormatError, Result};
use crate::vhd::Mark;

const MAGIC: u64 = u64::from_le_bytes(*b"TapioInt");
const VERSION: u32 = 2;
const HEADER_LEN: usize = 128;
const RECORD_LEN: usize = 16;
/// Records a half holds.
pub(super) const CAPACITY: u32 = 4096;
/// Where the words about the image's state are.
const MARK: usize = 32;
const NEXT_MARK: usize = 40;
const LEN: usize = 48;
const NEXT_LEN: usize = 56;
/// Bytes of a log.
pub(super) const INTENT_LEN: usize = HEADER_LEN + 2 * CAPACITY as usize * RECORD_LEN;

/// Where disk processes keep their intent logs: on a memory file system, but not among the counters, which the next
/// process clears away when their owner is dead. These are worth something only then.
pub fn directory() -> PathBuf {
    let root = std::env::var_os("TAPIO_SHM_DIR").map_or_else(|| PathBuf::from("/dev/shm"), PathBuf::from);
    root.join("tapio-intent")
}

/// The name of the log of an image, which has this number in its file system: a copy with the same uuid has another.
pub fn file_name(uuid: Uuid, inode: u64) -> String {
    if inode == 0 { uuid.to_string() } else { format!("{uuid}.{inode}") }
}

/// How many records the log in the file `path` holds for the image `uuid` that has `mark`; none without such a file,
/// and none if another program has opened the image for writing since.
///
/// # Errors
/// The directory or the file is another user's, or cannot be read.
pub fn owed(path: &Path, uuid: Uuid, mark: Option<Mark>) -> io::Result<usize> {
    let found = read(path)?.and_then(|bytes| records(&bytes, uuid));
    Ok(found.filter(|found| found.has_mark(mark)).map_or(0, |found| found.count))
}

/// The bytes of the log in the file `path`, if there is one.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
    else {
        return Ok(None);
    };
    let read = || -> io::Result<Vec<u8>> {
        let file = PrivateDir::open(directory)?.file(name, false)?;
        let mut bytes = Vec::with_capacity(INTENT_LEN);
        // A log is no longer than this, and what is longer is none.
        file.take(INTENT_LEN as u64 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        bytes => bytes.map(Some),
    }
}

/// How many records for the image `uuid` are in the bytes of a log.
pub fn count(bytes: &[u8], uuid: Uuid) -> usize {
    records(bytes, uuid).map_or(0, |found| found.count)
}

/// A log as a process finds it that is not its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    count: usize,
    marks: [u32; 2],
}

impl Found {
    /// Whether the log is of the process that put this mark on its image.
    pub(super) fn has_mark(&self, mark: Option<Mark>) -> bool {
        mark.is_some_and(|mark| self.marks.contains(&mark.number()))
    }
}

/// What is in the bytes of a log; `None` if it is no log of this image.
fn records(bytes: &[u8], uuid: Uuid) -> Option<Found> {
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
    Some(Found { count: of_half(0) + of_half(1), marks: [word(32), word(40)] })
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
    Mapped { _memory: SharedMemory, directory: PrivateDir, name: String },
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

#[cfg(test)]
impl HeapMemory {
    /// What the log holds for the image `uuid`, if it is in use for it.
    fn records(&self, uuid: Uuid) -> Option<Found> {
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
        let mut logs = self.0.lock();
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
    /// Memory for the log of the image `uuid`, which has the number `inode` in its file system.
    ///
    /// # Errors
    /// The directory or the file cannot be made.
    pub(super) fn memory(&self, uuid: Uuid, inode: u64) -> Result<IntentMemory> {
        match self {
            Self::Private => Ok(IntentMemory::heap(&HeapMemory::new())),
            Self::Memory(logs) => Ok(IntentMemory::heap(&logs.of(uuid))),
            Self::Directory(directory) => {
                let name = file_name(uuid, inode);
                let made =
                    PrivateDir::make(directory).and_then(|directory| IntentMemory::file(directory, name));
                made.map_err(|error| {
                    FormatError::io("cannot make the intent log", error).with_path(directory)
                })
            }
        }
    }
}

impl IntentMemory {
    /// A log on the heap: lost with the process unless another holder keeps `memory`.
    pub fn heap(memory: &Arc<HeapMemory>) -> Self {
        // Atomics may be written through a shared reference, and the vector is never resized.
        let base = NonNull::from(memory.0.as_slice()).cast();
        Self { base, keep: Keep::Heap { _memory: Arc::clone(memory) } }
    }

    /// A log in the file `name`, which lies in shared memory; made if it is not there.
    ///
    /// # Errors
    /// The file cannot be made or mapped, or is another user's.
    fn file(directory: PrivateDir, name: String) -> io::Result<Self> {
        let file = directory.file_or_new(&name)?;
        if file.metadata()?.len() != INTENT_LEN as u64 {
            file.set_len(0)?;
            file.set_len(INTENT_LEN as u64)?;
        }
        let memory = SharedMemory::of(&file, INTENT_LEN)?;
        Ok(Self { base: memory.base(), keep: Keep::Mapped { _memory: memory, directory, name } })
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

/// What a process left that died, and the state of the image that it belongs to.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub(super) intents: Vec<Intent>,
    /// The image has one of these marks.
    pub(super) marks: [u32; 2],
    /// It has one of these lengths, or one between them.
    pub(super) lens: [u64; 2],
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
    pub(super) fn adopt(memory: IntentMemory, uuid: Uuid) -> (Self, Left) {
        let log = Self { memory, active: Cell::new(0), used: [Cell::new(0), Cell::new(0)] };
        let mut left = Left::default();
        if log.word(0).load(Ordering::Acquire) == MAGIC
            && log.word32(8).load(Ordering::Relaxed) == VERSION
            && log.word32(12).load(Ordering::Relaxed) == CAPACITY
            && log.uuid() == uuid
        {
            for half in 0..2 {
                let tag = log.tag(half);
                left.intents.extend((0..CAPACITY).map_while(|index| log.record(half, index, tag)));
            }
            left.marks = [MARK, NEXT_MARK].map(|at| log.word(at).load(Ordering::Relaxed) as u32);
            left.lens = [LEN, NEXT_LEN].map(|at| log.word(at).load(Ordering::Relaxed));
        } else {
            // Another image's, or fresh memory: nothing in it may come to life later.
            for half in 0..2 {
                log.clear(half);
            }
            for at in [MARK, NEXT_MARK, LEN, NEXT_LEN] {
                log.word(at).store(0, Ordering::Relaxed);
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

    /// The image is about to have `mark`.
    pub(super) fn will_have_mark(&self, mark: Mark) {
        self.word(NEXT_MARK).store(mark.number().into(), Ordering::Release);
    }

    /// The image has the mark that it was about to have.
    pub(super) fn has_mark(&self) {
        self.word(MARK).store(self.word(NEXT_MARK).load(Ordering::Relaxed), Ordering::Release);
    }

    /// The mark that the image has.
    pub(super) fn mark(&self) -> Option<Mark> {
        Mark::of_number(self.word(MARK).load(Ordering::Relaxed) as u32)
    }

    /// The image has `now` bytes, and is about to have `then`.
    pub(super) fn will_have_len(&self, now: u64, then: u64) {
        self.word(LEN).store(now, Ordering::Release);
        self.word(NEXT_LEN).store(then, Ordering::Release);
    }

    /// The records are not believed: they go where a person may look at them, and out of the log. Says where they are.
    pub(super) fn set_aside(&self) -> io::Result<Option<PathBuf>> {
        let aside = match &self.memory.keep {
            Keep::Heap { .. } => None,
            Keep::Mapped { directory, name, .. } => {
                let name = format!("{name}.refused");
                // One of the image is kept, the newest.
                let _ = directory.remove(&name);
                let mut file = directory.new_file(&name)?;
                let words = (0..INTENT_LEN / 8).map(|index| self.word(index * 8).load(Ordering::Relaxed));
                io::Write::write_all(&mut file, &words.flat_map(u64::to_ne_bytes).collect::<Vec<_>>())?;
                Some(directory.path().join(name))
            }
        };
        self.clear_all();
        Ok(aside)
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
        if let Keep::Mapped { directory, name, .. } = &self.memory.keep {
            // A log that stays is empty, and so harmless.
            let _ = directory.remove(name);
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
        assert!(left.intents.is_empty());
        assert!(log.append(intent(1)) && log.append(intent(2)));
        assert_eq!(
            (memory.records(uuid).map(|found| found.count), memory.records(Uuid::nil())),
            (Some(2), None)
        );
        drop(log);
        let (log, left) = IntentLog::adopt(IntentMemory::heap(&memory), uuid);
        assert_eq!(left.intents, [intent(1), intent(2)]);
        let half = log.switch();
        assert!(log.append(intent(3)));
        log.clear(half);
        drop(log);
        let (_, left) = IntentLog::adopt(IntentMemory::heap(&memory), uuid);
        assert_eq!(left.intents, [intent(3)]);
    }

    #[test]
    fn another_image_finds_nothing() {
        let memory = HeapMemory::new();
        let (log, _) = IntentLog::adopt(IntentMemory::heap(&memory), Uuid::from_u128(7));
        assert!(log.append(intent(1)));
        drop(log);
        let (_, left) = IntentLog::adopt(IntentMemory::heap(&memory), Uuid::from_u128(8));
        assert!(left.intents.is_empty());
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

    #[test]
    fn a_directory_or_a_log_of_another_kind_is_refused_and_not_waited_for() {
        use std::os::unix::fs::PermissionsExt;
        let place = tempfile::tempdir().expect("a directory");
        let directory = place.path().join("tapio-intent");
        let (uuid, at) = (Uuid::from_u128(7), IntentPlace::Directory(directory.clone()));
        let path = directory.join(file_name(uuid, 5));
        assert_eq!(owed(&path, uuid, None).expect("there is none"), 0);
        let (log, _) = IntentLog::adopt(at.memory(uuid, 5).expect("made"), uuid);
        let mark = Mark::draw(None);
        log.will_have_mark(mark);
        log.has_mark();
        assert!(log.append(intent(1)));
        assert_eq!(owed(&path, uuid, Some(mark)).expect("ours"), 1);
        assert_eq!(owed(&path, uuid, Some(Mark::draw(Some(mark)))).expect("ours"), 0);
        let aside = log.set_aside().expect("set aside").expect("in a file");
        assert_eq!(records(&std::fs::read(aside).expect("there"), uuid).map(|found| found.count), Some(1));
        assert_eq!(owed(&path, uuid, Some(mark)).expect("ours"), 0);
        log.remove();
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).expect("made");
        at.memory(uuid, 5).expect_err("a FIFO");
        owed(&path, uuid, Some(mark)).expect_err("a FIFO");
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777)).expect("ours");
        let error = at.memory(uuid, 6).expect_err("every user can write there");
        assert!(error.to_string().contains("tapio-intent"), "{error}");
        owed(&path, uuid, Some(mark)).expect_err("every user can write there");
    }
}
