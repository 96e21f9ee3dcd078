//! Block size and queue depth: every way to have so many bytes in flight.
//!
//! The sizes are powers of two from the sector to 4 MiB, and each is divided among 1, 2, 4 ... requests, down to the
//! sector: one request of 512 KiB, or 64 of 8 KiB.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use serde::Serialize;

use crate::device::{Device, Sample, Shape};
use crate::pace::{Pace, spread};

/// The most bytes in flight.
const SIZE_MAX: u64 = 4 << 20;
/// The size of which a picture of its own is made.
pub const SIZE_SHOWN: u64 = 512 << 10;

/// Which shapes are measured.
#[derive(Clone, Copy, Debug)]
pub struct SweepOptions {
    /// A few sizes instead of all.
    pub quick: bool,
    /// No more requests in flight than this.
    pub depth_max: u32,
}

/// What was measured of one kind of request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sweep {
    /// At random places.
    pub random: bool,
    /// Writes.
    pub write: bool,
    /// Shapes that were to be measured.
    pub planned: usize,
    /// By bytes in flight, then by depth.
    pub samples: Vec<Sample>,
}

impl Sweep {
    /// As a heading has it.
    pub const fn name(&self) -> &'static str {
        Shape::name(self.random, self.write)
    }

    /// The sample of a shape.
    pub fn at(&self, block_len: u64, depth: u32) -> Option<&Sample> {
        self.samples.iter().find(|sample| sample.shape.block_len == block_len && sample.shape.depth == depth)
    }

    /// Samples with so many bytes in flight, by depth.
    pub fn of_size(&self, size: u64) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.shape.in_flight() == size)
    }

    /// The fastest sample.
    pub fn peak(&self) -> Option<&Sample> {
        self.samples.iter().max_by(|one, other| one.bytes_per_s.total_cmp(&other.bytes_per_s))
    }
}

/// Each value once, in order.
pub fn distinct<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.collect::<BTreeSet<T>>().into_iter().collect()
}

/// Pairs of block length and depth.
pub fn grid(device: &dyn Device, options: SweepOptions) -> Vec<(u64, u32)> {
    let sector = device.sector_len().max(512).next_power_of_two();
    let mut all = Vec::new();
    let mut size = sector;
    while size <= SIZE_MAX {
        let is_chosen = !options.quick || [4096, 32 << 10, SIZE_SHOWN, SIZE_MAX].contains(&size);
        let mut depth = 1u32;
        while is_chosen && size / u64::from(depth) >= sector && depth <= options.depth_max {
            // Of a quick run, the size that is shown has all its depths.
            let is_wanted = !options.quick || size == SIZE_SHOWN || depth.trailing_zeros().is_multiple_of(2);
            if is_wanted && size / u64::from(depth) <= device.len() {
                all.push((size / u64::from(depth), depth));
            }
            depth *= 2;
        }
        size *= 2;
    }
    all
}

/// Measures one kind of request in all shapes.
///
/// # Errors
/// The target cannot be used, or answers nothing but errors.
pub fn sweep(
    device: &mut dyn Device,
    random: bool,
    write: bool,
    options: SweepOptions,
    pace: &Pace<'_>,
) -> io::Result<Sweep> {
    let grid = grid(device, options);
    let mut sweep = Sweep { random, write, planned: grid.len(), samples: Vec::new() };
    for (done, index) in spread(grid.len()).into_iter().enumerate() {
        let time: Duration = pace.slice(grid.len() - done);
        if pace.is_over() {
            break;
        }
        let (block_len, depth) = grid[index];
        let sample = device.load(Shape { random, write, block_len, depth }, time, u64::MAX)?;
        if sample.requests > 0 && sample.errors == sample.requests {
            return Err(io::Error::other(format!(
                "all {} of {block_len} bytes failed",
                Shape::name(random, write)
            )));
        }
        sweep.samples.push(sample);
    }
    sweep.samples.sort_by_key(|sample| (sample.shape.in_flight(), sample.shape.depth));
    Ok(sweep)
}
