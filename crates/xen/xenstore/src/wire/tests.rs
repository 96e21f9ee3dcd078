use proptest::prelude::*;

use super::*;

#[test]
fn a_header_has_four_numbers_in_native_byte_order() {
    let header = Header { kind: 11, request: 0x0102_0304, transaction: 7, len: 9 };
    let bytes = header.encode();
    assert_eq!(bytes[4..8], 0x0102_0304_u32.to_ne_bytes());
    assert_eq!(Header::decode(&bytes), header);
}

#[test]
fn numbers_of_the_kinds_are_those_of_the_header_file() {
    assert_eq!(MessageKind::ALL.len(), 26);
    for kind in MessageKind::ALL {
        assert_eq!(MessageKind::from_number(*kind as u32), Some(*kind));
    }
    assert_eq!(MessageKind::from_number(20), None, "RESTRICT is gone");
    assert_eq!(MessageKind::from_number(27), None);
    assert_eq!(MessageKind::WatchEvent as u32, 15);
    assert_eq!(MessageKind::DirectoryPart as u32, 22);
}

/// Every form of request, with what it looks like on the wire.
fn examples() -> Vec<(Request<'static>, &'static [u8])> {
    vec![
        (Request::Control { arguments: b"print\0hello\0" }, b"print\0hello\0"),
        (Request::Directory { path: "/a" }, b"/a\0"),
        (Request::Read { path: "/a/b" }, b"/a/b\0"),
        (Request::GetPerms { path: "/" }, b"/\0"),
        (Request::Watch { path: "/a", token: b"\xff t", depth: None }, b"/a\0\xff t\0"),
        (Request::Watch { path: "@releaseDomain", token: b"", depth: Some(2) }, b"@releaseDomain\0\x002\0"),
        (Request::Unwatch { path: "/a", token: b"t" }, b"/a\0t\0"),
        (Request::TransactionStart, b"\0"),
        (Request::TransactionEnd { commit: true }, b"T\0"),
        (Request::TransactionEnd { commit: false }, b"F\0"),
        (Request::Introduce { domid: 3, gfn: 1 << 40, port: 9 }, b"3\x001099511627776\x009\0"),
        (Request::Release { domid: 3 }, b"3\0"),
        (Request::GetDomainPath { domid: 32751 }, b"32751\0"),
        (Request::Write { path: "/a", value: b"one\0two" }, b"/a\0one\0two"),
        (Request::Write { path: "/a", value: b"" }, b"/a\0"),
        (Request::Mkdir { path: "/a" }, b"/a\0"),
        (Request::Rm { path: "/a" }, b"/a\0"),
        (
            Request::SetPerms {
                path: "/a",
                permissions: vec![Permission::new(Access::None, 0), Permission::new(Access::Both, 5)],
            },
            b"/a\0n0\0b5\0",
        ),
        (Request::IsDomainIntroduced { domid: 1 }, b"1\0"),
        (Request::Resume { domid: 1 }, b"1\0"),
        (Request::SetTarget { domid: 2, target: 1 }, b"2\x001\0"),
        (Request::ResetWatches, b"\0"),
        (Request::DirectoryPart { path: "/a", offset: 40 }, b"/a\x0040\0"),
        (Request::GetFeature { domid: None }, b""),
        (Request::GetFeature { domid: Some(1) }, b"1\0"),
        (Request::SetFeature { domid: 1, value: 2 }, b"1\x002\0"),
        (Request::GetQuota { domid: None, quota: None }, b""),
        (Request::GetQuota { domid: None, quota: Some("nodes") }, b"nodes\0"),
        (Request::GetQuota { domid: Some(4), quota: Some("nodes") }, b"4\0nodes\0"),
        (Request::SetQuota { domid: None, quota: "nodes", value: 7 }, b"nodes\x007\0"),
        (Request::SetQuota { domid: Some(4), quota: "nodes", value: 7 }, b"4\0nodes\x007\0"),
    ]
}

#[test]
fn every_request_looks_as_the_specification_says() {
    for (request, payload) in examples() {
        assert_eq!(request.payload(), payload, "{request:?}");
        assert_eq!(Request::parse(request.kind() as u32, payload).as_ref(), Ok(&request));
    }
    let asked: std::collections::HashSet<MessageKind> =
        examples().iter().map(|(request, _)| request.kind()).collect();
    let missing: Vec<_> = MessageKind::ALL.iter().filter(|kind| !asked.contains(kind)).collect();
    assert_eq!(missing, [&MessageKind::WatchEvent, &MessageKind::Error], "what only the daemon says");
}

#[test]
fn another_form_is_refused() {
    let refused = |kind: MessageKind, payload: &[u8]| Request::parse(kind as u32, payload).unwrap_err();
    for kind in [
        MessageKind::Read,
        MessageKind::Directory,
        MessageKind::Rm,
        MessageKind::Mkdir,
        MessageKind::GetPerms,
    ] {
        for bad in [&b""[..], b"/a", b"/a\0/b\0", b"/a\0b", b"\xff\0"] {
            assert_eq!(refused(kind, bad), Errno::EINVAL, "{kind:?} {bad:?}");
        }
    }
    assert_eq!(refused(MessageKind::Write, b"/a"), Errno::EINVAL);
    for bad in [&b"T"[..], b"X\0", b"\0", b"T\0T\0"] {
        assert_eq!(refused(MessageKind::TransactionEnd, bad), Errno::EINVAL);
    }
    for bad in
        [&b"-1\0"[..], b"+1\0", b" 1\0", b"\0", b"4294967296\0", b"99999999999999999999999\0", b"0x1\0"]
    {
        assert_eq!(refused(MessageKind::Release, bad), Errno::EINVAL, "{bad:?}");
    }
    for bad in [&b"/a\0"[..], b"/a\0x1\0", b"/a\0r\0", b"/a\0r1", b"/a\0r-1\0"] {
        assert_eq!(refused(MessageKind::SetPerms, bad), Errno::EINVAL, "{bad:?}");
    }
    assert_eq!(refused(MessageKind::Watch, b"/a\0"), Errno::EINVAL);
    assert_eq!(refused(MessageKind::Watch, b"/a\0t\0x\0"), Errno::EINVAL);
    assert_eq!(refused(MessageKind::Watch, b"/a\0t\x001\x002\0"), Errno::EINVAL);
    for number in [15, 16, 20, 27, u32::MAX] {
        assert_eq!(Request::parse(number, b"\0").unwrap_err(), Errno::ENOSYS);
    }
}

#[test]
fn a_stream_is_cut_wherever_it_is_broken() {
    let mut stream = Vec::new();
    for (number, (request, _)) in examples().iter().enumerate() {
        request.frame(number as u32, 5, &mut stream).unwrap();
    }
    for step in [1, 2, 3, 15, 16, 17, 100, stream.len()] {
        let mut decoder = Decoder::new();
        let mut found = 0;
        for piece in stream.chunks(step) {
            decoder.push(piece);
            while let Some(message) = decoder.next().unwrap() {
                let (request, payload) = &examples()[found];
                assert_eq!(message.payload, *payload);
                assert_eq!(message.kind(), Some(request.kind()));
                assert_eq!((message.header.request, message.header.transaction), (found as u32, 5));
                found += 1;
            }
            assert!(decoder.pending().len() < HEADER_LEN + PAYLOAD_MAX);
        }
        assert_eq!(found, examples().len());
        assert!(decoder.pending().is_empty());
    }
}

#[test]
fn a_payload_that_is_too_long_ends_the_stream() {
    let mut out = Vec::new();
    frame(MessageKind::Read, 1, 0, &[b'a'; PAYLOAD_MAX], &mut out).unwrap();
    let mut decoder = Decoder::new();
    decoder.push(&out);
    assert_eq!(decoder.next().unwrap().unwrap().payload.len(), PAYLOAD_MAX);
    decoder.push(&Header { kind: 2, request: 1, transaction: 0, len: 4097 }.encode());
    for _ in 0..3 {
        assert_eq!(decoder.next(), Err(WireError::TooLong { len: 4097 }));
    }
    out.clear();
    assert_eq!(frame(MessageKind::Read, 1, 0, &[0; 4097], &mut out), Err(WireError::TooLong { len: 4097 }));
    assert!(out.is_empty());
}

#[test]
fn names_of_errors_go_both_ways() {
    for errno in Errno::ALL {
        assert_eq!(Errno::from_name(errno.name()), *errno);
        assert!(errno.number() > 0);
    }
    assert_eq!(Errno::ALL.len(), 16);
    assert_eq!(Errno::from_name("EWHATEVER"), Errno::EINVAL);
    assert_eq!(Errno::E2BIG.number(), 7);
}

#[test]
fn a_long_directory_comes_in_parts() {
    let names: Vec<String> = (0..3000).map(|number| format!("child-{number}")).collect();
    let all = reply::strings(&names);
    let (mut found, mut offset, mut parts) = (Vec::new(), 0, 0);
    loop {
        let part = reply::directory_part(77, &all, offset).unwrap();
        assert!(part.len() <= PAYLOAD_MAX);
        let (generation, bytes, last) = reply::read_directory_part(&part).unwrap();
        assert_eq!(generation, b"77");
        found.extend_from_slice(bytes);
        offset += bytes.len();
        parts += 1;
        if last {
            break;
        }
    }
    assert_eq!(reply::read_strings(MessageKind::Directory, &found).unwrap(), names);
    assert!(parts > 5);
    // No children, and none left.
    assert_eq!(reply::directory_part(1, b"", 0).unwrap(), b"1\0\0");
    assert_eq!(reply::read_directory_part(b"1\0\0").unwrap(), (&b"1"[..], &b""[..], true));
    assert_eq!(reply::directory_part(1, &all, all.len()).unwrap(), b"1\0\0");
    assert_eq!(reply::directory_part(1, &all, all.len() + 1), None);
    for bad in [&b""[..], b"1", b"1\0", b"1\0abc"] {
        assert!(reply::read_directory_part(bad).is_err(), "{bad:?}");
    }
    // Exactly as much as fits, with and without the empty name.
    for len in PAYLOAD_MAX - 4..=PAYLOAD_MAX {
        let mut one = vec![b'a'; len - 2];
        one.push(0);
        let part = reply::directory_part(1, &one, 0).unwrap();
        assert!(part.len() <= PAYLOAD_MAX, "{len}");
    }
}

#[test]
fn permissions_and_events_go_both_ways() {
    let list = [Permission::new(Access::Write, 0), Permission::new(Access::Read, 32767)];
    assert_eq!(reply::permissions(&list), b"w0\0r32767\0");
    assert_eq!(reply::read_permissions(b"w0\0r32767\0").unwrap(), list);
    for bad in [&b""[..], b"w0", b"x0\0", b"\0"] {
        assert!(reply::read_permissions(bad).is_err());
    }
    assert_eq!(reply::event("/a", b"to\xff"), b"/a\0to\xff\0");
    assert_eq!(reply::read_event(b"/a\0to\xff\0").unwrap(), ("/a".into(), b"to\xff".to_vec()));
    assert!(reply::read_event(b"/a\0").is_err());
    assert_eq!(reply::read_text(MessageKind::Control, b"a\nb").unwrap(), "a\nb");
    assert_eq!(
        reply::read_text(MessageKind::GetDomainPath, b"/local/domain/1\0").unwrap(),
        "/local/domain/1"
    );
    assert!(reply::read_text(MessageKind::Control, b"a\0b\0").is_err());
}

proptest! {
    #[test]
    fn what_is_read_is_written_alike(kind in 0_u32..30, payload in proptest::collection::vec(any::<u8>(), 0..40)) {
        if let Ok(request) = Request::parse(kind, &payload) {
            let again = request.payload();
            prop_assert_eq!(Request::parse(kind, &again), Ok(request));
        }
    }
}
