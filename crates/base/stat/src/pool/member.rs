//! A disk's place at a pool: what it does while pages cannot be had.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use super::layout::{Owner, SLOTS};
use super::ledger::{GRACE_NS, Ledger, Refusal, STARVED_NS, STARVED_TURNS, STUCK_NS};
use super::segment::{Mapping, Place, TakenSlot, take_slot};
use super::{PoolName, owner};
use crate::shm::ShmRoot;

/// A disk at a pool, on the thread that waits for pages.
///
/// Nothing here waits. A disk that is refused waits until [`PoolMember::wake_fd`] is readable, or for [`GRACE_NS`],
/// whichever comes first, and asks again.
#[derive(Debug)]
pub struct PoolMember {
    seat: Arc<PoolSeat>,
    owner: Owner,
    /// What others write a byte into to wake this one.
    bell: File,
    /// The bells of others, opened when they are first rung.
    bells: Vec<Option<File>>,
    observed: Observed,
    /// When it looked for dead processes last, and the slot to go on from.
    inspected: (u64, usize),
}

/// A disk's slot, for all threads of the disk. Leaving, which is dropping the last, gives back what the disk holds; the
/// last disk to leave removes the pool.
#[derive(Debug)]
pub struct PoolSeat {
    ledger: Ledger<Mapping>,
    place: Place,
    slot: usize,
}

impl PoolSeat {
    /// Takes pages if they are free and no disk waits for any, this one included; gives how many, as
    /// [`PoolMember::take`].
    #[inline]
    pub fn take_free(&self, pages: u32) -> Option<u32> {
        let pages = pages.min(self.ledger.total);
        (!self.ledger.any_waits() && self.ledger.take(self.slot, pages)).then_some(pages)
    }

    /// Gives pages back; whether a disk waits for some. Then [`PoolMember::wake_next`] is due, and this disk's own
    /// requests may go on.
    #[inline]
    pub fn give(&self, pages: u32) -> bool {
        self.ledger.give(self.slot, pages);
        self.ledger.any_waits()
    }
}

impl Drop for PoolSeat {
    fn drop(&mut self) {
        self.ledger.leave(self.slot);
        self.place.leave(&self.ledger);
    }
}

/// How often a disk that has to share looks for dead processes among [`INSPECTED`] of the others, one lot after the
/// other: where no disk waits long, nothing else finds their pages.
const INSPECT_NS: u64 = 1_000_000_000;
const INSPECTED: usize = 16;

/// Gives back what dead processes hold, of all slots or of one; whether there were any.
pub(super) type Reclaim<'a, M> = dyn Fn(&Ledger<M>, Option<usize>) -> bool + 'a;

/// What a disk that waits remembers of the others.
#[derive(Debug, Default)]
pub(super) struct Observed {
    since_ns: Option<u64>,
    looked_ns: u64,
    /// The pool's last change, and since when it is that.
    changed: (u64, u64),
    /// Pages that were out when nothing had changed for so long that they are not counted on.
    lost: u32,
    /// The slot that goes first and could, or waits for itself; its progress when that was seen first, and the time.
    behind: Option<(usize, u64, u64)>,
    /// Slots that were woken and did not look, or wait for themselves, with the progress they had made: passed until
    /// they make more.
    passed: Vec<(usize, u64)>,
}

/// Takes a place at the pool of that name for the disk of that minor number of this process. The first one makes the
/// pool, of `pages` pages or [`PAGES_DEFAULT`](super::PAGES_DEFAULT); later ones must agree.
///
/// # Errors
/// The pool exists with another number of pages, is full of disks, has another layout, or cannot be made.
pub fn join(root: &ShmRoot, name: &PoolName, pages: Option<u32>, minor: u32) -> io::Result<PoolMember> {
    take_slot(root, name, pages, minor).map(PoolMember::new)
}

impl PoolMember {
    fn new(taken: TakenSlot) -> Self {
        let TakenSlot { ledger, place, slot, owner, bell } = taken;
        let bells = (0..SLOTS).map(|_| None).collect();
        let mut member = Self {
            seat: Arc::new(PoolSeat { ledger, place, slot }),
            owner,
            bell,
            bells,
            observed: Observed::default(),
            inspected: (0, 0),
        };
        member.quiet();
        member
    }

    /// The disk's slot, for its other threads.
    pub fn seat(&self) -> Arc<PoolSeat> {
        Arc::clone(&self.seat)
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        self.seat.place.name()
    }

    /// Pages of the pool.
    pub fn total(&self) -> u32 {
        self.seat.ledger.total
    }

    /// Pages that this disk holds.
    pub fn held(&self) -> u32 {
        self.seat.ledger.settle();
        self.seat.ledger.share(self.seat.slot).held()
    }

    /// Takes pages for a request; gives how many were taken, which are to be given back. A request larger than the
    /// pool takes all of it. `None`: not now; the disk counts as waiting until it asks again with success, or
    /// [`PoolMember::stop_waiting`]. `now_ns` is any clock that never goes back.
    #[inline]
    pub fn take(&mut self, pages: u32, now_ns: u64) -> Option<u32> {
        let pages = pages.min(self.seat.ledger.total);
        if self.observed.since_ns.is_none()
            && !self.seat.ledger.others_wait(self.seat.slot)
            && self.seat.ledger.take(self.seat.slot, pages)
        {
            return Some(pages);
        }
        let owner = self.owner;
        let (inspected_ns, from) = self.inspected;
        if now_ns.saturating_sub(inspected_ns) >= INSPECT_NS {
            self.inspected = (now_ns, self.seat.ledger.reclaim_some(from, INSPECTED, owner, &owner::is_dead));
        }
        let reclaim = |ledger: &Ledger<Mapping>, one| match one {
            Some(slot) => ledger.reclaim_at(slot, owner, &owner::is_dead),
            None => ledger.reclaim(owner, &owner::is_dead),
        };
        let (ledger, slot) = (&self.seat.ledger, self.seat.slot);
        let taken = self.observed.contend(ledger, slot, pages, now_ns, &reclaim);
        // Also where it has to wait: a process may have died between giving pages back and waking the next.
        self.wake_next();
        taken
    }

    /// Gives pages of a request back, and wakes the next disk that waits for them.
    #[inline]
    pub fn give(&mut self, pages: u32) {
        if pages > 0 {
            self.seat.ledger.give(self.seat.slot, pages);
            self.wake_next();
        }
    }

    /// Whether this disk waits for pages.
    pub fn is_waiting(&self) -> bool {
        self.observed.since_ns.is_some()
    }

    /// The request that waited is gone.
    pub fn stop_waiting(&mut self) {
        if self.observed.stop(&self.seat.ledger, self.seat.slot) {
            self.wake_next();
        }
    }

    /// Readable when this disk was woken.
    pub fn wake_fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    /// Forgets the wake-ups so far; to be called before asking again.
    pub fn quiet(&mut self) {
        let mut bytes = [0; 64];
        // It does not block: the end of what is there, or an error, is nothing to read.
        while matches!(self.bell.read(&mut bytes), Ok(count) if count == bytes.len()) {}
    }

    /// Wakes the next disk that waits and finds its pages.
    pub fn wake_next(&mut self) {
        // Each is woken once until it looks, so this ends; an unreachable one is dead, and cleaned up in time.
        loop {
            let passed = |other: usize| self.observed.passes_by(&self.seat.ledger, other);
            let Some(slot) = self.seat.ledger.next_to_wake(self.seat.slot, &passed) else { return };
            if self.ring(slot).is_ok() {
                return;
            }
        }
    }

    fn ring(&mut self, slot: usize) -> io::Result<()> {
        let place = &self.seat.place;
        let bell = match &mut self.bells[slot] {
            Some(bell) => bell,
            none => none.insert(place.open_bell_of_other(slot)?),
        };
        match bell.write(&[1]) {
            // Full of wake-ups that were not read yet: as good as one.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            other => other.map(drop),
        }
    }
}

impl Drop for PoolMember {
    fn drop(&mut self) {
        // No other thread of this disk rings. What other threads still hold goes back with the last of them.
        let held = self.held();
        if Arc::strong_count(&self.seat) == 1 {
            self.seat.ledger.give(self.seat.slot, held);
        }
        self.stop_waiting();
        self.wake_next();
    }
}

impl Observed {
    /// The way of a request that is not alone. Apart from [`PoolMember`] so that it is tested without files.
    pub(super) fn contend<M: super::ledger::Memory>(
        &mut self,
        ledger: &Ledger<M>,
        slot: usize,
        pages: u32,
        now_ns: u64,
        reclaim: &Reclaim<'_, M>,
    ) -> Option<u32> {
        use super::layout::at;
        let free = self.look(ledger, now_ns);
        let pages = pages.min(ledger.total).min((ledger.total - self.lost).max(1));
        if self.since_ns.is_none() {
            ledger.touch(slot);
        }
        ledger.memory.store(at::woken(slot), 0);
        // Twice: once more after it was said that this disk waits, because a disk is not woken before it has said so.
        let mut said = self.since_ns.is_some() && ledger.want(slot) == pages;
        let mut reclaimed = false;
        loop {
            let contended = ledger.others_wait(slot);
            if !contended {
                self.passed.clear();
            }
            let passed = |other: usize| self.passes_by(ledger, other);
            let refusal = match ledger.may_take(slot, pages, &passed) {
                Ok(()) if ledger.take(slot, pages) => {
                    if contended || said {
                        ledger.charge(slot, pages);
                    }
                    self.stop(ledger, slot);
                    return Some(pages);
                }
                Ok(()) => Refusal::Empty,
                Err(refusal) => refusal,
            };
            if !said {
                said = true;
                ledger.set_waiting(slot, Some(pages));
                if self.since_ns.is_none() {
                    (self.since_ns, self.looked_ns) = (Some(now_ns), now_ns);
                }
                continue;
            }
            if let Refusal::After(other) = refusal
                && self.passes(ledger, other, now_ns)
            {
                continue;
            }
            // Looking for the dead is reading a file for each disk: the first in turn looks at all, the others at the
            // one before them, and none looks while pages come and go.
            let still_ns = now_ns.saturating_sub(self.looked_ns.max(self.changed.1));
            if still_ns >= GRACE_NS && !reclaimed {
                self.looked_ns = now_ns;
                reclaimed = true;
                let (one, is_first) = match refusal {
                    Refusal::After(other) => (Some(other), false),
                    Refusal::Empty | Refusal::Part => (None, true),
                };
                let found = reclaim(ledger, one);
                if is_first {
                    ledger.recount(slot);
                }
                if found || refusal == Refusal::Empty {
                    continue;
                }
            }
            if ledger.share(slot).held() > 0 || !self.is_starved(now_ns, refusal) {
                return None;
            }
            self.lost = ledger.total - free;
            // What is left, unless another has it by now.
            let left = free.min(pages);
            let pages = if left > 0 && ledger.take(slot, left) { left } else { 0 };
            ledger.charge(slot, pages.max(1));
            self.stop(ledger, slot);
            return Some(pages);
        }
    }

    /// Looks whether the pool has changed; gives the free pages.
    fn look<M: super::ledger::Memory>(&mut self, ledger: &Ledger<M>, now_ns: u64) -> u32 {
        let state = ledger.settle();
        if self.changed.0 != state.0 || self.since_ns.is_none() {
            self.changed = (state.0, now_ns);
        }
        let free = state.free().min(ledger.total);
        self.lost = self.lost.min(ledger.total - free);
        free
    }

    /// Whether it has waited so long, and nothing has changed for so long, that it goes without its pages.
    fn is_starved(&self, now_ns: u64, refusal: Refusal) -> bool {
        let Some(since_ns) = self.since_ns else { return false };
        let still_ns = now_ns.saturating_sub(self.changed.1.max(since_ns));
        let turns = if matches!(refusal, Refusal::After(_)) { STARVED_TURNS } else { 1 };
        still_ns >= STARVED_NS * turns
    }

    /// Whether `other` is passed: it has made no progress since.
    pub(super) fn passes_by<M: super::ledger::Memory>(&self, ledger: &Ledger<M>, other: usize) -> bool {
        let is_passed = |(slot, then): &(usize, u64)| *slot == other && ledger.progress(other) == *then;
        self.passed.iter().any(is_passed) && (ledger.is_woken(other) || ledger.has_its_part(other))
    }

    /// Notes that `other` goes first; true once it has been able to for too long, or has waited for itself too long.
    fn passes<M: super::ledger::Memory>(&mut self, ledger: &Ledger<M>, other: usize, now_ns: u64) -> bool {
        let may_take_ns = match (ledger.is_woken(other), ledger.has_its_part(other)) {
            (true, _) => GRACE_NS,
            (false, true) => STUCK_NS,
            // It waits for pages of others, as this disk does.
            (false, false) => {
                self.behind = None;
                return false;
            }
        };
        let progress = ledger.progress(other);
        match self.behind {
            Some((slot, then, since_ns)) if (slot, then) == (other, progress) => {
                if now_ns.saturating_sub(since_ns) < may_take_ns {
                    return false;
                }
                self.behind = None;
                self.passed.retain(|(slot, _)| *slot != other);
                self.passed.push((other, progress));
                true
            }
            _ => {
                self.behind = Some((other, progress, now_ns));
                false
            }
        }
    }

    /// Ends a wait; whether there was one.
    pub(super) fn stop<M: super::ledger::Memory>(&mut self, ledger: &Ledger<M>, slot: usize) -> bool {
        self.behind = None;
        let waited = self.since_ns.take().is_some();
        if waited {
            ledger.set_waiting(slot, None);
        }
        waited
    }
}
