//! A run, from the first read to the advice.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;
use tapio_control::ControlError;
use tapio_report::failure::Result;

use crate::advice::{Advice, advise};
use crate::costs::{Costs, costs};
use crate::device::Device;
use crate::facts::Facts;
use crate::findings::{Finding, Measures, findings, measures};
use crate::geometry::{Geometry, geometry};
use crate::pace::Pace;
use crate::scan::{Scan, ScanOptions, scan};
use crate::schedulers::{SchedulerResult, compare};
use crate::sweep::{Sweep, SweepOptions, sweep};
use crate::target::Target;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Of the address space.
    pub scan: ScanOptions,
    /// Block sizes and depths.
    pub sweep: SweepOptions,
    /// Writes too: what the target holds is lost.
    pub destroy: bool,
    /// What is measured at all.
    pub parts: Parts,
}

/// Parts of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Throughput over the address space.
    pub scan: bool,
    /// Stripes, by two reads at a time.
    pub geometry: bool,
    /// Block size and depth.
    pub sweep: bool,
    /// The schedulers of the device.
    pub schedulers: bool,
    /// Flushes, discards, zeroing.
    pub costs: bool,
}

impl Parts {
    /// All of them.
    pub const ALL: Self = Self { scan: true, geometry: true, sweep: true, schedulers: true, costs: true };

    /// The share of the time that a part gets of what is left when it begins, so that all get theirs.
    fn share(self, part: usize) -> f64 {
        let weights = [
            f64::from(u8::from(self.scan)) * 30.0,
            f64::from(u8::from(self.geometry)) * 8.0,
            f64::from(u8::from(self.sweep)) * 50.0,
            f64::from(u8::from(self.schedulers)) * 8.0,
            f64::from(u8::from(self.costs)) * 4.0,
        ];
        weights[part] / weights[part..].iter().sum::<f64>().max(1e-9)
    }
}

/// What was measured, what the target is, and what suits it.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// As it was given.
    pub target: String,
    /// Bytes.
    pub len: u64,
    /// Bytes of the smallest request.
    pub sector_len: u64,
    /// The kernel that it was measured with.
    pub kernel: String,
    /// What the kernel says of it.
    pub facts: Facts,
    /// Everything that was planned was measured.
    pub complete: bool,
    /// What a reader must know before figures mean anything, and what was left out, as sentences.
    pub notes: Vec<String>,
    /// Throughput over the address space.
    pub scan: Option<Scan>,
    /// What two reads at a time showed.
    pub geometry: Option<Geometry>,
    /// Block sizes and depths, by kind of request.
    pub sweeps: Vec<Sweep>,
    /// By scheduler.
    pub schedulers: Vec<SchedulerResult>,
    /// What flushes and discards cost.
    pub costs: Costs,
    /// Numbers that findings rest on.
    pub measures: Measures,
    /// What the target is.
    pub findings: Vec<Finding>,
    /// What suits it.
    pub advice: Advice,
}

impl Profile {
    /// Nothing measured yet.
    pub fn new(target: &str, device: &dyn Device, facts: Facts) -> Self {
        let uname = rustix::system::uname();
        Self {
            target: target.to_owned(),
            len: device.len(),
            sector_len: device.sector_len(),
            kernel: uname.release().to_string_lossy().into_owned(),
            facts,
            complete: true,
            notes: Vec::new(),
            scan: None,
            geometry: None,
            sweeps: Vec::new(),
            schedulers: Vec::new(),
            costs: Costs::default(),
            measures: Measures::default(),
            findings: Vec::new(),
            advice: Advice::default(),
        }
    }

    /// Measures what needs nothing but requests. An error ends it: what was measured before stays.
    ///
    /// # Errors
    /// The target failed.
    pub fn measure(
        &mut self,
        device: &mut dyn Device,
        options: &Options,
        pace: &Pace<'_>,
    ) -> std::io::Result<()> {
        let parts = options.parts;
        if parts.scan {
            self.scan = Some(scan(device, options.scan, &pace.part("address space", parts.share(0)))?);
        }
        if parts.geometry {
            self.geometry = geometry(device, &pace.part("geometry", parts.share(1)))?;
        }
        if !parts.sweep {
            return Ok(());
        }
        let mut kinds = vec![(true, false), (false, false)];
        if options.destroy {
            kinds.extend([(true, true), (false, true)]);
        }
        let sweeps = pace.part("sweep", parts.share(2));
        let count = kinds.len();
        for (done, (random, write)) in kinds.into_iter().enumerate() {
            let what = crate::device::Shape::name(random, write);
            let part = sweeps.part(what, 1.0 / (count - done) as f64);
            self.sweeps.push(sweep(device, random, write, options.sweep, &part)?);
        }
        Ok(())
    }

    /// What the target is, and what suits it, from what was measured.
    pub fn conclude(&mut self) {
        if let Some(scan) = &self.scan
            && scan.points.len() < scan.planned
        {
            self.left_out("the address space", scan.points.len(), scan.planned);
        }
        let short: Vec<_> =
            self.sweeps.iter().map(|sweep| (sweep.name(), sweep.samples.len(), sweep.planned)).collect();
        for (name, done, planned) in short.into_iter().filter(|(_, done, planned)| done < planned) {
            self.left_out(name, done, planned);
        }
        self.measures = measures(&self.sweeps);
        let (scan, geometry) = (self.scan.as_ref(), self.geometry.as_ref());
        self.findings = findings(&self.facts, scan, geometry, &self.sweeps, &self.measures);
        self.advice =
            advise(&self.facts, &self.findings, &self.measures, scan, &self.sweeps, &self.schedulers);
        let flush = self.costs.write_flush_us.or(self.costs.flush_us);
        if let (true, Some(us)) = (self.facts.rotational == Some(true) && self.seeks(), flush)
            && us < 1000.0
        {
            self.notes.push(format!(
                "A flush takes {us:.0} us, less than a turn of a disk: a cache answers it. See that it has a battery."
            ));
        }
    }

    fn seeks(&self) -> bool {
        self.findings.iter().any(|finding| matches!(finding, Finding::Seeks { .. }))
    }

    fn left_out(&mut self, what: &str, done: usize, planned: usize) {
        self.complete = false;
        self.notes.push(format!("Of {what}, {done} of {planned} points were measured before the run ended."));
    }

    /// Lines `size bs qd tp` of the seed's script, throughput in KB/s, of random reads.
    pub fn dat(&self) -> String {
        let mut text = String::new();
        let random = self.sweeps.iter().filter(|sweep| sweep.random && !sweep.write);
        for sample in random.flat_map(|sweep| &sweep.samples) {
            let (size, bs, qd) = (sample.shape.in_flight(), sample.shape.block_len, sample.shape.depth);
            let _ = writeln!(text, "{size} {bs} {qd} {:.0}", sample.bytes_per_s / 1024.0);
        }
        text
    }
}

/// Profiles an open target.
///
/// # Errors
/// Nothing could be measured at all.
pub fn profile(name: &str, target: &mut Target, options: &Options, pace: &Pace<'_>) -> Result<Profile> {
    let mut profile = Profile::new(name, &target.bare, target.facts.clone());
    profile.notes.extend(target.users.iter().map(|user| format!("{user}: its load is in the figures.")));
    if !target.direct {
        let note = "The target takes no direct reads: the figures contain the page cache.".to_owned();
        profile.notes.push(note);
    }
    let measured = profile.measure(&mut target.bare, options, pace).and_then(|()| {
        if let (Some(numbers), true) = (target.numbers, options.parts.schedulers) {
            let part = pace.part("schedulers", options.parts.share(3));
            profile.schedulers = compare(&mut target.bare, Path::new("/sys"), numbers, &part)?;
        }
        Ok(())
    });
    if let Err(error) = measured {
        let nothing = profile.scan.is_none() && profile.sweeps.is_empty();
        let error = ControlError::io(format_args!("{name} failed"), &error);
        if nothing {
            return Err(
                error.next("see whether it can be read at all: dd if=TARGET of=/dev/null count=1, and dmesg")
            );
        }
        profile.complete = false;
        profile.notes.push(format!("The run ended early: {error}."));
    }
    if options.parts.costs {
        let (is_device, part) = (target.numbers.is_some(), pace.part("flushes and discards", 1.0));
        profile.costs = costs(target.bare.file(), profile.len, is_device, options.destroy, &part);
    }
    if pace.is_stopped() {
        profile.complete = false;
        profile
            .notes
            .push("The run was ended by a signal: the report is of what was measured by then.".to_owned());
    }
    profile.conclude();
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::simulated::Simulated;

    const GIB: u64 = 1 << 30;
    const OPTIONS: Options = Options {
        scan: ScanOptions { points: 64, reads: 10 },
        sweep: SweepOptions { quick: false, depth_max: 8192 },
        destroy: false,
        parts: Parts { schedulers: false, costs: false, ..Parts::ALL },
    };

    fn of_facts(device: &mut Simulated, facts: Facts) -> Profile {
        let (stop, tell) = (AtomicBool::new(false), |_: crate::pace::Progress<'_>| {});
        let pace = Pace::new(&stop, Duration::from_secs(600), &tell);
        let mut profile = Profile::new("simulated", device, facts);
        profile.measure(device, &OPTIONS, &pace).expect("measured");
        profile.conclude();
        profile
    }

    fn of(mut device: Simulated) -> Profile {
        of_facts(&mut device, Facts { device: Some("sda".into()), ..Facts::default() })
    }

    fn kinds(profile: &Profile) -> Vec<String> {
        let kind = |finding: &Finding| {
            let value = serde_json::to_value(finding).expect("JSON");
            value["kind"].as_str().expect("a kind").to_owned()
        };
        profile.findings.iter().map(kind).collect()
    }

    #[test]
    fn a_delay_of_two_milliseconds_is_found_and_splitting_gains_nothing() {
        let profile = of(Simulated::delayed(16 * GIB, 2_000_000));
        assert_eq!(kinds(&profile), ["delay", "parallel"], "{:?}", profile.measures);
        let ms = profile.measures.latency_ms.expect("a latency");
        assert!((1.8..2.2).contains(&ms), "{ms}");
        assert_eq!(profile.advice.split, None, "one request waits as long as many");
        assert!(profile.complete && profile.notes.is_empty(), "{:?}", profile.notes);
        assert_eq!(profile.sweeps[0].samples.len(), 105, "every size and depth of the seed's script");
    }

    #[test]
    fn a_disk_with_zones_is_found_with_its_ratio_and_never_split() {
        let mut disk = Simulated::rotating(500 * GIB, 12, 80e6, 40e6);
        let schedulers = ["none", "mq-deadline", "bfq"].map(str::to_owned).to_vec();
        let facts = Facts { device: Some("sda".into()), schedulers, ..Facts::default() };
        let profile = of_facts(&mut disk, facts);
        assert_eq!(kinds(&profile)[..2], ["seeks", "outer-zones"], "{:?}", profile.findings);
        let scan = profile.scan.as_ref().expect("a scan");
        assert!((1.9..2.1).contains(&scan.outer_to_inner().expect("zones")), "{:?}", scan.zones);
        assert!((10..=12).contains(&scan.zones.len()), "{:?}", scan.zones);
        let advice = &profile.advice;
        assert_eq!(
            (advice.split, advice.merge, advice.scheduler.as_deref(), advice.sr_type),
            (None, None, Some("bfq"), Some("lvm"))
        );
        let is_said = |reason: &String| reason.contains("neither to be split");
        assert!(advice.reasons.iter().any(is_said), "{:?}", advice.reasons);
        assert!(advice.reasons.iter().any(|reason| reason.contains("first part")), "{:?}", advice.reasons);
        assert_eq!(advice.settings()["scheduler"], "bfq");
    }

    #[test]
    fn a_server_of_one_request_at_a_time_is_to_get_neighbours_as_one_unless_it_rotates() {
        let mut server = Simulated::one_at_a_time(16 * GIB, 2_000_000);
        let advice = of_facts(&mut server, Facts::default()).advice;
        assert_eq!((advice.split, advice.merge), (None, Some(512 << 10)), "{:?}", advice.reasons);
        assert_eq!(advice.settings()["merge-size"], "512KiB");
        let mut disk = Simulated::one_at_a_time(16 * GIB, 2_000_000);
        let advice = of_facts(&mut disk, Facts { rotational: Some(true), ..Facts::default() }).advice;
        assert_eq!((advice.split, advice.merge), (None, None), "{:?}", advice.reasons);
    }

    #[test]
    fn halves_of_two_speeds_are_areas() {
        let mut halves = Simulated::solid_state(8 * GIB);
        halves.limit = f64::INFINITY;
        halves.delay_ns = 0;
        halves.zones = vec![(0, 200e6), (4 * GIB, 100e6)];
        let profile = of(halves);
        let scan = profile.scan.as_ref().expect("a scan");
        assert_eq!((scan.zones.len(), scan.zones[0].end), (2, 4 * GIB));
        assert!((1.9..2.1).contains(&scan.outer_to_inner().expect("two")));
        assert!(profile.findings.iter().any(|one| matches!(one, Finding::Areas { areas: 2, .. })));
    }

    #[test]
    fn stripes_are_found_exactly_by_two_reads_at_a_time() {
        for (members, chunk) in [(3, 64 << 10), (2, 512 << 10), (5, 16 << 10), (4, 80 << 10)] {
            let profile = of(Simulated::striped(64 * GIB, members, chunk));
            let width = chunk * members as u64;
            let stripe =
                Finding::Stripe { chunk, members: members as u64, width, known: false, measured: true };
            assert!(profile.findings.contains(&stripe), "{members} x {chunk}: {:?}", profile.geometry);
        }
        for (what, plain) in [
            ("one", Simulated::striped(64 * GIB, 1, 64 << 10)),
            ("solid state", Simulated::solid_state(64 * GIB)),
            ("a delay", Simulated::delayed(64 * GIB, 2_000_000)),
            ("rotating", Simulated::rotating(64 * GIB, 8, 80e6, 40e6)),
        ] {
            let profile = of(plain);
            let is_stripe = |one: &Finding| matches!(one, Finding::Stripe { .. });
            assert!(!profile.findings.iter().any(is_stripe), "{what}: {:?}", profile.geometry);
        }
        let mut array = Simulated::striped(64 * GIB, 2, 64 << 10);
        let layer = crate::facts::Layer {
            name: "md0".into(),
            kind: "raid0".into(),
            chunk: Some(64 << 10),
            members: Some(2),
        };
        let profile = of_facts(&mut array, Facts { layers: vec![layer], ..Facts::default() });
        let both = |one: &Finding| matches!(one, Finding::Stripe { known: true, measured: true, .. });
        assert!(profile.findings.iter().any(both), "{:?}", profile.findings);
    }

    #[test]
    fn a_limit_and_areas_without_storage_are_found() {
        let mut limited = Simulated::solid_state(16 * GIB);
        limited.delay_ns = 0;
        limited.limit = 50e6;
        let profile = of(limited);
        let limit = profile.findings.iter().find_map(|one| match one {
            Finding::Limit { mb_s } => Some(*mb_s),
            _ => None,
        });
        assert!(limit.is_some_and(|mb_s| (48.0..52.0).contains(&mb_s)), "{:?}", profile.findings);
        let mut thin = Simulated::rotating(64 * GIB, 1, 80e6, 80e6);
        thin.stored = 16 * GIB;
        let profile = of(thin);
        let scan = profile.scan.as_ref().expect("a scan");
        assert_eq!((scan.thin.as_slice(), scan.zones.len()), ([(16 * GIB, 64 * GIB)].as_slice(), 1));
        assert!(profile.findings.contains(&Finding::Thin { share: 0.75 }), "{:?}", profile.findings);
    }

    #[test]
    fn solid_state_reports_its_depth_and_splits() {
        let profile = of(Simulated::solid_state(64 * GIB));
        assert_eq!(kinds(&profile), ["parallel"], "{:?}", profile.measures);
        assert!(
            profile.advice.depth.is_some_and(|depth| (16..=64).contains(&depth)),
            "{:?}",
            profile.measures
        );
        let split = profile.advice.split.expect("there are channels for the pieces");
        assert_eq!(profile.advice.settings()["split-size"], format!("{}KiB", split >> 10));
        let mut disk = Simulated::solid_state(64 * GIB);
        let rotating = of_facts(&mut disk, Facts { rotational: Some(true), ..Facts::default() });
        assert_eq!((rotating.advice.split, rotating.advice.merge), (None, None));
        // As the seed's script wrote them.
        let dat = profile.dat();
        assert_eq!(dat.lines().count(), 105);
        assert!(
            dat.starts_with("512 512 1 ") && dat.lines().all(|line| line.split(' ').count() == 4),
            "{dat}"
        );
        assert!(dat.contains("\n524288 8192 64 "), "{dat}");
    }

    #[test]
    fn a_run_that_is_stopped_reports_what_there_is() {
        let stop = AtomicBool::new(false);
        let calls = std::cell::Cell::new(0);
        let tell = |_: crate::pace::Progress<'_>| {
            calls.set(calls.get() + 1);
            stop.store(calls.get() > 40, Ordering::Relaxed);
        };
        let pace = Pace::new(&stop, Duration::from_secs(600), &tell);
        let mut device = Simulated::rotating(500 * GIB, 12, 80e6, 40e6);
        let mut profile = Profile::new("simulated", &device, Facts::default());
        profile.measure(&mut device, &OPTIONS, &pace).expect("measured");
        profile.conclude();
        let scan = profile.scan.as_ref().expect("a scan");
        assert!(scan.points.len() < 64 && scan.points.len() > 30, "{}", scan.points.len());
        // Early points are spread over everything.
        assert!((1.8..2.2).contains(&scan.outer_to_inner().expect("zones")));
        assert!(!profile.complete && profile.notes[0].contains("of 64 points"), "{:?}", profile.notes);
    }
}
