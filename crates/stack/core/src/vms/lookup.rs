//! From records to what they stand for.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tapio_model::ApiError;
use tapio_vm::VmDriver;

use super::{Call, StorageCall, Vms};
use crate::basics::this_host;
use crate::db::Object;
use crate::plan::Limits;

/// The driver of VMs that name none.
const DRIVER: &str = "uml";

/// The name of a VM's driver.
pub fn driver_name(vm: &Object) -> String {
    if vm.bool("is_control_domain") {
        return "host".into();
    }
    let named = vm.map("other_config").remove("driver").or_else(|| vm.map("platform").remove("driver"));
    named.unwrap_or_else(|| DRIVER.into())
}

/// The driver of a VM.
///
/// # Errors
/// `INVALID_VALUE`: there is none of that name.
pub fn driver(vms: &Vms, vm: &Object) -> Result<Arc<dyn VmDriver>, ApiError> {
    let name = driver_name(vm);
    vms.driver(&name).ok_or_else(|| {
        let known = vms.driver_names().join(", ");
        ApiError::new(
            "INVALID_VALUE",
            ["other_config:driver".to_owned(), format!("{name} (there are: {known})")],
        )
    })
}

/// The call as the storage gets it.
pub fn to_storage(call: &Call) -> StorageCall {
    call.to(&call.part.storage)
}

/// Seconds since 1970.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Takes over what the host's `other_config` says about steps at a time; the configuration file's numbers otherwise.
pub fn apply_limits(call: &Call) {
    let config = &call.part.config;
    let host = call.part.db.get("host", &this_host(&call.part.db));
    let told = host.map(|host| host.map("other_config")).unwrap_or_default();
    let number = |key: &str, default: usize| {
        told.get(key)
            .and_then(|text| text.parse().ok())
            .filter(|number| (1..=1_000).contains(number))
            .unwrap_or(default)
    };
    let all = number("worker-pool-size", config.worker_pool_size);
    let vm = number("max-parallel-per-vm", config.per_vm_parallel);
    // Steps that wait for one SR, which may hang, leave some of the host's permits to the others.
    let sr = number("max-parallel-per-sr", all - all / 8);
    call.part.plans.set_limits(Limits { host: all, vm, sr });
}

/// Seconds that a key of `other_config` gives, within reason.
pub fn seconds(objects: &[&Object], key: &str, default: u64) -> Duration {
    let told = objects.iter().find_map(|object| object.map("other_config").get(key)?.parse::<u64>().ok());
    Duration::from_secs(told.unwrap_or(default).clamp(1, 86_400))
}

/// Reports to the administrator what happened without a command.
pub fn tell(vms: &Vms, name: &str, vm: &Object, body: &str) {
    tracing::warn!(name, vm = vm.text("uuid"), "{body}");
    // A guest's last words may be long.
    let body: String = body.chars().take(4_000).collect();
    if let Err(error) = crate::tell(&vms.db, name, 3, "VM", vm.text("uuid"), &body) {
        tracing::warn!(name, %error, "a message could not be kept");
    }
}
