//! Each failure has its documented error.

use std::os::unix::fs::FileExt;
use std::process::Command;

use tapio_core::storage;
use tapio_model::{NULL_REF, Value};
use tapio_types::Access;

use super::rig::{MIB, Rig};

fn none() -> Value {
    Value::string_map::<&str, &str>([])
}

#[test]
fn wrong_parameters() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let gone = "OpaqueRef:00000000-0000-4000-8000-000000000000";
    for method in ["VDI.destroy", "VDI.forget", "VDI.update"] {
        assert_eq!(
            rig.refused(method, vec![gone.into()]),
            ("HANDLE_INVALID".into(), vec!["VDI".into(), gone.into()])
        );
    }
    for method in ["SR.scan", "SR.update", "SR.destroy", "SR.forget"] {
        assert_eq!(
            rig.refused(method, vec![gone.into()]),
            ("HANDLE_INVALID".into(), vec!["SR".into(), gone.into()])
        );
    }
    for method in ["PBD.plug", "PBD.unplug", "PBD.destroy"] {
        assert_eq!(rig.refused(method, vec![gone.into()]).0, "HANDLE_INVALID", "{method}");
    }
    assert_eq!(rig.refused("VDI.resize", vec![gone.into(), "large".into()]).0, "FIELD_TYPE_ERROR");
    assert_eq!(rig.refused("VDI.resize", vec![gone.into()]).0, "MESSAGE_PARAMETER_COUNT_MISMATCH");
    let error = rig.try_vdi(&sr, -1, &[]).expect_err("a size is not negative");
    assert_eq!((&*error.code, &*error.params[0]), ("INVALID_VALUE", "virtual_size"));
    let error = rig.try_vdi(gone, MIB, &[]).expect_err("there is no such SR");
    assert_eq!(error.code, "HANDLE_INVALID");
    let error = rig.try_vdi(&sr, MIB, &[("image-format", "floppy")]).expect_err("there is no such format");
    assert!(error.code.starts_with("SR_BACKEND_FAILURE_"), "{error}");
    // One byte more than a VHD can have.
    let error = rig.try_vdi(&sr, (2040 << 30) + 1, &[]).expect_err("too large");
    assert_eq!(error.code, "SR_BACKEND_FAILURE_79");
    assert!(error.params[1].contains("VDI Invalid size"), "{error}");
    rig.check(&sr, "sr");
}

#[test]
fn an_sr_that_cannot_be_made_leaves_nothing() {
    let rig = Rig::new();
    let (code, _) = rig.refused("SR.create", rig.sr_params("nothing", none()));
    assert_eq!(code, "SR_UNKNOWN_DRIVER");
    let (code, params) = rig.refused("SR.create", rig.sr_params("file", none()));
    assert_eq!(code, "SR_BACKEND_FAILURE_94", "{params:?}");
    let (code, _) = rig.refused("SR.create", rig.sr_params("ext", none()));
    assert_eq!(code, "SR_BACKEND_FAILURE_90");
    let mut params = rig.sr_params("file", Value::string_map([("location", "/nonexistent/at/all")]));
    params[0] = NULL_REF.into();
    assert_eq!(rig.refused("SR.create", params.clone()).0, "HANDLE_INVALID");
    params[0] = rig.host.as_str().into();
    params[7] = true.into();
    params[5] = "ext".into();
    assert_eq!(rig.refused("SR.create", params.clone()).0, "VALUE_NOT_SUPPORTED");
    params[5] = "file".into();
    params[7] = false.into();
    params[2] = (-5).into();
    assert_eq!(rig.refused("SR.create", params).0, "INVALID_VALUE");
    assert!(rig.stack.db.all("SR").is_empty() && rig.stack.db.all("PBD").is_empty());
    assert!(rig.stack.db.notes("storage/").is_empty());
}

#[test]
fn what_a_driver_cannot_do() {
    let rig = Rig::new();
    let dir = rig.dir.join("iso");
    std::fs::create_dir(&dir).expect("a directory");
    std::fs::write(dir.join("tools.iso"), vec![0; 65536]).expect("an image");
    let config = [("location", dir.to_string_lossy().into_owned()), ("legacy_mode", "true".into())];
    let sr = rig.text("SR.create", rig.sr_params("iso", Value::string_map(config))).expect("a library");
    let vdis = rig.stack.db.find("VDI", "SR", &sr);
    let [iso] = &vdis[..] else { panic!("{vdis:?}") };
    assert_eq!((iso.text("name_label"), iso.bool("read_only")), ("tools.iso", true));
    let vdi: Value = iso.reference.as_str().into();
    let refused = [
        ("VDI.snapshot", vec![vdi.clone(), none()]),
        ("VDI.clone", vec![vdi.clone(), none()]),
        ("VDI.resize", vec![vdi.clone(), MIB.into()]),
        ("VDI.destroy", vec![vdi.clone()]),
        ("VDI.set_on_boot", vec![vdi.clone(), "reset".into()]),
        ("SR.assert_can_host_ha_statefile", vec![sr.as_str().into()]),
    ];
    for (method, params) in refused {
        assert_eq!(
            rig.refused(method, params),
            ("SR_OPERATION_NOT_SUPPORTED".into(), vec![sr.clone()]),
            "{method}"
        );
    }
    assert_eq!(
        rig.try_vdi(&sr, MIB, &[]).expect_err("nothing is made there").code,
        "SR_OPERATION_NOT_SUPPORTED"
    );
    let call = rig.own_call();
    let error = storage::activate(&call, &rig.vdi(&iso.reference), "vbd", Access::ReadWrite)
        .expect_err("it is read only");
    assert_eq!((&*error.code, &error.params[..]), ("VDI_READONLY", &[iso.reference.clone()][..]));
    for drive in 0..20 {
        drop(
            storage::activate(&call, &rig.vdi(&iso.reference), &format!("vbd {drive}"), Access::ReadOnly)
                .expect("a reader"),
        );
    }
    let files = rig.make_sr("sr");
    let copied = rig.text("VDI.copy", Rig::copy_params(&iso.reference, &files)).expect("a copy of an ISO");
    assert_eq!(rig.vdi(&copied).text("name_label"), "tools.iso");
    rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan");
    rig.call("SR.set_shared", vec![files.as_str().into(), true.into()]).expect("hosts may share a directory");
}

#[test]
fn a_vanished_directory_loses_no_record() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let (there, aside) = (rig.dir.join("sr"), rig.dir.join("aside"));
    std::fs::rename(&there, &aside).expect("it is taken away");
    for (method, params) in [
        ("SR.scan", vec![sr.as_str().into()]),
        ("VDI.snapshot", vec![vdi.as_str().into(), none()]),
        ("VDI.resize", vec![vdi.as_str().into(), (8 * MIB).into()]),
        ("VDI.update", vec![vdi.as_str().into()]),
    ] {
        let (code, params) = rig.refused(method, params);
        assert!(
            code.starts_with("SR_BACKEND_FAILURE_") || code == "VDI_MISSING",
            "{method}: {code} {params:?}"
        );
    }
    let error = rig.try_vdi(&sr, 4 * MIB, &[]).expect_err("there is nowhere to make it");
    assert!(error.code.starts_with("SR_BACKEND_FAILURE_"), "{error}");
    let error =
        storage::activate(&rig.own_call(), &rig.vdi(&vdi), "vbd", Access::ReadWrite).expect_err("it is away");
    assert!(error.code.starts_with("SR_BACKEND_FAILURE_") || error.code == "VDI_MISSING", "{error}");
    std::fs::rename(&aside, &there).expect("it is back");
    rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan");
    assert_eq!(rig.vdi(&vdi).text("name_label"), "disk");
    rig.check(&sr, "sr");
}

#[test]
fn a_damaged_image_is_told_and_harms_no_other() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let (damaged, sound) = (rig.make_vdi(&sr, 4 * MIB), rig.make_vdi(&sr, 4 * MIB));
    let file = std::fs::File::options().write(true).open(rig.file("sr", &damaged)).expect("its file");
    let len = file.metadata().expect("its size").len();
    file.write_all_at(&vec![0x5a; len as usize], 0).expect("room");
    rig.call("SR.scan", vec![sr.as_str().into()]).expect("a scan goes on");
    assert!(!rig.vdi(&damaged).map("sm_config")["damaged"].is_empty());
    let error = storage::activate(&rig.own_call(), &rig.vdi(&damaged), "vbd", Access::ReadWrite);
    let error = error.expect_err("it cannot be read");
    assert!(error.code.starts_with("SR_BACKEND_FAILURE_"), "{error}");
    rig.snapshot(&sound);
    rig.call("VDI.destroy", vec![damaged.as_str().into()]).expect("it can be removed");
    rig.check(&sr, "sr");
}

/// A small file system, for as long as this lives.
struct Small(std::path::PathBuf);

impl Drop for Small {
    fn drop(&mut self) {
        tapio_fixtures::unmounting::unmount(&self.0);
    }
}

#[test]
fn a_full_disk_leaves_what_was() {
    let rig = Rig::new();
    let dir = rig.dir.join("small");
    std::fs::create_dir(&dir).expect("a directory");
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"]).arg(&dir).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        println!("skipped: needs root to mount a tmpfs [storage::a_full_disk_leaves_what_was]");
        return;
    }
    let _small = Small(dir);
    let sr = rig.make_sr("small");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let ballast = rig.dir.join("small/ballast");
    let full = (0_u64..).find(|at| {
        let file = std::fs::File::options().create(true).write(true).truncate(false).open(&ballast);
        file.and_then(|file| file.write_all_at(&[1; 4096], at * 4096)).is_err()
    });
    assert!(full.is_some());
    let error = rig.try_vdi(&sr, 4 * MIB, &[]).expect_err("there is no room");
    assert_eq!(error.code, "SR_BACKEND_FAILURE_44", "{error}");
    let (code, _) = rig.refused("VDI.copy", Rig::copy_params(&vdi, &sr));
    assert_eq!(code, "SR_BACKEND_FAILURE_44");
    rig.call("SR.update", vec![sr.as_str().into()]).expect("sizes");
    let record = rig.get("SR", &sr);
    assert_eq!(record.int("physical_utilisation"), record.int("physical_size"), "{record:?}");
    std::fs::remove_file(&ballast).expect("room again");
    rig.check(&sr, "small");
    let more = rig.make_vdi(&sr, 4 * MIB);
    rig.call("VDI.destroy", vec![more.as_str().into()]).expect("it goes");
    let pbd = rig.pbd(&sr);
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("it is not in use");
}
