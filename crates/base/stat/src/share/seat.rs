//! A disk's place at its device: what the path of a request counts and asks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::control::{Control, PIECE_COST, PIECE_MIN, Sample, UNLIMITED, WEIGHT_MAX, flag};
use super::layout::at;
use super::segment::{Mapping, Place, take_slot};
use super::{DeviceName, PERIOD_NS, WEIGHT_DEFAULT};
use crate::pool::layout::Owner;
use crate::shm::ShmRoot;

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
    /// Bytes that it may have in flight now, if they are limited.
    pub limit: Option<u64>,
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

    /// How many of `rest` bytes may go to the device now as one piece; `None`: none, until a piece ends.
    pub fn piece(&self, rest: u64) -> Option<u64> {
        let (limit, in_flight) = (self.limit.load(Relaxed), self.in_flight.load(Relaxed));
        // Whole requests where they fit: pieces of them would cost the device more.
        let piece = rest.min(limit.max(PIECE_MIN) / 4096 * 4096);
        (in_flight == 0 || in_flight.saturating_add(piece) <= limit).then_some(piece)
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
            self.counted_ns.store(now_ns, Relaxed);
        }
        if before + bytes > self.peak.load(Relaxed) {
            self.peak.store(before + bytes, Relaxed);
        }
    }

    /// It is done; it went at `began_ns`.
    #[inline]
    pub fn end(&self, bytes: u64, began_ns: u64, now_ns: u64) {
        // A piece may have begun at another seat, before the disk moved to other images.
        let less = |in_flight: u64| Some(in_flight.saturating_sub(bytes));
        let _ = self.in_flight.fetch_update(Relaxed, Relaxed, less);
        let counted = self.counted_ns.swap(now_ns, Relaxed);
        let busy = self.busy_ns.fetch_add(now_ns.saturating_sub(counted), Relaxed);
        let cost = self.cost.fetch_add(bytes + PIECE_COST, Relaxed).wrapping_add(bytes + PIECE_COST);
        let moved = self.bytes.fetch_add(bytes, Relaxed).wrapping_add(bytes);
        self.latency_ns.fetch_add(now_ns.saturating_sub(began_ns), Relaxed);
        self.pieces.fetch_add(1, Relaxed);
        self.memory.store(at::busy(self.slot), busy.wrapping_add(now_ns.saturating_sub(counted)));
        self.memory.store(at::cost(self.slot), cost);
        self.memory.store(at::bytes(self.slot), moved);
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
            bytes: zero(),
            busy_ns: zero(),
            counted_ns: zero(),
            latency_ns: zero(),
            pieces: zero(),
            due_ns: zero(),
            limit: AtomicU64::new(UNLIMITED),
            competes: zero(),
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

    /// Sets what the disk counts, 1 to [`WEIGHT_MAX`], and the mean latency of its pieces at the device that it shall
    /// have, in microseconds; 0: none.
    pub fn set(&mut self, weight: u32, latency_us: u64) {
        self.weight = weight.clamp(1, WEIGHT_MAX);
        self.target_ns = latency_us.saturating_mul(1000);
        self.seat.memory.store(at::weight(self.seat.slot), self.weight.into());
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
        seat.due_ns.store((now_ns / PERIOD_NS + 1) * PERIOD_NS, Relaxed);
        let (latency, pieces) = (seat.latency_ns.swap(0, Relaxed), seat.pieces.swap(0, Relaxed));
        if let Some(mean) = latency.checked_div(pieces) {
            self.is_late = self.target_ns > 0 && mean > self.target_ns;
        }
        let peak = seat.peak.swap(seat.in_flight(), Relaxed);
        self.publish_flags();
        let used = (seat.memory.load(at::USED) as usize).min(super::layout::SLOTS);
        self.samples.clear();
        self.samples.extend((0..used).map(|slot| seat.memory.sample(slot)));
        self.control.look(now_ns, &self.samples, seat.slot, peak);
        let limit = self.control.limit();
        let before = seat.limit.swap(limit, Relaxed);
        seat.competes.store(self.control.competes().into(), Relaxed);
        self.publish_flags();
        limit > before
    }

    fn publish_flags(&self) {
        let late = if self.is_late { flag::LATE } else { 0 };
        let limited = if self.control.limit() == UNLIMITED { 0 } else { flag::LIMITED };
        self.seat.memory.store(at::flags(self.seat.slot), late | limited);
    }

    /// Sets where the counters begin.
    #[cfg(test)]
    pub(super) fn start_at(&self, count: u64) {
        self.seat.cost.store(count, Relaxed);
        self.seat.bytes.store(count, Relaxed);
        self.seat.busy_ns.store(count, Relaxed);
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
        }
    }
}
