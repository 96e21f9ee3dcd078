//! Changed block tracking, of disks that no process has open.

use std::os::unix::fs::FileExt;

use tapio_model::{NULL_REF, Value};

use super::rig::{MIB, Rig};

fn none() -> Value {
    Value::string_map::<&str, &str>([])
}

fn on(vdi: &str) -> Vec<Value> {
    vec![vdi.into()]
}

/// A VDI whose changed blocks are tracked.
fn tracked(rig: &Rig, sr: &str) -> String {
    let vdi = rig.make_vdi(sr, 4 * MIB);
    assert!(rig.words("VDI", &vdi, "allowed_operations").contains(&"enable_cbt".to_owned()));
    rig.call("VDI.enable_cbt", on(&vdi)).expect("it is a disk of its own");
    assert!(rig.vdi(&vdi).bool("cbt_enabled"));
    vdi
}

fn listed(rig: &Rig, from: &str, to: &str) -> String {
    rig.text("VDI.list_changed_blocks", vec![from.into(), to.into()]).expect("one comes after the other")
}

fn copy_into(rig: &Rig, from: &str, into: &str) {
    rig.text("VDI.copy", vec![from.into(), NULL_REF.into(), NULL_REF.into(), into.into()]).expect("a copy");
}

#[test]
fn what_is_tracked_is_a_field_and_is_not_inherited_by_clones() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = tracked(&rig, &sr);
    rig.call("VDI.enable_cbt", on(&vdi)).expect("it is so already");
    let tracks = |vdi: &str| rig.vdi(vdi).bool("cbt_enabled");
    let first = rig.snapshot(&vdi);
    assert!(tracks(&first));
    let clone = rig.text("VDI.clone", vec![vdi.as_str().into(), none()]).expect("a clone");
    let copy = rig.text("VDI.copy", Rig::copy_params(&vdi, &sr)).expect("a copy");
    let into = rig.make_vdi(&sr, 4 * MIB);
    let params = [&vdi, NULL_REF, &first, &into].map(Value::string).to_vec();
    rig.text("VDI.copy", params).expect("a delta");
    assert_eq!([&clone, &copy, &into, &vdi].map(|vdi| tracks(vdi)), [false, false, false, true]);
    rig.call("VDI.disable_cbt", on(&vdi)).expect("it is a disk of its own");
    let second = rig.snapshot(&vdi);
    assert_eq!([&vdi, &first, &second].map(|vdi| tracks(vdi)), [false, true, false]);
    rig.call("VDI.data_destroy", on(&first)).expect("it is a tracked snapshot");
    let left = rig.vdi(&first);
    assert_eq!((left.text("type"), left.int("physical_utilisation")), ("cbt_metadata", 0));
    assert!(left.bool("cbt_enabled") && left.int("virtual_size") == 4 * MIB);
    let content = left.map("other_config").get("content_id").cloned();
    assert_eq!(content.as_deref(), Some("/No content: this is a cbt_metadata VDI/"));
    rig.check(&sr, "sr");
    rig.call("SR.scan", on(&sr)).expect("a scan");
    rig.check(&sr, "sr");
    assert_eq!(rig.vdi(&first).text("type"), "cbt_metadata");
}

#[test]
fn changed_blocks_are_listed_from_snapshot_to_snapshot() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = tracked(&rig, &sr);
    let raw = rig.try_vdi(&sr, 4 * MIB, &[("type", "raw")]).expect("a raw VDI");
    let write = |at: i64, byte: u8| {
        let file = std::fs::File::options().write(true).open(rig.file("sr", &raw)).expect("its file");
        file.write_all_at(&[byte; 512], at as u64).expect("room");
        copy_into(&rig, &raw, &vdi);
    };
    let first = rig.snapshot(&vdi);
    write(0, 1);
    let second = rig.snapshot(&vdi);
    rig.call("VDI.resize", vec![vdi.as_str().into(), (8 * MIB).into()]).expect("it grows");
    let third = rig.snapshot(&vdi);
    assert_eq!(listed(&rig, &first, &second), "gAAAAAAAAAA=");
    assert_eq!(listed(&rig, &first, &third), "gAAAAAAAAAAAAAAAAAAAAA==");
    assert_eq!(listed(&rig, &second, &third), "AAAAAAAAAAAAAAAAAAAAAA==");
    assert!(rig.words("VDI", &second, "allowed_operations").contains(&"data_destroy".to_owned()));
    rig.call("VDI.data_destroy", on(&second)).expect("it is a tracked snapshot");
    assert_eq!(listed(&rig, &first, &second), "gAAAAAAAAAA=");
    // The changes of one that goes are those of the one after it.
    rig.call("VDI.destroy", on(&second)).expect("its log goes as well");
    assert_eq!(listed(&rig, &first, &third), "gAAAAAAAAAAAAAAAAAAAAA==");
    let backwards =
        rig.refused("VDI.list_changed_blocks", vec![third.as_str().into(), first.as_str().into()]);
    assert_eq!(backwards.0, "SR_BACKEND_FAILURE_460");
    rig.check(&sr, "sr");
    for gone in [&first, &third, &vdi, &raw] {
        rig.call("VDI.destroy", on(gone)).expect("it goes");
        rig.check(&sr, "sr");
    }
    let left = std::fs::read_dir(rig.dir.join("sr")).expect("the directory");
    let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(left, [".sr-uuid"], "no log is left");
}

/// As after a disk process that was killed: its log says that it is not complete.
#[test]
fn the_administrator_is_told_of_a_log_that_is_not_complete() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = tracked(&rig, &sr);
    let first = rig.snapshot(&vdi);
    let log = rig.dir.join("sr").join(format!("{}.cbtlog", rig.vdi(&vdi).text("uuid")));
    let mut log = tapio_format::cbt::Log::open(&log, tapio_types::Access::ReadWrite).expect("its log");
    let header = tapio_format::cbt::LogHeader { consistent: 0, ..*log.header() };
    log.set_header(header).expect("written");
    drop(log);
    let second = rig.snapshot(&vdi);
    assert_eq!(listed(&rig, &first, &second), "//////////8=", "everything");
    let told = rig.stack.db.all("message");
    let about = rig.vdi(&vdi).text("uuid").to_owned();
    let found: Vec<_> = told.iter().filter(|message| message.text("obj_uuid") == about).collect();
    assert_eq!(found.len(), 1, "{told:?}");
    let message = (found[0].text("name"), found[0].text("cls"), found[0].int("priority"));
    assert_eq!(message, ("VDI_CBT_METADATA_INCONSISTENT", "VDI", 3));
    assert!(found[0].text("body").contains("everything counts as changed"), "{}", found[0].text("body"));
}

#[test]
fn what_cannot_be_tracked_says_so() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = tracked(&rig, &sr);
    let plain = rig.make_vdi(&sr, 4 * MIB);
    let raw = rig.try_vdi(&sr, 4 * MIB, &[("type", "raw")]).expect("a raw VDI");
    let (snapshot, untracked) = (rig.snapshot(&vdi), rig.snapshot(&plain));
    let refused = |method: &str, params: Vec<Value>| rig.refused(method, params).0;
    let pair = |from: &str, to: &str| vec![Value::string(from), Value::string(to)];
    let list = "VDI.list_changed_blocks";
    assert_eq!(refused("VDI.enable_cbt", on(&raw)), "SR_BACKEND_FAILURE_66");
    for method in ["VDI.enable_cbt", "VDI.disable_cbt"] {
        assert_eq!(refused(method, on(&snapshot)), "OPERATION_NOT_ALLOWED");
    }
    assert_eq!(refused("VDI.data_destroy", on(&vdi)), "OPERATION_NOT_ALLOWED");
    assert_eq!(refused("VDI.data_destroy", on(&untracked)), "VDI_NO_CBT_METADATA");
    assert_eq!(refused(list, pair(&vdi, &plain)), "VDI_NO_CBT_METADATA");
    assert_eq!(refused(list, pair(&vdi, &vdi)), "SR_BACKEND_FAILURE_460");
    let elsewhere = rig.make_sr("other");
    assert_eq!(refused(list, pair(&snapshot, &tracked(&rig, &elsewhere))), "SR_BACKEND_FAILURE_460");
    rig.call("VDI.data_destroy", on(&snapshot)).expect("it is a tracked snapshot");
    let needs_data = [
        ("VDI.data_destroy", on(&snapshot)),
        ("VDI.enable_cbt", on(&snapshot)),
        ("VDI.snapshot", vec![snapshot.as_str().into(), none()]),
        ("VDI.clone", vec![snapshot.as_str().into(), none()]),
        ("VDI.resize", vec![snapshot.as_str().into(), (8 * MIB).into()]),
        ("VDI.copy", Rig::copy_params(&snapshot, &sr)),
        ("VDI.copy", [&plain, NULL_REF, &snapshot, NULL_REF].map(Value::string).to_vec()),
        ("VDI.copy", [&plain, NULL_REF, NULL_REF, &snapshot].map(Value::string).to_vec()),
    ];
    for (method, params) in needs_data {
        let (code, params) = rig.refused(method, params);
        assert_eq!(
            (code.as_str(), params),
            ("VDI_INCOMPATIBLE_TYPE", vec![snapshot.clone(), "cbt_metadata".into()])
        );
    }
    let opened = tapio_core::storage::activate(
        &rig.own_call(),
        &rig.vdi(&snapshot),
        "vbd",
        tapio_types::Access::ReadOnly,
    );
    assert_eq!(opened.expect_err("there are no data").code, "VDI_INCOMPATIBLE_TYPE");
    let mut allowed = rig.words("VDI", &snapshot, "allowed_operations");
    allowed.sort();
    assert_eq!(allowed, ["destroy", "forget", "list_changed_blocks", "update"]);
    // An SR that is not empty stays, even if a log is all that is in it.
    assert_eq!(refused("SR.destroy", on(&sr)), "SR_NOT_EMPTY");
}

/// An image that is away for a while keeps its record, although its log is there.
#[test]
fn an_image_that_is_away_has_not_become_metadata() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = tracked(&rig, &sr);
    let (file, away) = (rig.file("sr", &vdi), rig.dir.join("away"));
    std::fs::rename(&file, &away).expect("moved");
    rig.call("SR.scan", on(&sr)).expect("a scan");
    assert_eq!(rig.refused("VDI.update", on(&vdi)).0, "VDI_MISSING");
    let missing = rig.vdi(&vdi);
    assert!(missing.bool("missing") && missing.text("type") == "user");
    std::fs::rename(&away, &file).expect("moved back");
    rig.call("SR.scan", on(&sr)).expect("a scan");
    assert!(!rig.vdi(&vdi).bool("missing") && rig.vdi(&vdi).bool("cbt_enabled"));
    rig.check(&sr, "sr");
}
