//! From records to what they stand for.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tapio_model::{ApiError, NULL_REF, Value};
use tapio_vm::VmDriver;

use crate::Toolstack;
use crate::args::Args;
use crate::call::Call;
use crate::caller::Caller;
use crate::db::{Db, Object};
use crate::plan::Limits;
use crate::progress::Unwatched;

/// The driver of machines that name none.
const DRIVER: &str = "uml";

/// The name of a machine's driver.
pub fn driver_name(vm: &Object) -> String {
    if vm.bool("is_control_domain") {
        return "host".into();
    }
    let named = vm.map("other_config").remove("driver").or_else(|| vm.map("platform").remove("driver"));
    named.unwrap_or_else(|| DRIVER.into())
}

/// The driver of a machine.
///
/// # Errors
/// `INVALID_VALUE`: there is none of that name.
pub fn driver(stack: &Toolstack, vm: &Object) -> Result<Arc<dyn VmDriver>, ApiError> {
    let name = driver_name(vm);
    stack.machines.driver(&name).ok_or_else(|| {
        let known = stack.machines.driver_names().join(", ");
        ApiError::new(
            "INVALID_VALUE",
            ["other_config:driver".to_owned(), format!("{name} (there are: {known})")],
        )
    })
}

/// The record of this host.
pub fn this_host(db: &Db) -> String {
    let master = db.all("pool").first().map(|pool| pool.text("master").to_owned());
    let host = master.filter(|master| db.get("host", master).is_ok());
    let only = || db.all("host").first().map(|host| host.reference.clone());
    host.or_else(only).unwrap_or_else(|| NULL_REF.to_owned())
}

/// A call of the toolstack's own.
pub fn own_call(stack: &Arc<Toolstack>) -> Call {
    let caller = Caller::toolstack();
    Call { stack: Arc::clone(stack), caller, progress: Arc::new(Unwatched::default()), made_for: None }
}

/// Sends another message on behalf of a call.
///
/// # Errors
/// The message's.
pub fn send(call: &Call, message: &'static str, args: Vec<Value>) -> Result<Value, ApiError> {
    let handler = call.stack.handlers.0.get(message);
    let handler = handler.ok_or_else(|| ApiError::new("NOT_IMPLEMENTED", [message]))?;
    handler(call, &Args(args))
}

/// [`send`], for a message that answers a reference.
///
/// # Errors
/// As there.
pub fn send_for_reference(call: &Call, message: &'static str, args: Vec<Value>) -> Result<String, ApiError> {
    let answer = send(call, message, args)?;
    let text = answer.as_str().map(ToOwned::to_owned);
    text.ok_or_else(|| ApiError::internal(format!("{message} answered no reference")))
}

/// Seconds since 1970.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Takes over what the host's `other_config` says about steps at a time; the configuration file's numbers otherwise.
pub fn apply_limits(call: &Call) {
    let config = &call.stack.config;
    let host = call.stack.db.get("host", &this_host(&call.stack.db));
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
    call.stack.plans.set_limits(Limits { host: all, vm, sr });
}

/// Seconds that a key of `other_config` gives, within reason.
pub fn seconds(objects: &[&Object], key: &str, default: u64) -> Duration {
    let told = objects.iter().find_map(|object| object.map("other_config").get(key)?.parse::<u64>().ok());
    Duration::from_secs(told.unwrap_or(default).clamp(1, 86_400))
}

/// Tells people what happened by itself.
pub fn tell(stack: &Toolstack, name: &str, vm: &Object, body: &str) {
    tracing::warn!(name, vm = vm.text("uuid"), "{body}");
    // A guest's last words may be long.
    let body: String = body.chars().take(4_000).collect();
    if let Err(error) = crate::tell(stack, name, 3, "VM", vm.text("uuid"), &body) {
        tracing::warn!(name, %error, "a message could not be kept");
    }
}
