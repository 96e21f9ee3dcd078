//! Many guests at once over many storage repositories: what all of them together get, for each way of moving data.
//!
//! A guest is a disk process, a ring and a thread; a storage repository is a directory with the images of its disks and
//! the page pool that these share.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::Duration;

use tapio_load::{Load, Mix};
use tapio_types::Movement;

use super::case::{PAGE, front, movements};
use super::guest::{Guest, Setup};
use super::load;
use super::report::{MachinesRow, Report, Skipped, Together};
use super::{Place, Plan, interrupted};
use crate::progress::Progress;

/// Bytes of each guest's image.
const IMAGE_LEN: u64 = 16 << 20;
/// Requests in flight in each guest: of large ones fewer, so that all together never take more than a gigabyte.
const DEPTH: u32 = 8;
/// Pages of 4 KiB that the disks of a storage repository share.
const POOL_PAGES: u32 = 2816;

/// What is tried.
struct Sweep {
    guests: &'static [usize],
    repositories: &'static [usize],
    bytes: &'static [u32],
}

const FULL: Sweep =
    Sweep { guests: &[1, 2, 4, 8, 16], repositories: &[1, 4], bytes: &[4096, 64 << 10, 1 << 20] };
const QUICK: Sweep = Sweep { guests: &[1, 2], repositories: &[2], bytes: &[4096, 1 << 20] };

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    bytes: u32,
    repositories: usize,
    guests: usize,
    /// The name of its way of moving data.
    movement: &'static str,
}

fn cases(sweep: &Sweep) -> Vec<Case> {
    let mut all = Vec::new();
    for &bytes in sweep.bytes {
        for &repositories in sweep.repositories {
            // More repositories than guests would be the same as fewer.
            for &guests in sweep.guests.iter().filter(|guests| **guests >= repositories || repositories == 1)
            {
                all.extend(movements().iter().map(|movement| Case {
                    bytes,
                    repositories,
                    guests,
                    movement: movement.name(),
                }));
            }
        }
    }
    all
}

pub fn run(plan: &Plan, place: &Place<'_>, report: &mut Report) {
    let sweep = if plan.quick { QUICK } else { FULL };
    let cases = cases(&sweep);
    let rounds = plan.rounds.min(3);
    let mut progress = Progress::new(cases.len() * rounds);
    let mut found: BTreeMap<Case, Vec<Together>> = BTreeMap::new();
    let images = match Images::new(place, sweep.guests.iter().copied().max().unwrap_or(1)) {
        Ok(images) => images,
        Err(reason) => return report.skipped.push(Skipped::of("machines", reason)),
    };
    for case in (0..rounds).flat_map(|_| cases.iter()) {
        if interrupted() {
            break;
        }
        let name = case.movement;
        let what = format!("{} guests, {} SRs, {} bytes, {name}", case.guests, case.repositories, case.bytes);
        progress.begin(&what);
        match together(place, &images, case, plan.time) {
            Ok(one) => found.entry(*case).or_default().push(one),
            Err(reason) => report.skipped.push(Skipped::of(&what, reason)),
        }
    }
    progress.end();
    for (case, all) in found {
        let Ok(movement) = case.movement.parse() else { continue };
        report.machines.push(MachinesRow::of(case.bytes, case.repositories, case.guests, movement, &all));
    }
}

/// The images of all guests there will be.
struct Images(Vec<PathBuf>);

impl Images {
    fn new(place: &Place<'_>, count: usize) -> Result<Self, String> {
        let data = vec![0x5a; IMAGE_LEN as usize];
        let write = |index: usize| {
            let path = place.ground.dir().join(format!("guest-{index}.raw"));
            fs::write(&path, &data)
                .map(|()| path.clone())
                .map_err(|error| format!("{}: {error}", path.display()))
        };
        (0..count).map(write).collect::<Result<_, _>>().map(Self)
    }
}

fn together(place: &Place<'_>, images: &Images, case: &Case, time: Duration) -> Result<Together, String> {
    let movement: Movement = case.movement.parse()?;
    let depth = if case.bytes > 256 << 10 { DEPTH / 4 } else { DEPTH };
    let front = front(movement, case.bytes.div_ceil(PAGE), case.bytes, depth);
    let mut guests = Vec::new();
    for (index, image) in images.0.iter().take(case.guests).enumerate() {
        let setup = Setup {
            image: format!("aio:{}", image.display()),
            front: front.clone(),
            movement,
            polls: false,
            pool: Some(format!("sr-{}:{POOL_PAGES}", index % case.repositories)),
            share: None,
        };
        guests.push(Guest::start(&place.program, place.ground, index as u32 + 1, &setup)?);
    }
    let load = Load {
        mix: Mix::RandomRead,
        block_len: case.bytes,
        depth,
        span_len: IMAGE_LEN,
        time,
        requests_max: u64::MAX,
        spin: false,
        seed: 5,
    };
    let begin = Barrier::new(guests.len());
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let start = |(index, guest)| {
            let (load, begin) = (Load { seed: load.seed + index as u64, ..load }, &begin);
            scope.spawn(move || {
                begin.wait();
                load::run(guest, &load)
            })
        };
        let threads: Vec<_> = guests.iter_mut().enumerate().map(start).collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a guest panicked".into())));
        joined.collect::<Result<_, String>>()
    })?;
    let counts = || outcomes.iter().map(|one: &load::Outcome| one.report.count);
    let (requests, most) = (counts().sum::<u64>().max(1) as f64, counts().max().unwrap_or(0).max(1));
    Ok(Together {
        iops: outcomes.iter().map(|one| one.report.rate()).sum(),
        disk_cpu_us: outcomes.iter().map(|one| one.disk_cpu_us).sum::<f64>() / requests,
        front_cpu_us: outcomes.iter().map(|one| one.front_cpu_us).sum::<f64>() / requests,
        fairness: counts().min().unwrap_or(0) as f64 / most as f64,
        errors: outcomes.iter().map(|one| one.report.errors).sum(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_case_has_repositories_without_guests() {
        for sweep in [FULL, QUICK] {
            let all = cases(&sweep);
            assert!(all.iter().all(|case| case.guests >= case.repositories));
            assert!(all.len().is_multiple_of(movements().len()) && !all.is_empty());
        }
        assert!(cases(&FULL).len() < 100, "a run must end");
    }
}
