//! Calls that may block, on threads of their own.
//!
//! Opening, cutting and removing files, and making names durable, wait for a file system: for its journal, for space
//! to be freed, for a server. For some of them the ring has no operation, for others only on new kernels. They are
//! rare, so each gets a thread of its own, which inherits the restrictions of the data thread.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::Builder;

use parking_lot::Mutex;

use super::Uring;

/// Room for paths, file system calls and one image's metadata.
const STACK_LEN: usize = 256 << 10;

/// What the thread and its caller share.
struct Place<T> {
    result: Mutex<Option<T>>,
    event: OwnedFd,
}

/// Marks the thread as ended when it is dropped, also if its work panicked.
struct Ended<T>(Arc<Place<T>>);

impl<T> Drop for Ended<T> {
    fn drop(&mut self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes; the descriptor is the place's.
        let _ = unsafe { libc::write(self.0.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

impl Uring {
    /// Runs `work` on a thread of its own, while the tasks of this thread go on.
    ///
    /// # Errors
    /// No event counter can be made, or the work panicked.
    pub async fn offload<T, F>(&self, work: F) -> io::Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        let place = Arc::new(Place { result: Mutex::new(None), event });
        let work = Arc::new(Mutex::new(Some(work)));
        let (there, kept) = (Arc::clone(&place), Arc::clone(&work));
        let run = move || {
            let ended = Ended(there);
            let work = kept.lock().take();
            if let Some(work) = work {
                let result = work();
                *ended.0.result.lock() = Some(result);
            }
        };
        let started = Builder::new().name("tapio-aside".into()).stack_size(STACK_LEN).spawn(run);
        let left = if started.is_err() { work.lock().take() } else { None };
        if let Some(work) = left {
            // No thread to be had: late is better than never.
            return Ok(work());
        }
        self.poll(place.event.as_raw_fd(), libc::POLLIN).await?;
        let result = place.result.lock().take();
        result.ok_or_else(|| io::Error::other("the thread of a blocking call panicked"))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;
    use std::sync::mpsc::sync_channel;

    use crate::uring::{Uring, UringConfig};
    use crate::{Executor, Inbox, Io, Polling, PollingConfig};

    #[test]
    fn tasks_go_on_while_a_call_blocks() {
        let Ok(uring) = Uring::new(UringConfig::default()) else { return };
        let inbox: Rc<Inbox<()>> = Inbox::new(1);
        let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
        let mut executor = Executor::new(uring.tasks().clone(), inbox, |()| async {}, polling);
        let (release, blocked) = sync_channel::<u32>(1);
        let (running, released) = (uring.clone(), Rc::new(Cell::new(false)));
        let seen = Rc::clone(&released);
        // Ends only because this task runs while the call waits for it.
        uring.tasks().spawn(async move {
            seen.set(true);
            release.send(7).expect("the call waits");
        });
        let told = async move { running.offload(move || blocked.recv()).await };
        let told = executor.block_on(&uring, &mut (), told).expect("a thread");
        assert!(released.get());
        assert_eq!(told, Ok(7));
        let running = uring.clone();
        let failed = async move { running.offload(|| -> u32 { panic!("as planned") }).await };
        assert!(executor.block_on(&uring, &mut (), failed).is_err());
    }
}
