//! What one thread has for another: a queue, and whether the receiver sleeps.
//!
//! The receiver says that it is about to sleep and looks once more; the sender puts its letter in and then looks
//! whether the receiver sleeps. Both with a fence between (`SeqCst`), so that no letter stays behind with a receiver
//! that sleeps (`tests/loom`). While the receiver is awake a letter costs a lock that both hold for a few instructions.

use super::atomic::{AtomicBool, AtomicUsize, Mutex, Ordering, fence};

/// Letters from one thread to another, in order.
#[derive(Debug)]
pub struct Mailbox<T> {
    letters: Mutex<Vec<T>>,
    count: AtomicUsize,
    sleeps: AtomicBool,
}

impl<T> Mailbox<T> {
    /// No letters, and a receiver that is awake.
    pub fn new() -> Self {
        Self { letters: Mutex::new(Vec::new()), count: AtomicUsize::new(0), sleeps: AtomicBool::new(false) }
    }

    /// Puts a letter in; true if the receiver must be woken.
    #[must_use]
    pub fn send(&self, letter: T) -> bool {
        self.deliver(|letters| letters.push(letter))
    }

    /// Puts several letters in, taking them out of `from`; true if the receiver must be woken.
    #[must_use]
    pub fn send_all(&self, from: &mut Vec<T>) -> bool {
        !from.is_empty() && self.deliver(|letters| letters.append(from))
    }

    fn deliver(&self, put: impl FnOnce(&mut Vec<T>)) -> bool {
        {
            let mut letters = self.letters.lock();
            put(&mut letters);
            self.count.store(letters.len(), Ordering::Release);
        }
        fence(Ordering::SeqCst);
        // One load in the common case; one waker in the other.
        self.sleeps.load(Ordering::Relaxed) && self.sleeps.swap(false, Ordering::AcqRel)
    }

    /// Whether there are none: a load.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Takes all letters out, behind those in `into`.
    pub fn take(&self, into: &mut Vec<T>) {
        if self.is_empty() {
            return;
        }
        let mut letters = self.letters.lock();
        into.append(&mut letters);
        self.count.store(0, Ordering::Release);
    }

    /// The receiver is about to sleep; false if there are letters, and it must not.
    pub fn arm(&self) -> bool {
        self.sleeps.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.is_empty()
    }

    /// The receiver is awake.
    pub fn disarm(&self) {
        self.sleeps.store(false, Ordering::Relaxed);
    }
}
