//! The records of VMs whose disks were received: all in one change.

use std::collections::BTreeMap;

use tapio_model::{ApiError, NULL_REF, Value};

use super::super::allowed::refresh;
use super::super::fields::{MAC_SEED, OF_TEMPLATES, generation_id};
use super::super::{vbd, vif, vm};
use super::Call;
use super::plan::{How, NewNetwork, NewVbd, NewVm, Plan};
use crate::db::Change;
use crate::storage::vdi::made_note;

/// What is done in the same change, with the VMs.
pub(super) type Then<'a> = &'a dyn Fn(&mut Change<'_>, &[String]) -> Result<(), ApiError>;

/// Makes the VMs of a plan; `made` has the VDIs, by their ids. Answers the references.
///
/// # Errors
/// `DUPLICATE_MAC_SEED`, those of new VMs, VBDs and VIFs; the store's. Then nothing was changed.
pub(super) fn write(
    call: &Call,
    plan: &Plan,
    made: &BTreeMap<String, String>,
    how: How,
    then: Then<'_>,
) -> Result<Vec<String>, ApiError> {
    call.part.db.change(|change| {
        let mut vms = Vec::new();
        for new in &plan.vms {
            vms.push(write_vm(change, new, made, how)?);
        }
        for vdi in made.values() {
            change.drop_note(made_note(vdi));
        }
        then(change, &vms)?;
        Ok(vms)
    })
}

fn write_vm(
    change: &mut Change<'_>,
    new: &NewVm,
    made: &BTreeMap<String, String>,
    how: How,
) -> Result<String, ApiError> {
    let mut config = new.other_config.clone();
    config.retain(|key, _| !OF_TEMPLATES.contains(&key.as_str()));
    if let Some(seed) = config.get_mut(MAC_SEED) {
        if !how.restore {
            *seed = uuid::Uuid::new_v4().to_string();
        } else if let Some(seed) = taken_seed(change, new, seed) {
            return Err(ApiError::new("DUPLICATE_MAC_SEED", [seed]));
        }
    }
    let generation = if how.restore { new.generation_id.clone() } else { generation_id(&new.generation_id) };
    let version = if how.restore { new.version.saturating_add(1) } else { 0 };
    let mut fields: Vec<(&str, Value)> =
        new.fields.iter().map(|(name, value)| (*name, value.clone())).collect();
    fields.extend([
        ("other_config", Value::string_map(config)),
        ("generation_id", Value::string(generation)),
        ("version", Value::Int(version)),
    ]);
    let here = if how.restore { change.by_uuid("VM", &new.uuid).ok() } else { None };
    let reference = match here {
        Some(here) => {
            for vbd in change.find("VBD", "VM", &here.reference) {
                vbd::remove_in(change, &vbd)?;
            }
            for vif in change.find("VIF", "VM", &here.reference) {
                vif::remove_in(change, &vif)?;
            }
            for (field, value) in fields {
                change.set("VM", &here.reference, field, value)?;
            }
            here.reference.clone()
        }
        None => {
            if how.restore {
                fields.push(("uuid", Value::string(&new.uuid)));
            }
            vm::create_in(change, fields)?
        }
    };
    for vbd in &new.vbds {
        write_vbd(change, &reference, vbd, made)?;
    }
    for vif in &new.vifs {
        let network = network(change, &vif.network)?;
        let mut fields: Vec<(&str, Value)> =
            vif.fields.iter().map(|(name, value)| (*name, value.clone())).collect();
        fields.extend([("VM", Value::string(&reference)), ("network", Value::string(network))]);
        let mac = if how.restore { vif.mac.as_str() } else { "" };
        vif::create_in(change, &vif.device, mac, fields)?;
    }
    if let Some(memory) = new.memory.as_ref().and_then(|id| made.get(id)) {
        change.set("VM", &reference, "suspend_VDI", Value::string(memory))?;
        change.set("VM", &reference, "power_state", Value::string("Suspended"))?;
    }
    refresh(change, "VM", &reference)?;
    Ok(reference)
}

/// The seed, if a VM that is not replaced has it.
fn taken_seed(change: &Change<'_>, new: &NewVm, seed: &str) -> Option<String> {
    let has =
        |vm: &crate::db::Object| vm.map("other_config").get(MAC_SEED).is_some_and(|known| known == seed);
    let others = change.all("VM");
    let is_taken =
        others.iter().any(|vm| vm.text("uuid") != new.uuid && !vm.bool("is_a_snapshot") && has(vm));
    is_taken.then(|| seed.to_owned())
}

fn write_vbd(
    change: &mut Change<'_>,
    vm: &str,
    new: &NewVbd,
    made: &BTreeMap<String, String>,
) -> Result<(), ApiError> {
    let mut fields: Vec<(&str, Value)> =
        new.fields.iter().map(|(name, value)| (*name, value.clone())).collect();
    let vdi = match &new.disk {
        Some(id) => {
            let vdi =
                made.get(id).ok_or_else(|| ApiError::new("IMPORT_ERROR_FAILED_TO_FIND_OBJECT", [id]))?;
            if change.get("VDI", vdi)?.bool("read_only") {
                fields.retain(|(name, _)| *name != "mode");
                fields.push(("mode", Value::string("RO")));
            }
            vdi.clone()
        }
        None => medium(change, &new.location),
    };
    if new.is_cd {
        fields.retain(|(name, _)| !["mode", "type"].contains(name));
        fields.extend([("mode", Value::string("RO")), ("type", Value::string("CD"))]);
        fields.push(("empty", Value::Bool(vdi == NULL_REF)));
    }
    fields.extend([("VM", Value::string(vm)), ("VDI", Value::string(vdi))]);
    vbd::create_in(change, fields).map(drop)
}

/// The medium of a drive: one of this name in any SR of media.
fn medium(change: &Change<'_>, location: &str) -> String {
    let found = change.find("VDI", "location", location).into_iter().find(|vdi| {
        !location.is_empty()
            && change.get("SR", vdi.text("SR")).is_ok_and(|sr| sr.text("content_type") == "iso")
    });
    found.map_or_else(|| NULL_REF.to_owned(), |vdi| vdi.reference.clone())
}

/// The network of this name, or with this bridge; made where there is none.
fn network(change: &mut Change<'_>, new: &NewNetwork) -> Result<String, ApiError> {
    let by = |field: &str, text: &str| {
        let found = if text.is_empty() { Vec::new() } else { change.find("network", field, text) };
        found.first().map(|network| network.reference.clone())
    };
    if let Some(known) = by("name_label", &new.name).or_else(|| by("bridge", &new.bridge)) {
        return Ok(known);
    }
    let fields: Vec<(&str, Value)> = new.fields.iter().map(|(name, value)| (*name, value.clone())).collect();
    change.create("network", &fields)
}
