//! What the owner of a disk keeps of its queue threads.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::{self, Arc};

use tapio_ring::{Io, Notify};

use super::exchange::{Exchange, ToQueue};
use super::view::{Shared, View};
use crate::chain::Chain;

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

/// Empty on a disk without queue threads.
pub(crate) type SharingSlot<I> = OnceCell<Rc<Sharing<I>>>;

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
    pub fn new(is_open: bool) -> Self {
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
