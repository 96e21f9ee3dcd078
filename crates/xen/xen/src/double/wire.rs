//! A double's event channels.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

/// One end of a double's event channel: an eventfd that wakes us, another one that wakes the other side.
///
/// Notifications that come before the first is taken are one, as on Xen.
#[derive(Debug)]
pub struct Wire {
    ours: OwnedFd,
    theirs: OwnedFd,
}

fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Wire {
    /// A channel: both ends of it.
    ///
    /// # Errors
    /// Too many descriptors are open.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (left, right) = (eventfd()?, eventfd()?);
        let other = Self { ours: right.try_clone()?, theirs: left.try_clone()? };
        Ok((Self { ours: left, theirs: right }, other))
    }

    /// An end, from descriptors of another process: the one that wakes us, the one that wakes the other side.
    pub fn from_fds(ours: OwnedFd, theirs: OwnedFd) -> Self {
        Self { ours, theirs }
    }

    /// The two descriptors, for [`Wire::from_fds`] in another process.
    pub fn into_fds(self) -> (OwnedFd, OwnedFd) {
        (self.ours, self.theirs)
    }

    /// The two descriptors, to be passed while this end stays: what wakes us, what wakes the other side.
    pub fn as_fds(&self) -> (BorrowedFd<'_>, BorrowedFd<'_>) {
        (self.ours.as_fd(), self.theirs.as_fd())
    }

    /// The same end once more: a guest that waits while its back end is replaced.
    ///
    /// # Errors
    /// Too many descriptors are open.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { ours: self.ours.try_clone()?, theirs: self.theirs.try_clone()? })
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.ours.as_raw_fd()
    }

    pub(crate) fn notify(&self) -> io::Result<()> {
        match rustix::io::write(&self.theirs, &1u64.to_ne_bytes()) {
            // A counter that is full is a notification that waits.
            Ok(_) | Err(Errno::WOULDBLOCK) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn take(&self) -> io::Result<bool> {
        match rustix::io::read(&self.ours, &mut [0u8; 8]) {
            Ok(_) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}
