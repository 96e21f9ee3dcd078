//! Event channels: how domains wake each other.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

#[cfg(feature = "doubles")]
use crate::double;
use crate::sys;

/// Our end of an event channel.
#[derive(Debug)]
pub enum Channel {
    /// A real one, by `/dev/xen/evtchn`.
    Xen(sys::EventDevice),
    /// A double's, by two eventfds.
    #[cfg(feature = "doubles")]
    Double(double::Wire),
}

impl Channel {
    /// The channel of a double: what wakes us, and what wakes the other side.
    ///
    /// # Errors
    /// `Unsupported` in a program without doubles.
    pub fn of_double(ours: OwnedFd, theirs: OwnedFd) -> io::Result<Self> {
        #[cfg(feature = "doubles")]
        return Ok(Self::Double(double::Wire::from_fds(ours, theirs)));
        #[cfg(not(feature = "doubles"))]
        {
            drop((ours, theirs));
            Err(crate::without_doubles())
        }
    }

    /// Becomes readable when the other side has notified us. [`Channel::take`] makes it quiet again.
    pub fn raw_fd(&self) -> RawFd {
        match self {
            Self::Xen(channel) => channel.raw_fd(),
            #[cfg(feature = "doubles")]
            Self::Double(channel) => channel.raw_fd(),
        }
    }

    /// The number of a real channel's port; a double has none.
    pub fn port(&self) -> Option<u32> {
        match self {
            Self::Xen(channel) => Some(channel.port()),
            #[cfg(feature = "doubles")]
            Self::Double(_) => None,
        }
    }

    /// Wakes the other side.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn notify(&self) -> io::Result<()> {
        match self {
            Self::Xen(channel) => channel.notify(),
            #[cfg(feature = "doubles")]
            Self::Double(channel) => channel.notify(),
        }
    }

    /// Takes the notifications that are there and lets the next one come (read and unmask). False if there were none.
    ///
    /// # Errors
    /// The channel is broken: the other domain is gone.
    pub fn take(&self) -> io::Result<bool> {
        match self {
            Self::Xen(channel) => channel.take(),
            #[cfg(feature = "doubles")]
            Self::Double(channel) => channel.take(),
        }
    }
}
