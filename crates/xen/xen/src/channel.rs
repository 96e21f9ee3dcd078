//! Event channels: how domains wake each other.

use std::io;
use std::os::fd::RawFd;

use crate::{double, sys};

/// Our end of an event channel.
#[derive(Debug)]
pub enum Channel {
    /// A real one, by `/dev/xen/evtchn`.
    Xen(sys::EventDevice),
    /// A double's, by two eventfds.
    Double(double::Wire),
}

impl Channel {
    /// Becomes readable when the other side has notified us. [`Channel::take`] makes it quiet again.
    pub fn raw_fd(&self) -> RawFd {
        match self {
            Self::Xen(channel) => channel.raw_fd(),
            Self::Double(channel) => channel.raw_fd(),
        }
    }

    /// Wakes the other side.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn notify(&self) -> io::Result<()> {
        match self {
            Self::Xen(channel) => channel.notify(),
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
            Self::Double(channel) => channel.take(),
        }
    }
}
