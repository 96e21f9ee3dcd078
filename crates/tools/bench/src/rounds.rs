//! All measurements in one directory.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tapio_report::failure::Result;

use super::alone;
use super::failed;
use super::ground::Ground;
use super::measure::{Job, Sample, interrupted, measure};
use super::medians::Row;
use super::plan::{Plan, sizes};
use super::progress::Progress;
use super::report::{Place, Report, Skipped};
use super::server::Server;
use super::verdict;

/// Measures what `plan` says in `dir`; what a process costs alone only if that is wanted here.
///
/// # Errors
/// The directory cannot be used. A server that fails is named in the report instead.
pub fn run(plan: &Plan, dir: &Path, alone: bool, report: &mut Report) -> Result<()> {
    let ground = Ground::new(dir, |site, free| sizes(plan.quick, site.in_memory, free))?;
    let started = if alone && plan.starts { plan.named(&alone::STARTED) } else { Vec::new() };
    let weighed = if alone && plan.memory { plan.named(&alone::WEIGHED) } else { Vec::new() };
    let steps = plan.pairs().count() * plan.rounds + started.len() + weighed.len();
    let mut progress = Progress::new(steps);
    let mut broken = BTreeMap::new();
    let rows = rows(plan, &ground, &mut progress, &mut broken).map_err(failed)?;
    costs(plan, &ground, (&started, &weighed), &mut progress, &mut broken, report);
    progress.end();
    report.skipped.extend(broken.into_iter().map(|(server, reason)| Skipped { server, reason }));
    if !rows.is_empty() {
        let processors = report.setting.environment.processors;
        let goals = verdict::of_rows(&rows, ground.in_memory, processors);
        report.places.push(Place::of(&ground, rows, goals));
    }
    Ok(())
}

/// Why servers could not be measured; the first reason of each.
type Broken = BTreeMap<&'static str, String>;

fn rows(
    plan: &Plan,
    ground: &Ground,
    progress: &mut Progress,
    broken: &mut Broken,
) -> std::result::Result<Vec<Row>, String> {
    let sizes = &ground.sizes;
    let mut samples: BTreeMap<(&str, &str), Vec<Sample>> = BTreeMap::new();
    'rounds: for round in 0..plan.rounds {
        for (workload, server, program) in plan.pairs() {
            if interrupted() {
                break 'rounds;
            }
            progress.begin(&format!("{} {}", workload.name, server.name));
            let (len, time, requests_max) = if workload.fresh {
                // Long enough for several runs of reserved space, and bounded by the space that there is.
                (sizes.fresh_len, plan.time * 2, sizes.fresh_requests(workload, ground.in_memory))
            } else {
                (sizes.full_len, plan.time, u64::MAX)
            };
            let job = Job { workload: *workload, len, time, requests_max, seed: 7 + round as u64 };
            ground.settle()?;
            let measured = ground
                .stand(server, Some(workload))
                .and_then(|stand| measure(server, program, &stand, &job, plan.warm_up));
            match measured {
                Ok(sample) => samples.entry((workload.name, server.name)).or_default().push(sample),
                Err(reason) => {
                    broken.entry(server.name).or_insert_with(|| format!("{}: {reason}", workload.name));
                }
            }
        }
    }
    ground.settle()?;
    let found = plan.pairs().filter_map(|(workload, server, _)| {
        let row = Row::of(workload.name, server.name, samples.get(&(workload.name, server.name))?);
        Some(Row { cached: server.is_cached(ground.in_memory), ..row })
    });
    Ok(found.collect())
}

fn costs(
    plan: &Plan,
    ground: &Ground,
    (started, weighed): (&[Server], &[Server]),
    progress: &mut Progress,
    broken: &mut Broken,
    report: &mut Report,
) {
    let starts_each = if plan.quick { 1 } else { 5 * plan.rounds };
    for server in started.iter().filter(|_| !interrupted()) {
        progress.begin(&format!("start {}", server.name));
        match alone::start(ground, server, starts_each) {
            Ok(start) => report.starts.push(start),
            Err(reason) => drop(broken.entry(server.name).or_insert(reason)),
        }
    }
    for server in weighed.iter().filter(|_| !interrupted()) {
        progress.begin(&format!("memory {}", server.name));
        let idle_after = if plan.quick { plan.time } else { alone::IDLE_AFTER };
        match alone::memory(ground, server, plan.time.min(Duration::from_secs(1)), idle_after) {
            Ok(found) => report.memory.extend(found),
            Err(reason) => drop(broken.entry(server.name).or_insert(reason)),
        }
    }
}
