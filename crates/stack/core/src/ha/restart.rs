//! What the host that decides does when another one died.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::ApiError;

use super::starts::Place;
use super::{BEST_EFFORT, Ha, RESTART, plan};
use crate::db::Object;
use crate::vms;

/// How often it is looked whether a VM is to be started.
pub(super) const TURN: Duration = Duration::from_secs(1);
/// How long after a start that failed the next one is tried: doubled for each further one, up to the second.
const AGAIN: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));
/// How long a VM without a promise is tried. A lease of an SR ends meanwhile.
const BEST_EFFORT_FOR: Duration = Duration::from_secs(600);

/// Starts of a VM that failed.
#[derive(Debug)]
pub(super) struct Failed {
    times: u32,
    again: Instant,
}

/// One look, on the host that decides.
pub(super) fn turn(ha: &Arc<Ha>) {
    let Some(pool) = ha.enabled().filter(|_| ha.pool.is_member() && ha.pool.decides()) else {
        ha.failed.lock().clear();
        ha.best_effort.lock().clear();
        return;
    };
    for vm in ha.db.all("VM") {
        if is_lost(ha, &vm) {
            lose(ha, &vm);
        }
    }
    let is_held = ha.not_before.lock().is_some_and(|until| Instant::now() < until);
    if !is_held {
        start_wanted(ha);
    }
    if let Err(error) = ha.record_plan(&pool) {
        tracing::warn!(%error, "how many hosts may fail is not up to date");
    }
}

/// Whether a VM ran on a host that died, and may run on another.
fn is_lost(ha: &Ha, vm: &Object) -> bool {
    if vm.is_null("resident_on") || ![RESTART, BEST_EFFORT].contains(&vm.text("ha_restart_priority")) {
        return false;
    }
    let Ok(host) = ha.db.get("host", vm.text("resident_on")) else { return false };
    let lives = ha.db.get("host_metrics", host.text("metrics")).is_ok_and(|metrics| metrics.bool("live"));
    !lives && ha.assert_agile(&vm.reference).is_ok() && has_storage_lost(ha, vm, &host)
}

/// Whether a host is silent on all SRs on which a VM has disks that it writes: the second witness. A host that beats
/// there is alive although the pool's database does not hear of it, and its guests go on. Where this host cannot see
/// such an SR, nothing is known.
fn has_storage_lost(ha: &Ha, vm: &Object, host: &Object) -> bool {
    let Ok(host) = host.uuid() else { return false };
    ha.written_disks(&vm.reference).iter().all(|sr| {
        let sr = ha.db.get("SR", sr).and_then(|sr| sr.uuid());
        sr.ok().and_then(|sr| ha.vms.hosts_alive_on(sr)).is_some_and(|alive| !alive.contains(&host))
    })
}

/// The record says that a VM does not run any more.
fn lose(ha: &Ha, vm: &Object) {
    let (uuid, host) = (vm.text("uuid"), vm.text("resident_on"));
    tracing::warn!(vm = uuid, host, "the host of a VM died: the VM is to be started on another one");
    if let Err(error) = vms::lost(&ha.vms, &vm.reference) {
        tracing::warn!(vm = uuid, %error, "a VM of a host that died keeps its record");
    }
}

/// The VMs that are to be started, by their order. Those without a promise come last.
fn wanted(ha: &Ha) -> BTreeMap<Place, Vec<Arc<Object>>> {
    let mut best_effort = ha.best_effort.lock();
    let now = Instant::now();
    let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let mut left = Vec::new();
    for vm in ha.db.all("VM") {
        let is_promised = match vm.text("ha_restart_priority") {
            RESTART => true,
            BEST_EFFORT => false,
            _ => continue,
        };
        let rests = vm.text("power_state") == "Halted" && vm.map("current_operations").is_empty();
        if !rests || !vm.bool("ha_always_run") {
            continue;
        }
        left.push(vm.reference.clone());
        let until =
            (!is_promised).then(|| *best_effort.entry(vm.reference.clone()).or_insert(now + BEST_EFFORT_FOR));
        match until {
            Some(until) if until <= now => give_up(ha, &vm),
            _ => groups.entry((!is_promised, vm.int("order"))).or_default().push(vm),
        }
    }
    best_effort.retain(|vm, _| left.contains(vm));
    ha.failed.lock().retain(|vm, _| left.contains(vm));
    groups
}

/// A VM without a promise was tried for long enough.
fn give_up(ha: &Ha, vm: &Object) {
    let uuid = vm.text("uuid");
    tracing::warn!(vm = uuid, "a VM whose host died is not tried any more: it is to start with best effort");
    if let Err(error) = ha.db.set("VM", &vm.reference, "ha_always_run", false) {
        tracing::warn!(vm = uuid, %error, "a VM is tried on");
    }
}

/// Starts what may start now, each VM in a thread of its own: a host may hang in a start.
fn start_wanted(ha: &Arc<Ha>) {
    let now = Instant::now();
    let mut groups = wanted(ha);
    let failed = ha.failed.lock();
    for vms in groups.values_mut() {
        vms.retain(|vm| failed.get(&vm.reference).is_none_or(|failed| failed.again <= now));
    }
    drop(failed);
    let names = |vms: &Vec<Arc<Object>>| vms.iter().map(|vm| vm.reference.clone()).collect();
    let places = groups.iter().map(|(place, vms)| (*place, names(vms))).collect();
    let admitted = ha.starts.lock().admit(places, now);
    for vm in groups.into_values().flatten().filter(|vm| admitted.contains(&vm.reference)) {
        let (own, reference) = (Arc::clone(ha), vm.reference.clone());
        let starting = move || {
            let is_up = start(&own, &vm);
            let pause = Duration::from_secs(vm.int("start_delay").unsigned_abs().min(60));
            own.starts.lock().ended(&vm.reference, Instant::now(), is_up.then_some(pause));
        };
        if let Err(error) = std::thread::Builder::new().name("ha-start".to_owned()).spawn(starting) {
            tracing::error!(%error, "no thread starts a VM whose host died");
            ha.starts.lock().ended(&reference, Instant::now(), None);
        }
    }
}

/// Whether the VM runs.
fn start(ha: &Ha, vm: &Object) -> bool {
    let uuid = vm.text("uuid");
    let mut first: Option<ApiError> = None;
    for host in hosts(ha, vm) {
        let started = match ha.db.own_host() == Some(host.as_str()) {
            true => vms::start_here(&ha.vms, &vm.reference),
            false => ha.pool.start_on(&host, &vm.reference),
        };
        match started {
            Ok(()) => {
                tracing::warn!(vm = uuid, host, "a VM whose host died runs again");
                ha.failed.lock().remove(&vm.reference);
                ha.best_effort.lock().remove(&vm.reference);
                let body = format!("VM '{}' ran on a host that died, and runs again", vm.text("name_label"));
                tell(ha, "HA_PROTECTED_VM_RESTARTED", 3, uuid, &body);
                return true;
            }
            Err(error) => drop(first.get_or_insert(error)),
        }
    }
    let error = first.unwrap_or_else(|| ApiError::new("NO_HOSTS_AVAILABLE", [""; 0]));
    let mut failed = ha.failed.lock();
    let times = failed.get(&vm.reference).map_or(0, |failed| failed.times);
    let pause = AGAIN.0.saturating_mul(1 << times.min(8)).min(AGAIN.1);
    failed.insert(vm.reference.clone(), Failed { times: times + 1, again: Instant::now() + pause });
    drop(failed);
    tracing::warn!(vm = uuid, %error, "a VM whose host died does not start yet");
    // Not at once: the first host that is tried may be about to die as well.
    if times == 4 {
        let name = vm.text("name_label");
        let body =
            format!("VM '{name}' ran on a host that died, and does not start: {error}. It is tried again.");
        tell(ha, "HA_PROTECTED_VM_RESTART_FAILED", 1, uuid, &body);
    }
    false
}

fn tell(ha: &Ha, name: &'static str, priority: i64, vm: &str, body: &str) {
    if let Err(error) = crate::tell(&ha.db, name, priority, "VM", vm, body) {
        tracing::warn!(%error, "a message to the administrator is lost");
    }
}

/// Whether a host beats on all SRs on which a VM has disks that it writes, as far as this host sees them.
fn has_storage(ha: &Ha, vm: &Object, host: &str) -> bool {
    let Ok(uuid) = ha.db.get("host", host).and_then(|host| host.uuid()) else { return false };
    let is_own = ha.db.own_host() == Some(host);
    ha.written_disks(&vm.reference).iter().filter_map(|sr| ha.db.get("SR", sr).ok()?.uuid().ok()).all(|sr| {
        match ha.vms.hosts_alive_on(sr) {
            Some(alive) => is_own || alive.contains(&uuid),
            // Not seen from here: so not this host.
            None => !is_own,
        }
    })
}

/// The hosts that can start a VM: those with the fewest VMs of its anti-affinity group first, then those with the
/// fewest bytes of other VMs.
fn hosts(ha: &Ha, vm: &Object) -> Vec<String> {
    let vms = ha.db.all("VM");
    let used = |host: &str| {
        let here = vms.iter().filter(|vm| vm.text("resident_on") == host);
        here.map(|vm| vm.int("memory_dynamic_max")).sum::<i64>()
    };
    let mut hosts = ha.pool.hosts_that_reach(&vm.reference);
    // One that is attached may have lost its storage since.
    hosts.retain(|host| has_storage(ha, vm, host));
    hosts.sort_by_key(|host| used(host));
    ha.pool.apart(vm, hosts)
}

impl Ha {
    /// The hosts' memory, and that of protected VMs, in bytes.
    pub(super) fn memory(&self) -> (Vec<u64>, Vec<u64>) {
        let metrics = self.db.all("host").into_iter();
        let metrics = metrics.filter_map(|host| self.db.get("host_metrics", host.text("metrics")).ok());
        let hosts = metrics.filter(|metrics| metrics.bool("live"));
        let hosts = hosts.map(|metrics| metrics.int("memory_total").unsigned_abs()).collect();
        let vms = self.db.all("VM").into_iter();
        let vms = vms.filter(|vm| vm.text("ha_restart_priority") == RESTART && vm.bool("ha_always_run"));
        (hosts, vms.map(|vm| vm.int("memory_static_max").unsigned_abs()).collect())
    }

    /// Writes down for how many failures there is a plan, where that has changed.
    fn record_plan(&self, pool: &Object) -> Result<(), ApiError> {
        let (hosts, vms) = self.memory();
        let most = i64::try_from(plan::failures(&hosts, &vms)).unwrap_or(0);
        let wanted = pool.int("ha_host_failures_to_tolerate");
        let (exists, is_over) = (most.min(wanted), most < wanted);
        if (pool.int("ha_plan_exists_for"), pool.bool("ha_overcommitted")) == (exists, is_over) {
            return Ok(());
        }
        self.db.change(|change| {
            change.set("pool", &pool.reference, "ha_plan_exists_for", exists)?;
            change.set("pool", &pool.reference, "ha_overcommitted", is_over)
        })
    }
}
