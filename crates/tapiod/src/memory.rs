//! Giving memory back: an answer about ten thousand objects takes hundreds of MiB for a moment, which the allocator
//! would keep.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use tapio_model::Value;

/// Heaps that the allocator makes for threads beside each other. Each keeps what its largest answer took.
const HEAPS: libc::c_int = 4;
/// Members of a result from which it is large.
const LARGE: usize = 1000;
/// How long after a large answer memory is given back: it is on its way then, and a second one may follow.
const LATER: Duration = Duration::from_secs(1);

/// Bounds the number of heaps; before there are threads.
pub fn bound_heaps() {
    // SAFETY: mallopt takes two numbers and touches nothing of ours.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
    }
}

/// Gives memory back after large answers; sleeps without any.
#[derive(Clone, Debug)]
pub struct Trimmer(SyncSender<()>);

impl Trimmer {
    /// Starts its thread.
    ///
    /// # Errors
    /// There can be no more threads.
    pub fn start() -> std::io::Result<Self> {
        let (sender, receiver) = sync_channel(1);
        std::thread::Builder::new().name("tapiod-trim".into()).spawn(move || run(&receiver))?;
        Ok(Self(sender))
    }

    /// Looks at an answer that is about to be sent.
    pub fn saw(&self, answer: &Value) {
        if is_large(answer) {
            // One that is waiting already serves for this answer, too.
            let _ = self.0.try_send(());
        }
    }
}

fn run(receiver: &Receiver<()>) {
    while receiver.recv().is_ok() {
        std::thread::sleep(LATER);
        // SAFETY: malloc_trim takes a number; it locks the heaps it looks at.
        #[cfg(target_env = "gnu")]
        unsafe {
            libc::malloc_trim(0);
        }
    }
}

/// Whether a result holds many objects: records by reference, or a batch of events.
fn is_large(answer: &Value) -> bool {
    let many = |value: &Value| match value {
        Value::Set(members) => members.len() >= LARGE,
        Value::Map(pairs) => pairs.len() >= LARGE,
        _ => false,
    };
    many(answer) || answer.as_map().is_some_and(|pairs| pairs.len() < LARGE && pairs.values().any(many))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_answers_are_many_records_or_events() {
        let many = || Value::strings((0..LARGE).map(|at| at.to_string()));
        assert!(is_large(&many()));
        assert!(is_large(&Value::Map([("events".to_owned(), many())].into())));
        assert!(!is_large(&Value::strings(["one"])));
        assert!(!is_large(&Value::string("x".repeat(LARGE))));
    }
}
