use proptest::prelude::*;

use super::*;

fn text() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9:/._ü-]{0,100}"
}

fn body_of(kind: MessageKind) -> BoxedStrategy<Body> {
    use MessageKind as K;
    match kind {
        K::PidRsp => any::<i32>().prop_map(Body::Pid).boxed(),
        K::Open | K::Resume => (any::<(u32, u32, u32, u32, u16)>(), text(), text())
            .prop_map(|((flags, devnum, domid, prt_devnum, req_timeout), path, secondary)| {
                Body::Params(Box::new(Params {
                    flags,
                    devnum,
                    domid,
                    path,
                    prt_devnum,
                    req_timeout,
                    secondary,
                }))
            })
            .boxed(),
        K::OpenRsp | K::DiskInfoRsp => any::<(u64, u32, u32)>()
            .prop_map(|(sectors, sector_size, info)| Body::Image(Image { sectors, sector_size, info }))
            .boxed(),
        K::ListRsp => (any::<(i32, i32, i32)>(), text())
            .prop_map(|((count, minor, state), path)| Body::List(List { count, minor, state, path }))
            .boxed(),
        K::StatsRsp => any::<(u16, u16, u64)>()
            .prop_map(|(kind, cookie, length)| Body::Stat(Stat { kind, cookie, length }))
            .boxed(),
        K::XenblkifConnect | K::XenblkifDisconnect => {
            (any::<([u32; 8], u32, u32, u32, u32, u32, u32, u32)>(), text())
                .prop_map(
                    |((gref, domid, devid, order, proto, port, poll_duration, poll_idle_threshold), pool)| {
                        let ring = Blkif {
                            domid,
                            devid,
                            gref,
                            order,
                            proto,
                            pool,
                            port,
                            poll_duration,
                            poll_idle_threshold,
                        };
                        Body::Blkif(Box::new(ring))
                    },
                )
                .boxed()
        }
        K::Error
        | K::RuntimeError
        | K::AttachRsp
        | K::PauseRsp
        | K::ResumeRsp
        | K::CloseRsp
        | K::DetachRsp
        | K::XenblkifConnectRsp
        | K::XenblkifDisconnectRsp => (any::<i32>(), text())
            .prop_map(|(error, message)| Body::Response(Response { error, message }))
            .boxed(),
        _ => Just(Body::None).boxed(),
    }
}

fn message() -> impl Strategy<Value = Message> {
    prop::sample::select(MessageKind::ALL)
        .prop_flat_map(|kind| (Just(kind), any::<u16>(), body_of(kind)))
        .prop_map(|(kind, cookie, body)| Message { kind, cookie, body })
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(message in message()) {
        let bytes = message.encode().expect("fits");
        prop_assert_eq!(Message::decode(&bytes), Ok(message));
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error(
        mut bytes in prop::collection::vec(any::<u8>(), MESSAGE_LEN),
        kind in 0u16..40,
    ) {
        bytes[..2].copy_from_slice(&kind.to_ne_bytes());
        let bytes: [u8; MESSAGE_LEN] = bytes.try_into().expect("length");
        match Message::decode(&bytes) {
            Ok(message) => prop_assert_eq!(message.kind as u16, kind),
            Err(CodecError::UnknownKind(found)) => prop_assert!(found == 0 || found > 30),
            Err(_) => {}
        }
    }
}

#[test]
fn fields_stand_where_the_c_compiler_puts_them() {
    let open = Message {
        kind: MessageKind::Open,
        cookie: 0x1234,
        body: Body::Params(Box::new(Params {
            flags: flags::RDONLY | flags::OPEN_ENCRYPTED,
            devnum: 7,
            domid: 9,
            path: "vhd:/a".into(),
            prt_devnum: 11,
            req_timeout: 120,
            secondary: "nbd:s".into(),
        })),
    };
    let bytes = open.encode().expect("fits");
    let at = |offset: usize, len: usize| &bytes[offset..offset + len];
    assert_eq!(at(0, 8), [7, 0, 0x34, 0x12, 0, 0, 0, 0]);
    assert_eq!(at(8, 12), [0x02, 4, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0]);
    assert_eq!(at(20, 7), b"vhd:/a\0");
    assert_eq!(at(276, 6), [11, 0, 0, 0, 120, 0]);
    assert_eq!(at(282, 6), b"nbd:s\0");

    let ring = Blkif { port: 0xaabb, poll_idle_threshold: 50, pool: "p".into(), ..Blkif::default() };
    let connect =
        Message { kind: MessageKind::XenblkifConnect, cookie: 0, body: Body::Blkif(Box::new(ring)) };
    let bytes = connect.encode().expect("fits");
    assert_eq!((bytes[56], &bytes[312..314], bytes[320]), (b'p', &[0xbb, 0xaa][..], 50));

    let stat = Message {
        kind: MessageKind::StatsRsp,
        cookie: 0,
        body: Body::Stat(Stat { length: 77, ..Stat::default() }),
    };
    assert_eq!(stat.encode().expect("fits")[16], 77);
}

#[test]
fn strings_of_requests_must_be_plain() {
    let open = |path: &[u8]| {
        let mut bytes = Message::bare(MessageKind::Open, 0).encode().expect("fits");
        bytes[20..20 + path.len()].copy_from_slice(path);
        Message::decode(&bytes)
    };
    assert!(open(b"vhd:/a").is_ok());
    assert_eq!(open(&[b'x'; 256]), Err(CodecError::Text("path")));
    assert_eq!(open(b"vhd:/a\nb"), Err(CodecError::Text("path")));
    assert_eq!(open(b"vhd:/\xff"), Err(CodecError::Text("path")));
}

#[test]
fn what_does_not_fit_is_refused() {
    let message = |path: String| Message {
        kind: MessageKind::Open,
        cookie: 0,
        body: Body::Params(Box::new(Params { path, ..Params::default() })),
    };
    assert!(message("x".repeat(255)).encode().is_ok());
    assert_eq!(message("x".repeat(256)).encode(), Err(CodecError::Long("path")));
    assert_eq!(message("a\0b".into()).encode(), Err(CodecError::Text("path")));
    let wrong = Message { body: Body::Pid(1), ..Message::bare(MessageKind::Open, 0) };
    assert_eq!(wrong.encode(), Err(CodecError::Body(MessageKind::Open)));
}

#[test]
fn a_log_path_makes_its_way() {
    let field = encode_log_path("/sr/x.cbtlog").expect("fits");
    assert_eq!(decode_log_path(&field).as_deref(), Ok("/sr/x.cbtlog"));
    assert!(decode_log_path(&[b'x'; PATH_LEN]).is_err());
    assert_eq!((0..=255).filter(|len| key_len_is_valid(*len)).collect::<Vec<u8>>(), [32, 64]);
}
