//! What a VM made from another has of it, and the rules of network interfaces.

use std::collections::BTreeSet;
use std::sync::Arc;

use tapio_core::db::Db;
use tapio_model::{NULL_REF, Value};
use tapio_store::Sqlite;

use crate::rig::{MIB, Rig, record_of};

fn one(reference: &str) -> Vec<Value> {
    vec![reference.into()]
}

fn network(rig: &Rig) -> String {
    rig.text("network.create", vec![record_of([("name_label", Value::string("net"))])])
}

fn vif(vm: &str, network: &str, device: &str, mac: &str) -> Vec<Value> {
    vec![record_of([
        ("VM", Value::string(vm)),
        ("network", Value::string(network)),
        ("device", Value::string(device)),
        ("MAC", Value::string(mac)),
        ("MTU", Value::Int(1500)),
    ])]
}

fn made(rig: &Rig, method: &str, source: &str) -> String {
    rig.text(method, vec![source.into(), "made".into()])
}

const WAYS: [&str; 3] = ["VM.clone", "VM.copy", "VM.snapshot"];

#[test]
fn what_is_made_from_a_template_can_be_destroyed() {
    let rig = Rig::pretended();
    let templates = rig.stack.db.find("VM", "name_label", "Simulated guest");
    let template = &templates.first().expect("a template").reference;
    assert_eq!(rig.get("VM", template).map("other_config")["default_template"], "true");
    rig.call(
        "VM.set_blocked_operations",
        vec![template.as_str().into(), Value::string_map([("destroy", "no")])],
    );
    rig.call(
        "VM.add_to_other_config",
        vec![template.as_str().into(), "xensource_internal".into(), "x".into()],
    );
    for method in ["VM.clone", "VM.copy"] {
        let vm = made(&rig, method, template);
        let record = rig.get("VM", &vm);
        let config = record.map("other_config");
        assert!(
            !config.contains_key("default_template") && !config.contains_key("xensource_internal"),
            "{config:?}"
        );
        assert_eq!(config["base_template_name"], "Simulated guest");
        assert_eq!(config["driver"], "sim", "what is not about templates is kept");
        assert!(!record.bool("is_default_template") && record.map("blocked_operations").is_empty());
        assert_eq!(record.text("parent"), NULL_REF, "{method}");
        let second = rig.get("VM", &made(&rig, "VM.clone", &vm)).map("other_config");
        assert_eq!(second["base_template_name"], "Simulated guest", "the first template is remembered");
        rig.call("VM.provision", one(&vm));
        rig.call("VM.destroy", one(&vm));
    }
    // A mark that a client set holds as it does on a template of the toolstack.
    let vm = rig.make_vm(&[]);
    rig.call("VM.add_to_other_config", vec![vm.as_str().into(), "default_template".into(), "true".into()]);
    assert_eq!(rig.refused("VM.destroy", one(&vm)).code, "VM_CANNOT_DELETE_DEFAULT_TEMPLATE");
}

#[test]
fn settings_of_one_vm_are_not_those_of_another() {
    let rig = Rig::pretended();
    let vm = rig.make_vm(&[]);
    let set = |method: &str, value: Value| drop(rig.call(method, vec![vm.as_str().into(), value]));
    set("VM.set_tags", Value::strings(["red"]));
    set("VM.set_name_description", "a word".into());
    set("VM.set_blocked_operations", Value::string_map([("start", "no")]));
    set("VM.set_order", Value::Int(3));
    set("VM.set_start_delay", Value::Int(30));
    set("VM.set_shutdown_delay", Value::Int(40));
    rig.call("VM.add_to_other_config", vec![vm.as_str().into(), "mac_seed".into(), "seed".into()]);
    let source = rig.get("VM", &vm);
    rig.stack
        .db
        .set(
            "VM_guest_metrics",
            source.text("guest_metrics"),
            "os_version",
            Value::string_map([("name", "Debian")]),
        )
        .expect("a record");
    for method in WAYS {
        let source = rig.get("VM", &vm);
        let record = rig.get("VM", &made(&rig, method, &vm));
        assert_eq!(record.get("tags"), source.get("tags"), "{method}");
        assert_eq!(record.text("name_description"), "a word", "{method}");
        assert!(record.map("blocked_operations").is_empty(), "{method}");
        for field in ["order", "start_delay", "shutdown_delay"] {
            assert_eq!(record.int(field), 0, "{method} {field}");
        }
        let is_snapshot = method == "VM.snapshot";
        assert_eq!(record.map("other_config")["mac_seed"] == "seed", is_snapshot, "{method}");
        assert_ne!(record.text("generation_id"), source.text("generation_id"), "{method}");
        let guest = record.text("guest_metrics");
        assert_ne!(guest, source.text("guest_metrics"));
        assert_eq!(rig.get("VM_guest_metrics", guest).map("os_version")["name"], "Debian", "{method}");
    }
}

#[test]
fn snapshots_are_a_line() {
    let rig = Rig::pretended();
    let vm = rig.make_vm(&[]);
    let parent = |vm: &str| rig.get("VM", vm).text("parent").to_owned();
    let (first, second) = (made(&rig, "VM.snapshot", &vm), made(&rig, "VM.snapshot", &vm));
    assert_eq!(
        (parent(&first), parent(&second), parent(&vm)),
        (NULL_REF.into(), first.clone(), second.clone())
    );
    let info = rig.get("VM", &first).map("snapshot_info");
    assert_eq!(
        (&*info["power-state-at-snapshot"], &*info["disk-snapshot-type"]),
        ("Halted", "crash_consistent")
    );
    // A VM made from a snapshot begins a line of its own.
    assert_eq!(parent(&made(&rig, "VM.clone", &second)), NULL_REF);
    rig.call("VM.destroy", one(&second));
    assert_eq!(parent(&vm), first, "the line closes");
    rig.call("VM.destroy", one(&vm));
    assert_eq!(rig.get("VM", &first).text("snapshot_of"), NULL_REF);
}

#[test]
fn disks_that_were_made_for_a_vm_go_with_it() {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB));
    rig.make_empty_cd(&vm);
    for method in WAYS {
        for vbd in rig.stack.db.find("VBD", "VM", &made(&rig, method, &vm)) {
            let is_owned = vbd.map("other_config").contains_key("owner");
            assert_eq!(is_owned, vbd.text("type") == "Disk", "{method}");
        }
    }
    let source = rig.stack.db.find("VBD", "VM", &vm);
    assert!(source.iter().all(|vbd| !vbd.map("other_config").contains_key("owner")));
}

#[test]
fn interfaces_are_checked() {
    let rig = Rig::pretended();
    let (vm, net) = (rig.make_vm(&[]), network(&rig));
    let create = |device: &str, mac: &str| rig.text("VIF.create", vif(&vm, &net, device, mac));
    let refused = |device: &str, mac: &str| rig.refused("VIF.create", vif(&vm, &net, device, mac));
    let given = create("0", "00:16:3e:00:00:01");
    assert_eq!(rig.get("VIF", &given).text("MAC"), "00:16:3e:00:00:01");
    assert!(!rig.get("VIF", &given).bool("MAC_autogenerated"));
    let mut macs = BTreeSet::new();
    for (device, mac) in [("1", ""), ("2", "random")] {
        let vif = rig.get("VIF", &create(device, mac));
        assert!(vif.bool("MAC_autogenerated"));
        assert_eq!(u8::from_str_radix(&vif.text("MAC")[..2], 16).expect("an octet") & 3, 2);
        assert!(macs.insert(vif.text("MAC").to_owned()));
    }
    for (device, mac, code, param) in [
        ("0", "", "DEVICE_ALREADY_EXISTS", "0"),
        ("00", "", "DEVICE_ALREADY_EXISTS", "00"),
        ("eth0", "", "INVALID_DEVICE", "eth0"),
        ("", "", "INVALID_DEVICE", ""),
        ("-1", "", "INVALID_DEVICE", "-1"),
        ("3", "x", "MAC_INVALID", "x"),
        ("3", "ff:ff:ff:ff:ff:ff", "MAC_INVALID", "ff:ff:ff:ff:ff:ff"),
    ] {
        let error = refused(device, mac);
        assert_eq!((&*error.code, &*error.params[0]), (code, param));
    }
    let nowhere = rig.refused("VIF.create", vif(&vm, NULL_REF, "3", ""));
    assert_eq!(nowhere.params, ["network", NULL_REF]);
    assert_eq!(rig.refused("VIF.create", vif(NULL_REF, &net, "3", "")).params, ["VM", NULL_REF]);
    assert_eq!(rig.stack.db.count("VIF_metrics"), 3, "nothing is left of what was refused");
    let free = rig.call("VM.get_allowed_VIF_devices", one(&vm));
    assert_eq!(free, Value::strings(["3", "4", "5", "6"]));
    let record = rig.get("VIF", &given);
    assert_eq!(record.get("allowed_operations"), &Value::strings(["attach"]));
    rig.get("VIF_metrics", record.text("metrics"));
    rig.call("VIF.destroy", one(&given));
    assert_eq!(rig.stack.db.count("VIF_metrics"), 2);
    create("0", "");
}

#[test]
fn interfaces_are_copied_and_go_with_their_vm() {
    let rig = Rig::pretended();
    let (vm, net) = (rig.make_vm(&[]), network(&rig));
    let mut record = vif(&vm, &net, "4", "00:16:3e:00:00:02");
    if let Value::Map(fields) = &mut record[0] {
        fields.insert("other_config".into(), Value::string_map([("a", "b")]));
        fields.insert("locking_mode".into(), "locked".into());
        fields.insert("ipv4_allowed".into(), Value::strings(["10.0.0.1"]));
    }
    rig.call("VIF.create", record);
    for method in WAYS {
        let made = made(&rig, method, &vm);
        let vifs = rig.stack.db.find("VIF", "VM", &made);
        let [vif] = &*vifs else { panic!("{method}: {vifs:?}") };
        assert_eq!((vif.text("device"), vif.text("network")), ("4", &*net), "{method}");
        assert_eq!((&*vif.map("other_config")["a"], vif.text("locking_mode")), ("b", "locked"));
        assert_eq!(vif.get("ipv4_allowed"), &Value::strings(["10.0.0.1"]));
        assert_eq!(vif.text("MAC") == "00:16:3e:00:00:02", method == "VM.snapshot", "{method}");
        rig.call("VM.destroy", one(&made));
        assert_eq!((rig.stack.db.count("VIF"), rig.stack.db.count("VIF_metrics")), (1, 1), "{method}");
    }
    rig.call("VM.destroy", one(&vm));
    assert_eq!((rig.stack.db.count("VIF"), rig.stack.db.count("VIF_metrics")), (0, 0));
}

#[test]
fn a_network_takes_its_interfaces_along() {
    let rig = Rig::pretended();
    let (vm, net) = (rig.make_vm(&[]), network(&rig));
    rig.call("VIF.create", vif(&vm, &net, "0", ""));
    rig.call("network.destroy", one(&net));
    assert_eq!((rig.stack.db.count("VIF"), rig.stack.db.count("VIF_metrics")), (0, 0));
    let host = rig.stack.db.all("host")[0].reference.clone();
    let net = network(&rig);
    let pif =
        [("device", Value::string("eth9")), ("host", Value::string(host)), ("network", Value::string(&net))];
    let pif = rig.stack.db.create("PIF", &pif).expect("a record");
    let refused = rig.refused("network.destroy", one(&net));
    assert_eq!((&*refused.code, refused.params), ("NETWORK_CONTAINS_PIF", vec![pif]));
}

#[test]
fn a_start_mends_what_earlier_versions_left() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::create_dir_all(dir.path().join("state")).expect("a directory for the store");
    let (vm, snapshot, lonely) = {
        let store = Sqlite::open(&dir.path().join("state/store.db")).expect("a store");
        let db = Db::open(Arc::new(store)).expect("a database");
        let marked =
            || ("other_config", Value::string_map([("default_template", "true"), ("driver", "sim")]));
        let make = |class: &str, fields: &[(&str, Value)]| db.create(class, fields).expect("a record");
        let vm = make("VM", &[marked()]);
        let of = [marked(), ("is_a_template", true.into()), ("is_a_snapshot", true.into())];
        let snapshot = make("VM", &of);
        let net = make("network", &[]);
        let fields =
            |vm: &str| [("VM", Value::string(vm)), ("network", Value::string(&net)), ("device", "0".into())];
        make("VIF", &fields(&vm));
        let lonely = make("VIF", &fields("OpaqueRef:gone"));
        (vm, snapshot, lonely)
    };
    let rig = Rig::again(dir.path());
    assert!(rig.stack.db.get("VIF", &lonely).is_err(), "its VM is gone");
    let vif = rig.stack.db.find("VIF", "VM", &vm).pop().expect("a VIF");
    assert!(vif.bool("MAC_autogenerated") && !vif.text("MAC").is_empty());
    rig.get("VIF_metrics", vif.text("metrics"));
    rig.call("VM.destroy", one(&snapshot));
    rig.call("VM.destroy", one(&vm));
}
