//! The daemon's own life: start, certificate, accounts, signals, end.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

use serde_json::json;
use tapio_e2e::needs;
use tapio_e2e::process::{poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::{our, repository};
use tapio_e2e::toolstack::{DaemonOptions, END_LIMIT};

fn text(path: &std::path::Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn state_is_kept_and_one_daemon_has_it() {
    let scratch = Scratch::on_disk();
    let options = DaemonOptions::new(&scratch);
    let daemon = options.start();
    let session = daemon.login();
    let pool = session.call("pool.get_all", &[])[0].clone();
    session.call("pool.set_name_label", &[pool.clone(), json!("kept")]);
    let said = options.refused();
    assert!(said.contains("another tapiod") && said.contains(&daemon.process.pid().to_string()), "{said}");
    let socket = std::fs::metadata(&daemon.socket).expect("the socket");
    assert!(socket.file_type().is_socket() && socket.mode() & 0o777 == 0o600, "{:o}", socket.mode());
    let state = std::fs::metadata(scratch.join("state")).expect("the state");
    assert_eq!(state.mode() & 0o777, 0o700);
    // Killed, then ended in order: what was answered is there.
    let daemon = daemon.kill_and_restart();
    assert_eq!(daemon.login().text("pool.get_name_label", std::slice::from_ref(&pool)), "kept");
    daemon.stop();
    assert!(!scratch.join("run/xapi").exists() && !scratch.join("run/listening").exists());
    let daemon = options.start();
    assert_eq!(daemon.login().text("pool.get_name_label", &[pool]), "kept");
    daemon.stop();
}

#[test]
fn a_default_sr_is_made_once() {
    let scratch = Scratch::on_disk();
    let options = DaemonOptions::new(&scratch).default_sr();
    let daemon = options.start();
    let found = |daemon: &tapio_e2e::toolstack::Daemon| {
        let session = daemon.login();
        let pool = session.call("pool.get_all", &[])[0].clone();
        let sr = session.text("pool.get_default_SR", &[pool]);
        assert_eq!(session.text("SR.get_type", &[json!(sr)]), "file");
        (sr, session.call("SR.get_all", &[]).as_array().expect("a list").len())
    };
    let first = found(&daemon);
    daemon.stop();
    let daemon = options.start();
    assert_eq!(found(&daemon), first);
    daemon.stop();
}

#[test]
fn a_certificate_of_ones_own_takes_effect_at_once() {
    needs!("openssl");
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).tls().start();
    let address = daemon.https.clone().expect("HTTPS is served").replace("https://", "");
    let shown = || {
        let script = format!(
            "openssl s_client -connect {address} </dev/null 2>/dev/null | openssl x509 -noout -fingerprint -sha256 -subject -ext subjectAltName"
        );
        run(Command::new("sh").args(["-c", &script])).ok()
    };
    let before = shown();
    assert!(before.contains("DNS:localhost") && before.contains("IP Address:127.0.0.1"), "{before}");
    let fingerprint = before.lines().next().and_then(|line| line.split('=').nth(1)).expect("a fingerprint");
    assert!(daemon.process.log().contains(fingerprint), "it is printed at the start");
    let (cert, key) = (scratch.join("cert.pem"), scratch.join("key.pem"));
    let mut make = Command::new("openssl");
    make.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ours"]);
    run(make.arg("-out").arg(&cert).arg("-keyout").arg(&key)).ok();
    let install = |cert: &std::path::Path, key: &std::path::Path| {
        let mut command = Command::new(our("tapiod"));
        command.args(["--config", "/dev/null", "--state-dir"]).arg(scratch.join("state"));
        run(command.arg("--install-certificate").arg(cert).arg(key))
    };
    assert!(install(&cert, &cert).fails().contains("no key"));
    let said = install(&cert, &key).ok();
    let fresh = said.trim().strip_prefix("SHA-256 ").expect("a fingerprint");
    let now = poll_until(Duration::from_secs(60), || Some(shown()).filter(|shown| shown.contains(fresh)));
    assert!(now.expect("the new certificate").contains("CN = ours"));
    // The same by a client, who may also go back to one that is signed by itself.
    let xe = |args: &[&str]| {
        run(Command::new(our("tapio")).arg("xe").args(args).env("TAPIO_SOCKET", &daemon.socket))
    };
    xe(&["host-reset-server-certificate"]).ok();
    assert!(!shown().contains(fresh) && shown().contains("DNS:localhost"), "{}", shown());
    let [cert_file, key_file] =
        [("certificate", &cert), ("private-key", &key)].map(|(name, path)| format!("{name}={}", text(path)));
    let install = "host-server-certificate-install";
    let wrong = xe(&[install, &cert_file, &format!("private-key={}", text(&cert))]).fails();
    assert!(wrong.contains("no key in PEM"), "{wrong}");
    let wrong = xe(&[install, &cert_file, &key_file, &format!("certificate-chain={}", text(&key))]).fails();
    assert!(wrong.contains("no certificate in the chain"), "{wrong}");
    xe(&[install, &cert_file, &key_file]).ok();
    assert!(shown().contains(fresh));
    let pem = xe(&["host-get-server-certificate"]).ok();
    assert_eq!(pem.trim(), std::fs::read_to_string(&cert).expect("PEM").trim());
    assert!(!daemon.process.log().contains("PRIVATE KEY"), "the key is in no log");
    // Both versions of TLS that are let in, and none before them.
    for (version, works) in [("-tls1_3", true), ("-tls1_2", true), ("-tls1_1", false)] {
        let script = format!("openssl s_client {version} -connect {address} </dev/null");
        let finished = run(Command::new("sh").args(["-c", &script]));
        assert_eq!(finished.stdout.contains("BEGIN CERTIFICATE"), works, "{version} {finished}");
    }
    daemon.stop();
}

#[test]
fn accounts_are_made_on_the_command_line() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    daemon.add_user("alice", "vm-admin", "correct horse");
    let user = |args: &[&str]| {
        let mut command = Command::new(our("tapiod"));
        command
            .arg("user")
            .args(args)
            .args(["--config", "/dev/null", "--state-dir"])
            .arg(scratch.join("state"));
        run(&mut command)
    };
    user(&["add", "wheel", "--group", "--role", "pool-admin"]).ok();
    let list = user(&["list"]).ok();
    let rows: Vec<Vec<&str>> = list.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows, [vec!["own", "vm-admin", "alice"], vec!["group", "pool-admin", "wheel"]]);
    assert!(user(&["add", "bob", "--role", "king"]).fails().contains("pool-operator"));
    assert!(user(&["add", "bob", "--role", "read-only"]).fails().contains("no password"));
    assert!(user(&["passwd", "bob"]).fails().contains("no account 'bob'"));
    user(&["remove", "wheel", "--group"]).ok();
    assert!(user(&["remove", "wheel", "--group"]).fails().contains("wheel"));
    // The password is in no log.
    assert!(!daemon.process.log().contains("correct horse"));
    daemon.stop();
}

#[test]
fn settings_are_checked_and_shown() {
    let scratch = Scratch::on_disk();
    let tapiod = |args: &[&str]| run(Command::new(our("tapiod")).args(args));
    let shown = tapiod(&["--config", "/dev/null", "--print-config"]).ok();
    let file = scratch.join("tapiod.conf");
    std::fs::write(&file, shown.replace("worker-pool-size = auto", "worker-pool-size = 7")).expect("written");
    let again = tapiod(&["--config", text(&file), "--print-config"]).ok();
    assert!(again.contains("worker-pool-size = 7") && again.contains("listen = 0.0.0.0:443"), "{again}");
    let state = scratch.join("state");
    std::fs::create_dir(&state).expect("made");
    let check = ["--config", text(&file), "--state-dir", text(&state), "--check"];
    let said = tapiod(&check).ok();
    assert!(said.contains("is free") && said.contains("made at the first start"), "{said}");
    std::fs::write(state.join("accounts"), "nonsense\n").expect("written");
    assert!(tapiod(&check).fails().contains("accounts: line 1"));
    std::fs::write(&file, "worker-pool = 7\n").expect("written");
    assert!(tapiod(&check).fails().contains("line 1: there is no key 'worker-pool'"));
    let help = tapiod(&["--help"]).ok();
    for word in ["--default-sr", "tapiod user add", "SIGHUP", "--print-config"] {
        assert!(help.contains(word), "{word}");
    }
}

#[test]
fn the_manager_hears_and_a_hangup_is_no_end() {
    let scratch = Scratch::on_disk();
    let socket = scratch.join("notify");
    let manager = UnixDatagram::bind(&socket).expect("bound");
    manager.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let receive = || {
        let mut bytes = [0; 4096];
        let len = manager.recv(&mut bytes).expect("a message in time");
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    let options =
        DaemonOptions::new(&scratch).env("NOTIFY_SOCKET", text(&socket)).env("WATCHDOG_USEC", "200000");
    let mut daemon = options.start();
    let ready = receive();
    assert!(ready.contains("READY=1") && ready.contains("STATUS=serving unix:"), "{ready}");
    assert_eq!(receive(), "WATCHDOG=1");
    daemon.process.signal(libc::SIGHUP);
    let read_again =
        poll_until(Duration::from_secs(60), || daemon.process.log().contains("read again").then_some(()));
    assert!(read_again.is_some(), "{}", daemon.process.log());
    assert_eq!(receive(), "WATCHDOG=1");
    daemon.process.signal(libc::SIGTERM);
    let last = std::iter::repeat_with(receive).find(|text| text != "WATCHDOG=1").expect("endless");
    assert!(last.starts_with("STOPPING=1"), "{last}");
    assert!(daemon.process.wait(END_LIMIT).success());
}

#[test]
fn the_units_are_such_as_systemd_takes() {
    needs!("systemd-analyze");
    let scratch = Scratch::on_disk();
    let unit = std::fs::read_to_string(repository().join("packaging/tapiod.service")).expect("the unit");
    let path = scratch.join("tapiod.service");
    std::fs::write(&path, unit.replace("/usr/sbin/tapiod", text(&our("tapiod")))).expect("written");
    let finished = run(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path));
    let complaints: Vec<&str> = finished.stderr.lines().filter(|line| line.contains("tapiod")).collect();
    assert!(finished.status.success() && complaints.is_empty(), "{finished}");
}
