//! What a run found, and how it is shown.

use std::fmt::Write;

use serde::Serialize;

use super::alone::{Memory, Start};
use super::common::{self, CUT_SHORT};
use super::goals::{Quantity, Ratio};
use super::medians::Row;
use super::workload::WORKLOADS;

/// The host and the settings of a run.
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
