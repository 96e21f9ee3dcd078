//! A load on one queue, and what came of it.

use std::io;
use std::time::{Duration, Instant};

use super::queue::{Command, Completion, DriverQueue};

/// What to do, request by request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Reads at random places.
    RandomRead,
    /// Writes at random places.
    RandomWrite,
    /// Reads one after the other.
    SequentialRead,
    /// Writes one after the other.
    SequentialWrite,
}

/// A load.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// What to do.
    pub mix: Mix,
    /// Bytes of each request, a multiple of 512.
    pub block_len: u32,
    /// Requests in flight.
    pub depth: usize,
    /// Bytes of the disk to use, from its start.
    pub span_len: u64,
    /// For how long.
    pub time: Duration,
    /// For how many requests, at most; `u64::MAX` for as many as the time allows.
    pub requests_max: u64,
    /// Spin for answers rather than sleep.
    pub spin: bool,
    /// Where the random places begin.
    pub seed: u64,
}

/// What came of a load.
#[derive(Clone, Debug, Default)]
pub struct LoadReport {
    /// Requests answered.
    pub count: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// How long it took.
    pub time: Duration,
    /// Times the device was kicked.
    pub kicks: u64,
    /// Latencies by power of two of nanoseconds: `[n]` counts those of `2^n` to `2^(n+1)`, in quarters.
    pub latency: Vec<u64>,
}

/// Steps of the histogram in one power of two.
const STEPS: u32 = 8;

impl LoadReport {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.count as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// The latency in nanoseconds that `share` (0 to 1) of the requests did not exceed, to within an eighth.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let mut left = (self.count as f64 * share) as u64;
        for (index, count) in self.latency.iter().enumerate() {
            if left < *count {
                let (power, step) = (index as u32 / STEPS, index as u32 % STEPS);
                return (1u64 << power) + ((1u64 << power) / u64::from(STEPS)) * u64::from(step + 1);
            }
            left -= count;
        }
        0
    }

    fn note(&mut self, ns: u64) {
        let ns = ns.max(STEPS.into());
        let power = ns.ilog2();
        let step = (ns >> (power - STEPS.ilog2())) as u32 % STEPS;
        self.latency[(power * STEPS + step) as usize] += 1;
    }
}

impl Load {
    /// Runs the load. The queue's slots must be as large as a block and as many as the depth.
    pub fn run(&self, queue: &mut DriverQueue) -> io::Result<LoadReport> {
        let mut report = LoadReport { latency: vec![0; 64 * STEPS as usize], ..LoadReport::default() };
        let mut issued: Vec<Instant> = vec![Instant::now(); queue.room()];
        let blocks = (self.span_len / u64::from(self.block_len)).max(1);
        let mut done: Vec<Completion> = Vec::with_capacity(queue.room());
        let (mut state, mut position, mut under_way) = (self.seed | 1, 0, 0);
        let (begin, kicks) = (Instant::now(), queue.kicks);
        queue.want_interrupts(!self.spin);
        let (mut now, mut started) = (begin, 0);
        let going_on = |now: Instant, started: u64| now < begin + self.time && started < self.requests_max;
        while under_way > 0 || going_on(now, started) {
            if going_on(now, started) {
                while under_way < self.depth
                    && started < self.requests_max
                    && let Some(slot) = queue.next_slot()
                {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    position += 1;
                    let random = matches!(self.mix, Mix::RandomRead | Mix::RandomWrite);
                    let block = if random { (state >> 24) % blocks } else { position % blocks };
                    let (at, len) = (block * u64::from(self.block_len), self.block_len);
                    let command = match self.mix {
                        Mix::RandomRead | Mix::SequentialRead => Command::Read { at, len },
                        Mix::RandomWrite | Mix::SequentialWrite => Command::Write { at, len },
                    };
                    queue.submit(&command);
                    issued[usize::from(slot)] = now;
                    under_way += 1;
                    started += 1;
                }
                queue.kick()?;
            }
            if self.spin {
                let mut spins = 0u32;
                while !queue.has_answers() && spins < 1_000_000 {
                    spins += 1;
                    std::hint::spin_loop();
                }
            } else {
                queue.wait(Duration::from_secs(5))?;
            }
            done.clear();
            if queue.reap(&mut done) == 0 && !self.spin {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in five seconds"));
            }
            now = Instant::now();
            for completion in &done {
                report.note((now - issued[usize::from(completion.slot)]).as_nanos() as u64);
                report.errors += u64::from(completion.status != 0);
            }
            report.count += done.len() as u64;
            under_way -= done.len();
        }
        report.time = begin.elapsed();
        report.kicks = queue.kicks - kicks;
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_an_eighth() {
        let mut report = LoadReport { latency: vec![0; 64 * STEPS as usize], ..LoadReport::default() };
        for ns in 1..=10_000u64 {
            report.note(ns);
            report.count += 1;
        }
        for share in [0.1, 0.5, 0.9, 0.99] {
            let (want, got) = (10_000.0 * share, report.quantile_ns(share) as f64);
            assert!((got - want).abs() <= want / 8.0 + 8.0, "{share}: {got} instead of {want}");
        }
    }
}
