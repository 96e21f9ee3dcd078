//! How far a disk is ahead of each of the others: arithmetic on samples, without memory, files or clocks.
//!
//! The lead over another disk grows by what this disk sends to the device and falls by what the other one sends, both
//! by weight. It counts while the other one competes: while it has something in flight or waiting, and for the time
//! that its guest usually takes for the next request.

use super::sample::{PIECE_COST, PIECE_MIN, Sample, WEIGHT_MAX};

/// Bytes by which a disk may be ahead of another one that competes.
pub const QUANTUM: u64 = 256 << 10;
/// Parts of one, in which factors are kept.
pub const ONE: u64 = 64;
/// Largest factor: so much more than the other one is no limit any more.
const FACTOR_MAX: u64 = 4096 * ONE;
/// What a disk that may send a multiple can have saved up.
const SAVED_MAX: u64 = 64 << 20;
/// A disk that claims to compete and neither sends nor gets anything for so long does not.
const STUCK_NS: u64 = 300_000_000;
/// More at once is nonsense.
const PLAUSIBLE: u64 = 1 << 40;

/// Another disk, as this one knows it.
#[derive(Clone, Copy, Debug)]
struct Pair {
    owner: u64,
    /// Its counters when they were read last, and when one of them had changed.
    cost: u64,
    bytes: u64,
    changed_ns: u64,
    competes: bool,
    /// Cost by which this disk is ahead.
    lead: i64,
    /// How many times of what the other one sends this disk may send, in parts of [`ONE`].
    factor: u64,
    /// Pieces of this disk that waited for this one.
    blocked: u64,
    /// Bytes of its usual piece.
    piece: u64,
}

impl Pair {
    const fn new(sample: &Sample, now_ns: u64) -> Self {
        Self {
            owner: sample.owner,
            cost: sample.cost,
            bytes: sample.bytes,
            changed_ns: now_ns,
            competes: false,
            lead: 0,
            factor: ONE,
            blocked: 0,
            piece: PIECE_MIN,
        }
    }
}

/// The leads over all disks that depend on the device.
#[derive(Debug, Default)]
pub struct Leads {
    pairs: Vec<(usize, Pair)>,
    own_cost: u64,
    /// Cost that may go before the counters are read again.
    credit: u64,
    /// The pair with the least room.
    behind: usize,
}

fn to_signed(cost: u64) -> i64 {
    i64::try_from(cost).unwrap_or(i64::MAX)
}

impl Leads {
    /// The slots that are looked at from now on; the state of those that stay is kept.
    pub fn follow(&mut self, slots: impl Iterator<Item = (usize, Sample)>, now_ns: u64) {
        let before = std::mem::take(&mut self.pairs);
        let kept = |slot: usize, sample: &Sample| {
            let known = before.iter().find(|(known, pair)| *known == slot && pair.owner == sample.owner);
            known.map(|(_, pair)| *pair)
        };
        self.pairs = slots
            .map(|(slot, sample)| (slot, kept(slot, &sample).unwrap_or_else(|| Pair::new(&sample, now_ns))))
            .collect();
        self.credit = 0;
    }

    /// Forgets how far it is ahead: what was sent without a limit is not counted.
    pub fn level(&mut self, own_cost: u64) {
        for (_, pair) in &mut self.pairs {
            (pair.lead, pair.competes) = (0, false);
        }
        (self.own_cost, self.credit) = (own_cost, 0);
    }

    /// What may go now without falling out of the rule: reads the counters again if there may be less than `want`.
    pub fn room(&mut self, want: u64, own: (u64, u32), now_ns: u64, read: impl Fn(usize) -> Sample) -> u64 {
        let (cost, weight) = own;
        let sent = cost.wrapping_sub(self.own_cost);
        if self.credit > sent.saturating_add(want) {
            return self.credit - sent;
        }
        let own_weight = u64::from(weight.clamp(1, WEIGHT_MAX));
        let mut least = i64::MAX;
        for (index, (slot, pair)) in self.pairs.iter_mut().enumerate() {
            let sample = read(*slot);
            let moved = sample.cost.wrapping_sub(pair.cost);
            if moved != 0 || sample.bytes != pair.bytes {
                pair.changed_ns = now_ns;
            }
            (pair.cost, pair.bytes) = (sample.cost, sample.bytes);
            let is_alive = sample.owner == pair.owner && now_ns < pair.changed_ns.saturating_add(STUCK_NS);
            if !is_alive || now_ns >= sample.until_ns || moved > PLAUSIBLE {
                pair.competes = false;
                continue;
            }
            if !std::mem::replace(&mut pair.competes, true) {
                // What it did not use was lent.
                pair.lead = 0;
            } else {
                let weight = u64::from(sample.weight.clamp(1, WEIGHT_MAX));
                let allowed =
                    u128::from(moved) * u128::from(own_weight * pair.factor) / u128::from(weight * ONE);
                let allowed = i64::try_from(allowed).unwrap_or(i64::MAX);
                let lead = pair.lead.saturating_add(to_signed(sent)).saturating_sub(allowed);
                // Neither side saves up for more than a moment.
                let saved = to_signed((QUANTUM * pair.factor / ONE).min(SAVED_MAX));
                pair.lead = lead.clamp(-saved, 2 * to_signed(QUANTUM));
            }
            let room = to_signed(QUANTUM) - pair.lead;
            if room < least {
                (least, self.behind) = (room, index);
            }
        }
        (self.own_cost, self.credit) = (cost, u64::try_from(least).unwrap_or(0));
        self.credit
    }

    /// A piece waits for the disk that is behind most.
    pub fn block(&mut self) {
        if let Some((_, pair)) = self.pairs.get_mut(self.behind) {
            pair.blocked += 1;
        }
    }

    /// Bytes that may be in flight whatever the lead: as much as the one behind has in a piece, so that the device has
    /// something to do while that one's guest thinks.
    pub fn floor(&self) -> u64 {
        self.pairs.get(self.behind).map_or(PIECE_MIN, |(_, pair)| pair.piece)
    }

    /// Bytes of the longest piece.
    pub fn piece_max(&self) -> u64 {
        self.pairs.get(self.behind).map_or(QUANTUM, |(_, pair)| QUANTUM * pair.factor / ONE)
    }

    /// What is known of a slot's pieces: their bytes and cost in a period.
    pub fn set_piece(&mut self, slot: usize, bytes: u64, cost: u64) {
        if let Some((_, pair)) = self.pairs.iter_mut().find(|(known, _)| *known == slot) {
            let pieces = cost.saturating_sub(bytes) / PIECE_COST;
            if let Some(mean) = bytes.checked_div(pieces) {
                pair.piece = (mean / 4096 * 4096).clamp(4096, PIECE_MIN * 2);
            }
        }
    }

    /// Whether any piece waited since the factors were changed last.
    pub fn has_blocked(&self) -> bool {
        self.pairs.iter().any(|(_, pair)| pair.blocked > 0)
    }

    /// This disk may send `percent` of what it sends now, beside the one that it waited for most.
    pub fn raise(&mut self, percent: u64) {
        if let Some((_, pair)) = self.pairs.iter_mut().max_by_key(|(_, pair)| pair.blocked) {
            pair.factor = (pair.factor * percent / 100).max(pair.factor + 1).min(FACTOR_MAX);
        }
        self.forget();
    }

    /// Comes nearer to even; the factors before, if there is something to come nearer to.
    pub fn lower(&mut self, percent: u64) -> Option<Vec<(usize, u64)>> {
        self.forget();
        let before = self.pairs.iter().map(|(slot, pair)| (*slot, pair.factor)).collect();
        let is_even = self.pairs.iter().all(|(_, pair)| pair.factor == ONE);
        for (_, pair) in &mut self.pairs {
            pair.factor = (pair.factor * percent / 100).max(ONE);
        }
        (!is_even).then_some(before)
    }

    /// Puts factors back.
    pub fn restore(&mut self, factors: &[(usize, u64)]) {
        self.forget();
        for (slot, pair) in &mut self.pairs {
            if let Some((_, factor)) = factors.iter().find(|(known, _)| known == slot) {
                pair.factor = *factor;
            }
        }
    }

    fn forget(&mut self) {
        self.pairs.iter_mut().for_each(|(_, pair)| pair.blocked = 0);
    }

    /// The largest factor, in 100.
    pub fn largest(&self) -> u64 {
        self.pairs.iter().map(|(_, pair)| pair.factor * 100 / ONE).max().unwrap_or(100)
    }
}
