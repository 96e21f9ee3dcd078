//! What an import is to make, told from the records of an archive before a byte of a disk is read.

use std::collections::{BTreeMap, BTreeSet};

use tapio_model::{NULL_REF, Source, Type, Value};
use tapio_types::SECTOR_LEN;
use tapio_xva::{Document, Entry, XvaError};

use crate::check::coerce;
use crate::storage::archive::NewDisk;
use crate::storage::copy::INHERITED;

/// Fields of a VM that an import does not take over: they are of the host that it was on, or of its run there.
const NOT_TAKEN: [&str; 27] = [
    "uuid",
    "allowed_operations",
    "current_operations",
    "power_state",
    "domid",
    "domarch",
    "is_default_template",
    "is_control_domain",
    "is_a_snapshot",
    "snapshot_time",
    "snapshot_info",
    "snapshot_metadata",
    "transportable_snapshot_id",
    "is_snapshot_from_vmpp",
    "is_vmss_snapshot",
    "memory_overhead",
    "memory_target",
    "last_booted_record",
    "last_boot_CPU_flags",
    "requires_reboot",
    "version",
    "generation_id",
    "pending_guidances",
    "pending_guidances_recommended",
    "pending_guidances_full",
    "attached_PCIs",
    "other_config",
];

/// Fields of a VBD that are taken over.
const OF_VBD: [&str; 8] = [
    "userdevice",
    "bootable",
    "mode",
    "type",
    "unpluggable",
    "other_config",
    "qos_algorithm_type",
    "qos_algorithm_params",
];

/// Objects of an archive, at most: VMs have at most 255 disks.
const VMS_MAX: usize = 1024;

/// How VMs are received.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    /// They keep their UUIDs and addresses.
    pub(super) restore: bool,
    /// One that is here is replaced though it is not older.
    pub(super) force: bool,
}

/// A VM that is to be made.
#[derive(Clone, Debug)]
pub(super) struct NewVm {
    pub(super) uuid: String,
    pub(super) version: i64,
    pub(super) generation_id: String,
    pub(super) fields: Vec<(&'static str, Value)>,
    pub(super) other_config: BTreeMap<String, String>,
    pub(super) vbds: Vec<NewVbd>,
    pub(super) vifs: Vec<NewVif>,
}

/// A VBD that is to be made.
#[derive(Clone, Debug)]
pub(super) struct NewVbd {
    pub(super) fields: Vec<(&'static str, Value)>,
    pub(super) is_cd: bool,
    /// The id of the disk; of a drive, where its medium lies.
    pub(super) disk: Option<String>,
    pub(super) location: String,
}

/// A VIF that is to be made.
#[derive(Clone, Debug)]
pub(super) struct NewVif {
    pub(super) device: String,
    pub(super) mac: String,
    pub(super) fields: Vec<(&'static str, Value)>,
    pub(super) network: NewNetwork,
}

/// The network of a VIF, which may be here.
#[derive(Clone, Debug, Default)]
pub(super) struct NewNetwork {
    pub(super) name: String,
    pub(super) bridge: String,
    pub(super) fields: Vec<(&'static str, Value)>,
}

/// All that is to be made.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) vms: Vec<NewVm>,
    /// By id.
    pub(super) disks: BTreeMap<String, NewDisk>,
    /// Disks whose bytes are passed over: memory of suspended VMs.
    pub(super) ignored: BTreeMap<String, u64>,
}

fn is_null(id: &str) -> bool {
    id.is_empty() || id == NULL_REF || id == "OpaqueRef:Null"
}

fn wrong(why: impl Into<String>) -> XvaError {
    XvaError::Wrong(why.into())
}

/// The fields of a record that are taken over. One that is not of its type has its first value.
fn taken(
    class: &'static str,
    entry: &Entry,
    is_taken: impl Fn(&'static str, Type) -> bool,
) -> Vec<(&'static str, Value)> {
    let Some(class) = tapio_model::class(class) else { return Vec::new() };
    let kept = class.fields.iter().filter(|field| matches!(field.source, Source::Kept));
    let mut fields = Vec::new();
    for field in kept.filter(|field| is_taken(field.name, field.ty)) {
        let Some(value) = entry.record.get(field.name) else { continue };
        let value = match (field.ty, value) {
            (Type::Bool, _) => Value::Bool(entry.bool(field.name)),
            (_, Value::Void) => continue,
            (_, value) => value.clone(),
        };
        match coerce(value, field.ty, field.name) {
            Ok(value) => fields.push((field.name, value)),
            Err(error) => {
                tracing::warn!(class = class.name, id = entry.id, %error, "a field of an archive is not taken over");
            }
        }
    }
    fields
}

fn is_reference(ty: Type) -> bool {
    match ty {
        Type::Ref(_) => true,
        Type::Set(inner) | Type::Option(inner) => is_reference(*inner),
        Type::Map(key, inner) => is_reference(*key) || is_reference(*inner),
        _ => false,
    }
}

impl Plan {
    /// What the archive has.
    pub(super) fn new(document: &Document) -> Result<Self, XvaError> {
        let mut plan = Self { vms: Vec::new(), disks: BTreeMap::new(), ignored: BTreeMap::new() };
        let is_vm = |entry: &&Entry| !entry.bool("is_control_domain");
        for entry in document.of_class("VM").filter(is_vm) {
            if plan.vms.len() == VMS_MAX {
                return Err(wrong(format!("the archive has more than {VMS_MAX} VMs")));
            }
            let vm = plan.vm(document, entry)?;
            plan.vms.push(vm);
        }
        if plan.vms.is_empty() {
            return Err(wrong("the archive has no VM"));
        }
        Ok(plan)
    }

    fn vm(&mut self, document: &Document, entry: &Entry) -> Result<NewVm, XvaError> {
        let memory = entry.text("suspend_VDI");
        if let Some(vdi) = document.get("VDI", memory) {
            self.ignored.insert(memory.to_owned(), size(vdi)?);
        }
        let is_taken = |name: &'static str, ty: Type| !NOT_TAKEN.contains(&name) && !is_reference(ty);
        let config = entry.record.get("other_config").map(Value::to_string_map).unwrap_or_default();
        let of_this = |class: &'static str| {
            document.of_class(class).filter(|device| device.text("VM") == entry.id).collect::<Vec<_>>()
        };
        let mut places = BTreeSet::new();
        let mut vbds = Vec::new();
        for vbd in of_this("VBD") {
            if !places.insert(vbd.text("userdevice")) {
                return Err(wrong(format!("two disks of a VM are at place '{}'", vbd.text("userdevice"))));
            }
            vbds.extend(self.vbd(document, vbd)?);
        }
        let vifs = of_this("VIF").into_iter().map(|vif| new_vif(document, vif)).collect();
        Ok(NewVm {
            uuid: entry.text("uuid").to_ascii_lowercase(),
            version: entry.text("version").trim().parse().unwrap_or_default(),
            generation_id: entry.text("generation_id").to_owned(),
            fields: taken("VM", entry, is_taken),
            other_config: config,
            vbds,
            vifs,
        })
    }

    fn vbd(&mut self, document: &Document, vbd: &Entry) -> Result<Option<NewVbd>, XvaError> {
        let is_cd = vbd.text("type").eq_ignore_ascii_case("CD");
        let id = vbd.text("VDI");
        let vdi = document.get("VDI", id);
        let fields = taken("VBD", vbd, |name, _| OF_VBD.contains(&name));
        if is_cd {
            let location = vdi.map(|vdi| vdi.text("location").to_owned()).unwrap_or_default();
            return Ok(Some(NewVbd { fields, is_cd, disk: None, location }));
        }
        if is_null(id) {
            return Ok(None);
        }
        let vdi = vdi.ok_or_else(|| XvaError::Missing { id: id.to_owned() })?;
        let len = size(vdi)?;
        let fields_of_vdi = taken("VDI", vdi, |name, _| INHERITED.contains(&name));
        self.disks.insert(id.to_owned(), NewDisk { len, fields: fields_of_vdi });
        Ok(Some(NewVbd { fields, is_cd, disk: Some(id.to_owned()), location: String::new() }))
    }
}

/// Bytes of a disk, in whole sectors.
fn size(vdi: &Entry) -> Result<u64, XvaError> {
    let len = vdi.number("virtual_size").filter(|len| (1..=i64::MAX as u64 - SECTOR_LEN).contains(len));
    let len = len.ok_or_else(|| {
        let told: String = vdi.text("virtual_size").chars().take(40).collect();
        wrong(format!("the size '{told}' of a disk is no number of bytes"))
    })?;
    Ok(len.next_multiple_of(SECTOR_LEN))
}

fn new_vif(document: &Document, vif: &Entry) -> NewVif {
    let network = document.get("network", vif.text("network"));
    let network = network.map(|network| NewNetwork {
        name: network.text("name_label").to_owned(),
        bridge: network.text("bridge").to_owned(),
        fields: taken("network", network, |name, _| {
            ["name_label", "name_description", "other_config", "MTU", "tags"].contains(&name)
        }),
    });
    let given = super::super::vif::GIVEN.into_iter().chain(super::super::vif::COPIED);
    let given: Vec<&str> = given.collect();
    NewVif {
        device: vif.text("device").to_owned(),
        mac: vif.text("MAC").to_owned(),
        fields: taken("VIF", vif, |name, ty| given.contains(&name) && !is_reference(ty)),
        network: network.unwrap_or_default(),
    }
}
