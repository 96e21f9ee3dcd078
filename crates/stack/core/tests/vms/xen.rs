//! What the toolstack does with disks of Xen's guests, and with the page pools of SRs; guests are simulated.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tapio_control::{OwnClient, RunDir, command};
use tapio_model::Value;
use tapio_stat::ShmRoot;
use tapio_stat::pool::pools;

use crate::rig::{MIB, Rig};

fn wait(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn start(vm: &str) -> Vec<Value> {
    vec![vm.into(), false.into(), false.into()]
}

/// What the driver of a VM was given for its only disk.
fn given(rig: &Rig, vm: &str) -> serde_json::Value {
    let place = rig.get("VM", vm).uuid().expect("a uuid").simple().to_string();
    let record = fs::read(rig.dir.join("run/vm").join(place).join("machine.json")).expect("its record");
    let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
    record["disks"]["0"].clone()
}

#[test]
fn a_disk_of_xen_names_its_process_and_is_given_again_when_that_changes() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let rig = Rig::again(scratch.path());
    let sr = rig.make_sr();
    let vm = rig.make_vm(&[("sim-front", "xen"), ("sim-domid", "17")]);
    let vdi = rig.make_vdi(&sr, MIB);
    let more = [("userdevice", Value::string("0"))];
    let vbd = rig.text("VBD.create", vec![Rig::vbd_record(&vm, &vdi, &more)]);
    rig.call("VM.start", start(&vm));
    assert_eq!(rig.get("VM", &vm).int("domid"), 17, "the driver's number, not ours");
    assert_eq!(rig.get("VBD", &vbd).text("device"), "xvda");
    let uuid = rig.get("VBD", &vbd).uuid().expect("a uuid");
    let process = || rig.stack.disks.of_vbd(uuid).and_then(|note| note.process).expect("a process");
    let first = process();
    let control = scratch.path().join("ctl");
    // The number of the disk changes with its process.
    let minor = || rig.stack.disks.of_vbd(uuid).and_then(|note| note.minor).expect("a minor");
    let path = |pid: i32| control.join(format!("nbd{pid}.{}", minor()));
    let node = || given(&rig, &vm)["node"].as_str().map(PathBuf::from).expect("a path");
    assert_eq!(node(), path(first.pid));
    assert_eq!(given(&rig, &vm)["facts"]["polling_us"], 8_000);
    assert_eq!(given(&rig, &vm)["facts"]["vdi"], rig.get("VDI", &vdi).text("uuid"));
    // The back end of Xen adds the front end when it connects the guest.
    let mut client = OwnClient::connect(&RunDir::new(&control), first.pid).expect("it listens");
    let disks = client.call(&command::List {}, &[], Some(Duration::from_secs(60))).expect("an answer");
    assert!(disks[0].image.is_some() && disks[0].fronts.is_empty(), "{disks:?}");
    rig.call("VBD.add_to_other_config", vec![vbd.as_str().into(), "polling-duration".into(), "0".into()]);
    assert_eq!(given(&rig, &vm)["facts"]["polling_us"], 0, "told to the back end, too");
    // Rings are settings of the SR and of the VBD, which comes first.
    let add = |class: &str, of: &str, key: &str, value: &str| {
        rig.call(&format!("{class}.add_to_other_config"), vec![of.into(), key.into(), value.into()]);
    };
    add("SR", &sr, "max-ring-page-order", "1");
    add("SR", &sr, "data-movement", "map");
    add("VBD", &vbd, "max-ring-page-order", "2");
    let rings = given(&rig, &vm)["facts"]["rings"].clone();
    assert_eq!((rings["order"].as_u64(), rings["movement"].as_str()), (Some(2), Some("map")), "{rings}");
    for (class, of) in [("VBD", &vbd), ("SR", &sr)] {
        let bad = vec![of.as_str().into(), "multi-queue-max-queues".into(), "99".into()];
        let refused = rig.refused(&format!("{class}.add_to_other_config"), bad);
        assert_eq!(refused.code, "VALUE_NOT_SUPPORTED", "{refused}");
        assert!(refused.params[2].contains("1 to 16"), "{refused}");
    }
    // How requests go to the storage likewise: the disk process of a VBD is told at once.
    let mut transfers = || {
        let ask = command::Limits { minor: minor() };
        let limits = client.call(&ask, &[], Some(Duration::from_secs(60))).expect("an answer");
        limits.transfers.to_string()
    };
    add("SR", &sr, "split-size", "64KiB");
    add("VBD", &vbd, "merge-size", "32768");
    assert_eq!(transfers(), "split=64KiB,merge=32KiB");
    rig.call("VBD.remove_from_other_config", vec![vbd.as_str().into(), "merge-size".into()]);
    add("VBD", &vbd, "split-size", "off");
    assert_eq!(transfers(), "off");
    let bad = vec![sr.as_str().into(), "merge-size".into(), "1000".into()];
    assert_eq!(rig.refused("SR.add_to_other_config", bad).code, "VALUE_NOT_SUPPORTED");

    crate::real::signal(first.pid, tapio_sys::process::Signal::KILL);
    let is_new = || {
        let note = rig.stack.disks.of_vbd(uuid).expect("a disk");
        note.process.is_some_and(|now| now != first && node() == path(now.pid))
    };
    wait("another process is named", is_new);
    assert_eq!(given(&rig, &vm)["facts"]["polling_us"], 0);
    rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    rig.check_real();
}

#[test]
fn the_page_pool_of_an_sr_is_as_large_as_it_says_from_the_first_plug_to_the_last_unplug() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let rig = Rig::again(scratch.path());
    let sr = rig.make_sr();
    let shm = ShmRoot::new(scratch.path().join("shm"));
    let pages = || pools(&shm).expect("pools").iter().map(|pool| pool.pages).collect::<Vec<_>>();
    let key = "blkback-mem-pool-size-rings";
    for bad in ["3", "0", "eight"] {
        let set = vec![sr.as_str().into(), Value::string_map([(key, bad)])];
        let refused = rig.refused("SR.set_other_config", set);
        assert_eq!(refused.code, "VALUE_NOT_SUPPORTED");
        assert!(refused.params[2].contains("2, 4 or 8"), "{refused}");
        let refused = rig.refused("SR.add_to_other_config", vec![sr.as_str().into(), key.into(), bad.into()]);
        assert_eq!(refused.code, "VALUE_NOT_SUPPORTED");
    }
    rig.call("SR.add_to_other_config", vec![sr.as_str().into(), key.into(), "4".into()]);
    let twice = rig.refused("SR.add_to_other_config", vec![sr.as_str().into(), key.into(), "2".into()]);
    assert_eq!(twice.code, "MAP_DUPLICATE_KEY");
    assert!(pages().is_empty(), "nothing is plugged");
    let vms: Vec<String> = (0..2).map(|_| rig.make_vm(&[("sim-front", "vhost-user")])).collect();
    for vm in &vms {
        rig.make_vbd(vm, &rig.make_vdi(&sr, MIB));
    }
    rig.call("VM.start", start(&vms[0]));
    assert_eq!(pages(), [1408]);
    // It stays as it was made, for later disks too.
    rig.call("SR.set_other_config", vec![sr.as_str().into(), Value::string_map([(key, "8")])]);
    rig.call("VM.start", start(&vms[1]));
    assert_eq!(pages(), [1408]);
    assert_eq!(pools(&shm).expect("pools")[0].disks.len(), 2);
    let stop = |vm: &String| rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    stop(&vms[0]);
    assert_eq!(pages(), [1408], "one disk is left");
    rig.call("VM.start", start(&vms[0]));
    assert_eq!(pages(), [1408]);
    vms.iter().for_each(|vm| drop(stop(vm)));
    assert!(pages().is_empty(), "the last one has gone");
    rig.call("VM.start", start(&vms[0]));
    assert_eq!(pages(), [2816]);
    stop(&vms[0]);
    rig.call("SR.remove_from_other_config", vec![sr.as_str().into(), key.into()]);
    rig.call("VM.start", start(&vms[1]));
    assert_eq!(pages(), [704]);
    stop(&vms[1]);
    rig.check_real();
}
