//! What stamps are made of.

use std::fs;
use std::time::Duration;

/// Where stamps come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// `CLOCK_MONOTONIC_RAW`, in nanoseconds.
    Monotonic,
    /// The processor's time stamp counter.
    Tsc,
}

/// The shortest time from which the counter's speed is taken.
const BASELINE: Duration = Duration::from_millis(20);

impl Clock {
    /// The best that this host has.
    pub fn best() -> Self {
        if cfg!(target_arch = "x86_64")
            && fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| is_even(&text))
        {
            Self::Tsc
        } else {
            Self::Monotonic
        }
    }

    /// Its number in a ring's head.
    pub(super) const fn number(self) -> u64 {
        match self {
            Self::Monotonic => 0,
            Self::Tsc => 1,
        }
    }

    pub(super) const fn of_number(number: u64) -> Option<Self> {
        match number {
            0 => Some(Self::Monotonic),
            1 => Some(Self::Tsc),
            _ => None,
        }
    }

    /// As reports name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Monotonic => "CLOCK_MONOTONIC_RAW",
            Self::Tsc => "time stamp counter",
        }
    }

    /// Ticks now.
    #[inline]
    pub fn now(self) -> u64 {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: every x86-64 processor has the instruction, and it touches no memory.
            Self::Tsc => unsafe { std::arch::x86_64::_rdtsc() },
            #[cfg(not(target_arch = "x86_64"))]
            Self::Tsc => raw_ns(),
            Self::Monotonic => raw_ns(),
        }
    }

    /// How fast it runs, from a moment `then` on, given as its ticks and nanoseconds of `CLOCK_MONOTONIC_RAW`. Waits
    /// where that moment was just now.
    pub fn rate_since(self, then: (u64, u64)) -> Rate {
        if self == Self::Monotonic {
            return Rate { ns_per_tick: 1.0 };
        }
        let since = Duration::from_nanos(raw_ns().saturating_sub(then.1));
        std::thread::sleep(BASELINE.saturating_sub(since));
        let (ticks, ns) = self.pair();
        let (ticks, ns) = (ticks.saturating_sub(then.0), ns.saturating_sub(then.1));
        Rate { ns_per_tick: if ticks == 0 { 1.0 } else { ns as f64 / ticks as f64 } }
    }

    /// This moment, in ticks and in nanoseconds.
    pub fn pair(self) -> (u64, u64) {
        (self.now(), raw_ns())
    }
}

/// How long a tick is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Nanoseconds.
    pub ns_per_tick: f64,
}

impl Rate {
    /// The time from one stamp to a later one, in nanoseconds; none where the second is the earlier one.
    pub fn ns(self, from: u64, to: u64) -> u64 {
        (to.saturating_sub(from) as f64 * self.ns_per_tick) as u64
    }
}

/// Whether what `/proc/cpuinfo` says of the first processor guarantees an even counter.
fn is_even(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    let has = |name: &str| flags.is_some_and(|line| line.split_ascii_whitespace().any(|word| word == name));
    has("constant_tsc") && has("nonstop_tsc")
}

fn raw_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is ours to be written; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_RAW, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_both_promises_make_a_counter_even() {
        assert!(is_even("processor\t: 0\nflags\t\t: fpu nonstop_tsc sse constant_tsc\n"));
        assert!(!is_even("flags\t\t: fpu constant_tsc\n") && !is_even("flags : nonstop_tscx constant_tsc"));
        assert!(!is_even(""));
    }

    #[test]
    fn a_clock_runs_as_fast_as_the_other() {
        for clock in [Clock::Monotonic, Clock::best()] {
            let compared = || {
                let then = clock.pair();
                let rate = clock.rate_since(then);
                let (first, begin) = clock.pair();
                std::thread::sleep(Duration::from_millis(30));
                let (second, end) = clock.pair();
                assert_eq!(rate.ns(second, first), 0);
                (rate.ns(first, second) as f64, (end - begin) as f64)
            };
            // A busy host may take the processor away between the two halves of a pair.
            let mut compared = std::iter::repeat_with(compared).take(50);
            let even = compared.any(|(found, want)| (found / want - 1.0).abs() < 0.02);
            assert!(even, "{clock:?} runs at another speed");
        }
    }
}
