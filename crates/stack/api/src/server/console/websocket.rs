//! WebSocket (RFC 6455), as much of it as a server needs that passes bytes on: frames of clients, frames to them.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Longest frame that a client may send: keys, a paste, a mouse.
const FRAME_LEN_MAX: u64 = 1 << 20;

/// What a server appends to the client's key.
const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// A frame of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Bytes, of a message or a part of one.
    Data(Vec<u8>),
    /// To be answered with the same bytes.
    Ping(Vec<u8>),
    /// An answer to nothing.
    Pong,
    /// The client says goodbye.
    Close,
}

/// The answer to `Sec-WebSocket-Key`.
pub fn accept(key: &str) -> String {
    let mut hash = ring::digest::Context::new(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(key.as_bytes());
    hash.update(GUID.as_bytes());
    STANDARD.encode(hash.finish())
}

/// Takes frames out of bytes as they come.
#[derive(Debug, Default)]
pub struct Frames {
    bytes: Vec<u8>,
    /// A message has begun that is not complete.
    is_inside: bool,
}

impl Frames {
    /// Adds what has come.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame; none before all of it has come.
    ///
    /// # Errors
    /// What is wrong with it: the connection is of no use then.
    pub fn take(&mut self) -> Result<Option<Frame>, &'static str> {
        let [first, second, ..] = self.bytes[..] else { return Ok(None) };
        let (is_last, code) = (first & 0x80 != 0, first & 0x0f);
        if first & 0x70 != 0 {
            return Err("a frame has bits of an extension that was not agreed on");
        }
        if second & 0x80 == 0 {
            return Err("a frame of a client is not masked");
        }
        let (len_bytes, len) = match second & 0x7f {
            126 => (2, self.number(2)),
            127 => (8, self.number(8)),
            short => (0, Some(u64::from(short))),
        };
        let Some(len) = len else { return Ok(None) };
        if len > FRAME_LEN_MAX {
            return Err("a frame is longer than 1 MiB");
        }
        if code >= CLOSE && (!is_last || len > 125) {
            return Err("a control frame is in parts, or longer than 125 bytes");
        }
        let is_wrong = match code {
            0 => !self.is_inside,
            TEXT | BINARY => self.is_inside,
            CLOSE | PING | PONG => false,
            _ => return Err("a frame is of an unknown kind"),
        };
        if is_wrong {
            return Err("parts of messages are not in their order");
        }
        let data_at = 2 + len_bytes + 4;
        let end = data_at + len as usize;
        if self.bytes.len() < end {
            return Ok(None);
        }
        let frame: Vec<u8> = self.bytes.drain(..end).collect();
        let (head, data) = frame.split_at(data_at);
        let mask = &head[data_at - 4..];
        let data: Vec<u8> = data.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask).collect();
        if code < CLOSE {
            self.is_inside = !is_last;
        }
        Ok(Some(match code {
            CLOSE => Frame::Close,
            PING => Frame::Ping(data),
            PONG => Frame::Pong,
            _ => Frame::Data(data),
        }))
    }

    /// The number of so many bytes behind the first two.
    fn number(&self, len: usize) -> Option<u64> {
        let bytes = self.bytes.get(2..2 + len)?;
        Some(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}

fn frame(code: u8, data: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x80 | code];
    match data.len() {
        short @ 0..=125 => frame.push(short as u8),
        len @ 126..=0xffff => {
            frame.push(126);
            frame.extend((len as u16).to_be_bytes());
        }
        len => {
            frame.push(127);
            frame.extend((len as u64).to_be_bytes());
        }
    }
    frame.extend_from_slice(data);
    frame
}

/// A message of bytes.
pub(super) fn binary(data: &[u8]) -> Vec<u8> {
    frame(BINARY, data)
}

/// The answer to a ping.
pub(super) fn pong(data: &[u8]) -> Vec<u8> {
    frame(PONG, data)
}

/// A goodbye.
pub(super) fn close() -> Vec<u8> {
    frame(CLOSE, &1000_u16.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(first: u8, data: &[u8]) -> Vec<u8> {
        let mut bytes = frame(0, data);
        bytes[0] = first;
        bytes[1] |= 0x80;
        let at = bytes.len() - data.len();
        let mask = [1, 2, 3, 4];
        bytes.splice(at..at, mask);
        bytes[at + 4..].iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
        bytes
    }

    #[test]
    fn the_key_of_the_standard_is_answered() {
        assert_eq!(accept("dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn frames_come_in_any_pieces() {
        let long = vec![7; 70_000];
        let all = [
            masked(0x82, b"keys"),
            masked(0x02, b"be"),
            masked(0x89, b"ping"),
            masked(0x80, b"gun"),
            masked(0x82, &long[..300]),
            masked(0x82, &long),
            masked(0x8a, b""),
            masked(0x88, b""),
        ];
        let expected = [
            Frame::Data(b"keys".to_vec()),
            Frame::Data(b"be".to_vec()),
            Frame::Ping(b"ping".to_vec()),
            Frame::Data(b"gun".to_vec()),
            Frame::Data(long[..300].to_vec()),
            Frame::Data(long),
            Frame::Pong,
            Frame::Close,
        ];
        for piece in [1, 3, 1000, 1 << 20] {
            let (mut frames, mut found) = (Frames::default(), Vec::new());
            for bytes in all.concat().chunks(piece) {
                frames.push(bytes);
                while let Some(frame) = frames.take().unwrap() {
                    found.push(frame);
                }
            }
            assert_eq!(found, expected, "{piece}");
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let refused = |bytes: &[u8]| {
            let mut frames = Frames::default();
            frames.push(bytes);
            frames.take().unwrap_err()
        };
        assert!(refused(&frame(BINARY, b"x")).contains("masked"));
        assert!(refused(&masked(0xc2, b"x")).contains("extension"));
        assert!(refused(&masked(0x80, b"x")).contains("order"));
        assert!(refused(&masked(0x83, b"x")).contains("unknown"));
        assert!(refused(&masked(0x09, b"x")).contains("parts"));
        assert!(refused(&[0x82, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0]).contains("1 MiB"));
    }
}
