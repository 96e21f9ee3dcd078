//! VMs that start and end together, VMs that are placed by a rule, and plans of snapshots.

use std::collections::BTreeMap;

use tapio_core::dates;
use tapio_model::Value;

use crate::rig::{MIB, Rig, record_of};

fn one(reference: &str) -> Vec<Value> {
    vec![reference.into()]
}

fn vm(rig: &Rig, name: &str, more: &[(&str, &str)]) -> String {
    let vm = rig.make_vm(more);
    rig.call("VM.set_name_label", vec![vm.as_str().into(), name.into()]);
    vm
}

fn state(rig: &Rig, vm: &str) -> String {
    rig.get("VM", vm).text("power_state").to_owned()
}

#[test]
fn an_appliance_starts_and_ends_in_order() {
    let rig = Rig::pretended();
    let vms: Vec<String> =
        ["database", "web", "mail", "load balancer"].map(|name| vm(&rig, name, &[])).into();
    let appliance = rig.text("VM_appliance.create", vec![record_of([("name_label", Value::string("shop"))])]);
    for (vm, order) in vms.iter().zip([0, 1, 1, 2]) {
        rig.call("VM.set_appliance", vec![vm.as_str().into(), appliance.as_str().into()]);
        rig.call("VM.set_order", vec![vm.as_str().into(), Value::Int(order)]);
    }
    rig.call("VM.set_start_delay", vec![vms[0].as_str().into(), Value::Int(1)]);
    let record = rig.get("VM_appliance", &appliance);
    assert_eq!(record.get("allowed_operations").as_set().map(<[Value]>::len), Some(4));
    assert_eq!(rig.stack.db.find("VM", "appliance", &appliance).len(), 4);

    // In groups by their order, with the pause that a VM asks for.
    let start = || vec![appliance.as_str().into(), false.into()];
    rig.call("VM_appliance.start", start());
    assert!(vms.iter().all(|vm| state(&rig, vm) == "Running"));
    let started = |vm: &str| {
        let metrics = rig.get("VM_metrics", rig.get("VM", vm).text("metrics"));
        match metrics.get("start_time") {
            Value::DateTime(at) => *at,
            other => panic!("{other:?}"),
        }
    };
    assert!(started(&vms[1]) > started(&vms[0]), "a second lies between them");
    assert!(started(&vms[3]) >= started(&vms[2]).max(started(&vms[1])));
    // Nothing to do is no error; what runs is left alone.
    rig.call("VM_appliance.start", start());
    rig.call("VM_appliance.clean_shutdown", one(&appliance));
    assert!(vms.iter().all(|vm| state(&rig, vm) == "Halted"));

    // One that does not start keeps those behind it from starting; what ends, ends.
    rig.call("VM.add_to_platform", vec![vms[1].as_str().into(), "sim-fail".into(), "boot".into()]);
    let error = rig.refused("VM_appliance.start", start());
    assert_eq!((&*error.code, &*error.params[0]), ("OPERATION_PARTIALLY_FAILED", "start"));
    assert!(error.params.len() == 2 && error.params[1].starts_with("web: "), "{error:?}");
    let states: Vec<String> = vms.iter().map(|vm| state(&rig, vm)).collect();
    assert_eq!(states, ["Running", "Halted", "Running", "Halted"]);
    assert!(rig.get("VM_appliance", &appliance).map("current_operations").is_empty());
    rig.call("VM_appliance.hard_shutdown", one(&appliance));
    assert!(vms.iter().all(|vm| state(&rig, vm) == "Halted"));

    // A cancelled start begins no further group.
    rig.call("VM.remove_from_platform", vec![vms[1].as_str().into(), "sim-fail".into()]);
    rig.call("VM.set_start_delay", vec![vms[0].as_str().into(), Value::Int(600)]);
    let task = rig.text("Async.VM_appliance.start", start());
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while state(&rig, &vms[0]) != "Running" {
        assert!(std::time::Instant::now() < until);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let shown = rig.get("VM_appliance", &appliance).map("current_operations");
    assert_eq!(shown, BTreeMap::from([(task.clone(), "start".to_owned())]));
    let busy = rig.refused("VM_appliance.shutdown", one(&appliance));
    assert_eq!((&*busy.code, &*busy.params[2]), ("OTHER_OPERATION_IN_PROGRESS", "start"));
    rig.call("task.cancel", one(&task));
    assert_eq!(rig.finished(&task).text("status"), "cancelled");
    let states: Vec<String> = vms.iter().map(|vm| state(&rig, vm)).collect();
    assert_eq!(states, ["Running", "Halted", "Halted", "Halted"]);
    rig.call("VM_appliance.shutdown", one(&appliance));

    let host = rig.control_domain();
    let refused = rig.refused("VM.set_appliance", vec![host.into(), appliance.as_str().into()]);
    assert_eq!(refused.code, "OPERATION_NOT_ALLOWED");
    let unknown = rig.refused("VM.set_appliance", vec![vms[0].as_str().into(), "OpaqueRef:x".into()]);
    assert_eq!(unknown.code, "HANDLE_INVALID");
    rig.call("VM_appliance.destroy", one(&appliance));
    assert!(vms.iter().all(|vm| rig.get("VM", vm).is_null("appliance")));
}

#[test]
fn a_vm_belongs_to_one_group_and_a_broken_one_is_told_of() {
    let rig = Rig::pretended();
    let group = |name: &str, placement: &str| {
        let record = [("name_label", Value::string(name)), ("placement", Value::string(placement))];
        rig.text("VM_group.create", vec![record_of(record)])
    };
    let (apart, other) = (group("apart", "anti_affinity"), group("other", "normal"));
    let refused = rig.refused("VM_group.create", vec![record_of([("placement", Value::string("affinity"))])]);
    assert_eq!(refused.code, "VALUE_NOT_SUPPORTED");
    let vms: Vec<String> = ["one", "two"].map(|name| vm(&rig, name, &[])).into();
    let put = |vm: &str, groups: &[&str]| vec![vm.into(), Value::strings(groups.iter().copied())];
    let members = |group: &str| rig.call("VM_group.get_VMs", one(group));
    rig.call("VM.set_groups", put(&vms[0], &[&other]));
    for vm in &vms {
        rig.call("VM.set_groups", put(vm, &[&apart, &apart]));
    }
    let mut both = vms.clone();
    both.sort();
    assert_eq!((members(&apart), members(&other)), (Value::strings(both), Value::Set(Vec::new())));
    assert_eq!(rig.refused("VM.set_groups", put(&vms[0], &[&apart, &other])).code, "TOO_MANY_GROUPS");
    assert_eq!(rig.refused("VM.set_groups", put(&vms[0], &["OpaqueRef:x"])).code, "HANDLE_INVALID");
    let snapshot = rig.text("VM.snapshot", vec![vms[0].as_str().into(), "before".into()]);
    assert_eq!(rig.refused("VM.set_groups", put(&snapshot, &[&apart])).code, "OPERATION_NOT_ALLOWED");
    assert_eq!(rig.refused("VM.set_groups", put(&rig.control_domain(), &[])).code, "OPERATION_NOT_ALLOWED");
    let clone = rig.text("VM.clone", vec![vms[0].as_str().into(), "like it".into()]);
    for like_it in [&snapshot, &clone] {
        assert_eq!(rig.get("VM", like_it).get("groups"), &Value::Set(Vec::new()));
    }
    rig.call("VM.revert", one(&snapshot));
    assert_eq!(rig.get("VM", &vms[0]).get("groups"), &Value::strings([apart.as_str()]));

    // All on one host, and there is no other one.
    let told = || -> Vec<String> {
        rig.stack.groups.turn(dates::now());
        let all = rig.stack.db.all("message");
        let name = "ALL_RUNNING_VMS_IN_ANTI_AFFINITY_GRP_ON_SINGLE_HOST";
        let all = all.iter().filter(|message| message.text("name") == name);
        all.map(|message| message.text("body").to_owned()).collect()
    };
    for vm in &vms {
        rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    }
    assert_eq!(told(), Vec::<String>::new());
    let db = &rig.stack.db;
    let metrics = db.create("host_metrics", &[("live", true.into())]).unwrap();
    db.create("host", &[("metrics", metrics.into()), ("name_label", "another".into())]).unwrap();
    let uuid = rig.get("VM_group", &apart).text("uuid").to_owned();
    assert!(matches!(&told()[..], [body] if body.contains(&format!("<VM_group>{uuid}</VM_group>"))));
    assert_eq!(told().len(), 1, "once");
    // One that a client has read is gone, until the group was whole meanwhile.
    let message =
        db.all("message").into_iter().find(|message| message.text("name").starts_with("ALL_")).unwrap();
    rig.call("message.destroy", one(&message.reference));
    assert_eq!(told().len(), 0);
    rig.call("VM.hard_shutdown", one(&vms[0]));
    assert_eq!(told().len(), 0);
    rig.call("VM.start", vec![vms[0].as_str().into(), false.into(), false.into()]);
    assert_eq!(told().len(), 1);
    rig.call("VM_group.destroy", one(&apart));
    assert_eq!(told().len(), 0, "it does not outlive the group");
    assert_eq!(rig.get("VM", &vms[0]).get("groups"), &Value::Set(Vec::new()));
}

/// A plan that is due every full hour.
fn plan(rig: &Rig, more: &[(&str, Value)]) -> String {
    let mut record = BTreeMap::from([
        ("name_label".to_owned(), Value::string("nightly")),
        ("type".to_owned(), Value::string("snapshot")),
        ("frequency".to_owned(), Value::string("hourly")),
        ("retained_snapshots".to_owned(), Value::Int(2)),
    ]);
    record.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    rig.text("VMSS.create", vec![Value::Map(record)])
}

/// Snapshots of a VM: names, the newest last, and whether a plan took them.
fn snapshots(rig: &Rig, vm: &str) -> Vec<(String, bool)> {
    let mut all = rig.stack.db.find("VM", "snapshot_of", vm);
    all.sort_by_key(|snapshot| snapshot.text("name_label").to_owned());
    all.iter().map(|one| (one.text("name_label").to_owned(), one.bool("is_vmss_snapshot"))).collect()
}

fn told(rig: &Rig, name: &str) -> usize {
    rig.stack.db.all("message").iter().filter(|message| message.text("name") == name).count()
}

#[test]
fn a_plan_takes_snapshots_when_they_are_due_and_keeps_the_newest() {
    let rig = Rig::pretended();
    let sr = rig.make_sr();
    let (kept, free) = (vm(&rig, "kept", &[]), vm(&rig, "free", &[]));
    for vm in [&kept, &free] {
        rig.make_vbd(vm, &rig.make_vdi(&sr, MIB));
    }
    // A disk that the VM shares with nothing but its own snapshots, and an empty drive.
    rig.make_empty_cd(&kept);
    let plan = plan(&rig, &[]);
    rig.call("VM.set_snapshot_schedule", vec![kept.as_str().into(), plan.as_str().into()]);
    let own = rig.text("VM.snapshot", vec![kept.as_str().into(), "by hand".into()]);
    let managed = || rig.stack.db.all("VDI").iter().filter(|vdi| vdi.bool("managed")).count();
    let before = managed();

    // What was due before it was made is not made up for.
    let now = dates::now();
    rig.stack.groups.turn(now);
    assert_eq!(snapshots(&rig, &kept), [("by hand".to_owned(), false)]);
    let hour = |count: i64| (now / 3600 + 1 + count) * 3600 + 5;
    for count in 0..4 {
        rig.stack.groups.turn(hour(count));
        rig.stack.groups.turn(hour(count) + 60);
        let all = snapshots(&rig, &kept);
        let of_plan = all.iter().filter(|(_, is_plans)| *is_plans).count();
        assert_eq!(of_plan, 2.min(usize::try_from(count).unwrap() + 1), "once an hour: {all:?}");
        let newest = format!("nightly_{}", dates::format(hour(count)));
        assert!(all.iter().any(|(name, _)| *name == newest), "{all:?}");
    }
    assert!(rig.stack.db.get("VM", &own).is_ok(), "a snapshot by hand is nobody's to remove");
    assert_eq!(managed(), before + 2, "disks of snapshots go with them");
    assert!(snapshots(&rig, &free).is_empty());
    assert_eq!(told(&rig, "VMSS_SNAPSHOT_SUCCEEDED"), 4);
    let Value::DateTime(last) = *rig.get("VMSS", &plan).get("last_run_time") else { panic!("a date") };
    assert_eq!(last, hour(3));
    let alerts = rig.call("VMSS.get_alerts", vec![plan.as_str().into(), Value::Int(24)]);
    assert_eq!(alerts.as_set().map(<[Value]>::len), Some(4));

    // A time that passed while nothing ran is told of; one that is switched off runs only when it is asked to.
    rig.stack.groups.turn(hour(9) + 3700 - 10);
    assert_eq!(told(&rig, "VMSS_SNAPSHOT_MISSED_EVENT"), 0, "the hour has just begun");
    rig.call("VMSS.set_enabled", vec![plan.as_str().into(), false.into()]);
    rig.stack.groups.turn(hour(20));
    assert_eq!(told(&rig, "VMSS_SNAPSHOT_SUCCEEDED"), 5);
    // Whatever the time zone, at one of these two moments the last Monday began more than an hour ago.
    rig.call("VMSS.set_frequency", vec![plan.as_str().into(), "weekly".into()]);
    rig.call("VMSS.set_enabled", vec![plan.as_str().into(), true.into()]);
    for days in [14, 21] {
        rig.stack.groups.turn(now + days * 86_400 + (days - 14) * 6_171);
    }
    assert!(told(&rig, "VMSS_SNAPSHOT_MISSED_EVENT") >= 1);
    rig.call("VMSS.set_enabled", vec![plan.as_str().into(), false.into()]);
    let said = rig.text("VMSS.snapshot_now", one(&plan));
    assert_eq!(said, "1 of 1 VMs have a snapshot, 1 older ones are removed");

    // A disk of a snapshot that another VM has as well stays.
    let of_plan = rig.stack.db.find("VM", "snapshot_of", &kept);
    let other = of_plan.iter().find(|one| one.bool("is_vmss_snapshot")).expect("one").reference.clone();
    let disks = rig.stack.db.find("VBD", "VM", &other);
    let disk = disks.iter().find(|vbd| !vbd.is_null("VDI")).expect("a disk").text("VDI").to_owned();
    let record = Rig::vbd_record(&free, &disk, &[("mode", Value::string("RO"))]);
    rig.call("VBD.create", vec![record]);
    rig.call("VMSS.set_retained_snapshots", vec![plan.as_str().into(), Value::Int(1)]);
    rig.call("VMSS.snapshot_now", one(&plan));
    assert!(rig.stack.db.get("VM", &other).is_err(), "the snapshot is gone");
    assert!(rig.stack.db.get("VDI", &disk).is_ok(), "its disk is in use");

    rig.call("VMSS.destroy", one(&plan));
    assert!(rig.get("VM", &kept).is_null("snapshot_schedule"));
    assert_eq!(snapshots(&rig, &kept).len(), 2, "snapshots outlive their plan");
}

#[test]
fn a_plan_whose_snapshot_fails_says_so_and_removes_nothing() {
    let rig = Rig::pretended();
    let sr = rig.make_sr();
    let (good, bad) = (vm(&rig, "good", &[]), vm(&rig, "bad", &[]));
    let vdi = rig.make_vdi(&sr, MIB);
    rig.make_vbd(&good, &rig.make_vdi(&sr, MIB));
    rig.make_vbd(&bad, &vdi);
    let plan = plan(&rig, &[("retained_snapshots", Value::Int(1))]);
    for vm in [&good, &bad] {
        rig.call("VM.set_snapshot_schedule", vec![vm.as_str().into(), plan.as_str().into()]);
    }
    rig.call("VMSS.snapshot_now", one(&plan));
    let first = snapshots(&rig, &bad);
    let blocked = vec![bad.as_str().into(), Value::string_map([("snapshot", "it is precious")])];
    rig.call("VM.set_blocked_operations", blocked);
    let error = rig.refused("VMSS.snapshot_now", one(&plan));
    assert_eq!((&*error.code, &*error.params[0]), ("OPERATION_PARTIALLY_FAILED", "snapshot_now"));
    assert!(error.params[1].starts_with("bad: "), "{error:?}");
    assert_eq!(snapshots(&rig, &bad), first, "the one that there is stays");
    assert_eq!(snapshots(&rig, &good).len(), 1);
    assert_eq!(told(&rig, "VMSS_SNAPSHOT_FAILED"), 1);
}

#[test]
fn what_is_no_plan_is_refused() {
    let rig = Rig::pretended();
    let record = |more: &[(&str, Value)]| {
        let mut record = BTreeMap::from([
            ("name_label".to_owned(), Value::string("x")),
            ("type".to_owned(), Value::string("snapshot")),
            ("frequency".to_owned(), Value::string("daily")),
        ]);
        record.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        vec![Value::Map(record)]
    };
    for (more, what) in [
        (("retained_snapshots", Value::Int(0)), "retained_snapshots"),
        (("retained_snapshots", Value::Int(11)), "retained_snapshots"),
        (("schedule", Value::string_map([("hour", "25")])), "schedule:hour"),
        (("schedule", Value::string_map([("minute", "0")])), "schedule:minute"),
    ] {
        let error = rig.refused("VMSS.create", record(&[more]));
        assert_eq!((&*error.code, &*error.params[0]), ("INVALID_VALUE", what));
    }
    let plan = rig.text("VMSS.create", record(&[]));
    let key = |key: &str, value: &str| vec![plan.as_str().into(), key.into(), value.into()];
    rig.call("VMSS.add_to_schedule", key("hour", "3"));
    assert_eq!(rig.refused("VMSS.add_to_schedule", key("hour", "4")).code, "MAP_DUPLICATE_KEY");
    assert_eq!(rig.refused("VMSS.add_to_schedule", key("min", "5")).code, "INVALID_VALUE");
    let value = |value: Value| vec![plan.as_str().into(), value];
    assert_eq!(rig.refused("VMSS.set_retained_snapshots", value(Value::Int(99))).code, "INVALID_VALUE");
    let weekly = Value::string_map([("days", "Someday")]);
    assert_eq!(rig.refused("VMSS.set_schedule", value(weekly)).code, "INVALID_VALUE");
    rig.call("VMSS.set_frequency", value(Value::string("weekly")));
    rig.call("VMSS.remove_from_schedule", vec![plan.as_str().into(), "hour".into()]);
    let record = rig.get("VMSS", &plan);
    assert_eq!(
        (record.text("frequency"), record.map("schedule").len()),
        ("weekly", 0),
        "nothing else has changed"
    );
    assert_eq!(record.int("retained_snapshots"), 7);
}
