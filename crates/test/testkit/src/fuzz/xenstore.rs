//! xenstore's messages: from a client to the daemon, and from the daemon to our client.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tapio_xenstore::wire::{Decoder, HEADER_LEN, Header, Message, MessageKind, PAYLOAD_MAX, Request, reply};
use tapio_xenstore::{Client, Nodes, Path, XenbusState, domains};

/// Requests that our client makes in one input.
const ASKED_MAX: usize = 40;

/// The first byte says which way, and how the bytes are cut.
pub fn xenstore_wire(mut bytes: &[u8]) {
    let [how] = super::take::<1>(&mut bytes);
    if how & 1 == 0 { from_client(bytes, 1 + usize::from(how >> 1)) } else { from_daemon(bytes, how >> 1) }
}

/// Any stream of bytes, in pieces of any length, is the same messages; what is understood is written alike.
fn from_client(bytes: &[u8], step: usize) {
    let whole = messages(bytes, bytes.len().max(1));
    assert_eq!(messages(bytes, step), whole, "it depends on the pieces");
    for (header, payload) in &whole {
        let Ok(request) = Request::parse(header.kind, payload) else { continue };
        assert_eq!(request.kind() as u32, header.kind);
        let again = request.payload();
        assert_eq!(Request::parse(header.kind, &again).as_ref(), Ok(&request));
        if let Request::Read { path } | Request::Write { path, .. } = request
            && let Ok(found) = Path::resolve(path, 5)
        {
            assert!(found.as_str().starts_with('/') && Path::parse(found.as_str()).as_ref() == Ok(&found));
            let parents = std::iter::successors(Some(found.clone()), Path::parent).count();
            assert_eq!(parents, found.parts().count() + 1);
        }
    }
}

fn messages(bytes: &[u8], step: usize) -> Vec<(Header, Vec<u8>)> {
    let mut decoder = Decoder::new();
    let mut found = Vec::new();
    for piece in bytes.chunks(step) {
        decoder.push(piece);
        loop {
            match decoder.next() {
                Ok(Some(Message { header, payload })) => found.push((header, payload.to_vec())),
                Ok(None) => break,
                Err(_) => return found,
            }
        }
        assert!(decoder.pending().len() < HEADER_LEN + PAYLOAD_MAX);
    }
    found
}

/// Our client asks, and each answer is whatever comes next in the input: payloads with a length before each.
fn from_daemon(mut bytes: &[u8], mood: u8) {
    for kind in [MessageKind::Directory, MessageKind::Control] {
        let _ = reply::read_strings(kind, bytes);
        let _ = reply::read_text(kind, bytes);
    }
    let _ = reply::read_event(bytes);
    let _ = reply::read_permissions(bytes);
    let _ = XenbusState::parse(bytes);
    if let Ok((_, names, _)) = reply::read_directory_part(bytes) {
        assert!(names.is_empty() || names.ends_with(&[0]));
    }
    let Ok((ours, theirs)) = UnixStream::pair() else { return };
    let script = std::mem::take(&mut bytes).to_vec();
    std::thread::scope(|scope| {
        scope.spawn(move || answer(theirs, &script, mood));
        let Ok(mut client) = Client::from_socket(ours.into()) else { return };
        client.set_timeout(Duration::from_millis(20));
        let _ = client.read_many(&["/a", "/b", "/c"]);
        let _ = client.directory("/a");
        let _ = client.permissions("/a");
        let _ = client.watch("/a", "t");
        while let Ok(Some(_)) = client.next_event() {}
        let _ = domains::one(&mut client, 5);
        let _ = client.domain_path(5);
    });
}

/// A daemon that answers with the script and then goes away.
fn answer(mut stream: UnixStream, mut script: &[u8], mood: u8) {
    let mut decoder = Decoder::new();
    let mut bytes = [0; 4096];
    for _ in 0..ASKED_MAX {
        let Ok(len @ 1..) = stream.read(&mut bytes) else { return };
        decoder.push(&bytes[..len]);
        let mut out = Vec::new();
        while let Ok(Some(message)) = decoder.next() {
            if script.is_empty() {
                return;
            }
            let [len, odd] = super::take::<2>(&mut script);
            let mut payload = script;
            payload = &payload[..usize::from(len).min(payload.len())];
            script = &script[payload.len()..];
            let header = Header {
                // Mostly an honest header, so that the payload is looked at.
                kind: if odd & 7 == 7 { u32::from(odd >> 3) } else { message.header.kind },
                request: message.header.request.wrapping_add(u32::from(odd == 0xff)),
                transaction: message.header.transaction,
                len: payload.len() as u32 + u32::from(mood == 0x7f),
            };
            out.extend_from_slice(&header.encode());
            out.extend_from_slice(payload);
        }
        if stream.write_all(&out).is_err() {
            return;
        }
    }
}
