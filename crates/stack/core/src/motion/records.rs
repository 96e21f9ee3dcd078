//! The records of a VM on their way: what another host makes of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use tapio_model::{ApiError, Class, NULL_REF, Source, Type, Value};
use uuid::Uuid;

use crate::db::{Change, Db, Object, from_json, reference_of, to_json};
use crate::storage::vdi::made_note;
use crate::vms::allowed::refresh;
use crate::vms::fields::{MAC_SEED, OF_TEMPLATES, generation_id};
use crate::vms::{vbd, vif, vm};

/// All that is made of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Records {
    /// The VM first, then its snapshots.
    pub(super) vms: Vec<VmRecord>,
    pub(super) vdis: Vec<VdiRecord>,
    /// Whether the VM is another one than that it was made from.
    pub(super) copy: bool,
}

/// A VM, or a snapshot of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct VmRecord {
    pub(super) uuid: Uuid,
    fields: Map<String, Json>,
    /// What was last known of its guest.
    guest: Map<String, Json>,
    snapshot_of: Option<Uuid>,
    parent: Option<Uuid>,
    /// The image with its memory, if it is suspended.
    memory: Option<Uuid>,
    vbds: Vec<VbdRecord>,
    vifs: Vec<VifRecord>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct VbdRecord {
    fields: Map<String, Json>,
    disk: Option<Uuid>,
    /// The name of the medium in a drive.
    medium: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct VifRecord {
    fields: Map<String, Json>,
    device: String,
    mac: String,
    /// The reference of the network at the host that receives.
    network: String,
}

/// A disk that has arrived.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct VdiRecord {
    pub(super) image: Uuid,
    fields: Map<String, Json>,
    snapshot_of: Option<Uuid>,
}

/// Fields of a VM that are set by what happens to it, and not by its record.
const NOT_OF_VM: [&str; 14] = [
    "uuid",
    "allowed_operations",
    "current_operations",
    "power_state",
    "domid",
    "resident_on",
    "scheduled_to_be_resident_on",
    "is_control_domain",
    "is_default_template",
    "snapshot_of",
    "parent",
    "suspend_VDI",
    "metrics",
    "guest_metrics",
];

/// Fields of a VBD that its copy has.
const OF_VBD: [&str; 9] = [
    "userdevice",
    "bootable",
    "mode",
    "type",
    "unpluggable",
    "empty",
    "other_config",
    "qos_algorithm_type",
    "qos_algorithm_params",
];

/// Fields of a VDI that belong to the disk and not to its image.
const OF_VDI: [&str; 12] = [
    "name_label",
    "name_description",
    "type",
    "sharable",
    "read_only",
    "other_config",
    "xenstore_data",
    "is_a_snapshot",
    "snapshot_time",
    "tags",
    "allow_caching",
    "on_boot",
];

fn is_reference(ty: Type) -> bool {
    match ty {
        Type::Ref(_) => true,
        Type::Set(inner) | Type::Map(_, inner) => is_reference(*inner),
        _ => false,
    }
}

/// The members of an object that `is_taken`.
fn members(object: &Object, is_taken: impl Fn(&tapio_model::Field) -> bool) -> Map<String, Json> {
    let kept = object.class.fields.iter().filter(|field| matches!(field.source, Source::Kept));
    let taken = kept.filter(|field| !is_reference(field.ty) && is_taken(field));
    taken.map(|field| (field.name.to_owned(), to_json(object.get(field.name)))).collect()
}

/// The fields that this version knows, of members.
fn fields(class: &'static Class, members: &Map<String, Json>) -> Vec<(&'static str, Value)> {
    let known = class.fields.iter().filter(|field| !is_reference(field.ty));
    known.filter_map(|field| Some((field.name, from_json(members.get(field.name)?, field.ty)?))).collect()
}

fn class(name: &str) -> Result<&'static Class, ApiError> {
    tapio_model::class(name).ok_or_else(|| ApiError::internal(format!("there is no class {name}")))
}

/// Where the parts of a VM go: by their references here.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// The images that VDIs have become.
    pub(super) images: BTreeMap<String, Uuid>,
    /// The networks of VIFs.
    pub(super) networks: BTreeMap<String, String>,
}

/// The records of a VM and its snapshots, which are `vms`, the VM first.
///
/// # Errors
/// Something that a VM leads to goes nowhere: a defect.
pub(super) fn of_vms(db: &Db, vms: &[String], places: &Places, copy: bool) -> Result<Records, ApiError> {
    let mut uuids = BTreeMap::new();
    for vm in vms {
        let own = if copy { Uuid::new_v4() } else { db.get("VM", vm)?.uuid()? };
        uuids.insert(vm.as_str(), own);
    }
    let mut made = Vec::new();
    for vm in vms {
        let object = db.get("VM", vm)?;
        let known = |field: &str| uuids.get(object.text(field)).copied();
        let guest = db.get("VM_guest_metrics", object.text("guest_metrics")).ok();
        let is_guest = |field: &tapio_model::Field| !["uuid", "live"].contains(&field.name);
        made.push(VmRecord {
            uuid: uuids.get(vm.as_str()).copied().unwrap_or_default(),
            fields: members(&object, |field| !NOT_OF_VM.contains(&field.name)),
            guest: guest.map(|guest| members(&guest, is_guest)).unwrap_or_default(),
            snapshot_of: known("snapshot_of"),
            parent: known("parent"),
            memory: places.images.get(object.text("suspend_VDI")).copied(),
            vbds: vbds(db, vm, places)?,
            vifs: vifs(db, vm, places)?,
        });
    }
    let mut vdis = Vec::new();
    for (vdi, image) in &places.images {
        let object = db.get("VDI", vdi)?;
        vdis.push(VdiRecord {
            image: *image,
            fields: members(&object, |field| OF_VDI.contains(&field.name)),
            snapshot_of: places.images.get(object.text("snapshot_of")).copied(),
        });
    }
    Ok(Records { vms: made, vdis, copy })
}

fn vbds(db: &Db, vm: &str, places: &Places) -> Result<Vec<VbdRecord>, ApiError> {
    let each = db.find("VBD", "VM", vm).into_iter().map(|vbd| {
        let (vdi, is_cd) = (vbd.text("VDI"), vbd.text("type") == "CD");
        let disk = places.images.get(vdi).copied();
        if disk.is_none() && !is_cd {
            return Err(ApiError::new("VDI_NOT_IN_MAP", [vdi]));
        }
        let medium = db.get("VDI", vdi).ok().filter(|_| is_cd && disk.is_none());
        let medium = medium.map(|vdi| vdi.text("location").to_owned()).unwrap_or_default();
        Ok(VbdRecord { fields: members(&vbd, |field| OF_VBD.contains(&field.name)), disk, medium })
    });
    each.collect()
}

fn vifs(db: &Db, vm: &str, places: &Places) -> Result<Vec<VifRecord>, ApiError> {
    let is_given = |name: &str| vif::GIVEN.contains(&name) || vif::COPIED.contains(&name);
    let each = db.find("VIF", "VM", vm).into_iter().map(|vif| {
        let network = places.networks.get(&vif.reference);
        Ok(VifRecord {
            fields: members(&vif, |field| is_given(field.name)),
            device: vif.text("device").to_owned(),
            mac: vif.text("MAC").to_owned(),
            network: network.cloned().ok_or_else(|| ApiError::new("VIF_NOT_IN_MAP", [&vif.reference]))?,
        })
    });
    each.collect()
}

impl Records {
    /// What of it is here already, or is not here and must be.
    ///
    /// # Errors
    /// `DUPLICATE_VM`, `DUPLICATE_MAC_SEED`, `HANDLE_INVALID` of a network or an image.
    pub(super) fn check(&self, change: &Change<'_>) -> Result<(), ApiError> {
        for vm in &self.vms {
            if change.by_uuid("VM", &vm.uuid.to_string()).is_ok() {
                return Err(ApiError::new("DUPLICATE_VM", [reference_of(vm.uuid)]));
            }
            for vif in &vm.vifs {
                change.get("network", &vif.network)?;
            }
        }
        for vdi in &self.vdis {
            change.get("VDI", &reference_of(vdi.image))?;
        }
        let seed = self.vms.first().and_then(|vm| vm.fields.get("other_config")?.get(MAC_SEED)?.as_str());
        if let Some(seed) = seed.filter(|_| !self.copy) {
            let has = |vm: &Object| vm.map("other_config").get(MAC_SEED).is_some_and(|known| known == seed);
            if change.all("VM").iter().any(|vm| !vm.bool("is_a_snapshot") && has(vm)) {
                return Err(ApiError::new("DUPLICATE_MAC_SEED", [seed]));
            }
        }
        Ok(())
    }

    /// Makes all of it; answers the references of the VMs.
    ///
    /// # Errors
    /// As [`Self::check`], those of new VMs, VBDs and VIFs; the store's.
    pub(super) fn write(&self, change: &mut Change<'_>) -> Result<Vec<String>, ApiError> {
        self.check(change)?;
        for vdi in &self.vdis {
            let reference = reference_of(vdi.image);
            for (field, value) in fields(class("VDI")?, &vdi.fields) {
                change.set("VDI", &reference, field, value)?;
            }
            let snapshot_of = vdi.snapshot_of.map_or_else(|| NULL_REF.to_owned(), reference_of);
            change.set("VDI", &reference, "snapshot_of", snapshot_of)?;
            change.drop_note(made_note(&reference));
        }
        let mut made = Vec::new();
        for vm in &self.vms {
            made.push(vm.write(change, self.copy)?);
        }
        for vm in &self.vms {
            let reference = reference_of(vm.uuid);
            for (field, other) in [("snapshot_of", vm.snapshot_of), ("parent", vm.parent)] {
                let other = other.map_or_else(|| NULL_REF.to_owned(), reference_of);
                change.set("VM", &reference, field, other)?;
            }
            refresh(change, "VM", &reference)?;
        }
        Ok(made)
    }
}

impl VmRecord {
    fn write(&self, change: &mut Change<'_>, copy: bool) -> Result<String, ApiError> {
        let mut new = fields(class("VM")?, &self.fields);
        new.retain(|(field, _)| !NOT_OF_VM.contains(field));
        for (field, value) in &mut new {
            match (*field, copy) {
                ("other_config", _) => {
                    let mut config = value.to_string_map();
                    config.retain(|key, _| !OF_TEMPLATES.contains(&key.as_str()));
                    if let Some(seed) = config.get_mut(MAC_SEED).filter(|_| copy) {
                        *seed = Uuid::new_v4().to_string();
                    }
                    *value = Value::string_map(config);
                }
                ("generation_id", true) => {
                    *value = Value::string(generation_id(value.as_str().unwrap_or_default()));
                }
                _ => {}
            }
        }
        new.push(("uuid", Value::string(self.uuid.to_string())));
        let reference = vm::create_in(change, new)?;
        let guest = change.get("VM", &reference)?.text("guest_metrics").to_owned();
        for (field, value) in fields(class("VM_guest_metrics")?, &self.guest) {
            if field != "uuid" {
                change.set("VM_guest_metrics", &guest, field, value)?;
            }
        }
        for vbd in &self.vbds {
            vbd.write(change, &reference)?;
        }
        for vif in &self.vifs {
            let mut new = fields(class("VIF")?, &vif.fields);
            new.extend([("VM", Value::string(&reference)), ("network", Value::string(&vif.network))]);
            vif::create_in(change, &vif.device, if copy { "" } else { &vif.mac }, new)?;
        }
        if let Some(memory) = self.memory {
            change.set("VM", &reference, "suspend_VDI", reference_of(memory))?;
            change.set("VM", &reference, "power_state", "Suspended")?;
        }
        Ok(reference)
    }
}

impl VbdRecord {
    fn write(&self, change: &mut Change<'_>, vm: &str) -> Result<(), ApiError> {
        let mut new = fields(class("VBD")?, &self.fields);
        let vdi = match self.disk {
            Some(image) => reference_of(image),
            None => medium(change, &self.medium),
        };
        new.retain(|(field, _)| *field != "empty");
        new.push(("empty", Value::Bool(vdi == NULL_REF)));
        new.extend([("VM", Value::string(vm)), ("VDI", Value::string(vdi))]);
        vbd::create_in(change, new).map(drop)
    }
}

/// The medium of a drive: one of this name in any SR of media.
fn medium(change: &Change<'_>, location: &str) -> String {
    let is_medium =
        |vdi: &Object| change.get("SR", vdi.text("SR")).is_ok_and(|sr| sr.text("content_type") == "iso");
    let named = if location.is_empty() { Vec::new() } else { change.find("VDI", "location", location) };
    let found = named.iter().find(|vdi| is_medium(vdi));
    found.map_or_else(|| NULL_REF.to_owned(), |vdi| vdi.reference.clone())
}
