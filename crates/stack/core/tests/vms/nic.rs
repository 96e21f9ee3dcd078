//! Network interfaces that guests get: at the start, while they run, and with their memory.

use tapio_model::Value;

use crate::rig::{MIB, Rig, record_of};

fn one(reference: &str) -> Vec<Value> {
    vec![reference.into()]
}

fn begin(vm: &str) -> Vec<Value> {
    vec![vm.into(), false.into(), false.into()]
}

fn network(rig: &Rig, bridge: &str) -> String {
    let record = record_of([("name_label", Value::string("net")), ("bridge", Value::string(bridge))]);
    rig.text("network.create", vec![record])
}

/// A network that leads out of the host.
fn outer(rig: &Rig, bridge: &str) -> String {
    let network = network(rig, bridge);
    let host = rig.stack.db.all("host")[0].reference.clone();
    let fields = [("host", host.into()), ("network", network.as_str().into()), ("device", "eth7".into())];
    rig.stack.db.create("PIF", &fields).expect("an interface");
    network
}

fn vif(rig: &Rig, vm: &str, network: &str, device: &str) -> String {
    let record = record_of([
        ("VM", Value::string(vm)),
        ("network", Value::string(network)),
        ("device", Value::string(device)),
        ("MTU", Value::Int(1400)),
    ]);
    rig.text("VIF.create", vec![record])
}

fn is_plugged(rig: &Rig, vif: &str) -> bool {
    rig.get("VIF", vif).bool("currently_attached")
}

fn words(rig: &Rig, class: &str, object: &str) -> Vec<String> {
    let words = rig.get(class, object).get("allowed_operations").as_set().expect("a set").to_vec();
    words.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The places of what the guest has, and whether each leads to a network.
fn of_guest(rig: &Rig, vm: &str) -> Vec<(u8, bool)> {
    let driver = rig.stack.vms.driver("sim").expect("the driver");
    let found = driver.vifs(rig.get("VM", vm).uuid().expect("a UUID")).unwrap_or_default();
    found.into_iter().map(|(place, vif)| (place, vif.tap.is_some())).collect()
}

/// A VM whose memory can be kept.
fn made(rig: &Rig, platform: &[(&str, &str)]) -> String {
    let (sr, vm) = (rig.make_sr(), rig.make_vm(platform));
    rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB));
    rig.call("VM.set_suspend_SR", vec![vm.as_str().into(), sr.into()]);
    vm
}

#[test]
fn interfaces_come_with_the_guest_and_go() {
    let rig = Rig::pretended();
    let vm = made(&rig, &[]);
    let net = network(&rig, "br0");
    let (first, second) = (vif(&rig, &vm, &net, "0"), vif(&rig, &vm, &net, "3"));
    assert_eq!(words(&rig, "VIF", &first), ["attach"]);
    assert_eq!(rig.refused("VIF.plug", one(&first)).code, "VM_BAD_POWER_STATE");
    rig.call("VM.start", begin(&vm));
    assert!(is_plugged(&rig, &first) && is_plugged(&rig, &second));
    assert_eq!(of_guest(&rig, &vm), [(0, true), (3, true)]);
    assert_eq!(words(&rig, "VIF", &first), ["attach", "unplug"]);
    assert_eq!(rig.refused("VIF.plug", one(&first)).code, "DEVICE_ALREADY_ATTACHED");
    assert_eq!(rig.refused("VIF.destroy", one(&first)).code, "OPERATION_NOT_ALLOWED");
    assert_eq!(rig.refused("network.destroy", one(&net)).code, "NETWORK_CONTAINS_VIF");
    rig.call("VIF.unplug", one(&second));
    assert_eq!((is_plugged(&rig, &second), of_guest(&rig, &vm)), (false, vec![(0, true)]));
    assert_eq!(words(&rig, "VIF", &second), ["attach", "plug"]);
    for call in ["VIF.unplug", "VIF.unplug_force"] {
        assert_eq!(rig.refused(call, one(&second)).code, "DEVICE_ALREADY_DETACHED", "{call}");
    }
    rig.call("VIF.destroy", one(&second));
    let third = vif(&rig, &vm, &net, "5");
    rig.call("VIF.plug", one(&third));
    assert_eq!(of_guest(&rig, &vm), [(0, true), (5, true)]);
    let far = vif(&rig, &vm, &net, "9");
    assert_eq!(rig.refused("VIF.plug", one(&far)).code, "INVALID_DEVICE");
    rig.call("VIF.unplug_force", one(&third));
    assert!(words(&rig, "VM", &vm).contains(&"clean_shutdown".to_owned()), "nothing holds the VM any more");
    rig.call("VIF.destroy", one(&far));
    // The guest starts anew with all.
    rig.call("VM.hard_reboot", one(&vm));
    assert_eq!(of_guest(&rig, &vm), [(0, true), (5, true)]);
    rig.call("VM.hard_shutdown", one(&vm));
    assert!(!is_plugged(&rig, &first) && !is_plugged(&rig, &third));
    assert_eq!(words(&rig, "VIF", &first), ["attach"]);
    rig.check(None);
}

#[test]
fn a_network_that_is_not_here_is_refused_unless_it_is_internal() {
    let rig = Rig::pretended();
    let vm = made(&rig, &[]);
    let inner = vif(&rig, &vm, &network(&rig, "missing0"), "0");
    let nameless = vif(&rig, &vm, &network(&rig, ""), "1");
    let refused = |net: &str, needle: &str| {
        let bad = vif(&rig, &vm, net, "2");
        let error = rig.refused("VM.start", begin(&vm));
        assert_eq!((error.code.as_ref(), &*error.params[1]), ("HOST_CANNOT_ATTACH_NETWORK", net));
        assert!(error.params[2].contains(needle), "{error}");
        assert_eq!(rig.get("VM", &vm).text("power_state"), "Halted");
        rig.check(None);
        bad
    };
    let bad = refused(&outer(&rig, "missing1"), "missing1");
    rig.call("VIF.destroy", one(&bad));
    let bad = refused(&outer(&rig, "other1"), "no bridge of Linux");
    rig.call("VIF.destroy", one(&bad));
    rig.call("VM.start", begin(&vm));
    assert_eq!(of_guest(&rig, &vm), [(0, false), (1, false)]);
    for (vif, needle) in [(&inner, "missing0"), (&nameless, "names no bridge")] {
        let record = rig.get("VIF", vif);
        assert!(record.bool("currently_attached") && record.int("status_code") != 0);
        assert!(record.text("status_detail").contains(needle), "{}", record.text("status_detail"));
    }
    // What an administrator wants filtered does not pass unfiltered.
    let locked = vif(&rig, &vm, &network(&rig, "br2"), "4");
    rig.stack.db.set("VIF", &locked, "locking_mode", Value::string("locked")).expect("it is there");
    rig.call("VIF.plug", one(&locked));
    assert_eq!(of_guest(&rig, &vm).last(), Some(&(4, false)));
    rig.call("VIF.unplug", one(&locked));
    let good = vif(&rig, &vm, &outer(&rig, "br1"), "2");
    rig.call("VIF.plug", one(&good));
    assert_eq!(of_guest(&rig, &vm), [(0, false), (1, false), (2, true)]);
    rig.call("VIF.unplug", one(&inner));
    let record = rig.get("VIF", &inner);
    assert_eq!((record.int("status_code"), record.text("status_detail")), (0, ""));
    let bad = vif(&rig, &vm, &outer(&rig, "missing2"), "3");
    assert_eq!(rig.refused("VIF.plug", one(&bad)).code, "HOST_CANNOT_ATTACH_NETWORK");
    assert!(!is_plugged(&rig, &bad));
}

#[test]
fn memory_goes_on_with_the_interfaces_that_it_knows() {
    let rig = Rig::pretended();
    let vm = made(&rig, &[]);
    let net = network(&rig, "br0");
    let all: Vec<String> = (0..3).map(|place| vif(&rig, &vm, &net, &place.to_string())).collect();
    rig.call("VM.start", begin(&vm));
    rig.call("VIF.unplug", one(&all[1]));
    let kept = rig.text("VM.checkpoint", vec![vm.as_str().into(), "kept".into()]);
    let had = [(0, true), (2, true)];
    assert_eq!(of_guest(&rig, &vm), had);
    rig.call("VM.suspend", one(&vm));
    assert!(all.iter().all(|vif| !is_plugged(&rig, vif)));
    // Its record goes meanwhile: the guest knows its interface, which leads nowhere.
    rig.call("VIF.destroy", one(&all[2]));
    rig.call("VM.resume", begin(&vm));
    assert_eq!(of_guest(&rig, &vm), [(0, true), (2, false)]);
    let plugged: Vec<bool> = all[..2].iter().map(|vif| is_plugged(&rig, vif)).collect();
    assert_eq!(plugged, [true, false]);
    let later = vif(&rig, &vm, &net, "4");
    rig.call("VIF.plug", one(&later));
    rig.call("VM.revert", one(&kept));
    if rig.get("VM", &vm).text("power_state") == "Suspended" {
        rig.call("VM.resume", begin(&vm));
    }
    assert_eq!(of_guest(&rig, &vm), had);
    let vifs = rig.stack.db.find("VIF", "VM", &vm);
    let plugged: Vec<&str> =
        vifs.iter().filter(|vif| vif.bool("currently_attached")).map(|vif| vif.text("device")).collect();
    assert_eq!(plugged.len(), 2, "{plugged:?}");
    assert!(!plugged.contains(&"1"), "{plugged:?}");
    rig.check(None);
}

#[test]
fn what_fails_leaves_no_interface() {
    let rig = Rig::pretended();
    let vm = made(&rig, &[("sim-fail", "plug-vif:1,unplug-vif:0")]);
    let net = network(&rig, "br0");
    let (first, second) = (vif(&rig, &vm, &net, "0"), vif(&rig, &vm, &net, "1"));
    let error = rig.refused("VM.start", begin(&vm)).to_string();
    assert!(error.contains("network interface 1"), "{error}");
    assert_eq!(rig.get("VM", &vm).text("power_state"), "Halted");
    assert!(!is_plugged(&rig, &first) && of_guest(&rig, &vm).is_empty());
    rig.check(None);
    rig.call("VIF.destroy", one(&second));
    rig.call("VM.start", begin(&vm));
    let error = rig.refused("VIF.unplug", one(&first));
    assert_eq!((error.code.as_ref(), &*error.params[0]), ("DEVICE_DETACH_REJECTED", "VIF"));
    assert!(is_plugged(&rig, &first));
    rig.call("VIF.unplug_force", one(&first));
    let again = vif(&rig, &vm, &net, "1");
    assert!(rig.try_call("VIF.plug", one(&again)).is_err());
    assert!(!is_plugged(&rig, &again) && of_guest(&rig, &vm).is_empty());
    rig.check(None);
}

#[test]
fn an_interface_gets_another_network_while_its_guest_runs() {
    let rig = Rig::pretended();
    let vm = made(&rig, &[]);
    let (first, second) = (network(&rig, "br0"), network(&rig, "br1"));
    let vif = vif(&rig, &vm, &first, "0");
    let to = |network: &str| vec![vif.as_str().into(), network.into()];
    let of = |vif: &str| rig.get("VIF", vif).text("network").to_owned();
    let bridge = || {
        let driver = rig.stack.vms.driver("sim").expect("the driver");
        let found = driver.vifs(rig.get("VM", &vm).uuid().expect("a UUID")).expect("its interfaces");
        found.get(&0).and_then(|vif| vif.bridge.clone())
    };
    // Of a VM that does not run it is the record alone.
    let missing = network(&rig, "missing0");
    rig.call("VIF.move", to(&missing));
    assert_eq!(of(&vif), missing);
    assert_eq!(rig.refused("VIF.move", to("OpaqueRef:x")).code, "HANDLE_INVALID");
    let stubborn = self::vif(&rig, &vm, &second, "1");
    rig.call("VM.add_to_platform", vec![vm.as_str().into(), "sim-fail".into(), "move-vif:1".into()]);
    rig.call("VM.start", begin(&vm));
    // Plugged without a link, it has nothing that could be connected.
    let refused = rig.refused("VIF.move", to(&first));
    assert_eq!(refused.code, "OPERATION_NOT_ALLOWED");
    assert!(refused.params[0].contains("vif-unplug"), "{refused}");
    rig.call("VIF.unplug", one(&vif));
    rig.call("VIF.move", to(&first));
    rig.call("VIF.plug", one(&vif));
    assert_eq!(bridge().as_deref(), Some("br0"));
    for _ in 0..2 {
        rig.call("VIF.move", to(&second));
        assert_eq!((of(&vif), bridge().as_deref()), (second.clone(), Some("br1")));
        assert!(is_plugged(&rig, &vif));
    }
    // Where there is no such bridge, or the host refuses, all is as before.
    for bad in [&missing, &outer(&rig, "missing1"), &outer(&rig, "other1")] {
        let refused = rig.refused("VIF.move", to(bad));
        assert_eq!((refused.code.as_ref(), &refused.params[1]), ("HOST_CANNOT_ATTACH_NETWORK", bad));
        assert_eq!((of(&vif), bridge().as_deref()), (second.clone(), Some("br1")));
    }
    let refused = rig.refused("VIF.move", vec![stubborn.as_str().into(), first.as_str().into()]);
    assert!(refused.to_string().contains("sim-fail"), "{refused}");
    assert_eq!(of(&stubborn), second);
    assert!(rig.stack.db.notes("machines/vif-move/").is_empty());
    rig.check(None);
}
