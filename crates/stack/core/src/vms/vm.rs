//! Records of VMs: made, changed, removed.

use tapio_model::{ApiError, Value};
use tapio_vm::BootField;

use super::allowed;
use super::allowed::{bad_power_state, refresh};
use super::balloon::{MEMORY, check_memory};
use super::power::spec;
use super::running::Running;
use super::{Call, Handlers, Vms, devices, lookup, made, power, vbd, vif};
use crate::args::Args;
use crate::basics::this_host;
use crate::db::{Change, Object};
use crate::plan::steps::step;

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.create", create);
    handlers.on("VM.destroy", destroy);
    handlers.on("VM.set_is_a_template", set_is_a_template);
    handlers.on("VM.get_allowed_VBD_devices", allowed_vbd_devices);
    handlers.on("VM.get_allowed_VIF_devices", allowed_vif_devices);
    handlers.on("VM.get_possible_hosts", possible_hosts);
    handlers.on("VM.assert_can_boot_here", assert_can_boot_here);
    handlers.on("VM.assert_operation_valid", assert_operation_valid);
    handlers.on("VM.update_allowed_operations", update_allowed_operations);
    handlers.on("VM.compute_memory_overhead", |_, _| Ok(Value::Int(0)));
    handlers.on("VM.maximise_memory", maximise_memory);
    handlers.on("VM.set_memory", |call, args| {
        let bytes = args.int(1)?;
        set_memory(call, args.text(0)?, move |_| [bytes; 4])
    });
    handlers.on("VM.set_memory_limits", |call, args| {
        let limits = [args.int(1)?, args.int(3)?, args.int(4)?, args.int(2)?];
        set_memory(call, args.text(0)?, move |_| limits)
    });
    handlers.on("VM.set_memory_static_range", |call, args| {
        let (min, max) = (args.int(1)?, args.int(2)?);
        set_memory(call, args.text(0)?, move |[_, dynamic_min, dynamic_max, _]| {
            [min, dynamic_min, dynamic_max, max]
        })
    });
    handlers.on("VM.set_memory_static_min", |call, args| set_limit(call, args, 0));
    handlers.on("VM.set_memory_static_max", |call, args| set_limit(call, args, 3));
    handlers.on("VM.set_PV_kernel", |call, args| set_boot(call, args, "PV_kernel", BootField::Kernel));
    handlers.on("VM.set_PV_ramdisk", |call, args| set_boot(call, args, "PV_ramdisk", BootField::Ramdisk));
    handlers.on("VM.set_PV_args", |call, args| set_boot(call, args, "PV_args", BootField::Arguments));
    handlers.on("VM.set_VCPUs_max", |call, args| set_vcpus(call, args, "VCPUs_max"));
    handlers.on("VM.set_VCPUs_at_startup", |call, args| set_vcpus(call, args, "VCPUs_at_startup"));
}

fn create(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let record = args.value(0)?.as_map().cloned().unwrap_or_default();
    let made = call.part.db.change(|change| {
        let own = ["power_state", "domid", "resident_on", "metrics", "guest_metrics"];
        let fields: Vec<(&str, Value)> = record
            .iter()
            .filter(|(name, _)| !own.contains(&name.as_str()))
            .map(|(name, value)| (name.as_str(), value.clone()))
            .collect();
        create_in(change, fields)
    });
    made.map(Value::String)
}

/// Makes the record of a VM that does not run.
///
/// # Errors
/// `MEMORY_CONSTRAINT_VIOLATION`, `VALUE_NOT_SUPPORTED`.
pub fn create_in(change: &mut Change<'_>, mut fields: Vec<(&str, Value)>) -> Result<String, ApiError> {
    let install = [("install_time", Value::DateTime(lookup::now()))];
    let metrics = change.create("VM_metrics", &install)?;
    let guest = change.create("VM_guest_metrics", &[])?;
    fields.extend([("metrics", Value::string(metrics)), ("guest_metrics", Value::string(guest))]);
    let reference = change.create("VM", &fields)?;
    let vm = change.get("VM", &reference)?;
    check_memory(MEMORY.map(|field| vm.int(field)))?;
    check_vcpus(&vm)?;
    refresh(change, "VM", &reference)?;
    Ok(reference)
}

fn check_vcpus(vm: &Object) -> Result<(), ApiError> {
    let (start, max) = (vm.int("VCPUs_at_startup"), vm.int("VCPUs_max"));
    if start < 1 || start > max {
        return Err(ApiError::new(
            "VALUE_NOT_SUPPORTED",
            [
                "VCPUs_at_startup".to_owned(),
                start.to_string(),
                format!("it must be at least 1 and at most VCPUs_max, which is {max}"),
            ],
        ));
    }
    Ok(())
}

/// Refuses what only a halted VM takes.
///
/// # Errors
/// `VM_BAD_POWER_STATE`.
pub(super) fn refuse_running(vm: &Object) -> Result<(), ApiError> {
    if vm.text("power_state") == "Halted" { Ok(()) } else { Err(bad_power_state(vm, "Halted")) }
}

fn set_memory(
    call: &Call,
    reference: &str,
    choose: impl FnOnce([i64; 4]) -> [i64; 4],
) -> Result<Value, ApiError> {
    call.part.db.change(|change| {
        let vm = change.get("VM", reference)?;
        refuse_running(&vm)?;
        let limits = choose(MEMORY.map(|field| vm.int(field)));
        check_memory(limits)?;
        for (field, bytes) in MEMORY.into_iter().zip(limits) {
            change.set("VM", reference, field, bytes)?;
        }
        Ok(())
    })?;
    Ok(Value::Void)
}

fn set_limit(call: &Call, args: &Args, which: usize) -> Result<Value, ApiError> {
    let bytes = args.int(1)?;
    set_memory(call, args.text(0)?, move |mut limits| {
        limits[which] = bytes;
        limits
    })
}

fn set_vcpus(call: &Call, args: &Args, field: &str) -> Result<Value, ApiError> {
    let (reference, count) = (args.text(0)?, args.int(1)?);
    call.part.db.change(|change| {
        refuse_running(&*change.get("VM", reference)?)?;
        change.set("VM", reference, field, count)?;
        check_vcpus(&*change.get("VM", reference)?)
    })?;
    Ok(Value::Void)
}

/// What the VM's driver would refuse at the start is refused here already. The start looks again: files change, and so
/// does the driver.
fn set_boot(call: &Call, args: &Args, field: &'static str, which: BootField) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.text(1)?);
    let vm = call.part.db.get("VM", reference)?;
    if !value.is_empty()
        && let Ok(driver) = lookup::driver(&call.part, &vm)
    {
        let mut wanted = spec(&vm)?;
        match which {
            BootField::Kernel => wanted.kernel = Some(value.into()),
            BootField::Ramdisk => wanted.ramdisk = Some(value.into()),
            BootField::Arguments => wanted.kernel_args = value.to_owned(),
        }
        driver.check_boot(&wanted, which)?;
    }
    call.part.db.set("VM", reference, field, Value::string(value))?;
    Ok(Value::Void)
}

fn set_is_a_template(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.bool(1)?);
    call.part.db.change(|change| {
        let vm = change.get("VM", reference)?;
        refuse_running(&vm)?;
        if vm.bool("is_control_domain") || vm.bool("is_default_template") {
            let why = format!("{} stays what it is", vm.text("name_label"));
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        change.set("VM", reference, "is_a_template", value)?;
        refresh(change, "VM", reference)
    })?;
    Ok(Value::Void)
}

fn destroy(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let (_running, ()) = Running::begin(call, "VM", reference, "destroy", |_, vm| {
        if vm.bool("is_control_domain") {
            let why = format!("{} belongs to the host", vm.text("name_label"));
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        if vm.bool("is_default_template") || is_marked_default(vm) {
            return Err(ApiError::new("VM_CANNOT_DELETE_DEFAULT_TEMPLATE", [&vm.reference]));
        }
        // A checkpoint has memory and no process.
        if super::allowed::is_kept(vm) { Ok(()) } else { refuse_running(vm) }
    })?;
    step("vm-destroy:noted");
    let image = call.part.db.change(|change| {
        let vm = change.get("VM", reference)?;
        let image = made::leave_image(change, reference)?;
        remove_in(change, &vm)?;
        Ok(image)
    })?;
    if let Some(image) = image {
        made::discard(call, &image);
    }
    keep_only_known(&call.part);
    Ok(Value::Void)
}

/// Has drivers forget what they keep of VMs that are gone.
pub fn keep_only_known(vms: &Vms) {
    let is_known = |vm: uuid::Uuid| vms.db.by_uuid("VM", &vm.to_string()).is_ok();
    vms.drivers().iter().for_each(|driver| driver.keep_only(&is_known));
}

/// Whether `other_config` says that the VM is a template that came with the toolstack.
fn is_marked_default(vm: &Object) -> bool {
    vm.map("other_config").get("default_template").is_some_and(|word| word == "true")
}

/// Removes the record of a VM and what belongs to it alone; its VDIs stay.
///
/// # Errors
/// `OPERATION_NOT_ALLOWED` while a disk is plugged; the store's.
pub fn remove_in(change: &mut Change<'_>, vm: &Object) -> Result<(), ApiError> {
    for vbd in devices::of_vm(change, &vm.reference) {
        if vbd.bool("currently_attached") {
            let why = format!("VBD {} is still plugged", vbd.text("uuid"));
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        vbd::remove_in(change, &vbd)?;
    }
    for vif in change.find("VIF", "VM", &vm.reference) {
        vif::remove_in(change, &vif)?;
    }
    for console in change.find("console", "VM", &vm.reference) {
        change.destroy("console", &console.reference)?;
    }
    for (class, field) in [("VM_metrics", "metrics"), ("VM_guest_metrics", "guest_metrics")] {
        if change.get(class, vm.text(field)).is_ok() {
            change.destroy(class, vm.text(field))?;
        }
    }
    for snapshot in change.find("VM", "snapshot_of", &vm.reference) {
        change.set("VM", &snapshot.reference, "snapshot_of", Value::string(tapio_model::NULL_REF))?;
    }
    for child in change.find("VM", "parent", &vm.reference) {
        change.set("VM", &child.reference, "parent", Value::string(vm.text("parent")))?;
    }
    change.destroy("VM", &vm.reference)
}

fn allowed_vbd_devices(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let vm = call.part.db.get("VM", args.text(0)?)?;
    let vbds = call.part.db.find("VBD", "VM", &vm.reference);
    Ok(Value::strings(devices::free(&vbds).into_iter().map(|place| place.to_string())))
}

fn allowed_vif_devices(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let vm = call.part.db.get("VM", args.text(0)?)?;
    Ok(Value::strings(vif::free(&call.part.db.find("VIF", "VM", &vm.reference))))
}

fn possible_hosts(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let vm = call.part.db.get("VM", args.text(0)?)?;
    let can = power::assert_can_boot(&call.part, &vm).is_ok();
    Ok(Value::strings(can.then(|| this_host(&call.part.db))))
}

fn assert_can_boot_here(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let db = &call.part.db;
    let (vm, host) = (db.get("VM", args.text(0)?)?, db.get("host", args.text(1)?)?);
    if host.reference != this_host(db) {
        return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
    }
    for vbd in db.find("VBD", "VM", &vm.reference).iter().filter(|vbd| !vbd.bool("empty")) {
        let vdi = db.get("VDI", vbd.text("VDI"))?;
        if !db.find("PBD", "SR", vdi.text("SR")).iter().any(|pbd| pbd.bool("currently_attached")) {
            return Err(ApiError::new("VM_REQUIRES_SR", [vm.reference.as_str(), vdi.text("SR")]));
        }
    }
    power::assert_can_boot(&call.part, &vm)?;
    Ok(Value::Void)
}

fn assert_operation_valid(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (vm, wanted) = (call.part.db.get("VM", args.text(0)?)?, args.text(1)?);
    if allowed::of_vm(&vm).contains(&wanted) {
        return Ok(Value::Void);
    }
    allowed::refuse_special(&vm)?;
    let state = vm.text("power_state").to_lowercase();
    Err(ApiError::new("OPERATION_NOT_ALLOWED", [format!("{wanted} is not possible while the VM is {state}")]))
}

fn update_allowed_operations(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    call.part.db.change(|change| {
        change.get("VM", reference)?;
        refresh(change, "VM", reference)
    })?;
    Ok(Value::Void)
}

/// `VM.maximise_memory`: what is left of `total` for the guest. Guests of this host take nothing beside their memory.
fn maximise_memory(call: &Call, args: &Args) -> Result<Value, ApiError> {
    call.part.db.get("VM", args.text(0)?)?;
    let total = args.int(1)?;
    if total <= 0 {
        let what = ["total", &total.to_string(), "it is a number of bytes above zero"].map(String::from);
        return Err(ApiError::new("VALUE_NOT_SUPPORTED", what));
    }
    Ok(Value::Int(total))
}
