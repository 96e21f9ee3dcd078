//! Models of targets with a clock of their own, for tests: known delays, zones, stripes, limits.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::time::Duration;

use tapio_load::{Latencies, Random};

use crate::device::{Device, Read, Sample, Shape};

/// A member: serves one request at a time.
#[derive(Clone, Debug, Default)]
struct Member {
    free_ns: u64,
    next_at: u64,
}

/// A target made of members.
#[derive(Clone, Debug)]
pub struct Simulated {
    len: u64,
    now_ns: u64,
    random: Random,
    members: Vec<Member>,
    /// Bytes that follow each other on one member; 0: any member serves any request (a mirror, solid state).
    pub chunk: u64,
    /// Of every request, beside all others.
    pub delay_ns: u64,
    /// Of every request on its member.
    pub service_ns: u64,
    /// Of a request that does not follow the one before it on its member.
    pub seek_ns: u64,
    /// Bytes per second of a member, by the first byte from which on it counts.
    pub zones: Vec<(u64, f64)>,
    /// Bytes per second of all members together.
    pub limit: f64,
    limit_free_ns: u64,
    /// From this byte on nothing is stored.
    pub stored: u64,
    /// Requests take up to this share longer, by chance.
    pub noise: f64,
}

impl Simulated {
    fn new(len: u64, members: usize) -> Self {
        Self {
            len,
            now_ns: 0,
            random: Random::new(5),
            members: vec![Member::default(); members],
            chunk: 0,
            delay_ns: 0,
            service_ns: 10_000,
            seek_ns: 0,
            zones: vec![(0, 500e6)],
            limit: f64::INFINITY,
            limit_free_ns: 0,
            stored: u64::MAX,
            noise: 0.05,
        }
    }

    /// 32 channels that serve any request, 80 us each.
    pub fn solid_state(len: u64) -> Self {
        Self { service_ns: 0, delay_ns: 80_000, limit: 2e9, ..Self::new(len, 32) }
    }

    /// Zones from the outer rate to the inner one, in bytes per second.
    pub fn rotating(len: u64, zones: u64, outer: f64, inner: f64) -> Self {
        let rate = |zone: u64| outer + (inner - outer) * zone as f64 / (zones - 1).max(1) as f64;
        let zones = (0..zones).map(|zone| (len / zones * zone, rate(zone))).collect();
        Self { seek_ns: 12_000_000, service_ns: 50_000, zones, ..Self::new(len, 1) }
    }

    /// Members that serve one request at a time, side by side.
    pub fn striped(len: u64, members: usize, chunk: u64) -> Self {
        Self { chunk, service_ns: 5_000_000, ..Self::new(len, members) }
    }

    /// A network: nothing but a delay.
    pub fn delayed(len: u64, delay_ns: u64) -> Self {
        Self { delay_ns, service_ns: 1000, zones: vec![(0, 10e9)], ..Self::new(len, 64) }
    }

    /// A server that takes one request at a time, each for so long.
    pub fn one_at_a_time(len: u64, service_ns: u64) -> Self {
        Self { service_ns, zones: vec![(0, 10e9)], ..Self::new(len, 1) }
    }

    /// Serves a request that is made at a time; when it is done.
    fn serve(&mut self, begin_ns: u64, at: u64, len: u64) -> u64 {
        let (mut done, mut place) = (begin_ns, at);
        while place < at + len {
            let rest = at + len - place;
            let piece = if self.chunk == 0 { rest } else { rest.min(self.chunk - place % self.chunk) };
            let index = match self.chunk {
                0 => (0..self.members.len()).min_by_key(|index| self.members[*index].free_ns).unwrap_or(0),
                chunk => (place / chunk) as usize % self.members.len(),
            };
            let rate = self.zones.iter().rev().find(|(from, _)| *from <= place).map_or(1e9, |zone| zone.1);
            let seek = if self.members[index].next_at == place { 0 } else { self.seek_ns };
            let member = &mut self.members[index];
            let time = self.service_ns + seek + (piece as f64 / rate * 1e9) as u64;
            let noise = (self.random.below(1000) as f64 / 1000.0 * self.noise * time as f64) as u64;
            let time = if place >= self.stored { 1000 } else { time + noise };
            member.free_ns = member.free_ns.max(begin_ns) + time;
            member.next_at = place + piece;
            done = done.max(member.free_ns);
            place += piece;
        }
        if self.limit.is_finite() {
            self.limit_free_ns = self.limit_free_ns.max(begin_ns) + (len as f64 / self.limit * 1e9) as u64;
            done = done.max(self.limit_free_ns);
        }
        done + self.delay_ns
            + (self.random.below(1000) as f64 / 1000.0 * self.noise * self.delay_ns as f64) as u64
    }
}

impl Device for Simulated {
    fn len(&self) -> u64 {
        self.len
    }

    fn sector_len(&self) -> u64 {
        512
    }

    fn load(&mut self, shape: Shape, _time: Duration, requests_max: u64) -> io::Result<Sample> {
        let (begin, blocks) = (self.now_ns, (self.len / shape.block_len).max(1));
        // Enough for the beginning and the end of the load to count for little.
        let depth = u64::from(shape.depth);
        let requests = requests_max.min(depth * if depth > 512 { 4 } else { 20 } + 40);
        let mut flying = BinaryHeap::new();
        let (mut latencies, mut block) = (Latencies::default(), self.random.below(blocks));
        let (mut started, mut now) = (0, begin);
        while started < requests || !flying.is_empty() {
            while started < requests && flying.len() < shape.depth as usize {
                block = if shape.random { self.random.below(blocks) } else { (block + 1) % blocks };
                let done = self.serve(now, block * shape.block_len, shape.block_len);
                flying.push(Reverse((done, now)));
                started += 1;
            }
            if let Some(Reverse((done, made))) = flying.pop() {
                latencies.note(done - made);
                now = now.max(done);
            }
        }
        self.now_ns = now;
        let us = |share: f64| latencies.quantile_ns(share) as f64 / 1e3;
        Ok(Sample {
            shape,
            requests,
            errors: 0,
            bytes_per_s: (requests * shape.block_len) as f64 / ((now - begin).max(1) as f64 / 1e9),
            p10_us: us(0.1),
            p50_us: us(0.5),
            p90_us: us(0.9),
            p99_us: us(0.99),
            p999_us: us(0.999),
            max_us: us(1.0),
        })
    }

    fn read(&mut self, at: u64, len: u64) -> io::Result<Read> {
        let begin = self.now_ns;
        self.now_ns = self.serve(begin, at, len);
        Ok(Read { ns: self.now_ns - begin, is_zero: at >= self.stored })
    }

    fn read_pair(&mut self, at: [u64; 2], len: u64) -> io::Result<u64> {
        let begin = self.now_ns;
        for place in at {
            self.now_ns = self.now_ns.max(self.serve(begin, place, len));
        }
        Ok(self.now_ns - begin)
    }
}
