//! Guests that go to another host of their pool while they run.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use tapio_core::motion::LIVE_STEPS;
use tapio_fixtures::etcd::Cluster;

use super::guest::{Guest, kernel, make_vm};
use super::motion_failures::stalled;
use super::rig::{Failure, Host, Place, is_missing, make_sr, vdi};

/// Two hosts with a shared SR.
pub struct Two {
    pub a: Host,
    pub b: Host,
    pub sr: Value,
    pub at_a: Value,
    pub at_b: Value,
}

impl Two {
    pub fn new(cluster: &Cluster, dir: &Path, kernels: &Path) -> Self {
        Self::placed(cluster, dir, kernels, [None, None])
    }

    /// The same of hosts in a network of the test's own.
    pub fn placed(cluster: &Cluster, dir: &Path, kernels: &Path, places: [Option<Place>; 2]) -> Self {
        let kernels = format!("--set=kernel-dirs={}", kernels.display());
        let endpoints = format!("--set=etcd-endpoints={}", cluster.endpoints().join(","));
        let pool = "--set=etcd-prefix=/pool".to_owned();
        let mut of_both = vec![kernels];
        if places.iter().all(Option::is_none) {
            // No host dies by its lease here: one that a busy machine keeps from renewing it is not to start again.
            of_both.push("--set=pool-lease=20".to_owned());
        }
        let [at_a, at_b] = places;
        let a = Host::placed(&dir.join("a"), &[&[endpoints, pool], &of_both[..]].concat(), at_a);
        let b = Host::placed(&dir.join("b"), &of_both, at_b);
        let sr = make_sr(&a, &dir.join("shared"), true);
        b.join(&a).unwrap();
        b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
        let [at_a, at_b] = [&a, &b].map(|host| a.host_at(&host.address()).unwrap());
        a.until("the other has the SR", || a.pbd_of(&sr, &at_b).is_some_and(|(_, on)| on));
        Self { a, b, sr, at_a, at_b }
    }

    /// Waits until each host answers the other, and both have the SR.
    pub fn at_rest(&self) {
        self.a.until("both hosts answer", || {
            let answers = |from: &Host, of: &Value| from.call("host.get_fingerprint", json!([of])).is_ok();
            let has_sr = |host: &Value| self.a.pbd_of(&self.sr, host).is_some_and(|(_, on)| on);
            answers(&self.a, &self.at_b)
                && answers(&self.b, &self.at_a)
                && [&self.at_a, &self.at_b].into_iter().all(has_sr)
        });
    }

    /// Where the record says that the VM runs.
    pub fn resident(&self, vm: &Value) -> Option<Value> {
        let runs = self.a.call("VM.get_power_state", json!([vm])).ok()? == json!("Running");
        runs.then(|| self.a.call("VM.get_resident_on", json!([vm])).ok()).flatten()
    }
}

/// Disk processes of a host.
pub fn disks(host: &Host) -> usize {
    host.running("tapio-disk").len()
}

#[test]
fn a_guest_that_writes_goes_to_another_host_and_back() {
    let Some(kernels) = kernel().filter(|_| !is_missing()) else { return };
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let two = Two::new(&cluster, scratch.path(), &kernels);
    let Two { a, b, sr, at_a, at_b } = &two;
    let disk = a.done("VDI.create", vdi(sr, "data"));
    a.done("VDI.resize", json!([disk, 64 << 20]));
    let vm = make_vm(a, &kernels, &[&disk]);
    let vif = make_vif(a, &vm);
    let refused = a.call("VM.pool_migrate", json!([vm, at_b, {}])).unwrap_err();
    assert_eq!(refused[0], "VM_BAD_POWER_STATE", "{refused:?}");
    a.done("VM.start_on", json!([vm, at_a, false, false]));
    let guest = Guest::of(a, &vm);
    guest.wait(a);
    guest.begin_to_write(a);
    assert_eq!((guest.emulators(a), guest.emulators(b)), (1, 0));

    refused_where_it_cannot_go(&two, &vm, scratch.path());
    // Cancelled at a host that has another one do it.
    let mut two = two;
    let cancelled = stalled(&mut two, &vm, |two, task| {
        two.b.done("task.cancel", json!([task]));
        let status = || two.b.done("task.get_status", json!([task]));
        let told = || format!("it is {}; the log of the sender:\n{}", status(), two.a.log());
        two.b.until_or("it is cancelled", told, || status() == json!("cancelled"));
    });
    assert_eq!(cancelled.unwrap_err()[0], "TASK_CANCELLED");
    let Two { a, b, at_a, at_b, .. } = &two;
    b.until("nothing is left at the receiver", || (guest.emulators(b), disks(b)) == (0, 0));
    assert_eq!((two.resident(&vm).as_ref(), guest.emulators(a), disks(a)), (Some(at_a), 1, 1));
    guest.goes_on(a);
    // It keeps what it gets while it runs, at each host.
    a.done("VM.set_VCPUs_number_live", json!([vm, 2]));
    a.done("VM.set_memory_dynamic_range", json!([vm, 96 << 20, 96 << 20]));
    a.done("VM.wait_memory_target_live", json!([vm]));
    let begun = Instant::now();
    a.done("VM.pool_migrate", json!([vm, at_b, {}]));
    println!("moved in {:?}", begun.elapsed());
    assert_eq!(two.resident(&vm).as_ref(), Some(at_b), "{}", a.log());
    assert_eq!((guest.emulators(a), guest.emulators(b)), (0, 1));
    assert_eq!((disks(a), disks(b)), (0, 1));
    guest.goes_on(b);
    // Its interface came along, and is unplugged and plugged at the host that has it.
    let is_plugged = |vif: &Value| a.done("VIF.get_currently_attached", json!([vif])) == json!(true);
    assert!(is_plugged(&vif));
    a.done("VIF.unplug", json!([vif]));
    assert!(!is_plugged(&vif));
    a.done("VIF.plug", json!([vif]));
    assert!(is_plugged(&vif));
    let fewer = a.call("VM.set_VCPUs_number_live", json!([vm, 1])).unwrap_err();
    assert!(fewer[1].contains("has 2 processors"), "{fewer:?}");
    a.done("VM.set_VCPUs_number_live", json!([vm, 3]));
    a.done("VM.wait_memory_target_live", json!([vm]));
    a.done("VM.set_memory_target_live", json!([vm, 120 << 20]));
    a.done("VM.wait_memory_target_live", json!([vm]));

    // All VMs of a host, asked of the one that decides, which is not the one that has them.
    evacuated(&two, &kernels, &vm);
    assert_eq!((guest.emulators(a), guest.emulators(b)), (1, 0));
    guest.goes_on(a);

    b.done("VM.assert_can_migrate", json!([vm, { "host": at_b }, true, {}, {}, {}]));
    assert_eq!(b.done("VM.migrate_send", json!([vm, { "host": at_b }, true, {}, {}, {}])), vm);
    assert_eq!(two.resident(&vm).as_ref(), Some(at_b), "{}", b.log());
    assert_eq!((disks(a), disks(b)), (0, 1));
    let own = with_disks_of_one_host(&two, &vm, &guest, scratch.path());
    println!("{} blocks are right", guest.verify(b));

    a.done("VM.hard_shutdown", json!([vm]));
    assert_eq!((guest.emulators(a), guest.emulators(b)), (0, 0));
    assert_eq!((disks(a), disks(b)), (0, 0));
    // Without a guest the disks go the same way.
    assert_eq!(send(b, &vm, at_a, &own[0]).unwrap(), vm);
    assert_eq!(sr_of(b, &vm), own[0]);
}

/// How many VDIs an SR has.
pub fn vdis_of(host: &Host, sr: &Value) -> usize {
    host.done("SR.get_VDIs", json!([sr])).as_array().map_or(0, Vec::len)
}

/// The SR of the VM's only disk.
pub fn sr_of(host: &Host, vm: &Value) -> Value {
    host.done("VDI.get_SR", json!([disk_of(host, vm)]))
}

pub fn disk_of(host: &Host, vm: &Value) -> Value {
    let vbds = host.done("VM.get_VBDs", json!([vm]));
    host.done("VBD.get_VDI", json!([vbds[0]]))
}

/// `VM.migrate_send` of a VM with its disk.
fn send(host: &Host, vm: &Value, to: &Value, sr: &Value) -> Result<Value, Failure> {
    let map = json!({ disk_of(host, vm).as_str().unwrap(): sr });
    host.call("VM.migrate_send", json!([vm, { "host": to }, true, map, {}, {}]))
}

/// The guest, which is at the second host, goes to the first and back, with its disk on SRs that only one of them has.
/// Those SRs, the first host's first; the disk is on the second's then.
fn with_disks_of_one_host(two: &Two, vm: &Value, guest: &Guest, dir: &Path) -> [Value; 2] {
    let Two { a, b, sr, at_a, at_b } = two;
    let own = [make_sr(a, &dir.join("own-a"), false), make_sr(b, &dir.join("own-b"), false)];
    let is_at = |host: &Value, sr: &Value| {
        assert_eq!((two.resident(vm).as_ref(), sr_of(b, vm)), (Some(host), sr.clone()), "{}", b.log());
    };
    assert_eq!(send(b, vm, at_a, &own[0]).unwrap(), *vm);
    is_at(at_a, &own[0]);
    assert_eq!((disks(a), disks(b)), (1, 0));
    guest.goes_on(a);
    assert_eq!(send(b, vm, at_b, &own[0]).unwrap_err()[..], ["VM_REQUIRES_SR", text(vm), text(&own[0])]);
    // Along with the guest, there and back: the two SRs have no host in common.
    for (to, at, sr) in [(b, at_b, &own[1]), (a, at_a, &own[0]), (b, at_b, &own[1])] {
        assert_eq!(send(b, vm, at, sr).unwrap(), *vm);
        is_at(at, sr);
        assert_eq!((disks(a) + disks(b), disks(to)), (1, 1));
        guest.goes_on(to);
    }
    b.until("the old disks are gone", || vdis_of(b, &own[0]) == 0);
    assert_eq!(vdis_of(b, &own[1]), 1);
    // The disk goes ahead, the guest does not follow, and the disk comes back.
    a.done("VM.add_to_blocked_operations", json!([vm, "pool_migrate", "it stays"]));
    assert_eq!(send(b, vm, at_a, sr).unwrap_err()[0], "OPERATION_BLOCKED");
    is_at(at_b, &own[1]);
    a.done("VM.remove_from_blocked_operations", json!([vm, "pool_migrate"]));
    own
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// An interface on a network that no host has a bridge for: its link is down.
fn make_vif(host: &Host, vm: &Value) -> Value {
    let network =
        host.done("network.create", json!([{ "name_label": "none", "other_config": {}, "MTU": "1500" }]));
    let record = json!({
        "VM": vm, "network": network, "device": "2", "MAC": "", "MTU": "1500", "other_config": {},
        "qos_algorithm_type": "", "qos_algorithm_params": {}
    });
    host.done("VIF.create", json!([record]))
}

/// The VMs of the other host come to this one, apart from one that no host takes: its guest ends.
fn evacuated(two: &Two, kernels: &Path, vm: &Value) {
    let Two { a, b, at_a, at_b, .. } = two;
    let record = json!({
        "name_label": "pretended", "platform": {}, "other_config": { "driver": "sim" }, "memory_static_max": "67108864",
        "memory_dynamic_max": "67108864", "memory_dynamic_min": "67108864", "memory_static_min": "0"
    });
    let pretended = a.done("VM.create", json!([record]));
    let second = make_vm(a, kernels, &[]);
    let blocked = make_vm(a, kernels, &[]);
    for vm in [&pretended, &second, &blocked] {
        a.done("VM.start_on", json!([vm, at_b, false, false]));
    }
    a.done("VM.add_to_blocked_operations", json!([blocked, "pool_migrate", "it stays"]));
    let found = a.done("host.get_vms_which_prevent_evacuation", json!([at_b]));
    let found = found.as_object().unwrap();
    let code = |vm: &Value| found.get(vm.as_str().unwrap()).map(|error| error[0].clone());
    assert_eq!(code(&pretended), Some(json!("VM_LACKS_FEATURE")), "{found:?}");
    assert_eq!(code(&blocked), Some(json!("OPERATION_BLOCKED")), "{found:?}");
    assert_eq!(found.len(), 2, "{found:?}");
    let refused = a.call("host.assert_can_evacuate", json!([at_b])).unwrap_err();
    assert_eq!(refused[0], "CANNOT_EVACUATE_HOST");
    assert!(refused[1].contains("VM_LACKS_FEATURE,") && refused[1].contains('|'), "{refused:?}");

    let networks = a.done("network.get_all_records", json!([]));
    let is_without = |network: &&Value| network["PIFs"].as_array().is_some_and(Vec::is_empty);
    let without = networks.as_object().unwrap().values().find(is_without);
    if let Some(network) = without {
        let network = a.done("network.get_by_uuid", json!([network["uuid"]]));
        let refused = b.call("VM.pool_migrate", json!([vm, at_a, { "network": network }])).unwrap_err();
        assert_eq!(refused, ["PIF_NOT_PRESENT", at_a.as_str().unwrap(), network.as_str().unwrap()]);
    }

    a.done("host.disable", json!([at_b]));
    let error = a.call("host.evacuate", json!([at_b, "OpaqueRef:NULL", "4"])).unwrap_err();
    assert_eq!(error, ["OPERATION_BLOCKED", blocked.as_str().unwrap(), "it stays"]);
    let state = |vm: &Value| a.done("VM.get_power_state", json!([vm]));
    for (vm, at) in [(vm, at_a), (&second, at_a), (&blocked, at_b)] {
        a.until("it runs where it belongs", || two.resident(vm).as_ref() == Some(at));
    }
    assert_eq!((state(&pretended), disks(b)), (json!("Halted"), 0));
    a.done("VM.hard_shutdown", json!([blocked]));

    // By a task, whose progress comes from the other host. The guest that moves has booted.
    a.done("host.enable", json!([at_b]));
    a.done("VM.pool_migrate", json!([vm, at_b, {}]));
    a.done("host.disable", json!([at_b]));
    let task = a.done("Async.host.evacuate", json!([at_b, "OpaqueRef:NULL", "0"]));
    a.until("it has ended", || a.done("task.get_status", json!([task])) != json!("pending"));
    assert_eq!(a.done("task.get_status", json!([task])), json!("success"), "{}", b.log());
    let logs = || format!("{}\nthe log of the other host:\n{}", b.log(), a.log());
    assert_eq!(two.resident(vm).as_ref(), Some(at_a), "{}", logs());
    a.done("host.assert_can_evacuate", json!([at_b]));
    a.done("host.enable", json!([at_b]));
    a.done("VM.hard_shutdown", json!([second]));
}

/// What forbids that a VM goes to the other host, each with its error.
fn refused_where_it_cannot_go(two: &Two, vm: &Value, dir: &Path) {
    let Two { a, b, at_a, at_b, .. } = two;
    let refused = |what: &Value| a.call("VM.pool_migrate", json!([what, at_b, {}])).unwrap_err();
    let record = json!({
        "name_label": "pretended", "platform": {}, "other_config": { "driver": "sim" }, "memory_static_max": "67108864",
        "memory_dynamic_max": "67108864", "memory_dynamic_min": "67108864", "memory_static_min": "0"
    });
    let pretended = a.done("VM.create", json!([record]));
    a.done("VM.start_on", json!([pretended, at_a, false, false]));
    let why = refused(&pretended);
    assert!(why[0] == "VM_LACKS_FEATURE" && why[2].contains("driver sim"), "{why:?}");
    a.done("VM.hard_shutdown", json!([pretended]));

    a.done("host.disable", json!([at_b]));
    assert_eq!(refused(vm)[0], "HOST_DISABLED");
    a.done("host.enable", json!([at_b]));
    let can = |map: &Value| a.call("VM.assert_can_migrate", json!([vm, { "host": at_b }, true, map, {}, {}]));
    can(&json!({})).unwrap();

    // A disk that only one of them has.
    let own = make_sr(a, &dir.join("own"), false);
    let local = a.done("VDI.create", vdi(&own, "local"));
    let place = json!({
        "VM": vm, "VDI": local, "userdevice": "1", "bootable": false, "mode": "RW", "type": "Disk", "empty": false,
        "other_config": {}, "qos_algorithm_type": "", "qos_algorithm_params": {}
    });
    let vbd = a.done("VBD.create", json!([place]));
    assert_eq!(refused(vm), ["VM_REQUIRES_SR", vm.as_str().unwrap(), own.as_str().unwrap()]);
    a.done("VBD.destroy", json!([vbd]));
    let vbds = a.done("VM.get_VBDs", json!([vm]));
    let disk = a.done("VBD.get_VDI", json!([vbds[0]]));
    let map = json!({ disk.as_str().unwrap(): own });
    assert_eq!(can(&map).unwrap_err()[..], ["VM_REQUIRES_SR", text(vm), text(&own)]);
    assert_eq!((disks(a), disks(b)), (1, 0), "nothing was begun");
}

/// The call that moves the guest, to the second host or back.
pub type Way<'a> = dyn Fn(&Two, bool) -> (&'static str, Value) + 'a;

/// What a motion comes to whose daemon is killed: of the sender at its steps, of the receiver at its own.
pub fn killed(two: &mut Two, guest: &Guest, vm: &Value, step: &str, way: &Way<'_>) {
    let of_sender = step.starts_with("vm-migrate:");
    let dies = if of_sender { &mut two.a } else { &mut two.b };
    dies.kill();
    dies.start(&[("TAPIO_DIE_AT", step)]);
    two.at_rest();
    let (method, params) = way(two, true);
    let (a, b) = (&mut two.a, &mut two.b);
    let dies = if of_sender { None } else { Some(&mut *b) };
    let answer = std::thread::scope(|scope| {
        let other = dies.map(|host| {
            scope.spawn(move || {
                host.ends();
                host.start(&[]);
            })
        });
        let answer = a.call(method, params);
        other.into_iter().for_each(|other| other.join().unwrap());
        answer
    });
    let is_there = matches!(step, "vm-migrate:decided" | "vm-arrive:running");
    if of_sender {
        assert_eq!(answer.unwrap_err()[0], "NO_ANSWER", "{step}");
        two.a.ends();
        two.a.start(&[]);
    } else {
        assert_eq!(answer.is_ok(), is_there, "{step}: {answer:?}");
    }
    let (a, b) = (&two.a, &two.b);
    let (place, host, other) = if is_there { (&two.at_b, b, a) } else { (&two.at_a, a, b) };
    host.until(&format!("the guest is at one host after {step}"), || {
        two.resident(vm).as_ref() == Some(place)
            && (guest.emulators(host), guest.emulators(other)) == (1, 0)
            && (disks(host), disks(other)) == (1, 0)
    });
    guest.goes_on(host);
    if is_there {
        let (method, params) = way(two, false);
        b.done(method, params);
        guest.goes_on(a);
    }
}

#[test]
#[ignore = "takes minutes: eleven kills of daemons with a guest that is emulated"]
fn a_guest_is_at_one_host_after_a_kill_at_each_step() {
    let Some(kernels) = kernel().filter(|_| !is_missing()) else { return };
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut two = Two::new(&cluster, scratch.path(), &kernels);
    let disk = two.a.done("VDI.create", vdi(&two.sr, "data"));
    two.a.done("VDI.resize", json!([disk, 64 << 20]));
    let vm = make_vm(&two.a, &kernels, &[&disk]);
    two.a.done("VM.start_on", json!([vm, two.at_a, false, false]));
    let guest = Guest::of(&two.a, &vm);
    guest.wait(&two.a);
    guest.begin_to_write(&two.a);
    let only = std::env::var("TAPIO_STEP").unwrap_or_default();
    for step in LIVE_STEPS.iter().filter(|step| step.name.contains(&only)) {
        println!("killed at {}", step.name);
        let way = |two: &Two, there: bool| {
            ("VM.pool_migrate", json!([vm, if there { &two.at_b } else { &two.at_a }, {}]))
        };
        killed(&mut two, &guest, &vm, step.name, &way);
    }
    println!("{} blocks are right", guest.verify(&two.a));
    two.a.done("VM.hard_shutdown", json!([vm]));
}
