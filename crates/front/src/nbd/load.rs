//! A load generator: some connections, each with some requests under way, for some time.
//!
//! Each connection is a thread that receives what has come, answers every reply with a new request and sends all of
//! these at once, so that it costs less than any server it measures.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use tapio_nbd::socket::write_all;

use super::client::{Address, Client, ClientError, Wishes};
use super::wire::{
    ReplyHeader, RequestHeader, Style, chunk, command, command_flag, error, parse_reply, put_request,
};

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// Whether to write rather than to read.
    pub write: bool,
    /// Bytes of one request.
    pub block_len: u32,
    /// Requests under way on each connection.
    pub depth: usize,
    /// Connections.
    pub connections: usize,
    /// Random offsets rather than one after the other.
    pub random: bool,
    /// The part of the export that is used, from its beginning, in bytes; 0 for all of it.
    pub span_len: u64,
    /// How long.
    pub time: Duration,
    /// Requests on each connection, at most; `u64::MAX` for as many as the time allows.
    pub requests_max: u64,
    /// Where the random offsets start from.
    pub seed: u64,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadReport {
    /// Requests answered.
    pub requests: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Seconds it took.
    pub seconds: f64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Latency that half of the requests stayed below, in nanoseconds.
    pub p50_ns: u64,
    /// The same for 99 in 100.
    pub p99_ns: u64,
    /// The slowest.
    pub max_ns: u64,
}

impl LoadReport {
    /// Requests per second.
    pub fn iops(&self) -> f64 {
        self.requests as f64 / self.seconds.max(1e-9)
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(1e-9)
    }
}

/// Latencies in 16 buckets for each power of two.
struct Histogram {
    counts: Vec<u64>,
    max_ns: u64,
}

impl Histogram {
    fn new() -> Self {
        Self { counts: vec![0; 64 * 16], max_ns: 0 }
    }

    fn bucket(ns: u64) -> usize {
        let ns = ns.max(16);
        let power = 63 - ns.leading_zeros() as usize;
        power * 16 + ((ns >> (power - 4)) & 15) as usize
    }

    fn add(&mut self, ns: u64) {
        self.counts[Self::bucket(ns)] += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The upper end of the bucket in which the given share of all counts is reached.
    fn percentile(&self, percent: u64) -> u64 {
        let total: u64 = self.counts.iter().sum();
        let wanted = (total * percent).div_ceil(100).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                let (power, step) = (index / 16, index as u64 % 16);
                let end = if power < 4 { 16 } else { (17 + step) << (power - 4) };
                return end.min(self.max_ns);
            }
        }
        self.max_ns
    }
}

/// Runs `load` against an export and waits for its end.
pub fn run(address: &Address, wishes: &Wishes, load: &Load) -> Result<LoadReport, ClientError> {
    let mut threads = Vec::with_capacity(load.connections);
    for index in 0..load.connections.max(1) {
        let client = Client::connect(address, wishes, Duration::from_secs(10))?;
        let load = Load { seed: load.seed.wrapping_add(index as u64 * 0x9e37_79b9), ..load.clone() };
        threads.push(std::thread::spawn(move || drive(client, &load)));
    }
    let (mut report, mut histogram) = (LoadReport::default(), Histogram::new());
    for thread in threads {
        let (one, latencies) =
            thread.join().map_err(|_| ClientError::Protocol("a load thread panicked"))??;
        report.requests += one.requests;
        report.bytes += one.bytes;
        report.errors += one.errors;
        report.seconds = report.seconds.max(one.seconds);
        histogram.merge(&latencies);
    }
    report.p50_ns = histogram.percentile(50);
    report.p99_ns = histogram.percentile(99);
    report.max_ns = histogram.max_ns;
    Ok(report)
}

struct Driver<'a> {
    load: &'a Load,
    style: Style,
    blocks: u64,
    next_block: u64,
    state: u64,
    payload: Vec<u8>,
    out: Vec<u8>,
    started: Vec<Instant>,
    issued: u64,
    report: LoadReport,
    latencies: Histogram,
}

fn drive(client: Client, load: &Load) -> Result<(LoadReport, Histogram), ClientError> {
    let span_len =
        if load.span_len == 0 { client.export().len } else { load.span_len.min(client.export().len) };
    let blocks = span_len / u64::from(load.block_len.max(1));
    if blocks == 0 || load.depth == 0 {
        return Err(ClientError::Protocol("the export is smaller than one block of the load"));
    }
    let begin = Instant::now();
    let mut driver = Driver {
        load,
        style: client.style(),
        blocks,
        next_block: load.seed % blocks,
        state: load.seed | 1,
        payload: if load.write { vec![0xa5; load.block_len as usize] } else { Vec::new() },
        out: Vec::new(),
        started: vec![begin; load.depth],
        issued: 0,
        report: LoadReport::default(),
        latencies: Histogram::new(),
    };
    let fd = client.into_fd();
    for slot in 0..load.depth {
        driver.issue(slot, begin);
    }
    driver.send(fd.as_fd())?;
    driver.pump(&fd, begin)?;
    driver.report.seconds = begin.elapsed().as_secs_f64();
    Ok((driver.report, driver.latencies))
}

impl Driver<'_> {
    fn issue(&mut self, slot: usize, now: Instant) {
        let block = if self.load.random {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            self.state % self.blocks
        } else {
            self.next_block = (self.next_block + 1) % self.blocks;
            self.next_block
        };
        let extended_write = self.load.write && self.style == Style::Extended;
        let header = RequestHeader {
            flags: if extended_write { command_flag::PAYLOAD_LEN } else { 0 },
            command: if self.load.write { command::WRITE } else { command::READ },
            cookie: slot as u64,
            offset: block * u64::from(self.load.block_len),
            len: u64::from(self.load.block_len),
        };
        put_request(self.style, &header, &mut self.out);
        self.out.extend_from_slice(&self.payload);
        self.started[slot] = now;
        self.issued += 1;
    }

    fn send(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let result = write_all(fd, &self.out, Instant::now() + Duration::from_secs(30));
        self.out.clear();
        result
    }

    /// Receives replies until the time is over and nothing is under way any more.
    fn pump(&mut self, fd: &OwnedFd, begin: Instant) -> Result<(), ClientError> {
        let mut buffer = vec![0; 256 << 10];
        let (mut len, mut skip, mut running) = (0, 0u64, self.load.depth);
        let mut done_after_skip = None;
        while running > 0 {
            let got = receive(fd, &mut buffer[len..])?;
            let now = Instant::now();
            let going_on = now.duration_since(begin) < self.load.time;
            let (mut at, end) = (0, len + got);
            loop {
                let here = skip.min((end - at) as u64);
                at += here as usize;
                skip -= here;
                if skip > 0 {
                    break;
                }
                if let Some(slot) = done_after_skip.take() {
                    self.finish(slot, now)?;
                    if going_on && self.issued < self.load.requests_max {
                        self.issue(slot, now);
                    } else {
                        running -= 1;
                    }
                }
                let wrong = |_| ClientError::Protocol("what should be a reply is none");
                let Some((header, header_len)) = parse_reply(self.style, &buffer[at..end]).map_err(wrong)?
                else {
                    break;
                };
                at += header_len;
                (skip, done_after_skip) = self.take(&header);
            }
            buffer.copy_within(at..end, 0);
            len = end - at;
            if !self.out.is_empty() {
                self.send(fd.as_fd())?;
            }
        }
        Ok(())
    }

    /// Bytes that follow a header, and the request that is answered when they have passed.
    fn take(&mut self, header: &ReplyHeader) -> (u64, Option<usize>) {
        match *header {
            ReplyHeader::Simple { error, cookie } => {
                self.report.errors += u64::from(error != error::NONE);
                let data = if self.load.write || error != error::NONE { 0 } else { self.load.block_len };
                (u64::from(data), Some(cookie as usize))
            }
            ReplyHeader::Chunk { flags, kind, cookie, len, .. } => {
                self.report.errors += u64::from(kind & chunk::ERROR_BIT != 0);
                (len, (flags & chunk::DONE != 0).then_some(cookie as usize))
            }
        }
    }

    fn finish(&mut self, slot: usize, now: Instant) -> Result<(), ClientError> {
        let started =
            self.started.get(slot).ok_or(ClientError::Protocol("a reply to a request that was not made"))?;
        self.latencies.add(now.duration_since(*started).as_nanos() as u64);
        self.report.requests += 1;
        self.report.bytes += u64::from(self.load.block_len);
        Ok(())
    }
}

fn receive(fd: &OwnedFd, into: &mut [u8]) -> io::Result<usize> {
    loop {
        // SAFETY: the memory is valid for writing.
        let result = unsafe { libc::recv(fd.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), 0) };
        match result {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len if len > 0 => return Ok(len as usize),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_within_a_sixteenth_of_the_truth() {
        let mut histogram = Histogram::new();
        for ns in 1..=100_000u64 {
            histogram.add(ns);
        }
        for (percent, truth) in [(50, 50_000f64), (99, 99_000.0)] {
            let found = histogram.percentile(percent) as f64;
            assert!(found >= truth * 0.99 && found <= truth * 1.07, "{percent}: {found}");
        }
        assert_eq!(histogram.percentile(100), 100_000);
    }
}
