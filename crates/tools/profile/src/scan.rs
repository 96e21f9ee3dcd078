//! Throughput over the address space, and the zones that it shows.

use std::io;
use std::ops::Range;

use serde::Serialize;

use crate::device::Device;
use crate::pace::{Pace, spread};

/// Bytes of one read, as in the seed's figure.
const READ_LEN: u64 = 1 << 20;
/// Zones that differ by less than this are one.
const STEP_MIN: f64 = 0.03;

/// How much is read.
#[derive(Clone, Copy, Debug)]
pub struct ScanOptions {
    /// Places over the whole space.
    pub points: usize,
    /// Reads in each, one after the other.
    pub reads: usize,
}

/// One place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScanPoint {
    /// The byte where its reads begin.
    pub at: u64,
    /// Reads that were made.
    pub reads: usize,
    /// Megabytes per second over all of them.
    pub mb_s: f64,
    /// Megabytes per second of the median read, which a few slow ones do not change.
    pub median_mb_s: f64,
    /// Everything read there was zero.
    pub is_zero: bool,
}

/// Neighbouring places of one speed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Zone {
    /// First byte.
    pub start: u64,
    /// The byte behind the last.
    pub end: u64,
    /// Megabytes per second.
    pub mb_s: f64,
}

/// The scan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scan {
    /// Bytes of one read.
    pub read_len: u64,
    /// Places that were to be measured.
    pub planned: usize,
    /// By address.
    pub points: Vec<ScanPoint>,
    /// By address. Areas that read as nothing are in none.
    pub zones: Vec<Zone>,
    /// Areas without storage behind them: they read as zeroes, faster than the rest by far.
    pub thin: Vec<(u64, u64)>,
}

impl Scan {
    /// How much faster the first zone is than the last.
    pub fn outer_to_inner(&self) -> Option<f64> {
        let (first, last) = (self.zones.first()?, self.zones.last()?);
        (self.zones.len() > 1).then(|| first.mb_s / last.mb_s.max(1e-9))
    }
}

/// Reads all over the target.
///
/// # Errors
/// A read failed.
pub fn scan(device: &mut dyn Device, options: ScanOptions, pace: &Pace<'_>) -> io::Result<Scan> {
    let len = device.len();
    let sector = device.sector_len().max(1);
    let read_len = READ_LEN.min(len / sector * sector);
    let mut points = Vec::new();
    let count = (len / read_len.max(1)).min(options.points as u64).max(1) as usize;
    let each = len / count as u64;
    let reads = (each / read_len.max(1)).clamp(1, options.reads.max(1) as u64);
    let planned = if read_len == 0 { 0 } else { count };
    for index in spread(planned) {
        if pace.is_over() {
            break;
        }
        pace.slice(1);
        let at = (each * index as u64) / sector * sector;
        let (mut times, mut is_zero) = (Vec::new(), true);
        for read in 0..reads {
            let place = (at + read * read_len).min(len / sector * sector - read_len);
            let read = device.read(place, read_len)?;
            times.push(read.ns.max(1));
            is_zero &= read.is_zero;
            if pace.is_over() {
                break;
            }
        }
        let speed = |ns: u64, reads: usize| (read_len * reads as u64) as f64 / ns as f64 * 1e3;
        let mb_s = speed(times.iter().sum(), times.len());
        times.sort_unstable();
        let median_mb_s = speed(times[(times.len() - 1) / 2], 1);
        points.push(ScanPoint { at, reads: times.len(), mb_s, median_mb_s, is_zero });
    }
    points.sort_by_key(|point| point.at);
    let thin = thin(&points);
    let solid: Vec<usize> = (0..points.len()).filter(|index| !thin.contains(index)).collect();
    let speeds: Vec<f64> = solid.iter().map(|index| points[*index].median_mb_s).collect();
    let end_of = |index: usize| points.get(index + 1).map_or(len, |next| next.at);
    let zone = |range: Range<usize>| Zone {
        start: points[solid[range.start]].at,
        end: end_of(solid[range.end - 1]),
        mb_s: median(&speeds[range]),
    };
    let zones = plateaus(&speeds).into_iter().map(zone).collect();
    let thin = joined(thin.iter().map(|index| (points[*index].at, end_of(*index))));
    Ok(Scan { read_len, planned, points, zones, thin })
}

/// Areas that touch, as one.
fn joined(areas: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for area in areas {
        match all.last_mut() {
            Some(last) if last.1 == area.0 => last.1 = area.1,
            _ => all.push(area),
        }
    }
    all
}

/// Points that read as zeroes, if the others are slower by far. A disk that is full of zeroes has none.
fn thin(points: &[ScanPoint]) -> Vec<usize> {
    let of = |zero: bool| -> Vec<f64> {
        points.iter().filter(|point| point.is_zero == zero).map(|point| point.median_mb_s).collect()
    };
    let (zeroes, others) = (of(true), of(false));
    if zeroes.is_empty() || others.is_empty() || median(&zeroes) < 2.0 * median(&others) {
        return Vec::new();
    }
    (0..points.len()).filter(|index| points[*index].is_zero).collect()
}

pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[len / 2],
        len => f64::midpoint(sorted[len / 2 - 1], sorted[len / 2]),
    }
}

/// Neighbours of one speed. Speeds are compared by their factors; two plateaus differ by more than chance makes the
/// medians of so many points differ.
fn plateaus(speeds: &[f64]) -> Vec<Range<usize>> {
    if speeds.is_empty() {
        return Vec::new();
    }
    let logs: Vec<f64> = speeds.iter().map(|speed| speed.max(1e-9).ln()).collect();
    let steps: Vec<f64> = logs.windows(2).map(|two| (two[1] - two[0]).abs()).collect();
    // The deviation of one point, as its neighbours show it.
    let noise = 1.4826 * median(&steps) / std::f64::consts::SQRT_2;
    let mut found = Vec::new();
    split(&logs, 0..logs.len(), noise, &mut found);
    // Cuts that came early may be superfluous once others were made.
    let mut index = 1;
    while index < found.len() {
        if differ(&logs[found[index - 1].clone()], &logs[found[index].clone()], noise) {
            index += 1;
        } else {
            let end = found.remove(index).end;
            found[index - 1].end = end;
        }
    }
    found
}

fn differ(left: &[f64], right: &[f64], noise: f64) -> bool {
    let fewer = left.len().min(right.len()) as f64;
    (median(left) - median(right)).abs() >= STEP_MIN.max(4.0 * noise / fewer.sqrt())
}

fn split(logs: &[f64], range: Range<usize>, noise: f64, found: &mut Vec<Range<usize>>) {
    let part = &logs[range.clone()];
    // A single odd point is no zone, unless there are few.
    let least = if logs.len() >= 16 { 2 } else { 1 };
    let sum: f64 = part.iter().sum();
    let (mut left, mut best) = (0.0, (0.0, 0));
    for (cut, log) in part.iter().enumerate() {
        if cut >= least && cut + least <= part.len() {
            let (before, after) = (cut as f64, (part.len() - cut) as f64);
            let between = left / before - (sum - left) / after;
            let weight = between * between * before * after;
            if weight > best.0 {
                best = (weight, cut);
            }
        }
        left += log;
    }
    let cut = best.1;
    if cut == 0 || !differ(&part[..cut], &part[cut..], noise) {
        found.push(range);
        return;
    }
    split(logs, range.start..range.start + cut, noise, found);
    split(logs, range.start + cut..range.end, noise, found);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plateaus_are_found_in_noise_and_not_made_of_it() {
        let noisy =
            |speed: f64, index: usize| speed * (1.0 + 0.02 * ((index * 7919 % 13) as f64 / 6.5 - 1.0));
        let flat: Vec<f64> = (0..64).map(|index| noisy(100.0, index)).collect();
        let whole = std::iter::once(0..64).collect::<Vec<_>>();
        assert_eq!(plateaus(&flat), whole);
        let steps: Vec<f64> = (0..64).map(|index| noisy(100.0 - 20.0 * (index / 16) as f64, index)).collect();
        assert_eq!(plateaus(&steps), [0..16, 16..32, 32..48, 48..64]);
        let mut odd = flat;
        odd[20] = 10.0;
        assert_eq!(plateaus(&odd), whole, "one odd point is no zone");
        assert_eq!(plateaus(&[5.0, 5.0, 2.5, 2.5]), [0..2, 2..4]);
        assert!(plateaus(&[]).is_empty());
    }
}
