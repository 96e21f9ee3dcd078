//! VMs of an anti-affinity group: where they run, and to which host another one goes.
//!
//! It is a wish, not a condition: a VM starts beside others of its group rather than not at all.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_model::Value;

use super::Pool;
use crate::db::{Db, Object};

/// The class of the groups.
pub(crate) const CLASS: &str = "VM_group";

/// How long a VM counts at the host that it was sent to and does not run on yet. VMs that start beside each other see
/// each other by it; of one that failed to start nothing is left after it.
const SENT_FOR: Duration = Duration::from_secs(60);

/// VMs that were sent to a host, and until when that counts, by the VM's reference.
#[derive(Debug, Default)]
pub(super) struct Sent(Mutex<BTreeMap<String, (String, Instant)>>);

/// Whether this is a group whose VMs are to run on different hosts.
pub(crate) fn is_anti_affinity(group: &Object) -> bool {
    group.text("placement") == "anti_affinity"
}

/// The host that a VM runs on, or is paused on.
pub(crate) fn host_of(vm: &Object) -> Option<String> {
    (!vm.is_null("resident_on")).then(|| vm.text("resident_on").to_owned())
}

/// The anti-affinity group of a VM.
fn group_of(db: &Db, vm: &Object) -> Option<Arc<Object>> {
    let groups = vm.get("groups").as_set()?.iter().filter_map(Value::as_str);
    groups.filter_map(|group| db.get(CLASS, group).ok()).find(|group| is_anti_affinity(group))
}

/// Whether a VM is to run apart from others.
pub(super) fn has_group(db: &Db, vm: &Object) -> bool {
    group_of(db, vm).is_some()
}

/// For each host, how many other VMs of its anti-affinity group a VM would find there; `at` says where each of them is
/// or will be. None for a VM without such a group.
pub(crate) fn found(
    db: &Db,
    vm: &Object,
    at: impl Fn(&Object) -> Option<String>,
) -> Option<BTreeMap<String, usize>> {
    let group = group_of(db, vm)?;
    let mut found = BTreeMap::new();
    for other in db.find("VM", "groups", &group.reference) {
        if other.reference != vm.reference
            && let Some(host) = at(&other)
        {
            *found.entry(host).or_default() += 1;
        }
    }
    Some(found)
}

impl Sent {
    /// See [`Pool::apart`].
    fn order(&self, db: &Db, vm: &Object, mut hosts: Vec<String>) -> Vec<String> {
        let mut sent = self.0.lock();
        let now = Instant::now();
        let is_down = |vm: &String| db.get("VM", vm).is_ok_and(|vm| host_of(&vm).is_none());
        sent.retain(|vm, (_, until)| *until > now && is_down(vm));
        let at = |vm: &Object| host_of(vm).or_else(|| sent.get(&vm.reference).map(|(host, _)| host.clone()));
        let Some(found) = found(db, vm, at) else { return hosts };
        hosts.sort_by_key(|host| found.get(host).copied().unwrap_or_default());
        if let Some(first) = hosts.first() {
            sent.insert(vm.reference.clone(), (first.clone(), now + SENT_FOR));
        }
        hosts
    }
}

impl Pool {
    /// The hosts in the order in which a VM is tried there: those with the fewest VMs of its anti-affinity group first,
    /// otherwise as they were. The VM counts as sent to the first one.
    pub(crate) fn apart(&self, vm: &Object, hosts: Vec<String>) -> Vec<String> {
        self.sent.order(&self.db, vm, hosts)
    }

    /// The host on which a VM of an anti-affinity group starts, of those that have its disks; the one of `usual` comes
    /// first among equals. A host without room for it is chosen only if there is no other. None if no host has its
    /// disks.
    pub(super) fn start_apart(&self, vm: &Object, usual: &str) -> Option<String> {
        let mut hosts = self.hosts_that_reach(&vm.reference);
        let used = |host: &str| {
            let here = self.db.find("VM", "resident_on", host).into_iter();
            let here = here.filter(|vm| !vm.bool("is_control_domain"));
            here.map(|vm| vm.int("memory_dynamic_max")).sum::<i64>()
        };
        let has_room = |host: &String| {
            let total =
                self.db.get("host", host).and_then(|host| self.db.get("host_metrics", host.text("metrics")));
            total.is_ok_and(|all| used(host) + vm.int("memory_dynamic_max") <= all.int("memory_total"))
        };
        if hosts.iter().any(has_room) {
            hosts.retain(has_room);
        }
        hosts.sort_by_key(|host| host != usual);
        self.apart(vm, hosts).into_iter().next()
    }
}

/// A group whose running VMs, two or more, are all on one host.
pub(crate) struct Broken {
    pub(crate) group: Arc<Object>,
    pub(crate) host: String,
}

/// The anti-affinity groups that are broken now.
pub(crate) fn broken(db: &Db) -> Vec<Broken> {
    let groups = db.all(CLASS).into_iter().filter(|group| is_anti_affinity(group));
    let is_broken = |group: Arc<Object>| {
        let hosts: Vec<String> =
            db.find("VM", "groups", &group.reference).iter().filter_map(|vm| host_of(vm)).collect();
        let (first, rest) = hosts.split_first()?;
        let is_one = !rest.is_empty() && rest.iter().all(|host| host == first);
        is_one.then(|| Broken { group, host: first.clone() })
    };
    groups.filter_map(is_broken).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group, and VMs of it on these hosts; an empty name: on none.
    fn vms(db: &Db, placement: &str, at: &[&str]) -> Vec<Arc<Object>> {
        let group = db.create(CLASS, &[("placement", placement.into())]).expect("a group");
        let one = |host: &&str| {
            let class = tapio_model::class("VM").expect("a class").fields.iter();
            let required = class.filter(|field| matches!(field.initial, tapio_model::Initial::Required));
            let mut fields: Vec<_> = required.map(|field| (field.name, Object::first_value(field))).collect();
            fields.push(("resident_on", Value::string(*host)));
            fields.push(("groups", Value::strings([group.as_str()])));
            let vm = db.create("VM", &fields).expect("a VM");
            db.get("VM", &vm).expect("it is there")
        };
        at.iter().map(one).collect()
    }

    fn names(hosts: &[&str]) -> Vec<String> {
        hosts.iter().map(|host| (*host).to_owned()).collect()
    }

    #[test]
    fn the_host_with_the_fewest_comes_first_and_equals_stay_in_order() {
        let (db, sent) = (Db::default(), Sent::default());
        let all = vms(&db, "anti_affinity", &["a", "a", "b", "", ""]);
        let order = |vm: &Object, hosts: &[&str]| sent.order(&db, vm, names(hosts));
        assert_eq!(order(&all[3], &["a", "b", "c"]), names(&["c", "b", "a"]));
        // It is on its way to c, and the next one finds it there.
        assert_eq!(order(&all[4], &["a", "b", "c"]), names(&["b", "c", "a"]));
        assert_eq!(
            order(&all[3], &["a", "c", "b"]),
            names(&["c", "a", "b"]),
            "b has another one, and one on its way"
        );
        // One that has arrived, and has ended, counts nowhere.
        db.set("VM", &all[4].reference, "resident_on", "b").expect("it is there");
        assert_eq!(order(&all[3], &["b", "c"]), names(&["c", "b"]));
        for vm in &all {
            db.set("VM", &vm.reference, "resident_on", tapio_model::NULL_REF).expect("it is there");
        }
        assert_eq!(order(&all[3], &["b", "a"]), names(&["b", "a"]));
        // A VM that leaves a host does not count there: the caller knows where it goes.
        let all = vms(&db, "anti_affinity", &["a", "a", "b"]);
        let at =
            |vm: &Object| if vm.reference == all[1].reference { Some("c".to_owned()) } else { host_of(vm) };
        let found = found(&db, &all[0], at).expect("a group");
        assert_eq!(found, BTreeMap::from([("b".to_owned(), 1), ("c".to_owned(), 1)]));
    }

    #[test]
    fn other_groups_have_no_rule_and_one_vm_breaks_none() {
        let db = Db::default();
        let normal = vms(&db, "normal", &["a", "a"]);
        assert!(!has_group(&db, &normal[0]));
        assert_eq!(Sent::default().order(&db, &normal[0], names(&["a", "b"])), names(&["a", "b"]));
        vms(&db, "anti_affinity", &["a", ""]);
        vms(&db, "anti_affinity", &["a", "b"]);
        assert_eq!(broken(&db).len(), 0);
        vms(&db, "anti_affinity", &["b", "", "b"]);
        let broken = broken(&db);
        assert_eq!(broken.iter().map(|one| one.host.as_str()).collect::<Vec<_>>(), ["b"]);
    }
}
