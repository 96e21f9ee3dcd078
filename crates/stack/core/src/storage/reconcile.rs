//! A scan: what lies on the storage and what the database says are made to agree, by one change.

use std::collections::{BTreeMap, BTreeSet};

use tapio_model::ApiError;
use tapio_sm::VdiInfo;

use super::attached::Attached;
use super::records::{self, Alert};
use super::work::{Names, Work};
use super::{Call, allowed, tracking};
use crate::db::{Change, Object, reference_of};
use crate::plan::steps::step;

/// Looks at every image of an SR. New ones get a record, changed ones are brought up to date; a disk that is not there
/// any more is marked `missing` and keeps its names until it is found again or forgotten, a base copy goes.
///
/// # Errors
/// The driver's, the store's; then nothing changed.
pub(super) fn scan(call: &Call, attached: &Attached) -> Result<(), ApiError> {
    let work = Work::new(call);
    let names = Names { sr: &attached.reference, vdi: "", op: "scan" };
    let db = &call.part.db;
    let _comparing = attached.comparing();
    let mut images = attached.with(|sr| sr.scan(&work)).map_err(|error| names.translate(call, error))?;
    images.retain(|image| !attached.is_building(image.uuid));
    step("sr-scan:seen");
    let sizes = attached.measure(&work);
    let foreign = db.change(|change| {
        let foreign = compare(call, change, attached, &images)?;
        attached.record(change, sizes, 0)?;
        allowed::refresh_all(&call.part, change, &attached.reference)?;
        Ok(foreign)
    })?;
    for uuid in foreign {
        let body = format!(
            "VDI {uuid} lies in SR {} and has a record in another SR, as after an SR was copied: forget one of the two",
            attached.uuid
        );
        let sr = attached.uuid.to_string();
        Alert { name: "VDI_UUID_NOT_UNIQUE", priority: 3, class: "SR", about: &sr }
            .post(&call.part.db, &body);
    }
    Ok(())
}

/// Answers the UUIDs that have a record in another SR.
fn compare(
    call: &Call,
    change: &mut Change<'_>,
    attached: &Attached,
    images: &[VdiInfo],
) -> Result<Vec<String>, ApiError> {
    let sr = &attached.reference;
    let known: BTreeMap<String, _> =
        change.find("VDI", "SR", sr).into_iter().map(|vdi| (vdi.reference.clone(), vdi)).collect();
    let mut there = BTreeSet::new();
    let mut foreign = Vec::new();
    let mut sum = 0_i64;
    // What a snapshot is of has a record before it.
    let is_snapshot = |image: &&VdiInfo| image.told.as_ref().is_some_and(|told| told.snapshot_of.is_some());
    let (snapshots, others): (Vec<&VdiInfo>, Vec<&VdiInfo>) = images.iter().partition(is_snapshot);
    for image in others.into_iter().chain(snapshots) {
        let reference = reference_of(image.uuid);
        match known.get(&reference) {
            // Its image is away for a while, or for good: that no client has asked for.
            Some(old) if image.is_metadata && old.text("type") != tracking::METADATA => continue,
            Some(old) => {
                records::update(change, old, image)?;
            }
            None if change.get("VDI", &reference).is_ok() => {
                foreign.push(image.uuid.to_string());
                continue;
            }
            None => {
                records::create(change, sr, image, Vec::new())?;
            }
        }
        if change.get("VDI", &reference)?.bool("managed") {
            sum = sum.saturating_add(i64::try_from(image.virtual_size).unwrap_or(i64::MAX));
        }
        there.insert(reference);
    }
    for (reference, old) in known.iter().filter(|(reference, _)| !there.contains(*reference)) {
        vanished(call, change, reference, old)?;
    }
    if change.get("SR", sr)?.int("virtual_allocation") != sum {
        change.set("SR", sr, "virtual_allocation", sum)?;
    }
    Ok(foreign)
}

fn vanished(call: &Call, change: &mut Change<'_>, reference: &str, old: &Object) -> Result<(), ApiError> {
    let is_held = call.part.state().use_of(reference).is_some();
    if !old.bool("managed") && !is_held {
        return records::remove(change, reference);
    }
    if !old.bool("missing") {
        tracing::warn!(vdi = old.text("uuid"), "a disk is not on its storage any more");
        change.set("VDI", reference, "missing", true)?;
    }
    Ok(())
}
