//! The chain changes while clients use the disk.

use std::cell::RefCell;
use std::path::PathBuf;

use tapio_block::Job;
use tapio_format::{FormatError, FormatErrorKind};
use tapio_ring::Io;
use tapio_ring::sim::Random;
use tapio_types::{Access, ImageKind, LayerSpec};

use crate::rig::{Process, Rig, RigKind};
use crate::story::{End, World, prepared};

/// How long a snapshot may hold requests back: longer than anything but a stuck one.
const STALL_MAX_NS: u64 = 20_000_000_000;

/// One seed: a few phases with changes of the chain in each.
pub fn run(kind: RigKind, seed: u64) -> Result<(), String> {
    let mut random = Random::new(seed ^ 0xc4a1);
    let mut world = prepared(kind, seed)?;
    for _ in 0..2 + random.below(3) {
        let end = [End::Close, End::PowerCut, End::Kill][random.below(3) as usize];
        let faults = random.chance(1, 4);
        let cut = (end != End::Close && random.chance(3, 4)).then(|| 1 + random.below(400));
        world.phase_with(end, faults, cut, Some(Plan::Random(random.next())))?;
    }
    Ok(())
}

/// A change of the chain.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    Snapshot,
    /// The same by images that change their names.
    Swap,
    /// Of the image below the leaf.
    CommitInner,
    CommitLeaf,
}

/// Changes of a phase.
#[derive(Clone, Copy, Debug)]
pub enum Plan {
    /// Drawn from this seed, with pauses between them.
    Random(u64),
    /// These, one after the other.
    Fixed(&'static [Change]),
}

/// Two snapshots, the second of which is undone by a commit of an inner image.
pub const INNER: &[Change] = &[Change::Snapshot, Change::Snapshot, Change::CommitInner];
/// A snapshot, and two commits of a leaf: into a differencing image and into what that lies on.
pub const LEAF: &[Change] = &[Change::Snapshot, Change::CommitLeaf, Change::CommitLeaf];

/// Two snapshots by names, and a commit of what each left.
pub const SWAPS: &[Change] = &[Change::Swap, Change::Swap, Change::CommitInner, Change::CommitLeaf];

/// A fixed short story with an end after each of its changes. The whole of it leaves a chain of `left` images.
pub fn at_every_change(kind: RigKind, changes: &'static [Change], left: usize) -> Result<(), String> {
    let story = |end: End, cut: Option<u64>| -> Result<World, String> {
        let mut world = prepared(kind, 5)?;
        world.phase_with(end, false, cut, Some(Plan::Fixed(changes)))?;
        Ok(world)
    };
    let changes = {
        let world = prepared(kind, 5)?;
        let before = world.rig.host.changed();
        let whole = story(End::Close, None)?;
        if whole.rig.images.len() != left {
            return Err(format!("{} images are left of the whole story, not {left}", whole.rig.images.len()));
        }
        whole.rig.host.changed() - before
    };
    for cut in 1..=changes {
        for end in [End::PowerCut, End::Kill] {
            story(end, Some(cut)).map_err(|why| format!("{end:?} at change {cut} of {changes}: {why}"))?;
        }
    }
    Ok(())
}

/// The same story with EIO for a while from each of its operations on; then the power goes or the process dies, at the
/// end or before.
pub fn eio_at_every_operation(kind: RigKind, changes: &'static [Change]) -> Result<(), String> {
    let plan = Some(Plan::Fixed(changes));
    let (operations, changed) = {
        let mut world = prepared(kind, 5)?;
        let before = (world.rig.host.operations(), world.rig.host.changed());
        world.phase_with(End::Close, false, None, plan)?;
        (world.rig.host.operations() - before.0, world.rig.host.changed() - before.1)
    };
    let mut random = Random::new(7);
    for before in 0..operations {
        for count in [1, 4, 40] {
            for end in [End::PowerCut, End::Kill] {
                let cut = random.chance(1, 2).then(|| 1 + random.below(changed));
                let mut world = prepared(kind, 5)?;
                world.rig.host.fail_after(before, count);
                let ended = world.phase_with(end, false, cut, plan);
                // What is left is not only read back but also written on.
                ended.and_then(|()| world.phase_with(End::PowerCut, false, None, None)).map_err(|why| {
                    format!(
                        "EIO for {count} operations after {before} of {operations}, {end:?} at {cut:?}: {why}"
                    )
                })?;
            }
        }
    }
    Ok(())
}

/// Changes the chain as planned.
pub async fn manager(process: &Process, rig: &RefCell<Rig>, plan: Plan) -> Result<(), String> {
    if let Some(spec) = process.core.spec() {
        // The disk knows of images that left the chain when a process died.
        rig.borrow_mut().images.retain(|(_, image, _)| spec.layers.iter().any(|layer| layer.path == *image));
    }
    match plan {
        Plan::Random(seed) => at_random(process, rig, Random::new(seed)).await,
        Plan::Fixed(changes) => {
            for change in changes {
                let path = |index: usize| rig.borrow().images.get(index).map(|(_, path, _)| path.clone());
                match change {
                    Change::Snapshot => snapshot(process, rig).await?,
                    Change::Swap => swap(process, rig).await?,
                    Change::CommitInner => commit(process, rig, path(1), 0, None).await,
                    Change::CommitLeaf => commit(process, rig, path(0), 0, None).await,
                }
            }
            Ok(())
        }
    }
}

/// Takes snapshots and commits images until it has done enough.
async fn at_random(process: &Process, rig: &RefCell<Rig>, mut random: Random) -> Result<(), String> {
    for _ in 0..2 + random.below(4) {
        let tasks = process.sim.tasks();
        tasks.sleep_until(tasks.turn_ns() + random.below(2_000_000)).await;
        let children: Vec<PathBuf> = {
            let rig = rig.borrow();
            rig.images.iter().take(rig.images.len() - 1).map(|(_, path, _)| path.clone()).collect()
        };
        if children.is_empty() || (random.chance(1, 2) && children.len() < 5) {
            // A device, and an export, keep their names.
            let (kind, _, is_device) = rig.borrow().images[0].clone();
            if random.chance(1, 2) && kind != ImageKind::Nbd && !is_device {
                swap(process, rig).await?;
            } else {
                snapshot(process, rig).await?;
            }
            continue;
        }
        // The leaf as often as all others together.
        let inner = random.below(children.len() as u64) as usize;
        let path = children[if random.chance(1, 2) { 0 } else { inner }].clone();
        let rate = if random.chance(1, 3) { 20 << 20 } else { 0 };
        let cancel = random.chance(1, 5).then(|| random.below(500_000));
        commit(process, rig, Some(path), rate, cancel).await;
    }
    Ok(())
}

/// Merges an image into its parent, if nothing comes between.
async fn commit(
    process: &Process,
    rig: &RefCell<Rig>,
    path: Option<PathBuf>,
    rate: u64,
    cancel: Option<u64>,
) {
    let tasks = process.sim.tasks();
    let Some(path) = path else { return };
    let Ok(job) = process.core.commit(&path, rate) else { return };
    if let Some(after_ns) = cancel {
        tasks.sleep_until(tasks.turn_ns() + after_ns).await;
        job.cancel(tasks);
    }
    ended(process, &job).await;
    if process.core.spec().is_some_and(|spec| spec.layers.iter().all(|layer| layer.path != path)) {
        rig.borrow_mut().images.retain(|(_, image, _)| *image != path);
    }
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
        is_expected(&error)?;
    }
    Ok(())
}

async fn swap(process: &Process, rig: &RefCell<Rig>) -> Result<(), String> {
    rig.borrow_mut().put_child_in_place();
    let images = rig.borrow().spec(Access::ReadWrite).layers;
    if let Err(error) = process.core.swap_leaf(&images, None, STALL_MAX_NS).await {
        rig.borrow_mut().take_child_out();
        is_expected(&error)?;
    }
    Ok(())
}

/// Whether a fault is the reason that there is no snapshot.
fn is_expected(error: &FormatError) -> Result<(), String> {
    let expected = [FormatErrorKind::Io, FormatErrorKind::OutOfSpace, FormatErrorKind::Cancelled];
    if expected.contains(&error.kind()) { Ok(()) } else { Err(format!("no snapshot: {error}")) }
}
