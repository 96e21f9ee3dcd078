//! Locks of memory.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder panicked holds what it held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
