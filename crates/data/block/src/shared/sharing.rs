//! What the owner of a disk keeps of its queue threads.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering;
use std::sync::{self, Arc};

use tapio_ring::{Io, Notify, Tasks};
use tapio_types::Span;

use super::exchange::{Exchange, ToQueue};
use super::gate::Open;
use super::view::{Shared, View};
use crate::chain::Chain;
use crate::port::Geometry;

/// The end of a queue thread's mailboxes at the owner.
pub(crate) trait QueueEnd {
    /// The mailboxes.
    fn exchange(&self) -> &Exchange;
    /// The queue thread takes no requests, and all that it had were given to the owner.
    fn is_quiet(&self) -> bool;
    /// It was asked anew.
    fn is_asked(&self);
    /// Whether nothing of the queue thread waits here or on its way here.
    fn is_empty(&self) -> bool;
    /// Requests that are on their way to the disk.
    fn waiting(&self) -> usize;
}

/// A view, if there can be one, and the chain that it is of.
pub(crate) type ViewOf<I> = (Option<Arc<View<<I as Io>::Share>>>, Weak<Chain<<I as Io>::Store>>);

/// A disk that has queue threads.
pub(crate) struct Sharing<I: Io> {
    pub shared: Arc<Shared<I::Share>>,
    /// The queue threads. Not held here: what they hold has the disk.
    pub fronts: RefCell<Vec<Weak<dyn QueueEnd>>>,
    /// The view that queue threads may have.
    pub view: RefCell<Option<ViewOf<I>>>,
    pub views: Cell<u64>,
    /// Every view that a queue thread may still have.
    pub given: RefCell<Vec<sync::Weak<View<I::Share>>>>,
    /// Queue threads are to take requests.
    pub is_open: Cell<bool>,
    /// Told of letters that something may wait for.
    pub moved: Notify,
}

impl<I: Io> fmt::Debug for Sharing<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sharing").field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl<I: Io> Sharing<I> {
    fn new(is_open: bool) -> Self {
        Self {
            shared: Arc::default(),
            fronts: RefCell::default(),
            view: RefCell::default(),
            views: Cell::new(0),
            given: RefCell::default(),
            is_open: Cell::new(is_open),
            moved: Notify::default(),
        }
    }

    pub fn fronts(&self) -> Vec<Rc<dyn QueueEnd>> {
        self.fronts.borrow().iter().filter_map(Weak::upgrade).collect()
    }

    pub fn tell_all(&self, letter: impl Fn() -> ToQueue) {
        for front in self.fronts() {
            front.exchange().tell_queue(letter());
        }
    }
}

/// The place of [`Sharing`] in a disk: empty without queue threads, and then every question costs a load.
#[derive(Debug)]
pub(crate) struct SharingSlot<I: Io> {
    sharing: OnceCell<Rc<Sharing<I>>>,
    /// Requests at work that need the image for themselves. Also of a disk without queue threads: the first may begin
    /// meanwhile.
    holds: Cell<u32>,
}

impl<I: Io> Default for SharingSlot<I> {
    fn default() -> Self {
        Self { sharing: OnceCell::new(), holds: Cell::new(0) }
    }
}

impl<I: Io> SharingSlot<I> {
    pub fn get(&self) -> Option<&Rc<Sharing<I>>> {
        self.sharing.get()
    }

    /// What queue threads share with this thread, made at the first call. They are to take requests if `is_open`.
    pub fn make(&self, is_open: bool) -> &Rc<Sharing<I>> {
        self.sharing.get_or_init(|| Rc::new(Sharing::new(is_open)))
    }

    /// A request needs the image for itself.
    pub fn begin_hold(&self) {
        self.holds.set(self.holds.get() + 1);
    }

    /// It does not any more.
    pub fn end_hold(&self) {
        self.holds.set(self.holds.get() - 1);
    }

    /// Whether one does.
    pub const fn is_held(&self) -> bool {
        self.holds.get() > 0
    }

    /// Whether no queue thread has a request of its own at the storage. The gate must be closed.
    pub fn are_out(&self) -> bool {
        self.get().is_none_or(|sharing| sharing.shared.gate.is_empty())
    }

    /// Waits until no queue thread has a request of its own at the storage. The gate must be closed.
    pub async fn left(&self, tasks: &Tasks) {
        let Some(sharing) = self.get() else { return };
        while !sharing.shared.gate.is_empty() {
            sharing.moved.wait(tasks).await;
        }
    }

    /// A queue thread has said something that may be waited for.
    pub fn moved(&self, tasks: &Tasks) {
        if let Some(sharing) = self.get() {
            sharing.moved.notify_all(tasks);
        }
    }

    /// Has queue threads let go of the images, and waits until they have.
    pub async fn take_images_back(&self, tasks: &Tasks) {
        let Some(sharing) = self.get() else { return };
        sharing.shared.gate.set(0, Open::Nothing);
        sharing.shared.view.lock().take();
        sharing.view.take();
        sharing.tell_all(|| ToQueue::Forget);
        while sharing.given.borrow().iter().any(|view| view.strong_count() > 0) {
            sharing.moved.wait(tasks).await;
        }
    }

    /// Waits until the clients of every queue thread are served as the disk is now: a client that was told that the
    /// disk is larger may use that by any of them.
    pub async fn know(&self, geometry: Geometry, tasks: &Tasks) {
        let Some(sharing) = self.get() else { return };
        sharing.tell_all(|| ToQueue::Geometry(geometry));
        let knows =
            |front: &Rc<dyn QueueEnd>| front.exchange().known_len.load(Ordering::Acquire) == geometry.len;
        while !sharing.fronts().iter().all(knows) {
            sharing.moved.wait(tasks).await;
        }
    }

    /// Whether no change that a queue thread has answered early touches `span`.
    pub fn is_clear(&self, span: Span) -> bool {
        self.get().is_none_or(|sharing| sharing.shared.is_clear(span))
    }

    /// Requests of queue threads that are in flight: those at their storages, and those on their way here.
    pub fn in_flight(&self) -> usize {
        self.get().map_or(0, |sharing| {
            let waiting: usize = sharing.fronts().iter().map(|front| front.waiting()).sum();
            sharing.shared.gate.count() + waiting
        })
    }

    /// Of these, requests that the kernel does not give back.
    pub fn stuck(&self) -> usize {
        self.get().map_or(0, |sharing| {
            sharing.fronts().iter().map(|front| front.exchange().stuck.load(Ordering::Relaxed)).sum()
        })
    }

    /// Queue threads beside the owner.
    pub fn count(&self) -> usize {
        self.get().map_or(0, |sharing| sharing.fronts().len())
    }
}
