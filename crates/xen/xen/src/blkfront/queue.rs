//! A queue of a front end: slots to fill, a ring to put them into.

use std::collections::VecDeque;
use std::io;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use tapio_load::Ring;
use tapio_types::RingState;

use super::RingInvitation;
use super::options::FrontOptions;
use super::slots::Slots;
use crate::blkif::{Abi, DISCARD_SECURE, FrontRing, Request, RingError, Slot, op, status};
use crate::channel::Channel;
use crate::domain::{GrantRef, PAGE_LEN, Rights};
use crate::double::{DoubleVm, RevokeError, Wire};

/// In the id of a request that the caller made itself ([`FrontQueue::submit_raw`]).
pub const RAW_ID: u64 = 1 << 63;

/// What to ask of a disk. Places and lengths in bytes, multiples of the sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read into the first bytes of the slot's buffer.
    Read {
        /// Where on the disk.
        at: u64,
        /// How much, at least a sector.
        len: u32,
    },
    /// Write the first bytes of the slot's buffer.
    Write {
        /// Where on the disk.
        at: u64,
        /// How much, at least a sector.
        len: u32,
    },
    /// Write, after all that was written before and before all that is written after. Without data: that alone.
    Barrier {
        /// Where on the disk.
        at: u64,
        /// How much; at most eleven segments.
        len: u32,
    },
    /// Make all that was answered durable.
    Flush,
    /// Forget what is there.
    Discard {
        /// Where on the disk.
        at: u64,
        /// How much.
        len: u64,
        /// So that the data cannot be recovered.
        secure: bool,
    },
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// As [`FrontQueue::submit`] gave it.
    pub id: u64,
    /// The slot that is free again; `None` for a request that was made by hand.
    pub slot: Option<u32>,
    /// The operation, as the back end says.
    pub op: u8,
    /// [`status`].
    pub status: i16,
}

/// Memory of a ring.
#[derive(Debug)]
struct Area {
    page: u32,
    pages: u32,
    grants: Vec<GrantRef>,
}

impl Area {
    fn new(vm: &DoubleVm, pages: u32) -> io::Result<Self> {
        let none = || io::Error::new(io::ErrorKind::OutOfMemory, "the domain has no pages left");
        Ok(Self { page: vm.take_pages(pages).ok_or_else(none)?, pages, grants: Vec::new() })
    }

    fn bounds(&self, vm: &DoubleVm) -> (NonNull<u8>, usize) {
        (vm.page(self.page), self.pages as usize * PAGE_LEN)
    }

    /// Empties the pages and grants them anew; none may be in use.
    fn renew(&mut self, vm: &DoubleVm, back_end: u32) -> io::Result<()> {
        while let Some(grant) = self.grants.last() {
            if let Err(RevokeError::InUse(_)) = vm.revoke(*grant) {
                let why = "the back end still has the ring mapped; it must let go before a new one is made";
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
            }
            self.grants.pop();
        }
        for page in self.page..self.page + self.pages {
            vm.write(page, 0, &[0; PAGE_LEN]);
            self.grants.push(vm.grant(page, Rights::Write, back_end)?);
        }
        Ok(())
    }
}

/// A queue. Belongs to one thread at a time.
#[derive(Debug)]
pub struct FrontQueue {
    vm: DoubleVm,
    abi: Abi,
    back_end: u32,
    sector_size: u32,
    request_len_max: u32,
    areas: (Area, Option<Area>),
    ring: FrontRing,
    slots: Slots,
    /// Ours, and the one that back ends are given copies of.
    channel: Channel,
    theirs: Wire,
    /// Requests of a former ring that do not fit into this one yet.
    again: VecDeque<Request>,
    /// How often the back end was notified.
    pub kicks: u64,
    /// How often it notified us.
    pub wakes: u64,
}

fn broken(error: RingError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn ring_in(vm: &DoubleVm, areas: &(Area, Option<Area>), abi: Abi) -> io::Result<FrontRing> {
    let requests = areas.0.bounds(vm);
    // SAFETY: the queue keeps `vm`, and the areas are taken from it for the ring alone.
    let ring = unsafe {
        match &areas.1 {
            Some(responses) => FrontRing::new_split(requests, responses.bounds(vm)),
            None => FrontRing::new(requests.0, requests.1, abi),
        }
    };
    ring.map_err(broken)
}

impl FrontQueue {
    pub(super) fn new(vm: &DoubleVm, options: &FrontOptions) -> io::Result<Self> {
        let mut requests = Area::new(vm, options.ring_pages())?;
        requests.renew(vm, options.back_end)?;
        let mut responses = match options.response_pages() {
            0 => None,
            pages => Some(Area::new(vm, pages)?),
        };
        if let Some(area) = &mut responses {
            area.renew(vm, options.back_end)?;
        }
        let areas = (requests, responses);
        let (ours, theirs) = Wire::pair()?;
        Ok(Self {
            ring: ring_in(vm, &areas, options.abi)?,
            slots: Slots::new(vm, options)?,
            vm: vm.clone(),
            abi: options.abi,
            back_end: options.back_end,
            sector_size: options.sector_size,
            request_len_max: options.request_len_max(),
            areas,
            channel: Channel::Double(ours),
            theirs,
            again: VecDeque::new(),
            kicks: 0,
            wakes: 0,
        })
    }

    /// What a back end must know to serve it.
    ///
    /// # Errors
    /// Too many descriptors are open.
    pub fn invitation(&self) -> io::Result<RingInvitation> {
        Ok(RingInvitation {
            ring: self.areas.0.grants.clone(),
            responses: self.areas.1.as_ref().map_or_else(Vec::new, |area| area.grants.clone()),
            wire: self.theirs.try_clone()?,
        })
    }

    /// Slots that are free.
    pub fn room(&self) -> usize {
        self.slots.room()
    }

    /// Requests that have no answer.
    pub fn under_way(&self) -> u32 {
        self.ring.under_way()
    }

    /// The slot that the next [`FrontQueue::submit`] takes.
    pub fn next_slot(&self) -> Option<u32> {
        self.slots.next()
    }

    /// The slot of a request.
    pub fn slot_of(id: u64) -> u32 {
        id as u32
    }

    /// Bytes of the longest request.
    pub fn request_len_max(&self) -> u32 {
        self.request_len_max
    }

    /// The buffer of a slot. Not to be touched while the slot's request is in flight.
    pub fn buffer(&mut self, slot: u32) -> &mut [u8] {
        let len = self.request_len_max as usize;
        // SAFETY: the buffer lies inside this queue's pages, which `self` alone hands out. A back end that writes there
        // without being asked breaks the protocol, and the test that looks sees it.
        unsafe { std::slice::from_raw_parts_mut(self.slots.buffer(slot), len) }
    }

    /// Where the ring stands.
    pub fn counters(&self) -> RingState {
        self.ring.counters()
    }

    /// Grants that could not be taken back when a request was answered, because the back end still had the page mapped.
    pub fn stuck_grants(&self) -> u64 {
        self.slots.stuck
    }

    /// Puts a request into the ring, in the next slot; its id, or `None` when no slot is free or the ring is full. The
    /// back end is woken only by [`FrontQueue::kick`].
    ///
    /// # Errors
    /// No grants are left.
    ///
    /// # Panics
    /// Place or length are no multiples of the sector, or the length is above [`FrontQueue::request_len_max`], or 0.
    pub fn submit(&mut self, command: &Command) -> io::Result<Option<u64>> {
        if self.ring.room() == 0 || self.slots.next().is_none() || !self.again.is_empty() {
            return Ok(None);
        }
        let (op, at, len, rights) = match *command {
            Command::Read { at, len } => (op::READ, at, len, Rights::Write),
            Command::Write { at, len } => (op::WRITE, at, len, Rights::Read),
            Command::Barrier { at, len } => (op::WRITE_BARRIER, at, len, Rights::Read),
            Command::Flush => (op::FLUSH_DISKCACHE, 0, 0, Rights::Read),
            Command::Discard { at, .. } => (op::DISCARD, at, 0, Rights::Read),
        };
        let sector = u64::from(self.sector_size);
        let may_be_empty = !matches!(op, op::READ | op::WRITE);
        assert!(
            at.is_multiple_of(sector) && u64::from(len).is_multiple_of(sector),
            "part of a sector: {command:?}"
        );
        assert!(len <= self.request_len_max && (len > 0 || may_be_empty), "length of {command:?}");
        let mut request = Request { op, sector: at / 512, ..Request::default() };
        if let Command::Discard { len, secure, .. } = *command {
            assert!(len.is_multiple_of(sector), "part of a sector: {command:?}");
            request.discard_sectors = len / 512;
            request.discard_flag = if secure { DISCARD_SECURE } else { 0 };
        }
        self.slots.fill(&mut request, len, rights)?;
        assert!(!request.indirect || op <= op::WRITE, "more segments than a barrier holds: {command:?}");
        let put = self.ring.put(&request.encode(0, self.abi));
        debug_assert!(put, "there was room");
        Ok(Some(request.id))
    }

    /// Puts any bytes into the ring as a request; false when it is full. What answers to it has no slot: the id in the
    /// bytes should have [`RAW_ID`] set.
    pub fn submit_raw(&mut self, bytes: &Slot) -> bool {
        self.ring.put(bytes)
    }

    /// Shows the requests to the back end, and wakes it if it wants that.
    ///
    /// # Errors
    /// The event channel is broken.
    pub fn kick(&mut self) -> io::Result<()> {
        if !self.again.is_empty() {
            self.ask_again();
        }
        if self.ring.publish() {
            self.kicks += 1;
            self.channel.notify()?;
        }
        Ok(())
    }

    /// Wakes the back end whether it wants that or not, as a guest in a storm of interrupts does.
    ///
    /// # Errors
    /// The event channel is broken.
    pub fn kick_always(&mut self) -> io::Result<()> {
        let _ = self.ring.publish();
        self.kicks += 1;
        self.channel.notify()
    }

    /// Whether there are answers: one load.
    #[inline]
    pub fn has_answers(&self) -> bool {
        self.ring.peek()
    }

    /// Waits for an answer; false if none came in time.
    ///
    /// # Errors
    /// The ring or the event channel is broken.
    pub fn wait(&mut self, time: Duration) -> io::Result<bool> {
        let end = Instant::now() + time;
        loop {
            if self.ring.arm(1).map_err(broken)? {
                return Ok(true);
            }
            let left = end.saturating_duration_since(Instant::now());
            let mut poll = libc::pollfd { fd: self.channel.raw_fd(), events: libc::POLLIN, revents: 0 };
            let ms = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
            // SAFETY: one descriptor, of ours.
            let ready = unsafe { libc::poll(&raw mut poll, 1, ms) };
            if ready < 0 {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            self.wakes += u64::from(self.channel.take()?);
            if ready == 0 && end <= Instant::now() {
                return self.ring.look().map(|waiting| waiting > 0).map_err(broken);
            }
        }
    }

    /// Takes the answers that are there; how many.
    ///
    /// # Errors
    /// The back end broke the ring, or answered what was not asked.
    pub fn reap(&mut self, into: &mut Vec<Completion>) -> io::Result<usize> {
        self.reap_each(|completion| into.push(completion))
    }

    fn reap_each(&mut self, mut take: impl FnMut(Completion)) -> io::Result<usize> {
        let waiting = self.ring.look().map_err(broken)?;
        for _ in 0..waiting {
            let Some(answer) = self.ring.take() else { break };
            let slot = if answer.id & RAW_ID != 0 { None } else { self.slots.release(answer.id) };
            if slot.is_none() && answer.id & RAW_ID == 0 {
                let why = format!("the back end answered request {:#x}, which is not in flight", answer.id);
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            take(Completion { id: answer.id, slot, op: answer.op, status: answer.status });
        }
        if !self.again.is_empty() {
            self.kick()?;
        }
        Ok(waiting as usize)
    }

    /// Submits one request, waits for its answer, and gives that: for tests of single requests. Nothing else may be
    /// in flight.
    ///
    /// # Errors
    /// As of the steps; `TimedOut` when no answer comes in a minute.
    pub fn ask(&mut self, command: &Command) -> io::Result<Completion> {
        let id = self.submit(command)?.ok_or_else(|| io::Error::other("no slot is free"))?;
        self.kick()?;
        let mut answers = Vec::new();
        let end = Instant::now() + Duration::from_secs(60);
        while answers.is_empty() {
            if !self.wait(end.saturating_duration_since(Instant::now()))? {
                return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer to {command:?}")));
            }
            self.reap(&mut answers)?;
        }
        match answers[..] {
            [answer] if answer.id == id => Ok(answer),
            _ => {
                Err(io::Error::new(io::ErrorKind::InvalidData, format!("answers {answers:?} to {command:?}")))
            }
        }
    }

    /// Makes the ring anew, as a guest does that was suspended or whose back end is another one now, and asks once more
    /// what has no answer, in the same order; how many requests. The back end must have let go of the old ring
    /// ([`DoubleVm::back_end_died`] for one that was killed), and be invited again; then [`FrontQueue::kick`].
    ///
    /// Requests that were made by hand are forgotten.
    ///
    /// # Errors
    /// The old ring is still in use.
    pub fn reconnect(&mut self) -> io::Result<u32> {
        self.areas.0.renew(&self.vm, self.back_end)?;
        if let Some(area) = &mut self.areas.1 {
            area.renew(&self.vm, self.back_end)?;
        }
        self.ring = ring_in(&self.vm, &self.areas, self.abi)?;
        let _ = self.channel.take()?;
        self.again = self.slots.under_way().into();
        let count = self.again.len() as u32;
        self.ask_again();
        Ok(count)
    }

    /// Puts what is to be asked once more into the ring, as far as it fits: a split ring has fewer slots for requests
    /// than may be in flight.
    #[cold]
    fn ask_again(&mut self) {
        while let Some(request) = self.again.front()
            && self.ring.put(&request.encode(0, self.abi))
        {
            self.again.pop_front();
        }
    }
}

impl Ring for FrontQueue {
    fn room(&self) -> usize {
        Self::room(self)
    }

    fn submit(&mut self, write: bool, at: u64, len: u32) -> io::Result<Option<u32>> {
        let command = if write { Command::Write { at, len } } else { Command::Read { at, len } };
        Ok(Self::submit(self, &command)?.map(Self::slot_of))
    }

    fn kick(&mut self) -> io::Result<()> {
        Self::kick(self)
    }

    fn has_answers(&self) -> bool {
        Self::has_answers(self)
    }

    fn wait(&mut self, time: Duration) -> io::Result<bool> {
        Self::wait(self, time)
    }

    fn reap(&mut self, into: &mut Vec<(u32, bool)>) -> io::Result<()> {
        let take = |one: Completion| into.extend(one.slot.map(|slot| (slot, one.status == status::OKAY)));
        self.reap_each(take).map(drop)
    }

    fn notified(&self) -> (u64, u64) {
        (self.kicks, self.wakes)
    }
}
