//! How other threads reach a disk: its owner, and the queue threads beside it.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crate::data_thread::{Handle, Owner};
use crate::shared::{QueueHandle, QueueThreads};
use crate::taken::Origin;

/// Reaches a disk from any thread: its owner, and by [`DiskHandle::queue`] its queue threads.
#[derive(Clone, Debug)]
pub struct DiskHandle {
    owner: Handle<Owner>,
    queues: Arc<QueueThreads>,
}

impl Deref for DiskHandle {
    type Target = Handle<Owner>;

    fn deref(&self) -> &Handle<Owner> {
        &self.owner
    }
}

impl DiskHandle {
    pub(crate) const fn new(owner: Handle<Owner>, queues: Arc<QueueThreads>) -> Self {
        Self { owner, queues }
    }

    /// The same for a front end whose requests count where `origin` says: its jobs are given such a port.
    #[must_use]
    pub fn with_origin(&self, origin: Origin) -> Self {
        Self { owner: self.owner.with_origin(origin), queues: Arc::clone(&self.queues) }
    }

    pub(crate) const fn queues(&self) -> &Arc<QueueThreads> {
        &self.queues
    }

    /// How many threads may serve the disk, its owner among them.
    pub fn threads_max(&self) -> usize {
        self.queues.max()
    }

    /// Clients of the disk that are counted: by front ends that limit their number.
    pub fn clients(&self) -> &Arc<AtomicUsize> {
        self.queues.clients()
    }

    /// The thread that serves the queue or the connection of this number; number 0 is the owner's. A queue thread is
    /// started when it is needed for the first time; where that fails, the owner serves.
    pub fn queue(&self, number: usize) -> QueueHandle {
        self.queues.nth(&self.owner, number % self.threads_max())
    }

    /// All threads that serve the disk now, the owner first.
    pub fn threads(&self) -> Vec<QueueHandle> {
        self.queues.all(&self.owner)
    }
}
