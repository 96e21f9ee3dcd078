//! SRs and PBDs.

use tapio_model::{NULL_REF, Value};

use super::rig::{MIB, Rig};

#[test]
fn an_sr_is_made_used_and_destroyed() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let record = rig.get("SR", &sr);
    assert_eq!(record.text("type"), "file");
    assert!(record.int("physical_size") > MIB, "{record:?}");
    assert!(rig.get("PBD", &rig.pbd(&sr)).bool("currently_attached"));
    assert!(rig.words("SR", &sr, "allowed_operations").contains(&"vdi_create".to_owned()));
    let vdi = rig.make_vdi(&sr, 8 * MIB);
    rig.check(&sr, "sr");
    assert_eq!(rig.refused("SR.destroy", vec![sr.as_str().into()]).0, "SR_NOT_EMPTY");
    assert_eq!(rig.refused("SR.forget", vec![sr.as_str().into()]), ("SR_HAS_PBD".into(), vec![sr.clone()]));
    rig.call("VDI.destroy", vec![vdi.as_str().into()]).expect("it goes");
    rig.check(&sr, "sr");
    rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan");
    rig.call("SR.update", vec![sr.as_str().into()]).expect("an update");
    rig.call("SR.destroy", vec![sr.as_str().into()]).expect("it is empty");
    assert!(rig.stack.db.all("SR").is_empty() && rig.stack.db.all("PBD").is_empty());
    assert!(rig.stack.db.notes("storage/").is_empty());
}

#[test]
fn a_forgotten_sr_is_introduced_again_with_its_disks() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let uuid = rig.get("SR", &sr).text("uuid").to_owned();
    let config = rig.get("PBD", &rig.pbd(&sr)).get("device_config").clone();
    let vdi = rig.make_vdi(&sr, 8 * MIB);
    let snapshot = rig.snapshot(&vdi);
    let pbd = rig.pbd(&sr);
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    assert_eq!(rig.words("VDI", &vdi, "allowed_operations"), ["forget"]);
    assert_eq!(rig.refused("VDI.destroy", vec![vdi.as_str().into()]).0, "SR_NOT_ATTACHED");
    rig.call("SR.forget", vec![sr.as_str().into()]).expect("it is unplugged");
    assert!(rig.stack.db.all("VDI").is_empty());
    let introduce = |uuid: &str, kind: &str| {
        let map = Value::string_map::<&str, &str>([]);
        vec![uuid.into(), "again".into(), "".into(), kind.into(), "".into(), false.into(), map]
    };
    assert_eq!(rig.refused("SR.introduce", introduce(&uuid, "nothing")).0, "SR_UNKNOWN_DRIVER");
    assert_eq!(rig.refused("SR.introduce", introduce("nothing", "file")).0, "UUID_INVALID");
    let again = rig.text("SR.introduce", introduce(&uuid, "file")).expect("it is not known");
    assert_eq!(rig.refused("SR.introduce", introduce(&uuid, "file")), ("SR_UUID_EXISTS".into(), vec![uuid]));
    assert_eq!(rig.refused("SR.scan", vec![again.as_str().into()]).0, "SR_HAS_NO_PBDS");
    let record = |config: &Value| {
        let pairs = [
            ("SR", Value::string(&again)),
            ("host", Value::string(&rig.host)),
            ("device_config", config.clone()),
        ];
        vec![Value::Map(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())]
    };
    let pbd = rig.text("PBD.create", record(&config)).expect("there is none");
    assert_eq!(rig.refused("PBD.create", record(&config)).0, "PBD_EXISTS");
    assert_eq!(rig.refused("SR.scan", vec![again.as_str().into()]).0, "SR_NOT_ATTACHED");
    rig.call("PBD.plug", vec![pbd.as_str().into()]).expect("it is there");
    rig.call("PBD.plug", vec![pbd.as_str().into()]).expect("it is plugged");
    assert_eq!(rig.vdi(&vdi).int("virtual_size"), 8 * MIB);
    assert!(rig.vdi(&snapshot).bool("managed"));
    rig.check(&again, "sr");
    assert_eq!(rig.refused("PBD.destroy", vec![pbd.as_str().into()]).0, "OPERATION_NOT_ALLOWED");
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is unplugged");
    rig.call("PBD.destroy", vec![pbd.as_str().into()]).expect("it is unplugged");
}

#[test]
fn a_probe_finds_what_is_there() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let (pbd, uuid) = (rig.pbd(&sr), rig.get("SR", &sr).text("uuid").to_owned());
    let config = rig.get("PBD", &pbd).get("device_config").clone();
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
    let params = |kind: &str| {
        vec![rig.host.as_str().into(), config.clone(), kind.into(), Value::string_map::<&str, &str>([])]
    };
    assert_eq!(rig.refused("SR.probe", params("nothing")).0, "SR_UNKNOWN_DRIVER");
    // What clients look for: this SR's UUID in a list of SRs.
    let xml = rig.text("SR.probe", params("file")).expect("an answer");
    let words: String = xml.split_whitespace().collect();
    assert!(words.contains(&format!("<SRlist><SR><UUID>{uuid}</UUID>")), "{xml}");
    let found = rig.call("SR.probe_ext", params("file")).expect("an answer");
    for result in found.as_set().expect("a set") {
        let result = result.as_map().expect("a record");
        assert!(result.contains_key("configuration") && result.contains_key("complete"), "{result:?}");
        let sr = result["sr"].as_map().expect("a record");
        assert_eq!(sr["uuid"].as_str(), Some(&*uuid), "{sr:?}");
    }
    let mut elsewhere = params("file");
    elsewhere[0] = NULL_REF.into();
    assert_eq!(rig.refused("SR.probe", elsewhere).0, "HANDLE_INVALID");
    rig.call("PBD.plug", vec![pbd.as_str().into()]).expect("it is there");
    assert_eq!(rig.get("SR", &sr).text("uuid"), uuid);
}

#[test]
fn drivers_have_records() {
    let rig = Rig::new();
    let types = rig.call("SR.get_supported_types", vec![]).expect("types");
    let types: Vec<_> =
        types.as_set().expect("a set").iter().filter_map(Value::as_str).map(str::to_owned).collect();
    assert!(types.contains(&"file".to_owned()) && types.contains(&"iso".to_owned()), "{types:?}");
    let known = rig.stack.db.all("SM");
    assert_eq!(known.len(), types.len());
    let file = known.iter().find(|sm| sm.text("type") == "file").expect("the file driver");
    assert_eq!(file.get("features").as_map().expect("a map").get("VDI_SNAPSHOT"), Some(&Value::Int(1)));
}

#[test]
fn a_scan_keeps_names_and_finds_new_and_vanished_images() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let (kept, moved) = (rig.make_vdi(&sr, 8 * MIB), rig.make_vdi(&sr, 4 * MIB));
    let (file, aside) = (rig.file("sr", &moved), rig.dir.join("aside"));
    std::fs::rename(&file, &aside).expect("a file is moved");
    let new = uuid::Uuid::new_v4();
    std::fs::copy(rig.file("sr", &kept), rig.dir.join(format!("sr/{new}.vhd"))).expect("a file is copied");
    let generation = rig.stack.db.generation();
    rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan");
    assert!(rig.stack.db.generation() > generation);
    assert_eq!(rig.vdi(&kept).text("name_label"), "disk");
    assert!(rig.vdi(&moved).bool("missing"), "it is not there");
    assert_eq!(rig.vdi(&moved).text("name_label"), "disk");
    assert_eq!(
        rig.refused("VDI.snapshot", vec![moved.as_str().into(), Value::Map(Default::default())]).0,
        "VDI_MISSING"
    );
    let found = rig.stack.db.by_uuid("VDI", &new.to_string()).expect("it was found");
    assert!(found.bool("managed") && found.text("SR") == sr);
    assert_eq!(rig.get("SR", &sr).int("virtual_allocation"), 16 * MIB);
    std::fs::rename(&aside, &file).expect("it is back");
    rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan");
    rig.check(&sr, "sr");
    assert_eq!(rig.vdi(&moved).text("name_label"), "disk");
}

#[test]
fn what_was_attached_is_attached_after_a_restart() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    // Another daemon on the same records: what was attached in the old one is not in the new one.
    let fresh = crate::rig::recover(&rig.stack);
    fresh.expect("attached again, or still");
    assert!(rig.get("PBD", &rig.pbd(&sr)).bool("currently_attached"));
    rig.call("VDI.update", vec![vdi.as_str().into()]).expect("it is attached");
}
