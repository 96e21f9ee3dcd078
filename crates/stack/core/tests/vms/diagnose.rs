//! Damage of every kind is made and found; a healthy host has none; repairs repair.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Deserialize;
use tapio_core::disks::{Backend, Rights};
use tapio_core::storage::diagnose::{limits, pool, sr, system};
use tapio_format::vhd::offline::{Image, OpenOptions, Shape, create, set_hidden, set_parent};
use tapio_model::Value;
use tapio_model::findings::FINDINGS;
use tapio_stat::pool::{PoolDisk, PoolInfo};
use tapio_types::Access;
use uuid::Uuid;

use crate::pretend::Pretend;
use crate::rig::{MIB, Rig};

#[derive(Debug, Deserialize)]
struct Found {
    kind: String,
    object: String,
    repair: Option<String>,
}

/// A host with an SR in which a disk has a chain of two base copies.
struct Host {
    rig: Rig,
    processes: Arc<Pretend>,
    sr: String,
    vdi: String,
    /// A process of another user.
    other: Mutex<Option<Child>>,
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut other) = self.other.lock().expect("no panic").take() {
            let _ = other.kill();
            let _ = other.wait();
        }
    }
}

fn set_config(rig: &Rig, sr: &str, pairs: &[(&str, &str)]) {
    let pairs = Value::string_map(pairs.iter().copied());
    rig.call("SR.set_other_config", vec![sr.into(), pairs]);
}

impl Host {
    fn new() -> Self {
        let processes = Arc::new(Pretend::default());
        let rig = Rig::with(Arc::clone(&processes) as Arc<dyn Backend>);
        let sr = rig.make_sr();
        set_config(&rig, &sr, &[("gc-quiet", "100000")]);
        let vdi = rig.make_vdi(&sr, 8 * MIB);
        let host = Self { rig, processes, sr, vdi, other: Mutex::default() };
        for at in 0..2 {
            let mut image = Image::open(&host.rig.file(&host.vdi), OpenOptions::WRITE).expect("its image");
            image.write_at(at * MIB as u64, &[7; 512]).and_then(|()| image.finish()).expect("room");
            drop(image);
            let none = Value::string_map::<&str, &str>([]);
            host.rig.text("VDI.snapshot", vec![host.vdi.as_str().into(), none]);
        }
        host
    }

    fn found(&self) -> Vec<Found> {
        let host = self.rig.stack.db.all("host")[0].reference.clone();
        let answer = self.rig.text("host.diagnose", vec![host.into()]);
        let found: Vec<Found> = serde_json::from_str(&answer).expect("findings");
        // Settings of the host that runs the test are its own affair.
        let own = ["cpu-", "disk-", "write-cache-", "log-", "sr-nearly-", "network-"];
        found.into_iter().filter(|one| !own.iter().any(|own| one.kind.starts_with(own))).collect()
    }

    /// All that a diagnosis looks at: records, and files of the SR with their contents.
    fn picture(&self) -> (Vec<String>, Vec<(PathBuf, Vec<u8>)>) {
        let classes = ["SR", "PBD", "VDI", "VBD", "VM"];
        let records = classes.iter().flat_map(|class| self.rig.stack.db.all(class));
        let mut records: Vec<String> = records.map(|record| format!("{record:?}")).collect();
        records.sort();
        let files =
            fs::read_dir(self.path("")).expect("the SR's directory").flatten().map(|entry| entry.path());
        // This host's beat goes on.
        let files = files.filter(|path| path.is_file() && !path.ends_with(".tapio-hosts"));
        let mut files: Vec<_> = files.map(|path| (path.clone(), fs::read(path).expect("a file"))).collect();
        files.sort();
        (records, files)
    }

    fn base(&self) -> PathBuf {
        let parent = self.rig.get("VDI", &self.vdi).text("parent").to_owned();
        self.rig.file(&parent)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.rig.dir.join("sr").join(name)
    }

    fn repair(&self, found: &[Found]) {
        let wanted: BTreeSet<&str> = found.iter().filter_map(|one| one.repair.as_deref()).collect();
        for message in wanted {
            match message {
                "SR.scan" => drop(self.rig.call(message, vec![self.sr.as_str().into()])),
                "SR.collect_garbage" => {
                    self.rig.call(message, vec![self.sr.as_str().into(), false.into()]);
                    let until = Instant::now() + Duration::from_secs(60);
                    while self.rig.stack.storage.is_collecting(&self.sr) {
                        assert!(Instant::now() < until, "the collection does not end");
                        std::thread::sleep(Duration::from_millis(2));
                    }
                }
                "host.end_stray_disk" => {
                    let host = self.rig.stack.db.all("host")[0].reference.clone();
                    for one in found.iter().filter(|one| one.repair.as_deref() == Some(message)) {
                        let pid: i64 = one.object.parse().expect("a number");
                        self.rig.call(message, vec![host.as_str().into(), pid.into()]);
                    }
                }
                "VDI.release" => {
                    for one in found.iter().filter(|one| one.repair.as_deref() == Some(message)) {
                        let vdi = self.rig.stack.db.by_uuid("VDI", &one.object).expect("a VDI");
                        self.rig.call(message, vec![vdi.reference.as_str().into()]);
                    }
                }
                other => panic!("{other} is done by nothing"),
            }
        }
    }
}

fn empty_image(path: &Path, hidden: bool) {
    create(path, &Shape::Dynamic, 8 * MIB as u64, 0).expect("an image");
    if hidden {
        let mut image = Image::open(path, OpenOptions::WRITE).expect("it is there");
        set_hidden(&mut image, 1).expect("room");
    }
}

type Damage = fn(&Host);

/// What makes a finding of the kind in an SR, or among disk processes.
const DAMAGE: &[(&str, Damage)] = &[
    ("vdi-without-image", |host| fs::remove_file(host.rig.file(&host.vdi)).expect("it is there")),
    ("image-without-vdi", |host| empty_image(&host.path(&format!("{}.vhd", Uuid::new_v4())), false)),
    ("vdi-differs", |host| {
        host.rig.stack.db.set("VDI", &host.vdi, "virtual_size", MIB).expect("it is there");
    }),
    ("parent-missing", |host| fs::remove_file(host.base()).expect("it is there")),
    ("parent-replaced", |host| {
        let base = host.base();
        fs::remove_file(&base).expect("it is there");
        empty_image(&base, true);
    }),
    ("parent-loop", |host| {
        let mut base = Image::open(&host.base(), OpenOptions::WRITE).expect("it is there");
        set_parent(&mut base, &host.rig.file(&host.vdi), false).expect("it takes any");
    }),
    ("image-damaged", |host| {
        // Two blocks at one place: the table alone is wrong, which a look at header and footer does not show.
        let file = fs::File::options().write(true).open(host.rig.file(&host.vdi)).expect("it is there");
        file.write_all_at(&[0, 0, 0, 8, 0, 0, 0, 8], 1536).expect("room");
    }),
    ("journal-left", |host| fs::write(host.path(&format!("clone_{}", Uuid::new_v4())), "cut").expect("room")),
    ("journal-foreign", |host| {
        let uuid = host.rig.get("VDI", &host.vdi).text("uuid").to_owned();
        fs::write(host.path(&format!("coalesce_{uuid}")), format!("{}\n", Uuid::new_v4())).expect("room");
    }),
    ("file-unfinished", |host| fs::write(host.path(".vhd-4194999-1.partial"), "half").expect("room")),
    ("base-unused", |host| empty_image(&host.path(&format!("{}.vhd", Uuid::new_v4())), true)),
    ("chain-stuck", |host| {
        for vdi in host.rig.stack.db.find("VDI", "SR", &host.sr) {
            if vdi.bool("is_a_snapshot") {
                host.rig.call("VDI.destroy", vec![vdi.reference.as_str().into()]);
            }
        }
        set_config(&host.rig, &host.sr, &[("gc-quiet", "100000"), ("coalesce", "false")]);
    }),
    ("sr-not-attached", |host| {
        let pbd = host.rig.stack.db.find("PBD", "SR", &host.sr)[0].reference.clone();
        host.rig.call("PBD.unplug", vec![pbd.into()]);
    }),
    ("queue-changed", |host| {
        // A host whose only file system is on a disk that is files.
        let root = host.path("../host");
        let scheduler = root.join("sys/devices/sdx/queue/scheduler");
        let (file, text) = (root.join("proc/self/mountinfo"), "1 2 8:0 / / rw - ext4 /dev/sdx rw\n");
        for directory in [scheduler.parent(), file.parent(), Some(&root.join("sys/dev/block"))] {
            fs::create_dir_all(directory.expect("a directory")).expect("room");
        }
        fs::create_dir_all(root.join("sys/class/block")).expect("room");
        fs::write(file, text).expect("room");
        fs::write(root.join("sys/devices/sdx/dev"), "8:0").expect("room");
        fs::write(&scheduler, "[mq-deadline] none bfq").expect("room");
        for name in ["sys/dev/block/8:0", "sys/class/block/sdx"] {
            symlink(root.join("sys/devices/sdx"), root.join(name)).expect("room");
        }
        host.rig.stack.storage.use_devices_below(&root);
        set_config(&host.rig, &host.sr, &[("gc-quiet", "100000"), ("scheduler", "noop")]);
        assert_eq!(fs::read_to_string(&scheduler).expect("it is there"), "none");
        let shown = host.rig.get("SR", &host.sr).map("sm_config");
        assert_eq!(shown.get("queue-sdx").map(String::as_str), Some("none"));
        fs::write(scheduler, "none [bfq]").expect("room");
    }),
    ("process-leaked", |host| {
        host.processes.start(Uuid::new_v4(), Rights::default(), Instant::now()).expect("it starts");
    }),
    ("lock-kept", |host| {
        // What took the lock has ended, and a child of it has inherited the descriptor.
        let directory = fs::File::open(host.rig.dir.join("sr")).expect("it is there");
        directory.try_lock().expect("no operation holds it");
        let child = Command::new("sleep").arg("600").stdin(Stdio::from(directory)).spawn();
        *host.other.lock().expect("no panic") = Some(child.expect("sleep"));
    }),
    ("host-silent", |host| {
        // A host that shares the SR had a VDI open when it was last seen.
        use tapio_sm::lease::layout::{AREA_LEN, Beat, Header, SECTOR, beat_at, encode_open, open_at};
        let uuid_of = |class: &str, reference: &str| -> Uuid {
            host.rig.get(class, reference).text("uuid").parse().expect("a UUID")
        };
        let beat =
            Beat { host: Uuid::new_v4(), generation: 1, counter: 7, has_left: false, name: "other".into() };
        let open = [(uuid_of("VDI", &host.vdi), Access::ReadWrite)].into();
        let header = Header { sr: uuid_of("SR", &host.sr), silence_ms: 8_000 };
        let area = fs::File::create_new(host.path(".tapio-hosts")).expect("it is new");
        area.set_len(AREA_LEN).expect("room");
        let put = |at: usize, sector: &[u8]| area.write_all_at(sector, (at * SECTOR) as u64).expect("room");
        put(0, &header.encode());
        put(beat_at(0), &beat.encode());
        put(open_at(0), &encode_open(1, &open)[0]);
        let pbd = host.rig.stack.db.find("PBD", "SR", &host.sr)[0].reference.clone();
        for message in ["PBD.unplug", "PBD.plug"] {
            host.rig.call(message, vec![pbd.as_str().into()]);
        }
        let until = Instant::now() + Duration::from_secs(120);
        while !host.found().iter().any(|one| one.kind == "host-silent") {
            assert!(Instant::now() < until, "it is never silent for long enough: {:?}", host.found());
            std::thread::sleep(Duration::from_millis(5));
        }
    }),
    ("vdi-held", |host| {
        let vm = host.rig.make_vm(&[]);
        let vbd = host.rig.make_vbd(&vm, &host.vdi);
        host.rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
        let uuid: Uuid = host.rig.get("VBD", &vbd).text("uuid").parse().expect("a UUID");
        host.rig.stack.disks.forget(uuid);
        host.rig.stack.db.set("VBD", &vbd, "currently_attached", false).expect("it is there");
    }),
    ("process-dead", |host| {
        // Nothing is known of the disk, and the record says that the guest has it.
        let vm = host.rig.make_vm(&[]);
        let vbd = host.rig.make_vbd(&vm, &host.vdi);
        host.rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
        let uuid: Uuid = host.rig.get("VBD", &vbd).text("uuid").parse().expect("a UUID");
        host.rig.stack.disks.forget(uuid);
    }),
    ("process-dead", |host| {
        let vm = host.rig.make_vm(&[]);
        let vbd = host.rig.make_vbd(&vm, &host.vdi);
        host.rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
        let uuid: Uuid = host.rig.get("VBD", &vbd).text("uuid").parse().expect("a UUID");
        let process = host.rig.stack.disks.of_vbd(uuid).expect("it has a disk").process.expect("it runs");
        host.processes.end(process, None, true, Instant::now()).expect("it ends");
    }),
];

/// A host's files below a directory, with these contents.
fn system_of(files: &[(&str, &str)]) -> Vec<String> {
    let root = tempfile::tempdir().expect("a scratch directory");
    let sr = root.path().join("sr");
    fs::create_dir_all(&sr).expect("room");
    let device = {
        use std::os::unix::fs::MetadataExt;
        let number = fs::metadata(&sr).expect("it is there").dev();
        format!("{}:{}", libc::major(number), libc::minor(number))
    };
    let disk = root.path().join("sys/devices/sdx");
    fs::create_dir_all(disk.join("queue")).expect("room");
    fs::create_dir_all(root.path().join("sys/dev/block")).expect("room");
    symlink(&disk, root.path().join("sys/dev/block").join(device)).expect("room");
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("room");
        fs::write(&path, text).expect("room");
    }
    let found = system::find(root.path(), &[(Uuid::nil(), sr)]);
    found.into_iter().map(|finding| finding.kind.to_owned()).collect()
}

/// An SR on a hard mount of an NFS server, an operation limit in seconds, and a disk process started so.
fn network(limit: u64, request_timeout: &str) -> Vec<String> {
    let root = tempfile::tempdir().expect("a scratch directory");
    let sr = fs::canonicalize(root.path()).expect("it is there").join("sr");
    fs::create_dir_all(&sr).expect("room");
    for process in ["self", "77"] {
        fs::create_dir_all(root.path().join("proc").join(process)).expect("room");
    }
    let mount = format!("40 36 0:51 / {} rw - nfs4 s:/x rw,hard,timeo=600\n", sr.display());
    fs::write(root.path().join("proc/self/mountinfo"), mount).expect("room");
    let image = format!("vhd:{}/a.vhd", sr.display());
    let line =
        ["/usr/bin/tapio-disk", "--image", &image, "--request-timeout", request_timeout, ""].join("\0");
    fs::write(root.path().join("proc/77/cmdline"), line).expect("room");
    let found = limits::find(root.path(), (Uuid::nil(), &sr), Some(Duration::from_secs(limit)));
    found.into_iter().map(|finding| finding.kind.to_owned()).collect()
}

const QUEUE: &str = "sys/devices/sdx/queue";
const CPU: &str = "sys/devices/system/cpu/cpu0";

/// Kinds of the host's settings, and the findings that damage makes.
fn of_system() -> Vec<(&'static str, Vec<String>)> {
    let queue = |name: &str| format!("{QUEUE}/{name}");
    let cpu = |name: &str| format!("{CPU}/{name}");
    let kinds = |found: Option<tapio_core::storage::diagnose::Finding>| {
        found.map(|found| found.kind.to_owned()).into_iter().collect()
    };
    let mounts = "36 35 0:50 / / rw - ext4 /dev/a rw\n40 36 0:51 / /srv rw - nfs4 s:/x rw,soft,timeo=600\n";
    let small = PoolInfo {
        name: "a".into(),
        pages: 704,
        used: 704,
        disks: vec![PoolDisk { pid: 1, minor: 0, held: 704, waits_for: 11 }],
    };
    vec![
        ("cpu-governor", system_of(&[(&cpu("cpufreq/scaling_governor"), "powersave\n")])),
        (
            "cpu-idle-deep",
            system_of(&[
                (&cpu("cpuidle/state3/latency"), "890\n"),
                (&cpu("cpuidle/state3/name"), "C10\n"),
                (&cpu("cpuidle/state3/disable"), "0\n"),
            ]),
        ),
        (
            "disk-scheduler",
            system_of(&[(&queue("rotational"), "0\n"), (&queue("scheduler"), "none [bfq]\n")]),
        ),
        ("disk-read-ahead", system_of(&[(&queue("read_ahead_kb"), "16384\n")])),
        (
            "write-cache-off",
            system_of(&[(&queue("rotational"), "1\n"), (&queue("write_cache"), "write through\n")]),
        ),
        ("network-soft", kinds(system::soft(mounts, Path::new("/srv/sr")))),
        ("network-no-limit", network(86_400, "30")),
        ("network-no-limit", network(180, "0")),
        ("log-full", kinds(system::log_full(Path::new("/var/log"), 1000, 10))),
        ("sr-nearly-full", kinds(sr::nearly_full(Uuid::nil(), 1000, 950))),
        ("pool-exhausted", kinds(pool::exhausted(&small, &[], 1 << 30))),
    ]
}

#[test]
fn every_kind_of_finding_has_damage_that_makes_it() {
    let mut tested: Vec<&str> = DAMAGE.iter().map(|(kind, _)| *kind).collect();
    tested.extend(of_system().iter().map(|(kind, _)| *kind));
    for kind in FINDINGS {
        assert!(tested.contains(&kind.id), "nothing makes a finding of the kind {}", kind.id);
    }
}

#[test]
fn settings_that_are_in_the_way_are_found() {
    for (kind, found) in of_system() {
        assert_eq!(found, [kind]);
    }
    let healthy = [
        (format!("{QUEUE}/rotational"), "0\n"),
        (format!("{QUEUE}/scheduler"), "[none] bfq\n"),
        (format!("{QUEUE}/read_ahead_kb"), "128\n"),
        (format!("{QUEUE}/write_cache"), "write through\n"),
        (format!("{CPU}/cpufreq/scaling_governor"), "performance\n"),
    ];
    let healthy: Vec<(&str, &str)> = healthy.iter().map(|(path, text)| (path.as_str(), *text)).collect();
    assert_eq!(system_of(&healthy), Vec::<String>::new());
    let mounts = "40 36 0:51 / /srv rw - nfs4 s:/x rw,hard,timeo=600\n";
    assert_eq!(system::soft(mounts, Path::new("/srv/sr")), None);
    assert_eq!(network(180, "30"), Vec::<String>::new());
}

#[test]
fn a_healthy_host_has_no_findings() {
    let host = Host::new();
    let vm = host.rig.make_vm(&[]);
    host.rig.make_vbd(&vm, &host.vdi);
    host.rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    let found = host.found();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn damage_is_found_and_safe_repairs_repair() {
    let mut wrong = Vec::new();
    for (kind, damage) in DAMAGE {
        let host = Host::new();
        damage(&host);
        let before = host.picture();
        let found = host.found();
        if host.picture() != before {
            wrong.push(format!("a diagnosis of {kind} changes something"));
        }
        if !found.iter().any(|one| one.kind == *kind) {
            wrong.push(format!("{kind} is not found: {found:?}"));
        }
        let row = FINDINGS.iter().find(|row| row.id == *kind).expect("a row");
        if row.repair.is_none() {
            continue;
        }
        // What a repair shows is repaired too.
        for _ in 0..3 {
            host.repair(&host.found());
        }
        let left = host.found();
        if !left.is_empty() {
            wrong.push(format!("{kind} is left: {left:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_vdi_that_a_disk_process_has_is_not_released() {
    let host = Host::new();
    let vm = host.rig.make_vm(&[]);
    host.rig.make_vbd(&vm, &host.vdi);
    host.rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    let refused = host.rig.refused("VDI.release", vec![host.vdi.as_str().into()]);
    assert_eq!(refused.code, "OPERATION_NOT_ALLOWED");
    let refused = host.rig.refused("VDI.destroy", vec![host.vdi.as_str().into()]);
    assert_eq!(refused.code, "VDI_IN_USE");
    let vbd = host.rig.stack.db.find("VBD", "VM", &vm)[0].text("uuid").to_owned();
    let code = |dp: &str, leak: bool| {
        host.rig.refused("host.sm_dp_destroy", datapath(&host.rig, dp, leak)).code.into_owned()
    };
    assert_eq!(code(&vbd, false), "VDI_IN_USE");
    assert_eq!(code(&vbd, true), "VALUE_NOT_SUPPORTED");
    for unknown in ["vbd/1/xvda", "", "00000000-0000-0000-0000-000000000000"] {
        assert_eq!(code(unknown, false), "INVALID_VALUE", "{unknown}");
    }
}

/// The parameters of `host.sm_dp_destroy`.
fn datapath(rig: &Rig, dp: &str, allow_leak: bool) -> Vec<Value> {
    let host = rig.stack.db.all("host")[0].reference.clone();
    vec![host.into(), dp.into(), allow_leak.into()]
}

#[test]
fn a_datapath_without_a_disk_process_is_ended() {
    let host = Host::new();
    let (_, damage) = DAMAGE.iter().find(|(kind, _)| *kind == "vdi-held").expect("a row");
    damage(&host);
    let (_, holder, _) = host.rig.stack.storage.holders()[0].clone();
    let dp = holder.rsplit([' ', ':']).next().expect("a UUID").to_owned();
    host.rig.call("host.sm_dp_destroy", datapath(&host.rig, &dp, false));
    assert!(host.rig.stack.storage.holders().is_empty());
    let again = host.rig.refused("host.sm_dp_destroy", datapath(&host.rig, &dp, false));
    assert_eq!(again.code, "INVALID_VALUE");
    host.rig.call("VDI.destroy", vec![host.vdi.as_str().into()]);
}

#[test]
fn a_vdi_that_was_released_can_be_used_and_destroyed() {
    let host = Host::new();
    let (_, damage) = DAMAGE.iter().find(|(kind, _)| *kind == "vdi-held").expect("a row");
    damage(&host);
    let destroy = || vec![host.vdi.as_str().into()];
    assert_eq!(host.rig.refused("VDI.destroy", destroy()).code, "VDI_IN_USE");
    host.repair(&host.found());
    assert!(host.rig.stack.storage.holders().is_empty());
    let sm_config = host.rig.get("VDI", &host.vdi).map("sm_config");
    assert!(!sm_config.keys().any(|key| key.starts_with("host_")), "{sm_config:?}");
    // The note is gone too: a start finds nothing to hold.
    assert!(host.rig.stack.db.notes("storage/holder").is_empty());
}

#[test]
fn a_process_that_a_vbd_has_is_not_ended_as_a_stray_one() {
    let host = Host::new();
    let vm = host.rig.make_vm(&[]);
    let vbd = host.rig.make_vbd(&vm, &host.vdi);
    host.rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    let uuid: Uuid = host.rig.get("VBD", &vbd).text("uuid").parse().expect("a UUID");
    let process = host.rig.stack.disks.of_vbd(uuid).expect("a disk").process.expect("a process");
    let reference = host.rig.stack.db.all("host")[0].reference.clone();
    let refused =
        host.rig.refused("host.end_stray_disk", vec![reference.into(), i64::from(process.pid).into()]);
    assert_eq!(refused.code, "INVALID_VALUE");
    assert!(host.processes.is_alive(process));
}
