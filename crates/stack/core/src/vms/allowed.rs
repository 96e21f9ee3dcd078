//! What may be done with VMs, their VBDs and their VIFs.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};

use crate::db::{Change, Object};

fn is_held(object: &Object) -> bool {
    object.get("current_operations").as_map().is_some_and(|running| !running.is_empty())
}

/// Brings `allowed_operations` of an object, and of those that it decides over, up to date.
///
/// # Errors
/// The store's.
pub fn refresh(change: &mut Change<'_>, class: &str, reference: &str) -> Result<(), ApiError> {
    let vm = if class == "VM" {
        reference.to_owned()
    } else {
        change.get(class, reference)?.text("VM").to_owned()
    };
    // A VBD whose VM is gone goes with it.
    let Ok(vm) = change.get("VM", &vm) else { return Ok(()) };
    let vm_busy = is_held(&vm);
    // A VM that starts has up to 255 disks, each of which comes here.
    let vbds = match class {
        "VBD" if vm_busy => vec![change.get("VBD", reference)?],
        _ => change.find("VBD", "VM", &vm.reference),
    };
    let vifs = match class {
        "VBD" if vm_busy => Vec::new(),
        _ => change.find("VIF", "VM", &vm.reference),
    };
    let is_busy = vm_busy || vbds.iter().chain(&vifs).any(|device| is_held(device));
    let words = if is_busy { Vec::new() } else { of_vm(&vm) };
    change.set("VM", &vm.reference, "allowed_operations", Value::strings(words))?;
    for vbd in vbds.iter().filter(|vbd| class == "VM" || vbd.reference == reference) {
        let words = if vm_busy || is_held(vbd) { Vec::new() } else { of_vbd(vbd, &vm) };
        change.set("VBD", &vbd.reference, "allowed_operations", Value::strings(words))?;
    }
    for vif in vifs.iter().filter(|vif| class == "VM" || vif.reference == reference) {
        let words = if vm_busy || is_held(vif) { Vec::new() } else { of_vif(vif, &vm) };
        change.set("VIF", &vif.reference, "allowed_operations", Value::strings(words))?;
    }
    Ok(())
}

/// What may be done with a VM in the state that it is in.
pub fn of_vm(vm: &Object) -> Vec<&'static str> {
    if vm.bool("is_control_domain") {
        return Vec::new();
    }
    if vm.bool("is_a_snapshot") {
        return vec!["revert", "clone", "copy", "export", "destroy"];
    }
    if vm.bool("is_a_template") {
        let mut words = vec!["clone", "copy", "provision", "export"];
        words.extend((!vm.bool("is_default_template")).then_some("destroy"));
        return words;
    }
    match vm.text("power_state") {
        "Running" => vec![
            "pause",
            "clean_shutdown",
            "hard_shutdown",
            "shutdown",
            "clean_reboot",
            "hard_reboot",
            "suspend",
            "pool_migrate",
            "snapshot",
            "snapshot_with_quiesce",
            "checkpoint",
            "changing_VCPUs_live",
            "changing_dynamic_range",
            "power_state_reset",
        ],
        "Paused" => {
            vec![
                "unpause",
                "hard_shutdown",
                "shutdown",
                "hard_reboot",
                "snapshot",
                "checkpoint",
                "power_state_reset",
            ]
        }
        "Suspended" => {
            vec![
                "resume",
                "resume_on",
                "hard_shutdown",
                "shutdown",
                "snapshot",
                "export",
                "power_state_reset",
            ]
        }
        _ => vec!["start", "start_on", "clone", "copy", "snapshot", "export", "destroy", "power_state_reset"],
    }
}

/// What may be done with a VBD of a VM in that state.
fn of_vbd(vbd: &Object, vm: &Object) -> Vec<&'static str> {
    let mut words = vec!["attach"];
    if vbd.text("type") == "CD" && !vm.bool("is_a_template") {
        words.push(if vbd.bool("empty") { "insert" } else { "eject" });
    }
    if is_live(vm) {
        if vbd.bool("currently_attached") {
            if vbd.bool("unpluggable") {
                words.extend(["unplug", "unplug_force"]);
            }
            if !vbd.bool("empty") {
                words.push(if super::paused::is_shown(vbd) { "unpause" } else { "pause" });
            }
        } else {
            words.push("plug");
        }
    }
    words
}

/// What may be done with a VIF of a VM in that state.
fn of_vif(vif: &Object, vm: &Object) -> Vec<&'static str> {
    let mut words = vec!["attach"];
    if is_live(vm) {
        words.push(if vif.bool("currently_attached") { "unplug" } else { "plug" });
    }
    words
}

/// Whether disks and network interfaces can be plugged into it.
pub fn is_live(vm: &Object) -> bool {
    matches!(vm.text("power_state"), "Running" | "Paused")
}

/// Whether it never runs itself: a snapshot or a template, which may have memory and has no process.
pub fn is_kept(vm: &Object) -> bool {
    vm.bool("is_a_snapshot") || vm.bool("is_a_template")
}

/// `VM_BAD_POWER_STATE`, as clients know it: in small letters.
pub fn bad_power_state(vm: &Object, expected: &str) -> ApiError {
    ApiError::new(
        "VM_BAD_POWER_STATE",
        [vm.reference.clone(), expected.to_lowercase(), vm.text("power_state").to_lowercase()],
    )
}

/// Refuses templates, snapshots and the control domain.
///
/// # Errors
/// `VM_IS_TEMPLATE`, `OPERATION_NOT_ALLOWED`.
pub fn refuse_special(vm: &Object) -> Result<(), ApiError> {
    if vm.bool("is_a_template") || vm.bool("is_a_snapshot") {
        return Err(ApiError::new("VM_IS_TEMPLATE", [&vm.reference]));
    }
    if vm.bool("is_control_domain") {
        let why = format!("{} is the host itself", vm.text("name_label"));
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    Ok(())
}

/// A map with another pair.
pub fn with(map: &BTreeMap<String, String>, key: &str, value: &str) -> Value {
    let mut map = map.clone();
    map.insert(key.to_owned(), value.to_owned());
    Value::string_map(map)
}
