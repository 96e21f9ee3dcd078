//! Settings that suit a target, in words and as keys of an SR's `other_config`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use crate::facts::Facts;
use crate::findings::{Finding, Measures};
use crate::scan::Scan;
use crate::schedulers::SchedulerResult;
use crate::sweep::{SIZE_SHOWN, Sweep};

/// A gain that is worth a setting.
const GAIN_MIN: f64 = 1.25;
/// A scheduler has to be faster than none by this to be worth its work.
const SCHEDULER_GAIN: f64 = 1.05;
/// Requests are not made smaller than this: below it, every request costs more than its data.
const SPLIT_MIN: u64 = 16 << 10;

/// What to set, and why.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Advice {
    /// The I/O scheduler.
    pub scheduler: Option<String>,
    /// Requests that its queue keeps.
    pub nr_requests: Option<u32>,
    /// KiB that are read ahead.
    pub read_ahead_kb: Option<u64>,
    /// Requests in flight at which the target is at its best.
    pub depth: Option<u32>,
    /// Larger requests had better go as pieces of so many bytes.
    pub split: Option<u64>,
    /// Neighbouring requests had better go as one, up to so many bytes.
    pub merge: Option<u64>,
    /// Type of SR that suits a device.
    pub sr_type: Option<&'static str>,
    /// What to put where, and the reasons of all, as sentences.
    pub reasons: Vec<String>,
}

impl Advice {
    /// Keys of an SR's `other_config` that Tapio reads.
    pub fn settings(&self) -> BTreeMap<&'static str, String> {
        let mut all = BTreeMap::new();
        all.extend(self.scheduler.clone().map(|scheduler| ("scheduler", scheduler)));
        all.extend(self.nr_requests.map(|number| ("nr_requests", number.to_string())));
        all.extend(self.read_ahead_kb.map(|number| ("read_ahead_kb", number.to_string())));
        let kib = |bytes: u64| format!("{}KiB", bytes >> 10);
        all.extend(self.split.map(|bytes| ("split-size", kib(bytes))));
        all.extend(self.merge.map(|bytes| ("merge-size", kib(bytes))));
        all
    }

    /// The settings as a file that `xe sr-create settings=FILE` reads.
    pub fn file(&self, target: &str) -> String {
        // A name may hold anything, and a line of it would be a setting.
        let target = target.replace(['\n', '\r'], "?");
        let mut text = format!(
            "# Settings that 'tapio profile' advises for {target}.\n\
             # xe sr-create settings=THIS-FILE ... makes an SR with them; each is a key of the SR's other-config.\n"
        );
        for reason in &self.reasons {
            let _ = writeln!(text, "# {reason}");
        }
        for (key, value) in self.settings() {
            let _ = writeln!(text, "{key}={value}");
        }
        text
    }
}

/// How much faster so many bytes in flight are as several requests, and the largest piece that has nearly all of it.
pub fn split_gain(sweep: &Sweep, size: u64) -> Option<(f64, u64)> {
    let one = sweep.of_size(size).find(|sample| sample.shape.depth == 1)?.bytes_per_s;
    let pieces = || sweep.of_size(size).filter(|sample| sample.shape.block_len >= SPLIT_MIN);
    let best = pieces().map(|sample| sample.bytes_per_s).fold(0.0, f64::max);
    let near = pieces().filter(|sample| sample.bytes_per_s >= 0.95 * best);
    let piece = near.map(|sample| sample.shape.block_len).max()?;
    (one > 0.0).then(|| (best / one, piece))
}

/// How much faster so many bytes are as one request than as many of 4 KiB to 64 KiB.
fn merge_gain(sweep: &Sweep, size: u64) -> Option<f64> {
    let one = sweep.of_size(size).find(|sample| sample.shape.depth == 1)?.bytes_per_s;
    let small = sweep.of_size(size).filter(|sample| (4096..=16 << 10).contains(&sample.shape.block_len));
    let small = small.map(|sample| sample.bytes_per_s).fold(0.0, f64::max);
    (small > 0.0).then(|| one / small)
}

fn scheduler(advice: &mut Advice, seeks: bool, facts: &Facts, compared: &[SchedulerResult]) {
    let of = |name: &str| compared.iter().find(|one| one.name == name);
    let gain = |name: &str| of(name)?.against(of("none")?);
    let best = compared
        .iter()
        .filter_map(|one| Some((one.name.clone(), gain(&one.name)?)))
        .max_by(|one, other| one.1.total_cmp(&other.1));
    if seeks {
        // Fair between disks is what it is for there, and it costs a little.
        let fair = ["bfq", "mq-deadline"].into_iter().find(|name| {
            facts.schedulers.iter().any(|known| known == name) && gain(name).is_none_or(|gain| gain > 0.8)
        });
        if let Some(fair) = fair {
            advice.scheduler = Some(fair.to_owned());
            advice.reasons.push(format!(
                "Seeks dominate: '{fair}' keeps the requests of one disk together, and is fair between disks."
            ));
            return;
        }
    }
    match best {
        Some((name, gain)) if name != "none" && gain >= SCHEDULER_GAIN => {
            advice
                .reasons
                .push(format!("The scheduler '{name}' was {:.0} % faster than none.", (gain - 1.0) * 100.0));
            advice.scheduler = Some(name);
        }
        _ if facts.schedulers.iter().any(|name| name == "none") => {
            advice.scheduler = Some("none".to_owned());
            advice.reasons.push(match compared.is_empty() {
                true => "No seeks are to be saved: the scheduler 'none' costs nothing.".to_owned(),
                false => "No scheduler was faster than 'none' by 5 %.".to_owned(),
            });
        }
        _ => {}
    }
}

/// What suits the target.
pub fn advise(
    facts: &Facts,
    findings: &[Finding],
    measures: &Measures,
    scan: Option<&Scan>,
    sweeps: &[Sweep],
    compared: &[SchedulerResult],
) -> Advice {
    let mut advice = Advice { depth: measures.depth, ..Advice::default() };
    let rotates = facts.rotational == Some(true);
    let seeks = findings.iter().any(|finding| matches!(finding, Finding::Seeks { .. }));
    scheduler(&mut advice, seeks, facts, compared);
    if let Some(depth) = measures.depth {
        // Room for the depth at the peak on each of two disks.
        let wanted = (depth * 2).next_power_of_two().clamp(32, 1024);
        if facts.nr_requests.is_some_and(|now| now < u64::from(wanted)) {
            advice.nr_requests = Some(wanted);
            advice.reasons.push(format!(
                "Random reads are at their best with {depth} in flight: a queue of {wanted} lets two disks reach that."
            ));
        } else {
            advice.reasons.push(format!("Random reads are at their best with {depth} in flight."));
        }
    }
    let random = sweeps.iter().find(|sweep| sweep.random && !sweep.write);
    let sequential = sweeps.iter().find(|sweep| !sweep.random && !sweep.write);
    match random.and_then(|sweep| split_gain(sweep, SIZE_SHOWN)) {
        Some(_) if seeks || rotates => {
            advice.reasons.push(
                "Requests are neither to be split, since each piece might cost a seek, nor to be merged, which the \
                 scheduler does."
                    .to_owned(),
            );
        }
        Some((gain, piece)) if gain >= GAIN_MIN && piece < SIZE_SHOWN => {
            advice.split = Some(piece);
            advice.reasons.push(format!(
                "512 KiB as requests of {} KiB are {gain:.1} times as fast as one request: longer ones had better go \
                 in such pieces.",
                piece >> 10
            ));
        }
        _ => {}
    }
    let merged = sequential.and_then(|sweep| merge_gain(sweep, SIZE_SHOWN));
    if let Some(gain) = merged.filter(|gain| *gain >= GAIN_MIN && advice.split.is_none()) {
        advice.merge = (!seeks && !rotates).then_some(SIZE_SHOWN);
        advice.read_ahead_kb = Some(SIZE_SHOWN >> 10);
        advice.reasons.push(format!(
            "One sequential read of 512 KiB is {gain:.1} times as fast as small ones: let guests read ahead{}.",
            if advice.merge.is_some() { ", and neighbours go as one" } else { "" }
        ));
    }
    for finding in findings {
        match finding {
            Finding::OuterZones { ratio, .. } => {
                advice.reasons.push(format!(
                    "The first addresses are {ratio:.2} times as fast as the last: make an SR of the first part for disks \
                     that need throughput, and one of the last for archives{}.",
                    scan.and_then(halfway).unwrap_or_default()
                ));
            }
            Finding::Areas { areas, ratio } if *ratio >= 1.15 || *ratio <= 0.87 => {
                let which = if *ratio > 1.0 { "first" } else { "last" };
                advice.reasons.push(format!(
                    "{areas} areas of different speed: the {which} is the fastest. Make an SR of each, so that a disk lies in \
                     one."
                ));
            }
            Finding::Stripe { chunk, width, .. } => {
                advice.reasons.push(format!(
                    "Begin partitions at multiples of {} KiB, the width of the stripe; requests within {} KiB keep one member \
                     busy.",
                    width >> 10,
                    chunk >> 10
                ));
            }
            Finding::Thin { share } => {
                advice.reasons.push(format!(
                    "{:.0} % of the space has no storage yet: the figures are of the rest. Fill it before it is measured.",
                    share * 100.0
                ));
            }
            Finding::Delay { ms } => {
                advice.reasons.push(format!(
                    "Each request costs {ms:.1} ms on the way: what waits for one request at a time is slow here, whatever is \
                     set."
                ));
            }
            _ => {}
        }
    }
    if facts.device.is_some() {
        let discards = facts.discard_max.unwrap_or(0) > 0;
        advice.sr_type = Some(if seeks { "lvm" } else { "ext" });
        advice.reasons.push(match (seeks, discards) {
            (true, _) => {
                "SR type: lvm, whose disks are contiguous: sequential requests stay sequential.".to_owned()
            }
            (false, true) => "SR type: ext, whose images are thin; discards reach the device.".to_owned(),
            (false, false) => "SR type: ext, whose images are thin. The device takes no discards.".to_owned(),
        });
    }
    advice
}

/// Up to where zones are faster than the middle between the first and the last.
fn halfway(scan: &Scan) -> Option<String> {
    let (first, last) = (scan.zones.first()?.mb_s, scan.zones.last()?.mb_s);
    let middle = f64::midpoint(first, last);
    let end = scan.zones.iter().take_while(|zone| zone.mb_s >= middle).last()?.end;
    Some(format!(" (up to {} is faster than the middle)", tapio_report::size::size(end)))
}
