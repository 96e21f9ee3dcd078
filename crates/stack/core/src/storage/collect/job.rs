//! One job of a collection: what it takes, what the driver does, what the records say then.

use tapio_model::ApiError;
use tapio_sm::{ForkKind, Merge, Merged};
use uuid::Uuid;

use super::super::attached::Attached;
use super::super::transaction::Transaction;
use super::super::work::Work;
use super::super::{Call, allowed, records};
use super::rate;
use crate::db::{Change, reference_of};
use crate::operations::{COLLECT, on_sr, on_vdi};
use crate::plan::steps::step;

/// A merge by a caller that holds these disks.
pub(super) fn merge(image: Uuid, parent: Uuid, held: &[Uuid]) -> Merge {
    Merge { image, parent, held: held.to_vec() }
}

/// Takes the SR and these disks for the short part of a job.
fn enter<'a>(call: &'a Call, attached: &Attached, disks: &[Uuid]) -> Result<Transaction<'a>, ApiError> {
    let references: Vec<String> = disks.iter().map(|disk| reference_of(*disk)).collect();
    let mut targets = vec![on_sr(&attached.reference, COLLECT)];
    targets.extend(references.iter().map(|disk| on_vdi(disk, COLLECT)));
    Transaction::enter(call, &targets, |_| Ok(()))
}

/// Ends an operation with what a merge changed.
fn commit(
    call: &Call,
    attached: &Attached,
    operation: &Transaction<'_>,
    merged: &Merged,
) -> Result<(), ApiError> {
    let sizes = attached.measure(&Work::new(call));
    operation.commit(None, |change| {
        let more = record(call, change, merged)?;
        attached.record(change, sizes, more)
    })
}

/// Writes what a merge changed; answers by how much the disks are larger together.
fn record(call: &Call, change: &mut Change<'_>, merged: &Merged) -> Result<i64, ApiError> {
    let mut more = 0;
    for info in &merged.changed {
        let reference = reference_of(info.uuid);
        // An image that no scan has found yet has no record.
        if let Ok(old) = change.get("VDI", &reference) {
            more += records::update(change, &old, info)?;
            allowed::refresh(&call.part, change, "VDI", &reference)?;
        }
    }
    for gone in &merged.gone {
        let reference = reference_of(*gone);
        if change.get("VDI", &reference).is_ok() {
            records::remove(change, &reference)?;
        }
    }
    Ok(more)
}

/// Base copies that carry nothing go.
pub(super) fn garbage(call: &Call, attached: &Attached) -> Result<(), ApiError> {
    let operation = enter(call, attached, &[])?;
    let _changing = attached.changing();
    let gone = attached.with(|sr| sr.collect_garbage(&Work::new(call)))?;
    step("gc:garbage-gone");
    if gone.is_empty() {
        return Err(ApiError::backend(
            46,
            "base copies that carry nothing are in use, or not there any more",
            "",
        ));
    }
    let merged = Merged { gone, ..Merged::default() };
    commit(call, attached, &operation, &merged)
}

/// A parent whose block table is full becomes larger.
pub(super) fn grow(
    call: &Call,
    attached: &Attached,
    (image, parent): (Uuid, Uuid),
    disks: &[Uuid],
) -> Result<(), ApiError> {
    let operation = enter(call, attached, disks)?;
    let _changing = attached.changing();
    let grow = merge(image, parent, disks);
    attached.with(|sr| sr.grow_base(&Work::new(call), &grow))?;
    step("gc:grown");
    let changed = vec![attached.with(|sr| sr.vdi(&Work::new(call), parent))?];
    let merged = Merged { changed, gone: Vec::new() };
    commit(call, attached, &operation, &merged)
}

/// What the image holds is copied into its parent. Nothing is taken.
pub(super) fn copy(call: &Call, attached: &Attached, (image, parent): (Uuid, Uuid)) -> Result<(), ApiError> {
    let rate = rate(&*call.part.db.get("SR", &attached.reference)?);
    let copy = merge(image, parent, &[]);
    attached.with(|sr| sr.merge(&Work::new(call), &copy, rate))?;
    step("gc:copied");
    Ok(())
}

/// The image leaves its chains.
pub(super) fn relink(
    call: &Call,
    attached: &Attached,
    (image, parent): (Uuid, Uuid),
    disks: &[Uuid],
) -> Result<(), ApiError> {
    let operation = enter(call, attached, disks)?;
    let _changing = attached.changing();
    let relink = merge(image, parent, disks);
    let merged = attached.with(|sr| sr.relink(&Work::new(call), &relink))?;
    step("gc:relinked");
    commit(call, attached, &operation, &merged)
}

/// What a disk holds becomes a base copy.
pub(super) fn freeze(call: &Call, attached: &Attached, image: Uuid) -> Result<(), ApiError> {
    let operation = enter(call, attached, &[image])?;
    if call.part.state().is_shared_by_a_writer(&reference_of(image)) {
        return Err(ApiError::new("VDI_IN_USE", [reference_of(image), "coalesce".to_owned()]));
    }
    let _changing = attached.changing();
    let forked = attached.with(|sr| sr.fork(&Work::new(call), image, Uuid::new_v4(), ForkKind::Single))?;
    step("gc:frozen");
    let sizes = attached.measure(&Work::new(call));
    operation.commit(None, |change| {
        let old = change.get("VDI", &reference_of(image))?;
        let mut more = records::update(change, &old, &forked.origin)?;
        if let Some(base) = &forked.base {
            more += records::put(change, &attached.reference, base)?;
            allowed::refresh(&call.part, change, "VDI", &reference_of(base.uuid))?;
        }
        attached.record(change, sizes, more)
    })
}

/// A disk goes into its parent.
pub(super) fn leaf(call: &Call, attached: &Attached, image: Uuid, parent: Uuid) -> Result<(), ApiError> {
    let operation = enter(call, attached, &[image])?;
    let _changing = attached.changing();
    let leaf = merge(image, parent, &[image]);
    let merged = attached.with(|sr| sr.merge_leaf(&Work::new(call), &leaf))?;
    step("gc:leaf-merged");
    commit(call, attached, &operation, &merged)
}
