//! The command line of clients that have XenServer's own `xe`, by an independent client of its protocol.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tapio_e2e::needs;
use tapio_e2e::process::{Finished, Running, poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::toolstack::{Daemon, DaemonOptions};

const CLIENT: &str = include_str!("thin_cli.py");

fn xe(place: &str, words: &[&str]) -> Finished {
    run(Command::new("python3").args(["-c", CLIENT, place]).args(words))
}

fn address(url: Option<&str>) -> String {
    url.and_then(|url| url.split_once("://")).expect("an address").1.trim_end_matches('/').to_owned()
}

#[test]
fn the_same_commands_with_accounts_roles_and_files_of_the_client() {
    needs!("python3");
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).tls().default_sr().start();
    daemon.add_user("joe", "read-only", "correct-horse-9");
    daemon.add_user("ann", "pool-admin", "correct-horse-8");
    let tls = format!("tls:{}", address(daemon.https.as_deref()));
    let ann = |words: &[&str]| xe(&tls, &[&["username=ann", "password=correct-horse-8"], words].concat());
    let value = |words: &[&str]| ann(words).ok().trim_end().to_owned();

    // Output to the letter, and what root on the host needs no password for.
    let sr = value(&["sr-list", "type=file", "--minimal"]);
    let root = format!("unix:{}", daemon.socket.display());
    assert_eq!(xe(&root, &["sr-list", "type=file", "--minimal"]).ok(), format!("{sr}\n"));
    let vdi = value(&["vdi-create", &format!("sr-uuid={sr}"), "name-label=data", "virtual-size=2MiB"]);
    let listed = ann(&["vdi-list", &format!("uuid={vdi}"), "params=uuid,name-label"]).ok();
    let expected = format!("uuid ( RO)          : {vdi}\n    name-label ( RW): data\n\n\n");
    assert_eq!(listed, expected);
    assert!(ann(&["help", "vdi-create"]).ok().contains("reqd params     : sr-uuid"));

    // Errors as elsewhere.
    assert_eq!(ann(&["florist"]).fails(), "Unknown command: florist\nFor usage run: 'xe help'\n");
    assert!(ann(&["vdi-destroy"]).fails().starts_with("Required parameter not found: uuid\n"));
    assert!(ann(&["vdi-destroy", "uuid=1"]).fails().contains("UUID"));

    // Accounts and roles; a wrong password is told as that xe tells it.
    assert_eq!(xe(&tls, &["sr-list"]).fails(), "Authentication failed\n");
    assert_eq!(xe(&tls, &["username=joe", "password=wrong", "sr-list"]).fails(), "Authentication failed\n");
    let joe = |words: &[&str]| xe(&tls, &[&["username=joe", "password=correct-horse-9"], words].concat());
    assert_eq!(joe(&["vdi-list", "name-label=data", "--minimal"]).ok(), format!("{vdi}\n"));
    let denied = joe(&["vdi-destroy", &format!("uuid={vdi}")]).fails();
    assert!(denied.starts_with("The role of the session does not allow this.\n"), "{denied}");

    // Where the command works is not the client's to choose.
    let elsewhere = ["server=192.0.2.1", "--socket", "/nowhere", "sr-list", "--minimal"];
    assert!(ann(&elsewhere).ok().contains(&sr));

    // Files are the client's.
    let (there, back) = (scratch.path().join("there.raw"), scratch.path().join("back.raw"));
    let bytes: Vec<u8> = (0..2_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&there, &bytes).expect("written");
    let id = format!("uuid={vdi}");
    let file = |path: &std::path::Path| format!("filename={}", path.display());
    ann(&["vdi-import", &id, &file(&there)]).ok();
    ann(&["vdi-export", &id, &file(&back)]).ok();
    let came = std::fs::read(&back).expect("written");
    assert!(came == bytes, "what came back differs: {} bytes", came.len());
    let missing = ann(&["vdi-import", &id, "filename=/nowhere/at.all"]).fails();
    assert!(missing.ends_with("\nError: the client did not send the file\n"), "{missing}");
    let dir = scratch.path().join("dir.txt");
    std::fs::write(&dir, "/nowhere/at/all").expect("written");
    let named = format!("device-config:location-filename={}", dir.display());
    let tried = ann(&["sr-probe-ext", "type=file", &named]);
    assert!(!format!("{tried}").contains("cannot read"), "{tried}");
    let refused = ann(&["console", "uuid=1"]).fails();
    assert!(refused.contains("works by the xe that comes with Tapio alone"), "{refused}");

    bad_requests(&daemon);
    nothing_stays_of_a_client_that_goes_away(&daemon, &root, scratch.path());
    daemon.stop();
}

fn bad_requests(daemon: &Daemon) {
    let send = |request: &str| {
        let mut stream = TcpStream::connect(address(Some(&daemon.http))).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("answered");
        String::from_utf8_lossy(&answer).into_owned()
    };
    for (request, said) in [
        ("POST /cli HTTP/1.0\r\n\r\n", "content-length"),
        ("POST /cli HTTP/1.0\r\ncontent-length: 999999\r\n\r\n", "bytes"),
        ("POST /cli HTTP/1.0\r\ncontent-length: 1\r\n\r\n\0", "zero"),
    ] {
        let answer = send(request);
        assert!(answer.starts_with("HTTP/1.0 400 ") && answer.contains(said), "{answer}");
    }
    // Requests that begin alike go the way of all others.
    assert!(send("POST /climate HTTP/1.0\r\ncontent-length: 0\r\n\r\n").contains("HTTP/1."));
}

/// Programs that the daemon runs for clients.
fn programs(daemon: &Daemon) -> usize {
    pids(daemon).len()
}

fn pids(daemon: &Daemon) -> Vec<PathBuf> {
    let parent = format!("PPid:\t{}\n", daemon.process.pid());
    let is_ours = |dir: &std::path::Path| {
        let text = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap_or_default();
        text("status").contains(&parent) && text("cmdline").contains("__serve")
    };
    let entries = std::fs::read_dir("/proc").expect("listed");
    entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|dir| is_ours(dir)).collect()
}

/// What the program of a command has given up, as the kernel tells it.
fn is_confined(program: &std::path::Path) {
    let status = std::fs::read_to_string(program.join("status")).expect("it runs");
    let value = |key: &str| {
        let line =
            status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("no {key}"));
        line.trim().to_owned()
    };
    for set in ["CapPrm:", "CapEff:", "CapInh:", "CapAmb:"] {
        assert_eq!(u64::from_str_radix(&value(set), 16), Ok(0), "{set}");
    }
    assert_eq!(value("NoNewPrivs:"), "1");
    // A user that no file and no account belongs to, and its group alone.
    let users: Vec<u32> =
        value("Uid:").split_whitespace().map(|uid| uid.parse().expect("a number")).collect();
    let groups: Vec<u32> =
        value("Gid:").split_whitespace().map(|gid| gid.parse().expect("a number")).collect();
    if rustix::process::geteuid().is_root() {
        assert_eq!(users, [0x7001_0001; 4], "{status}");
        assert_eq!(groups, [0x7001_0000; 4], "{status}");
        assert_eq!(value("Groups:"), "");
    }
}

fn nothing_stays_of_a_client_that_goes_away(daemon: &Daemon, place: &str, dir: &std::path::Path) {
    let mut waiting = Command::new("python3");
    waiting.args(["-c", CLIENT, place, "event-wait", "class=vm", "name-label=never"]);
    let mut waiting = Running::start(&mut waiting, &dir.join("waiting.log"));
    let limit = Duration::from_secs(60);
    waiting.wait_for("the program of the command", limit, || (programs(daemon) == 1).then_some(()));
    waiting.wait_for("its rights are given up", limit, || {
        let status = std::fs::read_to_string(pids(daemon).first()?.join("status")).ok()?;
        status.contains("NoNewPrivs:\t1").then_some(())
    });
    is_confined(&pids(daemon)[0]);
    let socket = std::fs::metadata(dir.join("run/commands")).expect("the socket of commands");
    if rustix::process::geteuid().is_root() {
        use std::os::unix::fs::MetadataExt;
        assert_eq!((socket.mode() & 0o777, socket.uid(), socket.gid()), (0o660, 0, 0x7001_0000));
    }
    waiting.kill();
    assert!(poll_until(limit, || (programs(daemon) == 0).then_some(())).is_some(), "a program stays");
}
