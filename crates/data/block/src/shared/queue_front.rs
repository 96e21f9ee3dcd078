//! A queue thread as its disk's owner meets it: a front end like any other.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use tapio_ring::Io;

use super::exchange::{Exchange, Handed, ToOwner, ToQueue};
use super::sharing::QueueEnd;
use crate::core::Core;
use crate::front::FrontEnd;
use crate::port::Port;
use crate::request::{Completion, Data, DiskError, Request};
use crate::taken::Origin;

/// What came from one queue thread and what goes back there.
pub(super) struct QueueFront<I: Io> {
    core: Weak<Core<I>>,
    exchange: Arc<Exchange>,
    port: Port,
    /// A port for each client of the queue thread, so that they take turns where the disk is limited.
    ports: RefCell<Vec<((u8, Origin), Port)>>,
    /// Requests that the disk has no room for yet.
    waiting: RefCell<VecDeque<Handed>>,
    /// Of these slots the client answers when the request is given up.
    give_up: RefCell<Vec<bool>>,
    answers: RefCell<Vec<ToQueue>>,
    /// The queue thread takes no requests, and all that it had were given to the owner.
    is_quiet: Cell<bool>,
    /// What waits here now goes to the disk without waiting for its turn.
    is_hurried: Cell<bool>,
}

impl<I: Io> fmt::Debug for QueueFront<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueFront").field("exchange", &self.exchange).finish_non_exhaustive()
    }
}

impl<I: Io> QueueFront<I> {
    pub fn new(core: &Rc<Core<I>>, exchange: Arc<Exchange>, port: Port) -> Rc<Self> {
        Rc::new(Self {
            core: Rc::downgrade(core),
            exchange,
            port,
            ports: RefCell::default(),
            waiting: RefCell::default(),
            give_up: RefCell::default(),
            answers: RefCell::default(),
            is_quiet: Cell::new(false),
            is_hurried: Cell::new(false),
        })
    }

    fn read(self: &Rc<Self>, letter: ToOwner) {
        let Some(core) = self.core.upgrade() else { return };
        match letter {
            ToOwner::Request(handed) => self.waiting.borrow_mut().push_back(handed),
            ToOwner::Extents { slot, span, count_max } => {
                let (me, port) = (Rc::clone(self), self.port.clone());
                self.port.tasks().spawn(async move {
                    let found = port.extents(span, count_max).await;
                    me.exchange.tell_queue(ToQueue::Extents(slot, found));
                });
            }
            ToOwner::Counts(counts) => core.count_elsewhere(&counts),
            ToOwner::Quiet => {
                self.is_quiet.set(true);
                core.queue_threads_moved();
            }
            ToOwner::Hurry => {
                core.admission().admit_all();
                self.is_hurried.set(!self.waiting.borrow().is_empty());
            }
            ToOwner::Pages => core.admission().given_elsewhere(),
            ToOwner::Share => core.look_at_device(),
            ToOwner::Look => core.queue_threads_moved(),
        }
    }

    /// The port of a client.
    fn port_of(&self, client: (u8, Origin)) -> Port {
        let mut ports = self.ports.borrow_mut();
        if let Some((_, port)) = ports.iter().find(|(other, _)| *other == client) {
            return port.clone();
        }
        let port = self.port.client().with_origin(client.1);
        ports.push((client, port.clone()));
        port
    }

    /// Hands to the disk what it has room for.
    fn submit(self: &Rc<Self>) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        let (mut any, mut index) = (false, 0);
        while index < waiting.len() {
            if self.port.is_paused() {
                break;
            }
            let port = self.port_of((waiting[index].client, waiting[index].origin));
            // A client that has to wait for its turn keeps no other one waiting.
            if port.room() == 0 {
                index += 1;
                continue;
            }
            let Some(handed) = waiting.remove(index) else { break };
            let Handed { op, span, data, born_ns, slot, gives_up, .. } = handed;
            {
                let mut give_up = self.give_up.borrow_mut();
                let len = give_up.len().max(slot as usize + 1);
                give_up.resize(len, false);
                give_up[slot as usize] = gives_up;
            }
            let client: Rc<dyn Completion> = Rc::<Self>::clone(self);
            let request = Request::new(op, span, Data::Guest(data), born_ns, u64::from(slot), client);
            if let Err(request) = port.submit(request) {
                // There was room a moment ago, and nothing ran in between.
                request.answer(Err(DiskError::Io(libc::EBUSY)));
            }
            any = true;
        }
        any
    }
}

impl<I: Io> QueueEnd for QueueFront<I> {
    fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    fn is_quiet(&self) -> bool {
        self.is_quiet.get()
    }

    fn is_asked(&self) {
        self.is_quiet.set(false);
    }

    fn is_empty(&self) -> bool {
        self.exchange.to_owner.is_empty() && self.waiting.borrow().is_empty()
    }

    fn waiting(&self) -> usize {
        self.waiting.borrow().len()
    }
}

impl<I: Io> Completion for QueueFront<I> {
    fn complete(&self, tag: u64, result: Result<(), DiskError>) {
        self.answers.borrow_mut().push(ToQueue::Done(tag as u32, result));
    }

    fn give_up(&self, tag: u64) -> bool {
        let gives_up = self.give_up.borrow().get(tag as usize).copied().unwrap_or(false);
        if gives_up {
            self.answers.borrow_mut().push(ToQueue::GiveUp(tag as u32));
        }
        gives_up
    }
}

/// The end of the mailboxes at the owner.
pub(super) struct FromQueue<I: Io> {
    front: Rc<QueueFront<I>>,
    letters: Vec<ToOwner>,
}

impl<I: Io> FromQueue<I> {
    pub fn boxed(front: &Rc<QueueFront<I>>) -> Box<dyn FrontEnd> {
        Box::new(Self { front: Rc::clone(front), letters: Vec::new() })
    }
}

impl<I: Io> FrontEnd for FromQueue<I> {
    fn pull(&mut self) -> bool {
        self.front.exchange.to_owner.take(&mut self.letters);
        let any = !self.letters.is_empty();
        for letter in self.letters.drain(..) {
            self.front.read(letter);
        }
        if self.front.waiting.borrow().is_empty() {
            return any;
        }
        let Some(core) = self.front.core.upgrade() else { return any };
        // What closed the gate may be over by now.
        core.look_at_sharing();
        let mut submitted = self.front.submit();
        while self.front.is_hurried.get() {
            core.admission().admit_all();
            // What the disk has no room for goes on when it has.
            if !self.front.submit() {
                self.front.is_hurried.set(!self.front.waiting.borrow().is_empty());
                break;
            }
            submitted = true;
        }
        if submitted && !core.life.is_running() {
            // A pause waits until all of them are at the disk.
            core.queue_threads_moved();
        }
        submitted || any
    }

    fn publish(&mut self) {
        let mut answers = self.front.answers.borrow_mut();
        self.front.exchange.tell_queue_all(&mut answers);
    }

    fn peek(&self) -> bool {
        !self.front.exchange.to_owner.is_empty()
    }

    fn arm(&mut self) -> bool {
        !self.front.exchange.to_owner.arm()
    }

    fn disarm(&mut self) {
        self.front.exchange.to_owner.disarm();
    }

    fn rest(&mut self) {
        // A queue thread that serves tells its counts ten times a second: where the owner rests, all of them do.
        let chain = self.front.core.upgrade().and_then(|core| core.chain());
        chain.iter().flat_map(|chain| chain.links()).for_each(|link| link.layer.forget_shared());
    }
}
