//! How many pages each disk has: the algorithm over shared words, without a file and without waiting.
//!
//! **Exact across deaths.** Taking and giving changes two numbers, the free pages and the pages of one disk. The change
//! is written as one word, the [`FreePages`], which has the free pages after it and says what the change was; the next
//! process first carries it over to the disk's [`Share`], which counts its changes so that this happens once. So
//! at every moment free pages and shares (with the last change carried over) make the whole pool, also when a process
//! is killed between any two of its steps. Other processes give back the pages of one that died.
//!
//! **Fair.** While no disk waits, a disk gets what it asks for. While one does, two rules hold. A disk may not hold
//! more than its part, the pool divided by the disks that hold or want something (but one request always). And pages
//! go to the disk that has had the fewest since the waiting began: each disk has a tag, to which its requests add
//! their pages, and the lowest tag among those that wait goes first, so that disks with large and with small requests
//! get the same number of pages, to within one request.
//!
//! **First come, first served, however slow.** The first in turn waits until its pages are free, and all others wait
//! behind it: a large request is not starved by small ones, and a storage that takes long for each request changes
//! nothing about the order. The first is passed only if it was woken, because its pages are there, and does not look
//! for [`GRACE_NS`]: its process is stopped, or its words are nonsense. It is passed until it looks. One that has its
//! part, and waits for requests of its own, is passed if none of them ends for [`STUCK_NS`].
//!
//! **Bounded waits.** If nothing was taken or given for [`STARVED_NS`], the pages that are out are with a storage that
//! is stuck. The first in turn goes on with what is left then, be it nothing, and counts on those pages again when some
//! of them come back.

use super::layout::{FreePages, Owner, PAGES_MAX, SLOTS, Share, at};

/// How long a disk that was woken and does not look may hold up others.
pub const GRACE_NS: u64 = 100_000_000;
/// How long a disk that has its part may hold up others while none of its requests ends.
pub const STUCK_NS: u64 = 5 * GRACE_NS;
/// After this long without any change of the pool the first in turn serves one request without its pages: whatever the
/// segment says, a guest never hangs.
pub const STARVED_NS: u64 = 1_000_000_000;
/// After so many times that long any disk does.
pub const STARVED_TURNS: u64 = 10;
/// A disk that fell behind, because it was passed, does not get back more than this many pools of pages.
const LAG_POOLS: u64 = 1;

/// Words that several processes change.
pub trait Memory {
    /// Reads a word.
    fn load(&self, at: usize) -> u64;
    /// Replaces it.
    fn store(&self, at: usize, value: u64);
    /// Replaces it if it is still `old`.
    fn swap(&self, at: usize, old: u64, new: u64) -> bool;
}

/// The accounts.
#[derive(Debug)]
pub struct Ledger<M> {
    pub memory: M,
    /// Read once, so that damage cannot change it later.
    pub total: u32,
}

/// Why pages cannot be had now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Too few are free.
    Empty,
    /// The disk has its part, and others wait.
    Part,
    /// This slot goes first.
    After(usize),
}

impl<M: Memory> Ledger<M> {
    /// Makes the words of an empty segment those of a pool of `total` pages.
    pub fn format(memory: M, total: u32) -> Self {
        let total = total.clamp(1, PAGES_MAX);
        memory.store(at::TOTAL, total.into());
        memory.store(at::SLOTS, SLOTS as u64);
        memory.store(at::STATE, FreePages::new(total, 0, 0, 0).0);
        memory.store(at::VERSION, super::layout::VERSION);
        memory.store(at::MAGIC, super::layout::MAGIC);
        Self { memory, total }
    }

    /// The slots that were ever used: what there is to look at.
    fn slots(&self) -> std::ops::Range<usize> {
        0..(self.memory.load(at::USED) as usize).min(SLOTS)
    }

    /// Carries the last change over to its share; gives the state after which that is done.
    pub fn settle(&self) -> FreePages {
        loop {
            let state = FreePages(self.memory.load(at::STATE));
            let at = at::share(state.slot());
            let share = Share(self.memory.load(at));
            if !share.lacks(state) || self.memory.swap(at, share.0, share.with(state.delta()).0) {
                return state;
            }
            // Another process has done it, and perhaps more.
        }
    }

    pub fn share(&self, slot: usize) -> Share {
        Share(self.memory.load(at::share(slot)))
    }

    pub fn owner(&self, slot: usize) -> Owner {
        Owner(self.memory.load(at::owner(slot)))
    }

    /// Takes `pages` for `slot` if that many are free.
    pub fn take(&self, slot: usize, pages: u32) -> bool {
        loop {
            let state = self.settle();
            if state.free() < pages {
                return false;
            }
            let count = self.share(slot).next_count();
            let next = FreePages::new(state.free() - pages, pages as i32, slot, count);
            if self.memory.swap(at::STATE, state.0, next.0) {
                self.settle();
                return true;
            }
        }
    }

    /// Gives `pages` of `slot` back.
    pub fn give(&self, slot: usize, pages: u32) {
        loop {
            let state = self.settle();
            let share = self.share(slot);
            let pages = pages.min(share.held());
            let free = (state.free() + pages).min(self.total);
            let next = FreePages::new(free, -(pages as i32), slot, share.next_count());
            if self.memory.swap(at::STATE, state.0, next.0) {
                self.settle();
                return;
            }
        }
    }

    /// Counts the free pages anew from what the disks hold: for a damaged segment. Exact while other processes run:
    /// it changes nothing if anything changed meanwhile.
    pub fn recount(&self, slot: usize) {
        let state = self.settle();
        let held: u64 = self
            .slots()
            .filter(|slot| self.owner(*slot) != Owner::NONE)
            .map(|slot| u64::from(self.share(slot).held()))
            .sum();
        let free = u64::from(self.total).saturating_sub(held) as u32;
        if free != state.free() {
            let next = FreePages::new(free, 0, slot, self.share(slot).next_count());
            if self.memory.swap(at::STATE, state.0, next.0) {
                self.settle();
            }
        }
    }

    /// Takes a free slot for `owner`.
    pub fn join(&self, owner: Owner, minor: u32) -> Option<usize> {
        let slot = (0..SLOTS).find(|slot| {
            self.owner(*slot) == Owner::NONE && self.memory.swap(at::owner(*slot), 0, owner.0)
        })?;
        // Before it holds anything.
        while let used = self.memory.load(at::USED)
            && used <= slot as u64
            && !self.memory.swap(at::USED, used, slot as u64 + 1)
        {}
        self.clear(slot);
        self.memory.store(at::minor(slot), minor.into());
        self.memory.store(at::tag(slot), self.memory.load(at::TIME));
        Some(slot)
    }

    /// Gives a slot back with all that it holds.
    pub fn leave(&self, slot: usize) {
        self.clear(slot);
        self.memory.store(at::owner(slot), 0);
    }

    fn clear(&self, slot: usize) {
        self.set_waiting(slot, None);
        self.memory.store(at::woken(slot), 0);
        self.settle();
        let held = self.share(slot).held();
        if held > 0 {
            self.give(slot, held);
        }
    }

    /// Gives back what dead processes hold; `me` owns their slots first, so that they are found again if `me` dies
    /// doing so. Returns whether there were any.
    pub fn reclaim(&self, me: Owner, is_dead: &dyn Fn(Owner) -> bool) -> bool {
        self.slots().filter(|slot| self.reclaim_at(*slot, me, is_dead)).count() > 0
    }

    /// As [`Ledger::reclaim`], for `count` slots from `first` on, and from slot 0 again behind the last. Gives the slot
    /// to go on from.
    pub fn reclaim_some(
        &self,
        first: usize,
        count: usize,
        me: Owner,
        is_dead: &dyn Fn(Owner) -> bool,
    ) -> usize {
        let used = self.slots().len().max(1);
        for slot in first..first + count.min(used) {
            self.reclaim_at(slot % used, me, is_dead);
        }
        (first + count) % used
    }

    /// As [`Ledger::reclaim`], for one slot.
    pub fn reclaim_at(&self, slot: usize, me: Owner, is_dead: &dyn Fn(Owner) -> bool) -> bool {
        let owner = self.owner(slot);
        let dead = owner != Owner::NONE
            && owner != me
            && is_dead(owner)
            && self.memory.swap(at::owner(slot), owner.0, me.0);
        if dead {
            self.leave(slot);
        }
        dead
    }

    /// Records how many pages the disk waits for, or that it does not wait.
    pub fn set_waiting(&self, slot: usize, want: Option<u32>) {
        if let Some(want) = want {
            self.memory.store(at::want(slot), want.into());
        }
        let (at, bit) = (at::WAITING + slot / 64, 1u64 << (slot % 64));
        loop {
            let word = self.memory.load(at);
            let next = if want.is_some() { word | bit } else { word & !bit };
            if word == next || self.memory.swap(at, word, next) {
                return;
            }
        }
    }

    /// Whether a disk but `me` waits: what is looked at on the path of a request.
    pub fn others_wait(&self, me: usize) -> bool {
        (0..at::WAITING_WORDS).any(|index| {
            let own = if me / 64 == index { 1u64 << (me % 64) } else { 0 };
            self.memory.load(at::WAITING + index) & !own != 0
        })
    }

    /// Whether any disk waits.
    pub fn any_waits(&self) -> bool {
        (0..at::WAITING_WORDS).any(|index| self.memory.load(at::WAITING + index) != 0)
    }

    /// The slots that wait, without `me` and without those that no disk has.
    pub fn waiting(&self, me: usize) -> impl Iterator<Item = usize> + '_ {
        (0..at::WAITING_WORDS).flat_map(move |index| {
            // Those that were never used are nonsense.
            let used = self.slots().end;
            let mut bits = self.memory.load(at::WAITING + index);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(index * 64 + bit)
            })
            .filter(move |slot| *slot != me && *slot < used && self.owner(*slot) != Owner::NONE)
        })
    }

    /// Whether a disk was woken and has not looked since.
    pub fn is_woken(&self, slot: usize) -> bool {
        self.memory.load(at::woken(slot)) != 0
    }

    /// Whether `slot` has its part already, so that it waits for its own requests.
    pub fn has_its_part(&self, slot: usize) -> bool {
        let held = self.share(slot).held();
        // Something is always allowed: a request may be larger than a part.
        held > 0 && held + self.want(slot) > self.part()
    }

    /// The tag by which a slot takes its turn. Tags wrap: what counts is the distance from the virtual time.
    fn lead(&self, slot: usize, time: u64) -> i64 {
        let lead = self.memory.load(at::tag(slot)).wrapping_sub(time) as i64;
        // A tag far from the time is nonsense, or belongs to a disk that was passed long ago.
        let bound = (u64::from(self.total) * LAG_POOLS) as i64;
        lead.clamp(-bound, bound.saturating_mul(2))
    }

    /// A disk that comes from a rest has no claim from before: its tag is now, at least. One that has requests in
    /// flight is at work, though between two of them it may not wait for a moment.
    pub fn touch(&self, slot: usize) {
        if self.share(slot).held() > 0 {
            return;
        }
        let time = self.memory.load(at::TIME);
        let lead = self.lead(slot, time).max(0);
        self.memory.store(at::tag(slot), time.wrapping_add(lead as u64));
    }

    /// Whether `me` may take `pages` now while others wait, but for those that `passed` says to pass.
    pub fn may_take(&self, me: usize, pages: u32, passed: &dyn Fn(usize) -> bool) -> Result<(), Refusal> {
        let time = self.memory.load(at::TIME);
        let mine = (self.lead(me, time), me);
        let mut contended = false;
        let mut first = None;
        for other in self.waiting(me).filter(|other| !passed(*other)) {
            contended = true;
            let turn = (self.lead(other, time), other);
            if turn < first.unwrap_or(mine) {
                first = Some(turn);
            }
        }
        if let Some((_, first)) = first {
            return Err(Refusal::After(first));
        }
        let held = self.share(me).held();
        // Something is always allowed: a request may be larger than a part.
        if contended && held > 0 && held + pages > self.part() {
            return Err(Refusal::Part);
        }
        Ok(())
    }

    /// What each disk may hold while others wait.
    fn part(&self) -> u32 {
        let wants = |slot: usize| {
            self.memory.load(at::WAITING + slot / 64) & (1u64 << (slot % 64)) != 0
                || self.share(slot).held() > 0
        };
        let count = self.slots().filter(|slot| self.owner(*slot) != Owner::NONE && wants(*slot)).count();
        (self.total / count.max(1) as u32).max(1)
    }

    /// Counts pages that were taken while others waited.
    pub fn charge(&self, slot: usize, pages: u32) {
        let time = self.memory.load(at::TIME);
        let lead = self.lead(slot, time);
        let start = time.wrapping_add(lead as u64);
        self.memory.store(at::tag(slot), start.wrapping_add(pages.into()));
        if lead > 0 {
            // Should another do so at the same moment, its time is as good.
            self.memory.swap(at::TIME, time, start);
        }
    }

    /// The slot to wake after something changed: the first in turn of those that wait, were not woken yet and are not
    /// passed, if it finds its pages. If it does not, neither may those behind it.
    pub fn next_to_wake(&self, me: usize, passed: &dyn Fn(usize) -> bool) -> Option<usize> {
        if !self.others_wait(me) {
            return None;
        }
        let time = self.memory.load(at::TIME);
        let next = self
            .waiting(me)
            .filter(|slot| !self.is_woken(*slot) && !passed(*slot))
            .min_by_key(|slot| (self.lead(*slot, time), *slot))?;
        let free = FreePages(self.memory.load(at::STATE)).free();
        let finds = self.want(next) <= free && !self.has_its_part(next);
        (finds && self.memory.swap(at::woken(next), 0, 1)).then_some(next)
    }

    pub fn want(&self, slot: usize) -> u32 {
        (self.memory.load(at::want(slot)) as u32).min(self.total)
    }

    /// A number that is another one as soon as the slot makes progress.
    pub fn progress(&self, slot: usize) -> u64 {
        self.share(slot).0 ^ self.memory.load(at::tag(slot)).rotate_left(32)
    }
}
