//! `tapio bugreport`: what is in the archive, and that no secret is.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use serde_json::json;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;
use tapio_e2e::toolstack::DaemonOptions;

#[test]
fn a_report_has_everything_but_secrets() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let session = daemon.login();
    daemon.add_user("alice", "vm-admin", "planted-account");
    let alice = daemon.login_as("alice", "planted-account");
    session.call("secret.create", &[json!({"value": "planted-object", "other_config": {}})]);
    let sr = session.call("SR.get_all", &[])[0].clone();
    session.call("SR.add_to_other_config", &[sr.clone(), json!("backup-password"), json!("planted-other")]);
    session.call("SR.set_name_label", &[sr.clone(), json!("kept-name")]);
    let host = session.call("host.get_all", &[])[0].clone();
    let config = json!({"location": scratch.join("gone"), "cifspassword": "planted-device"});
    let pbd = json!({"host": host, "SR": sr, "device_config": config, "other_config": {}});
    let planted_device = session.try_call("PBD.create", &[pbd]).is_ok();
    std::fs::write(scratch.join("keys.psk"), "client:planted-psk\n").expect("written");
    let settings = scratch.join("tapiod.conf");
    std::fs::write(&settings, "log-level = info\npsk = planted-setting\n").expect("written");
    let log = scratch.join("own.log");
    std::fs::write(&log, "kept-line\nsaw planted-other\npassword=planted-line\n").expect("written");

    let archive = scratch.join("report.tar.gz");
    let report = || {
        let mut command = Command::new(our("tapio"));
        command.args(["bugreport", "--json", "--output"]).arg(&archive).arg("--settings").arg(&settings);
        command.arg("--run-dir").arg(scratch.join("run")).arg("--log").arg(&log);
        command.env("TAPIO_RUN_DIR", scratch.join("run/disk")).env("TAPIO_SHM_DIR", scratch.join("shm"));
        run(command.args(["--", "--socket"]).arg(&daemon.socket).env("HOME", scratch.path()))
    };
    let members = report().ok();
    assert_eq!(std::fs::metadata(&archive).expect("written").mode() & 0o777, 0o600);
    assert!(report().fails().contains("name another file"), "what exists is kept");

    let unpacked = scratch.join("unpacked");
    std::fs::create_dir(&unpacked).expect("made");
    run(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&unpacked)).ok();
    let read = |name: &str| std::fs::read_to_string(unpacked.join(name)).unwrap_or_default();
    for name in [
        "versions.txt",
        "host/mounts.txt",
        "host/memory.txt",
        "records/VM.json",
        "records/host.json",
        "findings.json",
    ] {
        assert!(!read(name).is_empty() && members.contains(name), "{name}: {}", read("missing.txt"));
    }
    assert!(read("records/SR.json").contains("kept-name"));
    assert!(read("settings/tapiod.conf").contains("log-level = info"));
    assert!(read("logs/0-own.log").contains("kept-line"));
    assert!(read("srs/0/files.txt").contains(" files\n"), "{}", read("missing.txt"));
    assert_eq!(read("records/PBD.json").contains("cifspassword"), planted_device);

    let found = run(Command::new("grep").args(["-rE", "planted-"]).arg(&unpacked));
    assert_eq!(found.stdout, "");
    for session in [&session, &alice] {
        let found = run(Command::new("grep").args(["-rF", session.reference.as_str()]).arg(&unpacked));
        assert_eq!(found.stdout, "");
    }
    daemon.stop();
}
