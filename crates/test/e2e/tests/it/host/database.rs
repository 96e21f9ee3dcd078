//! The database and the host as files, by `xe`, and a daemon that is killed at each step of a restore; the database on
//! an SR.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use serde_json::json;
use tapio_e2e::process::{Finished, poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;
use tapio_e2e::toolstack::{Daemon, DaemonOptions};

const LIMIT: Duration = Duration::from_secs(60);

fn xe(daemon: &Daemon, words: &[&str]) -> Finished {
    let mut command = std::process::Command::new(our("tapio"));
    command.arg("xe").env("TAPIO_SOCKET", &daemon.socket).env_remove("XE_EXTRA_ARGS");
    run(command.args(words))
}

/// The name of the pool, when the daemon answers.
fn name(daemon: &Daemon) -> Option<String> {
    let mut command = std::process::Command::new(our("tapio"));
    command.arg("xe").env("TAPIO_SOCKET", &daemon.socket).args([
        "pool-list",
        "params=name-label",
        "--minimal",
    ]);
    let done = command.output().ok().filter(|done| done.status.success())?;
    Some(String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

fn rename(daemon: &Daemon, name: &str) {
    let session = daemon.login();
    let pool = session.call("pool.get_all", &[])[0].clone();
    session.call("pool.set_name_label", &[pool, json!(name)]);
}

#[test]
fn a_database_is_dumped_and_restored_whatever_ends_the_daemon() {
    let scratch = Scratch::on_disk();
    let options = DaemonOptions::new(&scratch);
    let daemon = options.start();
    rename(&daemon, "then");
    let file = scratch.join("pool.dump");
    let named = format!("file-name={}", file.display());
    xe(&daemon, &["pool-dump-database", &named]).ok();
    assert_eq!(std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
    let refused = xe(&daemon, &["pool-dump-database", &named]).fails();
    assert!(refused.contains("is there already"), "{refused}");
    let out = xe(&daemon, &["pool-dump-database", "file-name=-"]).ok();
    assert_eq!(out.lines().count(), std::fs::read_to_string(&file).expect("text").lines().count());

    rename(&daemon, "now");
    let dry = xe(&daemon, &["pool-restore-database", &named, "dry-run=true"]).ok();
    assert!(
        dry.contains("~ pool ") && dry.contains("name_label") && dry.contains("nothing was changed"),
        "{dry}"
    );
    assert_eq!(name(&daemon).as_deref(), Some("now"));
    let report = xe(&daemon, &["pool-restore-database", &named, "dry-run=true", "--json"]).ok();
    assert!(report.contains("\"dry_run\": true"), "{report}");
    let said = xe(&daemon, &["pool-restore-database", &named]).ok();
    assert!(said.contains("tapiod starts again"), "{said}");
    let is_back = || (name(&daemon).as_deref() == Some("then")).then_some(());
    poll_until(LIMIT, is_back).expect("the pool is as it was");
    daemon.stop();

    for step in ["pool-restore:staged", "pool-restore:kept", "pool-restore:committed"] {
        let mut daemon = options.clone().env("TAPIO_DIE_AT", step).start();
        rename(&daemon, "now");
        // The first step ends the daemon that is asked, the others the one that it becomes.
        let _ = xe(&daemon, &["pool-restore-database", &named]);
        assert_eq!(daemon.process.wait(LIMIT).code(), Some(137), "{step}");
        drop(daemon);
        let daemon = options.start();
        assert_eq!(name(&daemon).as_deref(), Some("then"), "{step}");
        assert!(!scratch.join("state/database.restore").exists(), "{step}");
        daemon.stop();
    }
}

const STEPS_OF_A_HOST: [&str; 6] = [
    "host-restore:staged",
    "host-restore:begun",
    "host-restore:server.pem",
    "host-restore:accounts",
    "host-restore:database",
    "host-restore:tapiod.conf",
];

#[test]
fn a_host_is_kept_and_comes_back_whatever_ends_the_daemon() {
    let scratch = Scratch::on_disk();
    let settings = scratch.join("tapiod.conf");
    let then = "# Then.\nlog-level = debug\n";
    std::fs::write(&settings, then).expect("written");
    let options = DaemonOptions::new(&scratch).tls().config(&settings);
    let daemon = options.start();
    daemon.add_user("alice", "vm-admin", "a long password");
    rename(&daemon, "then");
    let (certificate, accounts) = (scratch.join("state/server.pem"), scratch.join("state/accounts"));
    let files = [&settings, &certificate, &accounts].map(|path| path.clone());
    let read = |path: &std::path::PathBuf| std::fs::read(path).expect("a file");
    let before = files.each_ref().map(read);
    let file = scratch.join("host.tar");
    let named = format!("file-name={}", file.display());
    let said = xe(&daemon, &["host-backup", &named]);
    assert!(said.stderr.contains("holds secrets, such as the host's key"), "{said:?}");
    said.ok();
    assert_eq!(std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
    let listed = run(std::process::Command::new("tar").arg("-tf").arg(&file)).ok();
    assert_eq!(
        listed.lines().collect::<Vec<_>>(),
        ["manifest.json", "database.tapio", "tapiod.conf", "server.pem", "accounts"]
    );

    let spoil = |daemon: &Daemon| {
        rename(daemon, "now");
        xe(daemon, &["host-reset-server-certificate"]).ok();
        std::fs::write(&settings, "log-level = info\n").expect("written");
        std::fs::write(&accounts, "# None.\n").expect("written");
    };
    let is_as_before = |daemon: &Daemon, step: &str| {
        assert_eq!(name(daemon).as_deref(), Some("then"), "{step}");
        assert!(files.each_ref().map(read) == before, "{step}: the files are those of the backup");
        for left in ["host.restore", "host.restoring", "host.refused"] {
            assert!(!scratch.join("state").join(left).exists(), "{step}: {left}");
        }
        daemon.login_as("alice", "a long password").call("session.logout", &[]);
    };
    spoil(&daemon);
    let dry = xe(&daemon, &["host-restore", &named, "dry-run=true"]).ok();
    assert!(dry.contains("~ pool ") && dry.contains("nothing was changed"), "{dry}");
    for path in &files {
        assert!(dry.contains(&format!("{} changes", path.display())), "{dry}");
    }
    assert_eq!(name(&daemon).as_deref(), Some("now"));
    let mut cut = read(&file);
    cut.truncate(cut.len() - 2048);
    std::fs::write(scratch.join("cut.tar"), cut).expect("written");
    let cut = format!("file-name={}", scratch.join("cut.tar").display());
    let refused = xe(&daemon, &["host-restore", &cut, "--force"]).fails();
    assert!(refused.contains("backup of a host") && refused.contains("cut off"), "{refused}");
    let said = xe(&daemon, &["host-restore", &named]).ok();
    assert!(said.contains("tapiod starts again"), "{said}");
    let is_back = || (name(&daemon).as_deref() == Some("then")).then_some(());
    poll_until(LIMIT, is_back).expect("the host is as it was");
    daemon.stop();
    assert_eq!(read(&scratch.join("tapiod.conf.before-restore")), b"log-level = info\n");
    let daemon = options.start();
    is_as_before(&daemon, "a restore");
    daemon.stop();

    for step in STEPS_OF_A_HOST {
        let mut daemon = options.clone().env("TAPIO_DIE_AT", step).start();
        spoil(&daemon);
        // The first step ends the daemon that is asked, the others the one that it becomes.
        let _ = xe(&daemon, &["host-restore", &named]);
        assert_eq!(daemon.process.wait(LIMIT).code(), Some(137), "{step}");
        drop(daemon);
        let daemon = options.start();
        is_as_before(&daemon, step);
        daemon.stop();
    }
}

#[test]
fn a_vm_comes_back_on_another_host() {
    let (scratch, other) = (Scratch::on_disk(), Scratch::on_disk());
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let line = |daemon: &Daemon, words: &[&str]| xe(daemon, words).ok().trim().to_owned();
    let list = |daemon: &Daemon, words: &[&str]| line(daemon, &[words, &["--minimal"]].concat());
    let sr = list(&daemon, &["sr-list", "type=file"]);
    let on_sr = format!("sr-uuid={sr}");
    let disk = line(&daemon, &["vdi-create", &on_sr, "name-label=disk", "virtual-size=8MiB"]);
    let templates = list(&daemon, &["template-list"]);
    let template = format!("template-uuid={}", templates.split(',').next().expect("a template"));
    let vm = line(&daemon, &["vm-install", &template, "new-name-label=web"]);
    line(&daemon, &["vbd-create", &format!("vm-uuid={vm}"), &format!("vdi-uuid={disk}"), "device=5"]);
    let named = format!("uuid={sr}");
    line(&daemon, &["sr-enable-database-replication", &named]);
    let pbd = list(&daemon, &["pbd-list", &on_sr]);
    line(&daemon, &["pbd-unplug", &format!("uuid={pbd}")]);

    let host = DaemonOptions::new(&other).start();
    line(&host, &["sr-introduce", &named, "type=file", "name-label=site"]);
    let own = format!("host-uuid={}", list(&host, &["host-list"]));
    let location = format!("device-config:location={}", scratch.join("sr").display());
    let pbd = line(&host, &["pbd-create", &on_sr, &own, &location]);
    line(&host, &["pbd-plug", &format!("uuid={pbd}")]);
    let vdi = list(&host, &["vdi-list", "type=Metadata", &on_sr]);
    let database = format!("database:vdi-uuid={vdi}");
    let there = list(&host, &["vm-list", "name-label=web", &database]);
    assert_eq!(there, vm);
    let named = format!("uuid={vm}");
    line(&host, &["vm-assert-can-be-recovered", &named, &database]);
    line(&host, &["vm-recover", &named, &database]);
    assert_eq!(list(&host, &["vm-list", "name-label=web", "power-state=halted"]), vm);
    let found = list(&host, &["vbd-list", &format!("vm-uuid={vm}"), "params=vdi-uuid"]);
    assert!(found.split(',').any(|vdi| vdi == disk), "{found}");
    let refused = xe(&host, &["vm-recover", &named, &database]).fails();
    assert!(refused.contains("not newer"), "{refused}");
    line(&host, &["vm-recover", &named, &database, "--force"]);
    host.stop();
    daemon.stop();
}
