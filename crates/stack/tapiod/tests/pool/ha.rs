//! VMs of a host that died start on another one, and never run twice.

use std::time::Duration;

use serde_json::{Value, json};
use tapio_fixtures::etcd::Cluster;

use super::motion::disks;
use super::rig::{Host, first_host, is_missing, make_sr, vdi};

/// A VM of the simulation with a disk that it writes.
pub fn make_vm(host: &Host, sr: &Value) -> Value {
    let record = json!({
        "name_label": "protected", "platform": {}, "other_config": { "driver": "sim" }, "memory_static_max": "67108864",
        "memory_dynamic_max": "67108864", "memory_dynamic_min": "67108864", "memory_static_min": "0"
    });
    let vm = host.done("VM.create", json!([record]));
    let disk = host.done("VDI.create", vdi(sr, "data"));
    let place = json!({
        "VM": vm, "VDI": disk, "userdevice": "0", "bootable": false, "mode": "RW", "type": "Disk", "empty": false,
        "other_config": {}, "qos_algorithm_type": "", "qos_algorithm_params": {}
    });
    host.done("VBD.create", json!([place]));
    vm
}

pub fn lives(at: &Host, host: &Value) -> bool {
    let metrics = at.done("host.get_metrics", json!([host]));
    at.done("host_metrics.get_live", json!([metrics])) == json!(true)
}

pub fn resident_on(at: &Host, vm: &Value) -> Option<Value> {
    let runs = at.call("VM.get_power_state", json!([vm])).ok()? == json!("Running");
    runs.then(|| at.call("VM.get_resident_on", json!([vm])).ok()).flatten()
}

#[test]
fn vms_of_a_host_that_died_start_on_another_and_run_once() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut a = first_host(&cluster, &scratch.path().join("a"));
    let mut b = Host::new(&scratch.path().join("b"), &[]);
    let sr = make_sr(&a, &scratch.path().join("shared"), true);
    let own = make_sr(&a, &scratch.path().join("own"), false);
    b.join(&a).unwrap();
    b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
    let [host_a, host_b] = [&a, &b].map(|host| a.host_at(&host.address()).unwrap());
    a.until("the other has the SR", || a.pbd_of(&sr, &host_b).is_some_and(|(_, on)| on));

    let local = make_vm(&a, &own);
    let refused = a.call("VM.assert_agile", json!([local])).unwrap_err();
    assert_eq!(refused[0], "HA_CONSTRAINT_VIOLATION_SR_NOT_SHARED");
    let vm = make_vm(&a, &sr);
    a.done("VM.set_ha_restart_priority", json!([vm, "restart"]));
    assert_eq!(a.call("VM.set_ha_restart_priority", json!([vm, "soon"])).unwrap_err()[0], "INVALID_VALUE");
    a.done("pool.enable_ha", json!([[sr], {}]));
    assert_eq!(a.call("pool.enable_ha", json!([[], {}])).unwrap_err()[0], "HA_IS_ENABLED");
    assert_eq!(a.call("pool.eject", json!([host_b])).unwrap_err()[0], "HA_IS_ENABLED");
    a.done("VM.start_on", json!([vm, host_b, false, false]));
    assert_eq!(a.done("VM.get_ha_always_run", json!([vm])), json!(true));
    assert_eq!((disks(&a), disks(&b)), (0, 1));

    // The daemon dies, and its guests go on: the storage hears of the host.
    b.kill();
    a.until("the daemon is missed", || !lives(&a, &host_b));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(resident_on(&a, &vm), Some(host_b.clone()), "{}", a.log());
    assert_eq!((disks(&a), disks(&b)), (0, 1));
    b.start(&[]);
    a.until("it is back", || lives(&a, &host_b));
    assert_eq!(resident_on(&a, &vm), Some(host_b.clone()), "{}", a.log());

    // All of the host dies, and the host that decides as soon as it has noted that for both VMs.
    let extra = make_vm(&a, &sr);
    a.done("VM.set_ha_restart_priority", json!([extra, "best-effort"]));
    a.done("VM.start_on", json!([extra, host_b, false, false]));
    assert_eq!(a.done("VM.get_ha_always_run", json!([extra])), json!(false), "nothing is promised");
    a.kill();
    a.start(&[("TAPIO_DIE_AT", "vm-shutdown:halted:2")]);
    a.until("it is a member again", || [&host_a, &host_b].contains(&&a.master()) && lives(&a, &host_a));
    b.kill_all();
    a.ends();
    a.start(&[]);
    for vm in [&vm, &extra] {
        a.until("the VM runs on the other host", || resident_on(&a, vm).as_ref() == Some(&host_a));
    }
    assert_eq!((disks(&a), disks(&b)), (2, 0));
    let told = a.done("message.get_all_records", json!([]));
    let is_told = |name: &str| told.as_object().unwrap().values().any(|message| message["name"] == name);
    assert!(is_told("HA_PROTECTED_VM_RESTARTED"), "{told}");

    // What it had is not its own any more.
    b.start(&[]);
    b.until("it is a member again", || lives(&a, &host_b));
    b.until("what ran there is ended", || b.log().contains("what is left of it here is ended"));
    assert_eq!(resident_on(&b, &vm), Some(host_a));
    assert_eq!((disks(&a), disks(&b)), (2, 0));

    // A client that asks for its end gets it.
    a.done("VM.hard_shutdown", json!([vm]));
    assert_eq!(a.done("VM.get_ha_always_run", json!([vm])), json!(false));
    assert_eq!(a.done("VM.get_ha_always_run", json!([extra])), json!(false), "it was started once");
    a.done("pool.disable_ha", json!([]));
}
