//! The first line: of a record only what is listed here is taken.
//!
//! Numbers, truths, times, words of enumerations and references are taken by their type in the model. Texts, and
//! values of maps, are taken if a row below names them. A field that the model does not know is not taken.

use std::collections::BTreeSet;

use serde_json::{Map, Value};
use tapio_model::class;
use tapio_model::{Class, Type};

use super::redact::{LEFT_OUT, Redactor, names_a_secret};

/// Classes whose records are collected. None holds accounts, sessions, secrets or certificates.
pub(super) const CLASSES: [&str; 17] = [
    "pool",
    "host",
    "host_metrics",
    "SM",
    "SR",
    "PBD",
    "VDI",
    "VBD",
    "VBD_metrics",
    "VM",
    "VM_metrics",
    "VM_guest_metrics",
    "VIF",
    "network",
    "console",
    "task",
    "message",
];

/// References to these are bearer tokens.
const BEARERS: [&str; 1] = ["session"];

/// Texts and sets of texts that are taken: of all classes, then by class.
const TEXTS: &[(&str, &[&str])] = &[
    ("", &["uuid", "name_label"]),
    ("pool", &["ha_cluster_stack"]),
    (
        "host",
        &[
            "API_version_vendor",
            "address",
            "capabilities",
            "edition",
            "external_auth_type",
            "hostname",
            "iscsi_iqn",
            "sched_policy",
            "supported_bootloaders",
        ],
    ),
    ("SM", &["capabilities", "driver_filename", "required_api_version", "type", "vendor", "version"]),
    ("SR", &["content_type", "type"]),
    ("VDI", &["location"]),
    ("VBD", &["device", "qos_algorithm_type", "qos_supported_algorithms", "status_detail", "userdevice"]),
    (
        "VM",
        &[
            "HVM_boot_policy",
            "PV_bootloader",
            "PV_kernel",
            "PV_ramdisk",
            "domarch",
            "generation_id",
            "ha_restart_priority",
            "reference_label",
            "transportable_snapshot_id",
        ],
    ),
    ("VM_metrics", &["state"]),
    ("VIF", &["MAC", "device", "status_detail"]),
    ("network", &["bridge"]),
    ("task", &["error_info", "type"]),
    ("message", &["body", "name", "obj_uuid"]),
];

/// Keys of maps whose values are taken: of all classes, then by class.
const KEYS: &[(&str, &str, &[&str])] = &[
    ("host", "software_version", &["*"]),
    ("host", "cpu_info", &["*"]),
    ("host", "cpu_configuration", &["*"]),
    ("host", "chipset_info", &["*"]),
    ("host", "API_version_vendor_implementation", &["*"]),
    ("host", "bios_strings", &["bios-vendor", "bios-version", "system-manufacturer", "system-product-name"]),
    ("host", "other_config", &["iscsi_iqn", "multipathing"]),
    ("pool", "cpu_info", &["*"]),
    ("pool", "restrictions", &["*"]),
    ("SM", "configuration", &["*"]),
    ("SM", "features", &["*"]),
    (
        "SR",
        "other_config",
        &[
            "auto-scan",
            "coalesce",
            "gc",
            "gc-quiet",
            "gc-rate",
            "indestructible",
            "leaf-coalesce",
            "mem-pool-pages",
            "mem-pool-size-pages",
            "mem-pool-size-rings",
            "merge-size",
            "polling-duration",
            "polling-idle-threshold",
            "split-size",
        ],
    ),
    ("SR", "sm_config", &["allocation", "multipathable", "nfsversion", "preferred-image-formats", "type"]),
    (
        "PBD",
        "device_config",
        &[
            "LUNid",
            "SCSIid",
            "device",
            "location",
            "multihomelist",
            "nfsversion",
            "path",
            "port",
            "server",
            "serverpath",
            "share",
            "subdir",
            "target",
            "targetIQN",
            "type",
        ],
    ),
    (
        "VDI",
        "sm_config",
        &[
            "activating",
            "base_mirror",
            "damaged",
            "image-format",
            "leaf-coalesce",
            "paused",
            "relinking",
            "type",
            "vdi_type",
            "vhd-blocks",
            "vhd-parent",
        ],
    ),
    ("VDI", "other_config", &["content_id", "leaf-coalesce"]),
    (
        "VBD",
        "other_config",
        &["backend-kind", "merge-size", "owner", "polling-duration", "polling-idle-threshold", "split-size"],
    ),
    ("VBD", "qos_algorithm_params", &["class", "sched"]),
    ("VBD", "runtime_properties", &["*"]),
    ("VIF", "runtime_properties", &["*"]),
    ("VM", "HVM_boot_params", &["firmware", "order"]),
    ("VM", "VCPUs_params", &["cap", "mask", "weight"]),
    ("VM", "other_config", &["base_template_name", "default_template", "driver", "install-methods"]),
    (
        "VM",
        "platform",
        &[
            "acpi",
            "apic",
            "cores-per-socket",
            "device-model",
            "driver",
            "hvm_serial",
            "nx",
            "pae",
            "parallel",
            "secureboot",
            "timeoffset",
            "usb",
            "usb_tablet",
            "viridian",
            "vnc",
        ],
    ),
    ("VM_guest_metrics", "PV_drivers_version", &["build", "major", "micro", "minor"]),
    ("VM_guest_metrics", "os_version", &["distro", "major", "minor", "name", "uname"]),
];

/// What was left out of records, and the words that are the report's own.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) left_out: BTreeSet<String>,
    pub(super) own: BTreeSet<String>,
    pub(super) uuids: BTreeSet<String>,
}

fn texts(class: &str, field: &str) -> bool {
    TEXTS.iter().any(|(of, fields)| (of.is_empty() || *of == class) && fields.contains(&field))
}

fn keys(class: &str, field: &str) -> &'static [&'static str] {
    KEYS.iter().find(|(of, map, _)| *of == class && *map == field).map_or(&[], |(_, _, keys)| keys)
}

/// Whether a text has the form of a reference; the UUID of it.
fn referred(text: &str) -> Option<&str> {
    let uuid = text.strip_prefix("OpaqueRef:")?;
    (uuid == "NULL" || uuid::Uuid::try_parse(uuid).is_ok()).then_some(uuid)
}

/// Whether a key is a name, as programs give them: it is taken then, even if its value is not.
fn is_name(key: &str) -> bool {
    key.len() <= 64 && key.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b'='))
}

impl Seen {
    fn omit(&mut self, value: &Value) -> Value {
        match value {
            Value::String(text) if !text.is_empty() => {
                self.left_out.insert(text.clone());
            }
            Value::Array(all) => {
                all.iter().for_each(|value| {
                    self.omit(value);
                });
            }
            Value::Object(all) => {
                all.values().for_each(|value| {
                    self.omit(value);
                });
            }
            // Nothing to hide: an empty text, a number of a field that newer daemons have.
            _ => {}
        }
        match value {
            Value::String(text) if text.is_empty() => Value::from(""),
            Value::Array(all) if all.is_empty() => value.clone(),
            Value::Object(all) if all.is_empty() => value.clone(),
            _ => LEFT_OUT.into(),
        }
    }

    fn take(&mut self, class: &str, field: &str, ty: Type, value: &Value) -> Value {
        match (ty, value) {
            (Type::Bool, Value::Bool(_)) => value.clone(),
            (Type::Int | Type::Float, Value::Number(_)) => value.clone(),
            // Numbers are texts in some answers, times in all.
            (Type::Int | Type::Float | Type::DateTime, Value::String(text)) if is_number_or_time(text) => {
                value.clone()
            }
            (Type::Enum(words), Value::String(text)) if words.words.contains(&text.as_str()) => value.clone(),
            (Type::Ref(to), Value::String(text)) if !BEARERS.contains(&to) && referred(text).is_some() => {
                value.clone()
            }
            (Type::String, Value::String(text)) if texts(class, field) => {
                self.own.insert(text.clone());
                value.clone()
            }
            (Type::Set(of), Value::Array(all)) => {
                Value::Array(all.iter().map(|value| self.take(class, field, *of, value)).collect())
            }
            (Type::Map(_, of), Value::Object(all)) => self.map(class, field, *of, all),
            _ => self.omit(value),
        }
    }

    fn map(&mut self, class: &str, field: &str, of: Type, all: &Map<String, Value>) -> Value {
        let listed = keys(class, field);
        let mut taken = Map::new();
        for (key, value) in all {
            // Values that the model types have no text: only their keys could.
            let is_typed = !matches!(of, Type::String) && (referred(key).is_some() || is_number_or_time(key));
            let is_listed = listed.contains(&key.as_str()) || (listed == ["*"] && !names_a_secret(key));
            let value = match of {
                Type::String if is_listed => {
                    if let Some(text) = value.as_str() {
                        self.own.insert(text.to_owned());
                    }
                    value.clone()
                }
                _ if is_listed || is_typed => self.take(class, field, of, value),
                _ => self.omit(value),
            };
            if is_name(key) {
                self.own.insert(key.clone());
                taken.insert(key.clone(), value);
            } else {
                self.left_out.insert(key.clone());
                taken.insert(format!("{LEFT_OUT} {}", taken.len()), LEFT_OUT.into());
            }
        }
        Value::Object(taken)
    }

    fn record(&mut self, class: &Class, record: &Map<String, Value>) -> Value {
        let mut taken = Map::new();
        for (name, value) in record {
            let value = match class.field(name) {
                Some(field) => self.take(class.name, name, field.ty, value),
                None => self.omit(value),
            };
            if is_name(name) {
                taken.insert(name.clone(), value);
            }
        }
        if let Some(uuid) = taken.get("uuid").and_then(Value::as_str) {
            self.uuids.insert(uuid.to_ascii_lowercase());
        }
        Value::Object(taken)
    }

    /// What is taken of the records of a class.
    pub(super) fn records(&mut self, name: &str, records: &Value) -> Value {
        let (Some(class), Some(records)) = (class(name), records.as_object()) else {
            return self.omit(records);
        };
        let mut taken = Map::new();
        for (reference, record) in records {
            let (Some(uuid), Some(record)) = (referred(reference), record.as_object()) else { continue };
            self.uuids.insert(uuid.to_ascii_lowercase());
            taken.insert(reference.clone(), self.record(class, record));
        }
        Value::Object(taken)
    }
}

fn is_number_or_time(text: &str) -> bool {
    text.len() <= 32
        && text.bytes().any(|byte| byte.is_ascii_digit())
        && text.bytes().all(|byte| {
            byte.is_ascii_digit() || matches!(byte, b'-' | b'+' | b':' | b'.' | b'T' | b'Z' | b'e')
        })
}

/// Passes each text of a value through the second line.
pub(super) fn redacted(value: &Value, redactor: &mut Redactor) -> Value {
    match value {
        Value::String(text) => redactor.text(text).into(),
        Value::Array(all) => all.iter().map(|value| redacted(value, redactor)).collect(),
        Value::Object(all) => all
            .iter()
            .map(|(key, value)| {
                // Words are what keys are made of, secret ones too; a reference may be a session's.
                let key = if key.starts_with("OpaqueRef:") { redactor.text(key) } else { key.clone() };
                (key, redacted(value, redactor))
            })
            .collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tapio_model::{ClassKind, FieldAccess};

    use super::*;

    const REF: &str = "OpaqueRef:0d8f3a52-6f0c-4f0e-9a53-2f7a1f0a9d11";

    fn taken(class: &str, record: Value) -> (String, Seen) {
        let mut seen = Seen::default();
        let text = seen.records(class, &json!({REF: record})).to_string();
        (text, seen)
    }

    /// A value of the type that a client could have written.
    fn planted(ty: Type) -> Value {
        match ty {
            Type::Set(of) => json!([planted(*of)]),
            Type::Map(_, of) => json!({"planted-key": planted(*of), "type": planted(*of)}),
            _ => "planted".into(),
        }
    }

    #[test]
    fn a_row_names_a_field_that_there_is() {
        for (class, field) in
            TEXTS.iter().flat_map(|(class, fields)| fields.iter().map(move |field| (class, field)))
        {
            let classes: Vec<&str> = if class.is_empty() { CLASSES.to_vec() } else { vec![class] };
            let has =
                |name: &&str| tapio_model::class(name).is_some_and(|class| class.field(field).is_some());
            assert!(classes.iter().any(has), "{class}.{field}");
        }
        for (class, field, _) in KEYS {
            let row = tapio_model::class(class).and_then(|class| class.field(field));
            assert!(row.is_some_and(|row| matches!(row.ty, Type::Map(..))), "{class}.{field}");
        }
        for name in CLASSES {
            assert!(tapio_model::class(name).is_some_and(|class| class.kind == ClassKind::Objects), "{name}");
        }
    }

    /// Whatever a client may write is taken only if a row names it.
    #[test]
    fn nothing_is_taken_that_no_row_names() {
        for name in CLASSES {
            let class = tapio_model::class(name).expect("a class");
            for field in class.fields {
                let (text, seen) =
                    taken(name, json!({field.name: planted(field.ty), "new_field": "planted"}));
                let is_listed = texts(name, field.name);
                let is_text = matches!(field.ty, Type::Map(_, Type::String));
                let is_key = is_text && keys(name, field.name).iter().any(|key| matches!(*key, "*" | "type"));
                let values = text.replace("planted-key", "");
                assert_eq!(values.contains("planted"), is_listed || is_key, "{name}.{}: {text}", field.name);
                assert!(seen.left_out.contains("planted"), "new_field");
                if is_listed || is_key {
                    // What is free text for clients would be a row of no use: these are names alone.
                    let is_free =
                        matches!(field.access, FieldAccess::ReadWrite) && matches!(field.ty, Type::Map(..));
                    assert!(!is_free || !keys(name, field.name).contains(&"*"), "{name}.{}", field.name);
                }
            }
        }
    }

    #[test]
    fn secrets_are_left_out_and_names_are_taken() {
        let (text, seen) = taken(
            "PBD",
            json!({"uuid": "a", "device_config":
            {"target": "10.0.0.1", "chapuser": "planted-a", "chappassword": "planted-b", "planted \" c": "planted-d"}}),
        );
        assert!(text.contains("10.0.0.1") && text.contains("\"chappassword\":\"(left out)\""), "{text}");
        assert!(!text.contains("planted"), "{text}");
        assert!(seen.left_out.contains("planted-b") && seen.left_out.contains("planted \" c"));
        let (text, _) = taken(
            "task",
            json!({"name_label": "kept", "result": "planted", "progress": "0.5",
            "status": "success", "type": "planted-type", "subtask_of": "OpaqueRef:NULL",
                "created": "20261125T09:54:30Z",
            "error_info": ["SR_BACKEND_FAILURE_181"]}),
        );
        assert!(
            text.contains("kept") && text.contains("0.5") && text.contains("20261125T09:54:30Z"),
            "{text}"
        );
        assert!(text.contains("SR_BACKEND_FAILURE_181") && !text.contains("\"planted\""), "{text}");
    }
}
