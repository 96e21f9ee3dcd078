//! Not more emulated VMs at once than processors, whatever starts them: threads of a test, lanes, other runs in
//! the same directory. Each takes a lock on one of as many files, and the kernel gives it back however it ends.

use std::fs::{File, TryLockError};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::tools::repository;

/// Between two looks for a free slot. What is waited for takes many seconds.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The right to run an emulated VM, until it is dropped.
#[derive(Debug)]
pub struct Slot {
    _lock: File,
}

/// Waits for the right to run an emulated VM. Every VM has a deadline of its own, so this ends.
#[track_caller]
pub fn vm() -> Slot {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
    let count = thread::available_parallelism().map_or(1, usize::from);
    take(&target.join("lanes/machines"), count)
}

fn take(dir: &std::path::Path, count: usize) -> Slot {
    std::fs::create_dir_all(dir).unwrap_or_else(|error| panic!("cannot make {}: {error}", dir.display()));
    let files: Vec<File> = (0..count)
        .map(|number| {
            let path = dir.join(number.to_string());
            File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)
                .unwrap_or_else(|error| panic!("cannot open {}: {error}", path.display()))
        })
        .collect();
    loop {
        for file in &files {
            match file.try_lock() {
                // The lock is that of the open file, not of this descriptor of it.
                Ok(()) => return Slot { _lock: file.try_clone().expect("a descriptor more") },
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => panic!("cannot lock in {}: {error}", dir.display()),
            }
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn no_more_run_at_once_than_there_are_slots() {
        let dir = tempfile::tempdir().unwrap();
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    let slot = take(dir.path(), 2);
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    thread::sleep(Duration::from_millis(5));
                    running.fetch_sub(1, Ordering::SeqCst);
                    drop(slot);
                });
            }
        });
        assert!(most.into_inner() <= 2);
    }
}
