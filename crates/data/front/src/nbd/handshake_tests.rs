use proptest::prelude::*;

use super::*;

struct Two;

fn described(name: &str) -> Described {
    Described {
        name: name.to_string(),
        description: "a disk".to_string(),
        len: 1 << 20,
        block_len_min: if name == "long" { 4096 } else { 512 },
        block_len_preferred: 4096,
        read_only: name == "ro",
        fast_zero: false,
    }
}

impl Catalog for Two {
    fn list(&self) -> Vec<Listed> {
        ["rw", "ro"].map(|name| Listed { name: name.into(), description: "a disk".into() }).into()
    }

    fn find(&mut self, name: &str, _enter: bool) -> Result<Described, Refusal> {
        if ["rw", "ro", "long"].contains(&name) { Ok(described(name)) } else { Err(Refusal::Unknown) }
    }
}

/// Feeds a whole stream, as a driver would; what is left of it belongs to the transmission phase.
fn run(stream: &[u8]) -> (Result<Step, HandshakeError>, Vec<u8>, usize) {
    let (mut handshake, mut out, mut at) = (Handshake::new(), Vec::new(), 0);
    loop {
        let wants = handshake.wants();
        assert!((1..=OPTION_LEN_MAX as usize).contains(&wants));
        let Some(bytes) = stream.get(at..at + wants) else { return (Ok(Step::More), out, at) };
        at += wants;
        match handshake.feed(bytes, &mut Two, &mut out) {
            Ok(Step::More) => {}
            end => return (end, out, at),
        }
    }
}

fn opening() -> Vec<u8> {
    3u32.to_be_bytes().to_vec()
}

fn put_option(stream: &mut Vec<u8>, option: u32, data: &[u8]) {
    stream.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    stream.extend_from_slice(&option.to_be_bytes());
    stream.extend_from_slice(&(data.len() as u32).to_be_bytes());
    stream.extend_from_slice(data);
}

fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name.as_bytes(), rest].concat()
}

fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = named(name, &(queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend_from_slice(&named(query, &[]));
    }
    data
}

/// `(option, reply type, payload)` of every reply.
fn replies(mut out: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut list = Vec::new();
    while !out.is_empty() {
        let mut reader = Reader(out);
        assert_eq!(reader.u64(), Some(OPTION_REPLY_MAGIC));
        let (option, kind, len) = (reader.u32().unwrap(), reader.u32().unwrap(), reader.u32().unwrap());
        list.push((option, kind, reader.bytes(len as usize).unwrap().to_vec()));
        out = reader.0;
    }
    list
}

#[test]
fn go_leads_to_transmission_and_swallows_nothing_behind_it() {
    let mut stream = opening();
    put_option(&mut stream, option::STRUCTURED_REPLY, &[]);
    put_option(
        &mut stream,
        option::SET_META_CONTEXT,
        &meta("rw", &["qemu:dirty-bitmap:x", "base:allocation"]),
    );
    put_option(&mut stream, option::GO, &named("rw", &[0, 2, 0, 1, 0, 2]));
    let len = stream.len();
    stream.extend_from_slice(b"first request");
    let (end, out, taken) = run(&stream);
    let agreed = Agreed { export: described("rw"), style: Style::Structured, allocation: true };
    assert_eq!(end, Ok(Step::Transmission(agreed)));
    assert_eq!(taken, len);
    let kinds: Vec<_> = replies(&out).iter().map(|(_, kind, _)| *kind).collect();
    use option_reply::{ACK, INFO, META_CONTEXT};
    assert_eq!(kinds, [ACK, META_CONTEXT, ACK, INFO, INFO, INFO, INFO, ACK]);
}

#[test]
fn only_a_client_that_asks_is_held_to_long_blocks() {
    // What was asked with GO, whether the smallest block was stated, and what is agreed.
    for (asked, stated) in [(&[0, 1, 0, 3][..], 4096), (&[0, 1, 0, 1], 512), (&[0, 0], 512)] {
        let mut stream = opening();
        put_option(&mut stream, option::GO, &named("long", asked));
        let (end, out, _) = run(&stream);
        let Ok(Step::Transmission(agreed)) = end else { panic!("{end:?}") };
        assert_eq!(agreed.export.block_len_min, stated);
        let sizes = replies(&out).into_iter().find(|(_, _, payload)| payload.starts_with(&[0, 3]));
        let (_, _, payload) = sizes.expect("block sizes are stated");
        assert_eq!(payload[2..6], stated.to_be_bytes());
    }
    let mut stream = opening();
    put_option(&mut stream, option::EXPORT_NAME, b"long");
    let Ok(Step::Transmission(agreed)) = run(&stream).0 else { panic!("the old way in") };
    assert_eq!(agreed.export.block_len_min, 512);
}

#[test]
fn a_context_chosen_for_another_export_does_not_count() {
    let mut stream = opening();
    put_option(&mut stream, option::EXTENDED_HEADERS, &[]);
    put_option(&mut stream, option::SET_META_CONTEXT, &meta("ro", &["base:allocation"]));
    put_option(&mut stream, option::GO, &named("rw", &[0, 0]));
    let (end, ..) = run(&stream);
    let agreed = Agreed { export: described("rw"), style: Style::Extended, allocation: false };
    assert_eq!(end, Ok(Step::Transmission(agreed)));
}

#[test]
fn the_old_way_in_pads_with_zeroes_unless_told_not_to() {
    for (flags, padding) in [(1u32, 124), (3, 0)] {
        let mut stream = flags.to_be_bytes().to_vec();
        put_option(&mut stream, option::EXPORT_NAME, b"ro");
        let (end, out, _) = run(&stream);
        assert!(matches!(end, Ok(Step::Transmission(_))));
        assert_eq!(out.len(), 10 + padding);
        let flags = u16::from_be_bytes([out[8], out[9]]);
        assert_ne!(flags & transmission_flag::READ_ONLY, 0);
        assert_eq!(flags & (transmission_flag::SEND_TRIM | transmission_flag::SEND_DF), 0);
    }
    let mut stream = opening();
    put_option(&mut stream, option::EXPORT_NAME, b"other");
    assert_eq!(run(&stream).0, Err(HandshakeError::NoSuchExport(Refusal::Unknown)));
}

#[test]
fn what_is_refused_leaves_the_handshake_alive() {
    let mut stream = opening();
    put_option(&mut stream, option::STARTTLS, &[]);
    put_option(&mut stream, 0xdead, b"whatever");
    put_option(&mut stream, option::SET_META_CONTEXT, &meta("rw", &["base:allocation"]));
    put_option(&mut stream, option::INFO, &named("nowhere", &[0, 0]));
    put_option(&mut stream, option::INFO, b"\0\0\xff\xff");
    put_option(&mut stream, option::STRUCTURED_REPLY, b"data");
    put_option(&mut stream, option::INFO, &vec![0; 20 << 10]);
    put_option(&mut stream, option::LIST, &[]);
    put_option(&mut stream, option::ABORT, &[]);
    let (end, out, _) = run(&stream);
    assert_eq!(end, Ok(Step::Goodbye));
    let kinds: Vec<_> = replies(&out).iter().map(|(_, kind, _)| *kind).collect();
    use option_reply::*;
    let errors = [ERR_POLICY, ERR_UNSUP, ERR_INVALID, ERR_UNKNOWN, ERR_INVALID, ERR_INVALID, ERR_TOO_BIG];
    assert_eq!(kinds[..7], errors);
    assert_eq!(kinds[7..], [SERVER, SERVER, ACK, ACK]);
}

#[test]
fn a_list_of_contexts_knows_wildcards_and_a_choice_does_not() {
    let found = |option, queries: &[&str]| {
        let mut stream = opening();
        put_option(&mut stream, option::STRUCTURED_REPLY, &[]);
        put_option(&mut stream, option, &meta("rw", queries));
        let (_, out, _) = run(&stream);
        replies(&out).iter().filter(|(_, kind, _)| *kind == option_reply::META_CONTEXT).count()
    };
    assert_eq!(found(option::LIST_META_CONTEXT, &[]), 1);
    assert_eq!(found(option::LIST_META_CONTEXT, &["base:"]), 1);
    assert_eq!(found(option::LIST_META_CONTEXT, &["qemu:"]), 0);
    assert_eq!(found(option::SET_META_CONTEXT, &[]), 0);
    assert_eq!(found(option::SET_META_CONTEXT, &["base:"]), 0);
    assert_eq!(found(option::SET_META_CONTEXT, &["base:allocation"]), 1);
}

#[test]
fn floods_and_absurd_lengths_end_the_session() {
    let mut stream = opening();
    for _ in 0..=OPTIONS_MAX {
        put_option(&mut stream, option::LIST, &[]);
    }
    assert_eq!(run(&stream).0, Err(HandshakeError::TooManyOptions));
    let mut stream = opening();
    put_option(&mut stream, option::GO, &[]);
    let at = stream.len() - 4;
    stream[at..].copy_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(run(&stream).0, Err(HandshakeError::OptionTooLong(u32::MAX)));
    assert_eq!(run(&[0xff; 4]).0, Err(HandshakeError::ClientFlags(u32::MAX)));
    assert!(matches!(run(&[0; 20]).0, Err(HandshakeError::WrongMagic(0))));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes: Vec<u8>) {
        let _ = run(&bytes);
    }

    #[test]
    fn no_option_makes_it_panic(options: Vec<(u8, Vec<u8>)>, structured: bool) {
        let mut stream = opening();
        if structured {
            put_option(&mut stream, option::STRUCTURED_REPLY, &[]);
        }
        for (option, data) in &options {
            put_option(&mut stream, u32::from(option % 14), data);
        }
        let (_, out, taken) = run(&stream);
        prop_assert!(taken <= stream.len());
        // Answers are a small multiple of questions: a client cannot use the server to flood another host.
        prop_assert!(out.len() <= 64 + 400 * (options.len() + 1));
    }
}
