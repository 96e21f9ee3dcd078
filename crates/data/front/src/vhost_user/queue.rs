//! One virtqueue on the data thread: takes requests out of the ring, hands them to the disk, puts answers back.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use tapio_block::{Completion, Data, DiskError, Op, Point, Port, Request};
use tapio_ring::{Notify, Segments};
use tapio_types::Span;

use super::blk::{self, Plan, Range, SERIAL_LEN, Status, feature};
use super::chain::Chain;
use super::dirty::Logging;
use super::event::Notifier;
use super::inflight::InflightPart;
use super::memory::GuestMemory;
use super::message::RingAddresses;
use super::ring::{Ring, RingSetup, Ticket};
use super::ring_error::RingError;

/// Everything that a queue needs to start.
#[derive(Debug)]
pub struct QueueSetup {
    /// Its place in the device.
    pub index: usize,
    /// Descriptors.
    pub size: u16,
    /// Where its ring is.
    pub addresses: RingAddresses,
    /// Where the ring is to be read on: an index; of a packed ring both places with their wrap counters.
    pub base: u32,
    /// The feature bits that both sides agreed on.
    pub features: u64,
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// How to interrupt the guest; without it the guest polls.
    pub call: Option<Arc<Notifier>>,
    /// How to tell the front end that the queue is broken.
    pub err: Option<Arc<Notifier>>,
    /// Where requests in flight are noted.
    pub inflight: Option<InflightPart>,
    /// Where pages that are written are noted, while a migration wants that.
    pub logging: Option<Logging>,
    /// Whether requests may be taken at once.
    pub enabled: bool,
    /// Refuse everything that changes the disk.
    pub read_only: bool,
    /// What `GET_ID` answers.
    pub serial: [u8; SERIAL_LEN],
}

/// What is still to be handed to the disk of a request that is more than the disk takes at once.
#[derive(Clone, Copy, Debug)]
enum Feed {
    Data { op: Op, span: Span, data: Segments, done: u64 },
    Ranges { zeroes: bool, next: usize },
}

/// A request in flight. Keeps its tables from one request to the next.
#[derive(Debug)]
struct Slot {
    chain: Chain,
    ranges: Vec<Range>,
    ticket: Ticket,
    /// Taken from the ring, not from what a former process left behind.
    fresh: bool,
    status: *mut u8,
    /// Bytes written to the guest if all goes well, the status byte included.
    written: u32,
    /// Parts that the disk has.
    parts: u32,
    failed: Option<DiskError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// Takes nothing new: the front end asked for its index, or the connection is gone.
    Halted,
    /// The guest wrote nonsense; takes nothing until it is set up anew.
    Broken(RingError),
    /// There is no peer to answer, and the memory of the ring may belong to another by now.
    Dead,
}

struct Core {
    memory: Arc<GuestMemory>,
    ring: Ring,
    addresses: RingAddresses,
    features: u64,
    read_only: bool,
    serial: [u8; SERIAL_LEN],
    state: State,
    enabled: bool,
    /// Guest memory is being exchanged.
    held: bool,
    slots: Vec<Slot>,
    free: Vec<u32>,
    in_flight: usize,
    /// The one request that was not handed over whole.
    feed: Option<(u32, Feed)>,
    /// Requests that a former process left without an answer, by their marks in the in-flight region.
    repeat: VecDeque<u16>,
    logging: Option<Logging>,
    call: Option<Arc<Notifier>>,
    err: Option<Arc<Notifier>>,
}

/// A virtqueue.
pub struct Queue {
    index: usize,
    port: Port,
    writeback: Rc<Cell<bool>>,
    core: RefCell<Core>,
    /// What the disk has finished since the last publication. Apart from `core`, so that a completion may come at any
    /// time.
    done: RefCell<Vec<(u32, Result<(), DiskError>)>>,
    settled: Notify,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("index", &self.index).finish_non_exhaustive()
    }
}

impl Completion for Queue {
    fn complete(&self, tag: u64, result: Result<(), DiskError>) {
        self.done.borrow_mut().push((tag as u32, result));
    }
}

impl Queue {
    /// Sets a queue up in guest memory. `writeback` tells whether a write is done before it is durable.
    pub fn new(setup: QueueSetup, port: Port, writeback: Rc<Cell<bool>>) -> Result<Self, RingError> {
        let (ring, repeat) = Ring::new(RingSetup {
            memory: &setup.memory,
            size: setup.size,
            addresses: &setup.addresses,
            base: setup.base,
            event_index: setup.features & feature::EVENT_IDX != 0,
            indirect: setup.features & feature::INDIRECT_DESC != 0,
            packed: setup.features & feature::RING_PACKED != 0,
            inflight: setup.inflight,
        })?;
        let core = Core {
            memory: setup.memory,
            ring,
            addresses: setup.addresses,
            features: setup.features,
            read_only: setup.read_only,
            serial: setup.serial,
            state: State::Running,
            enabled: setup.enabled,
            held: false,
            slots: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            feed: None,
            repeat: repeat.into(),
            logging: setup.logging,
            call: setup.call,
            err: setup.err,
        };
        // Whatever an earlier owner left in the flags: kicks are wanted until the thread says otherwise.
        core.ring.enable_kicks();
        Ok(Self {
            index: setup.index,
            port,
            writeback,
            core: RefCell::new(core),
            done: RefCell::new(Vec::new()),
            settled: Notify::default(),
        })
    }

    /// Takes what is new out of the ring, as far as the disk has room.
    pub fn pull(self: &Rc<Self>) -> bool {
        let mut core = self.core.borrow_mut();
        if !core.takes() {
            return false;
        }
        let (mut room, mut pulled) = (self.port.room(), false);
        if room == 0 {
            return false;
        }
        if let Err(error) = core.ring.look() {
            core.break_down(error);
            return false;
        }
        while room > 0 {
            let request = if core.feed.is_some() {
                self.next_part(&mut core)
            } else {
                let again = core.repeat.pop_front();
                if again.is_none() && !core.ring.has_next() {
                    break;
                }
                match self.take(&mut core, again) {
                    Ok(request) => request,
                    Err(error) => {
                        core.break_down(error);
                        break;
                    }
                }
            };
            pulled = true;
            let Some(request) = request else { continue };
            if let Err(request) = self.port.submit(request) {
                // `room` said that there is some; should the disk see that otherwise, the part has failed.
                request.answer(Err(DiskError::Io(libc::EAGAIN)));
                break;
            }
            room -= 1;
            if room == 0 {
                // A disk with limits says so for one request at a time.
                room = self.port.room();
            }
        }
        pulled
    }

    /// Whether the ring holds something that the disk has room for.
    pub fn peek(&self) -> bool {
        let core = self.core.borrow();
        core.takes() && self.port.room() > 0 && (core.has_leftovers() || core.ring.peek())
    }

    /// Asks for kicks; true if a request is there already.
    pub fn arm(&self) -> bool {
        let core = self.core.borrow();
        if !core.takes() || self.port.room() == 0 {
            // Without room the next event is a completion, and this runs again after it.
            return false;
        }
        core.ring.enable_kicks() || core.has_leftovers()
    }

    /// Kicks are not needed.
    pub fn disarm(&self) {
        let core = self.core.borrow();
        if core.takes() {
            core.ring.disable_kicks();
        }
    }

    /// Puts the answers of what is done into the ring, and interrupts the guest once if it wants that.
    pub fn publish(&self) {
        let mut core = self.core.borrow_mut();
        let any = {
            let mut done = self.done.borrow_mut();
            let any = !done.is_empty();
            for (slot, result) in done.drain(..) {
                core.note(slot, result);
            }
            any
        };
        core.commit();
        if any {
            self.port.note_all(Point::Published);
        }
        core.untake();
        if core.in_flight == 0 && !core.takes() {
            self.settled.notify_all(self.port.tasks());
        }
    }

    /// Takes nothing more. What the disk has is answered as always; [`Queue::settled`] waits for that.
    pub fn halt(&self) {
        let mut core = self.core.borrow_mut();
        if core.state == State::Running {
            core.state = State::Halted;
        }
        core.untake();
    }

    /// Waits until nothing is in flight.
    pub async fn settled(&self) {
        loop {
            self.publish();
            if self.core.borrow().in_flight == 0 {
                return;
            }
            // What waits for its turn at the disk would keep the front end waiting as well.
            self.port.hurry();
            self.settled.wait(self.port.tasks()).await;
        }
    }

    /// Answers nothing any more: the connection is gone and its memory may serve another.
    pub fn kill(&self) {
        self.core.borrow_mut().state = State::Dead;
    }

    /// Where the ring is to be read on, as `GET_VRING_BASE` answers it.
    pub fn base(&self) -> u32 {
        self.core.borrow().ring.base()
    }

    /// Logs what is written from now on elsewhere, or no longer.
    pub fn set_logging(&self, logging: Option<Logging>) {
        self.core.borrow_mut().logging = logging;
    }

    /// Why the queue is broken.
    pub fn broken(&self) -> Option<RingError> {
        match self.core.borrow().state {
            State::Broken(error) => Some(error),
            _ => None,
        }
    }

    /// Marks the queue broken.
    pub fn break_down(&self, error: RingError) {
        self.core.borrow_mut().break_down(error);
    }

    /// Allows or forbids taking requests.
    pub fn set_enabled(&self, enabled: bool) {
        self.core.borrow_mut().enabled = enabled;
    }

    /// Stops taking requests while guest memory is exchanged, or goes on.
    pub fn set_held(&self, held: bool) {
        let mut core = self.core.borrow_mut();
        core.held = held;
        core.untake();
    }

    /// Goes on with other guest memory. Requests in flight keep what they point to only if the new memory shares it.
    pub fn set_memory(&self, memory: &Arc<GuestMemory>) {
        let mut core = self.core.borrow_mut();
        let addresses = core.addresses;
        match core.ring.rebind(memory, &addresses) {
            Ok(()) => core.memory = Arc::clone(memory),
            Err(error) => core.break_down(error),
        }
    }

    /// Interrupts by another descriptor from now on, and once at once: the guest may have missed one.
    pub fn set_call(&self, call: Option<Arc<Notifier>>) {
        if let Some(call) = &call {
            call.signal();
        }
        self.core.borrow_mut().call = call;
    }

    /// Reports a broken queue by another descriptor.
    pub fn set_err(&self, err: Option<Arc<Notifier>>) {
        self.core.borrow_mut().err = err;
    }

    /// Takes the next request of the ring, or `again` one that was left behind. Gives what to hand to the disk, or
    /// nothing when it was answered at once.
    fn take(self: &Rc<Self>, core: &mut Core, again: Option<u16>) -> Result<Option<Request>, RingError> {
        let index = core.free_slot();
        let slot = &mut core.slots[index as usize];
        let found = match again {
            None => core.ring.find(&core.memory, &mut slot.chain),
            Some(mark) => core.ring.find_again(mark, &core.memory, &mut slot.chain),
        };
        let found = found.and_then(|mut ticket| {
            let status = slot.chain.status_at.and_then(|at| core.memory.contiguous(at, 1));
            slot.status = status.ok_or(RingError::NoStatus)?;
            core.ring.take(&mut ticket, again.is_none(), &slot.chain)?;
            Ok(ticket)
        });
        match found {
            Ok(ticket) => {
                slot.ticket = ticket;
                self.port.note(Point::Taken, u64::from(index), u32::from(ticket.id));
            }
            Err(error) => {
                core.free.push(index);
                return Err(error);
            }
        }
        (slot.fresh, slot.parts, slot.failed, slot.written) = (again.is_none(), 0, None, 1);
        core.in_flight += 1;
        if slot.chain.fault.is_some() {
            core.finish(index, Status::IoError, 1);
            return Ok(None);
        }
        let plan = blk::plan(&mut slot.chain, core.features, &core.serial, &mut slot.ranges);
        let durable = !self.writeback.get() && !core.read_only;
        let refuse = core.read_only && matches!(plan, Plan::Write { .. } | Plan::Discard | Plan::WriteZeroes);
        if refuse {
            core.finish(index, Status::IoError, 1);
            return Ok(None);
        }
        let (op, span, first, count) = match plan {
            Plan::Read { span, first, count } => {
                slot.written = u32::try_from(span.len).unwrap_or(u32::MAX).saturating_add(1);
                (Op::Read, span, first, count)
            }
            Plan::Write { span, first, count } => (Op::Write { durable }, span, first, count),
            Plan::Flush => {
                slot.parts = 1;
                return Ok(Some(self.request(Op::Flush, Span::new(0, 0), Segments::EMPTY, index)));
            }
            Plan::Discard | Plan::WriteZeroes => {
                core.feed = Some((index, Feed::Ranges { zeroes: plan == Plan::WriteZeroes, next: 0 }));
                return Ok(self.next_part(core));
            }
            Plan::Answer { status, written } => {
                core.finish(index, status, written.saturating_add(1));
                return Ok(None);
            }
        };
        let geometry = self.port.geometry();
        if !span.fits(geometry.len) {
            core.finish(index, Status::IoError, 1);
            return Ok(None);
        }
        // SAFETY: the table stays as it is until the slot is freed, which is when every part has completed; the memory
        // lies in `core.memory`, which is exchanged only when nothing is in flight. The guest may change the content of
        // its memory at any time, as hardware lets it do: it is moved by the kernel, never looked at here.
        let data = unsafe { Segments::from_iovecs(&slot.chain.pieces[first..first + count], span.len) };
        if span.len <= u64::from(geometry.transfer_max) {
            slot.parts = 1;
            return Ok(Some(self.request(op, span, data, index)));
        }
        core.feed = Some((index, Feed::Data { op, span, data, done: 0 }));
        Ok(self.next_part(core))
    }

    /// The next part of the request that was not handed over whole.
    fn next_part(self: &Rc<Self>, core: &mut Core) -> Option<Request> {
        let (index, feed) = core.feed.take()?;
        let slot = &mut core.slots[index as usize];
        if slot.failed.is_some() {
            // The rest would change nothing.
            if slot.parts == 0 {
                core.finish(index, Status::IoError, 1);
            }
            return None;
        }
        slot.parts += 1;
        match feed {
            Feed::Data { op, span, data, done } => {
                // Parts end on whole physical blocks where the disk's limit allows it.
                let limit = u64::from(self.port.geometry().transfer_max);
                let limit = if limit > 4096 { limit & !4095 } else { limit.max(512) };
                let len = (span.len - done).min(limit);
                let rest = done + len;
                if rest < span.len {
                    core.feed = Some((index, Feed::Data { op, span, data, done: rest }));
                }
                Some(self.request(op, Span::new(span.start + done, len), data.slice(done, len), index))
            }
            Feed::Ranges { zeroes, next } => {
                let Range { span, unmap } = slot.ranges[next];
                if next + 1 < slot.ranges.len() {
                    core.feed = Some((index, Feed::Ranges { zeroes, next: next + 1 }));
                }
                let durable = !self.writeback.get();
                let op = if zeroes { Op::WriteZeroes { unmap, durable } } else { Op::Discard };
                Some(self.request(op, span, Segments::EMPTY, index))
            }
        }
    }

    fn request(self: &Rc<Self>, op: Op, span: Span, data: Segments, slot: u32) -> Request {
        let client: Rc<dyn Completion> = Rc::<Self>::clone(self);
        let data = Data::Guest(data);
        Request::new(op, span, data, self.port.tasks().turn_ns(), u64::from(slot), client)
    }
}

impl Core {
    fn takes(&self) -> bool {
        self.state == State::Running && self.enabled && !self.held
    }

    fn has_leftovers(&self) -> bool {
        self.feed.is_some() || !self.repeat.is_empty()
    }

    fn free_slot(&mut self) -> u32 {
        if let Some(index) = self.free.pop() {
            return index;
        }
        // At most one slot a descriptor, because those in use are not taken again.
        self.slots.push(Slot {
            chain: Chain::default(),
            ranges: Vec::new(),
            ticket: Ticket::default(),
            fresh: true,
            status: std::ptr::null_mut(),
            written: 0,
            parts: 0,
            failed: None,
        });
        self.slots.len() as u32 - 1
    }

    /// Notes that a part is done.
    fn note(&mut self, index: u32, result: Result<(), DiskError>) {
        let slot = &mut self.slots[index as usize];
        slot.parts -= 1;
        if let Err(error) = result {
            slot.failed.get_or_insert(error);
        }
        let more = matches!(self.feed, Some((fed, _)) if fed == index);
        if slot.parts > 0 {
            return;
        }
        if more {
            if slot.failed.is_none() {
                return;
            }
            self.feed = None;
        }
        let (status, written) = match slot.failed {
            None => (Status::Ok, slot.written),
            Some(error) => (Status::from(Err(error)), 1),
        };
        self.finish(index, status, written);
    }

    /// Answers a request. The answer becomes visible with [`Core::commit`].
    fn finish(&mut self, index: u32, status: Status, written: u32) {
        let slot = &self.slots[index as usize];
        let ticket = slot.ticket;
        self.in_flight -= 1;
        self.free.push(index);
        if self.state == State::Dead {
            return;
        }
        // SAFETY: the status byte was found in guest memory when the request was taken, and that memory is exchanged
        // only when nothing is in flight.
        unsafe { slot.status.write_volatile(status as u8) };
        if let Some(logging) = &self.logging {
            log_request(logging, &self.memory, slot);
        }
        self.ring.answer(ticket, written);
    }

    /// Makes answers visible.
    fn commit(&mut self) {
        if self.state == State::Dead || !self.ring.has_answers() {
            return;
        }
        if let Some(logging) = &self.logging {
            self.ring.log_answers(logging);
            logging.log.tell();
        }
        if self.ring.publish()
            && let Some(call) = &self.call
        {
            call.signal();
        }
    }

    /// Puts a request that was not handed over whole back, when nothing more may be handed over: it is repeated from
    /// its beginning later, which the guest cannot tell because it has no answer yet.
    fn untake(&mut self) {
        if self.takes() {
            return;
        }
        let Some((index, _)) = self.feed else { return };
        let slot = &self.slots[index as usize];
        if slot.parts > 0 {
            return;
        }
        let (ticket, fresh) = (slot.ticket, slot.fresh);
        self.feed = None;
        self.in_flight -= 1;
        self.free.push(index);
        self.ring.give_back(ticket, fresh);
        if !fresh {
            self.repeat.push_front(ticket.mark);
        }
    }

    fn break_down(&mut self, error: RingError) {
        if matches!(self.state, State::Broken(_) | State::Dead) {
            return;
        }
        self.state = State::Broken(error);
        if let Some(err) = &self.err {
            err.signal();
        }
    }
}

/// Marks the pages that a request wrote: its status byte, and whatever it may have read from the disk. A request that
/// failed may have written a part.
fn log_request(logging: &Logging, memory: &GuestMemory, slot: &Slot) {
    let mark = |pointer: *const u8, len: u64| {
        memory.guest_ranges(pointer, len, |at, len| logging.log.mark(at, len));
    };
    mark(slot.status, 1);
    for piece in slot.chain.pieces.get(slot.chain.readable..).unwrap_or_default() {
        mark(piece.iov_base.cast(), piece.iov_len as u64);
    }
}
