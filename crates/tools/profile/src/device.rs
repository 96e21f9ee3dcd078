//! What is measured, behind a trait: a file or block device, or in tests a model of one with a clock of its own.

use std::io;
use std::time::Duration;

use serde::Serialize;

/// How requests are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shape {
    /// At random places; one after the other otherwise.
    pub random: bool,
    /// Writes; reads otherwise.
    pub write: bool,
    /// Bytes of a request.
    pub block_len: u64,
    /// Requests in flight.
    pub depth: u32,
}

impl Shape {
    /// Bytes in flight.
    pub const fn in_flight(&self) -> u64 {
        self.block_len * self.depth as u64
    }

    /// As a heading has it.
    pub const fn name(random: bool, write: bool) -> &'static str {
        match (random, write) {
            (true, false) => "random reads",
            (true, true) => "random writes",
            (false, false) => "sequential reads",
            (false, true) => "sequential writes",
        }
    }
}

/// What came of requests of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// How they were made.
    pub shape: Shape,
    /// Requests that were answered.
    pub requests: u64,
    /// Those answered with an error.
    pub errors: u64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Microseconds that a tenth of the requests did not exceed: the target without its queues.
    pub p10_us: f64,
    /// The median, in microseconds.
    pub p50_us: f64,
    /// In microseconds.
    pub p90_us: f64,
    /// In microseconds.
    pub p99_us: f64,
    /// In microseconds.
    pub p999_us: f64,
    /// The longest, in microseconds.
    pub max_us: f64,
}

impl Sample {
    /// Megabytes (10^6) per second.
    pub fn mb_s(&self) -> f64 {
        self.bytes_per_s / 1e6
    }
}

/// One read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Nanoseconds that it took.
    pub ns: u64,
    /// All its bytes were zero.
    pub is_zero: bool,
}

/// A target. Every error names no object: the caller does.
pub trait Device {
    /// Bytes.
    fn len(&self) -> u64;

    /// Whether there is nothing to measure.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the smallest request.
    fn sector_len(&self) -> u64;

    /// Makes requests of `shape` over the whole target for `time`, at most `requests_max`, and waits for all answers.
    ///
    /// # Errors
    /// The target cannot be used. Requests that fail are counted instead.
    fn load(&mut self, shape: Shape, time: Duration, requests_max: u64) -> io::Result<Sample>;

    /// Reads once, with nothing else in flight.
    ///
    /// # Errors
    /// The read failed.
    fn read(&mut self, at: u64, len: u64) -> io::Result<Read>;

    /// Reads in two places at once; nanoseconds until both were read.
    ///
    /// # Errors
    /// A read failed.
    fn read_pair(&mut self, at: [u64; 2], len: u64) -> io::Result<u64>;
}
