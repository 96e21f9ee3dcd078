//! Adaptive polling: spin for a while after work, as long as that pays, never on a busy host.
//!
//! tapdisk polls for a fixed time after each request (`polling-duration`) when the host's idle share lies above
//! `polling-idle-threshold`. Here the time is the upper end of a window that doubles when spinning found work and
//! halves when it did not, so that a disk with slow traffic falls back to sleeping by itself.

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
/// How long a reading of the host's load is used.
const LOAD_VALID_NS: u64 = 1_000_000_000;
/// After this many sleeps in a row without spinning, one spin is tried again.
const RETRY_AFTER: u32 = 64;

/// The state of the poller.
#[derive(Debug)]
pub struct Polling {
    config: PollingConfig,
    window_ns: u64,
    sleeps: u32,
    counters: PollingCounters,
    host: HostIdle,
}

impl Polling {
    /// A poller with this configuration.
    pub fn new(config: PollingConfig) -> Self {
        Self {
            config,
            window_ns: config.max_ns.min(WINDOW_MIN_NS * 4),
            sleeps: 0,
            counters: PollingCounters::default(),
            host: HostIdle::default(),
        }
    }

    /// Changes the configuration.
    pub fn set(&mut self, config: PollingConfig) {
        self.config = config;
        self.window_ns = config.max_ns.min(WINDOW_MIN_NS * 4);
        self.sleeps = 0;
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
        if self.window_ns == 0 {
            self.sleeps += 1;
            if self.sleeps < RETRY_AFTER {
                return 0;
            }
            self.sleeps = 0;
            self.window_ns = WINDOW_MIN_NS.min(self.config.max_ns);
        }
        if self.config.idle_min_percent > 0 {
            let idle = self.host.percent();
            if idle < self.config.idle_min_percent {
                self.counters.refused += 1;
                return 0;
            }
        }
        self.window_ns
    }

    pub(crate) fn hit(&mut self, spent_ns: u64) {
        self.counters.hits += 1;
        self.counters.spin_ns += spent_ns;
        self.window_ns = (self.window_ns.max(WINDOW_MIN_NS) * 2).min(self.config.max_ns);
    }

    pub(crate) fn miss(&mut self, spent_ns: u64) {
        if self.window_ns == 0 || spent_ns < self.window_ns {
            return;
        }
        self.counters.misses += 1;
        self.counters.spin_ns += spent_ns;
        self.window_ns /= 2;
        if self.window_ns < WINDOW_MIN_NS {
            self.window_ns = 0;
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

    #[test]
    fn the_window_grows_on_hits_up_to_the_limit_and_dies_on_misses() {
        let mut polling = Polling::new(PollingConfig { max_ns: 50_000, idle_min_percent: 0 });
        for _ in 0..5 {
            polling.hit(10);
        }
        assert_eq!(polling.window_ns(), 50_000);
        for _ in 0..8 {
            let window = polling.window_ns();
            polling.miss(window);
        }
        assert_eq!(polling.window_ns(), 0);
        assert_eq!(polling.counters().hits, 5);
    }

    #[test]
    fn a_dead_window_is_tried_again_after_a_while() {
        let mut polling = Polling::new(PollingConfig { max_ns: 50_000, idle_min_percent: 0 });
        while polling.window_ns > 0 {
            let window = polling.window_ns();
            polling.miss(window);
        }
        let tries = (0..RETRY_AFTER).filter(|_| polling.window_ns() > 0).count();
        assert_eq!(tries, 1);
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
