//! An allocator that counts what threads allocate that asked to be counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Counts this thread's allocations from now on.
pub fn start() {
    COUNTED.set(Some(0));
}

/// Stops counting; how many there were.
pub fn stop() -> u64 {
    COUNTED.take().unwrap_or(0)
}

fn count() {
    // Not where the thread is being torn down.
    let _ = COUNTED.try_with(|counted| counted.set(counted.get().map(|count| count + 1)));
}

// SAFETY: every call is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps to the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, base: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the contract of `dealloc`.
        unsafe { System.dealloc(base, layout) }
    }

    unsafe fn realloc(&self, base: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps to the contract of `realloc`.
        unsafe { System.realloc(base, layout, len) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
