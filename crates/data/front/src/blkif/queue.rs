//! One ring on the thread that serves it: takes requests out of it, hands them to the disk, puts answers back.
//!
//! ```text
//!   ring ── take: a batch ──▶ pending ── cut into parts ──▶ ready ── submit ──▶ the disk
//!            1 call copies      │ FIFO     1 call copies                          │
//!            their segments     │          all data of writes                     │ complete
//!   ring ◀── publish ── answers ◀── note ◀── 1 call copies all data of reads ◀── done
//! ```
//!
//! Nothing is taken while something is pending, so a request that cannot be served now waits in the ring.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use tapio_block::{Completion, DiskError, Op, Point, Port, Request as DiskRequest};
use tapio_ring::{Buffer, Notify, Pool};
use tapio_types::{Movement, RingState};
use tapio_xen::blkif::BackRing;
use tapio_xen::{Channel, Domain};

use super::check::Limits;
use super::core::{Blocked, Core, QueueState};
use super::mover::Mover;
use super::record::RecordQueue;
use super::report::{Broken, QueueCounts, QueueReport, UnderWay};
use super::slots::Places;

/// Parts that are made at once where the disk takes them one by one: so that their data is copied by one call.
const STAGED_MAX: usize = 32;
/// Requests that are taken for one look at the ring, at most: other rings have their turn then.
const BATCH_MAX: usize = 256;
/// Batches that are taken before the thread looks elsewhere, at most.
const ROUNDS_MAX: usize = 8;

/// Everything that a ring needs to start.
#[derive(Debug)]
pub struct QueueSetup {
    /// Its place in the device.
    pub index: usize,
    /// The ring; stands where it is to be read on.
    pub ring: BackRing,
    /// How to be woken and to wake.
    pub channel: Rc<Channel>,
    /// The guest.
    pub domain: Rc<Domain>,
    /// How data is moved.
    pub movement: Movement,
    /// Memory for data that is copied.
    pub pool: Pool,
    /// Where requests in flight are noted.
    pub record: RecordQueue,
    /// What a former process left, with its entries in the record.
    pub repeat: Vec<(u32, tapio_xen::blkif::Slot)>,
    /// Segments of an indirect request, at most.
    pub max_indirect: u16,
    /// Bytes of a sector as the guest was told.
    pub sector_size: u32,
    /// Refuse everything that changes the disk.
    pub read_only: bool,
}

/// A ring.
pub struct Queue {
    index: usize,
    port: Port,
    channel: Rc<Channel>,
    copying: bool,
    core: RefCell<Core>,
    /// What the disk has finished since the last publication. Apart from `core`, so that a completion may come at any
    /// time.
    done: RefCell<Vec<(u32, Result<(), DiskError>)>>,
    /// The memory of these, where it is the process' own.
    given_back: RefCell<Vec<(u32, Buffer)>>,
    /// Parts that are answered with an error now, though the storage still has them.
    given_up: RefCell<Vec<u32>>,
    settled: Notify,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("index", &self.index).finish_non_exhaustive()
    }
}

impl Completion for Queue {
    fn give_back(&self, tag: u64, buffer: Buffer) {
        self.given_back.borrow_mut().push((tag as u32, buffer));
    }

    fn complete(&self, tag: u64, result: Result<(), DiskError>) {
        self.done.borrow_mut().push((tag as u32, result));
    }

    fn give_up(&self, tag: u64) -> bool {
        // Mapped memory stays until the request ends: after an answer the guest would use it for something else.
        if self.copying {
            self.given_up.borrow_mut().push(tag as u32);
        }
        self.copying
    }

    fn gives_up(&self) -> bool {
        self.copying
    }
}

impl Queue {
    /// Its place in the device.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Starts on a ring.
    pub fn new(setup: QueueSetup, port: Port) -> Self {
        let entries = setup.ring.size();
        let taken: Vec<u32> = setup.repeat.iter().map(|(entry, _)| *entry).collect();
        let mover = Mover::new(setup.domain, setup.movement, setup.pool);
        let copying = mover.is_copying();
        let core = Core {
            ring: setup.ring,
            mover,
            record: setup.record,
            free_entries: (0..entries).rev().filter(|entry| !taken.contains(entry)).collect(),
            repeat: setup.repeat.into(),
            limits: Limits {
                len: 0,
                sector_size: setup.sector_size,
                max_indirect: setup.max_indirect,
                read_only: setup.read_only,
            },
            state: QueueState::Running,
            slots: Places::new(),
            parts: Places::new(),
            in_flight: 0,
            pending: VecDeque::new(),
            ready: VecDeque::new(),
            blocked: Blocked::No,
            table: Vec::new(),
            table_used: 0,
            fetched: Vec::new(),
            answers: Vec::new(),
            finished: Vec::new(),
            batch: Vec::new(),
            stamp: 0,
            counts: QueueCounts::default(),
        };
        let queue = Self {
            index: setup.index,
            port,
            channel: setup.channel,
            copying,
            core: RefCell::new(core),
            done: RefCell::default(),
            given_back: RefCell::default(),
            given_up: RefCell::default(),
            settled: Notify::default(),
        };
        queue.wake_guest();
        queue
    }

    /// Notifies the guest whether it wants that or not: a former process may have died between the answers that it
    /// showed and the notification for them, and the guest would wait for ever.
    fn wake_guest(&self) {
        let mut core = self.core.borrow_mut();
        core.counts.kicks_out += 1;
        if let Err(error) = self.channel.notify() {
            core.break_down(Broken::Channel(error.raw_os_error().unwrap_or(libc::EIO)));
        }
    }

    /// Takes what is new out of the ring and hands it over, as far as the disk has room.
    pub fn pull(self: &Rc<Self>) -> bool {
        let mut core = self.core.borrow_mut();
        if core.state == QueueState::Dead {
            return false;
        }
        let mut pulled = false;
        // Bounded: a guest that fills its ring as fast as it is emptied does not keep the thread from everything else.
        for _ in 0..ROUNDS_MAX {
            let room = self.port.room();
            if room == 0 {
                break;
            }
            let most = room.max(STAGED_MAX);
            if core.pending.is_empty() && core.ready.is_empty() && core.takes() {
                let geometry = self.port.geometry();
                core.limits.len = geometry.len;
                let read_only = core.limits.read_only || geometry.read_only;
                core.stamp = self.port.stamp();
                match core.take(most.min(BATCH_MAX), self.port.tasks().turn_ns(), read_only) {
                    Ok(taken) => pulled |= taken > 0,
                    Err(error) => {
                        core.break_down(Broken::Ring(error));
                        break;
                    }
                }
            }
            if core.pending.is_empty() && core.ready.is_empty() {
                break;
            }
            let part_max = u64::from(self.port.geometry().transfer_max);
            let had = core.make_parts(most, part_max);
            core.copy_in(had);
            let prepared = self.port.stamp();
            let submitted = self.submit(&mut core, room, prepared);
            pulled |= submitted > 0;
            if submitted == 0 {
                break;
            }
        }
        if pulled && core.state == QueueState::Halted {
            // These must not wait for their turn either.
            self.settled.notify_all(self.port.tasks());
        }
        pulled
    }

    fn submit(self: &Rc<Self>, core: &mut Core, mut room: usize, prepared: u64) -> usize {
        let mut submitted = 0;
        while let Some(index) = core.ready.front().copied() {
            if room == 0 {
                // A disk with limits says so for one request at a time.
                room = self.port.room();
                if room == 0 {
                    break;
                }
            }
            core.ready.pop_front();
            submitted += 1;
            let part = &core.parts[index];
            if part.broken {
                self.done.borrow_mut().push((index, Err(DiskError::Io(libc::EFAULT))));
                continue;
            }
            let client: Rc<dyn Completion> = Rc::<Self>::clone(self);
            let slot = &core.slots[part.slot];
            if prepared > 0 {
                self.port.note_at(slot.stamp, Point::Taken, index.into(), slot.request.id as u32);
                let moved = part.pieces.1 > 0 && !(part.op == Op::Read && core.mover.is_copying());
                self.port.note_at(if moved { prepared } else { 0 }, Point::CopiedIn, index.into(), 0);
            }
            let born_ns = slot.taken_ns;
            let (op, span) = (part.op, part.span);
            // SAFETY: the part keeps its pages until the disk has answered it, `give_up` or not.
            let data = unsafe { core.data(index) };
            let request = DiskRequest::new(op, span, data, born_ns, index.into(), client);
            if let Err(request) = self.port.submit(request) {
                // `room` said that there is some; should the disk see that otherwise, the part has failed.
                request.answer(Err(DiskError::Io(libc::EAGAIN)));
            }
            room -= 1;
        }
        submitted
    }

    /// Whether there is something to do that the disk has room for: a load or two.
    pub fn peek(&self) -> bool {
        let core = self.core.borrow();
        core.has_work() && self.port.room() > 0
    }

    /// Asks for notifications; true if there is something to do already.
    pub fn arm(&self) -> bool {
        let mut core = self.core.borrow_mut();
        if matches!(core.state, QueueState::Broken(_) | QueueState::Dead) {
            return false;
        }
        // Taken first: a notification that comes from now on wakes the thread again.
        match self.channel.take() {
            Ok(true) => core.counts.kicks_in += 1,
            Ok(false) => {}
            Err(error) => {
                core.break_down(Broken::Channel(error.raw_os_error().unwrap_or(libc::EIO)));
                return false;
            }
        }
        if self.port.room() == 0 || !core.has_places() {
            // The next event is a completion, and this runs again after it.
            return false;
        }
        if core.has_leftovers() {
            return core.has_work();
        }
        if !core.takes() {
            return false;
        }
        match core.ring.arm() {
            Ok(waiting) => waiting || !core.repeat.is_empty(),
            Err(error) => {
                core.break_down(Broken::Ring(error));
                false
            }
        }
    }

    /// Puts the answers of what is done into the ring, and notifies the guest once if it wants that. Whether there was
    /// something.
    pub fn publish(&self) -> bool {
        let mut core = self.core.borrow_mut();
        std::mem::swap(&mut *self.done.borrow_mut(), &mut core.finished);
        for (part, buffer) in self.given_back.borrow_mut().drain(..) {
            core.take_back(part, buffer);
        }
        for part in self.given_up.borrow_mut().drain(..) {
            core.give_up(part);
        }
        if core.note_all() {
            self.port.note_all(Point::CopiedOut);
        }
        let answered = core.commit(&self.channel);
        if answered {
            self.port.note_all(Point::Published);
        }
        if core.in_flight == 0 && !core.takes() {
            self.settled.notify_all(self.port.tasks());
        }
        answered
    }

    /// Takes nothing more. What was taken is answered as always; [`Queue::settled`] waits for that.
    pub fn halt(&self) {
        let mut core = self.core.borrow_mut();
        if core.state == QueueState::Running {
            core.state = QueueState::Halted;
        }
    }

    /// Waits until nothing is in flight. What cannot even begin, because the disk is paused, is left to the next
    /// process that serves the ring.
    pub async fn settled(self: &Rc<Self>) {
        loop {
            if self.pull() {
                // So that what this thread cannot serve by itself is at the disk's owner.
                self.port.tasks().yield_now().await;
            }
            // What waits for its turn at the disk would keep the front end waiting as well.
            self.port.hurry();
            self.publish();
            if self.port.is_paused() {
                self.core.borrow_mut().leave();
            }
            if self.core.borrow().in_flight == 0 {
                return;
            }
            self.settled.wait(self.port.tasks()).await;
        }
    }

    /// Answers nothing any more: the guest's memory goes.
    pub fn kill(&self) {
        self.core.borrow_mut().state = QueueState::Dead;
    }

    /// Whether no request is left for the next process that serves the ring.
    pub fn is_clean(&self) -> bool {
        let core = self.core.borrow();
        core.repeat.is_empty() && core.free_entries.len() == core.ring.size() as usize
    }

    /// Why nothing is taken any more.
    pub fn broken(&self) -> Option<Broken> {
        match &self.core.borrow().state {
            QueueState::Broken(error) => Some(error.clone()),
            _ => None,
        }
    }

    /// Takes nothing any more, for this reason.
    pub fn break_down(&self, error: Broken) {
        self.core.borrow_mut().break_down(error);
    }

    /// Where the ring stands.
    pub fn counters(&self) -> RingState {
        self.core.borrow().ring.counters()
    }

    /// Requests taken so far.
    pub fn requests(&self) -> u64 {
        self.core.borrow().counts.requests
    }

    /// Notifications taken so far.
    pub fn kicks(&self) -> u64 {
        self.core.borrow().counts.kicks_in
    }

    /// Everything, for people.
    pub fn report(&self, now_ns: u64, oldest_max: usize) -> QueueReport {
        let core = self.core.borrow();
        let mut oldest: Vec<UnderWay> = core
            .slots
            .iter()
            .filter(|slot| slot.live && !slot.answered)
            .map(|slot| UnderWay {
                id: slot.request.id,
                op: slot.request.op,
                sector: slot.request.sector,
                sectors: slot.span.len / 512,
                age_ns: now_ns.saturating_sub(slot.taken_ns),
            })
            .collect();
        oldest.sort_unstable_by_key(|request| std::cmp::Reverse(request.age_ns));
        oldest.truncate(oldest_max);
        let counts = QueueCounts {
            moves: core.mover.counts,
            persistent: core.mover.persistent().counts,
            ..core.counts
        };
        let broken = match &core.state {
            QueueState::Broken(error) => Some(error.clone()),
            _ => None,
        };
        QueueReport { counters: core.ring.counters(), in_flight: core.in_flight, oldest, counts, broken }
    }
}
