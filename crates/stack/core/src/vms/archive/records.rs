//! The records of a VM as an archive has them.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF, Type, Value};
use tapio_xva::{Document, Entry, Version};

use crate::basics::this_host;
use crate::db::{Db, Object};

/// A disk in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    /// Its id there.
    pub(super) id: String,
    pub(super) vdi: String,
    pub(super) len: u64,
}

/// Objects in the order of the archive, each once.
#[derive(Default)]
struct Listed {
    objects: Vec<Arc<Object>>,
    ids: BTreeMap<String, String>,
}

impl Listed {
    fn add(&mut self, object: Option<Arc<Object>>) {
        let Some(object) = object else { return };
        if !self.ids.contains_key(&object.reference) {
            self.ids.insert(object.reference.clone(), format!("Ref:{}", self.objects.len()));
            self.objects.push(object);
        }
    }
}

/// The document of a VM, and the disks that follow it, in the order in which they do. With its state the memory of a
/// suspended VM is one of them.
///
/// # Errors
/// A VBD has a VDI that is not there.
pub(super) fn document(
    db: &Db,
    vm: &Arc<Object>,
    keeps_state: bool,
) -> Result<(Document, Vec<Disk>), ApiError> {
    document_of_all(db, std::slice::from_ref(vm), keeps_state)
}

/// The same of several.
///
/// # Errors
/// As [`document`].
pub(super) fn document_of_all(
    db: &Db,
    vms: &[Arc<Object>],
    keeps_state: bool,
) -> Result<(Document, Vec<Disk>), ApiError> {
    let find = |class: &str, reference: &str| db.get(class, reference).ok();
    let mut listed = Listed::default();
    let host = find("host", &this_host(db));
    listed.add(host.clone());
    let mut sent: Vec<Arc<Object>> = Vec::new();
    for vm in vms {
        listed.add(Some(Arc::clone(vm)));
        listed.add(find("VM_metrics", vm.text("metrics")));
        listed.add(find("VM_guest_metrics", vm.text("guest_metrics")));
        let vbds = db.find("VBD", "VM", &vm.reference);
        let vifs = db.find("VIF", "VM", &vm.reference);
        vbds.iter().chain(&vifs).for_each(|object| listed.add(Some(Arc::clone(object))));
        vifs.iter().for_each(|vif| listed.add(find("network", vif.text("network"))));
        for vbd in vbds.iter().filter(|vbd| !vbd.is_null("VDI")) {
            let vdi = db.get("VDI", vbd.text("VDI"))?;
            if vbd.text("type") != "CD" && !sent.iter().any(|known| known.reference == vdi.reference) {
                sent.push(Arc::clone(&vdi));
            }
            listed.add(find("SR", vdi.text("SR")));
            listed.add(Some(vdi));
        }
        if keeps_state && vm.text("power_state") == "Suspended" && !vm.is_null("suspend_VDI") {
            let memory = db.get("VDI", vm.text("suspend_VDI"))?;
            listed.add(find("SR", memory.text("SR")));
            listed.add(Some(Arc::clone(&memory)));
            sent.push(memory);
        }
    }
    let mut disks: Vec<Disk> = sent
        .iter()
        .filter_map(|vdi| {
            let len = u64::try_from(vdi.int("virtual_size")).unwrap_or_default();
            Some(Disk { id: listed.ids.get(&vdi.reference)?.clone(), vdi: vdi.reference.clone(), len })
        })
        .collect();
    disks.sort_by(|one, other| one.id.cmp(&other.id));
    let software = host.as_ref().map(|host| host.map("software_version")).unwrap_or_default();
    let text = |key: &str| software.get(key).cloned().unwrap_or_default();
    let number = |field: &str| host.as_ref().map_or(0, |host| host.int(field));
    let version = Version {
        hostname: host.as_ref().map(|host| host.text("hostname").to_owned()).unwrap_or_default(),
        date: crate::dates::format(crate::dates::now()),
        product_brand: text("product_brand"),
        product_version: text("product_version"),
        build_number: "0".to_owned(),
        major: number("API_version_major"),
        minor: number("API_version_minor"),
    };
    let objects = listed.objects.iter().map(|object| entry(db, &listed.ids, object, keeps_state)).collect();
    Ok((Document { version, objects }, disks))
}

/// What of an object is not for others, and what it would be for.
fn is_blank(class: &str, field: &str) -> bool {
    let is_snapshot = ["is_a_snapshot", "snapshot_time", "transportable_snapshot_id"].contains(&field);
    match class {
        "VM" => {
            is_snapshot || ["snapshot_info", "snapshot_metadata", "consoles", "crash_dumps"].contains(&field)
        }
        "VDI" => is_snapshot,
        // Its keys and addresses are no part of the VM.
        "host" => !["uuid", "name_label", "name_description", "hostname"].contains(&field),
        _ => false,
    }
}

/// Fields of a VM that runs, or of what it has then.
const OF_STATE: [&str; 4] = ["suspend_VDI", "currently_attached", "domid", "resident_on"];

fn entry(db: &Db, ids: &BTreeMap<String, String>, object: &Object, keeps_state: bool) -> Entry {
    let mut record = BTreeMap::new();
    let told = db.record(object);
    for field in object.class.fields {
        let Some(value) = told.as_map().and_then(|told| told.get(field.name)) else { continue };
        let is_operations = ["allowed_operations", "current_operations", "blobs"].contains(&field.name);
        let is_state = !keeps_state && OF_STATE.contains(&field.name);
        let value = if is_operations || is_state || is_blank(object.class.name, field.name) {
            Object::first_value(field)
        } else if field.name == "power_state" && !keeps_state {
            Value::string("Halted")
        } else {
            translated(ids, field.ty, value)
        };
        record.insert(field.name.to_owned(), value);
    }
    let id = ids.get(&object.reference).cloned().unwrap_or_default();
    Entry { class: object.class.name.to_owned(), id, record }
}

/// A value with the ids of the archive for references; what the archive does not have is nothing.
fn translated(ids: &BTreeMap<String, String>, ty: Type, value: &Value) -> Value {
    match (ty, value) {
        (Type::Ref(_), Value::String(reference)) => {
            Value::string(ids.get(reference).map_or(NULL_REF, String::as_str))
        }
        (Type::Set(Type::Ref(_)), Value::Set(members)) => {
            let known = members.iter().filter_map(|member| ids.get(member.as_str()?));
            Value::strings(known.map(String::as_str))
        }
        (Type::Map(_, Type::Ref(_)), _) => Value::Map(BTreeMap::new()),
        _ => value.clone(),
    }
}
