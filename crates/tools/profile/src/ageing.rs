//! How a target ages: throughput of random writes over time, with and without discards, by the share that is left
//! unused.
//!
//! A solid-state disk that knows which blocks are free writes to erased ones; without discards it knows of none but
//! its own spare area, and has to move data before it can erase. So each run begins with everything discarded, fills
//! the used part once, and then overwrites it at random. With discards, a quarter of the used part is given back before
//! each round, as a file system does with deleted files.

use std::io;

use serde::Serialize;
use tapio_control::ControlError;
use tapio_load::Random;
use tapio_report::failure::Result;
use tapio_report::plot::{Axis, Line, Lines};

use crate::bare::Bare;
use crate::costs::discard;
use crate::device::{Device, Shape};
use crate::pace::Pace;
use crate::target::Target;

/// Bytes that are discarded at a time.
const EXTENT: u64 = 1 << 20;
/// The writes that are measured.
const WRITES: Shape = Shape { random: true, write: true, block_len: 16 << 10, depth: 32 };
/// Those that fill the used part.
const FILL: Shape = Shape { random: false, write: true, block_len: 1 << 20, depth: 4 };

/// What is run.
#[derive(Clone, Debug)]
pub struct AgeingOptions {
    /// Percent that are never written, each a run.
    pub spare: Vec<u32>,
    /// Rounds of a run.
    pub rounds: usize,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AgeingRun {
    /// Percent that are never written.
    pub spare: u32,
    /// Blocks were discarded between the rounds.
    pub trim: bool,
    /// How often the used part was written over by then, and megabytes per second.
    pub points: Vec<(f64, f64)>,
}

impl AgeingRun {
    /// How much of its first throughput is left at the end; none of fewer than two rounds.
    pub fn left(&self) -> Option<f64> {
        let (first, last) = (self.points.first()?, self.points.last()?);
        (self.points.len() > 1).then(|| last.1 / first.1.max(1e-9))
    }
}

/// All runs of a target.
#[derive(Clone, Debug, Serialize)]
pub struct Ageing {
    /// As it was given.
    pub target: String,
    /// Bytes.
    pub len: u64,
    /// All rounds of all runs were made.
    pub complete: bool,
    /// What was left out, as sentences.
    pub notes: Vec<String>,
    /// By spare area, without discards first.
    pub runs: Vec<AgeingRun>,
}

impl Ageing {
    /// As text.
    pub fn text(&self) -> String {
        let mut text = format!("{}: random writes of 16 KiB, 32 in flight, round by round\n", self.target);
        self.notes.iter().for_each(|note| text.push_str(&format!("! {note}\n")));
        for run in &self.runs {
            let speeds: Vec<_> = run.points.iter().map(|(_, mb_s)| format!("{mb_s:.1}")).collect();
            let left = run.left().map_or(String::new(), |left| format!("   {:.0} % left", left * 100.0));
            text.push_str(&format!("  {}: {} MB/s{left}\n", name(run), speeds.join(", ")));
        }
        text
    }

    /// As a picture: a line for each run.
    pub fn svg(&self) -> String {
        let line = |run: &AgeingRun| Line { name: name(run), points: run.points.clone() };
        Lines {
            title: format!("{}: random writes as the target ages", self.target),
            x: Axis::linear("times that the used part was written over"),
            y: Axis::linear("MB/s"),
            lines: self.runs.iter().map(line).collect(),
        }
        .svg()
    }
}

fn name(run: &AgeingRun) -> String {
    format!("{} % spare, {} TRIM", run.spare, if run.trim { "with" } else { "without" })
}

/// Ages an open target, which loses what it holds.
///
/// # Errors
/// It cannot be written.
pub fn ageing(name: &str, target: &Target, options: &AgeingOptions, pace: &Pace<'_>) -> Result<Ageing> {
    let (file, len) = (target.bare.file(), target.bare.len());
    let is_device = target.numbers.is_some();
    let failed = |error: io::Error| ControlError::io(format_args!("writing to {name}"), &error);
    let mut notes = Vec::new();
    let can_trim = discard(file, is_device, 0, EXTENT.min(len)).is_ok();
    if !can_trim {
        notes.push(
            "The target takes no discards: there are no runs with TRIM, and none begins afresh.".to_owned(),
        );
    }
    let kinds: Vec<(u32, bool)> = options
        .spare
        .iter()
        .flat_map(|spare| [(*spare, false), (*spare, true)])
        .filter(|(_, trim)| can_trim || !trim)
        .collect();
    let mut ageing = Ageing { target: name.to_owned(), len, complete: true, notes, runs: Vec::new() };
    for (done, (spare, trim)) in kinds.iter().copied().enumerate() {
        let part = pace.part("ageing", 1.0 / (kinds.len() - done) as f64);
        let used = (len / 100 * u64::from(100 - spare.min(90))) / EXTENT * EXTENT;
        let mut run = AgeingRun { spare, trim, points: Vec::new() };
        let sector = target.bare.sector_len();
        let mut bare = Bare::new(file.try_clone().map_err(failed)?, used, sector);
        if can_trim {
            discard(file, is_device, 0, len / EXTENT * EXTENT).map_err(failed)?;
        }
        // Once over everything that is used, or as much of it as a third of the time is enough for.
        bare.load(FILL, part.left() / 3, used / FILL.block_len).map_err(failed)?;
        let (mut random, mut written) = (Random::new(u64::from(spare)), 0);
        for round in 0..options.rounds {
            let time = part.slice(options.rounds - round);
            if part.is_over() {
                break;
            }
            if trim {
                for _ in 0..used / EXTENT / 4 {
                    if part.is_over() {
                        break;
                    }
                    let at = random.below(used / EXTENT) * EXTENT;
                    discard(file, is_device, at, EXTENT).map_err(failed)?;
                }
            }
            let sample = bare.load(WRITES, time, u64::MAX).map_err(failed)?;
            written += sample.requests * WRITES.block_len;
            run.points.push((written as f64 / used as f64, sample.mb_s()));
        }
        if run.points.len() < options.rounds {
            ageing.complete = false;
            let (done, all) = (run.points.len(), options.rounds);
            ageing.notes.push(format!("Of {}, {done} of {all} rounds were made.", self::name(&run)));
        }
        ageing.runs.push(run);
    }
    Ok(ageing)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;
    use crate::target::open;

    #[test]
    fn runs_differ_by_their_discards_and_leave_the_spare_area_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("disk");
        std::fs::write(&path, vec![9; 16 << 20]).expect("written");
        let target = open(&path, true).expect("a file");
        let (stop, tell) = (AtomicBool::new(false), |_: crate::pace::Progress<'_>| {});
        let pace = Pace::new(&stop, Duration::from_secs(2), &tell);
        let options = AgeingOptions { spare: vec![50], rounds: 2 };
        let found = ageing("disk", &target, &options, &pace).expect("aged");
        assert!(found.runs.iter().any(|run| !run.trim && run.spare == 50), "{found:?}");
        for run in found.runs.iter().filter(|run| run.points.len() == 2) {
            assert!(run.points[0].0 > 0.0 && run.points[1].0 > run.points[0].0, "{run:?}");
        }
        let bytes = std::fs::read(&path).expect("read");
        // What is spare was discarded, or never touched.
        assert!(bytes[9 << 20..].iter().all(|byte| *byte == 0 || *byte == 9));
        assert!(found.svg().contains("50 % spare, without TRIM") && found.text().contains("MB/s"));
    }
}
