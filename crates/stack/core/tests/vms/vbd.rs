//! VBDs: their rules, and their errors.

use tapio_model::{NULL_REF, Value};

use crate::rig::{MIB, Rig};

#[test]
fn places_are_chosen_taken_and_refused() {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let vdi = rig.make_vdi(&sr, MIB);
    let free = |rig: &Rig| rig.call("VM.get_allowed_VBD_devices", vec![vm.as_str().into()]);
    assert_eq!(free(&rig).as_set().map(<[Value]>::len), Some(255));
    let first = rig.make_vbd(&vm, &vdi);
    assert_eq!(rig.get("VBD", &first).text("userdevice"), "0");
    let at = |place: &str| vec![Rig::vbd_record(&vm, &vdi, &[("userdevice", place.into())])];
    let named = rig.text("VBD.create", at("xvdiu"));
    assert_eq!(rig.get("VBD", &named).text("userdevice"), "254");
    assert_eq!(rig.refused("VBD.create", at("254")).code, "DEVICE_ALREADY_EXISTS");
    for bad in ["255", "xvd", "-1", "first"] {
        assert_eq!(rig.refused("VBD.create", at(bad)).code, "INVALID_DEVICE", "{bad}");
    }
    let drive = rig.make_empty_cd(&vm);
    assert_eq!(rig.get("VBD", &drive).text("userdevice"), "3", "drives are where they always were");
    rig.call("VBD.set_userdevice", vec![drive.as_str().into(), "7".into()]);
    assert_eq!(
        rig.refused("VBD.set_userdevice", vec![drive.as_str().into(), "0".into()]).code,
        "DEVICE_ALREADY_EXISTS"
    );
    assert_eq!(free(&rig).as_set().map(<[Value]>::len), Some(252));
    rig.call("VBD.destroy", vec![drive.into()]);
    rig.check(None);
}

#[test]
fn what_cannot_be_is_refused() {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let vdi = rig.make_vdi(&sr, MIB);
    let code = |more: &[(&'static str, Value)]| {
        rig.refused("VBD.create", vec![Rig::vbd_record(&vm, &vdi, more)]).code.into_owned()
    };
    assert_eq!(code(&[("type", "CD".into())]), "VBD_CDS_MUST_BE_READONLY");
    assert_eq!(code(&[("empty", true.into())]), "VBD_NOT_REMOVABLE_MEDIA");
    assert_eq!(code(&[("VDI", NULL_REF.into())]), "HANDLE_INVALID");
    assert_eq!(code(&[("VM", "OpaqueRef:none".into())]), "HANDLE_INVALID");
    assert_eq!(code(&[("qos_algorithm_type", "fair".into())]), "INVALID_VALUE");
    rig.call("VDI.set_read_only", vec![vdi.as_str().into(), true.into()]);
    assert_eq!(code(&[]), "VDI_READONLY");
}

#[test]
fn plugging_has_its_states() {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[("sim-fail", "unplug:1,unplug-timeout:2,plug:4")]));
    let disks: Vec<String> = (0..5).map(|_| rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB))).collect();
    // The fourth place is a drive's; the failing one is the fifth disk at place 5, so it is put where it fails.
    rig.call("VBD.set_userdevice", vec![disks[3].as_str().into(), "9".into()]);
    rig.call("VBD.set_userdevice", vec![disks[4].as_str().into(), "4".into()]);
    let one = || vec![Value::string(&disks[0])];
    let error = rig.refused("VBD.plug", one());
    assert_eq!((&*error.code, error.params[2].as_str()), ("VM_BAD_POWER_STATE", "halted"));
    let bad = rig.refused("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    assert!(bad.to_string().contains("sim-fail"), "{bad}");
    assert_eq!(rig.get("VM", &vm).text("power_state"), "Halted");
    rig.check(None);
    rig.call("VBD.destroy", vec![disks[4].as_str().into()]);
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    assert_eq!(rig.get("VBD", &disks[0]).text("device"), "xvda");
    assert_eq!(rig.refused("VBD.plug", one()).code, "DEVICE_ALREADY_ATTACHED");
    assert_eq!(rig.refused("VBD.destroy", one()).code, "OPERATION_NOT_ALLOWED");
    rig.call("VBD.unplug", one());
    assert_eq!(rig.refused("VBD.unplug", one()).code, "DEVICE_ALREADY_DETACHED");
    rig.call("VBD.plug", one());
    rig.call("VBD.set_unpluggable", vec![disks[0].as_str().into(), false.into()]);
    assert_eq!(rig.refused("VBD.unplug", one()).code, "VBD_NOT_UNPLUGGABLE");
    assert_eq!(rig.refused("VBD.unplug_force", one()).code, "VBD_NOT_UNPLUGGABLE");
    let rejected = rig.refused("VBD.unplug", vec![disks[1].as_str().into()]);
    assert_eq!((&*rejected.code, &*rejected.params[1]), ("DEVICE_DETACH_REJECTED", disks[1].as_str()));
    assert!(rig.get("VBD", &disks[1]).bool("currently_attached"));
    rig.call("VBD.add_to_other_config", vec![disks[2].as_str().into(), "unplug-timeout".into(), "1".into()]);
    let begun = std::time::Instant::now();
    let late = rig.refused("VBD.unplug", vec![disks[2].as_str().into()]);
    assert_eq!((&*late.code, &*late.params[1]), ("DEVICE_DETACH_TIMEOUT", disks[2].as_str()));
    // The default is a minute.
    assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{:?}", begun.elapsed());
    rig.check(None);
    rig.call("VBD.unplug_force", vec![disks[2].as_str().into()]);
    assert!(!rig.get("VBD", &disks[2]).bool("currently_attached"));
    rig.check(None);
    rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    assert!(disks[..4].iter().all(|vbd| !rig.get("VBD", vbd).bool("currently_attached")));
    rig.check(None);
}

#[test]
fn a_paused_disk_goes_on_with_its_token_alone() {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let vdi = rig.make_vdi(&sr, MIB);
    let (vbd, drive) = (rig.make_vbd(&vm, &vdi), rig.make_empty_cd(&vm));
    let one = || vec![Value::string(&vbd)];
    let unpause = |token: &str| vec![Value::string(&vbd), token.into()];
    assert_eq!(rig.refused("VBD.pause", one()).code, "VM_BAD_POWER_STATE");
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    assert_eq!(rig.refused("VBD.pause", vec![drive.as_str().into()]).code, "VBD_IS_EMPTY");
    let early = rig.refused("VBD.unpause", unpause(""));
    assert!(early.params[0].contains("is not paused"), "{early}");
    let may = |word: &str| {
        let vbd = rig.get("VBD", &vbd);
        vbd.get("allowed_operations").as_set().is_some_and(|words| words.contains(&word.into()))
    };
    assert!(may("pause") && !may("unpause"));
    let token = rig.text("VBD.pause", one());
    assert!(!may("pause") && may("unpause"));
    assert_eq!(rig.get("VBD", &vbd).map("runtime_properties")["pause-token"], token);
    // What needs the images is refused, with the next step.
    let uuid = rig.get("VBD", &vbd).text("uuid").to_owned();
    let next = format!("xe vbd-unpause uuid={uuid}");
    for (method, params) in [
        ("VBD.pause", one()),
        ("VDI.snapshot", vec![vdi.as_str().into(), Value::string_map(std::iter::empty::<(&str, &str)>())]),
    ] {
        let refused = rig.refused(method, params);
        assert!(refused.code == "OPERATION_NOT_ALLOWED" && refused.params[0].contains(&next), "{refused}");
    }
    let wrong = rig.refused("VBD.unpause", unpause("another"));
    assert!(wrong.params[0].contains("another token"), "{wrong}");
    rig.call("VBD.unpause", unpause(&token));
    assert!(may("pause") && rig.get("VBD", &vbd).map("runtime_properties").is_empty());
    // An unplug lets it go on first, and so does the end of its VM.
    rig.call("VBD.pause", one());
    rig.call("VBD.unplug", one());
    assert!(!may("pause") && !may("unpause"));
    assert_eq!(rig.refused("VBD.pause", one()).code, "DEVICE_NOT_ATTACHED");
    rig.call("VBD.plug", one());
    assert!(may("pause"));
    rig.call("VBD.pause", one());
    rig.call("VM.clean_shutdown", vec![vm.as_str().into()]);
    assert_eq!(rig.stack.db.find("message", "name", "VBD_UNPAUSED").len(), 1);
    assert!(rig.get("VBD", &vbd).map("runtime_properties").is_empty());
    rig.check(None);
    // Forced ends ask nothing.
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    rig.call("VBD.pause", one());
    rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    assert_eq!(rig.stack.db.find("message", "name", "VBD_UNPAUSED").len(), 1);
    rig.check(None);
}

#[test]
fn drives_take_and_give_media() {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let (vdi, drive) = (rig.make_vdi(&sr, MIB), rig.make_empty_cd(&vm));
    let disk = rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB));
    let put = || vec![Value::string(&drive), Value::string(&vdi)];
    assert_eq!(rig.refused("VBD.eject", vec![drive.as_str().into()]).code, "VBD_IS_EMPTY");
    assert_eq!(
        rig.refused("VBD.insert", vec![disk.as_str().into(), vdi.as_str().into()]).code,
        "VBD_NOT_REMOVABLE_MEDIA"
    );
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    assert!(rig.get("VBD", &drive).bool("currently_attached"), "an empty drive is a drive");
    rig.call("VBD.insert", put());
    assert_eq!(rig.refused("VBD.insert", put()).code, "VBD_NOT_EMPTY");
    rig.check(None);
    rig.call("VBD.eject", vec![drive.as_str().into()]);
    let record = rig.get("VBD", &drive);
    assert!(record.bool("empty") && record.bool("currently_attached") && record.is_null("VDI"));
    rig.check(None);
    rig.call("VBD.insert", put());
    rig.call("VM.clean_shutdown", vec![vm.as_str().into()]);
    assert_eq!(rig.get("VBD", &drive).text("VDI"), vdi, "a medium stays in its drive");
    rig.check(None);
}

#[test]
fn a_vdi_has_one_writer_or_many_readers() {
    let rig = Rig::pretended();
    let sr = rig.make_sr();
    let vdi = rig.make_vdi(&sr, MIB);
    let host = rig.control_domain();
    let read_only = || vec![Rig::vbd_record(&host, &vdi, &[("mode", "RO".into())])];
    let readers: Vec<String> = (0..20).map(|_| rig.text("VBD.create", read_only())).collect();
    for reader in &readers {
        rig.call("VBD.plug", vec![reader.as_str().into()]);
    }
    rig.check(None);
    let writer = rig.make_vbd(&host, &vdi);
    assert_eq!(rig.refused("VBD.assert_attachable", vec![writer.as_str().into()]).code, "VDI_IN_USE");
    assert_eq!(rig.refused("VBD.plug", vec![writer.as_str().into()]).code, "VDI_IN_USE");
    for reader in &readers {
        rig.call("VBD.unplug", vec![reader.as_str().into()]);
    }
    rig.call("VBD.plug", vec![writer.as_str().into()]);
    assert_eq!(rig.refused("VBD.plug", vec![readers[0].as_str().into()]).code, "VDI_IN_USE");
    rig.call("VBD.unplug", vec![writer.into()]);
    rig.check(None);
}
