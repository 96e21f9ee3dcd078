//! Giving memory back: pieces of large answers and their values come and go by the thousand, and the allocator would
//! keep what they took.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use tapio_model::Answer;

/// Heaps that the allocator makes for parallel threads. Each keeps what its largest answer took.
const HEAPS: libc::c_int = 4;
/// From this size on a piece of memory is the kernel's, and goes back to it at once. Said explicitly, it stays so: the
/// allocator would raise it to the largest that was ever given back.
const MAPPED_LEN: libc::c_int = 128 << 10;
/// How long after a large answer memory is given back: it is on its way then, and a second one may follow.
const LATER: Duration = Duration::from_secs(1);

/// Bounds the number of heaps and what they hold; before there are threads.
pub fn bound_heaps() {
    // SAFETY: mallopt takes two numbers and touches nothing of ours.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_LEN);
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
    pub fn saw(&self, answer: &Answer) {
        if let Answer::Large(_) = answer {
            // One that is waiting already serves for this answer, too.
            let _ = self.0.try_send(());
        }
    }
}

fn run(receiver: &Receiver<()>) {
    while receiver.recv().is_ok() {
        std::thread::sleep(LATER);
        tapio_sys::memory::give_back();
    }
}
