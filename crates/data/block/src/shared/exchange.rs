//! What the owner and one queue thread have to say to each other.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use tapio_ring::Segments;
use tapio_types::Span;

use super::counts::Counts;
use super::mailbox::Mailbox;
use crate::port::{Extent, Geometry};
use crate::request::{DiskError, Op};
use crate::taken::Origin;

/// Wakes a thread that sleeps in its ring.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// A request that its queue thread cannot serve by itself.
#[derive(Debug)]
pub(super) struct Handed {
    pub op: Op,
    pub span: Span,
    pub data: Segments,
    pub born_ns: u64,
    /// Its place at the queue thread.
    pub slot: u32,
    pub origin: Origin,
    /// The client's number on its thread.
    pub client: u8,
    /// Whether its client answers when the request is given up.
    pub gives_up: bool,
}

// SAFETY: the maker of `data` guarantees the memory until the completion of the request, whatever thread's kernel moves
// it; the queue thread completes it only when the owner says so.
unsafe impl Send for Handed {}

/// From a queue thread to the owner.
#[derive(Debug)]
pub(super) enum ToOwner {
    Request(Handed),
    Extents {
        slot: u32,
        span: Span,
        count_max: usize,
    },
    /// Requests that the queue thread served by itself.
    Counts(Counts),
    /// The queue thread takes no requests, and the owner has been given every one that it had.
    Quiet,
    /// What waits for its turn is to be let in: a client has to come to an end.
    Hurry,
    /// Pages of the pool were given back, and a disk waits.
    Pages,
    /// It is time to look at the other disks of the device.
    Share,
    /// Something is as the owner may wait for: a request has left, a view is dropped, a told change has ended.
    Look,
}

/// From the owner to a queue thread.
#[derive(Debug)]
pub(crate) enum ToQueue {
    Done(u32, Result<(), DiskError>),
    Extents(u32, Result<Vec<Extent>, DiskError>),
    /// The request takes longer than it may: see [`crate::Completion::give_up`].
    GiveUp(u32),
    Geometry(Geometry),
    /// Take requests, or do not.
    SetOpen(bool),
    /// Let go of the images.
    Forget,
}

/// The two mailboxes.
pub struct Exchange {
    /// Which queue thread.
    pub(super) index: usize,
    pub(super) to_owner: Mailbox<ToOwner>,
    pub(super) to_queue: Mailbox<ToQueue>,
    /// Requests of the queue thread that the kernel does not give back.
    pub(super) stuck: AtomicUsize,
    /// Bytes of the disk as the clients of the queue thread know it.
    pub(super) known_len: AtomicU64,
    wake_owner: Wake,
    wake_queue: Wake,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("index", &self.index).finish_non_exhaustive()
    }
}

impl Exchange {
    /// Between the owner and queue thread `index`.
    pub fn new(index: usize, wake_owner: Wake, wake_queue: Wake) -> Arc<Self> {
        Arc::new(Self {
            index,
            to_owner: Mailbox::new(),
            to_queue: Mailbox::new(),
            stuck: AtomicUsize::new(0),
            known_len: AtomicU64::new(0),
            wake_owner,
            wake_queue,
        })
    }

    pub(super) fn tell_owner(&self, letter: ToOwner) {
        if self.to_owner.send(letter) {
            (self.wake_owner)();
        }
    }

    pub(super) fn tell_queue(&self, letter: ToQueue) {
        if self.to_queue.send(letter) {
            (self.wake_queue)();
        }
    }

    pub(super) fn tell_queue_all(&self, letters: &mut Vec<ToQueue>) {
        if self.to_queue.send_all(letters) {
            (self.wake_queue)();
        }
    }
}
