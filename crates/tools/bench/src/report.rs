//! What a run found, and how it is shown.

use std::fmt::Write;
use std::path::PathBuf;

use serde::Serialize;

use super::alone::{Memory, Start};
use super::common::{self, CUT_SHORT};
use super::goals::Quantity;
use super::ground::Ground;
use super::medians::Row;
use super::server::ours;
use super::site::Site;
use super::verdict::{self, Verdict};
use super::workload::{WORKLOADS, Workload};

/// What to know about a file system in memory: `tapio_ring` moves small pieces by calls of its own there.
const IN_MEMORY: &str = "tapio-disk moves reads of up to 64 KiB and writes of up to 256 KiB of files in memory itself, \
                         past its ring: only a disk shows the cost of the ring";

/// What was found in one directory.
#[derive(Clone, Debug, Serialize)]
pub struct Place {
    #[serde(flatten)]
    pub site: Site,
    pub image_bytes: u64,
    pub fresh_image_bytes: u64,
    pub fresh_requests_max: u64,
    pub fresh_space_bytes_max: u64,
    pub results: Vec<Row>,
    pub goals: Vec<Verdict>,
}

impl Place {
    pub fn of(ground: &Ground, results: Vec<Row>, goals: Vec<Verdict>) -> Self {
        let sizes = &ground.sizes;
        Self {
            site: ground.site.clone(),
            image_bytes: sizes.full_len,
            fresh_image_bytes: sizes.fresh_len,
            fresh_requests_max: sizes.fresh_requests_max,
            fresh_space_bytes_max: sizes.fresh_space_max,
            results,
            goals,
        }
    }

    fn tables(&self, out: &mut String) {
        let _ = writeln!(out, "\n== {} ==", self.site.line());
        if self.site.in_memory {
            let _ = writeln!(out, "{IN_MEMORY}");
        }
        for workload in &WORKLOADS {
            let rows: Vec<_> = self.results.iter().filter(|row| row.workload == workload.name).collect();
            if !rows.is_empty() {
                table(out, workload, &rows);
            }
        }
        comparisons(out, &self.goals);
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
    pub setting: common::Setting,
    /// Our disk process; none if it is not there.
    pub disk_program: Option<PathBuf>,
    pub places: Vec<Place>,
    pub starts: Vec<Start>,
    pub memory: Vec<Memory>,
    /// Those for a process alone; those for its work are with the places.
    pub goals: Vec<Verdict>,
    pub skipped: Vec<Skipped>,
    /// An interrupt ended the run before its time.
    pub interrupted: bool,
}

/// A number with a width and its decimals, or `n/a`.
fn or_not(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "n/a".into(), |value| format!("{value:.decimals$}"))
}

fn table(out: &mut String, workload: &Workload, rows: &[&Row]) {
    let _ = writeln!(
        out,
        "\n{} ({})\n  {:<22}{:>9}{:>9}{:>10}{:>10}{:>10}{:>12}{:>12}{:>11}{:>13}{:>11}",
        workload.title,
        workload.name,
        "SERVER",
        "IOPS",
        "MB/s",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "longest ms",
        "CPU us/req",
        "calls/req",
        "load us/req",
        "load CPUs"
    );
    for row in rows {
        let _ = write!(
            out,
            "  {:<22}{:>9.0}{:>9.1}{:>10.1}{:>10.1}{:>10.1}{:>12.2}{:>12}{:>11}{:>13}{:>11}",
            row.server,
            row.iops,
            row.bytes_per_second / 1e6,
            row.p50_us,
            row.p99_us,
            row.p999_us,
            row.longest_us / 1e3,
            or_not(row.server_cpu_us_per_request, 2),
            or_not(row.server_calls_per_request, 2),
            or_not(row.load_cpu_us_per_request, 2),
            or_not(row.load_processors, 2),
        );
        if row.errors > 0 {
            let _ = write!(out, "  {} errors", row.errors);
        }
        out.push_str(if row.limited_by_load { "  load busy" } else { "" });
        out.push_str(if row.cached { "  page cache\n" } else { "\n" });
    }
}

fn comparisons(out: &mut String, goals: &[Verdict]) {
    if goals.is_empty() {
        return;
    }
    let judged = goals.iter().filter(|goal| goal.reached.is_some()).count();
    let met = goals.iter().filter(|goal| goal.reached == Some(true)).count();
    let width = goals.iter().map(|goal| goal.workload.len()).max().unwrap_or(0).max("WORKLOAD".len()) + 2;
    let _ = writeln!(
        out,
        "\ngoals: {met} of {judged} met\n  {:<width$}{:<58}{:>8}  WANTED",
        "WORKLOAD", "", "VALUE"
    );
    for goal in goals {
        let sign = if goal.quantity == Quantity::Rate { "at least" } else { "at most" };
        let wanted = match (goal.wanted, goal.reached) {
            (Some(wanted), Some(false)) => format!("{sign} {wanted}: MISSED"),
            (Some(wanted), _) => format!("{sign} {wanted}"),
            (None, _) => String::new(),
        };
        let against = goal.against.map(|name| format!(" / {name}")).unwrap_or_default();
        let what = format!("{}{against}{}", goal.ours, goal.quantity.title());
        let note = goal.note.map(|note| format!(" ({note})")).unwrap_or_default();
        let line = format!("  {:<width$}{what:<58}{:>8.2}  {wanted}{note}", goal.workload, goal.value);
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

impl Report {
    /// An empty one.
    pub fn new(setting: common::Setting) -> Self {
        Self {
            setting,
            disk_program: ours().ok(),
            places: Vec::new(),
            starts: Vec::new(),
            memory: Vec::new(),
            goals: Vec::new(),
            skipped: Vec::new(),
            interrupted: false,
        }
    }

    /// Holds what was found of processes alone against its limits.
    pub fn judge_alone(&mut self) {
        self.goals = verdict::of_alone(&self.starts, &self.memory);
    }

    /// The tables that people read. Writing to a string cannot fail, here and above.
    pub fn tables(&self) -> String {
        let mut out = self.setting.line("ours beside peers");
        if let Some(program) = &self.disk_program {
            let _ = writeln!(out, "ours is {}", program.display());
        }
        for place in &self.places {
            place.tables(&mut out);
        }
        self.costs(&mut out);
        comparisons(&mut out, &self.goals);
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
}
