//! Work that may wait for this very process.
//!
//! Opening, configuring and detaching a device make the kernel ask the data thread. Were the process killed meanwhile,
//! a thread of it that waits in the kernel would keep the process's descriptors open, among them the one whose closing
//! ends the wait: neither would ever end. So such work runs on a thread with a table of descriptors of its own, in
//! which there is nothing of ours, and with a limit in time.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Work that runs on a thread of its own.
#[derive(Debug)]
pub struct Aside<T> {
    answer: Receiver<io::Result<T>>,
}

impl<T: Send + 'static> Aside<T> {
    /// Starts `work` on a thread that has none of this process's descriptors but the standard ones.
    pub fn start(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<Self> {
        let (reply, answer) = sync_channel(1);
        std::thread::Builder::new().name("device-aside".into()).stack_size(256 << 10).spawn(move || {
            // After its timeout the waiter does not want the answer.
            let _ = reply.send(own_descriptors().and_then(|()| work()));
        })?;
        Ok(Self { answer })
    }

    /// The result, or `None` when it is not there within the time: the work goes on, and may be waited for again.
    pub fn wait(&self, within: Duration) -> Option<io::Result<T>> {
        match self.answer.recv_timeout(within) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(io::Error::other("the thread that did it panicked")))
            }
        }
    }
}

/// [`Aside`] from beginning to end.
pub fn aside<T: Send + 'static>(
    within: Duration,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    match Aside::start(work)?.wait(within) {
        Some(result) => result,
        None => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Gives the calling thread a table of descriptors of its own with nothing but the standard ones in it.
fn own_descriptors() -> io::Result<()> {
    // SAFETY: takes no pointers; from here on this thread's descriptors are its own.
    if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: closes copies that only this thread has, and that nothing on this thread refers to yet.
    if unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn work_aside_has_no_descriptors_of_ours_and_ours_stay_open() {
        let mut file = File::open("/dev/zero").unwrap();
        let fd = file.as_raw_fd();
        let theirs = aside(Duration::from_secs(60), move || {
            // SAFETY: asks about a number.
            Ok(unsafe { libc::fcntl(fd, libc::F_GETFD) })
        });
        assert_eq!(theirs.unwrap(), -1, "the thread still has the descriptor");
        file.read_exact(&mut [1; 8]).unwrap();
    }

    #[test]
    fn work_that_takes_too_long_can_be_waited_for_again() {
        let (go, wait) = sync_channel::<()>(1);
        let work = Aside::start(move || wait.recv().map_err(io::Error::other)).unwrap();
        assert!(work.wait(Duration::from_millis(20)).is_none());
        go.send(()).unwrap();
        assert!(work.wait(Duration::from_secs(60)).unwrap().is_ok());
    }
}
