//! VMs whose memory goes to a VDI and comes back.

use std::collections::BTreeMap;

use tapio_model::{NULL_REF, Value};

use crate::rig::{MIB, Rig};

fn one(vm: &str) -> Vec<Value> {
    vec![Value::string(vm)]
}

fn begin(vm: &str) -> Vec<Value> {
    vec![vm.into(), false.into(), false.into()]
}

/// A toolstack with a VM that runs, with two disks.
fn running(platform: &[(&str, &str)]) -> (Rig, String) {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(platform));
    (0..2).for_each(|_| drop(rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB))));
    rig.call("VM.set_suspend_SR", vec![vm.as_str().into(), sr.into()]);
    rig.call("VM.start", begin(&vm));
    (rig, vm)
}

fn state(rig: &Rig, vm: &str) -> String {
    rig.get("VM", vm).text("power_state").to_owned()
}

fn images(rig: &Rig) -> usize {
    rig.stack.db.find("VDI", "type", "suspend").len()
}

fn plugged(rig: &Rig, vm: &str) -> usize {
    rig.stack.db.find("VBD", "VM", vm).iter().filter(|vbd| vbd.bool("currently_attached")).count()
}

fn allowed(rig: &Rig, vm: &str, operation: &str) -> bool {
    let words = rig.get("VM", vm).get("allowed_operations").as_set().expect("a set").to_vec();
    words.contains(&Value::string(operation))
}

#[test]
fn a_vm_is_suspended_and_goes_on() {
    let (rig, vm) = running(&[]);
    assert!(allowed(&rig, &vm, "suspend"));
    assert_eq!(rig.refused("VM.resume", begin(&vm)).code, "VM_BAD_POWER_STATE");
    rig.call("VM.suspend", one(&vm));
    assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Suspended", 0, 1));
    let image = rig.get("VM", &vm).text("suspend_VDI").to_owned();
    assert_eq!(rig.get("VM", &vm).text("resident_on"), NULL_REF);
    assert_eq!(rig.get("VM", &vm).int("domid"), -1);
    assert!(allowed(&rig, &vm, "resume") && !allowed(&rig, &vm, "start"));
    rig.check(None);
    let refused = rig.refused("VM.start", begin(&vm));
    assert_eq!((refused.code.as_ref(), &refused.params[2]), ("VM_BAD_POWER_STATE", &"suspended".to_owned()));
    for operation in ["VM.suspend", "VM.clean_shutdown", "VM.destroy", "VM.pause"] {
        assert_eq!(rig.refused(operation, one(&vm)).code, "VM_BAD_POWER_STATE", "{operation}");
    }
    assert_eq!(rig.refused("VDI.destroy", one(&image)).code, "VDI_IN_USE");
    rig.call("VM.resume", begin(&vm));
    assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Running", 2, 0));
    assert_eq!(rig.get("VM", &vm).text("suspend_VDI"), NULL_REF);
    rig.check(None);
    rig.call("VM.suspend", one(&vm));
    rig.call("VM.resume", vec![vm.as_str().into(), true.into(), false.into()]);
    assert_eq!((state(&rig, &vm).as_str(), images(&rig)), ("Paused", 0));
    rig.call("VM.unpause", one(&vm));
    rig.check(None);
}

#[test]
fn memory_is_read_by_a_vm_that_is_made_as_the_one_that_wrote_it() {
    let (rig, vm) = running(&[("sim-machine", "pc-1.0")]);
    rig.call("VM.suspend", one(&vm));
    let make = |name: &str| {
        rig.call("VM.set_platform", vec![vm.as_str().into(), Value::string_map([("sim-machine", name)])]);
    };
    make("pc-2.0");
    let error = rig.refused("VM.resume", begin(&vm)).to_string();
    assert!(error.contains("pc-1.0") && error.contains("pc-2.0"), "{error}");
    assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Suspended", 0, 1));
    rig.check(None);
    make("pc-1.0");
    rig.call("VM.resume", begin(&vm));
    assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Running", 2, 0));
}

#[test]
fn memory_of_a_vm_that_is_ended_goes() {
    let (rig, vm) = running(&[]);
    for operation in ["VM.hard_shutdown", "VM.shutdown", "VM.power_state_reset"] {
        rig.call("VM.suspend", one(&vm));
        rig.call(operation, one(&vm));
        assert_eq!((state(&rig, &vm).as_str(), images(&rig)), ("Halted", 0), "{operation}");
        rig.check(None);
        rig.call("VM.start", begin(&vm));
    }
}

#[test]
fn what_fails_leaves_the_guest_or_its_memory() {
    let set = |rig: &Rig, vm: &str, what: &str| {
        let platform = Value::string_map([("sim-fail", what)]);
        rig.call("VM.set_platform", vec![vm.into(), platform]);
    };
    let (rig, vm) = running(&[("sim-fail", "save")]);
    let error = rig.refused("VM.suspend", one(&vm));
    assert!(error.params.iter().any(|text| text.contains("sim-fail=save")), "{error}");
    assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Running", 2, 0));
    let error = rig.refused("VM.checkpoint", vec![vm.as_str().into(), "kept".into()]);
    assert!(error.params.iter().any(|text| text.contains("sim-fail=save")), "{error}");
    assert_eq!((state(&rig, &vm).as_str(), images(&rig)), ("Running", 0));
    assert_eq!(rig.stack.db.all("VDI").iter().filter(|vdi| vdi.bool("managed")).count(), 2);
    rig.check(None);
    rig.call("VM.hard_shutdown", one(&vm));
    set(&rig, &vm, "");
    rig.call("VM.start", begin(&vm));
    rig.call("VM.suspend", one(&vm));
    set(&rig, &vm, "load");
    assert!(rig.try_call("VM.resume", begin(&vm)).is_err());
    assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Suspended", 0, 1));
    rig.check(None);
    // Other data than were written are no memory.
    let image = rig.get("VM", &vm).text("suspend_VDI").to_owned();
    set(&rig, &vm, "");
    {
        use tapio_format::vhd::offline::{Image, OpenOptions};
        let mut file = Image::open(&rig.file(&image), OpenOptions::WRITE).expect("its image");
        file.write_at(8192, &[7; 512]).and_then(|()| file.finish()).expect("room");
    }
    assert_eq!(rig.refused("VM.resume", begin(&vm)).code, "SUSPEND_IMAGE_NOT_ACCESSIBLE");
    assert_eq!((state(&rig, &vm).as_str(), images(&rig)), ("Suspended", 1));
    rig.check(None);
    rig.call("VM.hard_shutdown", one(&vm));
    // There is no SR for it.
    rig.call("VM.set_suspend_SR", vec![vm.as_str().into(), NULL_REF.into()]);
    let pool = rig.stack.db.all("pool")[0].reference.clone();
    rig.call("pool.set_default_SR", vec![pool.into(), NULL_REF.into()]);
    rig.call("VM.start", begin(&vm));
    assert_eq!(rig.refused("VM.suspend", one(&vm)).code, "VM_NO_SUSPEND_SR");
    assert_eq!(state(&rig, &vm), "Running");
    rig.check(None);
}

#[test]
fn a_checkpoint_has_the_memory_and_a_vm_goes_back_to_it() {
    let (rig, vm) = running(&[]);
    let kept = rig.text("VM.checkpoint", vec![vm.as_str().into(), "kept".into()]);
    assert_eq!((state(&rig, &vm).as_str(), state(&rig, &kept).as_str()), ("Running", "Suspended"));
    assert_eq!((plugged(&rig, &vm), images(&rig)), (2, 1));
    rig.check(None);
    for _ in 0..2 {
        rig.call("VM.revert", one(&kept));
        assert_eq!((state(&rig, &vm).as_str(), images(&rig)), ("Suspended", 2));
        rig.check(None);
        rig.call("VM.resume", begin(&vm));
        assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Running", 2, 1));
    }
    // One that is suspended goes back too; its memory goes.
    rig.call("VM.suspend", one(&vm));
    rig.call("VM.revert", one(&kept));
    assert_eq!((state(&rig, &vm).as_str(), images(&rig)), ("Suspended", 2));
    rig.call("VM.hard_shutdown", one(&vm));
    rig.call("VM.destroy", one(&kept));
    assert_eq!(images(&rig), 0);
    rig.check(None);
    assert_eq!(
        rig.refused("VM.checkpoint", vec![vm.as_str().into(), "off".into()]).code,
        "VM_BAD_POWER_STATE"
    );
}

#[test]
fn a_driver_that_cannot_says_so() {
    let rig = Rig::pretended();
    let (_, vm) = (rig.make_sr(), rig.make_vm(&[]));
    rig.call("VM.start", begin(&vm));
    // As a VM of another driver: it is asked before anything is done.
    let config = Value::string_map(BTreeMap::from([("driver", "uml")]));
    rig.call("VM.set_other_config", vec![vm.as_str().into(), config]);
    let error = rig.refused("VM.suspend", one(&vm));
    assert_eq!(error.code, "VM_LACKS_FEATURE");
    assert!(error.params[1].contains("driver uml cannot"), "{error}");
    assert_eq!(
        rig.refused("VM.checkpoint", vec![vm.as_str().into(), "kept".into()]).code,
        "VM_LACKS_FEATURE"
    );
    assert_eq!(state(&rig, &vm), "Running");
}

#[test]
fn what_is_made_of_a_checkpoint_has_its_memory() {
    let (rig, vm) = running(&[]);
    let kept = rig.text("VM.checkpoint", vec![vm.as_str().into(), "kept".into()]);
    let template = rig.text("VM.clone", vec![kept.as_str().into(), "a template".into()]);
    assert_eq!((state(&rig, &template).as_str(), images(&rig)), ("Suspended", 2));
    let sr = rig.stack.db.find("SR", "type", "file")[0].reference.clone();
    let copied = rig.text("VM.copy", vec![kept.as_str().into(), "a copy".into(), sr.into()]);
    rig.call("VM.destroy", one(&kept));
    let made = rig.text("VM.clone", vec![template.as_str().into(), "a VM".into()]);
    rig.call("VM.destroy", one(&template));
    assert_eq!(images(&rig), 2, "each has its own");
    rig.check(None);
    for new in [&copied, &made] {
        rig.call("VM.provision", one(new));
        assert_eq!(state(&rig, new), "Suspended");
        assert_eq!(rig.refused("VM.start", begin(new)).code, "VM_BAD_POWER_STATE");
        // The driver compares what it reads.
        let key = vec![new.as_str().into(), "sim-memory-of".into(), rig.get("VM", &vm).text("uuid").into()];
        rig.call("VM.add_to_platform", key);
        rig.call("VM.resume", begin(new));
        assert_eq!((state(&rig, new).as_str(), plugged(&rig, new)), ("Running", 2));
        rig.check(None);
    }
    assert_eq!(images(&rig), 0, "it was used");
    // What has no memory begins anew.
    rig.call("VM.hard_shutdown", one(&vm));
    let plain = rig.text("VM.clone", vec![vm.as_str().into(), "plain".into()]);
    assert_eq!((state(&rig, &plain).as_str(), images(&rig)), ("Halted", 0));
}

#[test]
fn an_archive_with_its_state_has_the_memory_of_a_suspended_vm() {
    let (rig, vm) = running(&[]);
    let kept = rig.text("VM.checkpoint", vec![vm.as_str().into(), "kept".into()]);
    rig.call("VM.suspend", one(&vm));
    assert!(allowed(&rig, &vm, "export"));
    let uuid = rig.get("VM", &vm).text("uuid").to_owned();
    for from in [&vm, &kept] {
        let made = rig.import(&rig.export_with(from, true)).remove(0);
        assert_eq!((state(&rig, &made).as_str(), images(&rig)), ("Suspended", 3));
        assert!(allowed(&rig, &made, "resume") || rig.get("VM", &made).bool("is_a_template"));
        rig.check(None);
        if rig.get("VM", &made).bool("is_a_template") {
            rig.call("VM.provision", one(&made));
        }
        // The driver compares what it reads.
        let key = vec![made.as_str().into(), "sim-memory-of".into(), uuid.as_str().into()];
        rig.call("VM.add_to_platform", key);
        rig.call("VM.resume", begin(&made));
        assert_eq!((state(&rig, &made).as_str(), plugged(&rig, &made), images(&rig)), ("Running", 2, 2));
        rig.check(None);
    }
    let halted = rig.import(&rig.export(&vm)).remove(0);
    assert_eq!((state(&rig, &halted).as_str(), images(&rig)), ("Halted", 2));
    // Memory that another toolstack wrote, or that was not written to its end, is passed over.
    let image = rig.get("VM", &vm).text("suspend_VDI").to_owned();
    let chain = tapio_format::vhd::offline::OpenOptions::WRITE;
    let mut memory = tapio_format::vhd::offline::Image::open(&rig.file(&image), chain).expect("its image");
    memory.write_at(0, &[7; 512]).and_then(|()| memory.finish()).expect("room");
    let other = rig.import(&rig.export_with(&vm, true)).remove(0);
    assert_eq!((state(&rig, &other).as_str(), images(&rig)), ("Halted", 2));
    rig.check(None);
}

#[test]
fn a_guest_gets_a_new_emulator() {
    let (rig, vm) = running(&[("sim-machine", "pc-1.0")]);
    let processes = || rig.stack.disks.all().into_iter().map(|note| note.process).collect::<Vec<_>>();
    let before = processes();
    rig.call("VM.add_to_platform", vec![vm.as_str().into(), "sim-fail".into(), "save".into()]);
    rig.call("VM.restart_device_models", one(&vm));
    assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Running", 2, 0));
    let now = processes();
    assert!(
        now.len() == 2 && now.iter().all(|one| one.is_some() && !before.contains(one)),
        "{before:?}, {now:?}"
    );
    assert!(rig.stack.db.notes("machines/").is_empty());
    rig.check(None);
    // The new one cannot write its memory, and the guest goes on; memory that cannot be read stays.
    let refused = rig.refused("VM.restart_device_models", one(&vm));
    assert!(refused.params.iter().any(|text| text.contains("sim-fail=save")), "{refused}");
    assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Running", 2, 0));
    rig.call("VM.hard_shutdown", one(&vm));
    rig.call("VM.set_platform", vec![vm.as_str().into(), Value::string_map([("sim-machine", "pc-1.0")])]);
    rig.call("VM.start", begin(&vm));
    rig.call("VM.set_platform", vec![vm.as_str().into(), Value::string_map([("sim-machine", "pc-2.0")])]);
    let refused = rig.refused("VM.restart_device_models", one(&vm)).to_string();
    assert!(refused.contains("pc-1.0") && refused.contains("pc-2.0"), "{refused}");
    assert_eq!((state(&rig, &vm).as_str(), plugged(&rig, &vm), images(&rig)), ("Suspended", 0, 1));
    assert!(rig.stack.db.notes("machines/renew/").is_empty(), "a client knows what came of it");
    assert_eq!(rig.refused("VM.restart_device_models", one(&vm)).code, "VM_BAD_POWER_STATE");
    rig.call("VM.set_platform", vec![vm.as_str().into(), Value::string_map([("sim-machine", "pc-1.0")])]);
    rig.call("VM.resume", begin(&vm));
    // Nothing begins on a host that would not let it go on.
    let host = rig.stack.db.all("host")[0].reference.clone();
    rig.call("host.disable", one(&host));
    assert_eq!(rig.refused("VM.restart_device_models", one(&vm)).code, "HOST_DISABLED");
    assert_eq!(state(&rig, &vm), "Running");
}
