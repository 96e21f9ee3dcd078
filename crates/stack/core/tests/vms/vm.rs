//! The life of VMs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tapio_core::disks::Backend;
use tapio_core::plan::Timeline;
use tapio_format::vhd::offline::{Chain, Image, OpenOptions};
use tapio_model::Value;

use crate::pretend::Pretend;
use crate::rig::{MIB, Rig};

fn wait(what: &str, is_there: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_there() {
        assert!(Instant::now() < until, "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn start(vm: &str) -> Vec<Value> {
    vec![vm.into(), false.into(), false.into()]
}

#[test]
fn a_vm_lives() {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let vbds: Vec<String> = (0..8).map(|_| rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB))).collect();
    let state = |wanted: &str| assert_eq!(rig.get("VM", &vm).text("power_state"), wanted);
    let one = || vec![Value::string(&vm)];
    assert_eq!(rig.refused("VM.pause", one()).code, "VM_BAD_POWER_STATE");
    let task = rig.text("Async.VM.start", start(&vm));
    let ended = rig.finished(&task);
    assert_eq!(ended.text("status"), "success", "{ended:?}");
    let timeline = rig.text("task.get_timeline", vec![task.into()]);
    let timeline: Timeline = serde_json::from_str(&timeline).expect("JSON");
    assert_eq!((timeline.operation.as_str(), timeline.steps.len()), ("VM.start", 2 + 4 * 8));
    assert!(timeline.steps.iter().all(|step| step.result == "ok"));
    state("Running");
    assert!(vbds.iter().all(|vbd| rig.get("VBD", vbd).bool("currently_attached")));
    assert_eq!(rig.get("VM", &vm).text("resident_on"), rig.stack.db.all("host")[0].reference);
    assert_eq!(rig.refused("VM.start", start(&vm)).params[1..], ["halted", "running"]);
    assert_eq!(rig.refused("VM.destroy", one()).code, "VM_BAD_POWER_STATE");
    rig.check(None);
    rig.call("VM.pause", one());
    state("Paused");
    assert_eq!(rig.refused("VM.clean_shutdown", one()).code, "VM_BAD_POWER_STATE");
    rig.call("VM.unpause", one());
    rig.call("VM.clean_reboot", one());
    state("Running");
    rig.check(None);
    rig.call("VM.hard_reboot", one());
    rig.call("VM.clean_shutdown", one());
    state("Halted");
    assert!(vbds.iter().all(|vbd| !rig.get("VBD", vbd).bool("currently_attached")));
    rig.check(None);
    rig.call(
        "VM.start_on",
        vec![
            vm.as_str().into(),
            Value::string(&rig.stack.db.all("host")[0].reference),
            true.into(),
            false.into(),
        ],
    );
    state("Paused");
    rig.call("VM.power_state_reset", one());
    state("Halted");
    rig.check(None);
    rig.call("VM.destroy", one());
    assert!(vbds.iter().all(|vbd| rig.stack.db.get("VBD", vbd).is_err()));
    assert_eq!(rig.refused("VM.start", start(&vm)).code, "HANDLE_INVALID");
}

#[test]
fn a_host_is_evacuated() {
    let rig = Rig::pretended();
    let sr = rig.make_sr();
    let vms: Vec<String> = (0..5)
        .map(|number| {
            let options: &[_] = if number == 2 { &[("sim-fail", "shutdown")] } else { &[] };
            let vm = rig.make_vm(options);
            rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB));
            let set = [&vm, "shutdown-timeout", "1"].map(Value::string);
            rig.call("VM.add_to_other_config", set.to_vec());
            vm
        })
        .collect();
    vms[..4].iter().for_each(|vm| drop(rig.call("VM.start", start(vm))));
    let states = || vms.iter().map(|vm| rig.get("VM", vm).text("power_state").to_owned()).collect::<Vec<_>>();
    let host = || Value::string(&rig.stack.db.all("host")[0].reference);
    let error = rig.refused("host.evacuate", vec![host(), "OpaqueRef:NULL".into(), (-1).into()]);
    assert_eq!(error.code, "VALUE_NOT_SUPPORTED");
    assert_eq!(states()[..4], ["Running"; 4]);
    let preventing = || rig.call("host.get_vms_which_prevent_evacuation", vec![host()]);
    assert_eq!(preventing(), Value::Map(BTreeMap::new()));
    rig.call("VM.pause", vec![Value::string(&vms[0])]);
    let blocked = ["clean_shutdown", "it is counted"].map(Value::string).to_vec();
    rig.call("VM.add_to_blocked_operations", [vec![Value::string(&vms[1])], blocked].concat());
    let errors = preventing();
    let errors = errors.as_map().expect("a map");
    assert_eq!(errors.keys().collect::<BTreeSet<_>>(), [&vms[0], &vms[1]].into());
    assert_eq!(errors[&vms[0]], Value::strings(["VM_BAD_POWER_STATE", &vms[0], "running", "paused"]));
    assert_eq!(errors[&vms[1]], Value::strings(["OPERATION_BLOCKED", &vms[1], "it is counted"]));
    rig.call("VM.unpause", vec![Value::string(&vms[0])]);
    rig.call("VM.remove_from_blocked_operations", [&vms[1], "clean_shutdown"].map(Value::string).to_vec());
    // The guest that does not end is told, and keeps no other from it.
    let error = rig.refused("host.evacuate", vec![host(), "OpaqueRef:NULL".into(), 2.into()]);
    assert_eq!((error.code.as_ref(), &error.params[0]), ("VM_SHUTDOWN_TIMEOUT", &vms[2]));
    assert_eq!(states(), ["Halted", "Halted", "Running", "Halted", "Halted"]);
    rig.check(None);
    rig.call("VM.hard_shutdown", vec![Value::string(&vms[2])]);
    rig.call("VM.start", start(&vms[4]));
    let task = rig.text("Async.host.evacuate", vec![host()]);
    assert_eq!(rig.finished(&task).text("status"), "success");
    assert_eq!(states(), ["Halted"; 5]);
    rig.check(None);
}

#[test]
fn a_start_that_fails_leaves_nothing() {
    for failure in ["create", "boot", "plug:2"] {
        let rig = Rig::pretended();
        let (sr, vm) = (rig.make_sr(), rig.make_vm(&[("sim-fail", failure)]));
        (0..5).for_each(|_| drop(rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB))));
        let error = rig.refused("VM.start", start(&vm));
        assert!(error.to_string().contains("sim-fail"), "{failure}: {error}");
        assert_eq!(rig.get("VM", &vm).text("power_state"), "Halted");
        rig.check(None);
    }
}

#[test]
fn guests_end_by_themselves() {
    for (event, wanted) in [("halt", "Halted"), ("crash", "Halted")] {
        let rig = Rig::pretended();
        let (sr, vm) = (rig.make_sr(), rig.make_vm(&[("sim-event", event), ("sim-event-ms", "30")]));
        rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB));
        rig.call("VM.set_actions_after_crash", vec![vm.as_str().into(), "destroy".into()]);
        rig.call("VM.start", start(&vm));
        wait(event, || rig.get("VM", &vm).text("power_state") == wanted);
        wait("the end of the operation", || rig.get("VM", &vm).map("current_operations").is_empty());
        rig.check(None);
        let told = rig.stack.db.find("message", "name", "VM_CRASHED").len();
        assert_eq!(told, usize::from(event == "crash"));
    }
}

#[test]
fn vms_are_cloned_copied_and_kept_as_snapshots() {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let vbd = rig.make_vbd(&vm, &rig.make_vdi(&sr, 4 * MIB));
    rig.call("VBD.set_bootable", vec![vbd.as_str().into(), true.into()]);
    rig.make_empty_cd(&vm);
    for (method, params) in [
        ("VM.clone", vec![Value::string(&vm), "other".into()]),
        ("VM.copy", vec![Value::string(&vm), "other".into(), Value::string(&sr)]),
        ("VM.snapshot", vec![Value::string(&vm), "other".into()]),
    ] {
        let made = rig.text(method, params);
        let record = rig.get("VM", &made);
        assert_eq!((record.text("name_label"), record.text("power_state")), ("other", "Halted"), "{method}");
        let vbds = rig.stack.db.find("VBD", "VM", &made);
        assert_eq!(vbds.len(), 2, "{method}");
        let disk = vbds.iter().find(|vbd| vbd.text("type") == "Disk").expect("a disk");
        assert!(disk.bool("bootable") && disk.text("VDI") != rig.get("VBD", &vbd).text("VDI"), "{method}");
        let is_snapshot = method == "VM.snapshot";
        assert_eq!((record.bool("is_a_snapshot"), record.bool("is_a_template")), (is_snapshot, is_snapshot));
        assert_eq!(record.text("snapshot_of") == vm, is_snapshot);
        assert_eq!(rig.get("VDI", disk.text("VDI")).bool("is_a_snapshot"), is_snapshot);
        if is_snapshot {
            assert_eq!(rig.refused("VM.start", start(&made)).code, "VM_IS_TEMPLATE");
        }
        rig.check(None);
        rig.call("VM.destroy", vec![made.into()]);
    }
    let templates = rig.stack.db.find("VM", "name_label", "Simulated guest");
    let template = &templates.first().expect("a template").reference;
    assert_eq!(rig.refused("VM.start", start(template)).code, "VM_IS_TEMPLATE");
    assert_eq!(
        rig.refused("VM.destroy", vec![template.as_str().into()]).code,
        "VM_CANNOT_DELETE_DEFAULT_TEMPLATE"
    );
    let made = rig.text("VM.clone", vec![template.as_str().into(), "mine".into()]);
    let text = format!(
        "<provision><disk device=\"0\" size=\"{MIB}\" sr=\"{}\" bootable=\"true\" type=\"system\"/></provision>",
        rig.get("SR", &sr).text("uuid")
    );
    rig.call("VM.add_to_other_config", vec![made.as_str().into(), "disks".into(), text.into()]);
    rig.call("VM.provision", vec![made.as_str().into()]);
    assert_eq!(rig.stack.db.find("VBD", "VM", &made).len(), 1);
    assert_eq!(
        rig.refused("VM.provision", vec![made.as_str().into()]).code,
        "PROVISION_ONLY_ALLOWED_ON_TEMPLATE"
    );
    rig.call("VM.start", start(&made));
    rig.check(None);
    rig.call("VM.hard_shutdown", vec![made.into()]);
}

#[test]
fn a_vm_goes_back_to_its_snapshot() {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let vdis = || {
        let vbds = rig.stack.db.find("VBD", "VM", &vm);
        let disks = vbds.iter().filter(|vbd| vbd.text("type") == "Disk");
        disks
            .map(|vbd| (vbd.text("userdevice").to_owned(), vbd.text("VDI").to_owned()))
            .collect::<BTreeMap<_, _>>()
    };
    let write = |byte: u8| {
        let mut image = Image::open(&rig.file(&vdis()["0"]), OpenOptions::WRITE).expect("its image");
        image.write_at(0, &[byte; 512]).and_then(|()| image.finish()).expect("room");
    };
    let read = || {
        let mut sector = [0; 512];
        Chain::open(&rig.file(&vdis()["0"]))
            .and_then(|chain| chain.read_at(0, &mut sector))
            .expect("its chain");
        sector[0]
    };
    let set = |field: &str, value: Value| rig.call(&format!("VM.{field}"), vec![vm.as_str().into(), value]);
    let bootable = rig.make_vbd(&vm, &rig.make_vdi(&sr, 4 * MIB));
    rig.call("VBD.set_bootable", vec![bootable.into(), true.into()]);
    rig.make_vbd(&vm, &rig.make_vdi(&sr, 4 * MIB));
    rig.make_empty_cd(&vm);
    set("set_VCPUs_max", 2.into());
    write(b'a');
    let first = rig.text("VM.snapshot", vec![vm.as_str().into(), "first".into()]);
    write(b'b');
    set("set_VCPUs_max", 3.into());
    set("set_name_label", "renamed".into());
    let second = rig.text("VM.snapshot", vec![vm.as_str().into(), "second".into()]);
    let later = rig.make_vdi(&sr, MIB);
    rig.make_vbd(&vm, &later);
    write(b'c');
    // A VM that runs is ended.
    rig.call("VM.start", start(&vm));
    let before = vdis();
    rig.call("VM.revert", vec![first.as_str().into()]);
    let record = rig.get("VM", &vm);
    assert_eq!((record.text("power_state"), record.int("VCPUs_max")), ("Halted", 2));
    assert_eq!((record.text("name_label"), record.bool("is_a_snapshot")), ("renamed", false));
    assert_eq!((record.text("parent"), record.bool("is_a_template")), (first.as_str(), false));
    let after = vdis();
    assert_eq!(after.keys().collect::<Vec<_>>(), ["0", "1"]);
    assert_eq!(rig.stack.db.find("VBD", "VM", &vm).len(), 3, "and the CD drive");
    assert_eq!(read(), b'a');
    for place in ["0", "1"] {
        assert!(rig.stack.db.get("VDI", &before[place]).is_err(), "the disk that was replaced is gone");
        let snapshots = rig.stack.db.find("VDI", "snapshot_of", &after[place]);
        assert_eq!(snapshots.len(), 2, "snapshots of the old disk are snapshots of the new one");
    }
    assert!(rig.stack.db.find("VBD", "VDI", &later).is_empty(), "it was no part of the snapshot");
    assert!(rig.stack.db.get("VDI", &later).is_ok(), "and stays");
    rig.check(None);
    // From one to the other and back, and it runs.
    rig.call("VM.revert", vec![second.as_str().into()]);
    assert_eq!((read(), rig.get("VM", &vm).int("VCPUs_max")), (b'b', 3));
    rig.call("VM.revert", vec![first.as_str().into()]);
    assert_eq!(read(), b'a');
    rig.call("VM.start", start(&vm));
    rig.check(None);
    rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    let code = |of: &str| rig.refused("VM.revert", vec![of.into()]).code.into_owned();
    assert_eq!(code(&vm), "REVERT_ONLY_ALLOWED_ON_SNAPSHOT");
    rig.call("VM.destroy", vec![vm.as_str().into()]);
    assert_eq!(code(&first), "VM_REVERT_FAILED");
    rig.check(None);
}

#[test]
fn settings_are_checked() {
    let rig = Rig::pretended();
    let vm = rig.make_vm(&[]);
    let set = |field: &str, value: i64| {
        rig.try_call(&format!("VM.set_{field}"), vec![vm.as_str().into(), value.into()])
    };
    set("memory", 256 * MIB).expect("all limits are the same");
    assert_eq!(rig.get("VM", &vm).int("memory_static_min"), 256 * MIB);
    assert_eq!(set("memory_dynamic_max", MIB).expect_err("too little").code, "MEMORY_CONSTRAINT_VIOLATION");
    set("VCPUs_max", 4).expect("four");
    set("VCPUs_at_startup", 3).expect("three");
    assert_eq!(set("VCPUs_at_startup", 5).expect_err("too many").code, "VALUE_NOT_SUPPORTED");
    rig.call("VM.start", start(&vm));
    assert_eq!(set("memory", MIB).expect_err("it runs").code, "VM_BAD_POWER_STATE");
    let host = rig.control_domain();
    assert_eq!(rig.refused("VM.hard_shutdown", vec![host.into()]).code, "OPERATION_NOT_ALLOWED");
    rig.call("VM.add_to_blocked_operations", vec![vm.as_str().into(), "pause".into(), "BECAUSE".into()]);
    let blocked = rig.refused("VM.pause", vec![vm.as_str().into()]);
    assert_eq!((&*blocked.code, &*blocked.params[1]), ("OPERATION_BLOCKED", "BECAUSE"));
}

#[test]
fn texts_of_the_firmware_are_set_once_while_it_is_halted() {
    let rig = Rig::pretended();
    let (vm, other) = (rig.make_vm(&[]), rig.make_vm(&[]));
    let host = rig.stack.db.all("host")[0].reference.clone();
    let set = |vm: &str, pairs: &[(&str, &str)]| {
        let texts = Value::string_map(pairs.iter().map(|(key, text)| (*key, *text)));
        rig.try_call("VM.set_bios_strings", vec![vm.into(), texts])
    };
    let long = "x".repeat(513);
    for (key, text) in [("bios-colour", "red"), ("bios-vendor", "a\nb"), ("bios-vendor", &long)] {
        assert_eq!(set(&vm, &[(key, text)]).expect_err(key).code, "INVALID_VALUE");
    }
    let texts = [("bios-vendor", "Maker, Inc."), ("system-product-name", "Box")];
    set(&vm, &texts).expect("they are plain");
    let kept: Vec<(String, String)> = rig.get("VM", &vm).map("bios_strings").into_iter().collect();
    assert_eq!(kept, texts.map(|(key, text)| (key.to_owned(), text.to_owned())));
    assert_eq!(set(&vm, &texts).expect_err("once").code, "VM_BIOS_STRINGS_ALREADY_SET");
    // The guest of a VM made from it sees the same.
    let copy = rig.text("VM.clone", vec![vm.as_str().into(), "copy".into()]);
    assert_eq!(rig.get("VM", &copy).map("bios_strings").len(), 2);

    // Many virtual hosts show none.
    let copy = || rig.try_call("VM.copy_bios_strings", vec![other.as_str().into(), host.as_str().into()]);
    let change = |texts: &[(&str, &str)]| {
        let texts = Value::string_map(texts.iter().map(|(key, text)| (*key, *text)));
        rig.stack.db.set("host", &host, "bios_strings", texts).expect("the store takes it");
    };
    change(&[]);
    assert_eq!(copy().expect_err("nothing to copy").code, "VALUE_NOT_SUPPORTED");
    change(&texts);
    copy().expect("the host's");
    assert_eq!(rig.get("VM", &other).map("bios_strings"), rig.get("VM", &vm).map("bios_strings"));
    let third = rig.make_vm(&[]);
    rig.call("VM.start", start(&third));
    assert_eq!(set(&third, &texts).expect_err("it runs").code, "VM_BAD_POWER_STATE");
}

#[test]
fn memory_for_shadow_tables_is_a_factor_of_at_least_one() {
    let rig = Rig::pretended();
    let vm = rig.make_vm(&[]);
    let set =
        |message: &str, number: f64| rig.try_call(message, vec![vm.as_str().into(), Value::Float(number)]);
    let (halted, live) = ("VM.set_HVM_shadow_multiplier", "VM.set_shadow_multiplier_live");
    for wrong in [0.5, -1.0, 1e6] {
        assert_eq!(set(halted, wrong).expect_err("no factor").code, "VALUE_NOT_SUPPORTED");
    }
    set(halted, 2.5).expect("a factor");
    assert_eq!(set(live, 3.0).expect_err("it is halted").code, "VM_BAD_POWER_STATE");
    rig.call("VM.start", start(&vm));
    assert_eq!(set(halted, 3.0).expect_err("it runs").code, "VM_BAD_POWER_STATE");
    set(live, 4.0).expect("a factor");
    assert_eq!(*rig.get("VM", &vm).get("HVM_shadow_multiplier"), Value::Float(4.0));
}

#[test]
fn a_disk_that_is_not_paused_in_time_goes_on_when_it_can() {
    let backend = Arc::new(Pretend::default());
    let rig = Rig::with(Arc::clone(&backend) as Arc<dyn Backend>);
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let vdi = rig.make_vdi(&sr, MIB);
    rig.make_vbd(&vm, &vdi);
    rig.call("VM.start", start(&vm));
    let snapshot =
        || rig.try_call("VDI.snapshot", vec![vdi.as_str().into(), Value::string_map::<&str, &str>([])]);
    backend.late.store(2, Ordering::SeqCst);
    let error = snapshot().expect_err("its requests do not end");
    assert!(error.to_string().contains("do not end in time"), "{error}");
    wait("the disk to go on", || !backend.stands.load(Ordering::SeqCst));
    assert_eq!(backend.late.load(Ordering::SeqCst), 0, "it was asked until it could");
    snapshot().expect("it is as before");
    assert!(!backend.stands.load(Ordering::SeqCst));
}

#[test]
fn a_vm_gets_processors_while_it_runs() {
    let rig = Rig::pretended();
    let vm = rig.make_vm(&[]);
    let ask = |rig: &Rig, count: i64| {
        rig.try_call("VM.set_VCPUs_number_live", vec![vm.as_str().into(), count.into()])
    };
    let has = |rig: &Rig| {
        let record = rig.get("VM", &vm);
        let metrics = rig.get("VM_metrics", record.text("metrics"));
        (record.int("VCPUs_at_startup"), metrics.int("VCPUs_number"))
    };
    rig.call("VM.set_VCPUs_max", vec![vm.as_str().into(), Value::Int(4)]);
    assert_eq!(ask(&rig, 2).expect_err("it is halted").code, "VM_BAD_POWER_STATE");
    rig.call("VM.start", start(&vm));
    assert_eq!(has(&rig), (1, 1));
    for wrong in [0, -1, 5, i64::MAX] {
        let error = ask(&rig, wrong).expect_err("not possible");
        assert!(error.code == "INVALID_VALUE" && error.params[2].contains("1 to 4"), "{error}");
    }
    ask(&rig, 3).expect("three");
    assert_eq!(has(&rig), (3, 3));
    // One that fails changes nothing that is not so.
    rig.call("VM.set_platform", vec![vm.as_str().into(), Value::string_map([("sim-fail", "vcpus")])]);
    rig.call("VM.hard_reboot", vec![vm.as_str().into()]);
    assert_eq!(has(&rig), (3, 3), "it starts with as many as it had");
    assert!(ask(&rig, 4).expect_err("told to fail").to_string().contains("sim-fail"));
    assert_eq!(has(&rig), (3, 3));
}

#[test]
fn a_guest_that_runs_has_the_memory_that_it_is_told_to_have() {
    let rig = Rig::pretended();
    let vm = rig.make_vm(&[]);
    let range = |min: i64, max: i64| {
        rig.try_call("VM.set_memory_dynamic_range", vec![vm.as_str().into(), min.into(), max.into()])
    };
    let has = |field: &str| rig.get("VM", &vm).int(field);
    let actual = || rig.get("VM_metrics", rig.get("VM", &vm).text("metrics")).int("memory_actual");
    range(8 * MIB, 32 * MIB).expect("it is halted");
    assert_eq!((has("memory_dynamic_min"), has("memory_dynamic_max")), (8 * MIB, 32 * MIB));
    let one = |name: &str| rig.refused(name, vec![vm.as_str().into()]).code;
    assert_eq!(one("VM.wait_memory_target_live"), "VM_BAD_POWER_STATE");
    let target = vec![vm.as_str().into(), (16 * MIB).into()];
    assert_eq!(rig.refused("VM.set_memory_target_live", target.clone()).code, "VM_BAD_POWER_STATE");
    rig.call("VM.start", start(&vm));
    assert_eq!(actual(), 32 * MIB);
    rig.call("VM.set_memory_target_live", target);
    assert_eq!((has("memory_dynamic_min"), has("memory_dynamic_max")), (16 * MIB, 16 * MIB));
    wait("the event of the guest", || actual() == 16 * MIB);
    rig.call("VM.wait_memory_target_live", vec![vm.as_str().into()]);
    range(0, 64 * MIB).expect("as much as it can have");
    wait("the event of the guest", || actual() == 64 * MIB);
    let error = range(0, 65 * MIB).expect_err("more than static_max");
    assert_eq!((&*error.code, has("memory_dynamic_max")), ("MEMORY_CONSTRAINT_VIOLATION", 64 * MIB));
    // What fails leaves the record as it was; a guest that does not follow is waited for until that is cancelled.
    for (key, expected) in [("sim-fail", Some("sim-fail=memory")), ("sim-balloon-stuck", None)] {
        let platform = Value::string_map([(key, "memory")]);
        rig.call("VM.set_platform", vec![vm.as_str().into(), platform]);
        rig.call("VM.hard_reboot", vec![vm.as_str().into()]);
        match (range(0, 8 * MIB), expected) {
            (Err(error), Some(why)) => assert!(error.to_string().contains(why), "{error}"),
            (told, _) => assert!(told.is_ok() && expected.is_none(), "{told:?}"),
        }
        assert_eq!(has("memory_dynamic_max") == 64 * MIB, expected.is_some(), "{key}");
    }
    let task = rig.text("Async.VM.wait_memory_target_live", vec![vm.as_str().into()]);
    assert_eq!(rig.get("task", &task).text("status"), "pending");
    rig.call("task.cancel", vec![task.as_str().into()]);
    assert_eq!(rig.finished(&task).text("status"), "cancelled");
}

#[test]
fn one_operation_at_a_time() {
    let backend = Arc::new(Pretend::default());
    let rig = Rig::with(Arc::clone(&backend) as Arc<dyn Backend>);
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let vbd = rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB));
    let starting = backend.starting.lock().expect("no panic");
    let task = rig.text("Async.VM.start", start(&vm));
    wait("the start", || !rig.get("VM", &vm).map("current_operations").is_empty());
    let error = rig.refused("VM.hard_shutdown", vec![vm.as_str().into()]);
    assert_eq!((&*error.code, &*error.params[2]), ("OTHER_OPERATION_IN_PROGRESS", "start"));
    assert_eq!(rig.refused("VBD.unplug", vec![vbd.into()]).code, "OTHER_OPERATION_IN_PROGRESS");
    drop(starting);
    assert_eq!(rig.finished(&task).text("status"), "success");
    let allowed = rig.get("VM", &vm);
    let allowed = allowed.get("allowed_operations").as_set().expect("a set");
    assert!(allowed.contains(&"pause".into()) && !allowed.contains(&"start".into()));
}

#[test]
fn a_cancelled_start_is_undone() {
    let backend = Arc::new(Pretend::default());
    let rig = Rig::with(Arc::clone(&backend) as Arc<dyn Backend>);
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    (0..20).for_each(|_| drop(rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB))));
    let has_step = |task: &str, result: &str| {
        let timeline = rig.stack.plans.timeline(task);
        timeline.is_some_and(|timeline| timeline.steps.iter().any(|step| step.result == result))
    };
    let starting = backend.starting.lock().expect("no panic");
    let task = rig.text("Async.VM.start", start(&vm));
    wait("a step that was done", || has_step(&task, "ok"));
    wait("the steps that start disk processes", || {
        let timeline = rig.stack.plans.timeline(&task).expect("it runs");
        timeline.steps.iter().any(|step| step.name == "start a disk process" && step.result == "running")
    });
    rig.call("task.cancel", vec![task.as_str().into()]);
    wait("the steps that are left out", || has_step(&task, "skipped"));
    drop(starting);
    let ended = rig.finished(&task);
    assert_eq!(ended.text("status"), "cancelled", "{ended:?}");
    assert_eq!(rig.get("VM", &vm).text("power_state"), "Halted");
    rig.check(None);
}

#[test]
fn force_ends_a_guest_that_does_not_answer_a_clean_end() {
    for (asked, forced) in [
        ("Async.VM.clean_shutdown", "VM.hard_shutdown"),
        ("Async.VM.shutdown", "VM.hard_shutdown"),
        ("Async.VM.clean_reboot", "VM.hard_reboot"),
    ] {
        let rig = Rig::pretended();
        let (sr, vm) = (rig.make_sr(), rig.make_vm(&[("sim-shutdown-ms", "600000")]));
        let vbd = rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB));
        let one = || vec![Value::string(&vm)];
        let config = vec![vm.as_str().into(), "shutdown-timeout".into(), "12".into()];
        rig.call("VM.add_to_other_config", config);
        rig.call("VM.start", start(&vm));
        let task = rig.text(asked, one());
        wait("the clean end", || !rig.get("VM", &vm).map("current_operations").is_empty());
        rig.call(forced, one());
        let is_halted = forced == "VM.hard_shutdown";
        assert_eq!(rig.get("VM", &vm).text("power_state"), if is_halted { "Halted" } else { "Running" });
        rig.check(None);
        if is_halted {
            rig.call("VM.start", start(&vm));
        }
        // What waited for the guest ends with an error and leaves the one that runs now alone.
        let ended = rig.finished(&task);
        assert_eq!(ended.text("status"), "failure", "{asked}: {ended:?}");
        let error = ended.get("error_info").as_set().expect("an error")[0].clone();
        assert_eq!(error, Value::string("OTHER_OPERATION_IN_PROGRESS"), "{asked}: {ended:?}");
        assert_eq!(rig.get("VM", &vm).text("power_state"), "Running", "{asked}");
        assert!(rig.get("VBD", &vbd).bool("currently_attached"), "{asked}");
        rig.check(None);
        rig.call("VM.hard_shutdown", one());
    }
}
