//! The same with several objects, a few at a time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;

/// Does something with each of these, `most` at a time; what came of it, in their order.
pub(crate) fn each<T: Sync, R: Send>(all: &[T], most: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(BTreeMap::new());
    thread::scope(|scope| {
        for _ in 0..most.min(all.len()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(one) = all.get(at) else { return };
                    let result = work(one);
                    done.lock().insert(at, result);
                }
            });
        }
    });
    done.into_inner().into_values().collect()
}
