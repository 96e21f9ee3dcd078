//! Appliances: VMs that start and end together, in the order that each of them has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::{ApiError, NULL_REF, Value};

use super::{Busy, Groups, each};
use crate::args::Args;
use crate::call::{Call, HandlersOf};
use crate::db::Object;

const CLASS: &str = "VM_appliance";

/// All that can be done with one.
const OPERATIONS: [&str; 4] = ["start", "clean_shutdown", "hard_shutdown", "shutdown"];

/// Longest pause between two groups of VMs.
const PAUSE_MAX: Duration = Duration::from_secs(3600);
/// How often it is looked during a pause whether the task was cancelled.
const LOOK: Duration = Duration::from_millis(50);

pub(super) fn register(handlers: &mut HandlersOf<'_, Groups>) {
    handlers.on("VM_appliance.create", create);
    handlers.on("VM_appliance.destroy", destroy);
    handlers.on("VM.set_appliance", |call, args| put(call, args, "appliance", CLASS));
    handlers.on("VM.set_snapshot_schedule", |call, args| put(call, args, "snapshot_schedule", "VMSS"));
    handlers.on("VM_appliance.start", |call, args| {
        let paused = args.bool(1)?;
        all(call, args.text(0)?, "start", "VM.start", &[Value::Bool(paused), Value::Bool(false)])
    });
    handlers.on("VM_appliance.clean_shutdown", |call, args| {
        all(call, args.text(0)?, "clean_shutdown", "VM.clean_shutdown", &[])
    });
    handlers.on("VM_appliance.hard_shutdown", |call, args| {
        all(call, args.text(0)?, "hard_shutdown", "VM.hard_shutdown", &[])
    });
    handlers
        .on("VM_appliance.shutdown", |call, args| all(call, args.text(0)?, "shutdown", "VM.shutdown", &[]));
}

fn create(call: &Call<Groups>, args: &Args) -> Result<Value, ApiError> {
    let given = args.record()?.iter().map(|(name, value)| (name.as_str(), value.clone()));
    let mut fields: Vec<(&str, Value)> = given.collect();
    fields.push(("allowed_operations", Value::strings(OPERATIONS)));
    call.part.db.create(CLASS, &fields).map(Value::String)
}

fn destroy(call: &Call<Groups>, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let _busy = Busy::begin(&call.part, CLASS, reference, "destroy")?;
    call.part.db.change(|change| {
        change.get(CLASS, reference)?;
        for vm in change.find("VM", "appliance", reference) {
            change.set("VM", &vm.reference, "appliance", NULL_REF)?;
        }
        change.destroy(CLASS, reference)
    })?;
    Ok(Value::Void)
}

/// Puts a VM into a group.
fn put(call: &Call<Groups>, args: &Args, field: &str, class: &str) -> Result<Value, ApiError> {
    let (vm, group) = (args.text(0)?, args.text(1)?);
    call.part.db.change(|change| {
        let record = change.get("VM", vm)?;
        if record.bool("is_control_domain") || record.bool("is_a_snapshot") {
            let why = format!("{} is the host itself or a snapshot", record.text("name_label"));
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        if group != NULL_REF {
            change.get(class, group)?;
        }
        change.set("VM", vm, field, group)
    })?;
    Ok(Value::Void)
}

/// The VMs of an appliance in a state, by their order.
fn members(groups: &Groups, appliance: &str, state: &str) -> BTreeMap<i64, Vec<Arc<Object>>> {
    let mut found: BTreeMap<i64, Vec<_>> = BTreeMap::new();
    for vm in groups.db.find("VM", "appliance", appliance) {
        let counts = !vm.bool("is_a_template") && !vm.bool("is_a_snapshot");
        if counts && vm.text("power_state") == state {
            found.entry(vm.int("order")).or_default().push(vm);
        }
    }
    found
}

/// Has a message done for each VM, group by group. A start that fails keeps later groups from starting; ends go on.
fn all(
    call: &Call<Groups>,
    appliance: &str,
    operation: &'static str,
    message: &str,
    more: &[Value],
) -> Result<Value, ApiError> {
    let groups = &*call.part;
    groups.db.get(CLASS, appliance)?;
    let _busy = Busy::begin(groups, CLASS, appliance, operation)?;
    let _shown = Shown::begin(call, appliance, operation)?;
    let is_start = operation == "start";
    let (state, delay) = if is_start { ("Halted", "start_delay") } else { ("Running", "shutdown_delay") };
    let mut parts: Vec<Vec<Arc<Object>>> = members(groups, appliance, state).into_values().collect();
    if !is_start {
        parts.reverse();
    }
    let (count, mut failed) = (parts.len(), Vec::new());
    for (at, vms) in parts.iter().enumerate() {
        if call.progress.is_cancelled() {
            return Err(ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()]));
        }
        let done = each(vms, |vm| {
            let params = std::iter::once(Value::from(vm.reference.as_str())).chain(more.iter().cloned());
            groups.send(message, params.collect())
        });
        for (vm, result) in vms.iter().zip(done) {
            if let Err(error) = result {
                failed.push(format!("{}: {error}", vm.text("name_label")));
            }
        }
        if is_start && !failed.is_empty() {
            break;
        }
        call.progress.set((at + 1) as f64 / count as f64);
        if at + 1 < count {
            let seconds = vms.iter().map(|vm| vm.int(delay)).max().unwrap_or(0);
            pause(call, Duration::from_secs(seconds.max(0).unsigned_abs()).min(PAUSE_MAX));
        }
    }
    match failed.is_empty() {
        true => Ok(Value::Void),
        false => {
            failed.insert(0, operation.to_owned());
            Err(ApiError::new("OPERATION_PARTIALLY_FAILED", failed))
        }
    }
}

/// Waits between two groups; a task that is cancelled waits no longer.
fn pause(call: &Call<Groups>, time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until && !call.progress.is_cancelled() {
        std::thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
    }
}

/// Shows clients what is done with an appliance.
struct Shown<'a> {
    call: &'a Call<Groups>,
    appliance: &'a str,
}

impl<'a> Shown<'a> {
    fn begin(call: &'a Call<Groups>, appliance: &'a str, operation: &str) -> Result<Self, ApiError> {
        let task = call.progress.task().unwrap_or(NULL_REF);
        let now = Value::string_map([(task, operation)]);
        call.part.db.set(CLASS, appliance, "current_operations", now)?;
        Ok(Self { call, appliance })
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        let none = Value::Map(BTreeMap::new());
        // It may be gone; nothing else shows there.
        let _ = self.call.part.db.set(CLASS, self.appliance, "current_operations", none);
    }
}
