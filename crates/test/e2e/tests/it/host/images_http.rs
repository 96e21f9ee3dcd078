//! Disks that come and go over HTTP: `tests/python/images.py`, its files looked at by other tools, and kills.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use tapio_e2e::disk::text;
use tapio_e2e::needs;
use tapio_e2e::process::{Finished, poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;
use tapio_e2e::toolstack::{Daemon, DaemonOptions, Session};
use tapio_e2e::world::World;

fn parts(parts: &[&str]) -> World {
    let world = World::new();
    world.daemon().add_user("reader", "read-only", "correct horse");
    let args = [&["json", text(world.scratch.path())], parts].concat();
    println!("{}", world.story("images.py", &args));
    world
}

/// `vhd-util check` finds nothing wrong.
#[track_caller]
fn check(image: &Path) {
    let checked = run(Command::new(our("tapio")).args(["vhd-util", "check", "-n"]).arg(image)).ok();
    assert!(checked.contains("is valid"), "{checked}");
}

#[test]
fn raw_disks_and_parts_of_them() {
    needs!("curl");
    parts(&["raw", "by_curl"]).finish();
}

#[test]
fn vhds_are_whole_and_other_tools_read_them() {
    needs!("qemu-img");
    let world = parts(&["vhd"]);
    let (image, raw) = (world.scratch.join("whole.vhd"), world.scratch.join("whole.raw"));
    check(&image);
    run(Command::new("qemu-img").args(["compare", "-f", "vpc", "-F", "raw"]).arg(&image).arg(&raw)).ok();
    world.finish();
}

#[test]
fn differences_restore_a_disk() {
    let world = parts(&["delta"]);
    let names = std::fs::read_to_string(world.scratch.join("chain")).expect("the story wrote it");
    let names: Vec<&str> = names.lines().collect();
    for name in &names {
        check(&world.scratch.join(name));
    }
    // The two files beside each other are a chain.
    let merged = world.scratch.join("merged.vhd");
    let mut copy = Command::new(our("tapio"));
    run(copy.args(["vhd-util", "copy", "-n"]).arg(world.scratch.join(names[1])).arg("-N").arg(&merged)).ok();
    check(&merged);
    world.finish();
}

#[test]
fn lengths_that_mean_nothing_and_connections_that_are_cut() {
    parts(&["unknown_length"]).finish();
}

#[test]
fn every_failure_reaches_the_client_and_its_task() {
    parts(&["errors", "early", "roles"]).finish();
}

#[test]
fn what_a_transfer_holds() {
    parts(&["in_use"]).finish();
}

#[test]
fn an_export_holds_what_there_was_when_it_began_while_chains_are_merged() {
    needs!("qemu-img");
    let world = parts(&["collected"]);
    let (image, raw) = (world.scratch.join("collected.vhd"), world.scratch.join("collected.raw"));
    check(&image);
    run(Command::new("qemu-img").args(["compare", "-f", "vpc", "-F", "raw"]).arg(&image).arg(&raw)).ok();
    world.finish();
}

#[test]
fn a_daemon_that_is_killed_in_the_middle_leaves_no_half_disk() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let session = daemon.login();
    let pool = session.call("pool.get_all", &[])[0].clone();
    let sr = session.text("pool.get_default_SR", &[pool]);
    let before = session.call("VDI.get_all", &[]);
    let task = session.text("task.create", &[json!("of a product"), json!("")]);
    let mut stream = UnixStream::connect(&daemon.socket).expect("it is served");
    let head = format!(
        "PUT /import_raw_vdi?sr_id={sr}&task_id={task} HTTP/1.1\r\nhost: x\r\ncontent-length: 67108864\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).expect("taken");
    stream.write_all(&vec![b'x'; 8 << 20]).expect("taken");
    let progress = || session.call("task.get_progress", &[json!(task)]).as_f64().filter(|done| *done > 0.0);
    poll_until(Duration::from_secs(60), progress).expect("the import goes on");
    let daemon = daemon.kill_and_restart();
    let _ = stream.read(&mut [0; 512]);
    let session = daemon.login();
    assert_eq!(session.call("VDI.get_all", &[]), before);
    assert_eq!(session.text("task.get_status", &[json!(task)]), "failure");
    let images = || {
        let gone = !image_files(scratch.path());
        gone.then_some(())
    };
    poll_until(Duration::from_secs(60), images).expect("no image is left");
    daemon.stop();
}

/// A request on a connection of its own, with the first bytes of its body.
fn begin(daemon: &Daemon, head: &str, body: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect(&daemon.socket).expect("it is served");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    // An export has no body; a length of 0 says so.
    let len = if body.is_empty() { 0 } else { 64 << 20 };
    let head = format!("{head} HTTP/1.1\r\nhost: x\r\ncontent-length: {len}\r\n\r\n");
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).expect("taken");
    stream
}

/// What a connection answers until it ends.
fn answer(mut stream: UnixStream) -> String {
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// A VDI of 64 MiB in the default SR of a daemon.
fn make_disk(session: &Session) -> String {
    let pool = session.call("pool.get_all", &[])[0].clone();
    let sr = session.text("pool.get_default_SR", &[pool]);
    let record = json!({"SR": sr, "virtual_size": 64 << 20, "type": "user", "name_label": "disk"});
    session.text("VDI.create", &[record])
}

#[test]
fn one_transfer_too_many_is_told_so() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().arg("--set=transfers-max=1").start();
    let session = daemon.login();
    let [first, other] = [(); 2].map(|()| make_disk(&session));
    let task = session.text("task.create", &[json!("import"), json!("")]);
    let import = format!("PUT /import_raw_vdi?vdi={first}&task_id={task}");
    let stream = begin(&daemon, &import, &vec![b'x'; 8 << 20]);
    let progress = || session.call("task.get_progress", &[json!(task)]).as_f64().filter(|done| *done > 0.0);
    poll_until(Duration::from_secs(60), progress).expect("the import goes on");
    let refused = answer(begin(&daemon, &format!("GET /export_raw_vdi?vdi={other}"), &[]));
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("TOO_MANY_PENDING_TASKS"), "{refused}");
    // The place comes back with the end of the first.
    stream.shutdown(Shutdown::Write).expect("open");
    assert!(answer(stream).contains("IMPORT_ERROR_PREMATURE_EOF"));
    let mut head = [0; 12];
    let again = || {
        let mut stream = begin(&daemon, &format!("GET /export_raw_vdi?vdi={other}"), &[]);
        stream.read_exact(&mut head).ok()?;
        (&head == b"HTTP/1.1 200").then_some(())
    };
    poll_until(Duration::from_secs(60), again).expect("there is room");
    daemon.stop();
}

#[test]
fn silent_clients_let_go_of_their_disks() {
    let scratch = Scratch::on_disk();
    let options = DaemonOptions::new(&scratch).default_sr();
    let daemon = options.arg("--set=upload-time=1").arg("--set=write-time=1").start();
    let session = daemon.login();
    let [read, written] = [(); 2].map(|()| make_disk(&session));
    let [export, import] =
        ["export", "import"].map(|name| session.text("task.create", &[json!(name), json!("")]));
    // One reads nothing of 64 MiB, one sends a part of them. Both stay connected.
    let reader = begin(&daemon, &format!("GET /export_raw_vdi?vdi={read}&task_id={export}"), &[]);
    let writer =
        begin(&daemon, &format!("PUT /import_raw_vdi?vdi={written}&task_id={import}"), &vec![b'x'; 1 << 20]);
    for task in [&export, &import] {
        let ended = || (session.text("task.get_status", &[json!(task)]) == "failure").then_some(());
        poll_until(Duration::from_secs(60), ended).expect("it does not end");
    }
    let told = session.call("task.get_error_info", &[json!(import)]);
    assert_eq!(told[0], "IMPORT_ERROR_PREMATURE_EOF");
    let told = answer(writer);
    assert!(told.starts_with("HTTP/1.1 400"), "{told}");
    for vdi in [&read, &written] {
        session.call("VDI.destroy", &[json!(vdi)]);
    }
    assert!(answer(reader).len() < 64 << 20, "the rest never comes");
    daemon.stop();
}

/// Of every kind of transfer, more than a few at a time: `tests/python/silent.py`.
#[test]
fn clients_that_stop_in_the_middle_hold_nothing() {
    needs!("zstd");
    let world = World::with(|options| {
        let times = ["upload-time=1", "write-time=1", "head-time=1", "body-time=1"];
        times.iter().fold(options, |options, time| options.arg(&format!("--set={time}")))
    });
    println!("{}", world.story("silent.py", &["json", text(world.scratch.path()), "every_kind", "heads"]));
    world.finish();
}

/// A socket before the daemon's that cuts the first `cuts` connections that carry more than `limit` bytes.
fn cutting_proxy(path: &Path, daemon: &Path, limit: u64, cuts: u64) -> Arc<AtomicU64> {
    let listener = UnixListener::bind(path).expect("a socket");
    let (daemon, left) = (daemon.to_path_buf(), Arc::new(AtomicU64::new(cuts)));
    let counted = Arc::clone(&left);
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let server = UnixStream::connect(&daemon).expect("it is served");
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (mut from, mut to) = (from.try_clone().expect("a copy"), to.try_clone().expect("a copy"));
                let left = Arc::clone(&counted);
                std::thread::spawn(move || {
                    let (mut piece, mut done) = (vec![0; 64 << 10], 0);
                    while let Ok(len @ 1..) = from.read(&mut piece) {
                        done += len as u64;
                        let take = |left: u64| left.checked_sub(1);
                        if done > limit && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
                        {
                            break;
                        }
                        if to.write_all(&piece[..len]).is_err() {
                            break;
                        }
                    }
                    let _ = from.shutdown(Shutdown::Both);
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
    left
}

/// Standard error of a program that succeeded.
#[track_caller]
fn stderr(finished: Finished) -> String {
    assert!(finished.status.success(), "{finished}");
    finished.stderr
}

#[test]
fn xe_goes_on_after_a_cut_connection() {
    let world = World::new();
    let scratch = &world.scratch;
    let proxy = scratch.join("proxy");
    let left = cutting_proxy(&proxy, &world.daemon().socket, 3 << 20, 4);
    let xe = |words: &[&str]| run(world.xe().env("TAPIO_SOCKET", &proxy).args(words));
    let sr = xe(&["sr-list", "type=file", "--minimal"]).ok().trim().to_owned();
    let make = |name: &str| {
        let (sr, name) = (format!("sr-uuid={sr}"), format!("name-label={name}"));
        format!("uuid={}", xe(&["vdi-create", &sr, &name, "virtual-size=16MiB"]).ok().trim())
    };
    let disk: Vec<u8> = (0..16 << 20_u32).map(|at| ((at / 512) % 251) as u8 + 1).collect();
    let source = scratch.join("source.raw");
    std::fs::write(&source, &disk).expect("written");
    let file = |name: &str| format!("filename={}", text(&scratch.join(name)));

    let first = make("first");
    let said = stderr(xe(&["vdi-import", &first, &file("source.raw"), "--progress"]));
    assert!(said.contains("going on at byte ") && !said.contains("at byte 0"), "{said}");
    assert!(said.contains("100 %"), "{said}");
    assert!(left.load(Ordering::SeqCst) < 4, "a connection was cut");
    left.store(2, Ordering::SeqCst);
    let said = stderr(xe(&["vdi-export", &first, &file("again.raw")]));
    assert!(said.contains("going on at byte "), "{said}");
    assert_eq!(left.load(Ordering::SeqCst), 0);
    assert!(std::fs::read(scratch.join("again.raw")).expect("it is whole") == disk);
    assert!(xe(&["vdi-export", &first, &file("again.raw")]).fails().contains("is there already"));

    // A VHD begins anew when it is sent, not when it is received.
    left.store(1, Ordering::SeqCst);
    xe(&["vdi-export", &first, &file("disk.vhd"), "format=vhd"]).ok();
    check(&scratch.join("disk.vhd"));
    let second = make("second");
    left.store(1, Ordering::SeqCst);
    xe(&["vdi-import", &second, &file("disk.vhd"), "format=vhd"]).ok();
    assert_eq!(left.load(Ordering::SeqCst), 0);

    // Over TLS, the difference of two snapshots.
    let https = world.daemon().https.clone().expect("HTTPS is served");
    let port = https.rsplit(':').next().expect("a port").trim_end_matches('/').to_owned();
    let remote = |words: &[&str]| {
        let mut command = world.xe();
        command.env("XE_PASSWORD", "correct horse").args(["-s", "127.0.0.1", "-p", &port, "-u", "alice"]);
        run(command.args(words))
    };
    let before = remote(&["vdi-snapshot", &second]).ok();
    let after = remote(&["vdi-snapshot", &second]).ok();
    let base = format!("base={}", before.trim());
    let after = format!("uuid={}", after.trim());
    remote(&["vdi-export", &after, &base, &file("none.vhd"), "format=vhd"]).ok();
    assert!(std::fs::metadata(scratch.join("none.vhd")).expect("it is there").len() < 16 << 10);
    remote(&["vdi-export", &second, &file("second.raw")]).ok();
    assert!(std::fs::read(scratch.join("second.raw")).expect("it is whole") == disk);
    let refused = remote(&["vdi-import", &first, &file("second.raw"), "format=qcow2"]).fails();
    assert!(refused.contains("raw and vhd are known"), "{refused}");
    let refused = remote(&["vdi-import", &first, &file("second.raw"), "format=vhd"]).fails();
    assert!(refused.contains("no VHD footer"), "{refused}");
    assert_eq!(xe(&["task-list", "--minimal"]).ok().trim(), "");
    world.finish();
}

/// Whether an image lies in the SR below a daemon's directory.
fn image_files(dir: &Path) -> bool {
    let found = run(Command::new("find").arg(dir).args(["-name", "*.vhd", "-o", "-name", "*.raw"])).ok();
    !found.trim().is_empty()
}
