//! Operations of one SR that come one after the other.

use parking_lot::{Mutex, MutexGuard};
use tapio_types::ApiError;

use super::script::BEAT;
use crate::errors;
use crate::traits::Ctx;

/// Waits for its turn. The daemon hears meanwhile that the worker is alive: it ends a worker that is silent, and the
/// plugin's call that is waited for has a time limit of its own and may yet tell what went wrong.
///
/// # Errors
/// `TASK_CANCELLED`.
pub(super) fn wait<'a>(turns: &'a Mutex<()>, ctx: &dyn Ctx) -> Result<MutexGuard<'a, ()>, ApiError> {
    loop {
        if let Some(turn) = turns.try_lock_for(BEAT) {
            return Ok(turn);
        }
        if ctx.is_cancelled() {
            return Err(errors::cancelled());
        }
        ctx.progress(0.0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use uuid::Uuid;

    use super::*;
    use crate::traits::LiveDisk;

    /// A daemon that counts what it hears, and cancels.
    #[derive(Default)]
    struct Heard {
        beats: AtomicU32,
        is_cancelled: AtomicBool,
    }

    impl Ctx for Heard {
        fn is_cancelled(&self) -> bool {
            self.is_cancelled.load(Ordering::SeqCst)
        }

        fn progress(&self, _fraction: f64) {
            self.beats.fetch_add(1, Ordering::SeqCst);
        }

        fn live(&self, _vdi: Uuid) -> Option<Box<dyn LiveDisk>> {
            None
        }

        fn step(&self, _name: &'static str) {}
    }

    #[test]
    fn one_that_waits_for_its_turn_is_heard_of_and_can_be_cancelled() {
        let (turns, heard) = (Mutex::new(()), Heard::default());
        let first = wait(&turns, &heard).expect("free");
        assert_eq!(heard.beats.load(Ordering::SeqCst), 0);
        std::thread::scope(|scope| {
            let second = scope.spawn(|| wait(&turns, &heard).map(drop));
            while heard.beats.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            drop(first);
            second.join().expect("no panic").expect("its turn came");
        });
        let _first = wait(&turns, &heard).expect("free");
        heard.is_cancelled.store(true, Ordering::SeqCst);
        assert_eq!(wait(&turns, &heard).expect_err("cancelled").code, "TASK_CANCELLED");
    }
}
