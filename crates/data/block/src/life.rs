//! The states of a disk between plug and unplug, and what lasts for all of them.

use std::cell::{Cell, RefCell};
use std::fmt;

use tapio_format::Result;
use tapio_ring::Storage;
use tapio_types::SECTOR_LEN;

use crate::chain::Chain;
use crate::sectors::settle;

/// The states of a plugged disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// Requests are served.
    Running,
    /// No new requests are taken; those in flight are drained.
    Draining,
    /// Nothing is in flight and the images are closed.
    Paused,
    /// Closed for good.
    Closed,
}

impl fmt::Display for DiskState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Draining => "draining",
            Self::Paused => "paused",
            Self::Closed => "closed",
        })
    }
}

/// What a pause finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drain {
    /// The disk is draining from now on, and this pause is the one that ends that.
    Begun,
    /// Another pause is at work.
    Joined,
    /// There is nothing to pause.
    Over,
}

/// Where a disk is in its life.
#[derive(Debug)]
pub(crate) struct Life {
    state: Cell<DiskState>,
    /// How the last pause ended, for the callers that joined it.
    paused: RefCell<Result<()>>,
    /// What guests were told of sectors, for as long as the disk is there.
    sector_len: Cell<Option<u32>>,
}

impl Default for Life {
    /// Paused, as a disk without images is.
    fn default() -> Self {
        Self {
            state: Cell::new(DiskState::Paused),
            paused: RefCell::new(Ok(())),
            sector_len: Cell::new(None),
        }
    }
}

impl Life {
    pub const fn state(&self) -> DiskState {
        self.state.get()
    }

    pub fn is_running(&self) -> bool {
        self.state() == DiskState::Running
    }

    pub fn is_closed(&self) -> bool {
        self.state() == DiskState::Closed
    }

    /// The images are open and requests are served.
    pub fn run(&self) {
        self.state.set(DiskState::Running);
    }

    /// The disk is to be paused.
    pub fn drain(&self) -> Drain {
        match self.state() {
            DiskState::Running => {
                self.state.set(DiskState::Draining);
                Drain::Begun
            }
            DiskState::Draining => Drain::Joined,
            DiskState::Paused | DiskState::Closed => Drain::Over,
        }
    }

    /// The images are closed, with this result.
    pub fn pause(&self, result: Result<()>) {
        *self.paused.borrow_mut() = result;
        self.state.set(DiskState::Paused);
    }

    /// How the last pause ended.
    pub fn paused(&self) -> Result<()> {
        self.paused.borrow().clone()
    }

    /// There will be no images any more.
    pub fn close(&self) {
        self.state.set(DiskState::Closed);
    }

    /// Bytes of a sector as guests are told.
    pub fn sector_len(&self) -> u32 {
        self.sector_len.get().unwrap_or(SECTOR_LEN as u32)
    }

    /// Settles what guests are told, once; images that are opened later have to serve it.
    ///
    /// # Errors
    /// The disk is no whole number of such sectors.
    pub fn settle_sectors<S: Storage>(&self, chain: &Chain<S>, wanted: Option<u32>) -> Result<()> {
        let len = settle(chain, self.sector_len.get(), wanted)?;
        self.sector_len.set(Some(len));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tapio_format::{FormatError, FormatErrorKind};

    use super::*;

    #[test]
    fn one_pause_drains_and_the_others_join_it_and_hear_its_result() {
        let life = Life::default();
        assert_eq!((life.state(), life.drain()), (DiskState::Paused, Drain::Over));
        life.run();
        assert_eq!((life.drain(), life.state()), (Drain::Begun, DiskState::Draining));
        assert_eq!(life.drain(), Drain::Joined);
        life.pause(Err(FormatError::new(FormatErrorKind::Io, "the storage is gone")));
        assert_eq!(life.state(), DiskState::Paused);
        assert!(life.paused().is_err_and(|error| error.kind() == FormatErrorKind::Io));
        // The next pause has a result of its own.
        life.run();
        assert_eq!(life.drain(), Drain::Begun);
        life.pause(Ok(()));
        assert!(life.paused().is_ok());
        life.close();
        assert!(life.is_closed() && life.drain() == Drain::Over && !life.is_running());
    }
}
