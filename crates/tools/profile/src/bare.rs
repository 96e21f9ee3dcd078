//! A file or block device as a target, past the page cache where that can be.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use tapio_load::{Latencies, Load, Mix, bare_file};

use crate::device::{Device, Read, Sample, Shape};

/// Alignment that O_DIRECT is content with everywhere.
const ALIGN: usize = 4096;

/// An open target.
#[derive(Debug)]
pub struct Bare {
    file: File,
    len: u64,
    sector_len: u64,
    buffer: Vec<u8>,
    seed: u64,
}

impl Bare {
    /// Requests go to this open file.
    pub fn new(file: File, len: u64, sector_len: u64) -> Self {
        Self { file, len, sector_len, buffer: Vec::new(), seed: 0 }
    }

    /// The open file.
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Memory of that many bytes, aligned.
    fn memory(&mut self, len: usize) -> (&File, &mut [u8]) {
        if self.buffer.len() < len + ALIGN {
            self.buffer = vec![0; len + ALIGN];
        }
        let first = self.buffer.as_ptr().align_offset(ALIGN);
        (&self.file, &mut self.buffer[first..first + len])
    }
}

fn us(latencies: &Latencies, share: f64) -> f64 {
    latencies.quantile_ns(share) as f64 / 1e3
}

impl Device for Bare {
    fn len(&self) -> u64 {
        self.len
    }

    fn sector_len(&self) -> u64 {
        self.sector_len
    }

    fn load(&mut self, shape: Shape, time: Duration, requests_max: u64) -> io::Result<Sample> {
        let mix = match (shape.random, shape.write) {
            (true, false) => Mix::RandomRead,
            (true, true) => Mix::RandomWrite,
            (false, false) => Mix::SequentialRead,
            (false, true) => Mix::SequentialWrite,
        };
        let block_len = u32::try_from(shape.block_len).map_err(|_| io::ErrorKind::InvalidInput)?;
        // Another place each time: what a cache has of the last point is not asked for again.
        self.seed = self.seed.wrapping_add(0x9e37_79b9);
        let load = Load {
            mix,
            block_len,
            depth: shape.depth,
            span_len: self.len,
            time,
            requests_max,
            spin: false,
            seed: self.seed,
        };
        let report = bare_file::run_on(self.file.try_clone()?, &load)?.load;
        let latencies = &report.latencies;
        Ok(Sample {
            shape,
            requests: report.count,
            errors: report.errors,
            bytes_per_s: report.rate() * shape.block_len as f64,
            p10_us: us(latencies, 0.1),
            p50_us: us(latencies, 0.5),
            p90_us: us(latencies, 0.9),
            p99_us: us(latencies, 0.99),
            p999_us: us(latencies, 0.999),
            max_us: latencies.longest_ns() as f64 / 1e3,
        })
    }

    fn read(&mut self, at: u64, len: u64) -> io::Result<Read> {
        let (file, memory) = self.memory(len as usize);
        let begin = Instant::now();
        file.read_exact_at(memory, at)?;
        let ns = begin.elapsed().as_nanos() as u64;
        Ok(Read { ns, is_zero: memory.iter().all(|byte| *byte == 0) })
    }

    fn read_pair(&mut self, at: [u64; 2], len: u64) -> io::Result<u64> {
        bare_file::read_pair(&self.file, at, len as usize)
    }
}
