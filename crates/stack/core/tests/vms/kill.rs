//! The daemon is killed at every named step of every operation; the next one puts everything in order.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tapio_core::plan::steps::STEPS;
use tapio_format::vhd::offline::{Chain, Image, OpenOptions};
use tapio_model::Value;

use crate::rig::{MIB, Rig, disk_program, record_of};

/// Where the child works, and what it does.
const DIR: &str = "TAPIO_KILL_DIR";
const TASK: &str = "TAPIO_KILL_TASK";

pub fn vm(rig: &Rig) -> String {
    rig.stack.db.find("VM", "name_label", "guest")[0].reference.clone()
}

pub fn first_vbd(rig: &Rig) -> String {
    let vbds = rig.stack.db.find("VBD", "VM", &vm(rig));
    vbds.iter().find(|vbd| vbd.text("userdevice") == "0").expect("a disk").reference.clone()
}

fn vif(rig: &Rig) -> std::sync::Arc<tapio_core::db::Object> {
    rig.stack.db.find("VIF", "VM", &vm(rig)).pop().expect("an interface")
}

fn drive(rig: &Rig) -> String {
    rig.stack.db.find("VBD", "type", "CD")[0].reference.clone()
}

fn medium(rig: &Rig) -> String {
    rig.stack.db.find("VDI", "name_label", "medium")[0].reference.clone()
}

pub fn perform(rig: &Rig, task: &str) -> Value {
    let (vm, vbd) = (vm(rig), first_vbd(rig));
    let start = |vm: &str| rig.call("VM.start", vec![vm.into(), false.into(), false.into()]);
    match task {
        "prepare" | "idle" => Value::Void,
        "vm-start" => start(&vm),
        "vm-shutdown" => rig.call("VM.hard_shutdown", vec![vm.into()]),
        "vm-memory" => {
            rig.call("VM.set_memory_dynamic_range", vec![vm.into(), Value::Int(0), Value::Int(32 * MIB)])
        }
        "vm-vcpus" => rig.call("VM.set_VCPUs_number_live", vec![vm.into(), Value::Int(2)]),
        "vbd-plug" => rig.call("VBD.plug", vec![vbd.into()]),
        "vbd-unplug" => rig.call("VBD.unplug", vec![vbd.into()]),
        "vif-plug" => rig.call("VIF.plug", vec![vif(rig).reference.as_str().into()]),
        "vif-move" => {
            let other = record_of([("name_label", Value::string("other")), ("bridge", Value::string("br1"))]);
            let other = rig.text("network.create", vec![other]);
            rig.call("VIF.move", vec![vif(rig).reference.as_str().into(), other.into()])
        }
        "vif-unplug" => rig.call("VIF.unplug", vec![vif(rig).reference.as_str().into()]),
        "vm-start-without-vif" => {
            start(&vm);
            perform(rig, "vif-unplug")
        }
        "vm-clone" => rig.call("VM.clone", vec![vm.into(), "clone".into()]),
        "vm-revert" => {
            let snapshot = rig.text("VM.snapshot", vec![vm.into(), "kept".into()]);
            rig.call("VM.revert", vec![snapshot.into()])
        }
        "vm-suspend" => {
            start(&vm);
            rig.call("VM.suspend", vec![vm.into()])
        }
        "vm-renew" => rig.call("VM.restart_device_models", vec![vm.into()]),
        "vm-resume" => rig.call("VM.resume", vec![vm.into(), false.into(), false.into()]),
        "vm-checkpoint" => rig.call("VM.checkpoint", vec![vm.into(), "checkpoint".into()]),
        "vm-clone-of-checkpoint" => {
            let kept = rig.stack.db.find("VM", "name_label", "checkpoint")[0].reference.clone();
            rig.call("VM.clone", vec![kept.into(), "clone".into()])
        }
        "vm-import" => {
            let made = rig.import(&rig.export(&vm));
            Value::strings(made)
        }
        "vm-destroy" => rig.call("VM.destroy", vec![vm.into()]),
        "vm-quiesce" => rig.call("VM.snapshot_with_quiesce", vec![vm.into(), "quiet".into()]),
        "vbd-insert" => rig.call("VBD.insert", vec![drive(rig).into(), medium(rig).into()]),
        "vbd-eject" => {
            rig.call("VBD.insert", vec![drive(rig).into(), medium(rig).into()]);
            rig.call("VBD.eject", vec![drive(rig).into()])
        }
        "vm-start-with-drive" => {
            rig.make_empty_cd(&vm);
            let sr = rig.stack.db.find("SR", "type", "file")[0].reference.clone();
            let medium = rig.make_vdi(&sr, MIB);
            rig.call("VDI.set_name_label", vec![medium.into(), "medium".into()]);
            start(&vm)
        }
        "vdi-snapshot" => {
            let vdi = rig.get("VBD", &vbd).text("VDI").to_owned();
            rig.call("VDI.snapshot", vec![vdi.into(), Value::Map(BTreeMap::new())])
        }
        "make-chains" => make_chains(rig),
        "collect" => collect(rig),
        "vdi-enable-cbt" => {
            let vdi = rig.get("VBD", &vbd).text("VDI").to_owned();
            rig.call("VDI.enable_cbt", vec![vdi.into()])
        }
        "nbd-export" => export(rig),
        "vdi-release" => {
            let uuid = rig.get("VBD", &vbd).uuid().expect("a UUID");
            rig.stack.disks.forget(uuid);
            rig.call("VDI.release", vec![rig.get("VBD", &vbd).text("VDI").into()])
        }
        "vmss-prepare" => {
            let plan = [("name_label", "p"), ("type", "snapshot"), ("frequency", "weekly")];
            let mut plan: BTreeMap<String, Value> =
                plan.map(|(name, value)| (name.to_owned(), Value::string(value))).into();
            plan.insert("enabled".into(), false.into());
            plan.insert("retained_snapshots".into(), Value::Int(1));
            let plan = rig.text("VMSS.create", vec![Value::Map(plan)]);
            rig.call("VM.set_snapshot_schedule", vec![vm.into(), plan.into()]);
            perform(rig, "vmss-run")
        }
        "vmss-run" => {
            let plan = rig.stack.db.all("VMSS")[0].reference.clone();
            rig.call("VMSS.snapshot_now", vec![plan.into()])
        }
        "sr-scan" => {
            let sr = damage(rig, true);
            rig.call("SR.scan", vec![sr.into()])
        }
        "sr-collect" => {
            damage(rig, false);
            collect(rig)
        }
        "make-snapshot" => {
            let vdi = rig.get("VBD", &vbd).text("VDI").to_owned();
            write(rig, &vdi, 0, b'a');
            rig.call("VDI.snapshot", vec![vdi.as_str().into(), Value::Map(BTreeMap::new())]);
            write(rig, &vdi, 4096, b'b');
            rig.make_sr_in("to").into()
        }
        "vdi-move" => {
            let vdi = rig.get("VBD", &vbd).text("VDI").to_owned();
            let here = rig.get("VDI", &vdi).text("SR").to_owned();
            let srs = rig.stack.db.find("SR", "type", "file");
            let to = srs.iter().find(|sr| sr.reference != here).expect("another SR").reference.clone();
            rig.call("VDI.pool_migrate", vec![vdi.into(), to.into(), Value::Map(BTreeMap::new())])
        }
        other => panic!("no task {other}"),
    }
}

/// Puts chains below both disks, which nothing uses: of the first, a base copy that goes into a smaller one whose table
/// has no room for it, with a snapshot above; of the second, a base copy into which the disk goes.
fn make_chains(rig: &Rig) -> Value {
    let vm = vm(rig);
    let vdi_at = |place: &str| {
        let vbds = rig.stack.db.find("VBD", "VM", &vm);
        vbds.iter().find(|vbd| vbd.text("userdevice") == place).expect("a disk").text("VDI").to_owned()
    };
    let fork = |vdi: &str, kind: &str| {
        rig.call("VDI.snapshot", vec![vdi.into(), Value::string_map([("type", kind)])]);
    };
    let (first, second) = (vdi_at("0"), vdi_at("1"));
    let config = Value::string_map([("gc-quiet", "100000")]);
    rig.call("SR.set_other_config", vec![rig.get("VDI", &first).text("SR").into(), config]);
    write(rig, &first, 0, b'a');
    fork(&first, "single");
    rig.call("VDI.resize", vec![first.as_str().into(), (300 * MIB).into()]);
    write(rig, &first, 512, b'b');
    write(rig, &first, 256 << 20, b'c');
    fork(&first, "double");
    write(rig, &second, 0, b'd');
    fork(&second, "single");
    write(rig, &second, 512, b'e');
    Value::Void
}

/// Exports the second disk by NBD, and destroys a snapshot that was exported and has no clients.
fn export(rig: &Rig) -> Value {
    let dir = rig.dir.join("certificate");
    std::fs::create_dir_all(&dir).expect("a directory");
    tapio_fixtures::certificates::make(&dir, false, "IP:127.0.0.1", 2);
    let identity = tapio_core::exports::Identity { dir, cert: String::new(), subject: String::new() };
    // The ports of tests that run at the same time are others.
    let ports = (20_000 + (std::process::id() % 400) as u16 * 100, 65_535);
    let options = tapio_core::exports::ExportOptions { ports, ..Default::default() };
    rig.stack.exports.configure(options, move || Ok(identity.clone()));
    let db = &rig.stack.db;
    let network = db.create("network", &[("name_label", "loopback".into())]).expect("a network");
    let host = db.all("host")[0].reference.clone();
    let fields = [("host", host.into()), ("network", network.as_str().into()), ("IP", "127.0.0.1".into())];
    db.create("PIF", &fields).expect("an interface");
    rig.call("network.add_purpose", vec![network.as_str().into(), "nbd".into()]);
    let vdi = rig.get("VBD", &first_vbd(rig)).text("VDI").to_owned();
    let snapshot = rig.text("VDI.snapshot", vec![vdi.as_str().into(), Value::Map(BTreeMap::new())]);
    let places = rig.call("VDI.get_nbd_info", vec![snapshot.as_str().into()]);
    assert_eq!(places.as_set().map(<[Value]>::len), Some(1));
    rig.call("VDI.destroy", vec![snapshot.into()])
}

fn write(rig: &Rig, vdi: &str, at: u64, byte: u8) {
    let mut image = Image::open(&rig.file(vdi), OpenOptions::WRITE).expect("its image");
    image.write_at(at, &[byte; 512]).and_then(|()| image.finish()).expect("room");
}

pub fn collect(rig: &Rig) -> Value {
    let sr = &rig.stack.db.find("SR", "type", "file")[0].reference;
    let said = rig.call("SR.collect_garbage", vec![sr.as_str().into(), false.into()]);
    let until = Instant::now() + Duration::from_secs(60);
    while rig.stack.storage.is_collecting(sr) {
        assert!(Instant::now() < until, "the collection does not end");
        std::thread::sleep(Duration::from_millis(2));
    }
    said
}

/// Puts images into the directory of the SR, changes a record, and answers the SR; with `leftovers` there is also what
/// several kills would leave. The first disk holds an `a`.
fn damage(rig: &Rig, leftovers: bool) -> String {
    use tapio_format::vhd::offline::{Shape, create, set_hidden};
    let vdi = rig.get("VBD", &first_vbd(rig)).text("VDI").to_owned();
    let sr = rig.get("VDI", &vdi).text("SR").to_owned();
    let config = Value::string_map([("gc-quiet", "100000")]);
    rig.call("SR.set_other_config", vec![sr.as_str().into(), config]);
    write(rig, &vdi, 0, b'a');
    let place = |name: String| rig.dir.join("sr").join(name);
    for number in 0..2 {
        if leftovers {
            std::fs::write(place(format!(".vhd-419499{number}-1.partial")), "half").expect("room");
            std::fs::write(place(format!("clone_{}", uuid::Uuid::new_v4())), "cut").expect("room");
        }
        let image = place(format!("{}.vhd", uuid::Uuid::new_v4()));
        create(&image, &Shape::Dynamic, 4 * MIB as u64, 0).expect("an image");
        if number == 1 {
            set_hidden(&mut Image::open(&image, OpenOptions::WRITE).expect("it is there"), 1).expect("room");
        }
    }
    rig.stack.db.set("VDI", &vdi, "virtual_size", 2 * MIB).expect("it is there");
    sr
}

/// Run as a process of its own by the test below.
#[test]
#[ignore = "a child of another test"]
fn child() {
    let dir = std::env::var(DIR).expect("started by its parent");
    let task = std::env::var(TASK).expect("started by its parent");
    let rig = Rig::again(Path::new(&dir));
    if rig.stack.db.find("VM", "name_label", "guest").is_empty() {
        let (sr, vm) = (rig.make_sr(), rig.make_vm(&[("sim-front", "vhost-user"), ("sim-agent", "yes")]));
        (0..2).for_each(|_| drop(rig.make_vbd(&vm, &rig.make_vdi(&sr, 4 * MIB))));
        rig.call("VM.set_VCPUs_max", vec![vm.as_str().into(), Value::Int(2)]);
        rig.call("VM.set_suspend_SR", vec![vm.as_str().into(), sr.into()]);
        let network = record_of([("name_label", Value::string("net")), ("bridge", Value::string("br0"))]);
        let network = rig.text("network.create", vec![network]);
        let vif = [("VM", vm), ("network", network), ("device", "0".to_owned())];
        rig.call("VIF.create", vec![record_of(vif.map(|(name, value)| (name, Value::string(value))))]);
    }
    perform(&rig, &task);
}

/// Runs the child; answers its exit status.
pub fn run(dir: &Path, task: &str, die_at: Option<&str>) -> i32 {
    let mut command = Command::new(std::env::current_exe().expect("the test has a path"));
    command.args(["--exact", "kill::child", "--ignored", "--nocapture"]);
    command.env(DIR, dir).env(TASK, task).stdin(Stdio::null()).stdout(Stdio::null());
    command.env_remove("TAPIO_DIE_AT").envs(die_at.map(|step| ("TAPIO_DIE_AT", step)));
    let log = std::fs::File::create(dir.join("child.log")).expect("a log");
    let mut child = command.stderr(log).spawn().expect("the child starts");
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = child.try_wait().expect("a status") {
            return status.code().unwrap_or(-1);
        }
        if Instant::now() > until {
            child.kill().expect("it is ours");
            child.wait().expect("it ends");
            let log = std::fs::read_to_string(dir.join("child.log")).unwrap_or_default();
            panic!("{task} to {die_at:?} does not end: {log}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What must have been done before, and what is done to come to the step.
fn story(step: &str) -> (&'static str, &'static str) {
    if step == "vm-shutdown:halted" {
        // The memory of a suspended VM is thrown away.
        return ("vm-suspend", "vm-shutdown");
    }
    match step.split(':').next().unwrap_or_default() {
        "vbd-unplug" | "vdi-deactivate" => ("vm-start", "vbd-unplug"),
        "vm-shutdown" => ("vm-start", "vm-shutdown"),
        "vm-vcpus" => ("vm-start", "vm-vcpus"),
        "vm-memory" => ("vm-start", "vm-memory"),
        "vm-start" => ("prepare", "vm-start"),
        "vm-suspend" => ("prepare", "vm-suspend"),
        "vm-resume" => ("vm-suspend", "vm-resume"),
        "vm-renew" => ("vm-start", "vm-renew"),
        "vm-checkpoint" => ("vm-start", "vm-checkpoint"),
        "vm-clone" => ("prepare", "vm-clone"),
        "vm-revert" => ("prepare", "vm-revert"),
        "vm-import" => ("prepare", "vm-import"),
        "vm-destroy" => ("prepare", "vm-destroy"),
        "vm-quiesce" => ("vm-start", "vm-quiesce"),
        "vmss" => ("vmss-prepare", "vmss-run"),
        "vif-plug" => ("vm-start-without-vif", "vif-plug"),
        "vif-unplug" => ("vm-start", "vif-unplug"),
        "vif-move" => ("vm-start", "vif-move"),
        "vbd-insert" => ("vm-start-with-drive", "vbd-insert"),
        "vbd-eject" => ("vm-start-with-drive", "vbd-eject"),
        // Once while a VM starts, once into one that runs.
        "vbd-plug" => ("prepare", "vm-start"),
        other => panic!("no story for {other}: add one"),
    }
}

fn killed_at(step: &'static str, before: &str, task: &str) {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dir = scratch.path();
    assert_eq!(run(dir, before, None), 0, "{before}: {}", log(dir));
    if task == "vbd-plug" {
        assert_eq!(run(dir, "vbd-unplug", None), 0, "{}", log(dir));
    }
    let status = run(dir, task, Some(step));
    assert_eq!(status, 137, "{task} does not come to {step}: {}", log(dir));
    let rig = Rig::again(dir);
    if task == "vm-renew" {
        goes_on(&rig);
    }
    rig.check_real();
    let (vm, vbd) = (vm(&rig), first_vbd(&rig));
    let state = rig.get("VM", &vm).text("power_state").to_owned();
    let is_plugged = rig.get("VBD", &vbd).bool("currently_attached");
    let has_vif = task != "vif-unplug" && matches!(state.as_str(), "Running" | "Paused");
    assert_eq!(vif(&rig).bool("currently_attached"), has_vif, "{task} to {step}: a guest that is {state}");
    match (task, step) {
        ("vif-plug" | "vif-unplug", _) => assert_eq!(state, "Running", "{step}"),
        ("vif-move", _) => {
            let network = rig.get("network", vif(&rig).text("network"));
            let driver = rig.stack.vms.driver("sim").expect("it is there");
            let of_guest = driver.vifs(rig.get("VM", &vm).uuid().expect("a UUID")).expect("its interfaces");
            let bridge = of_guest.get(&0).and_then(|vif| vif.bridge.clone());
            assert_eq!((network.text("bridge"), bridge.as_deref()), ("br1", Some("br1")), "{step}");
            assert!(rig.stack.db.notes("machines/vif-move/").is_empty(), "{step}");
        }
        ("vm-start", _) => assert_eq!((state.as_str(), is_plugged), ("Halted", false), "{step}"),
        ("vm-memory", _) => {
            let driver = rig.stack.vms.driver("sim").expect("it is there");
            let uuid = rig.get("VM", &vm).uuid().expect("a UUID");
            assert_eq!(driver.memory(uuid), Ok(Some(32 << 20)), "{step}: the guest is not told");
            assert_eq!(rig.get("VM", &vm).int("memory_dynamic_max"), 32 * MIB);
        }
        ("vm-vcpus", _) => {
            let (record, metrics) = (rig.get("VM", &vm), rig.get("VM", &vm).text("metrics").to_owned());
            let metrics = rig.get("VM_metrics", &metrics).int("VCPUs_number");
            assert_eq!(
                (state.as_str(), record.int("VCPUs_at_startup"), metrics),
                ("Running", 2, 2),
                "{step}"
            );
        }
        ("vm-shutdown", "vm-shutdown:noted") => assert_eq!(state, "Running"),
        ("vm-shutdown", _) => assert_eq!((state.as_str(), is_plugged), ("Halted", false), "{step}"),
        ("vbd-plug" | "vbd-unplug", _) => {
            assert_eq!((state.as_str(), is_plugged), ("Running", false), "{step}");
        }
        ("vm-suspend" | "vm-resume" | "vm-checkpoint", _) => memory_is_kept_or_used(&rig, &vm, step),
        ("vm-renew", _) => {
            assert_eq!((state.as_str(), is_plugged), ("Running", true), "{step}");
            assert!(rig.get("VM", &vm).is_null("suspend_VDI"), "{step}");
            assert!(rig.stack.db.find("VDI", "type", "suspend").is_empty(), "{step}: its memory is left");
        }
        ("vbd-insert" | "vbd-eject", _) => {
            let record = rig.get("VBD", &drive(&rig));
            let is_in = matches!(step, "vbd-insert:plugged" | "vbd-eject:noted");
            assert!(record.bool("currently_attached"), "{step}: a drive keeps its place");
            assert_eq!((record.bool("empty"), record.is_null("VDI")), (!is_in, !is_in), "{step}");
            // It is a drive like any other from here.
            if is_in {
                rig.call("VBD.eject", vec![drive(&rig).into()]);
            }
            perform(&rig, "vbd-insert");
            rig.check_real();
        }
        ("vm-quiesce", _) => {
            assert!(rig.stack.db.find("VM", "name_label", "quiet").is_empty(), "{step}");
            let managed = rig.stack.db.all("VDI").iter().filter(|vdi| vdi.bool("managed")).count();
            assert_eq!((managed, state.as_str()), (2, "Running"), "{step}: disks of the snapshot are left");
            assert!(!is_frozen(&rig, &vm), "{step}: the guest stays frozen");
        }
        ("vmss-run", _) => {
            let snapshots = || {
                let all = rig.stack.db.find("VM", "snapshot_of", &vm);
                let of_plan = all.iter().filter(|one| one.bool("is_vmss_snapshot")).count();
                (all.len(), of_plan)
            };
            let wanted = match step {
                "vmss:noted" => (1, 1),
                "vmss:made" => (2, 1),
                _ => (2, 2),
            };
            assert_eq!(snapshots(), wanted, "{step}");
            let messages = rig.stack.db.all("message");
            let told = messages.iter().filter(|one| one.text("name") == "VMSS_SNAPSHOT_FAILED").count();
            assert_eq!(told, 1, "{step}: the administrator is told");
            perform(&rig, "vmss-run");
            let by_hand = usize::from(step == "vmss:made");
            assert_eq!(snapshots(), (1 + by_hand, 1), "{step}");
            let managed = rig.stack.db.all("VDI").iter().filter(|vdi| vdi.bool("managed")).count();
            assert_eq!(managed, 2 + 2 * (1 + by_hand), "{step}: disks of a snapshot that went are left");
        }
        ("vm-clone", _) => {
            assert!(rig.stack.db.find("VM", "name_label", "clone").is_empty(), "{step}");
            let managed = rig.stack.db.all("VDI").iter().filter(|vdi| vdi.bool("managed")).count();
            assert_eq!(managed, 2, "{step}: disks of the clone are left");
        }
        ("vm-import", _) => {
            assert_eq!(rig.stack.db.find("VM", "name_label", "guest").len(), 1, "{step}");
            assert_eq!(rig.stack.db.all("VDI").len(), 2, "{step}: disks of the import are left");
            let images = std::fs::read_dir(dir.join("sr")).expect("the SR's directory").flatten();
            let images = images.filter(|image| image.path().extension().is_some_and(|kind| kind == "vhd"));
            assert_eq!(images.count(), 2, "{step}: images of the import are left");
        }
        ("vm-revert", _) => {
            assert_eq!(rig.stack.db.find("VBD", "VM", &vm).len(), 2, "{step}");
            let managed = rig.stack.db.all("VDI").iter().filter(|vdi| vdi.bool("managed")).count();
            assert_eq!(managed, 2 + 2, "{step}: disks of the VM and of its snapshot, and no others");
        }
        _ => assert_eq!(state, "Halted"),
    }
    // All goes on from here.
    if state == "Suspended" {
        perform(&rig, "vm-resume");
    } else if state == "Halted" {
        perform(&rig, "vm-start");
    } else if !is_plugged {
        perform(&rig, "vbd-plug");
    }
    rig.check_real();
    perform(&rig, "vm-shutdown");
    rig.check_real();
}

/// Waits until a VM that was to get a new emulator goes on, or is known not to.
fn goes_on(rig: &Rig) {
    let until = Instant::now() + Duration::from_secs(60);
    while !rig.stack.db.notes("machines/renew/").is_empty() {
        assert!(Instant::now() < until, "the VM does not go on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a simulated guest is frozen: the file by which its driver knows it.
fn is_frozen(rig: &Rig, vm: &str) -> bool {
    let uuid = rig.get("VM", vm).uuid().expect("a UUID").simple().to_string();
    rig.dir.join("run/vm").join(uuid).join("frozen").exists()
}

/// A VM of which the daemon died in a suspend, a resume or a checkpoint runs with its disks, or is suspended without
/// and has its memory; there is no other memory image than that.
fn memory_is_kept_or_used(rig: &Rig, vm: &str, step: &str) {
    let record = rig.get("VM", vm);
    let images = rig.stack.db.find("VDI", "type", "suspend");
    let checkpoints = rig.stack.db.find("VM", "name_label", "checkpoint");
    let (state, attached) = match step {
        "vm-suspend:recorded" | "vm-suspend:ended" | "vm-resume:noted" | "vm-resume:loaded" => {
            ("Suspended", false)
        }
        _ => ("Running", true),
    };
    assert_eq!(record.text("power_state"), state, "{step}");
    assert_eq!(rig.get("VBD", &first_vbd(rig)).bool("currently_attached"), attached, "{step}");
    assert_eq!(record.is_null("suspend_VDI"), state == "Running", "{step}");
    assert_eq!(checkpoints.len(), usize::from(step == "vm-checkpoint:made"), "{step}");
    let wanted = usize::from(state == "Suspended") + checkpoints.len();
    assert_eq!(images.len(), wanted, "{step}: memory images");
    let managed = rig.stack.db.all("VDI").iter().filter(|vdi| vdi.bool("managed")).count();
    assert_eq!(managed, wanted + 2 + 2 * checkpoints.len(), "{step}: disks of a checkpoint are left");
}

pub fn log(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("child.log")).unwrap_or_default()
}

/// A clone that has memory as well; its story begins with a checkpoint.
const MEMORY_MADE: &str = "vm-clone:memory-made";

#[test]
fn a_clone_of_a_checkpoint_that_was_interrupted_is_gone() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dir = scratch.path();
    for task in ["vm-start", "vm-checkpoint", "vm-shutdown"] {
        assert_eq!(run(dir, task, None), 0, "{task}: {}", log(dir));
    }
    let task = "vm-clone-of-checkpoint";
    assert_eq!(run(dir, task, Some(MEMORY_MADE)), 137, "{}", log(dir));
    let rig = Rig::again(dir);
    rig.check_real();
    assert!(rig.stack.db.find("VM", "name_label", "clone").is_empty());
    assert_eq!(rig.stack.db.find("VDI", "type", "suspend").len(), 1, "that of the checkpoint");
    let managed = rig.stack.db.all("VDI").iter().filter(|vdi| vdi.bool("managed")).count();
    assert_eq!(managed, 2 + 2 + 1, "disks of the clone are left");
    let made = perform(&rig, task);
    let made = rig.get("VM", made.as_str().expect("a reference"));
    assert_eq!(made.text("power_state"), "Suspended");
    assert_eq!(rig.stack.db.find("VDI", "type", "suspend").len(), 2);
    rig.check_real();
}

/// What a running disk does while it is moved.
const OF_MOVES: [&str; 4] = ["disk:mirrored", "disk:in-sync", "disk:pivoted", "disk:moved"];

/// What a running disk does for its SR.
const OF_DISKS: [&str; 2] = ["disk:paused", "disk:resumed"];
/// The same in a snapshot.
const OF_SWAPS: [&str; 3] = ["disk:held", "disk:leaf-noted", "disk:leaf-swapped"];

#[test]
fn every_step_of_every_operation() {
    let mut stories: Vec<_> = STEPS
        .iter()
        // These have stories of their own below.
        .filter(|step| {
            !step.name.starts_with("disk:")
                && step.name != MEMORY_MADE
                && !step.name.starts_with("nbd-export")
        })
        .map(|step| {
            let (before, task) = story(step.name);
            (step.name, before, task)
        })
        .collect();
    stories.extend(
        STEPS
            .iter()
            .filter(|step| step.name.starts_with("vbd-plug"))
            .map(|step| (step.name, "vm-start", "vbd-plug")),
    );
    // In the suspend and the resume that are one operation.
    let of_both = [
        "vm-suspend:saved",
        "vm-suspend:recorded",
        "vm-resume:noted",
        "vm-resume:loaded",
        "vm-resume:running",
    ];
    stories.extend(of_both.map(|step| (step, "vm-start", "vm-renew")));
    for_each(stories, |(step, before, task)| killed_at(step, before, task));
}

/// Tells a few stories at a time: the host has few processors, but a child waits for disks most of the time.
pub fn for_each<T: Send>(stories: Vec<T>, tell: impl Fn(T) + Sync) {
    let stories = Mutex::new(stories);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let Some(story) = stories.lock().expect("no panic").pop() else { return };
                    tell(story);
                }
            });
        }
    });
}

/// The daemon dies in a snapshot of a plugged disk, and with `process` the disk process dies with it.
fn killed_in_a_snapshot(step: &'static str, process: bool) {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dir = scratch.path();
    assert_eq!(run(dir, "vm-start", None), 0, "{}", log(dir));
    // The log of changed blocks is switched in a snapshot of a disk that has one.
    let is_tracked = step.starts_with("fork:log");
    if is_tracked {
        assert_eq!(run(dir, "vdi-enable-cbt", None), 0, "{}", log(dir));
    }
    let status = run(dir, "vdi-snapshot", Some(step));
    assert_eq!(status, 137, "a snapshot does not come to {step}: {}", log(dir));
    if process {
        let backend = Rig::backend(dir, disk_program());
        for (process, _) in backend.ours() {
            backend.end(process, None, true, Instant::now() + Duration::from_secs(20)).expect("it ends");
        }
    }
    let rig = Rig::again(dir);
    rig.check_real();
    let is_as_it_was = || {
        for note in rig.stack.disks.all() {
            assert!(rig.stack.disks.serves(note.spec.vbd), "{step} {process}: {note:?}");
        }
        assert_eq!(rig.stack.disks.all().len(), 2, "{step} {process}: a guest has lost its disk");
        let vbd = rig.get("VBD", &first_vbd(&rig));
        assert!(vbd.bool("currently_attached"), "{step} {process}");
        assert_eq!(rig.get("VDI", vbd.text("VDI")).bool("cbt_enabled"), is_tracked, "{step} {process}");
    };
    is_as_it_was();
    perform(&rig, "vdi-snapshot");
    is_as_it_was();
    perform(&rig, "vm-shutdown");
    rig.check_real();
}

#[test]
fn a_disk_is_plugged_after_a_snapshot_that_was_interrupted() {
    let steps = tapio_sm::STEPS.iter().map(|(step, _)| *step);
    // No disk process of today is paused; sm's own stories have those of before.
    let of_forks =
        steps.filter(|step| step.starts_with("fork:") && !["fork:empty", "fork:paused"].contains(step));
    let stories = of_forks.chain(OF_SWAPS).flat_map(|step| [(step, false), (step, true)]).collect();
    for_each(stories, |(step, process)| killed_in_a_snapshot(step, process));
}

/// The daemon dies in a collection of chains below plugged disks, and with `process` the disk processes die with it.
fn killed_in_a_collection(step: &'static str, process: bool) {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dir = scratch.path();
    for task in ["make-chains", "vm-start"] {
        assert_eq!(run(dir, task, None), 0, "{task}: {}", log(dir));
    }
    let status = run(dir, "collect", Some(step));
    assert_eq!(status, 137, "a collection does not come to {step}: {}", log(dir));
    if process {
        let backend = Rig::backend(dir, disk_program());
        for (process, _) in backend.ours() {
            backend.end(process, None, true, Instant::now() + Duration::from_secs(20)).expect("it ends");
        }
    }
    let rig = Rig::again(dir);
    let is_served = || {
        rig.check_real();
        assert_eq!(rig.stack.disks.all().len(), 2, "{step} {process}: a guest has lost its disk");
    };
    is_served();
    perform(&rig, "collect");
    is_served();
    let left = perform(&rig, "collect");
    assert!(left.as_set().is_some_and(<[Value]>::is_empty), "{step} {process}: {left:?}");
    perform(&rig, "vm-shutdown");
    rig.check_real();
    let mut vbds = rig.stack.db.find("VBD", "VM", &vm(&rig));
    vbds.sort_by_key(|vbd| vbd.text("userdevice").to_owned());
    let holds = |disk: usize, at: u64| {
        let mut sector = [0; 512];
        let chain = Chain::open(&rig.file(vbds[disk].text("VDI"))).expect("its chain");
        chain.read_at(at, &mut sector).expect("in it");
        (sector[0], chain.layers().len())
    };
    let first = [0, 512, 256 << 20].map(|at| holds(0, at));
    assert_eq!(
        first,
        [(b'a', 2), (b'b', 2), (b'c', 2)],
        "{step} {process}: one base copy is left, for the snapshot"
    );
    assert_eq!([0, 512].map(|at| holds(1, at)), [(b'd', 1), (b'e', 1)], "{step} {process}: it stands alone");
}

#[test]
fn disks_are_plugged_after_a_collection_that_was_interrupted() {
    let of_driver = tapio_sm::STEPS.iter().map(|(step, _)| *step);
    let of_driver =
        of_driver.filter(|step| ["merge:", "relink:", "leaf:"].iter().any(|kind| step.starts_with(kind)));
    let own = ["gc:grown", "gc:copied", "gc:relinked", "gc:leaf-merged"];
    let stories =
        of_driver.chain(own).chain(OF_DISKS).flat_map(|step| [(step, false), (step, true)]).collect();
    for_each(stories, |(step, process)| killed_in_a_collection(step, process));
}

/// The daemon dies while it moves a plugged disk, and with `process` the disk process dies with it.
fn killed_in_a_move(step: &'static str, process: bool) {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dir = scratch.path();
    for task in ["make-snapshot", "vm-start"] {
        assert_eq!(run(dir, task, None), 0, "{task}: {}", log(dir));
    }
    let status = run(dir, "vdi-move", Some(step));
    assert_eq!(status, 137, "a move does not come to {step}: {}", log(dir));
    if process {
        let backend = Rig::backend(dir, disk_program());
        for (process, _) in backend.ours() {
            backend.end(process, None, true, Instant::now() + Duration::from_secs(20)).expect("it ends");
        }
    }
    let rig = Rig::again(dir);
    let place = |rig: &Rig| {
        let vdi = rig.get("VDI", rig.get("VBD", &first_vbd(rig)).text("VDI"));
        let pbd = &rig.stack.db.find("PBD", "SR", vdi.text("SR"))[0];
        let name = if pbd.map("device_config")["location"].ends_with("to") { "to" } else { "sr" };
        (vdi, name)
    };
    let is_served = || {
        rig.check_real();
        assert_eq!(rig.stack.disks.all().len(), 2, "{step} {process}: a guest has lost its disk");
        let (vdi, name) = place(&rig);
        let snapshots = rig.stack.db.find("VDI", "snapshot_of", &vdi.reference);
        assert_eq!(snapshots.len(), 1, "{step} {process}: its snapshot");
        let left = rig.stack.db.notes("storage/move");
        assert!(left.is_empty(), "{step} {process}: {left:?}");
        for dir in ["sr", "to"] {
            let images = std::fs::read_dir(rig.dir.join(dir)).expect("the SR's directory").flatten();
            let kinds = images.filter(|image| image.path().extension().is_some_and(|kind| kind == "vhd"));
            let sr = rig.stack.db.all("PBD").into_iter();
            let mut sr =
                sr.filter(|pbd| pbd.map("device_config").get("location").is_some_and(|at| at.ends_with(dir)));
            let records = rig.stack.db.find("VDI", "SR", sr.next().expect("its PBD").text("SR")).len();
            assert_eq!(kinds.count(), records, "{step} {process}: images in {dir}, and records");
        }
        name
    };
    let name = is_served();
    let is_switched = step == "disk:moved" || step == "disk:pivoted" || step.starts_with("vdi-move:switched");
    assert_eq!(name == "to", is_switched, "{step} {process}: where it is");
    if !is_switched {
        perform(&rig, "vdi-move");
    }
    assert_eq!(is_served(), "to", "{step} {process}");
    perform(&rig, "vm-shutdown");
    rig.check_real();
    let (vdi, name) = place(&rig);
    let snapshot = &rig.stack.db.find("VDI", "snapshot_of", &vdi.reference)[0];
    let holds = |vdi: &str, at: u64| {
        let file = rig.dir.join(name).join(format!("{}.vhd", rig.get("VDI", vdi).text("uuid")));
        let mut sector = [0; 512];
        Chain::open(&file).and_then(|chain| chain.read_at(at, &mut sector)).expect("in it");
        sector[0]
    };
    assert_eq!([0, 4096].map(|at| holds(&vdi.reference, at)), *b"ab", "{step} {process}");
    assert_eq!([0, 4096].map(|at| holds(&snapshot.reference, at)), [b'a', 0], "{step} {process}");
}

#[test]
fn a_disk_is_at_one_place_after_a_move_that_was_interrupted() {
    let own = ["vdi-move:noted", "vdi-move:copied", "vdi-move:switched"];
    let stories = own.into_iter().chain(OF_MOVES).flat_map(|step| [(step, false), (step, true)]).collect();
    for_each(stories, |(step, process)| killed_in_a_move(step, process));
}

/// The daemon dies on the way of an export; nothing of it is left.
fn killed_in_an_export(step: &'static str) {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dir = scratch.path();
    assert_eq!(run(dir, "prepare", None), 0, "{}", log(dir));
    let status = run(dir, "nbd-export", Some(step));
    assert_eq!(status, 137, "an export does not come to {step}: {}", log(dir));
    let rig = Rig::again(dir);
    rig.check_real();
    assert!(rig.stack.disks.all().is_empty(), "{step}: an export is left");
    // All goes on from here.
    perform(&rig, "nbd-export");
    rig.check_real();
}

#[test]
fn exports_that_were_interrupted_leave_nothing() {
    let of_exports = STEPS.iter().map(|step| step.name).filter(|step| step.starts_with("nbd-export"));
    for_each(of_exports.chain(["vbd-plug:started", "vbd-plug:opened"]).collect(), killed_in_an_export);
}

#[test]
fn an_export_goes_on_after_a_kill_of_its_process_and_of_the_daemon() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let rig = Rig::again(scratch.path());
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    rig.make_vbd(&vm, &rig.make_vdi(&sr, 4 * MIB));
    perform(&rig, "nbd-export");
    let vdi = rig.get("VBD", &first_vbd(&rig)).text("VDI").to_owned();
    let port = |rig: &Rig| {
        let places = rig.call("VDI.get_nbd_info", vec![vdi.as_str().into()]);
        let place = places.as_set().expect("places")[0].as_map().expect("a record").clone();
        u16::try_from(place["port"].as_int().expect("a number")).expect("a port")
    };
    let before = port(&rig);
    let client = std::net::TcpStream::connect(("127.0.0.1", before)).expect("it is served");
    let process = rig.stack.disks.all()[0].process.expect("a process");
    crate::real::signal(process.pid, tapio_sys::process::Signal::KILL);
    let until = Instant::now() + Duration::from_secs(60);
    while rig.stack.disks.all().first().is_none_or(|note| note.process.is_none_or(|now| now == process)) {
        assert!(Instant::now() < until, "no other process takes its place");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(port(&rig), before, "clients find it where it was");
    drop(client);
    let process = rig.stack.disks.all()[0].process;
    drop(rig);
    let rig = Rig::again(scratch.path());
    let found = rig.stack.disks.all().first().and_then(|note| note.process);
    assert!(found.is_none() || found == process, "the next daemon has found it, or ended it already");
    // It has no session and no client.
    while !rig.stack.disks.all().is_empty() {
        assert!(Instant::now() < until, "an export without a valid name stays");
        std::thread::sleep(Duration::from_millis(20));
    }
    rig.check_real();
}
