//! Time as a processor that serves nothing else would count it, so that one bound holds on quiet and on busy systems.
//!
//! With twice as many runnable threads as processors, each gets half of one: a second counts half a second.

use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at how busy the system is.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// A clock that runs slower the more threads compete for the processors.
#[derive(Debug)]
pub struct QuietTime {
    processors: usize,
    counted: Duration,
    last: Instant,
}

impl QuietTime {
    /// Starts at zero.
    pub fn start() -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self { processors, counted: Duration::ZERO, last: Instant::now() }
    }

    /// What has passed by this clock. It must be asked often: what passes between two questions is counted by the
    /// threads that are runnable at the second.
    pub fn elapsed(&mut self) -> Duration {
        let passed = self.last.elapsed();
        if passed < SAMPLE_INTERVAL {
            return self.counted + passed;
        }
        let loadavg = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        self.counted += passed.mul_f64(share(self.processors, runnable(&loadavg)));
        self.last += passed;
        self.counted
    }
}

/// Threads that run or could: the first number of the fourth field of `/proc/loadavg` (proc(5)); 0 without it.
fn runnable(loadavg: &str) -> usize {
    let field = loadavg.split(' ').nth(3).and_then(|field| field.split('/').next());
    field.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// The part of a processor that each of `runnable` threads gets, at most 1.
fn share(processors: usize, runnable: usize) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "counts of processors and threads")]
    let share = processors as f64 / runnable.max(processors) as f64;
    share
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_a_processor_is_that_of_the_runnable_threads() {
        assert_eq!(runnable("7.22 2.66 1.24 6/321 20341\n"), 6);
        assert_eq!((runnable(""), runnable("a b c d/e f")), (0, 0));
        assert!((share(2, 8) - 0.25).abs() < 1e-9);
        assert!((share(2, 1) - 1.0).abs() < 1e-9 && (share(2, 0) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn it_never_runs_faster_than_the_clock_and_never_back() {
        let (begun, mut quiet) = (Instant::now(), QuietTime::start());
        let mut last = Duration::ZERO;
        while last < Duration::from_millis(250) {
            let now = quiet.elapsed();
            // A sample is counted in full until the next one: it may fall back by less than that.
            assert!(now + SAMPLE_INTERVAL >= last && now <= begun.elapsed(), "{now:?} after {last:?}");
            last = last.max(now);
            thread::sleep(Duration::from_millis(1));
        }
    }
}
