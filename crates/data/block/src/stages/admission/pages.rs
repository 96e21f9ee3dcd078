//! Pages of an SR's pool, as admission takes them.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use tapio_stat::pool::{GRACE_NS, POOL_PAGE_LEN, PoolMember, PoolSeat};

/// A pool of pages that several disks share.
pub trait Pages {
    /// Takes pages for a request, and says how many; `None`: not now, and the pool's bell will ring.
    fn take(&mut self, pages: u32, now_ns: u64) -> Option<u32>;
    /// Gives them back.
    fn give(&mut self, pages: u32);
    /// The request that could not have its pages is gone.
    fn stop_waiting(&mut self);
    /// The pool for queue threads, which take what is free and never wait; `None`: requests of all threads take their
    /// turn here.
    fn seat(&self) -> Option<Arc<dyn PageSeat>> {
        None
    }
    /// A queue thread has given pages back, and a disk waits.
    fn wake_next(&mut self) {}
    /// After how long to ask again although the bell did not ring.
    fn retry_ns(&self) -> u64 {
        GRACE_NS
    }
    /// The descriptor that rings by being readable.
    fn bell(&self) -> Option<RawFd> {
        None
    }
    /// Forgets that it rang.
    fn quiet(&mut self) {}
    /// Name and size, for reports.
    fn facts(&self) -> PoolFacts {
        PoolFacts::default()
    }
}

/// A disk's place at its pool, for any of its threads.
pub trait PageSeat: fmt::Debug + Send + Sync {
    /// Takes pages for a request, and says how many; `None`: not now.
    fn take_free(&self, pages: u32) -> Option<u32>;
    /// Gives them back; whether a disk waits for some.
    fn give(&self, pages: u32) -> bool;
}

impl PageSeat for PoolSeat {
    fn take_free(&self, pages: u32) -> Option<u32> {
        Self::take_free(self, pages)
    }

    fn give(&self, pages: u32) -> bool {
        Self::give(self, pages)
    }
}

/// What a disk knows of its pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolFacts {
    /// The pool's name.
    pub name: String,
    /// Pages of the pool.
    pub pages: u32,
    /// Pages that the disk holds.
    pub held: u32,
}

impl Pages for PoolMember {
    fn take(&mut self, pages: u32, now_ns: u64) -> Option<u32> {
        Self::take(self, pages, now_ns)
    }

    fn give(&mut self, pages: u32) {
        Self::give(self, pages);
    }

    fn stop_waiting(&mut self) {
        Self::stop_waiting(self);
    }

    fn seat(&self) -> Option<Arc<dyn PageSeat>> {
        Some(Self::seat(self))
    }

    fn wake_next(&mut self) {
        Self::wake_next(self);
    }

    fn bell(&self) -> Option<RawFd> {
        Some(self.wake_fd())
    }

    fn quiet(&mut self) {
        Self::quiet(self);
    }

    fn facts(&self) -> PoolFacts {
        PoolFacts { name: self.name().to_owned(), pages: self.total(), held: self.held() }
    }
}

/// Pages for the data of a request of so many bytes.
pub fn pages_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(POOL_PAGE_LEN)).unwrap_or(u32::MAX)
}
