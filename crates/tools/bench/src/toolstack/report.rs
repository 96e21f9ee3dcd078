//! What a run found, as tables.

use std::fmt::Write;

use serde::Serialize;

use super::super::common::{self, CUT_SHORT};
use super::calls::{Calls, Many};
use super::density::Table;
use super::events::Events;
use super::idle::Idle;
use super::plug::{FRONT, GUEST, PEER, Plugs};
use super::plug_memory::PlugMemory;
use super::report_idle;
use super::snapshots::Snapshots;
use super::starts::{PER_VM, Start, StartKind, Storm};

/// The host and the settings of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    #[serde(flatten)]
    pub run: common::Setting,
    pub dir: String,
    pub latency_ms: u64,
}

/// Memory of the daemon.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    pub state: String,
    pub pss_kib: u64,
    pub anonymous_kib: u64,
}

/// Something that is aimed at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goal {
    pub what: String,
    pub value: f64,
    /// At least this, or at most.
    pub wanted: f64,
    pub at_least: bool,
    pub reached: bool,
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub setting: Setting,
    /// From the start of `tapiod` on empty directories to the answer to the first login.
    pub first_answer_ms: f64,
    pub plugs: Vec<Plugs>,
    pub snapshots: Vec<Snapshots>,
    pub starts: Vec<Start>,
    pub storm: Option<Storm>,
    pub calls: Vec<Calls>,
    pub events: Option<Events>,
    pub many: Option<Many>,
    pub plug_memory: Option<PlugMemory>,
    pub idle: Option<Idle>,
    pub density: Vec<Table>,
    pub memory: Vec<Memory>,
    pub goals: Vec<Goal>,
    pub skipped: Vec<String>,
    pub interrupted: bool,
}

/// The least part of the ideal speed-up.
const OF_IDEAL: f64 = 0.9;
/// The most that a plug may take, in milliseconds.
const PLUG_MS: f64 = 15.0;

impl Report {
    /// Compares what was found with what is aimed at.
    pub fn judge(&mut self) {
        let mut goals = Vec::new();
        let mut add = |what: String, value: f64, wanted: f64, at_least: bool| {
            let reached = if at_least { value >= wanted } else { value <= wanted };
            goals.push(Goal { what, value, wanted, at_least, reached });
        };
        for row in self.starts.iter().filter(|row| row.kind == StartKind::Latency && row.vbds > 1) {
            add(
                format!("start with {} disks, of the ideal speed-up", row.vbds),
                row.of_ideal,
                OF_IDEAL,
                true,
            );
        }
        let plug = |what: &str| self.plugs.iter().find(|row| row.what == what);
        for what in [FRONT, GUEST] {
            if let Some(row) = plug(what) {
                add(format!("{what}, ms"), row.median_ms, PLUG_MS, false);
            }
        }
        if let (Some(ours), Some(peer)) = (plug(FRONT), plug(PEER)) {
            let ratio = ours.median_ms / peer.median_ms.max(1e-3);
            add("VBD.plug / qemu-storage-daemon, until the front end answers".into(), ratio, 1.0, false);
        }
        self.goals = goals;
    }

    /// The tables that people read. Writing to a string cannot fail, here and below.
    pub fn tables(&self) -> String {
        let mut out = self.setting.run.line(&format!("state and images in {}", self.setting.dir));
        let _ = writeln!(out, "tapiod answers {:.1} ms after its first start", self.first_answer_ms);
        self.plugging(&mut out);
        self.snapshotting(&mut out);
        self.starting(&mut out);
        self.calling(&mut out);
        if let Some(events) = &self.events {
            let _ = writeln!(
                out,
                "\nevents to {} listeners\n  a change until the first has it {:.2} ms, until the last {:.2} ms \
                 ({} changes)\n  {:.0} changes/s in a burst; all have its last {:.2} ms later",
                events.listeners,
                events.first_listener_ms,
                events.last_listener_ms,
                events.changes,
                events.changes_per_second,
                events.caught_up_ms
            );
        }
        if let Some(many) = &self.many {
            let _ = writeln!(out, "\n{} VDIs\n  SR.scan that finds them {:.0} ms", many.vdis, many.scan_ms);
            for all in &many.get_all_records {
                let mib = all.bytes as f64 / f64::from(1 << 20);
                let _ =
                    writeln!(out, "  VDI.get_all_records {:?} {:.0} ms, {mib:.1} MiB", all.encoding, all.ms);
            }
        }
        if let Some(found) = &self.plug_memory {
            report_idle::plug_memory(&mut out, found);
        }
        if let Some(found) = &self.idle {
            report_idle::idle(&mut out, found);
        }
        report_idle::density(&mut out, &self.density);
        if !self.memory.is_empty() {
            let _ = writeln!(
                out,
                "\nmemory of tapiod\n  {:<36}{:>10}{:>16}",
                "STATE", "PSS KiB", "anonymous KiB"
            );
        }
        for row in &self.memory {
            let _ = writeln!(out, "  {:<36}{:>10}{:>16}", row.state, row.pss_kib, row.anonymous_kib);
        }
        if !self.goals.is_empty() {
            let _ = writeln!(out, "\ngoals\n  {:<64}{:>8}  WANTED", "", "FOUND");
        }
        for goal in &self.goals {
            let sign = if goal.at_least { "at least" } else { "at most" };
            let missed = if goal.reached { "" } else { ": MISSED" };
            let _ = writeln!(out, "  {:<64}{:>8.2}  {sign} {}{missed}", goal.what, goal.value, goal.wanted);
        }
        for skipped in &self.skipped {
            let _ = writeln!(out, "skipped {skipped}");
        }
        if self.interrupted {
            out.push_str(CUT_SHORT);
        }
        out
    }

    fn plugging(&self, out: &mut String) {
        if self.plugs.is_empty() {
            return;
        }
        let _ = writeln!(
            out,
            "\none plug of a VHD\n  {:<54}{:>8}{:>11}{:>9}{:>9}{:>11}",
            "", "times", "median ms", "least", "most", "unplug ms"
        );
        for row in &self.plugs {
            let _ = writeln!(
                out,
                "  {:<54}{:>8}{:>11.2}{:>9.2}{:>9.2}{:>11.2}",
                row.what, row.times, row.median_ms, row.least_ms, row.most_ms, row.unplug_ms
            );
        }
    }

    fn snapshotting(&self, out: &mut String) {
        if self.snapshots.is_empty() {
            return;
        }
        let _ = writeln!(
            out,
            "\nwrites of 4 KiB to a disk, 4 in flight\n  {:<54}{:>6}{:>9}{:>9}{:>9}{:>9}{:>12}",
            "", "count", "call ms", "writes", "p50 us", "p99 us", "longest ms"
        );
        for row in &self.snapshots {
            let _ = writeln!(
                out,
                "  {:<54}{:>6}{:>9.1}{:>9}{:>9.0}{:>9.0}{:>12.2}",
                row.what, row.snapshots, row.call_ms, row.writes, row.p50_us, row.p99_us, row.longest_ms
            );
        }
    }

    fn starting(&self, out: &mut String) {
        for kind in [StartKind::Latency, StartKind::Real] {
            let rows: Vec<_> = self.starts.iter().filter(|row| row.kind == kind).collect();
            if rows.is_empty() {
                continue;
            }
            let title = match kind {
                StartKind::Latency => {
                    format!("each plug waits {} ms for its storage", self.setting.latency_ms)
                }
                StartKind::Real => "VHDs behind vhost-user, no latency: work for the processors alone".into(),
            };
            let _ = writeln!(
                out,
                "\nVM.start, {title}\n  {:>5}{:>14}{:>14}{:>10}{:>8}{:>10}",
                "VBDs",
                "1 at a time",
                format!("{PER_VM} at a time"),
                "speed-up",
                "ideal",
                "of ideal"
            );
            for row in rows {
                let _ = writeln!(
                    out,
                    "  {:>5}{:>11.1} ms{:>11.1} ms{:>10.2}{:>8.2}{:>10.2}",
                    row.vbds, row.serial_ms, row.parallel_ms, row.speed_up, row.ideal, row.of_ideal
                );
            }
        }
        if let Some(storm) = &self.storm {
            let _ = writeln!(
                out,
                "\n{} VMs with {} disks at once, {} steps at a time, each plug waits {} ms\n  \
                 up in {:.0} ms (the waiting alone: {:.0} ms), down in {:.0} ms",
                storm.machines,
                storm.disks,
                storm.pool,
                storm.latency_ms,
                storm.up_ms,
                storm.ideal_ms,
                storm.down_ms
            );
        }
    }

    fn calling(&self, out: &mut String) {
        if self.calls.is_empty() {
            return;
        }
        let _ = writeln!(
            out,
            "\ncalls\n  {:<22}{:<8}{:<8}{:>12}{:>10}{:>10}{:>10}{:>14}",
            "MESSAGE", "WORDS", "DOOR", "CONNECTIONS", "calls/s", "p50 us", "p99 us", "CPU us/call"
        );
        for row in &self.calls {
            let cpu = row.server_cpu_us.map_or_else(|| "n/a".into(), |cpu| format!("{cpu:.0}"));
            let _ = writeln!(
                out,
                "  {:<22}{:<8}{:<8}{:>12}{:>10.0}{:>10.0}{:>10.0}{cpu:>14}",
                row.method,
                format!("{:?}", row.encoding),
                format!("{:?}", row.door),
                row.connections,
                row.calls_per_second,
                row.p50_us,
                row.p99_us
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn start(kind: StartKind, vbds: usize, of_ideal: f64) -> Start {
        Start { kind, vbds, serial_ms: 10.0, parallel_ms: 1.0, speed_up: 9.0, ideal: 10.0, of_ideal }
    }

    fn plugs(what: &'static str, median_ms: f64) -> Plugs {
        Plugs { what, times: 3, median_ms, least_ms: 1.0, most_ms: 30.0, unplug_ms: 2.0 }
    }

    #[test]
    fn goals_are_reached_or_missed() {
        let setting = Setting {
            run: common::Setting::now(Duration::from_secs(1), 3, false),
            dir: "/d".into(),
            latency_ms: 100,
        };
        let mut report = Report {
            setting,
            first_answer_ms: 1.0,
            snapshots: Vec::new(),
            plugs: vec![plugs(FRONT, 14.0), plugs(PEER, 10.0), plugs(GUEST, 16.0)],
            starts: vec![
                start(StartKind::Latency, 1, 0.1),
                start(StartKind::Latency, 10, 0.95),
                start(StartKind::Real, 10, 0.1),
            ],
            storm: None,
            calls: Vec::new(),
            events: None,
            many: None,
            plug_memory: None,
            idle: None,
            density: Vec::new(),
            memory: Vec::new(),
            goals: Vec::new(),
            skipped: vec!["x".into()],
            interrupted: false,
        };
        report.judge();
        let reached: Vec<bool> = report.goals.iter().map(|goal| goal.reached).collect();
        assert_eq!(reached, [true, true, false, false]);
        let text = report.tables();
        assert_eq!(text.matches(": MISSED").count(), 2, "{text}");
        assert!(text.contains("skipped x") && text.contains("10 at a time"), "{text}");
    }
}
