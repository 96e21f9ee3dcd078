//! How many plugs at a time this host had better allow.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};

use super::{Call, Handlers, lookup};
use crate::args::Args;
use crate::basics::{this_host, total_memory};
use crate::config::{PER_VM, PLUG_BYTES, VMS_AT_A_TIME, worker_pool_size};

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("host.advise_worker_pool", advise);
}

/// XenServer's rule, with the disks that the VMs of this host have on the average.
///
/// # Errors
/// `HOST_OFFLINE` for another host; `VALUE_NOT_SUPPORTED` for a number below zero.
fn advise(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let db = &call.part.db;
    let host = db.get("host", args.text(0)?)?;
    if host.reference != this_host(db) {
        return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
    }
    let vms = match usize::try_from(args.int(1)?) {
        Ok(0) => VMS_AT_A_TIME,
        Ok(vms) => vms,
        Err(_) => {
            let what = ["vms", &args.int(1)?.to_string(), "it is below zero"].map(String::from);
            return Err(ApiError::new("VALUE_NOT_SUPPORTED", what));
        }
    };
    let is_vm = |of: &str| {
        let flags = ["is_control_domain", "is_a_template", "is_a_snapshot"];
        db.get("VM", of).is_ok_and(|vm| flags.iter().all(|flag| !vm.bool(flag)))
    };
    let mut disks: BTreeMap<String, usize> = BTreeMap::new();
    for vbd in db.all("VBD").iter().filter(|vbd| !vbd.bool("empty")) {
        *disks.entry(vbd.text("VM").to_owned()).or_default() += 1;
    }
    disks.retain(|vm, _| is_vm(vm));
    let counted: usize = disks.values().map(|disks| (*disks).min(PER_VM)).sum();
    let of_vm = match disks.len() {
        0 => PER_VM,
        count => counted.div_ceil(count),
    };
    let advised = worker_pool_size(of_vm, vms, total_memory());
    lookup::apply_limits(call);
    Ok(Value::string_map([
        ("worker-pool-size", call.part.plans.limits().host.to_string()),
        ("advised", advised.to_string()),
        ("vms-at-a-time", vms.to_string()),
        ("disks-per-vm", of_vm.to_string()),
        ("bytes-per-plug", PLUG_BYTES.to_string()),
        ("bytes-of-advised", (advised as u64 * PLUG_BYTES).to_string()),
    ]))
}
