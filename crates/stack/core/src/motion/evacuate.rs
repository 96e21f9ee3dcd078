//! A host without VMs: each goes to another host of the pool while its guest runs, or is asked to end if none takes it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tapio_model::{ApiError, NULL_REF, Value};

use super::{Call, live};
use crate::args::Args;
use crate::basics::this_host;
use crate::db::Object;
use crate::operations::Target;
use crate::pool::apart;
use crate::progress::{Progress, Unwatched};
use crate::vms::evacuate::{could, end, memory, running_vms};

/// VMs at a time, if the caller names no number. XenServer's own number.
const BATCH: usize = 10;
/// The largest that a caller may ask for: each waits in a thread.
const BATCH_MAX: usize = 100;

/// Errors that say that a host cannot take a VM. After any other one the VM stays, and runs.
const CANNOT_TAKE: [&str; 11] = [
    "HOST_DISABLED",
    "HOST_NOT_ENOUGH_FREE_MEMORY",
    "HOST_OFFLINE",
    "INTERFACE_HAS_NO_IP",
    "NO_HOSTS_AVAILABLE",
    "PIF_NOT_PRESENT",
    "REQUIRED_PIF_IS_UNPLUGGED",
    "VM_HOST_INCOMPATIBLE_VERSION_MIGRATE",
    "VM_INCOMPATIBLE_WITH_THIS_HOST",
    "VM_LACKS_FEATURE",
    "VM_REQUIRES_SR",
];

/// The other hosts that live and are enabled, with the memory that is free there and promised to no VM, and the VMs
/// that were promised it.
#[derive(Debug, Default)]
struct Others(Mutex<Vec<(Arc<Object>, u64)>>, Mutex<BTreeMap<String, String>>);

impl Others {
    /// Asks each how much memory it has. One that does not answer takes nothing.
    fn of(call: &Call) -> Self {
        let own = this_host(&call.part.db);
        let pool = &call.part.pool;
        if !pool.is_member() {
            return Self::default();
        }
        let hosts = call.part.db.all("host").into_iter().filter(|host| host.reference != own);
        let good = hosts.filter(|host| host.bool("enabled") && pool.is_live(&host.reference));
        let asked = good.filter_map(|host| {
            let visit = pool.visit(&host.reference);
            let params = vec![Value::string(&host.reference)];
            match visit.and_then(|visit| visit.call("host.compute_free_memory", params)) {
                Ok(Value::Int(bytes)) => Some((host, u64::try_from(bytes).unwrap_or_default())),
                // JSON has texts for large numbers.
                Ok(Value::String(bytes)) => Some((host, bytes.parse().unwrap_or_default())),
                Ok(_) => None,
                Err(error) => {
                    tracing::warn!(host = host.text("name_label"), %error, "this host takes no VMs of another one");
                    None
                }
            }
        });
        Self(Mutex::new(asked.collect()), Mutex::default())
    }

    /// The host that can take a VM, apart from those that were tried: with the fewest VMs of its anti-affinity group,
    /// then with most free memory; its memory is promised.
    ///
    /// # Errors
    /// Why the host that would be best cannot; `NO_HOSTS_AVAILABLE`: there is none.
    fn promise(
        &self,
        call: &Call,
        vm: &Arc<Object>,
        network: &str,
        tried: &BTreeSet<String>,
    ) -> Result<Arc<Object>, ApiError> {
        let mut all = self.0.lock();
        if !all.is_empty() {
            could(&call.to(&call.part.vms), vm, "pool_migrate")?;
        }
        let needed = memory(vm)?;
        let mut promised = self.1.lock();
        let at = |vm: &Object| promised.get(&vm.reference).cloned().or_else(|| apart::host_of(vm));
        let found = apart::found(&call.part.db, vm, at).unwrap_or_default();
        let beside = |host: &Object| found.get(&host.reference).copied().unwrap_or_default();
        all.sort_by_key(|(host, free)| (beside(host), std::cmp::Reverse(*free)));
        let mut first = None;
        for (host, free) in all.iter_mut().filter(|(host, _)| !tried.contains(&host.reference)) {
            let nowhere = (&BTreeMap::new(), &BTreeMap::new());
            let refused = match live::check(call, vm, host, false, network, nowhere) {
                Ok(()) if *free >= needed => {
                    *free -= needed;
                    promised.insert(vm.reference.clone(), host.reference.clone());
                    return Ok(Arc::clone(host));
                }
                Ok(()) => {
                    let figures = [needed.to_string(), free.to_string()];
                    ApiError::new("HOST_NOT_ENOUGH_FREE_MEMORY", figures)
                }
                Err(error) => error,
            };
            first.get_or_insert(refused);
        }
        Err(first.unwrap_or_else(|| ApiError::bare("NO_HOSTS_AVAILABLE")))
    }

    /// What was promised is not needed there.
    fn release(&self, host: &Object, vm: &Object) {
        let needed = memory(vm).unwrap_or_default();
        self.1.lock().remove(&vm.reference);
        if let Some((_, free)) = self.0.lock().iter_mut().find(|(known, _)| known.reference == host.reference)
        {
            *free += needed;
        }
    }
}

/// How far all VMs are, as the progress of the call.
struct Whole {
    of: Arc<dyn Progress>,
    parts: Mutex<Vec<f64>>,
}

impl Whole {
    fn set(&self, at: usize, fraction: f64) {
        let mut parts = self.parts.lock();
        if let Some(part) = parts.get_mut(at) {
            *part = fraction;
        }
        self.of.set(parts.iter().sum::<f64>() / parts.len().max(1) as f64);
    }
}

/// How far one of them is. It is cancelled with the call.
struct Part {
    whole: Arc<Whole>,
    at: usize,
}

impl Progress for Part {
    fn is_cancelled(&self) -> bool {
        self.whole.of.is_cancelled()
    }

    fn set(&self, fraction: f64) {
        self.whole.set(self.at, fraction);
    }

    fn task(&self) -> Option<&str> {
        self.whole.of.task()
    }
}

/// Whether a VM is on this host still.
fn is_here(call: &Call, vm: &str) -> bool {
    let own = this_host(&call.part.db);
    call.part.db.get("VM", vm).is_ok_and(|vm| vm.text("resident_on") == own)
}

/// Brings one VM away.
fn bring_away(call: &Call, vm: &str, others: &Others, network: &str) -> Result<(), ApiError> {
    let vms = call.to(&call.part.vms);
    let mut tried = BTreeSet::new();
    loop {
        let record = call.part.db.get("VM", vm)?;
        let host = match others.promise(call, &record, network, &tried) {
            Ok(host) => host,
            Err(error) if CANNOT_TAKE.contains(&&*error.code) => {
                if !others.0.lock().is_empty() {
                    let vm = record.text("uuid");
                    tracing::warn!(vm, %error, "no host takes this VM: its guest is asked to end");
                }
                // What a guest has begun to end is not broken off.
                return end(&vms.with(Arc::new(Unwatched::default())), vm);
            }
            Err(error) => return Err(error),
        };
        let options = BTreeMap::from([("network".to_owned(), network.to_owned())]);
        let Err(error) = live::pool_migrate(call, vm, &host.reference, &options, &live::Along::default())
        else {
            return Ok(());
        };
        others.release(&host, &record);
        if !is_here(call, vm) {
            tracing::info!(vm = record.text("uuid"), %error, "a VM that was to move is not on this host any more");
            return Ok(());
        }
        if !CANNOT_TAKE.contains(&&*error.code) {
            return Err(error);
        }
        tried.insert(host.reference.clone());
    }
}

/// The VMs of a host that cannot move to another one now, or be asked to end if there is no other one: the error, and
/// its parameters.
pub(super) fn preventing(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let host = call.part.db.get("host", args.text(0)?)?;
    let found = reasons(call, &host.reference);
    let words = |error: ApiError| Value::strings(std::iter::once(error.code.to_string()).chain(error.params));
    Ok(Value::Map(found.into_iter().map(|(vm, error)| (vm, words(error))).collect()))
}

fn reasons(call: &Call, host: &str) -> BTreeMap<String, ApiError> {
    let vms = call.to(&call.part.vms);
    let others = Others::of(call);
    let is_alone = others.0.lock().is_empty();
    let mut found = BTreeMap::new();
    for vm in running_vms(&call.part.vms, host) {
        // One that has gone since prevents nothing.
        let Ok(vm) = call.part.db.get("VM", &vm) else { continue };
        let could = match is_alone {
            true => could(&vms, &vm, "clean_shutdown"),
            false => others.promise(call, &vm, NULL_REF, &BTreeSet::new()).map(drop),
        };
        if let Err(error) = could {
            found.insert(vm.reference.clone(), error);
        }
    }
    found
}

/// `host.assert_can_evacuate`.
///
/// # Errors
/// `CANNOT_EVACUATE_HOST`: the errors of [`preventing`], `CODE,PARAMETER` each, with `|` between them.
pub(super) fn assert_can(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let host = call.part.db.get("host", args.text(0)?)?;
    let found = reasons(call, &host.reference).into_values();
    let found: Vec<String> = found
        .map(|error| {
            std::iter::once(error.code.to_string()).chain(error.params).collect::<Vec<_>>().join(",")
        })
        .collect();
    if found.is_empty() {
        return Ok(Value::Void);
    }
    Err(ApiError::new("CANNOT_EVACUATE_HOST", [found.join("|")]))
}

/// Brings every VM away from this host, some at a time. One that stays keeps no other here.
///
/// # Errors
/// `HOST_OFFLINE` for another host; `OTHER_OPERATION_IN_PROGRESS` while another call evacuates or ends it;
/// `VALUE_NOT_SUPPORTED` for a size below zero; `HANDLE_INVALID` for a network; `TASK_CANCELLED`: VMs whose turn had
/// come have moved, have ended, or go on here; else the first error of a VM, after all others are away. The log has
/// all errors.
pub(super) fn evacuate(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let host = call.part.db.get("host", args.text(0)?)?;
    if host.reference != this_host(&call.part.db) {
        return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
    }
    let network = args.text(1)?;
    if !network.is_empty() && network != NULL_REF {
        call.part.db.get("network", network)?;
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
    let others = Others::of(call);
    let mut vms = running_vms(&call.part.vms, &host.reference);
    // The largest first: they find room while there is most of it.
    let size = |vm: &String| call.part.db.get("VM", vm).ok().and_then(|vm| memory(&vm).ok());
    vms.sort_by_cached_key(|vm| std::cmp::Reverse(size(vm)));
    let whole = Whole { of: Arc::clone(&call.progress), parts: Mutex::new(vec![0.0; vms.len()]) };
    let (whole, next, done) = (Arc::new(whole), AtomicUsize::new(0), AtomicUsize::new(0));
    let first_error: Mutex<Option<ApiError>> = Mutex::default();
    let work = || {
        while !call.progress.is_cancelled() {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(vm) = vms.get(at) else { return };
            let own = call.with(Arc::new(Part { whole: Arc::clone(&whole), at }));
            match bring_away(&own, vm, &others, network) {
                // It goes on here.
                Err(error) if error.code == "TASK_CANCELLED" && call.progress.is_cancelled() => return,
                Err(error) => {
                    tracing::warn!(%vm, %error, "a VM stays on a host that is evacuated");
                    first_error.lock().get_or_insert(error);
                }
                Ok(()) => {}
            }
            whole.set(at, 1.0);
            done.fetch_add(1, Ordering::Relaxed);
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
