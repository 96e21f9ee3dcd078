//! Where the time of traced requests went, by what they do and how large they are.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;
use tapio_load::LoadReport;
use tapio_stat::RequestKind;
use tapio_stat::trace::{STEPS, Step, TracedRequest};

use crate::plot::{Axis, Bar, Group, Line, Lines, Stacks};
use crate::size::size;

/// Of 100 requests of a row, as many of the fastest and as many of the slowest are left out of the means: one request
/// that lost its processor must not stand for all.
const TRIMMED_PERCENT: usize = 5;

/// How many of the fastest and, as many, of the slowest requests of a row are left out of its means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trim {
    /// Of 100.
    Percent(usize),
    /// Of the row, however many it has; none if fewer than three would be left.
    Requests(usize),
}

impl Default for Trim {
    fn default() -> Self {
        Self::Percent(TRIMMED_PERCENT)
    }
}

impl Trim {
    fn of(self, requests: usize) -> usize {
        match self {
            Self::Percent(percent) => requests * percent.min(49) / 100,
            Self::Requests(count) if requests >= count.saturating_mul(2).saturating_add(3) => count,
            Self::Requests(_) => 0,
        }
    }
}

/// How long something took, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Without the fastest and the slowest twentieth of the requests; of a step in the same requests, so that the
    /// means of the steps add up to that of the whole.
    pub mean_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
}

/// One step of the requests of a row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepTimes {
    pub step: Step,
    #[serde(flatten)]
    pub times: Times,
}

/// The same by the host alone: io_uring on the file, without any server.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HostTimes {
    pub depth: u32,
    #[serde(flatten)]
    pub times: Times,
}

impl HostTimes {
    /// Of a load with a fixed depth: its mean follows from its rate.
    pub fn of(depth: u32, load: &LoadReport) -> Self {
        let microseconds = |quantile| load.latencies.quantile_ns(quantile) as f64 / 1e3;
        let mean_us = f64::from(depth) * 1e6 / load.rate().max(1e-9);
        Self { depth, times: Times { mean_us, p50_us: microseconds(0.5), p99_us: microseconds(0.99) } }
    }
}

/// Requests of one kind and size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub kind: RequestKind,
    /// Their length in bytes, rounded up to a power of two.
    pub bytes: u64,
    pub requests: usize,
    /// How many were in flight at once, on average over the time they cover.
    pub depth: f64,
    /// Whether the front end's own points are known for all of them.
    pub front: bool,
    pub total: Times,
    pub steps: Vec<StepTimes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<HostTimes>,
}

fn percentile(sorted: &[u64], percent: usize) -> f64 {
    let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(index).map_or(0.0, |ns| *ns as f64 / 1e3)
}

fn times(values: &mut [u64], mean_us: f64) -> Times {
    values.sort_unstable();
    Times { mean_us, p50_us: percentile(values, 50), p99_us: percentile(values, 99) }
}

impl Row {
    fn of(
        kind: RequestKind,
        bytes: u64,
        (ns_per_tick, trim): (f64, Trim),
        mut requests: Vec<TracedRequest>,
    ) -> Self {
        requests.sort_unstable_by_key(|request| request.total_ns);
        let cut = trim.of(requests.len());
        let middle = &requests[cut..requests.len() - cut];
        let mean = |of: &dyn Fn(&TracedRequest) -> u64| {
            let sum: u128 = middle.iter().map(|request| u128::from(of(request))).sum();
            sum as f64 / middle.len().max(1) as f64 / 1e3
        };
        let column = |of: &dyn Fn(&TracedRequest) -> u64| -> Vec<u64> { requests.iter().map(of).collect() };
        let steps = Step::ALL.iter().enumerate().map(|(index, step)| {
            let of = move |request: &TracedRequest| request.steps_ns[index];
            StepTimes { step: *step, times: times(&mut column(&of), mean(&of)) }
        });
        let whole = |request: &TracedRequest| request.total_ns;
        Self {
            kind,
            bytes,
            requests: requests.len(),
            depth: depth(&requests, ns_per_tick),
            front: requests.iter().all(|request| request.front),
            total: times(&mut column(&whole), mean(&whole)),
            steps: steps.collect(),
            host: None,
        }
    }

    /// The mean of one step, in microseconds.
    pub fn step(&self, step: Step) -> f64 {
        self.steps.iter().find(|times| times.step == step).map_or(0.0, |times| times.times.mean_us)
    }

    /// As tables and pictures name it.
    pub fn name(&self) -> String {
        if self.bytes == 0 {
            self.kind.name().to_owned()
        } else {
            format!("{} {}", self.kind.name(), size(self.bytes))
        }
    }
}

/// Requests in flight on average: the time of all of them over the time that they cover.
fn depth(requests: &[TracedRequest], ns_per_tick: f64) -> f64 {
    let ns = |ticks: u64| ticks as f64 * ns_per_tick;
    let begin = requests.iter().map(|request| request.begin).min().unwrap_or(0);
    let covered = requests
        .iter()
        .map(|request| ns(request.begin - begin) + request.total_ns as f64)
        .fold(0.0, f64::max);
    let sum: f64 = requests.iter().map(|request| request.total_ns as f64).sum();
    if covered > 0.0 { sum / covered } else { 0.0 }
}

/// The rows of some requests: by kind, then by size.
pub fn rows(requests: &[TracedRequest], ns_per_tick: f64) -> Vec<Row> {
    trimmed_rows(requests, ns_per_tick, Trim::default())
}

/// As they stand in a row.
fn row_bytes(len: u64) -> u64 {
    if len == 0 { 0 } else { len.max(512).next_power_of_two() }
}

/// The requests one by one, in the order in which they began, as CSV: none is left out, so that the first ones of a
/// load, which are slower, are seen.
pub fn series(requests: &[TracedRequest], ns_per_tick: f64) -> String {
    let mut out = String::from("request,kind,bytes,begin_us");
    for step in Step::ALL {
        let _ = write!(out, ",{}_us", step.name());
    }
    out.push_str(",total_us\n");
    let ordered = in_order(requests);
    let begin = ordered.first().map_or(0, |request| request.begin);
    for (index, request) in ordered.iter().enumerate() {
        let since_us = request.begin.saturating_sub(begin) as f64 * ns_per_tick / 1e3;
        let _ = write!(out, "{index},{},{},{since_us:.3}", request.kind.name(), request.len);
        for ns in request.steps_ns {
            let _ = write!(out, ",{:.3}", ns as f64 / 1e3);
        }
        let _ = writeln!(out, ",{:.3}", request.total_ns as f64 / 1e3);
    }
    out
}

fn in_order(requests: &[TracedRequest]) -> Vec<TracedRequest> {
    let mut ordered = requests.to_vec();
    ordered.sort_by_key(|request| request.begin);
    ordered
}

/// Requests of a picture of single ones, at most, for each row.
const DRAWN_MAX: usize = 1000;

/// The picture of the same: how long each of the first requests took, a line for each kind and size.
pub fn series_picture(requests: &[TracedRequest], title: &str) -> String {
    let mut lines: BTreeMap<(usize, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for request in in_order(requests) {
        let points = lines.entry((request.kind as usize, row_bytes(request.len))).or_default();
        if points.len() < DRAWN_MAX {
            points.push(((points.len() + 1) as f64, request.total_ns as f64 / 1e3));
        }
    }
    let line = |((kind, bytes), points): ((usize, u64), Vec<(f64, f64)>)| {
        let kind = RequestKind::ALL.get(kind)?.name();
        let name = if bytes == 0 { kind.to_owned() } else { format!("{kind} {}", size(bytes)) };
        Some(Line { name, points })
    };
    Lines {
        title: title.to_owned(),
        x: Axis::linear("request, in the order in which they began"),
        y: Axis::log("microseconds"),
        lines: lines.into_iter().filter_map(line).collect(),
    }
    .svg()
}

/// The same with another trim.
pub fn trimmed_rows(requests: &[TracedRequest], ns_per_tick: f64, trim: Trim) -> Vec<Row> {
    let mut groups: BTreeMap<(usize, u64), Vec<TracedRequest>> = BTreeMap::new();
    for request in requests {
        groups.entry((request.kind as usize, row_bytes(request.len))).or_default().push(*request);
    }
    let row = |((kind, bytes), requests): ((usize, u64), Vec<TracedRequest>)| {
        Some(Row::of(*RequestKind::ALL.get(kind)?, bytes, (ns_per_tick, trim), requests))
    };
    groups.into_iter().filter_map(row).collect()
}

/// The steps that any of these rows spent time in; the others would be columns of zeroes.
fn used(rows: &[Row]) -> Vec<Step> {
    Step::ALL.into_iter().filter(|step| rows.iter().any(|row| row.step(*step) >= 0.005)).collect()
}

/// The table: a line for each row, means in microseconds. Writing to a string cannot fail.
pub fn table(rows: &[Row]) -> String {
    let steps = used(rows);
    let with_host = rows.iter().any(|row| row.host.is_some());
    let mut out = format!("{:<22}{:>9}{:>7}", "microseconds", "requests", "depth");
    for step in &steps {
        let _ = write!(out, "{:>width$}", step.name(), width = step.name().len().max(7) + 2);
    }
    let _ = write!(out, "{:>10}{:>10}{:>10}", "TOTAL", "p50", "p99");
    out.push_str(if with_host { "      HOST     times\n" } else { "\n" });
    for row in rows {
        let _ = write!(out, "{:<22}{:>9}{:>7.1}", row.name(), row.requests, row.depth);
        for step in &steps {
            let _ = write!(out, "{:>width$.2}", row.step(*step), width = step.name().len().max(7) + 2);
        }
        let total = &row.total;
        let _ = write!(out, "{:>10.2}{:>10.2}{:>10.2}", total.mean_us, total.p50_us, total.p99_us);
        if let Some(host) = &row.host {
            let _ = write!(
                out,
                "{:>10.2}{:>10.2}",
                host.times.mean_us,
                total.mean_us / host.times.mean_us.max(1e-9)
            );
        }
        out.push('\n');
    }
    out
}

/// The picture: a bar for each row, and beside it the host alone.
pub fn picture(rows: &[Row], title: &str) -> String {
    let steps = used(rows);
    let mut series: Vec<String> = steps.iter().map(|step| step.name().to_owned()).collect();
    let with_host = rows.iter().any(|row| row.host.is_some());
    if with_host {
        series.push("host alone".into());
    }
    let groups = rows.iter().map(|row| {
        let mut bars =
            vec![Bar { name: "traced".into(), parts: steps.iter().map(|step| row.step(*step)).collect() }];
        if let Some(host) = &row.host {
            let mut parts = vec![0.0; steps.len()];
            parts.push(host.times.mean_us);
            bars.push(Bar { name: "host".into(), parts });
        }
        Group { name: row.name(), bars }
    });
    // From 512 bytes to a megabyte times differ by a factor of a hundred: each size has its own scale.
    let stacks = Stacks {
        title: title.to_owned(),
        y: "microseconds, each group on its own scale".into(),
        series,
        groups: groups.collect(),
        own_scales: true,
    };
    stacks.svg()
}

/// The share of the whole that is not in any step: what truncation to nanoseconds has lost. For tests.
#[cfg(test)]
fn unexplained(row: &Row) -> f64 {
    let steps: f64 = row.steps.iter().map(|step| step.times.mean_us).sum();
    (row.total.mean_us - steps) / row.total.mean_us.max(1e-9)
}

const _: () = assert!(STEPS == Step::ALL.len());

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: RequestKind, len: u64, begin: u64, base_ns: u64) -> TracedRequest {
        let steps_ns: [u64; STEPS] = std::array::from_fn(|step| base_ns * (step as u64 + 1));
        let total_ns = steps_ns.iter().sum();
        TracedRequest { id: 0, client: 1, kind, len, front: true, begin, steps_ns, total_ns }
    }

    #[test]
    fn requests_are_gathered_by_kind_and_size_and_steps_add_up() {
        let mut all: Vec<_> =
            (0..100).map(|at| request(RequestKind::Read, 4096, at * 66_000, 1_000)).collect();
        // One that lost its processor.
        all.push(request(RequestKind::Read, 4096, 0, 1_000_000));
        all.push(request(RequestKind::Read, 3000, 0, 1_000));
        all.push(request(RequestKind::Write, 512, 0, 2_000));
        all.push(request(RequestKind::Flush, 0, 0, 5_000));
        let rows = rows(&all, 1.0);
        let names: Vec<_> = rows.iter().map(Row::name).collect();
        assert_eq!(names, ["read 4.0 KiB", "write 512 B", "flush"]);
        let read = &rows[0];
        assert_eq!((read.requests, read.total.p50_us, read.total.mean_us), (102, 66.0, 66.0));
        assert!(read.total.p99_us >= 66.0 && read.steps[10].times.mean_us == 11.0);
        assert!(rows.iter().all(|row| unexplained(row).abs() < 1e-9));
        let alone = rows.iter().find(|row| row.kind == RequestKind::Write).expect("a row");
        assert!((alone.depth - 1.0).abs() < 1e-9, "{}", alone.depth);
        assert_eq!(super::rows(&[], 1.0), []);
    }

    #[test]
    fn single_requests_are_kept_and_the_trim_is_a_choice() {
        // A load whose first requests are slow: 20 of 100 either side is the choice of the measurement repeated here.
        let mut all: Vec<_> = (0..100)
            .map(|at| request(RequestKind::Read, 4096, at * 66_000, if at < 10 { 9_000 } else { 1_000 }))
            .collect();
        all.reverse();
        let mean = |trim| trimmed_rows(&all, 1.0, trim)[0].total.mean_us;
        assert!((mean(Trim::Percent(0)) - 66.0 * (0.9 + 0.1 * 9.0)).abs() < 1e-6);
        assert!((mean(Trim::Requests(20)) - 66.0).abs() < 1e-6);
        assert_eq!(mean(Trim::Requests(60)), mean(Trim::Percent(0)), "too few would be left");
        let text = series(&all, 1.0);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 101);
        assert!(lines[1].starts_with("0,read,4096,0.000,") && lines[1].ends_with(",594.000"), "{}", lines[1]);
        assert!(
            lines[100].starts_with("99,read,4096,6534.000,") && lines[100].ends_with(",66.000"),
            "{}",
            lines[100]
        );
        assert!(lines.iter().all(|line| line.split(',').count() == STEPS + 5));
        let svg = series_picture(&all, "one by one");
        assert!(svg.contains("read 4.0 KiB") && svg.contains("594"), "{svg}");
    }

    #[test]
    fn tables_and_pictures_show_the_host_beside() {
        let all: Vec<_> = (0..10).map(|at| request(RequestKind::Read, 65_536, at, 1_000)).collect();
        let mut rows = rows(&all, 1.0);
        let plain = table(&rows);
        assert!(plain.contains("kernel") && !plain.contains("HOST"), "{plain}");
        let times = Times { mean_us: 33.0, p50_us: 30.0, p99_us: 40.0 };
        rows[0].host = Some(HostTimes { depth: 10, times });
        let text = table(&rows);
        assert!(text.lines().nth(1).is_some_and(|line| line.ends_with("33.00      2.00")), "{text}");
        let svg = picture(&rows, "where the time goes");
        assert!(svg.contains("host alone") && svg.contains("read 64.0 KiB"), "{svg}");
        // A step that took no time is no column.
        rows[0]
            .steps
            .iter_mut()
            .filter(|step| step.step == Step::CopyIn)
            .for_each(|step| step.times.mean_us = 0.0);
        assert!(!table(&rows).contains("copy-in"));
    }
}
