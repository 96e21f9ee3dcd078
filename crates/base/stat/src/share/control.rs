//! The rule by which a disk limits what it has in flight: arithmetic on samples, without memory, files or clocks.
//!
//! **Who competes.** A disk that had something in flight for at least half of a period depends on the device and not on
//! its guest. While no other disk is such, there is no limit: idle shares are lent.
//!
//! **How far.** A queue serves what is in it, so the parts of two disks are as what they have in flight. The disk
//! that is ahead of the one furthest behind, by what they moved over their weights, takes less in flight, step by
//! step, until they are even. Then the device has less in its queue: its latency falls and, as long as the queue is
//! not empty, its throughput stays.
//!
//! **Where it stops.** If it does not stay, less in flight is no service to anybody: the disk behind could not use
//! more. The total is therefore compared with what it was without limits: at the beginning, and in one of
//! [`PROBE_EVERY`] periods, by the host's clock, so that all disks do so at once. A step that costs more than
//! [`LOSS`] is taken back, and the next one waits, each time twice as long.
//!
//! **What a disk keeps.** One piece in flight, and its part by weight of what it moved itself without limits, whatever
//! others say.
//!
//! **Latency.** A disk with a target that misses it has the others take less, whatever the total does, down to what
//! they keep; they take more again slowly.

/// How often a disk looks at the others.
pub const PERIOD_NS: u64 = 100_000_000;
/// One period out of so many has no limits.
pub const PROBE_EVERY: u64 = 32;
/// Bytes that a disk may always have in flight.
pub const PIECE_MIN: u64 = 32 << 10;
/// What a piece costs beside its bytes: small ones are not for nothing.
pub const PIECE_COST: u64 = 4 << 10;
/// Weight of a disk if none is configured.
pub const WEIGHT_DEFAULT: u32 = 100;
/// Largest weight; the smallest is 1.
pub const WEIGHT_MAX: u32 = 1000;
/// No limit.
pub const UNLIMITED: u64 = u64::MAX;

/// What fairness may cost of the total: 4 of 100.
pub const LOSS: u64 = 4;
/// A step is not larger than to 7 of 10.
const STEP: u64 = 70;
/// Ahead by this much, in 100, is even.
const EVEN: u64 = 8;
/// Periods that say what is moved without limits.
const MEASURED: u64 = 4;
/// Periods without the end of a request after which a disk competes no more.
const REMEMBERED: u32 = 5;
/// Periods that the longest wait for the next step has.
const HOLD_MAX: u32 = 64;
/// Periods after a missed latency target in which limits rise slowly and nothing is probed.
const CALM: u32 = 100;
/// More in a period is nonsense: 64 TiB/s.
const PLAUSIBLE: u64 = 64 << 40;

/// Bits of a slot's flags.
pub mod flag {
    /// It misses its latency target.
    pub const LATE: u64 = 1;
    /// It is limited, and would take more.
    pub const LIMITED: u64 = 2;
}

/// What the words of a disk's slot say at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Its process; a number that changes with the disk.
    pub owner: u64,
    /// Bytes, and [`PIECE_COST`] for each piece.
    pub cost: u64,
    pub bytes: u64,
    pub busy_ns: u64,
    pub weight: u32,
    pub flags: u64,
}

/// What a disk did in a period.
#[derive(Clone, Copy, Debug, Default)]
struct Did {
    /// Bytes a second.
    rate: u64,
    /// Cost a second.
    cost: u64,
    /// Something was in flight for half of the time.
    is_backlogged: bool,
    weight: u64,
    flags: u64,
}

impl Did {
    fn between(before: &Sample, now: &Sample, elapsed_ns: u64) -> Self {
        let weight = now.weight.clamp(1, WEIGHT_MAX).into();
        if before.owner != now.owner || now.owner == 0 {
            return Self { weight, ..Self::default() };
        }
        let rate = |before: u64, now: u64| {
            let rate = u128::from(now.wrapping_sub(before)) * 1_000_000_000 / u128::from(elapsed_ns.max(1));
            u64::try_from(rate).ok().filter(|rate| *rate <= PLAUSIBLE).unwrap_or(0)
        };
        let busy = now.busy_ns.wrapping_sub(before.busy_ns);
        let (cost, rate) = (rate(before.cost, now.cost), rate(before.bytes, now.bytes));
        // Counted at the end of each piece: a period may have the end of one that began before it.
        let is_backlogged = rate > 0 && busy >= elapsed_ns / 2 && busy <= elapsed_ns.saturating_mul(4);
        Self { rate, cost, is_backlogged, weight, flags: now.flags }
    }

    /// What it moved for its weight, in a unit that is the same for all.
    const fn part(&self) -> u64 {
        self.cost.saturating_mul(16) / self.weight
    }
}

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

/// The state of one disk.
#[derive(Debug)]
pub struct Control {
    phase: Phase,
    seen: Vec<Sample>,
    /// What each did in the last period in which it did something, and how many have passed since.
    last: Vec<(Did, u32)>,
    sampled_ns: u64,
    /// The period of the last look.
    period: u64,
    /// Bytes in flight.
    limit: u64,
    /// What all disks together, and this one, got without limits, a second.
    total_free: u64,
    own_free: u64,
    /// The limit before the last step, which is still to prove itself, and the total of the first period since.
    trial: Option<(u64, Option<u64>)>,
    /// Periods until the next step, and how many it will be after a step that cost too much.
    hold: u32,
    next_hold: u32,
    calm: u32,
}

impl Default for Control {
    fn default() -> Self {
        Self {
            phase: Phase::Alone,
            seen: Vec::new(),
            last: Vec::new(),
            sampled_ns: 0,
            period: 0,
            limit: UNLIMITED,
            total_free: 0,
            own_free: 0,
            trial: None,
            hold: 0,
            next_hold: 1,
            calm: 0,
        }
    }
}

const fn period_of(now_ns: u64) -> u64 {
    now_ns / PERIOD_NS
}

const fn is_probe(period: u64) -> bool {
    period.is_multiple_of(PROBE_EVERY)
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

    /// Bytes that may be in flight in the period of the last look.
    pub fn limit(&self) -> u64 {
        if self.phase == Phase::Sharing && !(self.probes() && is_probe(self.period)) {
            self.limit
        } else {
            UNLIMITED
        }
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
        let others = || did.iter().enumerate().filter(|(slot, _)| *slot != me).map(|(_, did)| did);
        let is_late = own.flags & flag::LATE != 0;
        let misses = !is_late && others().any(|did| did.rate > 0 && did.flags & flag::LATE != 0);
        let behind = others().filter(|did| did.is_backlogged).map(Did::part).min();
        if behind.is_none() && !misses {
            return self.relax();
        }
        match self.phase {
            // The period in which the other one came is not a whole one.
            Phase::Alone => {
                (self.phase, self.total_free, self.own_free) = (Phase::Measuring(0), 0, 0);
                return;
            }
            Phase::Measuring(so_far) => {
                self.measured(total, own.rate, so_far + 1);
                let is_enough = so_far + 1 == MEASURED;
                self.phase = if is_enough { Phase::Sharing } else { Phase::Measuring(so_far + 1) };
                return;
            }
            Phase::Sharing if self.probes() && is_probe(before) => {
                return self.measured(total, own.rate, MEASURED);
            }
            // The queue of the probe is served in this one.
            Phase::Sharing if self.probes() && is_probe(before.wrapping_sub(1)) => return,
            Phase::Sharing => {}
        }
        let weights =
            own.weight + others().filter(|did| did.is_backlogged).map(|did| did.weight).sum::<u64>();
        let kept = u64::try_from(u128::from(self.own_free) * u128::from(own.weight) / u128::from(weights));
        let may_shrink = own.rate > kept.unwrap_or(u64::MAX);
        if misses || self.calm > 0 {
            return self.for_latency(misses, may_shrink, peak);
        }
        let behind = behind.unwrap_or(u64::MAX);
        let is_ahead = own.part() > percent(behind, 100 + EVEN);
        if let Some((limit, first)) = self.trial.take() {
            // One period says little where a device is unsteady.
            let Some(first) = first else {
                self.trial = Some((limit, Some(total)));
                return;
            };
            if first.midpoint(total) < percent(self.total_free, 100 - LOSS) {
                self.limit = limit;
                self.hold = self.next_hold;
                self.next_hold = (self.next_hold * 2).min(HOLD_MAX);
                return;
            }
            self.next_hold = 1;
            if is_ahead {
                self.shrink(own.part(), behind, may_shrink, peak);
            }
        } else if total < percent(self.total_free, 75) {
            // The load has changed, or the device: the next probe tells.
            self.grow(110);
        } else if self.hold > 0 {
            self.hold -= 1;
            self.even_out(&own, others());
        } else if is_ahead {
            self.shrink(own.part(), behind, may_shrink, peak);
        } else {
            self.next_hold = 1;
            if own.part() < percent(behind, 100 - EVEN) {
                self.grow(115);
            }
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
        let (seen, sampled_ns, period) = (std::mem::take(&mut self.seen), self.sampled_ns, self.period);
        *self = Self { seen, last, sampled_ns, period, ..Self::default() };
    }

    /// What was moved in a period without limits, one of `of`.
    fn measured(&mut self, total: u64, own: u64, of: u64) {
        let mean = |before: u64, now: u64| before - before / of + now / of;
        (self.total_free, self.own_free) = (mean(self.total_free, total), mean(self.own_free, own));
    }

    fn shrink(&mut self, own: u64, behind: u64, may_shrink: bool, peak: u64) {
        if !may_shrink {
            return;
        }
        let target = u64::try_from(u128::from(behind) * 100 / u128::from(own.max(1))).unwrap_or(100);
        self.trial = Some((self.limit, None));
        self.limit = percent(self.limit.min(peak), target.clamp(STEP, 100)).max(PIECE_MIN);
    }

    fn grow(&mut self, by: u64) {
        if self.limit != UNLIMITED {
            self.limit = percent(self.limit, by);
            if self.limit > 1 << 30 {
                self.limit = UNLIMITED;
            }
        }
    }

    /// Between steps: those that are limited become even among themselves.
    fn even_out<'a>(&mut self, own: &Did, others: impl Iterator<Item = &'a Did>) {
        let limited = |did: &&Did| did.is_backlogged && did.flags & flag::LIMITED != 0;
        let (sum, count) = others
            .filter(limited)
            .fold((own.part(), 1), |(sum, count), did| (u64::saturating_add(sum, did.part()), count + 1));
        let mean: u64 = sum / count;
        if self.limit == UNLIMITED || count == 1 {
            return;
        }
        if own.part() > percent(mean, 100 + EVEN) {
            self.limit = percent(self.limit, 92).max(PIECE_MIN);
        } else if own.part() < percent(mean, 100 - EVEN) {
            self.grow(108);
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
