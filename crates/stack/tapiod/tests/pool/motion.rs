//! Guests that go to another host of their pool while they run.

use std::fs;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use tapio_core::motion::LIVE_STEPS;
use tapio_fixtures::etcd::Cluster;

use super::guest::{Guest, kernel, make_vm};
use super::rig::{Host, is_missing, make_sr, vdi};

/// Two hosts with a shared SR.
struct Two {
    a: Host,
    b: Host,
    sr: Value,
    at_a: Value,
    at_b: Value,
}

impl Two {
    fn new(cluster: &Cluster, dir: &Path, kernels: &Path) -> Self {
        let kernels = format!("--set=kernel-dirs={}", kernels.display());
        let endpoints = format!("--set=etcd-endpoints={}", cluster.endpoints().join(","));
        let pool = "--set=etcd-prefix=/pool".to_owned();
        let a = Host::new(&dir.join("a"), &[endpoints, pool, kernels.clone()]);
        let b = Host::new(&dir.join("b"), &[kernels]);
        let sr = make_sr(&a, &dir.join("shared"), true);
        b.join(&a).unwrap();
        b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
        let [at_a, at_b] = [&a, &b].map(|host| a.host_at(&host.address()).unwrap());
        a.until("the other has the SR", || a.pbd_of(&sr, &at_b).is_some_and(|(_, on)| on));
        Self { a, b, sr, at_a, at_b }
    }

    /// Where the record says that the VM runs.
    fn resident(&self, vm: &Value) -> Option<Value> {
        let runs = self.a.call("VM.get_power_state", json!([vm])).ok()? == json!("Running");
        runs.then(|| self.a.call("VM.get_resident_on", json!([vm])).ok()).flatten()
    }
}

/// Disk processes of a host.
fn disks(host: &Host) -> usize {
    let is_disk = |pid: &i32| {
        fs::read_link(format!("/proc/{pid}/exe"))
            .is_ok_and(|path| path.to_string_lossy().contains("tapio-disk"))
    };
    host.processes().iter().filter(|pid| is_disk(pid)).count()
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
    let refused = a.call("VM.pool_migrate", json!([vm, at_b, {}])).unwrap_err();
    assert_eq!(refused[0], "VM_BAD_POWER_STATE", "{refused:?}");
    a.done("VM.start_on", json!([vm, at_a, false, false]));
    let guest = Guest::of(a, &vm);
    guest.wait(a);
    guest.begin_to_write(a);
    assert_eq!((guest.emulators(a), guest.emulators(b)), (1, 0));

    refused_where_it_cannot_go(&two, &vm, scratch.path());
    let begun = Instant::now();
    a.done("VM.pool_migrate", json!([vm, at_b, {}]));
    println!("moved in {:?}", begun.elapsed());
    assert_eq!(two.resident(&vm).as_ref(), Some(at_b), "{}", a.log());
    assert_eq!((guest.emulators(a), guest.emulators(b)), (0, 1));
    assert_eq!((disks(a), disks(b)), (0, 1));
    guest.goes_on(b);

    // Asked of the host that decides, which is not the one that has it.
    a.done("VM.assert_can_migrate", json!([vm, { "host": at_a }, true, {}, {}, {}]));
    assert_eq!(a.done("VM.migrate_send", json!([vm, { "host": at_a }, true, {}, {}, {}])), vm);
    assert_eq!(two.resident(&vm).as_ref(), Some(at_a), "{}", b.log());
    assert_eq!((guest.emulators(a), guest.emulators(b)), (1, 0));
    assert_eq!((disks(a), disks(b)), (1, 0));
    guest.goes_on(a);
    println!("{} blocks are right", guest.verify(a));

    a.done("VM.hard_shutdown", json!([vm]));
    assert_eq!((guest.emulators(a), guest.emulators(b)), (0, 0));
    assert_eq!((disks(a), disks(b)), (0, 0));
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
    assert_eq!(can(&map).unwrap_err()[0], "OPERATION_NOT_ALLOWED");
    assert_eq!((disks(a), disks(b)), (1, 0), "nothing was begun");
}

/// What a motion comes to whose daemon is killed: of the sender at its steps, of the receiver at its own.
fn killed(two: &mut Two, guest: &Guest, vm: &Value, step: &str) {
    let of_sender = step.starts_with("vm-migrate:");
    let dies = if of_sender { &mut two.a } else { &mut two.b };
    dies.kill();
    dies.start(&[("TAPIO_DIE_AT", step)]);
    two.a.until("both hosts answer", || {
        let answers = |from: &Host, of: &Value| from.call("host.get_fingerprint", json!([of])).is_ok();
        let has_sr = |host: &Value| two.a.pbd_of(&two.sr, host).is_some_and(|(_, on)| on);
        answers(&two.a, &two.at_b)
            && answers(&two.b, &two.at_a)
            && [&two.at_a, &two.at_b].into_iter().all(has_sr)
    });
    let (a, b) = (&mut two.a, &mut two.b);
    let (params, dies) = (json!([vm, two.at_b, {}]), if of_sender { None } else { Some(&mut *b) });
    let answer = std::thread::scope(|scope| {
        let other = dies.map(|host| {
            scope.spawn(move || {
                host.ends();
                host.start(&[]);
            })
        });
        let answer = a.call("VM.pool_migrate", params);
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
        b.done("VM.pool_migrate", json!([vm, two.at_a, {}]));
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
        killed(&mut two, &guest, &vm, step.name);
    }
    println!("{} blocks are right", guest.verify(&two.a));
    two.a.done("VM.hard_shutdown", json!([vm]));
}
