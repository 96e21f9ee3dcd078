//! Storage plugins of others, as scripts and as programs (`tests/plugins`): SRs, disks with data, snapshots under disks
//! that run, plugins that come, go and misbehave. By `xe`, as a person types it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::text;
use tapio_e2e::needs;
use tapio_e2e::process::{poll_until, run_within};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::{our, repository};
use tapio_e2e::toolstack::{Daemon, DaemonOptions, Session, post};

use super::MIB;
use super::storage_hangs::{stop, vm_on};

/// What anything may take on a busy host.
const LIMIT: Duration = Duration::from_secs(60);

/// Methods of the plugin of version 3; each is a link to its program.
const VOLUME: [&str; 19] = [
    "Plugin.Query",
    "SR.probe",
    "SR.create",
    "SR.attach",
    "SR.detach",
    "SR.destroy",
    "SR.stat",
    "SR.ls",
    "Volume.create",
    "Volume.snapshot",
    "Volume.clone",
    "Volume.destroy",
    "Volume.resize",
    "Volume.stat",
    "Volume.set",
    "Volume.unset",
    "Volume.set_name",
    "Volume.set_description",
    // The case of a name is of no account.
    "volume.COMPARE",
];
const DATAPATH: [&str; 7] = [
    "Plugin.Query",
    "Datapath.open",
    "Datapath.attach",
    "Datapath.activate",
    "Datapath.deactivate",
    "Datapath.detach",
    "Datapath.close",
];

/// Directories of plugins, and a daemon that looks there.
struct Host {
    scratch: Scratch,
    options: DaemonOptions,
    daemon: Option<Daemon>,
}

impl Host {
    fn start() -> Self {
        Self::dying_at(None)
    }

    /// Its worker ends at this step, the first time it comes there.
    fn dying_at(step: Option<&str>) -> Self {
        let scratch = Scratch::on_disk();
        for dir in [
            "plugins",
            "plugins/scripts",
            "plugins/scripts/volume",
            "plugins/scripts/datapath",
            "plugins/programs",
        ] {
            fs::create_dir(scratch.join(dir)).expect("a directory for plugins");
            fs::set_permissions(scratch.join(dir), Permissions::from_mode(0o755)).expect("its mode");
        }
        for file in ["files.py", "smapiv3.py", "smapiv1.py"] {
            fs::copy(repository().join("tests/plugins").join(file), scratch.join("plugins").join(file))
                .expect("copied");
            fs::set_permissions(scratch.join("plugins").join(file), Permissions::from_mode(0o755))
                .expect("its mode");
        }
        let set = |key: &str, dir: &str| format!("{key}={}", scratch.join("plugins").join(dir).display());
        let options = DaemonOptions::new(&scratch)
            .default_sr()
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .arg("--set")
            .arg(&set("storage-scripts", "scripts"))
            .arg("--set")
            .arg(&set("storage-programs", "programs"));
        let dying = step.map_or_else(|| options.clone(), |step| options.clone().env("TAPIO_DIE_AT", step));
        let daemon = Some(dying.start());
        Self { scratch, options, daemon }
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    fn kill_and_restart(&mut self) {
        self.kill_and_restart_with(&self.options.clone());
    }

    fn kill_and_restart_with(&mut self, options: &DaemonOptions) {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.process.kill();
        self.daemon = Some(options.start());
    }

    /// Installs methods of version 3 as a vendor's pack does: files beside each other, then the directory's name.
    fn install_scripts(&self, place: &str, methods: &[&str]) {
        let dir = self.scratch.join("plugins/scripts").join(place);
        let fresh = self.scratch.join("plugins/.fresh");
        fs::create_dir(&fresh).expect("made");
        fs::set_permissions(&fresh, Permissions::from_mode(0o755)).expect("its mode");
        for method in methods {
            symlink(self.scratch.join("plugins/smapiv3.py"), fresh.join(method)).expect("a link");
        }
        fs::rename(fresh, dir).expect("installed");
    }

    fn install_all_scripts(&self) {
        self.install_scripts("volume/org.xen.xapi.storage.testvolumes", &VOLUME);
        self.install_scripts("datapath/testfile", &DATAPATH);
        self.install_scripts("datapath/testnbd", &DATAPATH);
    }

    fn program(&self) -> PathBuf {
        self.scratch.join("plugins/programs/TESTPROGRAMSSR")
    }

    fn install_program(&self) {
        symlink(self.scratch.join("plugins/smapiv1.py"), self.program()).expect("a link");
    }

    #[track_caller]
    fn try_xe(&self, words: &[&str]) -> Result<String, String> {
        let mut command = std::process::Command::new(our("tapio"));
        command.arg("xe").env("TAPIO_SOCKET", &self.daemon().socket).env("HOME", self.scratch.path());
        for name in ["XDG_CONFIG_HOME", "XE_EXTRA_ARGS", "XE_PASSWORD"] {
            command.env_remove(name);
        }
        let done = run_within(command.args(words), LIMIT);
        let said = if done.status.success() {
            Ok(done.stdout.trim_end().to_owned())
        } else {
            Err(done.stderr.clone())
        };
        said.map_err(|error| error.trim_end().to_owned())
    }

    #[track_caller]
    fn xe(&self, words: &[&str]) -> String {
        self.try_xe(words)
            .unwrap_or_else(|error| panic!("xe {words:?}: {error}\n{}", self.daemon().process.log()))
    }

    #[track_caller]
    fn awaits_type(&self, name: &str, is_there: bool) {
        let known = || {
            let found = self.xe(&["sm-list", &format!("type={name}"), "params=type", "--minimal"]);
            (found.is_empty() != is_there).then_some(())
        };
        assert!(poll_until(LIMIT, known).is_some(), "type {name}: {}", self.daemon().process.log());
    }

    fn tapio(&self, words: &[&str]) -> String {
        let mut command = std::process::Command::new(our("tapio"));
        command
            .env("TAPIO_RUN_DIR", self.scratch.join("run/disk"))
            .env("TAPIO_SHM_DIR", self.scratch.join("shm"));
        run_within(command.args(words), LIMIT).ok()
    }

    /// Serves the only disk that runs by NBD, and answers where.
    fn serve(&self) -> String {
        let listed: serde_json::Value =
            serde_json::from_str(&self.tapio(&["disk", "list", "--json"])).expect("JSON");
        let number = |name: &str| listed[0][name].as_u64().expect("a number").to_string();
        let socket = self.scratch.join("nbd");
        let _ = fs::remove_file(&socket);
        let (pid, minor) = (number("pid"), number("minor"));
        self.tapio(&["disk", "front", "add", "-p", &pid, "-m", &minor, "--nbd-unix", text(&socket)]);
        format!("nbd+unix:///?socket={}", text(&socket))
    }

    fn finish(mut self) {
        stop(self.daemon.take().expect("it runs"));
    }
}

/// The words that a plugin's data path was told, in order.
fn told(image: &Path) -> Vec<String> {
    let mut notes = image.as_os_str().to_owned();
    notes.push(".way");
    fs::read_to_string(notes).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn reference(session: &Session, class: &str, uuid: &str) -> String {
    session.text(&format!("{class}.get_by_uuid"), &[json!(uuid)])
}

/// A life of an SR and its disks: `sr_type` in `dir`, with more of `device-config`.
#[track_caller]
fn live(host: &mut Host, sr_type: &str, dir: &str, more: &[&str]) {
    let dir = host.scratch.join(dir);
    let (sr_type_word, location) =
        (format!("type={sr_type}"), format!("device-config:location={}", dir.display()));
    let make = [&["sr-create", &sr_type_word, "name-label=of a vendor", &location][..], more].concat();
    let sr = host.xe(&make);
    let sr_word = format!("sr-uuid={sr}");
    let disk = host.xe(&["vdi-create", &sr_word, "name-label=disk", "virtual-size=8MiB"]);
    assert_eq!(
        host.xe(&["vdi-param-get", &format!("uuid={disk}"), "param-name=virtual-size"]),
        (8 * MIB).to_string()
    );
    let key = host.xe(&["vdi-param-get", &format!("uuid={disk}"), "param-name=location"]);
    let image = dir.join(format!("{key}.img"));
    assert_eq!(fs::metadata(&image).expect("the plugin's file").len(), 8 * MIB);

    // A disk that runs is snapshotted: what it had written then is in the snapshot, and it goes on.
    let session = host.daemon().login();
    let (vm, _) = vm_on(&session, &reference(&session, "VDI", &disk));
    let uri = host.serve();
    nbdsh(&uri, "h.pwrite(b'a' * 65536, 0); h.flush()");
    let snapshot = host.xe(&["vdi-snapshot", &format!("uuid={disk}")]);
    nbdsh(&uri, "h.pwrite(b'b' * 4096, 4096); h.flush()");
    // An NBD server does not see that its file becomes longer, and the plugin of version 1 does not say that it can.
    let is_online = sr_type == "testvolumes" && more.is_empty();
    if is_online {
        host.xe(&["vdi-resize", &format!("uuid={disk}"), "disk-size=16MiB"]);
    }

    // A daemon that is killed finds disk and plugin again.
    drop(session);
    host.kill_and_restart();
    let session = host.daemon().login();
    nbdsh(&uri, "h.pwrite(b'c' * 4096, 8192); h.flush()");
    nbdsh(&uri, "assert h.pread(12288, 0) == b'a' * 4096 + b'b' * 4096 + b'c' * 4096, 'lost'");
    let attached = ["sr-list", &format!("uuid={sr}"), "params=PBDs", "--minimal"].map(str::to_owned);
    let pbd = host.xe(&attached.each_ref().map(String::as_str));
    let plugged = || {
        (host.xe(&["pbd-param-get", &format!("uuid={pbd}"), "param-name=currently-attached"]) == "true")
            .then_some(())
    };
    assert!(poll_until(LIMIT, plugged).is_some(), "{}", host.daemon().process.log());
    session.call("VM.hard_shutdown", &[json!(vm)]);
    let words = told(&image);
    assert_eq!(
        words.last().map(String::as_str),
        Some(if sr_type == "testvolumes" { "close" } else { "deactivate" }),
        "{words:?}"
    );

    if !is_online {
        host.xe(&["vdi-resize", &format!("uuid={disk}"), "disk-size=16MiB"]);
    }

    // What lies there by now, whoever looks.
    let raw = |uuid: &str, name: &str| {
        let path = host.scratch.join(name);
        host.xe(&[
            "vdi-export",
            &format!("uuid={uuid}"),
            "format=raw",
            &format!("filename={}", path.display()),
        ]);
        fs::read(&path).expect("exported")
    };
    if !more.contains(&"device-config:way=nbd") {
        let bytes = raw(&disk, "exported");
        assert_eq!(bytes.len() as u64, 16 * MIB);
        assert!(
            bytes[..4096].iter().all(|byte| *byte == b'a')
                && bytes[8192..12288].iter().all(|byte| *byte == b'c')
        );
        let kept = raw(&snapshot, "kept");
        assert!(
            kept[..65536].iter().all(|byte| *byte == b'a') && kept[65536..].iter().all(|byte| *byte == 0)
        );
        let filled = host.xe(&["vdi-create", &sr_word, "name-label=filled", "virtual-size=16MiB"]);
        let from = format!("filename={}", host.scratch.join("exported").display());
        host.xe(&["vdi-import", &format!("uuid={filled}"), "format=raw", &from]);
        assert!(raw(&filled, "again") == bytes, "what was imported is what is there");
        host.xe(&["vdi-destroy", &format!("uuid={filled}")]);
    }
    let of = |uuid: &str, name: &str| {
        host.xe(&["vdi-param-get", &format!("uuid={uuid}"), &format!("param-name={name}")])
    };
    assert_eq!(of(&snapshot, "is-a-snapshot"), "true");
    assert_eq!(of(&snapshot, "snapshot-of"), disk);
    let clone = host.xe(&["vdi-clone", &format!("uuid={disk}")]);
    host.xe(&["vdi-param-set", &format!("uuid={clone}"), "name-label=renamed"]);
    assert!(
        poll_until(LIMIT, || notes_say(&dir, "renamed").then_some(())).is_some(),
        "the plugin knows the name"
    );
    host.xe(&["sr-scan", &format!("uuid={sr}")]);
    let all = host.xe(&["vdi-list", &sr_word, "params=uuid", "--minimal"]);
    let mut all: Vec<&str> = all.split(',').collect();
    all.sort_unstable();
    let mut wanted = vec![disk.as_str(), snapshot.as_str(), clone.as_str()];
    wanted.sort_unstable();
    assert_eq!(all, wanted, "each once, with the UUID of before");

    if !more.contains(&"device-config:way=nbd") {
        misbehaves(host, &sr_word, sr_type);
    }
    for uuid in [&clone, &snapshot, &disk] {
        host.xe(&["vdi-destroy", &format!("uuid={uuid}")]);
    }
    let images = fs::read_dir(&dir).expect("it is there still").flatten();
    let images = images.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "img"));
    assert_eq!(images.count(), 0, "all images are gone");
    host.xe(&["sr-destroy", &format!("uuid={sr}")]);
    assert!(!dir.join("sr.json").exists());
}

/// A plugin that misbehaves costs its call alone.
#[track_caller]
fn misbehaves(host: &mut Host, sr: &str, sr_type: &str) {
    let defects = [
        ("crash", "signal"),
        ("garbage", "this is no answer"),
        ("quiet", "status 3"),
        ("flood", "more than 16 MiB"),
    ];
    for (name, word) in defects {
        fails(host, sr, name, word);
    }
    // Its time is spent once.
    if sr_type == "testvolumes" {
        // On a busy host a sound plugin may take as long: no other call has this limit.
        host.kill_and_restart_with(&host.options.clone().arg("--set").arg("storage-timeout=8"));
        fails(host, sr, "hang", "had not ended after 8 s");
        host.kill_and_restart();
    }
}

/// A disk of this name cannot be made, and others have nothing of it.
#[track_caller]
fn fails(host: &Host, sr: &str, name: &str, word: &str) {
    let failed = host.try_xe(&["vdi-create", sr, &format!("name-label={name}"), "virtual-size=1MiB"]);
    let failed = failed.expect_err("it fails");
    assert!(failed.contains(word), "{name}: {failed}");
    let other = host.xe(&["sr-list", "type=file", "--minimal"]);
    host.xe(&["sr-scan", &format!("uuid={other}")]);
}

fn notes_say(dir: &Path, word: &str) -> bool {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let notes = entries.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "json"));
    notes.into_iter().any(|entry| fs::read_to_string(entry.path()).is_ok_and(|text| text.contains(word)))
}

#[test]
fn scripts_of_version_3_are_drivers() {
    needs!("python3", "nbdsh");
    let mut host = Host::start();
    assert_eq!(host.xe(&["sm-list", "type=testvolumes", "--minimal"]), "");
    host.install_all_scripts();
    host.awaits_type("testvolumes", true);
    let sm = host.xe(&["sm-list", "type=testvolumes", "params=uuid", "--minimal"]);
    let record = |session: &Session| session.call("SM.get_record", &[json!(reference(session, "SM", &sm))]);
    let record = record(&host.daemon().login());
    assert_eq!((&record["vendor"], &record["version"]), (&json!("Tapio's tests"), &json!("3.1")));
    assert_eq!(record["features"]["VDI_DELETE"], json!(1), "{record}");
    live(&mut host, "testvolumes", "volumes", &[]);
    assert_eq!(
        host.xe(&["sm-list", "type=testvolumes", "params=uuid", "--minimal"]),
        sm,
        "the record outlives a restart"
    );

    // Others can change it: it is not used any more, and says so.
    let dir = host.scratch.join("plugins/scripts/volume/org.xen.xapi.storage.testvolumes");
    fs::set_permissions(&dir, Permissions::from_mode(0o777)).expect("changed");
    host.awaits_type("testvolumes", false);
    assert!(host.daemon().process.log().contains("chmod go-w"));
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).expect("changed");
    host.awaits_type("testvolumes", true);
    fs::remove_dir_all(dir).expect("removed");
    host.awaits_type("testvolumes", false);
    let failed = host.try_xe(&["sr-create", "type=testvolumes", "name-label=x", "device-config:location=/x"]);
    assert!(failed.expect_err("it is gone").contains("testvolumes"));
    host.finish();
}

#[test]
fn data_of_version_3_come_by_nbd() {
    needs!("python3", "nbdsh", "qemu-nbd");
    let mut host = Host::start();
    host.install_all_scripts();
    host.awaits_type("testvolumes", true);
    live(&mut host, "testvolumes", "volumes", &["device-config:way=nbd"]);
    host.finish();
}

/// A disk whose worker ends while a plugin makes a snapshot of it goes on, with all that its guest wrote.
#[test]
fn a_disk_that_waited_for_a_plugin_goes_on() {
    needs!("python3", "nbdsh");
    for step in ["external:paused", "external:made:2", "external:resumed"] {
        let mut host = Host::dying_at(Some(step));
        host.install_all_scripts();
        host.awaits_type("testvolumes", true);
        let location = format!("device-config:location={}", host.scratch.join("volumes").display());
        let sr = host.xe(&["sr-create", "type=testvolumes", "name-label=of a vendor", &location]);
        let sr_word = format!("sr-uuid={sr}");
        let disk = host.xe(&["vdi-create", &sr_word, "name-label=disk", "virtual-size=8MiB"]);
        let session = host.daemon().login();
        let (vm, _) = vm_on(&session, &reference(&session, "VDI", &disk));
        let uri = host.serve();
        nbdsh(&uri, "h.pwrite(b'a' * 65536, 0); h.flush()");
        let failed = host.try_xe(&["vdi-snapshot", &format!("uuid={disk}")]).expect_err("its process ends");
        assert!(failed.contains("ended"), "{step}: {failed}");
        // Another worker lets it go on, without a word of anyone; the guest notices a pause.
        nbdsh(&uri, "h.pwrite(b'b' * 4096, 4096); h.flush()");
        let holds = "assert h.pread(12288, 0) == b'a' * 4096 + b'b' * 4096 + b'a' * 4096, 'lost'";
        nbdsh(&uri, holds);
        // A whole one works with a daemon that does not end, and nothing that was made is lost from sight.
        host.kill_and_restart();
        let session = host.daemon().login();
        host.xe(&["sr-scan", &format!("uuid={sr}")]);
        let images = fs::read_dir(host.scratch.join("volumes")).expect("the SR").flatten();
        let images =
            images.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "img")).count();
        let listed = host.xe(&["vdi-list", &sr_word, "params=uuid", "--minimal"]);
        assert_eq!(listed.split(',').count(), images, "{step}: {listed}");
        host.xe(&["vdi-snapshot", &format!("uuid={disk}")]);
        nbdsh(&uri, holds);
        session.call("VM.hard_shutdown", &[json!(vm)]);
        assert!(!host.scratch.join("run/external").join(&sr).exists(), "{step}: no note is left");
        host.finish();
    }
}

#[test]
fn programs_of_version_1_are_drivers() {
    needs!("python3", "nbdsh");
    let mut host = Host::start();
    host.install_program();
    host.awaits_type("testprograms", true);
    let failed = host
        .try_xe(&["sr-create", "type=testprograms", "name-label=x"])
        .expect_err("the location is missing");
    assert!(failed.contains("location"), "{failed}");
    assert_eq!(host.xe(&["sr-list", "type=testprograms", "--minimal"]), "", "nothing is left of it");
    live(&mut host, "testprograms", "programs", &[]);
    // Its session is of no use to who reads its command line, nor for another SR; nobody else changes such records.
    let ours = host.xe(&["sr-list", "type=file", "--minimal"]);
    let ours = host.xe(&["vdi-create", &format!("sr-uuid={ours}"), "name-label=ours", "virtual-size=1MiB"]);
    let http = format!("device-config:http={}", host.daemon().http);
    let said = host.xe(&["sr-probe", "type=testprograms", "device-config:location=/x", &http]);
    assert!(said.contains("SESSION_INVALID") && said.contains("PERMISSION_DENIED"), "{said}");
    let session = host.daemon().login();
    let ours = json!(reference(&session, "VDI", &ours));
    assert_eq!(session.fails("VDI.db_forget", std::slice::from_ref(&ours))[0], "PERMISSION_DENIED");
    assert_eq!(session.fails("VDI.set_managed", &[ours, json!(false)])[0], "PERMISSION_DENIED");
    // It has ended with the call.
    let theirs =
        said.split("<session>").nth(1).and_then(|rest| rest.split('<').next()).expect("its reference");
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "VDI.get_all", "params": [theirs]}).to_string();
    let (_, answer) = post(&host.daemon().socket, "/jsonrpc", &body);
    assert!(answer.contains("SESSION_INVALID"), "{answer}");
    fs::remove_file(host.program()).expect("removed");
    host.awaits_type("testprograms", false);
    host.finish();
}
