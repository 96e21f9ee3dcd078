//! VMs of an anti-affinity group start on different hosts.

use serde_json::{Value, json};
use tapio_fixtures::etcd::Cluster;

use super::ha::{make_vm, resident_on};
use super::rig::{Host, first_host, is_missing, make_sr};

#[test]
fn vms_of_a_group_start_apart() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let a = first_host(&cluster, &scratch.path().join("a"));
    let b = Host::new(&scratch.path().join("b"), &[]);
    let sr = make_sr(&a, &scratch.path().join("shared"), true);
    b.join(&a).unwrap();
    b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
    let [host_a, host_b] = [&a, &b].map(|host| a.host_at(&host.address()).unwrap());
    a.until("the other has the SR", || a.pbd_of(&sr, &host_b).is_some_and(|(_, on)| on));

    // All prefer one host. Two that start beside each other do not end up there both.
    let group = a.done("VM_group.create", json!([{ "name_label": "apart", "placement": "anti_affinity" }]));
    let appliance = a.done("VM_appliance.create", json!([{ "name_label": "both" }]));
    let vms = [(); 3].map(|()| make_vm(&a, &sr));
    for vm in &vms {
        a.done("VM.set_groups", json!([vm, [group]]));
        a.done("VM.set_affinity", json!([vm, host_a]));
    }
    for vm in &vms[..2] {
        a.done("VM.set_appliance", json!([vm, appliance]));
    }
    a.done("VM_appliance.start", json!([appliance, false]));
    let at = |vm: &Value| resident_on(&a, vm).unwrap_or_else(|| panic!("it does not run; {}", a.log()));
    let both = [at(&vms[0]), at(&vms[1])];
    assert!(both.contains(&host_a) && both.contains(&host_b), "{both:?}");
    // Among equals it goes where it would go without a group.
    a.done("VM.start", json!([vms[2], false, false]));
    assert_eq!(at(&vms[2]), host_a);
    // Where one of two left is not, and by way of either host.
    let on_a = if both[0] == host_a { &vms[0] } else { &vms[1] };
    a.done("VM.hard_shutdown", json!([vms[2]]));
    a.done("VM.hard_shutdown", json!([on_a]));
    a.done("VM.set_affinity", json!([on_a, host_b]));
    b.done("VM.start", json!([on_a, false, false]));
    assert_eq!(at(on_a), host_a);
    // A host that is told is taken, and one alone is better than none.
    a.done("VM.start_on", json!([vms[2], host_b, false, false]));
    assert_eq!(at(&vms[2]), host_b);
    a.done("VM.hard_shutdown", json!([vms[2]]));
    a.done("host.disable", json!([host_b]));
    a.done("VM.start", json!([vms[2], false, false]));
    assert_eq!(at(&vms[2]), host_a);
    would_fit(&a);
    a.done("VM_group.destroy", json!([group]));
    assert_eq!(b.done("VM.get_groups", json!([vms[2]])), json!([]));
}

/// How many hosts may fail if VMs wanted something else than they do.
fn would_fit(a: &Host) {
    let hosts = a.done("host_metrics.get_all_records", json!([]));
    let memory = hosts.as_object().unwrap().values().map(|one| one["memory_total"].to_string());
    let least: u64 = memory.map(|text| text.trim_matches('"').parse().unwrap()).min().unwrap();
    let large = (least / 10 * 6).to_string();
    let make = || {
        let record = json!({
            "name_label": "large", "platform": {}, "other_config": { "driver": "sim" }, "memory_static_max": large,
            "memory_dynamic_max": large, "memory_dynamic_min": large, "memory_static_min": "0"
        });
        a.done("VM.create", json!([record]))
    };
    let (one, two) = (make(), make());
    let ask = |first: &str, second: &str| {
        let wanted = json!([{ one.as_str().unwrap(): first, two.as_str().unwrap(): second }]);
        a.call("pool.ha_compute_hypothetical_max_host_failures_to_tolerate", wanted)
    };
    let number =
        |answer: Result<Value, Vec<String>>| answer.map(|number| number.to_string().replace('"', ""));
    assert_eq!(number(ask("restart", "restart")).as_deref(), Ok("0"));
    for other in ["best-effort", ""] {
        assert_eq!(number(ask("restart", other)).as_deref(), Ok("1"));
    }
    assert_eq!(ask("restart", "soon").unwrap_err()[0], "INVALID_VALUE");
    // It is a question: nothing is wanted of them.
    assert_eq!(a.done("VM.get_ha_restart_priority", json!([one])), json!(""));
}
