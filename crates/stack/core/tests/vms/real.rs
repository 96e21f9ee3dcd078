//! Real disk processes on real files.

use std::cell::Cell;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use tapio_control::{OwnClient, RunDir, command};
use tapio_fixtures::stopped::until_stopped;
use tapio_fixtures::waiting::Caller;
use tapio_load::Random;
use tapio_model::Value;
use tapio_sys::process::Signal;

use crate::rig::{MIB, Rig};

/// To a process of this test that has not ended; one that is stopped stands when this returns.
pub fn signal(pid: i32, signal: Signal) {
    tapio_sys::process::signal(pid.cast_unsigned(), signal).expect("it runs");
    if signal == Signal::STOP {
        until_stopped(pid.cast_unsigned());
    }
}

fn wait(what: &str, is_there: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_there() {
        assert!(Instant::now() < until, "{what} does not come");
        thread::sleep(Duration::from_millis(10));
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
        let asked = client.call(&command::Limits { minor }, &[], Some(Duration::from_secs(60)));
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
    signal(process.pid, Signal::KILL);
    wait("another process", || {
        rig.stack.disks.of_vbd(uuid).is_some_and(|now| {
            now.phase == tapio_core::disks::Phase::Running && now.process.is_some_and(|now| now != process)
        })
    });
    wait("the word of it", || !rig.stack.db.find("message", "name", "VBD_DISK_PROCESS_RESTARTED").is_empty());
    rig.check_real();

    // The daemon ends and another starts; neither touches the disks.
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
    let markers = fs::read_dir(rig.dir.join("ctl/tapdisk")).expect("the markers");
    assert_eq!(markers.count(), 0, "its number is free again");
    rig.check_real();
}

#[test]
fn readers_of_a_vdi_follow_a_snapshot_of_it() {
    let rig = Rig::real();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[("sim-front", "vhost-user")]));
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let read_only = || vec![Rig::vbd_record(&vm, &vdi, &[("mode", "RO".into())])];
    let readers: Vec<String> = (0..3).map(|_| rig.text("VBD.create", read_only())).collect();
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    let none = Value::string_map::<&str, &str>([]);
    rig.call("VDI.snapshot", vec![vdi.as_str().into(), none]);
    let chains: Vec<_> = readers
        .iter()
        .map(|vbd| rig.stack.disks.of_vbd(rig.get("VBD", vbd).uuid().expect("a uuid")).expect("a disk").chain)
        .collect();
    assert!(chains.iter().all(|chain| *chain == chains[0]), "{chains:?}");
    assert!(chains[0].as_ref().is_some_and(|chain| chain.layers.iter().all(|layer| layer.path.exists())));
    rig.check_real();
    rig.call("VM.hard_shutdown", vec![vm.into()]);
    rig.check_real();
}

#[test]
fn disk_processes_are_killed_at_any_time() {
    let seeds = std::env::var("TAPIO_SEED").ok().and_then(|seed| seed.parse().ok());
    let first: u64 = seeds.unwrap_or_else(|| u64::from(std::process::id()) | 1);
    println!("TAPIO_SEED={first}");
    let mut random = Random::new(first);
    let rig = Rig::real();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(&[("sim-front", "vhost-user")]));
    let vbds: Vec<String> = (0..3).map(|_| rig.make_vbd(&vm, &rig.make_vdi(&sr, 4 * MIB))).collect();
    let ours = || rig.processes().into_iter().map(|(process, _)| process.pid).collect::<Vec<_>>();
    for round in 0..12 {
        let (later, which) = (random.below(60), random.below(3) as usize);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(later));
                if let Some(pid) = ours().get(which) {
                    // If it has just ended, no other process has the number yet.
                    let _ = tapio_sys::process::signal(pid.cast_unsigned(), Signal::KILL);
                }
            });
            // Some of these fail, as they may: with an error, and leaving nothing.
            let _ = rig.try_call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
            let _ = rig.try_call("VBD.unplug", vec![vbds[0].as_str().into()]);
            let _ = rig.try_call("VBD.plug", vec![vbds[0].as_str().into()]);
        });
        // A process that died is replaced, or its VBD says that it is not plugged.
        wait("peace", || {
            let notes = rig.stack.disks.all();
            notes.iter().all(|note| rig.stack.disks.serves(note.spec.vbd)) && notes.len() == ours().len()
        });
        rig.check_real();
        let _ = rig.try_call("VM.hard_shutdown", vec![vm.as_str().into()]);
        assert_eq!(rig.get("VM", &vm).text("power_state"), "Halted", "round {round}");
        rig.check_real();
    }
}

/// What ended a disk process, a lack of memory for example, may end the one in its place before it serves.
#[test]
fn a_process_that_dies_while_it_takes_anothers_place_is_replaced_too() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let rig = Rig::with_started_by_script(scratch.path());
    let vm = rig.make_vm(&[("sim-front", "vhost-user")]);
    let vdi = rig.make_vdi(&rig.make_sr(), MIB);
    let vbd = rig.make_vbd(&vm, &vdi);
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    let uuid = rig.get("VBD", &vbd).uuid().expect("a uuid");
    // As many starts as `left` says do something else than starting.
    let killed = |left: u32, instead: &str| {
        let (count, before) = (scratch.path().join("left"), scratch.path().join("before.sh"));
        fs::write(&count, format!("{left}\n")).expect("a count");
        let script = format!(
            "left=$(cat {0})\necho $((left - 1)) >{0}\nif [ \"$left\" -gt 0 ]; then {instead}; fi\n",
            count.display()
        );
        fs::write(before, script).expect("a script");
        let process = rig.stack.disks.of_vbd(uuid).and_then(|note| note.process).expect("a process");
        signal(process.pid, Signal::KILL);
        process
    };
    let replaced = Cell::new(0);
    let is_replaced = |process| {
        // The message is the last step. A process that serves may not be offered yet, and its death then counts as one
        // of the tries of the replacement that is under way.
        replaced.set(replaced.get() + 1);
        wait("another process", || {
            rig.stack.db.find("message", "name", "VBD_DISK_PROCESS_RESTARTED").len() == replaced.get()
        });
        let now = rig.stack.disks.of_vbd(uuid).and_then(|note| note.process);
        assert!(now.is_some_and(|now| now != process) && rig.stack.disks.serves(uuid), "{now:?}");
        assert!(rig.get("VBD", &vbd).bool("currently_attached"));
        rig.check_real();
    };
    is_replaced(killed(2, "kill -9 $$"));
    // It starts where the daemon does not look for it, so it gets no number.
    let elsewhere = scratch.path().join("elsewhere");
    is_replaced(killed(2, &format!("export TAPIO_RUN_DIR={}", elsewhere.display())));
    // It starts, and its image is not there for a moment.
    let image =
        rig.stack.disks.of_vbd(uuid).and_then(|note| note.chain).expect("a chain").layers[0].path.clone();
    let away = image.with_extension("away");
    let (image, away) = (image.display(), away.display());
    is_replaced(killed(2, &format!("if [ $left = 2 ]; then mv {image} {away}; else mv {away} {image}; fi")));
    // Tries end.
    killed(1000, "kill -9 $$");
    wait("the end of tries", || !rig.stack.db.find("message", "name", "VBD_DISK_PROCESS_DIED").is_empty());
    assert!(!rig.get("VBD", &vbd).bool("currently_attached"));
    rig.check_real();
}

#[test]
fn a_process_that_dies_while_it_is_told_to_end_has_ended() {
    let rig = Rig::real();
    let vm = rig.make_vm(&[("sim-front", "vhost-user"), ("sim-pause-ms", "1000")]);
    let vbd = rig.make_vbd(&vm, &rig.make_vdi(&rig.make_sr(), MIB));
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    let uuid = rig.get("VBD", &vbd).uuid().expect("a uuid");
    rig.stack.disks.is_ending(uuid, Instant::now()).expect("a note");
    let (process, _) = rig.processes()[0];
    // It is connected to, and does not answer.
    signal(process.pid, Signal::STOP);
    let backend = rig.real_backend();
    let caller = Caller::default();
    let until = Instant::now() + Duration::from_secs(120);
    thread::scope(|scope| {
        let end = scope.spawn(|| caller.calls(|| backend.end(process, Some(0), false, until)));
        caller.until_it_waits();
        signal(process.pid, Signal::KILL);
        end.join().expect("no panic").expect("it has ended");
    });
    // The guest had let go: the disk is unplugged when its process is seen to have ended.
    rig.stack.disks.is_left(uuid);
    let is_unplugged = || {
        wait("the unplugged VBD", || {
            let vbd = rig.get("VBD", &vbd);
            !vbd.bool("currently_attached") && vbd.map("current_operations").is_empty()
        });
        rig.check_real();
    };
    is_unplugged();
    rig.call("VBD.plug", vec![vbd.as_str().into()]);
    rig.check_real();
    // The process ends while an operation holds the VM.
    rig.stack.disks.is_ending(uuid, Instant::now()).expect("a note");
    rig.stack.disks.is_left(uuid);
    let (process, _) = rig.processes()[0];
    thread::scope(|scope| {
        let pause = scope.spawn(|| rig.call("VM.pause", vec![vm.as_str().into()]));
        wait("the pause", || !rig.get("VM", &vm).map("current_operations").is_empty());
        signal(process.pid, Signal::KILL);
        pause.join().expect("paused");
    });
    is_unplugged();
    rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    rig.check_real();
}

/// The next process would open images that are being changed.
#[test]
fn a_process_that_dies_while_its_disk_is_paused_is_replaced_when_that_goes_on() {
    let rig = Rig::real();
    let vm = rig.make_vm(&[("sim-front", "vhost-user")]);
    let sr = rig.make_sr();
    let make_disk = || rig.get("VBD", &rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB))).uuid().expect("a uuid");
    let (paused, other) = (make_disk(), make_disk());
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    let note = rig.stack.disks.of_vbd(paused).expect("a note");
    let live = rig.stack.disks.live(note.vdi_uuid).expect("a running disk");
    live.pause().expect("paused");
    let kill = |vbd| {
        let process = rig.stack.disks.of_vbd(vbd).and_then(|note| note.process).expect("a process");
        signal(process.pid, Signal::KILL);
        wait("the end of the process", || !rig.real_backend().is_alive(process));
        process
    };
    // The message is the last step.
    let is_replaced = |vbd, died, messages| {
        wait("the message of another process", || {
            rig.stack.db.find("message", "name", "VBD_DISK_PROCESS_RESTARTED").len() == messages
        });
        let now = rig.stack.disks.of_vbd(vbd).and_then(|note| note.process);
        assert!(now.is_some_and(|now| now != died) && rig.stack.disks.serves(vbd), "{now:?}");
    };
    let died = kill(paused);
    let early = rig.stack.disks.restart(paused, Instant::now()).expect_err("its images change");
    assert!(early.params[0].contains("stays paused"), "{early}");
    // One that dies after it does not wait for it.
    is_replaced(other, kill(other), 1);
    assert!(
        rig.processes().iter().all(|(_, vbd)| *vbd == other),
        "it would have opened the images of before"
    );
    live.resume(&note.open_spec().expect("images")).expect("the next process goes on");
    is_replaced(paused, died, 2);
    rig.check_real();
    rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    rig.check_real();
}

/// Its client may look at the images, or change them.
#[test]
fn a_disk_that_a_client_paused_stays_so_until_it_is_told_to_go_on() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let rig = Rig::again(scratch.path());
    let vm = rig.make_vm(&[("sim-front", "vhost-user")]);
    let vbd = rig.make_vbd(&vm, &rig.make_vdi(&rig.make_sr(), MIB));
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    let uuid = rig.get("VBD", &vbd).uuid().expect("a uuid");
    let process = |rig: &Rig| rig.stack.disks.of_vbd(uuid).and_then(|note| note.process).expect("a process");
    rig.text("VBD.pause", vec![vbd.as_str().into()]);
    // A daemon that is started again leaves it, and knows it.
    let before = process(&rig);
    drop(rig);
    let rig = Rig::again(scratch.path());
    assert_eq!(process(&rig), before, "the process of a paused disk is left");
    let shown = rig.get("VBD", &vbd).map("runtime_properties");
    assert_eq!(shown.get("pause-token"), rig.stack.disks.pause_token(uuid).as_ref());
    rig.call("VBD.unpause", vec![vbd.as_str().into(), shown["pause-token"].as_str().into()]);
    assert_eq!(process(&rig), before);
    assert!(rig.stack.disks.serves(uuid));
    // One that dies while it is paused is replaced when it goes on.
    rig.text("VBD.pause", vec![vbd.as_str().into()]);
    signal(before.pid, Signal::KILL);
    wait("the end of the process", || !rig.real_backend().is_alive(before));
    assert!(rig.stack.disks.restart(uuid, Instant::now()).is_err());
    rig.call("VBD.unpause", vec![vbd.as_str().into(), "".into()]);
    wait("another process", || rig.stack.disks.serves(uuid));
    assert_ne!(process(&rig), before);
    wait("the message", || !rig.stack.db.find("message", "name", "VBD_DISK_PROCESS_RESTARTED").is_empty());
    rig.check_real();
    rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    rig.check_real();
}

/// Says why a test that lacks something is not run.
fn lacks(path: &str, test: &str) -> bool {
    let lacks = !std::path::Path::new(path).exists();
    if lacks {
        println!("skipped: needs {path} [{test}]");
    }
    lacks
}

#[test]
fn disks_of_the_host_are_devices_of_the_right_size() {
    if lacks("/dev/fuse", "disks_of_the_host_are_devices_of_the_right_size") {
        return;
    }
    let rig = Rig::real();
    let (sr, host) = (rig.make_sr(), rig.control_domain());
    let mut vbds = Vec::new();
    for bytes in [4 * MIB, 1024 * MIB] {
        let vdi = rig.make_vdi(&sr, bytes);
        let vbd = rig.make_vbd(&host, &vdi);
        rig.call("VBD.plug", vec![vbd.as_str().into()]);
        let device = rig.get("VBD", &vbd).text("device").to_owned();
        let sectors = fs::read_to_string(format!("/sys/block/{device}/size")).expect("a block device");
        let sectors: i64 = sectors.trim().parse().expect("a number");
        assert_eq!(sectors * 512, rig.get("VDI", &vdi).int("virtual_size"), "{device}");
        vbds.push((vbd, format!("/dev/{device}")));
    }
    rig.check_real();
    // A program uses one of them.
    let held = fs::OpenOptions::new();
    let mut held = held;
    let user = std::os::unix::fs::OpenOptionsExt::custom_flags(held.read(true).write(true), libc::O_EXCL)
        .open(&vbds[0].1)
        .expect("no other program has it open");
    std::io::Write::write_all(&mut &user, &[0x5a; 4096]).expect("written");
    user.sync_all().expect("flushed");
    let error = rig.refused("VBD.unplug", vec![vbds[0].0.as_str().into()]);
    assert_eq!((&*error.code, &*error.params[1]), ("DEVICE_DETACH_REJECTED", vbds[0].0.as_str()));
    rig.check_real();
    drop(user);
    for (vbd, _) in &vbds {
        rig.call("VBD.unplug", vec![vbd.as_str().into()]);
        assert_eq!(rig.get("VBD", vbd).text("device"), "");
        rig.call("VBD.destroy", vec![vbd.as_str().into()]);
    }
    rig.check_real();
}

#[test]
fn a_guest_of_user_mode_linux_starts_from_its_template_with_disks() {
    if lacks("/usr/bin/linux.uml", "a_guest_of_user_mode_linux_starts_from_its_template_with_disks") {
        return;
    }
    let rig = Rig::real();
    let sr = rig.make_sr();
    let template = rig.stack.db.find("VM", "name_label", "Tapio UML guest")[0].reference.clone();
    let vm = rig.text("VM.clone", vec![template.into(), "guest".into()]);
    let pool = rig.stack.db.all("pool")[0].reference.clone();
    rig.call("pool.set_default_SR", vec![pool.into(), Value::string(&sr)]);
    rig.call("VM.provision", vec![vm.as_str().into()]);
    (0..7).for_each(|_| drop(rig.make_vbd(&vm, &rig.make_vdi(&sr, 4 * MIB))));
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    rig.check_real();
    let console = rig.stack.db.find("console", "VM", &vm);
    let (uuid, location) = (console[0].text("uuid"), console[0].text("location"));
    assert!(
        location.starts_with("https://") && location.ends_with(&format!("/console?uuid={uuid}")),
        "{location}"
    );
    assert_eq!(console[0].text("protocol"), "vt100");
    // One more while it runs, and away again.
    let late = rig.make_vbd(&vm, &rig.make_vdi(&sr, 4 * MIB));
    rig.call("VBD.plug", vec![late.as_str().into()]);
    rig.check_real();
    rig.call("VBD.unplug", vec![late.as_str().into()]);
    rig.call("VM.pause", vec![vm.as_str().into()]);
    rig.call("VM.unpause", vec![vm.as_str().into()]);
    rig.call("VM.clean_reboot", vec![vm.as_str().into()]);
    rig.check_real();
    rig.call("VM.clean_shutdown", vec![vm.as_str().into()]);
    assert_eq!(rig.get("VM", &vm).text("power_state"), "Halted");
    rig.check_real();
}
