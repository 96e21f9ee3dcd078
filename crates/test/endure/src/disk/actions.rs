//! What happens to the process of a disk, and the table of all actions.

use std::fmt;

use tapio_e2e::disk::text;
use tapio_e2e::process::run_within;
use tapio_e2e::tools::find;

use super::changes;
use super::faults;
use super::storage::Storage;
use super::subject::{COMMAND_LIMIT, Image, Outcome, Subject};
use crate::load::verify;
use crate::model::{Range, SECTOR_LEN};

type Run = fn(&mut Subject<'_>, &Storage) -> Outcome;

/// Something that is done to a disk.
#[derive(Clone, Copy)]
pub struct Action {
    /// Its name in the report.
    pub name: &'static str,
    run: Run,
}

impl fmt::Debug for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

const ACTIONS: &[(&str, Run)] = &[
    ("kill", kill),
    ("pause", pause),
    ("stop", stop),
    ("quiet", quiet),
    ("snapshot", changes::snapshot),
    ("commit inner", changes::commit_inner),
    ("commit leaf", changes::commit_leaf),
    ("mirror", changes::mirror),
    ("grow", changes::grow),
    ("kill in snapshot", changes::kill_in_snapshot),
    ("kill in commit", changes::kill_in_commit),
    ("kill in mirror", changes::kill_in_mirror),
    ("kill in pivot", changes::kill_in_pivot),
    ("kill in grow", changes::kill_in_grow),
    ("full", faults::full),
    ("errors", faults::errors),
    ("flush errors", faults::flush_errors),
    ("hang", faults::hang),
    ("kill in hang", faults::kill_in_hang),
];

impl Action {
    /// An action of the table.
    pub fn named(name: &str) -> Self {
        let found = ACTIONS.iter().find(|(own, _)| *own == name);
        let (name, run) = found.unwrap_or_else(|| panic!("there is no action '{name}'"));
        Self { name, run: *run }
    }

    /// Does it.
    pub fn run(&self, subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
        (self.run)(subject, storage)
    }
}

fn kill(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    let times = 1 + subject.random.below(3);
    for _ in 0..times {
        subject.kill();
        subject.start()?;
        subject.report.done("kill");
        // Some die before they have served anything, most in the middle of work.
        subject.moment(40);
    }
    Ok(())
}

fn pause(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    let paused = subject.tap_ctl("pause", &[]);
    if !subject.judge("pause", &paused, &[])? {
        return Ok(());
    }
    subject.moment(200);
    let leaf = subject.leaf().name();
    let named = subject.random.once_in(2);
    let image = ["-a", leaf.as_str()];
    let resumed = subject.tap_ctl("unpause", if named { &image } else { &[] });
    subject.judge("unpause", &resumed, &[])?;
    subject.assert_leaf()
}

/// All requests are answered; everything is read, and every image is sound.
fn quiet(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    let _gate = subject.target.gate.write().expect("no holder panics");
    verify(subject.target, subject.report)?;
    subject.report.done("verification");
    Ok(())
}

/// An orderly end; the images are looked at by our tools and by other programs; a start.
fn stop(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    // In the middle of requests, or after the last of them.
    let gate = subject.random.once_in(2).then(|| subject.target.gate.write().expect("no holder panics"));
    subject.stop();
    drop(gate);
    subject.check_images()?;
    subject.report.done("check of all images");
    foreign(subject)?;
    match subject.random.below(4) {
        0 => changes::offline_snapshot(subject)?,
        1 => changes::offline_coalesce(subject)?,
        _ => {}
    }
    subject.follow_leaf();
    subject.start()?;
    subject.report.done("stop and start");
    Ok(())
}

/// QEMU reads the same, where it knows the format: it has no chains of VHDs, and no keys of theirs.
fn foreign(subject: &mut Subject<'_>) -> Outcome {
    let is_encrypted = subject.target.name == "encrypted";
    if subject.chain.len() > 1 || is_encrypted || find("qemu-img").is_none() {
        return Ok(());
    }
    let copy = subject.fresh("copy");
    let image = subject.leaf();
    let format = if image.kind == "vhd" { "vpc,force_size_calc=current_size" } else { "raw" };
    let source = format!("driver={format},file.driver=file,file.filename={}", text(&image.path));
    let mut convert = std::process::Command::new("qemu-img");
    convert.args(["convert", "--image-opts", &source, "-O", "raw", text(&copy)]);
    let finished = run_within(&mut convert, COMMAND_LIMIT);
    if !finished.status.success() {
        return Err(subject.finding(finished.to_string()));
    }
    let bytes = std::fs::read(&copy).map_err(|error| subject.finding(format!("the copy: {error}")))?;
    subject.remove(&[Image::raw(copy)]);
    let range = Range { first: 0, count: subject.len() / SECTOR_LEN };
    let mut model = subject.target.model.lock().expect("no holder panics");
    let compared = model.read(range, bytes.get(..range.len() as usize).unwrap_or(&bytes));
    drop(model);
    compared.map_err(|what| subject.finding(format!("as qemu-img reads it, {what}")))?;
    subject.report.done("comparison by qemu-img");
    Ok(())
}
