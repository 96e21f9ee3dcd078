//! What the words of a disk's slot say, and what it did between two moments.

/// Bytes that a disk may always have in flight.
pub const PIECE_MIN: u64 = 32 << 10;
/// What a piece costs beside its bytes: small ones are not for nothing.
pub const PIECE_COST: u64 = 4 << 10;
/// Weight of a disk if none is configured.
pub const WEIGHT_DEFAULT: u32 = 100;
/// Largest weight; the smallest is 1.
pub const WEIGHT_MAX: u32 = 1000;
/// More in a period is nonsense: 64 TiB/s.
const PLAUSIBLE: u64 = 64 << 40;

/// Bits of a slot's flags.
pub mod flag {
    /// It misses its latency target.
    pub const LATE: u64 = 1;
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
    /// Up to when it competes, if it does nothing more.
    pub until_ns: u64,
}

/// What a disk did in a period.
#[derive(Clone, Copy, Debug, Default)]
pub struct Did {
    /// Bytes a second.
    pub rate: u64,
    /// Cost a second.
    pub cost: u64,
    /// Time in which something was in flight, in 100.
    pub busy: u64,
    pub weight: u64,
    pub flags: u64,
}

impl Did {
    pub fn between(before: &Sample, now: &Sample, elapsed_ns: u64) -> Self {
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
        let is_plausible = rate > 0 && busy <= elapsed_ns.saturating_mul(4);
        let busy = if is_plausible { busy.saturating_mul(100) / elapsed_ns.max(1) } else { 0 };
        Self { rate, cost, busy, weight, flags: now.flags }
    }
}
