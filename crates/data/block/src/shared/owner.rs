//! The owner's part: when the gate is open, and what must be over before something changes.

use std::rc::Rc;
use std::sync::Arc;

use tapio_ring::Io;
use tapio_types::Access;

use super::counts::Counts;
use super::exchange::{Exchange, ToQueue};
use super::gate::Open;
use super::queue_front::{FromQueue, QueueFront};
use super::sharing::QueueEnd;
use super::view::{Shared, View};
use crate::core::Core;
use crate::front::FrontEnd;

/// The image for its owner alone; ends when it is dropped.
pub(crate) struct Hold<'a, I: Io>(&'a Core<I>);

impl<I: Io> Drop for Hold<'_, I> {
    fn drop(&mut self) {
        self.0.sharing.end_hold();
        self.0.look_at_sharing();
    }
}

impl<I: Io> Core<I> {
    /// What its queue threads share with this thread; makes it at the first call.
    pub fn share(&self) -> Arc<Shared<I::Share>> {
        Arc::clone(&self.sharing.make(self.life.is_running()).shared)
    }

    /// Whether queue threads could serve anything of the open images by themselves.
    pub fn can_be_shared(&self) -> bool {
        self.chain().is_some_and(|chain| View::of(0, &chain, None, None, self.host.io()).is_some())
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
        let is_disturbed = !self.life.is_running()
            || !self.stages.gate.is_open()
            || self.changes.at_work().is_some()
            || self.sharing.is_held()
            || self.stages.timeouts.has_fences()
            || self.admission().is_here_alone()
            || self.trace().is_on()
            || self.changes.is_unfinished();
        let Some(chain) = self.chain().filter(|_| !is_disturbed) else { return Open::Nothing };
        if chain.links().iter().any(|link| link.is_volatile()) {
            return Open::Nothing;
        }
        // Mirrors and logs hear of every change, from this thread.
        let changes = chain.access() == Access::ReadWrite && !self.stages.taps.any();
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
            let made = {
                let (pages, share) = (self.admission().seat(), self.stages.fairness.seat());
                View::of(id, &chain, pages, share, self.host.io()).map(Arc::new)
            };
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

    /// Closes the gate for as long as what this returns, and waits until no queue thread has a request of its own at
    /// the storage. Also of a disk without queue threads: the first may begin meanwhile.
    pub(crate) async fn hold_alone(&self) -> Hold<'_, I> {
        self.sharing.begin_hold();
        let hold = Hold(self);
        if self.sharing.get().is_some() {
            self.look_at_sharing();
            self.sharing.left(self.host.tasks()).await;
        }
        hold
    }

    /// A queue thread has said something that may be waited for.
    pub(super) fn queue_threads_moved(&self) {
        self.sharing.moved(self.host.tasks());
        self.stages.gate.tell();
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
            self.admission().admit_all();
            self.stages.gate.news().await;
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

    /// Counts what a queue thread has served.
    pub(super) fn count_elsewhere(&self, counts: &Counts) {
        let observer = self.stages.accounting.observer();
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
}
