//! Two hosts without a pool on one storage: two daemons, each with directories of its own, on an SR in one directory.
//! See docs/design/shared-storage.md.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tapio_e2e::disk::{text, vhd_util};
use tapio_e2e::process::{poll_until, signal};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::toolstack::{Daemon, DaemonOptions, Session};

use super::storage_hangs::{make_vdi, stop, vm_on};

/// What a busy host may take.
const LIMIT: Duration = Duration::from_secs(90);
/// Seconds of silence after which a host counts as dead in these tests.
const SILENCE: &str = "4";

/// A host.
struct Host {
    scratch: Scratch,
    daemon: Daemon,
    session: Session,
}

impl Host {
    fn start(name: &str, env: &[(&str, &str)]) -> Self {
        let scratch = Scratch::on_disk();
        let mut options = DaemonOptions::new(&scratch);
        for (key, value) in env {
            options = options.env(key, value);
        }
        let daemon = options.start();
        let session = daemon.login();
        let host = session.call("host.get_all", &[])[0].clone();
        session.call("host.set_name_label", &[host, json!(name)]);
        Self { scratch, daemon, session }
    }

    fn host(&self) -> Value {
        self.session.call("host.get_all", &[])[0].clone()
    }

    fn create(&self, directory: &Path) -> String {
        let config = json!({"location": text(directory), "host-silence": SILENCE});
        let names = [json!("shared"), json!(""), json!("file"), json!("user"), json!(true), json!({})];
        let sr = self.session.text("SR.create", &[&[self.host(), config, json!(0)][..], &names].concat());
        self.session.text("SR.get_uuid", &[json!(sr)])
    }

    fn introduce(&self, sr: &str, directory: &Path) {
        let names = [json!(sr), json!("shared"), json!(""), json!("file"), json!(""), json!(true), json!({})];
        let reference = self.session.text("SR.introduce", &names);
        let config = json!({"location": text(directory)});
        let record =
            json!({"host": self.host(), "SR": reference, "device_config": config, "other_config": {}});
        let pbd = self.session.text("PBD.create", &[record]);
        self.session.call("PBD.plug", &[json!(pbd)]);
    }

    fn sr(&self, uuid: &str) -> String {
        self.session.text("SR.get_by_uuid", &[json!(uuid)])
    }

    fn scan(&self, sr: &str) {
        self.session.call("SR.scan", &[json!(self.sr(sr))]);
    }

    /// The VDI of this UUID, as this host's records have it.
    fn vdi(&self, uuid: &str) -> String {
        self.session.text("VDI.get_by_uuid", &[json!(uuid)])
    }

    fn uuid_of(&self, vdi: &str) -> String {
        self.session.text("VDI.get_uuid", &[json!(vdi)])
    }

    fn unplug(&self, sr: &str) {
        let pbd = self.session.call("SR.get_PBDs", &[json!(self.sr(sr))])[0].clone();
        self.session.call("PBD.unplug", &[pbd]);
    }

    /// Processes of this host: its daemon, storage workers, keepers of leases and disk processes.
    fn processes(&self) -> Vec<i32> {
        let root = self.scratch.path();
        let is_ours = |pid: i32| {
            let own = |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let [words, variables] = [own("cmdline"), own("environ")];
            [words, variables].iter().any(|text| contains(text, text_of(root).as_bytes()))
        };
        let all = std::fs::read_dir("/proc").expect("processes").flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|pid| *pid != std::process::id().cast_signed() && is_ours(*pid)).collect()
    }

    fn signal(&self, number: i32) -> Vec<i32> {
        let processes = self.processes();
        for pid in &processes {
            let _ = signal(*pid, number);
        }
        processes
    }

    /// The process of this host with such words.
    fn process(&self, words: &str) -> Option<i32> {
        let found = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            contains(&line, words.as_bytes())
        };
        self.processes().into_iter().find(found)
    }

    fn stop(self) {
        stop(self.daemon);
    }
}

fn text_of(path: &Path) -> String {
    path.display().to_string()
}

fn contains(text: &[u8], words: &[u8]) -> bool {
    text.windows(words.len()).any(|window| window == words)
}

#[track_caller]
fn until<T>(what: &str, ready: impl FnMut() -> Option<T>) -> T {
    poll_until(LIMIT, ready).unwrap_or_else(|| panic!("{what} did not come within {LIMIT:?}"))
}

/// Names and sizes of the images and journals.
fn listed(directory: &Path) -> BTreeSet<(String, u64)> {
    let entries = std::fs::read_dir(directory).expect("the SR").flatten();
    let of = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().expect("a name");
        Some((name, entry.metadata().ok()?.len())).filter(|(name, _)| !name.starts_with(".tapio"))
    };
    entries.filter_map(of).collect()
}

fn check_all(directory: &Path) {
    for (name, _) in listed(directory) {
        assert!(!name.contains("clone_") && !name.ends_with(".new"), "{name} is left");
        if name.ends_with(".vhd") {
            let path: PathBuf = directory.join(&name);
            let said = vhd_util(&["check", "-n", text(&path)]).ok();
            assert!(said.contains("is valid"), "{name}: {said}");
        }
    }
}

/// Whether one of the words of an error says this.
#[track_caller]
fn says(error: &[String], what: &str) {
    assert!(error.iter().any(|word| word.contains(what)), "no '{what}' in {error:?}");
}

#[test]
fn hosts_see_each_others_changes_and_keep_off_each_others_disks() {
    let shared = Scratch::on_disk();
    let directory = shared.join("sr");
    let (one, two) = (Host::start("one", &[]), Host::start("two", &[]));
    let sr = one.create(&directory);
    two.introduce(&sr, &directory);
    let vdi = make_vdi(&one.session, &one.sr(&sr));
    let uuid = one.uuid_of(&vdi);
    two.scan(&sr);
    let theirs = two.vdi(&uuid);

    // Both plug it: one gets it, and the other is told where it is.
    let (vm, _) = vm_on(&one.session, &vdi);
    let (other, vbd) = vm_without_start(&two.session, &theirs);
    let refused = two.session.fails("VM.start", &[json!(other), json!(false), json!(false)]);
    says(&refused, &format!("VDI {uuid} is open for writing on host one"));
    says(&refused, "unplug it there first");
    for (method, more) in [
        ("VDI.snapshot", vec![json!({})]),
        ("VDI.resize", vec![json!(16 << 20)]),
        ("VDI.destroy", vec![]),
        ("VDI.enable_cbt", vec![]),
    ] {
        let error = two.session.fails(method, &[&[json!(theirs)][..], &more].concat());
        says(&error, "is open for writing on host one");
    }
    two.scan(&sr);
    let host = one.session.text("host.get_uuid", &[one.host()]);
    let key = format!("host_OpaqueRef:{host}");
    let tags = two.session.call("VDI.get_sm_config", &[json!(theirs)]);
    assert_eq!(tags[&key], json!("RW"), "{tags}");

    // What one host does, the other sees.
    let snapshot = one.session.text("VDI.snapshot", &[json!(vdi), json!({})]);
    let snapshot = one.uuid_of(&snapshot);
    two.scan(&sr);
    let parent = |host: &Host, uuid: &str| {
        host.session.call("VDI.get_sm_config", &[json!(host.vdi(uuid))])["vhd-parent"].clone()
    };
    assert_eq!(parent(&two, &snapshot), parent(&two, &uuid));
    assert_eq!(parent(&one, &snapshot), parent(&two, &snapshot));

    one_host_shortens_chains(&one, &two, (&directory, &sr, &vdi));

    // It goes over: unplugged on one, plugged on two.
    one.session.call("VM.hard_shutdown", &[json!(vm)]);
    two.session.call("VM.start", &[json!(other), json!(false), json!(false)]);
    let refused = one.session.fails("VM.start", &[json!(vm), json!(false), json!(false)]);
    says(&refused, "on host two");
    two.scan(&sr);
    let tags = two.session.call("VDI.get_sm_config", &[json!(theirs)]);
    assert_eq!(tags[&key], json!(null), "it is not open there any more");
    two.session.call("VBD.unplug", &[json!(vbd), json!(0)]);
    two.session.call("VM.hard_shutdown", &[json!(other)]);
    two.session.call("VDI.destroy", &[json!(two.vdi(&snapshot))]);
    one.scan(&sr);
    assert_eq!(one.session.call("VDI.get_missing", &[json!(one.vdi(&snapshot))]), json!(true));
    one.session.call("VDI.forget", &[json!(one.vdi(&snapshot))]);
    one.session.call("VDI.resize", &[json!(vdi), json!(24 << 20)]);
    two.scan(&sr);
    assert_eq!(two.session.call("VDI.get_virtual_size", &[json!(theirs)]), json!(24 << 20));

    // The SR goes when one host has it, and nothing is left of either.
    one.session.call("VDI.destroy", &[json!(vdi)]);
    one.scan(&sr);
    let refused = one.session.fails("SR.destroy", &[json!(one.sr(&sr))]);
    says(&refused, "host two");
    says(&refused, "detach it there first");
    two.unplug(&sr);
    one.session.call("SR.destroy", &[json!(one.sr(&sr))]);
    assert_eq!(listed(&directory), BTreeSet::new());
    assert!(!directory.join(".tapio-hosts").exists(), "the lease area goes with the SR");
    for host in [one, two] {
        until("the end of its keeper", || host.process("lease-keeper").is_none().then_some(()));
        host.stop();
    }
}

/// A base copy has one child left, a disk that host one has open. A collection of host two leaves both alone and says
/// why; one of host one merges them below the disk.
fn one_host_shortens_chains(one: &Host, two: &Host, (directory, sr, vdi): (&Path, &str, &str)) {
    // None begins by itself.
    for host in [one, two] {
        let quiet = [json!(host.sr(sr)), json!("gc-quiet"), json!("100000")];
        host.session.call("SR.add_to_other_config", &quiet);
    }
    let parent = || one.session.call("VDI.get_sm_config", &[json!(vdi)])["vhd-parent"].clone();
    let before = parent();
    let snapshot = one.session.text("VDI.snapshot", &[json!(vdi), json!({})]);
    one.session.call("VDI.destroy", &[json!(snapshot)]);
    let between = parent();
    assert_ne!(between, before);
    two.scan(sr);
    let collected = |host: &Host| {
        let said = host.session.call("SR.collect_garbage", &[json!(host.sr(sr)), json!(false)]);
        let lines: Vec<&str> = said.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        // A forecast is there if something is to be done.
        if !lines.iter().any(|line| line.starts_with("in all: ")) {
            return lines.join("; ");
        }
        until("the end of the collection", || {
            let all = host.session.call("task.get_all_records", &[]);
            let mut all = all.as_object()?.values();
            let task = all.find(|task| task["name_label"] == "Garbage Collection")?;
            (task["status"] != "pending").then(|| format!("{lines:?}: {}", task["result"]))
        })
    };
    let images = listed(directory);
    let said = collected(two);
    assert!(said.contains("chains of this SR are shortened by host one"), "{said}");
    assert_eq!(listed(directory), images, "nothing is changed below a disk of another host");
    let said = collected(one);
    assert_eq!(parent(), before, "{said}");
    assert!(listed(directory).len() < images.len());
    two.scan(sr);
}

/// As [`vm_on`], which stays halted.
fn vm_without_start(session: &Session, vdi: &str) -> (String, String) {
    super::storage_hangs::halted_vm_on(session, vdi)
}

#[test]
fn a_host_that_is_killed_in_a_snapshot_locks_nothing_for_ever() {
    let shared = Scratch::on_disk();
    let directory = shared.join("sr");
    let one = Host::start("one", &[("TAPIO_DIE_AT", "fork:swapped")]);
    let two = Host::start("two", &[]);
    let sr = one.create(&directory);
    two.introduce(&sr, &directory);
    let vdi = make_vdi(&one.session, &one.sr(&sr));
    let uuid = one.uuid_of(&vdi);
    let (_vm, _) = vm_on(&one.session, &vdi);
    one.session.fails("VDI.snapshot", &[json!(vdi), json!({})]);
    // Everything of the host at once, before its daemon starts another worker.
    let killed = one.signal(libc::SIGKILL);
    assert!(killed.len() >= 3, "a daemon, a keeper, a disk: {killed:?}");
    assert!(listed(&directory).iter().any(|(name, _)| name.starts_with("clone_")), "it was in the middle");

    // While it may be alive, its half done work is left alone, and its disk is its own.
    two.scan(&sr);
    check_all(&directory);
    let theirs = two.vdi(&uuid);
    let (other, _) = vm_without_start(&two.session, &theirs);
    two.session.call("VM.start", &[json!(other), json!(false), json!(false)]);
    two.session.call("VM.hard_shutdown", &[json!(other)]);
    two.session.call("VDI.snapshot", &[json!(theirs), json!({})]);
    check_all(&directory);
    two.unplug(&sr);
    two.stop();
}

#[test]
fn a_host_that_was_stopped_past_its_lease_does_no_further_step() {
    let shared = Scratch::on_disk();
    let directory = shared.join("sr");
    let one = Host::start("one", &[("TAPIO_STOP_AT", "fork:sibling-made")]);
    let two = Host::start("two", &[]);
    let sr = one.create(&directory);
    two.introduce(&sr, &directory);
    let vdi = make_vdi(&one.session, &one.sr(&sr));
    let uuid = one.uuid_of(&vdi);
    one.session.call("Async.VDI.snapshot", &[json!(vdi), json!({})]);
    let worker = until("the snapshot to stop", || {
        let worker = one.process("storage-worker")?;
        let state = std::fs::read_to_string(format!("/proc/{worker}/stat")).ok()?;
        state.rsplit(')').next()?.trim_start().starts_with('T').then_some(worker)
    });
    let stopped = one.signal(libc::SIGSTOP);
    assert!(stopped.contains(&worker));
    // The other finds out, undoes the snapshot, and makes one of its own.
    two.scan(&sr);
    check_all(&directory);
    let theirs = two.vdi(&uuid);
    two.session.call("VDI.snapshot", &[json!(theirs), json!({})]);
    let before = listed(&directory);

    // The first one goes on, and does nothing to the SR.
    one.signal(libc::SIGCONT);
    until("the end of its worker", || (!Path::new(&format!("/proc/{worker}/exe")).exists()).then_some(()));
    assert_eq!(listed(&directory), before);
    // It joins again by itself, with what the other made.
    until("the first host to be back", || one.session.try_call("SR.scan", &[json!(one.sr(&sr))]).ok());
    check_all(&directory);
    assert_eq!(listed(&directory), before);
    let count =
        |host: &Host| host.session.call("SR.get_VDIs", &[json!(host.sr(&sr))]).as_array().map(Vec::len);
    two.scan(&sr);
    assert_eq!(count(&one), count(&two));
    for host in [one, two] {
        host.unplug(&sr);
        host.stop();
    }
}

#[test]
fn a_disk_outlives_its_daemon_and_is_ended_when_its_host_lost_the_lease() {
    let shared = Scratch::on_disk();
    let directory = shared.join("sr");
    let (mut one, two) = (Host::start("one", &[]), Host::start("two", &[]));
    let sr = one.create(&directory);
    two.introduce(&sr, &directory);
    let vdi = make_vdi(&one.session, &one.sr(&sr));
    let uuid = one.uuid_of(&vdi);
    let (vm, _) = vm_on(&one.session, &vdi);
    two.scan(&sr);
    let theirs = two.vdi(&uuid);
    let (other, _) = vm_without_start(&two.session, &theirs);
    // Without a daemon, the disk's host is alive.
    one.daemon.process.kill();
    std::thread::sleep(Duration::from_secs(6));
    let refused = two.session.fails("VM.start", &[json!(other), json!(false), json!(false)]);
    says(&refused, "is open for writing on host one");
    let options = one.daemon.options.clone();
    one.daemon = options.start();
    one.session = one.daemon.login();
    assert_eq!(one.session.text("VM.get_power_state", &[json!(vm)]), "Running");

    // The whole host hangs for too long.
    let disk = one.process("tapio-disk").expect("the disk runs");
    one.signal(libc::SIGSTOP);
    until("the disk to be free", || {
        two.session.try_call("VM.start", &[json!(other), json!(false), json!(false)]).err().map_or(
            Some(()),
            |error| {
                // The kernel that both share knows that the stopped process has the image open.
                error.iter().any(|word| word.contains("open") && !word.contains("on host one")).then_some(())
            },
        )
    });
    one.signal(libc::SIGCONT);
    until("the end of its disk", || (!Path::new(&format!("/proc/{disk}/exe")).exists()).then_some(()));
    let _ = two.session.try_call("VM.start", &[json!(other), json!(false), json!(false)]);
    assert_eq!(two.session.text("VM.get_power_state", &[json!(other)]), "Running");
    two.session.call("VM.hard_shutdown", &[json!(other)]);
    let _ = one.session.try_call("VM.hard_shutdown", &[json!(vm)]);
    one.signal(libc::SIGKILL);
    two.unplug(&sr);
    two.stop();
}
