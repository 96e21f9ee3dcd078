//! Memory of guests that run: their dynamic range, and how much they have.
//!
//! A guest is told to have `memory_dynamic_max`, which is the target here. The record comes first, then the driver is
//! told; a daemon that died in between tells it again at its next start. What the guest has is followed by events of
//! the driver: `VM_metrics.memory_actual`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};
use tapio_vm::VmDriver;
use uuid::Uuid;

use super::allowed::{bad_power_state, refuse_special};
use super::running::Running;
use super::{Call, Handlers, Vms, lookup};
use crate::args::Args;
use crate::basics::may_be_here;
use crate::db::{Change, Object};
use crate::plan::steps::step;

/// How far a guest may be from its target to be there, and how long it may take; as in XenServer.
const TOLERANCE: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(256);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// Fields of memory, in the order in which each must be at most the next.
pub(super) const MEMORY: [&str; 4] =
    ["memory_static_min", "memory_dynamic_min", "memory_dynamic_max", "memory_static_max"];

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.set_memory_dynamic_range", |call, args| {
        let range = [args.int(1)?, args.int(2)?];
        set_range(call, args.text(0)?, move |_| range)
    });
    handlers.on("VM.set_memory_dynamic_min", |call, args| {
        let min = args.int(1)?;
        set_range(call, args.text(0)?, move |[_, max]| [min, max])
    });
    handlers.on("VM.set_memory_dynamic_max", |call, args| {
        let max = args.int(1)?;
        set_range(call, args.text(0)?, move |[min, _]| [min, max])
    });
    handlers.on("VM.set_memory_target_live", |call, args| {
        let target = args.int(1)?;
        let vm = call.part.db.get("VM", args.text(0)?)?;
        if vm.text("power_state") != "Running" {
            return Err(bad_power_state(&vm, "Running"));
        }
        set_range(call, args.text(0)?, move |_| [target; 2])
    });
    handlers.on("VM.wait_memory_target_live", wait);
}

/// Whether these can be limits of memory.
///
/// # Errors
/// `MEMORY_CONSTRAINT_VIOLATION`.
pub(super) fn check_memory(limits: [i64; 4]) -> Result<(), ApiError> {
    if limits.iter().any(|bytes| *bytes < 0) || !limits.is_sorted() {
        return Err(ApiError::new("MEMORY_CONSTRAINT_VIOLATION", [format!("0 <= {}", MEMORY.join(" <= "))]));
    }
    Ok(())
}

/// The dynamic range of a VM that is halted, or runs.
fn set_range(call: &Call, reference: &str, choose: impl Fn([i64; 2]) -> [i64; 2]) -> Result<Value, ApiError> {
    let put = |change: &mut Change<'_>, vm: &Object| {
        let [static_min, min, max, static_max] = MEMORY.map(|field| vm.int(field));
        let [new_min, new_max] = choose([min, max]);
        check_memory([static_min, new_min, new_max, static_max])?;
        change.set("VM", &vm.reference, "memory_dynamic_min", new_min)?;
        change.set("VM", &vm.reference, "memory_dynamic_max", new_max)
    };
    // Only its record is there to be changed.
    let is_halted = call.part.db.change(|change| {
        let vm = change.get("VM", reference)?;
        if vm.text("power_state") == "Halted" { put(change, &vm).map(|()| true) } else { Ok(false) }
    })?;
    if is_halted {
        return Ok(Value::Void);
    }
    let (_running, (was, vm)) =
        Running::begin(call, "VM", reference, "changing_dynamic_range", |change, vm| {
            refuse_special(vm)?;
            if vm.text("power_state") != "Running" {
                return Err(bad_power_state(vm, "Running"));
            }
            put(change, vm)?;
            Ok((MEMORY.map(|field| vm.int(field)), change.get("VM", &vm.reference)?))
        })?;
    step("vm-memory:recorded");
    let told = tell(call, &vm);
    if told.is_err() {
        call.part.db.change(|change| {
            change.set("VM", reference, "memory_dynamic_min", was[1])?;
            change.set("VM", reference, "memory_dynamic_max", was[2])
        })?;
    }
    told.map(|()| Value::Void)
}

/// Tells a guest what its record says.
fn tell(call: &Call, vm: &Object) -> Result<(), ApiError> {
    lookup::driver(&call.part, vm)?.set_memory(vm.uuid()?, target(vm))
}

fn target(vm: &Object) -> u64 {
    u64::try_from(vm.int("memory_dynamic_max")).unwrap_or(0)
}

/// Waits until the guest of a VM has the memory that it shall have.
fn wait(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let until = Instant::now() + LIMIT;
    let task = || call.progress.task().unwrap_or_default().to_owned();
    loop {
        let vm = call.part.db.get("VM", reference)?;
        if vm.text("power_state") != "Running" {
            return Err(bad_power_state(&vm, "Running"));
        }
        let actual = lookup::driver(&call.part, &vm)?.memory(vm.uuid()?)?;
        if actual.is_none_or(|actual| actual.abs_diff(target(&vm)) <= TOLERANCE) {
            if let Some(actual) = actual {
                record(&call.part, vm.uuid()?, actual)?;
            }
            return Ok(Value::Void);
        }
        if call.progress.is_cancelled() {
            return Err(ApiError::new("TASK_CANCELLED", [task()]));
        }
        if Instant::now() >= until {
            return Err(ApiError::new("VM_MEMORY_TARGET_WAIT_TIMEOUT", [task()]));
        }
        std::thread::sleep(LOOK);
    }
}

/// Writes down how much memory a guest has.
///
/// # Errors
/// The store's.
pub(super) fn record(vms: &Vms, uuid: Uuid, bytes: u64) -> Result<(), ApiError> {
    let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    vms.db.change(|change| {
        let Ok(vm) = vms.db.by_uuid("VM", &uuid.to_string()) else { return Ok(()) };
        let Ok(metrics) = change.get("VM_metrics", vm.text("metrics")) else { return Ok(()) };
        let runs = matches!(vm.text("power_state"), "Running" | "Paused") && may_be_here(&vms.db, &vm);
        if !runs || metrics.int("memory_actual") == bytes {
            return Ok(());
        }
        change.set("VM_metrics", &metrics.reference, "memory_actual", bytes)
    })
}

/// Writes down how much memory a guest has that has just begun, or come: it may not be at its target yet, or never.
pub(super) fn follow(call: &Call, vm: &Object, driver: &dyn VmDriver) {
    let found = vm.uuid().and_then(|uuid| Ok((uuid, driver.memory(uuid)?)));
    let followed =
        found.and_then(|(uuid, actual)| actual.map_or(Ok(()), |actual| record(&call.part, uuid, actual)));
    if let Err(error) = followed {
        tracing::warn!(vm = vm.text("uuid"), %error, "how much memory its guest has is not known");
    }
}

/// A guest that a daemon finds is told again what it shall have.
///
/// # Errors
/// The driver's, the store's.
pub(super) fn recover(call: &Call, vm: &Object, driver: &Arc<dyn VmDriver>) -> Result<(), ApiError> {
    let uuid = vm.uuid()?;
    let Some(actual) = driver.memory(uuid)? else { return Ok(()) };
    driver.set_memory(uuid, target(vm))?;
    record(&call.part, uuid, actual)
}
