//! A block front end without a guest: the load generator of benchmarks and the double of a guest in tests.
//!
//! It lives in a [`DoubleVm`], uses a disk as Linux' `xen-blkfront` does, and knows no xenstore: [`Offer`] is what a
//! back end publishes, [`Invitation`] what a back end must be told. Each queue has a fixed number of slots with a
//! buffer each, so that nothing is allocated per request.
//!
//! ```text
//!   FrontOptions ─ within(Offer) ─> Blkfront ─ invitation() ─> back end (grants, event channels)
//!                                      │
//!                                      └─ take_queues() ─> FrontQueue: submit, kick, wait, reap; reconnect
//! ```

mod options;
mod queue;
mod slots;

use std::io;
use std::os::fd::OwnedFd;

use crate::blkif::Abi;
use crate::domain::GrantRef;
use crate::double::{DoubleVm, Wire};

pub use options::{FrontOptions, Offer};
pub use queue::{Command, Completion, FrontQueue, RAW_ID};

/// What a back end must know to serve a queue.
#[derive(Debug)]
pub struct RingInvitation {
    /// Grants of the ring's pages, in order; of a split ring those of the requests.
    pub ring: Vec<GrantRef>,
    /// Of a split ring the grants of the pages of responses.
    pub responses: Vec<GrantRef>,
    /// The back end's end of the event channel.
    pub wire: Wire,
}

/// What a back end must know to serve a device: what a guest writes into its directory of xenstore.
#[derive(Debug)]
pub struct Invitation {
    /// The domain's memory, for [`Guest::from_fd`](crate::double::Guest::from_fd).
    pub memory: OwnedFd,
    /// `protocol`.
    pub abi: Abi,
    /// `feature-persistent`.
    pub persistent: bool,
    /// The queues.
    pub rings: Vec<RingInvitation>,
}

/// A device as its front end has it.
#[derive(Debug)]
pub struct Blkfront {
    vm: DoubleVm,
    options: FrontOptions,
    queues: Vec<FrontQueue>,
}

impl Blkfront {
    /// A front end in a domain of its own, with as much memory as it needs.
    ///
    /// # Errors
    /// The options contradict themselves, or there is no memory.
    pub fn new(options: FrontOptions) -> io::Result<Self> {
        options.check()?;
        Self::on(DoubleVm::new(options.pages())?, options)
    }

    /// A front end in a domain that is there: several devices of one guest.
    ///
    /// # Errors
    /// As of [`Blkfront::new`]; the domain must have [`FrontOptions::pages`] pages left.
    pub fn on(vm: DoubleVm, options: FrontOptions) -> io::Result<Self> {
        options.check()?;
        let queues = (0..options.queues).map(|_| FrontQueue::new(&vm, &options));
        let queues = queues.collect::<io::Result<Vec<_>>>()?;
        Ok(Self { vm, options, queues })
    }

    /// The domain.
    pub fn vm(&self) -> &DoubleVm {
        &self.vm
    }

    /// How it was made.
    pub fn options(&self) -> &FrontOptions {
        &self.options
    }

    /// What the back end must know. May be asked for again: by a back end that comes after another one died, or after
    /// [`FrontQueue::reconnect`].
    ///
    /// # Errors
    /// Too many descriptors are open.
    pub fn invitation(&self) -> io::Result<Invitation> {
        self.invitation_of(&self.queues)
    }

    /// The same when the queues were taken: those of this front end, all of them, in order.
    ///
    /// # Errors
    /// As of [`Blkfront::invitation`].
    pub fn invitation_of(&self, queues: &[FrontQueue]) -> io::Result<Invitation> {
        Ok(Invitation {
            memory: self.vm.share()?,
            abi: self.options.abi,
            persistent: self.options.persistent,
            rings: queues.iter().map(FrontQueue::invitation).collect::<io::Result<_>>()?,
        })
    }

    /// The queues, each for a thread.
    pub fn take_queues(&mut self) -> Vec<FrontQueue> {
        std::mem::take(&mut self.queues)
    }
}

#[cfg(test)]
mod tests;
