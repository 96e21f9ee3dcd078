//! Which disks compete, and what sharing may cost: arithmetic on samples, without memory, files or clocks.
//!
//! **Competing.** A disk that had something in flight for half of a period depends on the device and not on its
//! guest, until that is less than a tenth. While no other disk is such, there is no limit: idle shares are lent.
//!
//! **How even.** A disk is ahead of each of the others by at most a quantum ([`super::leads`]).
//!
//! **What it may cost.** The total is compared with what it was without limits: at the beginning, and in the first
//! ones of [`PROBE_EVERY`] periods, by the host's clock, so that all disks do so at once. Where the total is more than
//! [`LOSS`] less, the disk behind could not use what it was given: the one that waited for it may send a multiple of
//! what that one sends, as much as brings the total back. From time to time it tries a smaller multiple.
//!
//! **What a disk keeps.** One piece in flight, and its part by weight of what it moved itself without limits, whatever
//! others say.
//!
//! **Latency.** A disk with a target that misses it has the others take less, whatever the total does, down to what
//! they keep; they take more again slowly.

use super::leads::Leads;
use super::sample::{Did, PIECE_MIN, Sample, flag};

/// How often a disk looks at the others.
pub const PERIOD_NS: u64 = 100_000_000;
/// Of so many periods ...
pub const PROBE_EVERY: u64 = 64;
/// ... these first ones have no limits.
const PROBE_LEN: u64 = 4;
/// No limit.
pub const UNLIMITED: u64 = u64::MAX;

/// What fairness may cost of the total: 2 of 100.
pub const LOSS: u64 = 2;
/// A step is not larger than to 7 of 10.
const STEP: u64 = 70;
/// Periods that say what is moved without limits.
const MEASURED: u64 = 8;
/// Periods that say it later.
const MEMORY: u64 = 16;
/// Periods without the end of a request after which a disk competes no more.
const REMEMBERED: u32 = 5;
/// Periods after which a multiple has proved itself or not.
const WINDOW: u64 = 4;
/// Windows until the next try, at least and at most.
const HOLD_MIN: u32 = 4;
const HOLD_MAX: u32 = 32;
/// A try is for this much, in 100.
const TRY: u64 = 80;
/// A step goes to this much at most, in 100.
const RAISE_MAX: u64 = 800;
/// How many times longer than the first one a step becomes.
const RAISES_MAX: u64 = 6;
/// A disk competes that is busy for this much of a period, in 100, and until it is for less than that.
const BUSY_COMES: u64 = 50;
const BUSY_STAYS: u64 = 25;
/// So many periods after another with less say so.
const IDLE: u32 = 2;
/// Periods for which a disk is left out, at least and at most.
const REST_MIN: u32 = 16;
const REST_MAX: u32 = 64;
/// Periods after a missed latency target in which limits rise slowly and nothing is probed.
const CALM: u32 = 100;

/// Where a disk is between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No other disk competes.
    Alone,
    /// One does, and what all get without limits is measured: has been, in so many periods.
    Measuring(u64),
    /// Limited, or even without.
    Sharing,
}

/// A disk that competed and had time when it was waited for.
#[derive(Clone, Copy, Debug)]
struct Rest {
    /// Periods for which it is left out, and for how many it will be next time.
    left: u32,
    next: u32,
    /// Periods in which it had time.
    idle: u32,
}

impl Default for Rest {
    fn default() -> Self {
        Self { left: 0, next: REST_MIN, idle: 0 }
    }
}

/// What was moved since the last change.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    total: u64,
    own: u64,
    periods: u64,
}

/// The state of one disk.
#[derive(Debug)]
pub struct Control {
    phase: Phase,
    seen: Vec<Sample>,
    /// What each did in the last period in which it did something, and how many have passed since.
    last: Vec<(Did, u32)>,
    /// Which slots compete.
    others: Vec<usize>,
    rests: Vec<Rest>,
    sampled_ns: u64,
    /// The period of the last look.
    period: u64,
    /// Bytes in flight that another disk's latency leaves.
    limit: u64,
    /// What all disks together, and this one, got without limits, a second.
    total_free: u64,
    own_free: u64,
    /// In how many periods, and the most that this disk had in flight: a period may have the end of so much that was
    /// sent before it, or not.
    measured: u64,
    peak_free: u64,
    window: Window,
    /// Periods that do not count: what was sent before is served in them.
    skip: u32,
    /// The multiples before a try that is still to prove itself.
    trial: Option<Vec<(usize, u64)>>,
    /// Windows until the next try, and how many it will be after one that cost too much.
    hold: u32,
    next_hold: u32,
    /// Steps of the multiple, one after the other.
    raises: u64,
    calm: u32,
    pub leads: Leads,
}

impl Default for Control {
    fn default() -> Self {
        Self {
            phase: Phase::Alone,
            seen: Vec::new(),
            last: Vec::new(),
            others: Vec::new(),
            rests: Vec::new(),
            sampled_ns: 0,
            period: 0,
            limit: UNLIMITED,
            total_free: 0,
            own_free: 0,
            measured: 0,
            peak_free: 0,
            window: Window::default(),
            skip: 0,
            trial: None,
            hold: 0,
            next_hold: HOLD_MIN,
            raises: 1,
            calm: 0,
            leads: Leads::default(),
        }
    }
}

const fn period_of(now_ns: u64) -> u64 {
    now_ns / PERIOD_NS
}

const fn is_probe(period: u64) -> bool {
    period % PROBE_EVERY < PROBE_LEN
}

/// `percent` of a number.
fn percent(of: u64, percent: u64) -> u64 {
    u64::try_from(u128::from(of) * u128::from(percent) / 100).unwrap_or(u64::MAX)
}

impl Control {
    /// Whether other disks compete: large requests go in pieces then.
    pub fn competes(&self) -> bool {
        self.phase != Phase::Alone
    }

    /// Whether this disk keeps within reach of the others, in the period of the last look.
    pub fn is_even(&self) -> bool {
        self.phase == Phase::Sharing && !(self.probes() && is_probe(self.period))
    }

    /// Bytes that may be in flight in the period of the last look.
    pub fn limit(&self) -> u64 {
        if self.is_even() { self.limit } else { UNLIMITED }
    }

    const fn probes(&self) -> bool {
        self.calm == 0
    }

    /// Looks at all slots, of which `me` is this disk's; `peak` is the most that it had in flight since the last look.
    pub fn look(&mut self, now_ns: u64, slots: &[Sample], me: usize, peak: u64) {
        let (before, period) = (self.period, period_of(now_ns));
        let elapsed_ns = now_ns.saturating_sub(self.sampled_ns);
        let mut did = self.sample(slots, elapsed_ns);
        let total = did.iter().fold(0_u64, |sum, did| sum.saturating_add(did.rate));
        self.remember(&mut did);
        (self.sampled_ns, self.period) = (now_ns, period);
        // After a rest nothing of before holds.
        if elapsed_ns > 8 * PERIOD_NS {
            return self.relax();
        }
        let Some(own) = did.get(me).copied() else { return self.relax() };
        let others = || did.iter().enumerate().filter(|(slot, _)| *slot != me);
        let is_late = own.flags & flag::LATE != 0;
        let misses = !is_late && others().any(|(_, did)| did.rate > 0 && did.flags & flag::LATE != 0);
        let known = std::mem::take(&mut self.others);
        self.rest(&known, &did, before);
        let is_in = |slot: usize, did: &Did| {
            let has_time = self.rests[slot].left > 0;
            did.rate > 0 && !has_time && (did.busy >= BUSY_COMES || known.contains(&slot))
        };
        let is_in: Vec<usize> =
            others().filter(|(slot, did)| is_in(*slot, did)).map(|(slot, _)| slot).collect();
        self.others = is_in;
        if self.others.is_empty() && !misses {
            return self.relax();
        }
        if self.others != known {
            let members = self.others.iter().filter_map(|slot| Some((*slot, *slots.get(*slot)?)));
            self.leads.follow(members, now_ns);
        }
        for slot in &self.others {
            let (bytes, cost) = (did[*slot].rate, did[*slot].cost);
            self.leads.set_piece(*slot, bytes, cost);
        }
        match self.phase {
            // The period in which the other one came is not a whole one.
            Phase::Alone => {
                self.phase = Phase::Measuring(0);
                (self.total_free, self.own_free, self.measured, self.peak_free) = (0, 0, 0, 0);
                return;
            }
            Phase::Measuring(so_far) => {
                self.measured(total, own.rate, peak);
                let is_enough = so_far + 1 == MEASURED;
                self.phase = if is_enough { Phase::Sharing } else { Phase::Measuring(so_far + 1) };
                self.begin_window(1);
                return;
            }
            Phase::Sharing if self.probes() && is_probe(before) => {
                // What is sent in the first one is more than what is done.
                if before % PROBE_EVERY > 0 {
                    self.measured(total, own.rate, peak);
                }
                self.skip = self.skip.max(1);
                return;
            }
            Phase::Sharing => {}
        }
        let weights = own.weight + self.others.iter().map(|slot| did[*slot].weight).sum::<u64>();
        let kept = u128::from(self.own_free) * u128::from(own.weight) / u128::from(weights);
        let kept = u64::try_from(kept).unwrap_or(u64::MAX);
        if misses || self.calm > 0 {
            return self.for_latency(misses, own.rate > kept, peak);
        }
        if self.skip > 0 {
            self.skip -= 1;
            return;
        }
        self.window.total += total;
        self.window.own += own.rate;
        self.window.periods += 1;
        if self.window.periods >= WINDOW {
            self.judge(kept);
        }
    }

    /// Which disks are left out: a disk that competes while no other waits for it, and has time when it is waited for,
    /// is not tried again at once.
    fn rest(&mut self, known: &[usize], did: &[Did], before: u64) {
        self.rests.resize(did.len(), Rest::default());
        let is_even = self.phase == Phase::Sharing && !is_probe(before) && !is_probe(before.wrapping_sub(1));
        for (slot, (rest, did)) in self.rests.iter_mut().zip(did).enumerate() {
            if rest.left > 0 {
                rest.left -= 1;
            } else if is_even && known.contains(&slot) {
                // Time is counted when a piece ends: one period says little.
                rest.idle = if did.busy < BUSY_STAYS { rest.idle + 1 } else { 0 };
                if rest.idle >= IDLE {
                    *rest = Rest { left: rest.next, next: (rest.next * 2).min(REST_MAX), idle: 0 };
                } else if rest.idle == 0 {
                    rest.next = (rest.next - rest.next / 8).max(REST_MIN);
                }
            }
        }
    }

    fn begin_window(&mut self, skip: u32) {
        (self.window, self.skip) = (Window::default(), skip);
    }

    /// A window is over: whether what it moved is enough.
    fn judge(&mut self, kept: u64) {
        let Window { total, own, periods } = self.window;
        let (total, own) = (total / periods, own / periods);
        self.begin_window(0);
        let unsure = self.peak_free * (1_000_000_000 / PERIOD_NS) / self.measured.max(1);
        let missing = percent(self.total_free, 100 - LOSS).saturating_sub(total.saturating_add(unsure));
        let missing = missing.max(percent(kept, 90).saturating_sub(own.saturating_add(unsure)));
        if missing > 0 {
            if let Some(factors) = self.trial.take() {
                self.leads.restore(&factors);
                self.hold = self.next_hold;
                self.next_hold = (self.next_hold * 2).min(HOLD_MAX);
            } else if self.leads.has_blocked() {
                let more = missing.saturating_add(total / 100);
                let step = (own.saturating_add(more)).saturating_mul(100) / own.max(1);
                // Where a step does little, the next one is longer.
                let step = 100 + step.saturating_sub(100).saturating_mul(self.raises);
                self.raises = (self.raises + 1).min(RAISES_MAX);
                self.leads.raise(step.clamp(105, RAISE_MAX));
                self.hold = self.next_hold;
            } else {
                return;
            }
            return self.begin_window(1);
        }
        self.raises = 1;
        if self.trial.take().is_some() {
            self.next_hold = HOLD_MIN;
        }
        if self.hold > 0 {
            self.hold -= 1;
            return;
        }
        self.trial = self.leads.lower(TRY);
        if self.trial.is_some() {
            self.begin_window(1);
        }
    }

    fn sample(&mut self, slots: &[Sample], elapsed_ns: u64) -> Vec<Did> {
        self.seen.resize(slots.len(), Sample::default());
        let did = slots.iter().zip(&self.seen).map(|(now, before)| Did::between(before, now, elapsed_ns));
        let did = did.collect();
        self.seen.copy_from_slice(slots);
        did
    }

    /// A disk whose requests take longer than a period competes in those in which none ends, too.
    fn remember(&mut self, did: &mut [Did]) {
        self.last.resize(did.len(), (Did::default(), REMEMBERED));
        for (did, (last, age)) in did.iter_mut().zip(&mut self.last) {
            if did.rate > 0 {
                (*last, *age) = (*did, 0);
            } else if *age < REMEMBERED {
                *age += 1;
                *did = *last;
            }
        }
    }

    /// No other disk competes.
    fn relax(&mut self) {
        let last = std::mem::take(&mut self.last);
        let rests = std::mem::take(&mut self.rests);
        let (seen, sampled_ns, period) = (std::mem::take(&mut self.seen), self.sampled_ns, self.period);
        *self = Self { seen, last, rests, sampled_ns, period, ..Self::default() };
    }

    /// What was moved in a period without limits.
    fn measured(&mut self, total: u64, own: u64, peak: u64) {
        self.measured = (self.measured + 1).min(MEMORY);
        let mean = |before: u64, now: u64| before - before / self.measured + now / self.measured;
        (self.total_free, self.own_free) = (mean(self.total_free, total), mean(self.own_free, own));
        self.peak_free = mean(self.peak_free, peak);
    }

    fn grow(&mut self, by: u64) {
        if self.limit != UNLIMITED {
            self.limit = percent(self.limit, by);
            if self.limit > 1 << 30 {
                self.limit = UNLIMITED;
            }
        }
    }

    /// Another disk misses its target, or has done so lately.
    fn for_latency(&mut self, misses: bool, may_shrink: bool, peak: u64) {
        self.trial = None;
        if !misses {
            self.calm -= 1;
            return self.grow(102);
        }
        self.calm = CALM;
        if may_shrink {
            self.limit = percent(self.limit.min(peak), STEP).max(PIECE_MIN);
        }
    }
}
