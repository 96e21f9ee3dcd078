//! The same with several VMs or disks, a few at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// VMs and disks that are looked at at a time.
const PARALLEL: usize = 16;

/// Does something with each of these on a few threads: one whose disks hang takes its time alone.
pub fn for_each<T: Sync>(all: &[T], work: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..PARALLEL.min(all.len()) {
            scope.spawn(|| {
                while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(one);
                }
            });
        }
    });
}
