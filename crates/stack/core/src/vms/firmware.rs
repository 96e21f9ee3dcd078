//! What the firmware of a guest says of itself, and the memory that its pages are shadowed in: settings of a halted VM.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};
use tapio_vm::{FIRMWARE_TEXTS, firmware_text_is_plain};

use super::allowed::bad_power_state;
use super::vm::refuse_running;
use super::{Call, Handlers};
use crate::args::Args;

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.set_bios_strings", |call, args| set_texts(call, args.text(0)?, args.map(1)?));
    handlers.on("VM.copy_bios_strings", |call, args| {
        let host = call.part.db.get("host", args.text(1)?)?;
        let texts = host.map("bios_strings");
        if texts.is_empty() {
            let why = format!("the firmware of host {} shows none", host.text("name_label"));
            return Err(ApiError::new(
                "VALUE_NOT_SUPPORTED",
                ["bios_strings".to_owned(), String::new(), why],
            ));
        }
        set_texts(call, args.text(0)?, texts)
    });
    // The drivers here shadow no pages of a guest that runs: KVM and Xen have the processor do it, and User-mode Linux
    // has no page tables of its own. So there is nothing to enlarge, and the number is kept for a hypervisor that needs
    // it.
    handlers.on("VM.set_HVM_shadow_multiplier", |call, args| set_shadow_multiplier(call, args, "Halted"));
    handlers.on("VM.set_shadow_multiplier_live", |call, args| set_shadow_multiplier(call, args, "Running"));
}

/// Sets the texts of a VM that has none: a guest that was installed may be bound to them, and its licences too.
///
/// # Errors
/// `VM_BAD_POWER_STATE`, `VM_BIOS_STRINGS_ALREADY_SET`, `INVALID_VALUE`.
fn set_texts(call: &Call, vm: &str, texts: BTreeMap<String, String>) -> Result<Value, ApiError> {
    for (key, text) in &texts {
        if !FIRMWARE_TEXTS.iter().any(|known| known.key == key) || !firmware_text_is_plain(text) {
            return Err(ApiError::new("INVALID_VALUE", [key, text]));
        }
    }
    call.part.db.change(|change| {
        let record = change.get("VM", vm)?;
        refuse_running(&record)?;
        if !record.map("bios_strings").is_empty() {
            return Err(ApiError::new("VM_BIOS_STRINGS_ALREADY_SET", [vm]));
        }
        change.set("VM", vm, "bios_strings", Value::string_map(texts))
    })?;
    Ok(Value::Void)
}

fn multiplier(args: &Args) -> Result<f64, ApiError> {
    match args.value(1)? {
        Value::Float(number) if number.is_finite() && (1.0..=1000.0).contains(number) => Ok(*number),
        other => {
            let why = "a number from 1 to 1000 is possible";
            Err(ApiError::new("VALUE_NOT_SUPPORTED", ["HVM_shadow_multiplier", &format!("{other:?}"), why]))
        }
    }
}

/// Of a VM in that state.
fn set_shadow_multiplier(call: &Call, args: &Args, state: &str) -> Result<Value, ApiError> {
    let (vm, number) = (args.text(0)?, multiplier(args)?);
    call.part.db.change(|change| {
        let record = change.get("VM", vm)?;
        if record.text("power_state") != state {
            return Err(bad_power_state(&record, state));
        }
        change.set("VM", vm, "HVM_shadow_multiplier", Value::Float(number))
    })?;
    Ok(Value::Void)
}
