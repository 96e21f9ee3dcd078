//! What messages of VBDs do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};

use super::allowed::{bad_power_state, is_live, refresh};
use super::plug::{Disk, Timeout, plug_empty, record};
use super::running::Running;
use super::{Call, Handlers, devices, lookup, tuning};
use crate::args::Args;
use crate::db::{Change, Object};
use crate::operations::Claim;

/// How long `VBD.unplug` waits for guest and storage where `other_config:unplug-timeout` says nothing, in seconds.
const UNPLUG_SECONDS: u64 = 60;
/// The longest that a caller may choose.
const UNPLUG_SECONDS_MAX: u64 = 86_400;
/// And `VBD.unplug_force`.
const FORCE_SECONDS: u64 = 30;

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VBD.create", create);
    handlers.on("VBD.destroy", destroy);
    handlers.on("VBD.plug", plug);
    handlers.on("VBD.unplug", unplug);
    handlers.on("VBD.unplug_force", unplug_force);
    handlers.on("VBD.assert_attachable", assert_attachable);
    handlers.on("VBD.set_mode", set_mode);
    handlers.on("VBD.set_userdevice", set_userdevice);
    handlers.on("VBD.set_unpluggable", set_unpluggable);
    handlers.on("VBD.set_type", set_type);
    handlers.on("VBD.set_qos_algorithm_type", set_qos_type);
    handlers.on("VBD.set_qos_algorithm_params", set_qos_params);
    handlers.on("VBD.add_to_qos_algorithm_params", add_to_qos_params);
    handlers.on("VBD.remove_from_qos_algorithm_params", remove_from_qos_params);
    handlers.on("VBD.set_other_config", set_other_config);
    handlers.on("VBD.add_to_other_config", add_to_other_config);
    handlers.on("VBD.remove_from_other_config", remove_from_other_config);
}

/// Fields of a new VBD that the caller may give.
const GIVEN: [&str; 11] = [
    "VM",
    "VDI",
    "bootable",
    "mode",
    "type",
    "unpluggable",
    "empty",
    "other_config",
    "qos_algorithm_type",
    "qos_algorithm_params",
    "userdevice",
];

fn create(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let record = args.value(0)?.as_map().cloned().unwrap_or_default();
    let made = call.part.db.change(|change| {
        let fields: Vec<(&str, Value)> =
            GIVEN.iter().filter_map(|name| Some((*name, record.get(*name)?.clone()))).collect();
        create_in(change, fields)
    });
    made.map(Value::String)
}

/// Makes a VBD; every rule about its fields is here.
///
/// # Errors
/// `HANDLE_INVALID`, `VBD_CDS_MUST_BE_READONLY`, `VBD_NOT_REMOVABLE_MEDIA`, `VDI_READONLY`, `VDI_NOT_MANAGED`,
/// `INVALID_DEVICE`, `DEVICE_ALREADY_EXISTS`, `INVALID_VALUE`.
pub fn create_in(change: &mut Change<'_>, mut fields: Vec<(&str, Value)>) -> Result<String, ApiError> {
    let text = |name: &str| {
        let found = fields.iter().find(|(known, _)| *known == name);
        found.and_then(|(_, value)| value.as_str()).unwrap_or_default().to_owned()
    };
    let is_set =
        |name: &str| fields.iter().any(|(known, value)| *known == name && value.as_bool() == Some(true));
    let (vm, vdi, kind, mode) = (text("VM"), text("VDI"), text("type"), text("mode"));
    let is_cd = kind == "CD";
    let vm = change.get("VM", &vm)?;
    let has_no_vdi = vdi.is_empty() || vdi == tapio_model::NULL_REF;
    if is_cd && mode != "RO" {
        return Err(ApiError::bare("VBD_CDS_MUST_BE_READONLY"));
    }
    if is_set("empty") || has_no_vdi {
        if !is_cd {
            return Err(if has_no_vdi && !is_set("empty") {
                ApiError::new("HANDLE_INVALID", ["VDI", &vdi])
            } else {
                ApiError::new("VBD_NOT_REMOVABLE_MEDIA", ["a new VBD that is no drive cannot be empty"])
            });
        }
    } else {
        check_vdi(change, &vdi, mode == "RO")?;
    }
    let params = fields.iter().find(|(name, _)| *name == "qos_algorithm_params");
    let params = params.map(|(_, value)| value.to_string_map()).unwrap_or_default();
    tuning::qos(&text("qos_algorithm_type"), &params)?;
    let others = devices::of_vm(change, &vm.reference);
    let asked = text("userdevice");
    let place = if asked.is_empty() || asked == "autodetect" {
        devices::choose(&others, is_cd)?
    } else {
        let place = devices::place(&asked)?;
        if !devices::free(&others).contains(&place) {
            return Err(ApiError::new("DEVICE_ALREADY_EXISTS", [asked]));
        }
        place
    };
    let metrics = change.create("VBD_metrics", &[])?;
    fields.retain(|(name, _)| !["userdevice", "VDI", "empty"].contains(name));
    let is_empty = is_cd && (is_set_in(&fields, "empty") || has_no_vdi);
    fields.extend([
        ("userdevice", Value::string(place.to_string())),
        ("VDI", Value::string(if has_no_vdi { tapio_model::NULL_REF } else { vdi.as_str() })),
        ("empty", Value::Bool(is_empty)),
        ("metrics", Value::string(metrics)),
        ("qos_supported_algorithms", Value::strings(tuning::ALGORITHMS)),
    ]);
    let reference = change.create("VBD", &fields)?;
    refresh(change, "VBD", &reference)?;
    Ok(reference)
}

fn is_set_in(fields: &[(&str, Value)], name: &str) -> bool {
    fields.iter().any(|(known, value)| *known == name && value.as_bool() == Some(true))
}

/// The VDI of a VBD, which must be one that can be opened so.
///
/// # Errors
/// `HANDLE_INVALID`, `VDI_NOT_MANAGED`, `VDI_READONLY`, `VDI_MISSING`.
pub(super) fn check_vdi(change: &Change<'_>, vdi: &str, read_only: bool) -> Result<Arc<Object>, ApiError> {
    let vdi = change.get("VDI", vdi)?;
    if !vdi.bool("managed") {
        return Err(ApiError::new("VDI_NOT_MANAGED", [&vdi.reference]));
    }
    if vdi.bool("read_only") && !read_only {
        return Err(ApiError::new("VDI_READONLY", [&vdi.reference]));
    }
    if vdi.bool("missing") {
        return Err(ApiError::new("VDI_MISSING", [vdi.text("SR"), &vdi.reference]));
    }
    Ok(vdi)
}

fn destroy(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    call.part.db.change(|change| {
        let vbd = change.get("VBD", reference)?;
        call.part.operations.check_free("VBD", reference)?;
        if vbd.bool("currently_attached") {
            let why = format!("VBD {} is plugged; unplug it first", vbd.text("uuid"));
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        remove_in(change, &vbd)
    })?;
    Ok(Value::Void)
}

/// Removes a VBD and its measurements.
///
/// # Errors
/// The store's.
pub fn remove_in(change: &mut Change<'_>, vbd: &Object) -> Result<(), ApiError> {
    if !vbd.is_null("metrics") && change.get("VBD_metrics", vbd.text("metrics")).is_ok() {
        change.destroy("VBD_metrics", vbd.text("metrics"))?;
    }
    change.destroy("VBD", &vbd.reference)
}

/// The VBD and its VM, which must be able to take or give disks.
pub(super) fn live_vm(change: &Change<'_>, vbd: &Object) -> Result<Arc<Object>, ApiError> {
    let vm = change.get("VM", vbd.text("VM"))?;
    if vm.bool("is_a_template") {
        return Err(ApiError::new("VM_IS_TEMPLATE", [&vm.reference]));
    }
    if is_live(&vm) { Ok(vm) } else { Err(bad_power_state(&vm, "Running")) }
}

fn plug(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let (running, (vbd, vdi)) = Running::begin(call, "VBD", reference, "plug", |change, vbd| {
        live_vm(change, vbd)?;
        if vbd.bool("currently_attached") {
            return Err(ApiError::new("DEVICE_ALREADY_ATTACHED", [&vbd.reference]));
        }
        let vdi = match vbd.bool("empty") {
            true => None,
            false => Some(check_vdi(change, vbd.text("VDI"), vbd.text("mode") == "RO")?),
        };
        Ok((change.get("VBD", &vbd.reference)?, vdi))
    })?;
    let Some(vdi) = vdi else {
        // An empty drive has no disk, and is there all the same.
        plug_empty(call, &vbd)?;
        return Ok(Value::Void);
    };
    put_in(call, &vbd, vdi, running.claim())?;
    Ok(Value::Void)
}

/// Plugs the disk of a VBD.
///
/// # Errors
/// Those of a plug; nothing of it is left.
pub(super) fn put_in(
    call: &Call,
    vbd: &Arc<Object>,
    vdi: Arc<Object>,
    claim: Arc<Claim>,
) -> Result<(), ApiError> {
    lookup::apply_limits(call);
    let disk = Disk::claimed(call, vbd, vdi, claim)?;
    call.part.plans.run("VBD.plug", disk.plug(), &call.progress)
}

fn unplug(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let seconds = args.int(1)?;
    let negative =
        |_| ApiError::new("VALUE_NOT_SUPPORTED", ["timeout", &seconds.to_string(), "it is negative"]);
    let seconds = u64::try_from(seconds).map_err(negative)?;
    let chosen = (seconds > 0).then(|| Duration::from_secs(seconds.min(UNPLUG_SECONDS_MAX)));
    take_out(call, args.text(0)?, "unplug", false, chosen)
}

fn unplug_force(call: &Call, args: &Args) -> Result<Value, ApiError> {
    take_out(call, args.text(0)?, "unplug_force", true, None)
}

fn take_out(
    call: &Call,
    reference: &str,
    operation: &'static str,
    force: bool,
    chosen: Option<Duration>,
) -> Result<Value, ApiError> {
    let check = |change: &mut Change<'_>, vbd: &Object, is_forced: bool| {
        // A plug that hung has not got so far.
        if !vbd.bool("currently_attached") && !is_forced {
            return Err(ApiError::new("DEVICE_ALREADY_DETACHED", [&vbd.reference]));
        }
        let vm = live_vm(change, vbd)?;
        if !vbd.bool("unpluggable") {
            return Err(ApiError::new("VBD_NOT_UNPLUGGABLE", [&vbd.reference]));
        }
        Ok((vm, change.get("VBD", &vbd.reference)?))
    };
    let (running, (vm, vbd)) = if force {
        Running::begin_by_force(call, "VBD", reference, operation, check)?
    } else {
        Running::begin(call, "VBD", reference, operation, |change, vbd| check(change, vbd, false))?
    };
    if vbd.bool("empty") {
        record(call, reference, None, None)?;
        return Ok(Value::Void);
    }
    let default = if force { FORCE_SECONDS } else { UNPLUG_SECONDS };
    let timeout = chosen.unwrap_or_else(|| lookup::seconds(&[&vbd, &vm], "unplug-timeout", default));
    lookup::apply_limits(call);
    let vdi = call.part.db.get("VDI", vbd.text("VDI"))?;
    let disk = Disk::claimed(call, &vbd, vdi, running.claim())?;
    let plan = disk.unplug(force, Timeout::Until(Instant::now() + timeout));
    call.part.plans.run(if force { "VBD.unplug_force" } else { "VBD.unplug" }, plan, &call.progress)?;
    Ok(Value::Void)
}

fn assert_attachable(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let db = &call.part.db;
    let vbd = db.get("VBD", args.text(0)?)?;
    if vbd.bool("empty") {
        return Ok(Value::Void);
    }
    let reads = vbd.text("mode") == "RO" || vbd.text("type") == "CD";
    db.change(|change| check_vdi(change, vbd.text("VDI"), reads))?;
    let vdi = db.get("VDI", vbd.text("VDI"))?;
    if !vdi.bool("sharable") {
        let in_use = call.part.storage.holders().into_iter().any(|(of, holder, access)| {
            let other_writes = access == tapio_types::Access::ReadWrite;
            of == vdi.reference && holder != vbd.reference && (!reads || other_writes)
        });
        if in_use {
            return Err(ApiError::new("VDI_IN_USE", [vdi.reference.as_str(), "attach"]));
        }
    }
    let pbds = db.find("PBD", "SR", vdi.text("SR"));
    if !pbds.iter().any(|pbd| pbd.bool("currently_attached")) {
        return Err(ApiError::new(
            if pbds.is_empty() { "SR_HAS_NO_PBDS" } else { "SR_NOT_ATTACHED" },
            [vdi.text("SR")],
        ));
    }
    Ok(Value::Void)
}

/// Changes a field of a VBD that is not plugged.
fn set_while_out(
    call: &Call,
    reference: &str,
    field: &str,
    value: Value,
    check: impl FnOnce(&Change<'_>, &Object) -> Result<(), ApiError>,
) -> Result<Value, ApiError> {
    call.part.db.change(|change| {
        let vbd = change.get("VBD", reference)?;
        if vbd.bool("currently_attached") {
            let vm = change.get("VM", vbd.text("VM"))?;
            return Err(bad_power_state(&vm, "Halted"));
        }
        check(change, &vbd)?;
        change.set("VBD", reference, field, value)?;
        refresh(change, "VBD", reference)
    })?;
    Ok(Value::Void)
}

fn set_mode(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, mode) = (args.text(0)?, args.text(1)?);
    set_while_out(call, reference, "mode", Value::string(mode), |change, vbd| {
        if vbd.text("type") == "CD" && mode != "RO" {
            return Err(ApiError::bare("VBD_CDS_MUST_BE_READONLY"));
        }
        if vbd.bool("empty") { Ok(()) } else { check_vdi(change, vbd.text("VDI"), mode == "RO").map(drop) }
    })
}

fn set_type(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, kind) = (args.text(0)?, args.text(1)?);
    set_while_out(call, reference, "type", Value::string(kind), |_, vbd| {
        if kind == "CD" && vbd.text("mode") != "RO" {
            return Err(ApiError::bare("VBD_CDS_MUST_BE_READONLY"));
        }
        if kind != "CD" && vbd.bool("empty") {
            return Err(ApiError::new("VBD_IS_EMPTY", [&vbd.reference]));
        }
        Ok(())
    })
}

fn set_userdevice(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, asked) = (args.text(0)?, args.text(1)?);
    let db = &call.part.db;
    let vbd = db.get("VBD", reference)?;
    let others = || {
        let all = db.find("VBD", "VM", vbd.text("VM"));
        all.into_iter().filter(|other| other.reference != reference).collect::<Vec<_>>()
    };
    let place = match asked {
        "autodetect" => devices::choose(&others(), vbd.text("type") == "CD")?,
        asked => devices::place(asked)?,
    };
    set_while_out(call, reference, "userdevice", Value::string(place.to_string()), |change, vbd| {
        let others = devices::of_vm(change, vbd.text("VM"));
        let others: Vec<_> = others.into_iter().filter(|other| other.reference != reference).collect();
        if devices::free(&others).contains(&place) {
            return Ok(());
        }
        Err(ApiError::new("DEVICE_ALREADY_EXISTS", [asked]))
    })
}

fn set_unpluggable(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.bool(1)?);
    call.part.db.change(|change| {
        change.set("VBD", reference, "unpluggable", value)?;
        refresh(change, "VBD", reference)
    })?;
    Ok(Value::Void)
}

/// Changes fields that say how the disk behaves, and has the disk behave so.
fn set_tuned(
    call: &Call,
    reference: &str,
    change_fields: impl FnOnce(&mut Change<'_>, &Object) -> Result<(), ApiError>,
) -> Result<Value, ApiError> {
    let db = &call.part.db;
    let vbd = db.change(|change| {
        let vbd = change.get("VBD", reference)?;
        change_fields(change, &vbd)?;
        let after = change.get("VBD", reference)?;
        crate::rings::check_rings(&vbd.map("other_config"), &after.map("other_config"))?;
        tuning::qos(after.text("qos_algorithm_type"), &after.map("qos_algorithm_params"))?;
        Ok(after)
    })?;
    if vbd.bool("currently_attached") && !vbd.bool("empty") {
        let vdi = db.get("VDI", vbd.text("VDI"))?;
        let sr = db.get("SR", vdi.text("SR"))?;
        let again = call.part.disks.tune(vbd.uuid()?, &tuning::of(&vbd, &sr, &call.part.config))?;
        if let Some(disk) = again {
            let vm = db.get("VM", vbd.text("VM"))?;
            lookup::driver(&call.part, &vm)?.plug(vm.uuid()?, &disk)?;
        }
    }
    Ok(Value::Void)
}

fn set_qos_type(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.text(1)?);
    set_tuned(call, reference, |change, _| {
        change.set("VBD", reference, "qos_algorithm_type", Value::string(value))
    })
}

fn set_qos_params(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.value(1)?.clone());
    set_tuned(call, reference, |change, _| change.set("VBD", reference, "qos_algorithm_params", value))
}

fn add_to_qos_params(call: &Call, args: &Args) -> Result<Value, ApiError> {
    add_to(call, args, "qos_algorithm_params")
}

fn remove_from_qos_params(call: &Call, args: &Args) -> Result<Value, ApiError> {
    remove_from(call, args, "qos_algorithm_params")
}

fn set_other_config(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.value(1)?.clone());
    set_tuned(call, reference, |change, _| change.set("VBD", reference, "other_config", value))
}

fn add_to_other_config(call: &Call, args: &Args) -> Result<Value, ApiError> {
    add_to(call, args, "other_config")
}

fn remove_from_other_config(call: &Call, args: &Args) -> Result<Value, ApiError> {
    remove_from(call, args, "other_config")
}

fn add_to(call: &Call, args: &Args, field: &str) -> Result<Value, ApiError> {
    let (reference, key, value) = (args.text(0)?, args.text(1)?, args.text(2)?);
    set_tuned(call, reference, |change, vbd| {
        let mut map = vbd.map(field);
        if map.contains_key(key) {
            return Err(ApiError::new("MAP_DUPLICATE_KEY", ["VBD", field, vbd.text("uuid"), key]));
        }
        map.insert(key.to_owned(), value.to_owned());
        change.set("VBD", reference, field, Value::string_map(map))
    })
}

fn remove_from(call: &Call, args: &Args, field: &str) -> Result<Value, ApiError> {
    let (reference, key) = (args.text(0)?, args.text(1)?);
    set_tuned(call, reference, |change, vbd| {
        let mut map = vbd.map(field);
        map.remove(key);
        change.set("VBD", reference, field, Value::string_map(map))
    })
}
