//! The database on an SR: written when it changes, opened by a host of another pool, and VMs that come back from it.

use std::collections::BTreeMap;

use tapio_core::Peer;
use tapio_model::{ApiError, NULL_REF, Value};

use super::rig::{MIB, Rig};

fn peer() -> Peer {
    Peer { superuser: true, address: "unix:uid=0".into(), certificate: None }
}

/// A call in another session than that of the rig.
fn call_in(rig: &Rig, session: &str, method: &str, params: Vec<Value>) -> Result<Value, ApiError> {
    rig.stack.call(&peer(), method, [vec![session.into()], params].concat())
}

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

fn record(pairs: &[(&str, Value)]) -> Value {
    Value::Map(pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect())
}

/// The VDI that has the database.
fn metadata(rig: &Rig, sr: &str) -> Option<String> {
    let vdis = rig.stack.db.find("VDI", "SR", sr);
    let found = vdis.into_iter().find(|vdi| vdi.text("type") == "metadata");
    found.map(|vdi| vdi.reference.clone())
}

/// A VM with this disk.
fn vm(rig: &Rig, name: &str, vdi: &str) -> String {
    let class = tapio_model::class("VM").expect("a class");
    let mut fields: BTreeMap<String, Value> = BTreeMap::new();
    for field in class.fields.iter().filter(|field| field.initial.value(field.ty).is_none()) {
        let empty = tapio_model::Initial::Empty.value(field.ty).expect("each type has an empty value");
        fields.insert(field.name.to_owned(), empty);
    }
    let mib = |number: i64| Value::Int(number << 20);
    for (field, value) in [
        ("name_label", name.into()),
        ("memory_static_max", mib(256)),
        ("memory_dynamic_max", mib(256)),
        ("memory_dynamic_min", mib(256)),
        ("memory_static_min", mib(64)),
        ("VCPUs_max", 1.into()),
        ("VCPUs_at_startup", 1.into()),
    ] {
        fields.insert(field.to_owned(), value);
    }
    let vm = rig.text("VM.create", vec![Value::Map(fields)]).expect("a VM");
    let empty = || Value::string_map::<&str, &str>([]);
    let vbd = record(&[
        ("VM", vm.as_str().into()),
        ("VDI", vdi.into()),
        ("userdevice", "0".into()),
        ("bootable", true.into()),
        ("mode", "RW".into()),
        ("type", "Disk".into()),
        ("unpluggable", true.into()),
        ("empty", false.into()),
        ("other_config", empty()),
        ("qos_algorithm_type", "".into()),
        ("qos_algorithm_params", empty()),
    ]);
    rig.text("VBD.create", vec![vbd]).expect("a VBD");
    vm
}

/// Takes an SR of another host in, and attaches it.
fn introduce(rig: &Rig, uuid: &str, dir: &std::path::Path) -> String {
    let map = || Value::string_map::<&str, &str>([]);
    let params = vec![uuid.into(), "site".into(), "".into(), "file".into(), "".into(), false.into(), map()];
    let sr = rig.text("SR.introduce", params).expect("it is not known");
    let config = Value::string_map([("location", dir.to_string_lossy().into_owned())]);
    let pbd =
        record(&[("SR", sr.as_str().into()), ("host", rig.host.as_str().into()), ("device_config", config)]);
    let pbd = rig.text("PBD.create", vec![pbd]).expect("a PBD");
    rig.call("PBD.plug", vec![pbd.into()]).expect("it is there");
    sr
}

#[test]
fn vms_come_back_at_another_site() {
    let first = Rig::new();
    let sr = first.make_sr("sr");
    let dir = first.dir.join("sr");
    let uuid = first.get("SR", &sr).text("uuid").to_owned();
    let disk = first.make_vdi(&sr, 8 * MIB);
    let web = vm(&first, "before", &disk);
    let on_sr = |method: &str| first.call(method, vec![sr.as_str().into()]).expect(method);
    on_sr("SR.assert_supports_database_replication");
    on_sr("SR.enable_database_replication");
    on_sr("SR.enable_database_replication");
    let vdi = metadata(&first, &sr).expect("it is there");
    assert!(first.vdi(&vdi).bool("metadata_latest"));
    assert_eq!(first.vdi(&vdi).text("metadata_of_pool"), first.stack.db.all("pool")[0].reference);
    // What changes is written; nothing is written of what is the same.
    first.call("VM.set_name_label", vec![web.as_str().into(), "web".into()]).expect("named");
    let group = record(&[("name_label", "both".into()), ("name_description", "".into())]);
    let group = first.text("VM_appliance.create", vec![group]).expect("an appliance");
    let disk_of_db = first.make_vdi(&sr, 4 * MIB);
    let of_group = vm(&first, "db", &disk_of_db);
    first.call("VM.set_appliance", vec![of_group.as_str().into(), group.as_str().into()]).expect("in it");
    first.stack.replicas.turn();
    let file = first.file("sr", &vdi);
    let written = std::fs::metadata(&file).and_then(|data| data.modified()).expect("a file");
    first.stack.replicas.turn();
    assert_eq!(std::fs::metadata(&file).and_then(|data| data.modified()).expect("a file"), written);
    first.call("PBD.unplug", vec![first.pbd(&sr).into()]).expect("it is not in use");

    let second = Rig::new();
    let here = introduce(&second, &uuid, &dir);
    let found = metadata(&second, &here).expect("its UUID says what it is");
    let plain =
        second.stack.db.find("VDI", "SR", &here).iter().find(|vdi| vdi.text("type") == "user").cloned();
    let (code, why) =
        second.refused("VDI.open_database", vec![plain.expect("a disk").reference.as_str().into()]);
    assert_eq!(code, "COULD_NOT_IMPORT_DATABASE", "{why:?}");
    let opened = second.text("VDI.open_database", vec![found.as_str().into()]).expect("it opens");
    let there = |method: &str, params: Vec<Value>| call_in(&second, &opened, method, params);
    let all = there("VM.get_all_records", vec![]).expect("it is read");
    let names: Vec<String> = all
        .as_map()
        .expect("records")
        .values()
        .map(|vm| text(&vm.as_map().expect("a record")["name_label"]))
        .collect();
    assert!(names.contains(&"web".to_owned()) && names.contains(&"db".to_owned()), "{names:?}");
    let back = there("VM.get_by_name_label", vec!["web".into()]).expect("it is found");
    let back = text(&back.as_set().expect("a set")[0]);
    assert_eq!(back, web);
    // It is read, and nothing else.
    for (method, params) in [
        ("VM.set_name_label", vec![back.as_str().into(), "x".into()]),
        ("VM.start", vec![back.as_str().into(), false.into(), false.into()]),
        ("VDI.open_database", vec![found.as_str().into()]),
        ("event.from", vec![Value::strings(["*"]), "".into(), Value::Float(0.0)]),
    ] {
        let error = there(method, params).expect_err(method);
        assert_eq!(error.code, "OPERATION_NOT_ALLOWED", "{method}: {error}");
    }
    let mine = || Value::string(second.session());
    let refused = second.refused("VM.recover", vec![NULL_REF.into(), mine(), false.into()]);
    assert_eq!(refused.0, "OPERATION_NOT_ALLOWED", "in a session of the pool itself");
    let error = there("VM.recover", vec![back.as_str().into(), opened.as_str().into(), false.into()]);
    assert_eq!(error.expect_err("to itself").code, "SESSION_INVALID");
    let srs = there("VM.get_SRs_required_for_recovery", vec![back.as_str().into(), mine()]).expect("told");
    assert_eq!(srs, Value::strings([&sr]));
    let pbd = second.pbd(&here);
    second.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    let error = there("VM.assert_can_be_recovered", vec![back.as_str().into(), mine()]).expect_err("no SR");
    assert_eq!((&*error.code, error.params), ("VM_REQUIRES_SR", vec![back.clone(), sr.clone()]));
    second.call("PBD.plug", vec![pbd.into()]).expect("it is there");
    there("VM.assert_can_be_recovered", vec![back.as_str().into(), mine()]).expect("all is there");
    there("VM.recover", vec![back.as_str().into(), mine(), false.into()]).expect("it comes back");
    let came = second.stack.db.find("VM", "name_label", "web");
    assert_eq!(came.len(), 1);
    assert_eq!(came[0].text("uuid"), first.get("VM", &web).text("uuid"));
    assert_eq!(came[0].text("power_state"), "Halted");
    let vbd = second.stack.db.find("VBD", "VM", &came[0].reference);
    assert_eq!(second.vdi(vbd[0].text("VDI")).text("uuid"), first.vdi(&disk).text("uuid"));
    assert_eq!(second.vdi(vbd[0].text("VDI")).text("name_label"), "disk", "an SR of files does not know it");
    // One that is here is not replaced by one that is not newer.
    let again = vec![back.as_str().into(), mine(), false.into()];
    assert_eq!(there("VM.recover", again).expect_err("it is here").code, "VM_TO_IMPORT_IS_NOT_NEWER_VERSION");
    there("VM.recover", vec![back.as_str().into(), mine(), true.into()]).expect("by force");
    assert_eq!(second.stack.db.find("VM", "name_label", "web").len(), 1);

    let in_group = vec![of_group.as_str().into(), mine(), false.into()];
    assert_eq!(there("VM.recover", in_group).expect_err("a part").code, "VM_IS_PART_OF_AN_APPLIANCE");
    there("VM_appliance.assert_can_be_recovered", vec![group.as_str().into(), mine()]).expect("all is there");
    there("VM_appliance.recover", vec![group.as_str().into(), mine(), false.into()]).expect("it comes back");
    let both = second.stack.db.find("VM_appliance", "name_label", "both");
    let members = second.stack.db.find("VM", "appliance", &both[0].reference);
    assert_eq!(members.iter().map(|vm| vm.text("name_label")).collect::<Vec<_>>(), ["db"]);
    there("session.logout", vec![]).expect("it is closed");
    assert_eq!(there("VM.get_all", vec![]).expect_err("closed").code, "SESSION_INVALID");
}

#[test]
fn an_sr_that_fails_is_told_of_and_nothing_waits_for_it() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let on_sr = |method: &str| rig.call(method, vec![sr.as_str().into()]);
    let disk = rig.make_vdi(&sr, 4 * MIB);
    on_sr("SR.enable_database_replication").expect("there is room");
    let vdi = metadata(&rig, &sr).expect("it is there");
    let file = rig.file("sr", &vdi);
    let aside = rig.dir.join("aside");
    let messages = || {
        let all = rig.stack.db.all("message");
        let mut names: Vec<_> = all.iter().map(|message| message.text("name").to_owned()).collect();
        names.retain(|name| name.starts_with("METADATA_LUN"));
        names.sort();
        names
    };
    let rename =
        |name: &str| rig.call("VDI.set_name_label", vec![disk.as_str().into(), name.into()]).expect("named");
    std::fs::rename(&file, &aside).expect("the image goes");
    for name in ["one", "two"] {
        rename(name);
        rig.stack.replicas.turn();
    }
    assert_eq!(messages(), ["METADATA_LUN_BROKEN"]);
    assert!(!rig.vdi(&vdi).bool("metadata_latest"));
    std::fs::rename(&aside, &file).expect("it comes back");
    rig.stack.replicas.turn();
    assert_eq!(messages(), ["METADATA_LUN_BROKEN", "METADATA_LUN_HEALTHY"]);
    assert!(rig.vdi(&vdi).bool("metadata_latest"));
    on_sr("SR.disable_database_replication").expect("it goes");
    assert_eq!(metadata(&rig, &sr), None);
    assert!(!file.exists());
    rename("three");
    rig.stack.replicas.turn();
    rig.check(&sr, "sr");
}
