//! Each program's log, driven over a limit that is small here: it is rotated, no line is lost or there twice, and a
//! file system without room stops nobody.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;
use tapio_e2e::needs;
use tapio_e2e::process::{Running, poll_until, run, signal};
use tapio_e2e::scratch::{Scratch, SmallFileSystem};
use tapio_e2e::tools::{our, skip};
use tapio_e2e::toolstack::DaemonOptions;

use super::MIB;
use super::storage_hangs::{default_sr, make_vdi, stop, vm_on};

const LIMIT: Duration = Duration::from_secs(60);

/// The smallest limit that programs take.
const SIZE: u64 = 4096;

#[track_caller]
fn until<T>(what: &str, ready: impl FnMut() -> Option<T>) -> T {
    poll_until(LIMIT, ready).unwrap_or_else(|| panic!("{what} did not come"))
}

/// All lines of a log, from its oldest part on. Parts that are being compressed are read as they are.
fn lines(log: &Path) -> Vec<String> {
    let mut text = String::new();
    for number in (1..=300).rev() {
        let part = format!("{}.{number}", log.display());
        if Path::new(&part).exists() {
            text.push_str(&fs::read_to_string(&part).unwrap_or_default());
        } else if Path::new(&format!("{part}.gz")).exists() {
            text.push_str(&run(Command::new("gzip").arg("-dc").arg(format!("{part}.gz"))).ok());
        }
    }
    text.push_str(&fs::read_to_string(log).unwrap_or_default());
    text.lines().map(str::to_owned).collect()
}

/// Whether the log was rotated into compressed parts, and is short.
fn is_rotated(log: &Path) -> bool {
    let part = |end: &str| Path::new(&format!("{}{end}", log.display())).exists();
    let len = fs::metadata(log).map_or(u64::MAX, |data| data.len());
    part(".1.gz") && !part(".1") && len <= SIZE
}

/// What a client of xenstored sends for WRITE, by `xen/include/public/io/xs_wire.h`.
fn write(stream: &mut UnixStream, path: &str, value: &str) {
    let payload = format!("{path}\0{value}");
    let mut bytes = Vec::new();
    for word in [11, 1, 0, payload.len() as u32] {
        bytes.extend_from_slice(&u32::to_le_bytes(word));
    }
    bytes.extend_from_slice(payload.as_bytes());
    stream.write_all(&bytes).expect("sent");
    let mut head = [0; 16];
    stream.read_exact(&mut head).expect("an answer");
    let len = u32::from_le_bytes([head[12], head[13], head[14], head[15]]);
    let mut payload = vec![0; len as usize];
    stream.read_exact(&mut payload).expect("an answer");
    assert_eq!(head[0], 11, "{}", String::from_utf8_lossy(&payload));
}

#[test]
fn xenstored_and_tapback_rotate_what_they_write() {
    needs!("gzip");
    let scratch = Scratch::in_memory();
    let [socket, trace, store_log, log] =
        ["socket", "trace.log", "store.log", "tapback.log"].map(|name| scratch.join(name));
    let limit = [format!("--log-size={SIZE}"), "--log-kept=300".to_owned()];
    let mut command = Command::new(our("tapio-xenstored"));
    command.args(["--domains", "none", "--socket"]).arg(&socket).args(&limit);
    command.arg("--trace-file").arg(&trace).arg("--log-file").arg(&store_log);
    let mut xenstored = Running::start(&mut command, &scratch.join("xenstored.out"));
    let mut stream = xenstored.wait_for("the socket", LIMIT, || UnixStream::connect(&socket).ok());
    let mut command = Command::new(our("tapio-tapback"));
    command.arg("--xenstored").arg(&socket).args(&limit).arg("--log-file").arg(&log);
    command.arg("--run-dir").arg(scratch.join("run"));
    let mut tapback = Running::start(&mut command, &scratch.join("tapback.out"));
    until("its first line", || {
        lines(&log).iter().any(|line| line.contains("serves backend/vbd3")).then_some(())
    });
    for domain in 1..=100 {
        let back = format!("/local/domain/0/backend/vbd3/{domain}/51712");
        let front = format!("/local/domain/{domain}/device/vbd/51712");
        write(&mut stream, &format!("{front}/backend"), &back);
        write(&mut stream, &format!("{back}/mode"), &format!("no-mode-{domain}"));
        write(&mut stream, &format!("{back}/frontend"), &front);
        write(&mut stream, &format!("{back}/frontend-id"), &domain.to_string());
        write(&mut stream, &format!("{back}/state"), "1");
        write(&mut stream, &format!("{front}/state"), "3");
    }
    let of = |log: &Path, part: &str| lines(log).iter().filter(|line| line.contains(part)).count();
    until("a line of each disk, and the rotation", || {
        let domains = (1..=100).filter(|domain| of(&log, &format!(" {domain},51712: ")) > 0).count();
        (domains == 100 && is_rotated(&log)).then_some(())
    });
    let all: Vec<String> = lines(&trace)
        .into_iter()
        .filter(|line| line.contains(" WRITE ") && line.contains("/mode no-mode-"))
        .collect();
    assert!(is_rotated(&trace), "requests");
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 100, "each request once: {all:#?}");
    assert_eq!(all.len(), 100);
    // What it prints itself goes to the file that it writes now.
    let output = fs::read_link(format!("/proc/{}/fd/2", tapback.pid())).expect("a file");
    assert_eq!(output, log);
    tapback.stop(LIMIT);
    assert!(lines(&log).last().is_some_and(|line| line.contains("ends; ")), "the last line is there");
    xenstored.stop(LIMIT);
}

#[test]
fn the_daemon_rotates_its_log_and_that_of_disk_processes() {
    needs!("gzip", "pgrep");
    if Path::new("/run/systemd/journal/socket").exists() {
        return skip("needs a host without the journal");
    }
    let scratch = Scratch::on_disk();
    let (log, disks) = (scratch.join("log/tapiod.log"), scratch.join("log/tapio-disk.log"));
    let options = DaemonOptions::new(&scratch).default_sr();
    let options = options.arg("--set").arg(&format!("log-file={}", log.display()));
    let options = options.arg("--set").arg(&format!("log-dir={}", scratch.join("log").display()));
    let options = options.arg("--set").arg(&format!("log-size={SIZE}")).arg("--set").arg("log-kept=40");
    let daemon = options.start();
    // Each login of an account is a line.
    daemon.add_user("alice", "vm-admin", "password");
    for _ in 0..60 {
        daemon.login_as("alice", "password");
    }
    until("a line of each login, and the rotation", || {
        let logins = lines(&log).iter().filter(|line| line.contains("alice logged in")).count();
        assert!(logins <= 60, "none is there twice");
        (logins == 60 && is_rotated(&log)).then_some(())
    });
    // Storage workers print into the same pipe.
    let output = |pid: u32| fs::read_link(format!("/proc/{pid}/fd/2")).expect("it runs");
    let session = daemon.login();
    let vdi = make_vdi(&session, &default_sr(&session));
    let worker =
        run(Command::new("pgrep").args(["-P", &daemon.process.pid().to_string(), "-f", "storage-worker"]))
            .ok();
    let worker = worker.split_whitespace().next().and_then(|pid| pid.parse().ok()).expect("a worker");
    assert_eq!(output(worker), output(daemon.process.pid()));

    // A disk process says that it is ended; others are played here.
    let (vm, _) = vm_on(&session, &vdi);
    let ctl = fs::read_dir(scratch.join("run/disk")).expect("sockets");
    let pid = ctl
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("ctl")?.parse::<i32>().ok())
        .next();
    let pid = pid.expect("a disk process");
    signal(pid, libc::SIGTERM).expect("it runs");
    let said = format!("tapio-disk[{pid}]: ended by a signal");
    until("its last line", || lines(&disks).iter().any(|line| line.ends_with(&said)).then_some(()));
    let sender = UnixDatagram::unbound().expect("a socket");
    for number in 0..200 {
        sender
            .send_to(format!("tapio-disk[1]: line {number:03} of many").as_bytes(), scratch.join("run/log"))
            .expect("received");
    }
    until("all lines, and the rotation", || {
        let numbers = lines(&disks).iter().filter(|line| line.ends_with(" of many")).count();
        (numbers == 200 && is_rotated(&disks)).then_some(())
    });
    // Another daemon takes the place of one that was killed.
    let daemon = daemon.kill_and_restart();
    sender.send_to(b"tapio-disk[1]: after the kill", scratch.join("run/log")).expect("received");
    until("the line", || lines(&disks).iter().any(|line| line.ends_with("after the kill")).then_some(()));
    daemon.login().call("VM.hard_shutdown", &[json!(vm)]);
    stop(daemon);
    assert!(lines(&log).iter().any(|line| line.contains("alice logged in")));
}

#[test]
fn a_log_without_room_stops_nobody_and_counts_its_losses() {
    let small = match SmallFileSystem::mount(MIB) {
        Ok(small) => small,
        Err(reason) => return skip(&format!("needs root to mount: {reason}")),
    };
    let scratch = Scratch::on_disk();
    let log = small.path().join("tapiod.log");
    let daemon =
        DaemonOptions::new(&scratch).arg("--set").arg(&format!("log-file={}", log.display())).start();
    daemon.add_user("alice", "vm-admin", "password");
    let filler = small.path().join("filler");
    let mut file = fs::File::create(&filler).expect("made");
    while file.write_all(&[7; 4096]).is_ok() {}
    while file.write_all(&[7]).is_ok() {}
    // More lines than the last block of the log has room for.
    for _ in 0..60 {
        daemon.login_as("alice", "password");
    }
    fs::remove_file(&filler).expect("removed");
    drop(file);
    until("the number of lost lines", || {
        let text = fs::read_to_string(&log).unwrap_or_default();
        text.contains(" lines of this log were lost").then_some(())
    });
    daemon.login_as("alice", "password");
    stop(daemon);
    assert!(
        fs::read_to_string(&log).expect("the log").lines().last().is_some_and(|line| !line.contains("lost"))
    );
}
