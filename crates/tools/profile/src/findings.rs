//! What the measurements say the target is.

use serde::Serialize;

use crate::device::Shape;
use crate::facts::Facts;
use crate::geometry::Geometry;
use crate::scan::Scan;
use crate::sweep::{Sweep, distinct};

/// Random reads of one request at a time are slower than sequential ones by more than this where seeks dominate.
const SEEKS: f64 = 3.0;
/// Sizes of requests whose time is that of the way there, not of the data.
const SMALL_MAX: u64 = 64 << 10;
/// A cost of a request that is worth a name, in microseconds.
const DELAY_MIN_US: f64 = 500.0;
/// The share of the peak that counts as the peak.
const NEAR_PEAK: f64 = 0.95;

/// What a target is. Several may be true.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Finding {
    /// Requests at random places take much longer: a rotating disk.
    Seeks {
        /// How much faster sequential reads are.
        factor: f64,
    },
    /// A rotating disk whose outer tracks are faster.
    OuterZones {
        /// Zones.
        zones: usize,
        /// How much faster the first is than the last.
        ratio: f64,
    },
    /// Areas of different speed.
    Areas {
        /// Areas.
        areas: usize,
        /// How much faster the first is than the last.
        ratio: f64,
    },
    /// Every request costs the same time, whatever its size, and several at once cost it once.
    Delay {
        /// Milliseconds.
        ms: f64,
    },
    /// One throughput, whatever the size and number of requests.
    Limit {
        /// Megabytes per second.
        mb_s: f64,
    },
    /// A stripe.
    Stripe {
        /// Bytes that follow each other on one member.
        chunk: u64,
        /// Members with data side by side.
        members: u64,
        /// Bytes of one chunk of each member.
        width: u64,
        /// The kernel says so.
        known: bool,
        /// Two reads at a time showed it.
        measured: bool,
    },
    /// A mirror.
    Mirror {
        /// Copies.
        copies: u64,
    },
    /// The second half works beside the first: two devices, one behind the other.
    HalvesApart,
    /// Areas that have no storage.
    Thin {
        /// Share of the space, 0 to 1.
        share: f64,
    },
    /// More requests at a time are faster.
    Parallel {
        /// How much faster random reads become.
        factor: f64,
        /// Requests in flight from which on they hardly become faster.
        depth: u32,
    },
}

/// Numbers that several findings and the advice need.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measures {
    /// The time of a request without its data, in milliseconds.
    pub latency_ms: Option<f64>,
    /// How much faster sequential small reads are than random ones, one at a time.
    pub sequential_to_random: Option<f64>,
    /// How much faster the best depth is than one request at a time, for small random reads.
    pub depth_gain: Option<f64>,
    /// The depth from which on it hardly becomes faster.
    pub depth: Option<u32>,
    /// The most megabytes per second.
    pub peak_mb_s: Option<f64>,
}

/// The line a + b x through points, each weighted by its relative error. None without two different x.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let (mut w, mut wx, mut wy, mut wxx, mut wxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (x, y) in points.iter().copied().filter(|(_, y)| *y > 0.0) {
        let weight = 1.0 / (y * y);
        w += weight;
        wx += weight * x;
        wy += weight * y;
        wxx += weight * x * x;
        wxy += weight * x * y;
    }
    let det = w * wxx - wx * wx;
    (det > wxx * w * 1e-12).then(|| ((wy * wxx - wx * wxy) / det, (w * wxy - wx * wy) / det))
}

fn reads(sweeps: &[Sweep], random: bool) -> Option<&Sweep> {
    sweeps.iter().find(|sweep| sweep.random == random && !sweep.write)
}

/// Numbers from the sweeps.
pub fn measures(sweeps: &[Sweep]) -> Measures {
    let mut found = Measures::default();
    let Some(random) = reads(sweeps, true) else { return found };
    let single = random.samples.iter().filter(|sample| sample.shape.depth == 1);
    let points: Vec<(f64, f64)> =
        single.clone().map(|sample| (sample.shape.block_len as f64, sample.p50_us)).collect();
    let least = points.iter().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let fixed = line(&points).map_or(least, |(fixed, _)| fixed.clamp(0.0, least));
    found.latency_ms = fixed.is_finite().then_some(fixed / 1e3);
    if let Some(sequential) = reads(sweeps, false) {
        let factors: Vec<f64> = single
            .filter(|sample| sample.shape.block_len <= SMALL_MAX && sample.bytes_per_s > 0.0)
            .filter_map(|sample| {
                Some(sequential.at(sample.shape.block_len, 1)?.bytes_per_s / sample.bytes_per_s)
            })
            .collect();
        found.sequential_to_random = (!factors.is_empty()).then(|| crate::scan::median(&factors));
    }
    // The smallest block of which one request at a time and many were measured.
    let blocks = distinct(random.samples.iter().map(|sample| sample.shape.block_len));
    let has_depths = |block: &u64| {
        let of_block = random.samples.iter().filter(|sample| sample.shape.block_len == *block);
        random.at(*block, 1).is_some() && of_block.clone().any(|sample| sample.shape.depth >= 16)
    };
    if let Some(block) = blocks.into_iter().filter(|block| *block >= 4096).find(has_depths) {
        let of_block = || random.samples.iter().filter(|sample| sample.shape.block_len == block);
        let best = of_block().map(|sample| sample.bytes_per_s).fold(0.0, f64::max);
        let one = random.at(block, 1).map_or(0.0, |sample| sample.bytes_per_s);
        found.depth_gain = (one > 0.0).then(|| best / one);
        found.depth = of_block()
            .filter(|sample| sample.bytes_per_s >= NEAR_PEAK * best)
            .map(|sample| sample.shape.depth)
            .min();
    }
    let peaks = sweeps.iter().filter_map(Sweep::peak).map(super::device::Sample::mb_s);
    found.peak_mb_s = peaks.reduce(f64::max);
    found
}

/// The throughput that many shapes share as their highest: several sizes at several depths, random and sequential.
fn limit(sweeps: &[Sweep]) -> Option<f64> {
    let (random, sequential) = (reads(sweeps, true)?, reads(sweeps, false)?);
    let peak = random.peak()?.bytes_per_s.max(sequential.peak()?.bytes_per_s);
    let is_limited = |sweep: &Sweep| {
        let near = || sweep.samples.iter().filter(|sample| sample.bytes_per_s >= 0.9 * peak);
        let blocks = distinct(near().map(|sample| sample.shape.block_len));
        let depths = distinct(near().map(|sample| sample.shape.depth));
        // One small request at a time reaches it too.
        let is_small = |shape: Shape| shape.depth == 1 && shape.block_len <= SMALL_MAX;
        let single = near().any(|sample| is_small(sample.shape));
        single && blocks.len() >= 4 && depths.len() >= 2
    };
    (is_limited(random) && is_limited(sequential)).then_some(peak / 1e6)
}

/// What the target is.
pub fn findings(
    facts: &Facts,
    scan: Option<&Scan>,
    geometry: Option<&Geometry>,
    sweeps: &[Sweep],
    measures: &Measures,
) -> Vec<Finding> {
    let mut found = Vec::new();
    let factor = measures.sequential_to_random.unwrap_or(1.0);
    let seeks = factor >= SEEKS;
    if seeks {
        found.push(Finding::Seeks { factor });
    }
    if let Some((scan, ratio)) = scan.and_then(|scan| Some((scan, scan.outer_to_inner()?))) {
        let zones = &scan.zones;
        let falls = zones.windows(2).filter(|two| two[1].mb_s < two[0].mb_s).count();
        let is_outer_faster = falls * 5 >= (zones.len() - 1) * 4 && (1.15..4.0).contains(&ratio);
        // Two halves are two devices rather than a disk with two zones, unless it seeks.
        if is_outer_faster && (zones.len() > 2 || seeks) {
            found.push(Finding::OuterZones { zones: zones.len(), ratio });
        } else {
            found.push(Finding::Areas { areas: zones.len(), ratio });
        }
    }
    let known = facts.mirror().is_none().then(|| facts.stripe()).flatten();
    let measured = geometry.and_then(|geometry| Some((geometry.chunk?, geometry.members?)));
    if let Some((chunk, members)) = measured.or(known) {
        let (is_known, is_measured) = (known == Some((chunk, members)), measured.is_some());
        let width = chunk * members;
        found.push(Finding::Stripe { chunk, members, width, known: is_known, measured: is_measured });
    }
    if let Some(copies) = facts.mirror() {
        found.push(Finding::Mirror { copies });
    }
    if geometry.is_some_and(|geometry| geometry.halves_apart) && !seeks {
        found.push(Finding::HalvesApart);
    }
    if let Some(scan) = scan.filter(|scan| !scan.thin.is_empty()) {
        let thin: u64 = scan.thin.iter().map(|(start, end)| end - start).sum();
        let solid: u64 = scan.zones.iter().map(|zone| zone.end - zone.start).sum();
        found.push(Finding::Thin { share: thin as f64 / (thin + solid).max(1) as f64 });
    }
    let gain = measures.depth_gain.unwrap_or(1.0);
    if let Some(ms) = measures.latency_ms
        && ms * 1e3 >= DELAY_MIN_US
        && factor < 1.5
    {
        found.push(Finding::Delay { ms });
    }
    if let Some(mb_s) = limit(sweeps) {
        found.push(Finding::Limit { mb_s });
    }
    if let (true, Some(depth)) = (gain >= 1.5 && !seeks, measures.depth) {
        found.push(Finding::Parallel { factor: gain, depth });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_through_points_of_all_sizes() {
        let points: Vec<_> = (9..23).map(|power| 2f64.powi(power)).map(|x| (x, 2000.0 + x / 100.0)).collect();
        let (fixed, slope) = line(&points).expect("a line");
        assert!((fixed - 2000.0).abs() < 0.1 && (slope - 0.01).abs() < 1e-6, "{fixed} {slope}");
        assert!(line(&points[..1]).is_none() && line(&[]).is_none());
    }
}
