//! NBD: the server's option haggling, its view of requests, and the client's view of a server.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tapio_block::Geometry;
use tapio_front::nbd::client::{Client, ClientOptions, Haggle};
use tapio_front::nbd::foreign::{Action, Failure, Session, check, payload_len};
use tapio_front::nbd::limits::OPTION_LEN_MAX;
use tapio_front::nbd::wire::{
    MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, PAYLOAD_LEN_MAX, Reader, Style, command, info, option,
    option_reply, parse_reply, parse_request, put_request,
};
use tapio_front::nbd::{Catalog, Described, Handshake, Listed, Refusal, Step};
use tapio_types::Span;

use super::take;

/// Longer than any local answer takes; the stream has ended already when it matters.
const WITHIN: Duration = Duration::from_secs(10);

struct Shelf;

impl Catalog for Shelf {
    fn list(&self) -> Vec<Listed> {
        ["rw", "ro"].map(|name| Listed { name: name.into(), description: "a disk".into() }).into()
    }

    fn find(&mut self, name: &str, _enter: bool) -> Result<Described, Refusal> {
        match name {
            "rw" | "ro" => Ok(Described {
                name: name.into(),
                description: "a disk".into(),
                len: 1 << 30,
                block_len_min: 512,
                block_len_preferred: 4096,
                read_only: name == "ro",
                fast_zero: false,
            }),
            "busy" => Err(Refusal::Busy),
            "down" => Err(Refusal::Down),
            _ => Err(Refusal::Unknown),
        }
    }
}

/// What a client says from its first word on. Every answer must be whole replies, and not many for little.
pub fn nbd_handshake(bytes: &[u8]) {
    let (mut handshake, mut rest) = (Handshake::new(), bytes);
    let mut old_style = false;
    loop {
        let wants = handshake.wants();
        assert!((1..=OPTION_LEN_MAX as usize).contains(&wants));
        let Some((bytes, left)) = rest.split_at_checked(wants) else { return };
        rest = left;
        old_style |= bytes.len() == 16 && bytes[8..12] == option::EXPORT_NAME.to_be_bytes();
        let mut out = Vec::new();
        let step = handshake.feed(bytes, &mut Shelf, &mut out);
        assert!(out.len() <= 4096, "an answer of {} bytes to one option", out.len());
        match step {
            Ok(Step::Transmission(_)) if old_style && !starts_reply(&out) => {
                assert!([10, 134].contains(&out.len()));
                return;
            }
            Ok(step) => {
                whole_replies(&out);
                if step != Step::More {
                    return;
                }
            }
            Err(error) => return assert!(!error.to_string().is_empty()),
        }
    }
}

fn starts_reply(out: &[u8]) -> bool {
    out.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes())
}

fn whole_replies(out: &[u8]) {
    let mut reader = Reader(out);
    while !reader.0.is_empty() {
        assert_eq!(reader.u64(), Some(OPTION_REPLY_MAGIC));
        let head = (reader.u32(), reader.u32(), reader.u32());
        let (Some(_), Some(_), Some(len)) = head else { panic!("half a reply: {head:?}") };
        assert!(reader.bytes(len as usize).is_some(), "a reply of {len} bytes is cut off");
    }
}

/// Requests of the transmission phase; the first byte says what was negotiated.
pub fn nbd_requests(bytes: &[u8]) {
    let mut rest = bytes;
    let [negotiated] = take::<1>(&mut rest);
    let session = Session {
        style: style(negotiated),
        allocation: negotiated & 4 != 0,
        read_only: negotiated & 8 != 0,
        fast_zero: negotiated & 16 != 0,
        block_len: 512,
    };
    let geometry = Geometry {
        len: 1 << 30,
        logical_block_len: 512,
        physical_block_len: 4096,
        read_only: negotiated & 32 != 0,
        transfer_max: 2 << 20,
    };
    while let Ok(Some(header)) = parse_request(session.style, rest) {
        let (own, behind) = rest.split_at(session.style.request_len());
        let mut again = Vec::new();
        put_request(session.style, &header, &mut again);
        assert_eq!(again, own, "a request is written as it was read");
        let Some(payload) = payload_len(session.style, &header) else { return };
        assert!(payload <= u64::from(PAYLOAD_LEN_MAX));
        match check(&session, &geometry, &header) {
            Ok(Action::Disconnect) => return,
            Ok(action) => {
                let span = Span::new(header.offset, header.len);
                assert!(span.fits(geometry.len) && span.is_aligned(512), "{header:?} passed");
                let changes =
                    matches!(action, Action::Write { .. } | Action::Trim { .. } | Action::Zero { .. });
                assert!(!changes || !(session.read_only || geometry.read_only), "{header:?} passed");
                if matches!(action, Action::Read { .. } | Action::Write { .. }) {
                    assert!(!span.is_empty() && span.len <= u64::from(PAYLOAD_LEN_MAX));
                }
                assert!(session.allocation || !matches!(action, Action::Status { .. }));
            }
            Err(failure) => {
                assert!(matches!(failure, Failure::Refused { .. }) && failure.number() != 0);
            }
        }
        let Some(next) = usize::try_from(payload).ok().and_then(|len| behind.get(len..)) else { return };
        rest = next;
    }
}

fn style(bits: u8) -> Style {
    match bits & 3 {
        0 => Style::Simple,
        1 => Style::Structured,
        _ => Style::Extended,
    }
}

/// A server's side of a conversation, to which our client listens. The first byte says what the client wants, and
/// whether the server's bytes begin with the greeting or behind a handshake that went well.
pub fn nbd_replies(bytes: &[u8]) {
    let mut rest = bytes;
    let [choice] = take::<1>(&mut rest);
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let mut left = rest;
        while let Ok(Some((_, len))) = parse_reply(style, left) {
            assert!(len > 0 && len <= 32);
            left = &left[len..];
        }
    }
    let options = ClientOptions { export: "disk".into(), style: style(choice), allocation: choice & 4 != 0 };
    let mut stream = if choice & 8 == 0 { Vec::new() } else { agreeable(&options) };
    stream.extend_from_slice(rest);
    // The server may say everything before it is asked; then it only listens.
    let Ok((ours, mut theirs)) = UnixStream::pair() else { return };
    let said = theirs.set_nonblocking(true).and_then(|()| theirs.write_all(&stream));
    if said.and_then(|()| theirs.shutdown(Shutdown::Write)).is_err() {
        return;
    }
    let Ok(haggle) = Haggle::over(ours.into(), WITHIN) else { return };
    if choice & 16 != 0 {
        let _ = (haggle.list(), haggle.info("disk"));
        return;
    }
    if let Ok(client) = haggle.go(&options, WITHIN) {
        ask(client, choice);
    }
}

/// Requests until the server has nothing more to say.
fn ask(mut client: Client, choice: u8) {
    for turn in 0..8u8 {
        let ended = match (choice >> 5).wrapping_add(turn) % 4 {
            0 => {
                let read = client.read(4096, 8192);
                assert!(read.as_ref().map_or(8192, Vec::len) == 8192);
                read.is_err()
            }
            1 => client.allocation(0, 1 << 20).map(|extents| assert!(extents.len() <= 1 << 20)).is_err(),
            2 => client.write(0, &[1; 512], true).is_err(),
            _ => {
                // Whatever the server says, an answer holds no more data than was asked for.
                let reply = client.call(command::READ, 0, 0, 4096, &[]);
                let held =
                    reply.as_ref().map_or(0, |reply| reply.data.iter().map(|(_, data)| data.len()).sum());
                assert!(held <= 4096, "{held} bytes of data in an answer to 4096");
                reply.is_err()
            }
        };
        if ended {
            return;
        }
    }
    let _ = client.disconnect();
}

/// What a friendly server says up to the transmission phase.
pub fn agreeable(options: &ClientOptions) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&MAGIC.to_be_bytes());
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&3u16.to_be_bytes());
    match options.style {
        Style::Simple => {}
        Style::Structured => reply(&mut out, option::STRUCTURED_REPLY, option_reply::ACK, &[]),
        Style::Extended => reply(&mut out, option::EXTENDED_HEADERS, option_reply::ACK, &[]),
    }
    if options.allocation && options.style >= Style::Structured {
        let context = [&1u32.to_be_bytes()[..], b"base:allocation"].concat();
        reply(&mut out, option::SET_META_CONTEXT, option_reply::META_CONTEXT, &context);
        reply(&mut out, option::SET_META_CONTEXT, option_reply::ACK, &[]);
    }
    let export = [&info::EXPORT.to_be_bytes()[..], &(1u64 << 30).to_be_bytes(), &1u16.to_be_bytes()].concat();
    reply(&mut out, option::GO, option_reply::INFO, &export);
    reply(&mut out, option::GO, option_reply::ACK, &[]);
    out
}

/// Appends a server's reply to an option.
pub fn reply(out: &mut Vec<u8>, option: u32, kind: u32, payload: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    out.extend_from_slice(payload);
}
