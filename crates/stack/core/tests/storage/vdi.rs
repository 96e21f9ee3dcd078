//! VDIs.

use std::os::unix::fs::FileExt;

use tapio_model::{NULL_REF, Value};

use super::rig::{MIB, Rig};

fn none() -> Value {
    Value::string_map::<&str, &str>([])
}

#[test]
fn sizes_are_what_was_asked_for_or_more() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    for size in [4 * MIB, 4 * MIB + 1, 8 * MIB] {
        let vdi = rig.make_vdi(&sr, size);
        assert!(rig.vdi(&vdi).int("virtual_size") >= size);
        rig.call("VDI.update", vec![vdi.as_str().into()]).expect("an update changes nothing");
        assert_eq!(rig.vdi(&vdi).text("name_label"), "disk");
        rig.check(&sr, "sr");
        rig.call("VDI.destroy", vec![vdi.as_str().into()]).expect("it goes");
        rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan");
        assert!(rig.stack.db.get("VDI", &vdi).is_err());
    }
}

#[test]
fn what_attaches_a_vdi_without_a_database() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let host = rig.stack.db.all("host")[0].reference.clone();
    let asked = || vec![host.as_str().into(), vdi.as_str().into()];
    let text = rig.text("VDI.generate_config", asked()).expect("a call");
    let member =
        |name: &str, value: &str| format!("<name>{name}</name><value><string>{value}</string></value>");
    let place = rig.get("PBD", &rig.pbd(&sr)).map("device_config")["location"].clone();
    let (sr_uuid, vdi_uuid) =
        (rig.get("SR", &sr).text("uuid").to_owned(), rig.vdi(&vdi).text("uuid").to_owned());
    for (name, value) in [("location", place), ("sr_uuid", sr_uuid), ("vdi_uuid", vdi_uuid)] {
        assert!(text.contains(&member(name, &value)), "{name} in {text}");
    }
    assert!(text.contains("<methodName>vdi_attach_from_config</methodName>"), "{text}");
    assert!(rig.words("VDI", &vdi, "allowed_operations").contains(&"generate_config".to_owned()));
    // Nothing changes by it.
    assert_eq!(rig.text("VDI.generate_config", asked()).expect("the same"), text);
    rig.call("PBD.unplug", vec![rig.pbd(&sr).into()]).expect("nothing uses it");
    let config = [("location", "/x"), ("password", "secret word")];
    let params = vec![rig.pbd(&sr).into(), Value::string_map(config)];
    rig.call("PBD.set_device_config", params).expect("another way there");
    assert_eq!(rig.refused("VDI.generate_config", asked()).0, "SR_NOT_ATTACHED");
    let (code, _) = rig.refused("VDI.generate_config", vec![NULL_REF.into(), vdi.as_str().into()]);
    assert_eq!(code, "HANDLE_INVALID");
}

#[test]
fn a_disk_grows() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    rig.call("VDI.resize", vec![vdi.as_str().into(), (5 * MIB).into()]).expect("it grows");
    assert!(rig.vdi(&vdi).int("virtual_size") >= 5 * MIB);
    rig.check(&sr, "sr");
    let (code, _) = rig.refused("VDI.resize", vec![vdi.as_str().into(), MIB.into()]);
    assert!(code.starts_with("SR_BACKEND_FAILURE_"), "{code}");
    let (code, params) = rig.refused("VDI.resize", vec![vdi.as_str().into(), (-1).into()]);
    assert_eq!((code.as_str(), &*params[0]), ("INVALID_VALUE", "size"));
}

#[test]
fn snapshots_and_clones_are_what_they_are_of() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 8 * MIB);
    let before =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock").as_secs();
    let snapshot = rig.snapshot(&vdi);
    let (old, made) = (rig.vdi(&vdi), rig.vdi(&snapshot));
    let Value::DateTime(time) = made.get("snapshot_time") else { panic!("{made:?}") };
    assert!((before as i64..=before as i64 + 60).contains(time));
    assert!(made.bool("is_a_snapshot") && made.text("snapshot_of") == vdi);
    assert!(made.text("location") != old.text("location"));
    let clone = rig.text("VDI.clone", vec![vdi.as_str().into(), none()]).expect("a clone");
    let copied = rig.vdi(&clone);
    assert!(!copied.bool("is_a_snapshot") && copied.is_null("snapshot_of"));
    for other in [&made, &copied] {
        for field in ["virtual_size", "tags", "name_label", "other_config", "type"] {
            assert_eq!(old.get(field), other.get(field), "{field}");
        }
    }
    rig.check(&sr, "sr");
    for gone in [&snapshot, &vdi, &clone] {
        rig.call("VDI.destroy", vec![gone.as_str().into()]).expect("it goes");
        rig.check(&sr, "sr");
    }
    assert!(rig.images("sr").is_empty(), "base copies go with the last that needs them");
}

#[test]
fn a_chain_has_base_copies_that_cannot_be_used() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 8 * MIB);
    fill(&rig, "sr", &vdi, b'a');
    let single = Value::string_map([("type", "single")]);
    let same = rig.text("VDI.snapshot", vec![vdi.as_str().into(), single]).expect("a base copy");
    assert_eq!(same, vdi);
    let bases: Vec<_> =
        rig.stack.db.find("VDI", "SR", &sr).into_iter().filter(|vdi| !vdi.bool("managed")).collect();
    let [base] = &bases[..] else { panic!("{bases:?}") };
    assert_eq!(base.text("name_label"), "base copy");
    assert_eq!(rig.vdi(&vdi).text("parent"), base.reference);
    for (method, rest) in
        [("VDI.snapshot", vec![none()]), ("VDI.destroy", vec![]), ("VDI.resize", vec![MIB.into()])]
    {
        let params = [vec![base.reference.as_str().into()], rest].concat();
        assert_eq!(rig.refused(method, params).0, "VDI_NOT_MANAGED", "{method}");
    }
    let odd = Value::string_map([("type", "triple")]);
    assert_eq!(rig.refused("VDI.snapshot", vec![vdi.as_str().into(), odd]).0, "INVALID_VALUE");
    rig.check(&sr, "sr");
}

/// Writes into a raw image, or gives a VHD some data by copying a raw one into it.
fn fill(rig: &Rig, sr_dir: &str, vdi: &str, byte: u8) {
    let sr = rig.vdi(vdi).text("SR").to_owned();
    let raw = rig.try_vdi(&sr, rig.vdi(vdi).int("virtual_size"), &[("type", "raw")]).expect("a raw VDI");
    let file = std::fs::File::options().write(true).open(rig.file(sr_dir, &raw)).expect("its file");
    file.write_all_at(&vec![byte; MIB as usize], 0).expect("room");
    rig.text("VDI.copy", vec![raw.as_str().into(), NULL_REF.into(), NULL_REF.into(), vdi.into()])
        .expect("a copy");
    rig.call("VDI.destroy", vec![raw.as_str().into()]).expect("it goes");
}

/// What a VDI reads as, by a copy into a raw image.
fn contents(rig: &Rig, sr_dir: &str, vdi: &str) -> Vec<u8> {
    let sr = rig.vdi(vdi).text("SR").to_owned();
    let raw = rig.try_vdi(&sr, rig.vdi(vdi).int("virtual_size"), &[("type", "raw")]).expect("a raw VDI");
    rig.text("VDI.copy", vec![vdi.into(), NULL_REF.into(), NULL_REF.into(), raw.as_str().into()])
        .expect("a copy");
    let bytes = std::fs::read(rig.file(sr_dir, &raw)).expect("its file");
    rig.call("VDI.destroy", vec![raw.as_str().into()]).expect("it goes");
    bytes
}

#[test]
fn copies_full_and_delta() {
    let rig = Rig::new();
    let (sr, other) = (rig.make_sr("sr"), rig.make_sr("other"));
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    fill(&rig, "sr", &vdi, b'a');
    let snapshot = rig.snapshot(&vdi);
    // Another megabyte over the first one: the whole difference to the snapshot.
    fill(&rig, "sr", &vdi, b'b');
    let whole = rig.text("VDI.copy", Rig::copy_params(&snapshot, &other)).expect("a full copy");
    assert_eq!(rig.vdi(&whole).text("SR"), other);
    assert_eq!(contents(&rig, "other", &whole)[..MIB as usize], vec![b'a'; MIB as usize]);
    let params = vec![vdi.as_str().into(), other.as_str().into(), snapshot.as_str().into(), NULL_REF.into()];
    let delta = rig.text("VDI.copy", params).expect("a delta");
    let params = vec![delta.as_str().into(), NULL_REF.into(), NULL_REF.into(), whole.as_str().into()];
    assert_eq!(rig.text("VDI.copy", params).expect("into the copy"), whole);
    assert_eq!(contents(&rig, "other", &whole), contents(&rig, "sr", &vdi));
    rig.check(&sr, "sr");
    rig.check(&other, "other");
}

#[test]
fn copies_that_cannot_be() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let (vdi, small) = (rig.make_vdi(&sr, 8 * MIB), rig.make_vdi(&sr, 4 * MIB));
    let raw = rig.try_vdi(&sr, 8 * MIB, &[("type", "raw")]).expect("a raw VDI");
    let copy = |base: &str, into: &str| {
        rig.refused("VDI.copy", vec![vdi.as_str().into(), NULL_REF.into(), base.into(), into.into()])
    };
    assert_eq!(copy(NULL_REF, &small), ("VDI_TOO_SMALL".into(), vec![small.clone(), (8 * MIB).to_string()]));
    assert_eq!(copy(&small, &raw), ("VDI_NOT_SPARSE".into(), vec![raw.clone()]));
    assert_eq!(copy(NULL_REF, &vdi).0, "OPERATION_NOT_ALLOWED");
    assert_eq!(copy(NULL_REF, NULL_REF), ("HANDLE_INVALID".into(), vec!["SR".into(), NULL_REF.into()]));
    rig.call("VDI.set_read_only", vec![raw.as_str().into(), true.into()]).expect("it is not in use");
    assert_eq!(copy(NULL_REF, &raw), ("VDI_READONLY".into(), vec![raw.clone()]));
    rig.check(&sr, "sr");
}

#[test]
fn introduced_twice_is_once_too_often() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let (uuid, location) = (rig.vdi(&vdi).text("uuid").to_owned(), rig.vdi(&vdi).text("location").to_owned());
    let params = |uuid: &str, location: &str| {
        let flag = || Value::Bool(false);
        let mut params: Vec<Value> =
            vec![uuid.into(), "again".into(), "".into(), sr.as_str().into(), "user".into()];
        params.extend([
            flag(),
            flag(),
            none(),
            location.into(),
            none(),
            none(),
            true.into(),
            0.into(),
            0.into(),
        ]);
        params.extend([NULL_REF.into(), flag(), Value::DateTime(0), NULL_REF.into()]);
        params
    };
    let other = uuid::Uuid::new_v4().to_string();
    assert_eq!(rig.refused("VDI.introduce", params(&uuid, &location)).0, "UUID_INVALID");
    assert_eq!(rig.refused("VDI.introduce", params(&other, &location)).0, "LOCATION_NOT_UNIQUE");
    rig.call("VDI.forget", vec![vdi.as_str().into()]).expect("it is not in use");
    assert_eq!(rig.get("SR", &sr).int("virtual_allocation"), 0);
    let again = rig.text("VDI.introduce", params(&uuid, &location)).expect("it is not known");
    assert_eq!(again, vdi);
    assert_eq!(rig.vdi(&vdi).text("name_label"), "again");
    rig.check(&sr, "sr");
    assert_eq!(rig.refused("VDI.db_forget", vec![vdi.as_str().into()]).0, "PERMISSION_DENIED");
}
