//! Medians and ratios of a run, as tables, pictures and JSON.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;
use tapio_types::Movement;

use super::case::{Part, Variant, Work, movements, parts};
use super::load::Outcome;
use super::{MEANING, file_of};
use crate::common::{self, CUT_SHORT};
use crate::measure;
use crate::medians::median;
use crate::site::Site;
use tapio_report::plot::{Axis, Line, Lines};
use tapio_report::size::size;
use tapio_report::trace;

/// The host and the settings of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    #[serde(flatten)]
    pub run: common::Setting,
    #[serde(flatten)]
    pub site: Site,
    /// What the numbers mean, and what they do not.
    pub meaning: &'static str,
}

impl Setting {
    pub fn of(site: &Site, time: Duration, rounds: usize, kept_awake: bool) -> Self {
        let run = common::Setting::now(time, rounds, kept_awake);
        Self { run, site: site.clone(), meaning: MEANING }
    }
}

/// What one measurement found; CPU, notifications and wake-ups are for each request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    pub iops: f64,
    pub bytes_per_second: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub disk_cpu_us: f64,
    pub front_cpu_us: f64,
    pub kicks: f64,
    pub wakes: f64,
    pub errors: u64,
}

impl Sample {
    pub fn of(outcome: &Outcome, block_len: u32) -> Self {
        let report = &outcome.report;
        let each = |value: f64| value / report.count.max(1) as f64;
        let measure::Sample { iops, bytes_per_second, p50_us, p99_us, errors, .. } =
            measure::Sample::of(report, block_len, 1);
        Self {
            iops,
            bytes_per_second,
            p50_us,
            p99_us,
            disk_cpu_us: each(outcome.disk_cpu_us),
            front_cpu_us: each(outcome.front_cpu_us),
            kicks: each(report.kicks as f64),
            wakes: each(report.wakes as f64),
            errors,
        }
    }
}

/// Medians over the rounds of one variant under one load.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub comparison: &'static str,
    pub work: &'static str,
    pub variant: &'static str,
    pub block_bytes: u32,
    pub depth: u32,
    pub rounds: usize,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub disk_cpu_us_per_request: f64,
    pub front_cpu_us_per_request: f64,
    pub kicks_per_request: f64,
    pub wakes_per_request: f64,
    /// Bytes a second, over those of the first variant of the comparison.
    pub speed_ratio: f64,
    /// CPU of both sides for each byte, over that of the first variant.
    pub cpu_ratio: f64,
    /// Of all rounds together.
    pub errors: u64,
}

fn mid(samples: &[Sample], value: impl Fn(&Sample) -> f64) -> f64 {
    median(&mut samples.iter().map(value).collect::<Vec<_>>())
}

fn over(value: f64, of: f64) -> f64 {
    if of > 0.0 { value / of } else { 0.0 }
}

impl Row {
    /// The medians of samples, of which there must be one; `first` are those of the first variant.
    pub fn of(part: &Part, work: &Work, variant: &Variant, samples: &[Sample], first: &[Sample]) -> Self {
        let (block_bytes, depth) = variant.shape(work);
        let cpu_per_byte = |sample: &Sample| {
            over((sample.disk_cpu_us + sample.front_cpu_us) * sample.iops, sample.bytes_per_second)
        };
        let bytes_per_second = mid(samples, |sample| sample.bytes_per_second);
        Self {
            comparison: part.name,
            work: work.name,
            variant: variant.name,
            block_bytes,
            depth,
            rounds: samples.len(),
            iops: mid(samples, |sample| sample.iops),
            bytes_per_second,
            p50_us: mid(samples, |sample| sample.p50_us),
            p99_us: mid(samples, |sample| sample.p99_us),
            disk_cpu_us_per_request: mid(samples, |sample| sample.disk_cpu_us),
            front_cpu_us_per_request: mid(samples, |sample| sample.front_cpu_us),
            kicks_per_request: mid(samples, |sample| sample.kicks),
            wakes_per_request: mid(samples, |sample| sample.wakes),
            speed_ratio: over(bytes_per_second, mid(first, |sample| sample.bytes_per_second)),
            cpu_ratio: over(mid(samples, cpu_per_byte), mid(first, cpu_per_byte)),
            errors: samples.iter().map(|sample| sample.errors).sum(),
        }
    }
}

/// What all guests together got.
#[derive(Clone, Copy, Debug)]
pub struct Together {
    pub iops: f64,
    /// Of the disk processes and of the guests, in microseconds for each request.
    pub disk_cpu_us: f64,
    pub front_cpu_us: f64,
    /// The requests of the guest that got the fewest, over those of the guest that got the most.
    pub fairness: f64,
    pub errors: u64,
}

/// What some guests got together.
#[derive(Clone, Debug, Serialize)]
pub struct MachinesRow {
    pub block_bytes: u32,
    pub repositories: usize,
    pub guests: usize,
    pub movement: Movement,
    pub rounds: usize,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub disk_cpu_us_per_request: f64,
    pub front_cpu_us_per_request: f64,
    /// Requests of the guest that got the fewest, over those of the one that got the most.
    pub fairness: f64,
    pub errors: u64,
}

impl MachinesRow {
    pub fn of(
        block_bytes: u32,
        repositories: usize,
        guests: usize,
        movement: Movement,
        found: &[Together],
    ) -> Self {
        let mid = |value: fn(&Together) -> f64| median(&mut found.iter().map(value).collect::<Vec<_>>());
        let iops = mid(|one| one.iops);
        Self {
            block_bytes,
            repositories,
            guests,
            movement,
            rounds: found.len(),
            iops,
            bytes_per_second: iops * f64::from(block_bytes),
            disk_cpu_us_per_request: mid(|one| one.disk_cpu_us),
            front_cpu_us_per_request: mid(|one| one.front_cpu_us),
            fairness: mid(|one| one.fairness),
            errors: found.iter().map(|one| one.errors).sum(),
        }
    }
}

/// Which front end asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// A ring of Xen's, with data copied.
    #[default]
    Blkif,
    /// The same with pages that stay mapped.
    Persistent,
    /// The same with pages mapped for each request.
    Map,
    /// A virtqueue, where the disk process reaches the guest's memory itself.
    VhostUser,
}

impl Way {
    /// As titles and files name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blkif => "blkif",
            Self::Persistent => "persistent",
            Self::Map => "map",
            Self::VhostUser => "vhost-user",
        }
    }
}

/// What one size came to.
pub struct One {
    pub row: Option<trace::Row>,
    /// Requests a second without and with the trace.
    pub rates: [f64; 2],
    pub clock: &'static str,
}

/// Where the time of requests went, by their size.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Traced {
    pub way: Way,
    pub depth: u32,
    pub write: bool,
    pub clock: &'static str,
    pub rows: Vec<trace::Row>,
    /// For each row: requests a second with the trace, over those without.
    pub traced_ratio: Vec<f64>,
    /// For each row: bytes a second without the trace, and of the host alone.
    pub bytes_per_second: Vec<[f64; 2]>,
}

impl Traced {
    pub fn add(&mut self, one: One) {
        self.clock = one.clock;
        if let Some(row) = one.row {
            let host =
                row.host.map_or(0.0, |host| f64::from(host.depth) * 1e6 / host.times.mean_us.max(1e-9));
            self.bytes_per_second.push([one.rates[0], host].map(|rate| rate * row.bytes as f64));
            self.rows.push(row);
            self.traced_ratio.push(over(one.rates[1], one.rates[0]));
        }
    }

    fn title(&self) -> String {
        let what = if self.write { "writes" } else { "reads" };
        format!("where the time of {what} by {} goes, {} in flight", self.way.name(), self.depth)
    }
}

/// What was not measured.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    pub what: String,
    pub reason: String,
}

impl Skipped {
    pub fn of(what: &str, reason: String) -> Self {
        Self { what: what.to_owned(), reason }
    }
}

/// All that a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub setting: Setting,
    pub rows: Vec<Row>,
    pub machines: Vec<MachinesRow>,
    pub overhead: Vec<Traced>,
    pub skipped: Vec<Skipped>,
    /// An interrupt ended the run before its time.
    pub interrupted: bool,
}

impl Report {
    pub const fn new(setting: Setting) -> Self {
        Self {
            setting,
            rows: Vec::new(),
            machines: Vec::new(),
            overhead: Vec::new(),
            skipped: Vec::new(),
            interrupted: false,
        }
    }

    /// Whether anything was measured.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
            && self.machines.is_empty()
            && self.overhead.iter().all(|one| one.rows.is_empty())
    }

    /// The tables that people read. Writing to a string cannot fail, here and below.
    pub fn tables(&self) -> String {
        let Setting { run, site, meaning } = &self.setting;
        let mut out = run.line(&site.line());
        for part in parts() {
            self.comparison(&mut out, &part);
        }
        self.many_guests(&mut out);
        for traced in self.overhead.iter().filter(|traced| !traced.rows.is_empty()) {
            let _ = writeln!(out, "\n{}, by {}", traced.title(), traced.clock);
            out.push_str(&trace::table(&traced.rows));
            let ratios: Vec<_> = traced.traced_ratio.iter().map(|ratio| format!("{ratio:.2}")).collect();
            let _ =
                writeln!(out, "requests a second with the trace over those without: {}", ratios.join(" "));
            let mb = |rate: f64| format!("{:.1}", rate / 1e6);
            for (name, at) in [("this way", 0), ("the host alone", 1)] {
                let rates: Vec<_> = traced.bytes_per_second.iter().map(|rates| mb(rates[at])).collect();
                let _ = writeln!(out, "MB/s of each row, {name}: {}", rates.join(" "));
            }
        }
        let mut told = BTreeSet::new();
        for skipped in self.skipped.iter().filter(|skipped| told.insert(&skipped.reason)) {
            let others = self.skipped.iter().filter(|other| other.reason == skipped.reason).count() - 1;
            let more = if others > 0 { format!(", and {others} times more") } else { String::new() };
            let _ = writeln!(out, "\nnot measured: {}{more}: {}", skipped.what, skipped.reason);
        }
        if self.interrupted {
            let _ = write!(out, "\n{CUT_SHORT}");
        }
        let _ = writeln!(out, "\n{meaning}");
        out
    }

    fn comparison(&self, out: &mut String, part: &Part) {
        let rows: Vec<_> = self.rows.iter().filter(|row| row.comparison == part.name).collect();
        if rows.is_empty() {
            return;
        }
        let _ = writeln!(
            out,
            "\n{}: {}\n  {:<15}{:<12}{:>9}{:>7}{:>11}{:>10}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}{:>8}{:>8}",
            part.name,
            part.title,
            "",
            "",
            "bytes",
            "depth",
            "req/s",
            "MB/s",
            "p50 us",
            "p99 us",
            "disk us",
            "guest us",
            "kicks",
            "wakes",
            "speed",
            "CPU"
        );
        let mut last = "";
        for row in rows {
            let work = if row.work == last { "" } else { row.work };
            last = row.work;
            let _ = writeln!(
                out,
                "  {work:<15}{:<12}{:>9}{:>7}{:>11.0}{:>10.1}{:>9.1}{:>9.1}{:>9.2}{:>9.2}{:>8.2}{:>8.2}{:>8.2}{:>8.2}{}",
                row.variant,
                row.block_bytes,
                row.depth,
                row.iops,
                row.bytes_per_second / 1e6,
                row.p50_us,
                row.p99_us,
                row.disk_cpu_us_per_request,
                row.front_cpu_us_per_request,
                row.kicks_per_request,
                row.wakes_per_request,
                row.speed_ratio,
                row.cpu_ratio,
                if row.errors > 0 { format!("  {} errors", row.errors) } else { String::new() }
            );
        }
    }

    fn many_guests(&self, out: &mut String) {
        if self.machines.is_empty() {
            return;
        }
        let _ = write!(
            out,
            "\nmachines: all guests together, 4 KiB to 1 MiB random reads; MB/s (CPU microseconds of the disk processes for \
             each request, least over most requests of a guest)\n  {:<12}{:>5}{:>8}",
            "bytes", "SRs", "guests"
        );
        for movement in movements() {
            let _ = write!(out, "{:>26}", movement.name());
        }
        out.push('\n');
        for (block_bytes, repositories, guests) in self.shapes() {
            let _ = write!(out, "  {:<12}{repositories:>5}{guests:>8}", size(block_bytes.into()));
            for movement in movements() {
                let found = self.machines.iter().find(|row| {
                    (row.block_bytes, row.repositories, row.guests, row.movement)
                        == (block_bytes, repositories, guests, movement)
                });
                let cell = found.map_or_else(String::new, |row| {
                    let speed = row.bytes_per_second / 1e6;
                    format!("{speed:.0} ({:.1}, {:.2})", row.disk_cpu_us_per_request, row.fairness)
                });
                let _ = write!(out, "{cell:>26}");
            }
            out.push('\n');
        }
    }

    fn shapes(&self) -> BTreeSet<(u32, usize, usize)> {
        self.machines.iter().map(|row| (row.block_bytes, row.repositories, row.guests)).collect()
    }

    /// The pictures by their files' names.
    pub fn pictures(&self) -> Vec<(String, String)> {
        let sizes: BTreeSet<u32> = self.machines.iter().map(|row| row.block_bytes).collect();
        let many_guests = sizes.into_iter().map(|bytes| (file_of(bytes), self.many_guests_picture(bytes)));
        let overhead = self.overhead.iter().filter(|traced| !traced.rows.is_empty()).map(|traced| {
            let what = if traced.write { "writes" } else { "reads" };
            let name = format!("xen-overhead-{}-{what}-{}.svg", traced.way.name(), traced.depth);
            (name, trace::picture(&traced.rows, &traced.title()))
        });
        many_guests.chain(overhead).collect()
    }

    fn many_guests_picture(&self, bytes: u32) -> String {
        let lines =
            self.shapes().into_iter().map(|shape| shape.1).collect::<BTreeSet<_>>().into_iter().flat_map(
                |repositories| {
                    movements().into_iter().map(move |movement| {
                        let wanted = move |row: &&MachinesRow| {
                            (row.block_bytes, row.repositories, row.movement)
                                == (bytes, repositories, movement)
                        };
                        let mut points: Vec<_> = self
                            .machines
                            .iter()
                            .filter(wanted)
                            .map(|row| (row.guests as f64, row.bytes_per_second / 1e6))
                            .collect();
                        points.sort_by(|a, b| a.0.total_cmp(&b.0));
                        Line { name: format!("{}, {repositories} SRs", movement.name()), points }
                    })
                },
            );
        let lines = Lines {
            title: format!("all guests together, reads of {}", size(bytes.into())),
            x: Axis::log("guests"),
            y: Axis::linear("MB/s"),
            lines: lines.collect(),
        };
        lines.svg()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(iops: f64, cpu: f64) -> Sample {
        Sample {
            iops,
            bytes_per_second: iops * 4096.0,
            disk_cpu_us: cpu,
            front_cpu_us: cpu,
            ..Sample::default()
        }
    }

    #[test]
    fn ratios_are_of_medians_to_the_first_variant() {
        let part = &parts()[0];
        let (first, other) =
            ([sample(100.0, 4.0), sample(900.0, 9.0), sample(200.0, 5.0)], [sample(400.0, 2.5)]);
        let row = Row::of(part, &part.works[0], &part.variants[1], &other, &first);
        assert_eq!((row.speed_ratio, row.cpu_ratio, row.iops), (2.0, 0.5, 400.0));
        let row = Row::of(part, &part.works[0], &part.variants[0], &first, &first);
        assert_eq!((row.speed_ratio, row.cpu_ratio, row.rounds), (1.0, 1.0, 3));
        assert_eq!(Row::of(part, &part.works[0], &part.variants[0], &other, &[]).speed_ratio, 0.0);
    }

    #[test]
    fn tables_and_pictures_show_what_was_found() {
        let site = Site::of("/".as_ref()).expect("it is there");
        let mut report = Report::new(Setting::of(&site, Duration::from_secs(1), 3, false));
        let part = &parts()[0];
        report.rows.push(Row::of(part, &part.works[0], &part.variants[0], &[sample(123_456.0, 2.0)], &[]));
        let found = Together { iops: 1000.0, disk_cpu_us: 3.0, front_cpu_us: 1.0, fairness: 0.9, errors: 0 };
        for guests in [1, 4] {
            report.machines.push(MachinesRow::of(4096, 1, guests, Movement::Map, &[found]));
        }
        report.skipped.push(Skipped::of("order", "no ring".into()));
        report.skipped.push(Skipped::of("order", "no ring".into()));
        let text = report.tables();
        assert!(text.contains("123456") && text.contains("4 (3.0, 0.90)"), "{text}");
        assert_eq!(text.matches("not measured: order, and 1 times more: no ring").count(), 1, "{text}");
        assert!(text.contains("hypercalls"), "the meaning is part of the tables: {text}");
        let pictures = report.pictures();
        assert_eq!(pictures.len(), 1);
        assert!(pictures[0].0 == "xen-machines-4k.svg" && pictures[0].1.matches("<circle").count() == 2);
    }
}
