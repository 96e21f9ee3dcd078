//! Where the rings of a device stand that other threads than the disk's owner serve, for the owner, which tells of all
//! rings together: what is told of goes into statistics that have one writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tapio_block::Wake;
use tapio_types::RingState;

/// The rings of one thread, in cache lines that no other thread writes.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part {
    words: [AtomicU32; 7],
}

/// What the threads beside the owner have to say of their rings.
pub struct Standing {
    parts: Box<[Part]>,
    /// The owner has not seen the newest words.
    news: AtomicBool,
    wake: Wake,
}

impl std::fmt::Debug for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Standing").field("parts", &self.parts).finish_non_exhaustive()
    }
}

/// Adds the numbers of two rings, or of all rings of two threads.
pub fn sum(one: RingState, other: RingState) -> RingState {
    RingState {
        size: one.size + other.size,
        req_prod: one.req_prod.wrapping_add(other.req_prod),
        req_cons: one.req_cons.wrapping_add(other.req_cons),
        req_event: one.req_event.wrapping_add(other.req_event),
        rsp_prod: one.rsp_prod.wrapping_add(other.rsp_prod),
        rsp_pvt: one.rsp_pvt.wrapping_add(other.rsp_pvt),
        rsp_event: one.rsp_event.wrapping_add(other.rsp_event),
    }
}

impl Standing {
    /// For `count` threads beside the owner, which `wake` wakes.
    pub fn new(count: usize, wake: Wake) -> Arc<Self> {
        let parts = (0..count).map(|_| Part::default()).collect();
        Arc::new(Self { parts, news: AtomicBool::new(false), wake })
    }

    /// Thread `part` has rings that stand so. The owner sees it when it wakes up next.
    pub fn put(&self, part: usize, rings: &RingState) {
        let now = [
            rings.size,
            rings.req_prod,
            rings.req_cons,
            rings.req_event,
            rings.rsp_prod,
            rings.rsp_pvt,
            rings.rsp_event,
        ];
        for (word, now) in self.parts[part].words.iter().zip(now) {
            word.store(now, Ordering::Relaxed);
        }
        self.news.store(true, Ordering::Release);
    }

    /// Wakes the owner if it has not seen what was put.
    pub fn wake(&self) {
        if self.news.load(Ordering::Relaxed) {
            (self.wake)();
        }
    }

    /// Whether something was put since this was asked last. To be asked before [`Standing::all`].
    pub fn has_news(&self) -> bool {
        self.news.load(Ordering::Relaxed) && self.news.swap(false, Ordering::Acquire)
    }

    /// All rings of these threads. Words of one thread that is at work may be of two moments; the last ones that it put
    /// are of one.
    pub fn all(&self) -> RingState {
        let of = |part: &Part| {
            let [size, req_prod, req_cons, req_event, rsp_prod, rsp_pvt, rsp_event] =
                part.words.each_ref().map(|word| word.load(Ordering::Relaxed));
            RingState { size, req_prod, req_cons, req_event, rsp_prod, rsp_pvt, rsp_event }
        };
        self.parts.iter().map(of).fold(RingState::default(), sum)
    }
}
