//! What is known of a VM, in memory and in its directory.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tapio_types::ApiError;

use crate::place::{Place, Saved};

/// What is known of a VM. What cannot be kept is not changed.
#[derive(Debug)]
pub(crate) struct Record {
    saved: Mutex<Saved>,
    /// Forgotten: nothing of it is kept any more. Changes under the lock of `saved`.
    is_gone: AtomicBool,
}

impl Record {
    pub(crate) fn new(saved: Saved) -> Self {
        Self { saved: Mutex::new(saved), is_gone: AtomicBool::new(false) }
    }

    /// Looks at it; it cannot change while the guard is held.
    pub(crate) fn look(&self) -> MutexGuard<'_, Saved> {
        self.saved.lock()
    }

    /// Changes it, and keeps it in the VM's directory.
    pub(crate) fn change(&self, place: &Place, change: impl FnOnce(&mut Saved)) -> Result<(), ApiError> {
        let mut saved = self.look();
        let mut fresh = saved.clone();
        change(&mut fresh);
        if fresh != *saved {
            if !self.is_gone() {
                place.save(&fresh)?;
            }
            *saved = fresh;
        }
        Ok(())
    }

    /// Whether it was forgotten.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Forgets it, with everything in its place.
    pub(crate) fn forget(&self, place: &Place) {
        let _saved = self.look();
        self.is_gone.store(true, Ordering::Relaxed);
        place.remove();
    }
}
