//! An SR as a plan needs it.

use std::collections::BTreeMap;

use tapio_model::ApiError;
use tapio_sm::collect::{Node, Policy, View};
use tapio_sm::{MergeCost, VdiInfo};
use uuid::Uuid;

use super::super::attached::Attached;
use super::super::work::Work;
use super::super::{Call, Storage};
use crate::db::{Object, reference_of};
use crate::operations::{INTO, Operations};

/// What a collection has found out so far.
#[derive(Debug, Default)]
pub(in super::super) struct Memory {
    pub(super) costs: BTreeMap<Uuid, MergeCost>,
    pub(super) freezes: BTreeMap<Uuid, u32>,
    pub(super) failed: BTreeMap<Uuid, String>,
}

impl Memory {
    /// An image has changed: what was found out about it holds no longer.
    pub(super) fn forget(&mut self, image: Uuid) {
        self.costs.remove(&image);
    }
}

/// Looks at every image of an SR, and at what uses it. What was left half done is put in order first.
///
/// # Errors
/// The driver's.
pub(super) fn look(call: &Call, attached: &Attached, memory: &Memory) -> Result<View, ApiError> {
    let images = attached.with(|sr| sr.scan(&Work::new(call)))?;
    view(call, attached, memory, &images)
}

/// The same of these images of the SR, and nothing is changed.
///
/// # Errors
/// The driver's.
pub(in super::super) fn view(
    call: &Call,
    attached: &Attached,
    memory: &Memory,
    images: &[VdiInfo],
) -> Result<View, ApiError> {
    let storage = &call.part;
    let work = Work::new(call);
    let record = storage.db.get("SR", &attached.reference)?;
    let stat = attached.with(|sr| sr.stat(&work))?;
    Ok(View {
        nodes: images.iter().filter(|image| !image.is_metadata).map(|image| node(storage, image)).collect(),
        policy: policy(&record),
        free: Some(stat.physical_size.saturating_sub(stat.physical_utilisation)),
        measured: memory.costs.clone(),
        freezes: memory.freezes.clone(),
        failed: memory.failed.clone(),
    })
}

fn policy(sr: &Object) -> Policy {
    let config = sr.map("other_config");
    let is_on = |key: &str| config.get(key).is_none_or(|value| value != "false");
    Policy { gc: is_on("gc"), coalesce: is_on("coalesce"), leaf_coalesce: is_on("leaf-coalesce") }
}

fn node(storage: &Storage, image: &VdiInfo) -> Node {
    let reference = reference_of(image.uuid);
    let is = |key: &str, value: &str| image.sm_config.get(key).is_some_and(|known| known == value);
    let raw = is("type", "raw");
    let record = storage.db.get("VDI", &reference).ok();
    let may_shrink = record
        .as_ref()
        .is_none_or(|vdi| vdi.map("sm_config").get("leaf-coalesce").is_none_or(|value| value != "false"));
    Node {
        uuid: image.uuid,
        parent: image.parent,
        hidden: !image.managed,
        raw,
        unreadable: !raw && image.parent.is_none() && image.sm_config.contains_key("damaged"),
        virtual_size: image.virtual_size,
        physical: image.physical_utilisation,
        held: held(storage, image.uuid, &reference),
        may_shrink,
    }
}

/// What keeps the chain of a disk as it is for long.
fn held(storage: &Storage, uuid: Uuid, reference: &str) -> Option<String> {
    let copies =
        |operations: &Operations| ["copy", INTO].into_iter().any(|op| operations.is_held_by(reference, op));
    if copies(&storage.operations) {
        return Some("a copy, an export or an import".to_owned());
    }
    let is_open = storage.state().use_of(reference).is_some();
    (is_open && storage.disks.live(uuid).is_none()).then(|| "something that is no running disk".to_owned())
}
