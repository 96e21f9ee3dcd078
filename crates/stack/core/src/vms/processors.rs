//! Processors of guests that run.
//!
//! The driver adds them one by one, and the record follows: `VCPUs_at_startup`, because a guest that starts again has
//! as many, and `VM_metrics.VCPUs_number`. A daemon that dies in between finds more processors than the record says,
//! and writes that down at its next start.

use std::sync::Arc;

use tapio_model::{ApiError, Value};
use tapio_vm::VmDriver;

use super::allowed::{bad_power_state, refuse_special};
use super::running::Running;
use super::{Call, Handlers, lookup};
use crate::args::Args;
use crate::db::{Change, Object};
use crate::plan::steps::step;

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.set_VCPUs_number_live", set_number_live);
}

fn set_number_live(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, count) = (args.text(0)?, args.int(1)?);
    let (_running, vm) = Running::begin(call, "VM", reference, "changing_VCPUs_live", |change, vm| {
        refuse_special(vm)?;
        if vm.text("power_state") != "Running" {
            return Err(bad_power_state(vm, "Running"));
        }
        check(vm, count)?;
        change.get("VM", &vm.reference)
    })?;
    let driver = lookup::driver(&call.part, &vm)?;
    let changed = driver.set_vcpus(vm.uuid()?, u32::try_from(count).unwrap_or(u32::MAX));
    step("vm-vcpus:changed");
    // Some may be there although another one was refused.
    let recorded = follow(call, &vm, &driver);
    changed.and(recorded).map(|()| Value::Void)
}

fn check(vm: &Object, count: i64) -> Result<(), ApiError> {
    let most = vm.int("VCPUs_max");
    if (1..=most).contains(&count) {
        return Ok(());
    }
    let why = format!(
        "VM {} can have 1 to {most} processors (VCPUs_max), which can be changed while it is halted",
        vm.text("uuid")
    );
    Err(ApiError::new("INVALID_VALUE", ["nvcpu".to_owned(), count.to_string(), why]))
}

/// Writes down how many processors a guest has, if its driver counts them.
///
/// # Errors
/// The driver's, the store's.
pub(super) fn follow(call: &Call, vm: &Object, driver: &Arc<dyn VmDriver>) -> Result<(), ApiError> {
    let Some(count) = driver.vcpus(vm.uuid()?)? else { return Ok(()) };
    call.part.db.change(|change| record(change, vm, i64::from(count)))
}

fn record(change: &mut Change<'_>, vm: &Object, count: i64) -> Result<(), ApiError> {
    let vm = change.get("VM", &vm.reference)?;
    if vm.int("VCPUs_at_startup") != count {
        change.set("VM", &vm.reference, "VCPUs_at_startup", count)?;
    }
    match change.get("VM_metrics", vm.text("metrics")) {
        Ok(metrics) if metrics.int("VCPUs_number") != count => {
            change.set("VM_metrics", &metrics.reference, "VCPUs_number", count)
        }
        _ => Ok(()),
    }
}
