//! A storage repository whose storage hangs: its file system waits in the kernel, where no signal reaches. The daemon,
//! its other SRs and its end must not.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tapio_e2e::disk::text;
use tapio_e2e::faulty::Faulty;
use tapio_e2e::needs;
use tapio_e2e::process::{poll_until, run, signal};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::{our, skip};
use tapio_e2e::toolstack::{Daemon, DaemonOptions, Session};

use super::MIB;

/// What anything that must not wait for the storage may take on a busy host.
const LIMIT: Duration = Duration::from_secs(60);

/// A file system on a device that hangs when it is told to.
struct Hanging {
    faulty: Faulty,
    device: PathBuf,
    dir: PathBuf,
}

impl Hanging {
    fn make(scratch: &Scratch) -> Result<Self, String> {
        let mut faulty = Faulty::start(scratch, 256 * MIB, &[])?;
        let device = faulty.device()?;
        run(Command::new("mkfs.ext4").args(["-q", "-E", "nodiscard"]).arg(&device)).ok();
        let dir = scratch.join("hanging");
        std::fs::create_dir(&dir).expect("a mount point");
        let mounted = run(Command::new("mount").arg(&device).arg(&dir));
        if !mounted.status.success() {
            return Err(format!("needs mounts: {}", mounted.stderr.trim()));
        }
        std::fs::create_dir(dir.join("sr")).expect("a directory for the SR");
        Ok(Self { faulty, device, dir })
    }

    fn sr(&self) -> PathBuf {
        self.dir.join("sr")
    }

    /// Mounts it anew, so that nothing of it is in memory.
    fn forget_cached(&self) {
        let unmounted = || run(Command::new("umount").arg(&self.dir)).status.success().then_some(());
        until("the end of what uses it", LIMIT, unmounted);
        run(Command::new("mount").arg(&self.device).arg(&self.dir)).ok();
    }

    fn hang(&self, on: bool) {
        self.faulty.hang(on);
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.faulty.hang(false);
        run(Command::new("umount").arg("-l").arg(&self.dir));
    }
}

macro_rules! hanging {
    ($scratch:expr) => {{
        needs!("mkfs.ext4", "mount");
        match Hanging::make($scratch) {
            Ok(hanging) => hanging,
            Err(why) => return skip(&why),
        }
    }};
}

fn make_sr(session: &Session, path: &Path) -> String {
    let host = session.call("host.get_all", &[])[0].clone();
    let config = json!({"location": text(path)});
    let names = [json!("hanging"), json!(""), json!("file"), json!("user"), json!(false), json!({})];
    session.text("SR.create", &[&[host, config, json!(0)][..], &names].concat())
}

fn new_vdi(sr: &str) -> Value {
    json!({
        "SR": sr, "virtual_size": 8 * MIB, "name_label": "disk", "type": "user", "sharable": false,
        "read_only": false, "other_config": {},
    })
}

pub(super) fn make_vdi(session: &Session, sr: &str) -> String {
    session.text("VDI.create", &[new_vdi(sr)])
}

pub(super) fn default_sr(session: &Session) -> String {
    let pool = session.call("pool.get_all", &[])[0].clone();
    session.text("pool.get_default_SR", &[pool])
}

fn is_attached(session: &Session, sr: &str) -> bool {
    let pbds = session.call("SR.get_PBDs", &[json!(sr)]);
    session.call("PBD.get_currently_attached", &[pbds[0].clone()]) == json!(true)
}

#[track_caller]
fn until<T>(what: &str, limit: Duration, ready: impl FnMut() -> Option<T>) -> T {
    poll_until(limit, ready).unwrap_or_else(|| panic!("{what} did not come within {limit:?}"))
}

/// An end that must come although storage hangs: it cannot wait for what the kernel holds.
pub(super) fn stop(mut daemon: Daemon) {
    daemon.process.stop(LIMIT);
}

#[test]
fn one_hung_sr_takes_neither_the_others_nor_the_daemon() {
    let scratch = Scratch::on_disk();
    let hanging = hanging!(&scratch);
    let options = DaemonOptions::new(&scratch).default_sr().arg("--set").arg("storage-timeout=10");
    let daemon = options.start();
    let session = daemon.login();
    let (good, bad) = (default_sr(&session), make_sr(&session, &hanging.sr()));
    let kept = make_vdi(&session, &bad);
    hanging.hang(true);

    // What needs the storage fails with a sentence; the rest goes on.
    let began = Instant::now();
    let failed = session.fails("VDI.create", &[new_vdi(&bad)]);
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
    let uuid = session.text("SR.get_uuid", &[json!(bad)]);
    assert!(
        failed.iter().any(|word| word.contains(&uuid) && word.contains("its storage hangs")),
        "{failed:?}"
    );
    let failed = session.fails("VDI.create", &[new_vdi(&bad)]);
    assert!(failed.iter().any(|word| word.contains(&uuid)), "{failed:?}");
    let other = make_vdi(&session, &good);
    session.call("SR.scan", &[json!(good)]);
    session.call("VDI.destroy", &[json!(other)]);
    until("a message that says so", LIMIT, || {
        let all = session.call("message.get_all_records", &[]);
        let told = all.as_object()?.values().any(|message| message["name"] == json!("SR_NOT_ANSWERING"));
        told.then_some(())
    });

    // It ends although operations hang, and its successor serves although the SR still does.
    session.call("Async.SR.scan", &[json!(bad)]);
    stop(daemon);
    let daemon = options.start();
    let session = daemon.login();
    assert!(is_attached(&session, &good) && !is_attached(&session, &bad));
    assert_eq!(session.text("VDI.get_name_label", &[json!(kept)]), "disk");
    make_vdi(&session, &good);
    let failed = session.fails("VDI.create", &[new_vdi(&bad)]);
    assert!(["SR_NOT_ATTACHED", "OTHER_OPERATION_IN_PROGRESS"].contains(&failed[0].as_str()), "{failed:?}");

    // The storage is back, and with it the SR.
    hanging.hang(false);
    until("the SR", LIMIT * 2, || is_attached(&session, &bad).then_some(()));
    session.call("SR.scan", &[json!(bad)]);
    session.call("VDI.destroy", &[json!(kept)]);
    make_vdi(&session, &bad);
    // Nothing is left of the two that failed.
    session.call("SR.scan", &[json!(bad)]);
    let left = session.call("SR.get_VDIs", &[json!(bad)]);
    assert_eq!(left.as_array().map(Vec::len), Some(1), "{left}");
    let pbd = session.call("SR.get_PBDs", &[json!(bad)])[0].clone();
    session.call("PBD.unplug", &[pbd]);
    stop(daemon);
}

#[test]
fn an_sr_that_hung_goes_on_without_a_restart() {
    let scratch = Scratch::on_disk();
    let hanging = hanging!(&scratch);
    let options = DaemonOptions::new(&scratch).default_sr().arg("--set").arg("storage-timeout=10");
    let daemon = options.start();
    let session = daemon.login();
    let bad = make_sr(&session, &hanging.sr());
    let kept = make_vdi(&session, &bad);
    hanging.hang(true);
    session.fails("VDI.snapshot", &[json!(kept), json!({})]);
    hanging.hang(false);
    until("a message that it answers again", LIMIT * 2, || {
        let all = session.call("message.get_all_records", &[]);
        let told = all.as_object()?.values().any(|message| message["name"] == json!("SR_ANSWERS_AGAIN"));
        told.then_some(())
    });
    session.call("SR.scan", &[json!(bad)]);
    session.call("VDI.snapshot", &[json!(kept), json!({})]);
    stop(daemon);
}

#[test]
fn a_worker_that_dies_in_the_middle_is_an_error_and_the_next_puts_things_in_order() {
    let scratch = Scratch::on_disk();
    let options = DaemonOptions::new(&scratch).default_sr().env("TAPIO_DIE_AT", "fork:leaf-made");
    let daemon = options.start();
    let session = daemon.login();
    let sr = default_sr(&session);
    let vdi = make_vdi(&session, &sr);
    let failed = session.fails("VDI.clone", &[json!(vdi), json!({})]);
    assert!(failed.iter().any(|word| word.contains("ended after")), "{failed:?}");
    // The next process of the SR undoes the half of the clone when it attaches the SR.
    session.call("SR.scan", &[json!(sr)]);
    let there = session.call("SR.get_VDIs", &[json!(sr)]);
    assert_eq!(there, json!([vdi]));
    let files: Vec<_> = std::fs::read_dir(scratch.join("sr"))
        .expect("the SR")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
        .filter(|name| name.starts_with("clone_") || name.contains("partial"))
        .collect();
    assert!(files.is_empty(), "{files:?}");
    stop(daemon);
}

#[test]
fn workers_end_with_their_daemon() {
    let scratch = Scratch::on_disk();
    let options = DaemonOptions::new(&scratch).default_sr();
    let mut daemon = options.start();
    let mark = scratch.join("mnt");
    let workers = || {
        let out = run(Command::new("pgrep").args(["-f", &format!("storage-worker {}", text(&mark))]));
        out.stdout.split_whitespace().count()
    };
    make_vdi(&daemon.login(), &default_sr(&daemon.login()));
    assert_eq!(workers(), 1, "one for the SR");
    daemon.process.kill();
    until("the end of its worker", LIMIT, || (workers() == 0).then_some(()));
    let daemon = options.start();
    make_vdi(&daemon.login(), &default_sr(&daemon.login()));
    stop(daemon);
}

/// A running VM of the simulator with one disk.
pub(super) fn vm_on(session: &Session, vdi: &str) -> (String, String) {
    let (vm, vbd) = halted_vm_on(session, vdi);
    session.call("VM.start", &[json!(vm), json!(false), json!(false)]);
    (vm, vbd)
}

/// The same, which does not run.
pub(super) fn halted_vm_on(session: &Session, vdi: &str) -> (String, String) {
    let vm = session.text(
        "VM.create",
        &[json!({
            "name_label": "vm", "name_description": "", "user_version": 1, "is_a_template": false,
            "affinity": "OpaqueRef:NULL", "memory_static_max": 64 * MIB, "memory_dynamic_max": 64 * MIB,
            "memory_dynamic_min": 64 * MIB, "memory_static_min": 64 * MIB, "VCPUs_params": {},
            "VCPUs_max": 1, "VCPUs_at_startup": 1, "actions_after_shutdown": "destroy",
            "actions_after_reboot": "restart", "actions_after_crash": "destroy", "PV_bootloader": "",
            "PV_kernel": "", "PV_ramdisk": "", "PV_args": "", "PV_bootloader_args": "", "PV_legacy_args": "",
            "HVM_boot_policy": "", "HVM_boot_params": {}, "platform": {"driver": "sim"}, "PCI_bus": "",
            "other_config": {"driver": "sim"}, "recommendations": "",
        })],
    );
    let vbd = session.text(
        "VBD.create",
        &[json!({
            "VM": vm, "VDI": vdi, "userdevice": "0", "bootable": false, "mode": "RW", "type": "Disk",
            "unpluggable": true, "empty": false, "other_config": {}, "qos_algorithm_type": "",
            "qos_algorithm_params": {},
        })],
    );
    (vm, vbd)
}

#[test]
fn force_overrides_an_unplug_that_hangs() {
    let scratch = Scratch::on_disk();
    let hanging = hanging!(&scratch);
    let options = DaemonOptions::new(&scratch).default_sr().arg("--set").arg("storage-timeout=10");
    let daemon = options.start();
    let session = daemon.login();
    let bad = make_sr(&session, &hanging.sr());
    let (first, second) = (make_vdi(&session, &bad), make_vdi(&session, &bad));
    let (one, vbd) = vm_on(&session, &first);
    let (two, other) = vm_on(&session, &second);
    hanging.hang(true);
    // Whether the disks have anything to write or not, closing them flushes.
    for vbd in [&vbd, &other] {
        session.call("Async.VBD.unplug", &[json!(vbd), json!(3600)]);
        until("the unplug", LIMIT, || {
            let running = session.call("VBD.get_current_operations", &[json!(vbd)]);
            running.as_object().is_some_and(|running| !running.is_empty()).then_some(())
        });
    }
    let began = Instant::now();
    session.call("VBD.unplug_force", &[json!(vbd)]);
    assert_eq!(session.call("VBD.get_currently_attached", &[json!(vbd)]), json!(false));
    session.call("VM.hard_shutdown", &[json!(two)]);
    assert_eq!(session.text("VM.get_power_state", &[json!(two)]), "Halted");
    assert_eq!(session.call("VBD.get_currently_attached", &[json!(other)]), json!(false));
    session.call("VM.hard_shutdown", &[json!(one)]);
    assert!(began.elapsed() < LIMIT * 3, "{:?}", began.elapsed());
    for object in [&vbd, &other] {
        until("the end of the unplug that was overridden", LIMIT, || {
            let running = session.call("VBD.get_current_operations", &[json!(object)]);
            (running == json!({})).then_some(())
        });
    }
    hanging.hang(false);
    // Both disks can be used again, as soon as the processes that the kernel held have ended.
    for vm in [&one, &two] {
        until("the VM", LIMIT * 2, || {
            session.try_call("VM.start", &[json!(vm), json!(false), json!(false)]).ok()
        });
    }
    for vbd in [&vbd, &other] {
        assert_eq!(session.call("VBD.get_currently_attached", &[json!(vbd)]), json!(true));
    }
    // What hung has ended meanwhile, and changed nothing.
    for (vm, vbd) in [(&one, &vbd), (&two, &other)] {
        session.call("VBD.unplug", &[json!(vbd), json!(0)]);
        session.call("VM.hard_shutdown", &[json!(vm)]);
    }
    stop(daemon);
}

/// Sends a call whose daemon dies over it: no answer comes.
pub(super) fn ask_without_answer(daemon: &mut Daemon, session: &Session, method: &str, params: &[Value]) {
    let mut all = vec![json!(session.reference)];
    all.extend_from_slice(params);
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": all}).to_string();
    let head = format!("POST /jsonrpc HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
    let mut stream = std::os::unix::net::UnixStream::connect(&daemon.socket).expect("connected");
    std::io::Write::write_all(&mut stream, format!("{head}{body}").as_bytes()).expect("sent");
    daemon.process.wait(LIMIT);
}

#[test]
fn an_sr_that_is_destroyed_goes_on_to_be_when_its_storage_answers() {
    let scratch = Scratch::on_disk();
    let hanging = hanging!(&scratch);
    let options = DaemonOptions::new(&scratch).default_sr().arg("--set").arg("storage-timeout=10");
    let mut daemon = options.clone().env("TAPIO_DIE_AT", "sr-destroy:noted").start();
    let session = daemon.login();
    let bad = make_sr(&session, &hanging.sr());
    ask_without_answer(&mut daemon, &session, "SR.destroy", &[json!(bad)]);
    // The next daemon serves, and concludes nothing from the storage's silence, however often it asks.
    hanging.forget_cached();
    hanging.hang(true);
    let daemon = options.start();
    let session = daemon.login();
    let tries = || daemon.process.log().matches("its storage hangs").count();
    until("two tries without an answer", LIMIT * 2, || (tries() >= 2).then_some(()));
    assert!(
        session.try_call("SR.get_uuid", &[json!(bad)]).is_ok(),
        "its record is gone, and its storage is not"
    );
    make_vdi(&session, &default_sr(&session));
    hanging.hang(false);
    until("the end of the SR", LIMIT * 2, || session.try_call("SR.get_uuid", &[json!(bad)]).err());
    assert!(!hanging.sr().join(".sr-uuid").exists(), "its storage is erased");
    make_sr(&session, &hanging.sr());
    stop(daemon);
}

#[test]
fn a_pbd_of_a_hung_sr_is_refused_in_time_and_the_sr_works_later() {
    let scratch = Scratch::on_disk();
    let hanging = hanging!(&scratch);
    let options = DaemonOptions::new(&scratch).default_sr().arg("--set").arg("storage-timeout=10");
    let daemon = options.start();
    let session = daemon.login();
    let bad = make_sr(&session, &hanging.sr());
    let kept = make_vdi(&session, &bad);
    let pbd = session.call("SR.get_PBDs", &[json!(bad)])[0].clone();
    hanging.hang(true);
    session.fails("VDI.create", &[new_vdi(&bad)]);
    let began = Instant::now();
    if let Err(failed) = session.try_call("PBD.unplug", std::slice::from_ref(&pbd)) {
        assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
        let uuid = session.text("SR.get_uuid", &[json!(bad)]);
        assert!(failed.iter().any(|word| word.contains(&uuid)), "{failed:?}");
        assert!(is_attached(&session, &bad), "it stays plugged");
        hanging.hang(false);
        until("the SR", LIMIT, || session.try_call("SR.scan", &[json!(bad)]).ok());
        assert_eq!(session.text("VDI.get_name_label", &[json!(kept)]), "disk");
        session.call("PBD.unplug", &[pbd]);
        hanging.hang(true);
    }
    // An SR that is not plugged can be forgotten, whatever its storage does.
    session.call("SR.forget", &[json!(bad)]);
    assert!(session.try_call("SR.get_uuid", &[json!(bad)]).is_err());
    hanging.hang(false);
    stop(daemon);
}

#[test]
fn a_disk_process_that_is_killed_again_and_again_takes_one_number() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let session = daemon.login();
    let vdi = make_vdi(&session, &default_sr(&session));
    let (vm, vbd) = vm_on(&session, &vdi);
    let process = || {
        let mut list = Command::new(our("tapio"));
        list.args(["tap-ctl", "list"]).env("TAPIO_RUN_DIR", scratch.join("run/disk"));
        let rows = run(&mut list).stdout;
        let row = rows.lines().find(|row| row.contains("args=vhd:"))?;
        row.split_whitespace().find_map(|word| word.strip_prefix("pid=")?.parse::<i32>().ok())
    };
    // The message is the last step: one that is killed before counts as a try of the replacement that is under way.
    let replaced = || {
        let messages = session.call("message.get_all_records", &[]);
        let messages = messages.as_object().expect("records").values();
        messages.filter(|message| message["name"] == "VBD_DISK_PROCESS_RESTARTED").count()
    };
    for round in 0..6 {
        let pid = until("its process", LIMIT, process);
        // The disk process of this test's daemon.
        signal(pid, libc::SIGKILL).unwrap_or_else(|error| panic!("round {round}: {error}"));
        until("another process", LIMIT, || (replaced() > round).then_some(()));
    }
    until("its VBD", LIMIT, || {
        (session.call("VBD.get_currently_attached", &[json!(vbd)]) == json!(true)).then_some(())
    });
    let numbers = std::fs::read_dir(scratch.join("run/disk/tapdisk")).expect("markers").count();
    assert!(numbers <= 2, "{numbers} numbers are taken for one disk");
    session.call("VM.hard_shutdown", &[json!(vm)]);
    stop(daemon);
}
