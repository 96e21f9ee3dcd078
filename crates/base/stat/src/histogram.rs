//! Latency histograms with a bucket per power of two.

use serde::de::Error as _;
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Buckets of a histogram. Bucket `i` counts durations from 2^i up to 2^(i+1) nanoseconds, bucket 0 also counts
/// zero, and the last bucket everything from 2^39 ns (nine minutes) on.
pub const BUCKETS: usize = 40;

/// The bucket of a duration in nanoseconds.
pub const fn bucket_of(ns: u64) -> usize {
    let index = (63 - (ns | 1).leading_zeros()) as usize;
    if index < BUCKETS { index } else { BUCKETS - 1 }
}

/// The shortest duration a bucket counts, in nanoseconds.
pub const fn bucket_floor(bucket: usize) -> u64 {
    if bucket == 0 { 0 } else { 1 << bucket }
}

/// A histogram as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// Requests per bucket.
    pub counts: [u64; BUCKETS],
    /// Sum of all durations, in nanoseconds.
    pub sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], sum_ns: 0 }
    }
}

impl Histogram {
    /// Requests counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count))
    }

    /// The mean in nanoseconds; 0 while nothing was counted.
    pub fn mean_ns(&self) -> u64 {
        self.sum_ns.checked_div(self.count()).unwrap_or(0)
    }

    /// An upper bound of the given share (0.0 to 1.0) of the requests, in nanoseconds: the ceiling of the bucket in
    /// which it lies, hence at most twice the true value. 0 while nothing was counted.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let count = self.count();
        if count == 0 {
            return 0;
        }
        let rank = ((count as f64 * share.clamp(0.0, 1.0)).ceil() as u64).clamp(1, count);
        let mut seen: u64 = 0;
        for (bucket, in_bucket) in self.counts.iter().enumerate() {
            seen = seen.saturating_add(*in_bucket);
            if seen >= rank {
                return (2u64 << bucket) - 1;
            }
        }
        u64::MAX
    }

    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = [0; BUCKETS];
        for (out, (now, then)) in counts.iter_mut().zip(self.counts.iter().zip(&earlier.counts)) {
            *out = now.saturating_sub(*then);
        }
        Self { counts, sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns) }
    }
}

impl Serialize for Histogram {
    /// The counts without the empty tail, and the figures that readers ask for first.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let used = self.counts.iter().rposition(|count| *count != 0).map_or(0, |last| last + 1);
        let mut out = serializer.serialize_struct("Histogram", 6)?;
        out.serialize_field("count", &self.count())?;
        out.serialize_field("sum_ns", &self.sum_ns)?;
        out.serialize_field("mean_ns", &self.mean_ns())?;
        out.serialize_field("p50_ns", &self.quantile_ns(0.5))?;
        out.serialize_field("p99_ns", &self.quantile_ns(0.99))?;
        out.serialize_field("log2_ns", &self.counts[..used])?;
        out.end()
    }
}

impl<'de> Deserialize<'de> for Histogram {
    /// The counts and their sum; the other figures follow from them.
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Written {
            sum_ns: u64,
            log2_ns: Vec<u64>,
        }
        let Written { sum_ns, log2_ns } = Written::deserialize(from)?;
        if log2_ns.len() > BUCKETS {
            return Err(D::Error::invalid_length(log2_ns.len(), &"at most 40 buckets"));
        }
        let mut read = Self { sum_ns, ..Self::default() };
        read.counts[..log2_ns.len()].copy_from_slice(&log2_ns);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let mut histogram = Histogram { sum_ns: 7, ..Histogram::default() };
        for counts in [0, 3, BUCKETS] {
            histogram.counts[..counts].fill(5);
            let text = serde_json::to_string(&histogram).expect("writable");
            assert_eq!(serde_json::from_str::<Histogram>(&text).expect(&text), histogram);
        }
        let long = format!(r#"{{"sum_ns":0,"log2_ns":{:?}}}"#, [0; BUCKETS + 1]);
        assert!(serde_json::from_str::<Histogram>(&long).is_err());
    }

    #[test]
    fn every_power_of_two_opens_a_bucket() {
        assert_eq!((bucket_of(0), bucket_of(1)), (0, 0));
        for bucket in 1..BUCKETS {
            assert_eq!(bucket_of(bucket_floor(bucket)), bucket);
            assert_eq!(bucket_of(bucket_floor(bucket) - 1), bucket - 1);
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn a_quantile_is_the_ceiling_of_its_bucket() {
        let mut histogram = Histogram::default();
        histogram.counts[bucket_of(1_000)] = 99;
        histogram.counts[bucket_of(1_000_000)] = 1;
        assert_eq!(histogram.quantile_ns(0.5), 1023);
        assert_eq!(histogram.quantile_ns(0.99), 1023);
        assert_eq!(histogram.quantile_ns(1.0), 1_048_575);
        assert_eq!(Histogram::default().quantile_ns(0.5), 0);
    }

    #[test]
    fn the_last_bucket_has_a_ceiling_too() {
        let mut histogram = Histogram::default();
        histogram.counts[BUCKETS - 1] = 1;
        assert_eq!(histogram.quantile_ns(0.5), (1u64 << BUCKETS) - 1);
    }

    #[test]
    fn absurd_counts_from_a_damaged_file_do_not_overflow() {
        let histogram = Histogram { counts: [u64::MAX; BUCKETS], sum_ns: u64::MAX };
        assert_eq!(histogram.count(), u64::MAX);
        assert_eq!(histogram.mean_ns(), 1);
        let _ = histogram.quantile_ns(0.99);
    }
}
