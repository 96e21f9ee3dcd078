//! Real disk processes on real files.

use std::fs;
use std::time::{Duration, Instant};

use tapio_control::{Command, LimitsReport, OwnClient, RunDir};
use tapio_model::Value;

use crate::rig::{MIB, Rig};

fn wait(what: &str, is_there: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !is_there() {
        assert!(Instant::now() < until, "{what} does not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_disk_is_plugged_limited_restarted_and_adopted() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let rig = Rig::again(scratch.path());
    let sr = rig.make_sr();
    let vm = rig.make_vm(&[("sim-front", "vhost-user")]);
    let vbd = rig.make_vbd(&vm, &rig.make_vdi(&sr, 8 * MIB));
    let reader =
        rig.text("VBD.create", vec![Rig::vbd_record(&vm, &rig.make_vdi(&sr, MIB), &[("mode", "RO".into())])]);
    rig.call("VBD.set_qos_algorithm_type", vec![vbd.as_str().into(), "token-bucket".into()]);
    rig.call("VBD.add_to_qos_algorithm_params", vec![vbd.as_str().into(), "read_iops".into(), "700".into()]);
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    rig.check_real();
    let uuid = rig.get("VBD", &vbd).uuid().expect("a uuid");
    let note = rig.stack.disks.of_vbd(uuid).expect("a disk");
    assert_eq!(note.size, 8 << 20);
    let limits = |pid: i32, minor: u16| {
        let mut client =
            OwnClient::connect(&RunDir::new(scratch.path().join("ctl")), pid).expect("it listens");
        let asked =
            client.call::<LimitsReport>(&Command::Limits { minor }, &[], Some(Duration::from_secs(5)));
        asked.expect("an answer")
    };
    let process = note.process.expect("a process");
    let minor = note.minor.expect("a minor");
    let report = limits(process.pid, minor);
    assert_eq!(report.limits.read_iops, 700);
    assert_eq!(report.pool.expect("a pool").name, note.sr.to_string());
    rig.call(
        "VBD.set_qos_algorithm_params",
        vec![vbd.as_str().into(), Value::string_map([("write_bps", "5MiB")])],
    );
    assert_eq!(limits(process.pid, minor).limits.write_bps, 5 << 20, "while it runs");

    // Killed: another process takes its place.
    // SAFETY: the number is that of a process that this test started and that has not ended.
    unsafe { libc::kill(process.pid, libc::SIGKILL) };
    wait("another process", || {
        rig.stack.disks.of_vbd(uuid).is_some_and(|now| {
            now.phase == tapio_core::disks::Phase::Running && now.process.is_some_and(|now| now != process)
        })
    });
    wait("the word of it", || !rig.stack.db.find("message", "name", "VBD_DISK_PROCESS_RESTARTED").is_empty());
    rig.check_real();

    // The daemon goes and another comes; nobody touches the disks.
    let before = rig.stack.disks.all();
    drop(rig);
    let rig = Rig::again(scratch.path());
    assert_eq!(rig.stack.disks.all(), before);
    assert_eq!(rig.get("VM", &vm).text("power_state"), "Running");
    assert!(rig.get("VBD", &reader).bool("currently_attached"));
    rig.check_real();

    // A snapshot under its feet.
    let snapshot = rig.text("VM.snapshot", vec![vm.as_str().into(), "kept".into()]);
    let kept = rig.stack.db.find("VBD", "VM", &snapshot);
    assert_eq!(kept.len(), 2);
    let chain = rig.stack.disks.of_vbd(uuid).expect("a disk").chain.expect("open");
    assert_eq!(chain.layers.len(), 2, "{chain:?}");
    rig.check_real();
    rig.call("VM.clean_shutdown", vec![vm.into()]);
    assert_eq!(fs::read_dir(scratch.path().join("ctl/tapdisk")).expect("the markers").count(), 0);
    rig.check_real();
}

#[test]
fn a_damaged_image_is_an_error_with_a_cause_and_leaves_nothing() {
    let rig = Rig::real();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[]));
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let path = rig.dir.join("sr").join(format!("{}.vhd", rig.get("VDI", &vdi).text("uuid")));
    assert!(path.exists(), "{path:?}");
    fs::write(&path, vec![7; 1 << 16]).expect("damaged");
    rig.make_vbd(&vm, &vdi);
    let error = rig.refused("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    assert!(error.code.starts_with("SR_BACKEND_FAILURE_"), "{error}");
    assert!(error.to_string().contains(".vhd"), "{error}");
    assert_eq!(rig.get("VM", &vm).text("power_state"), "Halted");
    rig.check_real();
}
