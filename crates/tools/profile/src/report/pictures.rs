//! The pictures of a profile.

use tapio_report::plot::{Axis, Heat, Line, Lines, Points};

use crate::profile::Profile;
use crate::sweep::{SIZE_SHOWN, Sweep, distinct};

/// A picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Part of a file's name.
    pub name: String,
    /// As SVG.
    pub svg: String,
}

/// Bytes as the columns of a table have them.
pub(crate) fn short(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

fn space(profile: &Profile) -> Option<Picture> {
    let scan = profile.scan.as_ref().filter(|scan| !scan.points.is_empty())?;
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let (unit, scale) = if profile.len >= 4 << 30 { ("GiB", 1.0) } else { ("MiB", 1024.0) };
    let place = |bytes: u64| gib(bytes) * scale;
    let line = |name: &str, points: Vec<(f64, f64)>| Line { name: name.to_owned(), points };
    let mut lines = vec![
        line("mean", scan.points.iter().map(|point| (place(point.at), point.mb_s)).collect()),
        line("median", scan.points.iter().map(|point| (place(point.at), point.median_mb_s)).collect()),
    ];
    if scan.zones.len() > 1 {
        let steps =
            scan.zones.iter().flat_map(|zone| [(place(zone.start), zone.mb_s), (place(zone.end), zone.mb_s)]);
        lines.push(line("zones", steps.collect()));
    }
    let title = format!("{}: reads of 1 MiB over the address space", profile.target);
    let svg =
        Lines { title, x: Axis::linear(&format!("address, {unit}")), y: Axis::linear("MB/s"), lines }.svg();
    Some(Picture { name: "address".to_owned(), svg })
}

fn heat(profile: &Profile, sweep: &Sweep) -> Picture {
    let blocks = distinct(sweep.samples.iter().map(|sample| sample.shape.block_len));
    let depths = distinct(sweep.samples.iter().map(|sample| sample.shape.depth));
    let cell = |block: u64, depth: u32| sweep.at(block, depth).map(crate::device::Sample::mb_s);
    let row = |block: &u64| (short(*block), depths.iter().map(|depth| cell(*block, *depth)).collect());
    let heat = Heat {
        title: format!("{}: {}", profile.target, sweep.name()),
        x: "requests in flight".to_owned(),
        y: "block size".to_owned(),
        value: "MB/s".to_owned(),
        columns: depths.iter().map(u32::to_string).collect(),
        rows: blocks.iter().map(row).collect(),
    };
    Picture { name: format!("heat-{}", file_name(sweep)), svg: heat.svg() }
}

fn file_name(sweep: &Sweep) -> String {
    sweep.name().replace(' ', "-")
}

/// All points over the bytes in flight, as the seed has them: a series for each depth.
fn in_flight(profile: &Profile, sweep: &Sweep) -> Picture {
    let depths = distinct(sweep.samples.iter().map(|sample| sample.shape.depth));
    let series = |depth: &u32| {
        let of_depth = sweep.samples.iter().filter(|sample| sample.shape.depth == *depth);
        let points =
            of_depth.map(|sample| (sample.shape.in_flight() as f64 / 1024.0, sample.mb_s())).collect();
        Line { name: format!("{depth} in flight"), points }
    };
    let lines = Lines {
        title: format!("{}: {}, every block size and depth", profile.target, sweep.name()),
        x: Axis::log2("KiB in flight (block size x depth)"),
        y: Axis::linear("MB/s"),
        lines: depths.iter().map(series).collect(),
    };
    Picture { name: format!("in-flight-{}", file_name(sweep)), svg: Points(lines).svg() }
}

/// One size as one request, two, four ...
fn one_size(profile: &Profile, sweep: &Sweep) -> Option<Picture> {
    let points: Vec<_> =
        sweep.of_size(SIZE_SHOWN).map(|sample| (f64::from(sample.shape.depth), sample.mb_s())).collect();
    let lines = Lines {
        title: format!("{}: 512 KiB as 1 x 512 KiB, 2 x 256 KiB ... {}", profile.target, sweep.name()),
        x: Axis::log2("requests in flight"),
        y: Axis::linear("MB/s"),
        lines: vec![Line { name: sweep.name().to_owned(), points }],
    };
    let name = format!("512k-{}", file_name(sweep));
    (lines.lines[0].points.len() > 1).then(|| Picture { name, svg: lines.svg() })
}

/// Latencies of 4 KiB, by depth.
fn latencies(profile: &Profile, sweep: &Sweep) -> Option<Picture> {
    let block =
        sweep.samples.iter().map(|sample| sample.shape.block_len).filter(|block| *block >= 4096).min()?;
    let of_block = || sweep.samples.iter().filter(|sample| sample.shape.block_len == block);
    let line = |name: &str, of: fn(&crate::device::Sample) -> f64| Line {
        name: name.to_owned(),
        points: of_block().map(|sample| (f64::from(sample.shape.depth), of(sample))).collect(),
    };
    let lines = Lines {
        title: format!("{}: latency of {}, {}", profile.target, sweep.name(), short(block)),
        x: Axis::log2("requests in flight"),
        y: Axis::log("us"),
        lines: vec![
            line("median", |sample| sample.p50_us),
            line("90 %", |sample| sample.p90_us),
            line("99 %", |sample| sample.p99_us),
            line("99.9 %", |sample| sample.p999_us),
        ],
    };
    Some(Picture { name: format!("latency-{}", file_name(sweep)), svg: lines.svg() })
}

/// All of them.
pub fn pictures(profile: &Profile) -> Vec<Picture> {
    let mut all: Vec<Picture> = space(profile).into_iter().collect();
    for sweep in profile.sweeps.iter().filter(|sweep| !sweep.samples.is_empty()) {
        all.push(heat(profile, sweep));
        all.push(in_flight(profile, sweep));
        all.extend(one_size(profile, sweep));
        all.extend(latencies(profile, sweep));
    }
    all
}
