//! Adaptive polling: spin for a while after work, as long as that pays, never on a busy host.
//!
//! tapdisk polls for a fixed time after each request (`polling-duration`) when the host's idle share lies above
//! `polling-idle-threshold`. Here the time is the upper end of a window that follows the waits as they really were,
//! slept through or not: one that a spin of the time allowed would have covered opens the window, to twice its length,
//! and a longer one halves it, so that slow traffic is slept through from its first few requests on.

/// What the operator sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollingConfig {
    /// The longest spin, in nanoseconds; 0 switches polling off.
    pub max_ns: u64,
    /// Spin only while at least this share of the host's CPU time is idle, in percent; 0 always.
    pub idle_min_percent: u8,
}

impl PollingConfig {
    /// No polling.
    pub const OFF: Self = Self { max_ns: 0, idle_min_percent: 0 };
}

/// What polling has cost and brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollingCounters {
    /// Nanoseconds spent spinning.
    pub spin_ns: u64,
    /// Spins that found work.
    pub hits: u64,
    /// Spins that ended without any.
    pub misses: u64,
    /// Times that the host was too busy to spin.
    pub refused: u64,
}

/// The smallest window worth a try: about what sleeping and waking would cost.
const WINDOW_MIN_NS: u64 = 4_000;
/// What being woken may add to a wait that is slept through; much, where an idle processor has been halted.
const WAKE_UP_MAX_NS: u64 = 100_000;
/// How long a reading of the host's load is used.
const LOAD_VALID_NS: u64 = 1_000_000_000;
/// After this many waits of which it cannot be told whether a spin would have covered them, one is tried.
const RETRY_AFTER: u32 = 64;
/// So many spins in a row may end just before the work comes. More, and it is spinning that keeps the work away: the
/// guest waits for this very processor.
const LATE_MISSES_MAX: u32 = 4;

/// The state of the poller.
#[derive(Debug)]
pub struct Polling {
    config: PollingConfig,
    window_ns: u64,
    /// Waits of which it cannot be told whether a spin would have covered them, since one was tried.
    unclear: u32,
    /// Spins in a row that found nothing, although the work came soon after they had ended.
    late_misses: u32,
    /// How long the current wait was spun without finding work.
    spun_ns: u64,
    counters: PollingCounters,
    host: HostIdle,
}

impl Polling {
    /// A poller with this configuration. It begins with the whole window, as tapdisk does.
    pub fn new(config: PollingConfig) -> Self {
        Self {
            config,
            window_ns: config.max_ns,
            unclear: 0,
            late_misses: 0,
            spun_ns: 0,
            counters: PollingCounters::default(),
            host: HostIdle::default(),
        }
    }

    /// Changes the configuration, and begins again with the whole window.
    pub fn set(&mut self, config: PollingConfig) {
        self.config = config;
        self.window_ns = config.max_ns;
        (self.unclear, self.late_misses) = (0, 0);
    }

    /// The configuration in force.
    pub fn config(&self) -> PollingConfig {
        self.config
    }

    /// What polling did so far.
    pub fn counters(&self) -> PollingCounters {
        self.counters
    }

    /// Whether to spin at all now.
    pub(crate) fn wants(&self) -> bool {
        self.config.max_ns > 0
    }

    /// The window for the spin that begins now, in nanoseconds; 0 when it is not worth it or not allowed.
    pub(crate) fn window_ns(&mut self) -> u64 {
        if self.window_ns > 0 && self.config.idle_min_percent > 0 {
            let idle = self.host.percent();
            if idle < self.config.idle_min_percent {
                self.counters.refused += 1;
                return 0;
            }
        }
        self.window_ns
    }

    /// A spin is over after `spent_ns` nanoseconds, and has found work or not.
    pub(crate) fn spun(&mut self, spent_ns: u64, found: bool) {
        self.counters.spin_ns += spent_ns;
        if found {
            self.counters.hits += 1;
            (self.late_misses, self.spun_ns) = (0, 0);
        } else {
            self.counters.misses += 1;
            self.spun_ns = spent_ns;
        }
    }

    /// Work has ended a wait of `wait_ns` nanoseconds, spun and slept together.
    pub(crate) fn waited(&mut self, wait_ns: u64) {
        let max_ns = self.config.max_ns;
        let spun_ns = std::mem::take(&mut self.spun_ns);
        if spun_ns > 0 && wait_ns.saturating_sub(spun_ns) <= max_ns {
            self.late_misses = (self.late_misses + 1).min(LATE_MISSES_MAX);
        }
        // Not the whole window at once: where short waits (for the storage) and long ones (for the guest) take turns,
        // each long one costs a spin that finds nothing, which should be no longer than the short ones are worth.
        let enough = wait_ns.saturating_mul(2).max(WINDOW_MIN_NS).min(max_ns);
        let is_hopeless = self.late_misses == LATE_MISSES_MAX;
        if spun_ns > 0 && is_hopeless {
            self.window_ns = 0;
        } else if wait_ns <= max_ns && !is_hopeless {
            self.window_ns = self.window_ns.max(enough);
        } else if self.window_ns > 0 {
            self.window_ns /= 2;
            if self.window_ns < WINDOW_MIN_NS {
                self.window_ns = 0;
            }
        } else if wait_ns <= max_ns.saturating_add(WAKE_UP_MAX_NS) {
            self.unclear += 1;
            if self.unclear == RETRY_AFTER {
                self.unclear = 0;
                self.window_ns = enough;
            }
        }
    }
}

/// The share of CPU time that the host was idle, from `/proc/stat`, read at most once a second and only while polling.
#[derive(Debug, Default)]
struct HostIdle {
    read_at: Option<std::time::Instant>,
    last: Option<(u64, u64)>,
    percent: u8,
}

impl HostIdle {
    fn percent(&mut self) -> u8 {
        let now = std::time::Instant::now();
        let fresh =
            self.read_at.is_some_and(|at| now.duration_since(at).as_nanos() < u128::from(LOAD_VALID_NS));
        if fresh {
            return self.percent;
        }
        self.read_at = Some(now);
        let mut text = [0; 512];
        let Some((idle, total)) = read_stat(&mut text) else { return self.percent };
        // The first reading has nothing to be compared with: since boot is the best there is.
        let (idle_before, total_before) = self.last.unwrap_or((0, 0));
        let (idle_step, total_step) = (idle.saturating_sub(idle_before), total.saturating_sub(total_before));
        if let Some(percent) = (idle_step * 100).checked_div(total_step) {
            self.percent = percent.min(100) as u8;
        }
        self.last = Some((idle, total));
        self.percent
    }
}

fn read_stat(text: &mut [u8]) -> Option<(u64, u64)> {
    use std::io::Read;
    let len = std::fs::File::open("/proc/stat").ok()?.read(text).ok()?;
    parse_cpu_line(std::str::from_utf8(&text[..len]).ok()?.lines().next()?)
}

/// `(idle, total)` ticks of the line `cpu user nice system idle iowait irq softirq steal ...` (proc(5)).
fn parse_cpu_line(line: &str) -> Option<(u64, u64)> {
    let mut fields =
        line.strip_prefix("cpu ")?.split_ascii_whitespace().map(|field| field.parse::<u64>().unwrap_or(0));
    let (mut idle, mut total) = (0, 0);
    for index in 0..8 {
        let ticks = fields.next()?;
        total += ticks;
        if index == 3 || index == 4 {
            idle += ticks;
        }
    }
    Some((idle, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1_000;

    fn polling(max_us: u64) -> Polling {
        Polling::new(PollingConfig { max_ns: max_us * US, idle_min_percent: 0 })
    }

    /// What the executor does with a wait that lasts `wait_ns` when it is spun through, and `woken_ns` longer when it
    /// is slept through. Returns whether spinning found its end.
    fn wait(polling: &mut Polling, wait_ns: u64, woken_ns: u64) -> bool {
        let window = polling.window_ns();
        let found = wait_ns <= window;
        if window > 0 {
            polling.spun(wait_ns.min(window), found);
        }
        polling.waited(if found { wait_ns } else { wait_ns + woken_ns });
        found
    }

    fn hits(polling: &mut Polling, waits_us: &[u64]) -> Vec<bool> {
        waits_us.iter().map(|wait_us| wait(polling, wait_us * US, 0)).collect()
    }

    #[test]
    fn waits_shorter_than_what_is_allowed_are_polled_from_the_second_request_on() {
        for wait_us in [1, 10, 20, 30, 32] {
            let mut begun = polling(32);
            assert_eq!(hits(&mut begun, &[wait_us; 20]), [true; 20], "{wait_us} us, with a fresh poller");
            let mut asleep = polling(32);
            asleep.window_ns = 0;
            let found = hits(&mut asleep, &[wait_us; 20]);
            assert!(!found[0] && found[1..].iter().all(|found| *found), "{wait_us} us: {found:?}");
        }
    }

    #[test]
    fn slow_traffic_ends_with_no_spinning() {
        for (max_us, wait_us) in [(32, 1_000), (32, 133), (8_000, 10_000), (8_000, 1_000_000)] {
            let mut slow = polling(max_us);
            assert_eq!(hits(&mut slow, &[wait_us; 12]), [false; 12]);
            let before = slow.counters();
            assert!(before.spin_ns < 2 * max_us * US, "{before:?}");
            assert_eq!(hits(&mut slow, &[wait_us; 1_000]), [false; 1_000]);
            assert_eq!(slow.counters(), before, "waits of {wait_us} us, {max_us} us allowed");
        }
    }

    #[test]
    fn a_change_from_fast_to_slow_and_back_is_followed_within_a_few_requests() {
        let mut changing = polling(32);
        for _ in 0..5 {
            let found = hits(&mut changing, &[20; 10]);
            assert!(found[1..].iter().all(|found| *found), "{found:?}");
            hits(&mut changing, &[1_000; 4]);
            let before = changing.counters();
            hits(&mut changing, &[1_000; 10]);
            assert_eq!(changing.counters(), before);
        }
    }

    #[test]
    fn short_waits_among_long_ones_cost_no_more_than_they_are_worth() {
        let mut mixed = polling(8_000);
        hits(&mut mixed, &[20_000; 12]);
        let before = mixed.counters();
        for _ in 0..100 {
            hits(&mut mixed, &[20, 20_000]);
        }
        let spun = mixed.counters().spin_ns - before.spin_ns;
        assert!(spun <= 100 * (20 + 2 * 20) * US, "{spun} ns");
    }

    #[test]
    fn a_wait_that_only_waking_up_makes_too_long_is_tried_again_by_spinning() {
        let mut polling = polling(32);
        hits(&mut polling, &[1_000; 4]);
        let tries = (0..RETRY_AFTER).filter(|_| wait(&mut polling, 20 * US, 50 * US)).count();
        assert_eq!(tries, 0);
        assert!((0..100).all(|_| wait(&mut polling, 20 * US, 50 * US)));
        // In vain, it costs little.
        hits(&mut polling, &[1_000; 4]);
        let before = polling.counters();
        assert_eq!(hits(&mut polling, &[60; 680]), [false; 680]);
        let spun = polling.counters().spin_ns - before.spin_ns;
        assert!(spun > 0 && spun <= 680 * 60 * US / 50, "{spun} ns");
    }

    #[test]
    fn spinning_that_keeps_the_guest_from_running_ends_and_comes_back_when_it_can_pay() {
        for max_us in [32, 8_000] {
            let mut polling = polling(max_us);
            // The guest's part of a round trip begins when we let go of the processor.
            let blocked = |polling: &mut Polling| {
                let window = polling.window_ns();
                if window > 0 {
                    polling.spun(window, false);
                }
                polling.waited(window + 15 * US);
            };
            (0..10).for_each(|_| blocked(&mut polling));
            let before = polling.counters();
            assert!(before.misses <= 5, "{before:?}");
            (0..640).for_each(|_| blocked(&mut polling));
            let spun = polling.counters().spin_ns - before.spin_ns;
            assert!(spun <= 640 * 15 * US / 20, "{spun} ns");
            // It has got a processor of its own.
            let found = (0..200).filter(|_| wait(&mut polling, 15 * US, 5 * US)).count();
            assert!(found > 200 - RETRY_AFTER as usize - 2, "{found}");
        }
    }

    #[test]
    fn the_counters_say_what_was_spun() {
        let mut polling = polling(32);
        hits(&mut polling, &[10, 100, 20, 1_000]);
        let expected = PollingCounters { spin_ns: (10 + 32 + 16 + 32) * US, hits: 1, misses: 3, refused: 0 };
        assert_eq!(polling.counters(), expected);
    }

    #[test]
    fn polling_that_is_off_never_spins_and_a_new_setting_begins_anew() {
        let mut polling = Polling::new(PollingConfig::OFF);
        assert!(!polling.wants());
        hits(&mut polling, &[0, 1, 1_000]);
        assert_eq!((polling.window_ns(), polling.counters()), (0, PollingCounters::default()));
        polling.set(PollingConfig { max_ns: 50 * US, idle_min_percent: 0 });
        assert!(polling.wants());
        assert_eq!(polling.window_ns(), 50 * US);
    }

    #[test]
    fn the_cpu_line_counts_waiting_for_disks_as_idle() {
        assert_eq!(parse_cpu_line("cpu  10 0 20 60 5 1 2 2 0 0"), Some((65, 100)));
        assert_eq!(parse_cpu_line("intr 5"), None);
    }

    #[test]
    fn a_host_that_is_never_idle_enough_is_never_polled_on() {
        let mut polling = Polling::new(PollingConfig { max_ns: 50_000, idle_min_percent: 101 });
        assert_eq!(polling.window_ns(), 0);
        assert_eq!(polling.counters().refused, 1);
    }
}
