//! What a disk publishes under a domain and device number.

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::published::{VERSION, slot};
use tapio_types::RingState;

use crate::ring_text::{RING_TEXT_LEN_MAX, ring_text};
use crate::shm::{ShmRoot, Turn, Words, private_dir};
use crate::{FLAG_LOW_MEMORY, RequestKind};

const PAGE: usize = 4096;
/// A ring's state is written out at most this often.
const RING_INTERVAL_NS: u64 = 5_000_000_000;

/// The numbers under which a virtual disk is known: the guest's domain and the device in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VbdId {
    /// Domain; 0 where there is no hypervisor.
    pub domid: u32,
    /// Device; the disk's minor number if no other was given.
    pub devid: u32,
}

impl std::fmt::Display for VbdId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{},{}", self.domid, self.devid)
    }
}

/// The counters of one `vdi-*`, `vbd-*` or `nbd-*` file.
///
/// Sectors are counted with the request, when it is taken, so that a rate of requests and a rate of bytes over the same
/// interval belong together. (Our own page counts bytes that were answered.)
#[derive(Debug)]
pub(crate) struct Published {
    words: Words,
    /// Time of reads and writes in nanoseconds: the file has microseconds, and rounding each request would lose
    /// most of a fast disk's time.
    time_ns: [Cell<u64>; 2],
}

impl Published {
    pub(crate) fn new(words: Words, version: u32) -> Self {
        words.set(0, u64::from(version));
        Self { words, time_ns: [const { Cell::new(0) }; 2] }
    }

    #[inline]
    pub(crate) fn submitted(&self, kind: RequestKind, bytes: u64) {
        if let Some(first) = first_of(kind) {
            self.words.add(first + slot::SUBMITTED, 1);
            self.words.add(first + slot::SECTORS, bytes / 512);
        }
    }

    #[inline]
    pub(crate) fn completed(&self, kind: RequestKind, total_ns: u64, ok: bool) {
        if !ok {
            self.words.add(slot::IO_ERRORS, 1);
        }
        let Some(first) = first_of(kind) else { return };
        self.words.add(first + slot::COMPLETED, 1);
        let time = &self.time_ns[usize::from(kind == RequestKind::Write)];
        time.set(time.get().wrapping_add(total_ns));
        self.words.set(first + slot::TICKS, time.get() / 1000);
    }

    pub(crate) fn remove_file(&self) {
        self.words.remove_file();
    }

    pub(crate) fn out_of_requests(&self) {
        self.words.add(slot::OO_REQS, 1);
    }

    pub(crate) fn low_memory(&self, on: bool) {
        self.words.set(11, if on { FLAG_LOW_MEMORY } else { 0 });
    }
}

/// The layout counts reads and writes only.
#[inline]
const fn first_of(kind: RequestKind) -> Option<usize> {
    match kind {
        RequestKind::Read => Some(slot::READ),
        RequestKind::Write => Some(slot::WRITE),
        RequestKind::Flush | RequestKind::Discard | RequestKind::WriteZeroes => None,
    }
}

/// The files of one virtual disk. Made by a thread that may wait for the file system, then handed to the data thread;
/// the files are removed when the value is dropped.
#[derive(Debug)]
pub struct VbdPages {
    id: VbdId,
    published: Published,
    nbd: Option<Published>,
    statistics: Words,
    ring: Words,
    ring_len: usize,
    ring_written_ns: Option<u64>,
    ring_busy: bool,
    dirs: [PathBuf; 2],
}

impl VbdPages {
    /// Makes the files. `nbd` adds the `nbd-<minor>` file that a disk reached over NBD has.
    ///
    /// # Errors
    /// A living process publishes these numbers already (`AlreadyExists`), a directory cannot be made or belongs to
    /// another owner, or there is no room.
    pub fn create(root: &ShmRoot, pid: u32, minor: u32, id: VbdId, nbd: bool) -> io::Result<Box<Self>> {
        let dirs = [root.process(pid), root.vbd(id.domid, id.devid)];
        let turn = Turn::take(root)?;
        let made = Self::in_dirs(&turn, dirs.clone(), minor, id, nbd);
        if made.is_err() {
            for dir in &dirs {
                // Not empty: others publish there.
                let _ = fs::remove_dir(dir);
            }
        }
        made
    }

    fn in_dirs(turn: &Turn, dirs: [PathBuf; 2], minor: u32, id: VbdId, nbd: bool) -> io::Result<Box<Self>> {
        for dir in &dirs {
            private_dir(dir)?;
        }
        // First what two processes could both want.
        let statistics = Words::create(turn, &dirs[1].join("statistics"), PAGE)?;
        let ring = Words::create(turn, &dirs[1].join("io_ring"), PAGE)?;
        let published = dirs[0].join(format!("vbd-{}-{}", id.domid, id.devid));
        let nbd = match nbd {
            true => Some(Words::create(turn, &dirs[0].join(format!("nbd-{minor}")), PAGE)?),
            false => None,
        };
        let mut pages = Box::new(Self {
            id,
            published: Published::new(Words::create(turn, &published, PAGE)?, VERSION),
            nbd: nbd.map(|words| Published::new(words, VERSION)),
            statistics,
            ring,
            ring_len: PAGE,
            ring_written_ns: None,
            ring_busy: false,
            dirs,
        });
        pages.write_ring(&RingState::default());
        Ok(pages)
    }

    /// The same counters without files.
    ///
    /// # Errors
    /// No memory.
    pub fn private(id: VbdId) -> io::Result<Box<Self>> {
        Ok(Box::new(Self {
            id,
            published: Published::new(Words::anonymous(PAGE)?, VERSION),
            nbd: None,
            statistics: Words::anonymous(PAGE)?,
            ring: Words::anonymous(PAGE)?,
            ring_len: PAGE,
            ring_written_ns: None,
            ring_busy: false,
            dirs: Default::default(),
        }))
    }

    /// Under which numbers.
    pub fn id(&self) -> VbdId {
        self.id
    }

    #[inline]
    pub(crate) fn submitted(&self, kind: RequestKind, bytes: u64) {
        self.published.submitted(kind, bytes);
        if let Some(nbd) = &self.nbd {
            nbd.submitted(kind, bytes);
        }
        let word = match kind {
            RequestKind::Discard | RequestKind::WriteZeroes => 0,
            RequestKind::Flush => 1,
            RequestKind::Read => 3,
            RequestKind::Write => 5,
        };
        self.statistics.add(word, 1);
        if matches!(kind, RequestKind::Read | RequestKind::Write) {
            self.statistics.add(word + 1, bytes / 512);
        }
    }

    #[inline]
    pub(crate) fn completed(&self, kind: RequestKind, total_ns: u64, ok: bool) {
        self.published.completed(kind, total_ns, ok);
        if let Some(nbd) = &self.nbd {
            nbd.completed(kind, total_ns, ok);
        }
    }

    pub(crate) fn out_of_requests(&self) {
        self.published.out_of_requests();
        self.statistics.add(2, 1);
    }

    pub(crate) fn low_memory(&self, on: bool) {
        self.published.low_memory(on);
    }

    /// Writes the ring's state out when it is due, see [`crate::DiskStats::ring`].
    pub(crate) fn ring(&mut self, ring: &RingState, now_ns: u64) {
        let due = self.ring_written_ns.is_none_or(|then| now_ns.saturating_sub(then) >= RING_INTERVAL_NS);
        let quiet = ring.used() == 0;
        if due || (quiet && self.ring_busy) {
            self.write_ring(ring);
            self.ring_busy = !quiet;
            if due {
                self.ring_written_ns = Some(now_ns);
            }
        }
    }

    /// Writes the ring's state out now.
    pub(crate) fn ring_at_once(&mut self, ring: &RingState) {
        self.write_ring(ring);
        self.ring_busy = ring.used() != 0;
    }

    /// Two system calls at most, and only if the text changes its length is there a second.
    fn write_ring(&mut self, ring: &RingState) {
        let (text, len): ([u8; RING_TEXT_LEN_MAX], usize) = ring_text(ring);
        let Some(file) = self.ring.file() else { return };
        // A failure leaves an old state in an information file; the data path has no way to report it.
        if file.write_all_at(&text[..len], 0).is_ok()
            && len != self.ring_len
            && file.set_len(len as u64).is_ok()
        {
            self.ring_len = len;
        }
    }
}

impl Drop for VbdPages {
    fn drop(&mut self) {
        // Files first: their disappearance tells a reader that the disk is gone, and a directory must be empty.
        self.published.remove_file();
        if let Some(nbd) = &self.nbd {
            nbd.remove_file();
        }
        self.statistics.remove_file();
        self.ring.remove_file();
        for dir in self.dirs.iter().filter(|dir| !dir.as_os_str().is_empty()) {
            // Not empty: another disk of this process still publishes there.
            let _ = fs::remove_dir(dir);
        }
    }
}
