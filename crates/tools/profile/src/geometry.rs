//! What a target is made of, as two requests at a time show it.
//!
//! Two reads that go to one member of a stripe take twice as long as one; reads of two members take as long as one. So
//! the distance at which two reads no longer wait for each other is the chunk, and the next distance at which they do
//! is the width of the stripe. Members that serve requests beside each other (solid state, a mere delay), and members
//! whose time depends on where the last request was (rotating disks), show nothing this way.

use std::io;

use serde::Serialize;
use tapio_load::Random;

use crate::device::Device;
use crate::pace::Pace;

/// Bytes of a request.
const BLOCK_LEN: u64 = 4096;
/// Times that a distance is tried; the fastest counts: noise makes reads slower and never faster.
const TRIES: usize = 3;
/// From here on two reads waited for each other: half between one and two.
const TOGETHER: f64 = 1.5;
/// The largest chunk that is looked for.
const CHUNK_MAX: u64 = 4 << 20;
/// Places to begin at that a search needs.
const PLACES: u64 = 512;
/// Members that are looked for.
const STEPS_MAX: u64 = 32;

/// What two reads at a time showed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Geometry {
    /// Microseconds of one read alone.
    pub one_us: f64,
    /// Bytes that follow each other on one member.
    pub chunk: Option<u64>,
    /// Members of the stripe.
    pub members: Option<u64>,
    /// Two near reads wait for each other.
    pub contends: bool,
    /// The second half of the target does not wait for the first.
    pub halves_apart: bool,
    /// Distances that were tried, with how many times as long as one read two took.
    pub tried: Vec<(u64, f64)>,
}

struct Search<'a, 'b> {
    device: &'a mut dyn Device,
    pace: &'a Pace<'b>,
    random: Random,
    /// Places begin at its multiples.
    align: u64,
    block: u64,
    one_ns: u64,
    /// The places in an order by chance, so that none comes twice before all have come.
    order: Vec<u64>,
    tried: Vec<(u64, f64)>,
}

impl Search<'_, '_> {
    /// Somewhere that leaves room for `distance` and a block behind it.
    fn place(&mut self, distance: u64) -> u64 {
        let last = (self.device.len() - distance - self.block) / self.align;
        if self.order.is_empty() {
            self.order = (0..=(self.device.len() - self.block) / self.align).collect();
        }
        for _ in 0..self.order.len() {
            let index = self.random.below(self.order.len() as u64) as usize;
            if self.order[index] <= last {
                return self.order.swap_remove(index) * self.align;
            }
        }
        self.random.below(last + 1) * self.align
    }

    fn fits(&self, distance: u64) -> bool {
        distance + self.block + self.align <= self.device.len()
    }

    /// Whether two reads so far apart wait for each other; none when the time is over.
    fn together(&mut self, distance: u64) -> io::Result<Option<bool>> {
        let mut best = u64::MAX;
        for _ in 0..TRIES {
            if self.pace.is_over() {
                return Ok(None);
            }
            self.pace.slice(1);
            let at = self.place(distance);
            best = best.min(self.device.read_pair([at, at + distance], self.block)?);
        }
        let ratio = best as f64 / self.one_ns.max(1) as f64;
        self.tried.push((distance, ratio));
        Ok(Some(ratio >= TOGETHER))
    }

    /// The smallest distance below `most` at which reads do not wait for each other: the chunk, if places are its
    /// multiples.
    fn apart(&mut self, most: u64) -> io::Result<Option<u64>> {
        let (mut near, mut far) = (self.block, self.block * 2);
        loop {
            if far > most || !self.fits(far) {
                return Ok(None);
            }
            match self.together(far)? {
                None => return Ok(None),
                Some(true) => (near, far) = (far, far * 2),
                Some(false) => break,
            }
        }
        while far - near > self.block {
            let middle = near + (far - near) / 2 / self.block * self.block;
            match self.together(middle)? {
                None => return Ok(None),
                Some(true) => near = middle,
                Some(false) => far = middle,
            }
        }
        Ok(Some(far))
    }

    /// The smallest multiple of `step` at which reads wait for each other again: the width of the stripe.
    fn width(&mut self, step: u64) -> io::Result<Option<u64>> {
        for steps in 2..=STEPS_MAX {
            let width = step * steps;
            if !self.fits(width) {
                return Ok(None);
            }
            match self.together(width)? {
                None => return Ok(None),
                Some(false) => {}
                // And so on: once may be chance.
                Some(true) if !self.fits(width * 2) || self.together(width * 2)? == Some(true) => {
                    return Ok(Some(width));
                }
                Some(true) => {}
            }
        }
        Ok(None)
    }

    /// Chunk and members. The places of the first search are multiples of a power of two, of which a chunk may be none:
    /// the second goes by multiples of the width.
    fn stripe(&mut self) -> io::Result<Option<(u64, u64)>> {
        let Some(step) = self.apart(self.align)? else { return Ok(None) };
        let Some(width) = self.width(step)? else { return Ok(None) };
        (self.align, self.order) = (width, Vec::new());
        let Some(chunk) = self.apart(width - self.block)? else { return Ok(None) };
        Ok(width.is_multiple_of(chunk).then(|| (chunk, width / chunk)))
    }
}

/// Looks for a stripe. None for a target that is too small, or if there was no time.
///
/// # Errors
/// A read failed.
pub fn geometry(device: &mut dyn Device, pace: &Pace<'_>) -> io::Result<Option<Geometry>> {
    let len = device.len();
    let block = BLOCK_LEN.max(device.sector_len());
    let align = (1u64 << (len / PLACES).checked_ilog2().unwrap_or(0)).min(CHUNK_MAX);
    if align < block * 4 || pace.is_over() {
        return Ok(None);
    }
    let order = Vec::new();
    let mut search = Search {
        device,
        pace,
        random: Random::new(len),
        align,
        block,
        one_ns: u64::MAX,
        order,
        tried: Vec::new(),
    };
    for _ in 0..TRIES {
        let at = search.place(0);
        search.one_ns = search.one_ns.min(search.device.read(at, block)?.ns);
    }
    // Neighbours would be made one request by the kernel.
    let Some(contends) = search.together(block * 2)? else { return Ok(None) };
    let (mut chunk, mut members, mut halves_apart) = (None, None, false);
    if contends {
        match search.stripe()? {
            Some(found) => (chunk, members) = (Some(found.0), Some(found.1)),
            None => halves_apart = search.together(len / 2 / block * block)? == Some(false),
        }
    }
    let one_us = search.one_ns as f64 / 1e3;
    Ok(Some(Geometry { one_us, chunk, members, contends, halves_apart, tried: search.tried }))
}
