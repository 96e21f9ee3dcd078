//! Consoles as clients reach them over the network: by CONNECT, and by a WebSocket.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::machines::Guest;

/// Sends a request; the head of the answer, and the connection behind it.
fn ask(guest: &Guest, request: &str) -> (String, TcpStream) {
    let address = guest.world.daemon().http.strip_prefix("http://").expect("an address");
    let mut stream = TcpStream::connect(address).expect("the daemon listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).expect("an answer") == 1 {
        head.push(byte[0]);
    }
    (String::from_utf8_lossy(&head).into_owned(), stream)
}

/// Reads until `text` has come.
fn read_until(stream: &mut TcpStream, text: &str) {
    let until = Instant::now() + Duration::from_secs(60);
    let (mut all, mut bytes) = (Vec::new(), [0; 1024]);
    while !String::from_utf8_lossy(&all).contains(text) {
        assert!(Instant::now() < until, "no {text}: {}", String::from_utf8_lossy(&all));
        let len = stream.read(&mut bytes).expect("the console");
        assert!(len > 0, "it ended: {}", String::from_utf8_lossy(&all));
        all.extend_from_slice(&bytes[..len]);
    }
}

/// Reads frames of a WebSocket until `text` has come, which may be a letter a frame.
fn frames_until(stream: &mut TcpStream, text: &str) {
    let until = Instant::now() + Duration::from_secs(60);
    let mut all = Vec::new();
    while !String::from_utf8_lossy(&all).contains(text) {
        assert!(Instant::now() < until, "no {text}: {}", String::from_utf8_lossy(&all));
        let mut head = [0; 2];
        stream.read_exact(&mut head).expect("a frame");
        assert_eq!(head[0], 0x82, "a whole frame of bytes");
        let len = match head[1] {
            126 => {
                let mut long = [0; 2];
                stream.read_exact(&mut long).expect("its length");
                usize::from(u16::from_be_bytes(long))
            }
            short => usize::from(short),
        };
        let start = all.len();
        all.resize(start + len, 0);
        stream.read_exact(&mut all[start..]).expect("its bytes");
    }
}

/// The story, of a guest that runs with a terminal and a screen.
pub fn reached_by_those_who_may(guest: &Guest) {
    let daemon = guest.world.daemon();
    let session = daemon.login();
    let of = |protocol: &str| {
        let records = session.call("console.get_all_records", &[]);
        let all = records.as_object().expect("records").values().cloned();
        let found: Vec<_> = all.filter(|record| record["protocol"] == protocol).collect();
        assert_eq!(found.len(), 1, "{protocol}: {found:?}");
        found[0].clone()
    };
    let (terminal, screen) = (of("vt100"), of("rfb"));
    let path = |console: &serde_json::Value| {
        let location = console["location"].as_str().expect("a text").to_owned();
        let (_, path) = location.split_once("/console?").expect("an address of this server");
        format!("/console?{path}")
    };
    let id = format!("session_id={}", session.reference);
    // As products do.
    let connect = format!("CONNECT {}&{id} HTTP/1.0\r\nHost: h\r\n\r\n", path(&screen));
    let (head, mut stream) = ask(guest, &connect);
    assert!(head.starts_with("HTTP/1.0 200") || head.starts_with("HTTP/1.1 200"), "{head}");
    read_until(&mut stream, "RFB 003.");
    drop(stream);
    // As a browser does; a page of another origin does not get so far.
    let upgrade = |origin: &str| {
        format!(
            "GET {} HTTP/1.1\r\nHost: h\r\nOrigin: {origin}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Cookie: {id}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
             Sec-WebSocket-Protocol: binary\r\n\r\n",
            path(&terminal)
        )
    };
    let (head, _) = ask(guest, &upgrade("https://evil.example"));
    assert!(head.starts_with("HTTP/1.1 403"), "{head}");
    let (head, mut stream) = ask(guest, &upgrade("https://h"));
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    let head = head.to_lowercase();
    assert!(head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="), "{head}");
    assert!(head.contains("sec-websocket-protocol: binary"), "{head}");
    let typed = b"echo $((6*7))x\n";
    stream.write_all(&[&[0x82, 0x80 | typed.len() as u8, 0, 0, 0, 0], &typed[..]].concat()).expect("typed");
    frames_until(&mut stream, "42x");
    drop(stream);
    // Without a session, and with one that may only read.
    let (head, _) = ask(guest, &format!("CONNECT {} HTTP/1.0\r\n\r\n", path(&terminal)));
    assert!(head.contains(" 401 "), "{head}");
    daemon.add_user("reader", "read-only", "a long password");
    let reader = daemon.login_as("reader", "a long password");
    let request = format!("CONNECT {}&session_id={} HTTP/1.0\r\n\r\n", path(&terminal), reader.reference);
    let (head, _) = ask(guest, &request);
    assert!(head.contains(" 403 "), "{head}");
    let (head, _) = ask(guest, &format!("CONNECT /console?uuid=none&{id} HTTP/1.0\r\n\r\n"));
    assert!(head.contains(" 404 ") || head.contains(" 400 "), "{head}");
    let (head, _) = ask(guest, &format!("GET /console?{id} HTTP/1.1\r\nHost: h\r\n\r\n"));
    assert!(head.starts_with("HTTP/1.1 400"), "{head}");
}
