//! The owner's part: when the gate is open, and what must be over before something changes.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tapio_ring::Io;
use tapio_types::{Access, Span};

use super::counts::Counts;
use super::exchange::{Exchange, ToQueue};
use super::gate::Open;
use super::queue_front::{FromQueue, QueueFront};
use super::sharing::{QueueEnd, Sharing};
use super::view::{Shared, View};
use crate::core::{Core, DiskState};
use crate::front::FrontEnd;
use crate::port::Geometry;

/// The image for its owner alone; ends when it is dropped.
pub(crate) struct Hold<'a, I: Io>(&'a Core<I>);

impl<I: Io> Drop for Hold<'_, I> {
    fn drop(&mut self) {
        self.0.holds.set(self.0.holds.get() - 1);
        self.0.look_at_sharing();
    }
}

impl<I: Io> Core<I> {
    /// What its queue threads share with this thread; makes it at the first call.
    pub fn share(&self) -> Arc<Shared<I::Share>> {
        let make = || Rc::new(Sharing::new(self.state() == DiskState::Running));
        Arc::clone(&self.sharing.get_or_init(make).shared)
    }

    /// Whether queue threads could serve anything of the open images by themselves.
    pub fn can_be_shared(&self) -> bool {
        self.chain().is_some_and(|chain| View::of(0, &chain, None, &self.io).is_some())
    }

    /// Adds the queue thread at the other end of `exchange`; gives the front end that the data thread has to drive. The
    /// disk must have images.
    pub fn add_queue_thread(self: &Rc<Self>, exchange: &Arc<Exchange>) -> Option<Box<dyn FrontEnd>> {
        let (port, geometry) = (self.port()?, self.geometry()?);
        self.share();
        let sharing = self.sharing.get()?;
        let front = QueueFront::new(self, Arc::clone(exchange), port);
        let end: Rc<dyn QueueEnd> = Rc::<QueueFront<I>>::clone(&front);
        sharing.fronts.borrow_mut().push(Rc::downgrade(&end));
        // It may have changed since the thread was made.
        exchange.tell_queue(ToQueue::Geometry(geometry));
        if sharing.is_open.get() {
            exchange.tell_queue(ToQueue::SetOpen(true));
        }
        self.look_at_sharing();
        Some(FromQueue::boxed(&front))
    }

    /// What queue threads may do by themselves now.
    fn what_is_open(&self) -> Open {
        let is_disturbed = self.state() != DiskState::Running
            || !self.inbox.is_open()
            || self.changing.get().is_some()
            || self.holds.get() > 0
            || self.timeouts.has_fences()
            || self.admission.is_here_alone()
            || self.trace.is_on()
            || self.unfinished.borrow().is_some();
        let Some(chain) = self.chain().filter(|_| !is_disturbed) else { return Open::Nothing };
        if chain.links().iter().any(|link| link.is_volatile()) {
            return Open::Nothing;
        }
        // Mirrors and logs hear of every change, from this thread.
        let changes = chain.access() == Access::ReadWrite && !self.tapped.get();
        if changes { Open::Everything } else { Open::Reads }
    }

    /// Opens or closes the gate as the state of the disk says. To be called after everything that
    /// [`Self::what_is_open`] looks at; costs a load without queue threads.
    pub fn look_at_sharing(&self) {
        let Some(sharing) = self.sharing.get() else { return };
        let open = self.what_is_open();
        if open == Open::Nothing {
            let id = sharing.shared.gate.view();
            return sharing.shared.gate.set(id, Open::Nothing);
        }
        let Some(chain) = self.chain() else { return };
        let mut view = sharing.view.borrow_mut();
        let is_current = view.as_ref().is_some_and(|(_, of)| std::ptr::eq(of.as_ptr(), Rc::as_ptr(&chain)));
        if !is_current {
            sharing.shared.gate.set(0, Open::Nothing);
            let id = sharing.views.get() + 1;
            sharing.views.set(id);
            let made = View::of(id, &chain, self.admission.seat(), &self.io).map(Arc::new);
            sharing.shared.view.lock().clone_from(&made);
            let mut given = sharing.given.borrow_mut();
            given.retain(|view| view.strong_count() > 0);
            given.extend(made.as_ref().map(Arc::downgrade));
            if matches!(&*view, Some((Some(_), _))) {
                sharing.tell_all(|| ToQueue::Forget);
            }
            *view = Some((made, Rc::downgrade(&chain)));
        }
        if let Some((Some(view), _)) = &*view
            && !sharing.shared.gate.is_set(view.id, open)
        {
            sharing.shared.gate.set(view.id, open);
        }
    }

    /// Whether no queue thread has a request of its own at the storage. The gate must be closed.
    pub(crate) fn queue_threads_are_out(&self) -> bool {
        self.sharing.get().is_none_or(|sharing| sharing.shared.gate.is_empty())
    }

    /// Closes the gate for as long as what this returns, and waits until no queue thread has a request of its own at
    /// the storage. Also of a disk without queue threads: the first may begin meanwhile.
    pub(crate) async fn hold_alone(&self) -> Hold<'_, I> {
        self.holds.set(self.holds.get() + 1);
        let hold = Hold(self);
        if self.sharing.get().is_some() {
            self.look_at_sharing();
            self.queue_threads_left().await;
        }
        hold
    }

    /// Waits until no queue thread has a request of its own at the storage. The gate must be closed.
    pub(crate) async fn queue_threads_left(&self) {
        let Some(sharing) = self.sharing.get() else { return };
        while !sharing.shared.gate.is_empty() {
            sharing.moved.wait(self.io.tasks()).await;
        }
    }

    /// A queue thread has said something that may be waited for.
    pub(super) fn queue_threads_moved(&self) {
        if let Some(sharing) = self.sharing.get() {
            sharing.moved.notify_all(self.io.tasks());
        }
        self.ended.notify_all(self.io.tasks());
    }

    /// Has queue threads take no requests, and waits until every request that they had has ended or is here. To be
    /// called while the disk is draining.
    pub(crate) async fn drain_queue_threads(&self) {
        let Some(sharing) = self.sharing.get() else { return };
        sharing.is_open.set(false);
        self.look_at_sharing();
        sharing.fronts().iter().for_each(|front| front.is_asked());
        sharing.tell_all(|| ToQueue::SetOpen(false));
        let is_over = |front: &Rc<dyn QueueEnd>| front.is_quiet() && front.is_empty();
        while !(sharing.fronts().iter().all(is_over) && sharing.shared.gate.is_empty()) {
            // What was taken is served without waiting for its turn.
            self.admission.admit_all();
            self.ended.wait(self.io.tasks()).await;
        }
    }

    /// Has queue threads let go of the images, and waits until they have.
    pub(crate) async fn take_images_back(&self) {
        let Some(sharing) = self.sharing.get() else { return };
        sharing.shared.gate.set(0, Open::Nothing);
        sharing.shared.view.lock().take();
        sharing.view.take();
        sharing.tell_all(|| ToQueue::Forget);
        while sharing.given.borrow().iter().any(|view| view.strong_count() > 0) {
            sharing.moved.wait(self.io.tasks()).await;
        }
    }

    /// The disk runs again: queue threads take requests.
    pub(crate) fn open_queue_threads(&self) {
        let Some(sharing) = self.sharing.get() else { return };
        sharing.is_open.set(true);
        // First, so that no client is refused what a larger disk has.
        if let Some(geometry) = self.geometry() {
            sharing.tell_all(|| ToQueue::Geometry(geometry));
        }
        sharing.tell_all(|| ToQueue::SetOpen(true));
        self.look_at_sharing();
    }

    /// Waits until the clients of every queue thread are served as the disk is now: a client that was told that the
    /// disk is larger may use that by any of them.
    pub async fn queue_threads_know(&self, geometry: Geometry) {
        let Some(sharing) = self.sharing.get() else { return };
        sharing.tell_all(|| ToQueue::Geometry(geometry));
        let knows =
            |front: &Rc<dyn QueueEnd>| front.exchange().known_len.load(Ordering::Acquire) == geometry.len;
        while !sharing.fronts().iter().all(knows) {
            sharing.moved.wait(self.io.tasks()).await;
        }
    }

    /// Whether no change that a queue thread has answered early touches `span`.
    pub(crate) fn is_clear_elsewhere(&self, span: Span) -> bool {
        self.sharing.get().is_none_or(|sharing| sharing.shared.is_clear(span))
    }

    /// Counts what a queue thread has served.
    pub(super) fn count_elsewhere(&self, counts: &Counts) {
        let observer = self.observer();
        if let Some(observer) = &observer {
            for counted in &counts.requests {
                observer.submitted(counted.origin, counted.op, counted.bytes);
                let (origin, op, stages) = (counted.origin, counted.op, counted.stages);
                observer.completed(origin, op, counted.bytes, stages, counted.ended_ns, true);
            }
        }
        let sharing = self.sharing.get();
        let chain = sharing.and_then(|sharing| {
            let view = sharing.view.borrow();
            view.as_ref()
                .filter(|(view, _)| view.as_ref().is_some_and(|view| view.id == counts.view))
                .and_then(|(_, chain)| chain.upgrade())
        });
        if let Some(chain) = chain {
            chain.links().iter().zip(&counts.layers).for_each(|(link, layer)| link.add(layer));
        }
    }

    /// Requests of queue threads that are in flight: those at their storages, and those on their way here.
    pub(crate) fn in_flight_elsewhere(&self) -> usize {
        self.sharing.get().map_or(0, |sharing| {
            let waiting: usize = sharing.fronts().iter().map(|front| front.waiting()).sum();
            sharing.shared.gate.count() + waiting
        })
    }

    /// Of these, requests that the kernel does not give back.
    pub(crate) fn stuck_elsewhere(&self) -> usize {
        self.sharing.get().map_or(0, |sharing| {
            sharing.fronts().iter().map(|front| front.exchange().stuck.load(Ordering::Relaxed)).sum()
        })
    }

    /// Queue threads beside this one.
    pub fn queue_threads(&self) -> usize {
        self.sharing.get().map_or(0, |sharing| sharing.fronts().len())
    }
}
