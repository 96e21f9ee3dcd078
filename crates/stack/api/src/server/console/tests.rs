use super::*;
use crate::server::tests::{Fixture, fixture, limits};

fn request(headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder().method("GET").uri("/console?uuid=1");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap()
}

#[test]
fn pages_of_other_origins_get_no_console() {
    assert!(is_same_origin(&request(&[("host", "h:443")])), "a program");
    assert!(is_same_origin(&request(&[("host", "h:443"), ("origin", "https://H:443")])));
    assert!(!is_same_origin(&request(&[("host", "h"), ("origin", "https://evil.example")])));
    assert!(!is_same_origin(&request(&[("origin", "https://")])));
    assert!(!is_same_origin(&request(&[("host", "h"), ("origin", "null")])));
}

#[test]
fn an_upgrade_has_its_headers() {
    let good = [
        ("upgrade", "WebSocket"),
        ("connection", "keep-alive, Upgrade"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "abc"),
    ];
    assert_eq!(key(&request(&good)).unwrap(), "abc");
    for missing in 0..good.len() {
        let mut some = good.to_vec();
        some.remove(missing);
        assert!(key(&request(&some)).is_err(), "{missing}");
    }
}

#[tokio::test]
async fn bytes_pass_both_ways_as_they_are_and_in_frames() {
    for is_websocket in [false, true] {
        let (console, mut emulator) = UnixStream::pair().unwrap();
        let (mut theirs, mut ours) = UnixStream::pair().unwrap();
        // "hi", masked with zeros: as it is, behind the frame's head.
        let first: &[u8] = if is_websocket { &[0x82, 0x82, 0, 0, 0, 0, b'h', b'i'] } else { b"hi" };
        let lost: BoxFuture<()> = Box::pin(std::future::pending());
        let mut upgraded = Upgraded { console, is_websocket, lost, entered: Entered::of("s") };
        let running = tokio::spawn(async move { upgraded.run(&mut ours, first).await });
        let mut came = [0; 2];
        emulator.read_exact(&mut came).await.unwrap();
        assert_eq!(&came, b"hi");
        emulator.write_all(b"login: ").await.unwrap();
        let expected: &[u8] = if is_websocket { b"\x82\x07login: " } else { b"login: " };
        let mut shown = vec![0; expected.len()];
        theirs.read_exact(&mut shown).await.unwrap();
        assert_eq!(shown, expected);
        drop((theirs, emulator));
        running.await.unwrap();
    }
}

#[tokio::test]
async fn a_console_ends_with_the_rights_of_its_session() {
    for is_websocket in [false, true] {
        let (console, mut emulator) = UnixStream::pair().unwrap();
        let (mut theirs, mut ours) = UnixStream::pair().unwrap();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let lost: BoxFuture<()> = Box::pin(async move { drop(ended.await) });
        let mut upgraded = Upgraded { console, is_websocket, lost, entered: Entered::of("s") };
        let running = tokio::spawn(async move { upgraded.run(&mut ours, b"").await });
        emulator.write_all(b"x").await.unwrap();
        assert!(theirs.read(&mut [0; 8]).await.unwrap() > 0, "it is open");
        end.send(()).unwrap();
        running.await.unwrap();
        assert_eq!(theirs.read(&mut [0; 8]).await.unwrap(), 0, "nothing more comes");
        assert_eq!(emulator.read(&mut [0; 8]).await.unwrap(), 0, "nor is anything more typed");
    }
}

fn ticket_for(fixture: &Fixture, form: &str, origin: &str) -> (u16, String) {
    let head =
        format!("POST /console/ticket HTTP/1.1\r\nHost: h\r\n{origin}Content-Length: {}\r\n\r\n", form.len());
    let (status, text) = fixture.ask(format!("{head}{form}").as_bytes());
    let (_, body) = text.split_once("\r\n\r\n").unwrap();
    (status, body.to_owned())
}

fn open(fixture: &Fixture, ticket: &str, query: &str) -> (u16, String) {
    let request = format!(
        "GET /console{query} HTTP/1.1\r\nHost: h\r\nOrigin: http://h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: abc\r\nSec-WebSocket-Protocol: binary, ticket.{ticket}\r\n\r\n"
    );
    fixture.ask(request.as_bytes())
}

#[test]
fn a_ticket_stands_for_the_session_once() {
    let fixture = fixture(limits(|_| {}));
    let ticket = |session: &str| {
        let form = format!("session_id={session}&uuid=one");
        let (status, body) = ticket_for(&fixture, &form, "Origin: http://h\r\n");
        assert_eq!(status, 200, "{body}");
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        body["result"].as_str().unwrap().to_owned()
    };
    let first = ticket("good");
    let (status, head) = open(&fixture, &first, "");
    assert!(status == 101 && head.contains("sec-websocket-protocol: binary\r\n"), "{head}");
    assert!(!head.contains(&first), "the ticket is not sent back: {head}");
    assert_eq!(open(&fixture, &first, "").0, 403, "used");
    assert_eq!(open(&fixture, &ticket("good"), "?uuid=another").0, 403, "of another console");
    assert_eq!(open(&fixture, &ticket("good"), "?uuid=one").0, 101);
    assert_eq!(open(&fixture, &ticket("gone"), "").0, 403, "its session has ended");
    assert_eq!(open(&fixture, "none", "").0, 403);
    assert_eq!(fixture.ask(b"CONNECT /console HTTP/1.0\r\nSec-WebSocket-Protocol: ticket.x\r\n\r\n").0, 400);
}

#[test]
fn tickets_are_for_those_who_may() {
    let fixture = fixture(limits(|_| {}));
    for (form, origin, status, says) in [
        ("session_id=reader&uuid=one", "", 403, "RBAC_PERMISSION_DENIED"),
        ("session_id=none&uuid=one", "", 401, "SESSION_INVALID"),
        ("uuid=one", "", 401, "SESSION_INVALID"),
        ("session_id=good", "", 400, "names a console"),
        ("session_id=good&uuid=one", "Origin: http://evil\r\n", 403, "origin"),
    ] {
        let (came, body) = ticket_for(&fixture, form, origin);
        assert!(came == status && body.contains(says), "{form}: {came} {body}");
    }
    let (status, _) = fixture.ask(b"GET /console/ticket HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(status, 404);
}
