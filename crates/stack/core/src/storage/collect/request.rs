//! `SR.collect_garbage`: begins a collection, and says what it will do and why the rest stays.

use tapio_model::{ApiError, Value};
use tapio_sm::collect::{Forecast, Job, Plan, Skipped, Work as Kind, plan};

use super::super::work::{Names, Work};
use super::super::{Call, Handlers};
use super::job;
use super::look::{Memory, look};
use crate::args::Args;

pub(in super::super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("SR.collect_garbage", collect_garbage);
}

fn collect_garbage(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, only_look) = (args.text(0)?, args.bool(1)?);
    let attached = call.part.attached(reference)?;
    attached.is_collected()?;
    let told = |error| Names { sr: reference, vdi: "", op: "collect_garbage" }.translate(call, error);
    let mut memory = Memory::default();
    let view = look(call, &attached, &memory).map_err(told)?;
    for (image, parent) in plan(&view).jobs.iter().filter_map(|job| job.work.images()) {
        match attached.with(|sr| sr.merge_cost(&Work::new(call), &job::merge(image, parent, &[]))) {
            Ok(cost) => drop(memory.costs.insert(image, cost)),
            Err(error) => drop(memory.failed.insert(image, error.to_string())),
        }
    }
    let plan = plan(&look(call, &attached, &memory).map_err(told)?);
    if !only_look {
        call.part.collect_now(reference);
    }
    let lines = plan.jobs.iter().map(line).chain(plan.skipped.iter().map(skipped_line));
    Ok(Value::strings(lines.chain(forecast_line(&plan))))
}

/// What all jobs together take, in one line; none where there is nothing to be done.
pub(super) fn forecast_line(plan: &Plan) -> Option<String> {
    let Forecast { jobs, needs, gives_back } = plan.forecast();
    let noun = if jobs == 1 { "job" } else { "jobs" };
    (jobs > 0).then(|| {
        format!("in all: {jobs} {noun}, at most {needs} bytes more at a time, {gives_back} bytes given back")
    })
}

/// A job in one line.
pub(super) fn line(job: &Job) -> String {
    let Job { needs, gives_back, disks, .. } = job;
    let space = format!("needs {needs} bytes, gives back {gives_back}");
    match job.work {
        Kind::Garbage => format!("remove base copies that carry nothing: gives back {gives_back} bytes"),
        Kind::Inner { image, parent } => {
            format!("merge base copy {image} into {parent}, below {} disks: {space}", disks.len())
        }
        Kind::Freeze { image, parent } => {
            format!("make what VDI {image} holds a base copy, to merge it into {parent}: {space}")
        }
        Kind::Leaf { image, parent } => format!("merge VDI {image} into its base copy {parent}: {space}"),
    }
}

/// What is left alone, in one line.
pub(super) fn skipped_line(skipped: &Skipped) -> String {
    format!("not merged: {}: {}", skipped.image, skipped.why)
}
