//! `tapio bugreport`: what is in the archive, that no secret is, and that nothing which hangs stops it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use tapio_e2e::needs;
use tapio_e2e::process::{Finished, run, signal};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;
use tapio_e2e::toolstack::{DaemonOptions, Session};

use super::storage_hangs::{default_sr, make_vdi, stop, vm_on};

/// What is planted, each where it is named.
const PLANTED: [(&str, &str); 9] = [
    ("secret", "Pl4nted/secret+<&\"record\">"),
    ("device", "Pl4nted-chap-by-value"),
    ("sm", "Pl4nted-sm-config"),
    ("other", "Pl4nted-other-config"),
    ("xenstore", "Pl4nted-xenstore-data"),
    ("url", "Pl4nted-url-account"),
    ("console", "Pl4nted-console-line"),
    ("settings", "Pl4nted-setting"),
    ("account", "Pl4nted-account"),
];

/// How long a part of a report may take here: enough for a diagnosis of one disk.
const LIMIT_S: &str = "3";

fn planted(name: &str) -> &'static str {
    PLANTED.iter().find(|(known, _)| *known == name).expect("planted").1
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let number = group.iter().fold(0_u32, |number, byte| number << 8 | u32::from(*byte))
            << (8 * (3 - group.len()));
        for at in 0..=group.len() {
            text.push(char::from(DIGITS[(number >> (18 - 6 * at) & 63) as usize]));
        }
    }
    text
}

/// A value in the writings that logs and records have.
fn writings(value: &str) -> Vec<String> {
    let json = json!(value).to_string();
    let json = json[1..json.len() - 1].to_owned();
    let twice = json!(json).to_string();
    let xml = value.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let quoted = xml.replace('"', "&quot;");
    let mut url = String::new();
    let mut hex = String::new();
    for byte in value.bytes() {
        match byte {
            b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'_' | b'.' => url.push(char::from(byte)),
            _ => write!(url, "%{byte:02X}").expect("a string"),
        }
        write!(hex, "{byte:02x}").expect("a string");
    }
    let mut all = vec![value.to_owned(), json, twice[1..twice.len() - 1].to_owned(), xml, quoted, url, hex];
    all.extend(["", "a", "ab"].map(|before| base64(format!("{before}{value}").as_bytes())));
    all
}

struct Report {
    members: BTreeMap<String, String>,
}

impl Report {
    fn read(&self, name: &str) -> &str {
        self.members.get(name).map_or("", String::as_str)
    }

    fn missing(&self) -> &str {
        self.read("missing.txt")
    }
}

fn command(scratch: &Scratch, name: &str) -> Command {
    let mut command = Command::new(our("tapio"));
    command.args(["bugreport", "--json", "--part-limit", LIMIT_S, "--output"]).arg(scratch.join(name));
    command.arg("--settings").arg(scratch.join("tapiod.conf"));
    command.arg("--run-dir").arg(scratch.join("run")).arg("--log-dir").arg(scratch.join("log"));
    command.env("TAPIO_RUN_DIR", scratch.join("run/disk")).env("TAPIO_SHM_DIR", scratch.join("shm"));
    command.env("HOME", scratch.path());
    command
}

fn at(command: &mut Command, socket: &Path) -> Finished {
    run(command.args(["--", "--socket"]).arg(socket))
}

/// All members, unpacked by tar.
fn unpacked(scratch: &Scratch, name: &str) -> Report {
    let dir = scratch.join(&format!("{name}.d"));
    fs::create_dir(&dir).expect("made");
    run(Command::new("tar").arg("-xzf").arg(scratch.join(name)).arg("-C").arg(&dir)).ok();
    let names = run(Command::new("tar").arg("-tzf").arg(scratch.join(name))).ok();
    let read = |name: &str| (name.to_owned(), fs::read_to_string(dir.join(name)).expect("a member"));
    Report { members: names.lines().map(read).collect() }
}

/// A VM with a disk that runs and has a snapshot; UUIDs of disk and VM.
fn plugged(session: &Session) -> (String, String) {
    let vdi = make_vdi(session, &default_sr(session));
    for (map, key, value) in [
        ("xenstore_data", "vm-data/password", planted("xenstore").to_owned()),
        ("sm_config", "odd", planted("sm").to_owned()),
        ("other_config", "backup-url", format!("https://me:{}@h/", planted("url"))),
    ] {
        session.call(&format!("VDI.add_to_{map}"), &[json!(vdi), json!(key), json!(value)]);
    }
    session.call("VDI.snapshot", &[json!(vdi), json!({})]);
    let (vm, _) = vm_on(session, &vdi);
    session.call("VM.set_name_label", &[json!(vm), json!("kept-vm")]);
    session.call("VM.add_to_other_config", &[json!(vm), json!("token"), json!(planted("other"))]);
    session.call("VM.add_to_xenstore_data", &[json!(vm), json!("vm-data/x"), json!(planted("xenstore"))]);
    session.call("VM.set_PV_args", &[json!(vm), json!(format!("seed={}", planted("other")))]);
    (session.text("VDI.get_uuid", &[json!(vdi)]), vm)
}

/// Lines of a log, with what was planted in every writing and in the forms of logs.
fn log(sessions: &[&Session]) -> String {
    let mut text = String::from("2026-11-25T09:54:30.1Z  INFO tapiod: kept-line\n");
    for (name, value) in
        PLANTED.iter().filter(|(name, _)| !matches!(*name, "url" | "console" | "account" | "settings"))
    {
        for writing in writings(value) {
            let _ = writeln!(text, "saw of {name} {writing} here");
        }
    }
    for (name, value) in PLANTED.iter().filter(|(_, value)| !value.contains('"')) {
        let _ = writeln!(
            text,
            "{name}: password={value}\n{name}: \"password\": \"{value}\"\nAuthorization: Basic {value}"
        );
        let _ = writeln!(
            text,
            "Cookie: session_id={value}\nnode.session.auth.password = {value}\nat nbd://a:{value}@h/d"
        );
        let _ =
            writeln!(text, "GET /export?uuid=kept-uuid&session_id={value} HTTP/1.1\npassword:\n  {value}");
    }
    for session in sessions {
        let _ = writeln!(text, "a call by {} came", session.reference);
        let _ = writeln!(text, "GET /export?session_id={} HTTP/1.1", session.reference.replace(':', "%3A"));
        let _ = writeln!(text, "NBD export /0d8f3a52?session_id={}", session.reference);
    }
    text + "-----BEGIN PRIVATE KEY-----\nPl4ntedKeyBytes\n-----END PRIVATE KEY-----\nkept-end\n"
}

#[test]
fn a_report_has_everything_but_secrets() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let session = daemon.login();
    daemon.add_user("alice", "vm-admin", planted("account"));
    let alice = daemon.login_as("alice", planted("account"));
    let secret = session.call("secret.create", &[json!({"value": planted("secret"), "other_config": {}})]);
    let secret = session.call("secret.get_uuid", &[secret]);
    let sr = session.call("SR.get_all", &[])[0].clone();
    let sr_uuid = session.text("SR.get_uuid", std::slice::from_ref(&sr));
    session.call("SR.add_to_other_config", &[sr.clone(), json!("backup-password"), json!(planted("other"))]);
    session.call("SR.add_to_other_config", &[sr.clone(), json!("gc-quiet"), json!("4321")]);
    session.call("SR.set_name_label", &[sr.clone(), json!("kept-name")]);
    session.call("SR.set_name_description", &[sr.clone(), json!(planted("other"))]);
    let host = session.call("host.get_all", &[])[0].clone();
    let other = session.call(
        "SR.introduce",
        &[
            json!("5a1b2c3d-0000-4111-8222-333344445555"),
            json!("kept-other-sr"),
            json!(""),
            json!("file"),
            json!(""),
            json!(false),
            json!({"planted": planted("sm")}),
        ],
    );
    let config = json!({"location": scratch.join("gone"), "chapuser": "admin", "chappassword": planted("device"),
        "cifspassword_secret": secret, "odd": "true"});
    session.call(
        "PBD.create",
        &[json!({"host": host, "SR": other, "device_config": config, "other_config": {}})],
    );
    let (disk_uuid, vm) = plugged(&session);
    fs::write(scratch.join("tapiod.conf"), format!("log-level = info\npsk = {}\n", planted("settings")))
        .expect("written");
    fs::write(scratch.join("own.log"), log(&[&session, &alice])).expect("written");
    fs::create_dir_all(scratch.join("run/vm/a")).expect("made");
    fs::write(scratch.join("run/vm/a/console.log"), planted("console")).expect("written");
    fs::create_dir_all(scratch.join("log")).expect("made");
    fs::write(scratch.join("log/tapiod.log"), format!("kept-too\nwith {}\n", planted("device")))
        .expect("written");

    let report =
        || at(command(&scratch, "report.tar.gz").arg("--log").arg(scratch.join("own.log")), &daemon.socket);
    let members = report().ok();
    assert_eq!(fs::metadata(scratch.join("report.tar.gz")).expect("written").mode() & 0o777, 0o600);
    assert!(report().fails().contains("name another file"), "what exists is kept");
    let report = unpacked(&scratch, "report.tar.gz");

    // It is of use.
    let files: String = report
        .members
        .iter()
        .filter(|(name, _)| name.ends_with("/files.txt"))
        .map(|(_, text)| text.as_str())
        .collect();
    assert!(files.contains(&format!("{disk_uuid}.vhd")), "{files}: {}", report.missing());
    for name in [
        "versions.txt",
        "host/mounts.txt",
        "host/memory.txt",
        "records/VM.json",
        "records/host.json",
        "findings.json",
        "metrics.txt",
        "chains.txt",
        "disks/list.json",
        "disks/stats.txt",
    ] {
        assert!(!report.read(name).is_empty() && members.contains(name), "{name}: {}", report.missing());
    }
    for (name, kept) in [
        ("records/SR.json", "kept-name"),
        ("records/SR.json", "kept-other-sr"),
        ("records/SR.json", "\"gc-quiet\": \"4321\""),
        ("records/SR.json", &sr_uuid),
        ("records/PBD.json", "\"chappassword_secret\": \"(left out)\""),
        ("records/VM.json", "kept-vm"),
        ("records/VM.json", "\"driver\": \"sim\""),
        ("records/VDI.json", "\"vm-data/password\": \"(left out)\""),
        ("chains.txt", "base copy"),
        ("chains.txt", &disk_uuid),
        ("disks/list.json", &disk_uuid),
        ("disks/stats.txt", &disk_uuid),
        ("findings.json", "sr-not-attached"),
        ("metrics.txt", &disk_uuid),
        ("settings/tapiod.conf", "log-level = info"),
        ("logs/0-own.log", "kept-line"),
        ("logs/0-own.log", "kept-end"),
        ("logs/1-tapiod.log", "kept-too"),
    ] {
        assert!(
            report.read(name).contains(kept),
            "{name} lacks {kept}: {}\n{}",
            report.read(name),
            report.missing()
        );
    }
    for name in ["records/VM.json", "records/PBD.json", "disks/list.json", "findings.json"] {
        serde_json::from_str::<Value>(report.read(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    // And gives nothing away.
    // Of base64 what neither the bytes before a value nor its end decide.
    let inner = |text: String| text.get(4..text.len() - 4).map_or_else(|| text.clone(), str::to_owned);
    let mut wanted: Vec<String> = PLANTED.iter().flat_map(|(_, value)| writings(value)).collect();
    let encoded = PLANTED
        .iter()
        .flat_map(|(_, value)| ["", "a", "ab"].map(|before| base64(format!("{before}{value}").as_bytes())));
    wanted.extend(encoded.map(inner));
    wanted.push("Pl4nted".into());
    for session in [&session, &alice] {
        let uuid = session.reference.strip_prefix("OpaqueRef:").expect("a reference");
        wanted.extend([uuid.to_owned(), uuid.to_uppercase(), base64(uuid.as_bytes())]);
    }
    // What accounts are checked against, and the daemon's own secrets, lie beside its records.
    let kept = fs::read_dir(scratch.join("state")).expect("its state").flatten().map(|entry| entry.path());
    let kept: Vec<String> = kept.filter_map(|path| fs::read_to_string(path).ok()).collect();
    let hashes =
        kept.iter().filter(|text| text.contains("alice")).flat_map(|text| text.split([' ', ':', '\n', '"']));
    let hashes: Vec<&str> = hashes.filter(|word| word.len() > 24).collect();
    assert!(!hashes.is_empty(), "the account's password is kept as something: {kept:?}");
    wanted.extend(hashes.into_iter().map(str::to_owned));
    for (name, text) in &report.members {
        for value in &wanted {
            assert!(!text.contains(value.as_str()), "{value} is in {name}:\n{text}");
        }
    }
    session.call("VM.hard_shutdown", &[json!(vm)]);
    stop(daemon);
}

/// Children of a process whose command line has a word.
fn children(of: u32, word: &str) -> Vec<i32> {
    let out = run(Command::new("pgrep").args(["-P", &of.to_string(), "-f", word]));
    out.stdout.split_whitespace().map(|pid| pid.parse().expect("a number")).collect()
}

/// Stopped as long as this lives.
struct Stopped(Vec<i32>);

impl Stopped {
    fn new(pids: Vec<i32>) -> Self {
        assert!(!pids.is_empty(), "there are processes");
        pids.iter().for_each(|pid| signal(*pid, libc::SIGSTOP).expect("it runs"));
        Self(pids)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            // It may have ended meanwhile.
            let _ = signal(*pid, libc::SIGCONT);
        }
    }
}

#[test]
fn what_hangs_or_is_dead_stops_no_report() {
    needs!("pgrep");
    let scratch = Scratch::on_disk();
    let mut daemon = DaemonOptions::new(&scratch).default_sr().arg("--set").arg("storage-timeout=5").start();
    let session = daemon.login();
    let (uuid, vm) = plugged(&session);
    let sockets = fs::read_dir(scratch.join("run/disk")).expect("sockets");
    let pids: Vec<i32> = sockets
        .filter_map(|entry| entry.expect("a name").file_name().to_str()?.strip_prefix("ctl")?.parse().ok())
        .collect();
    assert_eq!(pids.len(), 1, "one disk process");
    {
        let _disk = Stopped::new(pids.clone());
        let _worker = Stopped::new(children(daemon.process.pid(), "worker"));
        at(&mut command(&scratch, "hung.tar.gz"), &daemon.socket).ok();
        let report = unpacked(&scratch, "hung.tar.gz");
        assert!(report.read("disks/list.json").contains("T (stopped)"), "{}", report.read("disks/list.json"));
        assert!(report.missing().contains("findings.json: no answer within"), "{}", report.missing());
        assert!(report.read("records/VDI.json").contains(&uuid) && report.read("chains.txt").contains(&uuid));
        assert!(report.read("disks/stats.txt").contains(&uuid), "{}", report.missing());
    }
    {
        // The daemon itself.
        let _daemon = Stopped::new(vec![daemon.process.pid() as i32]);
        at(&mut command(&scratch, "silent.tar.gz"), &daemon.socket).ok();
        let report = unpacked(&scratch, "silent.tar.gz");
        assert!(report.missing().contains("records/VM.json: not asked"), "{}", report.missing());
        assert!(report.read("disks/list.json").contains(&uuid), "{}", report.read("disks/list.json"));
    }
    daemon.process.kill();
    at(&mut command(&scratch, "dead.tar.gz"), &daemon.socket).ok();
    let report = unpacked(&scratch, "dead.tar.gz");
    assert!(report.missing().contains("records/VM.json: "), "{}", report.missing());
    assert!(report.read("disks/list.json").contains(&uuid), "{}", report.read("disks/list.json"));
    assert!(!report.read("host/kernel.txt").is_empty() && !report.read("versions.txt").is_empty());
    let daemon = daemon.options.start();
    daemon.login().call("VM.hard_shutdown", &[json!(vm)]);
    stop(daemon);
}
