//! Which requests queue threads serve by themselves, and the owner's knowledge of them.
//!
//! One word says what is open; each thread counts the requests that it has inside. Both sides write their own word
//! first and look at the other one's then, with a fence between (`SeqCst`), so that of a request that enters and an
//! owner that closes at the same moment at least one sees the other:
//!
//! | a queue thread, for each request | the owner |
//! |---|---|
//! | 1. counts it in | 1. closes |
//! | 2. looks whether it is open; if not, 3 and the request goes to the owner | 2. waits until it has seen every count at zero |
//! | 3. counts it out at its end, and wakes the owner if that waits | 3. has the image for itself |
//!
//! `tests/loom` tries every interleaving of it.

use super::atomic::{AtomicU64, Ordering, fence};

/// Queue threads of a disk, at most.
pub const QUEUE_THREADS_MAX: usize = 15;

/// What queue threads may do without the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Open {
    /// Nothing.
    Nothing,
    /// Reads.
    Reads,
    /// Reads and writes of what is there.
    Everything,
}

const OPEN_MASK: u64 = 3;
/// The owner waits for requests to end.
const AWAITED: u64 = 4;
const VIEW_SHIFT: u32 = 3;

/// A count on a cache line of its own: one thread writes it at every request.
#[derive(Debug)]
#[repr(align(64))]
struct Inside(AtomicU64);

/// See the module's documentation.
#[derive(Debug)]
pub struct Gate<const THREADS: usize = QUEUE_THREADS_MAX> {
    /// What is open, whether the owner waits, and the number of the view that requests must have. The owner writes it.
    state: AtomicU64,
    /// Changes that were answered although the storage still has them: while there are any, all requests go to the
    /// owner, which knows where they are.
    fences: AtomicU64,
    inside: [Inside; THREADS],
}

impl<const THREADS: usize> Gate<THREADS> {
    /// Closed, with nobody inside.
    pub fn new() -> Self {
        Self {
            state: AtomicU64::new(0),
            fences: AtomicU64::new(0),
            inside: std::array::from_fn(|_| Inside(AtomicU64::new(0))),
        }
    }

    /// A request that needs `open` enters on queue thread `thread`, which has view `view`. If it may not, it is outside
    /// again; `Err(true)` then means that the owner must be woken.
    #[inline]
    pub fn enter(&self, thread: usize, view: u64, open: Open) -> Result<(), bool> {
        let inside = &self.inside[thread].0;
        // Only this thread writes it.
        inside.store(inside.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let state = self.state.load(Ordering::Acquire);
        let is_open = state >> VIEW_SHIFT == view && state & OPEN_MASK >= open as u64;
        if is_open && self.fences.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        Err(self.leave(thread))
    }

    /// A request leaves; true if the owner must be woken.
    #[inline]
    pub fn leave(&self, thread: usize) -> bool {
        let inside = &self.inside[thread].0;
        inside.store(inside.load(Ordering::Relaxed) - 1, Ordering::Release);
        fence(Ordering::SeqCst);
        self.state.load(Ordering::Relaxed) & AWAITED != 0
    }

    /// The view that requests must have to enter; 0: none may.
    pub fn view(&self) -> u64 {
        self.state.load(Ordering::Acquire) >> VIEW_SHIFT
    }

    /// The owner opens or closes for requests with this view. While it stays closed, what waits for requests to leave
    /// goes on waiting.
    pub fn set(&self, view: u64, open: Open) {
        let awaited = if open == Open::Nothing { self.state.load(Ordering::Relaxed) & AWAITED } else { 0 };
        self.state.store(view << VIEW_SHIFT | open as u64 | awaited, Ordering::Release);
    }

    /// What the owner has set last.
    pub fn is_set(&self, view: u64, open: Open) -> bool {
        self.state.load(Ordering::Relaxed) & !AWAITED == view << VIEW_SHIFT | open as u64
    }

    /// Whether nothing is inside. If something is, the owner is woken when a request leaves: it looks again then. To be
    /// called by the owner, which has closed before.
    pub fn is_empty(&self) -> bool {
        let state = self.state.load(Ordering::Relaxed) & !AWAITED;
        self.state.store(state | AWAITED, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let is_empty = self.inside.iter().all(|inside| inside.0.load(Ordering::Acquire) == 0);
        if is_empty {
            self.state.store(state, Ordering::Relaxed);
        }
        is_empty
    }

    /// Requests inside: for people.
    pub fn count(&self) -> usize {
        self.inside.iter().map(|inside| inside.0.load(Ordering::Relaxed) as usize).sum()
    }

    /// A change was answered, or is about to be, although the storage still has it.
    pub fn fence(&self) {
        self.fences.fetch_add(1, Ordering::AcqRel);
    }

    /// It has ended.
    pub fn unfence(&self) {
        self.fences.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether there is such a change.
    pub fn is_fenced(&self) -> bool {
        self.fences.load(Ordering::Acquire) > 0
    }
}
