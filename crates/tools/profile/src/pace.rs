//! Time: how long parts of a run may take, when it is to stop, and what is said meanwhile.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The shortest time that one point is measured.
const POINT_MIN: Duration = Duration::from_millis(20);
/// The longest, as in the seed's script.
const POINT_MAX: Duration = Duration::from_secs(30);

/// The end of a part of a run.
pub struct Pace<'a> {
    stop: &'a AtomicBool,
    until: Instant,
    /// The whole run: when it began and ends.
    whole: (Instant, Instant),
    tell: &'a dyn Fn(Progress<'_>),
    what: Cell<&'static str>,
}

/// What is told while a run goes on.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// What is measured.
    pub what: &'a str,
    /// The share of the whole time that has passed, 0 to 1.
    pub share: f64,
    /// What is left, at most.
    pub left: Duration,
}

impl fmt::Debug for Pace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pace").field("left", &self.left()).finish_non_exhaustive()
    }
}

impl<'a> Pace<'a> {
    /// A run of at most `time`, which ends early when `stop` is set.
    pub fn new(stop: &'a AtomicBool, time: Duration, tell: &'a dyn Fn(Progress<'_>)) -> Self {
        let now = Instant::now();
        let until = now + time;
        Self { stop, until, whole: (now, until), tell, what: Cell::new("") }
    }

    /// A part that may take a share of what is left.
    pub fn part(&self, what: &'static str, share: f64) -> Self {
        let until = Instant::now() + self.left().mul_f64(share.clamp(0.0, 1.0));
        Self { stop: self.stop, until, whole: self.whole, tell: self.tell, what: Cell::new(what) }
    }

    /// What is left of it.
    pub fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Ctrl-C was pressed.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Whether to begin nothing more.
    pub fn is_over(&self) -> bool {
        self.is_stopped() || self.left().is_zero()
    }

    /// How long one of `points` that are left is measured. Tells how far the run is.
    pub fn slice(&self, points: usize) -> Duration {
        let (begin, end) = self.whole;
        let whole = (end - begin).as_secs_f64().max(1e-9);
        let left = end.saturating_duration_since(Instant::now());
        let share = (1.0 - left.as_secs_f64() / whole).clamp(0.0, 1.0);
        (self.tell)(Progress { what: self.what.get(), share, left });
        (self.left() / u32::try_from(points.max(1)).unwrap_or(u32::MAX)).clamp(POINT_MIN, POINT_MAX)
    }
}

/// Numbers below `count` in an order of which every beginning is spread over all of them.
pub fn spread(count: usize) -> Vec<usize> {
    let bits = count.next_power_of_two().trailing_zeros();
    let all = 0..count.next_power_of_two();
    let reversed = |index: usize| if bits == 0 { 0 } else { index.reverse_bits() >> (usize::BITS - bits) };
    all.map(reversed).filter(|index| *index < count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_once_and_early_ones_are_far_apart() {
        for count in [0, 1, 2, 7, 64, 100] {
            let mut all = spread(count);
            if count == 64 {
                assert_eq!(all[..4], [0, 32, 16, 48]);
            }
            all.sort_unstable();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_part_ends_with_its_share_or_when_it_is_stopped() {
        let (stop, told) = (AtomicBool::new(false), Cell::new(0));
        let tell = |progress: Progress<'_>| {
            assert!(progress.what == "sweep" && (0.0..=1.0).contains(&progress.share));
            told.set(told.get() + 1);
        };
        let pace = Pace::new(&stop, Duration::from_secs(1000), &tell);
        let part = pace.part("sweep", 0.5);
        assert!(part.left() <= Duration::from_secs(500) && !part.is_over());
        assert_eq!(part.slice(1), POINT_MAX);
        assert_eq!((part.slice(1_000_000), told.get()), (POINT_MIN, 2));
        stop.store(true, Ordering::Relaxed);
        assert!(part.is_over() && pace.is_stopped());
        assert!(Pace::new(&stop, Duration::ZERO, &tell).is_over());
    }
}
