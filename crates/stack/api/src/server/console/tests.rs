use super::*;

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
        let upgraded = Upgraded { console, is_websocket };
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
