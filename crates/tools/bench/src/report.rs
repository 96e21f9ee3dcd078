//! Medians, and how they are shown.

use std::fmt::Write;

use serde::Serialize;

use super::alone::{Memory, Start};
use super::common::{self, CUT_SHORT};
use super::goals::{Quantity, Ratio};
use super::measure::Sample;
use super::workload::WORKLOADS;

/// The machine and the settings of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    #[serde(flatten)]
    pub run: common::Setting,
    pub dir: String,
    pub in_memory: bool,
    pub image_bytes: u64,
    pub fresh_image_bytes: u64,
    pub fresh_requests: u64,
}

/// Medians over the rounds of one server under one load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub workload: &'static str,
    pub server: &'static str,
    pub rounds: usize,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub server_cpu_us_per_request: Option<f64>,
    pub server_calls_per_request: Option<f64>,
    /// Of all rounds together.
    pub errors: u64,
}

impl Row {
    /// The medians of samples, of which there must be one.
    pub fn of(workload: &'static str, server: &'static str, samples: &[Sample]) -> Self {
        let of = |value: fn(&Sample) -> f64| median(&mut samples.iter().map(value).collect::<Vec<_>>());
        let of_some = |value: fn(&Sample) -> Option<f64>| {
            let mut values: Vec<f64> = samples.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| median(&mut values))
        };
        Self {
            workload,
            server,
            rounds: samples.len(),
            iops: of(|sample| sample.iops),
            bytes_per_second: of(|sample| sample.bytes_per_second),
            p50_us: of(|sample| sample.p50_us),
            p99_us: of(|sample| sample.p99_us),
            server_cpu_us_per_request: of_some(|sample| sample.cpu_us),
            server_calls_per_request: of_some(|sample| sample.calls),
            errors: samples.iter().map(|sample| sample.errors).sum(),
        }
    }
}

/// What was not measured.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    pub server: &'static str,
    pub reason: String,
}

/// All that a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub setting: Setting,
    pub results: Vec<Row>,
    pub starts: Vec<Start>,
    pub memory: Vec<Memory>,
    pub ratios: Vec<Ratio>,
    pub skipped: Vec<Skipped>,
    /// An interrupt ended the run before its time.
    pub interrupted: bool,
}

/// The middle value; of an even number the mean of the two in the middle; 0 of none.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[half],
        _ => f64::midpoint(values[half - 1], values[half]),
    }
}

/// A number with a width and its decimals, or `n/a`.
fn or_not(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "n/a".into(), |value| format!("{value:.decimals$}"))
}

impl Report {
    /// The tables that people read. Writing to a string cannot fail, here and below.
    pub fn tables(&self) -> String {
        let Setting { dir, in_memory, .. } = &self.setting;
        let place = format!("{dir} ({})", if *in_memory { "in memory" } else { "a disk" });
        let mut out = self.setting.run.line(&place);
        for workload in &WORKLOADS {
            let rows: Vec<_> = self.results.iter().filter(|row| row.workload == workload.name).collect();
            if rows.is_empty() {
                continue;
            }
            let _ = writeln!(
                out,
                "\n{} ({})\n  {:<22}{:>10}{:>10}{:>10}{:>10}{:>14}{:>12}",
                workload.title,
                workload.name,
                "SERVER",
                "IOPS",
                "MB/s",
                "p50 us",
                "p99 us",
                "CPU us/req",
                "calls/req"
            );
            for row in rows {
                let _ = write!(
                    out,
                    "  {:<22}{:>10.0}{:>10.1}{:>10.1}{:>10.1}{:>14}{:>12}",
                    row.server,
                    row.iops,
                    row.bytes_per_second / 1e6,
                    row.p50_us,
                    row.p99_us,
                    or_not(row.server_cpu_us_per_request, 2),
                    or_not(row.server_calls_per_request, 2),
                );
                out.push_str(&if row.errors > 0 {
                    format!("  {} errors\n", row.errors)
                } else {
                    "\n".into()
                });
            }
        }
        self.costs(&mut out);
        self.comparisons(&mut out);
        for skipped in &self.skipped {
            let _ = writeln!(out, "skipped {}: {}", skipped.server, skipped.reason);
        }
        if self.interrupted {
            out.push_str(CUT_SHORT);
        }
        out
    }

    fn costs(&self, out: &mut String) {
        if !self.starts.is_empty() {
            let _ = writeln!(
                out,
                "\nstart and end\n  {:<22}{:>20}{:>12}",
                "SERVER", "first answer ms", "close ms"
            );
        }
        for start in &self.starts {
            let _ = writeln!(
                out,
                "  {:<22}{:>20.2}{:>12.2}",
                start.server, start.first_answer_ms, start.close_ms
            );
        }
        if !self.memory.is_empty() {
            let _ = writeln!(
                out,
                "\nmemory of one idle process\n  {:<22}{:<30}{:>10}{:>16}",
                "SERVER", "STATE", "PSS KiB", "anonymous KiB"
            );
        }
        for memory in &self.memory {
            let _ = writeln!(
                out,
                "  {:<22}{:<30}{:>10}{:>16}",
                memory.server, memory.state, memory.pss_kib, memory.anonymous_kib
            );
        }
    }

    fn comparisons(&self, out: &mut String) {
        if self.ratios.is_empty() {
            return;
        }
        let _ = writeln!(out, "\nratios\n  {:<18}{:<46}{:>8}  WANTED", "WORKLOAD", "", "RATIO");
        for ratio in &self.ratios {
            let what = if ratio.quantity == Quantity::Rate { "" } else { ", server CPU" };
            let sign = if ratio.quantity == Quantity::Rate { "at least" } else { "at most" };
            let wanted = match (ratio.wanted, ratio.reached) {
                (Some(wanted), Some(true)) => format!("{sign} {wanted}"),
                (Some(wanted), _) => format!("{sign} {wanted}: MISSED"),
                (None, _) => String::new(),
            };
            let pair = format!("{} / {}{what}", ratio.ours, ratio.peer);
            let line = format!("  {:<18}{pair:<46}{:>8.2}  {wanted}", ratio.workload, ratio.ratio);
            let _ = writeln!(out, "{}", line.trim_end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&mut []), 0.0);
    }

    #[test]
    fn one_bad_round_does_not_show() {
        let sample = |iops, cpu_us| Sample { iops, cpu_us, ..Sample::default() };
        let samples = [sample(10.0, Some(2.0)), sample(1000.0, None), sample(12.0, Some(4.0))];
        let row = Row::of("w", "s", &samples);
        assert_eq!(
            (row.iops, row.server_cpu_us_per_request, row.server_calls_per_request),
            (12.0, Some(3.0), None)
        );
    }
}
