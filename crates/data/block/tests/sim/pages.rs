//! A page pool that one disk has for itself: it never gives more pages than there are.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tapio_block::{PageSeat, Pages};

/// The pool, for the test and for every thread of the disk.
#[derive(Debug)]
pub struct Pool {
    /// All of them.
    pub pages: u32,
    free: AtomicU32,
    least: AtomicU32,
    /// The disk waits for pages.
    waits: AtomicBool,
}

impl Pool {
    /// Of so many pages.
    pub fn new(pages: u32) -> Arc<Self> {
        let [free, least] = [pages, pages].map(AtomicU32::new);
        Arc::new(Self { pages, free, least, waits: AtomicBool::new(false) })
    }

    /// Pages that are free.
    pub fn free(&self) -> u32 {
        self.free.load(Ordering::SeqCst)
    }

    /// Pages that were free when the fewest were.
    pub fn least(&self) -> u32 {
        self.least.load(Ordering::SeqCst)
    }

    /// The disk at this pool.
    pub fn member(self: &Arc<Self>) -> Box<dyn Pages> {
        Box::new(Member(Arc::clone(self)))
    }

    fn take(&self, pages: u32) -> Option<u32> {
        let pages = pages.min(self.pages);
        let left = self.free().checked_sub(pages)?;
        self.free.store(left, Ordering::SeqCst);
        self.least.fetch_min(left, Ordering::SeqCst);
        Some(pages)
    }

    fn put_back(&self, pages: u32) {
        let free = self.free.fetch_add(pages, Ordering::SeqCst) + pages;
        assert!(free <= self.pages, "{free} of {} pages are free", self.pages);
    }
}

impl PageSeat for Pool {
    fn take_free(&self, pages: u32) -> Option<u32> {
        if self.waits.load(Ordering::SeqCst) { None } else { self.take(pages) }
    }

    fn give(&self, pages: u32) -> bool {
        self.put_back(pages);
        self.waits.load(Ordering::SeqCst)
    }
}

struct Member(Arc<Pool>);

impl Pages for Member {
    fn take(&mut self, pages: u32, _now_ns: u64) -> Option<u32> {
        let taken = self.0.take(pages);
        self.0.waits.store(taken.is_none(), Ordering::SeqCst);
        taken
    }

    fn give(&mut self, pages: u32) {
        self.0.put_back(pages);
    }

    fn stop_waiting(&mut self) {
        self.0.waits.store(false, Ordering::SeqCst);
    }

    fn seat(&self) -> Option<Arc<dyn PageSeat>> {
        Some(Arc::<Pool>::clone(&self.0))
    }

    /// No bell rings: what was given back is heard of, or missed for good.
    fn retry_ns(&self) -> u64 {
        u64::MAX
    }
}
