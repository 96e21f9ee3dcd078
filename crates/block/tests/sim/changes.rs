//! The chain changes while clients use the disk.

use std::cell::RefCell;

use tapio_block::Job;
use tapio_format::FormatErrorKind;
use tapio_ring::Io;
use tapio_ring::sim::Random;
use tapio_types::{ImageKind, LayerSpec};

use crate::rig::{Kind, Process, Rig};
use crate::story::{End, World, prepared};

/// How long a snapshot may hold requests back: longer than anything but a stuck one.
const STALL_MAX_NS: u64 = 20_000_000_000;

/// One seed: a few phases with changes of the chain in each.
pub fn run(kind: Kind, seed: u64) -> Result<(), String> {
    let mut random = Random::new(seed ^ 0xc4a1);
    let mut world = prepared(kind, seed)?;
    for _ in 0..2 + random.below(3) {
        let end = [End::Close, End::PowerCut, End::Kill][random.below(3) as usize];
        let faults = random.chance(1, 4);
        let cut = (end == End::PowerCut && random.chance(3, 4)).then(|| 1 + random.below(300));
        world.phase_with(end, faults, cut, Some(random.next()))?;
    }
    Ok(())
}

/// A fixed short story with an end after each of its changes.
pub fn at_every_change(kind: Kind) -> Result<(), String> {
    let story = |end: End, cut: Option<u64>| -> Result<World, String> {
        let mut world = prepared(kind, 5)?;
        // A seed whose changes are a snapshot, another one and a commit.
        world.phase_with(end, false, cut, Some(4))?;
        Ok(world)
    };
    let changes = {
        let world = prepared(kind, 5)?;
        let before = world.rig.host.changed();
        story(End::Close, None)?.rig.host.changed() - before
    };
    for cut in 1..=changes {
        for end in [End::PowerCut, End::Kill] {
            story(end, Some(cut)).map_err(|why| format!("{end:?} at change {cut} of {changes}: {why}"))?;
        }
    }
    Ok(())
}

/// Takes snapshots and commits images until it has done enough.
pub async fn manager(process: &Process, rig: &RefCell<Rig>, mut random: Random) -> Result<(), String> {
    for _ in 0..2 + random.below(4) {
        let tasks = process.sim.tasks();
        tasks.sleep_until(tasks.turn_ns() + random.below(2_000_000)).await;
        let inner: Vec<_> = {
            let rig = rig.borrow();
            let count = rig.images.len();
            rig.images.iter().take(count - 1).skip(1).cloned().collect()
        };
        if inner.is_empty() || (random.chance(1, 2) && inner.len() < 4) {
            snapshot(process, rig).await?;
        } else {
            let (_, path, _) = &inner[random.below(inner.len() as u64) as usize];
            let rate = if random.chance(1, 3) { 20 << 20 } else { 0 };
            let Ok(job) = process.core.commit(path, rate) else { continue };
            if random.chance(1, 5) {
                tasks.sleep_until(tasks.turn_ns() + random.below(500_000)).await;
                job.cancel(tasks);
            }
            ended(process, &job).await;
            if process.core.spec().is_some_and(|spec| spec.layers.iter().all(|layer| layer.path != *path)) {
                rig.borrow_mut().images.retain(|(_, image, _)| image != path);
            }
        }
    }
    Ok(())
}

async fn ended(process: &Process, job: &Job) {
    // Faults, a cancel: the chain says what came of it.
    let _ = job.ended(process.sim.tasks()).await;
}

async fn snapshot(process: &Process, rig: &RefCell<Rig>) -> Result<(), String> {
    rig.borrow_mut().put_child(false);
    let path = rig.borrow().images[0].1.clone();
    let leaf = LayerSpec { kind: ImageKind::Vhd, path };
    let taken = process.core.snapshot(&leaf, STALL_MAX_NS).await;
    if let Err(error) = taken {
        rig.borrow_mut().images.remove(0);
        let expected = [FormatErrorKind::Io, FormatErrorKind::OutOfSpace, FormatErrorKind::Cancelled];
        if !expected.contains(&error.kind()) {
            return Err(format!("no snapshot: {error}"));
        }
    }
    Ok(())
}
