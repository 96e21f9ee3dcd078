//! What a run did, and what it found.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

/// Actions that a finding shows.
const ACTIONS_KEPT: usize = 50;

/// Something that is not as it has to be.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Which part of the run.
    pub leg: String,
    /// The step of its schedule.
    pub step: u64,
    /// What is wrong.
    pub what: String,
}

/// What a panic said: a helper that starts programs ends so when one of them does not what it has to.
pub fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words").to_string()
}

/// How often an action was done and refused.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    done: u64,
    refused: u64,
}

/// Counts requests of a load.
#[derive(Debug, Default)]
pub struct LoadCounts {
    /// Requests that were answered well.
    pub answered: AtomicU64,
    /// Requests that failed while they were allowed to.
    pub failed: AtomicU64,
    /// Bytes written.
    pub written: AtomicU64,
    /// Bytes read and compared.
    pub verified: AtomicU64,
    /// Connections made.
    pub connections: AtomicU64,
}

/// The record of a run, shared by all its parts.
#[derive(Debug)]
pub struct Report {
    /// The seed of the run.
    pub seed: u64,
    began: Instant,
    is_quiet: bool,
    tallies: Mutex<BTreeMap<String, Tally>>,
    actions: Mutex<VecDeque<String>>,
    findings: Mutex<Vec<Finding>>,
    refusals: Mutex<BTreeMap<String, u64>>,
    left_out: Mutex<BTreeMap<String, String>>,
    /// Requests of all disks.
    pub load: LoadCounts,
    /// The run ends.
    stop: AtomicBool,
}

impl Report {
    /// Nothing done yet.
    pub fn new(seed: u64, is_quiet: bool) -> Self {
        Self {
            seed,
            began: Instant::now(),
            is_quiet,
            tallies: Mutex::default(),
            actions: Mutex::default(),
            findings: Mutex::default(),
            refusals: Mutex::default(),
            left_out: Mutex::default(),
            load: LoadCounts::default(),
            stop: AtomicBool::new(false),
        }
    }

    fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// A line of the log: the last of them belong to a finding.
    pub fn note(&self, leg: &str, step: u64, text: &str) {
        let line = format!("{:9.3} {leg} {step}: {text}", self.seconds());
        if !self.is_quiet {
            eprintln!("{line}");
        }
        let mut actions = self.actions.lock().expect("no holder panics");
        if actions.len() == ACTIONS_KEPT {
            actions.pop_front();
        }
        actions.push_back(line);
    }

    /// An action was done.
    pub fn done(&self, action: &str) {
        self.tallies.lock().expect("no holder panics").entry(action.into()).or_default().done += 1;
    }

    /// An action was refused for a reason that is expected.
    pub fn refused(&self, action: &str, why: &str) {
        self.tallies.lock().expect("no holder panics").entry(action.into()).or_default().refused += 1;
        *self.refusals.lock().expect("no holder panics").entry(format!("{action}: {why}")).or_default() += 1;
    }

    /// A leg cannot run on this host.
    pub fn leave_out(&self, leg: &str, why: &str) {
        eprintln!("left out: {leg} {why}");
        self.left_out.lock().expect("no holder panics").insert(leg.into(), why.into());
    }

    /// Something is wrong: the run ends.
    pub fn found(&self, finding: Finding) {
        eprintln!("FINDING in {} at step {}: {}", finding.leg, finding.step, finding.what);
        self.findings.lock().expect("no holder panics").push(finding);
        self.end();
    }

    /// Whether anything was found.
    pub fn is_clean(&self) -> bool {
        self.findings.lock().expect("no holder panics").is_empty()
    }

    /// Whether anything was found in a leg.
    pub fn has_found(&self, leg: &str) -> bool {
        self.findings.lock().expect("no holder panics").iter().any(|finding| finding.leg == leg)
    }

    /// All parts of the run end.
    pub fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether the run is ending.
    pub fn is_ending(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn load_value(&self) -> Value {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "answered": count(&self.load.answered),
            "failed_as_allowed": count(&self.load.failed),
            "written_bytes": count(&self.load.written),
            "verified_bytes": count(&self.load.verified),
            "connections": count(&self.load.connections),
        })
    }

    /// Everything, for programs.
    pub fn json(&self) -> Value {
        let tallies = self.tallies.lock().expect("no holder panics");
        let actions: BTreeMap<&String, Value> = tallies
            .iter()
            .map(|(name, tally)| (name, json!({ "done": tally.done, "refused": tally.refused })))
            .collect();
        let findings = self.findings.lock().expect("no holder panics");
        let findings: Vec<Value> = findings
            .iter()
            .map(|finding| json!({ "leg": finding.leg, "step": finding.step, "what": finding.what }))
            .collect();
        json!({
            "seed": self.seed,
            "seconds": self.seconds(),
            "actions": actions,
            "refusals": *self.refusals.lock().expect("no holder panics"),
            "left_out": *self.left_out.lock().expect("no holder panics"),
            "load": self.load_value(),
            "findings": findings,
            "last_actions": *self.actions.lock().expect("no holder panics"),
        })
    }

    /// Everything, for people.
    pub fn text(&self) -> String {
        let mut text = format!("seed {}, {:.0} s\n\n", self.seed, self.seconds());
        for (name, tally) in self.tallies.lock().expect("no holder panics").iter() {
            let refused = match tally.refused {
                0 => String::new(),
                count => format!("   {count} refused"),
            };
            let _ = writeln!(text, "{name:<28} {:>8}{refused}", tally.done);
        }
        for (what, count) in self.refusals.lock().expect("no holder panics").iter() {
            let _ = writeln!(text, "  refused {count} times: {what}");
        }
        for (leg, why) in self.left_out.lock().expect("no holder panics").iter() {
            let _ = writeln!(text, "left out: {leg} {why}");
        }
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mib = |counter: &AtomicU64| count(counter) >> 20;
        let load = &self.load;
        let _ = writeln!(
            text,
            "\n{} requests answered, {} failed as they may; {} MiB written, {} MiB verified, {} connections",
            count(&load.answered),
            count(&load.failed),
            mib(&load.written),
            mib(&load.verified),
            count(&load.connections)
        );
        let findings = self.findings.lock().expect("no holder panics");
        if findings.is_empty() {
            text.push_str("no finding\n");
            return text;
        }
        text.push_str("\nlast actions:\n");
        for line in self.actions.lock().expect("no holder panics").iter() {
            let _ = writeln!(text, "  {line}");
        }
        for finding in findings.iter() {
            let _ =
                writeln!(text, "\nFINDING in {} at step {}:\n  {}", finding.leg, finding.step, finding.what);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_counts_and_shows_the_last_actions_of_a_finding() {
        let report = Report::new(7, true);
        report.done("kill");
        report.done("kill");
        report.refused("commit", "no space");
        assert!(report.is_clean() && report.text().ends_with("no finding\n"));
        for step in 0..60 {
            report.note("chain", step, "kill");
        }
        report.found(Finding { leg: "chain".into(), step: 60, what: "sector 3 differs".into() });
        assert!(!report.is_clean() && report.is_ending());
        let text = report.text();
        assert!(text.contains("chain 10: kill") && !text.contains("chain 9: kill"), "{text}");
        let json = report.json();
        assert_eq!(json["actions"]["kill"]["done"], 2);
        assert_eq!(json["actions"]["commit"]["refused"], 1);
        assert_eq!(json["findings"][0]["step"], 60);
    }
}
