//! A profile as text.

use std::fmt::Write as _;

use tapio_report::size::size;

use super::pictures::short;
use crate::findings::Finding;
use crate::profile::Profile;
use crate::sweep::SIZE_SHOWN;

/// A finding as a sentence.
pub(crate) fn sentence(finding: &Finding) -> String {
    match finding {
        Finding::Seeks { factor } => {
            format!("Seeks dominate: small sequential reads are {factor:.1} times as fast as random ones.")
        }
        Finding::OuterZones { zones, ratio } => {
            format!(
                "A rotating disk with zones: {zones} were told apart, the outer one {ratio:.2} times as fast as the inner one."
            )
        }
        Finding::Areas { areas, ratio } => {
            format!("{areas} areas of different speed; the first is {ratio:.2} times as fast as the last.")
        }
        Finding::Delay { ms } => {
            format!(
                "A delay of {ms:.2} ms for each request, whatever its size: a network, or a remote array."
            )
        }
        Finding::Limit { mb_s } => {
            format!("A limit of {mb_s:.1} MB/s, whatever the size and number of requests.")
        }
        Finding::Stripe { chunk, members, width, known, measured } => {
            let by = match (known, measured) {
                (true, true) => "the kernel says so, and two reads at a time show it",
                (true, false) => "the kernel says so",
                (false, _) => "two reads at a time show it",
            };
            format!("A stripe of {members} members, {} each, {} wide: {by}.", short(*chunk), short(*width))
        }
        Finding::Mirror { copies } => format!("A mirror of {copies} copies: the kernel says so."),
        Finding::HalvesApart => {
            "The two halves serve requests beside each other: two devices, one behind the other.".to_owned()
        }
        Finding::Thin { share } => {
            format!(
                "{:.0} % of the space reads as nothing, at once: no storage is behind it yet.",
                share * 100.0
            )
        }
        Finding::Parallel { factor, depth } => {
            format!(
                "Several requests at a time are faster: random reads {factor:.1} times, with {depth} in flight."
            )
        }
    }
}

/// Costs as lines of a name and a value.
pub(crate) fn costs(profile: &Profile) -> Vec<(&'static str, String)> {
    let costs = &profile.costs;
    let us = |us: Option<f64>| us.map(|us| format!("{us:.0} us"));
    let supported = |max: Option<u64>| match max {
        Some(0) => Some("not supported".to_owned()),
        Some(max) => Some(format!("supported, up to {} at a time", size(max))),
        None => None,
    };
    let zeroes = costs.discard_zeroes.map(|zeroes| if zeroes { "yes" } else { "no" }.to_owned());
    let all = [
        ("flush", us(costs.flush_us)),
        ("write of 4 KiB", us(costs.write_us)),
        ("write of 4 KiB and flush", us(costs.write_flush_us)),
        ("discard", supported(profile.facts.discard_max)),
        ("discard of 1 MiB", us(costs.discard_us)),
        ("discarded reads as zeroes", zeroes),
        ("write zeroes", supported(profile.facts.write_zeroes_max)),
        ("zeroing 1 MiB", us(costs.zeroes_us)),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn head(profile: &Profile) -> String {
    let facts = &profile.facts;
    let mut text =
        format!("{}: {}, sectors of {} bytes", profile.target, size(profile.len), profile.sector_len);
    if let Some(model) = &facts.model {
        let _ = write!(text, ", {model}");
    }
    text.push('\n');
    let layers: Vec<_> =
        facts.layers.iter().map(|layer| format!("{} ({})", layer.name, layer.kind)).collect();
    if layers.len() > 1 {
        let _ = writeln!(text, "  {}", layers.join(" on "));
    }
    for note in &profile.notes {
        let _ = writeln!(text, "! {note}");
    }
    text
}

/// The report.
pub fn text(profile: &Profile) -> String {
    let mut text = head(profile);
    text.push_str("\nWhat it is\n");
    if profile.findings.is_empty() {
        text.push_str(
            "  nothing in particular: one area, one speed, no gain from several requests at a time\n",
        );
    }
    for finding in &profile.findings {
        let _ = writeln!(text, "  {}", sentence(finding));
    }
    let measures = &profile.measures;
    if let Some(ms) = measures.latency_ms {
        let _ = writeln!(text, "  A request without its data takes {ms:.3} ms.");
    }
    if let Some(scan) = profile.scan.as_ref().filter(|scan| !scan.zones.is_empty()) {
        text.push_str("\nAddress space\n");
        for zone in &scan.zones {
            let _ = writeln!(
                text,
                "  {:>11} to {:>11} {:>9.1} MB/s",
                size(zone.start),
                size(zone.end),
                zone.mb_s
            );
        }
        for (start, end) in &scan.thin {
            let _ = writeln!(text, "  {:>11} to {:>11}  no storage", size(*start), size(*end));
        }
    }
    for sweep in profile.sweeps.iter().filter(|sweep| !sweep.samples.is_empty()) {
        let _ = writeln!(text, "\n{}: 512 KiB in flight as", capital(sweep.name()));
        for sample in sweep.of_size(SIZE_SHOWN) {
            let _ = writeln!(
                text,
                "  {:>5} x {:<8} {:>9.1} MB/s   median {:>9.0} us   99 % {:>9.0} us",
                sample.shape.depth,
                short(sample.shape.block_len),
                sample.mb_s(),
                sample.p50_us,
                sample.p99_us
            );
        }
        if let Some(peak) = sweep.peak() {
            let (depth, block) = (peak.shape.depth, short(peak.shape.block_len));
            let _ = writeln!(text, "  the fastest of all: {depth} x {block}, {:.1} MB/s", peak.mb_s());
        }
    }
    if !profile.schedulers.is_empty() {
        text.push_str("\nSchedulers: random 4 KiB x 1, random 4 KiB x 32, sequential 1 MiB x 4\n");
        for one in &profile.schedulers {
            let speeds: Vec<_> = one.samples.iter().map(|sample| format!("{:.1}", sample.mb_s())).collect();
            let _ = writeln!(text, "  {:<12} {} MB/s", one.name, speeds.join(", "));
        }
    }
    let costs = costs(profile);
    if !costs.is_empty() {
        text.push_str("\nCosts\n");
        for (name, value) in costs {
            let _ = writeln!(text, "  {name:<26} {value}");
        }
    }
    text.push_str("\nAdvice\n");
    for reason in &profile.advice.reasons {
        let _ = writeln!(text, "  {reason}");
    }
    for (key, value) in profile.advice.settings() {
        let _ = writeln!(text, "  other-config:{key}={value}");
    }
    text
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_ascii_uppercase().to_string() + letters.as_str()).unwrap_or_default()
}
