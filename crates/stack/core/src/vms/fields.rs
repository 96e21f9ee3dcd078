//! What a VM made from another takes over of its record, and what it does not.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Source, Value};

use super::lookup;
use crate::db::{Change, Object};

/// Fields that a new VM does not take over: they get their first value, or one of their own.
const OWN: [&str; 37] = [
    "uuid",
    "name_label",
    "allowed_operations",
    "current_operations",
    "blocked_operations",
    "power_state",
    "resident_on",
    "scheduled_to_be_resident_on",
    "domid",
    "domarch",
    "metrics",
    "guest_metrics",
    "is_default_template",
    "is_control_domain",
    "is_a_snapshot",
    "snapshot_of",
    "snapshot_time",
    "snapshot_info",
    "snapshot_metadata",
    "transportable_snapshot_id",
    "parent",
    "suspend_VDI",
    "suspend_SR",
    "blobs",
    "ha_always_run",
    "protection_policy",
    "is_snapshot_from_vmpp",
    "snapshot_schedule",
    "is_vmss_snapshot",
    "appliance",
    "groups",
    "start_delay",
    "shutdown_delay",
    "order",
    "version",
    "requires_reboot",
    "generation_id",
];

/// Sets of what to do after updates: of no new VM.
const GUIDANCES: [&str; 3] = ["pending_guidances", "pending_guidances_recommended", "pending_guidances_full"];

/// Keys of `other_config` that a template came with, and that make clients take it for one that must stay.
pub const OF_TEMPLATES: [&str; 2] = ["default_template", "xensource_internal"];

/// The key from which products make hardware addresses: a VM of its own has one of its own.
pub const MAC_SEED: &str = "mac_seed";

/// The key that says by which template a VM was made first.
const BASE_TEMPLATE: &str = "base_template_name";

/// Fields of a VM made from `source`.
pub fn of_new(source: &Object, name: &str, is_snapshot: bool) -> Vec<(&'static str, Value)> {
    let is_taken = |name: &str| !OWN.contains(&name) && !GUIDANCES.contains(&name) && name != "other_config";
    let kept = source.class.fields.iter().filter(|field| matches!(field.source, Source::Kept));
    let mut fields: Vec<(&str, Value)> = kept
        .filter(|field| is_taken(field.name))
        .map(|field| (field.name, source.get(field.name).clone()))
        .collect();
    let label = if name.is_empty() { source.text("name_label") } else { name };
    fields.extend([
        ("name_label", Value::string(label)),
        ("other_config", Value::string_map(other_config(source, is_snapshot))),
        ("generation_id", Value::string(generation_id(source.text("generation_id")))),
    ]);
    if is_snapshot {
        fields.retain(|(name, _)| *name != "is_a_template");
        let info = [
            ("power-state-at-snapshot", source.text("power_state")),
            ("disk-snapshot-type", "crash_consistent"),
        ];
        fields.extend([
            ("is_a_template", Value::Bool(true)),
            ("is_a_snapshot", Value::Bool(true)),
            ("snapshot_of", Value::string(&source.reference)),
            ("snapshot_time", Value::DateTime(lookup::now())),
            ("snapshot_info", Value::string_map(info)),
            ("parent", source.get("parent").clone()),
        ]);
    }
    fields
}

/// Fields that stay as they are when a VM goes back to a snapshot, beside those of [`OWN`]: what clients keep about the
/// VM, and where it may run.
const STAYS: [&str; 4] = ["name_description", "is_a_template", "tags", "affinity"];

/// Fields of a VM that goes back to `snapshot`.
pub fn of_reverted(snapshot: &Object) -> Vec<(&'static str, Value)> {
    let is_taken = |name: &str| !OWN.contains(&name) && !GUIDANCES.contains(&name) && !STAYS.contains(&name);
    let kept = snapshot.class.fields.iter().filter(|field| matches!(field.source, Source::Kept));
    let mut fields: Vec<(&str, Value)> = kept
        .filter(|field| is_taken(field.name))
        .map(|field| (field.name, snapshot.get(field.name).clone()))
        .collect();
    // Its guest is to see that it is an earlier one.
    fields.push(("generation_id", Value::string(generation_id(snapshot.text("generation_id")))));
    fields
}

fn other_config(source: &Object, is_snapshot: bool) -> BTreeMap<String, String> {
    let mut config = source.map("other_config");
    config.retain(|key, _| !OF_TEMPLATES.contains(&key.as_str()));
    if !is_snapshot && let Some(seed) = config.get_mut(MAC_SEED) {
        *seed = uuid::Uuid::new_v4().to_string();
    }
    if source.bool("is_a_template") {
        config.entry(BASE_TEMPLATE.to_owned()).or_insert_with(|| source.text("name_label").to_owned());
    }
    config
}

/// Two numbers by which a guest sees that it is another VM, or an earlier one; none where it had none.
pub fn generation_id(of_source: &str) -> String {
    if of_source.is_empty() {
        return String::new();
    }
    let (first, second) = uuid::Uuid::new_v4().as_u64_pair();
    format!("{}:{}", first >> 1, second >> 1)
}

/// Takes over what was last known of the guest. A clone never ran: that its guest told it lately is not taken over.
///
/// # Errors
/// The store's.
pub fn copy_guest_metrics(change: &mut Change<'_>, source: &Object, made: &str) -> Result<(), ApiError> {
    let Ok(known) = change.get("VM_guest_metrics", source.text("guest_metrics")) else { return Ok(()) };
    let new = change.get("VM", made)?.text("guest_metrics").to_owned();
    let is_copied = |name: &str| !["uuid", "live"].contains(&name);
    for field in known.class.fields.iter().filter(|field| is_copied(field.name)) {
        change.set("VM_guest_metrics", &new, field.name, known.get(field.name).clone())?;
    }
    Ok(())
}

/// Removes the mark of a template that came with the toolstack from what an earlier version made of one.
///
/// # Errors
/// The store's.
pub fn recover_in(change: &mut Change<'_>) -> Result<(), ApiError> {
    for vm in change.all("VM") {
        let mut config = vm.map("other_config");
        let is_made = !vm.bool("is_a_template") || vm.bool("is_a_snapshot");
        if is_made && config.remove(OF_TEMPLATES[0]).is_some() {
            change.set("VM", &vm.reference, "other_config", Value::string_map(config))?;
        }
    }
    Ok(())
}
