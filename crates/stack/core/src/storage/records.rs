//! From what the storage knows of a VDI to its record, and messages to the administrator.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use tapio_model::{ApiError, NULL_REF, Value, datetime};
use tapio_sm::VdiInfo;

pub(super) use super::attached::counted;
use super::attached::int;
use super::database_uuid as of_database;
use super::tracking::METADATA;
use crate::db::{Change, Db, Object, reference_of};

/// Keys of `sm_config` that belong to the storage: a scan sets and removes them, all others stay as they are.
const STORAGE_KEYS: &[&str] = &[
    "vdi_type",
    "vhd-parent",
    "vhd-blocks",
    "image-format",
    "type",
    "key_hash",
    "damaged",
    // Of devices.
    "identity",
    "device",
    "device-kind",
    "discard",
    "sector-size",
    "refused",
    SINGLE,
];

/// Of the VDI of an SR that holds one: it is destroyed with its SR.
const SINGLE: &str = "single-vdi";

/// Whether an SR that is to be destroyed is not empty because of this VDI.
pub(super) fn keeps_sr(vdi: &Object) -> bool {
    vdi.bool("managed") && !vdi.bool("missing") && !vdi.map("sm_config").contains_key(SINGLE)
}

/// Whether a key of `sm_config` belongs to the storage.
pub(super) fn is_storage_key(key: &str) -> bool {
    STORAGE_KEYS.contains(&key)
}

/// Name of a VDI that only carries others.
const BASE_COPY: &str = "base copy";

/// Types of a VDI that a storage may know of one that has no record.
const TYPES: &[&str] = &["user", "system", "suspend", "crashdump", "ephemeral"];

/// Seconds since 1970.
pub(super) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Fields of a record that the storage says.
fn said(info: &VdiInfo, sm_config: BTreeMap<String, String>) -> Vec<(&'static str, Value)> {
    let parent = info.parent.map_or_else(|| NULL_REF.to_owned(), reference_of);
    let mut fields = vec![
        ("location", Value::string(&info.location)),
        ("virtual_size", int(info.virtual_size)),
        ("physical_utilisation", int(info.physical_utilisation)),
        ("missing", Value::Bool(false)),
        ("cbt_enabled", Value::Bool(info.cbt_enabled)),
        ("parent", Value::string(parent)),
        ("sm_config", Value::string_map(sm_config)),
    ];
    // Of a LUN the record alone says it, from the answer of `VDI.create` on.
    if info.managed || !info.is_lun() {
        fields.push(("managed", Value::Bool(info.managed)));
    }
    if info.read_only {
        fields.push(("read_only", Value::Bool(true)));
    }
    if info.is_metadata {
        fields.push(("type", Value::string(METADATA)));
    }
    fields
}

/// Makes a record for an image; `fields` are those that the storage does not know, and go before its own.
///
/// # Errors
/// The database's.
pub(super) fn create(
    change: &mut Change<'_>,
    sr: &str,
    info: &VdiInfo,
    fields: Vec<(&'static str, Value)>,
) -> Result<String, ApiError> {
    let reference = reference_of(info.uuid);
    if let Ok(old) = change.get("VDI", &reference)
        && old.text("SR") == sr
    {
        // The driver has made it, which keeps the records of its VDIs itself.
        set_fields(change, &reference, fields)?;
        let old = change.get("VDI", &reference)?;
        update(change, &old, info)?;
        return Ok(reference);
    }
    let mut all = fields;
    let mut add = |name: &'static str, value: Value| {
        if !all.iter().any(|(known, _)| *known == name) {
            all.push((name, value));
        }
    };
    add("uuid", Value::string(info.uuid.to_string()));
    add("SR", Value::string(sr));
    let name =
        info.name_label.clone().unwrap_or_else(|| (if info.managed { "" } else { BASE_COPY }).to_owned());
    add("name_label", Value::string(name));
    let told = info.told.as_deref().cloned().unwrap_or_default();
    let kind = TYPES.iter().find(|kind| **kind == told.kind).copied().unwrap_or("user");
    let kind = if of_database::is_one(info.uuid) && info.managed { of_database::TYPE } else { kind };
    add("type", Value::string(if info.is_metadata { METADATA } else { kind }));
    if !told.name_description.is_empty() {
        add("name_description", Value::string(&told.name_description));
    }
    if let Some(of) = told.snapshot_of {
        add("is_a_snapshot", Value::Bool(true));
        let of = reference_of(of);
        let is_here = change.get("VDI", &of).is_ok_and(|of| of.text("SR") == sr);
        add("snapshot_of", Value::string(if is_here { of } else { NULL_REF.to_owned() }));
        add("snapshot_time", Value::DateTime(datetime::parse(&told.snapshot_time).unwrap_or(0)));
    }
    add("sharable", Value::Bool(false));
    add("read_only", Value::Bool(info.read_only));
    for (field, value) in said(info, info.sm_config.clone()) {
        add(field, value);
    }
    add("managed", Value::Bool(info.managed));
    change.create("VDI", &all)
}

/// Makes a record say what the storage says, and nothing else; answers by how much its virtual size changed the sum
/// of the SR.
///
/// # Errors
/// The database's.
pub(super) fn update(change: &mut Change<'_>, old: &Object, info: &VdiInfo) -> Result<i64, ApiError> {
    let mut sm_config = old.map("sm_config");
    // A host without a record shares the storage and nothing else: the storage says what it has open.
    let is_foreign =
        |key: &str| key.strip_prefix("host_").is_some_and(|host| change.get("host", host).is_err());
    sm_config.retain(|key, _| !is_storage_key(key) && !is_foreign(key));
    sm_config.extend(info.sm_config.clone());
    let before = counted(old);
    for (field, value) in said(info, sm_config) {
        if old.get(field) != &value {
            change.set("VDI", &old.reference, field, value)?;
        }
    }
    if !info.managed && !info.is_lun() && old.bool("managed") {
        change.set("VDI", &old.reference, "name_label", BASE_COPY)?;
    }
    let after = counted(&*change.get("VDI", &old.reference)?);
    Ok(after.saturating_sub(before))
}

/// Sets what differs.
///
/// # Errors
/// The database's.
pub(super) fn set_fields(
    change: &mut Change<'_>,
    vdi: &str,
    fields: Vec<(&'static str, Value)>,
) -> Result<(), ApiError> {
    let known = change.get("VDI", vdi)?;
    for (field, value) in fields {
        if known.get(field) != &value {
            change.set("VDI", vdi, field, value)?;
        }
    }
    Ok(())
}

/// Makes the record of a LUN that a client gets: `fields` are the client's. A scan may have made one before.
///
/// # Errors
/// The database's.
pub(super) fn give(
    change: &mut Change<'_>,
    sr: &str,
    info: &VdiInfo,
    fields: Vec<(&'static str, Value)>,
) -> Result<String, ApiError> {
    let Ok(old) = change.get("VDI", &reference_of(info.uuid)) else {
        return create(change, sr, info, fields);
    };
    for (field, value) in fields.into_iter().filter(|(field, _)| *field != "sm_config") {
        change.set("VDI", &old.reference, field, value)?;
    }
    update(change, &*change.get("VDI", &old.reference)?, info)?;
    Ok(old.reference.clone())
}

/// Makes a record for an image or brings it up to date; see [`update`] for the answer.
///
/// # Errors
/// The database's.
pub(super) fn put(change: &mut Change<'_>, sr: &str, info: &VdiInfo) -> Result<i64, ApiError> {
    match change.get("VDI", &reference_of(info.uuid)) {
        Ok(old) => update(change, &old, info),
        Err(_) => {
            create(change, sr, info, Vec::new())?;
            Ok(if info.managed { i64::try_from(info.virtual_size).unwrap_or(i64::MAX) } else { 0 })
        }
    }
}

/// Removes the record of a VDI. Disks of VMs that were made of it and are not plugged go as well, CD drives
/// become empty.
///
/// # Errors
/// The database's.
pub(super) fn remove(change: &mut Change<'_>, vdi: &str) -> Result<(), ApiError> {
    for vbd in change.find("VBD", "VDI", vdi) {
        if vbd.text("type") == "CD" {
            change.set("VBD", &vbd.reference, "VDI", NULL_REF)?;
            change.set("VBD", &vbd.reference, "empty", true)?;
        } else {
            let metrics = vbd.text("metrics").to_owned();
            change.destroy("VBD", &vbd.reference)?;
            if change.get("VBD_metrics", &metrics).is_ok() {
                change.destroy("VBD_metrics", &metrics)?;
            }
        }
    }
    change.destroy("VDI", vdi)
}

/// A message to the administrator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alert<'a> {
    pub(super) name: &'a str,
    pub(super) priority: i64,
    pub(super) class: &'a str,
    /// UUID of the object.
    pub(super) about: &'a str,
}

impl Alert<'_> {
    /// Posts it; that it could not be is logged only.
    pub(super) fn post(self, db: &Db, body: &str) {
        tracing::warn!(about = self.about, "{}: {body}", self.name);
        let told = crate::tell(db, self.name, self.priority, self.class, self.about, body);
        if let Err(error) = told {
            tracing::warn!(%error, "the message {} could not be kept", self.name);
        }
    }
}
