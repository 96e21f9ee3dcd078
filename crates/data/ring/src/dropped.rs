//! What becomes of an operation, a request or their memory that is dropped before its end.
//!
//! The kernel works on the memory of an operation until the operation has completed, whatever becomes of the future
//! that waits for it. So none of these futures is dropped half way, and no request without its answer: one that is
//! dropped all the same is a fault of this program.
//!
//! | | debug build | release build |
//! |---|---|---|
//! | an operation | the process aborts | counted; its place in the table stays taken until the completion |
//! | memory that was lent to an operation | the process aborts | counted, and never freed |
//! | a request | the process aborts | counted; its client gets EIO, unless a storage may still fill a guest's memory |
//!
//! Three ends are no fault. A thread that ends drops its tasks where they stand, after the kernel has given back
//! everything ([`while_nothing_flies`]); what the kernel does not give back is never dropped. A simulated process that
//! is killed loses its operations first, then its tasks. And a thread that panics does not abort above that: memory
//! stays, and that is all.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

/// What was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// An operation of the kernel.
    Operation,
    /// Memory that an operation was given.
    Memory,
    /// A request of a guest or a client.
    Request,
}

/// What is done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDrop {
    /// The process ends, and shows where it was.
    Abort,
    /// It is counted, and the first is reported.
    Count,
}

static COUNT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static ON_DROP: Cell<OnDrop> =
        const { Cell::new(if cfg!(debug_assertions) { OnDrop::Abort } else { OnDrop::Count }) };
    /// The tasks of this thread are being dropped, and the kernel has nothing of theirs.
    static NOTHING_FLIES: Cell<bool> = const { Cell::new(false) };
}

impl Dropped {
    /// Something of this kind is dropped before its end. Whether that is a fault; then its memory must stay.
    ///
    /// To be called in `drop`.
    pub fn is_fault(self) -> bool {
        // A thread-local that is gone belongs to a thread that is gone, and its kernel side with it.
        if NOTHING_FLIES.try_with(Cell::get).unwrap_or(true) {
            return false;
        }
        self.note();
        true
    }

    /// One of this kind is dropped in flight.
    pub(crate) fn note(self) {
        let is_first = COUNT.fetch_add(1, Ordering::Relaxed) == 0;
        let what = match self {
            Self::Operation => "an operation was dropped in flight",
            Self::Memory => "memory was dropped that an operation works on",
            Self::Request => "a request was dropped without an answer",
        };
        let aborts = ON_DROP.try_with(Cell::get).is_ok_and(|on_drop| on_drop == OnDrop::Abort);
        if aborts && !std::thread::panicking() {
            // Not by a macro, whose output a test keeps to itself until an end that does not come.
            let _ = writeln!(io::stderr(), "{what}\n{}", Backtrace::force_capture());
            std::process::abort();
        }
        if is_first {
            let _ = writeln!(io::stderr(), "{what}: a fault of this program, please report it");
        }
    }
}

/// How often this process has dropped something before its end.
pub fn dropped() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// From now on this thread does so about what it drops.
#[cfg(feature = "doubles")]
pub fn set_on_drop(on_drop: OnDrop) {
    ON_DROP.set(on_drop);
}

/// Runs `drop_all`, which drops what the kernel has given back.
pub(crate) fn while_nothing_flies(drop_all: impl FnOnce()) {
    let before = NOTHING_FLIES.replace(true);
    drop_all();
    NOTHING_FLIES.set(before);
}

#[cfg(all(test, feature = "doubles"))]
mod tests;
