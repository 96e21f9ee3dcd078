//! Latencies of one load: finer than the histograms in shared memory, and seen by its caller alone.

/// Buckets of one power of two: a quantile is at most one part in this many above the truth.
const STEPS: u64 = 64;
const BUCKETS: usize = 64 * STEPS as usize;

/// How many requests took how long, to within one part in 64.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies {
    counts: Box<[u64; BUCKETS]>,
    count: u64,
    sum_ns: u64,
    max_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { counts: Box::new([0; BUCKETS]), count: 0, sum_ns: 0, max_ns: 0 }
    }
}

impl Latencies {
    /// Counts a request that took so many nanoseconds.
    pub fn note(&mut self, ns: u64) {
        self.max_ns = self.max_ns.max(ns);
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.count += 1;
        // Below the first steps, and beyond three hundred years, nothing is told apart.
        let ns = ns.clamp(STEPS, u64::MAX >> 1);
        let power = ns.ilog2();
        let step = (ns >> (power - STEPS.ilog2())) % STEPS;
        self.counts[(u64::from(power) * STEPS + step) as usize] += 1;
    }

    /// Counts what another counted.
    pub fn add(&mut self, other: &Self) {
        self.max_ns = self.max_ns.max(other.max_ns);
        self.count += other.count;
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        for (sum, count) in self.counts.iter_mut().zip(other.counts.iter()) {
            *sum += count;
        }
    }

    /// Requests counted.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// How long all took together, to the nanosecond.
    pub const fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// The longest one, to the nanosecond.
    pub const fn longest_ns(&self) -> u64 {
        self.max_ns
    }

    /// The nanoseconds that `share` (0 to 1) of the requests did not exceed: the end of the bucket in which that share
    /// is reached. 0 while nothing was counted.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let rank = ((self.count as f64 * share.clamp(0.0, 1.0)).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                let (power, step) = (index as u64 / STEPS, index as u64 % STEPS);
                return ((STEPS + step + 1) << (power - u64::from(STEPS.ilog2()))).min(self.max_ns);
            }
        }
        self.max_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_three_hundredths() {
        let mut once = Latencies::default();
        (1..=100_000).for_each(|ns| once.note(ns));
        let mut twice = once.clone();
        twice.add(&once);
        for found in [&once, &twice] {
            for share in [0.001, 0.1, 0.5, 0.9, 0.99, 0.999] {
                let (truth, found) = (100_000.0 * share, found.quantile_ns(share) as f64);
                assert!(found >= truth && found <= truth * 1.03 + 1.0, "{share}: {found}");
            }
            assert_eq!(found.counts.iter().sum::<u64>(), found.count(), "each is in one bucket");
            assert_eq!(found.sum_ns() / found.count(), 50_000);
            assert_eq!(found.longest_ns(), 100_000);
            assert_eq!(found.quantile_ns(1.0), 100_000);
        }
    }

    #[test]
    fn what_is_very_short_or_very_long_is_counted_too() {
        assert_eq!(Latencies::default().quantile_ns(0.5), 0);
        let mut found = Latencies::default();
        found.note(0);
        found.note(3);
        assert_eq!(found.quantile_ns(0.5), 3);
        found.note(u64::MAX);
        assert_eq!(found.quantile_ns(1.0), 1 << 63);
    }
}
