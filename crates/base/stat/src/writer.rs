//! Counting, by the thread that serves the disk.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{SystemTime, UNIX_EPOCH};

use tapio_types::IoLimits;

use crate::page::{
    MAGIC, PAGE_LEN, PAGE_VERSION, RING_USE_WORDS, VACANT, VBD_SLOTS, at, flag, limit_words, read_live,
    ring_words, store_image,
};
use crate::published::VERSION;
use crate::shm::{ShmRoot, Turn, Words, private_dir};
use crate::vbd::{Published, VbdId, VbdPages};
use tapio_types::RingState;

use crate::{DelayCounts, PollCounts, RequestKind, STAGES, Snapshot, Stages, TIMED_KINDS, bucket_of};

/// The identity of a disk in the names of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskName {
    /// Process.
    pub pid: u32,
    /// Minor number of the disk.
    pub minor: u32,
    /// File name of our page; `<pid>.<minor>` without one. A controller that knows the disk's UUID gives that.
    pub page: Option<String>,
}

impl DiskName {
    /// This process's disk of that minor number.
    pub fn of_this_process(minor: u32) -> Self {
        Self { pid: std::process::id(), minor, page: None }
    }

    /// The page's file name, or why the one that was given cannot be.
    fn page_name(&self) -> io::Result<String> {
        let Some(name) = &self.page else { return Ok(format!("{}.{}", self.pid, self.minor)) };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.bytes().all(plain) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "'{name}' cannot name a page of counters: use a UUID or letters, digits, '-', '.', '_'"
                ),
            ));
        }
        Ok(name.clone())
    }
}

/// The counters of one disk. Belongs to the thread that serves it; others look through a [`StatsView`].
///
/// Counting a request touches our page, the published file of the disk, and that of the virtual disk through which
/// the request came, by plain stores: no allocation, no lock, no system call.
#[derive(Debug)]
pub struct DiskStats {
    page: Arc<Words>,
    vdi: Published,
    vbds: [Option<Box<VbdPages>>; VBD_SLOTS],
    dir: Option<PathBuf>,
}

/// A look at the counters of a disk of the same process, from any thread.
#[derive(Clone, Debug)]
pub struct StatsView {
    page: Arc<Words>,
}

impl StatsView {
    /// Everything at this moment.
    pub fn snapshot(&self) -> Snapshot {
        // The page was written by this program, so head and layout are right.
        read_live(&self.page).expect("a page of this process has the right layout")
    }
}

impl DiskStats {
    /// Makes the files of a disk: our page and `vdi-<minor>`. They go when the value is dropped.
    ///
    /// # Errors
    /// A directory cannot be made or has another owner, a name is not usable, or there is no room.
    pub fn create(root: &ShmRoot, name: &DiskName) -> io::Result<Self> {
        let page_name = name.page_name()?;
        let dir = root.process(name.pid);
        let turn = Turn::take(root)?;
        private_dir(&dir)?;
        let page = Words::create(&turn, &root.pages().join(page_name), PAGE_LEN)?;
        let vdi = Words::create(&turn, &dir.join(format!("vdi-{}", name.minor)), 4096)?;
        Ok(Self::over(page, vdi, name, Some(dir)))
    }

    /// Counters without files, for tests and for hosts without shared memory.
    ///
    /// # Errors
    /// No memory.
    pub fn private(name: &DiskName) -> io::Result<Self> {
        Ok(Self::over(Words::anonymous(PAGE_LEN)?, Words::anonymous(4096)?, name, None))
    }

    fn over(page: Words, vdi: Words, name: &DiskName, dir: Option<PathBuf>) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        page.set(at::VERSION, PAGE_VERSION);
        page.set(at::LEN, PAGE_LEN as u64);
        page.set(at::PID, u64::from(name.pid));
        page.set(at::MINOR, u64::from(name.minor));
        page.set(at::CREATED, created);
        for index in 0..VBD_SLOTS {
            page.set(at::VBDS + index, VACANT);
        }
        fence(Ordering::Release);
        page.as_slice()[at::MAGIC].store(MAGIC, Ordering::Release);
        Self { page: Arc::new(page), vdi: Published::new(vdi, VERSION), vbds: Default::default(), dir }
    }

    /// A look for other threads. It stays valid after the disk has gone.
    pub fn view(&self) -> StatsView {
        StatsView { page: Arc::clone(&self.page) }
    }

    /// Publishes the image that the disk serves now, as `type:/path`.
    pub fn set_image(&mut self, image: &str) {
        store_image(&self.page, image);
    }

    /// Publishes how many requests the disk holds at most.
    pub fn set_queue_depth(&mut self, depth: u32) {
        self.page.set(at::QUEUE_DEPTH, u64::from(depth));
    }

    /// Publishes the disk under the numbers of `pages`; answers the slot to name when counting.
    ///
    /// # Errors
    /// All slots are taken: the pages come back.
    pub fn add_vbd(&mut self, pages: Box<VbdPages>) -> Result<usize, Box<VbdPages>> {
        let Some(slot) = self.vbds.iter().position(Option::is_none) else { return Err(pages) };
        let VbdId { domid, devid } = pages.id();
        (0..RING_USE_WORDS).for_each(|word| self.page.set(at::ring(slot) + word, 0));
        self.page.set(at::VBDS + slot, u64::from(domid) << 32 | u64::from(devid));
        self.vbds[slot] = Some(pages);
        Ok(slot)
    }

    /// Withdraws a slot. Dropping what comes back removes its files, which the data thread leaves to another.
    pub fn remove_vbd(&mut self, slot: usize) -> Option<Box<VbdPages>> {
        let pages = self.vbds.get_mut(slot)?.take()?;
        self.page.set(at::VBDS + slot, VACANT);
        Some(pages)
    }

    /// A request was taken, by whichever front end: every number under which the disk is published counts it.
    #[inline]
    pub fn submitted(&self, kind: RequestKind, bytes: u64) {
        self.taken(kind, bytes);
        for vbd in self.vbds.iter().flatten() {
            vbd.submitted(kind, bytes);
        }
    }

    /// A request was taken from the virtual disk in `slot`.
    #[inline]
    pub fn submitted_by(&self, slot: usize, kind: RequestKind, bytes: u64) {
        self.taken(kind, bytes);
        if let Some(Some(vbd)) = self.vbds.get(slot) {
            vbd.submitted(kind, bytes);
        }
    }

    #[inline]
    fn taken(&self, kind: RequestKind, bytes: u64) {
        self.page.add(at::KINDS + kind as usize * at::KIND_WORDS + at::SUBMITTED, 1);
        self.vdi.submitted(kind, bytes);
    }

    /// A request was answered, see [`DiskStats::submitted`].
    #[inline]
    pub fn completed(&self, kind: RequestKind, bytes: u64, stages: &Stages, ok: bool) {
        let total_ns = self.answered(kind, bytes, stages, ok);
        for vbd in self.vbds.iter().flatten() {
            vbd.completed(kind, total_ns, ok);
        }
    }

    /// A request of the virtual disk in `slot` was answered.
    #[inline]
    pub fn completed_by(&self, slot: usize, kind: RequestKind, bytes: u64, stages: &Stages, ok: bool) {
        let total_ns = self.answered(kind, bytes, stages, ok);
        if let Some(Some(vbd)) = self.vbds.get(slot) {
            vbd.completed(kind, total_ns, ok);
        }
    }

    /// Counts an answer for the disk itself; gives the whole time of the request.
    #[inline]
    fn answered(&self, kind: RequestKind, bytes: u64, stages: &Stages, ok: bool) -> u64 {
        let first = at::KINDS + kind as usize * at::KIND_WORDS;
        self.page.add(first + at::COMPLETED, 1);
        self.page.add(first + at::BYTES, bytes);
        if !ok {
            self.page.add(first + at::ERRORS, 1);
        }
        let times = stages.in_order();
        if (kind as usize) < TIMED_KINDS {
            for (stage, ns) in times.iter().enumerate() {
                let first = at::histogram(kind as usize, stage);
                self.page.add(first, *ns);
                self.page.add(first + 1 + bucket_of(*ns), 1);
            }
        }
        let total_ns = times[STAGES - 1];
        self.vdi.completed(kind, total_ns, ok);
        total_ns
    }

    /// A request had to stay in the guest's ring for lack of room.
    #[inline]
    pub fn out_of_requests(&self, slot: usize) {
        self.page.add(at::OUT_OF_REQUESTS, 1);
        self.vdi.out_of_requests();
        if let Some(Some(vbd)) = self.vbds.get(slot) {
            vbd.out_of_requests();
        }
    }

    /// The disk began or stopped to answer from its reserve of memory.
    pub fn low_memory(&self, on: bool) {
        self.set_flag(flag::LOW_MEMORY, on);
        self.vdi.low_memory(on);
        for vbd in self.vbds.iter().flatten() {
            vbd.low_memory(on);
        }
    }

    /// The second side of the disk's mirror was lost, or is lost no more.
    pub fn mirror_lost(&self, is_lost: bool) {
        self.set_flag(flag::MIRROR_LOST, is_lost);
    }

    fn set_flag(&self, bit: u64, on: bool) {
        let others = self.page.as_slice()[at::FLAGS].load(Ordering::Relaxed) & !bit;
        self.page.set(at::FLAGS, if on { others | bit } else { others });
    }

    /// Replaces what waiting cost, for a data thread that counts it elsewhere; what the disk was out of is kept.
    pub fn set_poll(&self, poll: &PollCounts) {
        self.page.set(at::SPIN_NS, poll.spin_ns);
        self.page.set(at::HITS, poll.hits);
        self.page.set(at::MISSES, poll.misses);
        self.page.set(at::WAKEUPS, poll.wakeups);
        self.page.set(at::ENTERS, poll.enters);
    }

    /// Publishes the limits of the disk.
    pub fn set_limits(&self, limits: &IoLimits) {
        for (index, word) in limit_words(limits).into_iter().enumerate() {
            self.page.set(at::LIMITS + index, word);
        }
    }

    /// Replaces what waiting for limits and pages came to.
    pub fn set_delays(&self, delays: &DelayCounts) {
        self.page.set(at::DELAYS, delays.requests);
        self.page.set(at::DELAYS + 1, delays.time_ns);
        self.page.set(at::DELAYS + 2, delays.waiting);
    }

    /// The thread woke up from a sleep.
    #[inline]
    pub fn woke(&self) {
        self.page.add(at::WAKEUPS, 1);
    }

    /// The thread entered the kernel's ring by a system call.
    #[inline]
    pub fn entered(&self) {
        self.page.add(at::ENTERS, 1);
    }

    /// Publishes where the ring in `slot` stands, in our page alone: a few stores. Until `now_ns`, any monotonic clock,
    /// it was as it was published last.
    #[inline]
    pub fn ring_now(&self, slot: usize, ring: &RingState, now_ns: u64) {
        if slot >= VBD_SLOTS {
            return;
        }
        let (first, words) = (at::ring(slot), self.page.as_slice());
        let word = |at: usize| words[first + at].load(Ordering::Relaxed);
        let (ends, since) = (word(at::RING_USED), word(at::RING_SINCE));
        let used = u64::from(((ends >> 32) as u32).wrapping_sub(ends as u32));
        self.page.add(first + at::RING_REQUEST_NS, used.saturating_mul(now_ns.saturating_sub(since)));
        self.page.set(first + at::RING_SINCE, now_ns);
        self.set_ring(slot, ring);
    }

    fn set_ring(&self, slot: usize, ring: &RingState) {
        for (index, word) in ring_words(ring).into_iter().enumerate() {
            self.page.set(at::ring(slot) + index, word);
        }
    }

    /// Publishes where the ring in `slot` stands. The text beside it, which tools of others read, is written at most
    /// once in five seconds, and once more when the ring has become empty since: a reader would otherwise take a disk
    /// that went idle for one that is stuck. `now_ns` is any monotonic clock. To be called after a batch; costs two
    /// comparisons and a few stores when no text is due.
    #[inline]
    pub fn ring(&mut self, slot: usize, ring: &RingState, now_ns: u64) {
        self.ring_now(slot, ring, now_ns);
        if let Some(Some(vbd)) = self.vbds.get_mut(slot) {
            vbd.ring(ring, now_ns);
        }
    }
}

impl DiskStats {
    /// Publishes the state of the ring in `slot` at once, as text too: a report was requested.
    pub fn ring_at_once(&mut self, slot: usize, ring: &RingState) {
        if slot < VBD_SLOTS {
            self.set_ring(slot, ring);
        }
        if let Some(Some(vbd)) = self.vbds.get_mut(slot) {
            vbd.ring_at_once(ring);
        }
    }
}

impl Drop for DiskStats {
    fn drop(&mut self) {
        self.vbds = Default::default();
        // A view may keep the memory alive; readers outside must see at once that the disk is gone.
        self.page.remove_file();
        self.vdi.remove_file();
        if let Some(dir) = &self.dir {
            let _ = fs::remove_dir(dir);
        }
    }
}

#[cfg(test)]
mod tests;
