//! What clients can make the daemon hold: bounded, however many they are and whatever they ask for.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::toolstack::{Daemon, DaemonOptions};

/// Connections that ask for large answers and read nothing.
const DEAF: usize = 500;
/// Logins, and how many of them at a time.
const LOGINS: usize = 1_200;
const LOGINS_AT_ONCE: usize = 100;
/// Objects, and bytes of text in each: 4 MiB for one listing, 2 GiB for those that the deaf ask for.
const OBJECTS: usize = 128;
const PAD: usize = 32 << 10;
/// What one account of one address may add to the daemon (docs/design/api-limits.md).
const BOUND_KIB: u64 = 96 << 10;

const PASSWORD: &str = "nothing but reading";

fn peak_kib(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.process.pid())).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

/// Sends a call on a connection of its own.
fn send(address: &str, method: &str, params: &serde_json::Value) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
    let head = format!(
        "POST /jsonrpc HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).expect("sent");
    stream
}

/// The status of an answer that begins.
fn status(stream: &mut TcpStream) -> String {
    let mut first = [0; 12];
    stream.read_exact(&mut first).expect("an answer begins");
    String::from_utf8_lossy(&first[9..]).into_owned()
}

#[test]
fn deaf_clients_and_a_storm_of_logins_take_a_bounded_amount() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).arg("--set=connections-per-peer=1000").start();
    let address = daemon.http.strip_prefix("http://").expect("an address");
    let root = daemon.login();
    for number in 0..OBJECTS {
        let pad = json!({"name_label": format!("pad {number}"), "other_config": {"pad": "x".repeat(PAD)}});
        root.call("network.create", &[pad]);
    }
    daemon.add_user("reader", "read-only", PASSWORD);
    let reader = daemon.login_as("reader", PASSWORD);
    let listing = || root.call("network.get_all_records", &[]).as_object().expect("records").len();
    assert!(listing() >= OBJECTS);
    let before = peak_kib(&daemon);

    let mut deaf: Vec<TcpStream> = Vec::new();
    let (mut begun, mut refused) = (0, 0);
    for number in 0..DEAF {
        let events = json!([reader.reference, ["network"], "", 30.0]);
        let stream = match number % 4 {
            0 => send(address, "event.from", &events),
            _ => send(address, "network.get_all_records", &json!([reader.reference])),
        };
        deaf.push(stream);
    }
    for stream in &mut deaf {
        match status(stream).as_str() {
            "200" => begun += 1,
            "503" => refused += 1,
            other => panic!("HTTP {other}"),
        }
    }
    assert!(begun >= 50 && refused >= 50, "{begun} have a share, {refused} were refused");
    assert!(listing() >= OBJECTS, "another account at another address has all of a large answer");

    let left = AtomicUsize::new(LOGINS);
    let (opened, sent_away) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let login = || {
        let next = || left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        while next().is_ok() {
            let mut stream = send(address, "session.login_with_password", &json!(["reader", PASSWORD]));
            match status(&mut stream).as_str() {
                "200" => opened.fetch_add(1, Ordering::SeqCst),
                "503" => sent_away.fetch_add(1, Ordering::SeqCst),
                other => panic!("HTTP {other}"),
            };
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..LOGINS_AT_ONCE {
            scope.spawn(login);
        }
        // Root logs in, asks and makes meanwhile: it has no password, and another address.
        while left.load(Ordering::SeqCst) > 0 {
            let other = daemon.login();
            other.call("pool.get_all", &[]);
            other.call("session.logout", &[]);
        }
    });
    let (opened, sent_away) = (opened.into_inner(), sent_away.into_inner());
    assert!(opened >= 60 && opened + sent_away == LOGINS, "{opened} logged in, {sent_away} were refused");
    // The account that did all this is served, now that its passwords are checked.
    let again = daemon.login_as("reader", PASSWORD);
    again.call("pool.get_all", &[]);

    let grown = peak_kib(&daemon) - before;
    println!("{begun} deaf clients hold, {opened} logins were checked; the daemon grew by {grown} KiB");
    assert!(grown < BOUND_KIB, "by {grown} KiB");
    drop(deaf);
    daemon.stop();
}
