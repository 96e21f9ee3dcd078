//! A connection in the transmission phase, on the data thread of its disk.
//!
//! ```text
//!  socket ──recv──▶ receiver task ──submit──▶ Port        complete(tag) ──▶ ready ──▶ sender task ──sendmsg──▶ socket
//!                      │  slots, pool memory, room            ▲                            │
//!                      └──────────── waits for ───────────────┴────── freed ◀──────────────┘
//! ```
//!
//! Two tasks: one takes requests off the socket for as long as there is room for them, the other gathers what is ready
//! into one send. Neither allocates per request. The connection ends when both have: see [`Stage`].

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use tapio_block::{Completion, Data, DataThread, DiskError, Extent, Op, Point, Port, Request};
use tapio_ring::uring::Uring;
use tapio_ring::{Buffer, Notify, Tasks};
use tapio_types::Span;

use super::limits::{LINGER_TIME, SLOTS};
use super::memory::Memory;
use super::plan::Session;
use super::session::{Permit, Shared, count};
use super::slots::{Outcome, Slots};

/// Why a connection takes no more requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The client said DISC.
    Goodbye,
    /// The client closed its end, or the socket failed.
    Vanished,
    /// The client sent what is no request.
    Protocol(&'static str),
    /// This side ended it.
    Closed,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Goodbye => "the client disconnected",
            Self::Vanished => "the client vanished",
            Self::Protocol(why) => why,
            Self::Closed => "closed by the server",
        })
    }
}

/// What a connection begins with.
pub(super) struct Start {
    /// The socket, past the handshake.
    pub(super) fd: OwnedFd,
    /// What was agreed.
    pub(super) session: Session,
    /// What the control side knows of it.
    pub(super) shared: Arc<Shared>,
    /// Its place among the connections there may be to the server and the export.
    pub(super) permit: Permit,
    /// Its place among those there may be to the disk.
    pub(super) place: Permit,
    /// Whether the export's clients wait.
    pub(super) held: Arc<AtomicBool>,
}

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Taking requests.
    Open,
    /// Taking none, answering what was taken.
    Ending,
}

/// One client.
pub struct Connection {
    me: Weak<Connection>,
    pub(super) port: Port,
    pub(super) uring: Uring,
    pub(super) session: Session,
    pub(super) memory: Memory,
    pub(super) slots: RefCell<Slots>,
    /// Slots with something to say to the client, in the order of their ends.
    pub(super) ready: RefCell<VecDeque<u32>>,
    pub(super) shared: Arc<Shared>,
    fd: OwnedFd,
    stage: Cell<Stage>,
    /// The socket is of no use any more: what is ready is thrown away.
    broken: Cell<bool>,
    held: Cell<bool>,
    /// Requests the disk has.
    in_flight: Cell<u32>,
    sending: Cell<bool>,
    /// The first part of a streamed read failed, and its client has been told so.
    pub(super) stream_failed: Cell<bool>,
    /// Its places among the connections there may be.
    _permits: [Permit; 2],
    /// A slot or memory came back, or the state changed: the receiver looks again, and so does a waiter for quiescence.
    freed: Notify,
    /// Something is ready, or the state changed: the sender looks again.
    outgoing: Notify,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("id", &self.shared.id)
            .field("stage", &self.stage.get())
            .field("in_flight", &self.in_flight.get())
            .finish_non_exhaustive()
    }
}

thread_local! {
    /// The connections of this data thread, for commands from the control side.
    static CONNECTIONS: RefCell<Vec<Weak<Connection>>> = const { RefCell::new(Vec::new()) };
}

impl Connection {
    /// Takes over a socket whose handshake is done; `None` when there is no place for it. Called on the data thread,
    /// where the receiver and the sender of the connection then have to run.
    pub(super) fn open(data_thread: &DataThread, start: Start) -> Option<Rc<Self>> {
        let Start { fd, session, shared, permit, place, held } = start;
        if shared.is_cancelled() {
            shared.note_closed();
            return None;
        }
        let connection = Rc::new_cyclic(|me| Self {
            me: me.clone(),
            port: data_thread.port.client(),
            uring: data_thread.uring.clone(),
            session,
            memory: Memory::new(data_thread.uring.pool()),
            slots: RefCell::new(Slots::new(SLOTS)),
            ready: RefCell::new(VecDeque::with_capacity(SLOTS)),
            shared,
            fd,
            stage: Cell::new(Stage::Open),
            broken: Cell::new(false),
            // Read here, on the thread where commands to hold and to go on arrive.
            held: Cell::new(held.load(Ordering::Acquire)),
            in_flight: Cell::new(0),
            sending: Cell::new(false),
            stream_failed: Cell::new(false),
            _permits: [permit, place],
            freed: Notify::default(),
            outgoing: Notify::default(),
        });
        CONNECTIONS.with_borrow_mut(|list| list.push(Rc::downgrade(&connection)));
        Some(connection)
    }

    /// The open connections of this thread that `wanted` names.
    pub(super) fn on_this_thread(wanted: impl Fn(&Shared) -> bool) -> Vec<Rc<Self>> {
        CONNECTIONS.with_borrow(|list| {
            list.iter().filter_map(Weak::upgrade).filter(|connection| wanted(&connection.shared)).collect()
        })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(super) fn tasks(&self) -> &Tasks {
        self.port.tasks()
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.get()
    }

    /// Lets all waiters of this connection look again.
    pub(super) fn changed(&self) {
        self.freed.notify_all(self.tasks());
        self.outgoing.notify_all(self.tasks());
    }

    /// Ends it now: what the disk has taken still ends, nothing more is sent.
    pub(super) fn break_off(&self) {
        if !self.broken.replace(true) {
            self.shut_down();
            self.changed();
        }
    }

    /// Wakes both directions of the socket with an end of stream; the descriptor stays until no operation uses it.
    fn shut_down(&self) {
        // SAFETY: the descriptor is open; an error means that the peer is already gone.
        unsafe { libc::shutdown(self.fd(), libc::SHUT_RDWR) };
    }

    /// Stops taking requests, or goes on. What has been taken is answered meanwhile.
    pub(super) fn hold(&self, hold: bool) {
        self.held.set(hold);
        self.changed();
    }

    /// Waits until everything taken has been answered and sent; call after [`Connection::hold`].
    pub(super) async fn quiet(&self) {
        while !(self.is_idle() || self.broken.get()) {
            self.freed.wait(self.tasks()).await;
        }
    }

    fn is_idle(&self) -> bool {
        self.in_flight.get() == 0 && self.ready.borrow().is_empty() && !self.sending.get()
    }

    /// Waits while the connection is held, and says whether it may go on at all.
    pub(super) async fn gate(&self) -> Result<(), End> {
        loop {
            if self.broken.get() {
                return Err(End::Closed);
            }
            if !self.held.get() {
                return Ok(());
            }
            self.freed.wait(self.tasks()).await;
        }
    }

    /// Waits until something of this connection's own comes back.
    pub(super) async fn wait_freed(&self) -> Result<(), End> {
        if !self.broken.get() {
            self.freed.wait(self.tasks()).await;
        }
        if self.broken.get() { Err(End::Closed) } else { Ok(()) }
    }

    /// The same, but no longer than `within_ns`: for what others have to give back.
    pub(super) async fn wait_freed_or(&self, within_ns: u64) -> Result<(), End> {
        let until = self.tasks().turn_ns() + within_ns;
        self.freed.wait_until(self.tasks(), until).await;
        if self.broken.get() { Err(End::Closed) } else { Ok(()) }
    }

    /// Hands a disk request over when the connection is not held and the disk has room.
    pub(super) async fn submit(&self, slot: u32, op: Op, span: Span, data: Data) -> Result<(), End> {
        if self.port.is_traced() {
            let cookie = self.slots.borrow_mut().at(slot).cookie;
            self.port.note(Point::Taken, u64::from(slot), cookie as u32);
        }
        loop {
            self.gate().await?;
            if self.port.room() > 0 {
                break;
            }
            either(self.port.wait_room(), self.freed.wait(self.tasks())).await;
        }
        let client = self.me.upgrade().ok_or(End::Closed)?;
        let born_ns = self.tasks().turn_ns();
        let request = Request::new(op, span, data, born_ns, u64::from(slot), client);
        self.in_flight.set(self.in_flight.get() + 1);
        if let Err(request) = self.port.submit(request) {
            // There was room a moment ago, and nothing ran in between.
            request.answer(Err(DiskError::Io(libc::EBUSY)));
        }
        Ok(())
    }

    /// Starts a task of its own for what the port answers later: extents.
    pub(super) fn look_up(&self, slot: u32, span: Span, count_max: usize) {
        let Some(me) = self.me.upgrade() else { return };
        self.in_flight.set(self.in_flight.get() + 1);
        self.tasks().spawn(async move {
            let result = me.port.extents(span, count_max).await;
            me.extents_found(slot, result);
        });
    }

    fn extents_found(&self, slot: u32, found: Result<Vec<Extent>, DiskError>) {
        let result = match found {
            Ok(extents) if !extents.is_empty() => {
                self.slots.borrow_mut().at(slot).extents = extents;
                Ok(())
            }
            Ok(_) => Err(DiskError::Io(libc::EIO)),
            Err(error) => Err(error),
        };
        self.complete(u64::from(slot), result);
    }

    /// Queues a slot whose answer needs nothing more.
    pub(super) fn answer(&self, slot: u32) {
        self.ready.borrow_mut().push_back(slot);
        self.outgoing.notify_all(self.tasks());
    }

    /// A flush after a trim that must be durable; rare, so it may have a task of its own.
    fn flush_first(&self, slot: u32) {
        let Some(me) = self.me.upgrade() else { return };
        self.in_flight.set(self.in_flight.get() + 1);
        self.tasks().spawn(async move {
            // The trim was taken before any hold began, so its flush is not held either.
            while me.port.room() == 0 {
                me.port.wait_room().await;
            }
            let client: Rc<dyn Completion> = Rc::clone(&me) as Rc<dyn Completion>;
            let (span, born_ns) = (Span::default(), me.tasks().turn_ns());
            let request = Request::new(Op::Flush, span, Data::None, born_ns, u64::from(slot), client);
            if let Err(request) = me.port.submit(request) {
                request.answer(Err(DiskError::Io(libc::EBUSY)));
            }
        });
    }

    /// The receiver takes no more requests.
    pub(super) fn stop_taking(&self, end: End) {
        self.stage.set(Stage::Ending);
        match end {
            End::Protocol(_) => count(&self.shared.totals.protocol_errors),
            End::Vanished => count(&self.shared.totals.vanished),
            End::Goodbye | End::Closed => {}
        }
        self.changed();
        if !self.is_idle() {
            // A client that said goodbye may still read its replies, but not for ever.
            let me = self.me.clone();
            let tasks = self.tasks().clone();
            let when = tasks.turn_ns() + LINGER_TIME.as_nanos() as u64;
            self.tasks().spawn(async move {
                tasks.sleep_until(when).await;
                if let Some(connection) = me.upgrade() {
                    connection.break_off();
                }
            });
        }
    }

    /// Sender's view: waits until something is ready; false when nothing ever will be.
    pub(super) async fn wait_ready(&self) -> bool {
        loop {
            if !self.ready.borrow().is_empty() {
                return true;
            }
            if self.stage.get() == Stage::Ending && self.in_flight.get() == 0 {
                return false;
            }
            self.outgoing.wait(self.tasks()).await;
        }
    }

    pub(super) fn set_sending(&self, sending: bool) {
        self.sending.set(sending);
    }

    /// Both tasks are done.
    pub(super) fn close(&self) {
        self.broken.set(true);
        self.shut_down();
        self.changed();
        let me = Weak::as_ptr(&self.me);
        CONNECTIONS.with_borrow_mut(|list| list.retain(|other| !std::ptr::eq(other.as_ptr(), me)));
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Also where the data thread ends first.
        self.shared.note_closed();
    }
}

impl Completion for Connection {
    fn give_back(&self, tag: u64, buffer: Buffer) {
        if let Some(memory) = &mut self.slots.borrow_mut().at(tag as u32).memory {
            memory.put_back(buffer);
        }
    }

    fn complete(&self, tag: u64, result: Result<(), DiskError>) {
        self.in_flight.set(self.in_flight.get() - 1);
        let outcome = self.slots.borrow_mut().finish(tag as u32, result);
        match outcome {
            Outcome::Answer(slot) => self.ready.borrow_mut().push_back(slot),
            Outcome::FlushFirst(slot) => self.flush_first(slot),
            Outcome::Nothing => {}
        }
        self.changed();
    }

    fn give_up(&self, tag: u64) -> bool {
        let answer = self.slots.borrow_mut().give_up(tag as u32, DiskError::Io(libc::ETIMEDOUT));
        match answer {
            Some(slot) => self.answer(slot),
            // Half of an answer may have gone already: a client that is cut off knows that it has none.
            None => self.break_off(),
        }
        // Either way the request has its memory until the disk is done with it.
        true
    }

    fn gives_up(&self) -> bool {
        true
    }
}

/// Waits for whichever comes first. Only for waits that own nothing: the other one is dropped.
async fn either(a: impl Future<Output = ()>, b: impl Future<Output = ()>) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    poll_fn(|context| {
        if a.as_mut().poll(context).is_ready() || b.as_mut().poll(context).is_ready() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}
