//! `vm-density`: VMs without the emulated devices that cost the host processor time while their guests do nothing.

use serde_json::{Value, json};

use super::select::machines;
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::{Session, print};

pub(super) static COMMANDS: &[Command] = &[command(
    "vm-density",
    &["level"],
    &["vm", "multiple"],
    "Chooses the emulated devices of all VMs, or of those that are chosen, from their next start on. 'level' is low (no \
     USB, no tablet, no parallel port), lowest (no serial console either) or default (as the driver has it)",
    density,
)];

/// Keys of `platform`, and what they are at the levels low and lowest.
const KEYS: [(&str, &str, &str); 4] = [
    ("usb", "false", "false"),
    ("usb_tablet", "false", "false"),
    ("parallel", "none", "none"),
    ("hvm_serial", "", "none"),
];

/// The platform with what a level says; nothing else of it changes.
fn platform_at(level: &str, platform: &Value) -> Result<Value> {
    let mut map = platform.as_object().cloned().unwrap_or_default();
    for (key, low, lowest) in KEYS {
        let value = match level {
            "low" => low,
            "lowest" => lowest,
            "default" => "",
            other => {
                return Err(Failure::other(format!("level: '{other}' is none of low, lowest, default")));
            }
        };
        map.remove(key);
        if !value.is_empty() {
            map.insert(key.to_owned(), value.into());
        }
    }
    Ok(map.into())
}

fn density(session: &Session) -> Result<()> {
    let level = session.need("level")?;
    platform_at(level, &json!({}))?;
    let is_chosen = session.arguments.filters().any(|(name, _)| !matches!(name, "level" | "multiple"));
    let chosen = match is_chosen {
        true => machines(session, &["level"])?,
        false => {
            let records = session.call("VM.get_all_records", &[])?;
            let is = |record: &Value, field: &str| record.get(field) == Some(&Value::Bool(true));
            let mut found: Vec<String> = Vec::new();
            for (reference, record) in records.as_object().into_iter().flatten() {
                if !["is_control_domain", "is_a_template", "is_a_snapshot"]
                    .iter()
                    .any(|field| is(record, field))
                {
                    found.push(reference.clone());
                }
            }
            found
        }
    };
    let mut waiting = 0;
    for vm in &chosen {
        let platform = session.call("VM.get_platform", &[vm.as_str().into()])?;
        let wanted = platform_at(level, &platform)?;
        if wanted != platform {
            session.call("VM.set_platform", &[vm.as_str().into(), wanted])?;
        }
        waiting += usize::from(session.text("VM.get_power_state", &[vm.as_str().into()])? != "Halted");
    }
    print(&format!("{} VMs are set; {waiting} of them take it at their next start\n", chosen.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_changes_its_keys_alone() {
        let before = json!({ "accel": "tcg", "usb": "true", "hvm_serial": "pty", "vnc": "true" });
        let low = platform_at("low", &before).unwrap();
        let expected = json!({ "accel": "tcg", "usb": "false", "usb_tablet": "false", "parallel": "none", "vnc": "true" });
        assert_eq!(low, expected);
        assert_eq!(platform_at("lowest", &low).unwrap()["hvm_serial"], "none");
        assert_eq!(platform_at("default", &low).unwrap(), json!({ "accel": "tcg", "vnc": "true" }));
        assert!(platform_at("lower", &before).is_err());
    }
}
