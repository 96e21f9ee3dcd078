//! A load on one queue, and what came of it.

use std::io;
use std::time::{Duration, Instant};

use super::queue::{Command, Completion, FrontQueue};
use crate::blkif::status;

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
    /// Bytes of each request, a multiple of the sector.
    pub block_len: u32,
    /// Requests in flight, as far as there are slots.
    pub depth: u32,
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
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// Requests answered.
    pub count: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// How long it took.
    pub time: Duration,
    /// Times the back end was notified.
    pub kicks: u64,
    /// Times it notified us.
    pub wakes: u64,
    latency: Box<[u64; BUCKETS]>,
}

/// Steps of the histogram in one power of two.
const STEPS: u32 = 16;
const BUCKETS: usize = 64 * STEPS as usize;

impl Default for LoadReport {
    fn default() -> Self {
        let latency = Box::new([0; BUCKETS]);
        Self { count: 0, errors: 0, time: Duration::ZERO, kicks: 0, wakes: 0, latency }
    }
}

impl LoadReport {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.count as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// The latency in nanoseconds that `share` (0 to 1) of the requests did not exceed, to within a sixteenth.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let mut left = (self.count as f64 * share) as u64;
        for (index, count) in self.latency.iter().enumerate() {
            if left < *count {
                let (power, step) = (index as u32 / STEPS, index as u64 % u64::from(STEPS));
                let base = 1u64 << power;
                return base + base / u64::from(STEPS) * (step + 1);
            }
            left -= count;
        }
        0
    }

    /// Adds what came of another queue, which ran at the same time.
    pub fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.errors += other.errors;
        self.time = self.time.max(other.time);
        self.kicks += other.kicks;
        self.wakes += other.wakes;
        for (sum, count) in self.latency.iter_mut().zip(other.latency.iter()) {
            *sum += count;
        }
    }

    fn note(&mut self, ns: u64) {
        let ns = ns.max(STEPS.into());
        let power = ns.ilog2();
        let step = (ns >> (power - STEPS.ilog2())) as u32 % STEPS;
        self.latency[(power * STEPS + step) as usize] += 1;
    }
}

impl Load {
    /// Where a request goes, the `number`th.
    fn command(&self, state: &mut u64, number: u64) -> Command {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let blocks = (self.span_len / u64::from(self.block_len)).max(1);
        let random = matches!(self.mix, Mix::RandomRead | Mix::RandomWrite);
        let block = if random { (*state >> 24) % blocks } else { number % blocks };
        let (at, len) = (block * u64::from(self.block_len), self.block_len);
        match self.mix {
            Mix::RandomRead | Mix::SequentialRead => Command::Read { at, len },
            Mix::RandomWrite | Mix::SequentialWrite => Command::Write { at, len },
        }
    }

    /// Runs the load. The queue's slots must be as large as a block; nothing else may be under way.
    ///
    /// # Errors
    /// The ring is broken, or no answer comes for five seconds.
    pub fn run(&self, queue: &mut FrontQueue) -> io::Result<LoadReport> {
        let mut report = LoadReport::default();
        let room = queue.room();
        let mut issued = vec![Instant::now(); room];
        let mut done: Vec<Completion> = Vec::with_capacity(room);
        let (mut state, mut started, mut under_way) = (self.seed | 1, 0u64, 0u32);
        let (kicks, wakes) = (queue.kicks, queue.wakes);
        let begin = Instant::now();
        let mut now = begin;
        loop {
            let more = now < begin + self.time && started < self.requests_max;
            if more {
                while under_way < self.depth && started < self.requests_max {
                    let Some(id) = queue.submit(&self.command(&mut state, started))? else { break };
                    issued[FrontQueue::slot_of(id) as usize] = now;
                    (under_way, started) = (under_way + 1, started + 1);
                }
            } else if under_way == 0 {
                break;
            }
            queue.kick()?;
            if self.spin {
                let mut spins = 0u32;
                while !queue.has_answers() {
                    spins = spins.wrapping_add(1);
                    std::hint::spin_loop();
                    // Time is asked for rarely: it is what is measured.
                    if spins.is_multiple_of(1 << 20) && now.elapsed() > Duration::from_secs(5) {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in five seconds"));
                    }
                }
            } else if !queue.wait(Duration::from_secs(5))? {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in five seconds"));
            }
            done.clear();
            queue.reap(&mut done)?;
            now = Instant::now();
            for completion in &done {
                let Some(slot) = completion.slot else { continue };
                report.note((now - issued[slot as usize]).as_nanos() as u64);
                report.errors += u64::from(completion.status != status::OKAY);
                report.count += 1;
                under_way -= 1;
            }
        }
        report.time = begin.elapsed();
        (report.kicks, report.wakes) = (queue.kicks - kicks, queue.wakes - wakes);
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_sixteenth() {
        let mut report = LoadReport::default();
        for ns in 1..=10_000u64 {
            report.note(ns);
            report.count += 1;
        }
        let mut twice = report.clone();
        twice.add(&report);
        assert_eq!(twice.count, 20_000);
        for share in [0.1, 0.5, 0.9, 0.99] {
            for report in [&report, &twice] {
                let (want, got) = (10_000.0 * share, report.quantile_ns(share) as f64);
                assert!((got - want).abs() <= want / 16.0 + 16.0, "{share}: {got} instead of {want}");
            }
        }
    }
}
