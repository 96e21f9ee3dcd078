//! Token buckets, exact: whole numbers, nothing is rounded away.

use tapio_types::IoLimits;

/// Tokens are counted in billionths, so that a rate a second times nanoseconds is a number of them.
const SCALE: i128 = 1_000_000_000;
/// While requests wait, tokens gather for this long at most: a thread that wakes up late has lost nothing.
const LATE_NS: u64 = 1_000_000_000;

/// What a request of one kind costs at one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Requests,
    Bytes,
}

/// A bucket. A request may pass when it is not in debt, and then takes all it costs, also what is not there: so a
/// request larger than the bucket passes too, and those behind it wait until its debt is paid.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    unit: Unit,
    rate: u64,
    /// The most it holds.
    capacity: i128,
    level: i128,
}

impl Bucket {
    fn fill(&mut self, elapsed_ns: u64, waited: bool) {
        let more = i128::from(self.rate) * i128::from(elapsed_ns);
        let late = i128::from(self.rate) * i128::from(LATE_NS);
        let most = if waited { self.capacity.max(late) } else { self.capacity };
        if self.level < most {
            self.level = (self.level + more).min(most);
        }
    }

    fn cost(&self, bytes: u64) -> i128 {
        match self.unit {
            Unit::Requests => SCALE,
            Unit::Bytes => i128::from(bytes) * SCALE,
        }
    }

    /// Nanoseconds until it is out of debt.
    fn wait_ns(&self) -> u64 {
        let debt = (-self.level).max(0);
        let rate = i128::from(self.rate);
        u64::try_from((debt + rate - 1) / rate).unwrap_or(u64::MAX)
    }
}

/// Which buckets a request goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Read,
    Write,
}

/// The buckets of a disk: of all requests, of reads, of writes.
#[derive(Clone, Debug)]
pub struct Buckets {
    all: Vec<Bucket>,
    reads: Vec<Bucket>,
    writes: Vec<Bucket>,
    filled_ns: u64,
}

impl Buckets {
    /// Full ones.
    pub fn new(limits: &IoLimits, now_ns: u64) -> Self {
        let make = |requests: u64, bytes: u64| {
            [(Unit::Requests, requests), (Unit::Bytes, bytes)]
                .into_iter()
                .filter(|(_, rate)| *rate > 0)
                .map(|(unit, rate)| {
                    let capacity = i128::from(limits.burst_of(rate, unit == Unit::Bytes)) * SCALE;
                    Bucket { unit, rate, capacity, level: capacity }
                })
                .collect()
        };
        Self {
            all: make(limits.iops, limits.bps),
            reads: make(limits.read_iops, limits.read_bps),
            writes: make(limits.write_iops, limits.write_bps),
            filled_ns: now_ns,
        }
    }

    /// Whether reads and writes wait apart from each other.
    pub fn is_split(&self) -> bool {
        !(self.reads.is_empty() && self.writes.is_empty())
    }

    /// Adds the tokens since the last call; `waited`: a request has waited for tokens meanwhile.
    pub fn fill(&mut self, now_ns: u64, waited: bool) {
        let elapsed = now_ns.saturating_sub(self.filled_ns);
        if elapsed > 0 {
            self.filled_ns = now_ns;
            let all = [&mut self.all, &mut self.reads, &mut self.writes];
            all.into_iter().flatten().for_each(|bucket| bucket.fill(elapsed, waited));
        }
    }

    fn on_the(&self, way: Way) -> impl Iterator<Item = &Bucket> {
        let own = if way == Way::Read { &self.reads } else { &self.writes };
        self.all.iter().chain(own)
    }

    /// Nanoseconds until a request may pass; 0: now.
    pub fn wait_ns(&self, way: Way) -> u64 {
        self.on_the(way).map(Bucket::wait_ns).max().unwrap_or(0)
    }

    /// Nanoseconds that a request of so many bytes costs: its time at the tightest bucket.
    pub fn price_ns(&self, way: Way, bytes: u64) -> u64 {
        let price = |bucket: &Bucket| bucket.cost(bytes) / i128::from(bucket.rate);
        self.on_the(way).map(price).max().map_or(0, |ns| u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// A request passes.
    pub fn charge(&mut self, way: Way, bytes: u64) {
        let own = if way == Way::Read { &mut self.reads } else { &mut self.writes };
        self.all.iter_mut().chain(own).for_each(|bucket| bucket.level -= bucket.cost(bytes));
    }

    /// The debts of buckets that are being replaced: changing a limit forgives nothing that is still to be paid, in
    /// time.
    pub fn inherit(&mut self, old: &Self) {
        for (new, old) in
            [(&mut self.all, &old.all), (&mut self.reads, &old.reads), (&mut self.writes, &old.writes)]
        {
            for bucket in new {
                let same = old.iter().find(|old| old.unit == bucket.unit);
                let level = same.map_or(bucket.level, |old| old.level.min(bucket.capacity));
                // A second at the new rate is debt enough.
                bucket.level = level.max(-i128::from(bucket.rate) * SCALE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn buckets(text: &str) -> Buckets {
        Buckets::new(&text.parse().expect("limits"), 0)
    }

    /// Requests of `bytes` one after the other for `seconds`, each as early as it may: how many pass.
    fn pass(buckets: &mut Buckets, way: Way, bytes: u64, seconds: u64) -> u64 {
        let (mut now, mut count) = (0, 0);
        while now < seconds * SECOND {
            buckets.fill(now, true);
            let wait = buckets.wait_ns(way);
            if wait == 0 {
                buckets.charge(way, bytes);
                count += 1;
            } else {
                now += wait;
            }
        }
        count
    }

    #[test]
    fn what_passes_is_the_rate_and_the_burst_and_the_one_that_goes_into_debt() {
        for (limit, bytes, each_second, burst) in [
            ("iops=500", 4096, 500, 10),
            ("iops=3", 4096, 3, 0),
            ("iops=1000000", 512, 1_000_000, 20_000),
            ("bps=50MiB", 1 << 20, 50, 1),
            ("bps=1MiB", 4096, 256, 5),
            ("bps=1MiB,burst=1s", 4096, 256, 256),
            ("iops=100,burst-ios=7", 512, 100, 7),
            ("iops=100,bps=1GiB", 4096, 100, 2),
            ("iops=100000,bps=8KiB", 4096, 2, 0),
        ] {
            let count = pass(&mut buckets(limit), Way::Read, bytes, 10);
            let want = each_second * 10 + burst;
            assert!(count.abs_diff(want) <= 1, "{limit}: {count} instead of {want}");
        }
    }

    #[test]
    fn a_request_larger_than_the_bucket_passes_and_the_next_waits_for_it() {
        let mut buckets = buckets("bps=1MiB");
        buckets.charge(Way::Write, 32 << 20);
        let wait = buckets.wait_ns(Way::Write);
        assert_eq!(wait, 32 * SECOND - SECOND / 50 + wait % 1000);
        buckets.fill(wait - 1, true);
        assert!(buckets.wait_ns(Way::Write) > 0);
        buckets.fill(wait, true);
        assert_eq!(buckets.wait_ns(Way::Write), 0);
    }

    #[test]
    fn reads_and_writes_have_their_own_buckets_and_the_one_in_common() {
        let mut buckets = buckets("iops=100,write-iops=10");
        assert!(buckets.is_split());
        buckets.charge(Way::Write, 0);
        buckets.charge(Way::Write, 0);
        assert!(buckets.wait_ns(Way::Write) > 0);
        assert_eq!(buckets.wait_ns(Way::Read), 0);
        buckets.charge(Way::Read, 4096);
        assert!(buckets.wait_ns(Way::Read) > 0);
    }

    #[test]
    fn a_rest_fills_no_more_than_the_burst_but_waiting_late_loses_nothing() {
        let mut rested = buckets("iops=1000");
        rested.fill(3600 * SECOND, false);
        let mut late = buckets("iops=1000");
        late.fill(SECOND / 2, true);
        let passing = |buckets: &mut Buckets| {
            let mut count = 0;
            while buckets.wait_ns(Way::Read) == 0 {
                buckets.charge(Way::Read, 512);
                count += 1;
            }
            count
        };
        assert_eq!((passing(&mut rested), passing(&mut late)), (21, 521));
    }

    #[test]
    fn a_changed_limit_keeps_the_debt() {
        let mut old = buckets("iops=10,bps=1MiB");
        old.charge(Way::Read, 1 << 20);
        let mut new = buckets("bps=2MiB");
        new.inherit(&old);
        let wait = new.wait_ns(Way::Read);
        assert!((480_000_000..500_000_000).contains(&wait), "{wait}");
    }
}
