use proptest::prelude::*;

use super::*;

const KEY: &[u8] = b"0123456789abcdef0123456789abcdef";

fn keys() -> Arc<Keys> {
    let text =
        "# people\nalice:30313233343536373839616263646566303132333435363738396162636465660a\nbob:00ff\n";
    let text = text.replace("660a\n", "66\n");
    Arc::new(Keys::parse(&text).unwrap())
}

/// Lets both sides talk until neither has more to say.
fn talk(client: &mut Session, server: &mut Session, mut to_server: Vec<u8>) -> Result<(), Failure> {
    let (mut plain, mut to_client) = (Vec::new(), Vec::new());
    while !to_server.is_empty() || !to_client.is_empty() {
        // One byte after the other: no message may depend on how it is cut.
        for byte in std::mem::take(&mut to_server) {
            server.receive(&[byte], &mut plain, &mut to_client)?;
        }
        client.receive(&std::mem::take(&mut to_client), &mut plain, &mut to_server)?;
    }
    assert!(plain.is_empty());
    Ok(())
}

fn pair() -> (Session, Session) {
    let mut wire = Vec::new();
    let mut client = Session::client("alice", KEY, &mut wire).unwrap();
    let mut server = Session::server(keys());
    talk(&mut client, &mut server, wire).unwrap();
    assert!(client.is_open() && server.is_open());
    (client, server)
}

#[test]
fn data_goes_both_ways_and_the_end_is_heard() {
    let (mut client, mut server) = pair();
    for len in [1, 100, 16384, 16385, 100_000] {
        let data: Vec<u8> = (0..len).map(|index| index as u8).collect();
        let (mut wire, mut plain, mut back) = (Vec::new(), Vec::new(), Vec::new());
        client.send(&data, &mut wire).unwrap();
        server.receive(&wire, &mut plain, &mut back).unwrap();
        assert!(plain == data && back.is_empty());
        (wire, plain) = (Vec::new(), Vec::new());
        server.send(&data, &mut wire).unwrap();
        client.receive(&wire, &mut plain, &mut back).unwrap();
        assert!(plain == data && back.is_empty());
    }
    let (mut wire, mut plain) = (Vec::new(), Vec::new());
    client.close(&mut wire);
    server.receive(&wire, &mut plain, &mut Vec::new()).unwrap();
    assert!(server.is_closed() && plain.is_empty());
}

#[test]
fn keys_change_when_they_are_worn_or_when_the_other_side_asks() {
    let (mut client, mut server) = pair();
    for wanted in [0, 1] {
        let (mut wire, mut back, mut plain) = (Vec::new(), Vec::new(), Vec::new());
        let update = message(kind::KEY_UPDATE, |out| out.push(wanted));
        record::put(client.writing.as_mut(), content::HANDSHAKE, &update, &mut wire).unwrap();
        client.writing = Some(client.writing.as_ref().unwrap().updated().unwrap());
        client.send(b"there", &mut wire).unwrap();
        server.receive(&wire, &mut plain, &mut back).unwrap();
        assert_eq!((plain.as_slice(), back.is_empty()), (&b"there"[..], wanted == 0));
        server.send(b"back", &mut back).unwrap();
        plain.clear();
        client.receive(&back, &mut plain, &mut Vec::new()).unwrap();
        assert_eq!(plain, b"back");
    }
}

#[test]
fn a_client_without_a_key_or_with_another_one_is_refused_in_the_same_words() {
    for (user, key) in [("alice", &b"another"[..]), ("mallory", KEY), ("bob", KEY), ("", KEY)] {
        let mut wire = Vec::new();
        let mut client = Session::client(user, key, &mut wire).unwrap();
        let mut server = Session::server(keys());
        let (mut plain, mut back) = (Vec::new(), Vec::new());
        let refused = server.receive(&wire, &mut plain, &mut back).unwrap_err();
        assert_eq!(refused.alert, Some(Alert::DECRYPT_ERROR), "{user}");
        let told = client.receive(&back, &mut plain, &mut Vec::new()).unwrap_err();
        assert!(told.why.contains("the keys differ"), "{told:?}");
    }
}

#[test]
fn every_changed_byte_is_noticed() {
    // Of the client's first message: in its proof, or as a message that is none. Bytes that do not matter may differ
    // only where the transcript notices: the two sides never come to agree.
    let mut first = Vec::new();
    Session::client("alice", KEY, &mut first).unwrap();
    for at in 0..first.len() {
        let mut wire = Vec::new();
        let mut client = Session::client("alice", KEY, &mut wire).unwrap();
        let mut server = Session::server(keys());
        // The version in the record's header is not looked at closely, by its definition.
        wire[at] ^= 1;
        let agreed = talk(&mut client, &mut server, wire).is_ok() && client.is_open() && server.is_open();
        assert!(!agreed || at == 2, "byte {at}");
    }
    // Of data.
    for at in 5..40 {
        let (mut client, mut server) = pair();
        let mut wire = Vec::new();
        client.send(b"a few bytes of data", &mut wire).unwrap();
        wire[at] ^= 1;
        let mut plain = Vec::new();
        let failed = server.receive(&wire, &mut plain, &mut Vec::new());
        assert!(failed.is_err() && plain.is_empty(), "byte {at}");
    }
    // A record again, or left out.
    let (mut client, mut server) = pair();
    let (mut one, mut two, mut plain) = (Vec::new(), Vec::new(), Vec::new());
    client.send(b"one", &mut one).unwrap();
    client.send(b"two", &mut two).unwrap();
    assert!(server.receive(&two, &mut plain, &mut Vec::new()).is_err());
    let (mut client, mut server) = pair();
    one.clear();
    client.send(b"one", &mut one).unwrap();
    server.receive(&one, &mut plain, &mut Vec::new()).unwrap();
    assert!(server.receive(&one, &mut plain, &mut Vec::new()).is_err());
}

#[test]
fn secrets_are_not_printed() {
    let (client, server) = pair();
    let text = format!("{client:?} {server:?} {:?}", keys());
    assert!(!text.contains("0123") && !text.contains("48, 49"), "{text}");
}

proptest! {
    #[test]
    fn no_bytes_make_a_session_panic(bytes: Vec<u8>, kind in 20u8..24, cut in 0usize..300) {
        let (mut plain, mut back) = (Vec::new(), Vec::new());
        let _ = Session::server(keys()).receive(&bytes, &mut plain, &mut back);
        let mut record = Vec::new();
        record::put(None, kind, &bytes, &mut record).unwrap();
        let _ = Session::server(keys()).receive(&record, &mut plain, &mut back);
        let mut wire = Vec::new();
        let mut client = Session::client("alice", KEY, &mut wire).unwrap();
        let _ = client.receive(&record, &mut plain, &mut back);
        // A true beginning, and then anything.
        let cut = cut.min(wire.len());
        wire.truncate(cut);
        wire.extend_from_slice(&bytes);
        let _ = Session::server(keys()).receive(&wire, &mut plain, &mut back);
        let (mut client, mut server) = pair();
        let _ = client.receive(&record, &mut plain, &mut back);
        let _ = server.receive(&bytes, &mut plain, &mut back);
        prop_assert!(plain.is_empty());
    }
}
