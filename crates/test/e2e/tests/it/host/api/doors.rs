//! Clients that want too much, too slowly, or nonsense: the daemon stays there for others, and within bounds.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::json;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::toolstack::{Daemon, DaemonOptions, post};

fn connect(daemon: &Daemon) -> TcpStream {
    let address = daemon.http.strip_prefix("http://").expect("an address");
    let stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    stream
}

fn resident_kib(daemon: &Daemon) -> u64 {
    let path = format!("/proc/{}/status", daemon.process.pid());
    let status = std::fs::read_to_string(path).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

#[test]
fn hostile_clients_cost_little_and_others_are_served() {
    let scratch = Scratch::on_disk();
    let options = DaemonOptions::new(&scratch).arg("--set=head-time=5").arg("--set=body-time=5");
    let daemon = options.arg("--set=connections-per-peer=300").start();
    let session = daemon.login();
    session.call("pool.get_all", &[]);
    let before = resident_kib(&daemon);
    let started = Instant::now();
    // Heads by the byte, bodies that never come, bodies that are too large, and clients that read nothing.
    let mut held = Vec::new();
    for number in 0..200 {
        let mut stream = connect(&daemon);
        let text: Vec<u8> = match number % 4 {
            0 => b"POST / HT".to_vec(),
            1 => b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n<methodCall>".to_vec(),
            2 => b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n".to_vec(),
            _ => {
                let body = r#"{"jsonrpc":"2.0","id":1,"method":"system.listMethods"}"#;
                let one = format!(
                    "POST /jsonrpc HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                );
                one.repeat(50).into_bytes()
            }
        };
        stream.write_all(&text).expect("sent");
        held.push(stream);
    }
    for _ in 0..20 {
        let asked = Instant::now();
        session.call("pool.get_all", &[]);
        assert!(asked.elapsed() < Duration::from_secs(60), "{:?}", asked.elapsed());
    }
    // The connections of all clients that owe something are closed in time.
    for (number, stream) in held.iter_mut().enumerate().filter(|(number, _)| number % 4 < 3) {
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        let status = text.split(' ').nth(1).unwrap_or("none");
        let expected = [["none", "408"], ["408", "408"], ["413", "413"]][number % 4];
        assert!(expected.contains(&status), "{number}: {text}");
    }
    assert!(started.elapsed() < Duration::from_secs(120), "{:?}", started.elapsed());
    let after = resident_kib(&daemon);
    assert!(after < before + (96 << 10), "from {before} to {after} KiB");
    daemon.stop();
}

#[test]
fn nonsense_is_a_fault_with_a_reason() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    for (path, body, expected, says) in [
        ("/", "<methodCall><methodName>", 200, "<fault><value><struct>"),
        ("/RPC2", "{}", 200, "This is no XML-RPC call"),
        ("/jsonrpc", "<methodCall/>", 200, "-32700"),
        ("/jsonrpc", r#"{"jsonrpc":"2.0","id":1}"#, 200, "-32600"),
    ] {
        let (status, text) = post(&daemon.socket, path, body);
        assert!(status == expected && text.contains(says), "{path} {body}: {status} {text}");
    }
    // What is a call gets XenAPI's own words for what is wrong with it.
    let session = daemon.login();
    assert_eq!(session.fails("no.such", &[])[0], "MESSAGE_METHOD_UNKNOWN");
    assert_eq!(session.fails("pool.get_all", &[json!(1)])[0], "MESSAGE_PARAMETER_COUNT_MISMATCH");
    assert_eq!(session.fails("event.from", &[json!("*"), json!(""), json!(1)])[0], "FIELD_TYPE_ERROR");
    assert_eq!(
        session.fails("event.from", &[json!(["*"]), json!("nonsense"), json!(1)])[0],
        "EVENT_FROM_TOKEN_PARSE_FAILURE"
    );
    daemon.stop();
}

#[test]
fn fifty_listeners_and_their_end() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    let session = daemon.login();
    let token = session.call("event.from", &[json!(["*"]), json!(""), json!(1)])["token"].clone();
    let mut listeners: Vec<TcpStream> = (0..50).map(|_| connect(&daemon)).collect();
    for stream in &mut listeners {
        let params = json!([session.reference, ["pool"], token, 60]);
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "event.from", "params": params}).to_string();
        let text = format!(
            "POST /jsonrpc HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(text.as_bytes()).expect("sent");
    }
    // No state shows that the daemon has read them all. One that it reads later is answered just as well.
    std::thread::sleep(Duration::from_millis(300));
    let threads = || {
        let dir = format!("/proc/{}/task", daemon.process.pid());
        std::fs::read_dir(dir).expect("threads").count()
    };
    assert!(threads() < 50, "{} threads", threads());
    let pool = session.call("pool.get_all", &[])[0].clone();
    let changed = Instant::now();
    session.call("pool.set_name_label", &[pool, json!("for all")]);
    for stream in &mut listeners {
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        assert!(text.contains("for all"), "{text}");
    }
    assert!(changed.elapsed() < Duration::from_secs(50), "{:?}", changed.elapsed());
    daemon.stop();
}
