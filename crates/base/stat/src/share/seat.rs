//! A disk's place at its device: what the path of a request counts and asks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::time::{ClockId, clock_gettime};

use super::control::{Control, UNLIMITED};
use super::layout::at;
use super::sample::{PIECE_COST, PIECE_MIN, Sample, WEIGHT_MAX, flag};
use super::segment::{Mapping, Place, take_slot};
use super::{DeviceName, PERIOD_NS, WEIGHT_DEFAULT};
use crate::pool::layout::Owner;
use crate::shm::ShmRoot;

/// A guest that takes longer for its next request is not waited for longer.
const PATIENCE_NS: u64 = 3_000_000;
/// It is waited for as long as it takes on average, times this.
const THINKS: u64 = 4;
/// Longer is a pause and not part of the average.
const THINK_MAX_NS: u64 = 4 * PATIENCE_NS;

/// What a disk knows of its device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShareFacts {
    /// The device's name.
    pub device: String,
    /// Disks that share it, this one included.
    pub disks: u64,
    /// The disk's weight.
    pub weight: u32,
    /// Its latency target in microseconds; 0: none.
    pub latency_us: u64,
    /// Bytes that it may have in flight now, if another disk's latency limits them.
    pub limit: Option<u64>,
    /// How much it may send beside the one that is furthest behind, by weight, in 100, while others compete: 100 is
    /// even.
    pub even_percent: Option<u64>,
    /// Pieces that had to wait, and how long, together, in nanoseconds.
    pub waited: u64,
    pub waited_ns: u64,
}

/// A disk's slot, for all of its threads. Every number is written by threads of this disk alone; two that write at once
/// may lose a count, which changes a rate by less than its own noise.
#[derive(Debug)]
pub struct ShareSeat {
    memory: Mapping,
    place: Place,
    slot: usize,
    in_flight: AtomicU64,
    waiting: AtomicU64,
    peak: AtomicU64,
    cost: AtomicU64,
    /// How long the guest takes for its next request, on average.
    think_ns: AtomicU64,
    bytes: AtomicU64,
    busy_ns: AtomicU64,
    /// Up to when `busy_ns` has been counted.
    counted_ns: AtomicU64,
    /// Latencies since the last look: their sum and number.
    latency_ns: AtomicU64,
    pieces: AtomicU64,
    /// When to look again.
    due_ns: AtomicU64,
    limit: AtomicU64,
    competes: AtomicU64,
    /// What the host's clock shows more than that of this process.
    ahead_ns: AtomicU64,
}

impl ShareSeat {
    /// Whether another disk has a slot at this device: the one load that this costs a disk that is alone.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.memory.load(at::MEMBERS) > 1
    }

    /// Whether other disks compete: requests go in pieces, by the thread that owns the disk.
    #[inline]
    pub fn competes(&self) -> bool {
        self.competes.load(Relaxed) != 0
    }

    /// A time of this process by the clock that all processes of the host have in common.
    fn of_host(&self, now_ns: u64) -> u64 {
        now_ns.wrapping_add(self.ahead_ns.load(Relaxed))
    }

    /// Whether the disk is to look at the others.
    #[inline]
    pub fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.due_ns.load(Relaxed)
    }

    /// [`Self::is_due`], for one caller in a period.
    pub fn take_due(&self, now_ns: u64) -> bool {
        let due = self.due_ns.load(Relaxed);
        now_ns >= due
            && self.due_ns.compare_exchange(due, now_ns.saturating_add(PERIOD_NS), Relaxed, Relaxed).is_ok()
    }

    /// A piece of a request has to wait, for [`Self::waited`].
    pub fn waits(&self, now_ns: u64) {
        if self.waiting.fetch_add(1, Relaxed) == 0 && self.in_flight.load(Relaxed) == 0 {
            self.counted_ns.store(now_ns, Relaxed);
        }
    }

    /// It waits no more.
    pub fn waited(&self) {
        self.waiting.fetch_sub(1, Relaxed);
    }

    /// A piece goes to the device.
    #[inline]
    pub fn begin(&self, bytes: u64, now_ns: u64) {
        let before = self.in_flight.fetch_add(bytes, Relaxed);
        if before == 0 && self.waiting.load(Relaxed) == 0 {
            let thought = now_ns.saturating_sub(self.counted_ns.swap(now_ns, Relaxed)).min(THINK_MAX_NS);
            let mean = self.think_ns.load(Relaxed);
            self.think_ns.store(mean - mean / 8 + thought / 8, Relaxed);
            self.memory.store(at::until(self.slot), u64::MAX);
        }
        if before + bytes > self.peak.load(Relaxed) {
            self.peak.store(before + bytes, Relaxed);
        }
        let cost = self.cost.fetch_add(bytes + PIECE_COST, Relaxed).wrapping_add(bytes + PIECE_COST);
        self.memory.store(at::cost(self.slot), cost);
    }

    /// It is done; it went at `began_ns`.
    #[inline]
    pub fn end(&self, bytes: u64, began_ns: u64, now_ns: u64) {
        // A piece may have begun at another seat, before the disk moved to other images.
        let less = |in_flight: u64| Some(in_flight.saturating_sub(bytes));
        let before = self.in_flight.fetch_update(Relaxed, Relaxed, less).unwrap_or(0);
        let counted = self.counted_ns.swap(now_ns, Relaxed);
        let busy = self.busy_ns.fetch_add(now_ns.saturating_sub(counted), Relaxed);
        let moved = self.bytes.fetch_add(bytes, Relaxed).wrapping_add(bytes);
        self.latency_ns.fetch_add(now_ns.saturating_sub(began_ns), Relaxed);
        self.pieces.fetch_add(1, Relaxed);
        self.memory.store(at::busy(self.slot), busy.wrapping_add(now_ns.saturating_sub(counted)));
        self.memory.store(at::bytes(self.slot), moved);
        if before <= bytes && self.waiting.load(Relaxed) == 0 {
            let patience = self.think_ns.load(Relaxed).saturating_mul(THINKS).min(PATIENCE_NS);
            self.memory.store(at::until(self.slot), self.of_host(now_ns).saturating_add(patience));
        }
    }

    /// Bytes at the device.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }
}

impl Drop for ShareSeat {
    fn drop(&mut self) {
        self.place.leave(&self.memory, self.slot);
    }
}

/// A disk's place at its device, for the thread that owns the disk.
#[derive(Debug)]
pub struct ShareMember {
    seat: Arc<ShareSeat>,
    control: Control,
    samples: Vec<Sample>,
    weight: u32,
    target_ns: u64,
    is_late: bool,
    waits: (u64, u64),
}

impl ShareMember {
    fn new(memory: Mapping, place: Place, slot: usize) -> Self {
        let zero = AtomicU64::default;
        let seat = ShareSeat {
            memory,
            place,
            slot,
            in_flight: zero(),
            waiting: zero(),
            peak: zero(),
            cost: zero(),
            think_ns: zero(),
            bytes: zero(),
            busy_ns: zero(),
            counted_ns: zero(),
            latency_ns: zero(),
            pieces: zero(),
            due_ns: zero(),
            limit: AtomicU64::new(UNLIMITED),
            competes: zero(),
            ahead_ns: zero(),
        };
        Self {
            seat: Arc::new(seat),
            control: Control::default(),
            samples: Vec::new(),
            weight: WEIGHT_DEFAULT,
            target_ns: 0,
            is_late: false,
            waits: (0, 0),
        }
    }

    /// The slot, for every thread of the disk.
    pub fn seat(&self) -> Arc<ShareSeat> {
        Arc::clone(&self.seat)
    }

    /// Says what time it is by the clock of this process, which begins with the process.
    pub fn set_clock(&self, now_ns: u64) {
        let host = clock_gettime(ClockId::Monotonic);
        let host = u64::try_from(host.tv_sec).unwrap_or(0) * 1_000_000_000
            + u64::try_from(host.tv_nsec).unwrap_or(0);
        self.seat.ahead_ns.store(host.wrapping_sub(now_ns), Relaxed);
    }

    /// Sets what the disk counts, 1 to [`WEIGHT_MAX`], and the mean latency of its pieces at the device that it shall
    /// have, in microseconds; 0: none.
    pub fn set(&mut self, weight: u32, latency_us: u64) {
        self.weight = weight.clamp(1, WEIGHT_MAX);
        self.target_ns = latency_us.saturating_mul(1000);
        self.seat.memory.store(at::weight(self.seat.slot), self.weight.into());
    }

    /// How many of `rest` bytes may go to the device now as one piece; `None`: none, until a piece of this disk ends.
    pub fn piece(&mut self, rest: u64, now_ns: u64) -> Option<u64> {
        let seat = &*self.seat;
        let (limit, in_flight) = (seat.limit.load(Relaxed), seat.in_flight());
        // Whole requests where they fit: pieces of them would cost the device more.
        let piece = rest.min(limit.max(PIECE_MIN) / 4096 * 4096);
        let fits = |piece: u64| (in_flight == 0 || in_flight.saturating_add(piece) <= limit).then_some(piece);
        let own_cost = seat.cost.load(Relaxed);
        if !self.control.is_even() {
            self.control.leads.level(own_cost);
            return fits(piece);
        }
        let (memory, leads) = (&seat.memory, &mut self.control.leads);
        let room = leads.room(piece + PIECE_COST, (own_cost, self.weight), seat.of_host(now_ns), |slot| {
            memory.sample(slot)
        });
        let floor = leads.floor();
        if in_flight > 0 && room < piece.min(floor) {
            leads.block();
            return None;
        }
        fits(piece.min(room.max(floor).min(leads.piece_max()) / 4096 * 4096))
    }

    /// A piece waited.
    pub fn add_wait(&mut self, ns: u64) {
        let (pieces, time_ns) = self.waits;
        self.waits = (pieces + 1, time_ns.wrapping_add(ns));
    }

    /// Looks at the other disks of the device, and whether more may go now.
    pub fn look(&mut self, now_ns: u64) -> bool {
        let seat = &*self.seat;
        // The next look is in the next period by the clock that all have in common.
        let host_ns = seat.of_host(now_ns);
        seat.due_ns.store(now_ns.saturating_add(PERIOD_NS - host_ns % PERIOD_NS), Relaxed);
        let (latency, pieces) = (seat.latency_ns.swap(0, Relaxed), seat.pieces.swap(0, Relaxed));
        if let Some(mean) = latency.checked_div(pieces) {
            self.is_late = self.target_ns > 0 && mean > self.target_ns;
        }
        let peak = seat.peak.swap(seat.in_flight(), Relaxed);
        self.publish_flags();
        let used = (seat.memory.load(at::USED) as usize).min(super::layout::SLOTS);
        self.samples.clear();
        self.samples.extend((0..used).map(|slot| seat.memory.sample(slot)));
        self.control.look(host_ns, &self.samples, seat.slot, peak);
        let limit = self.control.limit();
        let before = seat.limit.swap(limit, Relaxed);
        seat.competes.store(self.control.competes().into(), Relaxed);
        self.publish_flags();
        limit > before || !self.control.is_even()
    }

    fn publish_flags(&self) {
        let late = if self.is_late { flag::LATE } else { 0 };
        self.seat.memory.store(at::flags(self.seat.slot), late);
    }

    /// Sets where the counters begin.
    #[cfg(test)]
    pub(super) fn start_at(&self, count: u64) {
        self.seat.cost.store(count, Relaxed);
        self.seat.bytes.store(count, Relaxed);
        self.seat.busy_ns.store(count, Relaxed);
    }

    /// Tells others this: cost, bytes, busy, weight, flags, until.
    #[cfg(test)]
    pub(super) fn lie(&self, words: [u64; 6]) {
        let slot = self.seat.slot;
        let places = [at::cost, at::bytes, at::busy, at::weight, at::flags, at::until];
        for (place, word) in places.into_iter().zip(words) {
            self.seat.memory.store(place(slot), word);
        }
    }

    /// Up to when others wait for it.
    #[cfg(test)]
    pub(super) fn until(&self) -> u64 {
        self.seat.memory.load(at::until(self.seat.slot))
    }

    /// What others read of it.
    #[cfg(test)]
    pub(super) fn flags(&self) -> u64 {
        self.seat.memory.load(at::flags(self.seat.slot))
    }

    /// What is known, for reports.
    pub fn facts(&self) -> ShareFacts {
        let limit = self.seat.limit.load(Relaxed);
        ShareFacts {
            device: self.seat.place.name().to_owned(),
            disks: self.seat.memory.load(at::MEMBERS),
            weight: self.weight,
            latency_us: self.target_ns / 1000,
            limit: (limit != UNLIMITED).then_some(limit),
            even_percent: self.control.competes().then(|| self.control.leads.largest()),
            waited: self.waits.0,
            waited_ns: self.waits.1,
        }
    }
}

/// Takes a place at the device of that name for the disk of that minor number of this process.
///
/// # Errors
/// The segment is full of disks, has another layout, or cannot be made.
pub fn join(root: &ShmRoot, name: &DeviceName, minor: u32) -> io::Result<ShareMember> {
    let (memory, place, slot) = take_slot(root, name, minor)?;
    Ok(ShareMember::new(memory, place, slot))
}

impl Mapping {
    /// What a slot says.
    fn sample(&self, slot: usize) -> Sample {
        Sample {
            owner: Owner(self.load(at::owner(slot))).0 ^ self.load(at::minor(slot)).rotate_left(20),
            cost: self.load(at::cost(slot)),
            bytes: self.load(at::bytes(slot)),
            busy_ns: self.load(at::busy(slot)),
            weight: self.load(at::weight(slot)).min(WEIGHT_MAX.into()) as u32,
            flags: self.load(at::flags(slot)),
            until_ns: self.load(at::until(slot)),
        }
    }
}
