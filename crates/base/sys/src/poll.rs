//! Waiting for descriptors.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::Timespec;
pub use rustix::event::{PollFd, PollFlags};

/// Waits until one of the descriptors is ready, for as long as `limit`, or without end where there is none; whether
/// one is (poll(2)).
///
/// # Errors
/// `Interrupted` by a signal; the kernel's.
pub fn any(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<bool> {
    // What is too long for the kernel has no end.
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    Ok(rustix::event::poll(fds, limit.as_ref())? > 0)
}

/// Whether the descriptor can be read, or has ended, within `limit`.
///
/// # Errors
/// Those of [`any`].
pub fn is_readable(fd: &impl AsFd, limit: Duration) -> io::Result<bool> {
    any(&mut [PollFd::new(fd, PollFlags::IN)], Some(limit))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_descriptor_is_readable_once_something_was_written() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        assert!(!is_readable(&reader, Duration::ZERO).expect("asked"));
        assert!(!is_readable(&reader, Duration::from_millis(1)).expect("asked"));
        writer.write_all(b"x").expect("written");
        assert!(is_readable(&reader, Duration::MAX).expect("asked"));
        let mut fds = [PollFd::new(&writer, PollFlags::OUT), PollFd::new(&reader, PollFlags::OUT)];
        assert!(any(&mut fds, None).expect("asked"));
        assert!(fds[0].revents() == PollFlags::OUT && fds[1].revents().is_empty());
    }
}
