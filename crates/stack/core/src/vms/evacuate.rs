//! A host without VMs: each is asked to end. A host of its own has no other to move them to.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tapio_model::{ApiError, Value};

use super::allowed::bad_power_state;
use super::running::could_begin;
use super::{Call, Handlers, Vms, power};
use crate::args::Args;
use crate::basics::this_host;
use crate::db::Object;
use crate::operations::Target;
use crate::progress::Unwatched;

/// VMs that end at a time, where the caller says nothing. XenServer's own number.
const BATCH: usize = 10;
/// The largest that a caller may ask for: each waits in a thread.
const BATCH_MAX: usize = 100;

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("host.evacuate", evacuate);
    handlers.on("host.get_vms_which_prevent_evacuation", preventing);
}

/// The VMs that run on a host, or are paused.
pub(super) fn running_vms(vms: &Vms, host: &str) -> Vec<String> {
    let resident = vms.db.find("VM", "resident_on", host);
    let runs = |vm: &&Arc<Object>| !vm.bool("is_control_domain") && vm.text("power_state") != "Halted";
    resident.iter().filter(runs).map(|vm| vm.reference.clone()).collect()
}

/// The VMs of a host that could not be asked to end now: the error, and its parameters.
fn preventing(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let host = call.part.db.get("host", args.text(0)?)?;
    let mut found = BTreeMap::new();
    for vm in running_vms(&call.part, &host.reference) {
        // One that has gone since prevents nothing.
        let Ok(vm) = call.part.db.get("VM", &vm) else { continue };
        let could = match vm.text("power_state") {
            "Running" => could_begin(call, &vm, "clean_shutdown"),
            _ => Err(bad_power_state(&vm, "Running")),
        };
        if let Err(error) = could {
            let words = std::iter::once(error.code.to_string()).chain(error.params);
            found.insert(vm.reference.clone(), Value::strings(words));
        }
    }
    Ok(Value::Map(found))
}

/// Asks the guest of every VM of this host to end, some at a time. One that does not end keeps no other from it.
///
/// # Errors
/// `HOST_OFFLINE` for another host; `OTHER_OPERATION_IN_PROGRESS` while another call evacuates or ends it;
/// `VALUE_NOT_SUPPORTED` for a size below zero; `TASK_CANCELLED`: the VMs that were
/// asked by then have ended; else the first error of a VM, after all others have ended. The log has all errors.
fn evacuate(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let host = call.part.db.get("host", args.text(0)?)?;
    if host.reference != this_host(&call.part.db) {
        return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
    }
    let batch = match usize::try_from(args.int(2)?) {
        Ok(0) => BATCH,
        Ok(batch) => batch.min(BATCH_MAX),
        Err(_) => {
            let what =
                ["evacuate_batch_size", &args.int(2)?.to_string(), "it is below zero"].map(String::from);
            return Err(ApiError::new("VALUE_NOT_SUPPORTED", what));
        }
    };
    let target = Target { class: "host", reference: &host.reference, op: "evacuate" };
    let _held = call.part.operations.enter(&*call.progress, &[target], || Ok(()))?;
    let vms = running_vms(&call.part, &host.reference);
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let first_error: Mutex<Option<ApiError>> = Mutex::default();
    let work = || {
        // The progress of one VM is not that of the call, and what its guest has begun is not broken off.
        let own = call.with(Arc::new(Unwatched::default()));
        while !call.progress.is_cancelled() {
            let Some(vm) = vms.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            if let Err(error) = power::shut_down_clean(&own, vm) {
                tracing::warn!(%vm, %error, "a VM stays on a host that is evacuated");
                first_error.lock().get_or_insert(error);
            }
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            call.progress.set(done as f64 / vms.len() as f64);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..batch.min(vms.len()) {
            scope.spawn(work);
        }
    });
    match first_error.into_inner() {
        Some(error) => Err(error),
        None if done.into_inner() < vms.len() => {
            Err(ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()]))
        }
        None => Ok(Value::Void),
    }
}
